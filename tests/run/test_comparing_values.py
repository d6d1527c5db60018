"""`fedpriv.compare`: what was measured stands for what is asked, and for nothing else."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedpriv
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.experiment.grouping import Flat
from fedpriv.studies.results import RESULT
from fedpriv.training.request import LocalStep, LocalTraining

ROOT = Path(__file__).parents[2]
X = np.random.default_rng(0).standard_normal((80, 4)).astype(np.float32)
Y = X[:, :3].argmax(1)
MECHANISM = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0)).calibrate(
    epsilon=8.0, delta=1e-2, rounds=1
)


@dataclass(frozen=True)
class InTurn(LocalTraining):
    """Local training with a factor for each step."""

    factors: tuple[float, ...] = (1.0,)

    def direction(self, step: LocalStep) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        return step.gradient * self.factors[step.number % len(self.factors)], ()


@dataclass(frozen=True)
class Halved(Flat):
    """A clipping with a field that no table has."""

    halvings: int = 1


class Scaled(nn.Module):
    """A layer with a plain attribute."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


def task(*layers: nn.Module, **more: Any) -> fedpriv.Task:
    torch.manual_seed(0)
    return fedpriv.Task(nn.Sequential(nn.Linear(4, 3), *layers), **more)


def frozen(shift: float) -> fedpriv.Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    with torch.no_grad():
        model[0].weight.add_(shift)
    return fedpriv.Task(model, frozen=("0.*",))


def times(factor: float) -> Callable[..., torch.Tensor]:
    return lambda scores, y: factor * functional.cross_entropy(scores, y, reduction="none")


def clipped(halvings: int) -> fedpriv.Mechanism:
    return replace(MECHANISM, clipping=Halved(1.0, halvings))


def study(out: Path, arms: Mapping[str, Mapping[str, Any]], **more: Any) -> fedpriv.Comparison:
    people = fedpriv.Population.from_arrays(X, Y, np.arange(80) % 20, held_out=(X, Y))
    given = {"local": fedpriv.SGD(0.5, epochs=1), "seeds": 1, "quiet": True, "out": out} | more
    given = {"task": task(), "mechanism": MECHANISM} | given
    return fedpriv.compare(people, arms=arms, **given)


CHANGED: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "layers": ({"task": task(nn.ReLU())}, {"task": task(nn.Tanh())}),
    "their numbers": ({"task": task(nn.Dropout(0.1))}, {"task": task(nn.Dropout(0.5))}),
    "attributes": ({"task": task(Scaled(1.0))}, {"task": task(Scaled(2.0))}),
    "frozen weights": ({"task": frozen(0.0)}, {"task": frozen(1.0)}),
    "the loss": ({"task": task(loss=times(1.0))}, {"task": task(loss=times(100.0))}),
    "figures": ({"task": task()}, {"task": task(figures={"auc": "auc"})}),
    "local training": (
        {"local": InTurn(0.5, steps=2, factors=(1.0, 0.5))},
        {"local": InTurn(0.5, steps=2, factors=(1.0, 2.0))},
    ),
    "clipping": ({"mechanism": clipped(1)}, {"mechanism": clipped(2)}),
}


TOLD = ("layers", "their numbers", "frozen weights", "figures")  # by study.toml


@pytest.mark.parametrize("what", CHANGED)
def test_a_study_goes_on_only_where_its_caller_says_that_nothing_changed(
    tmp_path: Path, what: str
) -> None:
    before, after = CHANGED[what]
    found = study(tmp_path, {"a": before})
    with pytest.raises(InvalidValueError, match="holds a study already"):
        study(tmp_path, {"a": after})
    assert study(tmp_path, {"a": before}, resume=True).runs == found.runs
    if what in TOLD:
        with pytest.raises(DataError, match="a run with settings that differ from the study"):
            study(tmp_path, {"a": after}, seeds=2, resume=True)


@pytest.mark.parametrize(("delta", "warned"), [(0.06, 1), (0.04, 0)])
def test_a_delta_that_allows_for_a_breach_is_warned_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], delta: float, warned: int
) -> None:
    mechanism = MECHANISM.calibrate(epsilon=8.0, delta=delta, rounds=1)
    study(tmp_path, {"a": {}, "b": {"task": task(nn.ReLU())}}, mechanism=mechanism, quiet=False)
    assert capsys.readouterr().out.count(f"warning: δ is {delta} for ") == warned


def test_equal_arms_are_refused(tmp_path: Path) -> None:
    arm = {"task": task(nn.ReLU())}
    with pytest.raises(InvalidValueError, match="arms 'a' and 'b' are alike"):
        study(tmp_path, {"a": arm, "b": arm})


def untold() -> Mapping[str, Mapping[str, Any]]:
    """Arms in pairs that differ in what no table says."""
    pairs = {n.replace(" ", "-"): pair for n, pair in CHANGED.items() if n not in TOLD}
    return {f"{n}-{k}": arm for n, pair in pairs.items() for k, arm in enumerate(pair)}


def when_measured(folder: Path) -> Mapping[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob(f"runs/*/*/*/{RESULT}")}


def test_arms_that_differ_in_what_no_table_says_go_on_in_another_process(tmp_path: Path) -> None:
    code = f"""
import tests.run.test_comparing_values as here
here.study({str(tmp_path)!r}, here.untold(), resume=True)
"""
    study(tmp_path, untold())
    written = when_measured(tmp_path)
    assert len(written) == len(untold())
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert when_measured(tmp_path) == written


def test_an_arm_of_which_nothing_would_be_measured_is_refused_before_any_run(
    tmp_path: Path,
) -> None:
    personal = {"task": task(nn.Linear(3, 3), personal=("1.*",))}
    with pytest.raises(InvalidValueError, match=r"arm 'own': .*so nothing would be measured"):
        study(tmp_path / "study", {"one": {}, "own": personal})
    assert not (tmp_path / "study").exists()


def test_runs_that_train_one_task_settle_its_road_once(tmp_path, caplog) -> None:
    """Another task has a road of its own, though its layers are alike."""
    caplog.set_level("INFO", logger="fedpriv.engine.transport")
    slower = {"local": fedpriv.SGD(0.1, epochs=1)}
    study(tmp_path / "one", {"a": {}, "b": slower}, seeds=2)
    assert caplog.text.count("users train") == 1
    study(tmp_path / "two", {"a": {"task": task()}, "b": {"task": task(), **slower}}, seeds=2)
    assert caplog.text.count("users train") == 3


def test_tasks_of_seeds_have_roads_of_their_own(tmp_path, caplog) -> None:
    caplog.set_level("INFO", logger="fedpriv.engine.transport")
    study(tmp_path, {"a": {"task": lambda _seed: task()}, "b": {}}, seeds=2)
    assert caplog.text.count("users train") == 3
