"""`fedpriv serve`: the plan that was simulated, on real nodes over gRPC."""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from rich.console import Console
from threadpoolctl import threadpool_limits

from fedpriv.build import Enrolled, Experiment
from fedpriv.config import FederationSection
from fedpriv.errors import InvalidValueError, StoppedError
from fedpriv.privacy.round import PartialSum, PrivacyRecords, RoundRequest, Transport
from fedpriv.run.run import Outcome, carry_out, released_text
from fedpriv.run.setup import RunSetup
from fedpriv.server.announcement import LedgerLines, prices, status_at_start, welcomes
from fedpriv.server.authentication import Authentication, RateLimit
from fedpriv.server.collection import Collection, End
from fedpriv.server.endpoint import Address, Endpoint, endpoint_of
from fedpriv.server.enrolment import Enrolment
from fedpriv.server.listener import Listener, listening
from fedpriv.server.metrics import Monitor
from fedpriv.server.service import Service, TransferLimits
from fedpriv.training.rounds import OnRound, RoundResult, Stop
from fedpriv.wire import Price, RunState, Status, encode_welcome

_log = logging.getLogger(__name__)
_FAREWELL_SECONDS = 10.0  # the longest wait for nodes that read the ledger once more
_IDLE_SECONDS = 1.0  # without a call, after which there is no such wait


@dataclass(frozen=True)
class Patience:
    """How long nodes are waited for.

    Attributes:
        deadline: seconds from the offer to the end of a round.
        absent: seconds to wait for a node that is not connected.
        fixed: whether every round takes until its deadline.
        nodes: a round begins when at least so many are connected.
    """

    deadline: float
    absent: float
    fixed: bool
    nodes: int


