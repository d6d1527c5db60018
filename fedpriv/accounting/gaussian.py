"""The Gaussian mechanism without sampling, exactly (Balle & Wang 2018, Theorem 8), and the CLT.

With μ = 1/z, a = ε/μ − μ/2 and b = ε/μ + μ/2 the mechanism is (ε, δ)-DP if and only if

    δ ≥ Φ(−a) − e^ε·Φ(−b) = φ(a)·(R(a) − R(b)),    R(x) = Φ(−x)/φ(x),

because e^ε·φ(b) = φ(a). Mills' ratio R is a scaled complementary error function, so nothing
underflows. Here z ≥ 0 is noise_stddev per sensitivity (with ∞ nothing is released), ε ≥ 0 is finite
and δ in (0, 1).

The central limit theorem's estimate of many sampled rounds is for comparison: it can be below the
truth.
"""

import math

import numpy as np
from scipy.special import erfcx, ndtr, ndtri_exp

from fedpriv.accounting.round_counts import (
    Ends,
    Rounds,
    Vector,
    arrays,
    unsampled_noise_multiplier,
)

_ULP = 2.0**-52
_MARGIN = 1e-12  # added to log δ: ten times the rounding errors in tests, not a proved bound
_WIDTH = 2e-11  # twice the error of ε relative to 1 + ε, and of δ relative to δ
# A z below the first has an ε above the largest float; a z above the second is replaced by it.
_LEAST_NOISE, _MOST_NOISE = 1e-150, 1e302
_LARGEST_LOG_DELTA = -1e-9  # replaces a δ closer to 1, where δ hardly depends on ε
_LARGEST_A = 1e3
_NEWTON_STEPS = 100
_LOG_SQRT_TAU = math.log(2 * math.pi) / 2
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)
_SERIES = (-2027025.0, 135135.0, -10395.0, 945.0, -105.0, 15.0, -3.0, 1.0, 0.0)


def log_deltas(epsilons: Vector, noise_multiplier: float) -> Vector:
    """Return log δ ≤ 0, rounded up by about 1e-12; −∞ for z = ∞, and else at least about −5e5."""
    if noise_multiplier < _LEAST_NOISE or math.isinf(noise_multiplier):
        return np.full(epsilons.shape, 0.0 if noise_multiplier < _LEAST_NOISE else -np.inf)
    z = min(noise_multiplier, _MOST_NOISE)
    mu = 1.0 / z
    scaled = np.minimum(np.minimum(epsilons, 1e300 / max(z, 1.0)) * z, 1e300)
    # A smaller a has a larger δ, so this covers the rounding of a.
    a = scaled - mu / 2 - 4 * _ULP * (scaled + mu / 2)
    value, _ = _log_delta(np.clip(a, -mu / 2, _LARGEST_A), np.full(a.shape, mu))
    return np.minimum(0.0, value * (1 - 4 * _ULP) + _MARGIN)


def deltas(epsilons: Vector, noise_multiplier: float) -> Vector:
    """Return the least δ for which the Gaussian mechanism is (ε, δ)-DP, never below the truth.

    For z in [0.05, 1e6] and δ ≥ 1e-300 the relative error is at most 1e-11. It is 1 for z = 0, and
    0 only for z = ∞.
    """
    logs = log_deltas(epsilons, noise_multiplier)
    return np.where(np.isinf(logs), 0.0, np.maximum(np.exp(logs), math.ulp(0.0)))


def delta(epsilon: float, noise_multiplier: float) -> float:
    """Return the δ of `deltas` at one ε."""
    return float(deltas(np.array([epsilon]), noise_multiplier)[0])


