"""What a study is: arms, targets and seeds, and the runs that they make.

Axes of a study: every combination of their levels is an arm.

Numeric axes of a study: numbers that its arms vary, and the lines that arms make along them.

The file of a study: a base experiment, axes or arms, seeds and targets.
"""

import copy
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Self

import tomli_w
from pydantic import Field, model_validator

from fedpriv.config import (
    Config,
    Count,
    Options,
    Positive,
    Section,
    assign,
    checked,
    parse_config,
    read_toml,
    spelled_out,
)
from fedpriv.errors import InvalidValueError, known_names

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


NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


def crossed(axes: Mapping[str, object]) -> tuple[Arm, ...]:
    """An arm for each combination of a level of every axis, named by its levels in order.

    Args:
        axes: by name, a table of levels and the assignments of each; or, under a key of the
            experiment, a list of its values, which name their levels, as in "norm-0.3".

    Raises:
        InvalidValueError: an axis is neither, has no level, or a level makes no name of an arm.
    """
    levels = [_levels(key, axis) for key, axis in axes.items()]
    return tuple(
        Arm(
            "_".join(level.name for level in chosen),
            tuple(itertools.chain.from_iterable(level.assignments for level in chosen)),
        )
        for chosen in itertools.product(*levels)
    )


def _levels(key: str, axis: object) -> tuple[Arm, ...]:
    match axis:
        case {}:
            levels = [_named(key, str(name), given) for name, given in axis.items()]
        case [*values]:
            levels = [_valued(key, value) for value in values]
        case _:
            raise InvalidValueError(
                f"axis {key!r} is {axis!r}; it must be a table of levels or a list of values"
            )
    if not levels:
        raise InvalidValueError(f"axis {key!r} has no level; it must have at least one")
    return tuple(levels)


def _named(key: str, name: str, given: object) -> Arm:
    """A level that says what it sets."""
    if not re.match(NAME, name):
        raise InvalidValueError(
            f"axis {key!r} has the level {name!r}; its name must be of letters, digits, dots, "
            "underscores and hyphens"
        )
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise InvalidValueError(
            f"level {name!r} of axis {key!r} is {given!r}; it must be a list of assignments "
            '"a.b=value"'
        )
    return Arm(name, tuple(given))


def _valued(key: str, value: object) -> Arm:
    """A level that is a value of the key."""
    name = f"{key.rpartition('.')[2]}-{value}"
    if not isinstance(value, str | int | float) or not re.match(NAME, name):
        raise InvalidValueError(
            f"axis {key!r} has the value {value!r}, which makes no name of an arm; a table of "
            "levels with names of their own can set it"
        )
    return Arm(name, (f"{key}={json.dumps(value)}",))


Settings = Mapping[str, object]


@dataclass(frozen=True)
class Line:
    """Arms that differ in one number, and in what follows from it.

    Attributes:
        name: what they share.
        arms: (value of the number, name of the arm), in order of the values.
    """

    name: str
    arms: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class NumericAxis:
    """A number of the experiment that arms vary.

    Attributes:
        key: its key in the experiment, "a.b".
        follows: keys of other numbers that each value of this one settles.
        lines: each combination of all else that arms vary; one at least has two values.
    """

    key: str
    follows: tuple[str, ...]
    lines: tuple[Line, ...]


def numeric_axes(study: Study) -> tuple[NumericAxis, ...]:
    """The numbers that the arms of a study vary, however its file wrote them.

    Of numbers that settle each other, as when each number of users has its own number of rounds,
    only the one that arms set first is an axis.
    """
    settings = {arm.name: settings_of(study, arm.name) for arm in study.arms}
    keys = _varied(study, settings.values())
    numbers = [key for key in keys if all(_is_number(s.get(key)) for s in settings.values())]
    axes: list[NumericAxis] = []
    for key in numbers:
        follows = [k for k in numbers if k != key and _settles(settings.values(), key, k)]
        others = [k for k in keys if k != key and k not in follows]
        lines = _lines(settings, key, others)
        seen = any(key in axis.follows and axis.key in follows for axis in axes)
        if not seen and any(len(line.arms) > 1 for line in lines):
            axes.append(NumericAxis(key, tuple(follows), lines))
    return tuple(axes)


