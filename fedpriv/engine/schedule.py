"""Which rows users train on, step by step, and the random words from which all of it follows.

A user's rows are shuffled for each pass over them. Their order, and which of them count where there
are more than `local.max_examples`, depend on the user's position in the population, the round's key
and the user's number of rows alone.
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
# In place of the number of a pass: which rows count at all, and what a model draws in each slice.
_CHOICE, _MASKS, _SLICES = 2**62, 2**61, 2**24


def counted(sizes: Integers, local: LocalTraining) -> Integers:
    """How many of a user's rows count."""
    return sizes if local.max_examples is None else np.minimum(sizes, local.max_examples)


def steps_of(counts: Integers, local: LocalTraining) -> Integers:
    """How many steps users with so many rows take."""
    if local.steps is not None:
        return np.where(counts > 0, local.steps, 0)
    return _batches(counts, local) * (local.epochs or 0)


def rounded_up(steps: int) -> int:
    """The next number of steps of which three binary digits are not zero, so that few occur."""
    unit = 1 << max(0, steps.bit_length() - 3)
    return -(-steps // unit) * unit


def largest_batch(counts: Integers, local: LocalTraining) -> Integers:
    """The number of rows in the first batch of users with so many rows."""
    return counts if local.batch_size is None else np.minimum(counts, local.batch_size)


def _batches(counts: Integers, local: LocalTraining) -> Integers:
    """In how many batches users have each row once; 0 for those without any."""
    return np.minimum(counts, 1) if local.batch_size is None else -(-counts // local.batch_size)


@dataclass(frozen=True)
class Schedule:
    """All that determines the rows of L lanes.

    Lanes have slices of W rows, K for each step. A lane without a user has one row, which does not
    count, and what is left of a slice repeats a row of the same user.
    """

    local: LocalTraining
    width: int  # W
    slices: int  # K
    words: Integers  # [L] a random word of each user
    starts: Integers  # [L] the first row in the store
    counts: Integers  # [L] how many rows count
    among: Integers | None  # [L, most] which of the rows count, in their order; None: the first

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
        """The schedule of users: positions, first rows in the store and numbers of rows, [n ≤ L].

        Lanes beyond the users have the row `blank`.
        """
        beyond = lanes - len(users)
        counts, words = counted(sizes, local), _word_of(users, key)
        slices = max(1, -(-int(largest_batch(counts, local).max(initial=0)) // width))
        among = _counting(words, counts, sizes) if np.any(counts < sizes) else None
        if among is not None:
            among = np.pad(among, ((0, beyond), (0, 0)))
        words, counts = np.pad(words, (0, beyond)), np.pad(counts, (0, beyond))
        starts = np.pad(starts, (0, beyond), constant_values=blank)
        return cls(local, width, slices, words, starts, counts, among)

    @property
    def steps(self) -> Integers:
        """How many steps each lane takes, [L]."""
        return steps_of(self.counts, self.local)

    def rows(self, first: int, steps: int, lanes: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """Rows in the store of the first l lanes in some steps, and which count: [l, T·K, W] each.

        Lanes side by side of about the same number of rows are drawn together.
        """
        powers = np.frexp(np.maximum(self.counts[:lanes], 1))[1]
        ends = [0, *(np.flatnonzero(np.diff(powers)) + 1).tolist(), lanes]
        parts = [self._rows(first, steps, slice(*pair)) for pair in itertools.pairwise(ends)]
        if len(parts) == 1:
            return parts[0]
        rows, real = zip(*parts, strict=True)
        return np.concatenate(rows), np.concatenate(real)

    def _rows(self, first: int, steps: int, lanes: slice) -> tuple[Integers, npt.NDArray[np.bool_]]:
        local, count = self.local, self.counts[lanes, None]
        users, some, within = len(count), np.maximum(count, 1), self.slices * self.width
        batch = np.minimum(some, local.batch_size or within)  # rows of a full one
        per_pass = -(-some // batch)
        begun, most = first // per_pass, int(some.max())
        passes = int(((first + steps - 1) // per_pass - begun).max()) + 1
        of_passes = _mixed(self.words[lanes, None] + _spread(begun + np.arange(passes)))
        order = _shuffled(of_passes, np.arange(most), count[:, 0])
        step, column = first + np.arange(steps), np.arange(within)
        place = (step % per_pass * batch)[:, :, None] + column
        real = (step < steps_of(count, local))[:, :, None] & (column < batch[:, :, None])
        real &= place < count[:, :, None]
        number = (step // per_pass - begun)[:, :, None] * most + place
        number = np.where(real, number, 0).reshape(users, -1)
        picked = np.take_along_axis(order.reshape(users, -1), number, 1)
        picked = self._chosen(np.where(real.reshape(users, -1), picked, 0), lanes)
        shape = users, steps * self.slices, self.width
        return (self.starts[lanes, None] + picked).reshape(shape), real.reshape(shape)

    def in_order(self, first: int, rows: int) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """So many rows of each lane in their order, and which of them count: [L, n] each."""
        places = first + np.arange(rows)
        real = places < self.counts[:, None]
        picked = self._chosen(np.where(real, places, 0), slice(None))
        return self.starts[:, None] + picked, real

    def _chosen(self, places: Integers, lanes: slice) -> Integers:
        """Numbers of rows [l, n] from their places among those that count."""
        among = None if self.among is None else self.among[lanes]
        return places if among is None else np.take_along_axis(among, places, 1)


def mask_words(words: Tensor, step: int, number: int) -> Tensor:
    """Random words of lanes for what a model draws in a slice of a step: int64 [l]."""
    return random_words(words, _MASKS + step * _SLICES + number, 1)[:, 0]


def random_words(words: Tensor, first: int, count: int) -> Tensor:
    """Numbers `first`, … of the sequences that begin with words [l]: int64 [l, count]."""
    numbers = torch.arange(first, first + count, device=words.device)
    found: Tensor = _mixed(words[:, None] + _spread(numbers))
    return found


def batches_of(
    user: int, start: int, size: int, local: LocalTraining, key: bytes
) -> Iterator[Integers]:
    """Rows of the store in each batch of one user: at a position, with rows from `start` on."""
    rows, count = rows_in_order(user, start, size, local, key), int(counted(np.array(size), local))
    batch, word = local.batch_size or count, _word_of(np.array([user]), key)
    firsts, steps = range(0, count, batch), int(steps_of(np.array(count), local))
    for step, first in zip(range(steps), itertools.cycle(firsts), strict=False):
        if first == 0:
            of_pass = _mixed(word + _spread(np.array([step // len(firsts)])))
            dice = _mixed(of_pass + _spread(np.arange(count))) ^ _SIGN
            shuffled = rows[np.argsort(dice, kind="stable")]
        yield shuffled[first : first + batch]


def rows_in_order(user: int, start: int, size: int, local: LocalTraining, key: bytes) -> Integers:
    """Rows of the store that count of one user, in their order."""
    sizes = np.array([size])
    counts = counted(sizes, local)
    if counts[0] == size:
        return np.arange(start, start + size)
    rows: Integers = start + _counting(_word_of(np.array([user]), key), counts, sizes)[0]
    return rows


def _counting(words: Integers, counts: Integers, sizes: Integers) -> Integers:
    """Which of each user's rows count, in their order: [L, most]."""
    among = np.tile(np.arange(max(1, int(counts.max()))), (len(words), 1))
    for lane in np.flatnonzero(counts < sizes).tolist():
        word = _mixed(words[lane : lane + 1] + _spread(np.array([_CHOICE])))[:, None]
        drawn = _shuffled(word, np.arange(sizes[lane]), sizes[lane : lane + 1])
        among[lane, : counts[lane]] = np.sort(drawn[0, 0, : counts[lane]])
    return among


def _shuffled(words: Integers, numbers: Integers, counts: Integers) -> Integers:
    """Shuffles of n numbers by words [L, P]: [L, P, n]; counts [L] of them are real and come first.

    The order is that of words without a sign.
    """
    dice = _mixed(words[:, :, None] + _spread(numbers)) ^ _SIGN
    dice[np.broadcast_to(numbers >= counts[:, None, None], dice.shape)] = ~_SIGN
    return np.argsort(dice, axis=2, kind="stable")


def _word_of(users: Integers, key: bytes) -> Integers:
    """A random word of each user, by the key of a round."""
    words: Integers = _mixed(int.from_bytes(key[:8], "little", signed=True) + _spread(users))
    return words


# Arrays of NumPy or tensors, of int64: for these operations both are the same.
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
