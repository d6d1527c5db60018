"""Local training: the rows that users train on, and the steps from gradients to updates.

A user's shape, its rung, follows from the plan and the user's own number of examples; no other
user's data decide how it computes. Shapes lie on a ladder, since users of different shapes cannot
train together; up to a quarter of a shape is padding, which counts for nothing. Rows are chosen by
each user's own key.

What a step does with a gradient is up to the `direction` of the round's `LocalTraining`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedpriv.data.population import UserStore
from fedpriv.engine.layers import BatchedModel, LowRankLinear, OnceConv2d
from fedpriv.engine.task import (
    Activations,
    Inputs,
    RoundParameters,
    Task,
    done_with,
    each_input,
    outputs_of,
)
from fedpriv.privacy.clipping_torch import BatchedTensor, TorchTensors, Updates
from fedpriv.privacy.gaussian_mechanism import CONTROL_PREFIX
from fedpriv.privacy.round import LocalStep, LocalTraining

Integers = npt.NDArray[np.int64]

_FIRST = 8  # numbers up to this one are rungs of the ladder; beyond, four in each octave
_GOLDEN = 0x9E3779B97F4A7C15  # odd, near 2⁶⁴ over the golden ratio
_CHOICE = 2**62  # in place of the number of a pass: which examples count at all


def ladder(numbers: Integers) -> Integers:
    """The least of 0, 1, …, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, … that is not below each number.

    >>> ladder(np.array([0, 1, 9, 17, 100])).tolist()
    [0, 1, 10, 20, 112]
    """
    exponents = np.frexp(np.maximum(numbers - 1, 0).astype(np.float64))[1].astype(np.int64)
    apart = np.left_shift(np.int64(1), np.maximum(exponents - 3, 0))
    return -(-numbers // apart) * apart


@dataclass(frozen=True, order=True)
class Rung:
    """The shape in which a user trains and is measured."""

    steps: int  # S, the most of any user
    width: int  # W, examples in a step
    blocks: int  # of W, in which each example is measured once; 0: none is
    padded: bool  # whether users can have fewer steps


def counted(sizes: Integers, local: LocalTraining) -> Integers:
    """How many of a user's examples count."""
    return sizes if local.max_examples is None else np.minimum(sizes, local.max_examples)


def by_rung(
    sizes: Integers, local: LocalTraining, *, measured: bool
) -> Iterator[tuple[Rung, Integers]]:
    """The rungs of users with `sizes` examples, least work first, and which users are on each.

    Users without examples are on no rung.
    """
    counts = counted(sizes, local)
    widths, passes = ladder(counts), ladder(_batches(counts, local))
    if local.batch_size is not None:
        widths = np.minimum(widths, local.batch_size)
    steps = (
        passes * (local.epochs or 0) if local.steps is None else np.full_like(counts, local.steps)
    )
    shapes = np.stack([steps, widths, passes if measured else np.zeros_like(passes)], axis=1)
    some = np.flatnonzero(counts > 0)
    found, which = np.unique(shapes[some], axis=0, return_inverse=True)
    for place in np.argsort(found[:, 0] * found[:, 1], kind="stable").tolist():
        step, width, blocks = found[place].tolist()
        padded = local.epochs is not None and step > _FIRST * local.epochs
        yield Rung(step, width, blocks, padded), some[which.ravel() == place]


class BatchRows(NamedTuple):
    """Which rows of the store the users of a chunk train on, step by step."""

    rows: Integers  # [C, S, W] of the user store; padding repeats a row of the same user
    weights: npt.NDArray[np.float32]  # [C, S, W] 1 for an example, 0 for padding
    chosen: Integers  # [C, W·blocks] rows of all examples that count, and padding
    counts: Integers  # [C] examples that count


