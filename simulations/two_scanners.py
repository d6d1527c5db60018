"""Users of two kinds: some send digits of 8×8 pixels, others of 28×28, to one linear model.

A row holds the 64 pixels of the one scanner and then the 784 of the other, zeros for the one that
its user does not have. So a user moves the weights of its own scanner only, and the update of the
others is zero.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedpriv.data import Population, UserStore, load_digits
from simulations.datasets.mnist import load_mnist_writers

_SMALL, _LARGE = 64, 784
_Fields = Mapping[str, NDArray[np.generic]]


def people(small_users: int = 287, folder: str | None = None) -> Population:
    """DIGITS among some users, and after them the writers of MNIST.

    Pixels are scaled as is usual for each: DIGITS to [0, 1], MNIST to mean 0 and variance 1. As
    many rows of the one are held out as of the other: all that DIGITS has, and MNIST's first.
    x is float32 [rows, 848] and y int64 [rows] in 0..9. MNIST's files are in the folder (None:
    FEDPRIV_DATA).
    """
    small, large = load_digits(small_users), load_mnist_writers(folder)
    held_out = len(small.test["y"])
    return Population(
        name=f"two scanners; {small.name}; {large.name}",
        users=UserStore(
            _joined(small.users.fields, large.users.fields),
            np.concatenate([small.users.offsets, small.users.rows + large.users.offsets[1:]]),
        ),
        test=_joined(small.test, {name: rows[:held_out] for name, rows in large.test.items()}),
    )


def model() -> nn.Module:
    """Softmax regression with a block of weights for each scanner, starting at zero."""
    return TwoScanners()


class TwoScanners(nn.Module):
    """Scores [B, 10] of rows [B, 848] as `people` makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(_SMALL, 10, bias=False)
        self.large = nn.Linear(_LARGE, 10, bias=False)
        for layer in (self.small, self.large):
            nn.init.zeros_(layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of what both blocks say; of one of them that is zero."""
        small, large = x[:, :_SMALL], x[:, _SMALL:]
        scores: torch.Tensor = self.small(small) + self.large(large)
        return scores


def _joined(small: _Fields, large: _Fields) -> dict[str, NDArray[np.generic]]:
    """Rows of the small scanner, then those of the large one, each with zeros for the other."""
    first, second = (np.reshape(f["x"], (len(f["y"]), -1)) for f in (small, large))
    x = np.zeros((len(first) + len(second), _SMALL + _LARGE), np.float32)
    x[: len(first), :_SMALL] = first
    x[len(first) :, _SMALL:] = second
    return {"x": x, "y": np.concatenate([small["y"], large["y"]])}
