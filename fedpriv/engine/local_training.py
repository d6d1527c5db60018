"""Local training: the rows that users train on, and the steps from gradients to updates.

A user's shape, its rung, follows from the plan and the user's own number of examples; no other
user's data decide how it computes. Shapes lie on a ladder, since users of different shapes cannot
train together; up to a quarter of a shape is padding, which counts for nothing. Rows are chosen by
each user's own key.

What a step does with a gradient is up to the `direction` of the round's `LocalTraining`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedpriv.data.population import UserStore
from fedpriv.engine.bounds import OwnTables
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
from fedpriv.privacy.clipping_torch import BatchedTensor, TorchTensors, Updates, to_device
from fedpriv.privacy.gaussian_mechanism import CONTROL_PREFIX
from fedpriv.privacy.round import LocalStep, LocalTraining

Integers = npt.NDArray[np.int64]

_FIRST = 8  # numbers up to this one are rungs of the ladder; beyond, four in each octave
_CPU = torch.device("cpu")
# Words of 64 bits are int64, whose products are the same modulo 2⁶⁴.
_SIGN = -(2**63)
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd, near 2⁶⁴ over the golden ratio
_WORDS, _FIELD, _WEIGHTS = "words", "field.", "weights"  # what batches are made of
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
    # Many users have the same number, and rows of numbers take long to sort.
    counts, which = np.unique(counted(sizes, local), return_inverse=True)
    widths, passes = ladder(counts), ladder(_batches(counts, local))
    if local.batch_size is not None:
        widths = np.minimum(widths, local.batch_size)
    steps = (
        passes * (local.epochs or 0) if local.steps is None else np.full_like(counts, local.steps)
    )
    shapes = np.stack([steps, widths, passes if measured else np.zeros_like(passes)], axis=1)
    found, shape_of = np.unique(shapes[counts > 0], axis=0, return_inverse=True)
    rungs = np.concatenate([np.full(np.sum(counts == 0), -1), shape_of.ravel()])[which]
    for place in np.argsort(found[:, 0] * found[:, 1], kind="stable").tolist():
        step, width, blocks = found[place].tolist()
        padded = local.epochs is not None and step > _FIRST * local.epochs
        yield Rung(step, width, blocks, padded), np.flatnonzero(rungs == place)


class BatchRows(NamedTuple):
    """Which rows of the store the users of a chunk train on, step by step; L lanes."""

    rows: Tensor  # [L, S, W] int64, of the user store; padding repeats a row of the same user
    weights: Tensor  # [L, S, W] float32: 1 for an example, 0 for padding
    chosen: tuple[Tensor, ...]  # [L, W] for each block: rows of all that count, and padding
    exists: tuple[Tensor, ...]  # [L, W] for each block: which are no padding


@dataclass(frozen=True)
class BatchSchedule:
    """All that determines the rows of a chunk, whatever device computes them.

    A user's examples are shuffled for each pass over them. Their order, and which of them count
    where there are more than `local.max_examples`, depends on the user's position in the
    population, the round's key and the user's number of examples alone.
    """

    local: LocalTraining
    rung: Rung
    counts: Integers  # [C] examples that count
    words: Tensor  # [3, L] int64: a random word, the first row in the store, how many count
    among: Tensor | None  # [L, most] which of the rows count, in their order; None: the first
    kinds: tuple["_Kind", ...]  # which have each lane once

    @property
    def follows_from_words(self) -> bool:
        """Whether all else is the same for all chunks of a rung."""
        return self.among is None and self.local.steps is None

    def rows(self, words: Tensor, among: Tensor | None = None) -> BatchRows:
        """Rows of these words and examples, [3, L] and [L, most], on their device."""
        if len(self.kinds) == 1:
            return self._rows(words, among, self.kinds[0])
        parts, device = [], words.device
        for kind in self.kinds:
            lanes = to_device(torch.from_numpy(kind.lanes), device)
            theirs = None if among is None else among[lanes]
            parts.append(self._rows(words[:, lanes], theirs, kind))
        places = np.argsort(np.concatenate([kind.lanes for kind in self.kinds]))
        back = to_device(torch.from_numpy(places), device)
        rows, weights, *blocks = zip(*parts, strict=True)
        chosen, exists = (
            tuple(torch.cat(of_block)[back] for of_block in zip(*of_kinds, strict=True))
            for of_kinds in blocks
        )
        return BatchRows(torch.cat(rows)[back], torch.cat(weights)[back], chosen, exists)

    def _rows(self, words: Tensor, among: Tensor | None, kind: "_Kind") -> BatchRows:
        """Rows of lanes of one kind.

        NumPy computes what is on a CPU, in which small arrays take it a fraction of the time.
        """
        xp, arange, take = _library_of(words.device)
        word, first, count = _own(words)
        which = None if among is None else _own(among)
        local, rung, some = self.local, self.rung, xp.where(count > 0, count, 1)
        size = rung.width if local.batch_size is None else local.batch_size
        width = xp.where(some < size, some, size)
        per_pass = (some + width - 1) // width
        steps = per_pass * local.epochs if local.epochs else per_pass * 0 + rung.steps
        of_passes = _mixed(word[:, None] + _spread(arange(kind.passes)))
        order = _shuffled(of_passes, arange(kind.most), count)

        step, column = arange(rung.steps), arange(rung.width)
        number, batch = step // per_pass[:, None], step % per_pass[:, None]
        place = batch[:, :, None] * width[:, None, None] + column
        real = (step < steps[:, None])[:, :, None] & (column < width[:, None, None])
        real &= place < count[:, None, None]
        lanes, shape = len(real), real.shape
        drawn = xp.where(real, number[:, :, None] * kind.most + place, 0).reshape(lanes, -1)
        picked = xp.where(real, take(order.reshape(lanes, -1), drawn, 1).reshape(shape), 0)
        if which is not None:
            picked = take(which, picked.reshape(lanes, -1), 1).reshape(shape)
        chosen, exists = [], []
        for block in range(rung.blocks):
            places = column + block * rung.width
            counts = places < count[:, None]
            these = xp.where(counts, places, some[:, None] - 1)
            these = these if which is None else take(which, these, 1)
            chosen.append(torch.as_tensor(first[:, None] + these))
            exists.append(torch.as_tensor(counts))
        rows, weights = first[:, None, None] + picked, torch.as_tensor(real).float()
        return BatchRows(torch.as_tensor(rows), weights, tuple(chosen), tuple(exists))


@dataclass(frozen=True)
class _Kind:
    """Lanes whose examples are shuffled in arrays of one size."""

    lanes: Integers  # [l]
    passes: int  # the most of one of them
    most: int  # examples of one of them


def schedule(
    users: Integers,
    starts: Integers,
    sizes: Integers,
    local: LocalTraining,
    local_key: bytes,
    rung: Rung,
    lanes: int | None = None,
    blank: int = 0,
) -> BatchSchedule:
    """The schedule of users of one rung: positions, first rows in the store, numbers of rows.

    All lanes beyond the users, if there are some, have one row, `blank`, which does not count.
    """
    counts, lanes = counted(sizes, local), len(users) if lanes is None else lanes
    # A word for each user in one round; reproducible, not secret.
    key = int.from_bytes(local_key[:8], "little", signed=True)
    words = np.zeros((3, lanes), np.int64)
    words[1, len(users) :] = blank
    words[:, : len(users)] = _mixed(key + _spread(users)), starts, counts
    if local.epochs:
        most = rung.width * (rung.steps // local.epochs)
        kinds = [_Kind(np.arange(lanes), local.epochs, most)]
    else:
        # With steps given, some users make many passes over few examples, others part of one pass.
        per_pass = np.ones(lanes, np.int64)
        per_pass[: len(users)] = _batches(counts, local)
        kinds = []
        for power in np.unique(powers := np.frexp(per_pass)[1]).tolist():
            alike = np.flatnonzero(powers == power)
            passes = -(-rung.steps // int(per_pass[alike].min()))
            kinds.append(_Kind(alike, passes, max(1, int(words[2, alike].max()))))
    among = None
    if np.any(counts < sizes):
        among = _counting(words[0], counts, sizes, max(kind.most for kind in kinds))
    return BatchSchedule(local, rung, counts, torch.from_numpy(words), among, tuple(kinds))


def _counting(words: Integers, counts: Integers, sizes: Integers, most: int) -> Tensor:
    """Which of each user's rows count, in their order: [L, most]."""
    among = np.tile(np.arange(most), (len(words), 1))
    for lane in np.flatnonzero(counts < sizes).tolist():
        word = _mixed(words[lane : lane + 1] + _spread(np.array([_CHOICE])))[:, None]
        drawn = _shuffled(word, np.arange(sizes[lane]), sizes[lane : lane + 1])
        among[lane, : counts[lane]] = np.sort(drawn[0, 0, : counts[lane]])
    return torch.from_numpy(among)


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
    schedule: BatchSchedule
    task: Task  # says which fields it reads
    resident: TorchTensors | None = None  # the store's fields, if they are `held_on` the device
    # What a chunk was `given` whose examples these are, if not that of the schedule.
    made_of: TorchTensors = field(default_factory=dict)

    @property
    def drawn_on_device(self) -> bool:
        """Whether rows are drawn where the fields are, so that words are all that is given."""
        return self.resident is not None and self.schedule.follows_from_words

    def given(self) -> TorchTensors:
        """What batches are made of, on the device; all else is the same for chunks of a shape."""
        if self.drawn_on_device:
            return {_WORDS: to_device(self.schedule.words, self.device)}
        columns = {_FIELD + name: c for name, c in self._columns(self.plan.rows).items()}
        return {**columns, _WEIGHTS: to_device(self.plan.weights, self.device)}

    def batches(self) -> Batches:
        """What they train on."""
        if _WEIGHTS in self.made_of:
            columns = {name: self.made_of[_FIELD + name] for name in self.task.fields}
            weights = self.made_of[_WEIGHTS]
        else:
            columns = self._columns(self.plan.rows)
            weights = to_device(self.plan.weights, self.device)
        x, y = self.task.given(columns)
        return Batches(x, y, weights, self.rung.padded)

    def blocks(self) -> Iterator[tuple[Inputs, Tensor, Tensor]]:
        """All that is measured, each example once: x and y [L·W, …], and which are real [L, W]."""
        for block in range(self.rung.blocks):
            x, y = self.task.given(self._columns(self.plan.chosen[block]))
            x, y = each_input(lambda t: t.flatten(0, 1), x), y.flatten(0, 1)
            yield x, y, to_device(self.plan.exists[block], self.device)

    @cached_property
    def plan(self) -> BatchRows:
        """Rows, on the device if the store's fields are there, and else on the CPU."""
        device = _CPU if self.resident is None else self.device
        among = self.schedule.among
        words = to_device(self.made_of.get(_WORDS, self.schedule.words), device)
        return self.schedule.rows(words, None if among is None else to_device(among, device))

    def _columns(self, rows: Tensor) -> TorchTensors:
        """Fields of rows [L, …], in memory whose alignment does not vary."""
        if self.resident is not None:
            chosen = rows.flatten()
            columns = {n: c.index_select(0, chosen) for n, c in self.resident.items()}
            return {n: c.view(*rows.shape, *c.shape[1:]) for n, c in columns.items()}
        taken = self._taken(rows)
        return {n: c.to(self.device, non_blocking=True) for n, c in taken.items()}

    def _taken(self, rows: Tensor) -> TorchTensors:
        """Fields of rows [L, …] in memory on the CPU, zero where no user is."""
        held, users = {}, len(self.users)
        for name in self.task.fields:
            column, pinned = self.store.fields[name], self.device.type == "cuda"
            kind = torch.from_numpy(np.empty(0, column.dtype)).dtype
            lanes = *rows.shape, *column.shape[1:]
            held[name] = torch.empty(lanes, dtype=kind, pin_memory=pinned)
            held[name][users:].zero_()
        self.store.take(rows[:users].numpy(), {n: t[:users].numpy() for n, t in held.items()})
        return held


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


