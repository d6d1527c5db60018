"""User stores from arrays and tensors in memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.partition import number_ids, partition
from fedpriv.data.population import Fields, UserStore, as_id_array, check_like, offsets_of
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
"""Values of one field; the first axis is the rows."""


def from_arrays(fields: Mapping[str, Column], user_ids: Column) -> UserStore:
    """Group rows in any order by the user id of each, all strings or all integers.

    Users come in order of first appearance, and a user's rows keep their order. Rows that are
    grouped already are held without a copy: do not write to them afterwards.

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

    Every user id comes once, with the same fields of the same dtypes and row shapes, else
    DataError.
    """
    parts: dict[str, dict[str, NDArray[np.generic]]] = {}
    for user_id, fields in users.items() if isinstance(users, Mapping) else users:
        if user_id in parts:
            raise DataError(f"user id {user_id!r} comes twice; a user must come once")
        arrays = {k: to_array(f"field {k!r} of user {user_id!r}", v) for k, v in fields.items()}
        _check_user(user_id, arrays, next(iter(parts.values()), arrays))
        parts[user_id] = arrays
    if not parts:
        raise DataError("there are no users; a store needs at least one")
    names = next(iter(parts.values())).keys()
    joined = {name: np.concatenate([part[name] for part in parts.values()]) for name in names}
    offsets = offsets_of([len(next(iter(part.values()))) for part in parts.values()])
    return UserStore(joined, offsets, as_id_array(list(parts)))


def to_array(what: str, column: Column) -> NDArray[np.generic]:
    """Turn an array, tensor or nested list into an array; arrays and CPU tensors share memory."""
    try:
        return column.detach().cpu().numpy() if isinstance(column, Tensor) else np.asarray(column)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} cannot be an array: {error}") from error


def _check_user(user_id: str, fields: Fields, others: Fields) -> None:
    if fields.keys() != others.keys():
        raise DataError(
            f"user {user_id!r} has the fields {sorted(fields)}; others have {sorted(others)}"
        )
    lengths = {array.shape[:1] for array in fields.values()}
    if len(lengths) != 1 or () in lengths:
        raise DataError(f"fields of user {user_id!r} have different numbers of rows")
    for name, array in fields.items():
        check_like(f"field {name!r} of user {user_id!r}", array, "others have", others[name])
