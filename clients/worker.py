"""A node's training process, and the messages between it and the main process.

The main process never imports torch; the training process holds the users' data and the model.

| message        | answers                                                                        |
|----------------|--------------------------------------------------------------------------------|
| `HostSettings` | `Loaded`                                                                       |
| `Welcome`      | `Built`: the task can be trained                                               |
| `Proposal`     | `Learnt`: users can train as such a round asks                                 |
| `Learnt`       | None: the process has adopted the decisions of an earlier process              |
| `Train`        | `Ready`, any number of them; then None: all users of the request are done      |

The process may send a `FedprivError` instead of any answer, as its last one. Any other failure ends
the training process.
"""

import asyncio
import atexit
import ctypes
import logging
import multiprocessing
import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from io import BufferedRWPair
from multiprocessing import resource_tracker
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt

from fedpriv.errors import DataError, FedprivError, InvalidValueError, ModelError, WorkerError
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest
from fedpriv.wire import Proposal, Welcome

_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
_LONGEST_PREPARATION_SECONDS = 600.0
MEBIBYTE = 2**20
# Of the main process, for each component: the model, sums of 64 bits, and copies in transfer.
_BYTES_PER_COMPONENT = 100
_CORE_MEBIBYTES = 320
_PR_SET_PDEATHSIG = 1  # of prctl(2)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostSettings:
    """The users that a node hosts, and the resources for training them."""

    users: str  # for `fedpriv.clients.users.load_users`
    device: str = "auto"  # for `fedpriv.engine.transport.device_named`
    # Address space of each process for training, in addition to data and model, and on a CPU for
    # building the model (Linux); None: on a CPU half of the machine's memory, else no limit.
    memory_mebibytes: int | None = None
    activations: str = "float32"  # of the model during training
    processes: int | None = None  # number that train in parallel; None: one for each thread
    id_key: Path | None = None  # file of the key for the users' ids; None: ids as in the data


@dataclass(frozen=True)
class Loaded:
    """The users that a training process holds."""

    users: int  # number of users, at least one
    users_sha256: bytes  # `fedpriv.wire.digest_of` of their ids
    # The first 8 bytes of SHA-256 of each user's id, ids sorted by code points. They identify
    # users; positions do not, since the server assigns them.
    id_digests: bytes
    broken: int = 0  # number of users whose rows cannot be read, who count as zero


@dataclass(frozen=True)
class Built:
    """The names and shapes of the tensors of a task that a training process has built."""

    parameters: Layout  # of the update
    statistics: Layout  # running statistics


_NO_TASK = Built(Layout((), ()), Layout((), ()))


@dataclass(frozen=True)
class Ready:
    """Users of a round who have been trained or have failed."""

    users: npt.NDArray[np.int64]  # positions
    partial: PartialSum  # sum of their updates


@dataclass(frozen=True)
class Learnt:
    """The decisions of `fedpriv.engine.transport` on how users train."""

    roads: bytes  # pickled, as unpickling imports torch


@dataclass(frozen=True)
class Train:
    """Train the users of a request; a user who takes longer than `seconds` counts as zero."""

    request: RoundRequest  # to users of the node only
    seconds: float | None  # per user; None: no limit, and users train one after the other


def share_of(seconds: float, users: int) -> float:
    """Return the seconds for which each drawn user may train, given the node's time for a round.

    Users train together in chunks, and the users of a chunk that takes too long train again, one by
    one. Both phases, including the time to fork processes, end within half of the node's time.
    """
    return max(0.0, seconds) / (6 * max(1, users))


def address_space() -> int:
    """Return the bytes of this process's address space; InvalidValueError if not on Linux."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    except OSError as error:
        raise InvalidValueError("memory is limited; only Linux can limit it") from error
    return pages * resource.getpagesize()


def limit_address_space(limit: int | None) -> None:
    """Limit the address space of this process, and of those that it starts, to `limit` bytes.

    None: to the system's limit. Beyond it, memory cannot be allocated (MemoryError).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = hard if limit is None else limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def memory_limiter(mebibytes: int | None) -> Callable[[int], None]:
    """Return a function that limits a node's main process, given the components of its task."""
    if mebibytes is None or sys.platform != "linux":
        return lambda _: None
    # Threads of gRPC, whose number follows the processors, reserve address space.
    threads = _CORE_MEBIBYTES * (os.cpu_count() or 1)
    base = address_space() + (mebibytes + threads) * MEBIBYTE
    return lambda components: limit_address_space(base + _BYTES_PER_COMPONENT * components)


