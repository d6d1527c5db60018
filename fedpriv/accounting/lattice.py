"""Where the losses of one round may lie: a lattice whose far points are sparse.

One point is the centre of the loss. From there the points in use are neighbours first, then spaced
in proportion to their distance, then evenly, so a few hundred cover losses of all sizes.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.loss import (
    Direction,
    Vector,
    least_loss,
    merged_loss,
    privacy_loss,
    sample_at,
    sample_range,
)

_GROWTH = 0.03
"""Spacing of far lattice points relative to their distance from the centre."""
_LARGEST_LOSS = 690.0
_MOST_POINTS = 1 << 14
"""Largest number of evenly spaced far lattice points."""


@dataclass(frozen=True)
class Lattice:
    """Where the losses of one round may lie.

    Attributes:
        step: distance h > 0 of neighbouring lattice points.
        widest: largest spacing of occupied points far from the centre, in steps, at least 1.
        tail: largest probability of what may be cut off on either side.
    """

    step: float
    widest: float
    tail: float


@dataclass(frozen=True)
class LatticePoints:
    """The lattice points in use for one round, in increasing order.

    Attributes:
        offset: loss of the point with index 0.
        index: [points] the loss of point i is offset + step·index[i].
        loss: [points] that loss L.
        x: [points] where the round has this loss, −∞ if nowhere; only the first may be.
        ratio: [points] r = (e^loss − 1 + q)/q.
    """

    offset: float
    index: NDArray[np.int64]
    loss: Vector
    x: Vector
    ratio: Vector


def lattice_points(q: float, z: float, lattice: Lattice, direction: Direction) -> LatticePoints:
    """The points for one round, which leave out `lattice.tail` of P and Q, and losses beyond ±690.

    Args:
        q: sampling probability in (0, 1].
        z: noise multiplier, at least 0.05.
        lattice: where the losses may lie.
        direction: which neighbour the mechanism ran on; the losses are L in either case.
    """
    # A hair beside the centre, so that rounding cannot move a mean to the wrong side of it.
    offset = _centre(q, z, lattice.step) - direction * 1e-12 * lattice.step
    low, high = privacy_loss(np.array(sample_range(q, z, lattice.tail)), q, z)
    below = _spaced(math.floor((offset - low) / lattice.step) + 2, lattice.widest)
    above = _spaced(math.ceil((high - offset) / lattice.step) + 1, lattice.widest)
    index = np.concatenate([-below[::-1], np.zeros(1, np.int64), above])
    loss = offset + lattice.step * index
    # One point at or below log(1 − q) is enough, and e^L and e^{−L} must stay numbers.
    inside = np.abs(loss) <= _LARGEST_LOSS
    inside[:-1] &= loss[1:] > least_loss(q)
    index, loss = index[inside], loss[inside]
    return LatticePoints(offset, index, loss, *sample_at(loss, q, z))


def _centre(q: float, z: float, step: float) -> float:
    """The loss c such that the cell [c − h, c + h] merges into c.

    Where the loss is nearly constant but for rare jumps, as at small z, nearly all mass is in this
    cell, and its mean must be a lattice point, or each round of a lower bound would lose some.
    Sections find c roughly, and fixed-point steps exactly where it matters: a cell that holds
    nearly all mass merges into the same point wherever its ends are.
    """
    low, high = privacy_loss(np.array([-8 * z, 4 * z]), q, z)
    candidates: Vector = np.linspace(low, high, 33)
    below = _merged_around(candidates, q, z, step) < candidates
    centre = candidates[max(1, int(np.argmax(below))) - 1 :][:1]
    for _ in range(3):
        centre = _merged_around(centre, q, z, step)
    return float(centre[0])


def _merged_around(c: Vector, q: float, z: float, step: float) -> Vector:
    """The losses into which the cells [c − h, c + h] merge; c itself where it cannot be told."""
    merged = merged_loss(sample_at(c - step, q, z)[0], sample_at(c + step, q, z)[0], q, z)
    return np.where(np.isnan(merged), c, merged)


def _spaced(reach: int, widest: float) -> NDArray[np.int64]:
    """Increasing indices from 1 to at least `reach`, spaced 1, then in proportion, then evenly."""
    widest = max(widest, 1.0, reach / _MOST_POINTS)
    knee, far = 1 / _GROWTH, widest / _GROWTH
    turn = knee + math.log(far / knee) / _GROWTH
    if reach <= knee:
        count = float(reach)
    elif reach <= far:
        count = knee + math.log(reach / knee) / _GROWTH
    else:
        count = turn + (reach - far) / widest
    u = np.arange(1, math.ceil(count) + 2)
    grown = knee * np.exp(_GROWTH * (np.minimum(u, turn) - knee)) + np.maximum(u - turn, 0) * widest
    return np.unique(np.ceil(np.where(u <= knee, u, grown)).astype(np.int64))
