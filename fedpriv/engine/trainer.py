"""The contributions of users, side by side or alone, and their sums.

A user for whom anything raises contributes zero.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.population import UserStore
from fedpriv.engine.alone import AloneModel
from fedpriv.engine.arithmetic import (
    Activations,
    generators_apart,
    plain_arithmetic,
    seed_generators,
    tf32,
)
from fedpriv.engine.descent import same_for_all
from fedpriv.engine.examples import Examples, OwnExamples, held_on, lent
from fedpriv.engine.graphs import Graphs
from fedpriv.engine.indices import Indices
from fedpriv.engine.measuring import Blocks, Measuring, diagnose_users, group_norms, user_metrics
from fedpriv.engine.schedule import Integers, Schedule, counted
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

AnyExamples = Examples | OwnExamples

_CLIPPED_AT_ONCE = 2**18  # numbers in the updates of users who train alone
_PIECES = 8  # into which a chunk that fails is split
_TOTAL, _WEIGHTS = "total", "weights"  # names of the output, and an input, of graphs of sums


@dataclass(frozen=True)
class Chunk:
    """Users who train side by side, those with the most slices first, or one who trains alone."""

    users: Integers  # [n] positions in the store
    shapes: tuple[int, ...] = ()  # numbers of lanes, largest first; empty: the user trains alone
    width: int = 1  # W, rows of a slice
    lean: tuple[int, ...] = ()  # layers that learn without weights
    cost: int = 0  # rows in all slices of all lanes

    @property
    def lanes(self) -> int:
        """L, the number of lanes at the beginning."""
        return fewest(self.shapes, len(self.users))


def fewest(shapes: Sequence[int], users: int) -> int:
    """Return the smallest number of lanes in `shapes`, largest first, that holds all users."""
    return next((lanes for lanes in reversed(shapes) if lanes >= users), 1)


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
    """The contributions that have been added up so far, in a round with this start."""

    def __init__(self, request: RoundRequest, start: RoundParameters) -> None:
        self.request, self.start = request, start
        self.total = np.zeros(request.clipping.layout.dimension)  # whole numbers below 2^53
        self.users = self.weight = 0
        self.diagnostics = list[npt.NDArray[np.float64]]()
        self.dropped: SimulationOnlyDropped | None = None
        self.reasons = list[str]()
        self.pending = list[Callable[[], npt.NDArray[np.int64]]]()  # sums on a GPU
        self.alone = list[tuple[Chunk, Updates]]()  # updates of single users, not yet clipped

    def wait(self, limit: int) -> None:
        """Add pending sums until at most `limit` remain."""
        while len(self.pending) > limit:
            self.total += self.pending.pop(0)()

    def done(self, name: str) -> ChunkSum:
        """Return the sum of everything, under this name."""
        self.wait(0)
        partial = PartialSum(name, self.users, self.total.astype(np.int64), self.weight)
        return ChunkSum(partial, tuple(self.diagnostics), self.dropped, tuple(self.reasons))


def blank(users: UserStore, rows: int = 1) -> dict[str, npt.NDArray[np.generic]]:
    """Return rows of zeros to try a task on, since users' data must not decide if a round runs."""
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
        with plain_arithmetic(self.device):
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
        with plain_arithmetic(self.device):
            return AloneModel(self.task, self.device, *self.two_rows)

    @cached_property
    def side_by_side(self) -> SideBySideModel:
        """The model of users who train side by side; MixingError if they cannot."""
        with plain_arithmetic(self.device):
            return SideBySideModel.of(self.task, self.alone.model, *self.two_rows)

    @cached_property
    def measured(self) -> SideBySideModel:
        """The model of users side by side, in evaluation mode."""
        with plain_arithmetic(self.device):
            given = self.task, self.alone.model, *self.two_rows
            return SideBySideModel.of(*given, training=False)

    @property
    def _product_precision(self) -> AbstractContextManager[None]:
        """A context in which a GPU rounds the factors of products if activations are "tf32"."""
        return tf32(allowed=True) if self.activations == "tf32" else nullcontext()

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
        return RoundParameters.of(request, self.constants, self.device, self.task.personal)

    def sum_of(self, request: RoundRequest, chunks: Sequence[Chunk]) -> ChunkSum:
        """Return the sum of the contributions in some chunks, named after the first user.

        If training fails, or memory is insufficient, a chunk is split into eighths, and so on. A
        user for whom training alone fails counts as zero.
        """
        with plain_arithmetic(self.device), generators_apart(self.device):
            sums = _Sums(request, self.begin(request))
            for chunk in chunks:
                self._add(sums, chunk)
                sums.wait(1)  # a GPU trains one chunk while the sum of another is copied
            self._clip_alone(sums)
            return sums.done(str(chunks[0].users[0]))

    def _add(self, sums: _Sums, chunk: Chunk) -> None:
        """Add the contributions of a chunk's users."""
        request, start, clipping = sums.request, sums.start, sums.request.clipping
        examples = self._examples(request, chunk)
        weights = np.minimum(examples.counts[: len(chunk.users)], clipping.weight_cap)
        try:
            if self.device.type != "cpu":
                self.indices.check(chunk.users)
            total = None
            if self.graphs is not None and isinstance(examples, Examples):
                total = self._total(request, start, chunk, examples, weights)
            if total is None:
                sent = self._sent(request, start, chunk, examples)
                if self.observed:
                    rows = diagnose_users(self._blocks(start, examples), sent, request)
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
        if self.device.type == "cpu" and not chunk.shapes:
            sums.alone.append((chunk, sent))
            if len(sums.alone) * clipping.layout.dimension >= _CLIPPED_AT_ONCE:
                self._clip_alone(sums)
            return
        if self.device.type == "cpu":
            self._clip(sums, chunk, sent, weights)
            return
        fetch = _fetched(integer_sum(sent, clipping, weights) if total is None else total)

        def summed() -> npt.NDArray[np.int64]:
            total, again = fetch(), partial(self._sent, request, start, chunk, examples)
            self._look_for_lost(sums, chunk, _contributors(request, total), again)
            return total

        sums.pending.append(summed)

    def _clip_alone(self, sums: _Sums) -> None:
        """Clip the updates of users who trained alone, all at once, which takes less time."""
        if not sums.alone:
            return
        chunks, sent = zip(*sums.alone, strict=True)
        sums.alone.clear()
        merged = replace(chunks[0], users=np.concatenate([chunk.users for chunk in chunks]))
        counts = counted(sizes_of(self.users, merged.users), sums.request.local)
        weights = np.minimum(counts, sums.request.clipping.weight_cap)
        updates = sent[0]
        if len(sent) > 1:
            updates = {name: torch.cat([update[name][:] for update in sent]) for name in sent[0]}
        self._clip(sums, merged, updates, weights)

    def _clip(self, sums: _Sums, chunk: Chunk, sent: Updates, weights: Integers) -> None:
        before = _contributors(sums.request, sums.total)
        add_contributions(sums.total, sent, sums.request.clipping, weights)
        contributors = _contributors(sums.request, sums.total) - before
        self._look_for_lost(sums, chunk, contributors, lambda: sent)

    def _look_for_lost(
        self, sums: _Sums, chunk: Chunk, contributors: int, sent: Callable[[], Updates]
    ) -> None:
        """Record the first user whose update is not finite, unless all users contributed."""
        expected = len(chunk.users) if CONTRIBUTORS in sums.request.metrics else 0
        if self.naming and sums.dropped is None and contributors < expected:
            norms = torch.stack([*group_norms(sent(), sums.request.clipping.sent).values()], 1)
            place = int((~torch.isfinite(norms).all(1)).nonzero()[0])
            lost = replace(chunk, users=chunk.users[place:])
            self._drop(sums, lost, "its update is not finite")

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

    def moved(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        store: UserStore | None = None,
    ) -> Updates:
        """Return how far users move in all trained parameters, [L, *shape] by name.

        This includes personal parameters. The users may be those of another store.
        """
        with plain_arithmetic(self.device), generators_apart(self.device):
            return self._moved(request, start, chunk, self._examples(request, chunk, store))

    def sent(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        store: UserStore | None = None,
    ) -> Updates:
        """Return the unclipped contributions of users, of another store if given, [L, *shape]."""
        with plain_arithmetic(self.device), generators_apart(self.device):
            return self._sent(request, start, chunk, self._examples(request, chunk, store))

    def _sent(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, examples: AnyExamples
    ) -> Updates:
        moved = self._moved(request, start, chunk, examples)
        return self._reported(request, start, examples, moved)

    def _reported(
        self, request: RoundRequest, start: RoundParameters, examples: AnyExamples, moved: Updates
    ) -> Updates:
        """Return the updates and metrics of users who moved so far, [L, *shape] by name."""
        updates = {name: t for name, t in moved.items() if name not in start.personal}
        reported = TorchTensors()
        if request.measured:
            blocks, groups = self._blocks(start, examples), request.clipping.groups
            reported = user_metrics(self.task, blocks, request.measured, updates, groups)
        if CONTRIBUTORS in request.metrics:
            reported[CONTRIBUTORS.tensor] = torch.ones(examples.lanes, device=self.device)
        return {**updates, **reported}

    def _moved(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, examples: AnyExamples
    ) -> Updates:
        if isinstance(examples, OwnExamples):
            return self._moved_alone(request, start, examples)
        if self.graphs is None:
            return self._moved_together(request, start, chunk, examples)

        def compute(start: RoundParameters, given: TorchTensors) -> Updates:
            return self._moved_together(request, start, chunk, replace(examples, made_of=given))

        shape = chunk.lean, examples.shape
        return self.graphs.computed(compute, request.local, shape, start, examples.made_of)

    def _total(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        examples: Examples,
        weights: Integers,
    ) -> Tensor | None:
        """Return the sum of a chunk, [D], from a graph of the whole computation, or None."""
        kernels, clipping = kernels_on(self.device), request.clipping
        shape = chunk.lean, examples.shape, clipping, request.measured, request.metrics
        if kernels is None or self.graphs is None or self.observed or not self.graphs.steady:
            return None
        if not self.graphs.may_capture(shape):
            return None

        def compute(start: RoundParameters, given: TorchTensors) -> Updates:
            captured = replace(examples, made_of=given)
            moved = self._moved_together(request, start, chunk, captured)
            sent = self._reported(request, start, captured, moved)
            return {_TOTAL: sum_by_kernels(kernels, sent, clipping, given[_WEIGHTS])}

        by_lane = to_device(lane_weights(clipping, weights, chunk.lanes), self.device)
        given = {**examples.made_of, _WEIGHTS: by_lane}
        return self.graphs.computed(compute, request.local, shape, start, given)[_TOTAL][:]

    def _moved_together(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, examples: Examples
    ) -> Updates:
        training = self.task, start, examples, chunk.lean, request.local, self.activations
        with self._product_precision:
            return Group(self.side_by_side, *training).trained(_in_lanes(chunk, examples))

    def _moved_alone(
        self, request: RoundRequest, start: RoundParameters, examples: OwnExamples
    ) -> Updates:
        seed_generators(request.local_key, examples.user, self.device)
        training = examples.batches(), request.local, self.activations, examples.steps
        with self._product_precision:
            return self.alone.moved(self.task, start, *training)

    def _blocks(self, start: RoundParameters, examples: AnyExamples) -> Blocks:
        """Yield the evaluation of users' rows by the model at the start."""
        if isinstance(examples, Examples):
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
    ) -> AnyExamples:
        store, hosted = (self.users, self.hosted) if store is None else (store, None)
        enrolled, local = chunk.users if hosted is None else hosted[chunk.users], request.local
        if not chunk.shapes:
            (user,), (index,) = enrolled.tolist(), chunk.users.tolist()
            resident = self.resident if store is self.users else None
            data = store.rows_of(index), store, self.device, self.task, resident
            return OwnExamples(user, local, request.local_key, *data)
        rows = enrolled, store.offsets[chunk.users], sizes_of(store, chunk.users)
        shape = chunk.width, chunk.lanes
        schedule = Schedule.of(*rows, local, request.local_key, *shape, store.rows)
        on_gpu = store is self.users and self.device.type == "cuda"
        resident = self.resident if on_gpu else None
        examples = Examples(len(enrolled), schedule, store, self.device, self.task, resident)
        if self.device.type == "cpu":
            return examples
        measured = self.observed or bool(request.measured)
        return replace(examples, made_of=examples.given(measured=measured))


def _in_lanes(chunk: Chunk, examples: Examples) -> list[list[int]]:
    """Return for each step and slice how many lanes hold the users who have rows in it."""
    if examples.device.type != "cpu":  # all lanes, since their kernels are captured
        return [[examples.lanes] * examples.schedule.slices for _ in examples.slices]
    return [
        [fewest(chunk.shapes, int((slices > number).sum())) for number in range(int(slices.max()))]
        for slices in examples.slices
    ]


def _fetched(tensor: Tensor) -> Callable[[], npt.NDArray[Any]]:
    """Begin to copy a tensor to the CPU; return a function that waits for the copy only."""
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
