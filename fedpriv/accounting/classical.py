"""The central limit theorem's estimate of ε, for comparison with the exact answer.

It can be below the truth. Rounds are counts by (q, z); a q, z, count or δ out of range raises
`InvalidValueError`.
"""

import math

import numpy as np

from fedpriv.accounting import gaussian
from fedpriv.accounting.round_counts import Rounds, check_rounds, unsampled_noise_multiplier


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


def clt_delta(rounds: Rounds, epsilon: float) -> float:
    """Return the δ of the rounds by the CLT, an estimate that can be below the truth."""
    return gaussian.delta(epsilon, _inverse(gaussian_mu(rounds)))


def _inverse(x: float) -> float:
    """Return 1/x, with 1/0 = ∞."""
    return 1.0 / x if x > 0.0 else math.inf
