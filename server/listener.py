"""Where the server listens, with which credentials, and the gRPC server in its own thread."""

import asyncio
import ipaddress
import logging
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedpriv.config import FederationSection
from fedpriv.errors import InvalidValueError
from fedpriv.server.authentication import (
    Authentication,
    Context,
    Identify,
    by_certificate,
    by_declaration,
)
from fedpriv.server.certificates import load_ca
from fedpriv.server.collection import End
from fedpriv.server.enrolment import EnrolledCertificates
from fedpriv.server.service import Service
from fedpriv.wire import NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES, parse
from fedpriv.wire import federation_pb2 as pb

_log = logging.getLogger(__name__)
SERVICE = "fedpriv.v1.Federation"
_ADDRESS = re.compile(r"(\[(?P<six>[^\[\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>[0-9]{1,5})")
_SMALL = 8192  # bytes of a message without tensors
_GRACE_SECONDS = 5.0
_WATCH_SECONDS = 2.0
OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", SERVER_RECEIVES_BYTES),
    ("grpc.max_send_message_length", NODE_RECEIVES_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.max_concurrent_streams", 8),  # of one connection
    # What a node may send before it is read; without a bound, memory grows with nodes.
    ("grpc.http2.lookahead_bytes", 2**18),
    ("grpc.http2.bdp_probe", 0),
    # A peer that vanished without a word is noticed after the first of these and the minute that
    # gRPC waits for the answer to a ping; on a slow uplink, that answer waits behind an update.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Nodes may ping as well, but not flood.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 300_000),  # of one without calls
    ("grpc.so_reuseport", 0),  # two servers on one port would each see half of the nodes
)
Kind = TypeVar("Kind", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Address:
    """A place to listen: a DNS name or IP address, without brackets; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, key: str) -> Self:
        """Read "host:port", "192.0.2.7:7443" or "[::1]:7443", the value of a key."""
        match = _ADDRESS.fullmatch(text)
        try:
            if match is None or int(match["port"]) >= 2**16:
                raise ValueError
            host = match["host"] or str(ipaddress.IPv6Address(match["six"]))
        except ValueError as error:
            shown = text if len(text) <= 100 else f"{text[:100]}…"
            sentence = f"{key} is {shown!r}; it must be HOST:PORT or [IPv6]:PORT"
            raise InvalidValueError(sentence) from error
        return cls(host, int(match["port"]))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, ValueError):  # unknown, or not a name at all
            return False
        # A scope such as "%lo" may follow an IPv6 address.
        addresses = {str(entry[4][0]).partition("%")[0] for entry in found}
        return all(ipaddress.ip_address(address).is_loopback for address in addresses)


@dataclass(frozen=True)
class Endpoint:
    """An address, and how callers are known there."""

    address: Address
    credentials: grpc.ServerCredentials | None  # of TLS; None: plain text
    identify: Identify


def endpoint_of(section: FederationSection, *, insecure: bool) -> Endpoint:
    """The endpoint that a configuration describes.

    With `insecure` it speaks plain text, where a node is believed to be the one it says: on
    loopback only. Otherwise certificates must be there and usable, and some enrolled.
    """
    address = Address.parse(section.address, "federation.address")
    if insecure:
        if not address.on_loopback:
            raise InvalidValueError(
                f"federation.address is {section.address!r}; without TLS it must be on loopback, "
                "such as 127.0.0.1:7443"
            )
        _log.warning("plain text: any process on this machine can claim to be any node")
        return Endpoint(address, None, by_declaration)
    if section.certificates is None:
        raise InvalidValueError(
            "federation.certificates is absent; it must be a folder with ca.pem, server.pem "
            "and server.key, as `fedpriv certs init` makes it, or --insecure be given"
        )
    certificates = EnrolledCertificates(Path(section.enrolment))
    credentials = tls_credentials(Path(section.certificates))
    if not certificates.nodes():
        raise InvalidValueError(
            f"{section.enrolment} enrols no certificate; each node's table must have the key "
            "certificate, with the fingerprint that `fedpriv certs issue` prints"
        )
    return Endpoint(address, credentials, by_certificate(certificates))


def tls_credentials(folder: Path) -> grpc.ServerCredentials:
    """Credentials that show the server's certificate and demand one of every peer."""
    load_ca(folder / "ca.pem")
    try:
        ca, certificate, key = (
            (folder / name).read_bytes() for name in ("ca.pem", "server.pem", "server.key")
        )
    except OSError as error:
        raise InvalidValueError(f"{error.filename} cannot be read: {error.strerror}") from error
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


def _generic_handler(service: Service) -> grpc.GenericRpcHandler:
    """The methods of federation.proto; a message that is too long or malformed ends its call."""
    stream = grpc.unary_stream_rpc_method_handler
    methods = {
        "Connect": stream(_reading(pb.Hello, service.connect), None, _serialised),
        "Download": stream(_reading(pb.RoundId, service.download)),  # writes what is serialised
        "Upload": grpc.stream_unary_rpc_method_handler(service.upload, _part, _serialised),
        "FetchLedger": stream(_reading(pb.LedgerRequest, service.fetch_ledger), None, _serialised),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            _reading(pb.StatusRequest, service.get_status), None, _serialised
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _reading(
    kind: type[Kind], method: Callable[[Kind, Context], Awaitable[object]]
) -> Callable[[bytes, Context], Awaitable[object]]:
    """The method, behind a parser; gRPC's own would log a traceback for each malformed request."""

    async def read(data: bytes, context: Context) -> object:
        return await method(parse(kind, data, _SMALL), context)

    return read


def _part(data: bytes) -> pb.UploadPart:
    return parse(pb.UploadPart, data, SERVER_RECEIVES_BYTES)  # a WireError where it is read


def _serialised(message: Message) -> bytes:
    return bytes(message.SerializeToString())


@dataclass(frozen=True)
class Listener:
    """A running server; the port of its address is the one in use."""

    address: Address
    service: Service  # for the event loop alone
    authentication: Authentication
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the event loop, and wait for its result."""

        async def run() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()


@contextmanager
def listening(
    service: Service,
    authentication: Authentication,
    address: Address,
    credentials: grpc.ServerCredentials | None,
) -> Iterator[Listener]:
    """Serve in a thread until the block is left; then end all connections.

    Without credentials of TLS it is plain text. InvalidValueError: it cannot listen there.
    """
    started: Future[Listener] = Future()
    stop = threading.Event()

    async def serve() -> None:
        server, healthy, at = await _bind(service, authentication, address, credentials)
        loop = asyncio.get_running_loop()
        started.set_result(Listener(at, service, authentication, loop))
        stopping = loop.run_in_executor(None, stop.wait)
        while not (await asyncio.wait({stopping}, timeout=_WATCH_SECONDS))[0]:
            if not await _accepts(at):
                _log.error("gRPC stopped listening on %s; the server listens again", at)
                await server.stop(None)  # the nodes' calls end, and they connect again
                try:
                    server, healthy, at = await _bind(service, authentication, at, credentials)
                except InvalidValueError as error:
                    _log.error("%s; the server will try again", error)
        await healthy.enter_graceful_shutdown()
        service.connections.end_all(End.SHUTTING_DOWN)
        await server.stop(_GRACE_SECONDS)

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    thread = threading.Thread(target=run, name="fedpriv service")
    thread.start()
    try:
        yield started.result()
    finally:
        stop.set()
        thread.join()


async def _bind(
    service: Service,
    authentication: Authentication,
    address: Address,
    credentials: grpc.ServerCredentials | None,
) -> tuple[grpc.aio.Server, health.aio.HealthServicer, Address]:
    server = grpc.aio.server(interceptors=[authentication], options=OPTIONS)
    server.add_generic_rpc_handlers((_generic_handler(service),))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    try:
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    except RuntimeError as error:
        raise InvalidValueError(
            f"the server cannot listen on {address}: the port is taken, the host is not of this "
            "machine, or key and certificate do not fit"
        ) from error
    await server.start()
    for name in ("", SERVICE):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    return server, healthy, Address(address.host, port)


async def _accepts(address: Address) -> bool:
    """Whether the port takes connections; grpcio 1.85 stops at a method name that is not UTF-8."""
    try:
        async with asyncio.timeout(_WATCH_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return True  # an overloaded machine or a lack of descriptors is no reason to start anew
    writer.close()
    return True
