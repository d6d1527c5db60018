"""Where the points of sums of likelihood ratios should be: dense where it matters for ε.

Nothing here has to be exact. A poor choice makes the certified interval wider, never wrong.

A quick look at all sums on the way to n rounds shows which values decide δ at some ε. If a sum of k
rounds is s, and all others are as they may be, then δ is φ(s). Moving mass from s by factors e^{±g}
adds about g²/6 to the variance of log s there, which costs Pr(s)·φ(s)·(d log φ/d log s)²·g²/12, and
does so in each of the n/k sums of k rounds. The cost is least, for a given number of points, where
their density 1/g is proportional to the cube root of what stands before g².
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtri

from fedpriv.accounting.ratio import RatioSum, add, merge, one_round
from fedpriv.accounting.ratio_targets import Target, targets_of
from fedpriv.accounting.rounds import Vector

_LARGEST_LOG = 500.0
"""Values beyond e^±500 are rounded, so that no product of masses that matters underflows."""
_SMALLEST = 1e-290
_NEAR, _FAR = 0.08, 0.06
"""Distance of points for the quick look: relative to that from the median, and to max(2, 1/z)."""
_COARSE, _FINE = 64, 100
"""Numbers of points that show where a sum is, and how it is distributed."""
_BEYOND = 1.5
"""How far the points go, relative to the distance of what can be seen from the median."""
_STEEPEST = 3.0
"""How steep φ may seem to be, relative to the largest slope of δ."""
_ROOM = 2.0
"""How much of all cost one point may take, in sixths, where cost grows faster than g²."""
_NEARLY_ALL = 0.9
"""Share of the rounds from which on the others hardly matter."""


@dataclass(frozen=True)
class Step:
    """One addition of ratios.

    Attributes:
        edges: logarithms of the edges for its result.
        other: None if what there is is doubled; or, if one round is added, logarithms of the edges
            for the ratio of that.
    """

    edges: Vector
    other: Vector | None


def additions(rounds: int) -> list[tuple[int, int]]:
    """Numbers of rounds to add, in this order, to get from one round to n: double, or add one.

    >>> additions(6)
    [(1, 1), (2, 1), (3, 3)]
    """
    steps = []
    k = 1
    for bit in f"{rounds:b}"[1:]:
        steps.append((k, k))
        k *= 2
        if bit == "1":
            steps.append((k, 1))
            k += 1
    return steps


def steps_to(rounds: int, z: float, tail: float) -> list[Step]:
    """How to get to the sum of n rounds: the edges for one round, then `additions`.

    Args:
        rounds: n ≥ 1.
        z: noise multiplier in [0.05, 1e6].
        tail: probability of losses that may be cut off at either end.
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

    steps = [Step(placed(1, rounds), None)]
    for first, second in additions(rounds):
        k = first + second
        other = placed(1, rounds / k) if second < first else None
        steps.append(Step(placed(k, rounds / k), other))
    return steps


def coarse(ratios: RatioSum, points: int) -> tuple[Vector, Vector]:
    """Values above 0, and masses, of at most so many groups of neighbouring points."""
    first = np.arange(0, len(ratios.value), -(-len(ratios.value) // points))
    mass = np.add.reduceat(ratios.mass, first)
    total = np.add.reduceat(ratios.mass * ratios.value, first)
    some = total > 0  # a mean may underflow
    return total[some] / mass[some], mass[some]


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
    ends = (float(middle + _BEYOND * (end - middle)) for end in (low, high))
    return next(ends), middle, next(ends), (above - below) / 2


def _spaced(low: float, middle: float, high: float, scale: float, far: float) -> Vector:
    """Points whose distance grows with that from the middle up to `far`."""
    low, high = max(low, -_LARGEST_LOG), min(high, _LARGEST_LOG)
    reach = math.asinh(max(high - middle, middle - low) / scale)
    mesh = middle + scale * np.sinh(reach * np.linspace(-1, 1, 400))
    mesh = np.unique(np.clip(mesh, low, high))
    centre = (mesh[1:] + mesh[:-1]) / 2
    return _along(mesh, np.maximum(1 / (_NEAR * np.hypot(scale, centre - middle)), 1 / far))


def _along(mesh: Vector, density: Vector) -> Vector:
    """Points of this density: [cells] points per unit between the [cells + 1] of the mesh."""
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
    """[cells] points per unit of log s, where s and all other rounds together decide δ.

    Args:
        sums: all sums, roughly.
        k: number of rounds of s.
        rounds: n.
        edges: [cells + 1] logarithms of the edges of the rough sum of k rounds.
        targets: what should be right.
        times: how many sums there are of this kind.
    """
    width, ratios = np.diff(edges), sums[k]
    log_value = np.log(ratios.value)
    cell = np.clip(np.searchsorted(edges, log_value, side="right") - 1, 0, len(width) - 1)
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
        root = np.cbrt(np.bincount(cell, weight * slope**2 / 12, len(width)) / width)
        density = np.maximum(density, root * math.sqrt(float(root @ width) / target.cost))
        room = np.arccosh(1 + _ROOM * target.cost / np.maximum(weight, 1e-290))
        np.maximum.at(density, cell, slope / room)
    return density


def _density_alone(
    ratios: RatioSum, rounds: int, edges: Vector, targets: Sequence[Target], times: float
) -> Vector:
    """[cells] points per unit of log s, where a large s decides δ while others are near their mean.

    Args:
        ratios: s, roughly.
        rounds: n.
        edges: [cells + 1] logarithms of the edges of `ratios`.
        targets: what should be right.
        times: how many sums there are of this kind.
    """
    larger = [target for target in targets if target.sign > 0]
    at = np.array([rounds * (target.threshold - 1) + ratios.rounds for target in larger])
    delta = times / rounds * np.maximum(ratios.value - at[:, None], 0.0) @ ratios.mass
    share = np.minimum(1.0, delta / [target.delta for target in larger])
    # d log(R/n)/d log s, where R = s + n − k.
    slope = at / (rounds - ratios.rounds + at)
    centre = np.exp((edges[1:] + edges[:-1]) / 2)
    density = slope * np.cbrt(share) * _local(larger)
    return np.asarray(np.interp(centre, at, density, left=0.0, right=0.0))


def _density_at_last(k: int, rounds: int, edges: Vector, targets: Sequence[Target]) -> Vector:
    """[cells] points per unit of log s for a sum s of nearly all rounds: each s has its ε."""
    at = np.array([rounds * (target.threshold - 1) + k for target in targets])
    centre = np.exp((edges[1:] + edges[:-1]) / 2)
    inside = np.interp(centre, at, _local(targets), left=0.0, right=0.0)
    return np.maximum(0.5 / np.diff(edges), inside)


def _local(targets: Sequence[Target]) -> Vector:
    """[targets] points per unit of log R, where a point matters to the ε nearby alone."""
    return np.array([target.steepness / math.sqrt(12 * target.cost) for target in targets])
