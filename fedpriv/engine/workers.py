"""Processes that train chunks of users side by side, each with threads of its own.

Threads of one process would wait for Python's lock, the longer the smaller a model is.
"""

import gc
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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import pairwise
from logging.handlers import QueueHandler
from mmap import mmap
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.engine.matmul import blas_threads
from fedpriv.engine.task import Start
from fedpriv.engine.trainer import Chunk, ChunkSum, Trainer
from fedpriv.errors import WorkerError
from fedpriv.privacy.round import RoundRequest

Message = tuple[bytes | int | None, Chunk]
"""A request, or its length in the memory for it, or None if it is that of the last message; and
whom to train."""

Answer = list[tuple[ChunkSum, npt.NDArray[np.int64] | None]] | Exception
"""Sums without totals, and their totals, None for that in the memory for it; or what was raised."""

_SLACK = 2**16  # bytes by which a later request may be longer than the first


def can_fork() -> bool:
    """Whether a process can go on as two here; macOS has libraries that break when it does."""
    return sys.platform == "linux"


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Let torch and NumPy compute with so many threads, in this thread.

    How many there are decides how sums are rounded, so it must not vary with who trains.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with blas_threads(threads):
            yield
    finally:
        torch.set_num_threads(before)


class TrainerProcess:
    """A process that does what a trainer does; it has what this one has when it begins.

    It shares memory of task and data, and ends with this one or when nobody refers to it any more.

    Attributes:
        dimension: of the totals for which there is shared memory.
    """

    def __init__(self, trainer: Trainer, request: bytes, dimension: int, threads: int) -> None:
        """Begin.

        Args:
            trainer: what it does.
            request: such as it will get.
            dimension: D of totals.
            threads: with how many it computes.
        """
        self.dimension = dimension
        # Large messages through a pipe come piece by piece, each when the other side awakes.
        self._given = mmap(-1, len(request) + _SLACK)
        self._total = np.frombuffer(mmap(-1, max(1, dimension) * 8), np.int64)
        context = multiprocessing.get_context("fork")
        self._connection, its = context.Pipe()
        shared = self._given, self._total
        self._process = context.Process(
            target=_serve, args=(trainer, its, self._connection, *shared, threads), daemon=True
        )
        with warnings.catch_warnings():
            # Locks that a thread holds at this moment stay locked; torch's, NumPy's and Python's
            # own are made anew, and training takes no other.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        its.close()
        self._request: bytes | None = None
        weakref.finalize(self, _end, os.getpid(), self._process, self._connection)

    def ask(self, request: bytes, chunk: Chunk) -> None:
        """Let it find sums; nothing else may be asked before the answer.

        Args:
            request: of the round, from `packed`.
            chunk: whom to train.

        Raises:
            WorkerError: the process has ended.
        """
        given: bytes | int | None = None if request is self._request else request
        if given is not None and len(request) <= len(self._given):
            self._given[: len(request)] = request
            given = len(request)
        message: Message = (given, chunk)
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=5))
        except OSError as error:
            raise self._ended() from error
        self._request = request

    def answer(self) -> list[ChunkSum]:
        """What `Trainer.sums` gives for what was asked.

        Raises:
            WorkerError: the process has ended.
            Exception: as of `Trainer.sums`.
        """
        try:
            said: tuple[list[logging.LogRecord], Answer]
            said = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        records, answer = said
        for record in records:
            logging.getLogger(record.name).handle(record)
        if isinstance(answer, Exception):
            raise answer
        return [
            replace(each, total=torch.from_numpy(self._total.copy() if total is None else total))
            for each, total in answer
        ]

    def _ended(self) -> WorkerError:
        self._process.join(timeout=10)
        return WorkerError(
            f"a process that trained users ended with exit code {self._process.exitcode}; where "
            "memory was short, engine.chunk_mebibytes can be less"
        )


