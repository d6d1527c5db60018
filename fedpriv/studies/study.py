"""What a study is: one experiment under several arms, at equal privacy, and the runs they make."""

import copy
import hashlib
import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import tomli_w
from pydantic import BeforeValidator, Field, model_validator

from fedpriv.errors import InvalidValueError, known_names
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import (
    Config,
    Positive,
    Section,
    assign,
    checked,
    flattened,
    for_folder,
    from_folder,
    parse_config,
    read_experiment,
    read_toml,
    with_paths,
)

RUNS = "runs"
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
# What an arm may not vary, as the study sets it, or as arms would then not cost the same.
_FIXED = {
    "the study names its runs": ("name", "run"),
    "the study's seeds are those of every arm": ("seed", "model.seed"),
    "the study's target is that of every arm": ("privacy.epsilon", "privacy.delta"),
    "every arm is calibrated to the study's target": ("privacy.noise_multiplier",),
    "all arms are calibrated by one accountant": ("privacy.accountant",),
    "an ε of one unit is no ε of another": ("privacy.unit", "privacy.microbatch"),
}

_Name = Annotated[str, Field(pattern=_NAME)]
_Seeds = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    Field(strict=False),
    BeforeValidator(lambda given: tuple(range(given)) if isinstance(given, int) else given),
]
_Accuracy = Annotated[float, Field(gt=0.0, le=1.0)]


class Arm(Section):
    """One way to set the experiment: "a.b=value" overrides of the base, as `--set` takes them."""

    name: _Name
    set: Annotated[tuple[str, ...], Field(strict=False)] = ()


class _Targets(Section):
    epsilon: Positive | Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]


