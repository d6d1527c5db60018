"""The training side of a node, which holds the users' data and the model, and trains.

It runs in the process of `answer_messages`, or, in a simulation on Ray, in a worker's ClientApp.
"""

import hashlib
import logging
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from io import BufferedRWPair

import numpy as np
import torch

from fedpriv import errors
from fedpriv.clients import worker
from fedpriv.clients.users import enrolled_positions, hosted_users
from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import Activations, activations_named
from fedpriv.engine.reading import users_for
from fedpriv.engine.task_checks import check_task
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import FedprivError, InvalidValueError, ModelError
from fedpriv.experiment.build import build_task
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import PartialSum, merge_sums
from fedpriv.support.logs import silenced
from fedpriv.training.request import LocalTraining, RoundRequest
from fedpriv.wire import Proposal, Welcome, digest_of

# Memory of torch and its compiler at their first use, and of each of torch's threads.
_LOADING_MEBIBYTES, _THREAD_MEBIBYTES = 1024, 160


@dataclass(frozen=True)
class Host:
    """The users of a node, before it has a task."""

    users: UserStore
    settings: worker.HostSettings

    @classmethod
    def of(cls, settings: worker.HostSettings) -> "Host":
        """Load the users; InvalidValueError if this machine lacks the device or activations.

        DataError: the users cannot be loaded.
        """
        machine_of(settings)
        return cls(hosted_users(settings.users, settings.id_key), settings)

    @property
    def loaded(self) -> worker.Loaded:
        """Number and digests of the users."""
        ids = sorted(self.users.id_of(user) for user in range(self.users.population))
        digests = (hashlib.sha256(user.encode()).digest()[:8] for user in ids)
        return worker.Loaded(len(ids), digest_of(ids), b"".join(digests), len(self.users.broken))

    def trainer(self, welcome: Welcome) -> "NodeTrainer":
        """Build the task of a welcome, and test it without the users' data.

        A FedprivError: the task cannot be built or trained, or the server has enrolled other users.
        """
        hosted = enrolled_positions(self.users, welcome.users)
        settings, task = self.settings, build_task(**vars(welcome.task))
        users = replace(self.users, fields=users_for(task, self.users.fields))
        blank = {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in users.fields.items()}
        check_task(task, blank)
        device, activations = machine_of(settings)
        place = users, device, chunk_memory_of(None, device), hosted
        transport = InProcessTransport(task, *place, limited=True)
        transport = replace(transport, activations=activations, processes=settings.processes)
        single = UserStore(blank, np.array([0, 1]))
        _warm_up(replace(transport, users=single, hosted=None))
        return NodeTrainer(transport)


def machine_of(settings: worker.HostSettings) -> tuple[torch.device, Activations]:
    """Return the device and activations; InvalidValueError if this machine lacks them."""
    device = device_named(settings.device)
    return device, activations_named(settings.activations, device)


def _warm_up(transport: InProcessTransport) -> None:
    """Train one user, so that torch loads and reserves memory before the limit is set."""
    parameters = transport.task.parameters()
    layout = Layout.of(parameters)
    clipping, local = Clipping(layout, flat(layout, 1.0)), LocalTraining(1.0, steps=2)
    request = RoundRequest("", 0, 0, parameters, clipping, local, np.arange(1), bytes(32))
    torch.ones(2**20).sum()  # large enough to start all threads
    list(transport.collect(request))


