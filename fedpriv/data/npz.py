"""Arrays from .npz files of others."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import DataError


def read_npz(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read all arrays of a file into memory, by name; nothing is unpickled.

    Raises:
        DataError: it cannot be read, or holds something else than arrays whose first axis is the
            rows; the message says nothing of the content.
    """
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file.items())
    # NumPy and zipfile raise half a dozen kinds of errors; a text of theirs may quote the content.
    except Exception as error:
        raise DataError(
            f"{path} cannot be read as an .npz file of numbers or strings ({type(error).__name__})"
        ) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{name!r} in {path} is no array whose first axis is the rows")
    return arrays
