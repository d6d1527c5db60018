"""Poisson sampling: every user joins the cohort independently with exactly the stated chance."""

from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import mul

import numpy as np
from numpy.typing import NDArray

from fedpriv.ledger.events import NeighbouringRelation, SamplingEvent, SamplingPolicy, Unit
from fedpriv.privacy.noise import keystream, words

_MOST_PASSED = 128
_WORDS_AT_ONCE = 1 << 14
_WORDS, _MORE_BITS = 0, 1  # streams of a key


@dataclass(frozen=True)
class PoissonSampling:
    """Each user of the population joins the cohort independently with one probability.

    The number of users passed over before the next one joins is geometric, and found by inversion
    (Devroye 1986, X.2). W uniform on [0, 1) passes over j users, and the one after them joins, if
    (1 − q)^(j+1) ≤ W < (1 − q)^j. One W decides on at most G = min(⌊1/q⌋, 128) users: below
    (1 − q)^G it passes over all G. The next W starts after the users that the last one decided on.

    A float64 q is a multiple of 2^-e for some e ≤ 1074, so these limits are multiples of 2^-eG, and
    W has as many bits. Its first 64 are a word of keystream and decide, unless they equal those of
    a limit: then the others are read.

    Guarantees, for an observer who does not know the key and cannot tell AES-256 from random bits:

    * the probability to join is exactly the float64 sampling_probability, for every legal value
      down to the smallest subnormal (2^-1074): what is priced is what is drawn;
    * users join independently of each other, and of draws with other keys;
    * the cohort depends on the key, the population and the probability only, and is the same on
      every machine: integer arithmetic throughout;
    * an empty cohort is a legal cohort.
    """

    population: int  # N ≥ 1, the number of enrolled users, a public constant
    sampling_probability: float  # q in (0, 1]
    unit: Unit = Unit.USER  # what is enrolled, and here called a user

    def __post_init__(self) -> None:
        self.event()

    @property
    def expected_cohort_size(self) -> float:
        """qN, the public denominator of an average; the realised size is secret."""
        return self.sampling_probability * self.population

    def event(self) -> SamplingEvent:
        """Return the event of one draw, for accountants of the add-or-remove-one relation."""
        return SamplingEvent(
            SamplingPolicy.POISSON,
            self.sampling_probability,
            self.population,
            NeighbouringRelation.ADD_OR_REMOVE_ONE,
            unit=self.unit,
        )

    def draw(self, key: bytes) -> NDArray[np.int64]:
        """Draw the cohort that a key determines: positions in [0, N), ascending; a secret.

        The key is 32 secret bytes, used for nothing else. A 64-bit word is read for each member and
        for each G users passed over; memory is twice the cohort and some megabytes.
        """
        limits = _limits(self.sampling_probability)
        most = limits.size
        cohort = []
        start = number = 0
        while start < self.population:
            expected = (self.population - start) * (1 / most + self.sampling_probability)
            count = min(int(expected) + 1, _WORDS_AT_ONCE)
            passed = _passed(key, number, count, self.sampling_probability, limits)
            ends = start + np.cumsum(np.minimum(passed + 1, most))
            cohort.append(ends[passed < most] - 1)
            start, number = int(ends[-1]), number + count
        users = np.concatenate(cohort)
        return users[: np.searchsorted(users, self.population)]


def _limits(probability: float) -> NDArray[np.uint64]:
    """First 64 bits of (1 − q)^j for j = G, …, 1, uint64 [G]; ascending."""
    joins, all_of = probability.as_integer_ratio()
    most = min(all_of // joins, _MOST_PASSED)
    bits = all_of.bit_length() - 1
    powers = accumulate(repeat(all_of - joins, most), mul)
    first = [(power << 64) >> bits * j for j, power in enumerate(powers, start=1)]
    return np.array(first[::-1], np.uint64)


def _passed(
    key: bytes, first: int, count: int, probability: float, limits: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """How many users each of the words `first` to `first + count` passes over: [count], up to G."""
    drawn = words(key, count, stream=_WORDS, start=first)
    passed = np.full(count, limits.size, np.int64)
    stops = np.flatnonzero(drawn >= limits[0])
    word = drawn[stops]
    reached = np.searchsorted(limits, word, side="right")
    passed[stops] = limits.size - reached
    for stop in stops[limits[reached - 1] == word].tolist():
        number = first + stop
        passed[stop] = _passed_exactly(key, int(drawn[stop]), number, probability, limits.size)
    return passed


def _passed_exactly(key: bytes, word: int, number: int, probability: float, most: int) -> int:
    """How many users the word of a number passes over, by all bits of its W."""
    joins, all_of = probability.as_integer_ratio()
    size = -(-(all_of.bit_length() - 1) * most // 8)
    more = keystream(key, size, stream=_MORE_BITS, start=number * size)
    w = word << 8 * size | int.from_bytes(more.tobytes(), "little")
    one = 1 << 64 + 8 * size
    return sum(w * all_of**j < one * (all_of - joins) ** j for j in range(1, most + 1))
