"""The cumulant generating function of the privacy loss of rounds, at complex points.

One round with sampling probability q and noise multiplier z is dominated by the pair
P = (1 − q)·N(0, z²) + q·N(1, z²) and Q = N(0, z²) (Zhu, Dong & Wang 2022, Theorem 11). With x = z·y
its likelihood ratio is A(y) = 1 − q + q·r(y), r(y) = exp(y/z − 1/(2z²)) and, for y ~ N(0, 1),

    E[e^{wL}] = E[A(y)^s],   s = 1 + w when the user is removed,   s = −w when the user is added.

The expectation is taken over a window of y: losses outside are too rare to matter for δ, but could
be so large that they spoil the cumulant. Inside, the integrand is analytic for |Im y| < πz and
Gauss–Legendre nodes get it right to all digits; `windows` and `shifted` bound what is left.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from fedpriv.accounting.loss import Direction, Vector

ComplexVector = NDArray[np.complex128]

EPS = float(np.finfo(np.float64).eps)
_CHUNK = 1 << 16
"""Numbers of a temporary array: half a MiB, so that it stays in the cache."""


@dataclass(frozen=True)
class Losses:
    """The privacy loss of one round of each of p pairs (q, z), at nodes in a window.

    Attributes:
        direction: which neighbour the mechanism ran on.
        q: [p, 1] sampling probabilities.
        z: [p, 1] noise multipliers.
        low: [p, 1] and
        high: [p, 1] ends of the window.
        place: [n] where the nodes are, from −1 at the low end to 1 at the high end.
        y: [p, n] the nodes.
        log_weight: [p, n] logarithms of the probabilities of the nodes under Q.
        log_ratio: [p, n] log A, which is L or −L.
        present: [p, n] q·r/A, the probability that the user took part given y.
        absent: [p, n] 1 − present.
    """

    direction: Direction
    q: Vector
    z: Vector
    low: Vector
    high: Vector
    place: Vector
    y: Vector
    log_weight: Vector
    log_ratio: Vector
    present: Vector
    absent: Vector


@dataclass(frozen=True)
class Tilted:
    """Losses under the tilt e^{cL}/E[e^{cL}].

    Attributes:
        losses: the p pairs.
        order: the power s of the likelihood ratio that belongs to w = c.
        log_mgf: [p] log E[e^{cL}].
        mean: [p] mean of the loss under the tilt.
        loss: [p, n] loss minus its mean.
        mass: [p, n] probabilities under the tilt.
        rounding: [p] bound on the relative error of sums over the nodes, per unit of |s|.
    """

    losses: Losses
    order: float
    log_mgf: Vector
    mean: Vector
    loss: Vector
    mass: Vector
    rounding: Vector

    @property
    def variance(self) -> Vector:
        """[p] variance of the loss under the tilt."""
        return np.asarray((self.mass * self.loss**2).sum(axis=1))


def losses(
    q: Vector, z: Vector, ends: tuple[Vector, Vector], direction: Direction, nodes: int
) -> Losses:
    """The loss of one round of each pair at nodes in a window.

    Args:
        q: [p] sampling probabilities in (0, 1].
        z: [p] noise multipliers > 0.
        ends: [p, 1] low and high end of the window.
        direction: which neighbour the mechanism ran on.
        nodes: number of nodes per pair.

    Returns:
        The losses.
    """
    q, z = q[:, None], z[:, None]
    low, high = ends
    place, weight = _rule(nodes)
    y = low + (high - low) / 2 * (1 + place)
    log_weight = np.log((high - low) * weight / np.sqrt(8 * np.pi)) - y * y / 2
    log_r, log_ratio = log_likelihood(y, q, z)
    present, absent = np.exp(np.log(q) + log_r - log_ratio), np.exp(log_absent(q) - log_ratio)
    return Losses(direction, q, z, low, high, place, y, log_weight, log_ratio, present, absent)


def tilt(given: Losses, c: float) -> Tilted:
    """Tilt losses by e^{cL}, c > 0."""
    s = power(given.direction, c)
    exponent = given.log_weight + s * given.log_ratio
    top = exponent.max(axis=1, keepdims=True)
    log_mgf = top[:, 0] + np.log(np.exp(exponent - top).sum(axis=1))
    # E[A^s − 1] keeps all digits of a tiny q; where A^s is large the plain sum does.
    weight = np.exp(given.log_weight)
    rise = weight * np.expm1(np.minimum(s * given.log_ratio, 30.0))
    rise = np.where(s * given.log_ratio > 30.0, np.exp(np.minimum(exponent, 1.0)), rise)
    outside = (ndtr(given.low) + ndtr(-given.high))[:, 0]
    small = np.log1p(np.maximum(rise.sum(axis=1) - outside, -0.5))
    log_mgf = np.where(log_mgf < 0.5, small, log_mgf)
    mass = np.exp(exponent - log_mgf[:, None])
    mean = (mass * given.log_ratio).sum(axis=1)
    # A sum of n products is wrong by at most n + 2 roundings of its absolute terms, which are at
    # most |s|·|L|·max(1, A^s) for E[A^s − 1]; a loss is wrong by some 60 roundings and a weight by
    # 60/(1 − x²), as 1 − x² is what cancels near the ends.
    terms = (mass + weight) * np.abs(given.log_ratio)
    roundings = len(given.place) + 64 + 64 / (1 - given.place**2)
    return Tilted(
        losses=given,
        order=s,
        log_mgf=log_mgf,
        mean=given.direction * mean,
        loss=given.direction * (given.log_ratio - mean[:, None]),
        mass=mass,
        rounding=EPS * (terms @ roundings),
    )


def log_mgf_along(tilted: Tilted, times: Vector) -> ComplexVector:
    """log E[e^{wL}] of one round of each pair at w = c + i·t.

    Args:
        tilted: p pairs under the tilt by c.
        times: [m] the t.

    Returns:
        [p, m] cumulants.
    """
    result = np.empty((len(tilted.loss), len(times)), dtype=np.complex128)
    rows = max(1, _CHUNK // tilted.loss.shape[1])
    for start in range(0, len(tilted.loss), rows):
        block = slice(start, start + rows)
        result[block] = _log_characteristic(tilted.loss[block], tilted.mass[block], times)
    return result + tilted.log_mgf[:, None] + 1j * tilted.mean[:, None] * times


def _log_characteristic(loss: Vector, mass: Vector, times: Vector) -> ComplexVector:
    """[p, m] logarithms of the characteristic functions of [p, n] losses with these masses."""
    result = np.empty((len(loss), len(times)), dtype=np.complex128)
    columns = max(1, _CHUNK // loss.size)
    for start in range(0, len(times), columns):
        half = (times[start : start + columns, None] / 2) * loss[:, None, :]
        sine, cosine = np.sin(half), np.cos(half)
        # e^{ia} − 1 = −2·sin²(a/2) + 2i·sin(a/2)·cos(a/2) keeps all digits of a small a.
        real = -2 * ((sine * sine) @ mass[:, :, None])[:, :, 0]
        imaginary = 2 * ((sine * cosine) @ mass[:, :, None])[:, :, 0]
        square = (1 + real) ** 2 + imaginary**2
        near = np.log1p(np.maximum(real * (2 + real) + imaginary**2, -0.5))
        modulus = np.where(square > 0.5, near, np.log(np.maximum(square, 1e-300))) / 2
        angle = np.arctan2(imaginary, 1 + real)
        result[:, start : start + columns] = modulus + 1j * angle
    return result


def power(direction: Direction, c: float) -> float:
    """The power s of the likelihood ratio that belongs to w = c."""
    return 1.0 + c if direction is Direction.REMOVE else -c


def log_absent(q: Vector) -> Vector:
    """log(1 − q), −∞ for q = 1."""
    return np.log1p(-q, out=np.full(q.shape, -np.inf), where=q < 1)


def log_likelihood(y: Vector, q: Vector, z: Vector) -> tuple[Vector, Vector]:
    """log r and log A at y, the second accurate relative to its size for tiny q and for q = 1."""
    log_r = (y - 0.5 / z) / z
    rise = q * np.expm1(np.minimum(log_r, 500.0))
    near = np.log1p(np.maximum(rise, -0.5))
    far = np.logaddexp(log_absent(q), np.log(q) + log_r)
    return log_r, np.where((rise > -0.5) & (log_r < 500.0), near, far)


@cache
def _rule(nodes: int) -> tuple[Vector, Vector]:
    """Gauss–Legendre nodes and weights on [−1, 1]."""
    place, weight = np.polynomial.legendre.leggauss(nodes)
    return place, weight
