"""Checks of settings that the loaders share.

User ids as one array: all strings or all integers, so that 1 and "1" never meet.

An .npy file to which rows are appended, for arrays that are larger than memory.

Rows of memory-mapped fields, gathered without mapped pages that stay.

A user's rows lie together, and far from the next user's in a large file. A page fault for them maps
16 pages, which are to be given back; to read them from the file costs a fraction of that.

A user store as a folder of .npy files that is either whole or not there.

    store.json          format, version, names of the fields
    offsets.npy         int64 [N + 1]
    user_ids.npy        [N], absent when a user's id is the position
    field-<name>.npy    one per field

Version 1 is the only version; a reader refuses every version it does not know.

Users' data as columns: one array per field, one user's rows side by side, and offsets.

A population: the enrolled users, and rows that belong to none of them.
"""

import json
import mmap
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, TypeAlias

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedpriv.errors import DataError, InvalidValueError

if TYPE_CHECKING:
    from fedpriv.data.arrays import Column


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


@dataclass
class GrowingArray:
    """The file, while it is written; what it holds is an array once the block of `create` ends.

    Attributes:
        file: the file.
        name: how messages call it.
        dtype: of the rows so far; None before the first.
        row: shape of a row.
        rows: how many there are.
    """

    file: BinaryIO
    name: str
    dtype: np.dtype[np.generic] | None = None
    row: tuple[int, ...] = ()
    rows: int = 0

    @classmethod
    @contextmanager
    def create(cls, path: Path) -> Iterator[Self]:
        """Begin a file that does not exist; in the end it is whole and on disk."""
        with path.open("xb") as file:
            array = cls(file, path.stem)
            yield array
            file.seek(0)
            array._write_header()  # NumPy leaves room in it for any number of rows
            file.flush()
            os.fsync(file.fileno())

    def append(self, rows: NDArray[np.generic]) -> None:
        """Append rows [r, ...].

        Raises:
            DataError: they are of another dtype or shape than those before.
        """
        if self.dtype is None:
            self.dtype, self.row = rows.dtype, rows.shape[1:]
            self._write_header()
        elif (rows.dtype, rows.shape[1:]) != (self.dtype, self.row):
            raise DataError(
                f"{self.name} is {self.dtype}{list(self.row)} per row in one part and "
                f"{rows.dtype}{list(rows.shape[1:])} in another"
            )
        self.file.flush()
        np.ascontiguousarray(rows).tofile(self.file)
        self.rows += len(rows)

    def _write_header(self) -> None:
        if self.dtype is not None:
            header = {
                "descr": npy.dtype_to_descr(self.dtype),
                "fortran_order": False,
                "shape": (self.rows, *self.row),
            }
            npy.write_array_header_1_0(self.file, header)


_LEAST_READ = 2**24  # bytes of a field; all of a smaller one is mapped by few faults
_PAGE = 4096  # bytes; to read so many between two runs costs less than another call
_FAULT = 16 * _PAGE  # longer runs are mapped without waste, and copied once only

Fields = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True)
class FieldFile:
    """The file that a field maps, opened by its path each time that rows are read.

    No descriptor is held: processes that train close those that they inherit. While a file is
    mapped no other has its inode, so a file that took its path is not mistaken for it.

    Attributes:
        path: of the .npy file.
        offset: bytes before the first row.
        device: number of the file system.
        inode: number of the file in it.
    """

    path: str
    offset: int
    device: int
    inode: int

    def read(self, field: NDArray[np.generic], runs: "Runs") -> NDArray[np.generic] | None:
        """Rows of runs, one run after another, [rows, ...]; None if the file is not there any more.

        Raises:
            DataError: the file was cut.
        """
        row = _bytes_per_row(field)
        rows = np.empty((int(runs.counts.sum()), *field.shape[1:]), field.dtype)
        space = rows.reshape(-1).view(np.uint8).data
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(file)
            if (found.st_dev, found.st_ino) != (self.device, self.inode):
                return None
            starts, sizes = self.offset + runs.firsts * row, runs.counts * row
            spans = list(zip(starts.tolist(), sizes.tolist(), strict=True))
            cached = _read_from_memory(space, file, spans)
            space = space[int(sizes[:cached].sum()) :]
            for start, size in spans[cached:]:  # a disk is asked for all of them at once
                os.posix_fadvise(file, start, size, os.POSIX_FADV_WILLNEED)
            for start, size in spans[cached:]:
                self._fill(space[:size], file, start)
                space = space[size:]
        finally:
            os.close(file)
        return rows

    def _fill(self, space: memoryview, file: int, start: int) -> None:
        while space:
            size = os.preadv(file, [space], start)
            if size == 0:
                raise DataError(f"{self.path} was cut; it ends before the rows of its field")
            space, start = space[size:], start + size


