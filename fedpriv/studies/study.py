"""A study: one experiment under several arms, at equal privacy, and its runs."""

import hashlib
import itertools
import json
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
    Name,
    Positive,
    Section,
    Seed,
    checked,
    flattened,
    for_folder,
    from_folder,
    overridden,
    parse_config,
    read_experiment,
    read_toml,
    with_paths,
)

RUNS = "runs"
# Keys that no arm may vary: the study sets them, or arms would not cost the same.
_FIXED = {
    "the study names its runs": ("name", "run"),
    "the study's seeds are those of every arm": ("seed", "model.seed"),
    "the study's target is that of every arm": ("privacy.epsilon", "privacy.delta"),
    "every arm is calibrated to the study's target": ("privacy.noise_multiplier",),
    "all arms are calibrated by one accountant": ("privacy.accountant",),
    "the ε of different units are not comparable": ("privacy.unit", "privacy.microbatch"),
}

_Seeds = Annotated[
    tuple[Seed, ...],
    Field(strict=False),
    BeforeValidator(lambda seeds: tuple(range(seeds)) if isinstance(seeds, int) else seeds),
]
_Accuracy = Annotated[float, Field(gt=0.0, le=1.0)]


class Arm(Section):
    """One variant of the experiment: overrides "a.b=value" of the base, as for `--set`."""

    name: Name
    set: Annotated[tuple[str, ...], Field(strict=False)] = ()


class _Targets(Section):
    epsilon: Positive | Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]


@dataclass(frozen=True)
class Target:
    """The privacy budget of every run of an arm, to which its noise is calibrated."""

    epsilon: float
    delta: float


@dataclass(frozen=True)
class Cell:
    """One run of a study; its seed determines cohorts, noise, training and initial parameters."""

    arm: Arm
    target: Target
    seed: int

    @property
    def path(self) -> str:
        """The cell's folder, relative to the study's folder."""
        return f"{RUNS}/{self.arm.name}/epsilon-{self.target.epsilon:g}/seed-{self.seed}"


