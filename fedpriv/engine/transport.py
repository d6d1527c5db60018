"""The in-process transport: users train together in chunks, in several processes side by side.

Threads of one process would wait for Python's lock, the longer the smaller a model is.
"""

import ctypes
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.places import refuse_shared
from fedpriv.data.population import UserStore
from fedpriv.engine.layers import one_blas_thread
from fedpriv.engine.local_training import Integers, Rung, by_rung
from fedpriv.engine.metrics import SimulationOnlyDiagnostics, check_metrics, diagnose_round
from fedpriv.engine.task import (
    ARITHMETIC_LOCK,
    Activations,
    RoundParameters,
    Task,
    activations_named,
    plain_arithmetic,
    refuse_flushing_threads,
)
from fedpriv.engine.trainer import (
    Chunk,
    ChunkSum,
    Isolation,
    SimulationOnlyDropped,
    Trainer,
    blank,
    sizes_of,
)
from fedpriv.errors import InvalidValueError, WorkerError, hold_numbers, require
from fedpriv.privacy.round import PartialSum, RoundRequest, Transport

_log = logging.getLogger(__name__)

_CHUNK_MEBIBYTES = 128  # on a CPU: with more, users are no faster
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)

_Asked = TypeVar("_Asked")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Engine:
    """Where and how fast users train; it changes no guarantee, and results by rounding alone."""

    device: str = "auto"  # such as "cpu" or "cuda"; "auto" takes CUDA where there is one
    chunk_mebibytes: int | None = None  # for users who train together; None suits the device
    activations: Activations = "float32"  # "bfloat16", or "tf32" on a GPU
    processes: int | None = None  # on a CPU; None: one for each of torch's threads

    def __post_init__(self) -> None:
        hold_numbers(self)
        for name in ("chunk_mebibytes", "processes"):
            number = getattr(self, name)
            require(number is None or number > 0, f"{name} is {number}; it must be at least 1")
        activations_named(self.activations, device_named(self.device))