def in_processes(
    processes: Sequence[TrainerProcess], request: bytes, jobs: Iterable[Chunk]
) -> Iterator[list[ChunkSum]]:
    """Let processes find the sums of chunks.

    Args:
        processes: at least one, none of them asked for anything. Some are still at work if this
            does not come to its end: then none may be asked again.
        request: of the round, from `packed`.
        jobs: chunks; one begins only once few enough sums wait to be taken.

    Yields:
        Sums in the order of the jobs.

    Raises:
        WorkerError: a process has ended.
        Exception: as of `Trainer.sums`.
    """
    idle, waiting = deque(processes), deque[TrainerProcess]()
    for chunk in jobs:
        if not idle:
            first = waiting.popleft()
            yield first.answer()
            idle.append(first)
        process = idle.popleft()
        process.ask(request, chunk)
        waiting.append(process)
    for process in waiting:
        yield process.answer()


def packed(request: RoundRequest) -> bytes:
    """A request for processes, without its users: each chunk comes with its own."""
    return pickle.dumps(replace(request, users=request.users[:0]), protocol=5)


def _serve(
    trainer: Trainer,
    connection: Connection,
    other_end: Connection,
    memory: mmap,
    total: npt.NDArray[np.int64],
    threads: int,
) -> None:
    """Train what is asked for until nobody can ask any more."""
    other_end.close()
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Files that this process holds open would stay locked if the other one were killed.
    kept = sorted((2, connection.fileno(), parent.sentinel, os.sysconf("SC_OPEN_MAX")))
    for before, after in pairwise(kept):
        os.closerange(before + 1, after)
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked decides what to do then
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # or collections would look at all that was inherited, again and again
    trainer = trainer.twin()  # another thread may have been using the models when this was forked
    records = _kept_records()
    with computing_with(threads), suppress(EOFError, OSError):
        while True:
            message: Message = pickle.loads(connection.recv_bytes())
            given, chunk = message
            if given is not None:
                packed = memory[:given] if isinstance(given, int) else given
                request: RoundRequest = pickle.loads(packed)
                start = Start.of(request, trainer.constants, trainer.device)
            try:
                answer = _placed(trainer.sums(request, start, chunk), total)
            except Exception as error:  # not of a user's training, which is caught there
                answer = error
            logged = [records.get() for _ in range(records.qsize())]
            connection.send_bytes(_pickled(logged, answer))


def _end_with(sentinel: int) -> None:
    """End when the other process has, whatever this one is doing."""
    wait([sentinel])
    os._exit(1)


def _kept_records() -> SimpleQueue[logging.LogRecord]:
    """Where all is kept that this process logs; only the other one knows how to show it."""
    records: SimpleQueue[logging.LogRecord] = SimpleQueue()
    root = logging.getLogger()
    for logger in (root, *map(logging.getLogger, root.manager.loggerDict)):
        logger.handlers, logger.propagate = [], True
    handler = QueueHandler(records)
    handler.addFilter(_without_exception)
    root.addHandler(handler)
    return records


def _without_exception(record: logging.LogRecord) -> bool:
    """Keep a record, but not the text of an exception, which may hold users' data."""
    record.exc_info = record.exc_text = None
    return True


def _placed(sums: list[ChunkSum], memory: npt.NDArray[np.int64]) -> Answer:
    """An answer; the total of an only sum is in the memory for it."""
    nothing = torch.empty(0)
    if len(sums) == 1 and sums[0].total.shape == memory.shape:
        memory[:] = sums[0].total.numpy()
        return [(replace(sums[0], total=nothing), None)]
    return [(replace(each, total=nothing), each.total.numpy()) for each in sums]


def _pickled(logged: list[logging.LogRecord], answer: Answer) -> bytes:
    try:
        return pickle.dumps((logged, answer), protocol=5)
    except Exception:
        error = WorkerError(f"a process raised {type(answer).__name__}")
        return pickle.dumps((logged, error))


def _end(owner: int, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    if os.getpid() == owner:  # and not one of the others, which have a copy of this
        connection.close()
        process.kill()  # it has nothing to finish
        process.join()
