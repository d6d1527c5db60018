"""`fedpriv serve`: the plan that was simulated, on real nodes over gRPC."""

import asyncio
import logging
import resource
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from cryptography import x509
from rich.console import Console
from threadpoolctl import threadpool_limits

from fedpriv import wire
from fedpriv.engine.released import released_model
from fedpriv.engine.task import Task
from fedpriv.errors import (
    DeclinedError,
    FedprivError,
    InvalidValueError,
    RunError,
    StoppedError,
    sentence_of,
)
from fedpriv.experiment.build import Experiment
from fedpriv.experiment.config import Config, FederationSection, load_config
from fedpriv.ledger import Ledger, PrivacyBudget
from fedpriv.ledger.events import Randomness, SecureSum
from fedpriv.measures.metrics import own_metrics
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.round import OpenedSum, PartialSum, PrivacyRecords
from fedpriv.report.tables import screen
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import Run, RunSetup
from fedpriv.run.terminal import execute, released_text
from fedpriv.server import gateway
from fedpriv.server.certificates import tls_context
from fedpriv.server.collection import Ballot, Collection, End, Exchange, SecureCollection, SignHead
from fedpriv.server.enrolment import EnrolledCertificates, Enrolment
from fedpriv.server.monitoring import Metrics
from fedpriv.server.service import Listener, Service, TransferLimits, check_connections, listening
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import RoundRequest, Transport
from fedpriv.training.rounds import OnRound, RoundResult, Stop, checkpoints, load_checkpoint
from fedpriv.wire import naming
from fedpriv.wire.naming import Address, binding_of, roster_of, signed_head

_log = logging.getLogger(__name__)
_FAREWELL_SECONDS = 10.0  # the longest wait for nodes that read the ledger after the run
_IDLE_SECONDS = 1.0  # the wait ends after so long without a call
_FIRST_PAUSE_SECONDS = 5.0  # for votes; doubled each time
_LONGEST_PAUSE_SECONDS = 60.0
_LATE_SECONDS = 5.0  # the wait for other nodes' votes, once enough agree to a secure sum


