"""Random allocation: every user is in exactly k rounds of a pass of n, drawn afresh each pass.

For k = 1 the pass is dominated by P = (1/n)·Σ_i N(e_i, z²I) against Q = N(0, z²I), which is the
pair of some pass (Feldman & Shenfeld 2025, arXiv 2502.08202, Theorem 3.1, for adaptive rounds and
both directions). Its likelihood ratio X under Q is the mean of those of n Gaussian rounds, and

    δ(ε) = E_Q[(X − e^ε)₊] if the user is removed,    δ(ε) = E_Q[(1 − e^ε·X)₊] if it is added.

Both are convex in X, so a pair is at least as bad as another if its X is larger in the convex
order: E[f(X)] for a convex f increases when mass moves apart and keeps its mean, and decreases when
parts of it are merged into their means (Shaked & Shanthikumar 2007, Section 3.A). Sums of
independent variables keep the order (Theorem 3.A.12). So `spread` and `merge` put the sum
R = r₁ + … + r_n back on few points after every addition, once above it and once below; both errors
are second order in the distance of the points. (Feldman & Shenfeld 2026, arXiv 2602.17284, compute
such losses by adding ratios.) Even the smallest masses are accurate, as they are only added. The
relative error of an addition is at most u·(2c + 16) in masses, and in the mean of an interval, from
which `spread` and `merge` follow, where u = 2⁻⁵³ and a term goes through at most c sums.

For k > 1, shuffle the n rounds and cut them into k blocks. One round drawn from each block is a
uniform draw of k rounds, by symmetry. Let the blocks be drawn anew for each user, and let the
adversary know them. Given the blocks B of the user that is removed or added, the pass consists of k
passes with k = 1, one over the rounds of each block, with independent draws. Blocks may interleave,
but given B a release depends on the user only through the draw of its block: the transcripts are an
adaptive composition of k mechanisms of the case k = 1, whose sizes do not depend on B, and
dominated by the product of their pairs. Without B the transcripts are mixtures over B with the same
weights, which cost no more than the worst B, by joint convexity of the hockey-stick divergence.
This is Lemma 3.2 of the paper of 2025, with blocks of nearly equal length instead of ⌊n/k⌋ rounds
each.

From below, a pass in which a user's updates are all S·e is the pair of P = mean over sets A of k
rounds of N(1_A, z²I) against Q, with the likelihood ratio E_k = e_k(r₁, …, r_n)/C(n, k), where e_k
is the elementary symmetric polynomial. Putting outputs into bins is post-processing, which never
costs, and P of a bin is the mean of E_k on it under Q. For two halves with a and b rounds,

    E_m = Σ_l h(l)·E_l(first)·E_{m − l}(second),   h(l) = C(a, l)·C(b, m − l)/C(a + b, m),

and the halves are independent under Q. So E_Q[E_m] on pairs of bins follows from those on bins of
the halves, and pairs of bins are put into bins of E₁, at last into bins of E_k. All terms are
positive.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from fedpriv.accounting.pld.lattice import ROUNDING, DiscreteLaw, Pairs
from fedpriv.accounting.pld.sampled_examples import PoissonPair, gaussian_masses
from fedpriv.accounting.round_counts import Vector

_ULP = 2.0**-53
_PAIRS_AT_ONCE = 1 << 15
_LEADING_BITS = 18  # of edges of intervals, after their common bits: a table of 2 MB
_MASS_ERROR, _VALUE_ERROR = 1e-12, 3e-12  # relative, of the intervals of one round and their means
_LARGEST_LOG = 500.0  # values beyond e^±500 are rounded, to avoid underflow of relevant products
# Probabilities of tails that are cut off; points are dense down to their square roots.
_TAILS = (1e-24, 1e-40, 1e-120, 1e-290)
_LOST = 1e-90  # more than the probability of all masses that may underflow
_MOST_ROUNDS = 1 << 30
_KEPT = 512  # sums in the cache, some 50 kB each; enough for all passes of one price

# Distances of points: relative to their distance from the median, and at most relative to
# max(2, 1/z); and the factors of both below the median, and in tails. With these, intervals of ε
# are narrower than a thousandth.
_NEAR, _FAR, _BELOW, _SPARSE = 0.005, 0.009, 3.0, 8.0
MOST_PARTICIPATIONS = 32  # of a `SubsetPair`
_BINS, _RARE = 512, 1e-60
_COARSE = 64  # points of a summand for the outline of a sum


@dataclass(frozen=True)
class RatioSum:
    """A variable close to the sum of the ratios of some rounds.

    Some variable above the sum in the convex order (`spread`), or below it (`merge`), has values
    within a factor e^{±value_error} of these, and masses within e^{±mass_error}.
    """

    rounds: int
    value: Vector  # [points] increasing values ≥ 0
    mass: Vector  # [points] their probabilities under N(0, z²)
    infinite: float  # part of the mean at infinite values: n times a probability under P
    value_error: float
    mass_error: float


Shape = Callable[[Vector, Vector, Vector], tuple[Vector, Vector, float]]
"""Replaces a distribution over intervals by one on points, such as `spread` and `merge`.

