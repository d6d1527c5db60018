"""A simulation with users distributed among the workers of a Flower grid.

`app` is a worker, which trains users that it is sent. It answers one message at a time. No
exception escapes it, since Flower would send its text. No text that may contain users' data is sent
or logged.
"""

import logging
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from time import monotonic
from typing import Self, TypeVar

from flwr.app import DEFAULT_TTL, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from rich.console import Console

from fedpriv.clients.training import NodeTrainer
from fedpriv.data.population import Population, UserStore
from fedpriv.engine.arithmetic import activations_named
from fedpriv.engine.reading import population_for
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import FedprivError, InvalidValueError, StoppedError, WireError, WorkerError
from fedpriv.experiment.build import (
    Experiment,
    method_of,
    population_of,
    refuse_if_few_count,
    simulated,
)
from fedpriv.experiment.config import Config
from fedpriv.flower import messages as flower_messages
from fedpriv.flower.messages import content_of
from fedpriv.privacy.round import PartialSum
from fedpriv.run.run import Follow, Run, RunSetup
from fedpriv.run.terminal import execute
from fedpriv.server.collection import flaw_of
from fedpriv.support.logs import SIMULATION_ONLY, one_line, trouble
from fedpriv.training.request import RoundRequest, Transport

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")
_STOP_CHECK_SECONDS = 0.2
_CONNECTION_SECONDS = 60.0
_START_SECONDS = 600.0  # for a worker to import torch and load all users' data