def device_named(name: str) -> torch.device:
    """Device of a name: "auto" takes CUDA where there is one; others must be on this machine."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        legal = "auto, cpu or cuda" if torch.cuda.is_available() else "auto or cpu"
        raise InvalidValueError(
            f"device is {name!r}, which torch does not find here; it must be {legal}"
        ) from error
    return device


def chunk_memory_of(mebibytes: int | None, device: torch.device) -> int:
    """Bytes that a chunk may take: so many MiB, or, of None, what suits the device.

    That is 128 MiB on a CPU. On a GPU it is a quarter of what is free there now: other processes
    may train on it too, and what a chunk takes is an estimate.
    """
    if mebibytes is None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(1, free // 4)
    return (_CHUNK_MEBIBYTES if mebibytes is None else mebibytes) * 2**20


@dataclass(frozen=True)
class InProcessTransport(Transport):
    """Trains the users of a store on this machine.

    Each chunk is one partial sum; no update outlives its chunk. If a chunk fails, parts of it are
    tried, and users that fail alone contribute zero. Chunks with the least work come first.
    """

    task: Task
    users: UserStore  # the enrolled users' data
    device: torch.device  # where to train
    chunk_memory: int  # bytes that users who train together may take, roughly
    # Positions in the enrolled population of the store's users, if it holds a part of them.
    hosted: Integers | None = None
    # Called at the end of each round with figures that are not private; None in every deployment.
    observer: Callable[[SimulationOnlyDiagnostics], None] | None = None
    # Called with users who count as zero; None in every deployment.
    on_dropped: Callable[[SimulationOnlyDropped], None] | None = None
    activations: Activations = "float32"  # of the model while users train
    # How many train side by side on a CPU, in one thread each; None: one for each of torch's. They
    # are forked from this one before the first round that has work for two, and end when it rests,
    # or with it. If it is 1, on a GPU and where none can be forked, this process trains, with
    # torch's threads.
    processes: int | None = None

    def __post_init__(self) -> None:
        activations_named(self.activations, self.device)
        refuse_shared(self.users, "whole users train")
        if self.processes is not None and self.processes < 1:
            raise InvalidValueError(f"processes is {self.processes}; it must be at least 1")
        if self.chunk_memory < 1:
            raise InvalidValueError(f"chunk_memory is {self.chunk_memory}; it must be positive")

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sum of the contributions of each chunk."""
        for _, found in self.by_chunk(request):
            yield found

    def rest(self) -> None:
        """End its processes."""
        self._idle.clear()

    def by_chunk(self, request: RoundRequest) -> Iterator[tuple[Integers, PartialSum]]:
        """Yield the users of each chunk, as positions in the population, and their sum."""
        seen = list[npt.NDArray[np.float64]]()
        for users, found in self._sums(request):
            seen.extend(found.diagnostics)
            if self.on_dropped is not None and found.dropped is not None:
                self.on_dropped(found.dropped)
            yield users if self.hosted is None else self.hosted[users], found.partial
        if self.observer is not None:
            self.observer(diagnose_round(request, seen))

    def _sums(self, request: RoundRequest) -> Iterator[tuple[Integers, ChunkSum]]:
        """Users of chunks and their sums, in the order of chunks."""
        if request.measured:  # before any user's data are touched
            check_metrics(self.task, request.measured, request.clipping, blank(self.users))
        with computing_with(self._threads):
            start = self._trainer.begin(request)
            if self.device.type == "cpu":
                with plain_arithmetic(self.device):
                    refuse_flushing_threads()
            chunks = list(self._chunks(request, start))
            if min(self._side_by_side, len(chunks)) <= 1:
                sums = _in_turn(self._trainer, request, start, chunks)
                yield from zip((chunk.users for chunk in chunks), sums, strict=True)
                return
        # Processes are kept for the next round if all goes well.
        processes = self._idle.copy()
        self._idle.clear()
        while len(processes) < self._side_by_side:
            processes.append(_Fork(_Training(self._trainer)))
        # Each chunk comes with its own users, and the rest once to each process.
        packed = pickle.dumps(replace(request, users=request.users[:0]), protocol=5)
        asked = [(None if n >= len(processes) else packed, c) for n, c in enumerate(chunks)]
        for chunk, found in zip(chunks, _in_forks(processes, asked), strict=True):
            yield chunk.users, found
        self._idle.extend(processes)

    def _chunks(self, request: RoundRequest, start: RoundParameters) -> Iterator[Chunk]:
        """The users of a request in chunks; there is work for all processes where that can be."""
        if self.hosted is None:
            known = (request.users >= 0) & (request.users < self.users.population)
            users = request.users[known]
        else:
            users = np.flatnonzero(np.isin(self.hosted, request.users))
        measured = bool(request.measured) or self.observer is not None
        rungs = list(by_rung(sizes_of(self.users, users), request.local, measured=measured))
        self._examine(request, start, [rung for rung, _ in rungs])
        work = [len(some) * rung.steps * rung.width for rung, some in rungs]
        for (rung, some), share in zip(rungs, work, strict=True):
            parts = round(self._side_by_side * share / sum(work))
            yield from self._isolation.chunks(request, start, rung, users[some], max(1, parts))

    def _examine(
        self, request: RoundRequest, start: RoundParameters, rungs: Sequence[Rung]
    ) -> None:
        """Examine rungs side by side if several are new: each takes as long as many chunks."""
        new = self._isolation.unknown(request, start, rungs)
        if (side_by_side := min(self._side_by_side, len(new))) > 1:
            examine = partial(self._isolation.examined, request)
            forks = [_Fork(examine) for _ in range(side_by_side)]
            try:
                self._isolation.learn(request, dict(zip(new, _in_forks(forks, new), strict=True)))
            finally:  # though the traceback of an error may refer to them
                for fork in forks:
                    fork.end()

    @cached_property
    def _side_by_side(self) -> int:
        """Chunks that train side by side."""
        if self.device.type != "cpu":
            return 1
        if not can_fork():
            if (self.processes or 1) > 1:
                _log.warning("users train in 1 process, not %d: none can be forked", self.processes)
            return 1
        return self.processes or torch.get_num_threads()

    @cached_property
    def _threads(self) -> int:
        """Threads that a chunk trains with, and is tried with, since they decide its bits."""
        # A fork waits for ever for threads that its parent had, if it computes with several; and
        # beside a GPU there is so little to compute that to wake them takes longer.
        alone = self.device.type == "cpu" and self._side_by_side == 1
        return torch.get_num_threads() if alone else 1

    @cached_property
    def _isolation(self) -> Isolation:
        return Isolation(self._trainer)

    @cached_property
    def _trainer(self) -> Trainer:
        return Trainer(
            self.task.apart(),
            self.users,
            self.hosted,
            self.device,
            self.chunk_memory,
            self.activations,
            observed=self.observer is not None,
            naming=self.on_dropped is not None,
        )

    @cached_property
    def _idle(self) -> "list[_Fork[tuple[bytes | None, Chunk], ChunkSum]]":
        return []


def can_fork() -> bool:
    """Whether processes can be forked here, and train.

    macOS has libraries that break when they are. A daemon may not fork, as the workers of
    `multiprocessing.Pool` are. And where torch finds a GPU it has a thread for each from the first
    gradient on, whatever that was computed on, and no fork of its process computes another.
    """
    daemon = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not daemon and torch.cuda.device_count() == 0


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let torch compute with so many threads and NumPy with one: they decide how sums round."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with one_blas_thread():
            yield
    finally:
        torch.set_num_threads(before)


