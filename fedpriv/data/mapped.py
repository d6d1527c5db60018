"""Rows of memory-mapped fields, gathered without mapped pages that stay.

A user's rows lie together, and far from the next user's in a large file. A page fault for them maps
16 pages, which are to be given back; to read them from the file costs a fraction of that.
"""

import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import DataError

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
    for name, field in fields.items():
        if isinstance(field, np.memmap) and _is_mapped(field) and field.flags.c_contiguous:
            if field.nbytes < _LEAST_READ or field.filename is None:
                continue
            found = Path(field.filename).stat()
            path = os.fspath(field.filename)
            files[name] = FieldFile(path, field.offset, found.st_dev, found.st_ino)
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
    for field in fields.values():
        if isinstance(field.base, mmap.mmap) and _is_mapped(field):
            field.base.madvise(mmap.MADV_DONTNEED)


def _is_mapped(field: NDArray[np.generic]) -> bool:
    """Whether it is a whole read-only mapping; a copy of one, or a part, is not."""
    mapped = isinstance(field, np.memmap) and isinstance(field.base, mmap.mmap)
    return mapped and getattr(field, "mode", None) == "r"


def _bytes_per_row(field: NDArray[np.generic]) -> int:
    return field.itemsize * prod(field.shape[1:])