@dataclass(frozen=True, eq=False)
class GrpcTransport(Transport):
    """Carries out rounds on connected nodes, from the thread of the training loop."""

    listener: Listener
    price_of: Callable[[RoundRequest], wire.Price]
    section: FederationSection  # only the times to wait, and `least_nodes`, are used
    signed_head: SignHead = lambda _: None
    _stopping: threading.Event = field(default_factory=threading.Event)

    def stop(self) -> None:
        """Abandon the current round and all later rounds; safe in a signal handler."""
        self._stopping.set()
        self.listener.loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        service = self.listener.service
        service.arrivals.set()
        if service.collection is not None:
            service.collection.finish()
        if service.exchange is not None:
            service.exchange.stop()

    def prepare(self, request: RoundRequest) -> None:
        """Propose the round to all connected nodes until `least_nodes` of them agree.

        Nodes that do not agree are asked again, after growing pauses. DeclinedError: enough nodes
        were connected, but too few agreed within `patience_seconds`. StoppedError: `stop` was
        called.
        """
        service, quorum = self.listener.service, self.section.least_nodes
        seconds, pause = self.section.patience_seconds, _FIRST_PAUSE_SECONDS / 2.0
        while True:
            if len(service.connections) < quorum:
                _log.info("waiting for %d nodes; %d connected", quorum, len(service.connections))
            self._wait_for_least(lambda: len(service.connections))
            ballot = self._ballot(request)
            self.listener.call(partial(service.propose, ballot))
            pause = min(2.0 * pause, _LONGEST_PAUSE_SECONDS, seconds)
            if self._wait_for_least(lambda: service.votes(agrees=True), pause):
                if ballot.terms.price.event.secure_sum is not None:  # later votes come too late
                    self._wait_for_least(lambda: quorum - service.votes(agrees=None), _LATE_SECONDS)
                return
            seconds -= pause
            agreed = self.listener.call(lambda: service.votes(agrees=True))
            result = f"{agreed} of the {quorum} required nodes agree to round {request.round}"
            if seconds <= 0.0:
                raise DeclinedError(f"{result}; it was not begun, and nothing is charged for it")
            _log.warning("%s; they are asked again, for %.0f more seconds at most", result, seconds)

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sum of each node that answers in time; StoppedError after `stop`."""
        listener, contributions = self.listener, 0
        ballot = listener.service.ballot or self._ballot(request)
        collection = listener.call(lambda: self._open(request, ballot))
        watch = asyncio.run_coroutine_threadsafe(self._watch(collection), listener.loop)
        try:
            while (partial := collection.results.get()) is not None:
                contributions += partial.users
                yield partial
                collection.taken()
        finally:
            watch.cancel()
            listener.call(listener.service.close_round)
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; nothing of the round is released")
        if collection.drawn and not contributions:
            # Whether anybody answers depends on who was drawn, so it must not stop the release.
            _log.warning("no drawn user contributed to round %d; it is charged", request.round)

    def collect_masked(
        self,
        request: RoundRequest,
        mechanism: GaussianMechanism,
        dropout: float,  # noqa: ARG002 - of simulated nodes
    ) -> Callable[[], OpenedSum | None]:
        """Collect the masked sum of the nodes that agreed to the round."""
        listener, secure = self.listener, mechanism.secure_sum
        service = listener.service

        collected = listener.call(lambda: self._open_masked(request, secure))
        if collected is None:
            return lambda: None
        with ExitStack() as unless_ready:
            unless_ready.callback(listener.call, service.close_round)
            ready = listener.wait(collected.collect())
            if self._stopping.is_set():
                raise StoppedError("the server was asked to stop; nothing of the round is released")
            if not ready:
                return lambda: None
            unless_ready.pop_all()

        def opened() -> OpenedSum | None:
            try:
                return listener.wait(collected.open())
            finally:
                listener.call(service.close_round)

        return opened

    def _ballot(self, request: RoundRequest) -> Ballot:
        return Ballot(wire.Proposal.of(request, self.price_of(request)), self.signed_head)

    def _open_masked(
        self, request: RoundRequest, secure: SecureSum | None
    ) -> SecureCollection | None:
        """Offer the round to the nodes that agree; None if too few of them are left."""
        service, section = self.listener.service, self.section
        ballot, seconds = service.ballot, section.deadline_seconds
        signatures = () if ballot is None else ballot.roster(service.connections.nodes)
        if ballot is None or secure is None or len(signatures) < secure.nodes:
            return None
        fixed, enrolment, event = section.fixed_length, service.enrolment, ballot.terms.price.event
        collection = Collection(request, ballot, signatures, enrolment, seconds, fixed_length=fixed)
        binding = binding_of(enrolment.population_id, ballot.id, event, ballot.head)
        roster, watch = roster_of(signatures, binding), partial(self._watch, collection)
        times = service.connections, seconds, section.absent_seconds
        collected = SecureCollection(secure, roster, collection, watch, *times)
        self._begin(collection, collected.exchange)
        return collected

    def _wait_for_least(self, count: Callable[[], int], seconds: float | None = None) -> bool:
        """Wait until `count`, in the event loop, reaches `least_nodes`; False after `seconds`."""
        service, least_nodes = self.listener.service, self.section.least_nodes

        async def enough() -> bool:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while count() < least_nodes and not self._stopping.is_set():
                        service.arrivals.clear()
                        await service.arrivals.wait()
            return count() >= least_nodes

        reached = self.listener.wait(enough())
        if self._stopping.is_set():
            raise StoppedError("the server was asked to stop; no cohort was drawn")
        return reached

    def _open(self, request: RoundRequest, ballot: Ballot) -> Collection:
        service, seconds = self.listener.service, self.section.deadline_seconds
        users = service.enrolment.users  # the name of a node of one user would show who is enrolled
        roster = ballot.roster([n for n in service.connections.nodes if len(users[n]) > 1])
        collection = Collection(request, ballot, roster, service.enrolment, seconds)
        self._begin(collection)
        return collection

    def _begin(self, collection: Collection, exchange: Exchange | None = None) -> None:
        self.listener.service.open_round(collection, exchange)
        if self._stopping.is_set():
            self._wake()

    async def _watch(self, collection: Collection) -> None:
        connections, absent_seconds = self.listener.service.connections, self.section.absent_seconds
        fixed = self.section.fixed_length
        try:
            while seconds_left := collection.seconds_left(connections, absent_seconds, fixed=fixed):
                collection.changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds_left):
                        await collection.changed.wait()
            self.listener.service.missed(collection)
        finally:
            collection.finish()


@dataclass(frozen=True)
class Endpoint:
    """An address, and how the server identifies the callers that connect to it."""

    address: Address
    tls: ssl.SSLContext | None  # None: plain text
    identify: gateway.Identify
    certificate: x509.Certificate | None = None  # of the server
    key: bytes = field(default=b"", repr=False)  # of the certificate, in PEM


def endpoint_of(section: FederationSection, *, insecure: bool) -> Endpoint:
    """Return the endpoint that a configuration describes.

    With `insecure`, the endpoint speaks plain text and believes the name that a node states; it
    must be a loopback address. Otherwise the server's certificates must be usable, and the
    certificate of at least one node must be enrolled. InvalidValueError if a condition fails.
    """
    address = Address.parse(section.address, "federation.address")
    if section.enrolment is None:
        raise InvalidValueError("federation.enrolment is absent; a server must have it")
    if insecure and section.secure_sum is not None:
        raise InvalidValueError(
            'federation.trust is "none" and --insecure is given; nodes sign their keys with '
            "certificates, so that --insecure must be left out"
        )
    if insecure:
        address.check_loopback("federation.address")
        _log.warning("plain text: any process on this machine can claim to be any node")
        return Endpoint(address, None, gateway.by_declaration)
    if section.certificates is None:
        raise InvalidValueError(
            "federation.certificates is absent; it must be a folder with ca.pem, server.pem "
            "and server.key, as `fedpriv certs init` makes it, or --insecure be given"
        )
    certificates = EnrolledCertificates(Path(section.enrolment))
    folder = Path(section.certificates)
    tls = tls_context(folder)
    if not certificates.nodes():
        raise InvalidValueError(
            f"{section.enrolment} enrols no certificate; each node's table must have the key "
            "certificate, with the fingerprint that `fedpriv certs sign` prints"
        )
    certificate = naming.load_certificate(folder / "server.pem")
    key = naming.read_key(folder / "server.key")
    return Endpoint(address, tls, gateway.by_certificate(certificates), certificate, key)


def serve(
    file: Path, assignments: list[str], out: Path | None, *, insecure: bool, leave: bool, **how: Any
) -> Run:
    """Run or resume an experiment on the nodes that connect, print progress, and return the run.

    SIGTERM and SIGINT end the run cleanly: a round that is being collected is charged and
    abandoned, a charged round is released, and a checkpoint is written. A second signal ends the
    process at once. After the run, the server continues to serve ledger and status until it is
    stopped, unless `leave` is set, too few nodes agreed to a round or too few users count.
    RunError: the run failed, but may be resumed; any other FedprivError: the input is wrong.
    """
    _allow_many_files()
    setup = RunSetup.at(load_config(file, assignments), out, **how)
    section = setup.config.federation
    if section is None:
        raise InvalidValueError(f"{file} has no section federation, which `fedpriv serve` needs")
    endpoint = endpoint_of(section, insecure=insecure)
    enrolment = Enrolment.load(Path(str(section.enrolment)))
    if section.least_nodes > (nodes := len(enrolment.nodes)):
        condition = f"it must be at most {nodes}, the number of enrolled nodes"
        raise InvalidValueError(f"federation.least_nodes is {section.least_nodes}; {condition}")
    check_connections(nodes)
    addresses = {"federation.address": endpoint.address}
    if section.metrics_address is not None:
        key = "federation.metrics_address"
        addresses[key] = Address.parse(section.metrics_address, key)
    _check_free(addresses)
    experiment = setup.on_nodes(section, enrolment.population_id, enrolment.user_ids)
    service = _service(experiment, section, enrolment, endpoint)
    console = screen()
    with ExitStack() as resources:
        # Many threads add up updates already; threads of BLAS would only compete with them.
        resources.enter_context(threadpool_limits(1, "blas"))
        if metrics := addresses.get("federation.metrics_address"):
            numbers = Metrics(lambda: service.published, service.sites)
            resources.enter_context(numbers.served(metrics.host, metrics.port))
        server = _Server(setup, section, service, endpoint, console, resources)
        finished_run = execute(setup, experiment, server.hosted, console, server.follow, clock=None)
        if finished_run.stop is Stop.DECLINED:
            console.print("the log says why nodes do not agree; --resume goes on with the run")
        elif not (leave or finished_run.stop.may_go_on):
            console.print("serving ledger and status until stopped")
            server.stop_requested.wait()
    return finished_run


@dataclass(frozen=True, eq=False)
class _Server:
    """The server of one run; it listens from the first round until `resources` are closed."""

    setup: RunSetup
    section: FederationSection
    service: Service
    endpoint: Endpoint
    console: Console
    resources: ExitStack
    stop_requested: threading.Event = field(default_factory=threading.Event)
    _listeners: list[Listener] = field(default_factory=list)  # one, after `hosted`

    def hosted(self, experiment: Experiment, records: PrivacyRecords) -> Transport:
        """Start to listen, and return the transport to the nodes that connect."""
        enter, service = self.resources.enter_context, self.service
        service.ledger = enter(Ledger.open(self.setup.ledger)).since  # also after the run
        # A copy, because evaluation puts tensors into the task's own model meanwhile.
        service.model = newest_model(self.setup.folder, experiment.task.apart())
        service.publish(epsilon=records.ledger.epsilon(records.budget))
        if (certificate := self.endpoint.certificate) is not None:
            service.sites.serves_until(certificate.not_valid_after_utc)
        enter(service.sites.kept(self.setup.folder))
        listener = enter(listening(service, self.endpoint.address, self.endpoint.tls))
        self._listeners.append(listener)
        price_of = prices(experiment.plan, records, experiment.entropy.randomness)
        transport = GrpcTransport(listener, price_of, self.section, self._signing(records.ledger))
        enter(_stop_signals(self.stop_requested, transport.stop))
        return transport

    def _signing(self, ledger: Ledger) -> SignHead:
        certificate, key = self.endpoint.certificate, self.endpoint.key
        if certificate is None:
            return lambda _: None
        name = ledger.population_name
        return lambda attempt: signed_head(name, attempt, ledger.head, certificate, key)

    def follow(self, experiment: Experiment, first: int, run: Callable[[OnRound], Run]) -> Run:
        """Print where the server listens, and run."""
        (listener,), enrolment, plan = self._listeners, self.service.enrolment, experiment.plan
        self.console.print(
            f"{plan.run}: listening on {listener.address}, "
            f"{len(enrolment.nodes)} nodes and {enrolment.population} users are enrolled, "
            f"{first} of {plan.rounds} rounds are released, folder {self.setup.folder.path}",
            soft_wrap=True,
            highlight=False,
        )
        if self.section.secure_sum is not None:
            digest = wire.enrolment_digest(enrolment.enrolled)
            self.console.print(f'nodes consent to these nodes by: enrolment = "{digest}"')
        return _published(run, listener, first, plan.rounds)


def _allow_many_files() -> None:
    """Raise the limit on open files, and so on connections, to the system's maximum."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems do not accept "no limit" as a number
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _check_free(addresses: Mapping[str, Address]) -> None:
    """Raise InvalidValueError unless the server can listen on all addresses at once."""
    with ExitStack() as resources:
        for key, address in addresses.items():
            for listener in gateway.listening_sockets(address, f"{key} is {address}, where")[0]:
                resources.enter_context(listener)


