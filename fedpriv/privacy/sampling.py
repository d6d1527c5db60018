"""The cohort of a round: each enrolled user joins by a coin of exactly the stated probability."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.events import NeighbouringRelation, SamplingEvent, SamplingPolicy
from fedpriv.privacy.entropy import keystream, words

_BLOCK = 1 << 20
_COINS = 0
_FIRST_LAYER = 1


@dataclass(frozen=True)
class PoissonSampling:
    """Each user of the population joins the cohort independently with one probability.

    Let q = m·2^-k with m in [1/2, 1), or m = 1 and k = 0 if q = 1. User i survives thinning if
    bit i of k streams of random bits is set, probability exactly 2^-k; each survivor then tosses
    one more 64-bit word w and joins if w < m·2^64. A float64 q has 53 significant bits, so m·2^64
    is an integer.

    Guarantees, for an observer who does not know the key and cannot tell AES-256 from random bits:

    * the probability to join is exactly the float64 sampling_probability, not merely at most,
      for every legal value down to the smallest subnormal (2^-1074); the accountant prices
      exactly what is drawn;
    * users' coins are independent of each other, and of other keys' coins;
    * the cohort depends on the key, the population and the probability only, and is the same on
      every machine: integer arithmetic throughout;
    * an empty cohort is a legal cohort.

    Attributes:
        population: N ≥ 1, the number of enrolled users, a public constant.
        sampling_probability: q in (0, 1].

    Raises:
        InvalidValueError: an attribute is out of range.
    """

    population: int
    sampling_probability: float

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
        )

    def draw(self, key: bytes) -> NDArray[np.int64]:
        """Draw the cohort that a key determines.

        Reads some 22 bits of keystream a user at most, and a word a survivor; memory is twice the
        cohort and some tens of megabytes, whatever the population.

        Args:
            key: 32 secret bytes, used for nothing else.

        Returns:
            int64[cohort size], the members' positions in [0, N), ascending, each at most once;
            a secret.

        Raises:
            InvalidValueError: the key has not 32 bytes.
        """
        layers, threshold = _thinning(self.sampling_probability)
        cohort = []
        coins = 0
        for start in range(0, self.population, _BLOCK):
            stop = min(start + _BLOCK, self.population)
            survivors = _survivors(key, start, stop, layers)
            # q = 1 has t = 2^64, which no 64-bit word holds, hence w ≤ t − 1 for w < t.
            coin = words(key, survivors.size, stream=_COINS, start=coins)
            cohort.append(survivors[np.flatnonzero(coin <= np.uint64(threshold - 1))])
            coins += survivors.size
        return np.concatenate(cohort)


def _thinning(probability: float) -> tuple[int, int]:
    """Layers k ≥ 0 and coin threshold t ≤ 2^64 with probability = 2^-k · t / 2^64 exactly."""
    layers = max(0, -math.frexp(probability)[1])
    return layers, int(math.ldexp(probability, 64 + layers))


def _survivors(key: bytes, start: int, stop: int, layers: int) -> NDArray[np.int64]:
    """Positions in [start, stop) whose bit is set in all layers; start is a multiple of 64."""
    if layers == 0:
        return np.arange(start, stop, dtype=np.int64)
    size = 8 * -(-(stop - start) // 64)
    alive = keystream(key, size, stream=_FIRST_LAYER, start=start // 8)
    for layer in range(_FIRST_LAYER + 1, _FIRST_LAYER + layers):
        if not alive.any():
            break
        alive &= keystream(key, size, stream=layer, start=start // 8)
    # Few groups of 64 users have a survivor when k is large: only those are taken apart.
    groups = alive.view(np.uint64)
    occupied = np.flatnonzero(groups)
    bits = np.unpackbits(groups[occupied].view(np.uint8), bitorder="little").view(np.bool_)
    at = np.flatnonzero(bits)
    positions = (start + 64 * occupied[at // 64] + at % 64).astype(np.int64, copy=False)
    return positions[: np.searchsorted(positions, stop)]
