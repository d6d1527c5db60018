"""Updates of canaries, clipped and added up by the same code as those of users."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedpriv.audit.canaries import Canaries, Directions, Positions, audited_groups
from fedpriv.privacy.clipping_torch import BatchedTensor, integer_sum
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest, Transport

LONGER = 10.0  # length of a canary's update in clipping norms
_NODE = "/canaries"  # names of nodes have no slash, so no node has this name


@dataclass(frozen=True, eq=False)
class CanaryTransport(Transport):
    """Adds the canaries to another transport, as users at the server."""

    transport: Transport  # of the users
    canaries: Canaries
    first: int  # position of the first canary's first place
    places: int = 1  # of each canary: k if the examples of users are drawn
    on_drawn: Callable[[Positions], object] = lambda _: None  # called with a round's drawn canaries

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sums of the users, and then that of the canaries."""
        are_canaries = request.users >= self.first
        drawn = (request.users[are_canaries] - self.first) // self.places
        self.on_drawn(drawn)
        yield from self.transport.collect(replace(request, users=request.users[~are_canaries]))
        yield canary_sum(self.canaries, request, drawn)

    def prepare(self, request: RoundRequest) -> None:
        """Prepare the users' transport; canaries need no preparation."""
        self.transport.prepare(request)

    def release_resources(self) -> None:
        """Release the resources of the users' transport."""
        self.transport.release_resources()


def canary_sum(canaries: Canaries, request: RoundRequest, drawn: Positions) -> PartialSum:
    """Return the sum of the updates of included canaries among those that were drawn.

    A canary is a user of full weight who sends nothing but its update, so metrics and counts of
    users do not change.
    """
    clipping = request.clipping
    senders = drawn[canaries.included[drawn]]
    signs = canaries.signs(request.round, request.attempt)[senders]
    updates: dict[str, BatchedTensor] = {
        name: torch.zeros(()).expand(len(senders), *shape)
        for name, shape in zip(clipping.layout.names, clipping.layout.shapes, strict=True)
    }
    for group in audited_groups(clipping):
        dimension, start = group.dimension(clipping.layout), 0
        directions = canaries.directions(group, dimension, request.round, request.attempt)
        for tensor, scale in zip(group.tensors, group.scales, strict=True):
            size = clipping.layout.sizes[tensor]
            length = LONGER * group.clipping_norm * scale
            span, shape = slice(start, start + size), updates[tensor].shape
            updates[tensor] = _Moves(directions, senders, signs * length, span, shape)
            start += size
    weights = np.full(len(senders), clipping.weight_cap)
    if not len(senders):
        return PartialSum(_NODE, 0, np.zeros(clipping.layout.dimension, np.int64), 0)
    total = integer_sum(updates, clipping, weights).numpy()
    if clipping.indicator is not None:
        total[clipping.layout.slices[clipping.indicator.tensor]] = 0
    return PartialSum(_NODE, len(senders), total, int(weights.sum()))


@dataclass(frozen=True)
class _Moves:
    """A tensor of the updates of some canaries, computed when it is indexed."""

    directions: Directions
    canaries: Positions
    lengths: FloatVector  # signed lengths of the whole vectors of the group
    span: slice  # the tensor's part of these vectors
    shape: torch.Size  # [c, …]

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def __len__(self) -> int:
        return len(self.canaries)

    def __getitem__(self, part: slice, /) -> torch.Tensor:
        moves = self.directions.rows(self.canaries[part], self.span)
        moves *= self.lengths[part, np.newaxis].astype(np.float32)
        return torch.from_numpy(moves).view(len(moves), *self.shape[1:])
