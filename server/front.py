"""The front: it accepts all connections, ends TLS, and passes bytes on to gRPC and back.

gRPC listens behind it, in plain text, on a Unix socket in a folder that only this user may enter.
"""

import asyncio
import logging
import socket
import ssl
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from time import thread_time
from typing import cast
from urllib.parse import quote

from fedpriv.errors import InvalidValueError, reason_of
from fedpriv.server.authentication import Allowance, Authentication, Peer, RefusedCallError
from fedpriv.server.monitoring import STRANGER
from fedpriv.wire.naming import Address

_log = logging.getLogger(__name__)
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
