"""Private selection: the best of a random number K of private trials, and its cost.

The best of 20 private runs costs as much as all 20, unless the number of runs is random and
everything except the best run stays secret. Then the best of K costs about two or three times as
much as one run, for any mean of K (Liu & Talwar 2019; Papernot & Steinke 2022, "Hyperparameter
tuning with Rényi differential privacy"). The theorems need independent trials of the same kind:
each draws its settings from one fixed distribution, not from the results of earlier trials. So a
search that learns from trial to trial, such as most of Optuna's samplers, has no such price.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext

import numpy as np

from fedpriv.accounting.round_counts import Vector

TRIAL_BITS = 512
"""Random bits that determine the number of trials."""
_DIGITS = 200  # decimal digits, more than these bits
_LARGEST_LOG = 690.0


def selected_rdp(
    orders: Sequence[float],
    rdp: Vector,
    delta_at: Callable[[float], float],
    mean: float,
    shape: float | None,
) -> Vector:
    """Return the RDP of the best of K trials, each of which has the RDP ε(λ): [orders].

    If the shape is None, K is Poisson with mean μ (Theorem 6), and the RDP is

        ε(λ) + μ·δ̂ + log(μ)/(λ − 1),

    where one trial is (ε̂, δ̂)-DP with ε̂ = log(1 + 1/(λ − 1)) and δ̂ = `delta_at`(ε̂). With a shape
    η, K is truncated negative binomial (Theorem 2), and the RDP, at the best of the orders λ̂, is

        ε(λ) + (1 + η)·(1 − 1/λ̂)·ε(λ̂) + (1 + η)·log(1/γ)/λ̂ + log(mean)/(λ − 1).

    The result never decreases with the order, as Rényi divergences never do.
    """
    alpha = np.asarray(orders, dtype=np.float64)
    if shape is None:
        surcharge = mean * np.array([delta_at(math.log1p(1.0 / (a - 1.0))) for a in alpha])
    else:
        log_inverse = -math.log(gamma_of(mean, shape))
        constant = np.min((1.0 - 1.0 / alpha) * rdp + log_inverse / alpha)
        surcharge = np.full_like(alpha, (1.0 + shape) * constant)
    total = rdp + surcharge + math.log(mean) / (alpha - 1.0)
    descending = np.argsort(-alpha)
    total[descending] = np.minimum.accumulate(total[descending])
    return np.asarray(total)


def gamma_of(mean: float, shape: float) -> float:
    """Return the γ in (0, 1) for which a truncated negative binomial K has this mean, rounded down.

    >>> round(gamma_of(20.0, 1.0), 9)
    0.05
    """
    low, high = -_LARGEST_LOG, 0.0  # log γ
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _mean(middle, shape) > mean else (low, middle)
    return math.exp(low)


def _mean(log_gamma: float, shape: float) -> float:
    """Return η(1 − γ)/(γ(1 − γ^η))."""
    return shape * math.expm1(-log_gamma) / -math.expm1(shape * log_gamma)


def number_of_trials(word: int, mean: float, shape: float | None = None) -> int:
    """Return the K determined by a secret word of 512 random bits, by inversion.

    Without a shape K is Poisson, and may be 0. The probability of each K has an error of at most
    2⁻⁵¹², so the sum of all errors times e^ε is far below any δ that is priced.

    >>> number_of_trials(2**511, 20.0), number_of_trials(2**511, 20.0, 1.0)
    (20, 14)
    """
    with localcontext(prec=_DIGITS):
        remaining, average = (Decimal(word) + Decimal("0.5")) / 2**TRIAL_BITS, Decimal(mean)
        gamma, eta = Decimal(1), Decimal(1)
        k, chance = 0, (-average).exp()
        if shape is not None:
            gamma, eta = Decimal(gamma_of(mean, shape)), Decimal(shape)
            k, chance = 1, (1 - gamma) * eta / (gamma**-eta - 1)
        while remaining >= chance:
            remaining -= chance
            factor = average if shape is None else (1 - gamma) * (k + eta)
            chance *= factor / (k + 1)
            k += 1
    return k
