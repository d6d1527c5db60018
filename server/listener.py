"""The gRPC server in a thread of its own, from bind to a clean end."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedpriv.errors import InvalidValueError
from fedpriv.server.authentication import Authentication, Context
from fedpriv.server.collection import End
from fedpriv.server.endpoint import Address
from fedpriv.server.service import Service
from fedpriv.wire import NODE_RECEIVES_BYTES, SERVER_RECEIVES_BYTES, parse
from fedpriv.wire import federation_pb2 as pb

_log = logging.getLogger(__name__)
SERVICE = "fedpriv.v1.Federation"
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


def _generic_handler(service: Service) -> grpc.GenericRpcHandler:
    """The methods of federation.proto; a message that is too long or malformed ends its call."""
    methods = {
        "Connect": grpc.unary_stream_rpc_method_handler(
            _reading(pb.Hello, service.connect), None, _serialised
        ),
        "Download": grpc.unary_stream_rpc_method_handler(
            _reading(pb.RoundId, service.download)  # writes what is serialised already
        ),
        "Upload": grpc.stream_unary_rpc_method_handler(service.upload, _part, _serialised),
        "FetchLedger": grpc.unary_stream_rpc_method_handler(
            _reading(pb.LedgerRequest, service.fetch_ledger), None, _serialised
        ),
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
    """A part of an answer; raises WireError where the answer is read."""
    return parse(pb.UploadPart, data, SERVER_RECEIVES_BYTES)


def _serialised(message: Message) -> bytes:
    return bytes(message.SerializeToString())


@dataclass(frozen=True)
class Listener:
    """A running server.

    Attributes:
        address: where it listens; its port is the one in use.
        service: its handlers, for the event loop alone.
        authentication: what calls pass before them.
        loop: of the server's thread.
    """

    address: Address
    service: Service
    authentication: Authentication
    loop: asyncio.AbstractEventLoop

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function on the event loop, and wait for its result."""

        async def run() -> Result:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result()


@contextmanager
def listening(
    make_service: Callable[[], tuple[Service, Authentication]],
    address: Address,
    credentials: grpc.ServerCredentials | None,
) -> Iterator[Listener]:
    """Serve in a thread until the block is left; then end all connections.

    Args:
        make_service: makes handlers and what calls pass before them, on the event loop.
        address: where to listen.
        credentials: of TLS; None: plain text.

    Raises:
        InvalidValueError: it cannot listen there.
    """
    started: Future[Listener] = Future()
    stop = threading.Event()

    async def serve() -> None:
        service, authentication = make_service()
        bound = await _bind(service, authentication, address, credentials)
        loop = asyncio.get_running_loop()
        started.set_result(Listener(bound.address, service, authentication, loop))
        stopping = loop.run_in_executor(None, stop.wait)
        while not (await asyncio.wait({stopping}, timeout=_WATCH_SECONDS))[0]:
            if not await _accepts(bound.address):
                _log.error("gRPC stopped listening on %s; the server listens again", bound.address)
                await bound.server.stop(None)  # the nodes' calls end, and they connect again
                try:
                    bound = await _bind(service, authentication, bound.address, credentials)
                except InvalidValueError as error:
                    _log.error("%s; the server will try again", error)
        await bound.healthy.enter_graceful_shutdown()
        service.connections.end_all(End.SHUTTING_DOWN)
        await bound.server.stop(_GRACE_SECONDS)

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
class _Bound:
    server: grpc.aio.Server
    healthy: health.aio.HealthServicer
    address: Address


async def _bind(
    service: Service,
    authentication: Authentication,
    address: Address,
    credentials: grpc.ServerCredentials | None,
) -> _Bound:
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
    return _Bound(server, healthy, Address(address.host, port))


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
