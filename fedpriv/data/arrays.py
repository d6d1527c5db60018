"""User stores from arrays and tensors in memory."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, Self, TypeAlias, runtime_checkable

import numpy as np

from fedpriv.data.partition import number_ids, partition
from fedpriv.data.population import (
    ROW_OWNERS,
    Array,
    UserStore,
    as_id_array,
    check_count,
    check_like,
    offsets_of,
    refuse_masked,
)
from fedpriv.errors import DataError


@runtime_checkable
class _Tensor(Protocol):
    # As much of torch.Tensor as is used here, so that torch need not be imported.
    def detach(self) -> Self: ...
    def cpu(self) -> Self: ...
    def numpy(self) -> Array: ...


_NUMBERS = (int, float, np.number, np.bool_)

ColumnLike: TypeAlias = Array | _Tensor | Sequence[object]  # values of one field, [rows, ...]


def from_arrays(
    fields: Mapping[str, ColumnLike], user_ids: ColumnLike, owners: int | None = None
) -> UserStore:
    """Group rows in any order by the user id of each, all strings or all integers.

    Users come in order of first appearance, and a user's rows keep their order. Rows that are
    grouped already are held without a copy: do not write to them afterwards.

    Where rows may have several owners, up to `owners`, each has a list of ids, or as many as the
    others, some of them repeated. A row is stored with the first, and the field `ROW_OWNERS` names
    all. DataError if there are such rows and `owners` is not given, or a row has more.
    """
    ids = to_array("user ids", user_ids) if isinstance(user_ids, _Tensor) else user_ids
    columns = {name: to_array(f"field {name!r}", column) for name, column in fields.items()}
    if ROW_OWNERS in columns:
        raise DataError(f"a field is named {ROW_OWNERS!r}; that name is taken by owners of rows")
    if owners is not None:
        check_count("owners", owners)
    if not several_ids(ids):
        distinct, user_of_row = number_ids(as_id_array(ids))
        return partition(columns, user_of_row, distinct)
    each = [list(dict.fromkeys(np.asarray(row, object).ravel().tolist())) for row in ids]
    most = _most_owners(each, owners)
    filled = [own + own[:1] * (most - len(own)) for own in each]
    table = as_id_array([owner for own in filled for owner in own]).reshape(-1, most)
    distinct, position = number_ids(table.ravel())
    shared = {ROW_OWNERS: table} if most > 1 else {}
    return partition({**columns, **shared}, position.reshape(-1, most)[:, 0], distinct)


def several_ids(ids: object) -> bool:
    """Whether ids are several for each row, or may be."""
    if isinstance(ids, np.ndarray) and ids.dtype != object:
        return ids.ndim == 2
    first = next(iter(ids), None) if isinstance(ids, Iterable) else None
    return isinstance(first, list | tuple | np.ndarray)


def _most_owners(each: Sequence[Sequence[object]], owners: int | None) -> int:
    """The most owners of a row; DataError if that, or none, is not allowed."""
    sizes = [len(own) for own in each]
    if 0 in sizes:
        raise DataError(f"row {sizes.index(0)} has no user id; each row must have one or more")
    most = max(sizes, default=1)
    if most > 1 and owners is None:
        raise DataError(
            f"row {sizes.index(most)} belongs to {most} users; with such rows owners must be "
            "given, the most users that a row may belong to"
        )
    if owners is not None and most > owners:
        raise DataError(
            f"row {sizes.index(most)} belongs to {most} users; owners is {owners}, the most that a "
            "row may belong to"
        )
    return most


def from_grouped(
    users: Mapping[str, Mapping[str, ColumnLike]] | Iterable[tuple[str, Mapping[str, ColumnLike]]],
) -> UserStore:
    """Join users whose rows are grouped already; each id comes once, a user may have no rows."""
    parts: dict[str, dict[str, Array]] = {}
    for user_id, fields in users.items() if isinstance(users, Mapping) else users:
        if user_id in parts:
            raise DataError(f"user id {user_id!r} comes twice; a user must come once")
        arrays = {k: to_array(f"field {k!r} of user {user_id!r}", v) for k, v in fields.items()}
        others = next(iter(parts.values()), arrays)
        if arrays.keys() != others.keys():
            found = f"user {user_id!r} has the fields {sorted(arrays)}"
            raise DataError(f"{found}; others have {sorted(others)}")
        lengths = {array.shape[:1] for array in arrays.values()}
        if len(lengths) != 1 or () in lengths:
            raise DataError(f"fields of user {user_id!r} have different numbers of rows")
        for name, array in arrays.items():
            check_like(f"field {name!r} of user {user_id!r}", array, "others have", others[name])
        parts[user_id] = arrays
    if not parts:
        raise DataError("there are no users; a store needs at least one")
    names = next(iter(parts.values()))
    joined = {name: np.concatenate([part[name] for part in parts.values()]) for name in names}
    offsets = offsets_of([len(next(iter(part.values()))) for part in parts.values()])
    return UserStore(joined, offsets, as_id_array(list(parts)))


def to_array(what: str, column: ColumnLike) -> Array:
    """Turn an array, tensor or nested list into an array; arrays and CPU tensors share memory.

    Objects that are all numbers or booleans, as tables of mixed columns have, become float32.
    """
    refuse_masked(what, column)
    try:
        found = column.detach().cpu().numpy() if isinstance(column, _Tensor) else np.asarray(column)
    except (TypeError, ValueError) as error:
        raise DataError(f"{what} cannot be an array: {error}") from error
    if found.dtype != object:
        return found
    for place, value in enumerate(found.flat):
        if not isinstance(value, _NUMBERS):
            row, kind = np.unravel_index(place, found.shape)[0], type(value).__name__
            raise DataError(f"{what} has a value of the type {kind} in row {row}; give numbers")
    return found.astype(np.float32)
