"""A deployment while it runs: the service on its event loop, the rounds in the main thread."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fedpriv.experiment import Experiment
from fedpriv.federated.books import Books
from fedpriv.federated.loop import Stop
from fedpriv.federated.round import ServerState
from fedpriv.sections import FederationSection
from fedpriv.wire import RunState, encode_welcome

from .addresses import Address
from .announcing import Rounds, announced
from .answers import Transfers
from .door import Door
from .enrolment import Enrolment
from .evaluation import Evaluator
from .folder import RunFolder
from .grpc_transport import GrpcTransport, Patience
from .guard import Guard
from .listening import Listening, listening
from .monitoring import Monitor
from .rates import RateLimit
from .result import released_text
from .roster import End
from .run import Cadence, Outcome, RoundRow, conduct
from .service import Service
from .standing import LedgerLines, prices, status_at_start, welcomes

_log = logging.getLogger(__name__)
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
        )
        over, end = RunState.STOPPED, End.SHUTTING_DOWN
        try:
            with announced(rows, experiment, self.folder, state.round) as told:
                outcome = self._followed(server.listening, told)
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

    def _publish(self, server: Listening, row: RoundRow) -> None:
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
