"""A server and the processes of its nodes, on loopback over TLS, with both kinds of trust.

All of it is the code of `fedpriv serve` and `fedpriv join`, except training: each node has one
user, who is drawn in every round and always contributes the same. Processes are forked, so that
they share the memory of imported modules.
"""

import asyncio
import multiprocessing
import os
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

import numpy as np

from fedpriv.clients.connection import Backoff, FederationStub, identity_of
from fedpriv.clients.consent import Consent
from fedpriv.clients.journal import Journal
from fedpriv.clients.ledger_check import OfferPolicy
from fedpriv.clients.membership import Membership, NodeSettings, OfferHandler
from fedpriv.clients.secure import SecureSums
from fedpriv.clients.worker import Built, HostSettings, Loaded, Worker
from fedpriv.experiment.config import FederationSection
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.round import PartialSum, add_up
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.server.collection import End
from fedpriv.server.deployment import GrpcTransport
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment
from fedpriv.server.gateway import Authentication, RateLimit, by_certificate
from fedpriv.server.service import Service, TransferLimits, listening
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import (
    Hello,
    Price,
    Proposal,
    RunState,
    Status,
    TaskDescription,
    Welcome,
    digest_of,
    enrolment_digest,
)
from fedpriv.wire.naming import Address
from simulations.load_site import Site, name_of, user_of

_MANY = 20  # nodes
_ROUNDS, _ROUNDS_OF_MANY = 11, 3  # of each kind; the first pays for connections and for memory
_SECONDS, _REST_SECONDS = 600.0, 1.0
_LOCAL = LocalTraining(0.1, steps=1, max_examples=1)
_TASK = TaskDescription("softmax", {}, 0, "cross-entropy")
_RECEIVED = 128  # offset of tcpi_bytes_received in TCP_INFO of Linux


@dataclass(frozen=True)
class Cost:
    """The cost of a round."""

    seconds: float  # from the proposal to the sum
    server: float  # seconds of the server's processor time
    node: float  # seconds of a node's processor time, on average
    sent: float  # bytes that reached the server from a node, on average, with TLS


def costs(secure: SecureSum, parameters: int) -> tuple[Cost, Cost]:
    """Return median costs of a round with a trusted server, and of one with an untrusted server."""
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder) / "certs", secure.nodes, parameters)
        site.issue()
        with _nodes(site) as (processes, start):
            return _rounds(site, secure, processes, start)


@contextmanager
def _nodes(site: Site) -> Iterator[tuple[list[BaseProcess], Callable[[int], None]]]:
    """Run processes of all nodes; yield them and a function that sends them the server's port."""
    context, pipes, processes = multiprocessing.get_context("fork"), list[Connection](), []
    for number in range(site.nodes):
        parent_end, child_end = context.Pipe()
        pipes.append(parent_end)
        processes.append(context.Process(target=_node, args=(child_end, site, number), daemon=True))
        processes[-1].start()

    def start(port: int) -> None:
        for pipe in pipes:
            pipe.send(port)

    try:
        yield cast("list[BaseProcess]", processes), start
    finally:
        for process in processes:
            process.terminate()
            process.join()


@dataclass
class _Trainer:
    """A stand-in for a training process."""

    site: Site
    number: int
    loaded: Loaded

    async def prepare(self, _: Welcome) -> None:
        layout = self.site.request(0, []).clipping.layout
        self.built = Built(layout, Layout((), ()))

    async def learn(self, _: Proposal) -> None:
        """Do nothing."""

    async def train(self, request: RoundRequest, _: float) -> PartialSum:
        total = self.site.contribution(self.number % self.site.kinds, request.clipping)
        return PartialSum("", 1, total, 1)


def _node(pipe: Connection, site: Site, number: int) -> None:
    """Run a node until it is stopped."""
    server, name = f"localhost:{pipe.recv()}", name_of(number)
    enrolled = enrolment_digest(Enrolment.load(site.enrolment).enrolled)
    consent, backoff = Consent(enrolment=enrolled), Backoff()
    digest = digest_of([user_of(number)])
    identity = identity_of(site.node_folder(number), None)

    async def take_part() -> None:
        worker = cast(Worker, _Trainer(site, number, Loaded(1, digest, bytes(8))))
        with Journal(site.folder / f"{name}.sqlite") as journal:
            async with FederationStub.open(server, identity) as stub:
                policy = OfferPolicy(journal, consent, None, np.zeros(1, np.int64))
                secure = SecureSums(stub, worker, policy, identity, backoff)
                handler = OfferHandler(stub, worker, policy, backoff, secure)
                settings = NodeSettings(server, HostSettings("none"), once=True)
                hello = Hello(name, digest)
                await Membership(settings, hello, handler).last()

    asyncio.run(take_part())


