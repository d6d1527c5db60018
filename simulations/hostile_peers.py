"""Peers that try to harm a server: each is a coroutine that ends when the server shuts it out.

They implement TCP, TLS and HTTP/2 (RFC 9113) themselves. They respect only the windows of HTTP/2,
because a server ends connections that do not.
"""

import asyncio
import resource
import ssl
import zlib
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import count, repeat
from multiprocessing.sharedctypes import SynchronizedArray
from pathlib import Path
from typing import cast

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_CONTINUATION = 9
_LAST = _ACK = 1
_WHOLE_HEADER = 4
_INITIAL_WINDOW = 4  # the setting's number
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_PIECE = bytes(2**14)
_DECLARED = 2**31 - 1  # bytes of one message
_INFLATED = 700  # MiB
_STREAMS = 8  # of one connection
_CALLS = 5  # of a flood, in a second
_PAUSE = 1.0  # seconds before a peer that was shut out tries again
_SHUT_OUT = (OSError, EOFError, ssl.SSLError)


@dataclass(frozen=True)
class Target:
    """A server on loopback, and a certificate to show to it."""

    port: int  # of the server
    certificate: Path  # folder with ca.pem, node.pem and node.key

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """TLS that shows the certificate."""
        context = ssl.create_default_context(cafile=self.certificate / "ca.pem")
        context.load_cert_chain(self.certificate / "node.pem", self.certificate / "node.key")
        context.set_alpn_protocols(["h2"])
        return context


async def silent(at: Target) -> None:
    """Hold a TCP connection that says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
    try:
        await reader.read()
    finally:
        writer.close()


async def slow_handshake(at: Target) -> None:
    """Send a TLS handshake at one byte a second."""
    hello, _, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        at.tls.wrap_bio(hello, outgoing, server_hostname="localhost").do_handshake()
    _, writer = await asyncio.open_connection("127.0.0.1", at.port)
    try:
        for byte in outgoing.read():
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(_PAUSE)
    finally:
        writer.close()


async def declares_much(at: Target) -> None:
    """Declare messages of 2 GiB in eight streams at once, and send as much as the server takes."""
    async with _connected(at) as http, asyncio.TaskGroup() as group:
        for _ in range(_STREAMS):
            group.create_task(http.call("GetStatus", b"\0", _DECLARED))


async def sends_bomb(at: Target) -> None:
    """Send a compressed message of less than 1 MiB that inflates to 700 MiB."""
    async with _connected(at) as http:
        await http.call("GetStatus", b"\1", body=bomb())


async def floods(at: Target) -> None:
    """Make five calls each second."""
    async with _connected(at) as http:
        while True:
            for _ in range(_CALLS):
                await http.call("GetStatus", b"\0")
            await asyncio.sleep(_PAUSE)


def _pings() -> Iterator[bytes]:
    yield from repeat(_frame(_PING, 0, 0, bytes(8)) * 1000)


def _settings() -> Iterator[bytes]:
    yield from repeat(_frame(_SETTINGS, 0, 0) * 1000)


def _continuations() -> Iterator[bytes]:
    """Yield a header that does not end."""
    yield _frame(_HEADERS, 0, 1, _header("GetStatus", b"\0"))
    yield from repeat(_frame(_CONTINUATION, 0, 1, _PIECE))


def _headers() -> Iterator[bytes]:
    """Yield calls without a message; a server takes only a few at once."""
    header = _header("GetStatus", b"\0")
    for first in count(1, 200):
        streams = range(first, first + 200, 2)
        yield b"".join(_frame(_HEADERS, _WHOLE_HEADER, stream, header) for stream in streams)


def _resets() -> Iterator[bytes]:
    """Yield the same calls, each ended at once by its caller."""
    header, code = _header("GetStatus", b"\0"), (8).to_bytes(4, "big")
    for first in count(1, 200):
        streams = range(first, first + 200, 2)
        yield b"".join(
            _frame(_HEADERS, _WHOLE_HEADER, stream, header) + _frame(_RESET, 0, stream, code)
            for stream in streams
        )


def _endless(frames: Callable[[], Iterator[bytes]], at: Target, *, read: bool) -> Awaitable[None]:
    """Send frames as fast as the server takes them, and read the answers or not."""

    async def send() -> None:
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", at.port, ssl=at.tls, server_hostname="localhost"
        )
        reading = asyncio.create_task(_discard(reader) if read else asyncio.sleep(0))
        if not read:
            cast("asyncio.Transport", writer.transport).pause_reading()
        try:
            writer.write(_PREFACE + _frame(_SETTINGS, 0, 0))
            for piece in frames():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)  # otherwise a lost connection would not be noticed
        finally:
            reading.cancel()
            writer.transport.abort()

    return send()


async def _discard(reader: asyncio.StreamReader) -> None:
    while await reader.read(2**20):
        pass


FRAMES = {"pings": _pings, "settings": _settings, "continuations": _continuations}
FRAMES |= {"headers": _headers, "resets": _resets}
KINDS: dict[str, Callable[[Target], Awaitable[None]]] = {
    "silent connections": silent,
    "slow handshakes": slow_handshake,
    "messages of 2 GiB": declares_much,
    "compressed bombs": sends_bomb,
    "floods of calls": floods,
}
for _name, _frames in FRAMES.items():
    KINDS[f"{_name}, read"] = partial(_endless, _frames, read=True)
    KINDS[f"{_name}, unread"] = partial(_endless, _frames, read=False)


def harass(
    targets: list[Target], kinds: Sequence[str], peers: int, starts: "SynchronizedArray[int]"
) -> None:
    """Run peers of these kinds, in a separate process, until it is killed.

    All targets are the same server, with different certificates, which peers share. `starts` counts
    for each kind how often a peer has begun.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def peer(number: int) -> None:
        kind = number % len(kinds)
        harm, target = KINDS[kinds[kind]], targets[number // len(kinds) % len(targets)]
        while True:
            starts[kind] += 1
            await until_shut_out(harm(target))
            await asyncio.sleep(_PAUSE)

    async def all_of_them() -> None:
        bomb()
        await asyncio.gather(*(peer(number) for number in range(peers)))

    asyncio.run(all_of_them())


async def until_shut_out(harm: Awaitable[None]) -> None:
    """Run a peer until the server shuts it out."""
    try:
        await harm
    except* _SHUT_OUT:
        pass


@cache
def bomb() -> bytes:
    """Return gzip data that inflate to 700 MiB."""
    packing, mebibyte = zlib.compressobj(wbits=31), bytes(2**20)
    return b"".join(packing.compress(mebibyte) for _ in range(_INFLATED)) + packing.flush()


@asynccontextmanager
async def _connected(at: Target) -> AsyncIterator["_Http2"]:
    name = "localhost"
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", at.port, ssl=at.tls, server_hostname=name
    )
    http = _Http2(reader, writer)
    listening = asyncio.create_task(http.listen())
    try:
        await http.ready.wait()
        yield http
    finally:
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        writer.close()


