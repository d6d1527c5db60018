"""The service that nodes call, and its gRPC server, which runs in an event loop of its own."""

import asyncio
import logging
import re
import resource
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from fedpriv import wire
from fedpriv.errors import InvalidValueError, WireError
from fedpriv.ledger import Head
from fedpriv.report.records import Trouble
from fedpriv.secure_sums.protocol import PUBLIC_BYTES
from fedpriv.server import gateway
from fedpriv.server.collection import Ballot, Collection, Connection, Connections, End, Exchange
from fedpriv.server.gateway import NODE, Authentication, Context, RefusedCallError
from fedpriv.wire import NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES, parse
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.naming import SERVICE, Address, binding_of, certificate_of

_log = logging.getLogger(__name__)
_LONGEST_REASON = 400  # characters
_OVER = "the round is over"
_NUMBER = re.compile(r"[\d.]+")  # may differ between the same objection to two rounds
_SMALL = 8192  # bytes of a message without tensors
_STEP = 2**17  # bytes of a step: messages to the neighbours of a node
_BYTES_PER_COMPONENT = 12  # of a sum: 32 bits as received, and 64 as added
_DOWNLOADS = 16  # at once; each holds a chunk or two in memory
_MODELS = 2  # at once; each holds a model in memory
# To fetch the ledger; also the model, to send the sum, and for the steps of a secure sum.
_CALLS_TO_VOTE, _CALLS_TO_ANSWER = 1, 8
_SHARE_OF_A_PART = 0.25  # of a transfer's time, so that a node that reads nothing frees its place
_RECHECK_SECONDS = 5.0  # the connection of a node whose certificate is removed ends within this
_GRACE_SECONDS = 5.0
_WATCH_SECONDS = 2.0
OPTIONS = (
    ("grpc.max_receive_message_length", SERVER_RECEIVES_BYTES),
    ("grpc.max_send_message_length", NODE_RECEIVES_BYTES),
    *wire.UNCOMPRESSED,
    ("grpc.max_metadata_size", 8192),
    ("grpc.max_concurrent_streams", 8),  # of one connection
    # How much a node may send before it is read; without a bound, memory grows with nodes.
    ("grpc.http2.lookahead_bytes", 2**16),
    ("grpc.http2.bdp_probe", 0),
    # A peer that vanished silently is noticed after the first of these and the minute that gRPC
    # waits for the answer to a ping; on a slow uplink, that answer is queued behind an update.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Nodes may ping too, but not too often.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.max_connection_idle_ms", 60_000),  # of a connection without calls
)
_MOST_CONNECTIONS = 8192  # of any peers
_FILES_OF_A_CONNECTION = 3  # of the front on both sides, and of gRPC
_OTHER_FILES = 256  # reserved for the run's own files and everything else
Kind = TypeVar("Kind", bound=Message)
Stream: TypeAlias = AsyncGenerator[Kind, None]
Result = TypeVar("Result")