@dataclass(frozen=True)
class Target:
    """What every run of an arm costs at most: its noise is calibrated to it."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Cell:
    """One run of a study; the seed is that of cohorts, noise, training and initial parameters."""

    arm: Arm
    target: Target
    seed: int

    @property
    def path(self) -> str:
        """Where its folder lies in that of the study."""
        return f"{RUNS}/{self.arm.name}/epsilon-{self.target.epsilon:g}/seed-{self.seed}"


class Study(Section):
    """One experiment under several arms, at equal privacy, on equal users and seeds."""

    name: _Name
    base: dict[str, object]  # the experiment that arms vary
    seeds: _Seeds = tuple(range(5))  # or how many, from 0
    target: _Targets
    baseline: str = ""  # the arm that others are compared with; by default the first
    # Levels; the first round in which an arm reached them is reported.
    accuracies: Annotated[tuple[_Accuracy, ...], Field(strict=False)] = ()
    arms: Annotated[tuple[Arm, ...], Field(strict=False)]

    @model_validator(mode="after")
    def _must_fit_together(self) -> Self:
        names = [arm.name for arm in self.arms]
        _refuse_repeated("arms", names)
        _refuse_repeated("seeds", self.seeds)
        # As folders, names and reports have it.
        _refuse_repeated(
            "target.epsilon", [float(f"{target.epsilon:g}") for target in self.targets]
        )
        if self.baseline and self.baseline not in names:
            known = known_names(self.baseline, names)
            raise ValueError(f"baseline is {self.baseline!r}, which is not an arm; {known}")
        alike: dict[str, str] = {}
        for arm in self.arms:
            _check_arm(self.base, arm)
            other = alike.setdefault(repr(self.flat_settings(arm)), arm.name)
            if other != arm.name:
                raise ValueError(f"arms {other!r} and {arm.name!r} are alike; they must differ")
        return self if self.baseline else self.model_copy(update={"baseline": names[0]})

    @property
    def targets(self) -> tuple[Target, ...]:
        """What runs may cost; arms are compared at the same target only."""
        epsilons = self.target.epsilon
        listed = epsilons if isinstance(epsilons, tuple) else (epsilons,)
        return tuple(Target(epsilon, self.target.delta) for epsilon in listed)

    @property
    def unit(self) -> str:
        """What the guarantee of every run protects."""
        return self.config_of(self.cells[0]).privacy.unit

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All runs, seed by seed, so that a study that is cut short has whole seeds."""
        order = itertools.product(self.seeds, self.targets, self.arms)
        return tuple(Cell(arm, target, seed) for seed, target, arm in order)

    def table_of(self, cell: Cell) -> dict[str, object]:
        """The experiment of a run, as a table; see `config_of` for its name in its ledger.

        Runs with the same seed have the same initial parameters. Each is the first of its ledger,
        so cohorts, noise and the order of examples are drawn from the same keys in every arm, and
        differences between arms are paired.
        """
        table = _varied(self.base, cell.arm)
        privacy, model = (table.setdefault(section, {}) for section in ("privacy", "model"))
        if isinstance(privacy, dict) and isinstance(model, dict):
            privacy.pop("noise_multiplier", None)
            privacy |= {"epsilon": cell.target.epsilon, "delta": cell.target.delta}
            model["seed"] = cell.seed
        run = f"{self.name}-seed{cell.seed}"
        return table | {"name": f"{self.name}-{cell.arm.name}", "run": run, "seed": cell.seed}

    def config_of(self, cell: Cell) -> Config:
        """The experiment of a run, which is called after its arm, target and seed."""
        config = parse_config(self.table_of(cell), f"arm {cell.arm.name!r}")
        at = f"-epsilon{cell.target.epsilon:g}".replace("+", "") if len(self.targets) > 1 else ""
        return config.model_copy(update={"run": f"{config.name}{at}-seed{cell.seed}"})

    def digest_of(self, cell: Cell) -> str:
        """SHA-256 of the settings of a run; a finished run of the same digest stands."""
        # Where data lie is no setting: a study may be moved with them.
        table = with_paths(self.table_of(cell), os.path.basename)
        text = json.dumps(table, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def files_of(self, cell: Cell) -> tuple[str, ...]:
        """Paths of the data of a run, which `digest_of` knows by their last names alone."""
        found = list[str]()

        def noted(path: str) -> str:
            found.append(path)
            return path

        with_paths(self.table_of(cell), noted)
        return tuple(found)

    def flat_settings(self, arm: Arm) -> dict[str, object]:
        """All settings of an arm but its names, defaults included, under keys "a.b"."""
        config = self.config_of(Cell(arm, self.targets[0], self.seeds[0]))
        return flattened(config.model_dump(exclude={"name", "run"}))


def _varied(base: Mapping[str, object], arm: Arm) -> dict[str, object]:
    table = copy.deepcopy(dict(base))
    for assignment in arm.set:
        assign(table, assignment)
    return table


def _levels(key: str, axis: object) -> list[Arm]:
    """Levels of an axis: assignments by name, or values of the key, which name their levels."""
    if isinstance(axis, list):
        last = key.rpartition(".")[2]
        levels = [(f"{last}-{value}", [f"{key}={_inline(value)}"]) for value in axis]
    elif isinstance(axis, Mapping):
        levels = list(axis.items())
    else:
        raise InvalidValueError(f"axis {key!r} is {axis!r}; it must be a table or a list")
    if not levels:
        raise InvalidValueError(f"axis {key!r} has no level; it must have at least one")
    for name, assignments in levels:
        if not re.match(_NAME, name):
            legal = "letters, digits, dots, underscores and hyphens, as a table can give levels"
            raise InvalidValueError(f"axis {key!r} has the level {name!r}; names are of {legal}")
        if not isinstance(assignments, list) or not all(isinstance(a, str) for a in assignments):
            found = f"level {name!r} of axis {key!r} is {assignments!r}"
            raise InvalidValueError(f'{found}; it must be a list of assignments "a.b=value"')
    return [Arm(name=name, set=tuple(assignments)) for name, assignments in levels]


def load_study(path: Path) -> Study:
    """Read a study from TOML and check it as far as that goes without data and models.

    `base` may be a file beside it or the name of an experiment that comes with fedpriv. `axes` may
    stand in place of arms: an arm for each combination of a level of every axis, named by its
    levels in order.
    """
    table = read_toml(path)
    if "base" not in table and "privacy" in table:
        raise InvalidValueError(f"{path} is an experiment, not a study; use `fedpriv simulate`")
    for key in table:
        if key not in (known := [*Study.model_fields, "axes"]):
            raise InvalidValueError(f"{path}: unknown key {key}; {known_names(key, known)}")
    base, axes = table.get("base"), table.pop("axes", {})
    if isinstance(base, str):
        table["base"] = read_experiment(experiment_file(Path(base), path.parent))
    elif isinstance(base, dict):
        table["base"] = from_folder(path.parent, base)
    if not isinstance(axes, dict) or bool(axes) == bool(table.get("arms")):
        raise InvalidValueError(f"{path}: exactly one of arms and axes must be given")
    if axes:
        arms = []
        for levels in itertools.product(*(_levels(key, axis) for key, axis in axes.items())):
            assignments = itertools.chain.from_iterable(level.set for level in levels)
            name = "_".join(level.name for level in levels)
            arms.append(Arm(name=name, set=tuple(assignments)))
        table["arms"] = arms
    return checked(Study, table, str(path))


def study_of_settings(settings: Mapping[str, Mapping[str, Any]], **others: object) -> Study:
    """The study whose arms have these settings: tables with the same sections and (ε, δ)."""
    if not settings:
        raise InvalidValueError("arms are none; there must be at least one")
    base = next(iter(settings.values()))
    arms = [
        {"name": arm, "set": [f"{k}={_inline(v)}" for k, v in table.items() if base.get(k) != v]}
        for arm, table in settings.items()
    ]
    target = {key: base["privacy"].get(key) for key in ("epsilon", "delta")}
    return checked(Study, {"base": base, "arms": arms, "target": target, **others}, "the study")


def _inline(value: object) -> str:
    """A value in one line of TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


def study_toml(study: Study, folder: Path) -> str:
    """The study for a file in the folder, written out; `load_study` reads an equal one there."""
    return tomli_w.dumps(study.model_dump() | {"base": for_folder(folder, study.base)})


def _refuse_repeated(what: str, values: Sequence[object]) -> None:
    if not values:
        raise ValueError(f"{what} are none; there must be at least one")
    value, count = Counter(values).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{what} hold {value!r} more than once; each must be unique")


def _check_arm(base: Mapping[str, object], arm: Arm) -> None:
    """Refuse an arm that would cost something else, or charge something else, than the others."""
    what = f"arm {arm.name!r}"
    try:
        before, varied = flattened(base), _varied(base, arm)
        table = flattened(varied)
    except InvalidValueError as error:
        raise ValueError(f"{what}: {error}") from error
    for reason, keys in _FIXED.items():
        for key in keys:
            if table.get(key) != before.get(key):
                raise ValueError(f"{what} sets {key}; {reason}")
    if table.get("privacy.ledger") is not None:
        raise ValueError(f"{what} has a privacy.ledger; every run of a study has its own")
    if table.get("privacy.unsafe_no_privacy"):
        raise ValueError(f"{what} has unsafe_no_privacy; a study compares at equal privacy")
    if table.get("audit.canaries") is not None:
        raise ValueError(f"{what} has an audit; a study would not say what it found")

    def absolute(path: str) -> str:
        if not Path(path).is_absolute():
            raise ValueError(f"{what} has the path {path!r}; in an arm it must be absolute")
        return path

    with_paths(varied, absolute)


@dataclass(frozen=True)
class Line:
    """Arms that differ in one number, and in what follows from it."""

    name: str  # what they share
    arms: tuple[tuple[float, str], ...]  # (number, arm) in order


@dataclass(frozen=True)
class NumericAxis:
    """A number that arms vary, and a line for each combination of all else that they vary."""

    key: str
    follows: tuple[str, ...]  # keys of other numbers that each value of this one settles
    lines: tuple[Line, ...]


def numeric_axes(study: Study) -> tuple[NumericAxis, ...]:
    """The numbers that arms vary; of those that settle each other, the one that arms set first."""
    settings = {arm.name: study.flat_settings(arm) for arm in study.arms}
    written = [text.partition("=")[0].strip() for arm in study.arms for text in arm.set]
    known = dict.fromkeys([*written, *(key for each in settings.values() for key in each)])
    columns = {key: [each.get(key) for each in settings.values()] for key in known}
    varied = {key: [*map(repr, values)] for key, values in columns.items()}
    varied = {key: values for key, values in varied.items() if len(set(values)) > 1}
    numbers = [key for key in varied if {type(value) for value in columns[key]} <= {int, float}]

    def settles(key: str, other: str) -> bool:
        pairs = set(zip(varied[key], varied[other], strict=True))
        return len(pairs) == len(set(varied[key]))

    axes: list[NumericAxis] = []
    for key in numbers:
        follows = [other for other in numbers if other != key and settles(key, other)]
        others = [other for other in varied if other != key and other not in follows]
        lines = _lines(settings, key, others)
        seen = any(key in axis.follows and axis.key in follows for axis in axes)
        if not seen and any(len(line.arms) > 1 for line in lines):
            axes.append(NumericAxis(key, tuple(follows), lines))
    return tuple(axes)


def _lines(
    settings: Mapping[str, Mapping[str, object]], key: str, others: Sequence[str]
) -> tuple[Line, ...]:
    groups: dict[str, list[tuple[float, str]]] = {}
    for arm, each in settings.items():
        rest = ", ".join(f"{other} = {each.get(other)}" for other in others)
        groups.setdefault(rest, []).append((float(str(each[key])), arm))
    lines = []
    for rest, arms in groups.items():
        # Names of arms are made of the levels of axes; what they have in common names the line.
        parts = [arm.split("_") for _, arm in arms]
        levels = zip(*parts, strict=True) if len({len(each) for each in parts}) == 1 else ()
        shared = "_".join(level[0] for level in levels if len(set(level)) == 1)
        lines.append(Line(shared or rest or "all arms", tuple(sorted(arms))))
    return tuple(lines)
