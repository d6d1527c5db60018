"""Chunks: users of one rung that train together, and how many of them there may be.

Training the users of a chunk, and summing what they contribute.
"""

import copy
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.population import UserStore
from fedpriv.engine.batches import Examples, Integers, Rung, counted, ladder, schedule
from fedpriv.engine.layers import Layers
from fedpriv.engine.low_rank import train_layers_chunk
from fedpriv.engine.metrics import (
    ChunkDiagnostics,
    Measuring,
    diagnose_chunk,
    mean_losses,
    user_metrics,
)
from fedpriv.engine.qualification import layers_of
from fedpriv.engine.sgd import train_alone, train_chunk
from fedpriv.engine.task import Activations, Start, Task, draws, plain_arithmetic, seeded
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping_torch import TorchTensors, Updates, integer_sum
from fedpriv.privacy.mechanism import Metric
from fedpriv.privacy.round import LocalTraining, PartialSum, RoundRequest

_FLOAT = 4  # bytes
_DOUBLE = 8
_COPIES = 3  # parameters of a user: current, gradient, a temporary; velocity is one more
_COPIES_OF_ONE_STEP = 2  # gradient and update
_COPIES_OF_METRICS = 2  # the vector and a temporary
_COPIES_OF_ACTIVATIONS = 3  # forward, backward, and one temporary
# Numbers of activations in a step. As many keep a processor busy; beyond, more users are no faster,
# but for tiny models, of which a step with few users is mostly Python. Models of other than known
# layers always have all lanes, however few users there are.
_NUMBERS = 2**24
_FEW_NUMBERS = 2**21
_FEW_LANES = 128
_MANY_LANES = 2048  # all of which are tried before users train in them
_UNROLLED = 32  # numbers: two vectors of AVX-512


@dataclass(frozen=True)
class Chunk:
    """Users who train together.

    Attributes:
        name: of their sum.
        rung: of all of them.
        lanes: L, with blank ones beside them.
        together: whether they go side by side; where they do not, L is 1.
        users: [C ≤ L] positions in the store.
    """

    name: str
    rung: Rung
    lanes: int
    together: bool
    users: Integers


@dataclass(frozen=True)
class ChunkSum:
    """A partial sum that the device may still be working on; attributes as of `PartialSum`.

    `diagnostics` holds what an observer is told of the users, if there is one.
    """

    node: str
    users: int
    total: torch.Tensor
    weight: int
    diagnostics: tuple[ChunkDiagnostics, ...]

    @property
    def partial(self) -> PartialSum:
        """The partial sum, once the device is ready."""
        return PartialSum(self.node, self.users, self.total.cpu().numpy(), self.weight)


@dataclass(frozen=True)
class Footprint:
    """What one example is in memory.

    Attributes:
        inputs: numbers of an input.
        outputs: numbers that each layer gives.
        patches: numbers of patches that convolutions copy.
    """

    inputs: int
    outputs: tuple[int, ...]
    patches: int

    @classmethod
    def of(cls, task: Task, examples: Mapping[str, npt.NDArray[np.generic]]) -> "Footprint":
        """That of a task.

        Args:
            task: model and loss.
            examples: at least one row of data to measure.
        """
        outputs: list[int] = []
        patches: list[int] = []

        def measure(layer: torch.nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, torch.Tensor):
                outputs.append(output.numel())
                if isinstance(layer, torch.nn.Conv2d):
                    patches.append(output[0, 0].numel() * layer.weight[0].numel())

        leaves = [layer for layer in task.model.modules() if not any(layer.children())]
        hooks = [layer.register_forward_hook(measure) for layer in leaves]
        x = torch.tensor(examples[task.inputs][:1])
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                task.model(x)
        finally:
            for hook in hooks:
                hook.remove()
        return cls(x.numel(), tuple(outputs), sum(patches))

    @property
    def activations(self) -> int:
        """Numbers of all activations."""
        return sum(self.outputs) + self.patches


def blank(users: UserStore) -> Mapping[str, npt.NDArray[np.generic]]:
    """One row of zeros to try a task on; no user's data may decide if a round runs."""
    return {n: np.zeros((1, *f.shape[1:]), f.dtype) for n, f in users.fields.items()}


def sizes_of(users: UserStore, chosen: Integers) -> Integers:
    """Sizes of some users, at a cost that does not grow with the population."""
    return users.offsets[chosen + 1] - users.offsets[chosen]


