"""A run that cannot end is refused before it charges anything, or leaves a folder."""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from fedpriv import (
    SGD,
    FedAvg,
    Flat,
    Mechanism,
    Poisson,
    Population,
    Task,
    TensorBoard,
    epsilon,
    simulate,
)
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import DataError, InvalidValueError, ModelError
from fedpriv.evaluation.held_out import evaluate
from fedpriv.run.folder import RunFolder, read_run
from fedpriv.training.optimizers import (
    Average,
    OptimizerState,
    Parameters,
    RateSchedule,
    ServerOptimizer,
    Step,
)
from fedpriv.training.request import LocalStep
from tests.commandline import printed, refused

FILE = Path(__file__).parents[2] / "fedpriv/experiment/bundled/digits.toml"
# The first rows, on which a model is tried out, are of class 0.
Y = np.repeat(np.arange(6), 4)
X = np.eye(24, 8, dtype=np.float32)


def start(folder: Path, x: np.ndarray, y: np.ndarray, noise: float = 2.0, **others: object) -> None:
    people = Population.from_arrays(X, Y % 5, np.arange(24), held_out=(x, y))
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))
    simulate(
        people,
        Task(nn.Linear(8, 5), loss="cross-entropy"),
        mechanism.with_noise(noise, epsilon=2.0, delta=1e-3),
        rounds=1,
        out=folder,
        quiet=True,
        **{"local": SGD(0.1, steps=1), **others},
    )


def test_held_out_labels_that_the_model_cannot_give_are_refused(tmp_path: Path) -> None:
    message = "held-out rows go from 0 to 5 and the model gives 5 scores.*: give the model 6 scores"
    with pytest.raises(ModelError, match=message):
        start(tmp_path / "run", X, Y)
    assert list(tmp_path.iterdir()) == []
    start(tmp_path / "run", X[:20], Y[:20])


def test_held_out_rows_without_a_finite_loss_are_refused(tmp_path: Path) -> None:
    x = X[:20].copy()
    x[-1, 0] = np.inf
    with pytest.raises(DataError, match=r"held-out field 'x' .* row 19; 1 of 20 rows"):
        start(tmp_path / "run", x, Y[:20])
    assert list(tmp_path.iterdir()) == []


def test_checking_leaves_the_model_as_it_was() -> None:
    task = Task(nn.Sequential(nn.Linear(8, 5), nn.Dropout(0.5)), loss="cross-entropy")
    before = task.parameters()
    rows, device = {"x": X[:20], "y": Y[:20]}, torch.device("cpu")
    found = evaluate(task, rows, device, before)
    with pytest.raises(IndexError):
        evaluate(task, {"x": X, "y": Y}, device, before)
    assert task.model.training
    assert evaluate(task, rows, device, before) == found
    for name, tensor in task.parameters().items():
        np.testing.assert_array_equal(tensor, before[name])


def test_a_budget_too_small_for_one_round_is_refused_at_the_start(tmp_path: Path) -> None:
    settings = ("--set", "privacy.noise_multiplier=0.5", "--set", "privacy.epsilon=0.1")
    sentence = refused("simulate", FILE, "--out", tmp_path / "run", *settings)
    (shown,) = re.findall(r"the first round would bring ε to ([0-9.]+) at delta 0\.001", sentence)
    true = epsilon([poisson_gaussian(0.3, 0.5)], 1e-3).epsilon
    assert true <= float(shown) < true + 1e-3
    assert "privacy.epsilon is 0.1 and must be larger, or the noise must be" in sentence
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(InvalidValueError, match="the first round would bring"):
        start(tmp_path / "run", X[:20], Y[:20], noise=0.3)
    assert list(tmp_path.iterdir()) == []


def test_what_others_spent_of_a_shared_ledger_counts(tmp_path: Path) -> None:
    ledger, rows = tmp_path / "ledger.sqlite", (X[:20], Y[:20])
    start(tmp_path / "a", *rows, noise=1.3, ledger=ledger)
    with pytest.raises(InvalidValueError, match="the first round would bring"):
        start(tmp_path / "b", *rows, noise=1.3, ledger=ledger)
    assert not (tmp_path / "b").exists()


