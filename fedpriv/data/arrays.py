"""User stores from arrays and tensors in memory."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, cast

import numpy as np

from fedpriv.data.columns import Array, ColumnLike, Rows, as_numpy, columns_of, to_array
from fedpriv.data.partition import number_ids, partition
from fedpriv.data.population import (
    ROW_OWNERS,
    UserStore,
    as_id_array,
    check_count,
    check_like,
    offsets_of,
)
from fedpriv.errors import DataError

Grouped: TypeAlias = Mapping[str, Rows] | Iterable[tuple[str, Rows]] | Iterable[Rows]
"""Rows by the id of their user, or in a list where each user's id is a position in it."""


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
    plain = isinstance(user_ids, np.ndarray) or not hasattr(user_ids, "__array__")
    ids = cast("Array | Sequence[object]", user_ids if plain else as_numpy(user_ids))
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


def from_grouped(users: Grouped) -> UserStore:
    """Join users whose rows are grouped already; each id comes once, a user may have no rows.

    A user's rows are fields by name, a pair of inputs x and targets y, or a torch dataset.
    """
    parts: dict[str, dict[str, Array]] = {}
    for user_id, rows in _by_user(users):
        if user_id in parts:
            raise DataError(f"user id {user_id!r} comes twice; a user must come once")
        fields = columns_of(rows)
        arrays = {k: to_array(f"field {k!r} of user {user_id!r}", v) for k, v in fields.items()}
        others = next((part for part in parts.values() if part), arrays)
        if arrays:  # of a dataset without items no field is known
            _check_part(user_id, arrays, others)
        parts[user_id] = arrays
    if not parts:
        raise DataError("there are no users; a store needs at least one")
    names = next((part for part in parts.values() if part), {})
    empty = {name: array[:0] for name, array in names.items()}
    whole = [part or empty for part in parts.values()]
    joined = {name: np.concatenate([part[name] for part in whole]) for name in names}
    offsets = offsets_of([len(part[next(iter(names))]) if names else 0 for part in whole])
    return UserStore(joined, offsets, as_id_array(list(parts)))


def _by_user(users: Grouped) -> Iterator[tuple[str, Rows]]:
    if isinstance(users, Mapping):
        yield from users.items()
        return
    if not isinstance(users, Iterable):
        kind = f"users are a {type(users).__name__}"
        raise DataError(f"{kind}; they must be a table of rows by id, or a list of rows")
    for position, entry in enumerate(users):
        named = isinstance(entry, tuple) and isinstance(entry[0], str | int | np.integer)
        yield cast("tuple[str, Rows]", entry if named else (position, entry))


def _check_part(user_id: str, arrays: Mapping[str, Array], others: Mapping[str, Array]) -> None:
    """Raise DataError unless a user's fields fit each other and those of the others."""
    if arrays.keys() != others.keys():
        problem = f"user {user_id!r} has the fields {sorted(arrays)}"
        raise DataError(f"{problem}; others have {sorted(others)}")
    lengths = {array.shape[:1] for array in arrays.values()}
    if len(lengths) != 1 or () in lengths:
        raise DataError(f"fields of user {user_id!r} have different numbers of rows")
    for name, array in arrays.items():
        check_like(f"field {name!r} of user {user_id!r}", array, "others have", others[name])
