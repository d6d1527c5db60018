"""The privacy loss of one round at nodes, and its cumulant generating function at complex points.

One round with sampling probability q and noise multiplier z is dominated by the pair
P = (1 − q)·N(0, z²) + q·N(1, z²) and Q = N(0, z²) (Zhu, Dong & Wang 2022, Theorem 11). With x = z·y
its likelihood ratio is A(y) = 1 − q + q·r(y), r(y) = exp(y/z − 1/(2z²)) and, for y ~ N(0, 1),

    E[e^{wL}] = E[A(y)^s],   s = 1 + w when the user is removed,   s = −w when the user is added.

The expectation is taken over a window of y: losses outside it are too rare to matter for δ, but
could be so large that they spoil the cumulant. Inside it, Gauss–Legendre quadrature keeps all
digits. Arrays with a row per setting (q, z) have p rows, arrays with a column per node n columns.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri_exp

from fedpriv.accounting.round_counts import Direction, Vector

ComplexVector = NDArray[np.complex128]
_Floats = NDArray[np.float64 | np.longdouble]

EPS = float(np.finfo(np.float64).eps)
CUT = 50.0  # a density below e^−50 of the largest is left out
_CHUNK = 1 << 15  # numbers of a temporary array: small enough to stay in the cache
_NODES = 128  # nodes of one matrix product: so few that no BLAS library starts threads for it
_POWERS = 16  # factors that one e^{itL} may be made of, twice; more would add up roundings


@dataclass(frozen=True)
class Losses:
    """The privacy loss of one round of each of p settings, at n nodes in a window."""

    direction: Direction
    q: Vector  # [p, 1]
    z: Vector  # [p, 1]
    low: Vector  # [p, 1] ends of the window
    high: Vector
    place: Vector  # [n] the nodes, from −1 at the low end to 1 at the high end
    y: Vector  # [p, n] the nodes
    weight: Vector  # [p, n] probabilities of the nodes under Q
    log_weight: Vector
    log_ratio: Vector  # [p, n] log A, which is L or −L
    present: Vector  # [p, n] probability that the user took part given y
    absent: Vector  # [p, n] 1 minus that

    @property
    def beyond_cut(self) -> Vector:
        """[p] bound on the tilted mass that `support` leaves out."""
        return np.asarray(np.exp(1.0 - CUT) * (CUT + self.high - self.low)[:, 0])


@dataclass(frozen=True)
class Tilted:
    """Losses under the tilt e^{cL}/E[e^{cL}]."""

    losses: Losses
    order: float  # the power s of the likelihood ratio that belongs to w = c
    log_mgf: Vector  # [p] log E[e^{cL}]
    mass: Vector  # [p, n] probabilities under the tilt

    @cached_property
    def mean(self) -> Vector:
        """[p] mean of the loss."""
        return np.asarray(self.losses.direction * (self.mass * self.losses.log_ratio).sum(axis=1))

    @cached_property
    def loss(self) -> Vector:
        """[p, n] loss minus its mean."""
        return self.losses.direction * self.losses.log_ratio - self.mean[:, None]

    @cached_property
    def variance(self) -> Vector:
        """[p] variance of the loss."""
        return np.asarray((self.mass * self.loss**2).sum(axis=1))

    @cached_property
    def rounding(self) -> Vector:
        """[p] bound on the relative error of sums over the nodes, per unit of |s|."""
        # A sum of n products is wrong by at most n + 2 roundings of its absolute terms, which are
        # at most |s|·|L|·max(1, A^s) for E[A^s − 1]; a loss is wrong by some 60 roundings, a
        # product of 32 factors e^{iL} by 5 for each, and a weight by 60/(1 − x²), as 1 − x²
        # cancels near the ends.
        terms = (self.mass + self.losses.weight) * np.abs(self.losses.log_ratio)
        place = self.losses.place
        return np.asarray(EPS * (terms @ (len(place) + 160 + 64 / (1 - place**2))))


def losses(
    q: Vector, z: Vector, ends: tuple[Vector, Vector], direction: Direction, nodes: int
) -> Losses:
    """The loss of one round of each of [p] settings between the [p, 1] ends of a window."""
    q, z = q[:, None], z[:, None]
    low, high = ends
    place, log_rule = gauss_legendre(nodes)
    y = low + (high - low) / 2 * (1 + place)
    log_weight = np.log((high - low) / np.sqrt(8 * np.pi)) + log_rule - y * y / 2
    log_r = (y - 0.5 / z) / z
    log_ratio = log_likelihood_ratio(log_r, q)
    present = np.exp(np.log(q) + log_r - log_ratio)
    absent = np.exp(log_absent(q) - log_ratio)
    weight = np.exp(log_weight)
    return Losses(
        direction, q, z, low, high, place, y, weight, log_weight, log_ratio, present, absent
    )


def tilt(given: Losses, c: float) -> Tilted:
    """Tilt losses by e^{cL}, c > 0."""
    s = power(given.direction, c)
    change = s * given.log_ratio
    exponent = given.log_weight + change
    top = exponent.max(axis=1, keepdims=True)
    mass = np.exp(exponent - top)
    log_mgf = top[:, 0] + np.log(mass.sum(axis=1))
    if (log_mgf < 0.5).any():
        # By E[A^s − 1], which keeps all digits of a tiny q; A^s = e^change.
        rise = given.weight * np.expm1(np.minimum(change, 30.0))
        rise = np.where(change > 30.0, np.exp(np.minimum(exponent, 1.0)), rise).sum(axis=1)
        rise -= (ndtr(given.low) + ndtr(-given.high))[:, 0]
        log_mgf = np.where(log_mgf < 0.5, np.log1p(np.maximum(rise, -0.5)), log_mgf)
    mass *= np.exp(top - log_mgf[:, None])
    return Tilted(given, s, log_mgf, mass)


def power(direction: Direction, c: float) -> float:
    """The power s of the likelihood ratio that belongs to w = c."""
    return 1.0 + c if direction is Direction.REMOVE else -c


def log_absent(q: Vector) -> Vector:
    """log(1 − q), −∞ for q = 1."""
    return np.log1p(-q, out=np.full(q.shape, -np.inf), where=q < 1)


def log_likelihood_ratio(log_r: Vector, q: Vector) -> Vector:
    """log(1 − q + q·r), accurate relative to its size for tiny q and for q = 1."""
    rise = q * np.expm1(np.minimum(log_r, 500.0))
    log_ratio = np.log1p(np.maximum(rise, -0.5))
    far = (rise <= -0.5) | (log_r >= 500.0)
    if not far.any():
        return log_ratio
    return np.where(far, np.logaddexp(log_absent(q), np.log(q) + log_r), log_ratio)


def window(q: Vector, z: Vector, log_tail: float, direction: Direction) -> tuple[Vector, Vector]:
    """[p, 1] ends of intervals of y that a round leaves with probability at most e^log_tail."""
    # A third of the tail each for absent and below, absent and above, present and above.
    log_third = log_tail - np.log(3.0)
    absent = np.full((len(q), 1), -ndtri_exp(log_third))
    if direction is Direction.ADD:
        return -absent, absent
    log_present = np.minimum(log_third - np.log(q), -np.log(2.0))
    return -absent, np.maximum(absent, (1 / z - ndtri_exp(log_present))[:, None])


def support(given: Losses, tilts: tuple[float, ...]) -> tuple[Vector, Vector]:
    """[p, 1] ends of the part of a window where a tilted density is at least e^−CUT of its peak.

    log f = −y²/2 + s·log A has (log f)'' ≥ −1 for s ≥ 0, so no peak hides between nodes; for s < 0
    it is concave.
    """
    kept = np.zeros(given.y.shape, dtype=np.bool_)
    for c in tilts:
        exponent = power(given.direction, c) * given.log_ratio - given.y**2 / 2
        kept |= exponent > exponent.max(axis=1, keepdims=True) - CUT
    edges = np.concatenate([given.low, given.y, given.high], axis=1)
    first = kept.argmax(axis=1)[:, None]
    last = edges.shape[1] - 1 - kept[:, ::-1].argmax(axis=1)[:, None]
    return np.take_along_axis(edges, first, 1), np.take_along_axis(edges, last, 1)


def log_mgf_along(tilted: Tilted, step: float, terms: int) -> ComplexVector:
    """[p, terms] log E[e^{wL}] of one round of each setting at w = c + i·step·j, j < terms."""
    result = np.empty((len(tilted.loss), terms), dtype=np.complex128)
    rows = max(1, _CHUNK // (_POWERS * tilted.loss.shape[1]))
    for start in range(0, len(tilted.loss), rows):
        block = slice(start, start + rows)
        for first in range(0, terms, _POWERS**2):
            last = min(first + _POWERS**2, terms)
            rise = _rise(tilted.loss[block], tilted.mass[block], step, first, last)
            result[block, first:last] = _log1p(rise)
    times = step * np.arange(terms)
    return result + tilted.log_mgf[:, None] + 1j * tilted.mean[:, None] * times


def _rise(loss: Vector, mass: Vector, step: float, first: int, last: int) -> ComplexVector:
    """[p, last − first] characteristic functions − 1 of [p, n] losses with these masses.

    Each e^{itL} is a product of two of some √(last − first) powers, which makes a matrix product.
    All are kept as e^{ia} − 1, which has all digits of a small a.
    """
    many = math.ceil(math.sqrt(last - first))
    small = _powers(np.zeros_like(loss), _turn(step * loss), many)
    big = _powers(_turn(step * first * loss), _turn(step * many * loss), -(-(last - first) // many))
    weighted = big * mass[:, None, :]
    both = np.repeat(weighted.sum(axis=2)[:, :, None], small.shape[1], axis=2)
    for start in range(0, loss.shape[1], _NODES):
        nodes = slice(start, start + _NODES)
        both += weighted[:, :, nodes] @ small[:, :, nodes].transpose(0, 2, 1)
    both += (small * mass[:, None, :]).sum(axis=2)[:, None, :]
    return both.reshape(len(loss), -1)[:, : last - first]


def _turn(angle: Vector) -> ComplexVector:
    """e^{ia} − 1 = −2·sin²(a/2) + 2i·sin(a/2)·cos(a/2)."""
    sine = np.sin(angle / 2)
    return np.asarray(-2 * sine * sine + 2j * sine * np.cos(angle / 2))


def _powers(start: Vector | ComplexVector, factor: ComplexVector, many: int) -> ComplexVector:
    """[p, many, n] (1 + start)·(1 + factor)^j − 1."""
    result = np.empty((len(factor), many, factor.shape[1]), dtype=np.complex128)
    result[:, 0] = start
    for j in range(1, many):
        np.multiply(result[:, j - 1], factor, out=result[:, j])
        result[:, j] += result[:, j - 1]
        result[:, j] += factor
    return result


def _log1p(rise: ComplexVector) -> ComplexVector:
    """log(1 + rise), accurate relative to its size, with an imaginary part in (−π, π]."""
    real, imaginary = rise.real, rise.imag
    change = real * (2 + real) + imaginary**2
    modulus = np.log1p(np.maximum(change, -0.5))
    far = change < -0.5
    if far.any():
        modulus[far] = np.log(np.maximum((1 + real[far]) ** 2 + imaginary[far] ** 2, 1e-300))
    return np.asarray(modulus / 2 + 1j * np.arctan2(imaginary, 1 + real))


@cache
def gauss_legendre(nodes: int) -> tuple[Vector, Vector]:
    """[n] Gauss–Legendre nodes on [−1, 1], increasing, and the logarithms of their weights.

    Roots in [0, 1) by Newton's method, in extended precision at the end; the others by symmetry.
    Weights are 2/((1 − x²)·P′(x)²). Routines in double precision lose up to nine digits of the
    weights near the ends.
    """
    half = nodes // 2
    place: _Floats = np.cos(math.pi * (np.arange(nodes - half, 0, -1) - 0.25) / (nodes + 0.5))
    for real in (np.float64, np.float64, np.longdouble):
        place, slope = _newton_step(place.astype(real), nodes)
    log_weight = np.log(2 / ((1 - place**2) * slope**2))
    return (
        np.concatenate([-place[::-1][:half], place]).astype(np.float64),
        np.concatenate([log_weight[::-1][:half], log_weight]).astype(np.float64),
    )


def _newton_step(x: _Floats, degree: int) -> tuple[_Floats, _Floats]:
    """Roots of the Legendre polynomial nearby, by a step of third order, and P′ there.

    The second derivative follows from Legendre's equation, (1 − x²)P″ = 2xP′ − n(n + 1)P.
    """
    before, value, product = np.ones_like(x), x.copy(), np.empty_like(x)
    k = np.arange(1, degree, dtype=x.dtype)
    for share in k / (k + 1):
        # P of degree k + 1 is x·P_k + (x·P_k − P_{k−1})·k/(k + 1), made where P_{k−1} was.
        np.multiply(x, value, out=product)
        np.subtract(product, before, out=before)
        before *= share
        before += product
        before, value = value, before
    slope = degree * (x * value - before) / (x**2 - 1)
    bend = (2 * x * slope - degree * (degree + 1) * value) / (1 - x**2)
    newton = value / slope
    step = -newton * (1 + newton * bend / (2 * slope))
    return x + step, slope + step * bend
