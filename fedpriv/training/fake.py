"""A transport without training, for tests of what is built on transports."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fedpriv.privacy.layout import Tensors
from fedpriv.privacy.round import PartialSum, RoundRequest, Transport


@dataclass(frozen=True)
class FakeTransport(Transport):
    """Each user's update is what a function says; each user is a node.

    Attributes:
        update_of: from the request and a user's position to the user's raw update, and its metrics
            minus their centres. If it raises, the user failed.
        weight_of: the weight of each user, in units of 1/c.
    """

    update_of: Callable[[RoundRequest, int], Tensors]
    weight_of: Callable[[int], int] = lambda _: 1

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield one clipped contribution per user."""
        for user in request.users.tolist():
            try:
                update = self.update_of(request, user)
            except Exception:  # a failing user counts as zero, whatever the failure
                continue
            weight = self.weight_of(user)
            contribution = request.clipping.contribution(update, weight)
            yield PartialSum(f"user {user}", 1, contribution, weight)
