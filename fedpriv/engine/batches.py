"""What users train on: shapes that are public, and rows chosen by each user's own key.

A user's shape, its rung, follows from the plan and the user's own number of examples; no other
user's data decide how it computes. Shapes lie on a ladder, since users of different shapes cannot
train together; up to a quarter of a shape is padding, which counts for nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task
from fedpriv.privacy.round import LocalTraining

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
    return _divided(numbers, apart) * apart


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
    passes = _divided(steps, per_pass)
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
    return BatchRows(starts[:, None, None] + picked, weights, starts[:, None] + chosen)


@dataclass(frozen=True)
class Batches:
    """Batches of L lanes, of which the first are users and the others blank."""

    x: Tensor  # [L, S, W, …] inputs; zeros where a lane is blank
    y: Tensor  # [L, S, W, …] targets, likewise
    weights: Tensor  # [L, S, W] 1 for examples, 0 for padding and blanks
    padded: bool  # whether some steps may have no examples, and then do nothing

    @property
    def shape(self) -> tuple[int, int, int]:
        """(L, S, W)."""
        lanes, steps, width = self.weights.shape
        return lanes, steps, width

    def active(self, step: int) -> Tensor | None:
        """Which lanes have this step, [L]; None: all."""
        return self.weights[:, step].amax(1) > 0 if self.padded else None


@dataclass(frozen=True)
class Examples:
    """The examples of C users in L lanes, on the device where they train."""

    rung: Rung
    lanes: int  # L ≥ C
    users: Integers  # [C] positions in the enrolled population
    counts: Integers  # [C] examples of each that count
    store: UserStore
    device: torch.device
    plan: BatchRows
    task: Task  # says which fields it reads

    def batches(self) -> Batches:
        """What they train on."""
        x, y = self._gathered(self.plan.rows)
        weights = self._blank((self.rung.steps, self.rung.width), torch.float32)
        weights[: len(self.users)] = torch.from_numpy(self.plan.weights)
        return Batches(x, y, self._moved(weights), self.rung.padded)

    def blocks(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """All that is measured, each example once: x and y [L·W, …], and which are real [L, W]."""
        width = self.rung.width
        for first in range(0, width * self.rung.blocks, width):
            rows = self.plan.chosen[:, first : first + width]
            x, y = (t.flatten(0, 1) for t in self._gathered(rows))
            real = self._blank((width,), torch.bool)
            places = np.arange(first, first + width)
            real[: len(self.users)] = torch.from_numpy(places < self.counts[:, None])
            yield x, y, self._moved(real)

    def sizes(self) -> Tensor:
        """Number of examples of each lane that count, float64 [L]; 0 where it is blank."""
        sizes = self._blank((), torch.float64)
        sizes[: len(self.users)] = torch.from_numpy(self.counts)
        return self._moved(sizes)

    def _gathered(self, rows: Integers) -> tuple[Tensor, Tensor]:
        """Inputs and targets [L, …] of rows [C, …], in memory whose alignment does not vary."""
        held = {}
        for name in (self.task.inputs, self.task.targets):
            field = self.store.fields[name]
            kind = torch.from_numpy(np.empty(0, field.dtype)).dtype
            held[name] = self._blank((*rows.shape[1:], *field.shape[1:]), kind)
        self.store.take(rows, {name: t.numpy()[: len(rows)] for name, t in held.items()})
        return self._moved(held[self.task.inputs]), self._moved(held[self.task.targets])

    def _blank(self, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """Memory [L, …] on the CPU, zero where no user is."""
        pinned = self.device.type == "cuda"
        memory = torch.empty((self.lanes, *shape), dtype=kind, pin_memory=pinned)
        memory[len(self.users) :].zero_()
        return memory

    def _moved(self, memory: Tensor) -> Tensor:
        """The same on the device; a GPU does other work meanwhile."""
        return memory.to(self.device, non_blocking=True)


def _batches(counts: Integers, local: LocalTraining) -> Integers:
    """In how many batches users have each example once; 0 for those without any."""
    size = local.batch_size
    return np.minimum(counts, 1) if size is None else _divided(counts, np.full_like(counts, size))


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


def _divided(above: Integers, below: Integers) -> Integers:
    """Quotients, rounded up."""
    return -(-above // below)
