"""Processes that train chunks of users, each with a processor's core of its own.

Threads of one process wait for Python's lock, which for a small model takes a quarter of the time.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.engine.chunk_sum import ChunkSum
from fedpriv.engine.matmul import blas_threads
from fedpriv.engine.start import Start
from fedpriv.engine.trainer import Trainer
from fedpriv.errors import WorkerError
from fedpriv.federated.transport import RoundRequest

Message = tuple[bytes | None, npt.NDArray[np.int64], str]
"""A request unless it is that of the last message, users, and the name of their sum."""

Answer = list[tuple[ChunkSum, npt.NDArray[np.float64]]] | Exception
"""Sums without totals, and their totals; or what was raised."""


def can_fork() -> bool:
    """Whether a process can go on as two here; macOS has libraries that break when it does."""
    return sys.platform == "linux"


class TrainerProcess:
    """A process that does what a trainer does; it has what this one has when it begins.

    It shares the memory of task and data, and ends when nobody refers to it any more, or with this
    process.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Begin."""
        context = multiprocessing.get_context("fork")
        self._connection, its = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(trainer, its, self._connection), daemon=True
        )
        with warnings.catch_warnings():
            # Locks that a thread holds at this moment stay locked; torch's, NumPy's and Python's
            # own are made anew, and training takes no other.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        its.close()
        self._request: bytes | None = None
        weakref.finalize(self, _end, os.getpid(), self._process, self._connection)

    def ask(self, request: bytes, chunk: npt.NDArray[np.int64], node: str) -> None:
        """Let it find sums; nothing else may be asked before the answer.

        Args:
            request: of the round, from `packed`.
            chunk: positions of users in the store.
            node: name of the sum.

        Raises:
            WorkerError: the process has ended.
        """
        message: Message = (None if request is self._request else request, chunk, node)
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
            answer: Answer = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._ended() from error
        if isinstance(answer, Exception):
            raise answer
        return [replace(each, total=torch.from_numpy(total)) for each, total in answer]

    def _ended(self) -> WorkerError:
        self._process.join(timeout=10)
        return WorkerError(
            f"a process that trained users ended with exit code {self._process.exitcode}; where "
            "memory was short, engine.chunk_mebibytes can be less"
        )


def in_processes(
    processes: Sequence[TrainerProcess],
    request: RoundRequest,
    jobs: Iterable[tuple[int, npt.NDArray[np.int64]]],
) -> Iterator[list[ChunkSum]]:
    """Let processes find the sums of chunks.

    Args:
        processes: at least one, none of them asked for anything. Some are still at work if this
            does not come to its end: then none may be asked again.
        request: of the round.
        jobs: numbers of chunks, and positions of their users; a job begins only once few enough
            sums wait to be taken.

    Yields:
        Sums in the order of the jobs.

    Raises:
        WorkerError: a process has ended.
        Exception: as of `Trainer.sums`.
    """
    given, idle, waiting = packed(request), deque(processes), deque[TrainerProcess]()
    for number, chunk in jobs:
        if not idle:
            first = waiting.popleft()
            yield first.answer()
            idle.append(first)
        process = idle.popleft()
        process.ask(given, chunk, f"chunk {number}")
        waiting.append(process)
    for process in waiting:
        yield process.answer()


def packed(request: RoundRequest) -> bytes:
    """A request for processes, without its users: each chunk comes with its own."""
    return pickle.dumps(replace(request, users=request.users[:0]), protocol=5)


def _serve(trainer: Trainer, connection: Connection, other_end: Connection) -> None:
    """Train what is asked for until nobody can ask any more."""
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever asked decides what to do then
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    with blas_threads(1), suppress(EOFError, OSError):
        while True:
            message: Message = pickle.loads(connection.recv_bytes())
            given, chunk, node = message
            if given is not None:
                request: RoundRequest = pickle.loads(given)
                start = Start.of(request, trainer.constants, trainer.device)
            connection.send_bytes(_answer(trainer, request, start, chunk, node))


def _answer(
    trainer: Trainer,
    request: RoundRequest,
    start: Start,
    chunk: npt.NDArray[np.int64],
    node: str,
) -> bytes:
    """An answer, pickled."""
    nothing = torch.empty(0)
    try:
        sums = trainer.sums(request, start, chunk, node)
        answer: Answer = [(replace(s, total=nothing), s.total.numpy()) for s in sums]
    except Exception as error:  # not of a user's training, which is caught there
        answer = error
    try:
        return pickle.dumps(answer, protocol=5)
    except Exception:
        return pickle.dumps(WorkerError(f"a process raised {type(answer).__name__}"))


def _end(owner: int, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    if os.getpid() == owner:  # and not one of the others, which have a copy of this
        connection.close()
        process.kill()  # it has nothing to finish
        process.join()
