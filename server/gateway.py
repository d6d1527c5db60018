"""The gateway: it accepts connections, identifies callers, and bounds what they may send.

`Front` ends TLS and passes bytes on to gRPC and back. gRPC listens behind it, in plain text, on a
Unix socket in a folder that only this user may enter, and `Authentication` checks each call.

The calling node is identified before any part of a call is read or handled. The rate of its calls
and the number of its open calls are limited.

gRPC bounds neither what it stores for a peer that does not read nor the work that small frames
cause. So we bound what a node may send besides the messages that handlers read. A node that sends
more is slowed down but not disconnected, so an honest node loses only time.
"""

import asyncio
import logging
import socket
import ssl
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic, thread_time
from typing import TypeAlias, cast
from urllib.parse import quote, unquote

import grpc
from cryptography import x509
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from fedpriv.errors import FedprivError, InvalidValueError, WireError, reason_of
from fedpriv.report.records import Trouble
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment, UnknownPeerError
from fedpriv.server.monitoring import SERVER, STRANGER, Sites
from fedpriv.wire import naming
from fedpriv.wire.naming import Address

_log = logging.getLogger(__name__)
NODE: ContextVar[str] = ContextVar("NODE")  # the node whose call is being handled
_PEER: ContextVar["Peer"] = ContextVar("PEER")  # the other end of its connection
_TOO_LONG = "it took too long, the node began another, or the round is over"
_FAILED = "the server failed; its log says why"
_OPEN_CALLS = 16  # per node; it needs two or three, and connections lost silently leave some open
_REQUEST_SECONDS = 20.0  # for a request of one small message
# What a node may send that no handler has read: the content of messages, in bytes, and the rest, in
# bytes plus the cost of waking and of each frame. A node may exceed this by one piece per
# connection; the excess drains with time, with bytes read or sent, and with calls.
_MOST_CONTENT, _MOST_REST = 2.0 * 2**20, 32.0 * 2**10
_CONTENT_PER_SECOND, _REST_PER_SECOND = 16.0 * 2**10, 2.0 * 2**10
# On Ethernet, an upload costs 0.02 per byte, and the windows of a download 0.001.
_REST_PER_READ, _REST_PER_SENT, _REST_PER_CALL = 0.05, 0.02, 1024
_MESSAGE_BYTES = 5  # in front of each message
_PIECE_BYTES = 2**16
_LONGEST_PAUSE_SECONDS = 1.0
_HANDSHAKE_SECONDS = 10.0  # for TLS, or in plain text for the first byte
_HANDSHAKES = 0.2  # the largest share of the event loop's time that handshakes take
_REFUSED_SECONDS = 1.0  # time for a refused peer to read the reason
_UNREAD_SECONDS = 60.0  # a peer that reads nothing for so long is disconnected
_UNIDENTIFIED = 1024  # connections; beyond it the oldest is closed
_OF_A_NODE = 8  # connections of one node; beyond it the oldest is closed
_BACKLOG = 1024
_PREFACE_BYTES, _HEADER_BYTES, _DATA = 24, 9, 0  # RFC 9113, sections 3.4, 4.1 and 6.1
_WAKING_COST, _FRAME_COST = 16, 128  # in bytes of an `Allowance`
# gRPC tells the caller the number, and does not try again at once.
_REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

Context: TypeAlias = grpc.aio.ServicerContext
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
# Returns the node of a certificate (PEM; empty in plain text) or of a call's metadata, or raises
# UnknownPeerError; InvalidValueError: the enrolment file cannot be used.
Identify = Callable[[bytes, Metadata], str]


