"""Privacy losses on a lattice: once at least as bad as the true one, and once at most as bad.

A pair of distributions (P, Q) compares what an event shows on two neighbours; its loss is
L = log(dP/dQ). The curve ε ↦ δ(ε) is convex in e^ε, and a chain of straight lines between lattice
points is the curve of a loss with values on the lattice. So chords of the true curve give a loss
at least as bad (Doroshenko et al. 2022), and chains of lines below it one at most as bad. Both keep
the mass and the mean of e^L, so their error is second order in the spacing. Both are computed from
masses between losses, never from differences of the curve, so the smallest masses are right.

Masses of outputs are [3, outputs] arrays: P, Q and P − Q without the cancellation of a difference.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.round_counts import Direction, Vector

# Relative error allowed to a mass: ten times the largest that tests find, not a proved bound.
ROUNDING = 1e-12
# A mass below this has lost digits: it is infinite loss from above, and none from below.
_SMALLEST = 1e-290
_NEAR = 0.5  # losses up to this size are computed from P − Q, others from P and Q
_LARGEST_LOSS = 690.0
_HAIR = 1e-12  # distance of the centre from a lattice point, in steps
_MOST_POINTS = 1 << 14  # largest number of evenly spaced far lattice points
SKETCH_NODES = 256  # nodes of a sketch


@dataclass(frozen=True)
class Lattice:
    """Where the losses of one pair may lie."""

    step: float  # distance h > 0 of neighbouring lattice points
    widest: float  # largest spacing of points in use far from the centre, in steps, at least 1
    growth: float  # spacing of points relative to their distance from the centre, below 1
    tail: float  # largest probability of what may be cut off on either side


@dataclass(frozen=True)
class LossAtoms:
    """A privacy loss on a lattice; finite masses and `infinite` need not sum to 1."""

    offset: float  # loss of the lattice point with index 0
    index: NDArray[np.int64]  # [atoms] the loss of atom i is offset + step·index[i]
    mass: Vector  # [atoms] probabilities ≥ 0
    rounding: Vector  # [atoms] how far rounding may have moved the loss of each atom
    infinite: float  # probability of an infinite loss


@dataclass(frozen=True)
class Sketch:
    """A privacy loss at [nodes], good enough to make plans."""

    log_q: Vector  # logarithms of masses under Q, up to a common factor; those under P are e^L more
    loss: Vector  # finite losses
    middle: float  # the loss near which most mass is, or nearly nothing happens


class LossLaw(ABC):
    """The loss L = log(dP/dQ) of a pair: masses between any losses, without direction or lattice.

    Outputs may be sorted by an approximate loss for bounds from below, not for those from above.
    """

    @property
    @abstractmethod
    def resolution(self) -> float:
        """Least r such that a relative error x in masses moves L by (1 − e^{−|L|} + 2r)·x."""

    @abstractmethod
    def span(self, tail: float) -> tuple[float, float]:
        """Finite losses that P and Q pass on either side with probability at most about `tail`."""

    @abstractmethod
    def centre(self, step: float) -> float:
        """The loss c such that outputs with a loss in [c − step, c + step] have c together.

        Where the loss jumps rarely, nearly all mass is there; what it merges into must be a lattice
        point, or each round of a lower bound would lose some.
        """

    @abstractmethod
    def masses(self, edges: Vector) -> Vector:
        """[3, edges + 1] below the first of the [edges] losses, between them, and above."""

    @abstractmethod
    def sketch(self, tail: float) -> Sketch:
        """The loss, roughly, without losses that are rarer than `tail`."""


class LossPair(Protocol):
    """The pair (P, Q) of some event, for z in [0.05, 10⁶]; a value that is compared and hashed."""

    @property
    def q(self) -> float:
        """The sampling probability in (0, 1], or of a pass how few rounds it has."""

    @property
    def z(self) -> float:
        """noise_stddev per sensitivity."""

    def __hash__(self) -> int: ...

    def at(self, q: float, z: float) -> "LossPair":
        """The same kind elsewhere: a larger q and a smaller z cost no less."""

    def at_most_as_bad(self, tail: float) -> LossLaw | None:
        """A loss at most as bad (None: unknown), which may cut off such tails."""

    def at_least_as_bad(self, tail: float) -> LossLaw:
        """A loss at least as bad, which may cut off such tails."""


Pairs = Mapping[LossPair, int]
"""Number of events by the pair whose loss they have."""


@dataclass(frozen=True)
class GaussianPair(LossLaw):
    """The pair of one release with Gaussian noise, which depends only on q and z."""

    q: float  # probability that a user is in the cohort, in (0, 1]
    z: float  # noise_stddev per sensitivity, ≥ 0

    @property
    def shift(self) -> float:
        """How far means lie apart if q = 1, in sensitivities."""
        return 1.0

    def centre(self, step: float) -> float:  # noqa: ARG002
        """0, where outputs of opposite losses merge if the loss is symmetric."""
        return 0.0

    @property
    def resolution(self) -> float:
        """The masses of a loss near 0 differ by at most a share of the order of q."""
        return self.q

    def at(self, q: float, z: float) -> Self:
        """The pair of the same kind with other q and z."""
        return replace(self, q=q, z=z)

    def at_most_as_bad(self, tail: float) -> LossLaw:  # noqa: ARG002
        """The pair's own."""
        return self

    def at_least_as_bad(self, tail: float) -> LossLaw:  # noqa: ARG002
        """The pair's own."""
        return self


