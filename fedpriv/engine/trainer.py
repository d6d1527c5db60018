"""Training chunks of users, in shapes in which users keep apart to the last bit.

A lane computes with its own numbers alone. But which instructions do it may depend on its place:
loops end with other instructions for what is left over, and libraries cut products into tiles.
Shapes are chosen so that nothing is left over where users are, and products of known layers are cut
into pieces of one size; and no shape is trusted for that. Before the first users train in one,
random users do, in other places and beside other neighbours, and each must get what it got before.

A rung has one shape with as many lanes as pay, which says what a user gets. Where there are fewer
users, other lanes are blank, or, on a CPU, there are fewer lanes that are found to give the same.
Where places or neighbours make a difference, users of the rung train one at a time.
"""

import logging
import pickle
import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.population import UserStore
from fedpriv.engine import local_training
from fedpriv.engine.adapters import Adapted
from fedpriv.engine.graphs import Graphs
from fedpriv.engine.indices import Indices
from fedpriv.engine.layers import BatchedModel, batched_model
from fedpriv.engine.local_training import Examples, Integers, Rung, held_on
from fedpriv.engine.metrics import Measuring, diagnose_chunk, group_norms, user_metrics
from fedpriv.engine.task import (
    Activations,
    Inputs,
    RoundParameters,
    Task,
    called,
    each_input,
    generator_apart,
    plain_arithmetic,
    seeded,
    tf32,
)
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping import IntegerVector
from fedpriv.privacy.clipping_torch import (
    TorchTensors,
    Updates,
    integer_sum,
    kernels_on,
    rows_of,
    sum_by_kernels,
    to_device,
    weighing,
)
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.round import LocalTraining, PartialSum, RoundRequest, merged

_log = logging.getLogger(__name__)

# Copies that exist at a time of a user's parameters (current, gradient, a temporary), of its
# activations (forward, backward, a temporary), and of its metrics (two, of float64).
_PARAMETERS, _ACTIVATIONS, _METRICS = 3, 3, 4
# Numbers of activations in a step. `_BUSY`, in `_FEW_LANES` at most, keep a CPU busy: with more
# users it is no faster. A step of a tiny model is mostly Python; if its layers are known, it has
# more lanes, for up to `_FEW_NUMBERS`. Other models always have all lanes, however few the users.
_BUSY = 2**23
_FEW_NUMBERS = 2**21
_FEW_LANES = 160
_MANY_LANES = 2048  # all of which are tried before users train in them
# On a GPU, whose libraries choose kernels by the size of a product, chunks of a rung have as many
# lanes: with fewer, it would wait for the next kernel, and with more, train blank ones.
_BUSY_DEVICE = 20_000_000
_DEVICE_LANES = 256
_TOTAL, _WEIGHED = "total", "weighed"  # what graphs of sums give and are given
_UNROLLED = 32  # numbers: two vectors of AVX-512
# Random users that are compared in smaller shapes, in turns; of fewer, differences stay unseen.
_COMPARED = 64
_TURNS = 16
_EXTREMES = (1e30, np.inf, np.nan)  # of random users, with both signs
_LARGE = 2**10  # the largest integer of random users, even where larger ones are legal
_CHANCES = 3  # to leave Python's and NumPy's generators alone, which other threads may use too
_FEW_EXAMPLES = np.array([1, 2, 8])  # a model that can be trained can be with one of these
# Random users have the first of these at which they stay finite, whatever the plan's.
_LEARNING_RATES = (0.05, 1e-4, 1e-8)


@dataclass(frozen=True)
class Chunk:
    """Users who train together."""

    rung: Rung  # of all of them
    lanes: int  # L, with blank ones beside the users
    together: bool  # whether they go side by side; where they do not, L is 1
    users: Integers  # [C ≤ L] positions in the store


@dataclass(frozen=True)
class SimulationOnlyDropped:
    """A user who counts as zero. Publishing it breaks the guarantee of that user."""

    user: int  # position in the store
    reason: str  # may hold the user's data


@dataclass(frozen=True)
class ChunkSum:
    """The partial sum of a chunk, and what a simulation alone is told of its users."""

    partial: PartialSum
    diagnostics: tuple[npt.NDArray[np.float64], ...] = ()
    dropped: SimulationOnlyDropped | None = None  # the first, if one was looked for


