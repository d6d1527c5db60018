"""Certified intervals for ε and δ from the privacy loss distribution (PLD).

Accounts any multiset of pairs (`pair`). Each is put on a lattice as a loss that is at least as bad
and as one that is at most as bad (`atoms`), composed by a tilted fast Fourier transform (`fft`),
and read off with every error on the safe side (`reading`). Both directions are computed; the worse
one is reported.
"""

import math
from collections.abc import Callable

from fedpriv.accounting import analytic
from fedpriv.accounting.fft import Composition, compose_atoms
from fedpriv.accounting.pair import GaussianPair, Pairs, grouped
from fedpriv.accounting.poisson_pair import PoissonPair
from fedpriv.accounting.reading import delta_above, delta_below, epsilon_above, epsilon_below
from fedpriv.accounting.rounds import Direction, Rounds, unsampled_noise_multiplier
from fedpriv.accounting.tilt import Aim, aim_at_delta, aim_at_epsilon, resolve

Ends = Callable[[Pairs, Pairs, float], tuple[float, float]]
"""From pairs that are at least, and at most as bad, and a precision, to an interval."""

_REFINED, _GROUPS = 16, 32
"""Numbers of different settings, each of which needs a transform: up to the first they are composed
again where that helps, up to the second once, and more are grouped."""

_LEAST_DELTA = 1e-200
_WIDTH, _LEAST_WIDTH = 1e-3, 1e-6
"""How wide an interval of ε may be, relative to its upper end and in addition."""
_DELTA_WIDTH = 0.05
"""How wide an interval of δ may be, relative to its upper end."""
_TRIES, _FINEST = 4, 1 / 64
"""How often a wide interval is computed again, and by how much finer each time at most."""
_PROGRESS = 0.8
"""Where an interval stays wider than this share of the last, finer lattices do not help."""


def epsilon_interval(rounds: Rounds, delta: float) -> tuple[float, float]:
    """Interval that holds the least ε for which Poisson-subsampled rounds are (ε, δ)-DP.

    * Rounds without noise, no matter how rare: [∞, ∞]. Noise multipliers below 0.05 have the upper
      end ∞.
    * See `epsilon_interval_of`.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        delta: δ in (0, 1).

    Returns:
        (low, up) with 0 ≤ low ≤ true ε ≤ up ≤ ∞.
    """
    return epsilon_interval_of(poisson_pairs(rounds), delta)


def delta_interval(rounds: Rounds, epsilon: float) -> tuple[float, float]:
    """Interval that holds the least δ for which Poisson-subsampled rounds are (ε, δ)-DP.

    * Noise multipliers below 0.05 have the upper end 1.
    * See `delta_interval_of`.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        epsilon: ε ≥ 0, finite.

    Returns:
        (low, up) with 0 ≤ low ≤ true δ ≤ up ≤ 1.
    """
    return delta_interval_of(poisson_pairs(rounds), epsilon)


def poisson_pairs(rounds: Rounds) -> Pairs:
    """The pairs of Poisson-subsampled rounds under add-or-remove-one, by (q, z)."""
    return {PoissonPair(q, z): count for (q, z), count in rounds.items()}


def epsilon_interval_of(pairs: Pairs, delta: float) -> tuple[float, float]:
    """Interval that holds the least ε that holds at δ for all these losses together.

    * No event: [0, 0]. An event without noise: [∞, ∞], by convention even where a user is so rarely
      sampled that δ alone would cover it.
    * δ below 1e-200 has the upper end ∞.
    * Poisson-subsampled Gaussians with q ≥ 1e-5, 0.3 ≤ z ≤ 30 and δ ≥ 1e-10, up to a million of
      them, have ends that differ by at most up/1000 + 1e-6. Beyond that range, and for other pairs,
      this is tried, and often reached.

    Args:
        pairs: number of events by the pair whose loss they have.
        delta: δ in (0, 1).

    Returns:
        (low, up) with 0 ≤ low ≤ true ε ≤ up ≤ ∞.
    """
    if not pairs:
        return 0.0, 0.0
    if any(pair.noiseless for pair in pairs):
        return math.inf, math.inf
    if delta < _LEAST_DELTA:
        return 0.0, math.inf
    z = _closed_form(pairs)
    if z is not None:
        return analytic.epsilon_interval(delta, z)

    def ends(worst: Pairs, best: Pairs, precision: float) -> tuple[float, float]:
        low, up = 0.0, 0.0
        for direction in Direction:
            aim = aim_at_delta(worst, delta, direction)
            below, above = _both(worst, best, aim, direction, precision)
            if below is not None:
                low = max(low, epsilon_below(below, delta))
            up = max(up, epsilon_above(above, delta))
        return low, up

    return _refined(pairs, ends, lambda up: _WIDTH * up + _LEAST_WIDTH)


