"""Shakespeare's speaking roles as users of a benchmark: some of them, none with very much."""

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
    """Where data sets are: FEDPRIV_DATA, or else beside this project."""
    return Path(os.environ.get("FEDPRIV_DATA") or _BESIDE)


def roles(users: int) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
    """Characters, the characters that follow them, and offsets of roles spread over the alphabet.

    Roles that say too little for one piece do not count; DataError if there are too few others.
    """
    store = load_shakespeare_roles(data_folder(), _LENGTH, windows_per_role=_MOST).users
    able = np.flatnonzero(store.sizes)
    if len(able) < users:
        raise DataError(f"{len(able)} roles say enough; {users} are needed")
    chosen = store.subset(able[:: len(able) // users][:users])
    x, y = (torch.from_numpy(chosen.fields[name]) for name in ("x", "y"))
    return x, y, chosen.offsets
