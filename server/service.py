"""Turns: how many transfers there are at once, whatever the number of nodes.

Taking what nodes answer: the only place where their sums exist at the server.

The service that nodes call: what happens on the server's event loop.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import ParamSpec, Self, TypeVar, cast

import grpc

from fedpriv.errors import WireError
from fedpriv.privacy.round import PartialSum
from fedpriv.server.authentication import (
    NODE,
    Context,
    Identify,
    RefusedCallError,
    UnknownPeerError,
)
from fedpriv.server.collection import Collecting, Connection, End, Roster, partial_sum_of
from fedpriv.server.enrolment import Enrolment
from fedpriv.server.metrics import Monitor, Refusal
from fedpriv.wire import (
    CHUNK_BYTES,
    Decline,
    Receipt,
    Receiver,
    Status,
    SummedUpdates,
    Welcome,
    chunks,
    decode_answer,
    decode_hello,
    decode_round_id,
    digest_of,
    encode_offer,
    encode_receipt,
    encode_status,
    encode_welcome,
)
from fedpriv.wire import federation_pb2 as pb


class Newest:
    """Lets one task of each node go on, the newest. Used on the server's event loop alone."""

    def __init__(self) -> None:
        self._limits: dict[str, asyncio.Timeout] = {}

    @asynccontextmanager
    async def only(self, node: str, until: float | None = None) -> AsyncIterator[None]:
        """End an older task of the node, and go on until a newer one comes.

        A node that lost its connection and came back must not wait for what is left of the old one.

        Args:
            node: whose task it is.
            until: when it ends at the latest, as `time.monotonic` says.

        Raises:
            TimeoutError: a newer one came, the time is up, or `end_all` was called.
        """
        async with asyncio.timeout_at(until) as limit:
            if node in self._limits:
                _end(self._limits[node])
            self._limits[node] = limit
            try:
                yield
            finally:
                if self._limits.get(node) is limit:
                    del self._limits[node]

    def excuse(self, node: str) -> None:
        """Let the task of a node, which is the caller, go on whatever happens."""
        self._limits.pop(node).reschedule(None)

    def end_all(self) -> None:
        """End all tasks but those that are excused."""
        for limit in self._limits.values():
            _end(limit)


class Turns:
    """Bounds how many tasks do something at once, each for a bounded time, one per node.

    Used on the server's event loop alone.

    Args:
        places: how many at once, at least 1.
        seconds: the longest that one may hold its place.
    """

    def __init__(self, places: int, seconds: float) -> None:
        self._places, self._seconds = asyncio.Semaphore(places), seconds
        self._newest = Newest()

    @asynccontextmanager
    async def turn(self, node: str, until: float | None = None) -> AsyncIterator[None]:
        """Wait for a place and hold it; a turn that the node has already ends.

        Args and errors as for `Newest.only`, and:

        Raises:
            TimeoutError: it was held for too long.
        """
        async with (
            self._newest.only(node, until),
            self._places,
            asyncio.timeout(self._seconds),
        ):
            yield

    def end_all(self) -> None:
        """End all turns, and all that are waited for."""
        self._newest.end_all()


