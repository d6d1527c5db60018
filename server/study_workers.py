"""Processes that run a study's cells side by side, one thread each."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from threadpoolctl import threadpool_limits

from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.errors import FedprivError, WorkerError
from fedpriv.studies import Cell, RunResult

from .study_run import Task, run_task


@dataclass(frozen=True)
class Progress:
    """A run has done so many rounds.

    Attributes:
        cell: the run.
        rounds: how many.
        result: what it came to, if it is finished.
    """

    cell: Cell
    rounds: int
    result: RunResult | None = None


@dataclass(frozen=True)
class Failure:
    """A run cannot be done.

    Attributes:
        sentence: why.
    """

    sentence: str


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def run_all(tasks: Sequence[Task], workers: int) -> Generator[Progress]:
    """Run tasks in processes of their own, and tell of each round.

    Guarantees: no process is left when the iterator ends, is closed or raises, nor when this
    process is killed; each uses one thread, so that as many as there are cores do not disturb each
    other.

    Args:
        tasks: what to run; begun in this order.
        workers: how many processes; no more than tasks are started.

    Raises:
        WorkerError: a run cannot be done, or its process died; the others are stopped.
    """
    waiting = list(reversed(tasks))
    with _started(min(workers, len(tasks))) as started:
        busy = {worker: _give(worker, waiting.pop()) for worker in started}
        while busy:
            for worker in _ready(busy):
                message = _received(worker, busy[worker])
                yield message
                if message.result is not None:
                    del busy[worker]
                    if waiting:
                        busy[worker] = _give(worker, waiting.pop())


@dataclass(frozen=True, eq=False)
class _Worker:
    """A process, and this end of the pipe to it."""

    process: BaseProcess
    connection: Connection


@contextmanager
def _started(number: int) -> Iterator[list[_Worker]]:
    """So many workers, who are stopped at the end of the block."""
    # A fork would take over threads and locks of torch in whatever state they are.
    context = multiprocessing.get_context("spawn")
    workers = []
    try:
        for _ in range(number):
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there,), daemon=True)
            process.start()
            there.close()  # so that each end notices when the other is gone
            workers.append(_Worker(process, here))
        yield workers
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()
            worker.connection.close()


def _give(worker: _Worker, task: Task) -> Task:
    worker.connection.send(task)
    return task


def _ready(workers: Iterable[_Worker]) -> list[_Worker]:
    """Workers with something to say, or who died; waits until there is one."""
    by_connection = {worker.connection: worker for worker in workers}
    ready = wait(list(by_connection))
    return [worker for connection, worker in by_connection.items() if connection in ready]


def _received(worker: _Worker, task: Task) -> Progress:
    where = f"arm {task.cell.arm.name!r}, seed {task.cell.seed}"
    try:
        message: Progress | Failure = worker.connection.recv()
    except (EOFError, ConnectionResetError) as error:
        worker.process.join()
        raise WorkerError(
            f"{where}: its process ended with exit code {worker.process.exitcode}; "
            "finished runs are kept, and the same command goes on with the others"
        ) from error
    if isinstance(message, Failure):
        raise WorkerError(f"{where}: {message.sentence}")
    return message


def work(connection: Connection) -> None:
    """Run what comes through a pipe until nobody is at its other end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started this process will end it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    loaded: dict[str, Population] = {}
    with threadpool_limits(1), suppress(EOFError, ConnectionError):
        while True:
            task: Task = connection.recv()
            connection.send(_done(task, loaded, connection))


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however long a round takes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _done(task: Task, loaded: dict[str, Population], connection: Connection) -> Progress | Failure:
    data = task.study.config_of(task.cell).data
    try:
        if repr(data) not in loaded:
            loaded.clear()  # the memory of one population
            loaded[repr(data)] = load_population(data.name, data.options)
    except (FedprivError, OSError) as error:
        return Failure(str(error))
    try:
        result = run_task(
            task,
            loaded[repr(data)],
            lambda rounds: connection.send(Progress(task.cell, rounds)),
        )
        return Progress(task.cell, result.rounds, result)
    except FedprivError as error:
        return Failure(str(error))
