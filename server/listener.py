"""How calls reach the service: messages are bounded before protobuf reads them.

The gRPC server in a thread of its own, from bind to a clean end.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedpriv.errors import InvalidValueError, WireError
from fedpriv.server.addresses import Address
from fedpriv.server.authentication import Behaviour, Context, Guard, RefusedCallError
from fedpriv.server.collection import End
from fedpriv.server.service import Service
from fedpriv.wire import NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES, parse
from fedpriv.wire import federation_pb2 as pb

SERVICE = "fedpriv.v1.Federation"
_SMALL = 8192  # bytes of a message without tensors
Kind = TypeVar("Kind", bound=Message)


def generic_handler(service: Service) -> grpc.GenericRpcHandler:
    """The methods of federation.proto; a message that is too long or none ends its call."""
    methods = {
        "Connect": grpc.unary_stream_rpc_method_handler(
            _reading(pb.Hello, service.connect), None, _written
        ),
        "Download": grpc.unary_stream_rpc_method_handler(
            _reading(pb.RoundId, service.download)  # writes what was serialised before
        ),
        "Upload": grpc.stream_unary_rpc_method_handler(service.upload, _part, _written),
        "FetchLedger": grpc.unary_stream_rpc_method_handler(
            _reading(pb.LedgerRequest, service.fetch_ledger), None, _written
        ),
        "GetStatus": grpc.unary_unary_rpc_method_handler(
            _reading(pb.StatusRequest, service.get_status), None, _written
        ),
    }
    return grpc.method_handlers_generic_handler(SERVICE, methods)


def _reading(kind: type[Kind], method: Callable[[Kind, Context], Awaitable[object]]) -> Behaviour:
    """The method, behind a parser; gRPC's own way would log a traceback for each malformed one."""

    async def read(data: object, context: Context) -> object:
        try:
            request = parse(kind, cast(bytes, data), _SMALL)
        except WireError as error:
            raise RefusedCallError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error
        return await method(request, context)

    return read


def _part(data: bytes) -> pb.UploadPart:
    """A part of an answer; raises WireError where the answer is read."""
    return parse(pb.UploadPart, data, SERVER_RECEIVES_BYTES)


def _written(message: Message) -> bytes:
    return bytes(message.SerializeToString())


_log = logging.getLogger(__name__)
_GRACE_SECONDS = 5.0
_WATCH_SECONDS = 2.0
OPTIONS: Sequence[tuple[str, int]] = (
    ("grpc.max_receive_message_length", SERVER_RECEIVES_BYTES),
    ("grpc.max_send_message_length", NODE_RECEIVES_BYTES),
    ("grpc.max_metadata_size", 8192),
    ("grpc.max_concurrent_streams", 8),  # of one connection
    # What a node may send before anybody reads it; without a bound, memory grows with nodes.
    ("grpc.http2.lookahead_bytes", 2**18),
    ("grpc.http2.bdp_probe", 0),
    # A peer that vanished without a word is noticed after the first of these and the minute that
    # gRPC waits for the answer to a ping; on a slow way up, that answer waits behind an update.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Nodes may ask as well, but not flood.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 3),
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 300_000),  # of one without calls
    ("grpc.so_reuseport", 0),  # two servers on one port would each see half of the nodes
)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Files:
    """What the server shows, and whom it trusts.

    Attributes:
        ca: certificate of the authority of the nodes, PEM.
        certificate: of the server, PEM.
        key: of the certificate, PEM.
    """

    ca: Path
    certificate: Path
    key: Path

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials that demand a certificate of every peer.

        Raises:
            InvalidValueError: a file cannot be read.
        """
        try:
            ca, certificate, key = (
                path.read_bytes() for path in (self.ca, self.certificate, self.key)
            )
        except OSError as error:
            raise InvalidValueError(f"{error.filename} cannot be read: {error.strerror}") from error
        return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


@dataclass(frozen=True)
class Listening:
    """A running server.

    Attributes:
        address: where it listens; its port is the one in use.
        service: its handlers, for the event loop alone.
        guard: what calls pass before them.
        loop: of the server's thread.
    """

    address: Address
    service: Service
    guard: Guard
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the event loop, and wait for its result."""
        done: Future[Result] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result()


@contextmanager
def listening(
    make_service: Callable[[], tuple[Service, Guard]],
    address: Address,
    credentials: grpc.ServerCredentials | None,
) -> Iterator[Listening]:
    """Serve in a thread until the block is left; then end all connections.

    Args:
        make_service: makes handlers and their guard, on the event loop.
        address: where to listen.
        credentials: of TLS; None: plain text.

    Raises:
        InvalidValueError: it cannot listen there.
    """
    started: Future[Listening] = Future()
    stop = threading.Event()

    async def serve() -> None:
        service, guard = make_service()
        opened = await _opened(service, guard, address, credentials)
        loop = asyncio.get_running_loop()
        started.set_result(Listening(opened.address, service, guard, loop))
        stopping = loop.run_in_executor(None, stop.wait)
        while not (await asyncio.wait({stopping}, timeout=_WATCH_SECONDS))[0]:
            if not await _accepts(opened.address):
                opened = await _reopened(opened, service, guard, credentials)
        await opened.healthy.enter_graceful_shutdown()
        service.roster.end_all(End.SHUTTING_DOWN)
        await opened.server.stop(_GRACE_SECONDS)

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


@dataclass(frozen=True)
class _Opened:
    server: grpc.aio.Server
    healthy: health.aio.HealthServicer
    address: Address


async def _opened(
    service: Service, guard: Guard, address: Address, credentials: grpc.ServerCredentials | None
) -> _Opened:
    server = grpc.aio.server(interceptors=[guard], options=OPTIONS)
    server.add_generic_rpc_handlers((generic_handler(service),))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    port = _bound(server, address, credentials)
    await server.start()
    for name in ("", SERVICE):
        await healthy.set(name, health_pb2.HealthCheckResponse.SERVING)
    return _Opened(server, healthy, Address(address.host, port))


async def _accepts(address: Address) -> bool:
    """Whether somebody listens there; grpcio 1.85 stops at a call of a method that is no UTF-8."""
    try:
        async with asyncio.timeout(_WATCH_SECONDS):
            _, writer = await asyncio.open_connection(address.host, address.port)
    except ConnectionRefusedError:
        return False
    except (OSError, TimeoutError):
        return True  # too much to do, or no descriptor left, is no reason to begin anew
    writer.close()
    return True


async def _reopened(
    opened: _Opened, service: Service, guard: Guard, credentials: grpc.ServerCredentials | None
) -> _Opened:
    """Listen again at the same place; the nodes' calls end, and they connect again."""
    _log.error("gRPC gave up listening on %s; the server listens again", opened.address)
    await opened.server.stop(None)
    try:
        return await _opened(service, guard, opened.address, credentials)
    except InvalidValueError as error:
        _log.error("%s; the server will try again", error)
        return opened


def _bound(
    server: grpc.aio.Server, address: Address, credentials: grpc.ServerCredentials | None
) -> int:
    try:
        if credentials is None:
            return int(server.add_insecure_port(str(address)))
        return int(server.add_secure_port(str(address), credentials))
    except RuntimeError as error:
        raise InvalidValueError(
            f"the server cannot listen on {address}: the port is taken, the host is not of this "
            "machine, or key and certificate do not fit"
        ) from error
