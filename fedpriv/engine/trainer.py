"""The contributions of users, side by side or alone, and their sums.

A user for whom anything raises contributes zero.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.population import UserStore
from fedpriv.engine.arithmetic import (
    Activations,
    generators_apart,
    plain_arithmetic,
    seed_generators,
    tf32,
)
from fedpriv.engine.descent import AloneModel, same_for_all
from fedpriv.engine.examples import Chunk, Examples, held_on, lent
from fedpriv.engine.graphs import Graphs
from fedpriv.engine.indices import Indices
from fedpriv.engine.measuring import Blocks, Measuring, diagnose_users, group_norms, user_metrics
from fedpriv.engine.schedule import Integers, Schedule
from fedpriv.engine.side_by_side import Group, SideBySideModel
from fedpriv.engine.task import Inputs, RoundParameters, Task, outputs_of
from fedpriv.privacy.clipping_torch import (
    TorchTensors,
    Updates,
    add_contributions,
    integer_sum,
    kernels_on,
    lane_weights,
    sum_by_kernels,
    to_device,
)
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS
from fedpriv.privacy.round import PartialSum
from fedpriv.training.request import RoundRequest

_PIECES = 8  # into which a chunk that fails is split
_CLIPPED_AT_ONCE = 2**18  # numbers in the updates of users who train alone
_TOTAL, _WEIGHTS = "total", "weights"  # names of the output, and an input, of graphs of sums


@dataclass(frozen=True)
class SimulationOnlyDropped:
    """A user who counts as zero. Publishing it breaks the guarantee of that user."""

    user: int  # position in the store
    reason: str  # may contain the user's data


@dataclass(frozen=True)
class ChunkSum:
    """The partial sum of some users, and information for simulations only."""

    partial: PartialSum
    diagnostics: tuple[npt.NDArray[np.float64], ...] = ()
    dropped: SimulationOnlyDropped | None = None  # the first dropped user, if `Trainer.naming`
    reasons: tuple[str, ...] = ()  # why users count as zero, without their data


class _Sums:
    """The sum of the contributions so far, in a round with this start."""

    def __init__(self, request: RoundRequest, start: RoundParameters) -> None:
        self.request, self.start = request, start
        self.total = np.zeros(request.clipping.layout.dimension)  # whole numbers below 2^53
        self.users = self.weight = 0
        self.diagnostics = list[npt.NDArray[np.float64]]()
        self.dropped: SimulationOnlyDropped | None = None
        self.reasons = list[str]()
        self.unclipped = list[tuple[Chunk, Updates, Integers]]()  # on a CPU, with weights
        self.pending = list[Callable[[], npt.NDArray[np.int64]]]()  # sums on a GPU

    def wait(self, limit: int) -> None:
        """Add pending sums until at most `limit` remain."""
        while len(self.pending) > limit:
            self.total += self.pending.pop(0)()

    def done(self, name: str) -> ChunkSum:
        """Return the complete sum, under this name."""
        self.wait(0)
        partial = PartialSum(name, self.users, self.total.astype(np.int64), self.weight)
        return ChunkSum(partial, tuple(self.diagnostics), self.dropped, tuple(self.reasons))


def blank(users: UserStore, rows: int = 1) -> dict[str, npt.NDArray[np.generic]]:
    """Return rows of zeros for trials, since users' data must not decide whether a round runs."""
    return {n: np.zeros((rows, *f.shape[1:]), f.dtype) for n, f in users.fields.items()}


def sizes_of(store: UserStore, users: Integers) -> Integers:
    """Return the numbers of rows of some users, [n], at a cost independent of the population."""
    return store.offsets[users + 1] - store.offsets[users]


