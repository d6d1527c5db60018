"""The Flower ClientApp: a worker of a simulation on Ray, which trains its share of the users.

It answers one message at a time. No exception escapes it, since Flower would send its text. No text
that may contain users' data is sent or logged.
"""

import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpriv.clients.training import NodeTrainer
from fedpriv.data.population import Population
from fedpriv.engine.arithmetic import activations_named
from fedpriv.engine.reading import population_for
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import FedprivError, InvalidValueError
from fedpriv.experiment.build import method_of, population_of
from fedpriv.experiment.config import Config
from fedpriv.flower import messages as flower_messages
from fedpriv.flower.messages import Introduction, ShareSum, content_of
from fedpriv.training.request import RoundRequest

_log = logging.getLogger(__name__)

NodeConfig = Mapping[str, object]
"""Flower's configuration of a node, with `partition-id` and `num-partitions`."""


def introduce(content: RecordDict, settings: NodeConfig) -> Introduction:
    """Load the population that a message describes; return the worker's number and its digest.

    FedprivError: the message or the configuration is invalid, or the population cannot be loaded.
    """
    (work,) = flower_messages.parts_in(content)
    population = _population(work)
    number, shard = _place(population.users.population, settings)
    return Introduction(
        number, flower_messages.digest_of_shard(population.ledger_name, population.users, shard)
    )


def respond(content: RecordDict, settings: NodeConfig) -> ShareSum:
    """Train the users of the request in a message who are in this worker's share.

    The text of an error may contain users' data.
    """
    work, packed = flower_messages.parts_in(content)
    request: RoundRequest = pickle.loads(packed)
    _, shard = _place(_population(work).users.population, settings)
    users = request.users[(request.users >= shard.start) & (request.users < shard.stop)]
    return ShareSum(len(users), _trainer(work).answer(replace(request, users=users)))


def _place(population: int, settings: NodeConfig) -> tuple[int, range]:
    """Return the number of a worker, and the positions of its users."""
    worker, workers = (settings.get(name) for name in ("partition-id", "num-partitions"))
    if not (isinstance(worker, int) and isinstance(workers, int) and 0 <= worker < workers):
        values = f"partition-id is {worker!r} of num-partitions {workers!r}"
        condition = "both must be whole numbers, the first from 0 to below the second"
        raise InvalidValueError(f"{values}; {condition}")
    return worker, flower_messages.shard_of(population, worker, workers)


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
def say_hello(message: Message, context: Context) -> Message:
    """Reply with the worker's `introduce`, or with one sentence why that failed."""
    return _reply(message, lambda: introduce(message.content, context.node_config), str)


@app.train()
def answer_request(message: Message, context: Context) -> Message:
    """Reply with the worker's `respond`, or with the type of the error if training fails."""
    return _reply(message, lambda: respond(message.content, context.node_config), _kind_of)


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
