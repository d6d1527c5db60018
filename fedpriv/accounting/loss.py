"""The privacy loss of one round of the Poisson-subsampled Gaussian.

One round with sampling probability q and noise multiplier z is dominated by the pair
P = (1 − q)·N(0, z²) + q·N(1, z²) and Q = N(0, z²) (Zhu, Dong & Wang 2022, Theorem 11). Its loss is
L(x) = log(1 − q + q·r(x)) with r(x) = exp((2x − 1)/(2z²)). Removing the user compares P with Q and
draws x from P; adding the user compares Q with P, draws x from Q and has the loss −L.
"""

import math

import numpy as np
from scipy.special import ndtr, ndtri

from fedpriv.accounting.rounds import Vector

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(6)
_LEAST_TAIL = 1e-290
_LARGEST_LOG_RATIO = 700.0


def least_loss(q: float) -> float:
    """The bound log(1 − q) that L stays above; −∞ for q = 1."""
    return math.log1p(-q) if q < 1.0 else -math.inf


def privacy_loss(x: Vector, q: float, z: float) -> Vector:
    """Loss L(x), accurate relative to its size for tiny q and for q = 1.

    Args:
        x: outputs of the query, in clipping norms.
        q: sampling probability in (0, 1].
        z: noise multiplier.

    Returns:
        The losses, shape of x.
    """
    log_ratio = (x - 0.5) / z**2
    rise = q * np.expm1(np.minimum(log_ratio, 500.0))
    far = np.logaddexp(least_loss(q), math.log(q) + log_ratio)
    return np.where((rise > -0.5) & (log_ratio < 500.0), np.log1p(np.maximum(rise, -0.5)), far)


def sample_at(loss: Vector, q: float, z: float) -> tuple[Vector, Vector]:
    """The inverse of the loss.

    Args:
        loss: any losses.
        q: sampling probability in (0, 1].
        z: noise multiplier.

    Returns:
        x with L(x) = loss, −∞ where there is none, and r = (e^loss − 1 + q)/q, which is r(x) or,
        where there is no x, at most 0.
    """
    least = least_loss(q)
    gap = -np.expm1(np.minimum(least - loss, 0.0))
    log_gap = np.log(gap, out=np.full(gap.shape, -np.inf), where=gap > 0)
    log_ratio = loss + log_gap - math.log(q)
    inside = np.exp(np.minimum(log_ratio, _LARGEST_LOG_RATIO))
    below = 1 + np.expm1(np.minimum(loss, least)) / q
    return z**2 * log_ratio + 0.5, np.where(gap > 0, inside, below)


def sample_range(q: float, z: float, tail: float) -> tuple[float, float]:
    """An interval of x that P and Q both leave with probability at most `tail` on either side."""
    tail = max(tail, _LEAST_TAIL)
    absent = -float(ndtri(min(0.5, tail / 2)))
    present = -float(ndtri(min(0.5, tail / (2 * q))))
    return -z * absent, max(z * absent, 1 + z * present)


def masses(low: Vector, high: Vector, mean: float, z: float) -> Vector:
    """Probabilities of N(mean, z²) in [low, high], accurate relative to their size.

    Narrow cells are integrated by Gauss's rule with 6 nodes, whose error is below 1e-15 where the
    density changes by less than a factor of √e; differences of distribution functions would cancel.
    """
    low, high = (np.clip(end, mean - 1e3 * z, mean + 1e3 * z) for end in (low, high))
    middle, half = ((low + high) / 2 - mean) / z, (high - low) / (2 * z)
    narrow = 2 * half * np.maximum(np.abs(middle), 1.0) < 0.5
    found = np.empty(narrow.shape)
    at = middle[narrow] + half[narrow] * _NODES[:, None]
    density = (_WEIGHTS[:, None] * np.exp(-(at**2) / 2)).sum(axis=0) / math.sqrt(2 * math.pi)
    found[narrow] = half[narrow] * density
    a, b = ((end[~narrow] - mean) / z for end in (low, high))
    found[~narrow] = np.where(a > 0, ndtr(-a) - ndtr(-b), ndtr(b) - ndtr(a))
    return found


def cells(x: Vector, mean: float, z: float) -> Vector:
    """Probabilities of N(mean, z²) between neighbouring entries of the increasing vector x."""
    return masses(x[:-1], x[1:], mean, z)


def merged_loss(low: Vector, high: Vector, q: float, z: float) -> Vector:
    """log(P[low, high]/Q[low, high]), NaN where the numbers are too small to tell."""
    absent, present = masses(low, high, 0.0, z), masses(low, high, 1.0, z)
    filled = (absent > 0) & (present > 0)
    ratio: Vector = np.divide(present, absent, out=np.full(absent.shape, np.nan), where=filled)
    rise: Vector = q * (ratio - 1)
    return np.where(rise > -0.5, np.log1p(np.maximum(rise, -0.5)), np.log((1 - q) + q * ratio))
