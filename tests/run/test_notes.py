"""What the owner of a run should know is in its result, folder and page, and on the terminal."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedpriv
from fedpriv.run.folder import RunFolder
from fedpriv.run.notes import still_falling
from fedpriv.run.run import Run

USERS, ROWS = 20, 4


class Unknown(nn.Module):
    """Calls a function of torch that lanes do not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.erfcx(x)


def run(folder: Path, model: nn.Module, *, rounds: int = 10, rate: float = 0.5, q: float = 1.0,
        delta: float = 1e-3, noise: float = 0.0, **others: object) -> Run:  # fmt: skip
    rng = np.random.default_rng(0)
    x = rng.standard_normal((USERS * ROWS + 20, 3)).astype(np.float32)
    y = x.argmax(1)
    people = fedpriv.Population.from_arrays(
        x[:-20], y[:-20], np.repeat(np.arange(USERS), ROWS), held_out=(x[-20:], y[-20:])
    )
    exact = fedpriv.Mechanism(
        fedpriv.Poisson(q), fedpriv.Flat(1.0), noise, delta=delta, unsafe_no_privacy=True
    )
    return fedpriv.simulate(
        people,
        fedpriv.Task(model),
        exact,
        local=fedpriv.SGD(rate, epochs=1),
        rounds=rounds,
        out=folder,
        seed=0,
        engine=fedpriv.Engine(processes=1),
        **others,
    )


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 3)


def test_each_note_is_in_result_file_page_and_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Sequential(Unknown(), nn.BatchNorm1d(3), linear(), nn.Softmax(1))
    found = run(tmp_path / "run", model, rounds=1)
    said = " ".join(capsys.readouterr().out.split())
    assert "what you should know - " in said
    page = found.report().read_text(encoding="utf-8")
    assert "What you should know" in page
    told = json.loads(RunFolder(found.folder).end.read_text(encoding="utf-8"))
    assert tuple(told["warnings"]) == found.warnings
    for cause, cure in (
        ("outputs of the model look like probabilities", "let the model end before its softmax"),
        ("users train one after another, as they cannot go side by side: ", "docs/isolation.md"),
        ("running statistics of the model's batch normalisation stay", "metrics.report.batch-norm"),
    ):
        (note,) = [text for text in found.warnings if cause in text]
        assert cure in note
        assert f"- {note}" in said
        assert cause.split("'")[0] in page


def test_a_run_without_troubles_has_no_notes_but_those_of_its_settings(tmp_path: Path) -> None:
    found = run(tmp_path / "run", linear(), rounds=2, quiet=True)
    assert [text.split(";")[0] for text in found.warnings] == ["unsafe_no_privacy is set"]


@pytest.mark.parametrize(("rate", "noted"), [(0.3, True), (1e-6, False)])
def test_a_loss_that_still_falls_is_noted(tmp_path: Path, rate: float, *, noted: bool) -> None:
    found = run(tmp_path / "run", linear(), rate=rate, quiet=True)
    losses = [each.loss for each in found.rounds]
    assert (losses[-1] < 0.98 * losses[-2]) is noted
    notes = [note for note in found.warnings if "on held-out rows still fell at the end" in note]
    assert bool(notes) is noted
    assert all("about 1.4 times the noise" in note for note in notes)


@pytest.mark.parametrize("evaluations", [10, 25, 100])
def test_noise_alone_is_seldom_taken_for_a_loss_that_falls(evaluations: int) -> None:
    random = np.random.default_rng(0)
    level = [still_falling([*1.0 + 0.2 * random.standard_normal(evaluations)]) for _ in range(1000)]
    assert sum(found is not None for found in level) < 50


def test_a_fall_beyond_the_noise_is_found_and_a_smaller_one_or_one_that_ended_is_not() -> None:
    noise, line = 0.02 * np.random.default_rng(0).standard_normal(100), np.linspace(1.0, 0.0, 100)
    before, after = still_falling([*1.0 + line + noise]) or (0.0, 0.0)
    assert before == pytest.approx(np.mean((1.0 + line + noise)[60:80]))
    assert after == pytest.approx(np.mean((1.0 + line + noise)[80:]))
    assert still_falling([*1.0 + 0.01 * line + noise]) is None
    assert still_falling([*1.0 + line**8 + noise]) is None
    assert still_falling([*1.0 - line + noise]) is None
    assert still_falling([2.0, 1.0] * 4) is None  # too few


def test_rounds_of_few_users_are_noted(tmp_path: Path) -> None:
    found = run(tmp_path / "run", linear(), rounds=1, q=0.01, quiet=True)
    assert any(text.startswith("a cohort has 0.2 users on average") for text in found.warnings)


@pytest.mark.parametrize(("noise", "noted"), [(0.0, False), (50.0, True)])
def test_a_loss_that_rose_is_noted(tmp_path: Path, noise: float, *, noted: bool) -> None:
    found = run(tmp_path / "run", linear(), rounds=2, noise=noise, quiet=True)
    assert any("loss on held-out rows rose from" in text for text in found.warnings) is noted


@pytest.mark.parametrize(("delta", "noted"), [(0.06, True), (0.04, False)])
def test_a_delta_of_a_user_or_more_is_noted(tmp_path: Path, delta: float, *, noted: bool) -> None:
    found = run(tmp_path / "run", linear(), rounds=1, delta=delta, quiet=True)
    assert any(text.startswith(f"δ is {delta} for 20 users") for text in found.warnings) is noted