class Allowance:
    """Bounds what the connections of one node may send besides messages that handlers read."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._since = clock, clock()
        self._content = self._rest = 0.0  # what has not drained yet

    def received(self, content: int, rest: int) -> None:
        """Count a piece: bytes of content, and the cost of the rest."""
        self.pause()  # time that passed before it does not drain it
        self._content += content
        self._rest += rest

    def read(self, size: int) -> None:
        """Record that a handler has read a message of `size` bytes."""
        self._drain(size + _MESSAGE_BYTES, _REST_PER_READ * size)

    def sent(self, size: int) -> None:
        """Record that the peer has accepted `size` bytes, for which it may grant new windows."""
        self._drain(0.0, _REST_PER_SENT * size)

    def called(self) -> None:
        """Record that a call was admitted."""
        self._drain(0.0, _REST_PER_CALL)

    def pause(self) -> float:
        """Return the seconds until the node may send more, if nothing else is drained."""
        now = self._clock()
        seconds, self._since = now - self._since, now
        self._drain(_CONTENT_PER_SECOND * seconds, _REST_PER_SECOND * seconds)
        content = (self._content - _MOST_CONTENT) / _CONTENT_PER_SECOND
        return max(0.0, content, (self._rest - _MOST_REST) / _REST_PER_SECOND)

    def _drain(self, content: float, rest: float) -> None:
        self._content = max(0.0, self._content - content)
        self._rest = max(0.0, self._rest - rest)


@dataclass(frozen=True, eq=False)
class Peer:
    """The other end of a connection."""

    node: str = STRANGER  # the node of the certificate
    certificate: bytes = b""  # PEM, as TLS has checked it; empty in plain text
    allowance: Allowance = field(default_factory=Allowance)


class RefusedCallError(Exception):
    """Ends a call with a status and one sentence, both of which are sent to the caller."""

    def __init__(self, code: grpc.StatusCode, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


def by_certificate(certificates: EnrolledCertificates) -> Identify:
    """Return a function that identifies the node at which the TLS certificate is enrolled now."""
    return lambda certificate, _: certificates.node_of(certificate, datetime.now(UTC))


def by_declaration(_: bytes, metadata: Metadata) -> str:
    """Return the node that the caller claims to be; for plain text on one machine.

    UnknownPeerError: the call names no node, or an invalid name.
    """
    name = dict(metadata).get(naming.NODE_KEY, "")
    try:
        return naming.check_node_name(unquote(str(name), errors="strict"))
    except ValueError as error:
        raise UnknownPeerError(str(error)) from error


class RateLimit:
    """A token bucket per node that holds `per_minute` calls and refills within a minute.

    Only enrolled nodes have buckets, so their number is bounded.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = monotonic) -> None:
        self._capacity, self._clock = float(per_minute), clock
        self._buckets: dict[str, tuple[float, float]] = {}  # calls left, and when that was computed

    def admits(self, node: str) -> bool:
        """Return whether the node may call now; if so, the call is counted."""
        now = self._clock()
        calls_left, since = self._buckets.get(node, (self._capacity, now))
        calls_left = min(self._capacity, calls_left + (now - since) * self._capacity / 60.0)
        admitted = calls_left >= 1.0
        self._buckets[node] = (calls_left - 1.0 if admitted else calls_left, now)
        return admitted

    def grant(self, node: str, calls: int) -> None:
        """Let the node make extra calls that the server has asked for."""
        if node in self._buckets:
            calls_left, since = self._buckets[node]
            self._buckets[node] = (min(self._capacity, calls_left + calls), since)


