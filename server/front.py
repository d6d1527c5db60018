"""The front: it accepts all connections, ends TLS, and passes on only as much as gRPC can bear.

gRPC bounds neither what it stores for a peer that does not read nor the work that small frames
cause. So it listens behind the front, in plain text on a Unix socket in a folder of this user.
"""

import asyncio
import logging
import socket
import ssl
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, thread_time
from urllib.parse import quote

from fedpriv.errors import InvalidValueError, reason_of
from fedpriv.wire.naming import Address

_log = logging.getLogger(__name__)
_PIECE_BYTES = 2**16
_PREFACE_BYTES, _HEADER_BYTES, _DATA = 24, 9, 0  # RFC 9113, sections 3.4, 4.1 and 6.1
# What a node may send that no handler has read: the content of messages, in bytes, and the rest, in
# bytes and in the work of reading a piece and of handling a frame. A node may exceed this by one
# piece; the excess drains per second, per byte read or sent, and per call.
_MOST_CONTENT, _MOST_REST = 2.0 * 2**20, 32.0 * 2**10
_PIECE_COST, _FRAME_COST = 16, 128
_CONTENT_PER_SECOND, _REST_PER_SECOND = 16.0 * 2**10, 2.0 * 2**10
_REST_PER_READ, _REST_PER_SENT, _REST_PER_CALL = 0.05, 0.05, 1024
_MESSAGE_BYTES = 5  # in front of each message
_LONGEST_PAUSE_SECONDS = 1.0
_HANDSHAKE_SECONDS = 10.0  # for TLS, or in plain text for the first byte
_HANDSHAKES = 0.2  # the largest share of the event loop's time that handshakes take
_REFUSED_SECONDS = 5.0  # a refused peer has to read why
_UNREAD_SECONDS = 60.0  # a peer that reads nothing for so long is disconnected
_UNIDENTIFIED = 1024  # connections; beyond it the oldest is closed
_OF_A_NODE = 8  # connections of one node; beyond it the oldest is closed
_BACKLOG = 1024
# gRPC reports the number to the application of a peer whose certificate is refused.
_REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class Allowance:
    """Bounds what the connections of one node may send besides messages that handlers read."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._since = clock, clock()
        self._content = self._rest = 0.0  # that drain

    def received(self, content: int, rest: int) -> None:
        """Count a piece: bytes of content, and the cost of the rest."""
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


class Frames:
    """Separates the content of messages, in DATA frames, from everything else that HTTP/2 sends."""

    def __init__(self) -> None:
        self._left, self._is_content, self._header = _PREFACE_BYTES, False, b""

    def weigh(self, piece: bytes) -> tuple[int, int]:
        """Return the bytes of content in the next bytes of a connection, and the rest's cost."""
        at, content, cost = 0, 0, _PIECE_COST
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


@dataclass(frozen=True, eq=False)
class Peer:
    """The other end of a connection."""

    certificate: bytes  # PEM, as TLS has checked it; empty in plain text
    allowance: Allowance = field(default_factory=Allowance)


