"""μ-Gaussian differential privacy and its central limit theorem (CLT).

A mechanism is μ-GDP if telling two neighbours apart from its output is at least as hard as telling
N(0, 1) from N(μ, 1) (Dong, Roth & Su 2019, Section 2). The Gaussian mechanism with noise
multiplier z is exactly 1/z-GDP, so every curve here is that of `analytic` at z = 1/μ.

What is μ-GDP has the guarantees below. The μ that the CLT gives to subsampled rounds is a limit for
ever more, ever more private rounds: **an estimate, that can be below the truth**, never a bound.
"""

import math

import numpy as np
from scipy.special import ndtr, ndtri

from fedpriv.accounting import analytic
from fedpriv.accounting.rounds import Rounds, Vector, check_rounds, unsampled_noise_multiplier
from fedpriv.errors import InvalidValueError

_LARGEST_EXPONENT = 700.0


def clt_mu(rounds: Rounds) -> float:
    """The μ that the rounds tend to: μ² = Σ count·q²·(e^{1/z²} − 1). An estimate, not a bound.

    Bu et al. 2020, equation (3.1), for rounds that differ: in the limit the squares add up (Dong,
    Roth & Su 2019, Theorem 6).

    Args:
        rounds: number of rounds by (q, z).

    Returns:
        μ ≥ 0; ∞ for a round without noise and where μ is above the largest float (z < 0.0266).

    Raises:
        InvalidValueError: a q, z or count is out of range.
    """
    check_rounds(rounds)
    logs = [_log_square(q, z) + math.log(count) for (q, z), count in rounds.items()]
    if not logs or max(logs) == math.inf:
        return math.inf if logs else 0.0
    largest = max(logs)
    log_mu = (largest + math.log(math.fsum(math.exp(x - largest) for x in logs))) / 2
    return math.exp(log_mu) if log_mu < math.log(np.finfo(np.float64).max) else math.inf


def clt_epsilon(rounds: Rounds, delta: float) -> float:
    """ε of the rounds by the CLT. An estimate that can be below the truth, never a guarantee.

    Uses the smaller of `clt_mu` and of the μ of the same rounds without sampling. The latter is a
    bound, and exact for q = 1, where the CLT would be above.

    Args:
        rounds: number of rounds by (q, z).
        delta: δ in (0, 1).

    Returns:
        ε ≥ 0; ∞ only for a round without noise.

    Raises:
        InvalidValueError: δ, a q, z or count is out of range.
    """
    return epsilon(delta, min(clt_mu(rounds), _inverse(unsampled_noise_multiplier(rounds))))


def delta(epsilon: float, mu: float) -> float:
    """Least δ for which every μ-GDP mechanism is (ε, δ)-DP (Bu et al. 2020, equation (3.2)).

    Args:
        epsilon: ε ≥ 0, finite.
        mu: μ ≥ 0.

    Returns:
        δ(ε; μ) = Φ(−ε/μ + μ/2) − e^ε·Φ(−ε/μ − μ/2), rounded up as in `analytic.delta`.

    Raises:
        InvalidValueError: ε or μ is out of range.
    """
    _check_mu(mu)
    return analytic.delta(epsilon, _inverse(mu))


def epsilon(delta: float, mu: float) -> float:
    """Least ε ≥ 0 for which every μ-GDP mechanism is (ε, δ)-DP: the inverse of `delta`.

    Args:
        delta: δ in (0, 1).
        mu: μ ≥ 0.

    Returns:
        ε(δ; μ), rounded up as in `analytic.epsilon`; ∞ for μ = ∞.

    Raises:
        InvalidValueError: δ or μ is out of range.
    """
    _check_mu(mu)
    return analytic.epsilon(delta, _inverse(mu))


def equivalent_mu(epsilon: float, delta: float) -> float:
    """Largest μ for which every μ-GDP mechanism is (ε, δ)-DP.

    It names the Gaussian mechanism that attains (ε, δ). What is only known to be (ε, δ)-DP need not
    be μ-GDP.

    Args:
        epsilon: ε ≥ 0, finite.
        delta: δ in (0, 1).

    Returns:
        μ > 0 with δ(ε; μ) ≤ δ, rounded down as in `analytic.noise_multiplier`.

    Raises:
        InvalidValueError: ε or δ is out of range.
    """
    return 1.0 / analytic.noise_multiplier(epsilon, delta)


def trade_off(type_one: Vector, mu: float) -> Vector:
    """G_μ: least type II error of any test between N(0, 1) and N(μ, 1).

    Args:
        type_one: type I errors α in [0, 1], any shape.
        mu: μ ≥ 0, finite.

    Returns:
        G_μ(α) = Φ(Φ⁻¹(1 − α) − μ), shape of `type_one` (Bu et al. 2020, Section 2). It is 1 at
        α = 0, 0 at α = 1, convex, falls in α and μ, and its own inverse; G_0(α) = 1 − α.

    Raises:
        InvalidValueError: an α or μ is out of range.
    """
    _check_mu(mu)
    if math.isinf(mu):
        raise InvalidValueError(f"mu is {mu}; it must be finite")
    _check_errors(type_one)
    return np.asarray(ndtr(-ndtri(type_one) - mu))


def trade_off_of_pair(type_one: Vector, epsilon: float, delta: float) -> Vector:
    """f_{ε,δ}: least type II error of any test between neighbours of an (ε, δ)-DP mechanism.

    Args:
        type_one: type I errors α in [0, 1], any shape.
        epsilon: ε ≥ 0.
        delta: δ in [0, 1].

    Returns:
        f(α) = max{0, 1 − δ − e^ε·α, e^{−ε}·(1 − δ − α)}, shape of `type_one` (Bu et al. 2020,
        equation (2.1)). The Gaussian of the `equivalent_mu` lies above f and touches it.

    Raises:
        InvalidValueError: an α, ε or δ is out of range.
    """
    if not epsilon >= 0.0:
        raise InvalidValueError(f"epsilon is {epsilon}; it must not be negative")
    if not 0.0 <= delta <= 1.0:
        raise InvalidValueError(f"delta is {delta}; it must be in [0, 1]")
    _check_errors(type_one)
    steep = 1 - delta - math.exp(min(epsilon, _LARGEST_EXPONENT)) * type_one
    flat = math.exp(-epsilon) * (1 - delta - type_one)
    return np.maximum(0.0, np.maximum(steep, flat))


def _log_square(q: float, z: float) -> float:
    """log(q²·(e^{1/z²} − 1)) without overflow."""
    exponent = 1.0 / z / z if z > 0.0 else math.inf
    if exponent < 1.0:
        # 1/z² may be below the smallest float, where e^x − 1 = x.
        growth = math.log(math.expm1(exponent)) if exponent > 0.0 else -2 * math.log(z)
    else:
        growth = exponent + math.log1p(-math.exp(-exponent))
    return 2 * math.log(q) + growth


def _inverse(x: float) -> float:
    """1/x with 1/0 = ∞."""
    return 1.0 / x if x > 0.0 else math.inf


def _check_mu(mu: float) -> None:
    if not mu >= 0.0:
        raise InvalidValueError(f"mu is {mu}; it must not be negative")


def _check_errors(type_one: Vector) -> None:
    outside = type_one[~((type_one >= 0.0) & (type_one <= 1.0))]
    if outside.size:
        raise InvalidValueError(f"a type I error is {outside.flat[0]}; it must be in [0, 1]")