# Arrays of NumPy or tensors, of int64: for these operations both are the same.
def _library_of(device: torch.device) -> tuple[Any, Callable[[int], Any], Callable[..., Any]]:
    """The library that computes on a device, its numbers 0, 1, … and how it takes along an axis."""
    if device.type == "cpu":
        return np, np.arange, np.take_along_axis
    return torch, partial(torch.arange, device=device), torch.take_along_dim


def _own(tensor: Tensor) -> Any:
    """The array or tensor of the library that computes on its device."""
    return tensor.numpy() if tensor.device.type == "cpu" else tensor


def _shuffled(words: Any, numbers: Any, counts: Any) -> Any:
    """Shuffles of n numbers by words [L, P]: [L, P, n]; counts [L] of them are real and come first.

    The order is that of words without a sign.
    """
    dice = _mixed(words[:, :, None] + _spread(numbers)) ^ _SIGN
    if isinstance(dice, Tensor):
        last = dice.masked_fill_(numbers >= counts[:, None, None], ~_SIGN)
        return torch.argsort(last, dim=2, stable=True)
    dice[np.broadcast_to(numbers >= counts[:, None, None], dice.shape)] = ~_SIGN
    return np.argsort(dice, axis=2, kind="stable")


def _spread(numbers: Any) -> Any:
    """The Weyl sequence of SplitMix64 (Steele, Lea & Flood 2014) at these places."""
    return (numbers + 1) * _GOLDEN