def merging_point(ends: Vector, merged_around: Callable[[Vector], Vector]) -> float:
    """The `centre` of a law, between two losses: by sections roughly, then by fixed-point steps.

    An interval that holds nearly all mass merges into the same point wherever its ends are, so
    that the result is exact where it matters.
    """
    candidates: Vector = np.linspace(ends[0], ends[1], 33)
    below = merged_around(candidates) < candidates
    centre = candidates[max(1, int(np.argmax(below))) - 1 :][:1]
    for _ in range(3):
        centre = merged_around(centre)
    return float(centre[0])


@dataclass(frozen=True)
class LatticePoints:
    """The points in use for one pair."""

    offset: float
    index: NDArray[np.int64]  # [points]
    loss: Vector  # [points] offset + step·index


def lattice_points(law: LossLaw, lattice: Lattice, direction: Direction) -> LatticePoints:
    """The points for one pair, which leave out `lattice.tail` of P and Q, and losses beyond ±690.

    One is the centre of the loss. From there they are neighbours first, then spaced in proportion
    to their distance, then evenly, so that a few hundred cover losses of all sizes.
    """
    # A hair beside the centre, so that rounding cannot move a mean to the wrong side of it.
    offset = law.centre(lattice.step) - direction * _HAIR * lattice.step
    low, high = law.span(lattice.tail)
    below = _spaced(math.floor((offset - low) / lattice.step) + 2, lattice)
    above = _spaced(math.ceil((high - offset) / lattice.step) + 1, lattice)
    index = np.concatenate([-below[::-1], np.zeros(1, np.int64), above])
    loss = offset + lattice.step * index
    inside = np.abs(loss) <= _LARGEST_LOSS  # e^L and e^{−L} must stay numbers
    return LatticePoints(offset, index[inside], loss[inside])


def _spaced(reach: int, lattice: Lattice) -> NDArray[np.int64]:
    """Increasing indices from 1 to at least `reach`, spaced 1, then in proportion, then evenly."""
    growth, widest = lattice.growth, max(lattice.widest, 1.0, reach / _MOST_POINTS)
    knee, far = 1 / growth, widest / growth
    turn = knee + math.log(far / knee) / growth
    count = min(reach, knee) + math.log(min(max(reach, knee), far) / knee) / growth
    count += max(reach - far, 0.0) / widest
    u = np.arange(1, math.ceil(count) + 2)
    grown = knee * np.exp(growth * (np.minimum(u, turn) - knee)) + np.maximum(u - turn, 0) * widest
    index = np.ceil(np.where(u <= knee, u, grown)).astype(np.int64)
    return index[np.diff(index, prepend=0) > 0]


