"""Users' data as columns: one array per field, one user's rows side by side, and offsets."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.checks import check_count
from fedpriv.data.ids import IdArray, as_id_array, first_duplicate
from fedpriv.data.mapped import FieldFile, files_of, gathered
from fedpriv.data.store_files import read_store, write_store
from fedpriv.errors import DataError, InvalidValueError


@dataclass(frozen=True, eq=False, repr=False)
class UserStore:
    """The data of N users; user i (a position, 0 ≤ i < N) owns rows offsets[i]:offsets[i+1].

    Guarantees:
        * Every row belongs to exactly one user, and every user has exactly one position: the
          user is the record, so a user enrolled twice would void the privacy statement.
        * A user may have zero rows.
        * Arrays are held, not copied; memory-mapped fields stay memory-mapped.
        * repr names fields and numbers, never a user's id or data.

    Attributes:
        fields: name → array [rows, ...]; names are Python identifiers.
        offsets: int64 [N + 1], from 0 to rows, never decreasing; read-only.
        user_ids: N distinct ids, or None when a user's id is the position, which costs no memory.
            Held as a read-only array of strings or integers.

    Raises:
        DataError: no field, no user, a field that is not an array with a first axis of all rows,
            dtype object, offsets that do not cut the rows, or user ids that are not N distinct
            strings or integers.
    """

    fields: Mapping[str, NDArray[np.generic]]
    offsets: NDArray[np.int64]
    user_ids: Sequence[str] | IdArray | None = None
    # Of large fields that are mapped; `take` reads them there.
    _files: Mapping[str, FieldFile] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        offsets = _checked_offsets(self.offsets, _checked_rows(self.fields))
        object.__setattr__(self, "fields", dict(self.fields))
        object.__setattr__(self, "offsets", _read_only(offsets))
        if self.user_ids is not None:
            ids = _checked_ids(self.user_ids, self.population)
            object.__setattr__(self, "user_ids", _read_only(ids))

    def __repr__(self) -> str:
        columns = ", ".join(f"{k}: {v.dtype}{list(v.shape[1:])}" for k, v in self.fields.items())
        return f"UserStore(population={self.population}, rows={self.rows}, fields={{{columns}}})"

    @property
    def population(self) -> int:
        """N, the number of users, with or without rows."""
        return len(self.offsets) - 1

    @property
    def rows(self) -> int:
        """Number of rows of all users together."""
        return int(self.offsets[-1])

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of rows of each user, int64 [N], computed at each access."""
        return np.diff(self.offsets)

    def id_of(self, user: int) -> str:
        """Id of the user at a position.

        Raises:
            InvalidValueError: `user` is not a position.
        """
        self._check_user(user)
        return str(user if self.user_ids is None else self.user_ids[user])

    def rows_of(self, user: int) -> slice:
        """Rows of the user at a position, as a slice of every field.

        Raises:
            InvalidValueError: `user` is not a position.
        """
        self._check_user(user)
        return slice(int(self.offsets[user]), int(self.offsets[user + 1]))

    def examples_of(self, user: int) -> dict[str, NDArray[np.generic]]:
        """Fields of one user, name → array [rows of the user, ...]; views, no copy.

        Views of a store loaded with memory mapping cannot be written to; `take` copies.

        Raises:
            InvalidValueError: `user` is not a position.
        """
        rows = self.rows_of(user)
        return {name: field[rows] for name, field in self.fields.items()}

    def take(
        self,
        rows: NDArray[np.integer],
        out: Mapping[str, NDArray[np.generic]] | None = None,
    ) -> dict[str, NDArray[np.generic]]:
        """Gather rows by number; reads only these rows of a mapped field.

        Of a field that `load` mapped, nothing stays resident: memory does not grow with what was
        read.

        Args:
            rows: integers in [0, self.rows) of any shape, repeats allowed.
            out: arrays [*rows.shape, ...] to write to, of the fields that are asked for; None: all
                are, in new arrays.

        Returns:
            name → array [*rows.shape, ...] in memory, writable.

        Raises:
            InvalidValueError: `rows` are not integers, or one is out of range.
            DataError: the file of a mapped field was cut.
        """
        _check_positions("rows", rows, self.rows)
        fields = self.fields if out is None else {name: self.fields[name] for name in out}
        files = {name: file for name, file in self._files.items() if name in fields}
        return gathered(fields, files, rows, out or {})

    def subset(self, users: NDArray[np.integer] | Sequence[int]) -> "UserStore":
        """Store of some users, in the order given, under the ids they have here.

        Args:
            users: positions, at least one, each at most once; their rows are copied.

        Raises:
            InvalidValueError: a position is not an integer in [0, N).
            DataError: no user, or one user twice.
        """
        chosen = np.asarray(users, dtype=None if len(users) else np.int64)
        _check_positions("users", chosen, self.population)
        if chosen.ndim != 1:
            raise InvalidValueError(f"users have shape {chosen.shape}; they must be a list")
        starts = self.offsets[chosen]
        sizes = self.offsets[chosen + 1] - starts
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        rows = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        ids = chosen if self.user_ids is None else np.asarray(self.user_ids)[chosen]
        return UserStore(self.take(rows), offsets, ids)

    def save(self, folder: str | Path) -> None:
        """Write the store as one .npy file per field, offsets, ids and a small description.

        The folder appears under its name only when all of it is on disk, so a crash can leave
        none or a whole one. An existing folder is never overwritten.

        Raises:
            DataError: `folder` exists.
        """
        UserStore.save_parts(folder, [self])

    @staticmethod
    def save_parts(folder: str | Path, parts: Iterable["UserStore"]) -> None:
        """Write the users of several stores, one store after another, as `save` writes one.

        Parts are taken as they are needed, so that a generator can make a population that is
        larger than memory; offsets and ids of all users are held.

        Raises:
            DataError: `folder` exists, there is no part, parts have different fields, or an id
                occurs twice or in some parts alone.
        """
        write_store(Path(folder), ((p.fields, p.offsets, p.user_ids) for p in parts))

    @classmethod
    def load(cls, folder: str | Path, *, mmap: bool = True) -> Self:
        """Open a saved store; with `mmap`, fields are mapped read-only and not yet read.

        Raises:
            DataError: `folder` is not a whole saved store of a known version.
        """
        store = cls(*read_store(Path(folder), mapped=mmap))
        object.__setattr__(store, "_files", files_of(store.fields))
        return store

    def _check_user(self, user: int) -> None:
        if check_count("user", user, least=0) >= self.population:
            raise InvalidValueError(
                f"user is {user}; positions of this store are 0 to {self.population - 1}"
            )


