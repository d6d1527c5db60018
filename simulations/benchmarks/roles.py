"""Shakespeare's speaking roles as users: what each says, cut into pieces of equal length."""

import gzip
import json
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.errors import DataError

FILE = "speeches.jsonl.gz"
ALPHABET = 128  # ASCII
_LENGTH = 64  # characters of a piece
_MOST = 64  # pieces of a role; the largest would have 952
_BESIDE = Path(__file__).parents[3] / "shared" / "data"


def find_speeches() -> Path:
    """The file, in the folder that FEDPRIV_DATA names or in `shakespeare` inside it.

    Raises:
        DataError: it is not there.
    """
    named = Path(os.environ.get("FEDPRIV_DATA") or _BESIDE)
    for place in (named / FILE, named / "shakespeare" / FILE):
        if place.is_file():
            return place
    raise DataError(
        f"{FILE} is absent from FEDPRIV_DATA and from shakespeare in it; one JSON object per "
        "speech, with user and text"
    )


def roles(users: int) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
    """Characters, the characters that follow them, and offsets of roles spread over the alphabet.

    Args:
        users: how many roles; those that say too little for one piece do not count.

    Raises:
        DataError: the file is absent or holds too few roles.
    """
    said: dict[str, list[str]] = {}
    with gzip.open(find_speeches(), "rt", encoding="ascii") as file:
        for line in file:
            speech = json.loads(line)
            said.setdefault(speech["user"], []).append(speech["text"])
    texts = ["\n".join(said[name]) for name in sorted(said)]
    texts = [text for text in texts if len(text) > _LENGTH]
    if len(texts) < users:
        raise DataError(f"{FILE} holds {len(texts)} roles that say enough; {users} are needed")
    chosen = texts[:: len(texts) // users][:users]
    pieces = [min(_MOST, (len(text) - 1) // _LENGTH) for text in chosen]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(pieces)])
    codes = [torch.tensor(list(text.encode("ascii"))) for text in chosen]
    x, y = (
        torch.cat([c[s : s + n * _LENGTH] for c, n in zip(codes, pieces, strict=True)])
        for s in (0, 1)
    )
    return x.view(-1, _LENGTH), y.view(-1, _LENGTH), offsets