def _in_turn(
    trainer: Trainer, request: RoundRequest, start: RoundParameters, chunks: Sequence[Chunk]
) -> Iterator[ChunkSum]:
    """The sums of chunks in their order; a GPU trains the next one while one is fetched.

    On a CPU each is there before the next one begins, which may fail or hang.
    """
    ahead, under_way = int(trainer.device.type == "cuda"), deque[Callable[[], ChunkSum]]()
    for chunk in chunks:
        under_way.append(trainer.launched(request, start, chunk))
        if len(under_way) > ahead:
            yield under_way.popleft()()
    for last in under_way:
        yield last()


def _in_forks(
    forks: Sequence["_Fork[_Asked, _Answer]"], questions: Sequence[_Asked]
) -> Iterator[_Answer]:
    """Answers to questions in their order; forks take turns."""
    for number, question in enumerate(questions):
        fork = forks[number % len(forks)]
        if number >= len(forks):
            yield fork.answer()
        fork.ask(question)
    for number in range(max(0, len(questions) - len(forks)), len(questions)):
        yield forks[number % len(forks)].answer()


class _Training:
    """What a fork does that trains: the sum of a chunk, of a request that comes with the first."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self, asked: tuple[bytes | None, Chunk]) -> ChunkSum:
        packed, chunk = asked
        if packed is not None:
            self._request: RoundRequest = pickle.loads(packed)
            self._start = self._trainer.begin(self._request)
        return self._trainer.sum_of(self._request, self._start, chunk)


class _Fork(Generic[_Asked, _Answer]):
    """A fork that answers questions; it ends with this process or its last reference."""

    def __init__(self, answer_to: Callable[[_Asked], _Answer]) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(answer_to, its), daemon=True)
        with warnings.catch_warnings(), ARITHMETIC_LOCK:
            # Locks that a thread holds at this moment stay locked; torch's, NumPy's and Python's
            # own are made anew, and training takes no other but the one that is held here.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        its.close()
        self.end = weakref.finalize(self, _end, os.getpid(), self._process, self._connection)

    def ask(self, question: _Asked) -> None:
        try:
            self._connection.send(question)
        except OSError as error:
            raise self._ended() from error

    def answer(self) -> _Answer:
        try:
            records, answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        for record in records:
            logging.getLogger(record.name).handle(record)
        if isinstance(answer, Exception):
            raise answer
        found: _Answer = answer
        return found

    def _ended(self) -> WorkerError:
        self._process.join(timeout=10)
        return WorkerError(
            f"a process that trained users ended with exit code {self._process.exitcode}; where "
            "memory was short, engine.chunk_mebibytes can be less"
        )


def _serve(answer_to: Callable[[_Asked], object], connection: Connection) -> None:
    """Answer what is asked until the other end is closed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Files and sockets of the parent would stay locked or open after its end.
    kept = sorted((2, connection.fileno(), parent.sentinel, os.sysconf("SC_OPEN_MAX")))
    for before, after in itertools.pairwise(kept):
        os.closerange(before + 1, after)

    def end_with_parent() -> None:  # whatever this process is doing
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked decides what to do then
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _keep_memory()
    gc.freeze()  # or collections would look at all that was inherited, again and again
    logged = _LogRecords()
    with computing_with(1), suppress(EOFError, OSError):
        while True:
            question: _Asked = connection.recv()
            try:
                answer = answer_to(question)
            except Exception as error:  # not of a user's training, which is caught there
                answer = error
            connection.send_bytes(_packed(logged.records, answer))
            logged.records.clear()


def _packed(records: list[logging.LogRecord], answer: object) -> bytes:
    """What is logged and answered, without what cannot be brought to another process."""
    instead = WorkerError(f"a process raised {type(answer).__name__}")
    for kept, sent in itertools.product((answer, instead), (records, [])):
        with suppress(Exception):
            message = pickle.dumps((sent, kept), protocol=5)
            if sent or isinstance(kept, Exception):
                pickle.loads(message)  # may fail where packing did not
            return message
    raise AssertionError("an error of a worker can be packed")


def _keep_memory() -> None:
    """Keep what is freed for the next chunk: fresh pages cost as much as a layer's arithmetic."""
    with suppress(OSError, AttributeError):  # glibc alone has these settings
        for setting, size in ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, 2**25)):
            ctypes.CDLL(None).mallopt(setting, size)


class _LogRecords(logging.Handler):
    """Keeps all that this process logs for the other one, which knows how to show it."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []
        root = logging.getLogger()
        for logger in (root, *map(logging.getLogger, root.manager.loggerDict)):
            logger.handlers, logger.propagate = [], True
        root.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a record, but not the text of an exception, which may hold users' data."""
        try:
            record.msg = record.getMessage()
        except Exception:  # of a model, whose users must not fail for it
            record.msg = "a message that cannot be formatted"
        record.args = record.exc_info = record.exc_text = None
        self.records.append(record)


def _end(owner: int, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    if os.getpid() == owner:  # and not one of the others, which have a copy of this
        connection.close()
        process.kill()  # it has nothing to finish
        process.join()
