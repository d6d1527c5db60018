"""The privacy loss of one round put on a lattice, once too bad and once too good.

The curve ε ↦ δ(ε) is convex in e^ε, and a curve that is a chain of straight lines between lattice
points belongs to a loss with values on the lattice. So chords of the true curve give a loss that
is at least as bad, chains of lines below it one that is at most as bad. Both keep the mass and the
mean of e^L, which makes their error second order in the spacing, and both are computed from the
masses of cells, never from differences of the curve, so that the smallest masses are right.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.lattice import LatticePoints
from fedpriv.accounting.loss import Direction, Vector, cells, least_loss, masses, sample_at

ROUNDING = 1e-12
"""Relative error allowed to the mass of a cell, ten times what the tests find."""


@dataclass(frozen=True)
class LossAtoms:
    """A privacy loss of one round on a lattice; finite masses and `infinite` need not sum to 1.

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


def dominating(q: float, z: float, points: LatticePoints, direction: Direction) -> LossAtoms:
    """A loss on the lattice whose compositions are at least as bad as those of the round.

    The mass of each cell goes to its two end points so that its masses under P and Q are kept
    (connect the dots, Doroshenko et al. 2022); what lies beyond the lattice moves to its end or to
    infinity, whichever is worse than where it was.

    Args:
        q: sampling probability in (0, 1].
        z: noise multiplier, at least 0.05.
        points: where the losses may lie, made for the same q, z and direction.
        direction: which neighbour the mechanism ran on.

    Returns:
        The atoms; masses and `infinite` sum to 1 within rounding.
    """
    loss, x, ratio = points.loss, points.x, points.ratio
    absent, present = cells(x, 0.0, z), cells(x, 1.0, z)
    share = ratio[:-1] / ratio[1:]
    absent_down = np.maximum(absent - present / ratio[1:], 0.0) / (1 - share)
    present_up = np.maximum(present - ratio[:-1] * absent, 0.0) / (1 - share)
    ends = np.array([-np.inf, x[0]]), np.array([x[-1], np.inf])
    below, above = ([float(cells(end, mean, z)[0]) for mean in (0.0, 1.0)] for end in ends)
    mass = np.zeros(len(loss))
    if direction is Direction.REMOVE:
        mass[1:] += (1 - q) * (absent - absent_down) + q * present_up
        mass[:-1] += (1 - q) * absent_down + q * (present - present_up)
        mass[0] += (1 - q) * below[0] + q * below[1]
        infinite = (1 - q) * above[0] + q * above[1]
    else:
        mass[1:] += absent - absent_down
        mass[:-1] += absent_down
        mass[-1] += above[0]
        infinite = below[0]
    return _atoms(points, np.maximum(mass, 0.0), infinite, q, direction)


def dominated(q: float, z: float, points: LatticePoints, direction: Direction) -> LossAtoms:
    """A loss on the lattice whose compositions are at most as bad as those of the round.

    The line between two lattice points is a tangent of the curve, lowered to where its neighbours
    meet it; the lower convex hull of that chain is again a curve. What lies beyond the lattice is
    dropped.

    Args:
        q: sampling probability in (0, 1].
        z: noise multiplier, at least 0.05.
        points: where the losses may lie, made for the same q, z and direction.
        direction: which neighbour the mechanism ran on.

    Returns:
        The atoms; their masses sum to at most 1 within rounding, and `infinite` is 0.
    """
    loss, x, ratio = points.loss, points.x, points.ratio
    touch, _ = sample_at((loss[:-1] + loss[1:]) / 2, q, z)
    # At the next lattice points a tangent should be above the asymptotes 1 − e^ε and 0 of the
    # curve: what lies below (above) its touching point should have its mean beyond the next lattice
    # point; touching at that point it does. What the direction reads, checked last, is a must.
    for side in (-direction, direction):
        if side == Direction.ADD:
            absent, present = (masses(x[:1], touch, mean, z) for mean in (0.0, 1.0))
            touch = np.where(present <= ratio[:-1] * absent, touch, x[:-1])
        else:
            absent, present = (masses(touch, x[-1:], mean, z) for mean in (0.0, 1.0))
            touch = np.where(present >= ratio[1:] * absent, touch, x[1:])
    edges = np.concatenate([x[:1], touch, x[-1:]])
    mass = _exchanged(cells(edges, 0.0, z), cells(edges, 1.0, z), ratio)
    mass = _convex_hull(mass, ratio, loss)
    if direction is Direction.REMOVE:
        mass = mass * _exp(loss)
    return _atoms(points, mass, 0.0, q, direction)


def _exchanged(absent: Vector, present: Vector, ratio: Vector) -> Vector:
    """Q-masses on the lattice points, one per cell, after exchange between neighbours.

    A cell whose mean is above its point lends the excess to the neighbour below, whose mass then
    rises to this point; a cell whose mean is below its point does so with the neighbour above.
    """
    excess = present - ratio * absent
    gap = np.diff(ratio)
    lend_down = np.maximum(excess[1:], 0.0) / gap
    lend_up = np.maximum(-excess[:-1], 0.0) / gap
    mass = absent.copy()
    mass[1:] += lend_down - lend_up
    mass[:-1] += lend_up - lend_down
    return mass


def _convex_hull(mass: Vector, ratio: Vector, loss: Vector) -> Vector:
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
        share = (ratio[point] - ratio[low]) / (ratio[high] - ratio[low])
        first, last = at == 0, at == len(kept) - 1
        to_high = np.where(first, 1.0, np.where(last, 0.0, share))
        to_low = np.where(first, 0.0, np.where(last, _exp(loss[point] - loss[low]), 1 - share))
        np.add.at(mass, high, to_high * mass[point])
        np.add.at(mass, low, to_low * mass[point])
        mass[point] = 0.0
        kept = np.delete(kept, at)
    return mass


def _atoms(
    points: LatticePoints, mass: Vector, infinite: float, q: float, direction: Direction
) -> LossAtoms:
    """The atoms as the direction sees them.

    A relative error of r moves L by its slope q·r/(1 − q + q·r) = 1 − (1 − q)·e^{−L}; q itself
    covers the rounding of losses near their least.
    """
    slope = -np.expm1(np.minimum(least_loss(q) - points.loss, 0.0))
    sign, rounding = int(direction), ROUNDING * (slope + q)
    return LossAtoms(sign * points.offset, sign * points.index, mass, rounding, infinite)


def _exp(exponent: Vector) -> Vector:
    """e^exponent, or a number too large to matter."""
    return np.asarray(np.exp(np.minimum(exponent, 700.0)))
