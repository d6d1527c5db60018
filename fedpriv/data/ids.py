"""User ids as one array: all strings or all integers, so that 1 and "1" never meet."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import DataError

IdArray: TypeAlias = NDArray[np.generic]
"""User ids, one per user or one per row, of a string or an integer dtype."""


def as_id_array(ids: Sequence[object] | NDArray[np.generic]) -> IdArray:
    """Turn user ids into an array of strings or of integers, never guessing.

    Guarantees:
        * An array of integers or of strings is returned as it is, not copied.
        * Anything else must hold only str or only int; mixed, missing (None, NaN), float and
          bool ids are refused, because NumPy would merge or split users by converting them.

    Args:
        ids: [n] ids; lists, tuples, NumPy arrays (object arrays too) and table columns will do.

    Returns:
        Array [n] of a string or integer dtype.

    Raises:
        DataError: not one-dimensional, or ids that are not all strings or all integers.
    """
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1:
            raise DataError(f"user ids have shape {ids.shape}; they must be one-dimensional")
        if ids.dtype.kind in "iuU":
            return ids
    values = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
    kind = str if values and isinstance(values[0], str) else (int, np.integer)
    for position, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, kind):
            raise DataError(
                f"user id number {position} is {value!r}; ids must be all strings or all integers"
            )
    array = np.array(values) if values else np.empty(0, dtype=np.str_)
    if array.dtype.kind not in "iuU":
        raise DataError("user ids hold an integer beyond 64 bits; write such ids as strings")
    return array


def first_duplicate(ids: IdArray) -> str | None:
    """The first id that has occurred before, or None if all are distinct.

    >>> first_duplicate(np.array(["a", "b", "c", "b", "a"]))
    'b'
    """
    _, first = np.unique(ids, return_index=True)
    if first.size == ids.size:
        return None
    repeated = np.ones(ids.size, dtype=bool)
    repeated[first] = False
    return str(ids[np.argmax(repeated)])
