"""What the users of a chunk learnt, before anybody clips it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedpriv.engine.matmul import product
from fedpriv.engine.task import TorchTensors


@dataclass(frozen=True)
class OuterProducts:
    """A matrix of each user, Σ_r left_r right_rᵀ, held as its factors until it is asked for.

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
        left, right = self.left[lanes].transpose(1, 2), self.right[lanes]
        return left * right if self.left.shape[1] == 1 else product(left, right)

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
