"""Shakespeare's speaking roles as users: what each says, cut into windows of characters."""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from fedpriv.data.columns import Array
from fedpriv.data.population import Population, UserStore, check_count, offsets_of
from fedpriv.errors import DataError
from simulations.datasets.files import find_file

FILE = "tff_shakespeare.jsonl.gz"
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""The 96 characters by code: line feed and printable ASCII, whichever occur in users' texts."""

_SOURCE = (
    "it has one JSON object per role, with user, train and test (lists of texts), as in "
    "https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/shakespeare"
)
_NO_CODE = 255
_CODES = np.full(256, _NO_CODE, np.uint8)
_CODES[list(CHARACTERS.encode("ascii"))] = range(len(CHARACTERS))


@dataclass(frozen=True)
class _Role:
    user: str
    train: list[str]
    test: list[str]


def load_shakespeare_roles(
    folder: str | Path | None = None, length: int = 40, windows_per_role: int | None = None
) -> Population:
    """Load what 715 roles of Shakespeare's plays say, to predict the next character.

    Users and held-out texts are those of TensorFlow Federated's data set (first made by Caldas et
    al. 2018, "LEAF", arXiv:1812.01097). The texts of a role are joined, one per line, and cut into
    adjoining windows of `length` characters; the target of each character is the one that follows
    it, across windows too. What is left at the end is dropped, so a role that says too little for
    one window is a user without rows. A role trains on its first `windows_per_role` windows.

    The held-out texts are by the same roles: what is measured on them concerns other texts of
    enrolled users, which the guarantee does not cover. x and y are int64 [rows, length], indices
    into `CHARACTERS`. The folder (None: FEDPRIV_DATA), or one `shakespeare` in it, holds the file.
    """
    check_count("length", length)
    if windows_per_role is not None:
        check_count("windows_per_role", windows_per_role)
    path = find_file(folder, "Shakespeare", (FILE,), "shakespeare", _SOURCE)
    roles = _read(path)
    train = [_windows(role.train, length, path)[:windows_per_role] for role in roles]
    test = np.concatenate([_windows(role.test, length, path) for role in roles])
    rows = np.concatenate(train)
    for part, windows in (("train", rows), ("test", test)):
        if not len(windows):
            raise DataError(f"{path} has no {part} text of more than {length} characters")
    offsets = offsets_of([len(windows) for windows in train])
    users = UserStore(_fields(rows), offsets, [role.user for role in roles])
    return Population(f"shakespeare-roles: {users.population} roles", users, _fields(test))


def _fields(windows: NDArray[np.int64]) -> dict[str, Array]:
    """Inputs and targets, [rows, length] each, of windows [rows, length + 1]."""
    return {"x": windows[:, :-1].copy(), "y": windows[:, 1:].copy()}


def _windows(texts: Sequence[str], length: int, path: Path) -> NDArray[np.int64]:
    """Codes of windows with the character that follows each: [windows, length + 1]."""
    codes = _CODES[np.frombuffer("\n".join(texts).encode(), np.uint8)]
    if codes.size and codes.max() == _NO_CODE:
        raise DataError(f"{path} holds a character that is neither a line feed nor printable ASCII")
    if len(codes) <= length:  # which may be longer than any memory
        return np.empty((0, length + 1), np.int64)
    starts = np.arange((len(codes) - 1) // length) * length
    windows: NDArray[np.uint8] = codes[starts[:, np.newaxis] + np.arange(length + 1)]
    return windows.astype(np.int64)


def _read(path: Path) -> list[_Role]:
    role, roles = TypeAdapter(_Role), list[_Role]()
    try:
        with gzip.open(path) as file:
            roles.extend(role.validate_json(line, strict=True) for line in file)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        # The text of an error may quote the content.
        legal = "a JSON object with user, a text, and train and test, lists of texts"
        raise DataError(f"{path} cannot be read; line {len(roles) + 1} must be {legal}") from error
    if not roles:
        raise DataError(f"{path} holds no role; it must hold at least one")
    return roles
