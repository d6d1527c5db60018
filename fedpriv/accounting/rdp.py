"""Rényi differential privacy (RDP), the moments accountant of the Poisson-subsampled Gaussian.

The RDP of one round at order α is log E_Q[(1 + u)^α]/(α − 1), u = q·(r − 1), with r the density of
N(1, z²) over that of Q = N(0, z²); removing a user is never better than adding one (Mironov, Talwar
& Zhang 2019, Theorem 5). As E_Q[u] = 0, E_Q[(1 + u)^α] − 1 = E_Q[(1 + u)^α − 1 − α·u], of which no
terms cancel, so the tiniest q keeps its relative accuracy.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from fedpriv.accounting.round_counts import Rounds, Vector, grouped
from fedpriv.ledger.events import LEAST_DELTA

DEFAULT_ORDERS: tuple[float, ...] = (
    *(1.0 + float(a) for a in np.geomspace(1e-4, 1.0, 41)[:-1]),
    *(2.0 + a / 8 for a in range(48)),
    *map(float, range(8, 64)),
    *sorted({float(round(a)) for a in np.geomspace(64, 16384, 64)}),
)
"""Dense where ε is large (near 1), sparse up to where q is tiny (thousands)."""

_GROUPS = 64  # different rounds that are computed; more are grouped
_SLACK = 1e-10
"""Relative error allowed to an RDP, and added: ten times what tests find, not a proved bound."""
_ROUNDING = 2.0**-50  # of logarithms, relative to what they are sums of
_MOST_EPSILON = 1e290
_LARGEST_FRACTIONAL = 256.0  # larger orders get the RDP of the next integer one
_LEAST_NOISE, _MOST_NOISE = 0.05, 1e100  # more noise is taken to be this, whose square is a number
_RANGE = 14.0  # standard deviations beyond its peaks up to which an integrand is followed
_NEGLIGIBLE = 1e-140  # a z below this one has RDPs near the largest float: ∞


def subsampled_gaussian_rdp(q: float, noise_multiplier: float, orders: Sequence[float]) -> Vector:
    """[orders] RDP of one round of the Poisson-subsampled Gaussian, add or remove one user.

    At most a part in 10⁹ above the exact value; ∞ without noise. q = 1 is the Gaussian mechanism,
    α/(2z²) (Mironov 2017, Corollary 3). An integer order is a sum of α − 1 positive terms (Mironov,
    Talwar & Zhang 2019, Section 3.3), a fractional one an integral; below z = 0.05, and above order
    256, it gets the RDP of the next integer order.
    """
    alpha = np.asarray(orders, dtype=np.float64)
    if noise_multiplier < _NEGLIGIBLE:
        return np.full(alpha.shape, np.inf)
    if q == 1.0:
        return alpha / 2 / noise_multiplier / noise_multiplier
    z = min(noise_multiplier, _MOST_NOISE)
    log_moments = np.array([_log_moment(q, z, float(a)) for a in alpha])
    return log_moments * (1 + _SLACK) / (alpha - 1)


def composed_rdp(rounds: Rounds, orders: Sequence[float]) -> Vector:
    """[orders] RDP of all rounds together, the sum of theirs (Mironov 2017, Proposition 1).

    Where many differ, that of fewer different ones which cost at least as much.
    """
    if all(z > 0.0 for _, z in rounds):
        rounds, _ = grouped(rounds, _GROUPS)
    total = np.zeros(len(orders))
    for (q, z), count in rounds.items():
        total += count * subsampled_gaussian_rdp(q, z, orders)
    return total


def epsilon_from_rdp(orders: Sequence[float], rdp: Vector, delta: float) -> float:
    """ε ≥ 0 at which (α, rdp) at the best order implies (ε, δ)-DP.

    min_α rdp + log((α − 1)/α) − (log δ + log α)/(α − 1) (Canonne, Kamath & Steinke 2020,
    Proposition 12; Balle et al. 2020, Theorem 21).
    """
    alpha = np.asarray(orders, dtype=np.float64)
    bounds = rdp + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)
    return max(0.0, float(bounds.min()))


def delta_from_rdp(orders: Sequence[float], rdp: Vector, epsilon: float) -> float:
    """δ in [1e-60, 1] at which (α, rdp) at the best order implies (ε, δ)-DP.

    min_α e^{(α − 1)(rdp − ε)}/(α − 1)·(1 − 1/α)^α (Canonne, Kamath & Steinke 2020, Proposition 12).
    """
    alpha = np.asarray(orders, dtype=np.float64)
    # Products of a larger ε overflow, and what holds at this one holds at that.
    epsilon = min(epsilon, _MOST_EPSILON)
    logs = (alpha - 1) * (rdp - epsilon) - np.log(alpha - 1) + alpha * np.log1p(-1 / alpha)
    return max(LEAST_DELTA, math.exp(min(0.0, float(logs.min()))))


@lru_cache(maxsize=1 << 15)
def _log_moment(q: float, z: float, alpha: float) -> float:
    """log E_Q[(1 + u)^α], or more."""
    if alpha.is_integer():
        return _log_integer_moment(q, z, int(alpha))
    if z < _LEAST_NOISE or alpha > _LARGEST_FRACTIONAL:
        following = math.ceil(alpha)
        return _log_integer_moment(q, z, following) * (alpha - 1) / (following - 1)
    return _log_fractional_moment(q, z, alpha)


def _log_integer_moment(q: float, z: float, alpha: int) -> float:
    """log(1 + Σ_k C(α, k)·(1 − q)^{α−k}·q^k·(e^{k(k − 1)/(2z²)} − 1)), k = 2, …, α."""
    k = np.arange(2, alpha + 1)
    growth = k * (k - 1) / (2 * z**2)
    coins = (alpha - k) * math.log1p(-q) + k * math.log(q)
    log_terms = _log_binomials(alpha) + coins + growth + np.log(-np.expm1(-growth))
    return _log_one_plus_sum(log_terms + _ROUNDING * (growth - coins))


def _log_binomials(alpha: int) -> Vector:
    """log C(α, j) for j = 2, …, α, rounded up: factorials of large orders cancel."""
    j, most = np.arange(2, alpha + 1), gammaln(alpha + 1) * (1 + 2 * _ROUNDING)
    return np.asarray(most - gammaln(j + 1) - gammaln(alpha - j + 1))


def _log_fractional_moment(q: float, z: float, alpha: float) -> float:
    """log E_Q[(1 + u)^α] by the trapezoidal rule.

    The integrand is analytic up to the branch points at a distance πz² from the real line, so the
    rule's error falls like e^{−2π²z²/dx} and e^{−2π²z²/dx²}; with this dx both are below 1e-16.
    """
    dx = min(0.5 * z**2, 0.7 * z)
    x = np.arange(-_RANGE * z, alpha + _RANGE * z, dx)
    log_ratio = (x - 0.5) / z**2
    u = q * np.expm1(np.minimum(log_ratio, 500.0))
    log_one_plus_u = np.where(log_ratio < 500.0, np.log1p(u), math.log(q) + log_ratio)
    log_density = -(x**2) / (2 * z**2) + math.log(dx / (z * math.sqrt(2 * math.pi)))
    return _log_one_plus_sum(log_density + _log_excess(u, log_one_plus_u, alpha - 1))


def _log_excess(u: Vector, log_one_plus_u: Vector, a: float) -> Vector:
    """log((1 + u)^{1+a} − 1 − (1 + a)·u), of a number ≥ 0, for u > −1 and a > 0."""
    power = a * log_one_plus_u
    middle = (1 + u) * np.expm1(np.minimum(power, 200.0)) - a * u
    series, term = np.zeros_like(u), (1 + a) * np.where(np.abs(u) < 1.0, u, 0.0)
    for k in range(2, 16):
        term = term * u * (2 + a - k) / k
        series += term
    small = (1 + a) * np.abs(u) < 0.1
    value = np.maximum(np.where(small, series, middle), np.finfo(np.float64).tiny)
    return np.where(power > 200.0, power + log_one_plus_u, np.log(value))


def _log_one_plus_sum(log_terms: Vector) -> float:
    """log(1 + Σ e^{log_terms}), accurate where the sum is tiny and where it is huge."""
    largest = log_terms.max()
    return float(np.logaddexp(0.0, largest + np.log(np.exp(log_terms - largest).sum())))