@dataclass(frozen=True)
class Runs:
    """Rows asked for, as runs of rows that lie together.

    Attributes:
        firsts: [R] first row of each run, ascending.
        counts: [R] number of rows of each.
        places: where each row asked for is among those of all runs, of any shape.
    """

    firsts: NDArray[np.int64]
    counts: NDArray[np.int64]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, distinct: NDArray[np.int64], which: NDArray[np.int64], near: int) -> Self:
        """Runs of rows.

        Args:
            distinct: [n] rows, ascending, at least one.
            which: of these each row asked for is, of any shape.
            near: how far rows of one run may be apart.
        """
        cuts = np.flatnonzero(np.diff(distinct) > near) + 1
        begin, end = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(distinct)]])
        firsts = distinct[begin]
        counts = distinct[end - 1] + 1 - firsts
        moved = np.cumsum(counts) - counts - firsts
        return cls(firsts, counts, (distinct + np.repeat(moved, end - begin))[which])


def files_of(fields: Fields) -> dict[str, FieldFile]:
    """Files of those fields that are better read than mapped: large, and just mapped by NumPy."""
    if sys.platform != "linux":
        return {}
    files = {}
    for name, array in fields.items():
        if isinstance(array, np.memmap) and _is_mapped(array) and array.flags.c_contiguous:
            if array.nbytes < _LEAST_READ or array.filename is None:
                continue
            found = Path(array.filename).stat()
            path = os.fspath(array.filename)
            files[name] = FieldFile(path, array.offset, found.st_dev, found.st_ino)
    return files


def gathered(
    fields: Fields, files: Mapping[str, FieldFile], rows: NDArray[np.integer], out: Fields
) -> dict[str, NDArray[np.generic]]:
    """Rows of fields, name → array [*rows.shape, ...]; no mapped page stays.

    Args:
        fields: arrays in memory or mapped.
        files: of mapped fields, as of `files_of`.
        rows: numbers of rows, legal ones, of any shape, with repeats.
        out: where to write those of fields that are named; others are new arrays.

    Raises:
        DataError: a file was cut.
    """
    read = _read(fields, files, rows, out) if files and rows.size else {}
    mapped = {name: field for name, field in fields.items() if name not in read}
    taken = {name: _taken(np.asarray(field), rows, out.get(name)) for name, field in mapped.items()}
    _release_pages(mapped)
    return {name: read[name] if name in read else taken[name] for name in fields}


def _taken(
    field: NDArray[np.generic], rows: NDArray[np.integer], out: NDArray[np.generic] | None
) -> NDArray[np.generic]:
    # All rows are legal; to be ready for others, NumPy would copy once more.
    taken: NDArray[np.generic] = np.take(field, rows, axis=0, out=out, mode="clip")
    return taken


