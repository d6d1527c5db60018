"""The central limit theorem's estimate of ε, for comparison with the exact answer.

It can be below the truth. Rounds are counts by (q, z).
"""

import numpy as np

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


def clt_noise(rounds: Rounds) -> float:
    """Return the z of the limit, 1/μ, at least that of the rounds without sampling, a bound."""
    mu = clt_mu(rounds)
    return max(1.0 / mu if mu > 0.0 else np.inf, unsampled_noise_multiplier(rounds))
