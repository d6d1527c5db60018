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
from fedpriv.engine.task import RoundParameters
from fedpriv.engine.trainer import Chunk, ChunkSum, Trainer
from fedpriv.errors import WorkerError
from fedpriv.privacy.round import RoundRequest

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
    """A process that does what a trainer does, on the memory of task and data that this one has.

    It ends with this process, or when nothing refers to it any more. It has memory for requests
    about as long as the one given, and for totals of a dimension D.
    """

    def __init__(self, trainer: Trainer, request: bytes, dimension: int, threads: int) -> None:
        # Large messages through a pipe come piece by piece, each when the other side awakes.
        self._given = mmap(-1, len(request) + _SLACK)
        self._total = np.frombuffer(mmap(-1, max(1, dimension) * 8), np.int64)[:dimension]
        self._request: bytes | None = None
        context = multiprocessing.get_context("fork")
        self._connection, its = context.Pipe()
        given = (trainer, its, self._connection, self._given, self._total, threads)
        self._process = context.Process(target=_serve, args=given, daemon=True)
        with warnings.catch_warnings(), trainer.lock:
            # Locks that a thread holds at this moment stay locked; torch's, NumPy's and Python's
            # own are made anew, and training takes no other but the trainer's, which is ours.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        its.close()
        weakref.finalize(self, _end, os.getpid(), self._process, self._connection)

    def fits(self, request: bytes, dimension: int) -> bool:
        """Whether the shared memory is large enough."""
        return len(request) <= len(self._given) and dimension == len(self._total)

    def ask(self, request: bytes, chunk: Chunk) -> None:
        """Let it find a chunk's sum; nothing else may be asked before the answer.

        Raises:
            WorkerError: the process has ended.
        """
        if request is not self._request:
            self._given[: len(request)] = request
        # The length of a request in memory; None: it is that of the last message.
        message = (None if request is self._request else len(request), chunk)
        try:
            self._connection.send_bytes(pickle.dumps(message, protocol=5))
        except OSError as error:
            raise self._ended() from error
        self._request = request

    def answer(self) -> ChunkSum:
        """What `Trainer.sum_of` gives for what was asked.

        Raises:
            WorkerError: the process has ended.
            Exception: as of `Trainer.sum_of`.
        """
        try:
            said: tuple[list[logging.LogRecord], ChunkSum | Exception]
            said = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        records, answer = said
        for record in records:
            logging.getLogger(record.name).handle(record)
        if isinstance(answer, Exception):
            raise answer
        return replace(answer, total=torch.from_numpy(self._total.copy()))

    def _ended(self) -> WorkerError:
        self._process.join(timeout=10)
        return WorkerError(
            f"a process that trained users ended with exit code {self._process.exitcode}; where "
            "memory was short, engine.chunk_mebibytes can be less"
        )


def in_processes(
    processes: Sequence[TrainerProcess], request: bytes, chunks: Iterable[Chunk]
) -> Iterator[ChunkSum]:
    """Let processes find the sums of chunks, in their order; `request` is from `packed`.

    No process may be busy. Some stay at work if this does not come to its end: then none may be
    asked again. A chunk begins only once few enough sums wait to be taken.

    Raises:
        WorkerError: a process has ended.
        Exception: as of `Trainer.sum_of`.
    """
    idle, waiting = deque(processes), deque[TrainerProcess]()
    for chunk in chunks:
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
    """Train what is asked for until the other end is closed."""
    other_end.close()
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Files that this process holds open would stay locked if the other one were killed.
    kept = sorted((2, connection.fileno(), parent.sentinel, os.sysconf("SC_OPEN_MAX")))
    for before, after in pairwise(kept):
        os.closerange(before + 1, after)
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asked decides what to do then
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    gc.freeze()  # or collections would look at all that was inherited, again and again
    records = _kept_records()
    with computing_with(threads), suppress(EOFError, OSError):
        while True:
            message: tuple[int | None, Chunk] = pickle.loads(connection.recv_bytes())
            length, chunk = message
            if length is not None:
                request: RoundRequest = pickle.loads(memory[:length])
                start = RoundParameters.of(request, trainer.constants, trainer.device)
            answer: ChunkSum | Exception
            try:
                answer = trainer.sum_of(request, start, chunk)
                total[:] = answer.total.numpy()
                answer = replace(answer, total=torch.empty(0))
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


def _pickled(logged: list[logging.LogRecord], answer: ChunkSum | Exception) -> bytes:
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