def dominating(law: LossLaw, lattice: Lattice, direction: Direction) -> LossAtoms:
    """A loss on the lattice whose compositions are at least as bad as those of the true loss.

    What lies between two points goes to both so that its masses under P and Q are kept; what lies
    beyond the lattice moves to its end or to infinity, whichever is worse than where it was.
    """
    points = lattice_points(law, lattice, direction)
    loss, share = points.loss, -np.expm1(-lattice.step * np.diff(points.index))
    found = law.masses(loss)
    inner, lost = _without_small(found)
    p, q, _ = inner
    mass = np.zeros(len(loss))
    # Where digits were lost, all of it is infinite; what is smaller than that is covered, too.
    infinite = _SMALLEST * len(loss)
    if direction is Direction.REMOVE:
        infinite += found[0, -1] + lost[0]
        moved = np.clip(_excess(inner, loss[:-1]) / share, 0.0, p)
        mass[1:] += moved
        mass[:-1] += p - moved
        mass[0] += found[0, 0]
    else:
        infinite += found[1, 0] + lost[1]
        moved = np.clip(-_excess(inner, loss[1:]) * np.exp(-loss[1:]) / share, 0.0, q)
        mass[1:] += q - moved
        mass[:-1] += moved
        mass[-1] += found[1, -1]
    return _atoms(law, points, mass, float(infinite), direction)


def dominated(law: LossLaw, lattice: Lattice, direction: Direction) -> LossAtoms:
    """A loss on the lattice whose compositions are at most as bad as those of the true loss.

    The line between two lattice points is a tangent of the curve, lowered to where its neighbours
    meet it; the lower convex hull of that chain is again a curve. What lies beyond the lattice is
    dropped, so masses sum to at most 1 within rounding.
    """
    points = lattice_points(law, lattice, direction)
    loss, spacing = points.loss, lattice.step * np.diff(points.index)
    touch = (loss[:-1] + loss[1:]) / 2

    def inner() -> Vector:
        """[3, points] between the touching points and the ends of the lattice."""
        return _without_small(law.masses(np.concatenate([loss[:1], touch, loss[-1:]])))[0]

    # At the next lattice points a tangent should be above the asymptotes 1 − e^ε and 0 of the
    # curve: what lies below (above) its touching point should have its mean beyond the next lattice
    # point; touching at that point it does. The direction's own side must hold, so it comes last;
    # on the other the centre is a hair off, and would move to the next point.
    for side, hair in ((-direction, 2 * _HAIR * lattice.step), (direction, 0.0)):
        if side == Direction.ADD:
            up_to = np.cumsum(inner(), axis=1)[:, :-1]
            touch = np.where(_excess(up_to, loss[:-1] + hair) <= 0, touch, loss[:-1])
        else:
            beyond = np.cumsum(inner()[:, ::-1], axis=1)[:, -2::-1]
            touch = np.where(_excess(beyond, loss[1:] - hair) >= 0, touch, loss[1:])
    mass = _convex_hull(_exchanged(inner(), loss, spacing), loss)
    if direction is Direction.REMOVE:
        mass = mass * np.exp(loss)
    return _atoms(law, points, mass, 0.0, direction)


def _without_small(masses: Vector) -> tuple[Vector, Vector]:
    """The masses between edges but for those that have lost digits, and the [3] sums of these."""
    inner = masses[:, 1:-1]
    small = (inner[:2] < _SMALLEST).any(axis=0)
    return np.where(small, 0.0, inner), np.where(small, inner, 0.0).sum(axis=1)


def _excess(masses: Vector, loss: Vector) -> Vector:
    """P − e^loss·Q of each, accurate relative to what a small error of the loss changes."""
    p, q, gap = masses
    near = np.abs(loss) < _NEAR
    from_gap = gap - q * np.expm1(np.where(near, loss, 0.0))
    return np.asarray(np.where(near, from_gap, p - q * np.exp(loss)))