def send(channel: BufferedRWPair, value: object) -> None:
    """Send a value to a trusted process, without copying its arrays."""
    pickle.dump(value, channel, protocol=5)
    channel.flush()


def receive(channel: BufferedRWPair) -> object:
    """Return the next value from a trusted process; EOFError if it has closed its end."""
    try:
        value: object = pickle.load(channel)
    except pickle.UnpicklingError as error:
        raise EOFError("the other process has closed its end within a message") from error
    return value


class Process:
    """A spawned process that answers messages, one message at a time.

    Guarantees:
        * It ends with its parent, even if that is killed; on Linux also with the parent's thread.
        * It ignores SIGINT and SIGTERM, which a terminal sends to all processes of a group.
        * It does not print the error that ended it, since the text may contain users' data.
        * If a message is cancelled or gets no answer, the process is killed at once.
        * After `gone` it no longer exists, and processes that it forked are about to end.
    """

    def __init__(self) -> None:
        self._socket, child_socket = socket.socketpair()
        self._channel = self._socket.makefile("rwb")
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_enter, args=(child_socket, os.getpid()))
        # A separate thread, because it may wait for a process that hangs.
        self._thread = ThreadPoolExecutor(1, "training")
        self._gone: Future[None] | None = None
        with child_socket, _blocked_signals():
            self._process.start()
        # Otherwise the interpreter would wait for the process at its end.
        atexit.register(self._process.kill)

    @property
    def alive(self) -> bool:
        """True if the process is running and was not killed."""
        return self._gone is None and self._process.is_alive()

    async def ask(self, message: object) -> object:
        """Send a message and return its first answer; ChildProcessError if the process has ended.

        If the answer is a FedprivError, it is raised.
        """

        def exchange() -> object:
            send(self._channel, message)
            return receive(self._channel)

        return await self._answer(exchange)

    async def listen(self) -> object:
        """Return the next answer to a message that has several; errors as for `ask`."""
        return await self._answer(lambda: receive(self._channel))

    async def _answer(self, exchange: Callable[[], object]) -> object:
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, exchange)
        except (OSError, EOFError):
            self.kill()
            await self.gone()
            failure = f"the training process ended with exit code {self._process.exitcode}"
            raise ChildProcessError(failure) from None
        except BaseException:
            self.kill()
            raise
        if isinstance(answer, FedprivError):
            raise answer
        return answer

    def kill(self) -> None:
        """End the process at once; idempotent."""
        if self._gone is None:
            atexit.unregister(self._process.kill)
            self._process.kill()
            with suppress(OSError):  # wakes the thread, even if a fork holds the other end open
                self._socket.shutdown(socket.SHUT_RDWR)
            self._gone = self._thread.submit(self._reap)
            self._thread.shutdown(wait=False)

    async def gone(self) -> None:
        """Wait until a killed process is gone."""
        if self._gone is not None:
            await asyncio.shield(asyncio.wrap_future(self._gone))

    def _reap(self) -> None:
        self._process.join()
        with suppress(OSError):  # part of a message may be unsent
            self._channel.close()
        self._socket.close()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block signals for a process that is started within, until it ignores them itself."""
    resource_tracker.ensure_running()  # otherwise it would start within, and unblock them
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)


def _enter(channel: socket.socket, parent: int) -> None:
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    limit_address_space(None)  # the parent's does not hold for users' data
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before this call
            os._exit(0)
    threading.Thread(target=_exit_after_parent, daemon=True).start()
    # Imported here, since only this process may load torch.
    from fedpriv.clients.training import answer_messages  # noqa: PLC0415

    try:
        answer_messages(channel.makefile("rwb"))
    except EOFError:  # the parent has ended
        sys.exit(0)
    except BaseException:  # without a traceback, which may contain users' data
        sys.exit(1)


def _exit_after_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()  # returns when a pipe closes that only the parent holds
        os._exit(0)


class Worker:
    """Trains the users of a node in another process, which may fail.

    Guarantees:
        * This process neither imports torch nor holds users' data. It sends a model to the other
          process without copying it.
        * A user whose training raises, hangs, takes too much memory or ends the process counts as
          zero. The node's other users are trained, as far as time allows.
        * If a call is cancelled, a process that trains is killed at once. If a process has ended,
          for any reason, the next call starts and prepares a new one.
        * After `close`, and when this process ends, even by SIGKILL, no other process remains.
        * The log contains no users' data, and does not reveal who was drawn.

    Calls wait for each other. The event loop whose thread starts a worker must outlive it.
    """

    def __init__(self, settings: HostSettings, process: Process, loaded: Loaded) -> None:
        self.loaded = loaded
        self.built = _NO_TASK  # of the task that is prepared
        self._settings, self._process = settings, process
        self._welcome: Welcome | None = None
        self._learnt = Learnt(b"")
        self._kinds = set[Hashable]()  # of rounds that `_learnt` covers
        self._learning: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._turn, self._closed = asyncio.Lock(), False

    @classmethod
    async def start(cls, settings: HostSettings) -> "Worker":
        """Start a process and load the users; DataError or InvalidValueError if that fails."""
        process = Process()
        try:
            return cls(settings, process, await _load(process, settings))
        except BaseException:
            process.kill()
            await process.gone()
            raise

    async def prepare(self, welcome: Welcome) -> None:
        """Build the task of a welcome; ModelError if it takes over ten minutes."""
        async with self._alone():
            self.built, self._welcome, self._learnt = _NO_TASK, None, Learnt(b"")
            self._kinds.clear()
            self.built = await _prepare(await self._ready(), welcome)
            self._welcome = welcome

    async def learn(self, proposal: Proposal) -> None:
        """Decide how users train in such rounds, before any is drawn; ModelError if they cannot.

        This waits until users have been trained, and continues if the call is cancelled.
        """
        kind = replace(proposal.local, learning_rate=1.0), proposal.metrics
        while (earlier_call := self._learning) is not None:
            # An earlier call, which may have been cancelled or have failed.
            await asyncio.gather(asyncio.shield(earlier_call), return_exceptions=True)
            if self._learning is earlier_call:
                self._learning = None
        if kind not in self._kinds:
            self._learning = asyncio.create_task(self._learn(kind, proposal))
            await asyncio.shield(self._learning)

    async def train(self, request: RoundRequest, seconds: float) -> PartialSum | None:
        """Train the node's users of a request; return their sum, with an empty `node`.

        Users who are done count, no matter what happens to the others. Each of n users may take
        `seconds` / 6n, so that none is late because of others. If users train in forks of the
        process, a fork ends when its user takes longer. Otherwise, and if the process ends, the
        remaining users are trained one by one after half of the time, each within an equal share of
        the remaining time. The result is None if no training succeeded within `seconds`.
        InvalidValueError: `prepare` was not called.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with self._alone(deadline):
                if self._welcome is None:
                    raise InvalidValueError("no task is prepared; call prepare first")
                users = np.intersect1d(request.users, self._welcome.users)
                answer = await self._trained(replace(request, users=users), deadline)
        except TimeoutError:  # `learn` was still running
            return None
        if answer and answer.users and not answer.total.any():
            cause = "all updates of the users are NaN, infinite or zero; look at their data"
            _log.warning("%s: %s", f"round {request.round} of run {request.run!r}", cause)
        return answer

    async def close(self) -> None:
        """End the process; idempotent."""
        self._closed = True
        for task in (self._learning, self._starting):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._process.kill()
        await self._process.gone()

    async def _learn(self, kind: Hashable, proposal: Proposal) -> None:
        async with self._alone():
            if self._welcome is None:
                return
            fault = "users cannot train as the server proposes"
            self._learnt = cast(Learnt, await _within_reason(await self._ready(), proposal, fault))
            self._kinds.add(kind)

    async def _trained(self, request: RoundRequest, deadline: float) -> PartialSum | None:
        zero = PartialSum("", 0, np.zeros(request.clipping.layout.dimension, np.int64), 0)
        waiting, together, total = request.users, len(request.users) != 1, None
        loop = asyncio.get_running_loop()
        seconds = deadline - loop.time()
        per_user, half_time = share_of(seconds, len(request.users)), loop.time() + seconds / 2.0
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    process = await self._ready()
            except TimeoutError:
                return total
            remaining = replace(request, users=waiting)
            answer = process.ask(Train(remaining, per_user if together else None))
            try:
                while True:
                    share = (deadline - loop.time()) / max(1, len(waiting))
                    async with asyncio.timeout_at(half_time if together else loop.time() + share):
                        ready = await answer
                    if not isinstance(ready, Ready):
                        return total or zero
                    waiting = np.setdiff1d(waiting, ready.users)
                    total = _added(total or zero, ready.partial)
                    answer = process.listen()
            except (ChildProcessError, TimeoutError, WorkerError):
                failure = "training users together failed; the others are trained one by one"
                if not together:
                    waiting = waiting[1:]
                    failure = "a user counts as zero: it ended the process or took too long"
                if len(request.users) > 1:  # for a single user, it would reveal that it was drawn
                    _log.warning(failure)
            if waiting.size == 0:
                return total
            together = False

    async def _ready(self) -> Process:
        """Return the process, which is started again if it has ended."""
        if self._closed:
            raise InvalidValueError("the worker is closed")
        if self._starting is None and not self._process.alive:
            self._starting = asyncio.create_task(self._start_again())
        if (starting := self._starting) is not None:
            try:
                await asyncio.shield(starting)  # if cancelled, the start continues for later calls
            finally:
                if starting.done():
                    self._starting = None
        return self._process

    async def _start_again(self) -> None:
        self._process.kill()
        await self._process.gone()
        self._process = Process()
        try:
            if await _load(self._process, self._settings) != self.loaded:
                changed = f"users {self._settings.users!r} are other users than at the start"
                raise DataError(f"{changed}; a node must be stopped before its users change")
            if self._welcome is not None:
                await _prepare(self._process, self._welcome)
                await self._process.ask(self._learnt)
        except BaseException:
            self._process.kill()
            raise

    @asynccontextmanager
    async def _alone(self, deadline: float | None = None) -> AsyncIterator[None]:
        """Use the process exclusively; TimeoutError if another call runs until the deadline."""
        async with asyncio.timeout_at(deadline):
            await self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()


