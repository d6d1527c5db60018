"""A node's training process, and what it and the main process say to each other.

The main process never imports torch; the training process holds the users' data and the model.

| message        | answers                                                                        |
|----------------|--------------------------------------------------------------------------------|
| `HostSettings` | `Loaded`                                                                       |
| `Welcome`      | None: the task can be trained                                                  |
| `Proposal`     | `Learnt`: users can train as such a round asks                                 |
| `Learnt`       | None: what was learnt by a process that has ended need not be learnt again     |
| `Timed`        | `Ready`, any number of them; then None: all of the node's users of it are done |
| `OneByOne`     | the same, one for each user in order                                           |

A `FedprivError` is an answer too, and the last one. Any other failure ends the training process.
"""

import asyncio
import atexit
import ctypes
import logging
import multiprocessing
import os
import pickle
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
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest
from fedpriv.wire import Proposal, Welcome

_FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM)
_LONGEST_PREPARATION_SECONDS = 600.0
_PR_SET_PDEATHSIG = 1  # of prctl(2)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostSettings:
    """Which users a node hosts, and how it trains them."""

    users: str  # as `fedpriv.clients.users.load_users` reads it
    device: str = "auto"  # as `fedpriv.engine.transport.device_named` reads it
    # Address space for training, besides what each process has taken once data and model are
    # loaded, and on a CPU for building the model (Linux); None: no limit.
    memory_mebibytes: int | None = None
    seconds: float | None = None  # longest for one round; None: until its deadline
    activations: str = "float32"  # of the model while users train
    processes: int | None = None  # that train side by side; None: one for each thread
    id_key: Path | None = None  # file of the key of the users' ids; None: the ids of the data

    def __post_init__(self) -> None:
        for name in ("memory_mebibytes", "seconds", "processes"):
            number = getattr(self, name)
            if number is not None and not number > 0:
                raise InvalidValueError(f"{name} is {number}; it must be positive")
        if self.memory_mebibytes is not None and self.memory_mebibytes >= 2**40:
            # The system has no numbers for limits that are much larger.
            raise InvalidValueError(
                f"memory_mebibytes is {self.memory_mebibytes}; it must be below 2^40"
            )


@dataclass(frozen=True)
class Loaded:
    """Which users a training process holds, at least one."""

    users: int
    users_sha256: bytes  # `fedpriv.wire.digest_of` of their ids
    # The first 8 bytes of SHA-256 of each user's id, ids sorted by code points. They identify
    # users; positions do not, since the server assigns them.
    id_digests: bytes


@dataclass(frozen=True)
class Ready:
    """Users of a round who are done, or failed: their positions, and their sum."""

    users: npt.NDArray[np.int64]
    partial: PartialSum


@dataclass(frozen=True)
class Learnt:
    """How users train, as `fedpriv.engine.transport` settles it; packed, for torch is in it."""

    roads: bytes


@dataclass(frozen=True)
class Timed:
    """Train the users of a request; one who takes longer than its seconds counts as zero."""

    request: RoundRequest  # the node has all of its users
    seconds: float  # of each user


@dataclass(frozen=True)
class OneByOne:
    """Train the users of a request one after the other; the node has all of them."""

    request: RoundRequest


def share_of(seconds: float, users: int) -> float:
    """How many of a node's seconds for a round each of its drawn users may take.

    They go together, and those whose chunk takes too long go again, one by one: both, and what it
    takes to fork processes anew, end within half of the time.
    """
    return max(0.0, seconds) / (6 * max(1, users))


def send(channel: BufferedRWPair, value: object) -> None:
    """Send a value to a trusted process; arrays in it are not copied."""
    pickle.dump(value, channel, protocol=5)
    channel.flush()


def receive(channel: BufferedRWPair) -> object:
    """Receive what a trusted process sent; EOFError if it has closed its end."""
    try:
        value: object = pickle.load(channel)
    except pickle.UnpicklingError as error:
        raise EOFError("the other process has closed its end within a message") from error
    return value


