"""The in-process transport: users train on this machine, in several processes in parallel."""

import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.places import refuse_shared
from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import (
    Activations,
    activations_named,
    plain_arithmetic,
    refuse_flushing_threads,
)
from fedpriv.engine.forks import Crew, Fork, can_fork, computing_with
from fedpriv.engine.measuring import SimulationOnlyDiagnostics, check_metrics, diagnose_round
from fedpriv.engine.roads import Path, Road, road_of
from fedpriv.engine.schedule import Integers
from fedpriv.engine.task import Task
from fedpriv.engine.trainer import ChunkSum, SimulationOnlyDropped, Trainer, blank, sizes_of
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.round import PartialSum
from fedpriv.support.checks import check_ranges, hold_numbers, require
from fedpriv.training.request import RoundRequest, Transport

_log = logging.getLogger(__name__)

_CHUNK_MEBIBYTES = 128  # on a CPU, where more memory makes training no faster
_SMALL_SAMPLE, _LARGE_SAMPLE = 8, 64  # users to try before a simulation's first round


@dataclass(frozen=True)
class Engine:
    """The resources for training; they affect no guarantee, and results only by rounding.

    InvalidValueError: a setting is invalid, or this machine lacks the device or activations.
    """

    device: str = "auto"  # such as "cpu" or "cuda"; "auto": CUDA if there is a GPU
    chunk_mebibytes: int | None = None  # for users who train together; None: depends on the device
    activations: Activations = "float32"  # "bfloat16", or "tf32" on a GPU
    processes: int | None = None  # on a CPU; None: one for each of torch's threads
    # "alone": one user after another; "together": users side by side; "auto": the faster of these,
    # measured unless the run has a seed.
    path: Path = "auto"

    def __post_init__(self) -> None:
        hold_numbers(self)
        require(
            self.path in get_args(Path),
            f"path is {self.path!r}; it must be one of {', '.join(get_args(Path))}",
        )
        check_ranges(self, chunk_mebibytes="whole?", processes="whole?")
        activations_named(self.activations, device_named(self.device))


