"""The in-process transport: users train together in chunks and are added into a sum."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

from fedpriv.data.population import UserStore
from fedpriv.engine.batches import Integers, by_rung
from fedpriv.engine.isolation import Isolation
from fedpriv.engine.metrics import (
    ChunkDiagnostics,
    SimulationOnlyDiagnostics,
    check_metrics,
    diagnose_round,
)
from fedpriv.engine.task import (
    Activations,
    RoundParameters,
    Task,
    activations_named,
    plain_arithmetic,
    refuse_flushing_threads,
)
from fedpriv.engine.trainer import Chunk, ChunkSum, Trainer, blank, sizes_of
from fedpriv.engine.workers import (
    TrainerProcess,
    can_fork,
    computing_with,
    in_processes,
    packed,
)
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.round import PartialSum, RoundRequest, Transport

_T = TypeVar("_T")


def device_named(name: str) -> torch.device:
    """Device of a name: "auto" takes CUDA where there is one.

    Raises:
        InvalidValueError: torch does not know the device, or this machine has none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidValueError(
            f"device is {name!r}, which this machine does not have; legal are auto, cpu and cuda"
        ) from error
    return device


@dataclass(frozen=True)
class InProcessTransport(Transport):
    """Trains the users of a store on this machine.

    Each chunk is one partial sum; no update outlives its chunk. If a chunk fails, parts of it are
    tried, and users that fail alone contribute zero. Chunks with the least work come first.

    Attributes:
        task: model and loss.
        users: the enrolled users' data.
        device: where to train.
        chunk_memory: bytes that a chunk of users may take, roughly; it decides how many users
            train together.
        hosted: positions in the enrolled population of the store's users, if the store holds a
            part of it; None if position i of the store is user i.
        observer: called at the end of each round with figures that are not private; None, as in
            every deployment, computes none.
        activations: "float32" or "bfloat16", of the model while users train; sums, clipping and
            metrics are the same.
        processes: how many train side by side on a CPU, with an equal share of torch's threads
            each: they are forked from this one before the first round that has work for two, and
            end with the transport. None: one for each thread. Only on Linux; elsewhere, on a GPU,
            and if it is 1, this process trains.

    Raises:
        InvalidValueError: activations have another name, or there is no process.
    """

    task: Task
    users: UserStore
    device: torch.device
    chunk_memory: int
    hosted: Integers | None = None
    observer: Callable[[SimulationOnlyDiagnostics], None] | None = None
    activations: Activations = "float32"
    processes: int | None = None

    def __post_init__(self) -> None:
        activations_named(self.activations)
        if self.processes is not None and self.processes < 1:
            raise InvalidValueError(f"processes is {self.processes}; it must be at least 1")

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sum of the contributions of each chunk.

        Raises:
            InvalidValueError: a metric is unknown or does not fit, or threads of torch take
                subnormal numbers for zero.
            ModelError: the model cannot be trained, or a metric not be computed on a row of zeros.
        """
        for _, partial in self.by_chunk(request):
            yield partial

    def by_chunk(self, request: RoundRequest) -> Iterator[tuple[Integers, PartialSum]]:
        """Yield the users of each chunk, as positions in the population, and their sum.

        Users that failed are among them; users without examples are in no chunk.

        Raises:
            InvalidValueError: as of `collect`.
            ModelError: likewise.
        """
        seen = list[ChunkDiagnostics]()
        trained = self._sums(request)
        # A GPU works on the next chunk while the sum of the last one is awaited.
        for users, total in trained if self.device.type == "cpu" else _one_behind(trained):
            seen.extend(total.diagnostics)
            yield users if self.hosted is None else self.hosted[users], total.partial
        if self.observer is not None:
            self.observer(diagnose_round(request, seen))

    def _sums(self, request: RoundRequest) -> Iterator[tuple[Integers, ChunkSum]]:
        """Users of chunks and their sums, in the order of chunks, some found side by side."""
        if request.metrics:  # refused before any user's data are touched
            check_metrics(self.task, request.metrics, request.clipping, blank(self.users))
        start = RoundParameters.of(request, self._trainer.constants, self.device)
        with computing_with(self._threads):
            with plain_arithmetic(self.device):
                refuse_flushing_threads()
            chunks = list(self._chunks(request, start))
            if min(self._side_by_side, len(chunks)) <= 1:
                for chunk in chunks:
                    yield chunk.users, self._trainer.sum_of(request, start, chunk)
                return
        # Processes are kept for the next round if all goes well.
        given, dimension = packed(request), request.clipping.layout.dimension
        processes = [process for process in self._workers if process.fits(given, dimension)]
        self._workers.clear()
        while len(processes) < self._side_by_side:
            processes.append(TrainerProcess(self._trainer, given, dimension, self._threads))
        for chunk, total in zip(chunks, in_processes(processes, given, chunks), strict=True):
            yield chunk.users, total
        self._workers.extend(processes)

    def _chunks(self, request: RoundRequest, start: RoundParameters) -> Iterator[Chunk]:
        """The users of a request in chunks; there is work for all processes where that can be."""
        if self.hosted is None:
            known = (request.users >= 0) & (request.users < self.users.population)
            users = request.users[known]
        else:
            users = np.flatnonzero(np.isin(self.hosted, request.users))
        measured = bool(request.metrics) or self.observer is not None
        rungs = list(by_rung(sizes_of(self.users, users), request.local, measured=measured))
        work = [len(some) * rung.steps * rung.width for rung, some in rungs]
        for (rung, some), share in zip(rungs, work, strict=True):
            parts = round(self._side_by_side * share / sum(work))
            yield from self._isolation.chunks(request, start, rung, users[some], max(1, parts))

    @cached_property
    def _side_by_side(self) -> int:
        """Chunks that train side by side."""
        if self.device.type != "cpu" or not can_fork():
            return 1
        return self.processes or torch.get_num_threads()

    @cached_property
    def _threads(self) -> int:
        """Threads that a chunk trains with."""
        return max(1, torch.get_num_threads() // self._side_by_side)

    @cached_property
    def _isolation(self) -> Isolation:
        return Isolation(self._trainer)

    @cached_property
    def _trainer(self) -> Trainer:
        return Trainer.of(
            self.task,
            self.users,
            self.hosted,
            self.device,
            self.chunk_memory,
            self.activations,
            observed=self.observer is not None,
        )

    @cached_property
    def _workers(self) -> list[TrainerProcess]:
        """Those that are idle."""
        return []


def _one_behind(items: Iterable[_T]) -> Iterator[_T]:
    """Each item once the next one is begun."""
    last: list[_T] = []
    for item in items:
        yield from last
        last = [item]
    yield from last
