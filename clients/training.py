"""The users of a node: read from a folder, from one file, or from a function by import path.

A node's whole part in a round: one partial sum over those of its users that were drawn.

The training process of a node: it holds the users' data and the model, and trains.
"""

import logging
import pkgutil
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.func import grad, vmap

from fedpriv import errors
from fedpriv.build import build_task
from fedpriv.clients.messages import Loaded, OneByOne, Ready, Source, receive, send
from fedpriv.data.arrays import from_arrays, from_grouped
from fedpriv.data.files import read_npz
from fedpriv.data.population import Population, UserStore
from fedpriv.engine.metrics import check_metrics
from fedpriv.engine.task import Activations, Task, activations_named, check_task
from fedpriv.engine.transport import InProcessTransport, device_named
from fedpriv.errors import DataError, FedprivError, InvalidValueError, ModelError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, Tensors, flat
from fedpriv.privacy.round import LocalTraining, PartialSum, RoundRequest, merged
from fedpriv.wire import TaskDescription, Welcome, digest_of

IDS = "user_id"
"""Name of the column of a columnar file that says whose a row is."""


def load_users(source: str) -> UserStore:
    """Read the users that a node hosts.

    Guarantees: nothing is unpickled, and no message holds a user's data. One may name a user, and
    a fedpriv error that a function raises passes as it is; both are for who runs the node alone.

    Args:
        source: one of

            * a folder saved by `UserStore.save`; its fields are mapped, not read;
            * a folder with one file ID.npz per user, holding the fields; a user may have zero rows;
            * one .npz file, holding the fields and `user_id`, the id of each row's user, in any
              order;
            * "package.module:function" of a function without arguments that returns a `UserStore`,
              or a `Population`, whose users are taken. Naming a function runs it.

            What exists as a file or folder is read as such.

    Raises:
        DataError: there is no such source, or it does not hold users.
        InvalidValueError: the loader refuses a setting of its own.
    """
    try:
        if Path(source).exists():
            return _from_files(Path(source))
    except OSError as error:
        raise DataError(f"users {source!r} cannot be read: {error.strerror}") from error
    if ":" in source:
        return _from_function(source)
    raise DataError(
        f"users {source!r} do not exist; legal are a folder, an .npz file and "
        "package.module:function"
    )


