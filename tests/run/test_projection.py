"""A projection of the inputs: asked for once, charged with the rounds, kept, and never trained."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv import SGD, Flat, Mechanism, Projection, Run, simulate
from fedpriv.accounting import epsilon
from fedpriv.data import load_digits
from fedpriv.data.files import read_npz
from fedpriv.disk import write_atomically
from fedpriv.engine.side_by_side import SideBySideModel
from fedpriv.engine.task import Task
from fedpriv.errors import InvalidValueError
from fedpriv.experiments import experiment_file
from fedpriv.ledger import Ledger
from fedpriv.models import Projected, mlp
from fedpriv.run.folder import RunFolder, write_report
from fedpriv.run.run import RunSetup
from tests.commandline import fedpriv, printed, refused

SIMULATIONS = Path(__file__).parents[2] / "simulations"
FILE = SIMULATIONS / "digits_projection.toml"
SHORT = ("--set", "rounds=2", "--set", "data.options.users=40", "--set", "engine.processes=1")


def charges(folder: Path) -> list[tuple[str, int]]:
    with Ledger.open(RunFolder(folder).ledger) as ledger:
        return [(charge.run, charge.round) for charge in ledger.charges()]


def directions(folder: Path) -> np.ndarray:
    return read_npz(RunFolder(folder).projection)["directions"]


def test_projection_and_rounds_share_a_budget_and_learn_digits(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    text = printed("simulate", FILE, "--out", folder, "--set", "seed=1")
    with Ledger.open(RunFolder(folder).ledger) as ledger:
        rows = list(ledger.charges())
        ledger.verify()
    (first, *rounds) = rows
    assert (first.run, first.round) == ("digits-projection-seed1", 0)
    assert [query.group for query in first.event.queries] == ["projection"]
    assert first.event.noise_multiplier == pytest.approx(4.0)
    assert first.event.sampling.sampling_probability == 1.0
    assert {row.run for row in rounds} == {first.run}
    assert len(rounds) == 100
    # One ε for all of it, which the budget bounds and nearly all of which is used.
    spent = epsilon([row.event for row in rows], 1e-4).epsilon
    assert 1.99 <= spent <= 2.0
    assert spent > epsilon([row.event for row in rounds], 1e-4).epsilon + 1e-3
    results = RunFolder(folder).results()
    assert results[-1].epsilon == pytest.approx(spent)
    assert results[0].epsilon > epsilon([first.event], 1e-4).epsilon
    # Chance is 0.1.
    assert results[-1].accuracy is not None
    assert results[-1].accuracy > 0.75
    assert f"charge {first.hash[:12]}" in text
    assert "100 of 100, 101 charged" in text
    assert directions(folder).shape == (64, 16)


def test_the_model_sees_inputs_along_the_directions_and_does_not_train_them() -> None:
    rng = np.random.default_rng(0)
    along = np.linalg.qr(rng.standard_normal((12, 3)))[0]
    inner = nn.Linear(3, 2)
    task = Task(Projected(along, inner))
    assert sorted(task.parameters()) == ["model.bias", "model.weight"]
    x = rng.standard_normal((5, 1, 3, 4)).astype(np.float32)
    expected = inner(torch.tensor(x.reshape(5, 12) @ along, dtype=torch.float32))
    torch.testing.assert_close(task.model(torch.tensor(x)), expected)


@pytest.mark.parametrize(("inputs", "components"), [(64, 16), (65, 7), (63, 1)])
def test_users_train_side_by_side_behind_a_projection(inputs: int, components: int) -> None:
    task = Task(Projected(np.eye(inputs)[:, :components], mlp(components, 8, 3)))
    rows = torch.zeros(2, inputs), torch.zeros(2, dtype=torch.int64)
    assert len(SideBySideModel.of(task, torch.device("cpu"), *rows).layers) == 2


def test_a_page_holds_contributors_against_the_cohorts_of_rounds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    printed("simulate", FILE, *SHORT, "--set", "privacy.sampling_probability=0.25", "--out", folder)
    # The projection asked all 40 users.
    assert "of 10.0 users expected in a round" in write_report(folder).read_text()


def test_a_resumed_run_keeps_its_directions_and_does_not_ask_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    printed("simulate", FILE, *SHORT, "--out", folder)
    before, first = charges(folder), directions(folder)
    assert len(before) == 3
    printed("simulate", FILE, *SHORT, "--out", folder, "--resume")
    assert charges(folder) == before
    np.testing.assert_array_equal(directions(folder), first)
    # The resolved experiment resumes it, too; with other directions it is another plan.
    printed("simulate", folder / "plan.toml", "--out", folder, "--resume")
    assert charges(folder) == before
    np.savez(RunFolder(folder).projection, directions=-first)
    sentence = refused("simulate", FILE, *SHORT, "--out", folder, "--resume")
    assert "a run can only be resumed with the plan it began with" in sentence
    RunFolder(folder).projection.unlink()
    sentence = refused("simulate", FILE, *SHORT, "--out", folder, "--resume")
    assert "projection.npz cannot be read" in sentence


def test_a_run_that_ends_after_its_projection_pays_for_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        ended = SimpleNamespace(check_audit=lambda: None)
        patch.setattr("fedpriv.run.simulate._run", lambda *_: ended)
        printed("simulate", FILE, *SHORT, "--out", folder, "--set", "seed=1")
    assert charges(folder) == [("digits-projection-seed1", 0)]
    first = directions(folder)
    printed("simulate", FILE, *SHORT, "--out", folder, "--set", "seed=1", "--resume")
    assert [number for _, number in charges(folder)] == [0, 0, 1, 2]
    assert not np.array_equal(directions(folder), first)


def test_an_interrupt_after_the_projection_names_the_folder_that_paid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("fedpriv.run.projection.write_atomically", interrupted)
    done = fedpriv("simulate", FILE, *SHORT, "--set", "seed=1", cwd=tmp_path)
    assert done.returncode == 130
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"runs/{folder.name} holds the run so far" in done.stdout
    assert charges(folder) == [("digits-projection-seed1", 0)]


def test_directions_that_were_paid_for_wait_for_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, full, write = tmp_path / "run", [], write_atomically

    def full_at_first(path: Path, content: bytes) -> None:
        if not full:
            full.append(path)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, content)

    monkeypatch.setattr("fedpriv.run.projection.write_atomically", full_at_first)
    monkeypatch.setattr("time.sleep", lambda _: None)
    printed("simulate", FILE, *SHORT, "--out", folder)
    assert full == [RunFolder(folder).projection]
    assert [number for _, number in charges(folder)] == [0, 1, 2]


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("projection.components=65", "projection.components is 65; it must be at most 64"),
        ("projection.components=0", "projection.components is 0"),
        ("projection.noise_multiplier=0", "projection.noise_multiplier is 0"),
        ("projection.noise_multiplier=0.5", "with the projection the ledger would hold ε ="),
        ("projection.sampling_probability=1.5", "projection.sampling_probability is 1.5"),
        ("projection.component=3", "did you mean 'components'"),
        ("model.inputs=z", "model.inputs is 'z'; with a projection it must be 'x'"),
        ("model.options.inputs=64", "the model cannot be evaluated on the data"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_spent(
    tmp_path: Path, setting: str, sentence: str
) -> None:
    folder = tmp_path / "run"
    assert sentence in refused("simulate", FILE, "--out", folder, "--set", setting)
    assert not folder.exists()


def test_what_trains_elsewhere_refuses_a_projection(tmp_path: Path) -> None:
    given = ["projection.components=3", "projection.noise_multiplier=8"]
    setup = RunSetup.of(SIMULATIONS / "federation.toml", given, tmp_path / "run", resume=False)
    assert setup.config.federation is not None
    with pytest.raises(InvalidValueError, match="projection is given; it must be absent"):
        setup.on_nodes(setup.config.federation, "people", ["a", "b"])
    ledger = str(tmp_path / "ledger.sqlite")
    sentence = refused("suggest", FILE, "--ledger", ledger)
    assert "projection is given; it must be absent" in sentence
    assert list(tmp_path.iterdir()) == []


def test_a_plan_prices_the_projection_and_spends_nothing(tmp_path: Path) -> None:
    text = printed("plan", FILE, cwd=tmp_path)
    assert "100 rounds and the projection cost ε = 2.0" in text or "cost ε = 1.99" in text
    assert "Nothing was spent." in text
    assert list(tmp_path.iterdir()) == []


def test_metrics_have_no_round_for_the_projection(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    done = fedpriv("simulate", FILE, *SHORT, "--out", folder)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [1, 2]


def test_a_projection_is_asked_of_the_unit_of_the_run(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", experiment_file(Path("digits-examples"))
    asked = ("projection.components=4", "projection.noise_multiplier=40", "model.options.inputs=4")
    assignments = [word for each in (*asked, "rounds=2") for word in ("--set", each)]
    printed("simulate", file, "--out", folder, "--set", "engine.processes=1", *assignments)
    with Ledger.open(RunFolder(folder).ledger) as ledger:
        events = [charge.event.sampling for charge in ledger.charges()]
    assert [event.unit for event in events] == ["example"] * 3
    assert {event.population for event in events} == {1437}


def in_python(folder: Path, mechanism: Mechanism, **others: Any) -> Run:
    task = Task(mlp(3, 8, 10), loss="cross-entropy")
    return simulate(
        load_digits(users=40, seed=1),
        task,
        mechanism,
        local=SGD(0.5, epochs=1),
        projection=Projection(3, noise_multiplier=8.0),
        out=folder,
        seed=1,
        quiet=True,
        **others,
    )


def test_python_asks_for_the_same_directions_and_keeps_its_budget(tmp_path: Path) -> None:
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))
    calibrated = mechanism.calibrate(epsilon=2.0, delta=1e-3, rounds=5)
    run = in_python(tmp_path / "python", calibrated)
    assert charges(tmp_path / "python") == [("run-seed1", number) for number in range(6)]
    assert 1.99 <= run.epsilon <= 2.0
    assert run.model(torch.zeros(2, 64)).shape == (2, 10)
    # The same plan in a file asks the same users, with the same noise.
    given = "name='run'", "seed=1", "data.options.seed=1", "model.options.inputs=3", "rounds=5"
    given += "projection.components=3", "projection.noise_multiplier=8"
    words = [word for each in given for word in ("--set", each)]
    printed("simulate", FILE, *SHORT, *words, "--out", tmp_path / "file")
    found = directions(tmp_path / "python")
    np.testing.assert_array_equal(found, directions(tmp_path / "file"))
    # A run goes on with its noise and its directions.
    again = in_python(tmp_path / "python", calibrated, resume=True)
    assert len(charges(tmp_path / "python")) == 6
    assert again.epsilon == run.epsilon


def test_given_noise_is_kept_beside_a_projection(tmp_path: Path) -> None:
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))
    mechanism = mechanism.with_noise(2.0, epsilon=9.0, delta=1e-3)
    run = in_python(tmp_path / "run", mechanism, rounds=2)
    with Ledger.open(RunFolder(tmp_path / "run").ledger) as ledger:
        noise = [charge.event.noise_multiplier for charge in ledger.charges()]
        events = [charge.event for charge in ledger.charges()]
    assert noise == pytest.approx([8.0, 2.0, 2.0])
    assert run.epsilon == pytest.approx(epsilon(events, 1e-3).epsilon)


def test_python_refuses_what_a_file_refuses(tmp_path: Path) -> None:
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=0.1, delta=1e-3, rounds=5)
    with pytest.raises(InvalidValueError, match="with the projection the ledger would hold"):
        in_python(tmp_path / "run", mechanism)
    assert list(tmp_path.iterdir()) == []
