"""Peers that do not keep to the rules: bytes in place of messages, and HTTP/2 by hand."""

import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc

SERVICE = "/fedpriv.v1.Federation/"
HEALTH = "/grpc.health.v1.Health/"
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
    "Check": lambda channel: one(channel, HEALTH + "Check"),
    "Watch": lambda channel: first(channel, HEALTH + "Watch"),
}
"""Each method of the service and of the health service, called with an empty message."""


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 (RFC 9113, section 4.1)."""
    length = len(payload).to_bytes(3, "big")
    return length + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def settings(window: int = 65535) -> bytes:
    """A frame that says how many bytes of a stream may come unasked."""
    return frame(4, 0, 0, struct.pack(">HI", 4, window))


def called(method: str, message: bytes, *, stream: int = 1, last: bool = True) -> bytes:
    """Frames that begin a call and send a message."""
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
    data = b"\0" + len(message).to_bytes(4, "big") + message
    return frame(1, 4, stream, block) + frame(0, int(last), stream, data)


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