def schedule(
    users: Integers,
    starts: Integers,
    sizes: Integers,
    local: LocalTraining,
    local_key: bytes,
    rung: Rung,
) -> BatchRows:
    """Rows of users of one rung: their positions, first rows in the store and numbers of rows.

    A user's examples are shuffled for each pass over them. Their order, and which of them count
    where there are more than `local.max_examples`, depends on the user's position in the
    population, the round's key and the user's number of examples alone.
    """
    # A word for each user in one round; reproducible, not secret.
    key = np.frombuffer(local_key[:8], "<u8").astype(np.uint64)
    keys, counts = _mixed(key + _spread(users)), counted(sizes, local)
    widths = counts if local.batch_size is None else np.minimum(counts, local.batch_size)
    per_pass = _batches(counts, local)
    steps = per_pass * (local.epochs or 0) if local.steps is None else local.steps + 0 * per_pass
    passes = -(-steps // per_pass)
    lanes = np.repeat(np.arange(len(counts)), passes)
    numbers = _counted_up(passes)
    drawn, places = _shuffled(_mixed(keys[lanes] + _spread(numbers)), counts[lanes])
    lanes, numbers = (np.repeat(each, counts[lanes]) for each in (lanes, numbers))
    step = numbers * per_pass[lanes] + places // widths[lanes]
    taken = step < steps[lanes]  # the last pass may end early
    at = lanes[taken], step[taken], (places % widths[lanes])[taken]
    shape = len(counts), rung.steps, rung.width
    picked = np.zeros(shape, np.int64)
    picked[at] = drawn[taken]
    weights = np.zeros(shape, np.float32)
    weights[at] = 1.0
    chosen = np.minimum(np.arange(rung.width * rung.blocks), counts[:, None] - 1)
    for lane in np.flatnonzero(counts < sizes).tolist():  # only some of its rows count
        key = _mixed(keys[lane : lane + 1] + _spread(np.array([_CHOICE], np.int64)))
        these = np.sort(_shuffled(key, sizes[lane : lane + 1])[0][: counts[lane]])
        picked[lane], chosen[lane] = these[picked[lane]], these[chosen[lane]]
    return BatchRows(starts[:, None, None] + picked, weights, starts[:, None] + chosen, counts)


@dataclass(frozen=True)
class Batches:
    """Batches of L lanes, of which the first are users and the others blank."""

    x: Inputs  # [L, S, W, …] each; zeros where a lane is blank
    y: Tensor  # [L, S, W, …] targets, likewise
    weights: Tensor  # [L, S, W] 1 for examples, 0 for padding and blanks
    padded: bool  # whether some steps may have no examples, and then do nothing

    def active(self, step: int) -> Tensor | None:
        """Which lanes have this step, [L]; None: all."""
        return self.weights[:, step].amax(1) > 0 if self.padded else None


@dataclass(frozen=True)
class Examples:
    """The examples of C users in L lanes, on the device where they train."""

    rung: Rung
    lanes: int  # L ≥ C
    users: Integers  # [C] positions in the enrolled population
    store: UserStore
    device: torch.device
    plan: BatchRows
    task: Task  # says which fields it reads
    resident: TorchTensors | None = None  # the store's fields, if they are `held_on` the device

    def batches(self) -> Batches:
        """What they train on."""
        x, y = self._gathered(self.plan.rows)
        weights = self._blank((self.rung.steps, self.rung.width), torch.float32)
        weights[: len(self.users)] = torch.from_numpy(self.plan.weights)
        return Batches(x, y, self._moved(weights), self.rung.padded)

    def blocks(self) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """All that is measured, each example once: x and y [L·W, …], and which are real [L, W]."""
        width = self.rung.width
        for first in range(0, width * self.rung.blocks, width):
            rows = self.plan.chosen[:, first : first + width]
            x, y = self._gathered(rows)
            x, y = each_input(lambda t: t.flatten(0, 1), x), y.flatten(0, 1)
            real = self._blank((width,), torch.bool)
            places = np.arange(first, first + width)
            real[: len(self.users)] = torch.from_numpy(places < self.plan.counts[:, None])
            yield x, y, self._moved(real)

    def _gathered(self, rows: Integers) -> tuple[Inputs, Tensor]:
        """Inputs and targets [L, …] of rows [C, …], in memory whose alignment does not vary."""
        if self.resident is not None:
            places = self._blank(rows.shape[1:], torch.int64)
            places[: len(rows)] = torch.from_numpy(rows)
            places[len(rows) :] = self.store.rows  # zeros
            chosen, shape = self._moved(places).flatten(), places.shape
            columns = {n: c.index_select(0, chosen) for n, c in self.resident.items()}
            return self.task.given({n: c.view(*shape, *c.shape[1:]) for n, c in columns.items()})
        held = {}
        for name in self.task.fields:
            field = self.store.fields[name]
            kind = torch.from_numpy(np.empty(0, field.dtype)).dtype
            held[name] = self._blank((*rows.shape[1:], *field.shape[1:]), kind)
        self.store.take(rows, {name: t.numpy()[: len(rows)] for name, t in held.items()})
        return self.task.given({name: self._moved(memory) for name, memory in held.items()})

    def _blank(self, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """Memory [L, …] on the CPU, zero where no user is."""
        pinned = self.device.type == "cuda"
        memory = torch.empty((self.lanes, *shape), dtype=kind, pin_memory=pinned)
        memory[len(self.users) :].zero_()
        return memory

    def _moved(self, memory: Tensor) -> Tensor:
        """The same on the device; a GPU does other work meanwhile."""
        return memory.to(self.device, non_blocking=True)


def held_on(device: torch.device, columns: Mapping[str, npt.NDArray[np.generic]]) -> TorchTensors:
    """Fields [rows + 1, …] on a device, of which the last row is zero."""
    held = {}
    for name, column in columns.items():
        kind = torch.from_numpy(np.empty(0, column.dtype)).dtype
        held[name] = torch.zeros((len(column) + 1, *column.shape[1:]), dtype=kind, device=device)
        held[name][:-1] = torch.from_numpy(np.ascontiguousarray(column))
    return held


def _batches(counts: Integers, local: LocalTraining) -> Integers:
    """In how many batches users have each example once; 0 for those without any."""
    return np.minimum(counts, 1) if local.batch_size is None else -(-counts // local.batch_size)


def _shuffled(keys: npt.NDArray[np.uint64], sizes: Integers) -> tuple[Integers, Integers]:
    """A shuffle of n_i things for each key, one after another: which thing at which place."""
    passes, places = np.repeat(np.arange(len(sizes)), sizes), _counted_up(sizes)
    dice = _mixed(keys[passes] + _spread(places))
    if np.all(sizes == sizes[0]):  # many short sorts take less than a long one
        return np.argsort(dice.reshape(len(sizes), -1), axis=1, kind="stable").ravel(), places
    drawn = np.argsort(dice, kind="stable")
    order = drawn[np.argsort(passes[drawn], kind="stable")]
    return places[order], places


def _spread(numbers: Integers) -> npt.NDArray[np.uint64]:
    """The Weyl sequence of SplitMix64 (Steele, Lea & Flood 2014) at these places."""
    return (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)


def _mixed(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64: each bit of a result depends on all bits of its word."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _counted_up(lengths: Integers) -> Integers:
    """0, 1, … up to each length, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)


def is_linear(local: LocalTraining) -> bool:
    """Whether directions are linear in gradients, displacements and memories.

    Coefficients must be the same for all parameters, as they are where no algorithm says otherwise.
    Others train without low-rank corrections.
    """
    return type(local).direction is LocalTraining.direction and local.control is None


class Descent:
    """How far C users have moved from the same parameters, which are never written to."""

    def __init__(
        self,
        start: TorchTensors,
        local: LocalTraining,
        control: TorchTensors | None = None,
        personal: Collection[str] = (),
    ) -> None:
        self.displacement: TorchTensors = {}  # [C, *shape]; empty before the first step
        self.memory: dict[str, tuple[Tensor, ...]] = {}
        self._start, self._local, self._control = start, local, control or {}
        self._personal = personal
        self._parameters: TorchTensors = {}
        self._rate, self._steps = local.rate, 0

    def parameters(self, users: int) -> TorchTensors:
        """Parameters of each user, [C, *shape], in memory that the next call overwrites."""
        if not self.displacement:
            self._parameters = same_for_all(self._start, users)
            return self._parameters
        own = {} if self._steps == 1 else self._parameters
        self._parameters = {
            name: torch.add(self._start[name], moved, out=own.get(name))
            for name, moved in self.displacement.items()
        }
        return self._parameters

    def step(self, gradients: TorchTensors, active: Tensor | None) -> None:
        """Take a step along gradients [C, *shape] at the `parameters` that were given last.

        Active says which users take it, [C]; None: all do.
        """
        local = self._local
        for name, gradient in gradients.items():
            moved = self.displacement.get(name)
            if moved is not None and local.proximal:
                gradient = (moved * local.proximal).add_(gradient)  # noqa: PLW2901
            memory = self.memory.get(name)
            if memory is None:
                memory = tuple(torch.zeros_like(gradient) for _ in range(local.memories))
            control = self._control.get(name, gradient.new_zeros(()))
            own = self._parameters[name], memory, control, name in self._personal
            begun = LocalStep(self._steps, gradient, *own)
            direction, self.memory[name] = local.direction(begun)
            if active is not None:
                has_step = active.view(-1, *[1] * (direction.dim() - 1))
                direction = torch.where(has_step, direction, 0.0)
            way = direction * -self._rate
            self.displacement[name] = way if moved is None else moved.add_(way)
        self._steps += 1

    def moved(self) -> TorchTensors:
        """All displacements, and the changes of control variates."""
        changes = {CONTROL_PREFIX + name: self.memory[name][0] for name in self._control}
        return {**self.displacement, **changes}


def same_for_all(parameters: TorchTensors, count: int) -> TorchTensors:
    """Parameters of C users that share one copy, which a stride of 0 shows."""
    return {
        name: p.as_strided((count, *p.shape), (0, *p.stride())) for name, p in parameters.items()
    }


def train_chunk(
    task: Task,
    start: RoundParameters,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
    *,
    alone: bool = False,
) -> TorchTensors:
    """Train the users of a chunk side by side by `torch.func`, whatever the model is made of.

    Training draws no random numbers, unless one user trains `alone`, as the model itself would.
    Returns updates (trained minus initial parameters), each tensor [L, *shape], personal ones
    included, and changes of control variates where the algorithm has some.
    """

    def mean_loss(tensors: TorchTensors, x: Inputs, y: Tensor, weights: Tensor) -> Tensor:
        outputs = outputs_of(task.model, tensors, x, activations)
        losses = task.losses_of(outputs, y)
        return (losses * weights).sum() / _one_if_none((weights * task.shares(y)).sum())

    def of_one(current: TorchTensors, x: Inputs, y: Tensor, weights: Tensor) -> TorchTensors:
        own = {name: p[0].detach().requires_grad_() for name, p in current.items()}

        def gradients() -> tuple[Tensor, ...]:
            loss = mean_loss({}, each_input(lambda t: t[0], x), y[0], weights[0])
            return torch.autograd.grad(loss, [*own.values()], materialize_grads=True)

        # What is checkpointed is computed again in the backward pass, by the same parameters.
        found = done_with(task.model, {**own, **start.constants}, gradients)
        return {name: g.unsqueeze(0) for name, g in zip(own, found, strict=True)}

    def of_lane(own: TorchTensors, x: Inputs, y: Tensor, weights: Tensor) -> Tensor:
        return mean_loss({**own, **start.constants}, x, y, weights)

    # In the first step, too, each user has parameters of its own: one product for all users would
    # round a user's numbers according to their place in it.
    gradient = of_one if alone else vmap(grad(of_lane), randomness="error")
    descent = Descent(start.parameters, local, start.control, start.personal)
    lanes, steps, _ = batches.weights.shape
    for step in range(steps):
        x = each_input(lambda t, step=step: t[:, step], batches.x)  # type: ignore[misc]
        y, weights = batches.y[:, step], batches.weights[:, step]
        descent.step(gradient(descent.parameters(lanes), x, y, weights), batches.active(step))
    return descent.moved()


def _one_if_none(counted: Tensor) -> Tensor:
    """Numbers of targets to divide sums by, which are zero where there are none."""
    return torch.where(counted > 0.0, counted, 1.0)


def train_layers_chunk(
    model: BatchedModel,
    task: Task,
    start: RoundParameters,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
) -> Updates:
    """Train the users of a chunk in layers of the task; the result is as of `train_chunk`.

    A linear algorithm moves a user's weights to W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so
    far, and moves the coefficients a_t likewise: by the same descent, from zero along unit vectors.
    """
    inputs, (users, steps, width) = batches.x, batches.weights.shape
    assert isinstance(inputs, Tensor)  # batched models have one input
    parameters = start.parameters
    names = model.low_rank(steps, width) if is_linear(local) else ()
    low_rank: dict[str, LowRankLinear | OnceConv2d] = {
        n: LowRankLinear(inputs, *(parameters[k] for k in model.keys[n])) for n in names
    }
    plain = inputs.device.type == "cpu" and activations == "float32"
    if steps == 1 and plain and is_linear(local):
        low_rank |= model.once_convolved(users, parameters)
    shared = {key for name in low_rank for key in model.keys[name]}
    # Parameters lie in memory as their gradients do: those of convolutions by patches.
    own = {
        n: p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p
        for n, p in parameters.items()
        if n not in shared
    }
    descent = Descent(own, local, start.control, start.personal)
    coefficients = Descent({"": batches.weights.new_zeros(steps)}, local)
    # A mean over each user's real targets; users are apart in the sum, so are its gradients.
    counted = (batches.weights * task.shares(batches.y, axes=3)).sum(2, keepdim=True)
    shares = batches.weights / _one_if_none(counted)
    for step in range(steps):
        own = {n: p.detach().requires_grad_() for n, p in descent.parameters(users).items()}
        x, y, share = (t[:, step].flatten(0, 1) for t in (inputs, batches.y, shares))
        for layer in low_rank.values():
            layer.expect(x)
        # Nor can a layer be computed again in the backward pass, as what is checkpointed is.
        with torch.autograd.graph.disable_saved_tensors_hooks("users train side by side"):
            outputs = model.outputs(own, start.constants, x, activations, low_rank)
        gradients = torch.autograd.grad(
            (task.losses_of(outputs, y) * share).sum(),
            [*own.values(), *(layer.probe for layer in low_rank.values())],
            materialize_grads=True,
        )
        active = batches.active(step)
        descent.step(dict(zip(own, gradients, strict=False)), active)
        unit = batches.weights.new_zeros((users, steps))
        unit[:, step] = 1.0
        coefficients.parameters(users)
        coefficients.step({"": unit}, active)
        for layer in low_rank.values():
            layer.learn(coefficients.displacement[""])
    learnt: dict[str, BatchedTensor] = {**descent.moved()}
    for name, layer in low_rank.items():
        learnt |= zip(model.keys[name], layer.updates(), strict=True)
    return {name: learnt.pop(name) for name in parameters} | learnt