class Study(Section):
    """One experiment under several arms, at equal privacy, on equal users and seeds."""

    name: Name
    base: dict[str, object]  # the experiment that arms vary
    seeds: _Seeds = tuple(range(5))  # or n for 0, …, n − 1
    target: _Targets
    baseline: str = ""  # the arm to compare with; by default the first
    # Reports say in which round an arm first reached each accuracy.
    accuracies: Annotated[tuple[_Accuracy, ...], Field(strict=False)] = ()
    arms: Annotated[tuple[Arm, ...], Field(strict=False)]

    @model_validator(mode="after")
    def _must_fit_together(self) -> Self:
        names = [arm.name for arm in self.arms]
        _refuse_repeated("arms", names)
        _refuse_repeated("seeds", self.seeds)
        epsilons = [float(f"{target.epsilon:g}") for target in self.targets]
        _refuse_repeated("target.epsilon", epsilons)  # rounded as in names of folders and reports
        if self.baseline and self.baseline not in names:
            hint = known_names(self.baseline, names)
            raise ValueError(f"baseline is {self.baseline!r}, which is not an arm; {hint}")
        names_by_settings: dict[str, str] = {}
        for arm in self.arms:
            _check_arm(self.base, arm)
            twin = names_by_settings.setdefault(repr(self.flat_settings(arm)), arm.name)
            if twin != arm.name:
                raise ValueError(f"arms {twin!r} and {arm.name!r} are alike; they must differ")
        return self if self.baseline else self.model_copy(update={"baseline": names[0]})

    @property
    def targets(self) -> tuple[Target, ...]:
        """Budgets of runs; arms are compared at the same target only."""
        epsilon = self.target.epsilon
        epsilons = epsilon if isinstance(epsilon, tuple) else (epsilon,)
        return tuple(Target(epsilon, self.target.delta) for epsilon in epsilons)

    @property
    def level(self) -> str:
        """The unit of each ε, and whether arms are projections to a larger population."""
        projected = {self.config_of(cell).population.as_if is not None for cell in self.cells}
        kind = {frozenset([True]): "projected ", frozenset([False]): ""}
        return f"{kind.get(frozenset(projected), 'partly projected ')}{self.unit}"

    @property
    def unit(self) -> str:
        """The unit that the guarantee of every run protects."""
        return self.config_of(self.cells[0]).privacy.unit

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All runs, seed by seed, so that an interrupted study has complete seeds."""
        order = itertools.product(self.seeds, self.targets, self.arms)
        return tuple(Cell(arm, target, seed) for seed, target, arm in order)

    def table_of(self, cell: Cell) -> dict[str, object]:
        """Return the experiment of a run as a table; `config_of` names the run in its ledger.

        Runs with the same seed have the same initial parameters. Each run is the first in its
        ledger, so all arms draw cohorts, noise and the order of examples from the same keys, and
        differences between arms are paired.
        """
        table = overridden(self.base, cell.arm.set)
        privacy, model = (table.setdefault(section, {}) for section in ("privacy", "model"))
        if isinstance(privacy, dict) and isinstance(model, dict):
            privacy.pop("noise_multiplier", None)
            privacy |= {"epsilon": cell.target.epsilon, "delta": cell.target.delta}
            model["seed"] = cell.seed
        run = f"{self.name}-seed{cell.seed}"
        return table | {"name": f"{self.name}-{cell.arm.name}", "run": run, "seed": cell.seed}

    def config_of(self, cell: Cell) -> Config:
        """Return the experiment of a run; the run's name has its arm, target and seed."""
        config = parse_config(self.table_of(cell), f"arm {cell.arm.name!r}")
        tag = f"-epsilon{cell.target.epsilon:g}".replace("+", "") if len(self.targets) > 1 else ""
        return config.model_copy(update={"run": f"{config.name}{tag}-seed{cell.seed}"})

    def digest_of(self, cell: Cell, folder: Path) -> str:
        """Return the SHA-256 of a run's settings; a finished run with this digest is valid.

        Paths are relative to the study's folder, so that it may be moved together with its data.
        """
        text = json.dumps(for_folder(folder, self.table_of(cell)), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def flat_settings(self, arm: Arm) -> dict[str, object]:
        """Return all settings of an arm except its names, with defaults, by keys "a.b"."""
        config = self.config_of(Cell(arm, self.targets[0], self.seeds[0]))
        return flattened(config.model_dump(exclude={"name", "run"}))


def _levels(key: str, axis: object) -> list[Arm]:
    """Return the levels of an axis, a table of assignments or a list of values, as arms."""
    if isinstance(axis, list):
        name_of_key = key.rpartition(".")[2]
        levels = [(f"{name_of_key}-{value}", [f"{key}={_inline(value)}"]) for value in axis]
    elif isinstance(axis, Mapping):
        levels = list(axis.items())
    else:
        raise InvalidValueError(f"axis {key!r} is {axis!r}; it must be a table or a list")
    if not levels:
        raise InvalidValueError(f"axis {key!r} has no level; it must have at least one")
    source = f"a level of axis {key!r}"
    return [checked(Arm, {"name": name, "set": values}, source) for name, values in levels]


def load_study(path: Path) -> Study:
    """Read a study from TOML, check everything that needs no data and no model, and return it.

    `base` may be a file next to it or the name of an experiment that comes with fedpriv. `axes` may
    replace `arms`: each combination of levels is an arm, named after its levels in order.
    InvalidValueError if the study is not valid.
    """
    table = read_toml(path)
    if "base" not in table and "privacy" in table:
        raise InvalidValueError(f"{path} is an experiment, not a study; use `fedpriv simulate`")
    for key in table:
        if key not in (keys := [*Study.model_fields, "axes"]):
            raise InvalidValueError(f"{path}: unknown key {key}; {known_names(key, keys)}")
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
    """Return the study whose arms have these settings: tables with the same sections and (ε, δ).

    `others` are the other fields of `Study`. InvalidValueError if one is not valid.
    """
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
    """Return a value in one line of TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


def study_toml(study: Study, folder: Path) -> str:
    """Return a study as TOML for a file in a folder; `load_study` restores it."""
    return tomli_w.dumps(study.model_dump() | {"base": for_folder(folder, study.base)})


def _refuse_repeated(subject: str, values: Sequence[object]) -> None:
    if not values:
        raise ValueError(f"{subject} are none; there must be at least one")
    value, count = Counter(values).most_common(1)[0]
    if count > 1:
        raise ValueError(f"{subject} hold {value!r} more than once; each must be unique")


def _check_arm(base: Mapping[str, object], arm: Arm) -> None:
    """Raise ValueError if an arm would change the cost of its runs or how they are charged."""
    subject = f"arm {arm.name!r}"
    try:
        base_settings, varied = flattened(base), overridden(base, arm.set)
        table = flattened(varied)
    except InvalidValueError as error:
        raise ValueError(f"{subject}: {error}") from error
    for reason, keys in _FIXED.items():
        for key in keys:
            if table.get(key) != base_settings.get(key):
                raise ValueError(f"{subject} sets {key}; {reason}")
    if table.get("privacy.ledger") is not None:
        raise ValueError(f"{subject} has a privacy.ledger; every run of a study has its own")
    if table.get("privacy.unsafe_no_privacy"):
        raise ValueError(f"{subject} has unsafe_no_privacy; a study compares at equal privacy")
    if table.get("audit.canaries") is not None:
        raise ValueError(f"{subject} has an audit; a study would not report its result")

    def absolute(path: str) -> str:
        if not Path(path).is_absolute():
            raise ValueError(f"{subject} has the path {path!r}; in an arm it must be absolute")
        return path

    with_paths(varied, absolute)


@dataclass(frozen=True)
class Line:
    """Arms that differ in one number, and in numbers that follow from it."""

    name: str  # names their common settings
    arms: tuple[tuple[float, str], ...]  # (number, arm) in order


@dataclass(frozen=True)
class NumericAxis:
    """A number that arms vary, and a line for each combination of their other settings."""

    key: str
    follows: tuple[str, ...]  # keys of other numbers that follow from this one
    lines: tuple[Line, ...]


def numeric_axes(study: Study) -> tuple[NumericAxis, ...]:
    """Return the numbers that arms vary; of two that determine each other, the first one set."""
    settings = {arm.name: study.flat_settings(arm) for arm in study.arms}
    keys = [text.partition("=")[0].strip() for arm in study.arms for text in arm.set]
    keys += itertools.chain.from_iterable(settings.values())
    columns = {k: [table.get(k) for table in settings.values()] for k in dict.fromkeys(keys)}
    texts = {key: [*map(repr, values)] for key, values in columns.items()}
    varied = {key: values for key, values in texts.items() if len(set(values)) > 1}
    numbers = [key for key in varied if {type(value) for value in columns[key]} <= {int, float}]

    def determines(key: str, other: str) -> bool:
        pairs = set(zip(varied[key], varied[other], strict=True))
        return len(pairs) == len(set(varied[key]))

    axes: list[NumericAxis] = []
    for key in numbers:
        follows = [other for other in numbers if other != key and determines(key, other)]
        others = [other for other in varied if other != key and other not in follows]
        lines = _lines(settings, key, others)
        is_duplicate = any(key in axis.follows and axis.key in follows for axis in axes)
        if not is_duplicate and any(len(line.arms) > 1 for line in lines):
            axes.append(NumericAxis(key, tuple(follows), lines))
    return tuple(axes)


def _lines(
    settings: Mapping[str, Mapping[str, object]], key: str, others: Sequence[str]
) -> tuple[Line, ...]:
    groups: dict[str, list[tuple[float, str]]] = {}
    for arm, table in settings.items():
        rest = ", ".join(f"{other} = {table.get(other)}" for other in others)
        groups.setdefault(rest, []).append((float(str(table[key])), arm))
    lines = []
    for rest, arms in groups.items():
        # Names of arms consist of levels of axes; their common levels name the line.
        parts = [arm.split("_") for _, arm in arms]
        levels = zip(*parts, strict=True) if len(set(map(len, parts))) == 1 else ()
        shared = "_".join(level[0] for level in levels if len(set(level)) == 1)
        lines.append(Line(shared or rest or "all arms", tuple(sorted(arms))))
    return tuple(lines)
