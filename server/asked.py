"""What one attempt at a round asks of the nodes, and which of their answers can count."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from fedpriv.federated.transport import PartialSum, RoundRequest
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.wire import Answer, RoundId, SummedUpdates, layout_of_sums

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Hosting:
    """Which node hosts which users.

    Attributes:
        nodes: names.
        numbers: [N] for each position of the population the number of its node in `nodes`.
        alone: nodes with one user, whom no log may name.
    """

    nodes: Sequence[str]
    numbers: npt.NDArray[np.int64]
    alone: frozenset[str]

    def drawn(self, users: Positions) -> dict[str, Positions]:
        """Drawn users by node: positions, ascending; only nodes that have some.

        Args:
            users: positions of the drawn, ascending.
        """
        numbers = self.numbers[users]
        order = np.argsort(numbers, kind="stable")
        found, starts = np.unique(numbers[order], return_index=True)
        parts = np.split(users[order], starts[1:])
        return {self.nodes[n]: part for n, part in zip(found.tolist(), parts, strict=False)}

    def called(self, node: str) -> str:
        """How a log names a node, without naming a user."""
        return "a node of one user" if node in self.alone else node


@dataclass(frozen=True, eq=False)
class Asked:
    """What is asked, and of whom.

    Attributes:
        id: which attempt at which round.
        expected: layout that sums must have.
        drawn: by node, the users that were drawn there; secret.
    """

    id: RoundId
    expected: Layout
    drawn: Mapping[str, Positions]

    @classmethod
    def of(cls, request: RoundRequest, hosting: Hosting) -> Self:
        """What a request asks of the nodes that host its users, under a new nonce."""
        return cls(
            RoundId(request.run, request.round, request.attempt, secrets.randbits(64)),
            layout_of_sums(request.clipping),
            hosting.drawn(request.users),
        )

    def misfit(self, node: str, answer: Answer) -> str | None:
        """Why an answer of a node cannot count, in one sentence, or None."""
        if answer.id != self.id:
            return "the answer is to another round or attempt than the one that is collected"
        if node not in self.drawn:
            return "no answer of this node is waited for"
        content = answer.content
        if isinstance(content, SummedUpdates) and content.users > self.drawn[node].size:
            return "the sum holds more users than were drawn at the node"
        return None


def partial_sum_of(node: str, content: SummedUpdates, tensors: Tensors) -> PartialSum:
    """What a node sent.

    Args:
        node: who sent it.
        content: the header.
        tensors: those that it declares.
    """
    (total,) = tensors.values()
    return content.partial_sum(node, total)