@dataclass(frozen=True)
class NodeTrainer:
    """Trains users of a node for rounds of one task, and clips each update.

    Clipping must happen here, since the server can only check the norm of a sum of updates.
    """

    transport: InProcessTransport  # without an observer; `hosted` are the positions of its users

    def __post_init__(self) -> None:
        if self.transport.observer is not None or self.transport.on_dropped is not None:
            sentence = "a node has a transport with an observer; only a simulation may have one"
            raise InvalidValueError(sentence)

    @property
    def built(self) -> worker.Built:
        """Names and shapes of the task's tensors."""
        task = self.transport.task
        return worker.Built(Layout.of(task.parameters()), Layout.of(task.statistics()))

    def learn(self, proposal: Proposal) -> worker.Learnt:
        """Decide how users train in such rounds; ModelError or InvalidValueError if they cannot."""
        task, local = self.transport.task, proposal.local
        parameters = task.parameters()
        nobody, control = np.empty(0, np.int64), parameters if local.control else {}
        terms = proposal.clipping, local, nobody, bytes(32), proposal.metrics
        request = RoundRequest("", 0, 0, parameters, *terms, task.statistics(), control)
        self.transport.prepare(request)
        return worker.Learnt(pickle.dumps(self.transport.roads))

    def recall(self, learnt: worker.Learnt) -> None:
        """Adopt the decisions that another process made for the same task."""
        if learnt.roads:
            self.transport.roads.update(pickle.loads(learnt.roads))

    def answer(self, request: RoundRequest, seconds: float | None = None) -> PartialSum:
        """Return the sum of clipped contributions of the request's users, with an empty `node`.

        A user who takes longer than `seconds` counts as zero, if processes can be forked.
        """
        sums = (ready.partial for ready in self.ready(request, seconds))
        return merge_sums("", sums, request.clipping.layout.dimension)

    def ready(self, request: RoundRequest, seconds: float | None = None) -> Iterator[worker.Ready]:
        """Train the request's users like `answer`; yield the users and sum of each chunk.

        The request's tensors must be those of the task (`consent.unlike`). MemoryError or
        RuntimeError: the process can no longer train.
        """
        # If the node has one user, a log would reveal that it was drawn.
        only_user = self.transport.users.population == 1
        with silenced(logging.CRITICAL) if only_user else nullcontext():
            for users, partial in self.transport.by_chunk(request, seconds):
                if self.transport.device.type == "cuda":
                    # Raises if a kernel failed for one user, which breaks the process for all.
                    torch.cuda.synchronize(self.transport.device)
                yield worker.Ready(users, partial)


def answer_messages(channel: BufferedRWPair) -> None:
    """Answer the messages of `fedpriv.clients.worker`; EOFError when the other end is closed.

    The text of any other exception may contain users' data.
    """
    host: Host | None = None
    trainer: NodeTrainer | None = None
    while True:
        message = worker.receive(channel)
        answer: object = None
        try:
            match message:
                case worker.HostSettings():
                    host = Host.of(message)
                    answer = host.loaded
                case Welcome() if host is not None:
                    with _limited(host.settings):
                        trainer = host.trainer(message)
                    answer = trainer.built
                case Proposal() if trainer is not None:
                    answer = trainer.learn(message)
                case worker.Learnt() if trainer is not None:
                    trainer.recall(message)
                case worker.Train(request, float(seconds)) if trainer is not None:
                    for ready in trainer.ready(request, seconds):
                        worker.send(channel, ready)
                case worker.Train(request) if trainer is not None:
                    for user in np.split(request.users, len(request.users)):
                        worker.send(
                            channel,
                            worker.Ready(user, trainer.answer(replace(request, users=user))),
                        )
                case _:
                    raise TypeError(f"a {type(message).__name__} has no answer yet")
        except FedprivError as error:
            answer = _plain(error)
        worker.send(channel, answer)


def _plain(error: FedprivError) -> FedprivError:
    """Return an error of `fedpriv.errors`, which the other process can unpickle without torch."""
    for kind in type(error).__mro__:
        if issubclass(kind, FedprivError) and kind.__module__ == errors.__name__:
            return kind(str(error))
    return error


@contextmanager
def _limited(settings: worker.HostSettings) -> Iterator[None]:
    """Limit address space while a model is built; then set the limit relative to its memory.

    By default the limit is half of the machine's memory, on Linux and on a CPU. CUDA maps devices'
    memory into the process's address space, and reserves it before use: a memory pool takes about
    twice the memory of the device (NVIDIA/nccl, pull request 2064). So a limit of address space
    would not limit memory there: none is set while a model is built, and afterwards only the one
    of the settings. ModelError: the model does not fit.
    """
    mebibytes, on_cpu = settings.memory_mebibytes, machine_of(settings)[0].type == "cpu"
    if mebibytes is None and on_cpu and sys.platform == "linux":
        mebibytes = (
            os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // (2 * worker.MEBIBYTE)
        )
    loading = _LOADING_MEBIBYTES + _THREAD_MEBIBYTES * torch.get_num_threads()
    _limit(mebibytes + loading if mebibytes is not None and on_cpu else None)
    try:
        yield
    except MemoryError as error:
        raise ModelError(f"it takes more memory than the {mebibytes} MiB of --memory") from error
    finally:
        _limit(mebibytes)


def _limit(mebibytes: int | None) -> None:
    """Let the address space of this process grow by at most `mebibytes`; None: no limit."""
    worker.limit_address_space(
        None if mebibytes is None else worker.address_space() + mebibytes * worker.MEBIBYTE
    )
