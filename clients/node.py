"""A node's whole part in a round: one partial sum over those of its users that were drawn."""

from dataclasses import dataclass

from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError
from fedpriv.federated.aggregate import merged
from fedpriv.federated.transport import PartialSum, RoundRequest


@dataclass(frozen=True)
class Node:
    """A process that hosts some of the enrolled users.

    The node is trusted with its users' data and clips each of their updates by itself; whoever
    receives the partial sum can only check its norm against the number of users in it.

    Attributes:
        name: under which the server knows it.
        transport: trains the node's users; `hosted` says who of the population they are.

    Raises:
        InvalidValueError: the transport has an observer.
    """

    name: str
    transport: InProcessTransport

    def __post_init__(self) -> None:
        if self.transport.observer is not None:
            raise InvalidValueError(
                f"node {self.name!r} has a transport with an observer; only a simulation may have "
                "one, as what it sees is not private"
            )

    def answer(self, request: RoundRequest) -> PartialSum:
        """Train the node's users of the cohort and sum their clipped contributions.

        Users of the request that the node does not host are left to other nodes.
        """
        dimension = request.clipping.layout.dimension
        return merged(self.name, self.transport.collect(request), dimension)