def _read(
    fields: Fields, files: Mapping[str, FieldFile], rows: NDArray[np.integer], out: Fields
) -> dict[str, NDArray[np.generic]]:
    """Rows of those fields whose files can be read."""
    distinct, which = np.unique(rows.astype(np.int64), return_inverse=True)
    which, read = which.reshape(rows.shape), {}
    for name, file in files.items():
        field = fields[name]
        row = _bytes_per_row(field)
        runs = Runs.of(distinct, which, near=max(1, _PAGE // row))
        if _is_mapped(field) and runs.counts.mean() * row < _FAULT:
            found = file.read(field, runs)
            if found is not None:
                read[name] = _taken(found, runs.places, out.get(name))
    return read


def _read_from_memory(space: memoryview, file: int, spans: Sequence[tuple[int, int]]) -> int:
    """Fill a space with (start, size) of a file, one after another; returns how many.

    It ends before the first that the system's cache does not hold.
    """
    done = 0
    with suppress(OSError):  # of a file system that cannot tell as well
        for start, size in spans:
            if os.preadv(file, [space[:size]], start, os.RWF_NOWAIT) < size:
                break
            space = space[size:]
            done += 1
    return done


def _release_pages(fields: Fields) -> None:
    """Give what was read of read-only mapped arrays back to the operating system's cache.

    Otherwise a process comes to hold all that it ever read, and its neighbours. The arrays stay as
    they are; where there is no such call nothing is done.
    """
    if sys.platform != "linux":
        return
    for array in fields.values():
        if isinstance(array.base, mmap.mmap) and _is_mapped(array):
            array.base.madvise(mmap.MADV_DONTNEED)


def _is_mapped(field: NDArray[np.generic]) -> bool:
    """Whether it is a whole read-only mapping; a copy of one, or a part, is not."""
    mapped = isinstance(field, np.memmap) and isinstance(field.base, mmap.mmap)
    return mapped and getattr(field, "mode", None) == "r"


def _bytes_per_row(field: NDArray[np.generic]) -> int:
    return field.itemsize * prod(field.shape[1:])


_FORMAT = "fedpriv user store"
_VERSION = 1

Columns: TypeAlias = tuple[
    Mapping[str, NDArray[np.generic]], NDArray[np.int64], Sequence[str] | IdArray | None
]
"""Fields, offsets and user ids: the arguments of a UserStore."""


def write_store(folder: Path, parts: Iterable[Columns]) -> None:
    """Write parts, one after another, beside the final place, flush to disk, then rename.

    Of the fields, one part is in memory at a time.

    Args:
        folder: final place; its parents are made.
        parts: users of each part with their rows, as of a UserStore.

    Raises:
        DataError: `folder` exists, there is no part, fields differ among parts, or an id occurs
            twice or in some parts alone.
    """
    if folder.exists():
        raise DataError(f"{folder} exists; a saved store is never overwritten")
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.partial")
    partial.mkdir(parents=True)
    try:
        description = {"format": _FORMAT, "version": _VERSION} | _write_parts(partial, parts)
        with (partial / "store.json").open("x") as file:
            json.dump(description, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _flush_folder(partial)
        partial.rename(folder)
        _flush_folder(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_parts(folder: Path, parts: Iterable[Columns]) -> dict[str, object]:
    """Write all arrays; returns what the description says of them."""
    columns: dict[str, GrowingArray] = {}
    sizes: list[NDArray[np.int64]] = []
    ids: list[IdArray | None] = []
    with ExitStack() as files:
        for fields, offsets, user_ids in parts:
            if not sizes:
                # "x": two fields whose names differ in case only must not share a file.
                columns = {
                    name: files.enter_context(GrowingArray.create(folder / f"field-{name}.npy"))
                    for name in fields
                }
            if fields.keys() != columns.keys():
                raise DataError(f"parts have the fields {list(columns)} and {list(fields)}")
            for name, field in fields.items():
                columns[name].append(field)
            sizes.append(np.diff(offsets))
            ids.append(None if user_ids is None else as_id_array(user_ids))
    if not sizes:
        raise DataError("a user store has no users; it needs at least one")
    _write_array(folder / "offsets.npy", np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes])))
    known = [part for part in ids if part is not None]
    if known:
        _write_array(folder / "user_ids.npy", _together(known, len(ids)))
    return {"fields": list(columns), "user_ids": bool(known)}


def _together(ids: list[IdArray], parts: int) -> IdArray:
    if len(ids) < parts:
        raise DataError(f"{len(ids)} of {parts} parts have user ids; all must have them, or none")
    # 1 and "1" must not meet, and NumPy makes floats of signed and unsigned integers.
    if len({part.dtype.kind for part in ids}) > 1:
        kinds = sorted({str(part.dtype) for part in ids})
        raise DataError(f"parts have user ids of {' and '.join(kinds)}; they must be of one kind")
    together = np.concatenate(ids)
    twice = first_duplicate(together)
    if twice is not None:
        raise DataError(f"user id {twice!r} occurs twice; a user must have one place in the store")
    return together


def read_store(folder: Path, *, mapped: bool) -> Columns:
    """Read what `write_store` wrote; with `mapped`, fields are read-only np.memmap arrays.

    Raises:
        DataError: the folder is absent, not a store, of an unknown version, or damaged.
    """
    description = _read_description(folder)
    names = description.get("fields")
    if not isinstance(names, list) or not all(
        isinstance(n, str) and n.isidentifier() for n in names
    ):
        raise DataError(f"{folder / 'store.json'} names the fields {names!r}; not a list of names")
    fields = {name: _read_array(folder / f"field-{name}.npy", mapped=mapped) for name in names}
    cuts = _read_array(folder / "offsets.npy", mapped=False)
    if cuts.dtype.kind != "i":
        raise DataError(f"{folder / 'offsets.npy'} has dtype {cuts.dtype}; it must be int64")
    offsets: NDArray[np.int64] = cuts.astype(np.int64, copy=False)
    if not description.get("user_ids"):
        return fields, offsets, None
    return fields, offsets, as_id_array(_read_array(folder / "user_ids.npy", mapped=False))


def _read_description(folder: Path) -> dict[str, object]:
    path = folder / "store.json"
    if not path.is_file():
        raise DataError(f"{folder} is not a saved user store: it has no store.json")
    try:
        description = json.loads(path.read_text())
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(description, dict) or description.get("format") != _FORMAT:
        raise DataError(f"{path} does not describe a user store")
    version = description.get("version")
    if version != _VERSION:
        raise DataError(f"{path} has version {version!r}; this program reads version {_VERSION}")
    return description


def _write_array(path: Path, array: NDArray[np.generic]) -> None:
    with GrowingArray.create(path) as file:
        file.append(array)


def _read_array(path: Path, *, mapped: bool) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = np.load(path, mmap_mode="r" if mapped else None)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(f"{path} cannot be read: {reason}") from error
    except (ValueError, EOFError) as error:  # NumPy's text may quote the content
        raise DataError(f"{path} cannot be read as an array of numbers or strings") from error
    return array


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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


@dataclass(frozen=True, eq=False)
class Population:
    """Enrolled users and held-out rows to measure a model on.

    The name goes into the privacy ledger as the identity of the population, and the ledger is
    public. So it is made of what is public: N, the number of users, and settings such as names of
    data sets; never of a total or a digest of users' data, against which a guess could be tested. A
    name that stays while the data change is on the safe side: the ledger's charges then add up over
    both.

    Attributes:
        name: one printable line, such as "digits: 287 users, iid, seed 0".
        users: the enrolled users' data; inputs are the field "x", targets the field "y".
        test: name → array [test rows, ...]: rows that no enrolled user trains on, with the same
            fields, dtypes and row shapes as `users`.

    Raises:
        DataError: the name is empty or not one printable line, there is no test row, or the test
            fields do not fit the users' fields.
    """

    name: str
    users: UserStore
    test: Mapping[str, NDArray[np.generic]] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.name.strip() or not self.name.isprintable():
            raise DataError(f"population name {self.name!r} must be one printable line")
        if self.test.keys() != self.users.fields.keys():
            raise DataError(
                f"test rows have the fields {sorted(self.test)}; "
                f"the users have {sorted(self.users.fields)}"
            )
        for name, array in self.test.items():
            ours = self.users.fields[name]
            # The dtype's type, because strings of different widths do fit.
            if (array.dtype.type, array.shape[1:]) != (ours.dtype.type, ours.shape[1:]):
                raise DataError(
                    f"test field {name!r} is {array.dtype}{list(array.shape[1:])} per row; "
                    f"the users' is {ours.dtype}{list(ours.shape[1:])}"
                )
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
            held_out: inputs and targets of rows that belong to no user, to measure the model on.
            name: public, as it goes into the ledger; the number of users is appended.

        Raises:
            DataError: ids are neither strings nor integers, numbers of rows differ, or the held-out
                rows are of another dtype or shape than the users'.
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
