"""An .npy file to which rows are appended, for arrays that are larger than memory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedpriv.errors import DataError


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
