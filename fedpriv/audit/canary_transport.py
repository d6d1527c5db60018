"""What canaries send, clipped and added up by the code that does so for users."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedpriv.audit.canaries import Canaries, Directions, Positions, audited_groups
from fedpriv.privacy.clipping_torch import BatchedTensor, integer_sum
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest, Transport

LONGER = 10.0  # than clipping allows, what a canary sends
_NODE = "/canaries"  # no name of a node has a slash, so none can be taken for it


@dataclass(frozen=True, eq=False)
class CanaryTransport(Transport):
    """Another transport, with the canaries beside its users, as users of the server's own."""

    transport: Transport  # of the users
    canaries: Canaries
    first: int  # the position of the first canary's first place
    places: int = 1  # of each canary: k where the examples of users are drawn
    on_drawn: Callable[[Positions], object] = lambda _: None  # called with those of a round

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sums of the users, and then that of the canaries."""
        beyond = request.users >= self.first
        drawn = (request.users[beyond] - self.first) // self.places
        self.on_drawn(drawn)
        yield from self.transport.collect(replace(request, users=request.users[~beyond]))
        yield canary_sum(self.canaries, request, drawn)

    def prepare(self, request: RoundRequest) -> None:
        """Prepare the users' transport; canaries are always ready."""
        self.transport.prepare(request)

    def release_resources(self) -> None:
        """Let go of what the users' transport holds."""
        self.transport.release_resources()


def canary_sum(canaries: Canaries, request: RoundRequest, drawn: Positions) -> PartialSum:
    """What the canaries that were drawn, and are there, add to the sum of a round.

    Each is a user of full weight who sends nothing but its update: metrics and counts of users
    stay as they are.
    """
    clipping = request.clipping
    there = drawn[canaries.included[drawn]]
    signs = canaries.signs(request.round, request.attempt)[there]
    updates: dict[str, BatchedTensor] = {
        name: torch.zeros(()).expand(len(there), *shape)
        for name, shape in zip(clipping.layout.names, clipping.layout.shapes, strict=True)
    }
    for group in audited_groups(clipping):
        dimension, start = group.dimension(clipping.layout), 0
        directions = canaries.directions(group, dimension, request.round, request.attempt)
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            size = clipping.layout.sizes[tensor]
            length = LONGER * group.clipping_norm * scale
            span, shape = slice(start, start + size), updates[tensor].shape
            updates[tensor] = _Moves(directions, there, signs * length, span, shape)
            start += size
    weights = np.full(len(there), clipping.weight_cap)
    if not len(there):
        return PartialSum(_NODE, 0, np.zeros(clipping.layout.dimension, np.int64), 0)
    total = integer_sum(updates, clipping, weights).numpy()
    if clipping.indicator is not None:
        total[clipping.layout.slices[clipping.indicator.tensor]] = 0
    return PartialSum(_NODE, len(there), total, int(weights.sum()))


@dataclass(frozen=True)
class _Moves:
    """A tensor of the updates of some canaries, made when it is asked for."""

    directions: Directions
    canaries: Positions
    lengths: FloatVector  # with the sign, of the whole vector of the group
    span: slice  # of the tensor, in that vector
    shape: torch.Size  # [c, …]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __len__(self) -> int:
        return len(self.canaries)

    def __getitem__(self, some: slice, /) -> torch.Tensor:
        moves = self.directions.rows(self.canaries[some], self.span)
        moves *= self.lengths[some, np.newaxis].astype(np.float32)
        return torch.from_numpy(moves).view(len(moves), *self.shape[1:])
