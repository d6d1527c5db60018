"""Zero-concentrated differential privacy (zCDP) of Bun & Steinke 2016. Upper bounds.

A mechanism is ρ-zCDP if its Rényi divergence between neighbours is at most ρ·α at every order
α > 1. The Gaussian mechanism is 1/(2z²)-zCDP (Proposition 1.6) and ρ adds up (Lemma 1.7).

zCDP has no amplification by subsampling: at high orders the divergence of a subsampled Gaussian is
that of the Gaussian itself. A round with q < 1 is therefore charged as if everybody was in it.
"""

import math

from scipy.optimize import minimize_scalar

from fedpriv.accounting.analytic import check_delta
from fedpriv.accounting.rounds import Rounds, unsampled_noise_multiplier
from fedpriv.errors import InvalidValueError

_ROUNDING = 1e-14
_SEARCH = 6.0
_MOST_NOISE = 1e150


def rho(rounds: Rounds) -> float:
    """ρ of all rounds, Σ count/(2z²), whatever their q. An upper bound.

    Args:
        rounds: number of rounds by (q, z).

    Returns:
        ρ > 0, at least 5e-301; 0 for no round, ∞ for a round without noise and where ρ is above
        the largest float.

    Raises:
        InvalidValueError: a q, z or count is out of range.
    """
    z = unsampled_noise_multiplier(rounds)
    if z == 0.0 or math.isinf(z):
        return math.inf if rounds else 0.0
    z = min(z, _MOST_NOISE)
    return (1 + _ROUNDING) * 0.5 / z / z


def epsilon_bun_steinke(rho: float, delta: float) -> float:
    """ε for which every ρ-zCDP mechanism is (ε, δ)-DP. An upper bound, not attained.

    Args:
        rho: ρ ≥ 0.
        delta: δ in (0, 1).

    Returns:
        ρ + 2√(ρ·log(1/δ)) (Bun & Steinke 2016, Proposition 1.3).

    Raises:
        InvalidValueError: ρ or δ is out of range.
    """
    _check(rho, delta)
    # √ρ apart: the product may overflow.
    return (rho + 2 * math.sqrt(rho) * math.sqrt(-math.log(delta))) * (1 + _ROUNDING)


def epsilon(rho: float, delta: float) -> float:
    """ε for which every ρ-zCDP mechanism is (ε, δ)-DP, by the tighter conversion. An upper bound.

    Canonne, Kamath & Steinke 2020, Corollary 13. With a loss L of E[e^{(α−1)L}] ≤ e^{(α−1)αρ},

        δ(ε) = E[(1 − e^{ε−L})₊] ≤ e^{(α−1)(αρ−ε)}·max_x (1 − e^{−x})·e^{−(α−1)x},

    and the maximum is (1 − 1/α)^{α−1}/α. Every order α > 1 gives a bound, so an inexact search for
    the best one errs on the safe side.

    Args:
        rho: ρ ≥ 0.
        delta: δ in (0, 1).

    Returns:
        max{0, min_α αρ + log(1 − 1/α) + log(1/(αδ))/(α − 1)}, at most `epsilon_bun_steinke`.

    Raises:
        InvalidValueError: ρ or δ is out of range.
    """
    _check(rho, delta)
    if rho == 0.0 or math.isinf(rho):
        return rho
    log_inverse = -math.log(delta)
    # Bun & Steinke's order: it minimises the bound without the terms that only help.
    centre = math.log(log_inverse) / 2 - math.log(rho) / 2

    def bound(log_excess: float) -> float:
        excess = math.exp(log_excess)  # α − 1
        terms = (
            (1 + excess) * rho,
            -math.log1p(1 / excess),
            log_inverse / excess,
            -math.log1p(excess) / excess,
        )
        return sum(terms) + _ROUNDING * sum(map(abs, terms))

    bounds = (centre - _SEARCH, centre + _SEARCH)
    found = minimize_scalar(bound, bounds=bounds, method="bounded")
    return max(0.0, min(float(found.fun), epsilon_bun_steinke(rho, delta)))


def _check(rho: float, delta: float) -> None:
    if not rho >= 0.0:
        raise InvalidValueError(f"rho is {rho}; it must not be negative")
    check_delta(delta)