@dataclass(eq=False)
class Authentication:
    """Checks the caller of every method, then sets `NODE` and calls the handler: `handler`.

    If a request is one message, gRPC reads it before any of our code runs, and buffers as many
    bytes as the message claims to have. So all requests are streams to gRPC, which our code reads.

    Guarantees:
        * No handler is called, and no byte of a request is read, if the caller's certificate has
          expired, is not enrolled or was struck off, or if its node is not enrolled, calls too
          often or has too many calls open.
        * The number and the memory of the calls that a node leaves open are bounded.
        * If a handler refuses a call, cannot parse it, times out or fails, the call ends with a
          status. In case of a failure, the caller learns no more than that.
    """

    identify: Identify
    enrolment: Enrolment
    rates: RateLimit
    peers: dict[str, Peer] = field(default_factory=dict)  # by gRPC's names; kept by the front
    _open: Counter[str] = field(default_factory=Counter)
    _last_end: float = field(default_factory=monotonic)  # when the last call ended

    def __post_init__(self) -> None:
        self.sites = Sites(self.enrolment)

    def idle_seconds(self) -> float:
        """Return the seconds since the last call ended; 0 while a call is open."""
        return 0.0 if self._open else monotonic() - self._last_end

    @staticmethod
    def peer_certificate() -> x509.Certificate | None:
        """Return the certificate of the caller that is being handled; None in plain text."""
        certificate = _PEER.get().certificate
        return x509.load_pem_x509_certificate(certificate) if certificate else None

    def known(self, certificate: bytes, metadata: Metadata = ()) -> str:
        """Return the node of a caller; RefusedCallError, reported to the operator, if none."""
        try:
            return self.identify(certificate, metadata)
        except UnknownPeerError as error:
            code, sentence = grpc.StatusCode.UNAUTHENTICATED, str(error)
            self.sites.trouble(error.node or STRANGER, Trouble.CALL, sentence + error.subject)
        except InvalidValueError as error:
            # Only the operator can repair the file, and only the operator should see its path.
            code, sentence = grpc.StatusCode.UNAVAILABLE, "the server cannot read its enrolment now"
            self.sites.trouble(SERVER, Trouble.ENROLMENT, f"all calls are refused: {error}")
        raise RefusedCallError(code, sentence)

    def slowed(self, peer: Peer) -> None:
        """Record that a peer sends more than its allowance."""
        reason = "it sends too much that is no message; it is slowed"
        self.sites.trouble(peer.node, Trouble.CALL, reason)

    def check(self, context: Context) -> None:
        """Raise RefusedCallError unless an admitted caller still identifies as the same node."""
        node, metadata = NODE.get(), context.invocation_metadata() or ()
        if self.known(_PEER.get().certificate, metadata) != node:
            sentence = "the certificate is enrolled at another node now"
            raise RefusedCallError(grpc.StatusCode.UNAUTHENTICATED, sentence)

    def handler(
        self,
        method: MethodDescriptor,
        answer: Callable[..., Awaitable[object]],
        parse: Callable[[bytes], object],
        serialise: Callable[[Message], bytes],
    ) -> grpc.RpcMethodHandler:
        """Return a handler of a method that checks the caller, and then calls `answer`.

        `answer` gets the request, parsed by `parse`, and the context. WireError in `parse` ends the
        call; gRPC would log a traceback for each malformed request.
        """

        async def checked(messages: AsyncIterable[bytes], context: Context) -> object:
            node = None
            try:
                try:
                    if (peer := self.peers.get(context.peer())) is None:
                        raise asyncio.CancelledError  # its connection is over
                    node = self._admitted(peer, context)
                    self._open[node] += 1
                    NODE.set(node)
                    _PEER.set(peer)
                    peer.allowance.called()
                    if method.server_streaming:
                        # If these came with the first message, a node that does not read that
                        # message could not be sent a status.
                        await context.send_initial_metadata(())
                    request = self._messages(messages, peer, parse)
                    if method.client_streaming:
                        return await answer(request, context)
                    return await answer(await _only(request), context)
                except RefusedCallError as error:
                    refusal = error.code, str(error)
                except WireError as error:
                    refusal = grpc.StatusCode.INVALID_ARGUMENT, str(error)
                except TimeoutError:
                    refusal = grpc.StatusCode.DEADLINE_EXCEEDED, _TOO_LONG
                except (grpc.aio.InternalError, grpc.aio.AbortError):
                    raise
                except Exception as error:  # gRPC would send the caller its text, with paths
                    sentence = f": {error}" if isinstance(error, FedprivError) else ""
                    _log.exception("a call of %s failed%s", method.name, sentence)
                    refusal = grpc.StatusCode.INTERNAL, _FAILED
                await _abort(context, *refusal)
                return None
            except grpc.aio.InternalError as error:
                # The connection is lost; gRPC logs a traceback of every error except this one.
                raise asyncio.CancelledError from error
            finally:
                if node is not None:
                    self._last_end = monotonic()
                    self._open -= Counter([node])  # keeps positive numbers only

        if method.server_streaming:
            return grpc.stream_stream_rpc_method_handler(checked, None, serialise)
        return grpc.stream_unary_rpc_method_handler(checked, None, serialise)

    async def _messages(
        self, messages: AsyncIterable[bytes], peer: Peer, parse: Callable[[bytes], object]
    ) -> AsyncGenerator[object, None]:
        # Unless it is closed, a stream that is not read to its end lives until garbage collection.
        async with aclosing(aiter(messages)) as received:  # type: ignore[type-var]
            async for message in received:
                peer.allowance.read(len(message))
                yield parse(message)

    def _admitted(self, peer: Peer, context: Context) -> str:
        """Return the calling node if it may make this call; RefusedCallError otherwise."""
        code = grpc.StatusCode
        node = self.known(peer.certificate, context.invocation_metadata() or ())
        if node not in self.enrolment.users:
            self.sites.trouble(STRANGER, Trouble.CALL, f"node {node!r} is not enrolled")
            raise RefusedCallError(code.PERMISSION_DENIED, "the node is not enrolled")
        if not self.rates.admits(node):
            excess = "the node calls too often"
        elif self._open[node] >= _OPEN_CALLS:
            excess = f"the node has {_OPEN_CALLS} calls open"
        else:
            return node
        self.sites.trouble(node, Trouble.CALL, excess)
        raise RefusedCallError(code.RESOURCE_EXHAUSTED, excess)


