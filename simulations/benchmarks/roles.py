"""Some of Shakespeare's speaking roles as users of a benchmark, each with limited text."""

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.errors import DataError
from simulations.datasets.shakespeare import load_shakespeare_roles

_LENGTH = 64  # characters of a piece
_MOST = 64  # pieces of a role; the largest would have 1,082
_BESIDE = Path(__file__).parents[3] / "shared" / "data"


def data_folder() -> Path:
    """Return the folder of data sets: FEDPRIV_DATA, or else one next to this project."""
    return Path(os.environ.get("FEDPRIV_DATA") or _BESIDE)


def roles(users: int) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
    """Return characters, the next characters, and offsets of roles spread over the alphabet.

    Roles with too little text for one piece do not count; DataError if too few others are left.
    """
    store = load_shakespeare_roles(data_folder(), _LENGTH, windows_per_role=_MOST).users
    able = np.flatnonzero(store.sizes)
    if len(able) < users:
        raise DataError(f"{len(able)} roles have enough text; {users} are needed")
    chosen = store.subset(able[:: len(able) // users][:users])
    x, y = (torch.from_numpy(chosen.fields[name]) for name in ("x", "y"))
    return x, y, chosen.offsets