def epsilon(delta: float, noise_multiplier: float) -> float:
    """Return the least ε ≥ 0 for which the Gaussian mechanism is (ε, δ)-DP, never below the truth.

    For δ ≤ 0.5 the error is at most 1e-11·(1 + ε). It is ∞ only for z = 0 or above the largest
    float.
    """
    if math.isinf(noise_multiplier):
        return 0.0
    if noise_multiplier < _LEAST_NOISE:
        return math.inf
    mu = np.array([1.0 / min(noise_multiplier, _MOST_NOISE)])
    minimum = -mu / 2
    goal = min(math.log(delta), _LARGEST_LOG_DELTA) * (1 + 4 * _ULP) - _MARGIN
    a = np.maximum(-ndtri_exp(goal), minimum)
    # log δ is a concave function of a, since δ is a convolution of log-concave functions. So every
    # step of Newton's method ends on the safe side of the root: each iterate is a bound.
    for _ in range(_NEWTON_STEPS):
        value, slope = _log_delta(a, mu)
        next_a = np.maximum(a + (value - goal) / slope, minimum)
        converged = np.abs(next_a - a) <= 1e-14 * (1 + np.abs(a))
        a = next_a
        if converged[0]:
            break
    rounding = 4 * _ULP * mu * (np.abs(a) + mu / 2)
    result = np.where(a > minimum, np.maximum(mu * (a + mu / 2), 0.0) + rounding, 0.0)
    return float(result[0])


def epsilon_interval(delta: float, noise_multiplier: float) -> Ends:
    """Return a lower bound of ε, and `epsilon`, if z has a relative error of at most 2⁻⁵⁰."""
    if noise_multiplier == 0.0:
        return math.inf, math.inf
    up = epsilon(delta, noise_multiplier * (1 - 4 * _ULP))
    if math.log(delta) > 2 * _LARGEST_LOG_DELTA:
        return 0.0, up
    # Near δ = 1 the margin of log δ moves ε by more than _WIDTH.
    low = epsilon(delta * (1 + 4 * _MARGIN), noise_multiplier)
    return max(0.0, low - _WIDTH * (1 + low)), up


def delta_interval(epsilon: float, noise_multiplier: float) -> Ends:
    """Return a lower bound of δ, and `delta`, if z has a relative error of at most 2⁻⁵⁰."""
    if noise_multiplier == 0.0:
        return 0.0, 1.0
    low = delta(epsilon * (1 + _WIDTH), noise_multiplier * (1 + _WIDTH)) * (1 - _WIDTH)
    return low, delta(epsilon, noise_multiplier * (1 - 4 * _ULP))


def _log_delta(a: Vector, mu: Vector) -> tuple[Vector, Vector]:
    """Return log δ and −d(log δ)/da for a ≥ −μ/2 and μ > 0: [n] each."""
    b = a + mu
    density = np.exp(-np.square(a) / 2 - _LOG_SQRT_TAU)
    is_small = mu <= 1
    is_left = (a < 0) & ~is_small
    gap = np.where(is_small, _mills_gap(a, mu), _mills(np.maximum(a, 0)) - _mills(b))
    mass = np.where(is_left, ndtr(-a) - density * _mills(b), 1.0)
    value = np.where(is_left, np.log(mass), np.log(gap) - np.square(a) / 2 - _LOG_SQRT_TAU)
    return value, mu * _mills(b) * np.where(is_left, density / mass, 1 / gap)


def _mills(x: Vector) -> Vector:
    """Return Mills' ratio R(x) = Φ(−x)/φ(x) for x > −1."""
    return math.sqrt(math.pi / 2) * erfcx(x / math.sqrt(2))


def _mills_gap(a: Vector, mu: Vector) -> Vector:
    """Return R(a) − R(a + μ) for μ ≤ 1, without cancellation as the integral of 1 − x·R(x)."""
    width = np.minimum(mu, 1.0)[:, None] / 2
    x = np.maximum(a, -1.0)[:, None] + width * (1 + _NODES)
    # From x = 30 on the difference loses digits, and the asymptotic series is exact.
    series = np.polyval(_SERIES, 1 / np.square(np.maximum(x, 30.0)))
    slope = np.where(x < 30.0, 1 - x * _mills(x), series)
    return (width * slope) @ _WEIGHTS


def clt_mu(rounds: Rounds) -> float:
    """Return the μ of the limit of rounds: μ² = Σ count·q²·(e^{1/z²} − 1), an estimate, no bound.

    Bu et al. 2020, equation (3.1); in the limit squares add up (Dong, Roth & Su 2019, Theorem 6).
    """
    if not rounds:
        return 0.0
    q, z, counts = arrays(rounds)
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.sqrt(counts @ (q**2 * np.expm1(z**-2.0))))


def clt_noise(rounds: Rounds) -> float:
    """Return the z of the limit, 1/μ, at least that of the rounds without sampling, a bound."""
    mu = clt_mu(rounds)
    return max(1.0 / mu if mu > 0.0 else np.inf, unsampled_noise_multiplier(rounds))
