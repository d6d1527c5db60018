"""The central limit theorem's estimate of ε, for comparison with the exact answer.

It can be below the truth. Rounds are counts by (q, z).
"""

import numpy as np

from fedpriv.accounting import gaussian
from fedpriv.accounting.round_counts import Rounds, arrays, unsampled_noise_multiplier


def clt_mu(rounds: Rounds) -> float:
    """Return the μ of the limit of rounds: μ² = Σ count·q²·(e^{1/z²} − 1), an estimate, no bound.

    Bu et al. 2020, equation (3.1); in the limit squares add up (Dong, Roth & Su 2019, Theorem 6).
    """
    if not rounds:
        return 0.0
    q, z, counts = arrays(rounds)
    with np.errstate(divide="ignore", over="ignore"):
        return float(np.sqrt(counts @ (q**2 * np.expm1(z**-2.0))))


def gaussian_mu(rounds: Rounds) -> float:
    """Return the μ of rounds as one Gaussian: exact for q = 1, an estimate for others.

    It is `clt_mu`, but at most the μ of the same rounds without sampling, which is a bound.
    """
    unsampled = _inverse(unsampled_noise_multiplier(rounds))
    return unsampled if all(q == 1.0 for q, _ in rounds) else min(clt_mu(rounds), unsampled)


def clt_epsilon(rounds: Rounds, delta: float) -> float:
    """Return the ε of the rounds by the CLT, an estimate that can be below the truth."""
    return gaussian.epsilon(delta, _inverse(gaussian_mu(rounds)))


def clt_delta(rounds: Rounds, epsilon: float) -> float:
    """Return the δ of the rounds by the CLT, an estimate that can be below the truth."""
    return gaussian.delta(epsilon, _inverse(gaussian_mu(rounds)))


def _inverse(x: float) -> float:
    """Return 1/x, with 1/0 = ∞."""
    return 1.0 / x if x > 0.0 else np.inf
