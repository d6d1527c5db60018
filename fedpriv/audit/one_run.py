"""What the guesses of one run prove: tests of f-DP by canaries that are there by fair coins.

Of m canaries, r are guessed to be there or not, from everything that was released, and c guesses
are right. If the run is f-DP for each canary, whatever the others are, c is not far above r/2. The
test is that of Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-Differential Privacy in One Run"
(arXiv 2410.22235), Algorithm 3 with two choices a canary: it rejects a true claim with probability
at most α, whatever the statistic and however the releases depend on each other.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import scipy
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr, ndtri

from fedpriv.accounting.fdp import TradeOff
from fedpriv.privacy.clipping import Flags
from fedpriv.privacy.layout import FloatVector

Vector = NDArray[np.float64]
_LARGEST_MU = 32.0
_STEPS, _ZOOMS = 33, 4  # of a search for μ, to a part in a million of the largest
_SHARES = tuple(0.02 * 1.1**step for step in range(40))  # of canaries to guess about: to 0.82
_WORSE = 0.9  # than the best share; others beyond are worse still


def passes(
    least_false_alarms: Callable[[Vector], Vector],
    canaries: int,
    guesses: int,
    correct: int,
    error: float,
    claims: int = 1,
) -> Flags:
    """Which of some claims the guesses do not refute, at an error probability α: [claims].

    `least_false_alarms` maps powers [claims], each for its own claim, to the smallest type I error
    at which any test may have that power: the inverse of 1 − f.
    """
    m, r, c = canaries, guesses, correct
    # Bounds, in the recursion, on the chance to be right in so many guesses, and in more.
    above = np.full(claims, error * c / m)
    rest = np.full(claims, error * (r - c) / m)
    for i in range(c - 1, -1, -1):
        grown = np.maximum(rest, least_false_alarms(above))
        above = np.minimum(1.0, above + i / (r - i) * (grown - rest))
        rest = grown
    return np.asarray(above + rest <= r / m)


def refutes(off: TradeOff, canaries: int, guesses: int, correct: int, error: float) -> bool:
    """Whether the guesses show that the releases are not what a trade-off function says."""

    def least_false_alarms(power: Vector) -> Vector:
        # Power at α is at most min(e^ε·α + δ, 1 − e^−ε·(1 − δ − α)) for every pair.
        bounds = [np.zeros_like(power)]
        for epsilon, delta in off.pairs:
            bounds.append((power - delta) * math.exp(-epsilon))
            bounds.append(1.0 - delta - np.exp(np.log(1.0 - np.minimum(power, 1.0)) + epsilon))
        return np.asarray(np.max(bounds, axis=0))

    with np.errstate(divide="ignore", over="ignore"):
        return not passes(least_false_alarms, canaries, guesses, correct, error)[0]


def least_mu(canaries: int, guesses: int, correct: int, error: float) -> float:
    """The largest μ of which μ-GDP is refuted, rounded down; 0 if none is."""
    low, high = 0.0, _LARGEST_MU
    for _ in range(_ZOOMS):
        mus = np.linspace(low, high, _STEPS)[1:]

        def least_false_alarms(power: Vector, mus: Vector = mus) -> Vector:
            return np.asarray(ndtr(ndtri(power) - mus))

        passed = passes(least_false_alarms, canaries, guesses, correct, error, len(mus))
        first = int(np.argmax(passed)) if passed.any() else len(mus) - 1
        low, high = (mus[first - 1] if first else low), mus[first]
    return float(low)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """The ε at which G_μ has this δ: δ = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ); 0 if δ is larger."""
    if mu <= 0.0:
        return 0.0

    def excess(epsilon: float) -> float:
        near, far = mu / 2.0 - epsilon / mu, -mu / 2.0 - epsilon / mu
        return float(ndtr(near) - math.exp(min(epsilon + float(log_ndtr(far)), 0.0)) - delta)

    if excess(0.0) <= 0.0:
        return 0.0
    high = mu * (mu / 2.0 - float(ndtri(delta)))  # where the first term alone is δ
    return float(scipy.optimize.brentq(excess, 0.0, high, xtol=1e-12))


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """The μ for which G_μ has this δ at ε > 0."""
    return float(
        scipy.optimize.brentq(lambda mu: epsilon_of_mu(mu, delta) - epsilon, 1e-9, _LARGEST_MU)
    )


def best_guesses(canaries: int, mu: float, error: float) -> int:
    """How many canaries to guess about, r, even, to expect the largest bound if G_μ is leaked."""
    m = canaries
    best, most = 2 * max(1, m // 20), 0.0
    for share in _SHARES:
        half = round(m * share / 2.0)
        if not half:
            continue
        # The threshold above which a share s/2 lies of ½·N(0, 1) + ½·N(μ, 1), and who lies there.
        upper = scipy.optimize.brentq(
            _share_above, -40.0, _LARGEST_MU + 40.0, args=(mu, 2.0 * half / m)
        )
        right = float(ndtr(mu - upper)) * m  # expected, and hardly ever whole
        below = math.floor(right)
        ends = [least_mu(m, 2 * half, min(c, 2 * half), error) for c in (below, below + 1)]
        found = ends[0] + (right - below) * (ends[1] - ends[0])
        if found > most:
            best, most = 2 * half, found
        elif found < _WORSE * most:
            break
    return best


def _share_above(threshold: float, mu: float, share: float) -> float:
    return float(ndtr(-threshold) + ndtr(mu - threshold)) - share


@dataclass(frozen=True)
class Guesses:
    """The r canaries of whom a statistic is surest, and how many of the guesses are right."""

    count: int  # r
    correct: int  # c


def guess(ratios: FloatVector, included: Flags, count: int) -> Guesses:
    """Guess that the canaries with the r/2 largest ratios are there, with the least are not."""
    order, half = np.argsort(ratios, kind="stable"), count // 2
    correct = int(included[order[-half:]].sum() + (~included[order[:half]]).sum())
    return Guesses(2 * half, correct)


def estimated_epsilon(sums: FloatVector, included: Flags, delta: float) -> float | None:
    """ε between the normal laws of a statistic of canaries that are there and that are not.

    The statistic is how far all releases together go along a canary; Andrew et al. 2023, "One-shot
    Empirical Privacy Estimation for Federated Learning" (arXiv 2302.03098), fit such laws to its
    cosine. It is an estimate, and no bound. None where a law has no spread.
    """
    parts = sums[included], sums[~included]
    if any(len(part) < 2 or np.ptp(part) == 0.0 for part in parts):
        return None
    there, away = ((float(part.mean()), float(part.std(ddof=1))) for part in parts)
    return max(_epsilon_between(there, away, delta), _epsilon_between(away, there, delta))


def _epsilon_between(p: tuple[float, float], q: tuple[float, float], delta: float) -> float:
    """The ε at which the integral of (P − e^ε·Q)₊ is δ, for two normal laws (mean, deviation)."""
    (mean, deviation), (other, unit) = p, q
    z = np.linspace(-12.0, 12.0, 50_001)  # deviations of P, beyond which it has nothing left
    density = np.exp(-(z**2) / 2.0) / math.sqrt(math.tau)
    losses = (mean - other + deviation * z) ** 2 / unit**2 / 2.0 - z**2 / 2.0
    losses -= math.log(deviation) - math.log(unit)  # ln P/Q

    def excess(epsilon: float) -> float:
        beyond = density * -np.expm1(np.minimum(epsilon - losses, 0.0))
        return float(np.trapezoid(beyond, z)) - delta

    return 0.0 if excess(0.0) <= 0.0 else float(scipy.optimize.brentq(excess, 0.0, losses.max()))