def _rounds(
    site: Site, secure: SecureSum, processes: list[BaseProcess], start: Callable[[int], None]
) -> tuple[Cost, Cost]:
    """Run rounds of both kinds in turn, on a server in this process."""
    enrolment, everybody = Enrolment.load(site.enrolment), site.cohort(site.nodes)
    clipping = site.request(0, []).clipping
    trusted, untrusted = (_mechanism(site.nodes, clipping, trust) for trust in (None, secure))
    prices = {m.secure_sum: Price(m.event, 0, 1.0, 1e-6, 0) for m in (trusted, untrusted)}
    section = FederationSection(
        enrolment="none", deadline_seconds=_SECONDS, absent_seconds=_SECONDS
    ).model_copy(update={"least_nodes": site.nodes})

    def welcome_of(node: str) -> Welcome:
        users = enrolment.users_of(node).copy()
        return Welcome(enrolment.population_id, site.nodes, users, _TASK, "", enrolment.enrolled)

    status = Status("load", 0, 1, 0.0, 1.0, 1e-6, site.nodes, 0, site.nodes, RunState.WAITING)
    identify = by_certificate(EnrolledCertificates(site.enrolment))
    limits = TransferLimits.within(256 * 2**20, site.parameters, _SECONDS)
    service = Service(
        Authentication(identify, enrolment, RateLimit(100_000)), welcome_of, status, limits
    )
    with listening(service, Address("127.0.0.1", 0), site.tls) as server:
        start(server.address.port)

        def trusting(number: int) -> None:
            transport = GrpcTransport(server, lambda _: prices[None], section)
            request = replace(site.request(number, everybody), local=_LOCAL)
            transport.prepare(request)
            added = add_up(transport.collect(request), clipping, site.nodes)
            assert np.array_equal(added.total, site.sum_of(everybody))

        def trusting_nobody(number: int) -> None:
            transport = GrpcTransport(server, lambda _: prices[secure], section)
            request = replace(site.request(number, []), local=_LOCAL)
            transport.prepare(request)
            opened = transport.collect_masked(request, untrusted, 0.0)()
            assert opened is not None
            noise = clipping.in_units(opened.total - site.sum_of(everybody))
            share = np.std(noise) / (untrusted.noise_growth * untrusted.query.noise_stddevs[0])
            assert abs(share - 1.0) < 0.01

        count = _ROUNDS if site.nodes <= _MANY else _ROUNDS_OF_MANY
        turns = product(range(count), enumerate((trusting, trusting_nobody)))
        round_costs = [
            _cost(partial(work, 2 * turn + kind), processes) for turn, (kind, work) in turns
        ]
        server.call(lambda: server.service.connections.end_all(End.RUN_OVER))
    return _median(round_costs[2::2]), _median(round_costs[3::2])


def _mechanism(nodes: int, clipping: Clipping, secure: SecureSum | None) -> GaussianMechanism:
    sampling = PoissonSampling(nodes, 1.0)
    return GaussianMechanism.calibrated(sampling, clipping, 1.0, (1.0,), secure_sum=secure)


def _cost(work: Callable[[], None], processes: list[BaseProcess]) -> Cost:
    """Return the cost of a round, which ends at the nodes a moment later than at the server."""

    def at_nodes() -> float:
        clocks = ((~process.pid << 3) | 2 for process in processes if process.pid)
        return sum(map(time.clock_gettime, clocks)) / len(processes)

    start = at_nodes(), time.process_time(), _received(), time.perf_counter()
    work()
    seconds, server = time.perf_counter() - start[3], time.process_time() - start[1]
    time.sleep(_REST_SECONDS)
    node, sent_bytes = at_nodes() - start[0], (_received() - start[2]) / len(processes)
    return Cost(seconds, server, node, sent_bytes)


def _received() -> int:
    """Return the bytes that have arrived over this process's TCP connections."""
    total = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not str(file.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(file.name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                    total += struct.unpack_from("Q", info, _RECEIVED)[0]
    return total


def _median(round_costs: list[Cost]) -> Cost:
    return Cost(
        *(statistics.median(numbers) for numbers in zip(*map(astuple, round_costs), strict=True))
    )