def most_connections() -> int:
    """Return how many connections a port may have so that this process can still open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, min(_MOST_CONNECTIONS, (files - _OTHER_FILES) // _FILES_OF_A_CONNECTION))


def check_connections(nodes: int) -> None:
    """Raise InvalidValueError if this many nodes could not be connected at once."""
    if nodes > (limit := most_connections()):
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise InvalidValueError(
            f"{nodes} nodes are enrolled; the server takes {limit} connections where a process may "
            f"have {files} open files (ulimit -n, or LimitNOFILE= of systemd)"
        )


class Transfers:
    """Bounds the number of simultaneous transfers, and the duration of each; one per node.

    Used in the event loop only. The duration of a transfer does not include its wait for a place.
    """

    def __init__(self, places: int, seconds: float) -> None:
        self.places, self._seconds = asyncio.Semaphore(places), seconds
        self._limits: dict[str, asyncio.Timeout] = {}

    @asynccontextmanager
    async def newest(
        self, node: str, until: float | None = None
    ) -> AsyncGenerator[asyncio.Timeout, None]:
        """End an older transfer of the node, and continue until a newer one begins.

        So a node that reconnects does not wait for the transfer of its lost connection. Yields the
        argument of `excuse`. TimeoutError: a newer transfer began, `time.monotonic` has reached
        `until`, or `end_all` was called.
        """
        async with asyncio.timeout_at(until) as limit:
            if node in self._limits:
                _end(self._limits[node])
            self._limits[node] = limit
            try:
                yield limit
            finally:
                if self._limits.get(node) is limit:
                    del self._limits[node]

    @asynccontextmanager
    async def turn(self, node: str, until: float | None = None) -> AsyncGenerator[None, None]:
        """Like `newest`, but also wait for a place, and keep it for at most `seconds`."""
        async with self.newest(node, until), self.places, asyncio.timeout(self._seconds):
            yield

    def excuse(self, node: str, limit: asyncio.Timeout) -> None:
        """Let the calling transfer of a node finish: nothing ends it any more."""
        limit.reschedule(None)
        if self._limits.get(node) is limit:  # a newer one may have begun just now
            del self._limits[node]

    def end_all(self) -> None:
        """End all transfers that are not excused, including those that wait for a place."""
        for limit in self._limits.values():
            _end(limit)


def _end(limit: asyncio.Timeout) -> None:
    if not limit.expired():
        limit.reschedule(0.0)  # a time in the past


@dataclass(frozen=True)
class TransferLimits:
    """Bounds on transfers."""

    uploads: int  # sums in memory at once
    seconds: float  # how long one transfer may take

    @classmethod
    def within(cls, memory: int, dimension: int, seconds: float) -> Self:
        """Allow as many uploads of `dimension` components as fit into `memory` bytes, or one."""
        upload_bytes = _BYTES_PER_COMPONENT * dimension + wire.CHUNK_BYTES
        return cls(max(1, memory // upload_bytes), seconds)


@dataclass(eq=False)
class Service:
    """Handlers of the methods; `NODE` is the calling node.

    The constructor raises WireError for a welcome that cannot be sent. If a handler raises
    WireError or TimeoutError, its call ends (see `Authentication`).

    Guarantees:
        * A node's messages can end only its own calls, and change only its own part of the sum.
        * Once the certificate of a node is removed from the enrolment, the node receives no offers
          and its answers are refused, even in calls that are already open.
        * The transfer of a node that stops reading or sending ends when the round does, and at most
          `limits.seconds` after it got a place. If the node does not read one part of a transfer,
          it ends after a quarter of that time.
    """

    authentication: Authentication
    welcome_of: Callable[[str], wire.Welcome]
    status: wire.Status
    limits: TransferLimits
    # `Ledger.since` of the public ledger; called, and its result iterated, in threads.
    ledger: Callable[[Head | None], tuple[int, Iterator[str]] | None] = lambda _: None
    collection: Collection | None = None
    # Returns the file of the newest model, None before the first release; called in a thread.
    model: Callable[[], bytes | None] = lambda: None
    ballot: Ballot | None = None
    exchange: Exchange | None = None  # of the secure sum that is collected or opened
    published: wire.Status | None = None  # the status, once ε is known

    def __post_init__(self) -> None:
        self.enrolment, self.sites = self.authentication.enrolment, self.authentication.sites
        self.connections, self.arrivals = Connections(self._changed), asyncio.Event()
        seconds = self.limits.seconds
        self._uploads = Transfers(self.limits.uploads, seconds)
        self._downloads = Transfers(_DOWNLOADS, seconds)
        self._ledgers = Transfers(_DOWNLOADS, seconds)
        self._models = Transfers(_MODELS, seconds)
        self._objections: dict[str, str] = {}  # without numbers; empty if the node agreed
        # Computed once, or the event loop would sort and encode all users of a node at each hello.
        self._digests = {n: wire.digest_of(users) for n, users in self.enrolment.users.items()}
        self._welcomes = {
            node: pb.FromServer(welcome=wire.WELCOME.encode(self.welcome_of(node)))
            for node in self._digests
        }

    def _changed(self) -> None:
        self.arrivals.set()
        if self.collection is not None:
            self.collection.changed.set()
        if self.exchange is not None:
            self.exchange.wake()

    def publish(self, **changes: object) -> None:
        """Change the status that `get_status` returns."""
        self.status = self.published = replace(self.status, **changes)  # type: ignore[arg-type]

    def propose(self, ballot: Ballot) -> None:
        """Ask all connected nodes to vote; if the terms are unchanged, only those that objected."""
        if self.ballot is None or self.ballot.terms != ballot.terms:
            self.ballot = ballot
            voters = self.connections.nodes
        else:
            voters = tuple(n for n in self.connections.nodes if self.ballot.agrees(n) is False)
        for node in voters:
            if connection := self.connections.of(node):
                connection.tell(self.ballot)
                self.authentication.rates.grant(node, _CALLS_TO_VOTE)

    def votes(self, *, agrees: bool | None) -> int:
        """Return the number of connected nodes that agree, do not agree, or (None) did not vote."""
        ballot, nodes = self.ballot, self.connections.nodes
        return sum(ballot.agrees(node) is agrees for node in nodes) if ballot else 0

    def open_round(self, collection: Collection, exchange: Exchange | None = None) -> None:
        """Begin to collect a round, and offer it to the connected nodes with drawn users."""
        self.collection, self.exchange, self.ballot = collection, exchange, None
        self.publish(round=collection.offer.id.round, state=wire.RunState.COLLECTING)
        for node in collection.waiting:
            if (connection := self.connections.of(node)) and (offer := collection.offer_to(node)):
                connection.tell(offer)
                self.authentication.rates.grant(node, _CALLS_TO_ANSWER)

    def missed(self, collection: Collection) -> None:
        """Report the nodes that have not answered by the end of a round."""
        for node in collection.waiting:
            connected = self.connections.of(node) is not None
            why = "no answer by the end of the round" if connected else "not connected in the round"
            self.sites.trouble(node, Trouble.LATE, why)

    def close_round(self) -> None:
        """End a round, its transfers and the steps of its secure sum; idempotent."""
        if self.collection is not None:
            self.collection.abandon()
        if self.exchange is not None:
            self.exchange.end()
        self.collection = self.exchange = None
        self._downloads.end_all()
        self._uploads.end_all()
        self.publish(state=wire.RunState.RELEASING)

    async def connect(self, requests: Stream[pb.FromNode], context: Context) -> None:
        """Welcome a node, then exchange proposals, votes and offers until the connection ends."""
        async with aclosing(requests) as messages:
            node = NODE.get()
            async with asyncio.timeout(self.limits.seconds):
                self._check_hello(node, (await anext(messages, pb.FromNode())).hello)
            self.authentication.check(context)  # before this connection replaces another
            connection = self.connections.connect(node)
            certificate = self.authentication.peer_certificate()
            self.sites.came(node, certificate.not_valid_after_utc if certificate else None)
            _log.info("connected: %s", node)
            votes = asyncio.create_task(self._take_votes(node, connection, messages, context))
            try:
                await self._tell(node, connection, votes, context)
            finally:
                votes.cancel()
                await asyncio.gather(votes, return_exceptions=True)
                self.connections.disconnect(node, connection)
                if self.connections.of(node) is None:
                    self.sites.left(node)
                _log.info("disconnected: %s", node)

    async def _tell(
        self, node: str, connection: Connection, votes: asyncio.Task[None], context: Context
    ) -> None:
        async def send(message: pb.FromServer) -> None:
            async with asyncio.timeout(self.limits.seconds):  # in case the node does not read
                await context.write(message)

        await send(self._welcomes[node])
        if self.collection is not None and (offer := self.collection.offer_to(node)):
            connection.tell(offer)
        elif self.ballot is not None:
            self.ballot.forget(node)
            connection.tell(self.ballot)
        while (message := await connection.next(_RECHECK_SECONDS)) is not End.RUN_OVER:
            if isinstance(message, End):
                is_newer, code = message is End.NEWER, grpc.StatusCode
                raise RefusedCallError(code.ABORTED if is_newer else code.UNAVAILABLE, str(message))
            self.authentication.check(context)
            if votes.done():
                votes.result()  # raises if a vote was refused, which ends the connection
            match message:
                case Ballot():
                    connection.votes_due += 1
                    await send(message.message)
                case wire.RoundOffer():
                    await send(pb.FromServer(offer=wire.OFFER.encode(message)))

    async def _take_votes(
        self, node: str, connection: Connection, messages: Stream[pb.FromNode], context: Context
    ) -> None:
        async for message in messages:
            self.authentication.check(context)
            vote = self._checked(node, wire.VOTE.decode(message.vote))
            if not connection.votes_due:
                raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, "a vote on no proposal")
            connection.votes_due -= 1
            if self.ballot is not None:
                self.ballot.count(node, vote)
                self.arrivals.set()
            self._report(node, vote)

    def _checked(self, node: str, vote: wire.Vote) -> wire.Vote:
        """Return a vote, as an objection unless others will take its countersignature."""
        ballot = self.ballot
        if ballot is None or vote.objection or vote.id != ballot.id:
            return vote
        event, signature = ballot.terms.price.event, vote.countersignature
        if event.secure_sum is None and ballot.head is None:
            return replace(vote, countersignature=None)
        binding = binding_of(self.enrolment.population_id, vote.id, event, ballot.head)
        identity = node, PUBLIC_BYTES if event.secure_sum else 0
        certificate = self.authentication.peer_certificate()
        if signature is not None and (signature.node, len(signature.key)) == identity:
            with suppress(InvalidValueError):
                if certificate_of(signature, binding) == certificate:
                    return replace(vote, countersignature=replace(signature, head=ballot.head))
        return replace(vote, objection="the vote is not signed by the node")

    def _report(self, node: str, vote: wire.Vote) -> None:
        """Log each objection once. All nodes vote, so the line may name a node of one user."""
        gist = _NUMBER.sub("", vote.objection)
        if gist and gist != self._objections.get(node):
            self.sites.trouble(node, Trouble.UNWILLING, vote.objection)
        self._objections[node] = gist

    def _check_hello(self, node: str, request: pb.Hello) -> None:
        hello = wire.HELLO.decode(request)
        if hello.node != node:
            sentence = "the node that says hello is not the one of the certificate"
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, sentence)
        if hello.users_sha256 != self._digests[node]:
            sentence = "the node holds other users than are enrolled at it"
            self.sites.trouble(node, Trouble.ENROLMENT, sentence)
            raise RefusedCallError(grpc.StatusCode.FAILED_PRECONDITION, sentence)

    async def download(self, request: pb.RoundId, context: Context) -> None:
        """Send the model of the round to a node whose answer is awaited."""
        node, collection = NODE.get(), self.collection
        id_ = wire.ROUND_ID.decode(request)
        if collection is None or id_ != collection.offer.id or node not in collection.waiting:
            sentence = "the node is not asked in this round, or the round is over"
            raise RefusedCallError(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        async with self._downloads.turn(node, collection.deadline):
            for chunk in collection.model_chunks:
                await self._send(chunk, context)

    async def upload(self, parts: Stream[pb.UploadPart], context: Context) -> pb.Receipt:
        """Receive a node's answer to the present round; return a receipt with the outcome.

        A malformed answer is final: the node's users count as zero. After a transfer that took too
        long, the node may send again until the deadline.
        """
        node, collection = NODE.get(), self.collection
        if collection is None:
            return wire.RECEIPT.encode(wire.Receipt(accepted=False, reason="no round is collected"))
        # Unless it is closed, a stream that is not read to its end lives until garbage collection,
        # and a connection may have only a few streams.
        async with aclosing(parts) as received:
            try:
                refusal = await self._refusal(node, received, collection, context)
            except TimeoutError:
                refusal = "it took too long, the node sent another, or the round is over"
            except WireError as error:
                # A stream whose connection broke looks like one that ended; then this call fails.
                await context.send_initial_metadata(())
                self.authentication.check(context)
                collection.settle(node, None)
                refusal = str(error)[:_LONGEST_REASON]
        if refusal and not collection.over:  # otherwise `missed` reports the node as late
            self.sites.trouble(node, Trouble.REFUSED, refusal)
        return wire.RECEIPT.encode(wire.Receipt(accepted=not refusal, reason=refusal))

    async def _refusal(
        self, node: str, parts: Stream[pb.UploadPart], collection: Collection, context: Context
    ) -> str:
        """Receive an answer; return why it is not accepted, or "" if it is."""
        async with self._uploads.newest(node, collection.deadline) as limit:
            header = await anext(parts, pb.UploadPart())
            answer = wire.decode_answer(header.answer)
            if collection.counts_already(node, answer):
                return ""  # sent again, as no receipt reached the node
            if reason := collection.refusal(node, answer):
                return reason
            if isinstance(answer.content, wire.Decline):
                self.authentication.check(context)
                if not collection.settle(node, None):
                    return _OVER
                self.sites.trouble(node, Trouble.DECLINED, answer.content.reason)
                return ""
            async with self._uploads.places:
                async with asyncio.timeout(self.limits.seconds):
                    assembler = collection.assembler(answer.content)
                    async for part in parts:
                        assembler.add(part.chunk)  # here, since waking a thread takes as long
                    partial, flaw = await collection.assembled(node, answer.content, assembler)
                self._uploads.excuse(node, limit)  # from here on, nothing waits for the node
                self.authentication.check(context)
                if not collection.settle(node, partial):
                    return _OVER
                self.sites.answered(node)
                if flaw is not None:
                    self.sites.trouble(node, *flaw)
                await collection.until_taken()
                return ""

    async def exchange_step(self, request: pb.Step, context: Context) -> pb.Step:
        """Record a node's step of a secure sum, and answer when the step ends."""
        node, step, exchange = NODE.get(), wire.STEP.decode(request), self.exchange
        if exchange is None or not exchange.awaits(node, step):
            sentence = "the node is not in this secure sum, or it is over"
            raise RefusedCallError(grpc.StatusCode.FAILED_PRECONDITION, sentence)
        answer = await exchange.answer_to(node, step)
        self.authentication.check(context)
        return wire.STEP.encode(answer)

    async def fetch_ledger(self, request: pb.LedgerRequest, context: Context) -> None:
        """Send the records of the public ledger after a head, in chunks."""
        head = wire.LEDGER_REQUEST.decode(request)
        async with self._ledgers.turn(NODE.get()):
            records = await asyncio.to_thread(self.ledger, head)
            if records is None:
                reason = "the node knows a head that the ledger never had"
                self.sites.trouble(NODE.get(), Trouble.LEDGER, reason)
                await self._send(pb.FilePart(unknown=True), context)
                return
            size, texts = records
            await self._send_file(size, map(str.encode, texts), context)

    async def fetch_model(self, _request: pb.ModelRequest, context: Context) -> None:
        """Send the newest released model that has a checkpoint, to any node, drawn or not."""
        async with self._models.turn(NODE.get()):
            if (model := await asyncio.to_thread(self.model)) is None:
                sentence = "no round was released yet"
                raise RefusedCallError(grpc.StatusCode.FAILED_PRECONDITION, sentence)
            await self._send_file(len(model), iter([model]), context)

    async def _send_file(self, size: int, pieces: Iterator[bytes], context: Context) -> None:
        """Send the size of a file, and its pieces, which are iterated in threads."""
        await self._send(pb.FilePart(size=size), context)
        chunks = wire.chunks(pieces)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            await self._send(pb.FilePart(chunk=chunk), context)

    async def _send(self, part: Message | bytes, context: Context) -> None:
        """Send a part of a transfer to a node that is still enrolled; TimeoutError if not read."""
        self.authentication.check(context)
        async with asyncio.timeout(_SHARE_OF_A_PART * self.limits.seconds):
            await context.write(part)

    async def get_status(self, _request: pb.StatusRequest, _context: Context) -> pb.Status:
        """Return the status of the run."""
        return wire.STATUS.encode(replace(self.status, nodes_connected=len(self.connections)))