def settings_of(study: Study, arm: str) -> Settings:
    """All settings of an arm by key, with what the file leaves out, but for its name.

    Raises:
        InvalidValueError: the arm sets something that is unknown or out of range.
    """
    (chosen,) = [each for each in study.arms if each.name == arm]
    config = study.config_of(Cell(chosen, study.targets[0], study.seeds[0]))
    return _flat(config.model_dump(exclude={"name"}))


def _varied(study: Study, settings: Collection[Settings]) -> list[str]:
    """Keys whose value is not the same in all arms, those first that arms set themselves."""
    written = [text.partition("=")[0].strip() for arm in study.arms for text in arm.assignments]
    keys = dict.fromkeys([*written, *(key for each in settings for key in each)])
    return [key for key in keys if len({repr(each.get(key)) for each in settings}) > 1]


def _settles(settings: Collection[Settings], key: str, other: str) -> bool:
    """Whether each value of a key goes with one value of the other."""
    pairs = {(repr(each[key]), repr(each[other])) for each in settings}
    return len(pairs) == len({value for value, _ in pairs})


def _lines(settings: Mapping[str, Settings], key: str, others: Sequence[str]) -> tuple[Line, ...]:
    groups: dict[str, list[tuple[float, str]]] = {}
    for arm, each in settings.items():
        rest = ", ".join(f"{other} = {each.get(other)}" for other in others)
        groups.setdefault(rest, []).append((float(str(each[key])), arm))
    return tuple(
        Line(_shared([arm for _, arm in arms]) or rest or "all arms", tuple(sorted(arms)))
        for rest, arms in groups.items()
    )


def _shared(names: Sequence[str]) -> str:
    """What names of arms, made of the levels of axes, have in common.

    >>> _shared(["norm-0.3_flat", "norm-1_flat"])
    'flat'
    """
    parts = [name.split("_") for name in names]
    if len({len(each) for each in parts}) > 1:
        return ""
    return "_".join(level[0] for level in zip(*parts, strict=True) if len(set(level)) == 1)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _flat(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


Name = Annotated[str, Field(pattern=NAME)]
Assignments = Annotated[tuple[str, ...], Field(strict=False)]
# What an arm may not vary, as the study sets it, or as arms would then not cost the same.
_FIXED = {
    "name": "the study names its runs",
    "run": "the study names its runs",
    "seed": "the study's seeds are those of every arm",
    "model.seed": "the study's seeds are those of every arm",
    "privacy.epsilon": "the study's target is that of every arm",
    "privacy.delta": "the study's target is that of every arm",
    "privacy.noise_multiplier": "the noise of every arm is calibrated to the study's target",
    "privacy.accountant": "all arms are calibrated by one accountant",
}


class ArmSection(Section):
    """One arm: a name, and what it sets as `--set` would."""

    name: Name
    set: Assignments = ()


class TargetSection(Section):
    """What each run may cost; with several ε, every arm runs at each of them."""

    epsilon: Positive | Annotated[tuple[Positive, ...], Field(strict=False, min_length=1)]
    delta: Annotated[float, Field(gt=0.0, lt=1.0)]


class StudySection(Section):
    """A study.

    Attributes:
        name: short name.
        base: file of the experiment, beside that of the study, or its table.
        seeds: the seeds, or how many, from 0.
        target: what each run may cost.
        baseline: name of the arm to compare with; absent: the first.
        accuracies: levels of which is told when they were reached.
        arms: the arms, unless axes make them.
        axes: what makes the arms otherwise; see `crossed`.
    """

    name: Name
    base: str | dict[str, object]
    seeds: Count | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False)] = 5
    target: TargetSection
    baseline: str | None = None
    accuracies: Annotated[
        tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...], Field(strict=False)
    ] = ()
    arms: Annotated[tuple[ArmSection, ...], Field(strict=False)] = ()
    axes: Options = Field(default_factory=dict)

    @model_validator(mode="after")
    def _must_have_arms(self) -> Self:
        if bool(self.arms) == bool(self.axes):
            raise ValueError("exactly one of arms and axes must be given, with at least one arm")
        return self


