"""The rows on which users train in each step, and the random words that determine them.

A user's rows are shuffled for each pass over them. Their order, and the choice of rows if there are
more than `local.max_examples`, depend only on the user's position in the population, the round's
key and the user's number of rows.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedpriv.training.request import LocalTraining

Integers = npt.NDArray[np.int64]

# Words of 64 bits are int64, whose products are the same modulo 2⁶⁴.
_SIGN = -(2**63)
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # odd, near 2⁶⁴ over the golden ratio
# Streams of words besides those of passes: the choice of rows, and the masks of each slice.
_CHOICE, _MASKS, _SLICES = 2**62, 2**61, 2**24


def counted(sizes: Integers, local: LocalTraining) -> Integers:
    """Return the number of each user's rows that count, given the users' numbers of rows."""
    return sizes if local.max_examples is None else np.minimum(sizes, local.max_examples)


def steps_of(counts: Integers, local: LocalTraining) -> Integers:
    """Return each user's number of steps, given the numbers of rows that count."""
    if local.steps is not None:
        return np.where(counts > 0, local.steps, 0)
    passes = local.epochs or 0
    if local.batch_size is None:
        return np.minimum(counts, 1) * passes
    return -(-counts // local.batch_size) * passes


def rounded_up(steps: int) -> int:
    """Return the next number that has nonzero bits only among its three highest."""
    unit = 1 << max(0, steps.bit_length() - 3)
    return -(-steps // unit) * unit


def largest_batch(counts: Integers, local: LocalTraining) -> Integers:
    """Return the number of rows in each user's first batch, given the rows that count."""
    return counts if local.batch_size is None else np.minimum(counts, local.batch_size)


@dataclass(frozen=True)
class Schedule:
    """The rows of L lanes in each step.

    Each lane has K slices of W rows per step. A lane without a user has one row, which does not
    count. The unused places of a slice repeat a row of the same user.
    """

    local: LocalTraining
    width: int  # W
    slices: int  # K
    words: Integers  # [L] a random word of each user
    starts: Integers  # [L] the first row in the store
    counts: Integers  # [L] number of rows that count
    among: Integers | None  # [L, most] indices of rows that count, ascending; None: the first rows

    @classmethod
    def of(
        cls,
        users: Integers,
        starts: Integers,
        sizes: Integers,
        local: LocalTraining,
        key: bytes,
        width: int,
        lanes: int,
        blank: int = 0,
    ) -> "Schedule":
        """Return the schedule of users, given positions, first rows and numbers of rows, [n ≤ L].

        Lanes without users have the row `blank` of the store.
        """
        counts, words = counted(sizes, local), _word_of(users, key)
        slices = max(1, -(-int(largest_batch(counts, local).max(initial=0)) // width))
        among = _chosen_rows(words, counts, sizes) if np.any(counts < sizes) else None
        among = None if among is None else _in_lanes(among, lanes)
        starts = _in_lanes(starts, lanes, blank)
        words, counts = _in_lanes(words, lanes), _in_lanes(counts, lanes)
        return cls(local, width, slices, words, starts, counts, among)

    def rows(self, first: int, steps: int, lanes: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return rows of the first l lanes in some steps, and which count, [l, T·K, W] each.

        Adjacent lanes with similar numbers of rows are drawn together.
        """
        powers = np.frexp(np.maximum(self.counts[:lanes], 1))[1]
        ends = [0, *(np.flatnonzero(np.diff(powers)) + 1).tolist(), lanes]
        parts = [self._rows(first, steps, slice(*pair)) for pair in itertools.pairwise(ends)]
        rows, real = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(real)

    def _rows(self, first: int, steps: int, lanes: slice) -> tuple[Integers, npt.NDArray[np.bool_]]:
        local, count = self.local, self.counts[lanes, None]
        users, size, per_step = len(count), np.maximum(count, 1), self.slices * self.width
        batch = np.minimum(size, local.batch_size or per_step)  # rows of a full batch
        per_pass = -(-size // batch)  # batches
        first_pass, largest = first // per_pass, int(size.max())
        passes = int(((first + steps - 1) // per_pass - first_pass).max()) + 1
        pass_words = _mixed(self.words[lanes, None] + _spread(first_pass + np.arange(passes)))
        order = _shuffled(pass_words, np.arange(largest), count[:, 0])
        step, column = first + np.arange(steps), np.arange(per_step)
        place = (step % per_pass * batch)[:, :, None] + column
        real = (step < steps_of(count, local))[:, :, None] & (column < batch[:, :, None])
        real &= place < count[:, :, None]
        index = (step // per_pass - first_pass)[:, :, None] * largest + place
        index = np.where(real, index, 0).reshape(users, -1)
        rows = np.take_along_axis(order.reshape(users, -1), index, 1)
        rows = self._chosen(np.where(real.reshape(users, -1), rows, 0), lanes)
        shape = users, steps * self.slices, self.width
        return (self.starts[lanes, None] + rows).reshape(shape), real.reshape(shape)

    def batches(self) -> Iterator[Integers]:
        """Yield the rows of each batch of the first lane, [b]: the same as those of `rows`."""
        count, counts = int(self.counts[0]), self.counts[:1]
        batch = self.local.batch_size or max(1, count)
        rows = self.starts[0] + (np.arange(count) if self.among is None else self.among[0])
        firsts, steps = range(0, count, batch), int(steps_of(counts, self.local)[0])
        for step, first in zip(range(steps), itertools.cycle(firsts), strict=False):
            if first == 0:
                word = _mixed(self.words[:1, None] + _spread(np.array([step // len(firsts)])))
                order = _shuffled(word, np.arange(count), counts)[0, 0]
            yield rows[order[first : first + batch]]

    def in_order(self, first: int, rows: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Return n rows of each lane in their order, and which of them count, [L, n] each."""
        places = first + np.arange(rows)
        real = places < self.counts[:, None]
        chosen = self._chosen(np.where(real, places, 0), slice(None))
        return self.starts[:, None] + chosen, real

    def _chosen(self, places: Integers, lanes: slice) -> Integers:
        """Return indices of rows [l, n] from their places among the rows that count."""
        return places if self.among is None else np.take_along_axis(self.among[lanes], places, 1)


def _in_lanes(numbers: Integers, lanes: int, filler: int = 0) -> Integers:
    """Return numbers of users [n, …] for all lanes, [L, …]."""
    if len(numbers) == lanes:
        return numbers
    padded = np.full((lanes, *numbers.shape[1:]), filler)
    padded[: len(numbers)] = numbers
    return padded


def mask_words(words: Tensor, step: int, number: int) -> Tensor:
    """Return random words of lanes for the masks in a slice of a step, int64 [l]."""
    return random_words(words, _MASKS + step * _SLICES + number, 1)[:, 0]


def random_words(words: Tensor, first: int, count: int) -> Tensor:
    """Return elements from `first` on of the sequences that words [l] start, int64 [l, count]."""
    numbers = torch.arange(first, first + count, device=words.device)
    sequences: Tensor = _mixed(words[:, None] + _spread(numbers))
    return sequences


def _chosen_rows(words: Integers, counts: Integers, sizes: Integers) -> Integers:
    """Return the indices of each user's rows that count, ascending, [L, most]."""
    among = np.tile(np.arange(max(1, int(counts.max()))), (len(words), 1))
    for lane in np.flatnonzero(counts < sizes).tolist():
        word = _mixed(words[lane : lane + 1] + _spread(np.array([_CHOICE])))[:, None]
        shuffled = _shuffled(word, np.arange(sizes[lane]), sizes[lane : lane + 1])
        among[lane, : counts[lane]] = np.sort(shuffled[0, 0, : counts[lane]])
    return among


def _shuffled(words: Integers, numbers: Integers, counts: Integers) -> Integers:
    """Return n numbers shuffled by words [L, P], as [L, P, n]; the first `counts` [L] come first.

    Numbers are ordered by unsigned words.
    """
    dice = _mixed(words[:, :, None] + _spread(numbers)) ^ _SIGN
    if counts.min() < len(numbers):
        dice[np.broadcast_to(numbers >= counts[:, None, None], dice.shape)] = ~_SIGN
    return np.argsort(dice, axis=2, kind="stable")


def _word_of(users: Integers, key: bytes) -> Integers:
    """Return a random word for each user, from the key of a round."""
    words: Integers = _mixed(int.from_bytes(key[:8], "little", signed=True) + _spread(users))
    return words


# The following functions work for int64 arrays of NumPy and for tensors.
def _spread(numbers: Any) -> Any:
    """Return the elements at these places of SplitMix64's Weyl sequence.

    Source: Steele, Lea & Flood, "Fast Splittable Pseudorandom Number Generators", 2014.
    """
    return (numbers + 1) * _GOLDEN


def _mixed(words: Any) -> Any:
    """Apply the finaliser of SplitMix64: each bit of a result depends on all bits of its word."""
    words = (words ^ _shifted(words, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    words = (words ^ _shifted(words, 27)) * (0x94D049BB133111EB - 2**64)
    return words ^ _shifted(words, 31)


def _shifted(words: Any, bits: int) -> Any:
    """Shift words to the right as unsigned numbers."""
    return (words >> bits) & (2 ** (64 - bits) - 1)
