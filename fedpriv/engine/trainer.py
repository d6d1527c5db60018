"""What users contribute, side by side or alone, and the sums of it.

A user for whom anything raises contributes zero.
"""

import logging
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

_log = logging.getLogger(__name__)

AnyExamples = Examples | OwnExamples

_CLIPPED_AT_ONCE = 2**18  # numbers of users who go alone
_PIECES = 8  # into which users are split who fail together
_TOTAL, _WEIGHED = "total", "weighed"  # what graphs of sums give and are given


@dataclass(frozen=True)
class Chunk:
    """Users who go side by side, those with the most slices first, or one who goes alone."""

    users: Integers  # [n] positions in the store
    shapes: tuple[int, ...] = ()  # numbers of lanes, largest first; none: the user goes alone
    width: int = 1  # W, rows of a slice
    lean: tuple[int, ...] = ()  # layers that learn without weights
    cost: int = 0  # rows in all slices of all lanes

    @property
    def lanes(self) -> int:
        """L, in which they begin."""
        return fewest(self.shapes, len(self.users))


def fewest(shapes: Sequence[int], users: int) -> int:
    """The smallest of these numbers of lanes, largest first, that holds so many users."""
    return next((lanes for lanes in reversed(shapes) if lanes >= users), 1)


@dataclass(frozen=True)
class SimulationOnlyDropped:
    """A user who counts as zero. Publishing it breaks the guarantee of that user."""

    user: int  # position in the store
    reason: str  # may hold the user's data


@dataclass(frozen=True)
class ChunkSum:
    """The partial sum of some users, and what a simulation alone is told of them."""

    partial: PartialSum
    diagnostics: tuple[npt.NDArray[np.float64], ...] = ()
    dropped: SimulationOnlyDropped | None = None  # the first, if one was looked for


class _Sum:
    """What users contribute, as far as it is added up."""

    def __init__(self, dimension: int) -> None:
        self.total = np.zeros(dimension)  # whole numbers below 2^53
        self.users = self.weight = 0
        self.diagnostics = list[npt.NDArray[np.float64]]()
        self.dropped: SimulationOnlyDropped | None = None
        self.under_way = list[Callable[[], npt.NDArray[np.int64]]]()  # sums on a GPU
        self.alone = list[tuple[Chunk, Updates]]()  # what is clipped together, each by itself

    def wait(self, most: int) -> None:
        """Add what is under way, but for so many of the last."""
        while len(self.under_way) > most:
            self.total += self.under_way.pop(0)()

    def done(self, name: str) -> ChunkSum:
        """All of it."""
        self.wait(0)
        partial = PartialSum(name, self.users, self.total.astype(np.int64), self.weight)
        return ChunkSum(partial, tuple(self.diagnostics), self.dropped)


def blank(users: UserStore, rows: int = 1) -> dict[str, npt.NDArray[np.generic]]:
    """Rows of zeros to try a task on; no user's data may decide whether a round runs."""
    return {n: np.zeros((rows, *f.shape[1:]), f.dtype) for n, f in users.fields.items()}


def sizes_of(users: UserStore, chosen: Integers) -> Integers:
    """Sizes of some users, at a cost that does not grow with the population."""
    return users.offsets[chosen + 1] - users.offsets[chosen]


