"""Rényi differential privacy (RDP), the moments accountant of the Poisson-subsampled Gaussian.

The RDP of one round at order α is log E_Q[(1 + u)^α]/(α − 1), u = q·(r − 1), where r is the density
of N(1, z²) over that of Q = N(0, z²). Adding a user never costs more than removing one (Mironov,
Talwar & Zhang 2019, Theorem 5). Since E_Q[u] = 0, E_Q[(1 + u)^α] − 1 = E_Q[(1 + u)^α − 1 − α·u].
The terms of the latter do not cancel, so the relative error is small even for the tiniest q.
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
"""Orders: dense near 1, for a large ε; sparse up to thousands, for a tiny q."""

_GROUPS = 64  # largest number of different rounds; more are grouped
_SLACK = 1e-10
"""Relative error of an RDP, which is added: ten times that in tests, not a proved bound."""
_ROUNDING = 2.0**-50  # of logarithms, relative to their summands
_MOST_EPSILON = 1e290
_LARGEST_FRACTIONAL = 256.0  # larger orders get the RDP of the next integer
_LEAST_NOISE, _MOST_NOISE = 0.05, 1e100  # a larger z is replaced by 1e100, whose square is finite
_RANGE = 14.0  # standard deviations beyond the peaks at which an integral ends
_NEGLIGIBLE = 1e-140  # a smaller z has RDPs near the largest float: ∞


def subsampled_gaussian_rdp(q: float, noise_multiplier: float, orders: Sequence[float]) -> Vector:
    """Return the RDP of one Poisson-sampled round when one user is added or removed: [orders].

    It is above the exact value by at most a part in 10⁹, and ∞ without noise. For q = 1 it is that
    of the Gaussian mechanism, α/(2z²) (Mironov 2017, Corollary 3). For an integer order it is a sum
    of α − 1 positive terms (Mironov, Talwar & Zhang 2019, Section 3.3), for a fractional one an
    integral. For z < 0.05 or an order above 256, a fractional order gets the RDP of the next
    integer.
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
    """Return the RDP of all rounds together, the sum of their RDPs (Mironov 2017, Proposition 1).

    Many different rounds are replaced by fewer ones that cost at least as much. The result has the
    shape [orders].
    """
    if all(z > 0.0 for _, z in rounds):
        rounds, _ = grouped(rounds, _GROUPS)
    total = np.zeros(len(orders))
    for (q, z), count in rounds.items():
        total += count * subsampled_gaussian_rdp(q, z, orders)
    return total


def epsilon_from_rdp(orders: Sequence[float], rdp: Vector, delta: float) -> float:
    """Return the ε ≥ 0 for which (α, rdp) at the best order implies (ε, δ)-DP.

    It is min_α rdp + log((α − 1)/α) − (log δ + log α)/(α − 1) (Canonne, Kamath & Steinke 2020,
    Proposition 12; Balle et al. 2020, Theorem 21).
    """
    alpha = np.asarray(orders, dtype=np.float64)
    bounds = rdp + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)
    return max(0.0, float(bounds.min()))


def delta_from_rdp(orders: Sequence[float], rdp: Vector, epsilon: float) -> float:
    """Return the δ in [1e-60, 1] for which (α, rdp) at the best order implies (ε, δ)-DP.

    It is min_α e^{(α − 1)(rdp − ε)}/(α − 1)·(1 − 1/α)^α (Canonne, Kamath & Steinke 2020,
    Proposition 12).
    """
    alpha = np.asarray(orders, dtype=np.float64)
    # Products of a larger ε overflow; a δ for a smaller ε holds for it too.
    epsilon = min(epsilon, _MOST_EPSILON)
    logs = (alpha - 1) * (rdp - epsilon) - np.log(alpha - 1) + alpha * np.log1p(-1 / alpha)
    return max(LEAST_DELTA, math.exp(min(0.0, float(logs.min()))))


@lru_cache(maxsize=1 << 15)
def _log_moment(q: float, z: float, alpha: float) -> float:
    """Return an upper bound of log E_Q[(1 + u)^α]."""
    integer = math.ceil(alpha)
    if integer == alpha or z < _LEAST_NOISE or alpha > _LARGEST_FRACTIONAL:
        return _log_integer_moment(q, z, integer) * ((alpha - 1) / (integer - 1))
    return _log_fractional_moment(q, z, alpha)


def _log_integer_moment(q: float, z: float, alpha: int) -> float:
    """Return log(1 + Σ_{k=2}^α C(α, k)·(1 − q)^{α−k}·q^k·(e^{k(k − 1)/(2z²)} − 1))."""
    k = np.arange(2, alpha + 1)
    growth = k * (k - 1) / (2 * z**2)
    coins = (alpha - k) * math.log1p(-q) + k * math.log(q)
    log_terms = _log_binomials(alpha) + coins + growth + np.log(-np.expm1(-growth))
    return _log_one_plus_sum(log_terms + _ROUNDING * (growth - coins))


def _log_binomials(alpha: int) -> Vector:
    """Return log C(α, j) for j = 2, …, α, rounded up, since factorials of large orders cancel."""
    j, log_factorial = np.arange(2, alpha + 1), gammaln(alpha + 1) * (1 + 2 * _ROUNDING)
    return np.asarray(log_factorial - gammaln(j + 1) - gammaln(alpha - j + 1))


def _log_fractional_moment(q: float, z: float, alpha: float) -> float:
    """Return log E_Q[(1 + u)^α] by the trapezoidal rule.

    The integrand is analytic up to the branch points at a distance πz² from the real line, so the
    rule's error decreases like e^{−2π²z²/dx} and e^{−2π²z²/dx²}; with this dx both are below 1e-16.
    """
    dx = min(0.5 * z**2, 0.7 * z)
    x = np.arange(-_RANGE * z, alpha + _RANGE * z, dx)
    log_ratio = (x - 0.5) / z**2
    u = q * np.expm1(np.minimum(log_ratio, 500.0))
    log_one_plus_u = np.where(log_ratio < 500.0, np.log1p(u), math.log(q) + log_ratio)
    log_density = -(x**2) / (2 * z**2) + math.log(dx / (z * math.sqrt(2 * math.pi)))
    return _log_one_plus_sum(log_density + _log_excess(u, log_one_plus_u, alpha - 1))


def _log_excess(u: Vector, log_one_plus_u: Vector, a: float) -> Vector:
    """Return log((1 + u)^{1+a} − 1 − (1 + a)·u) for u > −1 and a > 0; its argument is ≥ 0."""
    power = a * log_one_plus_u
    middle = (1 + u) * np.expm1(np.minimum(power, 200.0)) - a * u
    series, term = np.zeros_like(u), (1 + a) * np.where(np.abs(u) < 1.0, u, 0.0)
    for k in range(2, 16):
        term = term * u * (2 + a - k) / k
        series += term
    is_small = (1 + a) * np.abs(u) < 0.1
    value = np.maximum(np.where(is_small, series, middle), np.finfo(np.float64).tiny)
    return np.where(power > 200.0, power + log_one_plus_u, np.log(value))


def _log_one_plus_sum(log_terms: Vector) -> float:
    """Return log(1 + Σ e^{log_terms}), accurate for tiny and for huge sums."""
    largest = log_terms.max()
    return float(np.logaddexp(0.0, largest + np.log(np.exp(log_terms - largest).sum())))
