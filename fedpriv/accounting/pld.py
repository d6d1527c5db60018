"""Certified intervals for ε and δ from the privacy loss distribution (PLD).

Accounts any multiset of Poisson-subsampled Gaussian rounds under add-or-remove-one. Rounds are put
on a lattice as a loss that is at least as bad and as one that is at most as bad (`loss`), composed
by a tilted fast Fourier transform (`fft`), and read off with every error on the safe side. Both
directions are computed; the worse one is reported.
"""

import math

import numpy as np

from fedpriv.accounting.atoms import dominated, dominating
from fedpriv.accounting.fft import Composition, compose_atoms
from fedpriv.accounting.lattice import lattice_points
from fedpriv.accounting.loss import Direction, Rounds, Vector
from fedpriv.accounting.tilt import Aim, aim_at_delta, aim_at_epsilon, conversion, resolve

_LEAST_NOISE, _MOST_NOISE = 0.05, 1e6
_LEAST_PROBABILITY = 1e-12
_LEAST_DELTA = 1e-200


def epsilon_interval(rounds: Rounds, delta: float) -> tuple[float, float]:
    """Interval that holds the least ε for which the rounds are (ε, δ)-DP.

    * No round: [0, 0]. A round without noise: [∞, ∞], by convention even where a user is so rarely
      sampled that δ alone would cover it.
    * The ends differ by about a thousandth where q ≥ 1e-7, 0.2 ≤ z ≤ 100, δ ≥ 1e-12 and there are
      at most a million rounds, or by some hundredths where δ comes from rare, large losses.
    * Noise multipliers below 0.05 have the upper end ∞, and so has δ below 1e-200.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        delta: δ in (0, 1).

    Returns:
        (low, up) with 0 ≤ low ≤ true ε ≤ up ≤ ∞.
    """
    if not rounds:
        return 0.0, 0.0
    if any(z == 0.0 for _, z in rounds):
        return math.inf, math.inf
    if delta < _LEAST_DELTA:
        return 0.0, math.inf
    low, up = 0.0, 0.0
    for direction in Direction:
        below, above = _both(rounds, aim_at_delta(_at_least(rounds), delta, direction), direction)
        if below is not None:
            low = max(low, _epsilon_below(below, delta))
        up = max(up, _epsilon_above(above, delta))
    return low, up if _has_upper_end(rounds) else math.inf


def delta_interval(rounds: Rounds, epsilon: float) -> tuple[float, float]:
    """Interval that holds the least δ for which the rounds are (ε, δ)-DP.

    * No round: [0, 0]. A round without noise: [0, 1].
    * Noise multipliers below 0.05 have the upper end 1; upper ends do not go far below 1e-100.

    Args:
        rounds: number of rounds by (q, z), q in (0, 1], z ≥ 0.
        epsilon: ε ≥ 0, finite.

    Returns:
        (low, up) with 0 ≤ low ≤ true δ ≤ up ≤ 1.
    """
    if not rounds:
        return 0.0, 0.0
    if any(z == 0.0 for _, z in rounds):
        return 0.0, 1.0
    low, up = 0.0, 0.0
    for direction in Direction:
        aim = aim_at_epsilon(_at_least(rounds), epsilon, direction)
        below, above = _both(rounds, aim, direction)
        if below is not None:
            low = max(low, _delta_below(below, epsilon))
        up = max(up, _delta_above(above, epsilon))
    return low, up if _has_upper_end(rounds) else 1.0


def _both(rounds: Rounds, aim: Aim, direction: Direction) -> tuple[Composition | None, Composition]:
    """The compositions that are at most and at least as bad as the rounds; None costs nothing."""
    worse, better = _at_least(rounds), _at_most(rounds)
    window, lattice = resolve(worse, aim, direction)
    points = {
        (q, z): lattice_points(q, z, lattice, direction) for q, z in worse.keys() | better.keys()
    }
    above = [(dominating(q, z, points[q, z], direction), n) for (q, z), n in worse.items()]
    below = [(dominated(q, z, points[q, z], direction), n) for (q, z), n in better.items()]
    some = below and all(atoms.mass.any() for atoms, _ in below)
    return compose_atoms(below, window) if some else None, compose_atoms(above, window)


def _has_upper_end(rounds: Rounds) -> bool:
    """Whether `_at_least` is at least as bad as the rounds."""
    return all(z >= _LEAST_NOISE for _, z in rounds)


def _at_least(rounds: Rounds) -> Rounds:
    """Rounds inside the range that is computed; at least as bad if `_has_upper_end`."""
    worse: dict[tuple[float, float], int] = {}
    for (q, z), count in rounds.items():
        key = (max(q, _LEAST_PROBABILITY), min(max(z, _LEAST_NOISE), _MOST_NOISE))
        worse[key] = worse.get(key, 0) + count
    return worse