def delta_interval_of(pairs: Pairs, epsilon: float) -> tuple[float, float]:
    """Interval that holds the least δ that holds at ε for all these losses together.

    * No event: [0, 0]. An event without noise: [0, 1].
    * Upper ends do not go far below 1e-100.

    Args:
        pairs: number of events by the pair whose loss they have.
        epsilon: ε ≥ 0, finite.

    Returns:
        (low, up) with 0 ≤ low ≤ true δ ≤ up ≤ 1.
    """
    if not pairs:
        return 0.0, 0.0
    if any(pair.noiseless for pair in pairs):
        return 0.0, 1.0
    z = _closed_form(pairs)
    if z is not None:
        return analytic.delta_interval(epsilon, z)

    def ends(worst: Pairs, best: Pairs, precision: float) -> tuple[float, float]:
        low, up = 0.0, 0.0
        for direction in Direction:
            aim = aim_at_epsilon(worst, epsilon, direction)
            below, above = _both(worst, best, aim, direction, precision)
            if below is not None:
                low = max(low, delta_below(below, epsilon))
            up = max(up, delta_above(above, epsilon))
        return low, up

    low, up = _refined(pairs, ends, lambda up: _DELTA_WIDTH * up)
    return low, min(up, 1.0)


def _closed_form(pairs: Pairs) -> float | None:
    """The z of the one Gaussian mechanism that the pairs are, if all have q = 1."""
    if all(isinstance(pair, GaussianPair) and pair.q == 1.0 for pair in pairs):
        rounds: dict[tuple[float, float], int] = {}
        for pair, count in pairs.items():
            rounds[pair.setting] = rounds.get(pair.setting, 0) + count
        return unsampled_noise_multiplier(rounds)
    return None


def _refined(pairs: Pairs, ends: Ends, allowed: Callable[[float], float]) -> tuple[float, float]:
    """What all tries together say, which get finer until the interval is as wide as allowed.

    Many pairs are tried once: a finer lattice would cost much, and not help where they are grouped.
    """
    worst, best = grouped(pairs, _GROUPS)
    low, up, precision = 0.0, math.inf, 1.0
    for _ in range(_TRIES if len(pairs) <= _REFINED else 1):
        width = up - low
        below, above = ends(worst, best, precision)
        low, up = max(low, below), min(up, above)
        if not allowed(up) < up - low < min(math.inf, _PROGRESS * width):
            break
        precision *= max(0.4 * allowed(up) / (up - low), _FINEST)
    if not low <= up:
        raise AssertionError(f"the ends contradict each other: {low} > {up}")
    return low, up


def _both(
    worst: Pairs, best: Pairs, aim: Aim, direction: Direction, precision: float
) -> tuple[Composition | None, Composition]:
    """Compositions at most as bad as `best` (None costs nothing) and at least as bad as `worst`."""
    window, lattice = resolve(worst, aim, direction, precision)
    above = [(pair.dominating(lattice, direction), n) for pair, n in worst.items()]
    below = [(pair.dominated(lattice, direction), n) for pair, n in best.items()]
    known = [(atoms, n) for atoms, n in below if atoms.mass.any()]
    return compose_atoms(known, window) if known else None, compose_atoms(above, window)
