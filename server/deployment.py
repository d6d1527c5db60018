"""Where the server listens, and how it knows who calls.

The transport over gRPC: offers a round to the nodes of the drawn users and yields what comes.

A deployment while it runs: the service on its event loop, the rounds in the main thread.

`fedpriv serve`: the plan that was simulated, on real nodes.
"""

import asyncio
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import grpc
from rich.console import Console
from threadpoolctl import threadpool_limits

from fedpriv.build import Experiment
from fedpriv.config import FederationSection
from fedpriv.errors import InvalidValueError, StoppedError
from fedpriv.privacy.round import Books, PartialSum, RoundRequest, Transport
from fedpriv.report.run_page import write_run_figures
from fedpriv.run.evaluation import Evaluator
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import (
    Cadence,
    Outcome,
    Rounds,
    conduct,
    print_result,
    released_text,
    state_to_start_from,
    warn,
)
from fedpriv.run.setup import RunSetup
from fedpriv.server.addresses import Address
from fedpriv.server.authentication import Guard, Identify, RateLimit, certified, declared
from fedpriv.server.certificates import load_ca
from fedpriv.server.collection import Collecting, End
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment, enrolled_experiment
from fedpriv.server.listener import Files, Listening, listening
from fedpriv.server.metrics import Monitor
from fedpriv.server.service import Service, Transfers
from fedpriv.server.status import LedgerLines, prices, status_at_start, welcomes
from fedpriv.training.rounds import RoundResult, ServerState, Stop
from fedpriv.wire import Price, RunState, encode_welcome

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Door:
    """An address, and what callers must show there.

    Attributes:
        address: where to listen.
        credentials: of TLS; None: plain text.
        identify: names the node behind a call.
    """

    address: Address
    credentials: grpc.ServerCredentials | None
    identify: Identify