def _checked_rows(fields: Mapping[str, NDArray[np.generic]]) -> int:
    if not fields:
        raise DataError("a user store has no field; it needs at least one")
    rows: dict[str, int] = {}
    for name, column in fields.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise DataError(f"field name {name!r} is not a Python identifier")
        if not isinstance(column, np.ndarray) or column.ndim == 0:
            raise DataError(
                f"field {name!r} is a {type(column).__name__}; "
                "it must be a NumPy array whose first axis is the rows"
            )
        if column.dtype.hasobject:
            raise DataError(
                f"field {name!r} has dtype {column.dtype}; rows must be of one shape and one "
                "number or string dtype"
            )
        rows[name] = len(column)
    if len(set(rows.values())) > 1:
        counts = ", ".join(f"{name} {count}" for name, count in rows.items())
        raise DataError(f"fields have different numbers of rows ({counts}); they must agree")
    return next(iter(rows.values()))


def _checked_offsets(offsets: NDArray[np.generic], rows: int) -> NDArray[np.int64]:
    array = np.asarray(offsets)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            f"offsets have dtype {array.dtype} and shape {array.shape}; "
            "they must be N + 1 integers in one dimension"
        )
    if array.size < 2:
        raise DataError("a user store has no users; it needs at least one")
    cuts: NDArray[np.int64] = array.astype(np.int64, copy=False)
    if cuts[0] != 0 or cuts[-1] != rows:
        raise DataError(f"offsets run from {cuts[0]} to {cuts[-1]}; they must run from 0 to {rows}")
    falls = np.flatnonzero(cuts[1:] < cuts[:-1])
    if falls.size:
        raise DataError(f"offsets decrease after user {falls[0]}; they must never decrease")
    return cuts


def _checked_ids(user_ids: Sequence[str] | IdArray, population: int) -> IdArray:
    ids = as_id_array(user_ids)
    if len(ids) != population:
        raise DataError(f"there are {len(ids)} user ids for {population} users; they must agree")
    twice = first_duplicate(ids)
    if twice is not None:
        raise DataError(f"user id {twice!r} occurs twice; a user must have one place in the store")
    return ids


def _check_positions(name: str, positions: NDArray[np.integer], end: int) -> None:
    # NumPy would read -1 as the last row, which is another user's.
    if positions.dtype.kind not in "iu":
        raise InvalidValueError(f"{name} have dtype {positions.dtype}; they must be integers")
    if positions.size and not (positions.min() >= 0 and positions.max() < end):
        raise InvalidValueError(
            f"{name} lie in [{positions.min()}, {positions.max()}]; they must lie in [0, {end})"
        )


def _read_only(array: IdArray) -> IdArray:
    view = array.view()
    view.flags.writeable = False
    return view
