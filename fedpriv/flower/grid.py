"""The Flower ServerApp: a simulation with users distributed among the workers of a grid."""

import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Self

import numpy as np
from flwr.app import DEFAULT_TTL, Context, Message, MessageType
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fedpriv import wire
from fedpriv.data.population import UserStore
from fedpriv.errors import InvalidValueError, StoppedError, WireError, WorkerError
from fedpriv.experiment.build import Experiment, refuse_if_few_count, simulated
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import Count, Section, checked, config_of, parse_toml
from fedpriv.flower import messages as flower_messages
from fedpriv.privacy.round import PartialSum, PrivacyRecords
from fedpriv.report.records import Trouble
from fedpriv.report.tables import screen
from fedpriv.run.run import Follow, Run, RunSetup
from fedpriv.run.terminal import execute, released_text
from fedpriv.server.collection import RoundTerms, prices, task_of
from fedpriv.server.enrolment import Hosting
from fedpriv.support.logs import SIMULATION_ONLY, LogFormat, configure, one_line, trouble
from fedpriv.training.request import RoundRequest, Transport
from fedpriv.training.rounds import OnRound
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.messages import TASK

_log = logging.getLogger(__name__)
_STOP_CHECK_SECONDS = 0.2
_HELLO_BYTES = 8192
_CONNECTION_SECONDS = 60.0
_START_SECONDS = 600.0  # for a worker to import torch and load all users' data

Headers = Mapping[str, bytes]