@dataclass(frozen=True)
class Trainer:
    """Trains chunks of users of a store, one chunk at a time."""

    task: Task
    users: UserStore
    hosted: Integers | None  # positions of the store's users in the population; None: the same
    device: torch.device
    memory: int  # approximate bytes for a chunk
    activations: Activations
    observed: bool = False  # whether to compute diagnostics
    naming: bool = False  # whether to report users who count as zero

    @cached_property
    def constants(self) -> TorchTensors:
        """Frozen parameters and buffers, on the device."""
        return self.task.constants(self.device)

    @cached_property
    def resident(self) -> TorchTensors | None:
        """The store's fields as tensors on the device, or None.

        On a GPU they are a copy, with a row of zeros at the end, if enough memory remains free.
        Fields that are mapped from files are assumed to be too large.
        """
        columns = {name: self.users.fields[name] for name in self.task.fields}
        if any(isinstance(column, np.memmap) for column in columns.values()):
            return None
        if self.device.type == "cpu":
            return lent(columns)
        if self.device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(self.device)
        if sum(column.nbytes for column in columns.values()) > free // 4:  # the rest is for chunks
            return None
        return held_on(self.device, columns)

    @cached_property
    def indices(self) -> Indices:
        """Finds users with integers that the task refuses."""
        return Indices(self.task, self.users)

    @cached_property
    def graphs(self) -> Graphs | None:
        """The graphs of chunks; None unless the device is a GPU."""
        if self.device.type != "cuda":
            return None
        return Graphs(self.device, self.constants, self.memory)

    @cached_property
    def alone(self) -> AloneModel:
        """The model of users who train alone."""
        return AloneModel(self.task, self.device)

    @cached_property
    def side_by_side(self) -> SideBySideModel:
        """The model of users who train side by side; MixingError if they cannot."""
        return SideBySideModel.of(self.task, self.alone.model, *self.two_rows)

    @cached_property
    def measured(self) -> SideBySideModel:
        """The model of users side by side, in evaluation mode."""
        return SideBySideModel.of(self.task, self.alone.model, *self.two_rows, training=False)

    @property
    def two_rows(self) -> tuple[Inputs, Tensor]:
        """Two rows of zeros, inputs and targets."""
        rows = blank(self.users, 2)
        tensors = {n: torch.from_numpy(rows[n]).to(self.device) for n in self.task.fields}
        return self.task.given(tensors)

    def begin(self, request: RoundRequest) -> RoundParameters:
        """Begin a round, and return its initial parameters on the device."""
        if self.graphs is not None:
            self.graphs.begin(request.clipping)
        parameters, statistics, control = (
            {name: to_device(torch.tensor(array), self.device) for name, array in tensors.items()}
            for tensors in (request.parameters, request.statistics, request.control)
        )
        personal, constants = self.task.personal, self.constants | statistics
        parameters |= {name: constants.pop(name) for name in personal}
        return RoundParameters(parameters, constants, control, personal)

    def sum_of(self, request: RoundRequest, chunks: Sequence[Chunk]) -> ChunkSum:
        """Return the sum of the contributions in some chunks, named after the first user.

        If training fails, or memory is insufficient, a chunk is split into eighths, and so on. A
        user for whom training alone fails counts as zero.
        """
        with plain_arithmetic(self.device), generators_apart(device=self.device):
            sums = _Sums(request, self.begin(request))
            for chunk in chunks:
                self._add(sums, chunk)
                sums.wait(1)  # a GPU trains one chunk while the sum of another is copied
            self._clip(sums)
            return sums.done(str(chunks[0].users[0]))

    def _add(self, sums: _Sums, chunk: Chunk) -> None:
        """Add the contributions of a chunk's users."""
        request, start, clipping = sums.request, sums.start, sums.request.clipping
        examples = self._examples(request, chunk)
        weights = np.minimum(examples.counts, clipping.weight_cap)
        try:
            if self.device.type != "cpu":
                self.indices.check(chunk.users)
            total = None
            if self.graphs is not None and chunk.shapes:
                total = self._total(request, start, examples, weights)
            if total is None:
                updates = self._sent(request, start, examples)
                if self.observed:
                    rows = diagnose_users(self._blocks(start, examples), updates, request)
                    sums.diagnostics.append(rows[: len(chunk.users)].cpu().numpy())
        except Exception as error:
            if self.graphs is not None and isinstance(error, torch.OutOfMemoryError):
                self.graphs.clear()
            if len(chunk.users) == 1:
                self._drop(sums, chunk, f"training raised {type(error).__name__}", error)
            else:
                for users in np.array_split(chunk.users, min(_PIECES, len(chunk.users))):
                    self._add(sums, replace(chunk, users=users))
            return
        # Training is complete, so later errors are not due to a user, and end the round.
        sums.users, sums.weight = sums.users + len(weights), sums.weight + int(weights.sum())
        if self.device.type == "cpu":
            sums.unclipped.append((chunk, updates, weights))
            if chunk.shapes or len(sums.unclipped) * clipping.layout.dimension >= _CLIPPED_AT_ONCE:
                self._clip(sums)
            return
        fetch = _fetched(integer_sum(updates, clipping, weights) if total is None else total)

        def summed() -> npt.NDArray[np.int64]:
            total, retrain = fetch(), partial(self._sent, request, start, examples)
            self._look_for_lost(sums, chunk, _contributors(request, total), retrain)
            return total

        sums.pending.append(summed)

    def _clip(self, sums: _Sums) -> None:
        """Clip updates and add them up; joining those of users alone takes less time."""
        if not sums.unclipped:
            return
        chunks, parts, weights = zip(*sums.unclipped, strict=True)
        sums.unclipped.clear()
        updates, sizes = parts[0], [len(chunk.users) for chunk in chunks]
        if len(parts) > 1:
            pairs = [*zip(parts, sizes, strict=True)]
            updates = {name: torch.cat([u[name][:size] for u, size in pairs]) for name in updates}
        previous = _contributors(sums.request, sums.total)
        add_contributions(sums.total, updates, sums.request.clipping, np.concatenate(weights))
        contributors = _contributors(sums.request, sums.total) - previous
        merged = replace(chunks[0], users=np.concatenate([chunk.users for chunk in chunks]))
        self._look_for_lost(sums, merged, contributors, lambda: updates)

    def _look_for_lost(
        self, sums: _Sums, chunk: Chunk, contributors: int, compute: Callable[[], Updates]
    ) -> None:
        """Record the first user whose update is not finite, unless all users contributed."""
        expected = len(chunk.users) if CONTRIBUTORS in sums.request.metrics else 0
        if self.naming and sums.dropped is None and contributors < expected:
            updates = compute()
            norms = torch.stack([*group_norms(updates, sums.request.clipping.sent).values()], 1)
            place = int((~torch.isfinite(norms).all(1)).nonzero()[0])
            rest = replace(chunk, users=chunk.users[place:])
            first = (n for n, u in updates.items() if not u[place : place + 1].isfinite().all())
            metrics = {metric.tensor: f"metric {metric.name!r}" for metric in sums.request.measured}
            self._drop(sums, rest, f"its {metrics.get(next(first, ''), 'update')} is not finite")

    def _drop(self, sums: _Sums, chunk: Chunk, reason: str, error: Exception | None = None) -> None:
        """Record that the first user of a chunk counts as zero."""
        sums.reasons.append(reason)  # not the text of the error, which may contain the user's data
        if not self.naming or sums.dropped is not None:
            return
        user = int(chunk.users[0])
        for name, column in self.users.examples_of(user).items():
            if column.dtype.kind == "f" and not np.isfinite(column).all():
                reason = f"its field {name!r} holds NaN or infinity"
        sums.dropped = SimulationOnlyDropped(user, f"{reason}: {error}" if error else reason)

    def sent(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        store: UserStore | None = None,
    ) -> Updates:
        """Return the unclipped contributions of users, of another store if given, [L, *shape]."""
        with plain_arithmetic(self.device), generators_apart(device=self.device):
            return self._sent(request, start, self._examples(request, chunk, store))

    def _sent(self, request: RoundRequest, start: RoundParameters, examples: Examples) -> Updates:
        moves = self._moved(request, start, examples)
        return self._reported(request, start, examples, moves)

    def _reported(
        self, request: RoundRequest, start: RoundParameters, examples: Examples, moves: Updates
    ) -> Updates:
        """Return the updates and metrics of users with these moves, [L, *shape] by name."""
        updates = {name: t for name, t in moves.items() if name not in start.personal}
        reported = TorchTensors()
        if request.measured:
            blocks, groups = self._blocks(start, examples), request.clipping.groups
            reported = user_metrics(self.task, blocks, request.measured, updates, groups)
        if CONTRIBUTORS in request.metrics:
            reported[CONTRIBUTORS.tensor] = torch.ones(examples.lanes, device=self.device)
        return {**updates, **reported}

    def _moved(self, request: RoundRequest, start: RoundParameters, examples: Examples) -> Updates:
        if self.graphs is None or not examples.chunk.shapes:
            return self._train(request, start, examples)

        def compute(start: RoundParameters, inputs: TorchTensors) -> Updates:
            return self._train(request, start, replace(examples, made_of=inputs))

        shape = examples.chunk.lean, examples.shape
        return self.graphs.computed(compute, request.local, shape, start, examples.made_of)

    def _total(
        self, request: RoundRequest, start: RoundParameters, examples: Examples, weights: Integers
    ) -> Tensor | None:
        """Return the sum of a chunk, [D], from a graph of the whole computation, or None."""
        kernels, clipping = kernels_on(self.device), request.clipping
        shape = examples.chunk.lean, examples.shape, clipping, request.measured, request.metrics
        if kernels is None or self.graphs is None or self.observed or not self.graphs.steady:
            return None
        if not self.graphs.may_capture(shape):
            return None

        def compute(start: RoundParameters, inputs: TorchTensors) -> Updates:
            captured = replace(examples, made_of=inputs)
            moves = self._train(request, start, captured)
            updates = self._reported(request, start, captured, moves)
            return {_TOTAL: sum_by_kernels(kernels, updates, clipping, inputs[_WEIGHTS])}

        by_lane = to_device(lane_weights(clipping, weights, examples.lanes), self.device)
        inputs = {**examples.made_of, _WEIGHTS: by_lane}
        return self.graphs.computed(compute, request.local, shape, start, inputs)[_TOTAL][:]

    def _train(self, request: RoundRequest, start: RoundParameters, examples: Examples) -> Updates:
        with tf32(allowed=True) if self.activations == "tf32" else nullcontext():
            if not examples.chunk.shapes:
                seed_generators(request.local_key, int(examples.users[0]), self.device)
                return self.alone.moved(start, examples, self.activations)
            return Group(self.side_by_side, start, examples, self.activations).trained()

    def _blocks(self, start: RoundParameters, examples: Examples) -> Blocks:
        """Yield the evaluation of users' rows by the model at the start."""
        if examples.chunk.shapes:
            lanes, model = examples.lanes, self.measured
            model.kept.copy_from(start.constants)
            run = partial(model.outputs, same_for_all(start.parameters, lanes), lanes)
            measuring = Measuring(self.task, model.kept.model, run)
            for x, y, exists in examples.blocks():
                model.kept.put_back()
                yield measuring.seen(x, y), exists
            return
        with self.alone.begun(start, training=False) as alone:
            measuring = Measuring(self.task, alone, partial(outputs_of, alone))
            for x, y, exists in examples.blocks():
                yield measuring.seen(x, y), exists

    def _examples(
        self, request: RoundRequest, chunk: Chunk, store: UserStore | None = None
    ) -> Examples:
        store, hosted = (self.users, self.hosted) if store is None else (store, None)
        enrolled, local = chunk.users if hosted is None else hosted[chunk.users], request.local
        starts, sizes = store.offsets[chunk.users], sizes_of(store, chunk.users)
        shape = chunk.width, chunk.lanes, store.rows
        schedule = Schedule.of(enrolled, starts, sizes, local, request.local_key, *shape)
        # Lanes without users need a row of zeros, which a store in the CPU's memory lacks.
        lanes_on_cpu = self.device.type == "cpu" and chunk.shapes
        resident = self.resident if store is self.users and not lanes_on_cpu else None
        settings = schedule, store, self.device, self.task, resident
        examples = Examples(chunk, enrolled, *settings)
        if self.device.type == "cpu" or not chunk.shapes:
            return examples
        measured = self.observed or bool(request.measured)
        return replace(examples, made_of=examples.given(measured=measured))


def _fetched(tensor: Tensor) -> Callable[[], npt.NDArray[Any]]:
    """Begin to copy a tensor to the CPU; return a function that waits for the copy alone."""
    if tensor.device.type != "cuda":
        return tensor.cpu().numpy
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    memory.copy_(tensor, non_blocking=True)
    copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tensor.device))

    def fetch() -> npt.NDArray[Any]:
        copied.synchronize()
        return memory.numpy()

    return fetch


def _contributors(request: RoundRequest, total: npt.NDArray[np.number]) -> int:
    """Return the number of contributors in a total [D], if the round counts them; else 0."""
    if CONTRIBUTORS not in request.metrics:
        return 0
    steps = float(total[request.clipping.layout.slices[CONTRIBUTORS.tensor]][0])
    return round(steps * CONTRIBUTORS.group.granularity)
