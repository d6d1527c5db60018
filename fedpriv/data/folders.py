"""Where files of well-known data sets lie that cannot come with the package."""

import os
from pathlib import Path

from fedpriv.errors import DataError

_ENVIRONMENT = "FEDPRIV_DATA"


def find_folder(folder: str | Path | None, title: str, file: str, source: str) -> Path:
    """Folder that holds a file: the one given or FEDPRIV_DATA's, or one inside it.

    Args:
        folder: the folder; None means the environment variable FEDPRIV_DATA.
        title: of the data set, for messages; in lower case, the folder inside.
        file: name of the file.
        source: a phrase that says where the file can be had.

    Raises:
        DataError: no folder is named, or the file is in neither place; the sentence says which
            file, where it was looked for, and where it can be had.
    """
    named = os.environ.get(_ENVIRONMENT) if folder is None else folder
    if not isinstance(named, (str, Path, type(None))):
        raise DataError(f"folder is {named!r}; it must be a path")
    if not named:
        raise DataError(
            f"no folder for {title}: give folder= or set {_ENVIRONMENT} to the folder that holds "
            f"{file}; {source}"
        )
    places = (Path(named), Path(named) / title.lower())
    for place in places:
        if (place / file).is_file():
            return place
    raise DataError(f"{file} is absent from {' and '.join(map(str, places))}; {source}")
