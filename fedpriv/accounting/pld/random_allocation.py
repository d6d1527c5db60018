"""Random allocation: every user is in exactly k rounds of a pass of n, drawn afresh each pass.

For k = 1 the pass is dominated by the pair P = (1/n)·Σ_i N(e_i, z²I) against Q = N(0, z²I), which
is also one of its own (Feldman & Shenfeld 2025, arXiv 2502.08202, Theorem 3.1, for adaptive rounds
and both directions). Its likelihood ratio X under Q is the mean of those of n Gaussian rounds, and

    δ(ε) = E_Q[(X − e^ε)₊] if the user is removed,    δ(ε) = E_Q[(1 − e^ε·X)₊] if it is added.

Both are convex in X, so a pair is at least as bad as another one if its X is above in the convex
order: for a convex f, E[f(X)] grows when mass moves apart and keeps its mean, and shrinks when
parts of it are merged into their means (Shaked & Shanthikumar 2007, Section 3.A). Sums of
independent variables keep the order (Theorem 3.A.12). So `spread` and `merge` put the sum
R = r₁ + … + r_n on few points again after every addition, without losing sight of what is above and
what is below it; both errors are second order in the distance of the points. (That such losses can
be computed by adding up ratios is due to Feldman & Shenfeld 2026, arXiv 2602.17284.) Nothing is
subtracted, so the smallest masses are right, too. An addition is wrong by at most u·(2c + 16) in
masses and in values, where u = 2⁻⁵³ and c is the largest number of terms of one interval.

For k > 1, shuffle the n rounds and cut them into k blocks. One round drawn from each block is a
uniform draw of k rounds: all sets are equally likely by symmetry. Let the blocks be drawn anew for
each user and told to the adversary. For the user that is removed or added, given its blocks B, the
pass is k passes with k = 1, one over the rounds of each block, in each of which the user takes part
in one round, independent of the other blocks. Rounds of different blocks may interleave; but given
B a release depends on the user only through the coins of its own block, so that the pair of
transcripts is an adaptive composition of k mechanisms of the case k = 1, whose sizes do not depend
on B, and is dominated by the product of their pairs. Without B the two transcripts are mixtures
over B with the same weights, and by joint convexity of the hockey-stick divergence these cost no
more than the worst B. This is Lemma 3.2 of the paper of 2025, but for blocks that are as equal as
can be instead of ⌊n/k⌋ long.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from fedpriv.accounting.pld.dominating_pairs import PoissonPair, gaussian_masses
from fedpriv.accounting.pld.lattice import (
    DiscreteLaw,
    Lattice,
    LossAtoms,
    Pairs,
    Sketch,
    dominated,
    dominating,
)
from fedpriv.accounting.round_counts import Direction, Vector

_ULP = 2.0**-53
_PAIRS_AT_ONCE = 1 << 17
_MASS_ERROR, _VALUE_ERROR = 1e-12, 3e-12  # relative, of the intervals of one round and their means
_LARGEST_LOG = 500.0  # values beyond e^±500 are rounded, so that no product that matters underflows
_SMALLEST = 1e-290
# Probabilities of losses that are cut off; points are dense down to their square roots.
_TAILS = (1e-40, 1e-120, 1e-290)
_LOST = 1e-90  # more than the probability of all that may underflow
_MOST_ROUNDS = 1 << 30
_NODES = 1024  # of a sketch: groups of more than a few points would hide how fast tails fall

# Where points are placed. Share of ε that all additions may cost: for usual δ, and below `_DEEP`.
_TOLERANCE, _DEEP_TOLERANCE, _DEEP = 3e-4, 1e-2, 1e-12
# Largest distances of the ε that should be right: in the decimal log of δ, relative to ε.
_DECADES, _APART = 1.7, 0.2
_LARGEST_DELTA = 0.9
_LEAST_COST = 1.0  # how much log δ is taken to fall up to an ε at least; δ near 1 falls slowly
_GRID = 300
# Distance of points for the quick look: relative to that from the median, and to max(2, 1/z).
_NEAR, _FAR = 0.08, 0.06
_COARSE, _FINE = 64, 100  # points that show where a sum is, and how it is distributed
_BEYOND = 1.5  # how far points go, relative to the distance of what can be seen from the median
_STEEPEST = 3.0  # how steep φ may seem to be, relative to the largest slope of δ
_ROOM = 2.0  # how much of all cost one point may take, in sixths, where cost outgrows g²
_NEARLY_ALL = 0.9  # share of the rounds from which on the others hardly matter


@dataclass(frozen=True)
class RatioSum:
    """A variable that is close to the sum of the ratios of some rounds.

    There is a variable above R in the convex order (`spread`), or below (`merge`), whose quotient
    with this one is within e^{±value_error}, while the masses are within e^{±mass_error}.
    """

    rounds: int
    value: Vector  # [points] increasing values ≥ 0
    mass: Vector  # [points] their probabilities under N(0, z²)
    infinite: float  # part of the mean at infinite values: n times a probability under P
    value_error: float
    mass_error: float


Points = tuple[Vector, Vector, float]
"""Values, masses and the infinite part of the mean."""
Shape = Callable[[Vector, Vector, Vector], Points]
"""What stands for a distribution that is known by intervals: `spread` or `merge`.