class Process:
    """A spawned process that answers messages, one message at a time.

    Guarantees:
        * It ends with the process that made it, even by SIGKILL; on Linux also with the thread.
        * SIGINT and SIGTERM do not reach it: a terminal sends them to all processes of a group.
        * It writes nothing about what ended it, since such a text may hold users' data.
        * A message that is cancelled or has no answer is its last: it is killed at once.
        * After `gone` nothing is left of it; processes that it forked are about to end.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._channel = self._socket.makefile("rwb")
        context = multiprocessing.get_context("spawn")
        self._process = context.Process(target=_enter, args=(theirs, os.getpid()))
        # A thread of its own, which may wait for a process that hangs.
        self._thread = ThreadPoolExecutor(1, "training")
        self._gone: Future[None] | None = None
        with theirs, _blocked_signals():
            self._process.start()
        # Otherwise an interpreter that ends would wait for the process.
        atexit.register(self._process.kill)

    @property
    def alive(self) -> bool:
        """Whether it runs and was not told to end."""
        return self._gone is None and self._process.is_alive()

    async def ask(self, message: object) -> object:
        """Send a message and wait for its first answer; ChildProcessError if the process has ended.

        An answer that is a FedprivError is raised.
        """

        def exchange() -> object:
            send(self._channel, message)
            return receive(self._channel)

        return await self._answer(exchange)

    async def listen(self) -> object:
        """Wait for the next answer to a message that has several; raises what `ask` raises."""
        return await self._answer(lambda: receive(self._channel))

    async def _answer(self, exchange: Callable[[], object]) -> object:
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, exchange)
        except (OSError, EOFError):
            self.kill()
            await self.gone()
            ended = f"the training process ended with exit code {self._process.exitcode}"
            raise ChildProcessError(ended) from None
        except BaseException:
            self.kill()
            raise
        if isinstance(answer, FedprivError):
            raise answer
        return answer

    def kill(self) -> None:
        """End the process at once; a call after the first does nothing."""
        if self._gone is None:
            atexit.unregister(self._process.kill)
            self._process.kill()
            with suppress(OSError):  # wakes the thread, even if another process holds the other end
                self._socket.shutdown(socket.SHUT_RDWR)
            self._gone = self._thread.submit(self._reap)
            self._thread.shutdown(wait=False)

    async def gone(self) -> None:
        """Wait until a killed process is gone."""
        if self._gone is not None:
            await asyncio.shield(asyncio.wrap_future(self._gone))

    def _reap(self) -> None:
        self._process.join()
        with suppress(OSError):  # part of a message may be left to send
            self._channel.close()
        self._socket.close()


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Keep signals from a process that is started inside, until it ignores them itself."""
    resource_tracker.ensure_running()  # otherwise it is started inside, and unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_PARENT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _enter(channel: socket.socket, parent: int) -> None:
    for number in _FOR_THE_PARENT:
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it ended before this call
            os._exit(0)
    threading.Thread(target=_exit_after_parent, daemon=True).start()
    # Only this process may load torch.
    from fedpriv.clients.training import answer_messages  # noqa: PLC0415

    try:
        answer_messages(channel.makefile("rwb"))
    except EOFError:  # the parent has ended
        sys.exit(0)
    except BaseException:  # a traceback may hold users' data
        sys.exit(1)


def _exit_after_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()  # ends with a pipe that only the parent holds
        os._exit(0)


