"""Peers that do not keep to the rules: bytes in place of messages, and HTTP/2 by hand."""

import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

SERVICE = "/fedpriv.v1.Federation/"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATIENCE = 20.0  # seconds that a call may take before the test fails

Outcome = bytes | grpc.StatusCode
"""The first message that a call gave, or the status it ended with."""


def first(channel: grpc.Channel, method: str, request: bytes = b"") -> Outcome:
    """Make a call that is answered by a stream; cancels it after the first message."""
    call = channel.unary_stream(method)(request, timeout=PATIENCE)
    try:
        for message in call:
            return bytes(message)
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()


def one(channel: grpc.Channel, method: str, request: bytes = b"") -> Outcome:
    """Make a call that is answered by one message."""
    try:
        return bytes(channel.unary_unary(method)(request, timeout=PATIENCE))
    except grpc.RpcError as error:
        return error.code()


def uploaded(channel: grpc.Channel, parts: Iterable[bytes]) -> Outcome:
    """Upload these parts."""
    try:
        return bytes(channel.stream_unary(SERVICE + "Upload")(iter(parts), timeout=PATIENCE))
    except grpc.RpcError as error:
        return error.code()


CALLS: dict[str, Callable[[grpc.Channel], Outcome]] = {
    "Connect": lambda channel: first(channel, SERVICE + "Connect"),
    "Download": lambda channel: first(channel, SERVICE + "Download"),
    "Upload": lambda channel: uploaded(channel, [b""]),
    "FetchLedger": lambda channel: first(channel, SERVICE + "FetchLedger"),
    "FetchModel": lambda channel: first(channel, SERVICE + "FetchModel"),
    "GetStatus": lambda channel: one(channel, SERVICE + "GetStatus"),
}
"""Each method of the service, called with an empty message."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    length = len(payload).to_bytes(3, "big")
    return length + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def settings(window: int = 65535) -> bytes:
    """A frame that says how many bytes of a stream may come unasked."""
    return frame(4, 0, 0, struct.pack(">HI", 4, window))


def heading(method: str, stream: int) -> bytes:
    """The frame that begins a call."""
    fields = {
        ":method": "POST",
        ":scheme": "https",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    # Literal fields without indexing (RFC 7541, section 6.2.2): all are shorter than 127 bytes.
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(1, 4, stream, block)


def called(method: str, message: bytes, *, stream: int = 1, last: bool = True) -> bytes:
    """Frames that begin a call and send a message."""
    data = b"\0" + len(message).to_bytes(4, "big") + message
    return heading(method, stream) + frame(0, int(last), stream, data)


class Flood:
    """Calls on one connection, each with a message that is said to have 2 GiB and never ends.

    Attributes:
        sent: bytes of messages that the server has taken.
        open: the calls that it has not ended.
    """

    def __init__(self, connection: ssl.SSLSocket, method: str, calls: int = 8) -> None:
        self.sent, self.open = 0, {2 * call + 1 for call in range(calls)}
        self._connection, self._received = connection, b""
        self._whole, self._windows = 2**16 - 1, dict.fromkeys(self.open, 2**16 - 1)
        connection.settimeout(0.2)
        self._say(PREFACE + settings() + b"".join(heading(method, call) for call in self.open))
        for call in self.open:
            self._send(call, b"\0" + (2**31 - 1).to_bytes(4, "big"))

    def go_on(self, most: int) -> None:
        """Send so many bytes in all, or until all calls have ended, or the server takes no more."""
        silent = 0
        while self.open and silent < 20:
            silent = 0 if self._listen() else silent + 1
            for call in tuple(self.open):
                room = min(self._whole, self._windows[call], 2**14, most - self.sent)
                while room > 0 and call in self.open:
                    self._send(call, bytes(room))
                    room = min(self._whole, self._windows[call], 2**14, most - self.sent)

    def _send(self, call: int, data: bytes) -> None:
        self.sent += len(data)
        self._whole -= len(data)
        self._windows[call] -= len(data)
        self._say(frame(0, 0, call, data))

    def _say(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError:
            self.open.clear()

    def _listen(self) -> bool:
        """Whether the server has said anything."""
        try:
            self._received += (data := self._connection.recv(2**16))
        except TimeoutError:
            return False
        except OSError:
            data = b""
        if not data:
            self.open.clear()
        while len(self._received) >= 9 + (size := int.from_bytes(self._received[:3], "big")):
            kind, flags, *number = self._received[3:9]
            payload, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            self._heard(kind, flags, int.from_bytes(number, "big"), payload)
        return True

    def _heard(self, kind: int, flags: int, call: int, payload: bytes) -> None:
        match kind:
            case 8 if call == 0:
                self._whole += int.from_bytes(payload, "big")
            case 8 if call in self._windows:
                self._windows[call] += int.from_bytes(payload, "big")
            case 4 if not flags & 1:
                options = dict(struct.iter_unpack(">HI", payload))
                for each in self._windows:
                    self._windows[each] += options.get(4, 2**16 - 1) - (2**16 - 1)
                self._say(frame(4, 1, 0))
            case 6 if not flags & 1:
                self._say(frame(6, 1, 0, payload))
            case 3:
                self.open.discard(call)
            case 1 if flags & 1:
                self.open.discard(call)


@contextmanager
def plain(port: int) -> Iterator[socket.socket]:
    """A TCP connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        yield connection


@contextmanager
def encrypted(port: int, certs: Path, node: str) -> Iterator[ssl.SSLSocket]:
    """A TLS connection with the certificate of a node, for any bytes."""
    context = ssl.create_default_context(cafile=certs / "authority" / "ca.pem")
    folder = certs / "nodes" / node
    context.load_cert_chain(folder / "node.pem", folder / "node.key")
    context.set_alpn_protocols(["h2"])
    with (
        plain(port) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as tls,
    ):
        yield tls
