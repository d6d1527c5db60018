"""Training the users of a chunk, and summing what they contribute."""

import logging
import threading
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd, prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.population import UserStore
from fedpriv.engine.batches import Examples, Integers, Rung, counted, ladder, schedule
from fedpriv.engine.layers import Layers, separable_layers
from fedpriv.engine.local_training import algorithm_of, train_chunk, train_layers_chunk
from fedpriv.engine.metrics import Measuring, diagnose_chunk, user_metrics
from fedpriv.engine.task import Activations, RoundParameters, Task, draws, plain_arithmetic, seeded
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping_torch import TorchTensors, Updates, integer_sum
from fedpriv.privacy.round import PartialSum, RoundRequest, merged

_log = logging.getLogger(__name__)

# Copies that exist at a time of a user's parameters (current, gradient, a temporary), of its
# activations (forward, backward, a temporary), and of its metrics.
_PARAMETERS, _ACTIVATIONS, _METRICS = 3, 3, 2
_FLOAT, _DOUBLE = 4, 8  # bytes
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
    """Users who train together."""

    rung: Rung  # of all of them
    lanes: int  # L, with blank ones beside the users
    together: bool  # whether they go side by side; where they do not, L is 1
    users: Integers  # [C ≤ L] positions in the store


@dataclass(frozen=True)
class ChunkSum:
    """The partial sum of a chunk, and what an observer is told of its users, if there is one."""

    partial: PartialSum
    diagnostics: tuple[npt.NDArray[np.float64], ...] = ()


