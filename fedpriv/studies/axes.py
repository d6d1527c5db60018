"""Axes of a study: every combination of their levels is an arm."""

import itertools
import json
import re
from collections.abc import Mapping

from fedpriv.errors import InvalidValueError
from fedpriv.studies.study import Arm

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