async def _load(process: Process, settings: HostSettings) -> Loaded:
    try:
        return cast(Loaded, await process.ask(settings))
    except ChildProcessError as error:
        raise DataError(f"users {settings.users!r} cannot be loaded: {error}") from error


async def _prepare(process: Process, welcome: Welcome) -> Built:
    fault = f"the task with model {welcome.task.model!r} cannot be built"
    return cast(Built, await _within_reason(process, welcome, fault))


async def _within_reason(process: Process, message: object, what: str) -> object:
    """Return a process's answer to a message that prepares training.

    ModelError, beginning with `what`: the preparation fails or takes too long.
    """
    try:
        async with asyncio.timeout(_LONGEST_PREPARATION_SECONDS):
            return await process.ask(message)
    except ChildProcessError as error:
        raise ModelError(f"{what}: {error}") from error
    except TimeoutError as error:
        seconds = f"{_LONGEST_PREPARATION_SECONDS:g} seconds"
        raise ModelError(f"{what}: it takes more than {seconds}") from error


def _added(total: PartialSum, part: PartialSum) -> PartialSum:
    """Return the sum of two partial sums, in the memory of the first."""
    np.add(total.total, part.total, out=total.total)
    return PartialSum("", total.users + part.users, total.total, total.weight + part.weight)
