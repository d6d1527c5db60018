"""The classical formulas for ε, to see beside the exact answer.

zCDP gives an upper bound, and a loose one; the CLT's estimate can be below the truth. Rounds are
numbers by (q, z); a q, z, count, δ or ρ out of range raises `InvalidValueError`.
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
    """The μ that rounds tend to: μ² = Σ count·q²·(e^{1/z²} − 1). An estimate, not a bound.

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
    """log(q²·(e^{1/z²} − 1)) without overflow."""
    exponent = 1.0 / z / z if z > 0.0 else math.inf
    if exponent < 1.0:
        # 1/z² may be below the smallest float, where e^x − 1 = x.
        growth = math.log(math.expm1(exponent)) if exponent > 0.0 else -2 * math.log(z)
    else:
        growth = exponent + math.log1p(-math.exp(-exponent))
    return 2 * math.log(q) + growth


def gaussian_mu(rounds: Rounds) -> float:
    """μ of the one Gaussian that rounds are for q = 1, exactly, and tend to for others.

    `clt_mu`, but at most that of the same rounds without sampling, whose μ-GDP is a bound.
    """
    return min(clt_mu(rounds), _inverse(unsampled_noise_multiplier(rounds)))


def clt_epsilon(rounds: Rounds, delta: float) -> float:
    """ε of the rounds by the CLT. An estimate that can be below the truth, never a guarantee."""
    return gaussian.epsilon(delta, _inverse(gaussian_mu(rounds)))


def _inverse(x: float) -> float:
    """1/x with 1/0 = ∞."""
    return 1.0 / x if x > 0.0 else math.inf


def zcdp_rho(rounds: Rounds) -> float:
    """An upper bound ρ = Σ count/(2z²) on all rounds (Bun & Steinke 2016, Proposition 1.6).

    Whatever their q: at high orders the divergence of a subsampled Gaussian is the Gaussian's own.
    """
    z = unsampled_noise_multiplier(rounds)
    if z == 0.0 or math.isinf(z):
        return math.inf if rounds else 0.0
    z = min(z, _MOST_NOISE)
    return (1 + _ZCDP_ROUNDING) * 0.5 / z / z


def zcdp_epsilon_bun_steinke(rho: float, delta: float) -> float:
    """ε = ρ + 2√(ρ·log(1/δ)) of ρ-zCDP (Bun & Steinke 2016, Proposition 1.3). An upper bound."""
    require(rho >= 0.0, f"rho is {rho}; it must not be negative")
    check_any_delta(delta)
    # √ρ apart: the product may overflow.
    return (rho + 2 * math.sqrt(rho) * math.sqrt(-math.log(delta))) * (1 + _ZCDP_ROUNDING)


def zcdp_epsilon(rho: float, delta: float) -> float:
    """ε for which every ρ-zCDP mechanism is (ε, δ)-DP (Canonne, Kamath & Steinke 2020, Cor. 13).

    With a loss L of E[e^{(α−1)L}] ≤ e^{(α−1)αρ},

        δ(ε) = E[(1 − e^{ε−L})₊] ≤ e^{(α−1)(αρ−ε)}·max_x (1 − e^{−x})·e^{−(α−1)x},

    and the maximum is (1 − 1/α)^{α−1}/α. Every order α > 1 gives a bound, so the search for the
    best one may be inexact.
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

    # Bun & Steinke's order minimises the bound without the terms that only help.
    centre = math.log(log_inverse) / 2 - math.log(rho) / 2
    bounds = (centre - _SEARCH, centre + _SEARCH)
    found = scipy.optimize.minimize_scalar(bound, bounds=bounds, method="bounded")
    return max(0.0, min(float(found.fun), simple))