@dataclass(frozen=True, eq=False)
class GridTransport(Transport):
    """Sends one offer per round to each worker with drawn users, and collects the answers.

    Guarantees, besides those of every transport:

    * Each worker is counted once, by a reply of its own to this attempt at this round.
    * Only the code of a reply that is an error is logged.
    * A round that lacks an answer raises, so it is not released. A worker that does not answer
      lacks the code or has died, and without its users the experiment would be a different one.
    """

    grid: Grid
    hosting: Hosting
    workers: Mapping[str, int]  # name → id on the grid
    headers: Headers  # sent to workers together with the offer
    price_of: Callable[[RoundRequest], wire.Price]
    seconds: float  # from the offer to the deadline
    stopping: threading.Event  # set to abandon the present round and all later ones

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sum of each worker; WorkerError if one fails, StoppedError if `stopping`."""
        terms = RoundTerms.of(request, self.hosting, self.price_of(request), self.seconds)
        tensors, answered = flower_messages.packed(terms.model), 0

        def messages() -> Iterator[tuple[str, Message]]:
            for worker in terms.drawn:
                if offer := terms.offer_to(worker):
                    encoded = wire.encode_offer(offer).SerializeToString()
                    headers = {flower_messages.OFFER: encoded, **self.headers}
                    content, node = (
                        flower_messages.content_of(headers, tensors),
                        self.workers[worker],
                    )
                    yield worker, Message(content, node, MessageType.TRAIN, ttl=offer.seconds)

        with closing(
            flower_messages.exchange(self.grid, messages(), terms.deadline, self.stopping)
        ) as replies:
            for worker, reply in replies:
                if partial := self._accepted(terms, worker, reply):
                    answered += 1
                    yield partial
        if self.stopping.is_set():
            raise StoppedError("the simulation was asked to stop; nothing of the round is released")
        if answered < len(terms.drawn):
            counts = f"{answered} of {len(terms.drawn)}"
            raise WorkerError(f"{counts} workers answered in round {request.round}; all must")

    def _accepted(self, terms: RoundTerms, worker: str, reply: Message | str) -> PartialSum | None:
        """Return the sum in a reply; None, with a line in the log, if it is not accepted."""
        name = f"{SIMULATION_ONLY}: {worker}"
        if isinstance(reply, str):
            _log.warning("%s counts as zero: %s", name, reply)
            return None
        try:
            if reply.metadata.src_node_id != self.workers[worker]:
                raise WireError("it comes from another node than the one that was asked")
            header = flower_messages.header_in(
                reply.content, flower_messages.ANSWER, wire.SERVER_RECEIVES_BYTES
            )
            if header is None:
                raise WireError("it holds no answer")
            message = wire.parse(pb.Answer, header, wire.SERVER_RECEIVES_BYTES)
            answer = wire.decode_answer(message, terms.expected)
            if reason := terms.misfit(worker, answer):
                raise WireError(reason)
            if isinstance(answer.content, wire.Decline):
                trouble(_log, name, Trouble.DECLINED, one_line(answer.content.reason))
                return None
            (total,) = flower_messages.tensors_in(reply.content, answer.content.tensors).values()
            partial = answer.content.partial_sum(worker, total)
            terms.check_sum(partial)
            if flaw := terms.flaw(partial):
                trouble(_log, name, *flaw)
            return partial
        except WireError as error:
            trouble(_log, name, Trouble.REFUSED, one_line(str(error)))
            return None


def _introduced(
    grid: Grid, ids: Iterable[int], headers: Headers, seconds: float, stopping: threading.Event
) -> Iterator[tuple[int, wire.Hello | str]]:
    """Yield the id of each worker that replies, with its hello or one sentence why it has none."""
    messages = (
        (str(i), Message(flower_messages.content_of(headers), i, MessageType.QUERY, ttl=seconds))
        for i in ids
    )
    for key, reply in flower_messages.exchange(grid, messages, monotonic() + seconds, stopping):
        yield int(key), _hello_in(reply)


def _hello_in(reply: Message | str) -> wire.Hello | str:
    if isinstance(reply, str):
        return f"{reply}; fedpriv must be installed there"
    try:
        if trouble := flower_messages.header_in(
            reply.content, flower_messages.TROUBLE, _HELLO_BYTES
        ):
            return one_line(trouble.decode(errors="replace"))
        header = flower_messages.header_in(reply.content, flower_messages.HELLO, _HELLO_BYTES)
        return wire.decode_hello(wire.parse(pb.Hello, header or b"", _HELLO_BYTES))
    except WireError as error:
        return one_line(str(error))


def hosting_of_workers(population: int, workers: int) -> Hosting:
    """Return which worker of a simulation hosts which users."""
    sizes = [
        len(flower_messages.shard_of(population, worker, workers)) for worker in range(workers)
    ]
    names = [f"worker-{worker}" for worker in range(workers)]
    return Hosting(names, np.repeat(np.arange(workers), sizes), frozenset())


def simulated_workers(
    grid: Grid,
    population: str,
    users: UserStore,
    workers: int,
    headers: Headers,
    stopping: threading.Event,
) -> dict[str, int]:
    """Wait until all workers of a simulation have loaded the users; return name → id on the grid.

    The headers describe the users to load. WorkerError: there are more or fewer workers, or one
    cannot load the same data. StoppedError: `stopping` was set.
    """
    end = monotonic() + _CONNECTION_SECONDS
    while len(ids := list(grid.get_node_ids())) < workers and monotonic() < end:
        if stopping.wait(_STOP_CHECK_SECONDS):
            raise StoppedError("the simulation was asked to stop")
    if len(ids) != workers:
        present = f"there are {len(ids)} workers (SuperNodes)"
        raise WorkerError(f"{present}; the run is configured for {workers}")
    expected = {}
    for k in range(workers):
        shard = flower_messages.shard_of(users.population, k, workers)
        expected[f"worker-{k}"] = flower_messages.digest_of_shard(population, users, shard)
    node_ids: dict[str, int] = {}
    for node_id, hello in _introduced(grid, ids, headers, _START_SECONDS, stopping):
        if isinstance(hello, str):
            raise WorkerError(f"a worker cannot take part: {hello}")
        if expected.get(hello.node) != hello.users_sha256:
            raise WorkerError("a worker has loaded other users, or other data, than the server")
        node_ids[hello.node] = node_id
    if stopping.is_set():
        raise StoppedError("the simulation was asked to stop")
    if node_ids.keys() != expected.keys():
        raise WorkerError(f"{len(node_ids)} of {workers} workers answer; all must")
    return node_ids


@dataclass(frozen=True)
class GridSimulation:
    """A simulation that is ready to start on the workers of a grid."""

    setup: RunSetup
    experiment: Experiment
    users: UserStore  # of the whole population
    workers: int

    @classmethod
    def of(cls, setup: RunSetup, workers: int) -> Self:
        """Load the users of an experiment; InvalidValueError if it cannot be run or resumed."""
        setup.refuse_true_figures("on workers")
        experiment, transport = simulated(setup.config, setup.run, setup.spent)
        setup.refuse_examples(experiment.plan, "on workers")
        setup.refuse_other_plan(experiment)
        if not (setup.resuming or setup.keep_going):
            refuse_if_few_count(experiment, transport)
        users = transport.users
        if not 1 <= workers <= users.population:
            condition = f"it must be from 1 to {users.population}, the number of users"
            raise InvalidValueError(f"workers is {workers}; {condition}")
        return cls(setup, experiment, users, workers)

    def run(
        self, grid: Grid, stopping: threading.Event, console: Console, follow: Follow | None = None
    ) -> Run:
        """Run the simulation on the workers of a grid; write and print like `fedpriv simulate`.

        When `stopping` is set, the present round is abandoned. WorkerError: a worker failed.
        """
        plan, config, workers = self.experiment.plan, self.experiment.config, self.workers
        data, engine = config.simulated_data, config.engine
        training = engine.device, engine.chunk_mebibytes, engine.activations, engine.path
        description = flower_messages.Simulated(data.name, data.options, *training)
        headers = {flower_messages.SIMULATED: description.encode()}
        node_ids = simulated_workers(grid, plan.population, self.users, workers, headers, stopping)
        headers[flower_messages.TASK] = TASK.encode(task_of(config)).SerializeToString()
        hosting = hosting_of_workers(self.users.population, workers)

        def hosted(experiment: Experiment, records: PrivacyRecords) -> Transport:
            price_of = prices(experiment.plan, records, experiment.entropy.randomness)
            seconds = float(DEFAULT_TTL)
            return GridTransport(grid, hosting, node_ids, headers, price_of, seconds, stopping)

        return execute(self.setup, self.experiment, hosted, console, follow)


class RunConfig(Section):
    """Flower's run config; docs/flower.md explains its keys."""

    # A TOML file, absolute or in the app; the name of one that comes with fedpriv; or TOML itself.
    experiment: str
    set: str = ""  # assignments "a.b=value", separated by semicolons
    out: str = ""  # empty: a new folder under runs/ where the ServerApp runs
    resume: bool = False
    keep_going: bool = False  # though too few users count
    workers: Count = 2  # number of SuperNodes among which users are distributed

    def setup(self) -> RunSetup:
        """Read the experiment, and the run's folder if it is resumed; FedprivError if they fail."""
        if self.resume and not self.out:
            raise InvalidValueError("run config: resume is true; out must then be given")
        assignments = [part.strip() for part in self.set.split(";") if part.strip()]
        out = Path(self.out) if self.out else None
        resume, going = self.resume, self.keep_going
        if "\n" in self.experiment:
            source = "run config: experiment"
            config = config_of(parse_toml(self.experiment, source), source, assignments)
            return RunSetup.at(config, out, resume=resume, keep_going=going)
        # Flower puts the folder of the app at the front of the import path.
        candidates = (Path(folder) / self.experiment for folder in sys.path)
        file = next((path for path in candidates if path.is_file()), None)
        file = file or experiment_file(Path(self.experiment))
        return RunSetup.of(file, assignments, out, resume=resume, keep_going=going)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume an experiment; FedprivError if the input is wrong or the run fails."""
    configure(LogFormat.TEXT)
    logging.getLogger("flwr").propagate = False  # it has its own handler
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Flower makes several calls a second
    config = checked(RunConfig, context.run_config, "run config")
    setup, stopping = config.setup(), threading.Event()
    console = screen()
    console.print(f"folder {setup.folder.path.absolute()}", soft_wrap=True, highlight=False)
    try:
        simulation = GridSimulation.of(setup, config.workers)
        simulation.run(grid, stopping, console, _log_rounds).check()
    finally:
        stopping.set()


def _log_rounds(experiment: Experiment, first: int, run: Callable[[OnRound], Run]) -> Run:
    rounds = experiment.plan.rounds
    _log.info("%d of %d rounds are released", first, rounds)
    return run(lambda result: _log.info(released_text(result, rounds)))
