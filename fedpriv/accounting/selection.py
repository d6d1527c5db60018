"""Private selection: the best of a random number K of private trials, and what it costs.

Who makes 20 private runs and keeps the best has paid for 20, unless the number of runs is random
and everything but the best stays secret. Then the best of K costs about two or three times as much
as one, whatever the mean of K (Liu & Talwar 2019; Papernot & Steinke 2022, "Hyperparameter tuning
with Rényi differential privacy"). The theorems need trials that are alike and independent: each
draws its settings from one fixed distribution, never from what earlier trials found. So a searcher
that learns from trial to trial, as Optuna's do but for the random one, has no such price.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]

TRIAL_BITS = 512
"""Random bits that a number of trials is drawn from."""
_DIGITS = 200  # far more than these bits tell
_LARGEST_LOG = 690.0


def selected_rdp(
    orders: Sequence[float],
    rdp: Vector,
    delta_at: Callable[[float], float],
    mean: float,
    shape: float | None,
) -> Vector:
    """[orders] RDP of the best of K trials, each of which has this RDP ε(λ) [orders].

    With Poisson K of mean μ (Theorem 6), where `delta_at` gives a δ̂ for which one trial is
    (ε̂, δ̂)-DP with ε̂ = log(1 + 1/(λ − 1)):

        ε(λ) + μ·δ̂ + log(μ)/(λ − 1).

    With a shape η, K is truncated negative binomial (Theorem 2), at the best of the orders λ̂:

        ε(λ) + (1 + η)·(1 − 1/λ̂)·ε(λ̂) + (1 + η)·log(1/γ)/λ̂ + log(mean)/(λ − 1).

    An order costs no more than a larger one, as Rényi divergences grow in the order.
    """
    alpha = np.asarray(orders, dtype=np.float64)
    if shape is None:
        more = mean * np.array([delta_at(math.log1p(1.0 / (a - 1.0))) for a in alpha])
    else:
        log_inverse = -math.log(gamma_of(mean, shape))
        best = np.min((1.0 - 1.0 / alpha) * rdp + log_inverse / alpha)
        more = np.full_like(alpha, (1.0 + shape) * best)
    total = rdp + more + math.log(mean) / (alpha - 1.0)
    descending = np.argsort(-alpha)
    total[descending] = np.minimum.accumulate(total[descending])
    return np.asarray(total)


def gamma_of(mean: float, shape: float) -> float:
    """The γ in (0, 1) for which truncated negative binomial K has this mean, rounded down.

    >>> round(gamma_of(20.0, 1.0), 9)
    0.05
    """
    low, high = -_LARGEST_LOG, 0.0  # log γ
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _mean(middle, shape) > mean else (low, middle)
    return math.exp(low)


def _mean(log_gamma: float, shape: float) -> float:
    """η(1 − γ)/(γ(1 − γ^η))."""
    return shape * math.expm1(-log_gamma) / -math.expm1(shape * log_gamma)


def number_of_trials(word: int, mean: float, shape: float | None = None) -> int:
    """K of a secret word of 512 random bits, by inversion. Poisson K may be 0.

    The chance of each K is that of the law up to 2⁻⁵¹², so that what this adds to δ, for all K
    together and times e^ε, is far below any δ that is priced.

    >>> number_of_trials(2**511, 20.0), number_of_trials(2**511, 20.0, 1.0)
    (20, 14)
    """
    with localcontext(prec=_DIGITS):
        left, average = (Decimal(word) + Decimal("0.5")) / 2**TRIAL_BITS, Decimal(mean)
        gamma, eta = Decimal(1), Decimal(1)
        k, chance = 0, (-average).exp()
        if shape is not None:
            gamma, eta = Decimal(gamma_of(mean, shape)), Decimal(shape)
            k, chance = 1, (1 - gamma) * eta / (gamma**-eta - 1)
        while left >= chance:
            left -= chance
            growth = average if shape is None else (1 - gamma) * (k + eta)
            chance *= growth / (k + 1)
            k += 1
    return k
