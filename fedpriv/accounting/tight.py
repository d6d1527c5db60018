"""The tightest intervals: closed form, contour integral, or composition of PLDs.

Rounds that every user takes part in are one Gaussian, in closed form. Other Poisson-sampled rounds
go along a contour, which gives some eight digits; where that refuses, and for other kinds of
events, `pld` gives three. The two share nothing but the definition of the privacy loss, and the
tests hold them against each other.

Many different rounds are priced in groups, first in few; finer ones follow while the interval is
wide.
"""

import math
from collections.abc import Callable

from fedpriv.accounting import contour, gaussian, pld
from fedpriv.accounting.gaussian import Ends
from fedpriv.accounting.pld.dominating_pairs import PoissonPair
from fedpriv.accounting.pld.lattice import Pairs
from fedpriv.accounting.round_counts import Rounds, folded, grouped, unsampled_noise_multiplier

_GROUPS = (64, 512, 2048)  # how many groups of rounds are tried, one after another
_NARROW = 2e-4  # an interval of this relative width is not made narrower by finer groups


def epsilon_interval(rounds: Rounds, delta: float) -> Ends:
    """Interval (low, up) that holds the least ε for which Poisson-sampled rounds are (ε, δ)-DP.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        delta: δ in [1e-60, 1).
    """
    z = _closed_form(rounds)
    if z is not None:
        return gaussian.epsilon_interval(delta, z)
    return _grouped(rounds, delta, contour.epsilon_interval, pld.epsilon_interval)


def delta_interval(rounds: Rounds, epsilon: float) -> Ends:
    """Interval (low, up) that holds the least δ for which the rounds are (ε, δ)-DP; ε is finite."""
    z = _closed_form(rounds)
    if z is not None:
        return gaussian.delta_interval(epsilon, z)
    return _grouped(rounds, epsilon, contour.delta_interval, pld.delta_interval)


def epsilon_interval_of(pairs: Pairs, delta: float) -> Ends:
    """The interval of ε of any pairs."""
    rounds = _poisson(pairs)
    return pld.epsilon_interval(pairs, delta) if rounds is None else epsilon_interval(rounds, delta)


def delta_interval_of(pairs: Pairs, epsilon: float) -> Ends:
    """The interval of δ of any pairs."""
    rounds = _poisson(pairs)
    return pld.delta_interval(pairs, epsilon) if rounds is None else delta_interval(rounds, epsilon)


def _poisson(pairs: Pairs) -> Rounds | None:
    """Rounds by (q, z) if all pairs are those of Poisson samples."""
    rounds = {(p.q, p.z): count for p, count in pairs.items() if isinstance(p, PoissonPair)}
    return rounds if len(rounds) == len(pairs) else None


def _closed_form(rounds: Rounds) -> float | None:
    """The z of the one Gaussian that unsampled rounds are, 0 if a round has no noise, or None."""
    z = unsampled_noise_multiplier(rounds)
    return z if z == 0.0 or all(q == 1.0 for q, _ in rounds) else None


def _grouped(
    rounds: Rounds,
    at: float,
    along_contour: Callable[[Rounds, float], Ends],
    composed: Callable[[Pairs, float], Ends],
) -> Ends:
    """What holds for all groupings together; lower ends leave room for the rounding of `folded`."""
    given, rounds = rounds, folded(rounds)
    low, up = 0.0, math.inf
    for most in _GROUPS:
        above, below = grouped(rounds, most)
        try:
            ends = along_contour(above, at)
            low = max(low, ends[0] if below == above else along_contour(below, at)[0])
            up = min(up, ends[1])
        except contour.ContourUnsuitableError:
            break
        if len(rounds) <= most or up - low <= _NARROW * up:
            break
    if math.isinf(up):
        low, up = composed({PoissonPair(q, z): n for (q, z), n in rounds.items()}, at)
    return low if rounds == given else low * (1 - 2.0**-40), up