@dataclass(frozen=True)
class Trainer:
    """Trains chunks of users of a store, one chunk at a time."""

    task: Task
    users: UserStore
    hosted: Integers | None  # positions of the store's users in the population; None: the same
    device: torch.device
    memory: int  # bytes that a chunk may take, roughly
    activations: Activations
    observed: bool = False  # whether an observer is told of the users
    naming: bool = False  # whether users who count as zero are told of

    @cached_property
    def evaluated(self) -> Task:
        """The task in evaluation mode."""
        return self.task.evaluated()

    @cached_property
    def constants(self) -> TorchTensors:
        """Frozen parameters and buffers, on the device."""
        with plain_arithmetic(self.device):
            return self.task.constants(self.device)

    @cached_property
    def resident(self) -> TorchTensors | None:
        """The store's fields as tensors on the device, or None.

        On a GPU they are a copy, if its memory stays free, and behind the users' rows is one of
        zeros. What is mapped from files is taken to be too large.
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
        """Which users have integers that the task cannot compute with."""
        return Indices(self.evaluated, self.users)

    @cached_property
    def graphs(self) -> Graphs | None:
        """Where chunks are captured, or None."""
        if self.device.type != "cuda":
            return None
        return Graphs(self.device, self.constants, self.memory)

    @cached_property
    def alone(self) -> AloneModel:
        """The model of users who go alone."""
        with plain_arithmetic(self.device):
            return AloneModel(self.task, self.device, *self.two_rows)

    @cached_property
    def side_by_side(self) -> SideBySideModel:
        """The model of users who go side by side; MixingError if none can."""
        with plain_arithmetic(self.device):
            return SideBySideModel.of(self.task, self.device, *self.two_rows)

    @cached_property
    def measured(self) -> SideBySideModel:
        """That of the evaluated task."""
        with plain_arithmetic(self.device):
            return SideBySideModel.of(self.evaluated, self.device, *self.two_rows)

    @property
    def _multiplying(self) -> AbstractContextManager[None]:
        """What lets a GPU round the factors of products, if activations say so."""
        return tf32(allowed=True) if self.activations == "tf32" else nullcontext()

    @property
    def two_rows(self) -> tuple[Inputs, Tensor]:
        """Two rows of zeros, inputs and targets."""
        rows = blank(self.users, 2)
        tensors = {n: torch.from_numpy(rows[n]).to(self.device) for n in self.task.fields}
        return self.task.given(tensors)

    def begin(self, request: RoundRequest) -> RoundParameters:
        """What users of a round begin with."""
        if self.graphs is not None:
            self.graphs.begin(request.clipping)
        return RoundParameters.of(request, self.constants, self.device, self.task.personal)

    def sum_of(self, request: RoundRequest, chunks: Sequence[Chunk]) -> ChunkSum:
        """Sum of what users contribute in some chunks, named after the first one's position.

        If training fails, or memory is short, an eighth of a chunk's users goes at a time; one for
        whom it fails alone counts as zero.
        """
        with plain_arithmetic(self.device), generators_apart(self.device):
            start, found = self.begin(request), _Sum(request.clipping.layout.dimension)
            for chunk in chunks:
                self._add(found, request, start, chunk)
                found.wait(1)  # a GPU trains the last one while one is fetched
            self._clip_alone(found, request)
            return found.done(str(chunks[0].users[0]))

    def _add(
        self, found: _Sum, request: RoundRequest, start: RoundParameters, chunk: Chunk
    ) -> None:
        """Add what users of a chunk contribute."""
        examples, clipping = self._examples(request, chunk), request.clipping
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
                    blocks = self._blocks(start, examples)
                    rows = diagnose_users(blocks, sent, request)
                    found.diagnostics.append(rows[: len(chunk.users)].cpu().numpy())
        except Exception as error:
            if self.graphs is not None and isinstance(error, torch.OutOfMemoryError):
                self.graphs.clear()
            if len(chunk.users) == 1:
                self._drop(found, chunk, f"training raised {type(error).__name__}", error)
            else:
                for users in np.array_split(chunk.users, min(_PIECES, len(chunk.users))):
                    self._add(found, request, start, replace(chunk, users=users))
            return
        # What is added is whole: an error from here on is of no user's, and ends the round.
        found.users, found.weight = found.users + len(weights), found.weight + int(weights.sum())
        if self.device.type == "cpu" and not chunk.shapes:
            found.alone.append((chunk, sent))
            if len(found.alone) * clipping.layout.dimension >= _CLIPPED_AT_ONCE:
                self._clip_alone(found, request)
            return
        if self.device.type == "cpu":
            self._clip(found, request, chunk, sent, weights)
            return
        fetch = _fetched(integer_sum(sent, clipping, weights) if total is None else total)

        def summed() -> npt.NDArray[np.int64]:
            total, again = fetch(), partial(self._sent, request, start, chunk, examples)
            self._look_for_lost(found, request, chunk, _contributors(request, total), again)
            return total

        found.under_way.append(summed)

    def _clip_alone(self, found: _Sum, request: RoundRequest) -> None:
        """Clip what users sent who went alone: some at a time, as each takes little time."""
        if not found.alone:
            return
        chunks, sent = zip(*found.alone, strict=True)
        found.alone.clear()
        users = replace(chunks[0], users=np.concatenate([chunk.users for chunk in chunks]))
        counts = counted(sizes_of(self.users, users.users), request.local)
        weights = np.minimum(counts, request.clipping.weight_cap)
        together = (
            sent[0]
            if len(sent) == 1
            else {name: torch.cat([each[name][:] for each in sent]) for name in sent[0]}
        )
        self._clip(found, request, users, together, weights)

    def _clip(
        self, found: _Sum, request: RoundRequest, chunk: Chunk, sent: Updates, weights: Integers
    ) -> None:
        before = _contributors(request, found.total)
        add_contributions(found.total, sent, request.clipping, weights)
        counted = _contributors(request, found.total) - before
        self._look_for_lost(found, request, chunk, counted, lambda: sent)

    def _look_for_lost(
        self,
        found: _Sum,
        request: RoundRequest,
        chunk: Chunk,
        counted: int,
        sent: Callable[[], Updates],
    ) -> None:
        """Note the first user whose update is not finite, if not all are counted."""
        expected = len(chunk.users) if CONTRIBUTORS in request.metrics else 0
        if self.naming and found.dropped is None and counted < expected:
            norms = torch.stack([*group_norms(sent(), request.clipping.sent).values()], 1)
            place = int((~torch.isfinite(norms).all(1)).nonzero()[0])
            lost = replace(chunk, users=chunk.users[place:])
            self._drop(found, lost, "its update is not finite")

    def _drop(self, found: _Sum, chunk: Chunk, reason: str, error: Exception | None = None) -> None:
        """Note that the first user of a chunk counts as zero."""
        if not self.naming:  # the text of the error may hold the user's data
            _log.warning("a user counts as zero: %s", reason)
        elif found.dropped is None:
            found.dropped = self._dropped(int(chunk.users[0]), reason, error)

    def _dropped(
        self, user: int, reason: str, error: Exception | None = None
    ) -> SimulationOnlyDropped:
        for name, column in self.users.examples_of(user).items():
            if column.dtype.kind == "f" and not np.isfinite(column).all():
                reason = f"its field {name!r} holds NaN or infinity"
        return SimulationOnlyDropped(user, f"{reason}: {error}" if error else reason)

    def simulation_only_flaw(
        self, request: RoundRequest, user: int
    ) -> SimulationOnlyDropped | None:
        """Train a user with rows as a round would, alone, and say why it would count as zero."""
        chunk = Chunk(np.array([user]))
        try:
            if self.device.type != "cpu":
                self.indices.check(chunk.users)
            sent = self.sent(request, self.begin(request), chunk)
        except Exception as error:
            return self._dropped(user, f"training raised {type(error).__name__}", error)
        if all(bool(torch.isfinite(update[:1]).all()) for update in sent.values()):
            return None
        return self._dropped(user, "its update is not finite")

    def moved(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        store: UserStore | None = None,
    ) -> Updates:
        """How far users, of another store if given, move from the start: [L, *shape] by name.

        In all that is trained, personal parameters too.
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
        """What users, of another store if given, send before clipping: [L, *shape] by name."""
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
        """What users send who moved so far."""
        updates = {name: t for name, t in moved.items() if name not in start.personal}
        reported = TorchTensors()
        if request.measured:
            blocks, groups = self._blocks(start, examples), request.clipping.groups
            reported = user_metrics(self.evaluated, blocks, request.measured, updates, groups)
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
        """The sum of a chunk, [D], from a graph that makes all of it; None if there can be none."""
        kernels, clipping = kernels_on(self.device), request.clipping
        shape = chunk.lean, examples.shape, clipping, request.measured, request.metrics
        if kernels is None or self.graphs is None or self.observed or not self.graphs.steady:
            return None
        if not self.graphs.may_capture(shape):
            return None

        def compute(start: RoundParameters, given: TorchTensors) -> Updates:
            theirs = replace(examples, made_of=given)
            moved = self._moved_together(request, start, chunk, theirs)
            sent = self._reported(request, start, theirs, moved)
            return {_TOTAL: sum_by_kernels(kernels, sent, clipping, given[_WEIGHED])}

        weighed = to_device(lane_weights(clipping, weights, chunk.lanes), self.device)
        given = {**examples.made_of, _WEIGHED: weighed}
        return self.graphs.computed(compute, request.local, shape, start, given)[_TOTAL][:]

    def _moved_together(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, examples: Examples
    ) -> Updates:
        given = self.task, start, examples, chunk.lean, request.local, self.activations
        with self._multiplying:
            return Group(self.side_by_side, *given).trained(_in_lanes(chunk, examples))

    def _moved_alone(
        self, request: RoundRequest, start: RoundParameters, own: OwnExamples
    ) -> Updates:
        local, steps = request.local, own.steps
        lean = self.alone.lean(start, local, own.counts, steps)
        for learning in (lean, {}) if lean else (lean,):
            seed_generators(request.local_key, own.user, self.device)
            given = self.task, start, own.batches(), local, self.activations, learning, steps
            try:
                with self._multiplying:
                    return self.alone.moved(*given)
            except Exception:  # a model may read the weights of a layer that learns without
                if not learning:
                    raise
        raise AssertionError("a user trains with weights if not without")

    def _blocks(self, start: RoundParameters, examples: AnyExamples) -> Blocks:
        """What users measure, of the model at the start."""
        if isinstance(examples, Examples):
            lanes, many = examples.lanes, self.measured
            many.kept.copy_from(start.constants, many.kept.tensors)
            run = partial(many.outputs, same_for_all(start.parameters, lanes), lanes)
            measuring = Measuring(self.evaluated, many.kept.model, run)
            for x, y, exists in examples.blocks():
                many.kept.put_back()
                yield measuring.seen(x, y), exists
            return
        with self.alone.begun(start, {}, training=False) as model:
            measuring = Measuring(self.evaluated, model, partial(outputs_of, model))
            for x, y, exists in examples.blocks():
                yield measuring.seen(x, y), exists

    def _examples(
        self, request: RoundRequest, chunk: Chunk, store: UserStore | None = None
    ) -> AnyExamples:
        store, hosted = (self.users, self.hosted) if store is None else (store, None)
        enrolled, local = chunk.users if hosted is None else hosted[chunk.users], request.local
        if not chunk.shapes:
            (user,), (own,) = enrolled.tolist(), chunk.users.tolist()
            resident = self.resident if store is self.users else None
            data = store.rows_of(own), store, self.device, self.task, resident
            return OwnExamples(user, local, request.local_key, *data)
        of_users = enrolled, store.offsets[chunk.users], sizes_of(store, chunk.users)
        shape = chunk.width, chunk.lanes
        schedule = Schedule.of(*of_users, local, request.local_key, *shape, store.rows)
        on_gpu = store is self.users and self.device.type == "cuda"
        resident = self.resident if on_gpu else None
        found = Examples(len(enrolled), schedule, store, self.device, self.task, resident)
        if self.device.type == "cpu":
            return found
        measured = self.observed or bool(request.measured)
        return replace(found, made_of=found.given(measured=measured))


def _in_lanes(chunk: Chunk, examples: Examples) -> list[list[int]]:
    """For each step and slice, in how many lanes users go on who have rows in it."""
    if examples.device.type != "cpu":  # whose kernels are captured, in all lanes
        return [[examples.lanes] * examples.schedule.slices for _ in examples.slices]
    return [
        [fewest(chunk.shapes, int((slices > number).sum())) for number in range(int(slices.max()))]
        for slices in examples.slices
    ]


def _fetched(tensor: Tensor) -> Callable[[], npt.NDArray[Any]]:
    """Begin to copy a tensor to the CPU; the call that is returned waits for that alone."""
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
    """How many users were not zeroed, where that is counted; else 0."""
    if CONTRIBUTORS not in request.metrics:
        return 0
    counted = float(total[request.clipping.layout.slices[CONTRIBUTORS.tensor]][0])
    return round(counted * CONTRIBUTORS.group.granularity)
