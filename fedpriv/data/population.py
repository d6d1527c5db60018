"""Users' data as columns: one array per field, each user's rows side by side, and offsets.

A `UserStore` holds the rows of all users, in memory or mapped from a folder of .npy files:

    store.json          format, version, names of the fields
    offsets.npy         int64 [N + 1]
    user_ids.npy        [N], absent when a user's id is its position
    field-<name>.npy    one per field

A `Population` adds held-out rows and the name under which the privacy ledger knows the users.
"""

import json
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedpriv.errors import DataError, InvalidValueError, known_names
from fedpriv.importing import call_imported, check_options, import_function

if TYPE_CHECKING:
    from fedpriv.data.arrays import Column

Array: TypeAlias = NDArray[np.generic]
Fields: TypeAlias = Mapping[str, Array]
"""Arrays by field name; the first axis of each is the rows."""
IdArray: TypeAlias = Array
"""User ids, one per user or one per row, of a string or an integer dtype."""

_FORMAT = "fedpriv user store"
_VERSION = 1
_DENSE = 4  # of a stretch of rows, more than one in this many is wanted
_LOADERS = {
    "digits": "fedpriv.data.digits:load_digits",
    "hugging-face": "fedpriv.data.hugging_face:load_hugging_face",
    "mnist-writers": "fedpriv.data.mnist:load_mnist_writers",
    "redealt": "fedpriv.data.hugging_face:load_redealt",
    "shakespeare-roles": "fedpriv.data.shakespeare:load_shakespeare_roles",
    "synthetic": "fedpriv.data.synthetic:synthetic_population",
}