def _service(
    experiment: Experiment, section: FederationSection, enrolment: Enrolment, endpoint: Endpoint
) -> Service:
    """Return the service, without a ledger yet; WireError if a message to nodes is too large."""
    welcome_of = welcomes(experiment.config, enrolment)
    memory = section.transfer_mebibytes * 2**20
    dimension = experiment.plan.mechanism.clipping.layout.dimension
    limits = TransferLimits.within(memory, dimension, section.transfer_seconds)
    rates = gateway.RateLimit(section.calls_per_minute)
    authentication = gateway.Authentication(endpoint.identify, enrolment, rates)
    status = status_at_start(experiment.plan, experiment.budget, enrolment)
    return Service(authentication, welcome_of, status, limits)


def task_of(config: Config) -> wire.TaskDescription:
    """Return the description from which nodes build the task."""
    metrics = tuple(own_metrics(config.metrics.report))
    return wire.TaskDescription(**config.model.task, metrics=metrics)


def welcomes(config: Config, enrolment: Enrolment) -> Callable[[str], wire.Welcome]:
    """Return a function from a node's name to the welcome that it receives when it connects."""
    task, name, population = task_of(config), enrolment.population_id, enrolment.population
    section = config.federation
    purpose = section.purpose if section else ""
    nodes = enrolment.enrolled if section and section.secure_sum else ()
    return lambda node: wire.Welcome(
        name, population, enrolment.users_of(node).copy(), task, purpose, nodes
    )