@dataclass(frozen=True, eq=False)
class GridTransport(Transport):
    """Sends each round's request to all workers, and collects the sums of their users.

    Guarantees, besides those of every transport:

    * Each worker is counted once, by a reply of its own to this attempt at this round.
    * Only the code of a reply that is an error is logged.
    * A round that lacks an answer raises, so it is not released. A worker that does not answer
      lacks the code or has died; without its users the experiment would be a different one.
    """

    grid: Grid
    shares: Mapping[int, range]  # worker's id on the grid → positions of its users
    work: bytes  # the pickled configuration, the same in all rounds
    seconds: float  # from the request to the deadline
    stopping: threading.Event  # set to abandon the present round and all later ones

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sum of each worker; WorkerError if one fails, StoppedError if `stopping`."""
        shared, answered = pickle.dumps(replace(request, users=request.users[:0])), 0
        users_of = {
            node: request.users[(request.users >= share.start) & (request.users < share.stop)]
            for node, share in self.shares.items()
        }
        messages = (
            Message(content_of(self.work, shared, pickle.dumps(users)), node, MessageType.TRAIN)
            for node, users in users_of.items()
        )
        deadline = monotonic() + self.seconds
        replies = flower_messages.exchange(self.grid, messages, deadline, self.stopping)
        with closing(replies):
            for node, reply in replies:
                if partial := self._accepted(node, reply, users_of[node].size):
                    answered += 1
                    yield partial
        if self.stopping.is_set():
            raise StoppedError("the simulation was asked to stop; nothing of the round is released")
        if answered < len(self.shares):
            counts = f"{answered} of {len(self.shares)}"
            raise WorkerError(f"{counts} workers answered in round {request.round}; all must")

    def _accepted(self, node: int, reply: Message | str, users: int) -> PartialSum | None:
        """Return the sum in a reply; None, with a line in the log, if there is none."""
        worker = f"worker-{[*self.shares].index(node)}"
        name = f"{SIMULATION_ONLY}: {worker}"
        try:
            partial = _answer_in(reply, PartialSum)
        except WireError as error:
            _log.warning("%s failed: %s", name, error)
            return None
        if flaw := flaw_of(partial, users):
            trouble(_log, name, *flaw)
        return replace(partial, node=worker)


def _answer_in(reply: Message | str, kind: type[_Answer]) -> _Answer:
    """Return the answer in a reply; WireError, with the reason, if it has none."""
    if isinstance(reply, str):
        raise WireError(f"{reply}; fedpriv must be installed there")
    parts = flower_messages.parts_in(reply.content)
    value: object = pickle.loads(parts[0]) if parts else None
    if isinstance(value, str):  # why the worker cannot answer
        raise WireError(one_line(value))
    if not isinstance(value, kind):
        raise WireError(f"a message holds no {kind.__name__}")
    return value


def introduced_workers(
    grid: Grid,
    population: str,
    users: UserStore,
    workers: int,
    work: bytes,
    stopping: threading.Event,
) -> dict[int, range]:
    """Wait until all workers of a simulation have loaded the users; return id on the grid → share.

    The shares are ranges of positions, of equal size up to one user. `work` is the pickled
    configuration. WorkerError: there are more or fewer workers, or one cannot load the same data.
    StoppedError: `stopping` was set.
    """
    end = monotonic() + _CONNECTION_SECONDS
    while len(ids := list(grid.get_node_ids())) < workers and monotonic() < end:
        if stopping.wait(_STOP_CHECK_SECONDS):
            raise StoppedError("the simulation was asked to stop")
    if len(ids) != workers:
        count = f"there are {len(ids)} workers (SuperNodes)"
        raise WorkerError(f"{count}; the run is configured for {workers}")
    ends = [users.population * number // workers for number in range(workers + 1)]
    shares = dict(zip(ids, map(range, ends, ends[1:]), strict=True))
    messages = (
        Message(content_of(work, pickle.dumps(share)), node, MessageType.QUERY)
        for node, share in shares.items()
    )
    end, answered = monotonic() + _START_SECONDS, 0
    for node, reply in flower_messages.exchange(grid, messages, end, stopping):
        try:
            digest = _answer_in(reply, bytes)
        except WireError as error:
            raise WorkerError(f"a worker cannot take part: {error}") from error
        if digest != flower_messages.digest_of_shard(population, users, shares[node]):
            raise WorkerError("a worker has loaded other users, or other data, than the server")
        answered += 1
    if stopping.is_set():
        raise StoppedError("the simulation was asked to stop")
    if answered < workers:
        raise WorkerError(f"{answered} of {workers} workers answer; all must")
    return shares


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
        if experiment.plan.secure_sum is not None:
            raise InvalidValueError(
                'federation.trust is "none"; on workers it must be "server", since only a '
                "simulation in one process has nodes of its own"
            )
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
        work, population = pickle.dumps(self.experiment.config), self.experiment.plan.population
        shares = introduced_workers(grid, population, self.users, self.workers, work, stopping)
        transport = GridTransport(grid, shares, work, float(DEFAULT_TTL), stopping)
        return execute(self.setup, self.experiment, lambda *_: transport, console, follow)


def introduce(content: RecordDict) -> bytes:
    """Load the population in a message; return the `digest_of_shard` of the share in it.

    FedprivError: the message is invalid, or the population cannot be loaded.
    """
    work, share = flower_messages.parts_in(content)
    population = _population(work)
    return flower_messages.digest_of_shard(
        population.ledger_name, population.users, pickle.loads(share)
    )


def respond(content: RecordDict) -> PartialSum:
    """Train the users in a message for its request; the text of an error may contain their data."""
    work, request, users = flower_messages.parts_in(content)
    return _trainer(work).answer(replace(pickle.loads(request), users=pickle.loads(users)))


# A worker's process lasts for the whole run, and receives messages to all nodes.
@lru_cache(maxsize=1)
def _population(packed: bytes) -> Population:
    return population_of(pickle.loads(packed))


@lru_cache(maxsize=1)
def _trainer(packed: bytes) -> NodeTrainer:
    config: Config = pickle.loads(packed)
    engine, task = config.engine, method_of(config).task
    device = device_named(engine.device)
    return NodeTrainer(
        InProcessTransport(
            task,
            population_for(task, _population(packed)).users,
            device,
            chunk_memory_of(engine.chunk_mebibytes, device),
            activations=activations_named(engine.activations, device),
            processes=1,  # Ray gives each worker one core
            path=engine.path,
        )
    )


app = ClientApp()


@app.query()
def say_hello(message: Message, _context: Context) -> Message:
    """Reply with the worker's `introduce`, or with one sentence why that failed."""
    return _reply(message, lambda: introduce(message.content), str)


@app.train()
def answer_request(message: Message, _context: Context) -> Message:
    """Reply with the worker's `respond`, or with the type of the error if training fails."""
    return _reply(message, lambda: respond(message.content), _kind_of)


def _reply(
    message: Message, answer: Callable[[], object], describe: Callable[[FedprivError], str]
) -> Message:
    try:
        answered = answer()
    except Exception as error:  # the text of errors other than ours may contain users' data
        answered = describe(error) if isinstance(error, FedprivError) else _kind_of(error)
        _log.error("a message cannot be answered: %s", _kind_of(error))
    return Message(content_of(pickle.dumps(answered)), reply_to=message)


def _kind_of(error: Exception) -> str:
    return type(error).__name__
