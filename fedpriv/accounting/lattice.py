"""Where the losses of one pair may lie: a lattice whose far points are sparse.

One point is the centre of the loss. From there the points in use are neighbours first, then spaced
in proportion to their distance, then evenly, so a few hundred cover losses of all sizes.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.rounds import Direction, Vector

_LARGEST_LOSS = 690.0
_MOST_POINTS = 1 << 14
"""Largest number of evenly spaced far lattice points."""


@dataclass(frozen=True)
class Lattice:
    """Where the losses of one pair may lie.

    Attributes:
        step: distance h > 0 of neighbouring lattice points.
        widest: largest spacing of points in use far from the centre, in steps, at least 1.
        growth: spacing of points at some distance from the centre, relative to that, below 1.
        tail: largest probability of what may be cut off on either side.
    """

    step: float
    widest: float
    growth: float
    tail: float


@dataclass(frozen=True)
class LatticePoints:
    """The lattice points in use for one pair, in increasing order.

    Attributes:
        offset: loss of the point with index 0.
        index: [points] the loss of point i is offset + step·index[i].
        loss: [points] that loss L.
        spacing: [points − 1] distances of neighbours, exact relative to their size.
    """

    offset: float
    index: NDArray[np.int64]
    loss: Vector
    spacing: Vector


@dataclass(frozen=True)
class Cells:
    """Masses of the sets of outputs whose losses lie between given ones.

    Attributes:
        p: [cells] masses under P.
        q: [cells] masses under Q.
        gap: [cells] p − q, without the cancellation that a subtraction could have.
    """

    p: Vector
    q: Vector
    gap: Vector


class LossLaw(Protocol):
    """The loss L = log(dP/dQ) of a pair as the masses between any losses; no direction, no lattice.

    A pair whose loss is known only roughly may sort its outputs by the rough loss. Bounds from
    below stay bounds; those from above need the true one.
    """

    @property
    def resolution(self) -> float:
        """Least r ≤ 1 such that a relative error x in masses moves L by (1 − e^{−|L|} + 2r)·x."""

    def span(self, tail: float) -> tuple[float, float]:
        """Finite losses that P and Q pass on either side with probability at most about `tail`."""

    def centre(self, step: float) -> float:
        """The loss c such that outputs with a loss in [c − step, c + step] have c together.

        Where the loss is nearly constant but for rare jumps nearly all mass is there, and what it
        merges into must be a lattice point, or each round of a lower bound would lose some.
        """

    def cells(self, edges: Vector) -> Cells:
        """Masses below the first of the increasing losses, between neighbours, above the last.

        Args:
            edges: [edges] losses.

        Returns:
            [edges + 1] masses.
        """


def lattice_points(law: LossLaw, lattice: Lattice, direction: Direction) -> LatticePoints:
    """The points for one pair, which leave out `lattice.tail` of P and Q, and losses beyond ±690.

    Args:
        law: the loss of the pair.
        lattice: where the losses may lie.
        direction: which neighbour the mechanism ran on; the losses are L in either case.
    """
    # A hair beside the centre, so that rounding cannot move a mean to the wrong side of it.
    offset = law.centre(lattice.step) - direction * 1e-12 * lattice.step
    low, high = law.span(lattice.tail)
    below = _spaced(math.floor((offset - low) / lattice.step) + 2, lattice)
    above = _spaced(math.ceil((high - offset) / lattice.step) + 1, lattice)
    index = np.concatenate([-below[::-1], np.zeros(1, np.int64), above])
    loss = offset + lattice.step * index
    inside = np.abs(loss) <= _LARGEST_LOSS  # e^L and e^{−L} must stay numbers
    index, loss = index[inside], loss[inside]
    return LatticePoints(offset, index, loss, lattice.step * np.diff(index))


def _spaced(reach: int, lattice: Lattice) -> NDArray[np.int64]:
    """Increasing indices from 1 to at least `reach`, spaced 1, then in proportion, then evenly."""
    growth, widest = lattice.growth, max(lattice.widest, 1.0, reach / _MOST_POINTS)
    knee, far = 1 / growth, widest / growth
    turn = knee + math.log(far / knee) / growth
    if reach <= knee:
        count = float(reach)
    elif reach <= far:
        count = knee + math.log(reach / knee) / growth
    else:
        count = turn + (reach - far) / widest
    u = np.arange(1, math.ceil(count) + 2)
    grown = knee * np.exp(growth * (np.minimum(u, turn) - knee)) + np.maximum(u - turn, 0) * widest
    index = np.ceil(np.where(u <= knee, u, grown)).astype(np.int64)
    return index[np.diff(index, prepend=0) > 0]
