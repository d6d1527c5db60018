"""User stores from arrays and tensors that are in memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.partition import number_ids, partition
from fedpriv.data.population import UserStore, as_id_array
from fedpriv.errors import DataError


@runtime_checkable
class Tensor(Protocol):
    """As much of torch.Tensor as is used here, so that torch need not be imported."""

    def detach(self) -> Self:
        """The tensor without its gradient."""

    def cpu(self) -> Self:
        """The tensor in main memory."""

    def numpy(self) -> NDArray[np.generic]:
        """The tensor's memory as an array."""


Column: TypeAlias = NDArray[np.generic] | Tensor | Sequence[object]
"""Values of one field, first axis the rows."""


def from_arrays(fields: Mapping[str, Column], user_ids: Column) -> UserStore:
    """Group rows that lie in any order by the user id that each of them names.

    Guarantees:
        * Every user has one place, in order of first appearance, and keeps the order of its rows.
        * Rows that are grouped already are held without a copy: do not write to them afterwards.

    Args:
        fields: name → array or tensor [rows, ...].
        user_ids: [rows] ids, all strings or all integers.

    Raises:
        DataError: the ids are not strings or integers, there is no row, or the fields differ in
            their numbers of rows or cannot be arrays of one dtype.
    """
    ids = to_array("user ids", user_ids) if isinstance(user_ids, Tensor) else user_ids
    distinct, user_of_row = number_ids(as_id_array(ids))
    columns = {name: to_array(f"field {name!r}", column) for name, column in fields.items()}
    return partition(columns, user_of_row, distinct)


def from_grouped(
    users: Mapping[str, Mapping[str, Column]] | Iterable[tuple[str, Mapping[str, Column]]],
) -> UserStore:
    """Put users whose rows are grouped already one after the other; users may have zero rows.

    Args:
        users: user id → fields, or pairs of the two; every user has the same fields, and a field
            has the same dtype and row shape for every user.

    Raises:
        DataError: an id comes twice, there is no user, or a user's fields do not fit.
    """
    pairs = users.items() if isinstance(users, Mapping) else users
    columns: dict[str, list[NDArray[np.generic]]] = {}
    sizes: dict[str, int] = {}
    for user_id, fields in pairs:
        if user_id in sizes:
            raise DataError(f"user id {user_id!r} comes twice; a user must come once")
        arrays = {k: to_array(f"field {k!r} of user {user_id!r}", v) for k, v in fields.items()}
        if not sizes:
            columns = {name: [] for name in arrays}
        sizes[user_id] = _append(columns, arrays, user_id)
    if not sizes:
        raise DataError("there are no users; a store needs at least one")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(list(sizes.values()))])
    joined = {name: np.concatenate(arrays) for name, arrays in columns.items()}
    return UserStore(joined, offsets, as_id_array(list(sizes)))


def to_array(what: str, column: Column) -> NDArray[np.generic]:
    """Turn an array, tensor or nested list into an array; arrays and CPU tensors share memory.

    Args:
        what: what the column is, for the message.
        column: the values.

    Raises:
        DataError: the values make no array, such as rows of different shapes.
    """
    try:
        return column.detach().cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} cannot be an array: {error}") from error


def _append(
    columns: Mapping[str, list[NDArray[np.generic]]],
    arrays: Mapping[str, NDArray[np.generic]],
    user_id: str,
) -> int:
    """Append one user's arrays to the columns and return the user's number of rows."""
    if arrays.keys() != columns.keys():
        raise DataError(
            f"user {user_id!r} has the fields {sorted(arrays)}; others have {sorted(columns)}"
        )
    lengths = {array.shape[:1] for array in arrays.values()}
    if len(lengths) != 1 or () in lengths:
        raise DataError(f"fields of user {user_id!r} have different numbers of rows")
    for name, array in arrays.items():
        first = columns[name][0] if columns[name] else array
        # The dtype's type, because strings of different widths do fit.
        if (array.dtype.type, array.shape[1:]) != (first.dtype.type, first.shape[1:]):
            raise DataError(
                f"field {name!r} of user {user_id!r} is {array.dtype}{list(array.shape[1:])} "
                f"per row; others have {first.dtype}{list(first.shape[1:])}"
            )
        columns[name].append(array)
    return len(next(iter(arrays.values())))