def _exchanged(masses: Vector, loss: Vector, spacing: Vector) -> Vector:
    """Q-masses on the lattice points, after exchange between neighbours.

    Where the mean is above the point, the excess goes to the neighbour below, whose mass then rises
    to this point; where it is below, to the neighbour above.
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
    """Q-masses of the lower convex hull of the curve whose second differences are `mass`.

    A point with negative mass lies above the chord of its neighbours, so it is not on the hull: it
    goes, and its mass under P and Q goes to the neighbours, until no mass is negative. At the end
    where the curve may pass below its asymptote there is one neighbour, which takes the mass under
    Q (first point) or P (last point); the other mass changes to the side that lowers δ.
    """
    left, at = mass.tolist(), loss.tolist()  # one point at a time: removals run along the points
    below, above = [*range(-1, len(at) - 1)], [*range(1, len(at) + 1)]
    waiting = np.flatnonzero(mass < 0).tolist()
    while waiting:
        point = waiting.pop()
        low, high, moved = below[point], above[point], left[point]
        if moved == 0.0:
            continue
        left[point] = 0.0
        if low < 0:
            to_low, to_high = 0.0, 1.0
        elif high == len(at):
            to_low, to_high = math.exp(min(at[point] - at[low], 700.0)), 0.0
        else:
            to_high = math.exp(at[point] - at[high]) * math.expm1(at[low] - at[point])
            to_high /= math.expm1(at[low] - at[high])
            to_low = 1.0 - to_high
        for end, share in ((low, to_low), (high, to_high)):
            if 0 <= end < len(at):
                left[end] += share * moved
                if left[end] < 0.0:
                    waiting.append(end)
        if low >= 0:
            above[low] = high
        if high < len(at):
            below[high] = low
    return np.array(left)


def _atoms(
    law: LossLaw, points: LatticePoints, mass: Vector, infinite: float, direction: Direction
) -> LossAtoms:
    """The atoms as the direction sees them."""
    rounding = ROUNDING * (2 * law.resolution - np.expm1(-np.abs(points.loss)))
    offset, index = int(direction) * points.offset, int(direction) * points.index
    return LossAtoms(offset, index, np.maximum(mass, 0.0), rounding, infinite)


@dataclass(frozen=True, eq=False)
class DiscreteLaw(LossLaw):
    """The loss of [outputs] with masses under P and Q; the rest of P and Q, if any, is left out.

    Outputs without mass under P have the loss −∞, others without mass under Q the loss ∞.
    """

    p: Vector
    q: Vector
    gap: Vector  # p − q, as exact as is known
    resolution: float = 1.0  # errors are relative to the masses

    @cached_property
    def loss(self) -> Vector:
        """[outputs] log(p/q)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            rise = self.gap / self.q
            far = np.where(self.p > 0, np.log(self.p) - np.log(self.q), -np.inf)
            return np.where(np.abs(rise) < _NEAR, np.log1p(rise), far)

    def span(self, tail: float) -> tuple[float, float]:
        """Finite losses that P and Q pass on either side with probability at most about `tail`."""
        finite = np.isfinite(self.loss)
        order = np.argsort(self.loss[finite])
        loss, both = self.loss[finite][order], np.maximum(self.p, self.q)[finite][order]
        below, above = np.cumsum(both), np.cumsum(both[::-1])[::-1]
        first = min(int((below <= tail).sum()), len(loss) - 1)
        last = max(int((above > tail).sum()) - 1, 0)
        return float(loss[first]), float(loss[last])

    def centre(self, step: float) -> float:
        """The loss of what surrounds the commonest output."""
        c = float(self.loss[np.argmax(np.where(np.isfinite(self.loss), self.q, -1.0))])
        for _ in range(3):
            near = np.abs(self.loss - c) <= step
            q, gap = float(self.q[near].sum()), float(self.gap[near].sum())
            c = float(np.log1p(gap / q)) if q > 0 and gap > -q else c
        return c

    def masses(self, edges: Vector) -> Vector:
        """[3, edges + 1] below the first of the [edges] losses, between them, and above."""
        at = np.searchsorted(edges, self.loss)
        rows = (self.p, self.q, self.gap)
        return np.array([np.bincount(at, row, len(edges) + 1) for row in rows], np.float64)

    def sketch(self, tail: float) -> Sketch:
        """Some hundred groups of outputs, without losses that are rarer than `tail`."""
        low, high = self.span(tail)
        edges = np.linspace(np.nextafter(low, -np.inf), high, SKETCH_NODES)
        return sketched(self, edges, self.centre(0.0))


def sketched(law: LossLaw, edges: Vector, middle: float) -> Sketch:
    """The loss in groups of the outputs between neighbouring edges."""
    inner = law.masses(edges)[:, 1:-1]
    groups = DiscreteLaw(*inner[:, (inner[:2] > 0).all(axis=0)])
    return Sketch(np.log(groups.q), groups.loss, middle)
