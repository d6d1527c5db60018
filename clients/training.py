"""The training side of a node: it holds the users' data and the model, and trains.

It runs in the process of `answer_messages`; at a worker of a simulation on Ray, in that of the
ClientApp.
"""

import hashlib
import logging
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import BufferedRWPair
from pathlib import Path

import numpy as np
import torch

from fedpriv import errors
from fedpriv.clients.users import enrolled_positions, hosted_users
from fedpriv.clients.worker import (
    HostSettings,
    Learnt,
    Loaded,
    OneByOne,
    Ready,
    Timed,
    receive,
    send,
)
from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import Activations, activations_named
from fedpriv.engine.reading import rows_for
from fedpriv.engine.task_checks import check_task
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import FedprivError, InvalidValueError
from fedpriv.experiment.build import build_task
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, Tensors, flat
from fedpriv.privacy.round import PartialSum, merge_sums
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import Proposal, Welcome, digest_of

_MEBIBYTE = 2**20
# What torch and its compiler take when they are first used, and each of torch's threads.
_LOADING_MEBIBYTES, _THREAD_MEBIBYTES = 1024, 160


@dataclass(frozen=True)
class Host:
    """The users of a node, before it is known what they train."""

    users: UserStore
    settings: HostSettings

    @classmethod
    def of(cls, settings: HostSettings) -> "Host":
        """Load the users; InvalidValueError if this machine lacks the device or activations."""
        machine_of(settings)
        return cls(hosted_users(settings.users, settings.id_key), settings)

    @property
    def loaded(self) -> Loaded:
        """Which users there are."""
        ids = sorted(self.users.id_of(user) for user in range(self.users.population))
        digests = (hashlib.sha256(user.encode()).digest()[:8] for user in ids)
        return Loaded(len(ids), digest_of(ids), b"".join(digests))

    def trainer(self, welcome: Welcome) -> "NodeTrainer":
        """Build the task and refuse one that cannot train, without touching the users' data."""
        hosted = enrolled_positions(self.users, welcome.users)
        named, settings = welcome.task, self.settings
        task = build_task(**vars(named))
        users = replace(self.users, fields=rows_for(task, self.users.fields))
        blank = {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in users.fields.items()}
        check_task(task, blank)
        device, activations = machine_of(settings)
        transport = InProcessTransport(
            task,
            users,
            device,
            chunk_memory_of(None, device),
            hosted,
            activations=activations,
            processes=settings.processes,
            limited=True,
            timed=False,  # or nodes could differ by rounding
        )
        one = UserStore(blank, np.array([0, 1]))
        _warm_up(replace(transport, users=one, hosted=None))
        return NodeTrainer(transport)


def machine_of(settings: HostSettings) -> tuple[torch.device, Activations]:
    """What to compute with; InvalidValueError if this machine lacks it."""
    device = device_named(settings.device)
    return device, activations_named(settings.activations, device)


def _warm_up(transport: InProcessTransport) -> None:
    """Train one user, so that what torch loads and reserves comes before the limit of memory."""
    parameters = transport.task.parameters()
    layout = Layout.of(parameters)
    clipping, local = Clipping(layout, flat(layout, 1.0)), LocalTraining(1.0, steps=2)
    request = RoundRequest("", 0, 0, parameters, clipping, local, np.arange(1), bytes(32))
    torch.ones(2**20).sum()  # large enough for all threads
    list(transport.collect(request))


