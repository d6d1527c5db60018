"""Arrays from .npz files."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import DataError


def read_npz(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read all arrays of a file by name; nothing is unpickled, and errors quote no content."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file.items())
    # NumPy and zipfile raise errors of many classes, and their texts may quote the content.
    except Exception as error:
        raise DataError(f"{path} cannot be read as an .npz file of numbers or strings") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{name!r} in {path} is not an array whose first axis is the rows")
    return arrays