@dataclass(frozen=True, eq=False, repr=False)
class UserStore:
    """The data of N users; user i (a position, 0 ≤ i < N) owns rows offsets[i]:offsets[i+1].

    Guarantees:
        * Every row belongs to exactly one user, and every user has exactly one position: the
          user is the unit of privacy, so a user enrolled twice would void the guarantee.
        * A user may have zero rows.
        * Arrays are held, not copied; memory-mapped fields stay memory-mapped.
        * repr shows fields and counts, never a user's id or data.

    Raises:
        DataError: no field, no user, a field that is not an array with a first axis of all rows,
            dtype object, offsets that do not cut the rows, or user ids that are not N distinct
            strings or integers.
    """

    fields: Fields  # names are Python identifiers
    offsets: NDArray[np.int64]  # [N + 1], from 0 to rows, never decreasing; read-only
    # N distinct ids, held as a read-only array; None where a user's id is its position.
    user_ids: Sequence[str] | IdArray | None = None

    def __post_init__(self) -> None:
        offsets = _checked_offsets(self.offsets, _checked_rows(self.fields))
        object.__setattr__(self, "fields", dict(self.fields))
        object.__setattr__(self, "offsets", _read_only(offsets))
        if self.user_ids is not None:
            ids = as_id_array(self.user_ids)
            if len(ids) != self.population:
                raise DataError(
                    f"there are {len(ids)} user ids for {self.population} users; they must agree"
                )
            _check_distinct(ids)
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
        """Number of rows of each user, [N]; computed at each access."""
        return np.diff(self.offsets)

    def id_of(self, user: int) -> str:
        """Id of the user at a position; InvalidValueError if it is not a position."""
        self._check_user(user)
        return str(user if self.user_ids is None else self.user_ids[user])

    def rows_of(self, user: int) -> slice:
        """Rows of the user at a position; InvalidValueError if it is not a position."""
        self._check_user(user)
        return slice(int(self.offsets[user]), int(self.offsets[user + 1]))

    def examples_of(self, user: int) -> dict[str, Array]:
        """Fields of one user, name → array [rows of the user, ...]: views, or read-only mapped."""
        rows = self.rows_of(user)
        return {name: array[rows] for name, array in self.fields.items()}

    def take(self, rows: NDArray[np.integer], out: Fields | None = None) -> dict[str, Array]:
        """Gather rows by number, name → writable array [*rows.shape, ...] in memory.

        Reads only these rows of a mapped field and leaves none of its pages resident, so memory
        does not grow with what was read.

        Args:
            rows: integers in [0, self.rows) of any shape, repeats allowed; InvalidValueError else.
            out: arrays to write to, for the fields wanted; by default all, into new arrays.
        """
        _check_positions("rows", rows, self.rows)
        wanted = self.fields if out is None else {name: self.fields[name] for name in out}
        return {name: _gather(wanted[name], rows, (out or {}).get(name)) for name in wanted}

    def subset(self, users: NDArray[np.integer] | Sequence[int]) -> "UserStore":
        """Store of some users, at distinct positions, with their ids and a copy of their rows."""
        chosen = np.asarray(users, dtype=None if len(users) else np.int64)
        _check_positions("users", chosen, self.population)
        if chosen.ndim != 1:
            raise InvalidValueError(f"users have shape {chosen.shape}; they must be a list")
        starts = self.offsets[chosen]
        sizes = self.offsets[chosen + 1] - starts
        offsets = offsets_of(sizes)
        rows = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], sizes)
        ids = chosen if self.user_ids is None else np.asarray(self.user_ids)[chosen]
        return UserStore(self.take(rows), offsets, ids)

    def save(self, folder: str | Path) -> None:
        """Write the store to a new folder, which appears once all of it is on disk."""
        UserStore.save_parts(folder, [self])

    @staticmethod
    def save_parts(folder: str | Path, parts: Iterable["UserStore"]) -> None:
        """Write the users of several stores, one store after another, as one store.

        Parts are consumed lazily, so a generator can make a population larger than memory; the
        offsets and ids of all users are held in memory. A crash leaves a whole store or none.
        DataError if the folder exists or parts do not fit each other.
        """
        place = Path(folder)
        if place.exists():
            raise DataError(f"{place} exists; a saved store is never overwritten")
        partial = place.with_name(f".{place.name}.{secrets.token_hex(8)}.partial")
        partial.mkdir(parents=True)
        try:
            _write_parts(partial, parts)
            _flush_folder(partial)
            partial.rename(place)
            _flush_folder(place.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise

    @classmethod
    def load(cls, folder: str | Path, *, mmap: bool = True) -> Self:
        """Open a saved store; with `mmap`, fields are mapped read-only and not yet read."""
        place = Path(folder)
        names, with_ids = _read_description(place / "store.json")
        fields = {name: _read_array(place / f"field-{name}.npy", mapped=mmap) for name in names}
        offsets = _read_array(place / "offsets.npy", mapped=False)
        if offsets.dtype.kind != "i":
            raise DataError(f"{place / 'offsets.npy'} has dtype {offsets.dtype}; it must be int64")
        ids = _read_array(place / "user_ids.npy", mapped=False) if with_ids else None
        return cls(fields, offsets.astype(np.int64, copy=False), ids)

    def _check_user(self, user: int) -> None:
        if check_count("user", user, least=0) >= self.population:
            raise InvalidValueError(
                f"user is {user}; positions of this store are 0 to {self.population - 1}"
            )


@dataclass(frozen=True, eq=False)
class Population:
    """Enrolled users, and held-out rows to evaluate a model on.

    The privacy ledger identifies the population by its name, and the ledger is public. So the name
    is made of public facts: N, the number of users, and settings such as names of data sets; never
    of a total or a digest of users' data, against which a guess could be tested. A name that stays
    while the data change errs on the safe side: the ledger's charges then add up over both.

    Attributes:
        name: one printable line, such as "digits: 287 users, iid, seed 0".
        users: the enrolled users' data; inputs are the field "x", targets the field "y".
        test: rows that no enrolled user trains on, at least one, with the same fields, dtypes and
            row shapes as `users`; DataError else.
    """

    name: str
    users: UserStore
    test: Fields = field(repr=False)

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable():
            raise DataError(f"population name {self.name!r} must be one printable line")
        if self.test.keys() != self.users.fields.keys():
            raise DataError(
                f"test rows have the fields {sorted(self.test)}; "
                f"the users have {sorted(self.users.fields)}"
            )
        for name, array in self.test.items():
            check_like(f"test field {name!r}", array, "the users' is", self.users.fields[name])
        counts = {len(array) for array in self.test.values()}
        if len(counts) != 1 or 0 in counts:
            raise DataError(
                f"test fields have {sorted(counts)} rows; all need the same number, at least one"
            )
        object.__setattr__(self, "test", dict(self.test))

    @classmethod
    def from_arrays(
        cls,
        x: "Column",
        y: "Column",
        user_ids: "Column",
        *,
        held_out: "tuple[Column, Column]",
        name: str = "people",
    ) -> "Population":
        """A population from rows in any order, each with the id of its user.

        >>> x, y = np.eye(4, dtype=np.float32), np.array([0, 1, 0, 1])
        >>> ids = ["ann", "bob", "ann", "eve"]
        >>> people = Population.from_arrays(x, y, ids, held_out=(x, y))
        >>> people.name
        'people: 3 users'

        Args:
            x: [rows, ...] inputs; an array, a tensor or nested lists.
            y: [rows, ...] targets.
            user_ids: [rows] ids, all strings or all integers.
            held_out: inputs and targets of rows that belong to no user, for evaluation.
            name: public, as it goes into the ledger; the number of users is appended.

        Raises:
            DataError: ids are neither strings nor integers, numbers of rows differ, or the held-out
                rows have another dtype or shape than the users'.
        """
        from fedpriv.data.arrays import from_arrays, to_array  # noqa: PLC0415 - it needs the store

        users = from_arrays({"x": x, "y": y}, user_ids)
        if not isinstance(held_out, tuple) or len(held_out) != 2:
            raise DataError("held_out must be a pair: inputs and targets")
        test = {
            field: to_array(f"held-out {field!r}", column)
            for field, column in zip(("x", "y"), held_out, strict=True)
        }
        return cls(f"{name}: {users.population} users", users, test)


def load_population(name: str, options: Mapping[str, object]) -> Population:
    """Load a population by name, as configuration files do.

    The name is one of fedpriv's loaders, or "package.module:function" of a function that returns
    a population; naming a function runs it. Options are keyword arguments, checked against its
    signature first. Of an error that is not fedpriv's own only type and line are reported, because
    its text may hold users' data; an OSError passes.
    """
    if name not in _LOADERS and ":" not in name:
        raise DataError(
            f"unknown population {name!r}; {known_names(name, _LOADERS)}, "
            "or package.module:function"
        )
    what = f"population {name!r}"
    loader = import_function(what, _LOADERS.get(name, name), DataError)
    check_options(what, loader, options, InvalidValueError)
    population = call_imported(what, loader, options, DataError)
    if not isinstance(population, Population):
        raise DataError(
            f"{name} returned a {type(population).__name__}; it must return a Population"
        )
    return population


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return `value` as an int; InvalidValueError unless it is a whole number ≥ `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise InvalidValueError(
            f"{name} is {value!r}; it must be a whole number of at least {least}"
        )
    return int(value)


def check_like(what: str, rows: Array, others: str, like: Array) -> None:
    """Raise DataError unless rows of two arrays may stand in one field."""
    # The dtype's type, because strings of different widths fit each other.
    if (rows.dtype.type, rows.shape[1:]) != (like.dtype.type, like.shape[1:]):
        raise DataError(f"{what} is {_per_row(rows)} per row; {others} {_per_row(like)}")


def offsets_of(sizes: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """Offsets [N + 1] of users with these numbers of rows [N]."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


def as_id_array(ids: Sequence[object] | Array) -> IdArray:
    """Turn user ids [n] into an array of strings or of integers, never guessing.

    An array of integers or strings is returned as it is. Anything else must hold only str or only
    int, else DataError: NumPy would merge or split users by converting mixed, missing (None, NaN),
    float or bool ids.
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


def _check_distinct(ids: IdArray) -> None:
    distinct, counts = np.unique(ids, return_counts=True)
    if len(distinct) < len(ids):
        raise DataError(
            f"user id {str(distinct[counts > 1][0])!r} occurs twice; a user must have one place "
            "in the store"
        )


def _checked_rows(fields: Fields) -> int:
    if not fields:
        raise DataError("a user store has no field; it needs at least one")
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
    rows = {len(column) for column in fields.values()}
    if len(rows) > 1:
        counts = ", ".join(f"{name} {len(column)}" for name, column in fields.items())
        raise DataError(f"fields have different numbers of rows ({counts}); they must agree")
    return rows.pop()


def _checked_offsets(offsets: Array, rows: int) -> NDArray[np.int64]:
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


def _gather(column: Array, rows: NDArray[np.integer], out: Array | None) -> Array:
    """Copy legal rows of a field; pages of a mapped one are given back to the system's cache."""
    mapping = column.base if isinstance(column, np.memmap) and column.mode == "r" else None
    if isinstance(mapping, mmap.mmap) and rows.size:
        # The file is mapped for random access, so ask for a stretch that is read almost whole.
        first, end = int(rows.min()), int(rows.max()) + 1
        if end - first <= _DENSE * rows.size:
            start, stop = (column.offset + row * column.strides[0] for row in (first, end))
            start -= start % mmap.PAGESIZE
            mapping.madvise(mmap.MADV_WILLNEED, start, stop - start)
    # Rows are legal; with mode "raise" NumPy would buffer the output.
    taken: Array = np.take(np.asarray(column), rows, axis=0, out=out, mode="clip")
    if isinstance(mapping, mmap.mmap):
        mapping.madvise(mmap.MADV_DONTNEED)
    return taken


def _write_parts(folder: Path, parts: Iterable[UserStore]) -> None:
    """Write all files of a store; of the fields, one part is in memory at a time."""
    like: dict[str, Array] = {}
    files: dict[str, BinaryIO] = {}
    sizes: list[NDArray[np.int64]] = []
    ids: list[IdArray] = []
    with ExitStack() as opened:
        for part in parts:
            if not sizes:
                like = {k: np.empty((0, *c.shape[1:]), c.dtype) for k, c in part.fields.items()}
                for name in like:
                    # Mode "x": two fields whose names differ only in case must not share a file.
                    path = folder / f"field-{name}.npy"
                    files[name] = opened.enter_context(path.open("xb"))
                    _write_header(files[name], like[name], 0)
            if part.fields.keys() != like.keys():
                raise DataError(f"parts have the fields {list(like)} and {list(part.fields)}")
            for name, column in part.fields.items():
                _append(files[name], name, like[name], column)
            sizes.append(part.sizes)
            if part.user_ids is not None:
                ids.append(as_id_array(part.user_ids))
        if not sizes:
            raise DataError("a user store has no users; it needs at least one")
        offsets = offsets_of(np.concatenate(sizes))
        for name, file in files.items():
            _write_header(file, like[name], int(offsets[-1]))
            _flush(file)
    _write_array(folder / "offsets.npy", offsets)
    if ids:
        _write_array(folder / "user_ids.npy", _joined_ids(ids, len(sizes)))
    description = {"format": _FORMAT, "version": _VERSION, "fields": [*like], "user_ids": bool(ids)}
    with (folder / "store.json").open("xb") as text:
        text.write(json.dumps(description, indent=1).encode())
        _flush(text)


def _write_header(file: BinaryIO, like: Array, rows: int) -> None:
    """Write the header of an .npy file; its length is the same for any number of rows."""
    header = npy.header_data_from_array_1_0(like) | {"shape": (rows, *like.shape[1:])}
    file.seek(0)
    npy.write_array_header_1_0(file, header)


def _append(file: BinaryIO, name: str, like: Array, rows: Array) -> None:
    if _per_row(rows) != _per_row(like):
        raise DataError(
            f"field {name!r} is {_per_row(like)} per row in one part, {_per_row(rows)} in another"
        )
    np.ascontiguousarray(rows).tofile(file)


def _per_row(rows: Array) -> str:
    return f"{rows.dtype}{list(rows.shape[1:])}"


def _joined_ids(ids: list[IdArray], parts: int) -> IdArray:
    if len(ids) < parts:
        raise DataError(f"{len(ids)} of {parts} parts have user ids; all must have them, or none")
    # 1 and "1" must not meet, and NumPy makes floats of signed and unsigned integers.
    if len({part.dtype.kind for part in ids}) > 1:
        kinds = sorted({str(part.dtype) for part in ids})
        raise DataError(f"parts have user ids of {' and '.join(kinds)}; they must be of one kind")
    joined = np.concatenate(ids)
    _check_distinct(joined)
    return joined


def _write_array(path: Path, array: Array) -> None:
    with path.open("xb") as file:
        np.save(file, array)
        _flush(file)


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_description(path: Path) -> tuple[list[str], bool]:
    """Names of the fields, and whether users have ids."""
    if not path.is_file():
        raise DataError(f"{path.parent} is not a saved user store: it has no store.json")
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise DataError(f"{path} does not describe a user store")
    version, names = description.get("version"), description.get("fields")
    if version != _VERSION:
        raise DataError(f"{path} has version {version!r}; this program reads version {_VERSION}")
    if not isinstance(names, list) or not all(str(name).isidentifier() for name in names):
        raise DataError(f"{path} has the fields {names!r}, not a list of names")
    return names, bool(description.get("user_ids"))


def _read_array(path: Path, *, mapped: bool) -> Array:
    try:
        array: Array = np.load(path, mmap_mode="r" if mapped else None)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from error
    except (ValueError, EOFError) as error:  # NumPy's text may quote the content
        raise DataError(f"{path} cannot be read as an array of numbers or strings") from error
    if isinstance(array.base, mmap.mmap):
        # Cohorts are scattered: without this, each page read brings in many that nobody wants.
        array.base.madvise(mmap.MADV_RANDOM)
    return array