class _Stream:
    """A non-blocking socket, in plain text or TLS."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._loop = asyncio.get_running_loop()

    async def receive(self) -> bytes:
        """Return the next bytes, at least one; empty at the end."""
        while True:
            try:
                return self.socket.recv(_PIECE_BYTES)
            except (BlockingIOError, ssl.SSLWantReadError):
                await self.readable()

    async def send(self, data: bytes) -> None:
        """Send all bytes; TimeoutError if the peer reads nothing for too long."""
        left = memoryview(data)
        while left:
            try:
                left = left[self.socket.send(left) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                async with asyncio.timeout(_UNREAD_SECONDS):
                    await self.writable()

    async def readable(self) -> None:
        await self._ready(self._loop.add_reader, self._loop.remove_reader)

    async def writable(self) -> None:
        await self._ready(self._loop.add_writer, self._loop.remove_writer)

    async def _ready(self, add: Callable[..., None], remove: Callable[[int], bool]) -> None:
        ready, number = self._loop.create_future(), self.socket.fileno()
        add(number, _settle, ready)
        try:
            await ready
        finally:
            remove(number)


def _settle(ready: "asyncio.Future[None]") -> None:
    if not ready.done():
        ready.set_result(None)


class Front:
    """Accepts connections to a port, and pipes those of enrolled nodes to gRPC.

    Guarantees:
        * With TLS, not a byte of a peer passes before its certificate is identified as a node's.
        * What a peer has sent and gRPC has not answered is bounded, whatever the peer sends: the
          front reads from it only while everything to it is sent, and as its `Allowance` permits.
        * A node has a bounded number of connections, and connections of strangers cannot keep
          nodes out: if there are too many, the oldest that is not identified is closed.
        * Handshakes take a bounded share of the event loop's time.

    `identify` returns the node of a certificate, or raises an error of `refused`.
    """

    def __init__(
        self,
        tls: ssl.SSLContext | None,
        identify: Callable[[bytes], str],
        refused: type[Exception],
        peers: dict[str, Peer],
        most: int,
    ) -> None:
        self._tls, self._identify, self._refused, self._most = tls, identify, refused, most
        self.inner = Path()  # of the socket where gRPC listens
        self._peers = peers  # of all connections, by the name that gRPC gives them
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
        with connection, suppress(OSError, TimeoutError):  # ssl.SSLError is an OSError
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream, peer, node = _Stream(connection), Peer(b""), None
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                await stream.readable()
                if self._tls is not None:
                    stream, certificate = await self._handshake(self._tls, connection)
            with stream.socket:
                if self._tls is not None:
                    try:
                        node = self._identify(certificate)
                    except self._refused:
                        stream.socket.send(_REFUSAL)
                        await asyncio.sleep(_REFUSED_SECONDS)
                        return
                    peer = Peer(certificate, self._allowances[node])
                with self._counted(node):
                    await self._piped(stream, peer)

    async def _handshake(
        self, tls: ssl.SSLContext, connection: socket.socket
    ) -> tuple[_Stream, bytes]:
        """Return an encrypted stream, and the peer's certificate."""
        encrypted = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        stream = _Stream(encrypted)
        try:
            while True:
                async with self._turn:
                    began = thread_time()
                    try:
                        encrypted.do_handshake()
                        wait: Callable[[], Awaitable[None]] | None = None
                    except ssl.SSLWantReadError:
                        wait = stream.readable
                    except ssl.SSLWantWriteError:
                        wait = stream.writable
                    finally:
                        seconds = thread_time() - began
                        await asyncio.sleep((1.0 / _HANDSHAKES - 1.0) * seconds)
                if wait is None:
                    der = encrypted.getpeercert(binary_form=True) or b""
                    return stream, ssl.DER_cert_to_PEM_cert(der).encode()
                await wait()
        except BaseException:
            encrypted.close()
            raise

    @contextmanager
    def _counted(self, node: str | None) -> Iterator[None]:
        """Count the current connection as one of the node's; close its oldest if it has many."""
        task = asyncio.current_task()
        assert task is not None
        self._unidentified.pop(task, None)
        if node is None:
            yield
            return
        own = self._nodes[node]
        own.append(task)
        if len(own) > _OF_A_NODE:
            own[0].cancel()
        try:
            yield
        finally:
            own.remove(task)

    async def _piped(self, outer: _Stream, peer: Peer) -> None:
        """Pass bytes between a peer and gRPC until either ends the connection."""
        loop = asyncio.get_running_loop()
        self._count += 1
        own = self.inner.with_name(str(self._count))
        name = f"unix:{quote(str(own))}"
        with socket.socket(socket.AF_UNIX) as inner:
            inner.settimeout(0.0)
            inner.bind(str(own))
            own.unlink()
            self._peers[name] = peer
            try:
                await loop.sock_connect(inner, str(self.inner))
                sent = asyncio.Event()
                sent.set()
                ways = {
                    loop.create_task(self._inward(outer, inner, peer.allowance, sent)),
                    loop.create_task(self._outward(outer, inner, peer.allowance, sent)),
                }
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
            finally:
                del self._peers[name]

    async def _inward(
        self, outer: _Stream, inner: socket.socket, allowance: Allowance, sent: asyncio.Event
    ) -> None:
        loop, frames = asyncio.get_running_loop(), Frames()
        while True:
            await sent.wait()
            if pause := allowance.pause():
                await asyncio.sleep(min(pause, _LONGEST_PAUSE_SECONDS))
                continue
            if not (piece := await outer.receive()):
                return
            allowance.received(*frames.weigh(piece))
            await loop.sock_sendall(inner, piece)
            await asyncio.sleep(0.0)  # or a peer that is always ready would have the loop alone

    async def _outward(
        self, outer: _Stream, inner: socket.socket, allowance: Allowance, sent: asyncio.Event
    ) -> None:
        loop = asyncio.get_running_loop()
        while piece := await loop.sock_recv(inner, _PIECE_BYTES):
            sent.clear()
            await outer.send(piece)
            sent.set()
            allowance.sent(len(piece))
            await asyncio.sleep(0.0)


def listening_sockets(address: Address) -> tuple[list[socket.socket], Address]:
    """Return sockets that listen on all addresses of the host, and the address with their port.

    InvalidValueError: the port is taken, or no address is of this machine.
    """
    sockets: list[socket.socket] = []
    port, failed = address.port, OSError("it has no address")
    try:
        for family, *_, name in socket.getaddrinfo(address.host, port, type=socket.SOCK_STREAM):
            try:
                both = family == socket.AF_INET6 and name[0] == "::" and socket.has_dualstack_ipv6()
                made = socket.create_server(
                    (name[0], port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
                )
            except OSError as error:  # such as ::1 of "localhost" where there is no IPv6
                failed = error
                continue
            made.settimeout(0.0)
            sockets.append(made)
            port = made.getsockname()[1]
    except (OSError, UnicodeError) as error:
        failed = OSError(reason_of(error))
    if not sockets:
        sentence = f"the server cannot listen on {address}: {reason_of(failed)}"
        raise InvalidValueError(sentence) from failed
    return sockets, Address(address.host, port)