def most_lanes(
    task: Task,
    layers: Layers | None,
    local: LocalTraining,
    metrics: Sequence[Metric],
    rung: Rung,
    footprint: Footprint,
    memory: int,
) -> int:
    """How many users of a rung train together: as many as pay, and as the memory is enough for.

    Args:
        task: model and loss.
        layers: of the task, where users train in layers.
        local: how a user trains.
        metrics: what is measured.
        rung: of the users.
        footprint: of an example.
        memory: bytes that a chunk may take, roughly.

    Raises:
        InvalidValueError: the memory is not positive.
    """
    if memory < 1:
        raise InvalidValueError(f"chunk memory is {memory} bytes; it must be positive")
    of_step = max(1, rung.width * (footprint.activations + footprint.inputs))
    wanted = min(_NUMBERS // of_step, _FEW_LANES)
    if layers is not None:
        wanted = max(wanted, min(_FEW_NUMBERS // of_step, _MANY_LANES))
    bytes_ = lane_bytes(task, layers, local, rung, footprint) + metric_bytes(metrics)
    most = max(1, min(wanted, memory // max(1, bytes_)))
    if layers is None:
        return 1 << most.bit_length() - 1  # so that no loop of vector instructions has a rest
    return most - most % (1 << max(most.bit_length() - 3, 0))  # on the ladder


def lane_bytes(
    task: Task,
    layers: Layers | None,
    local: LocalTraining,
    rung: Rung,
    footprint: Footprint,
) -> int:
    """Estimate of the memory of one user in a chunk; arguments as of `most_lanes`."""
    parameters = sum(p.numel() for p in task.model.parameters() if p.requires_grad)
    factors = 0
    if layers is not None:
        for name, layer in layers.low_rank(rung.steps, rung.width).items():
            parameters -= sum(p.numel() for p in layer.parameters())
            seen = layer.out_features if name == layers.entrance else layer.in_features
            factors += layers.rows[name] * (seen + 2 * layer.out_features)
    held = rung.steps * rung.width * (footprint.inputs + factors)
    copies = (_COPIES if rung.steps > 1 else _COPIES_OF_ONE_STEP) + (local.momentum > 0.0)
    activations = rung.width * footprint.activations * _COPIES_OF_ACTIVATIONS
    return _FLOAT * (held + activations + parameters * copies)


def lanes_for(users: int, rung: Rung, footprint: Footprint) -> int:
    """The least number of lanes, blank ones at the end, among which no user's place matters.

    torch goes through all lanes of a tensor in one loop of vector instructions, of which each does
    up to `_UNROLLED` numbers; what is left over at the end is done one by one, and some functions
    then give other bits. So nothing is left over, or it is in blank lanes.

    Args:
        users: how many there are, at least 1.
        rung: of the users.
        footprint: of an example; says how many numbers a lane has in the tensors of a step.
    """
    apart, least = filled(rung, footprint), min(_numbers(rung, footprint), default=1)
    spare = -(-(_UNROLLED - 1) // least) if apart > 1 else 0
    return min(-(-users // apart) * apart, int(ladder(np.array([users + spare]))[0]))


def filled(rung: Rung, footprint: Footprint) -> int:
    """The number of users of which multiples need no blank lanes."""
    return _UNROLLED // gcd(_UNROLLED, *_numbers(rung, footprint))


def _numbers(rung: Rung, footprint: Footprint) -> list[int]:
    """Of a lane, in the tensors of a step."""
    return [count * rung.width for count in footprint.outputs if count]


def most_users(lanes: int, rung: Rung, footprint: Footprint) -> int:
    """How many users so many lanes are enough for; at least 1, whose place is always the first."""
    fewer = range(lanes, 0, -1)
    return next((n for n in fewer if lanes_for(n, rung, footprint) <= lanes), 1)


def metric_bytes(metrics: Sequence[Metric]) -> int:
    """Estimate of the memory of the metrics of one user."""
    return _DOUBLE * _COPIES_OF_METRICS * sum(prod(metric.shape) for metric in metrics)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trainer:
    """Trains chunks of users of a store, one chunk at a time.

    Attributes:
        task: model and loss.
        evaluated: the same in evaluation mode.
        layers: of the task, where users train in layers.
        measured: of the evaluated task, likewise.
        constants: frozen parameters and buffers, on the device.
        users: their data.
        hosted: positions in the enrolled population of the store's users; None if they are those
            in the store.
        device: where to train.
        memory: bytes that a chunk may take, roughly.
        activations: of the model while users train.
        draws: whether training draws random numbers.
        observed: whether an observer is told of the users.
    """

    task: Task
    evaluated: Task
    layers: Layers | None
    measured: Layers | None
    constants: TorchTensors
    users: UserStore
    hosted: Integers | None
    device: torch.device
    memory: int
    activations: Activations
    draws: bool
    observed: bool
    # Held while a chunk trains: the models know the parameters of its users only.
    _one_chunk: threading.Lock = field(
        default_factory=threading.Lock, init=False, repr=False, compare=False
    )

    @classmethod
    def of(
        cls,
        task: Task,
        users: UserStore,
        hosted: npt.NDArray[np.int64] | None,
        device: torch.device,
        memory: int,
        activations: Activations,
        *,
        observed: bool,
    ) -> "Trainer":
        """Look at a task once for all chunks; arguments as the attributes."""
        row, evaluated = blank(users), task.evaluated()
        with plain_arithmetic(device):
            constants = task.constants(device)
            x, y = (torch.from_numpy(row[name]) for name in (task.inputs, task.targets))
            drawn = draws(task, constants, x, y)
            layers = None if drawn else layers_of(task, x, y)
            measured = None if layers is None else layers_of(evaluated, x, y)
        given = (constants, users, hosted, device, memory, activations)
        return cls(task, evaluated, layers, measured, *given, drawn, observed)

    def twin(self) -> "Trainer":
        """Another for the same users, with models of its own of the same tensors."""
        models = self.task.model, self.evaluated.model
        shared = {id(t): t for m in models for t in (*m.parameters(), *m.buffers())}
        # Without the copies that they keep.
        known = [layers and replace(layers) for layers in (self.layers, self.measured)]
        (model, evaluated), (layers, measured) = copy.deepcopy((models, known), shared)
        return replace(
            self,
            task=replace(self.task, model=model),
            evaluated=replace(self.evaluated, model=evaluated),
            layers=layers,
            measured=measured,
        )

    def most_lanes(self, request: RoundRequest, rung: Rung) -> int:
        """How many users of a rung train together at most; who they are does not matter."""
        task, local = self.task, request.local
        given = (task, self.layers, local, request.metrics, rung)
        return most_lanes(*given, self._footprint, self.memory)

    def lanes_for(self, users: int, rung: Rung) -> int:
        """How many lanes so many users of a rung need at least."""
        return lanes_for(users, rung, self._footprint)

    def filled(self, rung: Rung) -> int:
        """The number of users of a rung of which multiples need no blank lanes."""
        return filled(rung, self._footprint)

    def most_users(self, lanes: int, rung: Rung) -> int:
        """How many users of a rung so many lanes are enough for."""
        return most_users(lanes, rung, self._footprint)

    def sums(self, request: RoundRequest, start: Start, chunk: Chunk) -> list[ChunkSum]:
        """Sum of the contributions of a chunk.

        If training fails, half of the users train in the same shape, with blanks beside them, and
        then the other half; one for whom it fails alone counts as zero. So it is also where there
        is too little memory.

        Args:
            request: of the round.
            start: what users start from.
            chunk: the users.
        """
        try:
            return [self._sum(request, start, chunk)]
        except Exception as error:
            if len(chunk.users) == 1:
                # The text of the error may hold the user's data.
                _log.warning("a user counts as zero: training raised %s", type(error).__name__)
                return []
        half = len(chunk.users) // 2
        return [
            found
            for number, users in enumerate((chunk.users[:half], chunk.users[half:]))
            for found in self.sums(
                request, start, replace(chunk, name=f"{chunk.name}.{number}", users=users)
            )
        ]

    def sent(self, request: RoundRequest, start: Start, chunk: Chunk) -> Updates:
        """Updates and metrics of the lanes of a chunk, before they are clipped."""
        return self._sent(request, start, chunk, self._examples(request, chunk))

    def _sent(
        self, request: RoundRequest, start: Start, chunk: Chunk, examples: Examples
    ) -> Updates:
        with self._one_chunk, plain_arithmetic(self.device):
            updates = self._train(request, start, chunk, examples)
            if not request.metrics:
                return updates
            given = (self._measuring(start), examples, request.metrics)
            return {**updates, **user_metrics(*given, updates, request.clipping.groups)}

    def _sum(self, request: RoundRequest, start: Start, chunk: Chunk) -> ChunkSum:
        examples = self._examples(request, chunk)
        tensors = self._sent(request, start, chunk, examples)
        diagnostics: tuple[ChunkDiagnostics, ...] = ()
        if self.observed:
            losses = mean_losses(self._measuring(start), examples)
            diagnostics = (diagnose_chunk(tensors, request, losses, len(chunk.users)),)
        weights = np.minimum(examples.counts, request.clipping.weight_cap)
        total = integer_sum(tensors, request.clipping, weights)
        return ChunkSum(chunk.name, len(chunk.users), total, int(weights.sum()), diagnostics)

    def _train(
        self, request: RoundRequest, start: Start, chunk: Chunk, examples: Examples
    ) -> Updates:
        """Updates of the lanes of a chunk."""
        given = (self.task, start.parameters, start.constants)
        training = (examples.batches(), request.local, self.activations)
        if not chunk.together:
            (user,) = examples.users.tolist()
            seed = seeded(request.local_key, user, self.device) if self.draws else nullcontext()
            with seed:
                return {**train_alone(*given, *training)}
        if self.layers is None:
            return {**train_chunk(*given, *training)}
        low_rank = self.layers.low_rank(chunk.rung.steps, chunk.rung.width)
        return train_layers_chunk(self.layers, *given, *training, low_rank)

    def _measuring(self, start: Start) -> Measuring:
        if self.measured is None:
            return Measuring.of(self.evaluated, start.tensors)
        return Measuring.in_layers(self.evaluated, self.measured, start)

    def _examples(self, request: RoundRequest, chunk: Chunk) -> Examples:
        enrolled = chunk.users if self.hosted is None else self.hosted[chunk.users]
        starts, sizes = self.users.offsets[chunk.users], sizes_of(self.users, chunk.users)
        local = request.local
        plan = schedule(enrolled, starts, sizes, local, request.local_key, chunk.rung)
        counts = counted(sizes, local)
        where = (self.users, self.device, plan, self.task)
        return Examples(chunk.rung, chunk.lanes, enrolled, counts, *where)

    @cached_property
    def _footprint(self) -> Footprint:
        return Footprint.of(self.task, blank(self.users))
