"""Numeric axes of a study: numbers that its arms vary, and the lines that arms make along them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fedpriv.studies.study import Cell, Study

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