def device_named(name: str) -> torch.device:
    """Return the device with this name; for "auto", CUDA if there is a GPU, else the CPU.

    InvalidValueError: the device is not on this machine.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        choices = "auto, cpu or cuda" if torch.cuda.is_available() else "auto or cpu"
        raise InvalidValueError(
            f"device is {name!r}, which torch does not find here; it must be {choices}"
        ) from error
    return device


def chunk_memory_of(mebibytes: int | None, device: torch.device) -> int:
    """Return the bytes that a chunk may take, from a number of MiB, or a default for the device.

    The default on a CPU is 128 MiB. On a GPU it is a quarter of the free memory, since other
    processes may use the GPU too, and the need of a chunk is only estimated.
    """
    if mebibytes is None and device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return max(1, free // 4)
    return (_CHUNK_MEBIBYTES if mebibytes is None else mebibytes) * 2**20


@dataclass(frozen=True)
class InProcessTransport(Transport):
    """Trains the users of a store on this machine.

    No update outlives its chunk of users. A user for whom anything fails contributes zero, even if
    they end the process that trains them. InvalidValueError: a setting is invalid.
    """

    task: Task
    users: UserStore  # the enrolled users' data
    device: torch.device  # for training
    chunk_memory: int  # approximate bytes for users who train together
    # Positions of the store's users in the enrolled population; None: the store holds all of it.
    hosted: Integers | None = None
    # Called at the end of each round with figures that are not private; None in every deployment.
    observer: Callable[[SimulationOnlyDiagnostics], None] | None = None
    # Called with users who count as zero; None in every deployment.
    on_dropped: Callable[[SimulationOnlyDropped], None] | None = None
    activations: Activations = "float32"  # of the model during training
    # Number of processes on a CPU, with one thread each; None: one for each of torch's threads.
    # They are forked before the first round that has work for two, and end in `release_resources`,
    # or with this process. With 1, on a GPU, and if forks are impossible, this process trains with
    # torch's threads.
    processes: int | None = None
    limited: bool = False  # whether rounds limit the time of users, who then train in forks
    path: Path = "auto"  # whether users train alone or side by side
    # Whether to measure which is faster, instead of following a fixed rule. Then processes may
    # choose differently, and their sums differ by rounding.
    timed: bool = False
    # Public facts that determine shapes: the expected number of users in a round, and the largest
    # number of rows of a user. None: all users of the store, and any number.
    cohort: int | None = None
    most_rows: int | None = None
    # How users train, by kind of round and machine; may include decisions of other processes.
    roads: dict[Hashable, Road] = field(default_factory=dict, compare=False)
    _idle: list[Fork] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        activations_named(self.activations, self.device)
        refuse_shared(self.users, "whole users train")

    def prepare(self, request: RoundRequest) -> None:
        """Choose how users train, from public facts; ModelError or InvalidValueError on failure."""
        self.road(request)

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield sums of the contributions of users."""
        for _, partial in self.by_chunk(request):
            yield partial

    def release_resources(self) -> None:
        """End the forked processes."""
        self._idle.clear()

    def by_chunk(
        self, request: RoundRequest, limit: float | None = None
    ) -> Iterator[tuple[Integers, PartialSum]]:
        """Yield users who are done, as positions in the population, and their sum.

        If the transport is `limited` and processes can be forked, a user who takes more than
        `limit` seconds contributes zero.
        """
        diagnostics = list[npt.NDArray[np.float64]]()
        for users, chunk_sum in self._sums(request, limit):
            diagnostics.extend(chunk_sum.diagnostics)
            for reason in chunk_sum.reasons if self.on_dropped is None else ():
                _log.warning("a user counts as zero: %s", reason)
            if self.on_dropped is not None and chunk_sum.dropped is not None:
                self.on_dropped(chunk_sum.dropped)
            yield users if self.hosted is None else self.hosted[users], chunk_sum.partial
        if self.observer is not None:
            self.observer(diagnose_round(request, diagnostics))

    def simulation_only_look(
        self, request: RoundRequest
    ) -> tuple[SimulationOnlyDropped | None, ...]:
        """Train some users as a round would; return why each would count as zero, or None.

        They are a random sample of all users with rows: 8 users, or 64 if one of these 8 counts as
        zero. The result is not private, and deployments must not use this.
        """
        with_rows = np.flatnonzero(self.users.sizes)
        size = min(_LARGE_SAMPLE, len(with_rows))
        sample = np.random.default_rng(0).choice(with_rows, size, replace=False).tolist()
        flaws = [self._flaw(request, user) for user in sample[:_SMALL_SAMPLE]]
        rest = sample[_SMALL_SAMPLE:] if any(flaws) else []
        return (*flaws, *(self._flaw(request, user) for user in rest))

    def _flaw(self, request: RoundRequest, user: int) -> SimulationOnlyDropped | None:
        """Train a user alone, where rounds train; return why the user would count as zero."""
        rows = slice(*self.users.offsets[user : user + 2])
        fields = {name: torch.tensor(self.users.fields[name][rows]) for name in self.task.fields}
        counts = self.task.counts(self.task.given(fields)[1])
        if counts is not None and not counts.any():
            why = f"all its targets are {self.task.ignore_index}, which the loss ignores"
            return SimulationOnlyDropped(user, why)
        for _, chunk_sum in self._sums(replace(request, users=np.array([user])), None):
            if chunk_sum.dropped is None and not chunk_sum.partial.total.any():
                return SimulationOnlyDropped(user, "its update is zero, NaN or infinite")
            return chunk_sum.dropped
        return None

    def road(self, request: RoundRequest) -> Road:
        """Return how users train in such rounds; ModelError or InvalidValueError if they cannot."""
        expected = self.users.population if self.cohort is None else self.cohort
        local = replace(request.local, learning_rate=1.0)
        round_kind = local, request.measured, bool(request.control), expected, self.most_rows
        machine = self.device, self.chunk_memory, self.activations, self._side_by_side, self.path
        if (kind := (*round_kind, *machine, self.timed)) not in self.roads:
            if request.measured:
                check_metrics(self.task, request.measured, request.clipping, blank(self.users))
            with computing_with(self._threads), plain_arithmetic(self.device):
                if self.device.type == "cpu":
                    refuse_flushing_threads()
                limits = -(-expected // self._side_by_side), self.most_rows
                road = road_of(self._trainer, request, self.path, *limits, timed=self.timed)
            _log.info("users train %s", road)
            self.roads[kind] = road
        return self.roads[kind]

    def _sums(
        self, request: RoundRequest, limit: float | None
    ) -> Iterator[tuple[Integers, ChunkSum]]:
        """Yield users who are done, as positions in the store, and their sums."""
        road = self.road(request)
        if self.hosted is None:
            is_valid = (request.users >= 0) & (request.users < self.users.population)
            users = request.users[is_valid]
        else:
            users = np.flatnonzero(np.isin(self.hosted, request.users))
        trainer = self._trainer
        sizes, processes = sizes_of(self.users, users), self._side_by_side
        chunks = road.chunks(trainer, request.local, users, sizes, processes)
        if not chunks:
            return
        limit = limit if self._forking else None
        if limit is None and processes <= 1:
            with computing_with(self._threads):
                chunk_sum = trainer.sum_of(request, chunks)
            yield np.concatenate([chunk.users for chunk in chunks]), chunk_sum
            return
        idle = [self._idle.pop() for _ in range(min(processes, len(self._idle)))]
        crew = Crew(idle, processes, trainer, request, limit)
        yield from crew.sums(chunks)
        self._idle.extend(crew.forks)

    @property
    def _forking(self) -> bool:
        """True if users train in forks, which can be ended if they take too long."""
        return self.limited and self.device.type == "cpu" and can_fork()

    @cached_property
    def _side_by_side(self) -> int:
        """Number of chunks that train in parallel."""
        if self.device.type != "cpu":
            return 1
        if not can_fork():
            if (self.processes or 1) > 1:
                _log.warning("users train in 1 process, not %d: none can be forked", self.processes)
            return 1
        return self.processes or torch.get_num_threads()

    @cached_property
    def _threads(self) -> int:
        """Number of threads for each chunk, also in trials, because it affects rounding."""
        # With several threads, a fork would wait forever for the threads of its parent. With a GPU,
        # a CPU computes so little that waking threads takes longer.
        single = self.device.type == "cpu" and self._side_by_side == 1
        return torch.get_num_threads() if single and not self._forking else 1

    @cached_property
    def _trainer(self) -> Trainer:
        return Trainer(
            self.task.apart(),
            self.users,
            self.hosted,
            self.device,
            self.chunk_memory,
            self.activations,
            observed=self.observer is not None,
            naming=self.on_dropped is not None,
        )