def prices(
    plan: TrainingPlan, records: PrivacyRecords, randomness: Randomness
) -> Callable[[RoundRequest], wire.Price]:
    """Return a function that prices a round; call it in the thread that opened the records."""
    seeded = randomness is Randomness.SEEDED

    def price_of(request: RoundRequest) -> wire.Price:
        norms = tuple(g.clipping_norm for g in request.clipping.groups[: len(plan.groups)])
        event, budget = plan.mechanism_at(norms).event, records.budget
        series = records.open_series(event, plan.run)
        charges = records.ledger.head.count  # before ε: another run may charge in between
        epsilon = records.ledger.epsilon(budget, event if series is None else None)
        part = 0 if series is None else series[0].part
        return wire.Price(event, part, epsilon, budget.delta, charges, seeded)

    return price_of


def status_at_start(plan: TrainingPlan, budget: PrivacyBudget, enrolment: Enrolment) -> wire.Status:
    """Return the status of a run before its ledger is read; WireError if it cannot be sent."""
    nodes, users = len(enrolment.nodes), enrolment.population
    price = 0.0, budget.epsilon, budget.delta
    return wire.Status(plan.run, 0, plan.rounds, *price, nodes, 0, users, wire.RunState.WAITING)


def newest_model(folder: RunFolder, task: Task) -> Callable[[], bytes | None]:
    """Return a function that gives the file of the newest released model, or None without one."""

    def newest() -> bytes | None:
        paths = checkpoints(folder.checkpoints)
        state = load_checkpoint(paths[-1]).state if paths else None
        return released_model(task, state, folder.results()) if state and state.round else None

    return newest