def test_a_run_that_used_its_budget_may_still_be_resumed(tmp_path: Path) -> None:
    settings = ("--set", "privacy.noise_multiplier=1.0", "--set", "privacy.epsilon=2.0")
    settings += ("--set", "rounds=50", "--set", "seed=1", "--set", "engine.processes=1")
    first = printed("simulate", FILE, "--out", tmp_path / "run", *settings)
    again = printed("simulate", FILE, "--out", tmp_path / "run", *settings, "--resume")
    (rounds,) = [line for line in first.splitlines() if " of 50" in line and " charged" in line]
    assert rounds in again


@pytest.mark.parametrize(("users", "q", "size"), [(2, 0.1, "0.2"), (1, 1.0, "1")])
def test_cohorts_of_nobody_or_of_one_user_are_warned_of(
    tmp_path: Path, users: int, q: float, size: str
) -> None:
    settings = [f"data.options.users={users}", f"privacy.sampling_probability={q}", "rounds=1"]
    words = [word for each in settings for word in ("--set", each)]
    text = " ".join(printed("simulate", FILE, "--out", tmp_path / "run", *words).split())
    assert f"warning: a cohort has {size} users on average; rounds of one release its" in text


@pytest.mark.parametrize(("rounds", "warned"), [(3, False), (4, True)])
def test_a_budget_that_does_not_pay_for_all_rounds_is_warned_of_before_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rounds: int, warned: bool
) -> None:
    people = Population.from_arrays(X, Y % 5, np.arange(24), held_out=(X, Y % 5))
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))
    said = list[str]()
    run = simulate(
        people,
        Task(nn.Linear(8, 5), loss="cross-entropy"),
        mechanism.calibrate(epsilon=2.0, delta=1e-3, rounds=3),
        local=SGD(0.1, steps=1),
        rounds=rounds,
        out=tmp_path / "run",
        trackers=[lambda _: said.append(capsys.readouterr().out)],
    )
    assert len(run.rounds) == 3
    text = " ".join(said[0].split())
    assert ("warning: 4 rounds would bring ε to 2." in text) is warned
    assert ("the run will stop before the budget of 2.0 is passed" in text) is warned


def test_without_noise_nothing_is_called_differential_privacy(tmp_path: Path) -> None:
    settings = ["privacy.noise_multiplier=0", "privacy.unsafe_no_privacy=true", "rounds=1"]
    words = [word for each in settings for word in ("--set", each)]
    text = " ".join(printed("simulate", FILE, "--out", tmp_path / "run", *words).split())
    assert "No differential privacy: a sum was released without noise." in text
    assert "User-level differential privacy" not in text
    folder = RunFolder(tmp_path / "run")
    with safe_open(folder.model, "numpy") as file:
        released = file.metadata()["release"]
    for line in (released, folder.metrics.read_text()):
        assert json.loads(line, parse_constant=pytest.fail)["epsilon"] == "Infinity"
    assert folder.results()[0].epsilon == math.inf
    assert read_run(folder.path).budget is None
    priced = printed("epsilon", folder.ledger)
    assert "without noise.\n" in priced


@dataclass(frozen=True)
class Doubles(ServerOptimizer):
    """Gives parameters in 64 bits, as adding an average makes them."""

    def update(self, average: Average, state: OptimizerState, parameters: Parameters) -> Step:
        return {name: p + average[name] for name, p in parameters.items()}, state  # type: ignore[misc]


class Halving(RateSchedule):
    """Is no dataclass."""

    def at(self, number: int) -> float:
        return 0.5**number


@dataclass(frozen=True)
class Weighted(SGD):
    """Has a table."""

    weights: Mapping[str, float] = field(kw_only=True)


@dataclass(frozen=True)
class Turned(SGD):
    """Is given a direction by a test."""


