"""The service that nodes call: what happens on the server's event loop."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import cast

import grpc

from fedpriv.errors import WireError
from fedpriv.wire import (
    Status,
    Welcome,
    chunks,
    decode_hello,
    decode_round_id,
    digest_of,
    encode_offer,
    encode_receipt,
    encode_status,
    encode_welcome,
)
from fedpriv.wire import federation_pb2 as pb

from .answers import Answers, Transfers, refused
from .collecting import Collecting
from .enrolment import Enrolment
from .guard import NODE, Context, Identify, RefusedCallError, UnknownPeerError
from .monitoring import Monitor, Refusal
from .roster import Connection, End, Roster
from .turns import Turns

_log = logging.getLogger(__name__)
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
