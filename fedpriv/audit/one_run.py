"""Tests of f-DP from one run, by guesses about canaries that fair coins included.

For r of m canaries one guesses, from all releases, whether they are included, and c guesses are
right. If the run is f-DP for each canary, whatever the others are, c is not far above r/2. The test
is that of Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-Differential Privacy in One Run"
(arXiv 2410.22235), Algorithm 3 with two choices for each canary. It rejects a true claim with
probability at most α, for any statistic and any dependence between releases.
"""

import math
from collections.abc import Callable

import numpy as np
import scipy
from scipy.special import log_ndtr, ndtr, ndtri

from fedpriv.accounting.fdp import TradeOff
from fedpriv.privacy.clipping import Flags
from fedpriv.privacy.layout import FloatVector

_LARGEST_MU = 32.0
_STEPS, _ZOOMS = 33, 4  # of a search for μ, with an accuracy of a millionth of the largest
_SHARES = tuple(0.02 * 1.1**step for step in range(40))  # of canaries to guess about, up to 0.82
_WORSE = 0.9  # a share with less than this part of the best bound ends the search


def passes(
    least_false_alarms: Callable[[FloatVector], FloatVector],
    canaries: int,
    guesses: int,
    correct: int,
    error: float,
    claims: int = 1,
) -> Flags:
    """Return whether claims hold against the guesses, at the error probability α: [claims].

    `least_false_alarms` maps powers [claims], each for its own claim, to the smallest type I error
    at which any test may have that power: the inverse of 1 − f.
    """
    m, r, c = canaries, guesses, correct
    # The recursion's bounds on the chances of exactly i right guesses, and of more.
    above = np.full(claims, error * c / m)
    rest = np.full(claims, error * (r - c) / m)
    for i in range(c - 1, -1, -1):
        larger = np.maximum(rest, least_false_alarms(above))
        above = np.minimum(1.0, above + i / (r - i) * (larger - rest))
        rest = larger
    return np.asarray(above + rest <= r / m)


def refutes(off: TradeOff, canaries: int, guesses: int, correct: int, error: float) -> bool:
    """Return whether the guesses refute a trade-off function, at this error probability."""

    def least_false_alarms(power: FloatVector) -> FloatVector:
        # For every (ε, δ), power at α is at most min(e^ε·α + δ, 1 − e^−ε·(1 − δ − α)).
        bounds = [np.zeros_like(power)]
        for epsilon, delta in off.pairs:
            bounds.append((power - delta) * math.exp(-epsilon))
            bounds.append(1.0 - delta - np.exp(np.log(1.0 - np.minimum(power, 1.0)) + epsilon))
        return np.asarray(np.max(bounds, axis=0))

    with np.errstate(divide="ignore", over="ignore"):
        return not passes(least_false_alarms, canaries, guesses, correct, error)[0]


