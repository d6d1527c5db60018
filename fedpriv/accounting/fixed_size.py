"""RDP of the Gaussian mechanism on a cohort of fixed size when one user is replaced. Upper bounds.

Let p, p' and r be the releases on a cohort with the user, with the one that replaces it, and with
somebody else in its place: Gaussians that lie at most one sensitivity, 2S, apart. With q = m/N,

    E[(P/P')^α] ≤ 1 + Σ_{j≥2} C(α, j)·q^j·E_r[|p − p'|^j/r^j]

for integer α (Wang, Balle & Kasiviswanathan 2019, Section 3). Let R be the ratio of two Gaussians
one sensitivity apart. The last factor is at most

* 2·E[R^j], as |p − p'| ≤ max(p, p') and E[R^j] = e^{j(j−1)/(2z²)};
* 4·E[|R − 1|^j]: where r ≥ min(p, p') it divides by at least the smaller one, elsewhere |p − p'| is
  below max(p, p') − r, which makes four such integrals; by Cauchy and Schwarz an odd j has the
  geometric mean of its neighbours (their Theorem 27).

Everywhere here z is the noise per **sensitivity**: half the noise multiplier.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, logsumexp

from fedpriv.accounting.rounds import Rounds, Vector

_SLACK = 1e-10
"""Relative error allowed to an RDP, more than the tests find; added, for the safe side."""
_LAST_MOMENT = 256
"""Up to this even j the second of the bounds above is used; beyond it, the first alone."""
_NEGLIGIBLE = 1e-140
"""A z below this one has RDPs near the largest float: ∞."""
_LEAST_NOISE = 1.0
"""Below this z the first of the bounds above is the smaller one for every j."""
_RANGE, _STEP = 12.0, 0.125
"""In standard deviations: how far beyond its peaks an integrand is followed, and how finely."""


def fixed_size_gaussian_rdp(q: float, z: float, orders: Sequence[float]) -> Vector:
    """RDP of one round on m of N users, drawn without replacement, when one user is replaced.

    * An integer order has the bound of Wang, Balle & Kasiviswanathan 2019, Theorem 27.
    * Another one has the interpolated bound, because (α − 1)·ε(α) is convex (their Corollary 10).
    * No order has more than without sampling, α/(2z²), as the release is a mixture over cohorts
      and Rényi divergence is quasi-convex (van Erven & Harremoës 2014, Theorem 13); q = 1 has just
      that. Without noise it is ∞.

    Args:
        q: m/N in (0, 1].
        z: noise_stddev over the sensitivity 2S, ≥ 0.
        orders: [orders] α > 1.

    Returns:
        [orders] upper bounds on the RDP ε(α).
    """
    alpha = np.asarray(orders, dtype=np.float64)
    if z < _NEGLIGIBLE:
        return np.full(alpha.shape, np.inf)
    unsampled = alpha / 2 / z / z
    if q == 1.0:
        return unsampled
    below, above = np.floor(alpha), np.ceil(alpha)
    share = alpha - below
    log_moment = (1 - share) * _log_moments(q, z, below) + share * _log_moments(q, z, above)
    return np.minimum(log_moment * (1 + _SLACK) / (alpha - 1), unsampled)


def composed_fixed_size_rdp(rounds: Rounds, orders: Sequence[float]) -> Vector:
    """RDP of all rounds together: [orders] the sum of theirs (Mironov 2017, Proposition 1).

    Args:
        rounds: number of rounds by (m/N, noise_stddev over the sensitivity 2S).
        orders: [orders] α > 1.
    """
    total = np.zeros(len(orders))
    for (q, z), count in rounds.items():
        total += count * fixed_size_gaussian_rdp(q, z, orders)
    return total


def _log_moments(q: float, z: float, orders: Vector) -> Vector:
    """Bounds on log E[(P/P')^α], shape of the integer orders α ≥ 1."""
    return np.array([_log_moment(q, z, int(alpha)) for alpha in orders])


@lru_cache(maxsize=4096)
def _log_moment(q: float, z: float, alpha: int) -> float:
    if alpha == 1:
        return 0.0
    j = np.arange(2, alpha + 1)
    log_binomial = gammaln(alpha + 1) - gammaln(j + 1) - gammaln(alpha - j + 1)
    log_terms = log_binomial + j * math.log(q) + _log_differences(z, alpha)
    return float(np.logaddexp(0.0, logsumexp(log_terms)))


def _log_differences(z: float, alpha: int) -> Vector:
    """[α − 1] bounds on log E_r[|p − p'|^j/r^j] for j = 2, …, α."""
    j = np.arange(2, alpha + 1)
    bound = math.log(2) + j * (j - 1) / 2 / z / z
    if z >= _LEAST_NOISE:
        even = _log_even_moments(z)
        near = j[j < _LAST_MOMENT]
        geometric_mean = (even[near // 2 - 1] + even[(near + 1) // 2 - 1]) / 2
        bound[: len(near)] = np.minimum(bound[: len(near)], math.log(4) + geometric_mean)
    return bound


@lru_cache(maxsize=256)
def _log_even_moments(z: float) -> Vector:
    """log E[(R − 1)^j] for j = 2, 4, …, by the trapezoidal rule; nothing cancels.

    R = e^{x/z − 1/(2z²)} for a standard normal x. The integrand is entire and its peaks, near ±√j
    and below j/z + √j, are at least half a standard deviation wide: the step leaves no error.
    """
    j = np.arange(2, _LAST_MOMENT + 1, 2)[:, None]
    spread = math.sqrt(_LAST_MOMENT) + _RANGE
    x = np.arange(-spread, _LAST_MOMENT / z + spread, _STEP)
    rise = np.abs(np.expm1(x / z - 0.5 / z / z))
    log_rise = np.log(rise, out=np.full(x.shape, -np.inf), where=rise > 0)
    log_weight = math.log(_STEP / math.sqrt(2 * math.pi)) - x**2 / 2
    moments: Vector = logsumexp(j * log_rise + log_weight, axis=1)
    return moments
