"""The Flower ClientApp: a worker of a simulation, which trains its share of the users.

It answers one message at a time. Guarantees: no exception leaves it, so that Flower has no text of
one to send; no text that may hold users' data is sent or logged.
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
    """Which worker this is, and which users it has loaded."""
    population = _population(_simulated(content))
    shard = _shard(population.users.population, settings)
    name = f"worker-{settings['partition-id']}"
    return wire.Hello(
        name, flower_messages.digest_of_shard(population.name, population.users, shard)
    )


def respond(content: RecordDict, settings: NodeConfig, request: RoundRequest) -> PartialSum:
    """Train those users of a round who are in this worker's share.

    The text of an error may hold users' data.
    """
    task = flower_messages.header_in(content, flower_messages.TASK, NODE_RECEIVES_BYTES)
    if task is None:
        raise WireError("an offer came without a task")
    simulated = _simulated(content)
    shard = _shard(_population(simulated).users.population, settings)
    users = request.users
    users = users[(users >= shard.start) & (users < shard.stop)]
    return _worker(simulated, task).answer(replace(request, users=users))


def _simulated(content: RecordDict) -> bytes:
    if header := flower_messages.header_in(content, flower_messages.SIMULATED, _POPULATION_BYTES):
        return header
    raise InvalidValueError("the message does not say which users a worker is to load")


def _shard(population: int, settings: NodeConfig) -> range:
    worker, workers = (settings.get(name) for name in ("partition-id", "num-partitions"))
    if not (isinstance(worker, int) and isinstance(workers, int) and 0 <= worker < workers):
        found = f"partition-id is {worker!r} of num-partitions {workers!r}"
        legal = "both must be whole numbers, the first from 0 to below the second"
        raise InvalidValueError(f"{found}; {legal}")
    return flower_messages.shard_of(population, worker, workers)


# A worker lives as long as the run, and gets messages of all nodes.
@lru_cache(maxsize=1)
def _population(simulated: bytes) -> Population:
    described = flower_messages.Simulated.decode(simulated)
    return load_population(described.name, described.options)


@lru_cache(maxsize=1)
def _worker(simulated: bytes, task: bytes) -> NodeTrainer:
    described = flower_messages.Simulated.decode(simulated)
    built = build_task(**vars(TASK.decode(wire.parse(pb.Task, task, NODE_RECEIVES_BYTES))))
    users = population_for(built, _population(simulated)).users
    device = device_named(described.device)
    kind = activations_named(described.activations, device)
    at_once = chunk_memory_of(described.chunk_mebibytes, device)
    # Ray gives each worker a core.
    return NodeTrainer(
        InProcessTransport(
            built,
            users,
            device,
            at_once,
            activations=kind,
            processes=1,
            path=described.path,
            timed=False,  # or workers could differ by rounding
        )
    )


app = ClientApp()


@app.query()
def say_hello(message: Message, context: Context) -> Message:
    """Say which worker this is and which users it has, or in one sentence why it cannot."""
    try:
        hello = introduce(message.content, context.node_config)
        headers = {flower_messages.HELLO: wire.encode_hello(hello).SerializeToString()}
    except Exception as error:  # only the text of our own surely holds no users' data
        told = str(error) if isinstance(error, FedprivError) else type(error).__name__
        headers = {flower_messages.TROUBLE: told[:_LONGEST_TROUBLE].encode(errors="replace")}
    return Message(flower_messages.content_of(headers), reply_to=message)


@app.train()
def answer_offer(message: Message, context: Context) -> Message:
    """Answer an offer, or decline it where that fails; say nothing where there is none."""
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
    except Exception as error:  # its text may hold users' data
        _log.error("training failed: %s", type(error).__name__)
        return _reply(message, offer, Decline(f"training failed: {type(error).__name__}"))


def _reply(message: Message, offer: RoundOffer, trained: PartialSum | Decline) -> Message:
    answer, tensors = answer_of(offer.id, trained)
    headers, sent = (
        {flower_messages.ANSWER: answer.SerializeToString()},
        flower_messages.packed(tensors),
    )
    return Message(flower_messages.content_of(headers, sent if tensors else None), reply_to=message)