def least_mu(canaries: int, guesses: int, correct: int, error: float) -> float:
    """Return the largest μ such that the guesses refute μ-GDP, rounded down; 0 if none."""
    low, high = 0.0, _LARGEST_MU
    for _ in range(_ZOOMS):
        mus = np.linspace(low, high, _STEPS)[1:]

        def least_false_alarms(power: FloatVector, mus: FloatVector = mus) -> FloatVector:
            return np.asarray(ndtr(ndtri(power) - mus))

        claims = passes(least_false_alarms, canaries, guesses, correct, error, len(mus))
        first = int(np.argmax(claims)) if claims.any() else len(mus) - 1
        low, high = (mus[first - 1] if first else low), mus[first]
    return float(low)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return the ε of G_μ at δ: δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ); 0 if δ is larger."""
    if mu <= 0.0:
        return 0.0

    def excess(epsilon: float) -> float:
        upper, lower = mu / 2.0 - epsilon / mu, -mu / 2.0 - epsilon / mu
        return float(ndtr(upper) - math.exp(min(epsilon + float(log_ndtr(lower)), 0.0)) - delta)

    if excess(0.0) <= 0.0:
        return 0.0
    high = mu * (mu / 2.0 - float(ndtri(delta)))  # at which the first term alone is δ
    return float(scipy.optimize.brentq(excess, 0.0, high, xtol=1e-12))


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """Return the μ such that G_μ has this δ at ε > 0."""
    return float(
        scipy.optimize.brentq(lambda mu: epsilon_of_mu(mu, delta) - epsilon, 1e-9, _LARGEST_MU)
    )


def best_guesses(canaries: int, mu: float, error: float) -> int:
    """Return the even number of guesses, r, with the largest expected bound if G_μ is leaked."""
    m = canaries
    best_count, best_bound = 2 * max(1, m // 20), 0.0
    for share in _SHARES:
        half = round(m * share / 2.0)
        if not half:
            continue
        # The share of ½·N(0, 1) + ½·N(μ, 1) above this threshold is half/m.
        threshold = scipy.optimize.brentq(
            _share_above, -40.0, _LARGEST_MU + 40.0, args=(mu, 2.0 * half / m)
        )
        correct = float(ndtr(mu - threshold)) * m  # expected; the bound is interpolated
        below = math.floor(correct)
        ends = [least_mu(m, 2 * half, min(c, 2 * half), error) for c in (below, below + 1)]
        bound = ends[0] + (correct - below) * (ends[1] - ends[0])
        if bound > best_bound:
            best_count, best_bound = 2 * half, bound
        elif bound < _WORSE * best_bound:
            break
    return best_count


def _share_above(threshold: float, mu: float, share: float) -> float:
    return float(ndtr(-threshold) + ndtr(mu - threshold)) - share


def right_guesses(ratios: FloatVector, included: Flags, guesses: int) -> int:
    """Return how many of an even number r of guesses are right.

    One guesses that the canaries with the r/2 largest ratios are included, the r/2 smallest not.
    """
    order, half = np.argsort(ratios, kind="stable"), guesses // 2
    return int(included[order[-half:]].sum() + (~included[order[:half]]).sum())


def estimated_epsilon(sums: FloatVector, included: Flags, delta: float) -> float | None:
    """Return the ε between normal laws of a statistic of included and of excluded canaries.

    The statistic `sums` [m] is the projection of all releases together on a canary's moves. Andrew
    et al. 2023, "One-shot Empirical Privacy Estimation for Federated Learning" (arXiv 2302.03098),
    fit such laws to its cosine. It is an estimate and no bound. None if a law has no spread.
    """
    parts = sums[included], sums[~included]
    if any(len(part) < 2 or np.ptp(part) == 0.0 for part in parts):
        return None
    one, other = ((float(part.mean()), float(part.std(ddof=1))) for part in parts)
    return max(_epsilon_between(one, other, delta), _epsilon_between(other, one, delta))


def _epsilon_between(p: tuple[float, float], q: tuple[float, float], delta: float) -> float:
    """Return the ε at which the integral of (P − e^ε·Q)₊ is δ, for normal laws (mean, stddev)."""
    (mean_p, stddev_p), (mean_q, stddev_q) = p, q
    z = np.linspace(-12.0, 12.0, 50_001)  # in standard deviations of P, which is negligible beyond
    density = np.exp(-(z**2) / 2.0) / math.sqrt(math.tau)
    losses = (mean_p - mean_q + stddev_p * z) ** 2 / stddev_q**2 / 2.0 - z**2 / 2.0
    losses -= math.log(stddev_p) - math.log(stddev_q)  # ln P/Q

    def excess(epsilon: float) -> float:
        positive_part = density * -np.expm1(np.minimum(epsilon - losses, 0.0))
        return float(np.trapezoid(positive_part, z)) - delta

    return 0.0 if excess(0.0) <= 0.0 else float(scipy.optimize.brentq(excess, 0.0, losses.max()))
