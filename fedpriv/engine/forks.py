"""Processes that train in parallel: forks of this process, which share its data and model.

Threads of one process would wait for Python's lock, especially with small models.
"""

import ctypes
import gc
import itertools
import logging
import mmap
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
from typing import Any

import numpy as np
import torch

from fedpriv.engine.arithmetic import ARITHMETIC_LOCK
from fedpriv.engine.examples import Chunk
from fedpriv.engine.products import one_blas_thread
from fedpriv.engine.schedule import Integers
from fedpriv.engine.trainer import ChunkSum, SimulationOnlyDropped, Trainer
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_LINE = 64  # bytes of a processor's cache line, to which arrays are aligned


def can_fork() -> bool:
    """Return whether this process can be forked, and forks can train.

    Libraries of macOS break in forks. Daemons, such as the workers of `multiprocessing.Pool`, must
    not fork. If there are GPUs, torch starts a thread for each at the first gradient on any device,
    and after that, forks cannot compute gradients.
    """
    daemon = multiprocessing.current_process().daemon
    return sys.platform == "linux" and not daemon and torch.cuda.device_count() == 0


@contextmanager
def computing_with(threads: int) -> Iterator[None]:
    """Use `threads` threads of torch and one of NumPy, because their number affects rounding."""
    _keep_freed_memory()
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with one_blas_thread():
            yield
    finally:
        torch.set_num_threads(previous)


def _keep_freed_memory() -> None:
    """Let this process keep up to 1 GiB of the memory that tensors free, if its libc is glibc.

    Otherwise the system clears the pages of large tensors anew for every user, which takes up to
    half of the time.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)):
        mallopt(_TRIM_THRESHOLD, 2**30)
        mallopt(_MMAP_THRESHOLD, 2**25)  # the largest value


class PipeEnd:
    """An end of a pipe, with memory common to both ends for arrays, for which pipes are slow.

    The ends take turns: a message overwrites the arrays of the previous one.
    """

    def __init__(self, connection: Connection, memory: mmap.mmap) -> None:
        self.connection, self._memory = connection, memory

    def send(self, message: object) -> None:
        """Send a message; arrays that do not fit in the memory go through the pipe."""
        spans = [slice(0, 0)]

        def goes_through_the_pipe(array: pickle.PickleBuffer) -> bool:
            start = -(-spans[-1].stop // _LINE) * _LINE
            span = slice(start, start + array.raw().nbytes)
            if span.stop > len(self._memory):
                return True
            self._memory[span] = array.raw()
            spans.append(span)
            return False

        pickled = pickle.dumps(message, protocol=5, buffer_callback=goes_through_the_pipe)
        self.connection.send((pickled, spans[1:]))

    def receive(self) -> Any:
        """Return the next message, with copies of the arrays; EOFError if there is none."""
        pickled, spans = self.connection.recv()
        memory = np.frombuffer(self._memory, np.uint8)
        return pickle.loads(pickled, buffers=[memory[span].copy() for span in spans])


class Fork(PipeEnd):
    """A fork that trains chunks; it ends with this process or its last reference."""

    def __init__(self, trainer: Trainer, size: int) -> None:
        """`size`: bytes of memory for the arrays of a request, and then of its answer."""
        context = multiprocessing.get_context("fork")
        (connection, other_end), memory = context.Pipe(), mmap.mmap(-1, max(1, size))
        super().__init__(connection, memory)
        arguments = trainer, PipeEnd(other_end, memory)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings(), ARITHMETIC_LOCK:
            # Locks that other threads hold now remain locked in the fork. torch, NumPy and Python
            # renew theirs, and besides these, training takes only the lock that is held here.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        memory.madvise(mmap.MADV_DONTFORK)  # it holds sums of users: no other fork may reach it
        other_end.close()
        self.end = weakref.finalize(self, _stop, os.getpid(), self._process, connection)


def _serve(trainer: Trainer, end: PipeEnd) -> None:
    """Train chunks on request until the other end is closed, or an error ends this process.

    A message is a request without its users, and chunks; the answer is their sum.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Close the parent's files and sockets, which would stay open or locked after it ends.
    in_use = sorted((2, end.connection.fileno(), parent.sentinel, os.sysconf("SC_OPEN_MAX")))
    for lower, upper in itertools.pairwise(in_use):
        os.closerange(lower + 1, upper)

    def end_with_parent() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides whether this process ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    logging.disable()  # a model may log users' data, and handlers have lost their files
    gc.freeze()  # or each garbage collection would visit all inherited objects
    with computing_with(1), suppress(Exception):
        while True:
            request, chunks = end.receive()
            end.send(trainer.sum_of(request, chunks))