def enrolled_positions(store: UserStore, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where in the enrolled population each user of a store is: int64 [N].

    Ids are compared as strings by code points: the store's k-th in this order is at the k-th of
    the positions.

    Args:
        store: of N users, in any order.
        positions: [N], ascending.

    Raises:
        InvalidValueError: there are more or fewer positions than users.
    """
    if len(positions) != store.population:
        raise InvalidValueError(
            f"there are {len(positions)} positions for {store.population} users; the users that "
            "are enrolled at this node must be those that it holds"
        )
    ids = [store.id_of(user) for user in range(store.population)]
    enrolled = np.empty(store.population, np.int64)
    enrolled[sorted(range(len(ids)), key=ids.__getitem__)] = positions
    return enrolled


def _from_files(path: Path) -> UserStore:
    if not path.is_dir():
        return _columns(path)
    return UserStore.load(path) if (path / "store.json").exists() else _one_file_each(path)


def _one_file_each(folder: Path) -> UserStore:
    files = sorted(folder.iterdir())
    for path in files:
        if path.suffix != ".npz" or not path.is_file():
            raise DataError(f"{path} is no .npz file; a folder of users holds one ID.npz per user")
    try:
        return from_grouped((path.stem, read_npz(path)) for path in files)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error


def _columns(path: Path) -> UserStore:
    fields = read_npz(path)
    if IDS not in fields:
        raise DataError(f"{path} has no field {IDS!r}, the id of each row's user")
    ids = fields.pop(IDS)
    try:
        return from_arrays(fields, ids)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error


def _from_function(path: str) -> UserStore:
    try:
        function = pkgutil.resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise DataError(f"users {path!r} cannot be imported: {error}") from error
    except Exception as error:  # raised by the module itself, or the path has no legal form
        raise DataError(f"users {path!r} cannot be imported: {type(error).__name__}") from error
    if not callable(function):
        raise DataError(f"users {path!r} are no function; it must return a UserStore")
    try:
        loaded = function()
    except FedprivError:
        raise
    except Exception as error:  # its text may hold users' data
        raise DataError(f"users {path!r}: the function raised {type(error).__name__}") from error
    users = loaded.users if isinstance(loaded, Population) else loaded
    if not isinstance(users, UserStore):
        raise DataError(
            f"{path} returned a {type(users).__name__}; it must return a UserStore or a Population"
        )
    return users


@dataclass(frozen=True)
class Node:
    """A process that hosts some of the enrolled users.

    The node is trusted with its users' data and clips each of their updates by itself; whoever
    receives the partial sum can only check its norm against the number of users in it.

    Attributes:
        name: under which the server knows it.
        transport: trains the node's users; `hosted` says who of the population they are.

    Raises:
        InvalidValueError: the transport has an observer.
    """

    name: str
    transport: InProcessTransport

    def __post_init__(self) -> None:
        if self.transport.observer is not None:
            raise InvalidValueError(
                f"node {self.name!r} has a transport with an observer; only a simulation may have "
                "one, as what it sees is not private"
            )

    def answer(self, request: RoundRequest) -> PartialSum:
        """Train the node's users of the cohort and sum their clipped contributions.

        Users of the request that the node does not host are left to other nodes.
        """
        dimension = request.clipping.layout.dimension
        return merged(self.name, self.transport.collect(request), dimension)


_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Host:
    """The users of a node, before it is known what they train.

    Attributes:
        users: their data.
        device: where to train.
        activations: of the model while users train.
        source: limits.
    """

    users: UserStore
    device: torch.device
    activations: Activations
    source: Source

    @classmethod
    def of(cls, source: Source) -> "Host":
        """Load the users and find the device.

        Raises:
            DataError: the users cannot be loaded.
            InvalidValueError: this machine does not have the device, or there are no such
                activations.
        """
        activations = activations_named(source.activations)
        return cls(load_users(source.users), device_named(source.device), activations, source)

    @property
    def loaded(self) -> Loaded:
        """Which users there are."""
        ids = (self.users.id_of(user) for user in range(self.users.population))
        return Loaded(self.users.population, digest_of(ids))

    def trainer(self, welcome: Welcome) -> "Trainer":
        """Build the task and refuse one that cannot train, without touching the users' data.

        Raises:
            ModelError: the task cannot be built, or cannot train on such data.
            InvalidValueError: an option does not fit, or other users are enrolled than there are.
        """
        hosted = enrolled_positions(self.users, welcome.users)
        task = _task(welcome.task)
        blank = {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in self.users.fields.items()}
        check_task(task, blank)
        memory = self.source.chunk_mebibytes * _MEBIBYTE
        transport = InProcessTransport(
            task,
            self.users,
            self.device,
            memory,
            hosted,
            activations=self.activations,
            processes=self.source.processes,
        )
        _warm_up(replace(transport, users=UserStore(blank, np.array([0, 1])), hosted=None))
        return Trainer(transport, blank)


@dataclass(frozen=True)
class Trainer:
    """Trains the users of a node for one task.

    Attributes:
        transport: over the node's users.
        blank: one row of zeros of each field.
    """

    transport: InProcessTransport
    blank: Tensors

    def answer(self, request: RoundRequest) -> PartialSum:
        """The sum over the users of a request that are hosted here, its `node` empty.

        Raises:
            FedprivError: as of `ready`.
            MemoryError: likewise.
            RuntimeError: likewise.
        """
        partials = (partial for ready in self.ready(request) for partial in ready.partials)
        return merged("", partials, request.clipping.layout.dimension)

    def ready(self, request: RoundRequest) -> Iterator[Ready]:
        """Yield the sums over the users of a request that are hosted here, as they are found.

        Guarantees: a user whose training raises counts as zero, and so does one without examples.
        Of an only user nothing is logged, as it would say that the user was drawn.

        Raises:
            InvalidValueError: the model is not that of the task, or a metric does not fit.
            ModelError: a metric cannot be computed on a row of zeros.
            MemoryError: there is not enough memory.
            WorkerError: a process in which users trained side by side has ended.
            RuntimeError: the device works no more.
        """
        self._check(request)
        with _unlogged() if self.transport.users.population == 1 else nullcontext():
            for users, partials in self.transport.by_chunk(request):
                if self.transport.device.type == "cuda":
                    # A kernel that failed for one user has broken the process for all: this raises.
                    torch.cuda.synchronize(self.transport.device)
                yield Ready(users, partials)

    def _check(self, request: RoundRequest) -> None:
        """Refuse what would raise whatever the users' data are."""
        task = self.transport.task
        _check_tensors("parameters", request.parameters, self._parameters)
        if request.statistics:
            _check_tensors("running statistics", request.statistics, self._statistics)
        check_metrics(task, request.metrics, request.clipping, self.blank)

    @cached_property
    def _parameters(self) -> Tensors:
        return self.transport.task.parameters()

    @cached_property
    def _statistics(self) -> Tensors:
        return self.transport.task.statistics()


def serve(channel: socket.socket) -> None:
    """Answer the messages of `clients.messages`.

    Raises:
        EOFError: the other end is closed.
        Exception: whatever else cannot be answered; it may hold users' data.
    """
    host: Host | None = None
    trainer: Trainer | None = None
    while True:
        message = receive(channel)
        answer: object = None
        try:
            match message:
                case Source():
                    host = Host.of(message)
                    answer = host.loaded
                case Welcome() if host is not None:
                    with _limited_afterwards(host.source.memory_mebibytes):
                        trainer = host.trainer(message)
                case RoundRequest() if trainer is not None:
                    for ready in trainer.ready(message):
                        send(channel, ready)
                case OneByOne(request) if trainer is not None:
                    for user in np.split(request.users, len(request.users)):
                        alone = trainer.ready(replace(request, users=user))
                        send(channel, Ready(user, [p for r in alone for p in r.partials]))
                case _:
                    raise TypeError(f"a {type(message).__name__} has no answer yet")
        except FedprivError as error:
            answer = _plain(error)
        send(channel, answer)


def _task(described: TaskDescription) -> Task:
    given = (described.model, described.options, described.seed, described.loss, described.metrics)
    try:
        return build_task(*given)
    except FedprivError:
        raise
    except Exception as error:
        raise ModelError(
            f"the task with model {described.model!r} cannot be built: "
            f"{type(error).__name__}: {error}"
        ) from error


def _warm_up(transport: InProcessTransport) -> None:
    """Train one user, so that what torch loads and reserves at first is there before a limit is.

    Raises:
        ModelError: training raises.
    """
    parameters = transport.task.parameters()
    layout = Layout.of(parameters)
    clipping, local = Clipping(layout, flat(layout, 1.0)), LocalTraining(1.0, steps=2)
    request = RoundRequest("", 0, 0, parameters, clipping, local, np.arange(1), bytes(32))
    torch.ones(2**20).sum()  # large enough for all threads
    vmap(grad(torch.sin))(torch.ones(1))  # not every training needs it, and it is slow to load
    list(transport.collect(request))


def _check_tensors(what: str, given: Tensors, known: Tensors) -> None:
    shapes, legal = ({n: t.shape for n, t in tensors.items()} for tensors in (given, known))
    if shapes != legal:
        odd = sorted(name for name in shapes | legal if shapes.get(name) != legal.get(name))
        raise InvalidValueError(
            f"{what} {odd} of the round are missing, unknown or of another shape; legal are those "
            "of the task"
        )


def _plain(error: FedprivError) -> FedprivError:
    """The error as one of `fedpriv.errors`, which the other process can read without imports."""
    kinds: list[type[FedprivError]] = [
        kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__
    ]
    return kinds[0](str(error))


@contextmanager
def _unlogged() -> Iterator[None]:
    """Let nothing of the library's be logged."""
    logger = logging.getLogger("fedpriv")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _limited_afterwards(mebibytes: int | None) -> Iterator[None]:
    """Lift the limit of address space, and set it anew from what is taken at the end."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        yield
    finally:
        if mebibytes is not None:
            limit = _address_space() + mebibytes * _MEBIBYTE
            soft = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(resource.RLIMIT_AS, (soft, most))


def _address_space() -> int:
    """Bytes of address space that this process has.

    Raises:
        InvalidValueError: this system does not say.
    """
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError as error:
        raise InvalidValueError("memory_mebibytes is given; only Linux can limit it") from error
    return pages * resource.getpagesize()