class Worker:
    """Trains the users of a node in a process that may fail.

    Guarantees:
        * This process neither imports torch nor holds users' data; a model that is sent to the
          other is not copied here.
        * A user whose training raises, hangs, takes too much memory or ends the process counts as
          zero; the node's other users are answered for, as far as time allows.
        * A call that is cancelled kills a process that trains, at once. A process that has ended,
          whatever the reason, is started and prepared again by the next call.
        * After `close`, and after the end of this process even by SIGKILL, there is no other.
        * Nothing that is logged says who was drawn, or holds users' data.

    One call at a time; start it in the thread of an event loop that lives as long as it does.
    """

    def __init__(self, settings: HostSettings, process: Process, loaded: Loaded) -> None:
        self.loaded = loaded
        self._settings, self._process = settings, process
        self._welcome: Welcome | None = None
        self._learnt = Learnt(b"")
        self._kinds = set[Hashable]()  # of rounds that this was learnt of
        self._learning: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None
        self._turn, self._busy, self._closed = asyncio.Lock(), False, False

    @classmethod
    async def start(cls, settings: HostSettings) -> "Worker":
        """Start a process and load the users; raises DataError or InvalidValueError."""
        process = Process()
        try:
            return cls(settings, process, await _load(process, settings))
        except BaseException:
            process.kill()
            await process.gone()
            raise

    async def prepare(self, welcome: Welcome) -> None:
        """Build the task that the node is welcomed to; ModelError if it takes over ten minutes."""
        async with self._alone():
            self._welcome, self._learnt = None, Learnt(b"")
            self._kinds.clear()
            await _prepare(await self._ready(), welcome)
            self._welcome = welcome

    async def learn(self, proposal: Proposal) -> None:
        """Settle how users of such rounds train, before any is drawn; ModelError if they cannot.

        It waits for users who train, and goes on if the call is cancelled.
        """
        kind = replace(proposal.local, learning_rate=1.0), proposal.metrics
        while (before := self._learning) is not None:
            # Of an earlier call, whatever became of it: it may have been given up.
            await asyncio.gather(asyncio.shield(before), return_exceptions=True)
            if self._learning is before:
                self._learning = None
        if kind not in self._kinds:
            self._learning = asyncio.create_task(self._learn(kind, proposal))
            await asyncio.shield(self._learning)

    async def train(self, request: RoundRequest, seconds: float) -> PartialSum | None:
        """Train those users of a request that the node has; their sum, with an empty `node`.

        Users who are done count, whatever happens to the others. Each of n users may take
        `seconds` / 6n; then none is late because of others. Where users train in forks of the
        process, one who takes longer ends its fork. Elsewhere, and if the process ends, the others
        are trained one by one after half of the time, each within an equal share of what is left.
        None if no training ended well within `seconds` and the limit of the settings.
        """
        longest = self._settings.seconds
        seconds = seconds if longest is None else min(seconds, longest)
        deadline = asyncio.get_running_loop().time() + seconds
        try:
            async with self._alone(deadline):
                if self._welcome is None:
                    raise InvalidValueError("no task is prepared; call prepare first")
                users = np.intersect1d(request.users, self._welcome.users)
                return await self._trained(replace(request, users=users), deadline)
        except TimeoutError:  # while it was learnt how users train
            return None

    async def close(self) -> None:
        """End the process; a call after the first does nothing."""
        self._closed = True
        for task in (self._learning, self._starting):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        self._process.kill()
        await self._process.gone()

    async def _learn(self, kind: Hashable, proposal: Proposal) -> None:
        async with self._turn:
            if self._welcome is None:
                return
            what = "users cannot train as the server proposes"
            self._learnt = cast(Learnt, await _within_reason(await self._ready(), proposal, what))
            self._kinds.add(kind)

    async def _trained(self, request: RoundRequest, deadline: float) -> PartialSum | None:
        nothing = PartialSum("", 0, np.zeros(request.clipping.layout.dimension, np.int64), 0)
        waiting, together, total = request.users, len(request.users) != 1, None
        loop = asyncio.get_running_loop()
        left = deadline - loop.time()
        each, half = share_of(left, len(request.users)), loop.time() + left / 2.0
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    process = await self._ready()
            except TimeoutError:
                return total
            asked = replace(request, users=waiting)
            answer = process.ask(Timed(asked, each) if together else OneByOne(asked))
            try:
                while True:
                    share = (deadline - loop.time()) / max(1, len(waiting))
                    async with asyncio.timeout_at(half if together else loop.time() + share):
                        ready = await answer
                    if not isinstance(ready, Ready):
                        return total or nothing
                    waiting = np.setdiff1d(waiting, ready.users)
                    total = _added(total or nothing, ready.partial)
                    answer = process.listen()
            except (ChildProcessError, TimeoutError, WorkerError):
                failed = "training users together failed; the others are trained one by one"
                if not together:
                    waiting = waiting[1:]
                    failed = "a user counts as zero: it ended the process or took too long"
                if len(request.users) > 1:  # of a single user it would say that it was drawn
                    _log.warning(failed)
            if waiting.size == 0:
                return total
            together = False

    async def _ready(self) -> Process:
        if self._closed:
            raise InvalidValueError("the worker is closed")
        if self._starting is None and not self._process.alive:
            self._starting = asyncio.create_task(self._start_again())
        if (starting := self._starting) is not None:
            try:
                await asyncio.shield(starting)  # it goes on for the next call if this is cancelled
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
                other = f"users {self._settings.users!r} are other users than at the start"
                raise DataError(f"{other}; a node must be stopped before its users change")
            if self._welcome is not None:
                await _prepare(self._process, self._welcome)
                await self._process.ask(self._learnt)
        except BaseException:
            self._process.kill()
            raise

    @asynccontextmanager
    async def _alone(self, deadline: float | None = None) -> AsyncIterator[None]:
        """Nothing else is asked of the process; TimeoutError if it learns until the deadline."""
        if self._busy:
            raise InvalidValueError("the worker is busy; it takes one call at a time")
        self._busy = True
        try:
            async with asyncio.timeout_at(deadline):
                await self._turn.acquire()
            try:
                yield
            finally:
                self._turn.release()
        finally:
            self._busy = False


async def _load(process: Process, settings: HostSettings) -> Loaded:
    try:
        return cast(Loaded, await process.ask(settings))
    except ChildProcessError as error:
        raise DataError(f"users {settings.users!r} cannot be loaded: {error}") from error


async def _prepare(process: Process, welcome: Welcome) -> None:
    what = f"the task with model {welcome.task.model!r} cannot be built"
    await _within_reason(process, welcome, what)


async def _within_reason(process: Process, message: object, what: str) -> object:
    """The answer to a message that readies for training; ModelError says `what` has failed."""
    try:
        async with asyncio.timeout(_LONGEST_PREPARATION_SECONDS):
            return await process.ask(message)
    except ChildProcessError as error:
        raise ModelError(f"{what}: {error}") from error
    except TimeoutError as error:
        seconds = f"{_LONGEST_PREPARATION_SECONDS:g} seconds"
        raise ModelError(f"{what}: it takes more than {seconds}") from error


def _added(total: PartialSum, one: PartialSum) -> PartialSum:
    """The sum of two, in the memory of the first."""
    np.add(total.total, one.total, out=total.total)
    return PartialSum("", total.users + one.users, total.total, total.weight + one.weight)