Arguments are, for each interval and for the values above the last edge, the lower end (the first is
0), the mass and the excess Σ mass·(value − lower end) ≥ 0. Results are values, masses, and the part
of the mean at infinity.
"""


def spread(edge: Vector, mass: Vector, excess: Vector) -> tuple[Vector, Vector, float]:
    """Return masses moved to the ends of their intervals: above in the convex order.

    The mass above the last edge moves there and to infinity.
    """
    moved = np.minimum(excess[:-1] / np.diff(edge), mass[:-1])
    mass = mass.copy()
    mass[1:] += moved
    mass[:-1] -= moved
    return edge, mass, float(excess[-1])


def merge(edge: Vector, mass: Vector, excess: Vector) -> tuple[Vector, Vector, float]:
    """Return masses moved to the means of their intervals: below in the convex order."""
    positive = mass > 0
    return edge[positive] + excess[positive] / mass[positive], mass[positive], 0.0


def one_round(z: float, log_edges: Vector, shape: Shape) -> RatioSum:
    """Return the ratio of one round."""
    edge, _ = _edges(log_edges)
    x = np.concatenate([[-np.inf], z**2 * np.log(edge[1:]) + 0.5, [np.inf]])
    absent, present = (gaussian_masses(x[:-1], x[1:], mean, z) for mean in (0.0, 1.0))
    points = shape(edge, absent, np.maximum(present - edge * absent, 0.0))
    return RatioSum(1, *points, _VALUE_ERROR, _MASS_ERROR)


def add(first: RatioSum, second: RatioSum, log_edges: Vector, shape: Shape) -> RatioSum:
    """Return the sum of two independent variables, which belong to different rounds."""
    edge, shift = _edges(log_edges)
    # Positive numbers are ordered like their bits, so leading bits determine a value's interval.
    keys, size = edge[1:].view(np.int64) >> shift, len(edge)
    table = np.repeat(np.arange(size), np.diff(keys, prepend=keys[0] - 1, append=keys[-1] + 1))
    mass, mean, terms = np.zeros(size), np.zeros(size), 0
    rows = max(1, _PAIRS_AT_ONCE // len(second.value))
    for start in range(0, len(first.value), rows):
        block = slice(start, start + rows)
        values, weights = second.value, second.mass
        if first is second:
            values, weights = values[start:], weights[start:].copy()
            weights[rows:] *= 2  # the columns to the left of this block are its mirror image
        value = (first.value[block, None] + values).ravel()
        weight = (first.mass[block, None] * weights).ravel()
        interval = table.take((value.view(np.int64) >> shift) - (keys[0] - 1), mode="clip")
        mass += np.bincount(interval, weight, size)
        mean += np.bincount(interval, weight * value, size)
        terms = max(terms, int(np.bincount(interval).max()))
    value, mass, infinite = shape(edge, mass, np.maximum(mean - edge * mass, 0.0))
    infinite += first.infinite + second.infinite
    rounding = _ULP * (2 * (terms + math.ceil(len(first.value) / rows)) + 16)
    value_error = max(first.value_error, second.value_error) + rounding
    mass_error = first.mass_error + second.mass_error + rounding
    return RatioSum(first.rounds + second.rounds, value, mass, infinite, value_error, mass_error)


def _edges(log_edges: Vector) -> tuple[Vector, int]:
    """Return 0 and edges, rounded down to their leading bits, and the number of bits cut off."""
    bits = np.exp(log_edges).view(np.int64)
    shift = max(0, int(bits[-1] - bits[0]).bit_length() - _LEADING_BITS)
    return np.append(0.0, (np.unique(bits >> shift) << shift).view(np.float64)), shift


def coarse(ratios: RatioSum, points: int) -> tuple[Vector, Vector]:
    """Return positive means, and masses, of at most `points` groups of neighbouring points."""
    share = np.linspace(0.0, 1.0, points, endpoint=False)
    first = np.unique((len(ratios.value) * share**2 * (3 - 2 * share)).astype(np.int64))
    mass = np.add.reduceat(ratios.mass, first)
    total = np.add.reduceat(ratios.mass * ratios.value, first)
    positive = total > 0  # a mean may underflow
    return total[positive] / mass[positive], mass[positive]


@lru_cache(maxsize=_KEPT)
def sum_of_ratios(rounds: int, z: float, tail: float, shape: Shape) -> RatioSum:
    """Return R of n rounds: two times that of ⌊n/2⌋ rounds, and for an odd n one more round.

    Different n share the sums of fewer rounds.
    """
    mu = 1 / z
    far = _FAR * max(2.0, mu)
    if rounds == 1:
        reach = mu * ndtri([tail, math.sqrt(tail), 0.5])
        ends = np.append(reach, -reach[1::-1]) + mu**2 / 2 * np.array([-1, -1, -1, 1, 1])
        return one_round(z, _spaced(ends, mu, far), shape)
    half = sum_of_ratios(rounds // 2, z, tail, shape)
    total = add(half, half, _spaced(*_outline(half, half, tail), far), shape)
    if rounds % 2:
        one = sum_of_ratios(1, z, tail, shape)
        total = add(total, one, _spaced(*_outline(total, one, tail), far), shape)
    return total


def _outline(first: RatioSum, second: RatioSum, tail: float) -> tuple[Vector, float]:
    """Return five ends, as of `_spaced`, and the scale of the logarithm of a sum."""
    (one, p), (other, q) = coarse(first, _COARSE), coarse(second, _COARSE)
    value, mass = (one[:, None] + other).ravel(), (p[:, None] * q).ravel()
    order = np.argsort(value)
    logs, mass, tails = np.log(value[order]), mass[order], [tail, math.sqrt(tail)]
    present = np.cumsum((mass * value[order])[::-1]) / (first.rounds + second.rounds)
    most, high = np.interp(tails, present, logs[::-1])
    least, low, below, middle, above = np.interp([*tails, 0.16, 0.5, 0.84], np.cumsum(mass), logs)
    return np.array([least, low, middle, high, most]), float(above - below) / 2


def _spaced(ends: Vector, scale: float, far: float) -> Vector:
    """Return points with distances that increase with the distance from the middle up to `far`.

    Ends are the lowest point, the lowest dense one, the middle, the highest dense one, and the
    highest. δ depends on large ratios and hardly on tails, so points below the middle and in tails
    may be farther apart.
    """
    least, low, middle, high, most = np.clip(ends, -_LARGEST_LOG, _LARGEST_LOG)
    first, last = (math.asinh((end - middle) / scale) for end in (least, most))
    place = np.linspace(first, last, 1 << 11)
    point = middle + scale * np.sinh(place)
    density = np.maximum(1 / _NEAR, np.hypot(point - middle, scale) / far)
    density /= np.where(point < middle, _BELOW, 1.0)
    density /= np.where((point < low) | (point > high), _SPARSE, 1.0)
    number = np.cumsum(density * (place[1] - place[0]))
    return np.asarray(np.interp(np.arange(math.ceil(number[-1]) + 1), number, point))


def allocation_pairs(rounds: int, participations: int, noise_multiplier: float) -> Pairs:
    """Return pairs that together dominate one pass when a user is added or removed.

    This holds for adaptively chosen rounds too. For k = 1 and k = n it is the exact pair of the
    pass. Otherwise there is one pair for each block of ⌊n/k⌋ or ⌈n/k⌉ rounds, and lower bounds of
    these pairs say nothing about the pass.

    >>> sorted(allocation_pairs(11, 3, 1.0).items(), key=lambda item: item[0].rounds)
    [(AllocationPair(rounds=3, z=1.0), 1), (AllocationPair(rounds=4, z=1.0), 2)]
    """
    z, (size, larger) = noise_multiplier, divmod(rounds, participations)
    counts = {size: participations - larger, size + 1: larger}
    return {
        AllocationPair(n, z) if n > 1 else PoissonPair(1.0, z): count
        for n, count in counts.items()
        if count
    }


@dataclass(frozen=True)
class AllocationPair:
    """The pair of a pass of n rounds in which each user joins exactly one.

    More rounds are no worse: the mean of n ratios is the mean of the means of n − 1 of them. An n
    above 2³⁰ is computed as 2³⁰, and has no loss at most as bad. A loss at least as bad is infinite
    with probability 10⁻⁹⁰ or more.
    """

    rounds: int  # n ≥ 1
    z: float  # noise_stddev per sensitivity, ≥ 0

    @property
    def q(self) -> float:
        """1/√n: the ratio has the variance q²·(e^{1/z²} − 1), like that of a sampled round."""
        return 1 / math.sqrt(self.rounds)

    def at(self, q: float, z: float) -> "AllocationPair":
        """Return the pair of the same kind with another n, exact up to 2³⁰, and z."""
        return AllocationPair(round(q**-2.0), z)

    def at_most_as_bad(self, tail: float) -> DiscreteLaw | None:
        """Return a loss that is at most as bad as that of the pass; None for n above 2³⁰."""
        return _law(self._sum(tail, merge), -1) if self.rounds <= _MOST_ROUNDS else None

    def at_least_as_bad(self, tail: float) -> DiscreteLaw:
        """Return a loss that is at least as bad as that of the pass."""
        return _law(self._sum(tail, spread), 1)

    def _sum(self, tail: float, shape: Shape) -> RatioSum:
        cut = next((limit for limit in _TAILS if math.sqrt(limit) <= tail), _TAILS[-1])
        return sum_of_ratios(min(self.rounds, _MOST_ROUNDS), self.z, cut, shape)


def _law(ratios: RatioSum, sign: int) -> DiscreteLaw:
    """Return the loss log X, with the errors of the ratios added if the sign is 1, or subtracted.

    If X has an error of a factor e^{±v}, so have its masses under P, and the loss has one of v. If
    X is infinite, or a mass may have underflowed, the loss is infinite, or left out for sign −1.
    """
    n, q, infinite = ratios.rounds, ratios.mass, ratios.infinite / ratios.rounds + _LOST
    infinite = infinite if sign > 0 else 0.0
    finite = [q * ratios.value / n, q, q * (ratios.value - n) / n]
    tails = [[infinite, 0.0], [0.0, _LOST], [infinite, -_LOST]]
    factor = math.exp(sign * (ratios.mass_error + ratios.value_error))
    p, q, gap = factor * np.hstack([finite, tails])
    return DiscreteLaw(p, q, gap, 1.0 + ratios.value_error / (2 * ROUNDING))


@dataclass(frozen=True)
class SubsetPair:
    """A pair dominated by a pass in which each user joins k random rounds of n.

    Outputs are put into bins, and dropped if they are rarer than 10⁻⁶⁰.
    """

    rounds: int  # n
    participations: int  # k, at most `MOST_PARTICIPATIONS`
    z: float  # noise_stddev per sensitivity, ≥ 0
    q: float = 1.0

    def at(self, q: float, z: float) -> "SubsetPair":  # noqa: ARG002
        """Return the pair of the same kind with another z."""
        return replace(self, z=z)

    def at_least_as_bad(self, tail: float) -> DiscreteLaw:  # noqa: ARG002
        """Return the pair's loss with its errors subtracted; it is for lower bounds only."""
        sums, error = _in_bins(self.rounds, self.participations, self.z, self.participations)
        value = self.rounds * sums[-1] / sums[0]
        return _law(RatioSum(self.rounds, value, sums[0], 0.0, 2 * error + 4 * _ULP, error), -1)

    at_most_as_bad = at_least_as_bad