class GrpcTransport(Transport):
    """Asks nodes that are connected, from the thread of the training loop."""

    def __init__(
        self,
        listener: Listener,
        enrolment: Enrolment,
        price_of: Callable[[RoundRequest], Price],
        patience: Patience,
    ) -> None:
        self._listener, self._service, self._enrolment = listener, listener.service, enrolment
        self._price_of, self._patience = price_of, patience
        self._stopping = threading.Event()
        self._collection: Collection | None = None

    def stop(self) -> None:
        """Abandon the round that is collected, and every later one; safe in a signal handler."""
        self._stopping.set()
        self._listener.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._service.arrivals.set()
        if self._collection is not None:
            self._collection.finish()

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the contribution or sum of each node that answers in time.

        Raises:
            StoppedError: `stop` was called; what came was dropped.
        """
        self._await_nodes()
        price = self._price_of(request)
        collection = self._listener.call(lambda: self._open(request, price))
        watch = asyncio.run_coroutine_threadsafe(self._watch(collection), self._listener.loop)
        try:
            while (partial := collection.results.get()) is not None:
                yield partial
                collection.taken()
        finally:
            watch.cancel()
            self._listener.call(lambda: self._close(collection))
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nothing was charged for this round")

    def _await_nodes(self) -> None:
        """Wait until enough nodes are connected; which ones are drawn does not matter."""
        service, least = self._service, self._patience.nodes

        async def enough() -> None:
            while len(service.connections) < least and not self._stopping.is_set():
                service.arrivals.clear()
                await service.arrivals.wait()

        if len(service.connections) < least:
            _log.info("waiting for %d nodes; %d connected", least, len(service.connections))
            asyncio.run_coroutine_threadsafe(enough(), self._listener.loop).result()
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; no node was asked")

    def _open(self, request: RoundRequest, price: Price) -> Collection:
        service = self._service
        collection = Collection(request, price, self._enrolment, self._patience.deadline)
        self._collection = service.collection = collection
        service.publish(replace(service.status, round=request.round, state=RunState.COLLECTING))
        for node in collection.waiting:
            connection, offer = service.connections.of(node), collection.offer_to(node)
            if connection is not None and offer is not None:
                connection.offer(offer)
        if self._stopping.is_set():
            collection.finish()
        return collection

    async def _watch(self, collection: Collection) -> None:
        """End the round when it can end."""
        patience, connections = self._patience, self._service.connections
        try:
            while left := collection.seconds_left(
                connections, patience.absent, fixed=patience.fixed
            ):
                collection.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await collection.changed.wait()
        finally:
            collection.finish()

    def _close(self, collection: Collection) -> None:
        collection.abandon()
        self._collection = None
        self._service.forget_round()
        self._service.publish(replace(self._service.status, state=RunState.RELEASING))


@dataclass(frozen=True)
class Deployment:
    """What a run on real nodes is made of.

    Attributes:
        experiment: what is run.
        section: how long nodes are waited for, and how much they may send.
        enrolment: where users are.
        endpoint: where nodes connect.
        ledger: path of the ledger.
    """

    experiment: Experiment
    section: FederationSection
    enrolment: Enrolment
    endpoint: Endpoint
    ledger: Path

    @contextmanager
    def listening(self, records: PrivacyRecords) -> Iterator[Listener]:
        """Let nodes connect until the block is left.

        Raises:
            InvalidValueError: the server cannot listen there.
        """
        plan, section, endpoint = self.experiment.plan, self.section, self.endpoint
        welcome_of = welcomes(self.experiment.config, self.enrolment)
        for node in self.enrolment.nodes:
            encode_welcome(welcome_of(node))  # what cannot be sent is refused before nodes connect
        dimension = plan.mechanism.clipping.layout.dimension
        memory = section.transfer_mebibytes * 2**20
        limits = TransferLimits.within(memory, dimension, section.transfer_seconds)
        status = status_at_start(plan, records, self.enrolment)
        monitor, rates = Monitor(), RateLimit(section.calls_per_minute)

        def make_service() -> tuple[Service, Authentication]:
            lines, identify = LedgerLines(self.ledger), endpoint.identify
            return (
                Service(self.enrolment, welcome_of, lines, identify, status, limits, monitor),
                Authentication(identify, self.enrolment, rates, monitor),
            )

        with ExitStack() as stack:
            if section.metrics_address is not None:
                address = Address.parse(section.metrics_address, "federation.metrics_address")
                stack.enter_context(monitor.served(address.host, address.port))
            serving = listening(make_service, endpoint.address, endpoint.credentials)
            yield stack.enter_context(serving)

    def transport(self, listener: Listener, records: PrivacyRecords) -> GrpcTransport:
        """The transport to the nodes that connect."""
        section = self.section
        patience = Patience(
            section.deadline_seconds,
            section.absent_seconds,
            section.fixed_length,
            section.least_nodes,
        )
        price_of = prices(self.experiment.plan, records)
        return GrpcTransport(listener, self.enrolment, price_of, patience)

    def follow(self, listener: Listener, first: int, run: Callable[[OnRound], Outcome]) -> Outcome:
        """Run the rounds and publish each; then tell nodes that the run is over, or the server."""
        service, rounds = listener.service, self.experiment.plan.rounds

        def publish(status: Status) -> None:
            listener.call(lambda: service.publish(status))

        def show(result: RoundResult) -> None:
            _log.info(released_text(result, rounds))
            waiting = replace(service.status, epsilon=result.epsilon, state=RunState.WAITING)
            publish(replace(waiting, round=result.number))

        publish(replace(service.status, round=first))
        state, end = RunState.STOPPED, End.SHUTTING_DOWN
        try:
            outcome = run(show)
            _log.info("the run ended: %s", outcome.stop)
            if outcome.stop is not Stop.ASKED:
                state, end = RunState.FINISHED, End.RUN_OVER
            return outcome
        finally:
            publish(replace(service.status, state=state))
            listener.call(lambda: service.connections.end_all(end))
            leave_at = time.monotonic() + (_FAREWELL_SECONDS if end is End.RUN_OVER else 0.0)
            idle_seconds = listener.authentication.idle_seconds
            while idle_seconds() < _IDLE_SECONDS and time.monotonic() < leave_at:
                time.sleep(0.1)


def serve(
    file: Path,
    assignments: list[str],
    out: Path | None,
    *,
    resume: bool,
    insecure: bool,
    leave: bool,
) -> None:
    """Run or resume an experiment on the nodes that connect, and print how it went.

    SIGTERM and SIGINT end it cleanly: a round that is collected is abandoned without a charge, one
    that is charged is released, and a checkpoint is written. A second one ends it at once.

    Args:
        file: the experiment, TOML, with a section `federation`.
        assignments: "a.b=value" overrides.
        out: folder of the run; by default a new one under runs/.
        resume: go on with the run in `out`, or start it there.
        insecure: plain text, on loopback only.
        leave: end with the run; otherwise go on serving ledger and status until stopped.

    Raises:
        FedprivError: something is wrong with the input, or the run cannot go on; the message says
            what.
    """
    beginning = RunSetup.of(file, assignments, out, resume=resume)
    section = beginning.config.federation
    if section is None:
        raise InvalidValueError(f"{file} has no section federation, which `fedpriv serve` needs")
    endpoint = endpoint_of(section, insecure=insecure)
    enrolment = Enrolment.load(Path(section.enrolment))
    users = Enrolled(enrolment.population_id, enrolment.population)
    experiment = beginning.on_nodes(section, users)
    deployment = Deployment(experiment, section, enrolment, endpoint, beginning.ledger)
    _run(deployment, beginning, leave=leave)


def _run(deployment: Deployment, beginning: RunSetup, *, leave: bool) -> None:
    """Run all rounds and print the result; then, unless told to leave, serve until stopped."""
    console, enrolment = Console(), deployment.enrolment
    asked, started = threading.Event(), []
    with ExitStack() as stack:
        # Updates are added up in many threads already; more would only wait for each other.
        stack.enter_context(threadpool_limits(1, "blas"))

        def hosted(_experiment: Experiment, records: PrivacyRecords) -> Transport:
            listener = stack.enter_context(deployment.listening(records))
            started.append(listener)
            transport = deployment.transport(listener, records)
            stack.enter_context(_stop_signals(asked, transport.stop))
            return transport

        def follow(
            experiment: Experiment, first: int, run: Callable[[OnRound], Outcome]
        ) -> Outcome:
            (listener,) = started
            console.print(
                f"{experiment.plan.run}: listening on {listener.address}, "
                f"{len(enrolment.nodes)} nodes and {enrolment.population} users are enrolled, "
                f"round {first} of {experiment.plan.rounds} is next, "
                f"folder {beginning.folder.path}",
                soft_wrap=True,
                highlight=False,
            )
            return deployment.follow(listener, first, run)

        carry_out(beginning, deployment.experiment, hosted, console, follow, clock=None)
        if not (leave or asked.is_set()):
            console.print("serving ledger and status until stopped")
            asked.wait()


@contextmanager
def _stop_signals(asked: threading.Event, stop: Callable[[], None]) -> Iterator[None]:
    """Set `asked` and call `stop` at the first SIGTERM or SIGINT; a second has its old effect."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def put_back() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(_number: int, _frame: FrameType | None) -> None:
        put_back()
        asked.set()
        stop()

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        put_back()
