"""A transport without training, for tests of whatever stands above the seam."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fedpriv.federated.transport import PartialSum, RoundRequest, Transport
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.privacy.query import GaussianSumQuery


@dataclass(frozen=True)
class FakeTransport(Transport):
    """Each user's update is what a function says; each user is a node.

    Attributes:
        update_of: from the request and a user's position to the user's raw update. If it raises,
            the user failed.
    """

    update_of: Callable[[RoundRequest, int], Tensors]

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield one clipped contribution per user."""
        layout = Layout.of(request.parameters)
        query = GaussianSumQuery(layout, request.groups, (0.0,) * len(request.groups))
        for user in request.users.tolist():
            try:
                update = self.update_of(request, user)
            except Exception:  # a failing user counts as zero, whatever the failure
                continue
            yield PartialSum(f"user {user}", 1, query.contribution(update))