async def _only(request: AsyncGenerator[object, None]) -> object:
    """Return the only message of a request; WireError if there is none."""
    async with aclosing(request), asyncio.timeout(_REQUEST_SECONDS):
        async for message in request:
            return message
    raise WireError("the call has no message; it must have one")


async def _abort(context: Context, code: grpc.StatusCode, sentence: str) -> None:
    try:
        await context.abort(code, sentence)
    except grpc.aio.AbortError as error:
        # gRPC keeps this error and raises it again. Its traceback would keep the call alive until
        # garbage collection, and with it a stream, while a connection may have only a few.
        error.with_traceback(None)


class _Stream:
    """A non-blocking socket, in plain text or TLS."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._loop = asyncio.get_running_loop()

    def received(self) -> bytearray | None:
        """Return bytes that have arrived; empty at the end of the stream, None if none came yet."""
        piece = bytearray()
        try:
            while len(piece) < _PIECE_BYTES and (data := self.socket.recv(_PIECE_BYTES)):
                piece += data
        except (BlockingIOError, ssl.SSLWantReadError):
            return piece or None
        return piece

    async def send(self, data: bytes) -> None:
        """Send all bytes; TimeoutError if the peer reads nothing for too long."""
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[self.socket.send(unsent) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                async with asyncio.timeout(_UNREAD_SECONDS):
                    await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def readable(self) -> None:
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        ready, number = asyncio.Event(), self.socket.fileno()
        add(number, ready.set)
        try:
            await ready.wait()
        finally:
            remove(number)


class Frames:
    """Separates the content of messages, in DATA frames, from everything else that HTTP/2 sends."""

    def __init__(self) -> None:
        self._left, self._is_content, self._header = _PREFACE_BYTES, False, b""

    def weigh(self, piece: bytes | bytearray) -> tuple[int, int]:
        """Return the bytes of content in a piece of a connection, and the cost of the rest."""
        at, content, cost = 0, 0, 0
        while at < len(piece):
            if self._left:
                size = min(self._left, len(piece) - at)
                self._left -= size
                if self._is_content:
                    content += size
                else:
                    cost += size
            else:
                size = min(_HEADER_BYTES - len(self._header), len(piece) - at)
                self._header += piece[at : at + size]
                if len(self._header) == _HEADER_BYTES:
                    self._left = int.from_bytes(self._header[:3], "big")
                    self._is_content = self._header[3] == _DATA
                    self._header, cost = b"", cost + _HEADER_BYTES + _FRAME_COST
            at += size
        return content, cost


class Front:
    """Accepts connections to a port, and pipes those of enrolled nodes to gRPC.

    Guarantees:
        * With TLS, not a byte of a peer passes before its certificate is identified as a node's.
        * The data that a peer has sent and gRPC has not answered are bounded: the front reads from
          a peer only while everything to it is sent, and only as its `Allowance` permits.
        * A node has a bounded number of connections, and connections of strangers cannot keep
          nodes out: if there are too many, the oldest that is not identified is closed.
        * Handshakes take a bounded share of the event loop's time.

    Used in one event loop only.
    """

    def __init__(
        self, authentication: Authentication, tls: ssl.SSLContext | None, most: int
    ) -> None:
        self._authentication, self._tls, self._most = authentication, tls, most
        self.inner = Path()  # of the socket where gRPC listens
        self.refused = False  # whether gRPC has refused a connection there
        self._count = 0
        self._turn = asyncio.Lock()  # to advance a handshake
        self._connections: dict[asyncio.Task[None], None] = {}
        self._unidentified: dict[asyncio.Task[None], None] = {}  # oldest first
        self._nodes: dict[str, list[asyncio.Task[None]]] = defaultdict(list)
        self._allowances: dict[str, Allowance] = defaultdict(Allowance)

    async def accept(self, listener: socket.socket) -> None:
        """Serve the connections to a listening socket until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
            except OSError as error:
                _log.warning("no connection can be accepted now: %s", reason_of(error))
                await asyncio.sleep(_LONGEST_PAUSE_SECONDS)
                continue
            if len(self._unidentified) >= _UNIDENTIFIED or len(self._connections) >= self._most:
                if not self._unidentified:
                    connection.close()
                    continue
                oldest = next(iter(self._unidentified))
                del self._unidentified[oldest]
                oldest.cancel()
            task = loop.create_task(self._served(connection))
            self._connections[task] = self._unidentified[task] = None
            task.add_done_callback(self._forget)
            await asyncio.sleep(0.0)  # so that cancelled tasks close their sockets

    async def close(self) -> None:
        """End all connections."""
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._connections.pop(task, None)
        self._unidentified.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a connection failed", exc_info=error)

    async def _served(self, connection: socket.socket) -> None:
        with suppress(OSError), ExitStack() as resources:  # all errors of TLS and time are OSErrors
            resources.enter_context(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream, peer = _Stream(connection), Peer()
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                await stream.readable()
                if self._tls is not None:
                    encrypted = self._tls.wrap_socket(
                        connection, server_side=True, do_handshake_on_connect=False
                    )
                    stream = _Stream(resources.enter_context(encrypted))
                    certificate = await self._certificate(stream, encrypted)
            if self._tls is not None:
                try:
                    node = self._authentication.known(certificate)
                except RefusedCallError:
                    encrypted.send(_REFUSAL)
                    encrypted.shutdown(socket.SHUT_WR)
                    await asyncio.sleep(_REFUSED_SECONDS)
                    return
                peer = Peer(node, certificate, self._allowances[node])
            with self._counted(peer.node):
                await self._piped(stream, peer)

    async def _certificate(self, stream: _Stream, encrypted: ssl.SSLSocket) -> bytes:
        """Return the certificate of a peer, in PEM, after the handshake."""
        while True:
            async with self._turn:
                began = thread_time()
                try:
                    encrypted.do_handshake()
                    der = encrypted.getpeercert(binary_form=True) or b""
                    return ssl.DER_cert_to_PEM_cert(der).encode()
                except ssl.SSLWantReadError:
                    pass
                finally:
                    await asyncio.sleep((1.0 / _HANDSHAKES - 1.0) * (thread_time() - began))
            await stream.readable()

    @contextmanager
    def _counted(self, node: str) -> Iterator[None]:
        """Count the current task as a connection of the node; close the oldest if it has many."""
        task, node_tasks = cast("asyncio.Task[None]", asyncio.current_task()), self._nodes[node]
        self._unidentified.pop(task, None)
        node_tasks.append(task)
        if len(node_tasks) > _OF_A_NODE and node != STRANGER:
            node_tasks[0].cancel()
        try:
            yield
        finally:
            node_tasks.remove(task)

    async def _piped(self, outer: _Stream, peer: Peer) -> None:
        """Pass bytes between a peer and gRPC until either ends the connection."""
        self._count += 1
        path, sent = self.inner.with_name(str(self._count)), asyncio.Event()
        name = f"unix:{quote(str(path))}"  # as gRPC calls the peer
        with socket.socket(socket.AF_UNIX) as inner:
            inner.settimeout(0.0)
            inner.bind(str(path))
            path.unlink()
            self._authentication.peers[name] = peer
            try:
                await asyncio.get_running_loop().sock_connect(inner, str(self.inner))
                sent.set()
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(self._inward(outer, inner, peer, sent))
                    directions.create_task(self._outward(outer, inner, peer, sent))
            except* (ConnectionRefusedError, FileNotFoundError):
                self.refused = True
            except* OSError:
                pass  # one side has ended the connection
            finally:
                del self._authentication.peers[name]

    async def _inward(
        self, outer: _Stream, inner: socket.socket, peer: Peer, sent: asyncio.Event
    ) -> None:
        loop, frames, allowance = asyncio.get_running_loop(), Frames(), peer.allowance
        while True:
            await sent.wait()
            if pause := allowance.pause():
                self._authentication.slowed(peer)
                await asyncio.sleep(min(pause, _LONGEST_PAUSE_SECONDS))
            elif (piece := outer.received()) is None:
                await outer.readable()
                allowance.received(0, _WAKING_COST)
            elif piece:
                allowance.received(*frames.weigh(piece))
                await loop.sock_sendall(inner, piece)
                await asyncio.sleep(0.0)  # or one peer could keep the event loop to itself
            else:
                raise ConnectionResetError

    async def _outward(
        self, outer: _Stream, inner: socket.socket, peer: Peer, sent: asyncio.Event
    ) -> None:
        loop = asyncio.get_running_loop()
        while piece := await loop.sock_recv(inner, _PIECE_BYTES):
            sent.clear()
            await outer.send(piece)
            sent.set()
            peer.allowance.sent(len(piece))
            await asyncio.sleep(0.0)
        raise ConnectionResetError


def listening_sockets(address: Address, where: str) -> tuple[list[socket.socket], Address]:
    """Return sockets that listen on all addresses of the host, and the address with their port.

    InvalidValueError, beginning with `where`: the port is taken, or no address is of this machine.
    """
    sockets: list[socket.socket] = []
    port, failure = address.port, OSError("it has no address")
    try:
        for family, *_, name in socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM):
            try:
                dual = family == socket.AF_INET6 and name[0] == "::" and socket.has_dualstack_ipv6()
                listener = socket.create_server(
                    (name[0], port), family=family, backlog=_BACKLOG, dualstack_ipv6=dual
                )
            except OSError as error:  # such as ::1 of "localhost" where there is no IPv6
                failure = error
                continue
            listener.settimeout(0.0)
            sockets.append(listener)
            port = listener.getsockname()[1]
    except (OSError, UnicodeError) as error:
        failure = OSError(reason_of(error))
    if not sockets:
        sentence = f"{where} the server cannot listen: {reason_of(failure)}"
        raise InvalidValueError(sentence) from failure
    return sockets, Address(address.host, port)