def _at_most(rounds: Rounds) -> Rounds:
    """Rounds inside the range that is computed, at most as bad; those beyond it are left out."""
    better: dict[tuple[float, float], int] = {}
    for (q, z), count in rounds.items():
        if q >= _LEAST_PROBABILITY and z <= _MOST_NOISE:
            key = (q, max(z, _LEAST_NOISE))
            better[key] = better.get(key, 0) + count
    return better


def _epsilon_above(c: Composition, delta: float) -> float:
    """An ε ≥ 0 at which the divergence is surely at most δ."""
    finite = delta - c.infinite
    if finite <= 0:
        return math.inf
    log_mgf = c.log_mgf + c.mass_error
    chernoff = (log_mgf - math.log(finite) - conversion(c.tilt)) / c.tilt
    losses = _losses(c)
    surely = np.log(np.maximum(c.divergence, 0.0) + c.excess) + log_mgf - c.tilt * losses
    good = np.flatnonzero(surely <= math.log(finite))
    if len(good) == 0:
        return max(0.0, chernoff + c.slack)
    epsilon = float(losses[good[0]])
    if good[0] > 0:
        k = int(good[0]) - 1
        target = finite - c.excess * _exp(log_mgf - c.tilt * losses[k])
        epsilon = _crossing(c, k, target, log_mgf)
    return max(0.0, min(chernoff, epsilon) + c.slack)


def _epsilon_below(c: Composition, delta: float) -> float:
    """An ε ≥ 0 at which the divergence is surely at least δ, or 0."""
    log_mgf = c.log_mgf - c.mass_error
    losses = _losses(c)
    sure = np.maximum(c.divergence - c.deficit, 1e-300)
    good = np.flatnonzero(np.log(sure) + log_mgf - c.tilt * losses >= math.log(delta))
    if len(good) == 0:
        return 0.0
    k = min(int(good[-1]), len(losses) - 2)
    target = delta + c.deficit * _exp(log_mgf - c.tilt * losses[k])
    return max(0.0, _crossing(c, k, target, log_mgf) - c.slack)


def _delta_above(c: Composition, epsilon: float) -> float:
    """A bound that the divergence at ε surely does not pass."""
    log_mgf = c.log_mgf + c.mass_error
    at = epsilon - c.slack
    log_chernoff = log_mgf - c.tilt * at - conversion(c.tilt)
    finite = math.exp(min(0.0, log_chernoff))
    k = math.floor((at - c.start) / c.step)
    if 0 <= k < len(c.divergence) - 1:
        wrong = c.excess * _exp(log_mgf - c.tilt * at)
        finite = min(finite, _divergence(c, k, at, log_mgf) + wrong)
    return min(1.0, finite + c.infinite)


def _delta_below(c: Composition, epsilon: float) -> float:
    """A bound that the divergence at ε surely passes."""
    log_mgf = c.log_mgf - c.mass_error
    at = max(epsilon + c.slack, c.start)
    k = math.floor((at - c.start) / c.step)
    if k >= len(c.divergence) - 1:
        return 0.0
    wrong = c.deficit * _exp(log_mgf - c.tilt * at)
    return max(0.0, _divergence(c, k, at, log_mgf) - wrong)


def _losses(c: Composition) -> Vector:
    return c.start + c.step * np.arange(len(c.divergence), dtype=np.float64)


def _ends(c: Composition, k: int, log_mgf: float) -> tuple[float, float, float]:
    """s = s_{k+1}, P(S > s_k) and the divergence at s, without tilt."""
    s = c.start + c.step * (k + 1)
    survival = float(c.survival[k]) * _exp(log_mgf - c.tilt * (s - c.step))
    return s, survival, float(c.divergence[k + 1]) * _exp(log_mgf - c.tilt * s)


def _divergence(c: Composition, k: int, epsilon: float, log_mgf: float) -> float:
    """E[(1 − e^{ε − S})_+] for ε in [s_k, s_{k+1}], where P(S > u) is constant."""
    s, survival, divergence = _ends(c, k, log_mgf)
    return divergence * math.exp(epsilon - s) - survival * math.expm1(epsilon - s)


def _crossing(c: Composition, k: int, target: float, log_mgf: float) -> float:
    """The ε in [s_k, s_{k+1}] with that divergence, or the nearer end."""
    s, survival, divergence = _ends(c, k, log_mgf)
    share = (target - divergence) / max(survival - divergence, 1e-300)
    if share >= -math.expm1(-c.step):
        return s - c.step
    return s + math.log1p(-max(share, 0.0))


def _exp(x: float) -> float:
    """e^x, or a number too large to matter."""
    return math.exp(min(x, 700.0))