def _stop(owner: int, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    if os.getpid() == owner:  # not in another fork, which has a copy of this finalizer
        connection.close()
        process.kill()
        process.join()


@dataclass
class _Shift:
    """A fork, the chunks that it has not answered yet, and the number of those it trains now."""

    fork: Fork
    waiting: deque[Chunk]
    one_by_one: bool
    number: int = 0
    deadline: float = float("inf")  # for the next answer, on the clock of `time.monotonic`


class Crew:
    """Forks that train the chunks of a round.

    If a fork ends or exceeds the time of its users, its users continue one by one in another fork,
    and a user who ends that one too contributes zero. So a user can harm only themselves.
    """

    def __init__(
        self,
        forks: list[Fork],
        processes: int,
        trainer: Trainer,
        request: RoundRequest,
        limit: float | None,
    ) -> None:
        """Use idle `forks`, and start more if needed. `limit`: seconds per user; None: no limit."""
        self._trainer, self._limit = trainer, limit
        self._request = replace(request, users=request.users[:0])
        self._dimension = request.clipping.layout.dimension
        self.forks = [*forks]
        self.forks += [self._new_fork() for _ in range(processes - len(self.forks))]

    def _new_fork(self) -> Fork:
        request = self._request
        tensors = request.parameters, request.statistics, request.control
        arrays = sum(array.nbytes for part in tensors for array in part.values())
        return Fork(self._trainer, arrays + 8 * self._dimension)

    def sums(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Integers, ChunkSum]]:
        """Yield users and their sums as they are done."""
        parts = shared_out(chunks, len(self.forks))
        pairs = zip(self.forks, parts, strict=True)
        shifts = [_Shift(fork, deque(p), self._limit is not None) for fork, p in pairs if p]
        for shift in shifts:
            self._send(shift)
        while shifts:
            deadline = min(shift.deadline for shift in shifts)
            timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            ready = wait([shift.fork.connection for shift in shifts], timeout)
            for shift in shifts:
                if shift.fork.connection in ready:
                    yield from self._answered(shift)
                elif time.monotonic() >= shift.deadline and not shift.fork.connection.poll():
                    yield from self._ended(shift)
            shifts = [shift for shift in shifts if shift.waiting]

    def _send(self, shift: _Shift) -> None:
        """Let the fork of a shift train its next chunk, or all of them."""
        shift.number = 1 if shift.one_by_one else len(shift.waiting)
        chunks = [*shift.waiting][: shift.number]
        try:
            shift.fork.send((self._request, chunks))
        except OSError:  # it was killed while it was idle
            shift.fork = self._replaced(shift.fork)
            shift.fork.send((self._request, chunks))
        if self._limit is not None:
            users = len(chunks[0].users)
            shift.deadline = time.monotonic() + users * self._limit

    def _answered(self, shift: _Shift) -> Iterator[tuple[Integers, ChunkSum]]:
        try:
            chunk_sum = shift.fork.receive()
        except (EOFError, OSError):
            yield from self._ended(shift)
            return
        users = [shift.waiting.popleft().users for _ in range(shift.number)]
        if shift.waiting:
            self._send(shift)
        yield np.concatenate(users), chunk_sum

    def _ended(self, shift: _Shift) -> Iterator[tuple[Integers, ChunkSum]]:
        """Continue one user at a time in another fork; a user who was alone counts as zero."""
        shift.fork.end()
        if shift.one_by_one and len(shift.waiting[0].users) == 1:
            users = shift.waiting.popleft().users
            zero = PartialSum(str(users[0]), 0, np.zeros(self._dimension, np.int64), 0)
            reason = "it ended the process that trained it"
            dropped = SimulationOnlyDropped(int(users[0]), reason)
            yield users, ChunkSum(zero, (), dropped, (reason,))
        chunks = [
            replace(chunk, users=user)
            for chunk in shift.waiting
            for user in np.split(chunk.users, len(chunk.users))
        ]
        shift.fork = self._replaced(shift.fork)
        shift.waiting, shift.one_by_one = deque(chunks), True
        if chunks:
            self._send(shift)

    def _replaced(self, old_fork: Fork) -> Fork:
        fork = self._new_fork()
        self.forks[self.forks.index(old_fork)] = fork
        return fork


def shared_out(chunks: Sequence[Chunk], parts: int) -> list[list[Chunk]]:
    """Split chunks, the most expensive first, into `parts` lists of similar cost."""
    shares: list[list[Chunk]] = [[] for _ in range(parts)]
    costs = [0] * parts
    for chunk in chunks:
        cheapest = costs.index(min(costs))
        shares[cheapest].append(chunk)
        costs[cheapest] += chunk.cost
    return shares
