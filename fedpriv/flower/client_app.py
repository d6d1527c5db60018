"""The Flower ClientApp: a worker of a simulation, which trains its share of the users.

It answers one message at a time. No exception escapes it, since Flower would send its text. No text
that may contain users' data is sent or logged.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpriv import wire
from fedpriv.clients.connection import answer_of
from fedpriv.clients.training import NodeTrainer
from fedpriv.data.population import Population, load_population
from fedpriv.engine.arithmetic import activations_named
from fedpriv.engine.reading import population_for
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import FedprivError, InvalidValueError, WireError
from fedpriv.experiment.build import build_task
from fedpriv.flower import messages as flower_messages
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest
from fedpriv.wire import NODE_RECEIVES_BYTES, Decline, RoundOffer
from fedpriv.wire import federation_pb2 as pb
from fedpriv.wire.messages import TASK

_log = logging.getLogger(__name__)
_POPULATION_BYTES = 2**16
_LONGEST_TROUBLE = 400  # characters

NodeConfig = Mapping[str, object]
"""Flower's configuration of a node, with `partition-id` and `num-partitions`."""


def introduce(content: RecordDict, settings: NodeConfig) -> wire.Hello:
    """Load the population that a message describes; return the worker's name and users' digest.

    FedprivError: the message or the configuration is invalid, or the population cannot be loaded.
    """
    population = _population(_simulated(content))
    shard = _shard(population.users.population, settings)
    name = f"worker-{settings['partition-id']}"
    return wire.Hello(
        name, flower_messages.digest_of_shard(population.name, population.users, shard)
    )


def respond(content: RecordDict, settings: NodeConfig, request: RoundRequest) -> PartialSum:
    """Train the users of a request that are in this worker's share, and return their sum.

    The text of an error may contain users' data.
    """
    task = flower_messages.header_in(content, flower_messages.TASK, NODE_RECEIVES_BYTES)
    if task is None:
        raise WireError("an offer came without a task")
    simulated = _simulated(content)
    shard = _shard(_population(simulated).users.population, settings)
    users = request.users[(request.users >= shard.start) & (request.users < shard.stop)]
    return _worker(simulated, task).answer(replace(request, users=users))


def _simulated(content: RecordDict) -> bytes:
    if header := flower_messages.header_in(content, flower_messages.SIMULATED, _POPULATION_BYTES):
        return header
    raise InvalidValueError("the message does not say which users a worker is to load")


def _shard(population: int, settings: NodeConfig) -> range:
    worker, workers = (settings.get(name) for name in ("partition-id", "num-partitions"))
    if not (isinstance(worker, int) and isinstance(workers, int) and 0 <= worker < workers):
        values = f"partition-id is {worker!r} of num-partitions {workers!r}"
        condition = "both must be whole numbers, the first from 0 to below the second"
        raise InvalidValueError(f"{values}; {condition}")
    return flower_messages.shard_of(population, worker, workers)


# A worker's process lasts for the whole run, and receives messages to all nodes.
@lru_cache(maxsize=1)
def _population(simulated: bytes) -> Population:
    description = flower_messages.Simulated.decode(simulated)
    return load_population(description.name, description.options)


@lru_cache(maxsize=1)
def _worker(simulated: bytes, task: bytes) -> NodeTrainer:
    description = flower_messages.Simulated.decode(simulated)
    device = device_named(description.device)
    built = build_task(**vars(TASK.decode(wire.parse(pb.Task, task, NODE_RECEIVES_BYTES))))
    return NodeTrainer(
        InProcessTransport(
            built,
            population_for(built, _population(simulated)).users,
            device,
            chunk_memory_of(description.chunk_mebibytes, device),
            activations=activations_named(description.activations, device),
            processes=1,  # Ray gives each worker one core
            path=description.path,
            timed=False,  # otherwise workers could differ by rounding
        )
    )


app = ClientApp()


@app.query()
def say_hello(message: Message, context: Context) -> Message:
    """Reply with the worker's `introduce`, or with one sentence why that failed."""
    try:
        hello = introduce(message.content, context.node_config)
        headers = {flower_messages.HELLO: wire.encode_hello(hello).SerializeToString()}
    except Exception as error:  # the text of errors other than ours may contain users' data
        reason = str(error) if isinstance(error, FedprivError) else type(error).__name__
        headers = {flower_messages.TROUBLE: reason[:_LONGEST_TROUBLE].encode(errors="replace")}
    return Message(flower_messages.content_of(headers), reply_to=message)


@app.train()
def answer_offer(message: Message, context: Context) -> Message:
    """Answer an offer, or decline it if training fails; without an offer, the reply is empty."""
    try:
        header = flower_messages.header_in(
            message.content, flower_messages.OFFER, NODE_RECEIVES_BYTES
        )
        offer = wire.decode_offer(wire.parse(pb.Offer, header or b"", NODE_RECEIVES_BYTES))
    except FedprivError as error:
        _log.error("a message holds no offer: %s", error)
        return Message(flower_messages.content_of({}), reply_to=message)
    try:
        tensors = flower_messages.tensors_in(message.content, offer.model)
        request = offer.request(tensors)
        return _reply(message, offer, respond(message.content, context.node_config, request))
    except Exception as error:  # the text of the error may contain users' data
        _log.error("training failed: %s", type(error).__name__)
        return _reply(message, offer, Decline(f"training failed: {type(error).__name__}"))


def _reply(message: Message, offer: RoundOffer, result: PartialSum | Decline) -> Message:
    answer, tensors = answer_of(offer.id, result)
    headers = {flower_messages.ANSWER: answer.SerializeToString()}
    array = flower_messages.packed(tensors) if tensors else None
    return Message(flower_messages.content_of(headers, array), reply_to=message)