def _mixed(words: Any) -> Any:
    """The finaliser of SplitMix64: each bit of a result depends on all bits of its word."""
    words = (words ^ _shifted(words, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    words = (words ^ _shifted(words, 27)) * (0x94D049BB133111EB - 2**64)
    return words ^ _shifted(words, 31)


def _shifted(words: Any, bits: int) -> Any:
    """Words to the right, as those without a sign."""
    return (words >> bits) & (2 ** (64 - bits) - 1)


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
        self._zeros: TorchTensors = {}  # in place of control variates
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
                self._zeros[name] = gradient.new_zeros(())
            control = self._control.get(name, self._zeros[name])
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
        with nullcontext() if alone else OwnTables():
            gradients = gradient(descent.parameters(lanes), x, y, weights)
        descent.step(gradients, batches.active(step))
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
    inputs, (users, steps, _) = batches.x, batches.weights.shape
    assert isinstance(inputs, Tensor)  # batched models have one input
    parameters = start.parameters
    plain = inputs.device.type == "cpu" and activations == "float32"
    low_rank = _low_rank(model, inputs, parameters, plain=plain) if is_linear(local) else {}
    shared = {key for name in low_rank for key in model.keys[name]}
    # Parameters lie in memory as their gradients do: those of convolutions by patches.
    own = {
        n: p.contiguous(memory_format=torch.channels_last) if p.dim() == 4 else p
        for n, p in parameters.items()
        if n not in shared
    }
    descent = Descent(own, local, start.control, start.personal)
    coefficients = Descent({"": batches.weights.new_zeros(steps)}, local)
    coefficients.parameters(users)  # once, as linear algorithms do not read them
    # A mean over each user's real targets; users are apart in the sum, so are its gradients.
    counted = (batches.weights * task.shares(batches.y, axes=3)).sum(2, keepdim=True)
    shares = batches.weights / _one_if_none(counted)
    targets, shares = (t.transpose(0, 1).flatten(1, 2) for t in (batches.y, shares))
    units = torch.eye(steps, device=inputs.device)
    for step in range(steps):
        own = {n: p.detach().requires_grad_() for n, p in descent.parameters(users).items()}
        x, y, share = inputs[:, step].flatten(0, 1), targets[step], shares[step]
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
        if low_rank:
            coefficients.step({"": units[step].expand(users, steps)}, active)
        for layer in low_rank.values():
            layer.learn(coefficients.displacement[""])
    learnt: dict[str, BatchedTensor] = {**descent.moved()}
    for name, layer in low_rank.items():
        learnt |= zip(model.keys[name], layer.updates(), strict=True)
    return {name: learnt.pop(name) for name in parameters} | learnt


def _low_rank(
    model: BatchedModel, inputs: Tensor, parameters: TorchTensors, *, plain: bool
) -> dict[str, LowRankLinear | OnceConv2d]:
    """Layers that cost less with shared parameters, by name, for examples [C, S, W, …]."""
    users, steps, width = inputs.shape[:3]
    layers: dict[str, LowRankLinear | OnceConv2d] = {
        name: LowRankLinear(inputs, *(parameters[key] for key in model.keys[name]))
        for name in model.low_rank(steps, width)
    }
    if steps == 1 and plain:
        layers |= model.once_convolved(users, parameters)
    return layers
