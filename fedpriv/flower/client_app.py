"""The Flower ClientApp: a worker of a simulation on Ray, which trains users that it is sent.

It answers one message at a time. No exception escapes it, since Flower would send its text. No text
that may contain users' data is sent or logged.
"""

import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpriv.clients.training import NodeTrainer
from fedpriv.data.population import Population
from fedpriv.engine.arithmetic import activations_named
from fedpriv.engine.reading import population_for
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import FedprivError
from fedpriv.experiment.build import method_of, population_of
from fedpriv.experiment.config import Config
from fedpriv.flower import messages as flower_messages
from fedpriv.flower.messages import content_of
from fedpriv.privacy.round import PartialSum

_log = logging.getLogger(__name__)


def introduce(content: RecordDict) -> bytes:
    """Load the population that a message describes; return the `digest_of_shard` of a share of it.

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