def blank(users: UserStore) -> Mapping[str, npt.NDArray[np.generic]]:
    """One row of zeros to try a task on; no user's data may decide whether a round runs."""
    return {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in users.fields.items()}


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
    observed: bool  # whether an observer is told of the users
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
        """The store's fields on a GPU whose memory they leave free, or None.

        Behind the users' rows is one of zeros. What is mapped from files is taken to be too large.
        """
        columns = {name: self.users.fields[name] for name in self.task.fields}
        mapped = any(isinstance(column, np.memmap) for column in columns.values())
        if self.device.type != "cuda" or mapped:
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
    def draws(self) -> bool:
        """Whether training draws random numbers; True if unknown."""
        device = next(iter(self.task.model.parameters())).device  # not where users train
        x, y = self._blank_example
        x, y = each_input(lambda t: t.to(device), x), y.to(device)
        with plain_arithmetic(self.device), generator_apart(), torch.no_grad():
            before = torch.random.get_rng_state()
            try:
                self.task.losses_of(called(self.task.model, {}, x), y)
            except Exception:
                return True
            return not torch.equal(before, torch.random.get_rng_state())

    @cached_property
    def batched(self) -> BatchedModel | None:
        """The model of the task for many users, where it keeps them apart."""
        with plain_arithmetic(self.device):
            return None if self.draws else batched_model(self.task, *self._blank_example)

    @cached_property
    def measured(self) -> BatchedModel | None:
        """That of the evaluated task, where it keeps users apart in training too."""
        with plain_arithmetic(self.device):
            return self.batched and batched_model(self.evaluated, *self._blank_example)

    @property
    def _blank_example(self) -> tuple[Inputs, Tensor]:
        row = blank(self.users)
        return self.task.given({name: torch.from_numpy(row[name]) for name in self.task.fields})

    @cached_property
    def _numbers(self) -> tuple[int, tuple[int, ...], int]:
        """How many numbers an example's input, each layer's output and all patches have."""
        outputs, patches = list[int](), list[int]()

        def measure(layer: torch.nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                outputs.append(output.numel())
                if isinstance(layer, torch.nn.Conv2d):
                    patches.append(output[0, 0].numel() * layer.weight[0].numel())

        x, _ = self._blank_example
        layers = self.task.model.modules()
        # In one pass, of which the parts' outputs are not kept.
        parts = {p for each in layers if isinstance(each, Adapted) for p in each.children()}
        with ExitStack() as hooks, torch.no_grad(), generator_apart():
            for layer in self.task.model.modules():
                if layer not in parts and (isinstance(layer, Adapted) or not any(layer.children())):
                    hooks.enter_context(layer.register_forward_hook(measure))
            called(self.task.model, {}, x)
        inputs = x.values() if isinstance(x, dict) else [x]
        return sum(t.numel() for t in inputs), tuple(outputs), sum(patches)

    def lanes_for(self, users: int, rung: Rung) -> int:
        """The least number of lanes, blank ones at the end, among which no user's place matters.

        torch goes through all lanes of a tensor in one loop of vector instructions, of which each
        does up to `_UNROLLED` numbers; what is left over at the end is done one by one, and some
        functions then give other bits. So nothing is left over, or it is in blank lanes.
        """
        multiple, (_, outputs, _) = self.filled(rung), self._numbers
        least = min((count * rung.width for count in outputs if count), default=1)
        spare = -(-(_UNROLLED - 1) // least) if multiple > 1 else 0
        filled = -(-users // multiple) * multiple
        return min(filled, int(local_training.ladder(np.array([users + spare]))[0]))

    def filled(self, rung: Rung) -> int:
        """How many users fill vectors exactly: no multiple of them needs blank lanes."""
        _, outputs, _ = self._numbers
        return _UNROLLED // gcd(_UNROLLED, *(count * rung.width for count in outputs))

    def most_users(self, lanes: int, rung: Rung) -> int:
        """How many users fit into so many lanes; at least 1, whose place is always the first."""
        fewer = range(lanes, 0, -1)
        return next((n for n in fewer if self.lanes_for(n, rung) <= lanes), 1)

    def most_lanes(self, request: RoundRequest, rung: Rung) -> int:
        """How many users of a rung train together: as many as pay and as the memory holds."""
        inputs, outputs, patches = self._numbers
        of_step = max(1, rung.width * (inputs + sum(outputs) + patches))
        wanted = min(_BUSY // of_step, _FEW_LANES)
        if self.device.type != "cpu":
            wanted = min(max(_BUSY_DEVICE // of_step, _DEVICE_LANES), _MANY_LANES)
        elif self.batched is not None:
            wanted = max(wanted, min(_FEW_NUMBERS // of_step, _MANY_LANES))
        most = max(1, min(wanted, self.memory // max(1, self._lane_bytes(request, rung))))
        if self.batched is None:
            return 1 << most.bit_length() - 1  # so that no loop of vector instructions has a rest
        return most - most % (1 << max(most.bit_length() - 3, 0))  # on the ladder

    def _lane_bytes(self, request: RoundRequest, rung: Rung) -> int:
        """Estimate of the memory of one user in a chunk."""
        local, batched = request.local, self.batched
        parameters = sum(p.numel() for p in self.task.trainable().values())
        factors = 0
        if batched is not None and local_training.is_linear(local):
            for name, layer in batched.low_rank(rung.steps, rung.width).items():
                parameters -= sum(p.numel() for p in layer.parameters())
                factors += batched.rows[name] * (layer.in_features + 2 * layer.out_features)
        inputs, outputs, patches = self._numbers
        held = rung.steps * rung.width * (inputs + factors)
        activations = rung.width * (sum(outputs) + patches) * _ACTIVATIONS
        metrics = _METRICS * sum(prod(metric.shape) for metric in request.measured)
        copies = parameters * (_PARAMETERS + local.memories)
        return 4 * (held + activations + copies + metrics)

    def sum_of(self, request: RoundRequest, start: RoundParameters, chunk: Chunk) -> ChunkSum:
        """Sum of the contributions of a chunk, named after its first user's position.

        If training fails, or memory is short, half of the users train in the same shape, with
        blanks beside them, and then the other half; one for whom it fails alone counts as zero.
        """
        return self.launched(request, start, chunk)()

    def launched(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk
    ) -> Callable[[], ChunkSum]:
        """Train a chunk; on a GPU it is under way, and the call that is returned waits for it."""
        name, dimension = str(chunk.users[0]), request.clipping.layout.dimension
        try:
            if self.device.type != "cpu":
                self.indices.check(chunk.users)
            return self._launched(request, start, chunk)
        except Exception as error:
            if self.graphs is not None and isinstance(error, torch.OutOfMemoryError):
                self.graphs.clear()
            if len(chunk.users) == 1:
                if self.naming:
                    reason = f"training raised {type(error).__name__}: {error}"
                    dropped = SimulationOnlyDropped(int(chunk.users[0]), reason)
                    return lambda: ChunkSum(merged(name, (), dimension), dropped=dropped)
                # The text of the error may hold the user's data.
                _log.warning("a user counts as zero: training raised %s", type(error).__name__)
                return lambda: ChunkSum(merged(name, (), dimension))
        halves = [
            self.sum_of(request, start, replace(chunk, users=users))
            for users in np.array_split(chunk.users, 2)
        ]
        partial = merged(name, [each.partial for each in halves], dimension)
        first, second = halves
        diagnostics = first.diagnostics + second.diagnostics
        return lambda: ChunkSum(partial, diagnostics, first.dropped or second.dropped)

    def _launched(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk
    ) -> Callable[[], ChunkSum]:
        with plain_arithmetic(self.device):
            examples, start = self._examples(request, chunk), self._own(start, chunk)
            weights = np.minimum(examples.schedule.counts, request.clipping.weight_cap)
            tensors, diagnostics = None, []
            total = self._replayed_sum(request, start, chunk, examples, weights)
            if total is None:
                tensors = self._sent(request, start, chunk, examples, self._replayed)
                if self.observed:
                    measuring = Measuring(self.evaluated, start, self.measured)
                    diagnostics = [_fetched(diagnose_chunk(measuring, examples, tensors, request))]
                total = integer_sum(tensors, request.clipping, weights)
            summed = _fetched(total)

        def finish(sent: Updates | None = None) -> ChunkSum:
            total, dropped = summed(), None
            if self.naming and _contributors(request, total) not in (None, len(chunk.users)):
                with plain_arithmetic(self.device):
                    sent = sent or self._sent(request, start, chunk, examples, self._replayed)
                    dropped = self._not_finite(request, chunk, sent)
            users, weight = chunk.users, int(weights.sum())
            partial = PartialSum(str(users[0]), len(users), total, weight)
            return ChunkSum(partial, tuple(fetch() for fetch in diagnostics), dropped)

        if self.device.type == "cuda":  # by then the next chunk overwrites what was sent
            return finish
        found = finish(tensors)
        return lambda: found

    def _not_finite(
        self, request: RoundRequest, chunk: Chunk, tensors: Updates
    ) -> SimulationOnlyDropped:
        """The first user that was zeroed."""
        norms = torch.stack([*group_norms(tensors, request.clipping.sent).values()], 1)
        places = (~torch.isfinite(norms).all(1)).nonzero().flatten().tolist()
        user, reason = int(chunk.users[places[0]]), "its update is not finite"
        for name, column in self.users.examples_of(user).items():
            if column.dtype.kind == "f" and not np.isfinite(column).all():
                reason = f"its field {name!r} holds NaN or infinity"
        return SimulationOnlyDropped(user, reason)

    def begin(self, request: RoundRequest) -> RoundParameters:
        """What users of a round begin with."""
        if self.graphs is not None:
            self.graphs.begin(request.clipping)
        return RoundParameters.of(request, self.constants, self.device, self.task.personal)

    def trained(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, store: UserStore
    ) -> Updates:
        """How far each lane, users of a store, moves from the start, in personal parameters too."""
        with plain_arithmetic(self.device):
            examples, start = self._examples(request, chunk, store), self._own(start, chunk)
            with self._seeded(request, chunk, examples):
                return self._replayed(request, start, chunk, examples)

    def sent(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        store: UserStore | None = None,
    ) -> Updates:
        """What the lanes of a chunk, users of another store if given, send before clipping."""
        with plain_arithmetic(self.device):
            examples, start = self._examples(request, chunk, store), self._own(start, chunk)
            return self._sent(request, start, chunk, examples, self._replayed)

    def _replayed_sum(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        examples: Examples,
        weights: Integers,
    ) -> Tensor | None:
        """The sum of a chunk, [D], from a graph that makes all of it; None if there can be none."""
        if self.graphs is None or self.observed or not chunk.together:
            return None
        kernels, clipping = kernels_on(self.device), request.clipping
        shape = chunk.rung, chunk.lanes, clipping, request.measured, request.metrics
        if kernels is None or not (self.graphs.steady and self.graphs.may_capture(shape)):
            return None
        if not examples.drawn_on_device:
            return None

        def compute(start: RoundParameters, given: TorchTensors) -> Updates:
            theirs = replace(examples, made_of=given)
            sent = self._sent(request, start, chunk, theirs, self._train)
            return {_TOTAL: sum_by_kernels(kernels, sent, clipping, given[_WEIGHED])}

        weighed = to_device(weighing(clipping, weights, chunk.lanes), self.device)
        given = {**examples.given(), _WEIGHED: weighed}
        return self.graphs.computed(compute, request.local, shape, start, given)[_TOTAL][:]

    def _sent(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        examples: Examples,
        train: Callable[[RoundRequest, RoundParameters, Chunk, Examples], Updates],
    ) -> Updates:
        reported = TorchTensors()
        with self._seeded(request, chunk, examples):  # metrics may draw, too
            learnt = train(request, start, chunk, examples)
            updates = {name: t for name, t in learnt.items() if name not in start.personal}
            if request.measured:
                measuring = Measuring(self.evaluated, start, self.measured)
                groups = request.clipping.groups
                reported = user_metrics(measuring, examples, request.measured, updates, groups)
        if CONTRIBUTORS in request.metrics:
            reported[CONTRIBUTORS.tensor] = torch.ones(chunk.lanes, device=self.device)
        return {**updates, **reported}

    def _own(self, start: RoundParameters, chunk: Chunk) -> RoundParameters:
        """What users begin with: copies of what their model may write to.

        That is its buffers and, of one who trains alone, its parameters too. On a GPU, where graphs
        hold buffers, users who train together have no copies.
        """
        if chunk.together and self.device.type != "cpu":
            return start
        own = replace(start, constants=start.constants | self.task.buffers_in(start.constants))
        if chunk.together:
            return own
        parameters = {name: t.clone() for name, t in start.parameters.items()}
        return replace(own, parameters=parameters)

    def _seeded(
        self, request: RoundRequest, chunk: Chunk, examples: Examples
    ) -> AbstractContextManager[None]:
        """The generators of the user who trains alone; it may draw for some data only."""
        if chunk.together:
            return nullcontext()
        (user,) = examples.users.tolist()
        return seeded(request.local_key, user, self.device)

    def _examples(
        self, request: RoundRequest, chunk: Chunk, store: UserStore | None = None
    ) -> Examples:
        store, hosted = (self.users, self.hosted) if store is None else (store, None)
        enrolled = chunk.users if hosted is None else hosted[chunk.users]
        local, rung = request.local, chunk.rung
        starts, sizes = store.offsets[chunk.users], sizes_of(store, chunk.users)
        of_users, blanks = (enrolled, starts, sizes), (chunk.lanes, store.rows)
        plan = local_training.schedule(*of_users, local, request.local_key, rung, *blanks)
        resident = self.resident if store is self.users else None
        return Examples(rung, chunk.lanes, enrolled, store, self.device, plan, self.task, resident)

    def _replayed(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, examples: Examples
    ) -> Updates:
        """`_train`, by a graph where there can be one."""
        if self.graphs is None or not chunk.together:
            return self._train(request, start, chunk, examples)

        def compute(start: RoundParameters, given: TorchTensors) -> Updates:
            return self._train(request, start, chunk, replace(examples, made_of=given))

        given = examples.given()
        shape = chunk.rung, chunk.lanes, *given
        return self.graphs.computed(compute, request.local, shape, start, given)

    def _train(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, examples: Examples
    ) -> Updates:
        batches, batched = examples.batches(), self.batched
        inputs = self.task, start, batches, request.local, self.activations
        with tf32(allowed=self.activations == "tf32"):
            if chunk.together and batched is not None:
                return local_training.train_layers_chunk(batched, *inputs)
            return {**local_training.train_chunk(*inputs, alone=not chunk.together)}


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


def _contributors(request: RoundRequest, total: IntegerVector) -> int | None:
    """How many users were not zeroed, where that is counted."""
    if CONTRIBUTORS not in request.metrics:
        return None
    counted = int(total[request.clipping.layout.slices[CONTRIBUTORS.tensor]][0])
    return round(counted * CONTRIBUTORS.group.granularity)


@dataclass(frozen=True)
class _Verdict:
    """How users of a rung train."""

    most: int  # lanes
    digests: tuple[bytes, ...] = ()  # of what random users get in them; none: one user at a time
    mixed: bool = False  # whether they were tried side by side, and did not keep apart
    # For smaller numbers of lanes, whether they give the same.
    counts: dict[int, bool] = field(default_factory=dict)


class Isolation:
    """Cuts cohorts into chunks in whose shapes users keep apart.

    Guarantees:

    * the shapes in which a user may train follow from its rung, the request and the trainer;
    * in each of them, random users got the same bits whatever their places and neighbours were.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._verdicts: dict[Hashable, _Verdict] = {}
        # The first that is given, for all random users, or they could not be compared: with
        # control variates and without, since a node may keep its trainer from run to run.
        self._starts: dict[bool, RoundParameters] = {}
        self._rates: dict[Hashable, float] = {}
        self._told = False  # that users train one at a time

    def chunks(
        self, request: RoundRequest, start: RoundParameters, rung: Rung, users: Integers, parts: int
    ) -> Iterator[Chunk]:
        """Cut users of a rung, positions in the store, into a multiple of `parts` if possible.

        A `ModelError` says that the model cannot be trained in this shape, or that what a user gets
        depends on more than its rows and the generators of torch.
        """
        if self.unknown(request, start, [rung]):
            self.learn(request, {rung: self.examined(request, rung)})
        verdict = self._verdicts[_verdict_key(request, rung)]
        if verdict.mixed:
            self._tell_once()
        if not verdict.digests:
            for user in np.split(users, len(users)):
                yield Chunk(rung, 1, together=False, users=user)
            return
        for some in self._shared_out(users, parts, len(verdict.digests), rung):
            lanes = self._lanes(verdict, request, rung, len(some))
            yield Chunk(rung, lanes, together=True, users=some)

    def unknown(
        self, request: RoundRequest, start: RoundParameters, rungs: Sequence[Rung]
    ) -> list[Rung]:
        """Which rungs were not examined for such requests."""
        self._starts.setdefault(bool(start.control), start)
        return [rung for rung in rungs if _verdict_key(request, rung) not in self._verdicts]

    def examined(self, request: RoundRequest, rung: Rung) -> _Verdict:
        """How users of a rung train that is `unknown`; raises what `chunks` does."""
        for _ in range(_CHANCES):
            before = _own_generators()
            verdict = self._tried(request, rung)
            if _own_generators() == before:
                return verdict
        raise ModelError(
            "training draws from the generators of Python's random or NumPy's, of which all users "
            "have the same; it must draw from torch's, which are seeded for each user"
        )

    def learn(self, request: RoundRequest, verdicts: Mapping[Rung, _Verdict]) -> None:
        """Keep what rungs were `examined` for, here or in a fork."""
        self._verdicts |= {_verdict_key(request, rung): each for rung, each in verdicts.items()}

    def _shared_out(self, users: Integers, parts: int, most: int, rung: Rung) -> list[Integers]:
        """Users in a multiple of so many parts, about equal, none of more than the most."""
        parts = min(len(users), parts * -(-len(users) // (parts * most)))
        full = self._trainer.filled(rung)
        if most % full or len(users) < parts * full:
            return np.array_split(users, parts)
        share = len(users) / parts / full
        return np.split(users, np.rint(np.arange(1, parts) * share).astype(np.int64) * full)

    def _lanes(self, verdict: _Verdict, request: RoundRequest, rung: Rung, users: int) -> int:
        """The least number of lanes for so many users that gives what all lanes give."""
        if self._trainer.batched is None or self._trainer.device.type != "cpu":
            return verdict.most  # products may depend on how many there are
        while (lanes := self._trainer.lanes_for(users, rung)) < verdict.most:
            if lanes not in verdict.counts:
                few = self._random_users(request, rung, min(_COMPARED, len(verdict.digests)))
                try:
                    verdict.counts[lanes] = _agree(few.in_turns(lanes), verdict.digests)
                except Exception:  # of a model that takes other numbers of examples only
                    verdict.counts[lanes] = False
            if verdict.counts[lanes]:
                return lanes
            users += 1
        return verdict.most

    def _tried(self, request: RoundRequest, rung: Rung) -> _Verdict:
        trainer, mixed = self._trainer, False
        lanes = trainer.most_lanes(request, rung)
        if not trainer.draws and (lanes > 1 or trainer.batched is not None):
            users = trainer.most_users(lanes, rung)
            try:
                if digests := self._random_users(request, rung, users).together(lanes):
                    return _Verdict(lanes, digests)
            except Exception as error:  # whatever the model does with several users
                _log.info("users cannot train side by side: %s", type(error).__name__)
            mixed = True
        self._check_alone(request, rung)
        return _Verdict(1, mixed=mixed)

    def _tell_once(self) -> None:
        """Say that users train alone, but not which: sizes of users are no public facts."""
        if not self._told:
            self._told = True
            _log.warning(
                "%ssome users train one at a time: side by side, what one gets would depend on "
                "others",
                "simulation only, not private: " if self._trainer.naming else "",
            )

    def _check_alone(self, request: RoundRequest, rung: Rung) -> None:
        """Refuse a model that cannot be trained, or gives one user something else the next time.

        Where it can be trained with few examples, users of this rung are a zero each: how many
        examples one has, or how much memory they take, must not end the round for all.
        """
        measured = rung.blocks > 0
        few = [
            r for r, _ in local_training.by_rung(_FEW_EXAMPLES, request.local, measured=measured)
        ]
        failed: Exception | None = None
        for tried in (rung, *few):
            try:
                found = self._alone(request, tried)
                break
            except Exception as error:
                failed = failed or error
        else:
            raise ModelError(
                f"a user cannot be trained with {self._trainer.activations} activations: {failed}"
            ) from failed
        if found[0] != found[1]:
            on_gpu = ", and torch must have a deterministic algorithm for it on a GPU"
            raise ModelError(
                "training the same user twice gives two results; what a user gets must depend on "
                "its rows and on torch's generators alone, which are seeded for each user, and not "
                f"on who trained before{on_gpu if self._trainer.device.type == 'cuda' else ''}"
            )

    def _alone(self, request: RoundRequest, rung: Rung) -> list[dict[int, bytes]]:
        """What one random user of a rung gets twice, or one with rows of zeros."""
        users = self._random_users(request, rung, len(_EXTREMES))
        try:
            return users.alone()
        except Exception:  # random numbers need not be legal, but rows of zeros are
            zeros = {name: np.zeros_like(column) for name, column in users.store.fields.items()}
            return replace(users, store=UserStore(zeros, users.store.offsets)).alone()

    def _random_users(self, request: RoundRequest, rung: Rung, users: int) -> "_RandomUsers":
        """So many random users; fewer of them are the first of these."""
        key = (replace(request.local, learning_rate=_LEARNING_RATES[0]), rung)
        if key not in self._rates:
            found = (r for r in _LEARNING_RATES if self._at_rate(r, request, rung, 1).stay_finite)
            self._rates[key] = next(found, _LEARNING_RATES[0])
        return self._at_rate(self._rates[key], request, rung, users)

    def _at_rate(
        self, rate: float, request: RoundRequest, rung: Rung, users: int
    ) -> "_RandomUsers":
        start = self._starts[bool(request.control)]
        local = replace(request.local, learning_rate=rate)
        request = replace(request, local=local, local_key=bytes(32))
        store = _random_store(self._trainer, _sizes_on(rung, local, users))
        return _RandomUsers(self._trainer, request, start, rung, users, store)


def _verdict_key(request: RoundRequest, rung: Rung) -> Hashable:
    """All that a verdict depends on; rates only multiply, and random users' are not the plan's."""
    measured = tuple((metric.name, metric.shape) for metric in request.measured)
    return replace(request.local, learning_rate=_LEARNING_RATES[0]), measured, rung


@dataclass(frozen=True)
class _RandomUsers:
    """Users of one rung, in three kinds; u < `users` is random, in the middle of what is legal.

    User u + `users` is at the ends of that or not finite, alike for every third one, and user
    u + 2·`users` is as user u but for zeros at the end of each row, as of a text that is short.
    """

    trainer: Trainer
    request: RoundRequest
    start: RoundParameters
    rung: Rung
    users: int
    store: UserStore

    @property
    def stay_finite(self) -> bool:
        """Whether the first user's update is finite: all that are not would look alike.

        True as well where training raises, since no other rate would help.
        """
        chunk = Chunk(self.rung, 1, together=False, users=np.zeros(1, np.int64))
        try:
            moved = self.trainer.trained(self.request, self.start, chunk, self.store)
        except Exception:
            return True
        return all(bool(torch.isfinite(update[:1]).all()) for update in moved.values())

    def digests(self, order: Integers, lanes: int, *, together: bool = True) -> dict[int, bytes]:
        """Digests of all bits that each user gets if all train in this order."""
        chunk, found = Chunk(self.rung, lanes, together, order), []
        updates = self.trainer.sent(self.request, self.start, chunk, self.store)
        layout = Layout(tuple(updates), tuple(tuple(u.shape[1:]) for u in updates.values()))
        factors = np.random.default_rng(0).integers(-(2**63), 2**63, (2, layout.dimension))
        for _, rows in rows_of(updates, layout, len(order)):
            found += _digests(rows.float(), factors)  # exact, as they were float32
        return dict(zip(order.tolist(), found, strict=True))

    def together(self, lanes: int) -> tuple[bytes, ...]:
        """What random users get side by side; nothing if place or neighbours make a difference."""
        users, everyone = self.users, np.arange(self.users)
        digests = self.digests(everyone, lanes)
        short = self.digests(everyone + 2 * users, lanes)
        for number, places in ((0, 1), (1, users // 3 + 1), (2, 2 * (users // 3 + 1))):
            turned = np.roll(everyone, places)
            broken = np.where(turned % 3 == number, turned + users, turned)
            try:
                found = self.digests(broken, lanes)
            except Exception:  # a model may refuse one kind of them; then it is left out
                found = self.digests(turned, lanes)
            if not _agree(found, digests):
                return ()
        for beyond in self._with_illegal_integers():
            with suppress(Exception):  # most models refuse them
                if not _agree(beyond.digests(np.roll(broken, 1), lanes), digests):
                    return ()
        mixed = np.where(everyone % 3 == 0, everyone, everyone + 2 * users)
        if not _agree(self.digests(mixed, lanes), short):
            return ()
        if not _agree(self.digests(everyone[: -(-users // 2)], lanes), digests):  # beside blanks
            return ()
        return tuple(digests[user] for user in range(users))

    def _with_illegal_integers(self) -> Iterator["_RandomUsers"]:
        """Those whose broken ones are random but for one input of integers, which are not legal.

        None where these break the process for all, as on a GPU, or where layers are known.
        """
        trainer, fields = self.trainer, self.store.fields
        if trainer.device.type != "cpu" or trainer.batched is not None:
            return
        third = int(self.store.offsets[self.users])
        random = {
            n: np.concatenate([c[:third], c[:third], c[2 * third :]]) for n, c in fields.items()
        }
        for name, column in random.items():
            if name != trainer.task.targets and column.dtype.kind in "iu":
                least, most = trainer.indices.legal(name, _LARGE)
                limits = np.iinfo(column.dtype)
                for number in {max(least - 1, limits.min), min(most + 1, limits.max)}:
                    illegal = column.copy()
                    illegal[third : 2 * third] = number
                    store = UserStore({**random, name: illegal}, self.store.offsets)
                    yield replace(self, store=store)

    def in_turns(self, lanes: int) -> dict[int, bytes]:
        """What enough users to compare get in so many lanes, a few at a time, one place further."""
        most, found = self.trainer.most_users(lanes, self.rung), dict[int, bytes]()
        for first in range(0, min(self.users, _TURNS * most), most):
            turn = np.roll(np.arange(first, first + most) % self.users, 1)
            found |= self.digests(turn, lanes)
        return found

    def alone(self) -> list[dict[int, bytes]]:
        """What the first user gets, and what it gets again after all broken ones have trained."""
        first = np.zeros(1, np.int64)
        found = self.digests(first, 1, together=False)
        for broken in range(self.users, 2 * self.users):
            with suppress(Exception):  # of a model that refuses it
                self.digests(np.array([broken]), 1, together=False)
        return [found, self.digests(first, 1, together=False)]


def _digests(rows: Tensor, factors: npt.NDArray[np.int64]) -> list[bytes]:
    """Of the bits of rows [c, D] of float32, where all NaNs become one, by random factors [2, D].

    Each half is the sum of a row's words of 32 bits times its factors of 64, modulo 2⁶⁴. That is
    the same for two rows that differ with a probability of 2⁻³³ at most over the factors, since no
    difference of words is a multiple of 2³² (multiply-shift, Dietzfelbinger 1996).
    """
    words = rows.nan_to_num_(torch.nan, torch.inf, -torch.inf).view(torch.int32)
    if words.device.type == "cpu":
        return [half.tobytes() for half in words.numpy().astype(np.int64) @ factors.T]
    on_device = to_device(torch.from_numpy(factors), words.device)
    halves = torch.stack([(words * factor).sum(1) for factor in on_device], 1)
    return [half.tobytes() for half in halves.cpu().numpy()]


def _agree(found: Mapping[int, bytes], expected: Mapping[int, bytes] | Sequence[bytes]) -> bool:
    known = expected if isinstance(expected, Mapping) else dict(enumerate(expected))
    return all(found[user] == known[user] for user in found.keys() & known.keys())


def _own_generators() -> bytes:
    """States of the global generators that torch does not seed."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def _sizes_on(rung: Rung, local: LocalTraining, users: int) -> Integers:
    """Numbers of examples that lead to a rung: the largest, and some that leave padding."""
    passes = rung.blocks or rung.steps // (local.epochs or rung.steps)
    largest = rung.width * passes
    legal = [
        size
        for size in range(largest, max(largest - 3, 0), -1)
        for found, _ in local_training.by_rung(np.array([size]), local, measured=rung.blocks > 0)
        if found == rung
    ]
    return np.resize(np.array(legal), users)


def _random_store(trainer: Trainer, sizes: Integers) -> UserStore:
    """Random users of these sizes, in the three kinds of `_RandomUsers`."""
    rows, whose = int(sizes.sum()), np.repeat(np.arange(len(sizes)), sizes)
    fields: dict[str, npt.NDArray[np.generic]] = {}
    for seed, name in enumerate(trainer.task.fields):
        rng = np.random.default_rng(seed)
        column = trainer.users.fields[name]
        values = np.zeros((3 * rows, *column.shape[1:]), column.dtype)
        drawn = values[:rows]
        if np.issubdtype(column.dtype, np.inexact):
            drawn[:] = rng.random(drawn.shape, np.float32)
            with np.errstate(over="ignore"):  # of float16
                ends = [np.asarray(end).astype(column.dtype) for end in _EXTREMES]
        else:
            # Where more than 0 and 1 are legal: neither 0, which ends a short row, nor too large.
            least, most = trainer.indices.legal(name, _LARGE)
            low, high = (1, (most + 1) // 2) if most > 1 else (0, most)
            drawn[:] = rng.integers(low, high, drawn.shape, endpoint=True)
            ignored = name == trainer.task.targets and trainer.indices.may_ignore
            third = trainer.task.ignore_index if ignored else 0
            ends = [np.asarray(end, column.dtype) for end in (least, most, third)]
        broken = values[rows : 2 * rows]
        for number, end in enumerate(ends):
            broken[whose % len(ends) == number] = end
        if np.issubdtype(column.dtype, np.inexact):
            np.negative(broken.reshape(-1)[::2], out=broken.reshape(-1)[::2])
        values[2 * rows :] = drawn
        if column.ndim > 1:
            values[2 * rows :, ..., column.shape[-1] // 2 :] = 0
        fields[name] = values
    return UserStore(fields, np.cumsum([0, *sizes, *sizes, *sizes]))
