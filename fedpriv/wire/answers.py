"""A node's answer to an offer: the sum of its users' contributions, or that it declines."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.federated.transport import PartialSum
from fedpriv.privacy.contribution import MOST_WEIGHT, Clipping
from fedpriv.privacy.layout import Layout, Tensors
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.limits import MAX_NAME, MAX_USERS, SERVER_RECEIVES_BYTES, at_most, refusing
from fedpriv.wire.rounds import RoundId, decode_round_id, encode_round_id
from fedpriv.wire.tensors import (
    INT32,
    INT64,
    Manifest,
    Number,
    encode_manifest,
    expect_manifest,
)

SUM = "sum"
"""Name of the one vector that users' contributions add up to."""
_USERS_OF_32_BITS = 63  # each adds less than 2^25 to a component
LONGEST_ANSWER = SERVER_RECEIVES_BYTES - 16  # leaves room for the tag and length of an UploadPart


@dataclass(frozen=True)
class SummedUpdates:
    """The header of a `PartialSum`, whose total follows.

    Attributes:
        users: how many contributions it holds, at most 2^20; secret.
        weight: sum of their weights, in units of 1/c; secret.
        tensors: what follows: one vector of integers named `SUM`.

    Raises:
        InvalidValueError: a number is out of range.
    """

    users: int
    weight: int
    tensors: Manifest

    def __post_init__(self) -> None:
        if not 0 <= self.users <= MAX_USERS:
            raise InvalidValueError(f"the number of users is not from 0 to {MAX_USERS}")
        if not 0 <= self.weight <= self.users * MOST_WEIGHT:
            raise InvalidValueError(
                "the weight of users is negative, or too large for their number"
            )

    @classmethod
    def of(cls, partial: PartialSum) -> "SummedUpdates":
        """The header of a partial sum; its node is not in it, since a certificate says which."""
        layout = Layout((SUM,), (partial.total.shape,))
        return cls(partial.users, partial.weight, Manifest(layout, _dtype_of(partial)))

    def partial_sum(self, node: str, total: npt.NDArray[np.generic]) -> PartialSum:
        """The partial sum of a node.

        Args:
            node: whom the certificate of the connection names.
            total: [D], as a `Receiver` of `tensors` returns it by the name `SUM`.

        Raises:
            InvalidValueError: the total has another shape or dtype.
        """
        if (total.shape,) != self.tensors.layout.shapes or total.dtype != self.tensors.dtype:
            raise InvalidValueError(
                f"total is {total.dtype}{list(total.shape)}; it must be {self.tensors.dtype}"
                f"{list(self.tensors.layout.shapes[0])}"
            )
        return PartialSum(node, self.users, total.astype(np.int64, copy=False), self.weight)


def tensors_of(partial: PartialSum) -> Tensors:
    """What is sent of a partial sum: its total, in 32 bits where so few users cannot pass them."""
    return {SUM: partial.total.astype(_dtype_of(partial), copy=False)}


def _dtype_of(partial: PartialSum) -> Number:
    return INT32 if partial.users <= _USERS_OF_32_BITS else INT64


@dataclass(frozen=True)
class Decline:
    """The node does not take part; its users count as zero.

    Attributes:
        reason: for the operator's log, at most 1024 characters; must say nothing of users.

    Raises:
        InvalidValueError: the reason is too long.
    """

    reason: str

    def __post_init__(self) -> None:
        if len(self.reason) > MAX_NAME:
            raise InvalidValueError(
                f"a reason has {len(self.reason)} characters; it may have at most {MAX_NAME}"
            )


@dataclass(frozen=True)
class Answer:
    """What a node says to an offer.

    Attributes:
        id: which round it was offered.
        content: what it sends.
    """

    id: RoundId
    content: SummedUpdates | Decline


def layout_of_sums(clipping: Clipping) -> Layout:
    """Layout that the sums of a round have."""
    return Layout((SUM,), ((clipping.layout.dimension,),))


def encode_answer(answer: Answer) -> pb.Answer:
    """The message of an answer.

    Raises:
        WireError: it passes a limit.
    """
    message = pb.Answer(id=encode_round_id(answer.id))
    with refusing("an answer"):
        match answer.content:
            case SummedUpdates(users, weight, tensors):
                manifest = encode_manifest(tensors)
                total = pb.PartialSum(users=users, weight=weight, tensors=manifest)
                message.sum.CopyFrom(total)
            case Decline(reason):
                message.decline.CopyFrom(pb.Decline(reason=reason))
    at_most("bytes in an answer", message.ByteSize(), LONGEST_ANSWER)
    return message


def decode_answer(message: pb.Answer, expected: Layout) -> Answer:
    """The answer in a message; total.

    Args:
        message: from a node.
        expected: layout of a sum of the round that is being collected, from `layout_of_sums`.

    Raises:
        WireError: it is not legal, or its tensors are not those that were asked for.
    """
    round_id = decode_round_id(message.id)
    with refusing("an answer"):
        match message.WhichOneof("what"):
            case "sum":
                total = message.sum
                manifest = expect_manifest(total.tensors, expected, (INT32, INT64))
                return Answer(round_id, SummedUpdates(total.users, total.weight, manifest))
            case "decline":
                return Answer(round_id, Decline(message.decline.reason))
            case _:
                raise WireError("an answer is empty; it must be a sum or a decline")
