"""Rounds as arrays, and panels of few rounds that stand for many.

Sums over rounds of a function of (q, z) are all that an inversion needs. A panel has the pairs
(q, z) at which the function is computed and the weights that make the sum from its values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedpriv.accounting.cumulant import ComplexVector
from fedpriv.accounting.loss import Vector
from fedpriv.errors import InvalidValueError

_SAFETY = 8.0
"""How much worse the interpolation may be than at the points where it should be worst."""
_CELLS = 12
"""Cells per variable of a summary."""


@dataclass(frozen=True)
class RoundsArray:
    """Rounds by arrays: counts[i] rounds of sampling probability q[i] and noise multiplier z[i].

    Attributes:
        q: [n] sampling probabilities in (0, 1].
        z: [n] noise multipliers, finite and not negative.
        counts: [n] numbers of rounds > 0; a pair (q, z) may occur more than once.

    Raises:
        InvalidValueError: the shapes differ or a value is out of range.
    """

    q: Vector
    z: Vector
    counts: Vector

    def __post_init__(self) -> None:
        if not self.q.shape == self.z.shape == self.counts.shape == (len(self.q),):
            raise InvalidValueError(
                f"q, z and counts have the shapes {self.q.shape}, {self.z.shape} and "
                f"{self.counts.shape}; they must be vectors of one length"
            )
        for name, values, legal, within in (
            ("q", self.q, (self.q > 0) & (self.q <= 1), "in (0, 1]"),
            ("z", self.z, (self.z >= 0) & (self.z < np.inf), "finite and not negative"),
            ("counts", self.counts, (self.counts > 0) & (self.counts < np.inf), "positive"),
        ):
            if not legal.all():
                raise InvalidValueError(f"{name} has a {values[~legal][0]}; it must be {within}")

    def part(self, where: NDArray[np.bool_]) -> "RoundsArray":
        """The rounds where the mask is true."""
        return RoundsArray(self.q[where], self.z[where], self.counts[where])


def rounds_array(rounds: Mapping[tuple[float, float], float]) -> RoundsArray:
    """Rounds given by their number for each (q, z), as `events.compose` returns them.

    >>> rounds_array({(0.5, 2.0): 4})
    RoundsArray(q=array([0.5]), z=array([2.]), counts=array([4.]))
    """
    pairs = np.array(list(rounds.keys()), dtype=np.float64).reshape(-1, 2)
    counts = np.array(list(rounds.values()), dtype=np.float64)
    return RoundsArray(pairs[:, 0], pairs[:, 1], counts)


@dataclass(frozen=True)
class Check:
    """What tells how well a part of a panel interpolates.

    Attributes:
        pairs: the part.
        residual: [probes, pairs] difference of a probe and its interpolation, from all values.
        rounds: number of rounds that the part stands for, relative to the scale of `residual`.
    """

    pairs: slice
    residual: Vector
    rounds: float


@dataclass(frozen=True)
class Panel:
    """A few pairs (q, z) that stand for all rounds.

    Attributes:
        q: [p] and
        z: [p] the pairs.
        weight: [p] how often each counts in a sum; some may be negative, probes have 0.
        rounds: number of all rounds.
        count: [cells] numbers of rounds that lie between pairs, and
        corners: [cells, 4] those pairs.
        widest_q: [p] and
        widest_z: [p] a pair at least as bad as every round that the pair stands for.
        checks: for each part that interpolates.
    """

    q: Vector
    z: Vector
    weight: Vector
    rounds: float
    count: Vector
    corners: NDArray[np.int64]
    widest_q: Vector
    widest_z: Vector
    checks: tuple[Check, ...]

    def sum(self, values: Vector) -> float:
        """Σ over all rounds of a function with the [p] values."""
        return float(self.weight @ values)

    def interpolation_error(self, values: Vector | ComplexVector) -> Vector:
        """Estimate of the errors of sums over all rounds, 0 where all pairs are there.

        It is the largest error at the probes, which lie where the node polynomial is largest, times
        the number of rounds, times 8. This is the one error that is estimated and not bounded.

        Args:
            values: [p, m] functions of the pairs.

        Returns:
            [m] estimates.
        """
        error = np.zeros(values.shape[1])
        for check in self.checks:
            missed = np.abs(check.residual @ values[check.pairs]).max(axis=0)
            error += _SAFETY * check.rounds * missed
        return error

    def sum_above(self, values: Vector, errors: Vector) -> float:
        """A bound above Σ over all rounds of a positive function that is monotone in q and z.

        Args:
            values: [p] a function of the pairs.
            errors: [p] bounds on the errors of the values.

        Returns:
            The lower of two bounds: by interpolation, and by the corners of cells.
        """
        smooth = self.sum(values) + float(np.abs(self.weight) @ errors)
        smooth += float(self.interpolation_error(values[:, None])[0])
        return min(smooth, self.most(values + errors))

    def most(self, values: Vector) -> float:
        """A bound above the sum of a positive function, [p] values, that is monotone in q and z."""
        return float(self.count @ values[self.corners].max(axis=1))

    def least(self, values: Vector) -> float:
        """A bound below the sum of a positive function, [p] values, that is monotone in q and z."""
        return float(self.count @ values[self.corners].min(axis=1))


def direct(rounds: RoundsArray) -> Panel:
    """The panel of all rounds, each standing for itself; its sums are exact."""
    return Panel(
        q=rounds.q,
        z=rounds.z,
        weight=rounds.counts,
        rounds=float(rounds.counts.sum()),
        count=rounds.counts,
        corners=np.repeat(np.arange(len(rounds.q))[:, None], 4, axis=1),
        widest_q=rounds.q,
        widest_z=rounds.z,
        checks=(),
    )


def summary(rounds: RoundsArray) -> Panel:
    """A panel of at most 144 pairs, rough: the mean rounds of cells of log q and log z."""
    cells = [_cell(np.log(rounds.q)), _cell(np.log(rounds.z))]
    names, cell = np.unique(cells[0] * _CELLS + cells[1], return_inverse=True)
    counts = np.bincount(cell, rounds.counts, len(names)).astype(np.float64)
    square = np.bincount(cell, rounds.counts * rounds.q**2, len(names)) / counts
    log_z = np.bincount(cell, rounds.counts * np.log(rounds.z), len(names)) / counts
    return direct(RoundsArray(np.minimum(np.sqrt(square), 1.0), np.exp(log_z), counts))


def _cell(variable: Vector) -> NDArray[np.int64]:
    low, high = float(variable.min()), float(variable.max())
    place = (variable - low) * (_CELLS / max(high - low, 1e-9))
    return np.minimum(place.astype(np.int64), _CELLS - 1)


def merge(panels: Sequence[Panel]) -> Panel:
    """The panel of the rounds of all panels together."""
    starts = np.cumsum([0] + [len(panel.q) for panel in panels])
    checks = [
        Check(slice(start + c.pairs.start, start + c.pairs.stop), c.residual, c.rounds)
        for start, panel in zip(starts, panels, strict=False)
        for c in panel.checks
    ]
    corners = [panel.corners + start for start, panel in zip(starts, panels, strict=False)]
    return Panel(
        q=np.concatenate([panel.q for panel in panels]),
        z=np.concatenate([panel.z for panel in panels]),
        weight=np.concatenate([panel.weight for panel in panels]),
        rounds=sum(panel.rounds for panel in panels),
        count=np.concatenate([panel.count for panel in panels]),
        corners=np.concatenate(corners),
        widest_q=np.concatenate([panel.widest_q for panel in panels]),
        widest_z=np.concatenate([panel.widest_z for panel in panels]),
        checks=tuple(checks),
    )
