"""The classical formulas for ε, for comparison with the exact answer.

zCDP gives a loose upper bound; the CLT's estimate can be below the truth. Rounds are counts by
(q, z); a q, z, count, δ or ρ out of range raises `InvalidValueError`.
"""

import math

import numpy as np
import scipy

from fedpriv.accounting import gaussian
from fedpriv.accounting.round_counts import (
    Rounds,
    check_any_delta,
    check_rounds,
    unsampled_noise_multiplier,
)
from fedpriv.support.checks import require

_ZCDP_ROUNDING = 1e-14
_SEARCH, _MOST_NOISE = 6.0, 1e150


def clt_mu(rounds: Rounds) -> float:
    """Return the μ of the limit of rounds: μ² = Σ count·q²·(e^{1/z²} − 1), an estimate, no bound.

    Bu et al. 2020, equation (3.1); in the limit squares add up (Dong, Roth & Su 2019, Theorem 6).
    """
    check_rounds(rounds)
    logs = [_log_square(q, z) + math.log(count) for (q, z), count in rounds.items()]
    if not logs or max(logs) == math.inf:
        return math.inf if logs else 0.0
    largest = max(logs)
    log_mu = (largest + math.log(math.fsum(math.exp(x - largest) for x in logs))) / 2
    return math.exp(log_mu) if log_mu < math.log(np.finfo(np.float64).max) else math.inf


def _log_square(q: float, z: float) -> float:
    """Return log(q²·(e^{1/z²} − 1)) without overflow."""
    exponent = 1.0 / z / z if z > 0.0 else math.inf
    if exponent < 1.0:
        # If 1/z² underflows, e^x − 1 = x.
        growth = math.log(math.expm1(exponent)) if exponent > 0.0 else -2 * math.log(z)
    else:
        growth = exponent + math.log1p(-math.exp(-exponent))
    return 2 * math.log(q) + growth


def gaussian_mu(rounds: Rounds) -> float:
    """Return the μ of rounds as one Gaussian: exact for q = 1, an estimate for others.

    It is `clt_mu`, but at most the μ of the same rounds without sampling, which is a bound.
    """
    return min(clt_mu(rounds), _inverse(unsampled_noise_multiplier(rounds)))


def clt_epsilon(rounds: Rounds, delta: float) -> float:
    """Return the ε of the rounds by the CLT, an estimate that can be below the truth."""
    return gaussian.epsilon(delta, _inverse(gaussian_mu(rounds)))


def _inverse(x: float) -> float:
    """Return 1/x, with 1/0 = ∞."""
    return 1.0 / x if x > 0.0 else math.inf


def zcdp_rho(rounds: Rounds) -> float:
    """Return the upper bound ρ = Σ count/(2z²) of all rounds (Bun & Steinke 2016, Proposition 1.6).

    It does not depend on q: at high orders a subsampled Gaussian has the Gaussian's divergence.
    """
    z = unsampled_noise_multiplier(rounds)
    if z == 0.0 or math.isinf(z):
        return math.inf if rounds else 0.0
    z = min(z, _MOST_NOISE)
    return (1 + _ZCDP_ROUNDING) * 0.5 / z / z


def zcdp_epsilon_bun_steinke(rho: float, delta: float) -> float:
    """Return the bound ε = ρ + 2√(ρ·log(1/δ)) of ρ-zCDP (Bun & Steinke 2016, Proposition 1.3)."""
    require(rho >= 0.0, f"rho is {rho}; it must not be negative")
    check_any_delta(delta)
    # The product ρ·log(1/δ) may overflow.
    return (rho + 2 * math.sqrt(rho) * math.sqrt(-math.log(delta))) * (1 + _ZCDP_ROUNDING)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return an ε such that every ρ-zCDP mechanism is (ε, δ)-DP.

    For a loss L with E[e^{(α−1)L}] ≤ e^{(α−1)αρ},

        δ(ε) = E[(1 − e^{ε−L})₊] ≤ e^{(α−1)(αρ−ε)}·max_x (1 − e^{−x})·e^{−(α−1)x},

    and the maximum is (1 − 1/α)^{α−1}/α (Canonne, Kamath & Steinke 2020, Corollary 13). Every order
    α > 1 gives a bound, so the search for the best one may be inexact.
    """
    simple = zcdp_epsilon_bun_steinke(rho, delta)
    if rho == 0.0 or math.isinf(rho):
        return rho
    log_inverse = -math.log(delta)

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)  # α − 1
        loss, tail = (1 + excess) * rho, log_inverse / excess
        terms = (loss, -math.log1p(1 / excess), tail, -math.log1p(excess) / excess)
        return sum(terms) + _ZCDP_ROUNDING * sum(map(abs, terms))

    # Bun & Steinke's order minimises the bound without its negative terms.
    centre = math.log(log_inverse) / 2 - math.log(rho) / 2
    bounds = (centre - _SEARCH, centre + _SEARCH)
    minimum = scipy.optimize.minimize_scalar(bound, bounds=bounds, method="bounded")
    return max(0.0, min(float(minimum.fun), simple))