class _Http2:
    """A client's side of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._initial = 2**16 - 1
        self._windows: dict[int, int] = defaultdict(lambda: self._initial, {0: self._initial})
        self._next, self._over, self._lost = 1, set[int](), False
        self._moved, self.ready = asyncio.Event(), asyncio.Event()
        window = _frame(_WINDOW, 0, 0, (2**30).to_bytes(4))  # for answers
        writer.write(_PREFACE + _frame(_SETTINGS, 0, 0) + window)

    async def listen(self) -> None:
        """Handle the server's frames until it ends the connection."""
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                self._take(head[3], head[4], int.from_bytes(head[5:]), payload)
                self._moved.set()
        finally:
            self._lost = True
            self._moved.set()
            self.ready.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        answers = not flags & _ACK
        if kind == _SETTINGS and answers:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2]) == _INITIAL_WINDOW:
                    self._initial = int.from_bytes(payload[at + 2 : at + 6])
            self._writer.write(_frame(_SETTINGS, _ACK, 0))
            self.ready.set()
        elif kind == _PING and answers:
            self._writer.write(_frame(_PING, _ACK, 0, payload))
        elif kind == _WINDOW:
            self._windows[stream] += int.from_bytes(payload)
        elif kind == _GOAWAY:
            raise ConnectionResetError
        if kind == _RESET or (kind in (_HEADERS, _DATA) and flags & _LAST):
            self._over.add(stream)

    async def call(
        self, method: str, compressed: bytes, declared: int | None = None, body: bytes = b""
    ) -> None:
        """Make a call, and wait for its end; zeros fill the declared size beyond the body."""
        stream, self._next = self._next, self._next + 2
        self._writer.write(_frame(_HEADERS, _WHOLE_HEADER, stream, _header(method, compressed)))
        size = len(body) if declared is None else declared
        body = compressed + size.to_bytes(4, "big") + body
        bytes_left = 5 + size
        while bytes_left and (room := await self._room(stream)):
            piece = (body or _PIECE)[: min(room, bytes_left)]
            body, bytes_left = body[len(piece) :], bytes_left - len(piece)
            self._windows[0] -= len(piece)
            self._windows[stream] -= len(piece)
            self._writer.write(_frame(_DATA, 0 if bytes_left else _LAST, stream, piece))
            await self._writer.drain()
        while stream not in self._over:
            await self._wait()

    async def _room(self, stream: int) -> int:
        """Return the bytes that may be sent now; 0 if the server has ended the stream."""
        while stream not in self._over:
            if (room := min(self._windows[0], self._windows[stream], len(_PIECE))) > 0:
                return room
            await self._wait()
        return 0

    async def _wait(self) -> None:
        if self._lost:
            raise ConnectionResetError
        self._moved.clear()
        await self._moved.wait()


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    length = len(payload).to_bytes(3, "big")
    return length + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _header(method: str, compressed: bytes) -> bytes:
    """Encode literal fields without indexing (RFC 7541, section 6.2.2), all below 127 bytes."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": f"/fedpriv.v1.Federation/{method}",
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    if compressed != b"\0":  # otherwise a server that refuses compressed calls would stop here
        fields["grpc-encoding"] = "gzip"
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