@pytest.mark.parametrize(
    ("turn", "returns"),
    [
        (lambda step: (step.gradient.sum(), step.memory), r"Tensor\[\], tuple"),
        (lambda step: (step.gradient.numpy(), step.memory), r"ndarray\[1, 5, 8\], tuple"),
        (lambda step: step.gradient, r"Tensor\[1, 5, 8\]"),
        (lambda step: (step.gradient, (step.gradient,)), r"Tensor\[1, 5, 8\], tuple"),
        (lambda _: None, "NoneType"),
    ],
)
def test_an_algorithm_without_a_direction_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    turn: Callable[[LocalStep], object],
    returns: str,
) -> None:
    monkeypatch.setattr(Turned, "direction", lambda _, step: turn(step))
    legal = r"it must return a tensor \[1, 5, 8\] and a tuple of 0 tensors, as memories says"
    with pytest.raises(ModelError, match=f"direction of Turned returns {returns}; {legal}"):
        start(tmp_path / "run", X[:20], Y[:20], local=Turned(0.1, steps=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            {"server": Doubles()},
            r"^'weight' is float64\[5, 8\] after update of Doubles",
        ),
        ({"server": FedAvg(Halving())}, "^the plan has a value of the type Halving, which ca"),
        (
            {"local": Weighted(0.1, steps=1, weights={"bias": 2.0})},
            "^Weighted has a field of an un",
        ),
    ],
)
def test_parts_of_ones_own_that_do_not_work_are_refused(
    tmp_path: Path, others: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        start(tmp_path / "run", X[:20], Y[:20], **others)
    assert list(tmp_path.iterdir()) == []


def test_a_baseline_without_privacy_is_a_mechanism(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def baseline(norm: float, delta: float | None = 1e-3) -> str:
        bare = Mechanism(
            Poisson(0.5), Flat(norm), 0.0, delta=delta, rounds=1, unsafe_no_privacy=True
        )
        people = Population.from_arrays(X, Y % 5, np.arange(24), held_out=(X[:20], Y[:20]))
        run = simulate(people, Task(nn.Linear(8, 5)), bare, out=tmp_path / str(norm))
        assert run.epsilon == math.inf
        return " ".join(capsys.readouterr().out.split())

    assert "rounded" not in baseline(100.0)
    assert "warning: updates are rounded to whole multiples of 0.031" in baseline(1e6)
    with pytest.raises(InvalidValueError, match=r"^the mechanism has no delta"):
        baseline(1.0, None)


def test_batch_normalisation_that_nothing_moves_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    people = Population.from_arrays(X, Y % 5, np.arange(24), held_out=(X, Y % 5))
    mechanism = Mechanism.poisson(q=0.5, clipping=Flat(1.0))
    moved = replace(mechanism, metrics={"batch-norm": {"bound": 4.0}})
    for each, warned in ((mechanism, True), (moved, False)):
        simulate(
            people,
            Task(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 5)), loss="cross-entropy"),
            each.with_noise(2.0, epsilon=4.0, delta=1e-3),
            local=SGD(0.1, steps=1),
            rounds=1,
            out=tmp_path / str(warned),
        )
        text = " ".join(capsys.readouterr().out.split())
        assert ("metrics.report.batch-norm = { bound = 4.0 }" in text) == warned


WRONG: list[tuple[dict[str, object], str]] = [
    ({"trackers": [3]}, r"trackers\[0\] is of the type int"),
    ({"trackers": [TensorBoard]}, r"trackers\[0\] is the class TensorBoard itself"),
    (
        {"trackers": TensorBoard()},
        "trackers is of the type TensorBoard",
    ),
    ({"trackers": print}, "trackers is of the type builtin_function_or_method"),
    ({"ledger": 3}, "ledger is of the type int"),
]


@pytest.mark.parametrize(("others", "message"), WRONG)
def test_arguments_of_other_types_are_refused(
    tmp_path: Path, others: dict[str, object], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        start(tmp_path / "run", X[:20], Y[:20], **others)
    assert list(tmp_path.iterdir()) == []
