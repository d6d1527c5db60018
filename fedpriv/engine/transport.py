"""The in-process transport: users train together in chunks and are added into a sum."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.store import UserStore
from fedpriv.engine.chunk_sum import ChunkSum
from fedpriv.engine.chunks import blank, chunks, even, sizes_of
from fedpriv.engine.diagnostics import (
    ChunkDiagnostics,
    SimulationOnlyDiagnostics,
    diagnose_round,
)
from fedpriv.engine.matmul import blas_threads
from fedpriv.engine.metric_checks import check_metrics
from fedpriv.engine.precision import Activations, activations_named
from fedpriv.engine.processes import TrainerProcess, can_fork, in_processes, packed
from fedpriv.engine.start import Start
from fedpriv.engine.task import Task
from fedpriv.engine.threads import in_threads, one_thread
from fedpriv.engine.trainer import Trainer
from fedpriv.engine.updates import whole
from fedpriv.errors import InvalidValueError
from fedpriv.federated.transport import PartialSum, RoundRequest, Transport

Job = tuple[int, npt.NDArray[np.int64]]
"""Number of a chunk, and positions of its users."""


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
    """Trains the users of a store in this process.

    Each chunk is one partial sum; no update outlives its chunk. If a chunk fails, its users are
    trained one by one, and those that fail contribute zero.

    Attributes:
        task: model and loss.
        users: the enrolled users' data.
        device: where to train.
        chunk_memory: bytes that a chunk of users may take, roughly; it decides how many users
            train together. On a CPU, as many chunks train side by side as torch has threads, unless
            training draws random numbers.
        hosted: positions in the enrolled population of the store's users, if the store holds a
            part of it; None if position i of the store is user i.
        observer: called at the end of each round with figures that are not private; None, as in
            every deployment, computes none.
        activations: "float32" or "bfloat16", of the model while users train; sums, clipping and
            metrics are the same.
        processes: whether chunks that train side by side do so in processes, not in threads: these
            are forked from this one before the first round and end with the transport. Only on
            Linux; elsewhere threads do it.

    Raises:
        InvalidValueError: activations have another name.
    """

    task: Task
    users: UserStore
    device: torch.device
    chunk_memory: int
    hosted: npt.NDArray[np.int64] | None = None
    observer: Callable[[SimulationOnlyDiagnostics], None] | None = None
    activations: Activations = "float32"
    processes: bool = False

    def __post_init__(self) -> None:
        activations_named(self.activations)

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sum of the clipped contributions of each chunk.

        Raises:
            InvalidValueError: a metric is unknown or does not fit.
            ModelError: a metric cannot be computed on a row of zeros.
        """
        seen: list[ChunkDiagnostics] = []
        # One behind: a GPU works on the next chunk while the sum of the last one is awaited.
        last: ChunkSum | None = None
        for chunk in self._sums(request):
            seen.extend(chunk.diagnostics)
            if last is not None:
                yield last.partial
            last = chunk
        if last is not None:
            yield last.partial
        if self.observer is not None:
            self.observer(diagnose_round(request, seen))

    def raw_update(self, request: RoundRequest) -> tuple[dict[str, npt.NDArray[np.float32]], float]:
        """Train the one user of the store for someone else to clip.

        `request.clipping.contribution` of what is returned is what `collect` yields, up to the
        rounding of its sums.

        Returns:
            The user's tensors as training left them, unclipped, also where they are not finite:
            update and metrics minus their centres, all of the clipping's layout but the indicator,
            in its order. And the user's weight.

        Raises:
            InvalidValueError: the store has several users, its user is not in the request or has
                no examples, or a metric is unknown or does not fit.
            ModelError: a metric cannot be computed on a row of zeros.
            Exception: whatever training raises; its text may hold the user's data.
        """
        if self.users.population != 1:
            raise InvalidValueError(
                f"the store has {self.users.population} users; only one can send a raw update"
            )
        self._check(request)
        users = self._positions(request.users)
        sizes = sizes_of(self.users, users)
        if not np.any(sizes):
            raise InvalidValueError("the user is not in the request, or has no examples")
        start = Start.of(request, self._trainer.constants, self.device)
        tensors = whole(self._trainer.sent(request, start, users))
        (weight,) = request.weighting.of(sizes).tolist()
        asked = request.clipping.indicator
        names = [n for n in request.clipping.layout.names if asked is None or n != asked.tensor]
        return {name: tensors[name][0].cpu().numpy() for name in names}, weight

    def _check(self, request: RoundRequest) -> None:
        """Refuse what cannot be answered, before any user's data are touched."""
        if request.metrics:
            check_metrics(self.task, request.metrics, request.clipping, blank(self.users))

    def _sums(self, request: RoundRequest) -> Iterator[ChunkSum]:
        """Sums of chunks in their order, some of them side by side."""
        self._check(request)
        users, threads = self._positions(request.users), self._threads
        sizes = sizes_of(self.users, users)
        lanes = even(len(users), self._trainer.lanes(request), threads)
        jobs = list(enumerate(chunks(users, sizes, request.local, lanes)))
        if min(threads, len(jobs)) <= 1:
            work = self._work(request)
            with blas_threads(torch.get_num_threads()):
                for job in jobs:
                    yield from work(self._trainer, job)
            return
        if self.processes and can_fork():
            yield from self._sums_of_processes(request, jobs)
            return
        trainers = self._trainers
        with one_thread(), blas_threads(1):
            for sums in in_threads(trainers, jobs, self._work(request)):
                yield from sums

    def _work(self, request: RoundRequest) -> Callable[[Trainer, Job], list[ChunkSum]]:
        """What there is to do for each chunk of a round."""
        start = Start.of(request, self._trainer.constants, self.device)

        def work(trainer: Trainer, job: Job) -> list[ChunkSum]:
            number, chunk = job
            return trainer.sums(request, start, chunk, f"chunk {number}")

        return work

    def _sums_of_processes(self, request: RoundRequest, jobs: list[Job]) -> Iterator[ChunkSum]:
        """Sums of chunks, by processes that are kept for the next round if all goes well."""
        given, dimension = packed(request), request.clipping.layout.dimension
        processes = [p for p in self._processes if p.dimension == dimension][: self._threads]
        self._processes.clear()
        while len(processes) < self._threads:
            processes.append(TrainerProcess(self._trainer, given, dimension))
        for sums in in_processes(processes, given, jobs):
            yield from sums
        self._processes.extend(processes)

    def _positions(self, users: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions in the store of those users that are in it."""
        if self.hosted is None:
            return users[(users >= 0) & (users < self.users.population)]
        return np.flatnonzero(np.isin(self.hosted, users))

    @property
    def _threads(self) -> int:
        """Chunks that train side by side: torch's threads of a CPU, unless users share dice."""
        alone = self.device.type != "cpu" or self._trainer.draws
        return 1 if alone else torch.get_num_threads()

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
    def _processes(self) -> list[TrainerProcess]:
        """Those that are idle."""
        return []

    @cached_property
    def _trainers(self) -> list[Trainer]:
        """One for each thread."""
        return [self._trainer, *(self._trainer.twin() for _ in range(self._threads - 1))]
