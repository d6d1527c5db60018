"""Several threads of a processor, each with work of its own.

A thread for each chunk of users is faster than all threads on each small tensor, which wait for
each other thousands of times in a round, most of all on a machine that has other work to do.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TypeVar

import torch

_TURN = 1e-4  # seconds

Worker = TypeVar("Worker")
Job = TypeVar("Job")
Result = TypeVar("Result")


def in_threads(
    workers: Sequence[Worker], jobs: Iterable[Job], work: Callable[[Worker, Job], Result]
) -> Iterator[Result]:
    """Let workers do jobs, each in a thread of its own, in which torch computes with one thread.

    Args:
        workers: what may not do two jobs at a time; at least one.
        jobs: what is to do; a job begins only once few enough results wait to be taken.
        work: does a job.

    Yields:
        Results in the order of the jobs.

    Raises:
        Exception: what a job raises; those after it do not begin.
    """
    idle: SimpleQueue[Worker] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def by_an_idle_one(job: Job) -> Result:
        worker = idle.get()
        try:
            return work(worker, job)
        finally:
            idle.put(worker)

    waiting: deque[Future[Result]] = deque()
    with _threads(len(workers)) as pool:
        for job in jobs:
            if len(waiting) == len(workers):
                yield waiting.popleft().result()
            waiting.append(pool.submit(by_an_idle_one, job))
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute with one thread, in this thread.

    Threads that helped with a tensor spin for milliseconds before they sleep, in the way of others.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    # A thread that is told nothing lets MKL take as many as there are.
    pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
    try:
        with one_thread(), _short_turns():
            yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _short_turns() -> Iterator[None]:
    """Let a thread that needs Python's lock have it soon.

    Python lets another keep it for 5 ms, which is a quarter of a chunk of a small model.
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN))
    try:
        yield
    finally:
        sys.setswitchinterval(before)