@lru_cache(maxsize=64)
def _in_bins(rounds: int, k: int, z: float, order: int) -> tuple[Vector, float]:
    """Return E_Q[E_m] on each bin of E_`order` for m = 0, …, k, and a bound on relative errors.

    The shape is [1 + k, bins]; the first row is the probabilities of bins.
    """
    if rounds == 1:
        x = np.concatenate([[-np.inf], np.linspace(-9 * z, 1 + 9 * z, _BINS - 1), [np.inf]])
        sums, error = np.zeros((1 + k, _BINS)), _MASS_ERROR
        for m in (0, 1):
            sums[m] = gaussian_masses(x[:-1], x[1:], float(m), z)
    else:
        a, b = rounds // 2, rounds - rounds // 2
        (first, error), (second, other) = _in_bins(a, k, z, 1), _in_bins(b, k, z, 1)
        pairs = np.zeros((1 + k, first.shape[1], second.shape[1]))
        for m in range(min(k, rounds) + 1):
            ways = [
                math.comb(a, i) * math.comb(b, m - i) / math.comb(rounds, m) for i in range(m + 1)
            ]
            pairs[m] = np.einsum("i,ip,iq->pq", ways, first[: m + 1], second[m::-1])
        sums = pairs.reshape(1 + k, -1)
        sums = sums[:, (sums[0] > _RARE) & (sums[order] > _RARE**4)]
        log_value = np.log(sums[order] / sums[0])
        share = (log_value - log_value.min()) / max(float(np.ptp(log_value)), 1e-9)
        places = (share * (_BINS - 1)).astype(np.int64)
        error += other + 2 * _ULP * (int(np.bincount(places).max()) + k + 16)
        sums = np.array([np.bincount(places, row, _BINS) for row in sums])
    return sums[:, (sums[0] > _RARE) & (sums[1] > 0.0)], error