@dataclass(frozen=True)
class Listener:
    """A running server."""

    address: Address  # with the port in use
    service: Service  # used in the event loop only
    loop: asyncio.AbstractEventLoop

    def wait(self, work: Coroutine[None, None, Result]) -> Result:
        """Run a coroutine on the event loop, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the event loop, and wait for its result."""

        async def run() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()


@contextmanager
def listening(service: Service, address: Address, tls: ssl.SSLContext | None) -> Iterator[Listener]:
    """Serve in a thread within the context; without `tls`, in plain text.

    InvalidValueError: the server cannot listen on the address.
    """
    started, stop = Future[Listener](), threading.Event()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        folder = TemporaryDirectory(prefix="fedpriv-")  # that only this user may enter
        with ExitStack() as resources:
            path = Path(resources.enter_context(folder))
            sockets, bound = gateway.listening_sockets(address, f"on {address}")
            for listener in sockets:
                resources.enter_context(listener)
            front = gateway.Front(service.authentication, tls, most_connections())
            server = await _begun(service, front, path)
            accepting = [loop.create_task(front.accept(listener)) for listener in sockets]
            started.set_result(Listener(bound, service, loop))
            stopping = loop.run_in_executor(None, stop.wait)
            while not (await asyncio.wait({stopping}, timeout=_WATCH_SECONDS))[0]:
                if front.refused:  # grpcio 1.85 stops listening if a method's name is not UTF-8
                    _log.error("gRPC stopped listening; the server begins it again")
                    await server.stop(None)  # ends all calls; nodes connect again
                    server = await _begun(service, front, path)
            service.connections.end_all(End.SHUTTING_DOWN)
            await server.stop(_GRACE_SECONDS)
            for task in accepting:
                task.cancel()
            await front.close()

    async def run() -> None:
        try:
            await serve()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=lambda: asyncio.run(run()), name="fedpriv service")
    thread.start()
    try:
        yield started.result()
    finally:
        stop.set()
        thread.join()


