"""Shakespeare's speaking roles as users: the text of each, cut into windows."""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from fedpriv.data.columns import Array
from fedpriv.data.population import Population, UserStore, check_count, offsets_of
from fedpriv.errors import DataError
from simulations.datasets.files import find_file

FILE, SPEECHES = "tff_shakespeare.jsonl.gz", "speeches.jsonl.gz"
CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""The 96 characters by code: line feed and printable ASCII, no matter which occur in the texts."""

_SOURCE = (
    "it has one JSON object per role, with user, train and test (lists of texts), as in "
    "https://www.tensorflow.org/federated/api_docs/python/tff/simulation/datasets/shakespeare"
)
_SPEECHES_SOURCE = "it has one JSON object per speech, with user, play and text"
_UNKNOWN, _MARKS = 1, 4  # the code of all unknown words, and the first code of a known word
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
    """Load the texts of 715 roles of Shakespeare's plays, to predict the next character.

    Users and held-out texts are those of TensorFlow Federated's data set (first made by Caldas et
    al. 2018, "LEAF", arXiv:1812.01097). The texts of a role are joined, one per line, and cut into
    adjoining windows of `length` characters; the target of each character is the one that follows
    it, across windows too. The remainder at the end is dropped, so a role with too little text for
    one window is a user without rows. A role trains on its first `windows_per_role` windows.

    The held-out texts are by the same roles: figures on them concern other texts of enrolled users,
    which the guarantee does not cover. x and y are int64 [rows, length], indices into `CHARACTERS`.
    The folder (None: FEDPRIV_DATA), or its subfolder `shakespeare`, holds the file.
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


def load_speakers(
    words: int,
    length: int = 20,
    windows_per_role: int = 64,
    held_out_plays: int = 7,
    seed: int = 0,
    folder: str | Path | None = None,
) -> Population:
    """Load the texts of the roles of Shakespeare's plays, to predict the next word.

    Users are the roles of all plays except `held_out_plays`. The commonest words and marks of the
    held-out plays are the vocabulary of `words` codes, including four reserved ones; every other
    word has code 1. Windows are those of `load_shakespeare_roles`, but of words. About a thousand
    held-out windows are tested, spread over their plays. The folder (None: FEDPRIV_DATA), or its
    subfolder `shakespeare`, holds speeches.jsonl.gz.
    """
    public, roles = said_in((held_out_plays,), seed, folder)
    words_of = re.compile(r"[a-z']+|[.,;:!?]").findall
    common = Counter(word for text in public.values() for word in words_of(text.lower()))
    codes = {w: n for n, (w, _) in enumerate(common.most_common(words - _MARKS), _MARKS)}

    def windows(text: str) -> NDArray[np.int64]:
        numbers = [codes.get(word, _UNKNOWN) for word in words_of(text.lower())]
        return _adjoining(np.array(numbers), length)

    windows_of = {role: windows(text)[:windows_per_role] for role, text in roles.items()}
    test = np.concatenate([*map(windows, public.values())])
    enrolled = {role: rows for role, rows in windows_of.items() if len(rows)}
    users = UserStore(
        _fields(np.concatenate([*enrolled.values()])),
        offsets_of([*map(len, enrolled.values())]),
        [*enrolled],
    )
    name = f"speakers: {users.population} roles, plays of seed {seed}"
    return Population(name, users, _fields(test[:: max(1, len(test) // 1_000)]))


def said_in(
    plays: Sequence[int], seed: int = 0, folder: str | Path | None = None
) -> list[dict[str, str]]:
    """Return the text of each role in groups of plays of these sizes, and in the other plays.

    The plays of each group are drawn at random.
    """
    path = find_file(folder, "Shakespeare", (SPEECHES,), "shakespeare", _SPEECHES_SOURCE)
    texts, play_of = dict[str, list[str]](), dict[str, str]()
    with gzip.open(path, "rt", encoding="ascii") as file:
        for line in file:
            speech = json.loads(line)
            texts.setdefault(speech["user"], []).append(speech["text"])
            play_of[speech["user"]] = speech["play"]
    order = np.random.default_rng(seed).permutation(sorted({*play_of.values()})).tolist()
    ends = [*np.cumsum([0, *plays]).tolist(), None]
    return [
        {
            role: "\n".join(texts_of_role)
            for role, texts_of_role in texts.items()
            if play_of[role] in order[a:b]
        }
        for a, b in pairwise(ends)
    ]


def _fields(windows: NDArray[np.int64]) -> dict[str, Array]:
    """Return inputs and targets, [rows, length] each, of windows [rows, length + 1]."""
    return {"x": windows[:, :-1].copy(), "y": windows[:, 1:].copy()}


def _windows(texts: Sequence[str], length: int, path: Path) -> NDArray[np.int64]:
    """Return codes of windows with the character that follows each: [windows, length + 1]."""
    codes = _CODES[np.frombuffer("\n".join(texts).encode(), np.uint8)]
    if codes.size and codes.max() == _NO_CODE:
        raise DataError(f"{path} holds a character that is neither a line feed nor printable ASCII")
    return _adjoining(codes, length)


def _adjoining(codes: NDArray[np.integer], length: int) -> NDArray[np.int64]:
    """Return windows with the code that follows each: [windows, length + 1]."""
    if len(codes) <= length:  # a length may exceed any memory
        return np.empty((0, length + 1), np.int64)
    starts = np.arange((len(codes) - 1) // length) * length
    windows: NDArray[np.int64] = codes.astype(np.int64)[
        starts[:, np.newaxis] + np.arange(length + 1)
    ]
    return windows


def _read(path: Path) -> list[_Role]:
    role, roles = TypeAdapter(_Role), list[_Role]()
    try:
        with gzip.open(path) as file:
            roles.extend(role.validate_json(line, strict=True) for line in file)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        # The text of an error may quote the content.
        condition = "a JSON object with user, a text, and train and test, lists of texts"
        raise DataError(
            f"{path} cannot be read; line {len(roles) + 1} must be {condition}"
        ) from error
    if not roles:
        raise DataError(f"{path} holds no role; it must hold at least one")
    return roles
