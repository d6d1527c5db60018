"""The location of data sets' files, and tables of numbers in .csv files."""

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import DataError

_ENVIRONMENT = "FEDPRIV_DATA"


def find_file(
    folder: str | Path | None, title: str, files: Sequence[str], inside: str, source: str
) -> Path:
    """Return the first of some files that exists in a folder, or in its subfolder `inside`.

    The folder is `folder`, or else the one in FEDPRIV_DATA.
    """
    path = os.environ.get(_ENVIRONMENT) if folder is None else folder
    if not isinstance(path, (str, Path, type(None))):
        raise DataError(f"folder is {path!r}; it must be a path")
    any_of = " or ".join(files)
    if not path:
        advice = f"give folder= or set {_ENVIRONMENT} to the folder that holds {any_of}"
        raise DataError(f"no folder for {title}: {advice}; {source}")
    places = (Path(path), Path(path) / inside)
    for place in places:
        for file in files:
            if (place / file).is_file():
                return place / file
    raise DataError(f"{any_of} is absent from {' and '.join(map(str, places))}; {source}")


def read_csv(path: Path, columns: Sequence[str]) -> dict[str, NDArray[np.float64]]:
    """Return columns [rows] of finite numbers by name, from a .csv(.gz) file with a header."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            header = [name.strip('"') for name in next(lines, "").strip().split(",")]
            if unnamed := [name for name in columns if name not in header]:
                missing = f"its first line does not name the column {unnamed[0]!r}"
                raise DataError(f"{path} cannot be read: {missing}")
            indices = [header.index(name) for name in columns]
            text = [line for line in lines if line.strip()]
            rows = np.loadtxt(text, delimiter=",", usecols=indices, ndmin=2) if text else None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        # The text of an error may quote the content.
        raise DataError(f"{path} cannot be read as a table of numbers") from error
    if rows is None:
        raise DataError(f"{path} has no rows")
    if not np.isfinite(rows).all():
        raise DataError(f"{path} holds a number that is not finite")
    return dict(zip(columns, np.ascontiguousarray(rows.T), strict=True))