def load_study(path: Path) -> Study:
    """Read a study from TOML and check it as far as that goes without data and models.

    Raises:
        InvalidValueError: a file is absent or no TOML, a key is unknown, absent or out of range,
            names, seeds or targets are not unique, or an arm sets what the study sets for all.
    """
    section = checked(StudySection, read_toml(path), str(path))
    base, seeds, epsilons = section.base, section.seeds, section.target.epsilon
    arms = tuple(Arm(arm.name, arm.set) for arm in section.arms)
    arms = arms or crossed(section.axes)
    study = Study(
        name=section.name,
        base=spelled_out(read_toml(path.parent / base) if isinstance(base, str) else base),
        arms=arms,
        targets=tuple(
            Target(epsilon, section.target.delta)
            for epsilon in (epsilons if isinstance(epsilons, tuple) else (epsilons,))
        ),
        seeds=seeds if isinstance(seeds, tuple) else tuple(range(seeds)),
        baseline=section.baseline or arms[0].name,
        accuracies=section.accuracies,
    )
    check_study(study, str(path))
    return study


def study_toml(study: Study) -> str:
    """The study as TOML, with base and arms written out; `load_study` reads an equal one."""
    (delta,) = {target.delta for target in study.targets}
    return tomli_w.dumps(
        {
            "name": study.name,
            "seeds": list(study.seeds),
            "baseline": study.baseline,
            "accuracies": list(study.accuracies),
            "target": {"epsilon": [t.epsilon for t in study.targets], "delta": delta},
            "arms": [{"name": arm.name, "set": list(arm.assignments)} for arm in study.arms],
            "base": study.base,
        }
    )


def check_study(study: Study, source: str) -> None:
    """Refuse a study whose arms, seeds or targets do not fit together; `source` is named."""
    _unique([arm.name for arm in study.arms], f"{source}: arms")
    _unique(study.seeds, f"{source}: seeds")
    _unique([target.epsilon for target in study.targets], f"{source}: target.epsilon")
    names = [arm.name for arm in study.arms]
    if study.baseline not in names:
        raise InvalidValueError(
            f"{source}: baseline is {study.baseline!r}, which is no arm; "
            f"{known_names(study.baseline, names)}"
        )
    for arm in study.arms:
        _check_arm(study.base, arm, f"{source}: arm {arm.name!r}")
    seen: dict[str, str] = {}
    for arm in study.arms:
        other = seen.setdefault(repr(settings_of(study, arm.name)), arm.name)
        if other != arm.name:
            raise InvalidValueError(
                f"{source}: arms {other!r} and {arm.name!r} are alike; they must differ in what "
                "they set"
            )


def _check_arm(base: Table, arm: Arm, source: str) -> None:
    """Refuse an arm that would cost something else, or charge something else, than the others."""
    try:
        table = varied(base, arm)
    except InvalidValueError as error:
        raise InvalidValueError(f"{source}: {error}") from error
    for key, reason in _FIXED.items():
        if _value(table, key) != _value(base, key):
            raise InvalidValueError(f"{source} sets {key}; {reason}")
    if _value(table, "privacy.ledger") is not None:
        raise InvalidValueError(f"{source} has a privacy.ledger; every run of a study has its own")
    if _value(table, "privacy.unsafe_no_privacy"):
        raise InvalidValueError(
            f"{source} has unsafe_no_privacy; a study compares at equal privacy"
        )


def _value(table: Table, key: str) -> object:
    """What a table holds under "a.b"; None if there is nothing."""
    value: object = table
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _unique(values: Sequence[object], what: str) -> None:
    if not values:
        raise InvalidValueError(f"{what} are none; there must be at least one")
    repeated = [value for value, count in Counter(values).items() if count > 1]
    if repeated:
        raise InvalidValueError(f"{what} hold {repeated[0]!r} more than once; each must be unique")