def _published(run: Callable[[OnRound], Run], listener: Listener, first: int, rounds: int) -> Run:
    """Run the rounds and publish each; then tell nodes that the run or the server has ended."""
    service = listener.service

    def publish(**changes: object) -> None:
        listener.call(lambda: service.publish(**changes))

    def show(result: RoundResult) -> None:
        _log.info(released_text(result, rounds))
        publish(epsilon=result.epsilon, state=wire.RunState.WAITING, round=result.round)

    publish(round=first)
    state, end = wire.RunState.STOPPED, End.SHUTTING_DOWN
    try:
        outcome = run(show)
        publish(epsilon=outcome.epsilon)  # charges may have followed the last round
        _log.info("the run ended: %s", outcome.stop)
        if not outcome.stop.may_go_on:
            state, end = wire.RunState.FINISHED, End.RUN_OVER
        return outcome
    except (FedprivError, OSError) as error:
        sentence = sentence_of(error)
        raise RunError(f"{sentence}; the run ended, and --resume goes on with it") from error
    finally:
        publish(state=state)
        listener.call(lambda: service.connections.end_all(end))
        leave_at = time.monotonic() + (_FAREWELL_SECONDS if end is End.RUN_OVER else 0.0)
        idle_seconds = service.authentication.idle_seconds
        while idle_seconds() < _IDLE_SECONDS and time.monotonic() < leave_at:
            time.sleep(0.1)


@contextmanager
def _stop_signals(stop_requested: threading.Event, stop: Callable[[], None]) -> Iterator[None]:
    """Set `stop_requested` and call `stop` at the first SIGTERM or SIGINT.

    The previous handlers are restored at this signal, and at the end of the context.
    """
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(_number: int, _frame: FrameType | None) -> None:
        restore()
        stop_requested.set()
        stop()

    for number in previous:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()
