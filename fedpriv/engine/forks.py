"""Processes that train in parallel: forks of this process, which share its data and model.

Threads of one process would wait for Python's lock, especially with small models.
"""

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
from fedpriv.engine.examples import Chunk
from fedpriv.engine.products import one_blas_thread
from fedpriv.engine.schedule import Integers
from fedpriv.engine.trainer import ChunkSum, SimulationOnlyDropped, Trainer
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest


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
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with one_blas_thread():
            yield
    finally:
        torch.set_num_threads(previous)


class Fork:
    """A fork that trains chunks; it ends with this process or its last reference."""

    def __init__(self, trainer: Trainer) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, child_connection = context.Pipe()
        arguments = trainer, child_connection
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        with warnings.catch_warnings(), ARITHMETIC_LOCK:
            # Locks that other threads hold now remain locked in the fork. torch, NumPy and Python
            # renew theirs, and besides these, training takes only the lock that is held here.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        child_connection.close()
        self.end = weakref.finalize(self, _end, os.getpid(), self._process, self.connection)


def _serve(trainer: Trainer, connection: Connection) -> None:
    """Train chunks on request until the other end is closed, or an error ends this process.

    A message is a pickled request without its users, and lists of chunks with an answer each.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    # Close the parent's files and sockets, which would stay open or locked after it ends.
    in_use = sorted((2, connection.fileno(), parent.sentinel, os.sysconf("SC_OPEN_MAX")))
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
            pickled, parts = connection.recv()
            request: RoundRequest = pickle.loads(pickled)
            for chunks in parts:
                answer = len(chunks), trainer.sum_of(request, chunks)
                connection.send_bytes(pickle.dumps(answer, protocol=5))


def _end(owner: int, process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    if os.getpid() == owner:  # not in another fork, which has a copy of this finalizer
        connection.close()
        process.kill()
        process.join()


@dataclass
class _Shift:
    """A fork and the chunks that it has not answered yet."""

    fork: Fork
    waiting: deque[Chunk]
    one_by_one: bool
    deadline: float = float("inf")  # for the next answer, on the clock of `time.monotonic`


class Crew:
    """Forks that train the chunks of a round.

    If a fork ends or exceeds the time of its users, its users continue one by one in another fork,
    and a user who ends that one too contributes zero. So a user can harm only themselves.
    """

    def __init__(
        self, forks: list[Fork], trainer: Trainer, request: RoundRequest, limit: float | None
    ) -> None:
        """Forks that end are replaced in `forks`. `limit`: seconds per user; None: no limit."""
        self._forks, self._trainer, self._limit = forks, trainer, limit
        self._packed = pickle.dumps(replace(request, users=request.users[:0]), protocol=5)
        self._dimension = request.clipping.layout.dimension

    def sums(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Integers, ChunkSum]]:
        """Yield users and their sums as they are done."""
        parts = shared_out(chunks, len(self._forks))
        pairs = zip(self._forks, parts, strict=True)
        shifts = [_Shift(fork, deque(p), self._limit is not None) for fork, p in pairs if p]
        for shift in shifts:
            self._begin(shift)
        while shifts:
            deadline = min(shift.deadline for shift in shifts)
            timeout = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
            ready = wait([shift.fork.connection for shift in shifts], timeout)
            for shift in shifts:
                if shift.fork.connection in ready:
                    yield from self._answered(shift)
                elif time.monotonic() >= shift.deadline:
                    yield from self._ended(shift)
            shifts = [shift for shift in shifts if shift.waiting]

    def _begin(self, shift: _Shift) -> None:
        chunks = [*shift.waiting]
        work = self._packed, [[chunk] for chunk in chunks] if shift.one_by_one else [chunks]
        try:
            shift.fork.connection.send(work)
        except OSError:  # it was killed while it was idle
            shift.fork = self._replaced(shift.fork)
            shift.fork.connection.send(work)
        self._set_deadline(shift)

    def _set_deadline(self, shift: _Shift) -> None:
        if self._limit is not None and shift.waiting:
            users = len(shift.waiting[0].users)
            shift.deadline = time.monotonic() + users * self._limit

    def _answered(self, shift: _Shift) -> Iterator[tuple[Integers, ChunkSum]]:
        try:
            number, chunk_sum = shift.fork.connection.recv()
        except (EOFError, OSError):
            yield from self._ended(shift)
            return
        answered = [shift.waiting.popleft() for _ in range(number)]
        self._set_deadline(shift)
        yield np.concatenate([chunk.users for chunk in answered]), chunk_sum

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
            self._begin(shift)

    def _replaced(self, old_fork: Fork) -> Fork:
        fork = Fork(self._trainer)
        self._forks[self._forks.index(old_fork)] = fork
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
