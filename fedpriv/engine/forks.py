"""Processes that train side by side: forks of this one, which share its data and model.

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
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait

import numpy as np
import torch

from fedpriv.engine.arithmetic import ARITHMETIC_LOCK
from fedpriv.engine.products import one_blas_thread
from fedpriv.engine.schedule import Integers
from fedpriv.engine.trainer import Chunk, ChunkSum, SimulationOnlyDropped, Trainer
from fedpriv.errors import WorkerError
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest

_log = logging.getLogger(__name__)

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)


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


@dataclass(frozen=True)
class Work:
    """What a fork is asked: to train chunks."""

    request: bytes  # packed, without its users
    chunks: Sequence[Chunk]
    one_by_one: bool  # whether each chunk is answered; or all of them together


class Fork:
    """A fork that trains chunks; it ends with this process or its last reference."""

    def __init__(self, trainer: Trainer) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, its = context.Pipe()
        self._process = context.Process(target=_serve, args=(trainer, its), daemon=True)
        with warnings.catch_warnings(), ARITHMETIC_LOCK:
            # Locks that a thread holds at this moment stay locked; torch's, NumPy's and Python's
            # own are made anew, and training takes no other but the one that is held here.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        its.close()
        self.end = weakref.finalize(self, _end, os.getpid(), self._process, self.connection)

    def ask(self, work: Work) -> None:
        """Begin with chunks; WorkerError if it has ended."""
        try:
            self.connection.send(work)
        except OSError as error:
            raise WorkerError("a process that trains users has ended") from error

    def answer(self) -> tuple[int, ChunkSum]:
        """How many of the chunks are done with this sum; WorkerError if it has ended."""
        try:
            records, number, found = self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerError("a process that trains users has ended") from error
        for record in records:
            logging.getLogger(record.name).handle(record)
        if isinstance(found, Exception):
            raise WorkerError(f"a process that trains users raised {found}") from found
        return number, found


def _serve(trainer: Trainer, connection: Connection) -> None:
    """Train what is asked until the other end is closed."""
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
            work: Work = connection.recv()
            answers = _answers(trainer, work)
            while (answer := next(answers, None)) is not None:
                connection.send_bytes(_packed(logged.records, *answer))
                logged.records.clear()


def _answers(trainer: Trainer, work: Work) -> Iterator[tuple[int, ChunkSum | Exception]]:
    """Numbers of chunks and their sums; an error ends them."""
    try:
        request: RoundRequest = pickle.loads(work.request)
        parts = [[chunk] for chunk in work.chunks] if work.one_by_one else [work.chunks]
        for chunks in parts:
            yield len(chunks), trainer.sum_of(request, chunks)
    except Exception as error:  # not of a user's training, which is caught there
        yield 0, error


def _packed(records: list[logging.LogRecord], number: int, answer: ChunkSum | Exception) -> bytes:
    """What is logged and answered, without what cannot be brought to another process."""
    instead = WorkerError(type(answer).__name__)
    for kept, sent in itertools.product((answer, instead), (records, [])):
        with suppress(Exception):
            message = pickle.dumps((sent, number, kept), protocol=5)
            if sent or isinstance(kept, Exception):
                pickle.loads(message)  # may fail where packing did not
            return message
    raise AssertionError("an error of a worker can be packed")


def _keep_memory() -> None:
    """Keep what is freed for the next chunk: fresh pages cost as much as a layer's arithmetic."""
    with suppress(OSError, AttributeError):  # glibc alone has these settings
        for setting, size in ((_TRIM_THRESHOLD, 2**31 - 1), (_MMAP_THRESHOLD, 2**30)):
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


@dataclass
class _Shift:
    """A fork, the chunks that it has not answered yet, and until when it must answer the next."""

    fork: Fork
    waiting: deque[Chunk]
    one_by_one: bool
    deadline: float = float("inf")


