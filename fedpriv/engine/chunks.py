"""Chunks: users of one rung that train together, and how many of them there may be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.data.store import UserStore
from fedpriv.engine.batches import Integers, Rung, ladder
from fedpriv.engine.diagnostics import ChunkDiagnostics
from fedpriv.engine.layers import Layers
from fedpriv.engine.task import Task
from fedpriv.errors import InvalidValueError
from fedpriv.federated.transport import LocalTraining, PartialSum
from fedpriv.privacy.metrics import Metric

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
