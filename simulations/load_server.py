"""The servers of the load benchmark, each in its own process that takes orders from a pipe."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import numpy as np

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.experiment.config import FederationSection
from fedpriv.privacy.round import add_up
from fedpriv.server.collection import End
from fedpriv.server.deployment import GrpcTransport
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment
from fedpriv.server.gateway import (
    Authentication,
    RateLimit,
    by_certificate,
)
from fedpriv.server.service import Listener, Service, TransferLimits, listening
from fedpriv.wire import CHUNK_BYTES, Price, RunState, Status, TaskDescription, Welcome
from fedpriv.wire.naming import Address
from simulations.load_site import Site

BARE = "bare.Stream"
_PATIENCE = FederationSection(
    enrolment="none", deadline_seconds=3600.0, absent_seconds=3600.0
).model_copy(update={"least_nodes": 0})
_CALLS_PER_MINUTE = 600
_TASK = TaskDescription("softmax", {}, 0, "cross-entropy")


@dataclass(frozen=True)
class Round:
    """Asks the server for a round."""

    number: int  # of the round
    cohort: list[int]  # numbers of the nodes to ask, ascending
    total: Path  # file for the sum, as `numpy.save` writes it


@dataclass(frozen=True)
class Done:
    """Says that a round is over."""

    seconds: float  # from the request to the sum
    connected: int  # number of connected nodes
    peak: int  # bytes of the process's peak memory since it began (VmHWM)


def serve(pipe: Connection, site: Site, limits: TransferLimits) -> None:
    """Run the server of `fedpriv serve`, with its transport, for the rounds that the pipe orders.

    Sends its port, then a `Done` for each `Round`; ends when the pipe is closed.
    """
    enrolment = Enrolment.load(site.enrolment)
    identify = by_certificate(EnrolledCertificates(site.enrolment))
    status = Status("load", 0, 1, 0.0, 1.0, 1e-6, site.nodes, 0, site.nodes, RunState.WAITING)
    event = poisson_gaussian(0.5, 1.0, population=site.nodes)
    price = Price(event, 0, 1.0, 1e-6, 0)

    def welcome_of(node: str) -> Welcome:
        return Welcome("load", site.nodes, enrolment.users_of(node).copy(), _TASK)

    authentication = Authentication(identify, enrolment, RateLimit(_CALLS_PER_MINUTE))
    service = Service(authentication, welcome_of, status, limits)
    with listening(service, Address("127.0.0.1", 0), site.tls) as server:
        transport = GrpcTransport(server, lambda _: price, _PATIENCE)
        pipe.send(server.address.port)
        with suppress(EOFError):
            while True:
                pipe.send(_collected(pipe.recv(), site, server, transport))
        server.call(lambda: server.service.connections.end_all(End.RUN_OVER))


def _collected(order: Round, site: Site, server: Listener, transport: GrpcTransport) -> Done:
    request = site.request(order.number, order.cohort)
    began = time.perf_counter()
    added = add_up(transport.collect(request), request.clipping, len(order.cohort))
    seconds = time.perf_counter() - began
    np.save(order.total, added.total)
    return Done(seconds, len(server.service.connections), peak_bytes())


def serve_bare(pipe: Connection, site: Site) -> None:
    """Run a bare gRPC server with the same certificates.

    It sends its port, and ends when the pipe is closed. Download sends as many bytes as the model
    has, from messages that were made before; Upload takes messages and discards them. grpc.aio has
    its defaults, and nothing stands between it and the bytes: no protobuf, no interceptor, no limit
    on simultaneous calls.
    """
    asyncio.run(_serve_bare(pipe, site))


async def _serve_bare(pipe: Connection, site: Site) -> None:
    parts = messages(site.model_bytes)

    async def download(_: bytes, context: grpc.aio.ServicerContext) -> None:
        for part in parts:
            await context.write(part)

    async def upload(received: AsyncIterator[bytes], _: grpc.aio.ServicerContext) -> bytes:
        async for _part in received:
            pass
        return b""

    server = grpc.aio.server()
    methods = {
        "Download": grpc.unary_stream_rpc_method_handler(download),
        "Upload": grpc.stream_unary_rpc_method_handler(upload),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(BARE, methods),))
    port = server.add_secure_port("127.0.0.1:0", site.credentials)
    await server.start()
    pipe.send(port)
    with suppress(EOFError):
        await asyncio.to_thread(pipe.recv)
    await server.stop(None)


def messages(size: int) -> list[bytes]:
    """Return `size` bytes, in messages as long as a chunk's data; the last has the remainder."""
    count, remainder = divmod(size, CHUNK_BYTES)
    return [bytes(CHUNK_BYTES)] * count + [bytes(remainder)] * bool(remainder)


def peak_bytes(process: int | str = "self") -> int:
    """Return the peak memory of a process since it began.

    Not by `getrusage`, where Linux also counts the parent's earlier memory.
    """
    status = Path(f"/proc/{process}/status")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="ascii"))
    if match is None:
        raise RuntimeError(f"{status} does not have the peak memory")
    return int(match[1]) * 1024
