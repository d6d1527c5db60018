"""Taking what nodes answer: the only place where their sums exist at the server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import ParamSpec, Self, TypeVar

from fedpriv.errors import WireError
from fedpriv.federated.transport import PartialSum
from fedpriv.wire import (
    CHUNK_BYTES,
    Decline,
    Receipt,
    Receiver,
    SummedUpdates,
    decode_answer,
)
from fedpriv.wire import federation_pb2 as pb

from .asked import partial_sum_of
from .collecting import Collecting
from .enrolment import Enrolment
from .guard import Context, Identify, UnknownPeerError
from .monitoring import Monitor, Refusal
from .turns import Newest

_log = logging.getLogger(__name__)
_LONGEST_REASON = 400  # characters
_BYTES_PER_COMPONENT = 12  # of a sum: 32 bits as it came, and 64 as it is added
P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Transfers:
    """Bounds of what is under way at once.

    Attributes:
        uploads: sums in memory at once.
        seconds: the longest that one transfer may take.
    """

    uploads: int
    seconds: float

    @classmethod
    def within(cls, memory: int, dimension: int, seconds: float) -> Self:
        """As many uploads as fit, at least one.

        Args:
            memory: bytes for sums in transfer.
            dimension: D of a contribution.
            seconds: the longest that one transfer may take.
        """
        one = _BYTES_PER_COMPONENT * dimension + CHUNK_BYTES
        return cls(max(1, memory // one), seconds)


class Answers:
    """Takes answers, at most so many at once.

    Guarantees:
        * A node's sum exists in memory from its first chunk until it is in the total, and at most
          `Transfers.uploads` of them do; nothing of them is kept or logged.
        * An answer that is malformed, or whose node is no longer known, counts as zero, and is
          not waited for any more; one whose connection broke may be sent again.
        * A node has one answer under way, the newest, and none after the end of its round.
        * A node of several users is named in the log, a node of one user never is.

    Args:
        enrolment: where users are.
        identify: names the node behind a call, as of now.
        transfers: bounds.
        monitor: is told of bytes and refusals.
    """

    def __init__(
        self, enrolment: Enrolment, identify: Identify, transfers: Transfers, monitor: Monitor
    ) -> None:
        self._enrolment, self._identify, self._monitor = enrolment, identify, monitor
        self._places, self._seconds = asyncio.Semaphore(transfers.uploads), transfers.seconds
        self._newest = Newest()

    def end_all(self) -> None:
        """Let go of all that is under way and was not counted."""
        self._newest.end_all()

    async def take(
        self,
        node: str,
        parts: AsyncIterator[pb.UploadPart],
        collecting: Collecting,
        context: Context,
    ) -> Receipt:
        """Read an answer and count it once.

        Raises:
            UnknownPeerError: the node's certificate was struck off, or expired, meanwhile.
        """
        try:
            receipt = await self._taken(node, parts, collecting, context)
        except TimeoutError:
            receipt = refused("it took too long, the node sent another, or the round is over")
        except WireError as error:
            # A stream whose connection broke looks like one that ended; then this fails.
            await context.send_initial_metadata(())
            await collecting.settle(node, None)
            receipt = refused(str(error))
        except UnknownPeerError:
            await collecting.settle(node, None)
            self._monitor.refused(Refusal.IDENTITY)
            raise
        if not receipt.accepted:
            self._monitor.refused(Refusal.ANSWER)
            _log.warning(
                "an answer of %s is refused: %s",
                self._enrolment.hosting.called(node),
                receipt.reason,
            )
        return receipt

    async def _taken(
        self,
        node: str,
        parts: AsyncIterator[pb.UploadPart],
        collecting: Collecting,
        context: Context,
    ) -> Receipt:
        async with self._newest.only(node, collecting.deadline):
            header = await anext(aiter(parts), pb.UploadPart())
            answer = decode_answer(header.answer, collecting.asked.expected)
            if reason := collecting.refusal(node, answer):
                return refused(reason)
            content = answer.content
            if isinstance(content, Decline):
                _log.info(
                    "%s declines: %s",
                    self._enrolment.hosting.called(node),
                    _one_line(content.reason),
                )
                return _receipt(counted=await collecting.settle(node, None))
            async with self._places:
                async with asyncio.timeout(self._seconds):
                    partial = await self._received(node, content, parts)
                self._newest.excuse(node)  # what is left to do takes no time of the node
                self._identify(context)
                return _receipt(counted=await collecting.settle(node, partial))

    async def _received(
        self,
        node: str,
        content: SummedUpdates,
        parts: AsyncIterator[pb.UploadPart],
    ) -> PartialSum:
        """What the chunks of an answer hold."""
        receiver = Receiver(content.tensors)
        async for part in parts:
            receiver.add(part.chunk)  # to wake a thread would cost as much
        self._monitor.received(content.tensors.size)
        return await _in_thread(_finished, node, content, receiver)


async def _in_thread(function: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
    """What a function returns; a caller that is cancelled waits too, as it holds memory till then.

    Whatever it raises after that is nobody's.
    """
    work = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.gather(work, return_exceptions=True)
        raise


def _finished(node: str, content: SummedUpdates, receiver: Receiver) -> PartialSum:
    return partial_sum_of(node, content, receiver.finish())


def _one_line(text: str) -> str:
    """Text of a node as a log may hold it."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def refused(reason: str) -> Receipt:
    """The receipt of an answer that does not count."""
    return Receipt(accepted=False, reason=reason[:_LONGEST_REASON])


def _receipt(*, counted: bool) -> Receipt:
    return Receipt(accepted=True) if counted else refused("the round is over")
