"""Users of two kinds: some send digits of 8×8 pixels, others of 28×28, to one linear model.

A row holds the 64 pixels of one scanner and then the 784 of the other, with zeros for the scanner
that its user does not have. So a user changes only the weights of its own scanner.
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
    """Return users of DIGITS, followed by the writers of MNIST.

    Pixels are scaled as usual: DIGITS to [0, 1], MNIST to mean 0 and variance 1. Both have the same
    number of held-out rows: all of DIGITS, and the first of MNIST.
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
    """Return softmax regression with a block of weights for each scanner, starting at zero."""
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
        """Return the sum of both blocks' scores, one of which is zero."""
        small, large = x[:, :_SMALL], x[:, _SMALL:]
        scores: torch.Tensor = self.small(small) + self.large(large)
        return scores


def _joined(small: _Fields, large: _Fields) -> dict[str, NDArray[np.generic]]:
    """Return rows of the small, then of the large scanner, each with zeros for the other."""
    first, second = (np.reshape(f["x"], (len(f["y"]), -1)) for f in (small, large))
    x = np.zeros((len(first) + len(second), _SMALL + _LARGE), np.float32)
    x[: len(first), :_SMALL] = first
    x[len(first) :, _SMALL:] = second
    return {"x": x, "y": np.concatenate([small["y"], large["y"]])}
