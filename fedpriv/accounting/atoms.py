"""A privacy loss put on a lattice, once too bad and once too good.

The curve ε ↦ δ(ε) is convex in e^ε, and a curve that is a chain of straight lines between lattice
points belongs to a loss with values on the lattice. So chords of the true curve give a loss that
is at least as bad, chains of lines below it one that is at most as bad. Both keep the mass and the
mean of e^L, which makes their error second order in the spacing, and both are computed from the
masses of cells, never from differences of the curve, so that the smallest masses are right.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.lattice import Cells, Lattice, LatticePoints, LossLaw, lattice_points
from fedpriv.accounting.rounds import Direction, Vector

ROUNDING = 1e-12
"""Relative error allowed to the mass of a cell, ten times what the tests find."""
_NEAR = 0.5
"""Losses up to this size are told from 0 by the gap between P and Q, others by P and Q."""


@dataclass(frozen=True)
class LossAtoms:
    """A privacy loss on a lattice; finite masses and `infinite` need not sum to 1.

    Attributes:
        offset: loss of the lattice point with index 0.
        index: [atoms] the loss of atom i is offset + step·index[i].
        mass: [atoms] probabilities ≥ 0.
        rounding: [atoms] how far rounding may have moved the loss of each atom.
        infinite: probability of an infinite loss.
    """

    offset: float
    index: NDArray[np.int64]
    mass: Vector
    rounding: Vector
    infinite: float


def dominating(law: LossLaw, lattice: Lattice, direction: Direction) -> LossAtoms:
    """A loss on the lattice whose compositions are at least as bad as those of the pair.

    The mass of each cell goes to its two end points so that its masses under P and Q are kept
    (connect the dots, Doroshenko et al. 2022); what lies beyond the lattice moves to its end or to
    infinity, whichever is worse than where it was.

    Args:
        law: the true loss of the pair.
        lattice: where the losses may lie.
        direction: which neighbour the mechanism ran on.

    Returns:
        The atoms; masses and `infinite` sum to 1 within rounding.
    """
    points = lattice_points(law, lattice, direction)
    loss, share = points.loss, -np.expm1(-points.spacing)
    cells = law.cells(loss)
    inner = _part(cells, slice(1, -1))
    mass = np.zeros(len(loss))
    if direction is Direction.REMOVE:
        moved = np.clip(_excess(inner, loss[:-1]) / share, 0.0, inner.p)
        mass[1:] += moved
        mass[:-1] += inner.p - moved
        mass[0] += cells.p[0]
        infinite = cells.p[-1]
    else:
        moved = np.clip(-_excess(inner, loss[1:]) * np.exp(-loss[1:]) / share, 0.0, inner.q)
        mass[1:] += inner.q - moved
        mass[:-1] += moved
        mass[-1] += cells.q[-1]
        infinite = cells.q[0]
    return _atoms(law, points, mass, float(infinite), direction)


def dominated(law: LossLaw, lattice: Lattice, direction: Direction) -> LossAtoms:
    """A loss on the lattice whose compositions are at most as bad as those of the pair.

    The line between two lattice points is a tangent of the curve, lowered to where its neighbours
    meet it; the lower convex hull of that chain is again a curve. What lies beyond the lattice is
    dropped.

    Args:
        law: the loss of the pair, of whatever sets of outputs it makes.
        lattice: where the losses may lie.
        direction: which neighbour the mechanism ran on.

    Returns:
        The atoms; their masses sum to at most 1 within rounding, and `infinite` is 0.
    """
    points = lattice_points(law, lattice, direction)
    loss = points.loss
    touch = (loss[:-1] + loss[1:]) / 2
    # At the next lattice points a tangent should be above the asymptotes 1 − e^ε and 0 of the
    # curve: what lies below (above) its touching point should have its mean beyond the next lattice
    # point; touching at that point it does. What the direction reads, checked last, is a must.
    for side in (-direction, direction):
        cells = _within(law, loss, touch)
        if side == Direction.ADD:
            touch = np.where(_excess(_sums(cells), loss[:-1]) <= 0, touch, loss[:-1])
        else:
            touch = np.where(_excess(_sums_above(cells), loss[1:]) >= 0, touch, loss[1:])
    mass = _exchanged(_within(law, loss, touch), points)
    mass = _convex_hull(mass, loss)
    if direction is Direction.REMOVE:
        mass = mass * _exp(loss)
    return _atoms(law, points, mass, 0.0, direction)


def _within(law: LossLaw, loss: Vector, touch: Vector) -> Cells:
    """[points] masses of the cells that the touching points make of the lattice."""
    return _part(law.cells(np.concatenate([loss[:1], touch, loss[-1:]])), slice(1, -1))


def _part(cells: Cells, of: slice) -> Cells:
    return Cells(cells.p[of], cells.q[of], cells.gap[of])


def _sums(cells: Cells) -> Cells:
    """Masses of all cells up to each but the last."""
    p, q, gap = (np.cumsum(masses)[:-1] for masses in (cells.p, cells.q, cells.gap))
    return Cells(p, q, gap)


def _sums_above(cells: Cells) -> Cells:
    """Masses of all cells above each but the last."""
    p, q, gap = (np.cumsum(masses[::-1])[-2::-1] for masses in (cells.p, cells.q, cells.gap))
    return Cells(p, q, gap)


def _excess(cells: Cells, loss: Vector) -> Vector:
    """P − e^loss·Q of each cell, accurate relative to what a small error of the loss changes."""
    near = np.abs(loss) < _NEAR
    return np.where(
        near,
        cells.gap - cells.q * np.expm1(np.where(near, loss, 0.0)),
        cells.p - cells.q * np.exp(loss),
    )


def _exchanged(cells: Cells, points: LatticePoints) -> Vector:
    """Q-masses on the lattice points, one per cell, after exchange between neighbours.

    A cell whose mean is above its point lends the excess to the neighbour below, whose mass then
    rises to this point; a cell whose mean is below its point does so with the neighbour above.
    """
    excess = _excess(cells, points.loss)
    gap = np.exp(points.loss[:-1]) * np.expm1(points.spacing)
    lend_down = np.maximum(excess[1:], 0.0) / gap
    lend_up = np.maximum(-excess[:-1], 0.0) / gap
    mass = cells.q.copy()
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
    mass = mass.copy()
    kept = np.arange(len(mass))
    while (negative := mass[kept] < 0).any():
        negative[1:] &= ~negative[:-1]  # of a run every other one, so that neighbours stay
        at = np.flatnonzero(negative)
        point, low = kept[at], kept[np.maximum(at - 1, 0)]
        high = kept[np.minimum(at + 1, len(kept) - 1)]
        to_point, to_end = loss[low] - loss[point], loss[low] - loss[high]
        first, last = at == 0, at == len(kept) - 1
        share = np.exp(loss[point] - loss[high]) * np.expm1(to_point)
        share = share / np.where(first, -1.0, np.expm1(np.where(first, -1.0, to_end)))
        to_high = np.where(first, 1.0, np.where(last, 0.0, share))
        to_low = np.where(first, 0.0, np.where(last, _exp(loss[point] - loss[low]), 1 - share))
        np.add.at(mass, high, to_high * mass[point])
        np.add.at(mass, low, to_low * mass[point])
        mass[point] = 0.0
        kept = np.delete(kept, at)
    return mass


def _atoms(
    law: LossLaw, points: LatticePoints, mass: Vector, infinite: float, direction: Direction
) -> LossAtoms:
    """The atoms as the direction sees them."""
    rounding = ROUNDING * (2 * law.resolution - np.expm1(-np.abs(points.loss)))
    sign = int(direction)
    mass = np.maximum(mass, 0.0)
    return LossAtoms(sign * points.offset, sign * points.index, mass, rounding, infinite)


def _exp(exponent: Vector) -> Vector:
    """e^exponent, or a number too large to matter."""
    return np.asarray(np.exp(np.minimum(exponent, 700.0)))