Given are, for each interval and for what is above the last edge, the lower end (the first is 0),
the mass and the excess Σ mass·(value − lower end) ≥ 0.
"""


def spread(edge: Vector, mass: Vector, excess: Vector) -> Points:
    """Masses moved to the ends of their intervals, which is above them in the convex order.

    What is above the last edge moves to it and to infinity.
    """
    moved = np.minimum(excess[:-1] / np.diff(edge), mass[:-1])
    mass = mass.copy()
    mass[1:] += moved
    mass[:-1] -= moved
    return edge, mass, float(excess[-1])


def merge(edge: Vector, mass: Vector, excess: Vector) -> Points:
    """Masses moved to the means of their intervals, which is below them in the convex order."""
    some = mass > 0
    return edge[some] + excess[some] / mass[some], mass[some], 0.0


def one_round(z: float, log_edges: Vector, shape: Shape) -> RatioSum:
    """The ratio of one round."""
    log_edges, edge = _distinct(log_edges)
    x = np.concatenate([[-np.inf], z**2 * log_edges + 0.5, [np.inf]])
    absent, present = gaussian_masses(x, 0.0, z), gaussian_masses(x, 1.0, z)
    points = shape(edge, absent, np.maximum(present - edge * absent, 0.0))
    return RatioSum(1, *points, _VALUE_ERROR, _MASS_ERROR)


def add(first: RatioSum, second: RatioSum, log_edges: Vector, shape: Shape) -> RatioSum:
    """The sum of two independent ones, of further rounds."""
    _, edge = _distinct(log_edges)
    size = len(edge)
    mass, excess, terms = np.zeros(size), np.zeros(size), np.zeros(size, np.int64)
    rows = max(1, _PAIRS_AT_ONCE // len(second.value))
    for start in range(0, len(first.value), rows):
        here = slice(start, start + rows)
        values, weights = second.value, second.mass
        if first is second:
            values, weights = values[start:], weights[start:].copy()
            weights[rows:] *= 2  # what is left of this block of rows is its mirror image
        value = (first.value[here, None] + values).ravel()
        weight = (first.mass[here, None] * weights).ravel()
        interval = np.searchsorted(edge, value, side="right") - 1
        mass += np.bincount(interval, weight, size)
        excess += np.bincount(interval, weight * (value - edge[interval]), size)
        terms += np.bincount(interval, minlength=size)
    value, mass, infinite = shape(edge, mass, excess)
    rounding = _ULP * (2 * float(terms.max()) + 16)
    return RatioSum(
        first.rounds + second.rounds,
        value,
        mass,
        first.infinite + second.infinite + infinite,
        max(first.value_error, second.value_error) + rounding,
        first.mass_error + second.mass_error + rounding,
    )


def _distinct(log_edges: Vector) -> tuple[Vector, Vector]:
    """Logarithms of edges that rounding leaves apart, and 0 and these edges."""
    edge, first = np.unique(np.exp(log_edges), return_index=True)
    return log_edges[first], np.concatenate([[0.0], edge])


def coarse(ratios: RatioSum, points: int) -> tuple[Vector, Vector]:
    """Values above 0, and masses, of at most so many groups of neighbouring points."""
    first = np.arange(0, len(ratios.value), -(-len(ratios.value) // points))
    mass = np.add.reduceat(ratios.mass, first)
    total = np.add.reduceat(ratios.mass * ratios.value, first)
    some = total > 0  # a mean may underflow
    return total[some] / mass[some], mass[some]


@dataclass(frozen=True)
class Target:
    """One ε at which δ should be right."""

    threshold: float  # R/n at this ε: e^ε where a user is removed, e^{−ε} where one is added
    sign: int  # 1 where larger sums are worse, −1 where smaller ones are
    delta: float
    steepness: float  # −d log δ/dε
    cost: float  # how much log δ may rise

    @property
    def density(self) -> float:
        """Points per unit of log R, where a point matters to the ε nearby alone."""
        return self.steepness / math.sqrt(12 * self.cost)


def targets_of(ratios: RatioSum, tail: float, additions: int) -> list[Target]:
    """Targets from the standard deviation of log R to where δ is √tail, by threshold."""
    x, mass = ratios.value / ratios.rounds, ratios.mass / ratios.mass.sum()
    log_x = np.log(x)
    deviation = math.sqrt(float(mass @ np.square(log_x - mass @ log_x)))
    levels = 10.0 ** -np.arange(1.0, -math.log10(tail) / 2 + _DECADES, _DECADES)
    found = []
    for sign in (1, -1):
        largest = max(float(np.max(sign * log_x)), deviation)
        epsilon = largest * np.linspace(0.0, 1.0, _GRID)[:-1] ** 2
        threshold = np.exp(sign * epsilon)
        # E[(X − e^ε)₊], or E[(1 − e^ε·X)₊] = e^ε·E[(e^{−ε} − X)₊], and minus their derivatives.
        gain = np.maximum(sign * (x - threshold[:, None]), 0.0)
        if sign > 0:
            delta, slope = gain @ mass, threshold * ((gain > 0) @ mass)
        else:
            delta, slope = gain @ mass / threshold, ((gain > 0) @ (mass * x)) / threshold
        growth = np.exp(np.arange(0.0, math.log(largest / deviation), _APART))
        at = {1, *np.searchsorted(epsilon, deviation * growth).tolist()}
        at |= {int((delta > level).sum()) for level in levels if level < delta[0]}
        for i in at:
            if i < len(delta) and levels[-1] < delta[i] < _LARGEST_DELTA:
                share = (_TOLERANCE if delta[i] > _DEEP else _DEEP_TOLERANCE) / additions
                steepness = float(slope[i] / delta[i])
                cost = share * max(steepness * max(float(epsilon[i]), deviation), _LEAST_COST)
                found.append(Target(float(threshold[i]), sign, float(delta[i]), steepness, cost))
    return sorted(found, key=lambda target: target.threshold)


def additions(rounds: int) -> list[tuple[int, int]]:
    """Numbers of rounds to add, in this order, to get from one round to n: double, or add one.

    >>> additions(6)
    [(1, 1), (2, 1), (3, 3)]
    """
    steps, k = [], 1
    for bit in f"{rounds:b}"[1:]:
        steps += [(k, k), (2 * k, 1)] if bit == "1" else [(k, k)]
        k = sum(steps[-1])
    return steps


@lru_cache(maxsize=64)
def sum_of_ratios(rounds: int, z: float, tail: float, shape: Shape) -> RatioSum:
    """R of n rounds, by `additions`."""
    first, *steps = edges_of(rounds, z, tail)
    ratios = one_round(z, first[0], shape)
    for edges, edges_of_one in steps:
        other = ratios if edges_of_one is None else one_round(z, edges_of_one, shape)
        ratios = add(ratios, other, edges, shape)
    return ratios


@lru_cache(maxsize=64)
def edges_of(rounds: int, z: float, tail: float) -> list[tuple[Vector, Vector | None]]:
    """Logarithms of the edges for one round, and then for the result of each addition.

    With each addition of one round come those for its ratio; with the others, None.
    """
    edges, sums = _quick_look(rounds, z, tail)
    targets = targets_of(sums[rounds], tail, len(sums))

    def placed(k: int, times: float) -> Vector:
        if k > _NEARLY_ALL * rounds:
            return _along(edges[k], _density_at_last(k, rounds, edges[k], targets))
        rough = 0.5 / np.diff(edges[k])
        by_all = _density_by_all(sums, k, rounds, edges[k], targets, times)
        alone = _density_alone(sums[k], rounds, edges[k], targets, times)
        return _along(edges[k], np.maximum(rough, np.maximum(by_all, alone)))

    steps: list[tuple[Vector, Vector | None]] = [(placed(1, rounds), None)]
    for first, second in additions(rounds):
        k = first + second
        steps.append((placed(k, rounds / k), placed(1, rounds / k) if second < first else None))
    return steps


def _quick_look(
    rounds: int, z: float, tail: float
) -> tuple[dict[int, Vector], dict[int, RatioSum]]:
    """Edges and sums with few points, by number of rounds."""
    mu, reach = 1 / z, -float(ndtri(tail))
    middle, far = -(mu**2) / 2, _FAR * max(2.0, mu)
    edges = {1: _spaced(middle - mu * reach, middle, mu * reach - middle, mu, far)}
    sums = {1: _positive(one_round(z, edges[1], merge))}
    for first, second in additions(rounds):
        k = first + second
        edges[k] = _spaced(*_outline(sums[first], sums[second], tail), far)
        sums[k] = _positive(add(sums[first], sums[second], edges[k], merge))
    return edges, sums


def _positive(ratios: RatioSum) -> RatioSum:
    """The same without values that underflowed."""
    return replace(ratios, value=np.maximum(ratios.value, _SMALLEST))


def _outline(first: RatioSum, second: RatioSum, tail: float) -> tuple[float, float, float, float]:
    """Lower end, median, upper end and scale of the logarithm of a sum."""
    (one, p), (other, q) = coarse(first, _COARSE), coarse(second, _COARSE)
    value, mass = (one[:, None] + other).ravel(), (p[:, None] * q).ravel()
    order = np.argsort(value)
    log_value, mass = np.log(value[order]), mass[order]
    absent = np.cumsum(mass)
    present = np.cumsum((mass * value[order])[::-1])[::-1] / (first.rounds + second.rounds)
    low = log_value[min(int((absent < tail).sum()), len(mass) - 1)]
    high = log_value[max(int((present > tail).sum()) - 1, 0)]
    below, middle, above = (float(x) for x in np.interp([0.16, 0.5, 0.84], absent, log_value))
    low, high = (float(middle + _BEYOND * (end - middle)) for end in (low, high))
    return low, middle, high, (above - below) / 2


def _spaced(low: float, middle: float, high: float, scale: float, far: float) -> Vector:
    """Points whose distance grows with that from the middle up to `far`."""
    low, high = max(low, -_LARGEST_LOG), min(high, _LARGEST_LOG)
    reach = math.asinh(max(high - middle, middle - low) / scale)
    mesh = middle + scale * np.sinh(reach * np.linspace(-1, 1, 400))
    mesh = np.unique(np.clip(mesh, low, high))
    centre = (mesh[1:] + mesh[:-1]) / 2
    return _along(mesh, np.maximum(1 / (_NEAR * np.hypot(scale, centre - middle)), 1 / far))


def _along(mesh: Vector, density: Vector) -> Vector:
    """Points of this density: [n] points per unit between the [n + 1] of the mesh."""
    number = np.concatenate([[0.0], np.cumsum(density * np.diff(mesh))])
    count = max(2, math.ceil(number[-1]) + 1)
    return np.interp(np.linspace(0.0, number[-1], count), number, mesh)


def _density_by_all(
    sums: Mapping[int, RatioSum],
    k: int,
    rounds: int,
    edges: Vector,
    targets: Sequence[Target],
    times: float,
) -> Vector:
    """Points per unit of log s between edges, where s and all other rounds together decide δ."""
    width, ratios = np.diff(edges), sums[k]
    log_value = np.log(ratios.value)
    place = np.clip(np.searchsorted(edges, log_value, side="right") - 1, 0, len(width) - 1)
    nearest = max(j for j in sums if j <= rounds - k)
    others, chance = coarse(sums[nearest], _FINE)
    total = (ratios.value[:, None] + others * ((rounds - k) / nearest)) / rounds
    density = np.zeros(len(width))
    for target in targets:
        phi = np.maximum(target.sign * (total - target.threshold), 0.0) @ chance + 1e-290
        steepest = _STEEPEST * max(t.steepness for t in targets if t.sign == target.sign)
        slope = np.minimum(np.abs(np.gradient(np.log(phi), log_value)), steepest)
        weight = ratios.mass * phi
        weight *= times / weight.sum()
        root = np.cbrt(np.bincount(place, weight * slope**2 / 12, len(width)) / width)
        density = np.maximum(density, root * math.sqrt(float(root @ width) / target.cost))
        room = np.arccosh(1 + _ROOM * target.cost / np.maximum(weight, 1e-290))
        np.maximum.at(density, place, slope / room)
    return density


def _density_alone(
    ratios: RatioSum, rounds: int, edges: Vector, targets: Sequence[Target], times: float
) -> Vector:
    """Points per unit of log s where a large s decides δ, others near their mean."""
    larger = [target for target in targets if target.sign > 0]
    at = np.array([rounds * (target.threshold - 1) + ratios.rounds for target in larger])
    delta = times / rounds * np.maximum(ratios.value - at[:, None], 0.0) @ ratios.mass
    share = np.minimum(1.0, delta / [target.delta for target in larger])
    # d log(R/n)/d log s, where R = s + n − k.
    slope = at / (rounds - ratios.rounds + at)
    density = slope * np.cbrt(share) * [target.density for target in larger]
    return np.asarray(np.interp(_centres(edges), at, density, left=0.0, right=0.0))


def _density_at_last(k: int, rounds: int, edges: Vector, targets: Sequence[Target]) -> Vector:
    """Points per unit of log s for a sum s of nearly all rounds: each s has its ε."""
    at = [rounds * (target.threshold - 1) + k for target in targets]
    density = [target.density for target in targets]
    inside = np.interp(_centres(edges), at, density, left=0.0, right=0.0)
    return np.maximum(0.5 / np.diff(edges), inside)


def _centres(edges: Vector) -> Vector:
    return np.asarray(np.exp((edges[1:] + edges[:-1]) / 2))


def allocation_pairs(rounds: int, participations: int, noise_multiplier: float) -> Pairs:
    """Pairs that together dominate one pass when a user is added or removed, adaptive or not.

    * k = 1: the pair of the pass, so that its bounds from below are those of the pass, too.
    * k = n: n Gaussian rounds, of which the same is true.
    * Otherwise a pair for each of k blocks of ⌊n/k⌋ or ⌈n/k⌉ rounds. Their bounds from below say
      nothing of the pass.

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
    """The pair of a pass of n rounds with every user in exactly one of them.

    n above 2³⁰ is taken for that, and has no mass in a loss at most as bad. (More rounds are no
    worse: the mean of n ratios is that of the means of all but one of them.) A loss at least as bad
    is infinite with probability 10⁻⁹⁰ or more.
    """

    rounds: int  # n ≥ 1
    z: float  # noise_stddev per sensitivity, ≥ 0

    @property
    def setting(self) -> tuple[float, float]:
        """1 and z."""
        return 1.0, self.z

    def at(self, q: float, z: float) -> "AllocationPair":  # noqa: ARG002
        """The pair of the same kind with other noise."""
        return replace(self, z=z)

    def sketch(self, tail: float) -> Sketch:
        """The loss, roughly, without losses that are rarer than `tail`."""
        ratios = self._ratios(tail, spread)
        value, mass = coarse(ratios, _NODES)
        loss = np.log(value / ratios.rounds)
        low, high = _law(ratios).span(tail)
        # One node beyond, as ε lies below the first loss that is rarer than δ.
        first = max(0, int((loss < low).sum()) - 1)
        seen = slice(first, int((loss <= high).sum()) + 1)
        middle = float(loss[int(np.searchsorted(np.cumsum(mass), 0.5))])
        return Sketch(np.log(mass[seen]), loss[seen], middle)

    def dominating(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at least as bad as that of the pass."""
        ratios = self._ratios(lattice.tail, spread)
        above = dominating(_law(ratios), lattice, direction)
        if direction is Direction.REMOVE:
            unseen = ratios.infinite / ratios.rounds
        else:
            unseen = float(ratios.mass[ratios.mass * ratios.value == 0.0].sum())
        above = _scaled(replace(above, infinite=above.infinite + unseen), ratios, 1)
        return replace(above, infinite=above.infinite + _LOST)

    def dominated(self, lattice: Lattice, direction: Direction) -> LossAtoms:
        """A loss on the lattice that is at most as bad as that of the pass."""
        ratios = self._ratios(lattice.tail, merge)
        below = _scaled(dominated(_law(ratios), lattice, direction), ratios, -1)
        inside = self.rounds <= _MOST_ROUNDS
        return below if inside else replace(below, mass=np.zeros_like(below.mass))

    def _ratios(self, tail: float, shape: Shape) -> RatioSum:
        cut = next((each for each in _TAILS if math.sqrt(each) <= tail), _TAILS[-1])
        return sum_of_ratios(min(self.rounds, _MOST_ROUNDS), self.z, cut, shape)


def _law(ratios: RatioSum) -> DiscreteLaw:
    """The loss log X where it is finite."""
    p = ratios.mass * ratios.value / ratios.rounds
    gap = ratios.mass * (ratios.value - ratios.rounds) / ratios.rounds
    some = ratios.mass * ratios.value > 0.0
    return DiscreteLaw(p[some], ratios.mass[some], gap[some])


def _scaled(found: LossAtoms, ratios: RatioSum, sign: int) -> LossAtoms:
    """The atoms with the errors of the ratios on the safe side.

    If X is off by a factor of e^{±v}, then so are its masses under P, and the loss is off by v.
    """
    factor = math.exp(sign * (ratios.mass_error + ratios.value_error))
    rounding = found.rounding + ratios.value_error
    infinite = min(1.0, found.infinite * factor)
    return replace(found, mass=found.mass * factor, rounding=rounding, infinite=infinite)