def _end(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(0.0)  # a time that has passed: at once


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


_DOWNLOADS = 16  # at once; each holds a chunk or two
_LEDGERS = 2
_TOO_LONG = "it took too long, the node began another, or the round is over"
_RECHECK_SECONDS = 5.0  # after which an idle connection of a node struck off has ended


class Service:
    """Handlers of the five methods; `NODE` says who calls.

    Guarantees:
        * What a node sends cannot raise here, nor move anything but its own part of the sum.
        * A node whose certificate is struck off is offered nothing and counts for nothing from
          then on, whatever it has open.
        * A node that does not read what it is sent, or does not send, ends no later than
          `Transfers.seconds` after its turn came, and with the round.

    Args:
        enrolment: which users there are, and where.
        welcome_of: what to tell a node that connects.
        ledger: lines of the public ledger as they are now; called in a thread of its own.
        identify: names the node behind a call, as of now.
        status: at first.
        transfers: bounds.
        monitor: is told what happens.
    """

    def __init__(
        self,
        enrolment: Enrolment,
        welcome_of: Callable[[str], Welcome],
        ledger: Callable[[], bytes],
        identify: Identify,
        status: Status,
        transfers: Transfers,
        monitor: Monitor,
    ) -> None:
        self._enrolment, self._welcome_of, self._ledger = enrolment, welcome_of, ledger
        self._identify, self._monitor, self.status = identify, monitor, status
        self.collecting: Collecting | None = None
        self.roster = Roster(self._changed)
        self.arrivals = asyncio.Event()
        self._answers = Answers(enrolment, identify, transfers, monitor)
        self._seconds = transfers.seconds
        self._downloads = Turns(_DOWNLOADS, transfers.seconds)
        self._ledgers = Turns(_LEDGERS, transfers.seconds)

    def _changed(self) -> None:
        self._monitor.connected(self.roster.connected)
        self.arrivals.set()
        if self.collecting is not None:
            self.collecting.changed.set()

    def publish(self, status: Status) -> None:
        """Tell everybody who asks, from now on, where the run stands."""
        self.status = status
        self._monitor.round(status.round)
        self._monitor.state(status.state)
        self._monitor.epsilon(status.epsilon)

    def forget_round(self) -> None:
        """Let go of the round that was collected, and of all transfers that belong to it."""
        self.collecting = None
        self._downloads.end_all()
        self._answers.end_all()

    async def connect(self, request: pb.Hello, context: Context) -> None:
        """Welcome a node, then offer it rounds."""
        node = NODE.get()
        self._check_hello(node, request)
        connection = self.roster.connect(node)
        _log.info("connected: %s", node)
        try:
            welcome = encode_welcome(self._welcome_of(node))
            await self._say(pb.FromServer(welcome=welcome), context)
            if self.collecting is not None and (offer := self.collecting.offer_to(node)):
                connection.offer(offer)
            await self._tell(connection, context)
        finally:
            self.roster.disconnect(node, connection)
            _log.info("disconnected: %s", node)

    def _check_hello(self, node: str, request: pb.Hello) -> None:
        try:
            hello = decode_hello(request)
        except WireError as error:
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        if hello.node != node:
            sentence = "the node that says hello is not the one of the certificate"
            raise RefusedCallError(grpc.StatusCode.PERMISSION_DENIED, sentence)
        if hello.users_sha256 != digest_of(self._enrolment.users[node]):
            self._monitor.refused(Refusal.ENROLMENT)
            _log.warning("refused: %s holds other users than are enrolled at it", node)
            sentence = "the users that the node holds are not those that are enrolled at it"
            raise RefusedCallError(grpc.StatusCode.FAILED_PRECONDITION, sentence)

    async def _tell(self, connection: Connection, context: Context) -> None:
        """Pass offers on until the connection is over."""
        while True:
            match await connection.next(_RECHECK_SECONDS):
                case None:
                    self._still_known(context)
                case End.RUN_OVER:
                    return
                case End.NEWER as why:
                    raise RefusedCallError(grpc.StatusCode.ABORTED, str(why))
                case End() as why:
                    raise RefusedCallError(grpc.StatusCode.UNAVAILABLE, str(why))
                case offer:
                    self._still_known(context)
                    await self._say(pb.FromServer(offer=encode_offer(offer)), context)

    async def _say(self, message: pb.FromServer, context: Context) -> None:
        """Send a message, or end the call if the node does not read it."""
        try:
            async with asyncio.timeout(self._seconds):
                await context.write(message)
        except TimeoutError:
            raise RefusedCallError(grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_LONG) from None

    def _still_known(self, context: Context) -> None:
        """End the call if its node may no longer take part."""
        try:
            self._identify(context)
        except UnknownPeerError:
            self._monitor.refused(Refusal.IDENTITY)
            raise

    async def download(self, request: pb.RoundId, context: Context) -> None:
        """Send the model of the round to a node that was asked."""
        node, collecting = NODE.get(), self.collecting
        try:
            asked = decode_round_id(request)
        except WireError as error:
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        if collecting is None or asked != collecting.asked.id or node not in collecting.waiting:
            sentence = "the node is not asked in this round, or the round is over"
            raise RefusedCallError(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        try:
            async with self._downloads.turn(node, collecting.deadline):
                for chunk in collecting.model_chunks():
                    await context.write(chunk)
                    self._monitor.sent(len(chunk))
        except TimeoutError:
            raise RefusedCallError(grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_LONG) from None

    async def upload(self, parts: AsyncIterator[pb.UploadPart], context: Context) -> pb.Receipt:
        """Take a node's answer to the round that is collected."""
        collecting = self.collecting
        if collecting is None:
            return encode_receipt(refused("no round is collected"))
        # Neither read to its end nor closed, it would be kept until Python's collector comes by;
        # and with it its stream, of which a connection may have few.
        async with aclosing(cast(AsyncGenerator[pb.UploadPart, None], aiter(parts))) as received:
            receipt = await self._answers.take(NODE.get(), received, collecting, context)
        return encode_receipt(receipt)

    async def fetch_ledger(self, request: pb.LedgerRequest, context: Context) -> None:
        """Send the public ledger."""
        del request
        try:
            async with self._ledgers.turn(NODE.get()):
                lines = await asyncio.to_thread(self._ledger)
                await context.write(pb.LedgerPart(size=len(lines)))
                for chunk in chunks([lines]):
                    await context.write(pb.LedgerPart(chunk=chunk))
        except TimeoutError:
            raise RefusedCallError(grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_LONG) from None

    async def get_status(self, request: pb.StatusRequest, context: Context) -> pb.Status:
        """Say where the run stands."""
        del request, context
        return encode_status(replace(self.status, nodes_connected=self.roster.connected))
