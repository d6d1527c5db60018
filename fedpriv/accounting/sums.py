"""Sums over rounds along a path in the complex plane: all that an inversion needs to know of them.

They add up, so that rounds can be added to a path later.
"""

import math
from dataclasses import dataclass

import numpy as np

from fedpriv.accounting.characteristic import log_mgf_along
from fedpriv.accounting.cumulant import EPS, ComplexVector, tilt
from fedpriv.accounting.gap import ends_of_mass, gaps
from fedpriv.accounting.grid import Grid, Path
from fedpriv.accounting.loss import Direction, Vector
from fedpriv.accounting.panel import Panel
from fedpriv.accounting.shifted import decay

FAR = (1.0, 2.0, 4.0, 8.0)
"""Where the decay beyond the last point is known, relative to that."""
_ROUNDING = 4 * EPS
"""More than a quotient and a product are rounded by, relative to the result."""


@dataclass(frozen=True)
class Sums:
    """Sums over rounds along a path.

    Attributes:
        cumulant: [last + 1] K at the points.
        error: [last + 1] bounds on the errors of e^K, relative to its modulus.
        lost: [last + 1] b such that coins change e^K by a share e^b − 1 of it at most; see `gap`.
        falls: [4] b with |e^{K(c + it)}| ≤ e^{K(c) − b} for all t from `FAR` times the last on.
        beyond: [4] what coins take from each b, as a multiple of 1 + t²/c².
        further: a bound above K at the further point.
        dropped: bound on the part of δ from losses outside the windows.
    """

    cumulant: ComplexVector
    error: Vector
    lost: Vector
    falls: Vector
    beyond: Vector
    further: float
    dropped: float

    def plus(self, other: "Sums") -> "Sums":
        """The sums over the rounds of both."""
        return Sums(
            self.cumulant + other.cumulant,
            self.error + other.error,
            self.lost + other.lost,
            self.falls + other.falls,
            self.beyond + other.beyond,
            self.further + other.further,
            self.dropped + other.dropped,
        )

    def times(self, factor: float) -> "Sums":
        """The sums over every round so often, with what multiplying rounds."""
        cumulant = self.cumulant * factor
        more = factor * (1.0 + _ROUNDING)
        return Sums(
            cumulant=cumulant,
            error=self.error * more + _ROUNDING * np.abs(cumulant),
            lost=self.lost * more,
            falls=self.falls * factor - _ROUNDING * factor * np.abs(self.falls),
            beyond=self.beyond * more,
            further=self.further * factor + _ROUNDING * factor * abs(self.further),
            dropped=self.dropped * more,
        )


def sums(panel: Panel, path: Path, on: Grid) -> Sums:
    """The sums over all rounds along a path.

    Args:
        panel: the rounds.
        path: where.
        on: a grid for this path, maybe together with others.

    Returns:
        The sums.
    """
    certified = len(panel.cells.count) > 0 and path.direction is Direction.REMOVE
    far = FAR if certified else FAR[:1]
    found = [_one_of_each(part, path, far) for part in on.parts()]
    values = np.concatenate([one.values for one in found])
    wrong = np.concatenate([one.wrong for one in found])
    log_mgf = np.concatenate([one.log_mgf for one in found])
    error = np.concatenate([one.error for one in found])
    ends = np.concatenate([one.ends for one in found])
    falls = np.concatenate([one.falls for one in found])
    gap = gaps(panel, path, log_mgf, error, ends)
    cumulant, relative, lost = panel.cumulant(values, wrong, gap)
    w = path.c + 1j * path.times
    beyond = [panel.cells.lost(gap, log_mgf, fall) for fall in falls.T]
    return Sums(
        cumulant=cumulant,
        error=relative,
        lost=lost * np.abs(w * (w + 1)) / (path.c * (path.c + 1)),
        falls=np.resize([panel.least(fall) for fall in falls.T], len(FAR)),
        beyond=np.resize(beyond, len(FAR)),
        further=panel.cumulant_above(np.concatenate([one.further for one in found])),
        dropped=panel.rounds * math.exp(path.log_tail),
    )


@dataclass(frozen=True)
class _OneOfEach:
    """What is known of one round of each of p pairs.

    Attributes:
        values: [p, last + 1] log E[e^{wL}] at the points.
        wrong: [p, last + 1] bounds on the relative errors of their exponentials.
        log_mgf: [p] the first of the values.
        error: [p] a bound on its error.
        ends: [p, 2] an interval of y with nearly all of the tilted mass.
        falls: [p, f] decay at these multiples of the last point.
        further: [p] a bound above the cumulant at the further point.
    """

    values: ComplexVector
    wrong: Vector
    log_mgf: Vector
    error: Vector
    ends: Vector
    falls: Vector
    further: Vector


def _one_of_each(on: Grid, path: Path, far: tuple[float, ...]) -> _OneOfEach:
    given = on.losses()
    tilted, further = tilt(given, path.c), tilt(given, path.further)
    values = log_mgf_along(tilted, path.step, path.last + 1)
    wrong = on.relative_error(tilted, path.stop)[:, None] + tilted.rounding[:, None] * path.times
    error = on.relative_error(tilted, 0.0)
    size = np.exp(np.maximum(values.real - tilted.log_mgf[:, None], -600.0))
    return _OneOfEach(
        values=values,
        wrong=wrong / size,
        log_mgf=tilted.log_mgf,
        error=error,
        ends=ends_of_mass(tilted, path.c),
        falls=np.stack([decay(tilted, path.stop * times) for times in far], axis=1),
        further=further.log_mgf + on.relative_error(further, 0.0),
    )
