"""Files of data: where those of well-known data sets lie, and arrays from .npz files."""

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import DataError

_ENVIRONMENT = "FEDPRIV_DATA"


def find_folder(folder: str | Path | None, title: str, file: str, source: str) -> Path:
    """Folder with a data set's file: the one given or else FEDPRIV_DATA's, or `title` inside it."""
    named = os.environ.get(_ENVIRONMENT) if folder is None else folder
    if not isinstance(named, (str, Path, type(None))):
        raise DataError(f"folder is {named!r}; it must be a path")
    if not named:
        how = f"give folder= or set {_ENVIRONMENT} to the folder that holds {file}"
        raise DataError(f"no folder for {title}: {how}; {source}")
    places = (Path(named), Path(named) / title.lower())
    for place in places:
        if (place / file).is_file():
            return place
    raise DataError(f"{file} is absent from {' and '.join(map(str, places))}; {source}")


def read_npz(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read all arrays of a file into memory, by name; nothing is unpickled or quoted in errors."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file.items())
    # NumPy and zipfile raise many kinds of errors, and their text may quote the content.
    except Exception as error:
        raise DataError(f"{path} cannot be read as an .npz file of numbers or strings") from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or array.ndim == 0:
            raise DataError(f"{name!r} in {path} is not an array whose first axis is the rows")
    return arrays
