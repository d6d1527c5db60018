"""The Flower ClientApp: answers one message at a time with what the node's users contribute.

Each message may come to a fresh process. Guarantees: no exception leaves it, so that Flower has no
text of one to send; what is said to the server and logged says nothing of users.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedpriv import wire
from fedpriv.build import build_task
from fedpriv.clients.connection import answer_of
from fedpriv.clients.consent import misfit
from fedpriv.clients.training import Host, NodeTrainer, machine_of
from fedpriv.clients.worker import HostSettings, share_of
from fedpriv.data.population import Population, check_count, load_population
from fedpriv.engine.arithmetic import activations_named
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import DataError, FedprivError, InvalidValueError, WireError
from fedpriv.importing import raised_at
from fedpriv.privacy.round import PartialSum, RoundRequest
from fedpriv.wire import NODE_RECEIVES_BYTES, Decline, RoundOffer, Welcome, flower_messages
from fedpriv.wire import federation_pb2 as pb

_log = logging.getLogger(__name__)
_POPULATION_BYTES = 2**16
_LONGEST_TROUBLE = 400  # characters
_SHARE_FOR_TRAINING = 0.5  # of the time until a deadline

NodeConfig = Mapping[str, object]
"""Flower's configuration of a node.

A worker of a simulation has `partition-id` and `num-partitions`; a node that hosts enrolled users
has `node`, its name, `users`, and perhaps others of `HostSettings`.
"""


def introduce(content: RecordDict, settings: NodeConfig) -> wire.Hello:
    """Who a node is, and which users it holds; a FedprivError says nothing of enrolled users."""
    if "users" in settings:
        return wire.Hello(str(settings.get("node", "")), _host_of(settings).loaded.users_sha256)
    population = _population(_simulated(content))
    shard = _shard(population.users.population, settings)
    name = f"worker-{settings['partition-id']}"
    return wire.Hello(
        name, flower_messages.digest_of_shard(population.name, population.users, shard)
    )


def respond(
    content: RecordDict, settings: NodeConfig, offer: RoundOffer, request: RoundRequest
) -> PartialSum | Decline:
    """Train the users of an offer that are hosted here, or say why the node declines.

    Half of the offer's time is left for sending, and a sixth of the other half is divided among the
    enrolled users: one who takes longer counts as zero. All users of a simulation are waited for.
    The text of an error may hold users' data.
    """
    began = time.monotonic()
    header = flower_messages.header_in(content, flower_messages.WELCOME, NODE_RECEIVES_BYTES)
    if header is None:
        raise WireError("an offer came without a welcome")
    if "users" not in settings:
        simulated = _simulated(content)
        shard = _shard(_population(simulated).users.population, settings)
        users = request.users
        users = users[(users >= shard.start) & (users < shard.stop)]
        return _worker(simulated, header).answer(replace(request, users=users))
    welcome = _welcome(header)
    if reason := misfit(welcome, offer):
        return Decline(reason)
    trainer = _host_of(settings).trainer(welcome)
    left = began + _SHARE_FOR_TRAINING * offer.seconds - time.monotonic()
    return trainer.answer(request, share_of(left, len(request.users)))


def _host_of(settings: NodeConfig) -> Host:
    device = str(settings.get("device", HostSettings.device))
    activations = str(settings.get("activations", HostSettings.activations))
    users, names = str(settings["users"]), ("chunk-mebibytes", "processes")
    counts = {name: check_count(name, settings[name]) for name in names if name in settings}
    processes = counts.get("processes")
    at_once = counts.get("chunk-mebibytes")
    id_key = Path(str(settings["id-key"])) if "id-key" in settings else None
    known = HostSettings(users, device, None, None, activations, processes, at_once, id_key)
    machine_of(known)
    try:
        return Host.of(known)
    except FedprivError as error:  # its text may name a user, or hold what the loader put into it
        _log.error("the users cannot be loaded: %s", raised_at(error))
        raise DataError("the node's users cannot be loaded; its log says where") from None


def _simulated(content: RecordDict) -> bytes:
    if header := flower_messages.header_in(content, flower_messages.SIMULATED, _POPULATION_BYTES):
        return header
    raise InvalidValueError(
        "the node has no users: give it node and users in its node-config, or run it as a worker "
        "of a simulation"
    )


def _shard(population: int, settings: NodeConfig) -> range:
    worker, workers = (settings.get(name) for name in ("partition-id", "num-partitions"))
    if not (isinstance(worker, int) and isinstance(workers, int) and 0 <= worker < workers):
        found = f"partition-id is {worker!r} of num-partitions {workers!r}"
        legal = "both must be whole numbers, the first from 0 to below the second"
        raise InvalidValueError(f"{found}; {legal}")
    return flower_messages.shard_of(population, worker, workers)


# A worker of a simulation lives as long as the run, and gets messages of all nodes.
@lru_cache(maxsize=1)
def _population(simulated: bytes) -> Population:
    described = flower_messages.Simulated.decode(simulated)
    return load_population(described.name, described.options)


@lru_cache(maxsize=1)
def _worker(simulated: bytes, welcome: bytes) -> NodeTrainer:
    described, task = flower_messages.Simulated.decode(simulated), _welcome(welcome).task
    built = build_task(**vars(task))
    users, device = _population(simulated).users, device_named(described.device)
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


def _welcome(header: bytes) -> Welcome:
    return wire.decode_welcome(wire.parse(pb.Welcome, header, NODE_RECEIVES_BYTES))


app = ClientApp()


@app.query()
def say_hello(message: Message, context: Context) -> Message:
    """Say who the node is and which users it holds, or in one sentence why it cannot."""
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
        return _reply(message, offer, respond(message.content, context.node_config, offer, request))
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
