"""What the users of a chunk learnt, before anybody clips it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch

from fedpriv.engine.matmul import product
from fedpriv.engine.task import TorchTensors

# Numbers of whole updates that exist at a time. What has left a processor's caches before it is
# clipped costs more than the arithmetic; a GPU needs more to be busy.
_NUMBERS = 2**19
_NUMBERS_CUDA = 2**24


@dataclass(frozen=True)
class OuterProducts:
    """A matrix of each user, Σ_r left_r right_rᵀ, held as its factors.

    Attributes:
        left: [C, R, out].
        right: [C, R, in].
    """

    left: torch.Tensor
    right: torch.Tensor

    def __len__(self) -> int:
        return len(self.left)

    def __getitem__(self, lanes: slice) -> torch.Tensor:
        """The matrices of some users: [c, out, in]."""
        return product(self.left[lanes].transpose(1, 2), self.right[lanes])

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self.left.device

    @property
    def shape(self) -> torch.Size:
        """[C, out, in]."""
        return torch.Size((len(self.left), self.left.shape[2], self.right.shape[2]))


Updates = Mapping[str, torch.Tensor | OuterProducts]
"""Name of tensor → [C, *shape], float32, whole or in factors."""


def whole(updates: Updates, lanes: slice = slice(None)) -> TorchTensors:
    """Tensors of some of the users of a chunk: [c, *shape]."""
    return {name: update[lanes] for name, update in updates.items()}


def few_lanes(updates: Updates) -> Iterator[slice]:
    """A few users at a time, at least one, so that their whole tensors stay in a cache."""
    first = next(iter(updates.values()))
    users, most = len(first), _NUMBERS_CUDA if first.device.type == "cuda" else _NUMBERS
    numbers = sum(prod(update.shape[1:]) for update in updates.values())
    few = max(1, most // max(1, numbers))
    for start in range(0, users, few):
        yield slice(start, min(start + few, users))
