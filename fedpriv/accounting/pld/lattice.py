"""Privacy losses on a lattice: one at least as bad as the true loss, and one at most as bad.

A pair (P, Q) has the distributions of an event's output on two neighbours; its loss is
L = log(dP/dQ). The curve ε ↦ δ(ε) is convex in e^ε, and a chain of straight lines between lattice
points is the curve of a loss with values on the lattice. So chords of the true curve give a loss
at least as bad (Doroshenko et al. 2022), and chains of lines below it one at most as bad. Both keep
the mass and the mean of e^L, so their error is second order in the spacing. Both are computed from
masses between losses, not from differences of the curve, so even the smallest masses are accurate.

Masses of outputs are [3, outputs] arrays: P, Q, and P − Q computed without cancellation.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.round_counts import Direction, Vector

# Relative error of a mass: ten times the largest in tests, not a proved bound.
ROUNDING = 1e-12
# A smaller mass has lost digits: an upper bound makes its loss infinite, a lower bound drops it.
_SMALLEST = 1e-290
_NEAR = 0.5  # losses up to this size are computed from P − Q, others from P and Q
_LARGEST_LOSS, _HUGE_LOSS = 600.0, 550.0
_HAIR = 1e-12  # distance of the centre from a lattice point, in steps
_MOST_POINTS = 1 << 14  # largest number of evenly spaced far lattice points
SKETCH_NODES = 256  # nodes of a sketch


@dataclass(frozen=True)
class Lattice:
    """The lattice for the losses of one pair."""

    step: float  # distance h > 0 of neighbouring lattice points
    widest: float  # largest spacing of points in use far from the centre, in steps, at least 1
    growth: float  # spacing of points relative to their distance from the centre, below 1
    tail: float  # largest probability that may be cut off on either side


@dataclass(frozen=True)
class LossAtoms:
    """A privacy loss on a lattice; finite masses and `infinite` need not sum to 1."""

    offset: float  # loss of the lattice point with index 0
    index: NDArray[np.int64]  # [atoms] the loss of atom i is offset + step·index[i]
    mass: Vector  # [atoms] probabilities ≥ 0
    rounding: Vector  # [atoms] bounds on the error of losses by rounding
    infinite: float  # probability of an infinite loss


@dataclass(frozen=True)
class Sketch:
    """An approximate privacy loss at [nodes], accurate enough for plans."""

    log_q: Vector  # logarithms of masses under Q, up to a common term; L + log_q is that under P
    loss: Vector  # finite losses L
    middle: float  # a loss with most of the mass nearby, or of outputs that reveal nearly nothing


class LossLaw(Protocol):
    """The loss L = log(dP/dQ) of a pair: masses between any losses, without direction or lattice.

    For lower bounds, outputs may be sorted by an approximate loss; for upper bounds they may not.
    """

    @property
    def resolution(self) -> float:
        """Least r such that a relative error x in masses moves L by (1 − e^{−|L|} + 2r)·x."""

    def span(self, tail: float) -> tuple[float, float]:
        """Return finite losses with at most about `tail` of P and of Q on either side of them."""

    def centre(self, step: float) -> float:
        """Return the loss c of the merged outputs that have losses in [c − step, c + step].

        If large losses are rare, nearly all mass is there. So c must be a lattice point, or each
        round of a lower bound would lose some loss.
        """

    def masses(self, edges: Vector) -> Vector:
        """Return masses below, between and above the losses `edges`: [3, edges + 1]."""

    def sketch(self, tail: float) -> Sketch:
        """Return an approximate loss, without losses that are rarer than `tail`."""


class LossPair(Protocol):
    """The pair (P, Q) of some event, for z in [0.02, 10⁶]; it can be compared and hashed."""

    @property
    def q(self) -> float:
        """The sampling probability in (0, 1]; for a pass, a decreasing function of its rounds."""

    @property
    def z(self) -> float:
        """noise_stddev per sensitivity."""

    def __hash__(self) -> int: ...

    def at(self, q: float, z: float) -> "LossPair":
        """Return a pair of the same kind; a larger q and a smaller z cost no less."""

    def at_most_as_bad(self, tail: float) -> LossLaw | None:
        """Return a loss that is at most as bad, or None; it may cut off tails of this mass."""

    def at_least_as_bad(self, tail: float) -> LossLaw:
        """Return a loss that is at least as bad; it may cut off tails of this mass."""


Pairs = Mapping[LossPair, int]
"""Number of events by their pair."""


@dataclass(frozen=True)
class GaussianPair:
    """The pair of one release with Gaussian noise; subclasses are its kinds."""

    q: float  # probability that a user is in the cohort, in (0, 1]
    z: float  # noise_stddev per sensitivity, ≥ 0

    @property
    def shift(self) -> float:
        """Distance between the two means for q = 1, in sensitivities."""
        return 1.0

    def at(self, q: float, z: float) -> Self:
        """Return the pair of the same kind with other q and z."""
        return replace(self, q=q, z=z)


@dataclass(frozen=True)
class LatticePoints:
    """The lattice points in use for one pair."""

    offset: float
    index: NDArray[np.int64]  # [points]
    loss: Vector  # [points] offset + step·index


def lattice_points(law: LossLaw, lattice: Lattice, direction: Direction) -> LatticePoints:
    """Return the points for one pair, without tails of mass `lattice.tail` or losses beyond ±600.

    One point is the centre of the loss. From there, points are first neighbours, then spaced in
    proportion to their distance, then evenly, so that a few hundred cover losses of all sizes.
    """
    # Slightly off the centre, so that rounding cannot move a mean to its wrong side.
    offset = law.centre(lattice.step) - direction * _HAIR * lattice.step
    low, high = law.span(lattice.tail)
    below = _spaced(math.floor((offset - low) / lattice.step) + 2, lattice)
    above = _spaced(math.ceil((high - offset) / lattice.step) + 1, lattice)
    index = np.concatenate([-below[::-1], np.zeros(1, np.int64), above])
    loss = offset + lattice.step * index
    is_inside = np.abs(loss) <= _LARGEST_LOSS  # so that masses under Q do not underflow
    return LatticePoints(offset, index[is_inside], loss[is_inside])


def _spaced(reach: int, lattice: Lattice) -> NDArray[np.int64]:
    """Return increasing indices from 1 to at least `reach`, spaced as in `lattice_points`."""
    growth, widest = lattice.growth, max(lattice.widest, 1.0, reach / _MOST_POINTS)
    knee, far = 1 / growth, widest / growth
    turn = knee + math.log(far / knee) / growth
    count = min(reach, knee) + math.log(min(max(reach, knee), far) / knee) / growth
    count += max(reach - far, 0.0) / widest
    u = np.arange(1, math.ceil(count) + 2)
    far_index = knee * np.exp(growth * (np.minimum(u, turn) - knee))
    far_index += np.maximum(u - turn, 0) * widest
    index = np.ceil(np.where(u <= knee, u, far_index)).astype(np.int64)
    return index[np.diff(index, prepend=0) > 0]


def dominating(law: LossLaw, lattice: Lattice, direction: Direction) -> LossAtoms:
    """Return a loss on the lattice with compositions at least as bad as those of the true loss.

    Mass between two points is split between them, so that its masses under P and Q are kept. Mass
    beyond the lattice moves to its end or to infinity, in the direction that makes it worse.
    """
    points = lattice_points(law, lattice, direction)
    loss, share = points.loss, -np.expm1(-lattice.step * np.diff(points.index))
    masses = law.masses(loss)
    inner, small_sums = _without_small(masses)
    p, q, _ = inner
    mass = np.zeros(len(loss))
    # Masses that lost digits become infinite; so does more than all mass that underflowed.
    infinite = _SMALLEST * len(loss)
    if direction is Direction.REMOVE:
        infinite += masses[0, -1] + small_sums[0]
        moved = np.clip(_excess(inner, loss[:-1]) / share, 0.0, p)
        mass[1:] += moved
        mass[:-1] += p - moved
        mass[0] += masses[0, 0]
    else:
        infinite += masses[1, 0] + small_sums[1]
        moved = np.clip(-_excess(inner, loss[1:]) * np.exp(-loss[1:]) / share, 0.0, q)
        mass[1:] += q - moved
        mass[:-1] += moved
        mass[-1] += masses[1, -1]
    return _atoms(law, points, mass, float(infinite), direction)


def dominated(law: LossLaw, lattice: Lattice, direction: Direction) -> LossAtoms:
    """Return a loss on the lattice with compositions at most as bad as those of the true loss.

    The line between two lattice points is a tangent of the curve, lowered to meet its neighbours;
    the lower convex hull of that chain is again a curve. Mass beyond the lattice is dropped, or, if
    the lattice ends at a huge loss, moved there, which adds less than e^−550 to the mass under Q.
    So masses sum to at most 1 within rounding.
    """
    points = lattice_points(law, lattice, direction)
    loss, spacing = points.loss, lattice.step * np.diff(points.index)
    touch = (loss[:-1] + loss[1:]) / 2

    def inner() -> Vector:
        """Return masses between the touching points and the ends of the lattice: [3, points]."""
        return _without_small(law.masses(np.concatenate([loss[:1], touch, loss[-1:]])))[0]

    # At the next lattice points a tangent should be above the asymptotes 1 − e^ε and 0 of the
    # curve: the mean of the mass below (above) its touching point should be beyond the next lattice
    # point, as it is if it touches there. This must hold on the direction's side, which comes last;
    # on the other side the centre is a hair off, and would move to the next point.
    for side, hair in ((-direction, 2 * _HAIR * lattice.step), (direction, 0.0)):
        if side == Direction.ADD:
            below = np.cumsum(inner(), axis=1)[:, :-1]
            touch = np.where(_excess(below, loss[:-1] + hair) <= 0, touch, loss[:-1])
        else:
            above = np.cumsum(inner()[:, ::-1], axis=1)[:, -2::-1]
            touch = np.where(_excess(above, loss[1:] - hair) >= 0, touch, loss[1:])
    mass = _convex_hull(_exchanged(inner(), loss, spacing), loss)
    if direction is Direction.REMOVE:
        mass = mass * np.exp(loss)
        if loss[-1] > _HUGE_LOSS:
            mass[-1] += law.masses(loss[-1:])[0, -1]
    return _atoms(law, points, mass, 0.0, direction)


def _without_small(masses: Vector) -> tuple[Vector, Vector]:
    """Return the masses between edges, with small ones set to 0, and the sums [3] of small ones.

    Masses below 1e-290 have lost digits.
    """
    inner = masses[:, 1:-1]
    is_small = (inner[:2] < _SMALLEST).any(axis=0)
    return np.where(is_small, 0.0, inner), np.where(is_small, inner, 0.0).sum(axis=1)


def _excess(masses: Vector, loss: Vector) -> Vector:
    """Return P − e^loss·Q of each output; its error is that of a small error of the loss."""
    p, q, gap = masses
    is_near = np.abs(loss) < _NEAR
    from_gap = gap - q * np.expm1(np.where(is_near, loss, 0.0))
    return np.asarray(np.where(is_near, from_gap, p - q * np.exp(loss)))


def _exchanged(masses: Vector, loss: Vector, spacing: Vector) -> Vector:
    """Return Q-masses on the lattice points, after exchange between neighbours.

    If the mean of a mass is above its point, the point below lends it mass, which moves up to the
    point; if the mean is below, the point above lends mass.
    """
    excess = _excess(masses, loss)
    gap = np.exp(loss[:-1]) * np.expm1(spacing)
    lend_down = np.maximum(excess[1:], 0.0) / gap
    lend_up = np.maximum(-excess[:-1], 0.0) / gap
    mass: Vector = masses[1].copy()
    mass[1:] += lend_down - lend_up
    mass[:-1] += lend_up - lend_down
    return mass


def _convex_hull(mass: Vector, loss: Vector) -> Vector:
    """Return Q-masses of the lower convex hull of the curve with the second differences `mass`.

    A point with negative mass is above the chord of its neighbours, so it is not on the hull: it is
    removed, and its mass under P and Q goes to the neighbours, until no mass is negative. A point
    at an end of the lattice, where the curve may be below its asymptote, has one neighbour, which
    takes the mass under Q (first point) or P (last point); the other mass changes so that δ
    decreases.
    """
    # One point at a time, since a removal may cause another one nearby.
    masses, losses = mass.tolist(), loss.tolist()
    below, above = [*range(-1, len(losses) - 1)], [*range(1, len(losses) + 1)]
    negative = np.flatnonzero(mass < 0).tolist()
    while negative:
        point = negative.pop()
        low, high, moved = below[point], above[point], masses[point]
        if moved == 0.0:
            continue
        masses[point] = 0.0
        if low < 0:
            to_low, to_high = 0.0, 1.0
        elif high == len(losses):
            to_low, to_high = math.exp(min(losses[point] - losses[low], 700.0)), 0.0
        else:
            to_high = math.exp(losses[point] - losses[high])
            to_high *= math.expm1(losses[low] - losses[point])
            to_high /= math.expm1(losses[low] - losses[high])
            to_low = 1.0 - to_high
        for end, share in ((low, to_low), (high, to_high)):
            if 0 <= end < len(losses):
                masses[end] += share * moved
                if masses[end] < 0.0:
                    negative.append(end)
        if low >= 0:
            above[low] = high
        if high < len(losses):
            below[high] = low
    return np.array(masses)


def _atoms(
    law: LossLaw, points: LatticePoints, mass: Vector, infinite: float, direction: Direction
) -> LossAtoms:
    """Return the atoms with the sign of the direction."""
    rounding = ROUNDING * (2 * law.resolution - np.expm1(-np.abs(points.loss)))
    offset, index = int(direction) * points.offset, int(direction) * points.index
    return LossAtoms(offset, index, np.maximum(mass, 0.0), rounding, infinite)


@dataclass(frozen=True, eq=False)
class DiscreteLaw:
    """The loss of [outputs] with masses under P and Q, which need not sum to 1.

    Outputs without mass under P have the loss −∞, others without mass under Q the loss ∞.
    """

    p: Vector
    q: Vector
    gap: Vector  # p − q, computed without cancellation
    resolution: float = 1.0  # errors are relative to the masses

    @cached_property
    def loss(self) -> Vector:
        """log(p/q): [outputs]."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rise = self.gap / self.q
            plain = np.where(self.p > 0, np.log(self.p) - np.log(self.q), -np.inf)
            return np.where(np.abs(rise) < _NEAR, np.log1p(rise), plain)

    def span(self, tail: float) -> tuple[float, float]:
        """Return finite losses with at most about `tail` of P and of Q on either side of them."""
        finite = np.isfinite(self.loss)
        order = np.argsort(self.loss[finite])
        loss, larger = self.loss[finite][order], np.maximum(self.p, self.q)[finite][order]
        below, above = np.cumsum(larger), np.cumsum(larger[::-1])[::-1]
        first = min(int((below <= tail).sum()), len(loss) - 1)
        last = max(int((above > tail).sum()) - 1, 0)
        return float(loss[first]), float(loss[last])

    def centre(self, step: float) -> float:
        """Return the loss of the merged outputs around the most likely one."""
        c = float(self.loss[np.argmax(np.where(np.isfinite(self.loss), self.q, -1.0))])
        for _ in range(3):
            is_near = np.abs(self.loss - c) <= step
            q, gap = float(self.q[is_near].sum()), float(self.gap[is_near].sum())
            c = float(np.log1p(gap / q)) if q > 0 and gap > -q else c
        return c

    def masses(self, edges: Vector) -> Vector:
        """Return masses below, between and above the losses `edges`: [3, edges + 1]."""
        places = np.searchsorted(edges, self.loss)
        rows = (self.p, self.q, self.gap)
        return np.array([np.bincount(places, row, len(edges) + 1) for row in rows], np.float64)

    def sketch(self, tail: float) -> Sketch:
        """Return a few hundred groups of outputs, without losses rarer than `tail`."""
        low, high = self.span(tail)
        edges = np.linspace(np.nextafter(low, -np.inf), high, SKETCH_NODES)
        return sketched(self, edges, self.centre(0.0))


def sketched(law: LossLaw, edges: Vector, middle: float) -> Sketch:
    """Return the losses of groups of outputs, each between neighbouring edges."""
    inner = law.masses(edges)[:, 1:-1]
    groups = DiscreteLaw(*inner[:, (inner[:2] > 0).all(axis=0)])
    return Sketch(np.log(groups.q), groups.loss, middle)
