"""User stores from arrays and tensors in memory."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mode
from typing import TypeAlias, cast

import numpy as np

from fedpriv.data.columns import (
    Array,
    ColumnLike,
    Faults,
    Rows,
    as_numpy,
    columns_of,
    read_column,
    to_array,
)
from fedpriv.data.partition import number_ids, partition
from fedpriv.data.population import (
    ROW_OWNERS,
    UserStore,
    as_id_array,
    check_count,
    check_like,
    ids_of_rows,
    offsets_of,
)
from fedpriv.errors import DataError

Grouped: TypeAlias = Mapping[str, Rows] | Iterable[tuple[str, Rows]] | Iterable[Rows]
"""Rows by the id of their user, or in a list; then each user's id is its position in the list."""


def from_arrays(
    fields: Mapping[str, ColumnLike], user_ids: ColumnLike, owners: int | None = None
) -> UserStore:
    """Group rows in any order by their user ids, which are all strings or all integers.

    Users are in order of first appearance, and a user's rows keep their order. Rows that are
    grouped already are not copied: do not write to them afterwards.

    If rows have several owners, at most `owners`, each row has a list of ids, which may be
    repeated. A row is stored with its first owner, and the field `ROW_OWNERS` names all owners.
    DataError: a row has more than `owners` owners, or several without `owners`.

    A user with a faulty row, see `read_column`, is `broken`.
    """
    columns = {name: read_column(f"field {name!r}", column) for name, column in fields.items()}
    return from_columns(columns, user_ids, owners)


def from_columns(
    columns: Mapping[str, tuple[Array, Faults]], user_ids: ColumnLike, owners: int | None = None
) -> UserStore:
    """Group rows like `from_arrays`; `columns` are arrays with their faults."""
    plain = isinstance(user_ids, np.ndarray) or not hasattr(user_ids, "__array__")
    ids = cast("Array | Sequence[object]", user_ids if plain else as_numpy(user_ids))
    fields = {name: array for name, (array, _) in columns.items()}
    if ROW_OWNERS in fields:
        raise DataError(f"a field is named {ROW_OWNERS!r}; the name is reserved for owners of rows")
    if owners is not None:
        check_count("owners", owners)
    if several_ids(ids):
        by_row = [list(dict.fromkeys(np.asarray(row, object).ravel().tolist())) for row in ids]
        width = _most_owners(by_row, owners)
        padded = [row + row[:1] * (width - len(row)) for row in by_row]
        table = ids_of_rows([owner for row in padded for owner in row]).reshape(-1, width)
        fields |= {ROW_OWNERS: table} if width > 1 else {}
        distinct, position = number_ids(table.ravel())
        position = position.reshape(-1, width)[:, 0]
    else:
        distinct, position = number_ids(ids_of_rows(ids))
    store = partition(fields, position, distinct)
    faults = {row: why for _, faulty in columns.values() for row, why in faulty.items()}
    if faults:
        place = np.argsort(np.argsort(position, kind="stable"))
        faults = {int(place[row]): why for row, why in faults.items()}
    return store.without(faults)


def several_ids(ids: object) -> bool:
    """Return whether each row has a list of ids."""
    if isinstance(ids, np.ndarray) and ids.dtype != object:
        return ids.ndim == 2
    first = next(iter(ids), None) if isinstance(ids, Iterable) else None
    return isinstance(first, list | tuple | np.ndarray)


def _most_owners(ids_by_row: Sequence[Sequence[object]], owners: int | None) -> int:
    """Return the largest number of owners of a row; DataError if it is illegal, or one is 0."""
    sizes = [len(ids) for ids in ids_by_row]
    if 0 in sizes:
        raise DataError(f"row {sizes.index(0)} has no user id; each row must have one or more")
    size = max(sizes, default=1)
    if size > (owners or 1):
        raise DataError(
            f"row {sizes.index(size)} belongs to {size} users and owners is {owners}; it must be "
            "the largest number of owners of a row"
        )
    return size


def from_grouped(users: Grouped) -> UserStore:
    """Join users whose rows are grouped; each id occurs once, and a user may have no rows.

    A user's rows are fields by name, a pair of inputs x and targets y, or a torch dataset. A user
    is `broken` if its rows cannot be read, or differ in type or shape from those of most users.
    """
    return from_readers((user_id, partial(columns_of, rows)) for user_id, rows in _by_user(users))


def from_readers(users: Iterable[tuple[str, Callable[[], Mapping[str, ColumnLike]]]]) -> UserStore:
    """Join users like `from_grouped`; each function returns a user's fields or raises DataError."""
    parts, broken = dict[str, dict[str, Array]](), dict[str, str]()
    for user_id, reader in users:
        if user_id in parts:
            raise DataError(f"user id {user_id!r} occurs twice; each user must occur once")
        parts[user_id] = {}
        try:
            parts[user_id] = _arrays_of(reader())
        except DataError as error:
            broken[user_id] = str(error)
    if not parts:
        raise DataError("there are no users; a store needs at least one")
    usual = _usual_part([*parts.values()])
    if broken and not usual:
        raise DataError(next(iter(broken.values())))
    no_rows = {name: array[:0] for name, array in usual.items()}
    for user_id, part in parts.items():
        try:
            parts[user_id] = _as_others(part, usual) if _length(part) else no_rows
        except DataError as error:
            parts[user_id], broken[user_id] = no_rows, str(error)
    fields = {name: np.concatenate([part[name] for part in parts.values()]) for name in usual}
    sizes = [_length(part) for part in parts.values()]
    reasons = {n: f"user {i!r}: {broken[i]}" for n, i in enumerate(parts) if i in broken}
    return UserStore(fields, offsets_of(sizes), as_id_array(list(parts)), reasons)


def _arrays_of(fields: Mapping[str, ColumnLike]) -> dict[str, Array]:
    """Return the fields of one user as arrays; DataError at the first fault."""
    arrays = {name: to_array(f"field {name!r}", column) for name, column in fields.items()}
    lengths = {array.shape[:1] for array in arrays.values()}
    if len(lengths) > 1 or () in lengths:
        raise DataError("fields have different numbers of rows")
    return arrays


def _length(part: Mapping[str, Array]) -> int:
    return len(next(iter(part.values()), ()))


def _usual_part(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Return fields that have the names, types and shapes of most fields with rows."""
    usable = [part for part in parts if _length(part)] or [part for part in parts if part] or [{}]
    forms = [
        tuple(sorted((name, array.dtype.kind, array.shape[1:]) for name, array in part.items()))
        for part in usable
    ]
    return usable[forms.index(mode(forms))]


def _as_others(part: dict[str, Array], usual: Mapping[str, Array]) -> dict[str, Array]:
    """Return a user's fields in the usual types; DataError if more than integers must change."""
    if part.keys() != usual.keys():
        raise DataError(f"the fields are {sorted(part)}; most users have {sorted(usual)}")
    for name, like in usual.items():
        if like.dtype.kind == "f" and part[name].dtype.kind in "biu":
            part = {**part, name: part[name].astype(like.dtype)}
        check_like(f"field {name!r}", part[name], "most users have", like)
    return part


def _by_user(users: Grouped) -> Iterator[tuple[str, Rows]]:
    if isinstance(users, Mapping):
        yield from users.items()
        return
    if not isinstance(users, Iterable):
        kind = f"users are a {type(users).__name__}"
        raise DataError(f"{kind}; they must be a table of rows by id, or a list of rows")
    for position, entry in enumerate(users):
        has_id = isinstance(entry, tuple) and isinstance(entry[0], str | int | np.integer)
        yield cast("tuple[str, Rows]", entry if has_id else (position, entry))
