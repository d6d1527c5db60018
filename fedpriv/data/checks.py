"""Checks of settings that the loaders share."""

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