class Crew:
    """Forks that train the chunks of a round.

    Where one ends or takes longer than its users may, its users go on one by one in another, and
    those who end that one, too, contribute zero. So each costs itself its place, and nobody else.
    """

    def __init__(
        self, forks: list[Fork], trainer: Trainer, request: RoundRequest, limit: float | None
    ) -> None:
        """`forks` are replaced where they end. Each user may take `limit` seconds, if given."""
        self._forks, self._trainer, self._limit = forks, trainer, limit
        self._packed = pickle.dumps(replace(request, users=request.users[:0]), protocol=5)
        self._dimension = request.clipping.layout.dimension

    def sums(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Integers, ChunkSum]]:
        """Users and their sums, as they are done."""
        shifts = [
            self._begun(fork, some, one_by_one=self._limit is not None)
            for fork, some in zip(self._forks, shared_out(chunks, len(self._forks)), strict=True)
            if some
        ]
        while shifts:
            first = min(shift.deadline for shift in shifts)
            left = None if first == float("inf") else max(0.0, first - time.monotonic())
            ready = wait([shift.fork.connection for shift in shifts], left)
            for shift in shifts:
                if shift.fork.connection in ready:
                    yield from self._answered(shift)
                elif time.monotonic() >= shift.deadline:
                    yield from self._ended(shift)
            shifts = [shift for shift in shifts if shift.waiting]

    def _begun(self, fork: Fork, chunks: Sequence[Chunk], *, one_by_one: bool) -> _Shift:
        work = Work(self._packed, chunks, one_by_one)
        try:
            fork.ask(work)
        except WorkerError:  # it was killed while it rested
            fork = self._another(fork)
            fork.ask(work)
        shift = _Shift(fork, deque(chunks), one_by_one)
        self._expect(shift)
        return shift

    def _expect(self, shift: _Shift) -> None:
        if self._limit is not None and shift.waiting:
            users = len(shift.waiting[0].users)
            shift.deadline = time.monotonic() + users * self._limit

    def _answered(self, shift: _Shift) -> Iterator[tuple[Integers, ChunkSum]]:
        try:
            number, found = shift.fork.answer()
        except WorkerError:
            yield from self._ended(shift)
            return
        done = [shift.waiting.popleft() for _ in range(number)]
        self._expect(shift)
        yield np.concatenate([chunk.users for chunk in done]), found

    def _ended(self, shift: _Shift) -> Iterator[tuple[Integers, ChunkSum]]:
        """Go on in another fork with one user at a time; one who was alone contributes zero."""
        shift.fork.end()
        if shift.one_by_one and len(shift.waiting[0].users) == 1:
            lost = shift.waiting.popleft()
            if not self._trainer.naming:
                _log.warning("a user counts as zero: it ended the process that trains users")
            nothing = PartialSum(str(lost.users[0]), 0, np.zeros(self._dimension, np.int64), 0)
            reason = "it ended the process that trained it"
            yield (
                lost.users,
                ChunkSum(nothing, (), SimulationOnlyDropped(int(lost.users[0]), reason)),
            )
        chunks = [
            replace(chunk, users=user)
            for chunk in shift.waiting
            for user in np.split(chunk.users, len(chunk.users))
        ]
        shift.fork = self._another(shift.fork)
        shift.waiting, shift.one_by_one = deque(chunks), True
        if chunks:
            shift.fork.ask(Work(self._packed, chunks, one_by_one=True))
            self._expect(shift)

    def _another(self, ended: Fork) -> Fork:
        another = Fork(self._trainer)
        self._forks[self._forks.index(ended)] = another
        return another


def shared_out(chunks: Sequence[Chunk], parts: int) -> list[list[Chunk]]:
    """Chunks in so many parts of about the same cost, those that cost most first."""
    found: list[list[Chunk]] = [[] for _ in range(parts)]
    costs = [0] * parts
    for chunk in chunks:
        least = costs.index(min(costs))
        found[least].append(chunk)
        costs[least] += chunk.cost
    return found
