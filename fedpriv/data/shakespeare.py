"""Shakespeare's speaking roles as users: what each says, cut into windows of characters."""

import gzip
import json
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.data.files import find_folder
from fedpriv.data.population import Population, UserStore, check_count, offsets_of
from fedpriv.errors import DataError

FILE = "tff_shakespeare.jsonl.gz"
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""The 96 characters by code: line feed and printable ASCII.

The list is fixed; one made of the characters that occur would reveal something of users' texts.
"""

_SOURCE = (
    "it has one JSON object per role, with user, train and test (lists of texts), as in "
    "https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/shakespeare"
)
_NO_CODE = 255
_CODES = np.full(256, _NO_CODE, np.uint8)
_CODES[list(CHARACTERS.encode("ascii"))] = range(len(CHARACTERS))

Said = tuple[str, list[str], list[str]]


def load_shakespeare_roles(
    folder: str | Path | None = None, length: int = 40, windows_per_role: int | None = None
) -> Population:
    """Load what 715 roles of Shakespeare's plays say, to predict the next character.

    Users and held-out texts are those of TensorFlow Federated's data set (first made by Caldas et
    al. 2018, "LEAF", arXiv:1812.01097). The texts of a role are joined, one per line, and cut into
    adjoining windows of `length` characters; the target of each character is the one that follows
    it, across windows too. What is left at the end is dropped, so no row has padding. A role that
    says too little for one window is a user without rows. A role trains on its first
    `windows_per_role` windows at most; the largest has 1,731 of 40, the median one 23.

    The held-out texts are by the same roles: what is measured on them concerns other texts of
    enrolled users, which the guarantee does not cover.

    The folder, or one `shakespeare` in it, holds tff_shakespeare.jsonl.gz; None means the
    environment variable FEDPRIV_DATA. x and y are int64 [rows, length], indices into `CHARACTERS`;
    user ids are the file's names of roles. The name does not depend on `length`, as the users are
    the same.
    """
    check_count("length", length)
    if windows_per_role is not None:
        check_count("windows_per_role", windows_per_role)
    path = find_folder(folder, "Shakespeare", FILE, _SOURCE) / FILE
    roles = _read(path)
    train = [_windows(texts, length, path)[:windows_per_role] for _, texts, _ in roles]
    test = np.concatenate([_windows(texts, length, path) for _, _, texts in roles])
    rows = np.concatenate(train)
    for part, windows in (("train", rows), ("test", test)):
        if not len(windows):
            raise DataError(f"{path} has no {part} text of more than {length} characters")
    offsets = offsets_of([len(windows) for windows in train])
    users = UserStore(_fields(rows), offsets, [name for name, _, _ in roles])
    return Population(f"shakespeare-roles: {users.population} roles", users, _fields(test))


def _fields(windows: NDArray[np.int64]) -> dict[str, NDArray[np.generic]]:
    """Inputs and targets, [rows, length] each, of windows [rows, length + 1]."""
    x, y = windows[:, :-1], windows[:, 1:]
    return {"x": np.ascontiguousarray(x), "y": np.ascontiguousarray(y)}


def _windows(texts: Sequence[str], length: int, path: Path) -> NDArray[np.int64]:
    """Codes of windows with the character that follows each: [windows, length + 1]."""
    text = "\n".join(texts).encode("utf-8", "surrogatepass")
    codes = _CODES[np.frombuffer(text, np.uint8)]
    if codes.size and codes.max() == _NO_CODE:
        raise DataError(f"{path} holds a character that is neither a line feed nor printable ASCII")
    starts = np.arange(max(0, len(codes) - 1) // length) * length
    windows: NDArray[np.uint8] = codes[starts[:, np.newaxis] + np.arange(length + 1)]
    return windows.astype(np.int64)


def _read(path: Path) -> list[Said]:
    """Name, texts and held-out texts of each role, in the order of the file."""
    roles = []
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                roles.append(_role(json.loads(line), path, number))
    except (OSError, EOFError, zlib.error, ValueError) as error:
        # The text of an error may quote the content.
        raise DataError(f"{path} cannot be read as JSON lines ({type(error).__name__})") from error
    if not roles:
        raise DataError(f"{path} holds no role; it must hold at least one")
    return roles


def _role(said: object, path: Path, number: int) -> Said:
    match said:
        case {"user": str(name), "train": [*train], "test": [*test]} if all(
            isinstance(text, str) for text in (*train, *test)
        ):
            return name, train, test
    raise DataError(
        f"line {number} of {path} is not a role; it must have user, a text, and train and test, "
        "lists of texts"
    )
