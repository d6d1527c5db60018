"""The sum of what the users of a chunk contribute."""

from dataclasses import dataclass

import torch

from fedpriv.engine.diagnostics import ChunkDiagnostics
from fedpriv.federated.transport import PartialSum


@dataclass(frozen=True)
class ChunkSum:
    """A partial sum that the device may still be working on; attributes as of `PartialSum`.

    `diagnostics` holds what an observer is told of the users, if there is one.
    """

    node: str
    users: int
    total: torch.Tensor
    weight: float
    diagnostics: tuple[ChunkDiagnostics, ...]

    @property
    def partial(self) -> PartialSum:
        """The partial sum, once the device is ready."""
        return PartialSum(self.node, self.users, self.total.cpu().numpy(), self.weight)
