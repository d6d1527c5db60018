"""What a study is: arms, targets and seeds, and the runs that they make."""

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from fedpriv.config import Config, assign, parse_config

Table = Mapping[str, object]
RUNS = "runs"


@dataclass(frozen=True)
class Arm:
    """One way to set the experiment.

    Attributes:
        name: unique in the study; letters, digits, dots, underscores and hyphens.
        assignments: "a.b=value" overrides of the base, as `--set` takes them.
    """

    name: str
    assignments: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """What every run of an arm may cost: the noise of each arm is calibrated to it.

    Attributes:
        epsilon: ε > 0.
        delta: δ in (0, 1).
    """

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Attributes:
        arm: how it is set.
        target: what it may cost.
        seed: of its cohorts, noise, local training and initial parameters.
    """

    arm: Arm
    target: Target
    seed: int

    @property
    def path(self) -> str:
        """Where its folder lies in that of the study."""
        return f"{RUNS}/{self.arm.name}/epsilon-{self.target.epsilon:g}/seed-{self.seed}"


@dataclass(frozen=True)
class Study:
    """One experiment under several arms, at equal privacy, on equal users and seeds.

    Attributes:
        name: short name.
        base: the experiment that arms vary, as the table of its file.
        arms: the arms; at least one.
        targets: what runs may cost; arms are compared at the same target only.
        seeds: at least one, each once.
        baseline: name of the arm that others are compared with.
        accuracies: levels in (0, 1] of which is told when an arm reached them.
    """

    name: str
    base: Table
    arms: tuple[Arm, ...]
    targets: tuple[Target, ...]
    seeds: tuple[int, ...]
    baseline: str
    accuracies: tuple[float, ...] = ()

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All runs, seed by seed, so that a study that is cut short has whole seeds."""
        return tuple(
            Cell(arm, target, seed)
            for seed in self.seeds
            for target in self.targets
            for arm in self.arms
        )

    def table_of(self, cell: Cell) -> dict[str, object]:
        """The experiment of a run, as a table.

        Runs with the same seed have the same name in their ledgers, and initial parameters of the
        same seed: cohorts, noise and the order of examples are then drawn from the same keys in
        every arm, so that differences between arms are paired.
        """
        table = varied(self.base, cell.arm)
        privacy = table.setdefault("privacy", {})
        if isinstance(privacy, dict):
            privacy.pop("noise_multiplier", None)
            privacy |= {"epsilon": cell.target.epsilon, "delta": cell.target.delta}
        model = table.setdefault("model", {})
        if isinstance(model, dict):
            model["seed"] = cell.seed
        return table | {
            "name": f"{self.name}-{cell.arm.name}",
            "run": f"{self.name}-seed{cell.seed}",
            "seed": cell.seed,
        }

    def config_of(self, cell: Cell) -> Config:
        """The experiment of a run.

        Raises:
            InvalidValueError: a key is unknown, absent or out of range.
        """
        return parse_config(self.table_of(cell), f"arm {cell.arm.name!r}")

    def digest_of(self, cell: Cell) -> str:
        """SHA-256 of the settings of a run; a finished run of the same digest stands."""
        text = json.dumps(self.table_of(cell), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()


def varied(base: Table, arm: Arm) -> dict[str, object]:
    """A copy of the base with the assignments of an arm.

    Raises:
        InvalidValueError: an assignment is not one.
    """
    table = copy.deepcopy(dict(base))
    for assignment in arm.assignments:
        assign(table, assignment)
    return table