@dataclass(frozen=True)
class Footprint:
    """What one example takes in memory."""

    inputs: int  # numbers of an input
    outputs: tuple[int, ...]  # numbers that each layer gives
    patches: int  # numbers of patches that convolutions copy

    @classmethod
    def of(cls, task: Task, examples: Mapping[str, npt.NDArray[np.generic]]) -> "Footprint":
        """That of a task, from at least one row of data."""
        outputs: list[int] = []
        patches: list[int] = []

        def measure(layer: torch.nn.Module, _inputs: object, output: object) -> None:
            if isinstance(output, Tensor):
                outputs.append(output.numel())
                if isinstance(layer, torch.nn.Conv2d):
                    patches.append(output[0, 0].numel() * layer.weight[0].numel())

        x = torch.tensor(examples[task.inputs][:1])
        with ExitStack() as hooks, torch.no_grad(), torch.random.fork_rng(devices=[]):
            for layer in task.model.modules():
                if not any(layer.children()):
                    hooks.enter_context(layer.register_forward_hook(measure))
            task.model(x)
        return cls(x.numel(), tuple(outputs), sum(patches))

    @property
    def activations(self) -> int:
        """Numbers of all activations."""
        return sum(self.outputs) + self.patches

    def lanes_for(self, users: int, rung: Rung) -> int:
        """The least number of lanes, blank ones at the end, among which no user's place matters.

        torch goes through all lanes of a tensor in one loop of vector instructions, of which each
        does up to `_UNROLLED` numbers; what is left over at the end is done one by one, and some
        functions then give other bits. So nothing is left over, or it is in blank lanes.
        """
        multiple = self.filled(rung)
        least = min((count * rung.width for count in self.outputs if count), default=1)
        spare = -(-(_UNROLLED - 1) // least) if multiple > 1 else 0
        filled = -(-users // multiple) * multiple
        return min(filled, int(ladder(np.array([users + spare]))[0]))

    def filled(self, rung: Rung) -> int:
        """The number of users of which multiples need no blank lanes."""
        return _UNROLLED // gcd(_UNROLLED, *(count * rung.width for count in self.outputs))

    def most_users(self, lanes: int, rung: Rung) -> int:
        """How many users fit into so many lanes; at least 1, whose place is always the first."""
        fewer = range(lanes, 0, -1)
        return next((n for n in fewer if self.lanes_for(n, rung) <= lanes), 1)


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
    # Held while the models know the parameters of a chunk's users, and by a thread that forks, so
    # that no process begins with those of another.
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise InvalidValueError(f"chunk memory is {self.memory} bytes; it must be positive")

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
    def draws(self) -> bool:
        """Whether training draws random numbers."""
        with plain_arithmetic(self.device):
            return draws(self.task, *self._blank_example)

    @cached_property
    def layers(self) -> Layers | None:
        """Of the task, where users are separable."""
        with plain_arithmetic(self.device):
            return None if self.draws else separable_layers(self.task, *self._blank_example)

    @cached_property
    def measured(self) -> Layers | None:
        """Of the evaluated task, where users are separable in training too."""
        with plain_arithmetic(self.device):
            return self.layers and separable_layers(self.evaluated, *self._blank_example)

    @cached_property
    def footprint(self) -> Footprint:
        """What one example takes."""
        return Footprint.of(self.task, blank(self.users))

    @property
    def _blank_example(self) -> tuple[Tensor, Tensor]:
        row = blank(self.users)
        return torch.from_numpy(row[self.task.inputs]), torch.from_numpy(row[self.task.targets])

    def most_lanes(self, request: RoundRequest, rung: Rung) -> int:
        """How many users of a rung train together: as many as pay and as the memory holds."""
        of_step = max(1, rung.width * (self.footprint.activations + self.footprint.inputs))
        wanted = min(_NUMBERS // of_step, _FEW_LANES)
        if self.layers is not None:
            wanted = max(wanted, min(_FEW_NUMBERS // of_step, _MANY_LANES))
        most = max(1, min(wanted, self.memory // max(1, self._lane_bytes(request, rung))))
        if self.layers is None:
            return 1 << most.bit_length() - 1  # so that no loop of vector instructions has a rest
        return most - most % (1 << max(most.bit_length() - 3, 0))  # on the ladder

    def _lane_bytes(self, request: RoundRequest, rung: Rung) -> int:
        """Estimate of the memory of one user in a chunk."""
        algorithm, layers = algorithm_of(request.local), self.layers
        parameters = sum(p.numel() for p in self.task.trainable().values())
        factors = 0
        if layers is not None and algorithm.linear:
            for name, layer in layers.low_rank(rung.steps, rung.width).items():
                parameters -= sum(p.numel() for p in layer.parameters())
                factors += layers.rows[name] * (layer.in_features + 2 * layer.out_features)
        held = rung.steps * rung.width * (self.footprint.inputs + factors)
        activations = rung.width * self.footprint.activations * _ACTIVATIONS
        metrics = _METRICS * sum(prod(metric.shape) for metric in request.metrics)
        numbers = held + activations + parameters * (_PARAMETERS + algorithm.memories)
        return _FLOAT * numbers + _DOUBLE * metrics

    def sum_of(self, request: RoundRequest, start: RoundParameters, chunk: Chunk) -> ChunkSum:
        """Sum of the contributions of a chunk, named after its first user's position.

        If training fails, or memory is short, half of the users train in the same shape, with
        blanks beside them, and then the other half; one for whom it fails alone counts as zero.
        """
        name, dimension = str(chunk.users[0]), request.clipping.layout.dimension
        try:
            return self._sum(request, start, chunk)
        except Exception as error:
            if len(chunk.users) == 1:
                # The text of the error may hold the user's data.
                _log.warning("a user counts as zero: training raised %s", type(error).__name__)
                return ChunkSum(merged(name, (), dimension))
        half = len(chunk.users) // 2
        halves = [
            self.sum_of(request, start, replace(chunk, users=users))
            for users in (chunk.users[:half], chunk.users[half:])
        ]
        partial = merged(name, [each.partial for each in halves], dimension)
        return ChunkSum(partial, halves[0].diagnostics + halves[1].diagnostics)

    def _sum(self, request: RoundRequest, start: RoundParameters, chunk: Chunk) -> ChunkSum:
        diagnostics: tuple[npt.NDArray[np.float64], ...] = ()
        with self.lock, plain_arithmetic(self.device):
            examples = self._examples(request, chunk)
            tensors = self._sent(request, start, chunk, examples)
            if self.observed:
                measuring = Measuring(self.evaluated, start, self.measured)
                diagnostics = (diagnose_chunk(measuring, examples, tensors, request),)
            weights = np.minimum(examples.counts, request.clipping.weight_cap)
            total = integer_sum(tensors, request.clipping, weights).cpu().numpy()
        name, users = str(chunk.users[0]), len(chunk.users)
        return ChunkSum(PartialSum(name, users, total, int(weights.sum())), diagnostics)

    def sent(
        self,
        request: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        store: UserStore | None = None,
    ) -> Updates:
        """What the lanes of a chunk, users of another store if given, send before clipping."""
        with self.lock, plain_arithmetic(self.device):
            return self._sent(request, start, chunk, self._examples(request, chunk, store))

    def _sent(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, examples: Examples
    ) -> Updates:
        updates = self._train(request, start, chunk, examples)
        if not request.metrics:
            return updates
        measuring = Measuring(self.evaluated, start, self.measured)
        groups = request.clipping.groups
        return {**updates, **user_metrics(measuring, examples, request.metrics, updates, groups)}

    def _examples(
        self, request: RoundRequest, chunk: Chunk, store: UserStore | None = None
    ) -> Examples:
        enrolled = chunk.users if self.hosted is None or store else self.hosted[chunk.users]
        store, local, rung = store or self.users, request.local, chunk.rung
        starts, sizes = store.offsets[chunk.users], sizes_of(store, chunk.users)
        plan = schedule(enrolled, starts, sizes, local, request.local_key, rung)
        counts = counted(sizes, local)
        return Examples(rung, chunk.lanes, enrolled, counts, store, self.device, plan, self.task)

    def _train(
        self, request: RoundRequest, start: RoundParameters, chunk: Chunk, examples: Examples
    ) -> Updates:
        """Updates of the lanes of a chunk."""
        task, batches, local = self.task, examples.batches(), request.local
        if not chunk.together:
            (user,) = examples.users.tolist()
            with seeded(request.local_key, user, self.device) if self.draws else nullcontext():
                return {**train_chunk(task, start, batches, local, self.activations, alone=True)}
        if self.layers is None:
            return {**train_chunk(task, start, batches, local, self.activations)}
        return train_layers_chunk(self.layers, task, start, batches, local, self.activations)