async def _begun(service: Service, front: gateway.Front, folder: Path) -> grpc.aio.Server:
    """Start a gRPC server behind the front, at a new socket in the folder."""
    server = grpc.aio.server(options=OPTIONS)
    server.add_generic_rpc_handlers([_generic_handler(service)])
    front.inner, front.refused = folder / f"grpc-{time.monotonic_ns()}", False
    try:
        server.add_insecure_port(f"unix:{front.inner}")
    except RuntimeError as error:
        raise InvalidValueError(
            f"the server cannot listen on a socket in {folder}; TMPDIR must be a folder with a "
            "short path that it can write to"
        ) from error
    await server.start()
    return server


def _generic_handler(service: Service) -> grpc.GenericRpcHandler:
    """Return the handler of the methods of federation.proto."""
    answers: dict[str, tuple[Callable[..., Awaitable[object]], type[Message], int]] = {
        "Connect": (service.connect, pb.FromNode, _SMALL),
        "Download": (service.download, pb.RoundId, _SMALL),
        "Upload": (service.upload, pb.UploadPart, SERVER_RECEIVES_BYTES),
        "Exchange": (service.exchange_step, pb.Step, _STEP),
        "FetchLedger": (service.fetch_ledger, pb.LedgerRequest, _SMALL),
        "FetchModel": (service.fetch_model, pb.ModelRequest, _SMALL),
        "GetStatus": (service.get_status, pb.StatusRequest, _SMALL),
    }

    def serialised(message: Message | bytes) -> bytes:
        return message if isinstance(message, bytes) else bytes(message.SerializeToString())

    handlers = {}
    for method in pb.DESCRIPTOR.services_by_name["Federation"].methods:
        answer, kind, limit = answers[method.name]
        reading = partial(parse, kind, most=limit)
        handlers[method.name] = service.authentication.handler(method, answer, reading, serialised)
    return grpc.method_handlers_generic_handler(SERVICE, handlers)