@dataclass(frozen=True)
class NodeTrainer:
    """Trains users of a node for rounds of one task, and clips each of their updates.

    The server can only check the norm of a partial sum against the number of users in it.
    """

    transport: InProcessTransport  # without an observer; `hosted` says which users it has

    def __post_init__(self) -> None:
        if self.transport.observer is not None or self.transport.on_dropped is not None:
            sentence = "a node has a transport with an observer; only a simulation may have one"
            raise InvalidValueError(sentence)

    def learn(self, proposal: Proposal) -> Learnt:
        """Settle how users of such rounds train; ModelError or InvalidValueError if they cannot."""
        task, local, users = self.transport.task, proposal.local, np.empty(0, np.int64)
        parameters, statistics = task.parameters(), task.statistics()
        asked = RoundRequest(
            run="",
            round=0,
            attempt=0,
            parameters=parameters,
            clipping=proposal.clipping,
            local=local,
            users=users,
            local_key=bytes(32),
            metrics=proposal.metrics,
            statistics=statistics,
            control=parameters if local.control else {},
        )
        self.transport.prepare(asked)
        return Learnt(pickle.dumps(self.transport.roads))

    def recall(self, learnt: Learnt) -> None:
        """Know what another process has learnt of the same task."""
        if learnt.roads:
            self.transport.roads.update(pickle.loads(learnt.roads))

    def answer(self, request: RoundRequest, seconds: float | None = None) -> PartialSum:
        """The sum of clipped contributions of the node's users of a round, with an empty `node`.

        `seconds`: of each user; one who takes longer counts as zero, where processes can be forked.
        """
        sums = (ready.partial for ready in self.ready(request, seconds))
        return merge_sums("", sums, request.clipping.layout.dimension)

    def ready(self, request: RoundRequest, seconds: float | None = None) -> Iterator[Ready]:
        """Train the node's users of a round, as `answer` does; say chunk by chunk which are done.

        MemoryError or RuntimeError: the process can no longer train.
        """
        task = self.transport.task
        _check_shapes("parameters", request.parameters, task.parameters())
        control = task.parameters() if request.local.control else {}
        _check_shapes("control variates", request.control, control)
        if request.statistics:
            _check_shapes("running statistics", request.statistics, task.statistics())
        # The log of a node's only user would say that it was drawn.
        with _unlogged() if self.transport.users.population == 1 else nullcontext():
            for users, partial in self.transport.by_chunk(request, seconds):
                if self.transport.device.type == "cuda":
                    # A kernel that failed for one user has broken the process for all: this raises.
                    torch.cuda.synchronize(self.transport.device)
                yield Ready(users, partial)


def _check_shapes(what: str, given: Tensors, legal: Tensors) -> None:
    found, wanted = ({(n, t.shape) for n, t in tensors.items()} for tensors in (given, legal))
    if odd := sorted({name for name, _ in found ^ wanted}):
        unlike = f"{what} {odd} of the round are missing, unknown or of another shape"
        raise InvalidValueError(f"{unlike}; legal are those of the task")


def answer_messages(channel: BufferedRWPair) -> None:
    """Answer the messages of `fedpriv.clients.worker` until the other end is closed, an EOFError.

    The text of anything else that is raised may hold users' data.
    """
    host: Host | None = None
    trainer: NodeTrainer | None = None
    while True:
        message = receive(channel)
        answer: object = None
        try:
            match message:
                case HostSettings():
                    host = Host.of(message)
                    answer = host.loaded
                case Welcome() if host is not None:
                    with _limited(host.settings):
                        trainer = host.trainer(message)
                case Proposal() if trainer is not None:
                    answer = trainer.learn(message)
                case Learnt() if trainer is not None:
                    trainer.recall(message)
                case Timed(request, seconds) if trainer is not None:
                    for ready in trainer.ready(request, seconds):
                        send(channel, ready)
                case OneByOne(request) if trainer is not None:
                    for user in np.split(request.users, len(request.users)):
                        send(channel, Ready(user, trainer.answer(replace(request, users=user))))
                case _:
                    raise TypeError(f"a {type(message).__name__} has no answer yet")
        except FedprivError as error:
            answer = _plain(error)
        send(channel, answer)


def _plain(error: FedprivError) -> FedprivError:
    """The error as one of `fedpriv.errors`, which the other process can read without imports."""
    for kind in type(error).__mro__:
        if issubclass(kind, FedprivError) and kind.__module__ == errors.__name__:
            return kind(str(error))
    return error


@contextmanager
def _unlogged() -> Iterator[None]:
    logger = logging.getLogger("fedpriv")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextmanager
def _limited(settings: HostSettings) -> Iterator[None]:
    """Limit address space while a model is built, and set the limit anew from what it has taken."""
    mebibytes = settings.memory_mebibytes
    # CUDA reserves as many addresses as it likes when it is first used.
    if mebibytes is None or machine_of(settings)[0].type != "cpu":
        _limit(None)
    else:
        _limit(mebibytes + _LOADING_MEBIBYTES + _THREAD_MEBIBYTES * torch.get_num_threads())
    try:
        yield
    finally:
        _limit(mebibytes)


def _limit(mebibytes: int | None) -> None:
    """Let this process take so much address space besides what it has; None: any."""
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    soft = most
    if mebibytes is not None:
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        except OSError as error:
            reason = "memory_mebibytes is given; only Linux can limit it"
            raise InvalidValueError(reason) from error
        limit = pages * resource.getpagesize() + mebibytes * _MEBIBYTE
        soft = limit if most == resource.RLIM_INFINITY else min(limit, most)
    resource.setrlimit(resource.RLIMIT_AS, (soft, most))
