"""The tightest intervals: closed form, contour integral, or composition of PLDs.

Rounds that everybody is in are one Gaussian, in closed form. Others go along a contour, which gives
some eight digits, and where that refuses, by `pld`, which gives three. The last two share nothing
but the definition of the privacy loss, and the tests hold them against each other.

Many different rounds are priced in groups, first in few; finer ones follow while the interval is
wide.
"""

import math
from collections.abc import Callable

from fedpriv.accounting import analytic, pld
from fedpriv.accounting.contour import interval as contour
from fedpriv.accounting.contour.interval import ContourUnsuitableError
from fedpriv.accounting.rounds import Rounds, folded, grouped, unsampled_noise_multiplier

_GROUPS = (64, 512, 2048)
"""How many groups of rounds are tried, one after another."""
_NARROW = 2e-4
"""An interval of this width, relative to its upper end, is not made narrower by finer groups."""
Ends = tuple[float, float]


def epsilon_interval(rounds: Rounds, delta: float) -> Ends:
    """Interval that holds the least ε for which the rounds are (ε, δ)-DP.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        delta: δ in [1e-60, 1).

    Returns:
        (low, up) with 0 ≤ low ≤ true ε ≤ up ≤ ∞.
    """
    z = _closed_form(rounds)
    if z is not None:
        return analytic.epsilon_interval(delta, z)
    return _grouped(rounds, delta, contour.epsilon_interval, pld.epsilon_interval)


def delta_interval(rounds: Rounds, epsilon: float) -> Ends:
    """Interval that holds the least δ for which the rounds are (ε, δ)-DP.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        epsilon: ε ≥ 0, finite.

    Returns:
        (low, up) with 0 ≤ low ≤ true δ ≤ up ≤ 1.
    """
    z = _closed_form(rounds)
    if z is not None:
        return analytic.delta_interval(epsilon, z)
    return _grouped(rounds, epsilon, contour.delta_interval, pld.delta_interval)


def _closed_form(rounds: Rounds) -> float | None:
    """The z of the one Gaussian that the rounds are: 0 without noise, ∞ without rounds, or None."""
    z = unsampled_noise_multiplier(rounds)
    return z if z == 0.0 or all(q == 1.0 for q, _ in rounds) else None


def _grouped(
    rounds: Rounds,
    at: float,
    along_contour: Callable[[Rounds, float], Ends],
    composed: Callable[[Rounds, float], Ends],
) -> Ends:
    """What holds for all groupings together."""
    rounds = folded(rounds)
    low, up = 0.0, math.inf
    for most in _GROUPS:
        above, below = grouped(rounds, most)
        try:
            ends = along_contour(above, at)
            low = max(low, ends[0] if below == above else along_contour(below, at)[0])
            up = min(up, ends[1])
        except ContourUnsuitableError:
            break
        if len(rounds) <= most or up - low <= _NARROW * up:
            break
    if math.isinf(up):
        low, up = composed(rounds, at)
    return low * (1 - 2.0**-40), up
