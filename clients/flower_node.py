"""What a node on Flower's runtime does with a message; each may come to a fresh process."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

from flwr.app import RecordDict

from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.engine.precision import activations_named
from fedpriv.engine.transport import InProcessTransport, device_named
from fedpriv.errors import DataError, FedprivError, InvalidValueError, WireError
from fedpriv.federated.transport import RoundRequest
from fedpriv.flower import (
    SIMULATED,
    WELCOME,
    Simulated,
    digest_of_shard,
    header_in,
    shard_of,
)
from fedpriv.importing import raised_at
from fedpriv.tasks import build_task
from fedpriv.wire import (
    NODE_RECEIVES_BYTES,
    Decline,
    Hello,
    RoundOffer,
    Welcome,
    decode_welcome,
    parse,
)
from fedpriv.wire import federation_pb2 as pb

from .consent import misfit
from .messages import Source, Trained
from .node import Node
from .training import Host
from .users import load_users

_log = logging.getLogger(__name__)
_MEBIBYTE = 2**20
_POPULATION_BYTES = 2**16

Settings = Mapping[str, object]
"""What Flower calls the configuration of a node.

A worker of a simulation has `partition-id` and `num-partitions`. A node that hosts enrolled users
has `node`, its name, and `users`, as `clients.users.load_users` reads it; it may have `device`,
`chunk-mebibytes` and `activations`.
"""


def introduce(content: RecordDict, settings: Settings) -> Hello:
    """Who a node is, and which users it holds.

    Raises:
        FedprivError: the users cannot be loaded, or the settings do not fit. Of users that the
            server does not have the message says nothing; of those of a simulation only what
            an error of fedpriv's own says.
        OSError: a loader of a simulation raises it.
    """
    if "users" in settings:
        return Hello(str(settings.get("node", "")), _host_of(settings).loaded.users_sha256)
    population = _population(_simulated(content))
    users = population.users
    shard = _shard(users.population, settings)
    name = f"worker-{settings['partition-id']}"
    return Hello(name, digest_of_shard(population.name, map(users.id_of, shard)))


def respond(
    content: RecordDict, settings: Settings, offer: RoundOffer, request: RoundRequest
) -> Trained | Decline | None:
    """Train the users of an offer that are hosted here.

    Args:
        content: of the message, with the welcome that the offer is of.
        settings: of the node.
        offer: what is offered.
        request: the request that it is of, with the model.

    Returns:
        As `clients.training.Trainer.answer`, or why the node declines.

    Raises:
        Exception: whatever training raises; its text may hold users' data.
    """
    header = header_in(content, WELCOME, NODE_RECEIVES_BYTES)
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
    return _host_of(settings).trainer(welcome).answer(request)


def _host_of(settings: Settings) -> Host:
    users, device = str(settings["users"]), str(settings.get("device", "auto"))
    memory = settings.get("chunk-mebibytes", Source.chunk_mebibytes)
    if not isinstance(memory, int):
        raise InvalidValueError(f"chunk-mebibytes is {memory!r}; it must be a whole number")
    named = str(settings.get("activations", Source.activations))
    source = Source(users, device, memory, activations=named)
    found, activations = device_named(device), activations_named(named)
    try:
        loaded = load_users(users)
    except FedprivError as error:  # its text may name a user, or hold what the loader put into it
        _log.error("the users cannot be loaded: %s", raised_at(error))
        raise DataError("the node's users cannot be loaded; its log says where") from None
    return Host(loaded, found, activations, source)


def _simulated(content: RecordDict) -> bytes:
    header = header_in(content, SIMULATED, _POPULATION_BYTES)
    if header is None:
        raise InvalidValueError(
            "the node has no users: give it node and users in its node-config, or run it as a "
            "worker of a simulation"
        )
    return header


def _shard(population: int, settings: Settings) -> range:
    worker, workers = (settings.get(name) for name in ("partition-id", "num-partitions"))
    if not (isinstance(worker, int) and isinstance(workers, int) and 0 <= worker < workers):
        raise InvalidValueError(
            f"partition-id is {worker!r} of num-partitions {workers!r}; both must be whole "
            "numbers, the first from 0 to below the second"
        )
    return shard_of(population, worker, workers)


# A worker of a simulation gets messages of all nodes, and lives as long as the run.
@lru_cache(maxsize=1)
def _population(simulated: bytes) -> Population:
    described = Simulated.decode(simulated)
    return load_population(described.name, described.options)


@lru_cache(maxsize=1)
def _worker(simulated: bytes, welcome: bytes) -> Node:
    described, task = Simulated.decode(simulated), _welcome(welcome).task
    transport = InProcessTransport(
        build_task(task.model, task.options, task.seed, task.loss, task.metrics),
        _population(simulated).users,
        device_named(described.device),
        described.chunk_mebibytes * _MEBIBYTE,
        activations=activations_named(described.activations),
    )
    return Node("", transport)


def _welcome(header: bytes) -> Welcome:
    return decode_welcome(parse(pb.Welcome, header, NODE_RECEIVES_BYTES))
