"""What one attempt at a round asks of the nodes, and which of their answers can count."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self, cast

import numpy as np
import numpy.typing as npt

from fedpriv.federated.transport import PartialSum, RoundRequest
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.layout import FloatVector, Tensors
from fedpriv.wire import Answer, Expected, RawUpdate, RoundId, SummedUpdates

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Hosting:
    """Which node hosts which users.

    Attributes:
        nodes: names.
        numbers: [N] for each position of the population the number of its node in `nodes`.
        alone: nodes with one user, who send its update for the server to clip.
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
        clipping: how contributions are clipped.
        expected: layouts that answers must have.
        drawn: by node, the users that were drawn there; secret.
        alone: as in `Hosting`.
    """

    id: RoundId
    clipping: Clipping
    expected: Expected
    drawn: Mapping[str, Positions]
    alone: frozenset[str]

    @classmethod
    def of(cls, request: RoundRequest, hosting: Hosting) -> Self:
        """What a request asks of the nodes that host its users, under a new nonce."""
        return cls(
            RoundId(request.run, request.round, request.attempt, secrets.randbits(64)),
            request.clipping,
            Expected.of(request.clipping),
            hosting.drawn(request.users),
            hosting.alone,
        )

    def misfit(self, node: str, answer: Answer) -> str | None:
        """Why an answer of a node cannot count, in one sentence, or None."""
        if answer.id != self.id:
            return "the answer is to another round or attempt than the one that is collected"
        if node not in self.drawn:
            return "no answer of this node is waited for"
        match answer.content:
            case RawUpdate() if node not in self.alone:
                return "a node of several users must send the sum of their contributions"
            case SummedUpdates() if node in self.alone:
                return "a node of one user must send its update, which the server clips"
            case SummedUpdates(users, _, _) if users > self.drawn[node].size:
                return "the sum holds more users than were drawn at the node"
            case _:
                return None


def partial_sum_of(
    node: str, content: RawUpdate | SummedUpdates, tensors: Tensors, clipping: Clipping
) -> PartialSum:
    """What a node sent, clipped if it is one user's.

    Args:
        node: who sent it.
        content: the header.
        tensors: those that it declares.
        clipping: of the round.
    """
    if isinstance(content, RawUpdate):
        contribution = clipping.contribution(tensors, content.weight)
        return PartialSum(node, 1, contribution, content.weight)
    (total,) = tensors.values()
    return content.partial_sum(node, cast(FloatVector, total))