def door_of(section: FederationSection, *, insecure: bool) -> Door:
    """The door that a configuration describes.

    Args:
        section: the configuration.
        insecure: plain text, where nodes are whoever they say; on loopback only.

    Raises:
        InvalidValueError: certificates are absent or cannot be used, none is enrolled, plain text
            would be seen by other machines, or the address is malformed.
    """
    address = Address.parse(section.address, "federation.address")
    if insecure:
        if not address.on_loopback:
            raise InvalidValueError(
                f"federation.address is {section.address!r}; without TLS it must be on loopback, "
                "such as 127.0.0.1:7443"
            )
        _log.warning("plain text: whoever uses this machine can say to be any node")
        return Door(address, None, declared)
    if section.certificates is None:
        raise InvalidValueError(
            "federation.certificates is absent; it must be a folder with ca.pem, server.pem "
            "and server.key, as `fedpriv certs init` makes it, or --insecure be given"
        )
    folder = Path(section.certificates)
    files = Files(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    load_ca(files.ca)
    certificates = EnrolledCertificates(Path(section.enrolment))
    if not certificates.nodes():
        raise InvalidValueError(
            f"{section.enrolment} enrols no certificate; each node's table must have the key "
            "certificate, with the fingerprint that `fedpriv certs issue` prints"
        )
    return Door(address, files.credentials(), certified(certificates))


@dataclass(frozen=True)
class Patience:
    """How long nodes are waited for.

    Attributes:
        deadline: seconds from the offer to the end of a round.
        absent: seconds that a node is waited for that is not connected.
        fixed: whether every round takes until its deadline.
        nodes: a round begins when at least so many are connected.
    """

    deadline: float
    absent: float
    fixed: bool
    nodes: int


class GrpcTransport(Transport):
    """Asks nodes that are connected, from the thread of the training loop.

    Args:
        listening: the running server.
        enrolment: where users are.
        price_of: what a round costs.
        patience: how long to wait.
    """

    def __init__(
        self,
        listening: Listening,
        enrolment: Enrolment,
        price_of: Callable[[RoundRequest], Price],
        patience: Patience,
    ) -> None:
        self._listening, self._enrolment = listening, enrolment
        self._price_of, self._patience = price_of, patience
        self._stopping = threading.Event()
        self._collecting: Collecting | None = None

    def stop(self) -> None:
        """Abandon the round that is collected, and every later one; safe in a signal handler."""
        self._stopping.set()
        self._listening.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._listening.service.arrivals.set()
        if self._collecting is not None:
            self._collecting.finish()

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the contribution or sum of each node that answers in time.

        Raises:
            StoppedError: `stop` was called; what came was forgotten.
        """
        self._await_nodes()
        price = self._price_of(request)
        collecting = self._listening.call(lambda: self._open(request, price))
        watch = asyncio.run_coroutine_threadsafe(self._watch(collecting), self._listening.loop)
        try:
            while (partial := collecting.results.get()) is not None:
                yield partial
                collecting.taken()
        finally:
            watch.cancel()
            self._listening.call(lambda: self._close(collecting))
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nothing was charged for this round")

    def _await_nodes(self) -> None:
        """Wait until enough nodes are connected; which ones are drawn does not matter."""
        service, least = self._listening.service, self._patience.nodes

        async def enough() -> None:
            while service.roster.connected < least and not self._stopping.is_set():
                service.arrivals.clear()
                await service.arrivals.wait()

        if service.roster.connected < least:
            _log.info("waiting for %d nodes; connected are %d", least, service.roster.connected)
            asyncio.run_coroutine_threadsafe(enough(), self._listening.loop).result()
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nobody was asked")

    def _open(self, request: RoundRequest, price: Price) -> Collecting:
        service = self._listening.service
        collecting = Collecting(request, price, self._enrolment, self._patience.deadline)
        self._collecting = service.collecting = collecting
        service.publish(replace(service.status, round=request.round, state=RunState.COLLECTING))
        for node in collecting.waiting:
            connection, offer = service.roster.connection_of(node), collecting.offer_to(node)
            if connection is not None and offer is not None:
                connection.offer(offer)
        if self._stopping.is_set():
            collecting.finish()
        return collecting

    async def _watch(self, collecting: Collecting) -> None:
        """End the round when it can end."""
        patience, roster = self._patience, self._listening.service.roster
        try:
            while left := collecting.seconds_left(roster, patience.absent, fixed=patience.fixed):
                collecting.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await collecting.changed.wait()
        finally:
            collecting.finish()

    def _close(self, collecting: Collecting) -> None:
        service = self._listening.service
        collecting.abandon()
        self._collecting = None
        service.forget_round()
        service.publish(replace(service.status, state=RunState.RELEASING))


_FAREWELL_SECONDS = 10.0  # the longest wait for nodes that read the ledger once more
_QUIET_SECONDS = 1.0  # without a call, after which nobody is waited for


@dataclass(frozen=True)
class Deployed:
    """A server that listens, and the transport to the nodes that call it.

    Attributes:
        listening: the server.
        transport: asks its nodes.
    """

    listening: Listening
    transport: GrpcTransport

    @property
    def address(self) -> Address:
        """Where it listens."""
        return self.listening.address

    def stop(self) -> None:
        """Abandon the round that is collected and all later ones; safe in a signal handler."""
        self.transport.stop()


@dataclass(frozen=True)
class Deployment:
    """What a run on real nodes is made of.

    Attributes:
        experiment: what is run.
        section: how nodes connect and how long they are waited for.
        enrolment: where users are.
        books: ledger, participation record and budget.
        folder: where the run is written.
        ledger: path of the ledger.
    """

    experiment: Experiment
    section: FederationSection
    enrolment: Enrolment
    books: Books
    folder: RunFolder
    ledger: Path

    @contextmanager
    def listening(self, door: Door, round_number: int) -> Iterator[Deployed]:
        """Let nodes connect until the block is left.

        Args:
            door: where, and how callers are known.
            round_number: the next round.

        Raises:
            InvalidValueError: it cannot listen there.
        """
        with self._monitoring() as monitor:
            make = self._maker(door, monitor, round_number)
            with listening(make, door.address, door.credentials) as server:
                plan = self.experiment.plan
                patience = Patience(
                    self.section.deadline_seconds,
                    self.section.absent_seconds,
                    self.section.fixed_length,
                    self.section.least_nodes,
                )
                price_of = prices(plan, self.books)
                transport = GrpcTransport(server, self.enrolment, price_of, patience)
                yield Deployed(server, transport)

    @contextmanager
    def _monitoring(self) -> Iterator[Monitor]:
        monitor = Monitor()
        place = self.section.metrics_address
        if place is not None:
            address = Address.parse(place, "federation.metrics_address")
            monitor.start(address.port, address.host)
        try:
            yield monitor
        finally:
            monitor.stop()

    def _maker(
        self, door: Door, monitor: Monitor, round_number: int
    ) -> Callable[[], tuple[Service, Guard]]:
        plan, section = self.experiment.plan, self.section
        welcome_of = welcomes(self.experiment.config, self.enrolment)
        for node in self.enrolment.nodes:
            encode_welcome(welcome_of(node))  # what cannot be said is refused before anybody asks
        dimension = plan.mechanism.average.sum_query.clipping.layout.dimension
        memory = section.transfer_mebibytes * 2**20
        transfers = Transfers.within(memory, dimension, section.transfer_seconds)
        status = status_at_start(plan, self.books, self.enrolment, round_number)
        rates = RateLimit(section.calls_per_minute)

        def make() -> tuple[Service, Guard]:
            guard = Guard(door.identify, self.enrolment, rates, monitor)
            service = Service(
                self.enrolment,
                welcome_of,
                LedgerLines(self.ledger),
                door.identify,
                status,
                transfers,
                monitor,
            )
            return service, guard

        return make

    def run(self, server: Deployed, state: ServerState) -> Outcome:
        """Run the rounds, then tell nodes that the run is over or that the server goes.

        Raises:
            FedprivError: the run cannot go on.
        """
        experiment, output = self.experiment, self.experiment.config.output
        rows = conduct(
            self.folder,
            experiment.plan,
            state,
            server.transport,
            self.books,
            experiment.entropy,
            Evaluator(experiment.task, experiment.held_out, experiment.device),
            Cadence(output.evaluate_every, output.checkpoint_every),
            callbacks=experiment.on_round,
        )
        over, end = RunState.STOPPED, End.SHUTTING_DOWN
        try:
            outcome = self._followed(server.listening, rows)
            if outcome.stop is not Stop.ASKED:
                over, end = RunState.FINISHED, End.RUN_OVER
            return outcome
        finally:
            self._say_goodbye(server.listening, over, end)

    def _followed(self, server: Listening, rows: Rounds) -> Outcome:
        """Run the rounds and publish each of them."""
        while True:
            try:
                self._publish(server, next(rows))
            except StopIteration as stopped:
                outcome: Outcome = stopped.value
                _log.info("the run ended: %s", outcome.stop)
                return outcome

    def _publish(self, server: Listening, row: RoundResult) -> None:
        _log.info(released_text(row, self.experiment.plan.rounds))
        status = replace(
            server.service.status,
            round=row.round + 1,
            epsilon=row.epsilon,
            state=RunState.WAITING,
        )
        server.call(lambda: server.service.publish(status))

    def _say_goodbye(self, server: Listening, state: RunState, end: End) -> None:
        service = server.service
        server.call(lambda: service.publish(replace(service.status, state=state)))
        server.call(lambda: service.roster.end_all(end))
        if end is End.RUN_OVER:
            leave_at = time.monotonic() + _FAREWELL_SECONDS
            while server.guard.quiet_for() < _QUIET_SECONDS and time.monotonic() < leave_at:
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
        resume: go on with the run in `out`, or start it if there is none.
        insecure: plain text, on loopback only.
        leave: end when the run is over; otherwise go on serving ledger and status until stopped.

    Raises:
        FedprivError: something is wrong with the input, or the run cannot go on; the message says
            what.
    """
    console = Console()
    setup = RunSetup.of(file, assignments, out, resume=resume)
    section = setup.config.federation
    if section is None:
        raise InvalidValueError(f"{file} has no section federation, which `fedpriv serve` needs")
    door = door_of(section, insecure=insecure)
    experiment, enrolment = enrolled_experiment(setup, section)
    warn(experiment, console)
    setup.write_plan(experiment)
    folder, ledger = setup.folder, setup.ledger
    participation = folder.participation_of(ledger)
    population, budget = experiment.plan.population, experiment.budget
    with folder.held(), Books.open(ledger, participation, population, budget) as books:
        deployment = Deployment(experiment, section, enrolment, books, folder, ledger)
        _run(deployment, setup, door, console, leave=leave)
    write_run_figures(
        folder.results(), experiment.plan.run, budget.delta, budget.epsilon, folder.path
    )


def _run(
    deployment: Deployment, setup: RunSetup, door: Door, console: Console, *, leave: bool
) -> None:
    """Run all rounds and print the result; then, unless told to leave, serve until stopped."""
    experiment, books, folder = deployment.experiment, deployment.books, deployment.folder
    plan, enrolment = experiment.plan, deployment.enrolment
    state = state_to_start_from(folder, plan, books, experiment.initial_state)
    with (
        # Updates are added up in threads that are many already; more only wait for each other.
        threadpool_limits(1, "blas"),
        deployment.listening(door, state.round) as server,
        _until_asked(server.stop) as asked,
    ):
        console.print(
            f"{plan.run}: listening on {server.address}, {len(enrolment.nodes)} nodes and "
            f"{enrolment.population} users are enrolled, round {state.round} of {plan.rounds} is "
            f"next, folder {folder.path}",
            soft_wrap=True,
            highlight=False,
        )
        outcome = deployment.run(server, state)
        print_result(setup, experiment, outcome, books, console)
        if outcome.stop is not Stop.ASKED and not leave:
            console.print("serving ledger and status until stopped")
            asked.wait()


@contextmanager
def _until_asked(stop: Callable[[], None]) -> Iterator[threading.Event]:
    """Call `stop` and set the event at the first SIGTERM or SIGINT; a second has its old effect."""
    asked = threading.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in signals]

    def put_back() -> None:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)

    def handle(_number: int, _frame: FrameType | None) -> None:
        put_back()
        asked.set()
        stop()

    for number in signals:
        signal.signal(number, handle)
    try:
        yield asked
    finally:
        put_back()
