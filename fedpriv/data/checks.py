"""Checks of settings that the loaders share."""

from collections.abc import Mapping

import numpy as np

from fedpriv.errors import InvalidValueError


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int if it is a whole number of at least `least`.

    Args:
        name: what the number is, for the message.
        value: the number; bool is not a number here.
        least: the smallest legal value.

    Raises:
        InvalidValueError: `value` is not an integer, or is less than `least`.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidValueError(
            f"{name} is {value!r}; it must be a whole number of at least {least}"
        )
    return int(value)


def check_text(name: str, value: object) -> str:
    """Return `value` if it is text; otherwise raise InvalidValueError."""
    if not isinstance(value, str):
        raise InvalidValueError(f"{name} is {value!r}; it must be text")
    return value


def check_table(name: str, value: object) -> Mapping[str, object]:
    """Return `value` if it is a table by name, or an empty one for None.

    Raises:
        InvalidValueError: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InvalidValueError(f"{name} is {value!r}; it must be a table")
    return value
