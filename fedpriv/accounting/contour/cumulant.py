"""The privacy loss of one round: its cumulant generating function, and bounds on its error.

One round with sampling probability q and noise multiplier z is dominated by the pair
P = (1 − q)·N(0, z²) + q·N(1, z²) and Q = N(0, z²) (Zhu, Dong & Wang 2022, Theorem 11). With x = z·y
its likelihood ratio is A(y) = 1 − q + q·r(y), r(y) = exp(y/z − 1/(2z²)) and, for y ~ N(0, 1),

    E[e^{wL}] = E[A(y)^s],   s = 1 + w when the user is removed,   s = −w when the user is added.

The expectation is taken over a window of y: losses outside it are too rare to matter for δ, but may
be large enough to spoil the cumulant. Inside it, Gauss–Legendre quadrature keeps all digits. Arrays
with a row for each setting (q, z) have p rows, and arrays with a column for each node n columns.
"""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import eval_legendre, expm1, log1p, ndtr, ndtri_exp

from fedpriv.accounting.round_counts import Direction, Vector

ComplexVector = NDArray[np.complex128]

EPS, TINY = (float(x) for x in (np.finfo(np.float64).eps, np.finfo(np.float64).tiny))
LARGEST_ANGLE = 2.4  # θ stays below π, where A may vanish
HEIGHTS = (0.2, 0.5, 1.2, 2.4, 4.8)  # of ellipses in the imaginary direction
_CUT = 50.0  # a density below e^−50 of the largest is left out
_SURVEY = 96  # nodes per setting, enough for plans
_CHUNK = 1 << 15  # numbers of a temporary array, which fit into the cache
_POWERS = 16  # largest number of factors of one e^{itL}, twice; more would add up roundings
_NODES = 128  # nodes of one matrix product: too few for any BLAS library to start threads
_TAPER = 16
_SHARE = 0.75  # of the best shift of a path: nearly as good for small t, better for rare losses
_TRUSTED = 0.9  # share of a decay that counts; the rest covers the error of its quadrature
_INTERVALS = 96  # of a window, in each of which a density's peak is bounded


@dataclass(frozen=True)
class Losses:
    """The privacy loss of one round of each of p settings, at n nodes in a window."""

    direction: Direction
    q: Vector  # [p, 1]
    z: Vector  # [p, 1]
    low: Vector  # [p, 1] ends of the window
    high: Vector
    place: Vector  # [n] the nodes, from −1 at the lower end to 1 at the upper end
    y: Vector  # [p, n] the nodes
    weight: Vector  # [p, n] probabilities of the nodes under Q
    log_weight: Vector
    log_ratio: Vector  # [p, n] log A, which is L or −L
    present: Vector  # [p, n] probability that the user took part given y
    absent: Vector  # [p, n] 1 minus that

    @property
    def beyond_cut(self) -> Vector:
        """[p] bounds on the tilted mass that `support` leaves out."""
        return np.asarray(np.exp(1.0 - _CUT) * (_CUT + self.high - self.low)[:, 0])


@dataclass(frozen=True)
class DirectedRounds:
    """Rounds of p different settings (q, z), seen from one direction."""

    q: Vector  # [p]
    z: Vector  # [p]
    counts: Vector  # [p] number of rounds of each setting
    direction: Direction
    certainty: float = math.log(1e9)  # log of the ratio of δ to each error that a plan controls

    @property
    def number(self) -> float:
        """Total number of rounds."""
        return float(self.counts.sum())

    def sum(self, values: Vector) -> float:
        """Return the sum over all rounds of values [p] for the settings."""
        return float(self.counts @ values)

    @cached_property
    def settings(self) -> "RoundSettings":
        """The settings without counts, as a key of caches."""
        return RoundSettings(tuple(self.q.tolist()), tuple(self.z.tolist()), self.direction)


class RoundSettings(NamedTuple):
    """The p different settings of rounds, without counts."""

    q: tuple[float, ...]
    z: tuple[float, ...]
    direction: Direction

    def survey(self, log_tail: float) -> Losses:
        """Return losses at a few nodes, enough for plans."""
        q, z = np.array(self.q), np.array(self.z)
        return losses(q, z, window(q, z, log_tail, self.direction), self.direction, _SURVEY)


@dataclass(frozen=True)
class Tilted:
    """Losses under the tilt e^{cL}/E[e^{cL}]."""

    losses: Losses
    order: float  # the power s of the likelihood ratio for w = c
    log_mgf: Vector  # [p] log E[e^{cL}]
    mass: Vector  # [p, n] probabilities under the tilt

    @cached_property
    def mean(self) -> Vector:
        """Mean of the loss, [p]."""
        return np.asarray(self.losses.direction * (self.mass * self.losses.log_ratio).sum(axis=1))

    @cached_property
    def loss(self) -> Vector:
        """The loss minus its mean, [p, n]."""
        return self.losses.direction * self.losses.log_ratio - self.mean[:, None]

    @cached_property
    def variance(self) -> Vector:
        """Variance of the loss, [p]."""
        return np.asarray((self.mass * self.loss**2).sum(axis=1))

    @cached_property
    def rounding(self) -> Vector:
        """Bound on the relative error of sums over the nodes, per unit of |s|: [p]."""
        # The error of a sum of n products is at most n + 2 roundings of its absolute terms, which
        # are at most |s|·|L|·max(1, A^s) for E[A^s − 1]. A loss has some 60 roundings, a product of
        # 32 factors e^{iL} has 5 for each, and a weight has (60 + n/32)/(1 − x²), since 1 − x²
        # cancels near the ends.
        n, square = self.mass.shape[1], 1 - self.losses.place**2
        terms = (self.mass + self.losses.weight) * np.abs(self.losses.log_ratio)
        return np.asarray(EPS * (terms @ (n + 160 + (64 + n / 32) / square)))


def losses(
    q: Vector, z: Vector, ends: tuple[Vector, Vector], direction: Direction, nodes: int
) -> Losses:
    """Return the loss of one round of settings [p] between the ends [p, 1] of a window."""
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


def tilt(untilted: Losses, c: float) -> Tilted:
    """Return losses tilted by e^{cL}, c > 0."""
    s = power(untilted.direction, c)
    change = s * untilted.log_ratio
    exponent = untilted.log_weight + change
    top = exponent.max(axis=1, keepdims=True)
    mass = np.exp(exponent - top)
    log_mgf = top[:, 0] + np.log(mass.sum(axis=1))
    if (log_mgf < 0.5).any():
        # E[A^s − 1] keeps all digits of a tiny q; A^s = e^change.
        rise = untilted.weight * np.expm1(np.minimum(change, 30.0))
        rise = np.where(change > 30.0, np.exp(np.minimum(exponent, 1.0)), rise).sum(axis=1)
        rise -= (ndtr(untilted.low) + ndtr(-untilted.high))[:, 0]
        log_mgf = np.where(log_mgf < 0.5, np.log1p(np.maximum(rise, -0.5)), log_mgf)
    mass *= np.exp(top - log_mgf[:, None])
    return Tilted(untilted, s, log_mgf, mass)


def power(direction: Direction, c: float) -> float:
    """Return the power s of the likelihood ratio for w = c."""
    return 1.0 + c if direction is Direction.REMOVE else -c


def log_absent(q: Vector) -> Vector:
    """Return log(1 − q), −∞ for q = 1."""
    return np.log1p(-q, out=np.full(q.shape, -np.inf), where=q < 1)


def log_likelihood_ratio(log_r: Vector, q: Vector) -> Vector:
    """Return log(1 − q + q·r), with a small relative error for tiny q and for q = 1."""
    rise = q * np.expm1(np.minimum(log_r, 500.0))
    log_ratio = np.log1p(np.maximum(rise, -0.5))
    far = (rise <= -0.5) | (log_r >= 500.0)
    if not far.any():
        return log_ratio
    return np.where(far, np.logaddexp(log_absent(q), np.log(q) + log_r), log_ratio)


def window(q: Vector, z: Vector, log_tail: float, direction: Direction) -> tuple[Vector, Vector]:
    """Return ends [p, 1] of intervals that contain y except with probability e^log_tail."""
    # A third of the tail each for y below without the user, above without, and above with it.
    log_third = log_tail - np.log(3.0)
    absent = np.full((len(q), 1), -ndtri_exp(log_third))
    if direction is Direction.ADD:
        return -absent, absent
    log_present = np.minimum(log_third - np.log(q), -np.log(2.0))
    return -absent, np.maximum(absent, (1 / z - ndtri_exp(log_present))[:, None])


def support(survey: Losses, tilts: tuple[float, ...]) -> tuple[Vector, Vector]:
    """Return ends [p, 1] of the part of a window where a tilted density is ≥ e^−50 of its peak.

    log f = −y²/2 + s·log A has (log f)'' ≥ −1 for s ≥ 0, so no peak hides between nodes; for s < 0
    it is concave.
    """
    is_inside = np.zeros(survey.y.shape, dtype=np.bool_)
    for c in tilts:
        exponent = power(survey.direction, c) * survey.log_ratio - survey.y**2 / 2
        is_inside |= exponent > exponent.max(axis=1, keepdims=True) - _CUT
    edges = np.concatenate([survey.low, survey.y, survey.high], axis=1)
    first = is_inside.argmax(axis=1)[:, None]
    last = edges.shape[1] - 1 - is_inside[:, ::-1].argmax(axis=1)[:, None]
    return np.take_along_axis(edges, first, 1), np.take_along_axis(edges, last, 1)


def log_mgf_along(tilted: Tilted, step: float, terms: int) -> ComplexVector:
    """Return log E[e^{wL}] of one round of each setting at w = c + i·step·j: [p, terms]."""
    result = np.empty((len(tilted.loss), terms), dtype=np.complex128)
    rows = max(1, _CHUNK // (_POWERS * tilted.loss.shape[1]))
    for start in range(0, len(tilted.loss), rows):
        block = slice(start, start + rows)
        for first in range(0, terms, _POWERS**2):
            last = min(first + _POWERS**2, terms)
            rise = _rise(tilted.loss[block], tilted.mass[block], step, first, last)
            result[block, first:last] = log1p(np.where(rise == -1.0, -1.0 + 1e-300j, rise))
    times = step * np.arange(terms)
    return result + tilted.log_mgf[:, None] + 1j * tilted.mean[:, None] * times


def _rise(loss: Vector, mass: Vector, step: float, first: int, last: int) -> ComplexVector:
    """Return characteristic functions − 1 of losses [p, n] with these masses: [p, last − first].

    Each e^{itL} is a product of two of some √(last − first) powers, so the sums are a matrix
    product. All are stored as e^{ia} − 1, which keeps all digits of a small a.
    """
    count = math.ceil(math.sqrt(last - first))
    small = _powers(np.zeros_like(loss), step * loss, count)
    big = _powers(step * first * loss, step * count * loss, math.ceil((last - first) / count))
    weighted = big * mass[:, None, :]
    sums = np.repeat(weighted.sum(axis=2)[:, :, None], small.shape[1], axis=2)
    for start in range(0, loss.shape[1], _NODES):
        nodes = slice(start, start + _NODES)
        sums += weighted[:, :, nodes] @ small[:, :, nodes].transpose(0, 2, 1)
    sums += (small * mass[:, None, :]).sum(axis=2)[:, None, :]
    return sums.reshape(len(loss), -1)[:, : last - first]


def _powers(start: Vector, angle: Vector, count: int) -> ComplexVector:
    """Return e^{i·(start + j·angle)} − 1 for j < count: [p, count, n]."""
    factor = expm1(1j * angle)
    result = np.empty((len(factor), count, factor.shape[1]), dtype=np.complex128)
    result[:, 0] = expm1(1j * start)
    for j in range(1, count):  # (1 + x)·(1 + f) − 1
        np.multiply(result[:, j - 1], factor, out=result[:, j])
        result[:, j] += result[:, j - 1]
        result[:, j] += factor
    return result


@cache
def gauss_legendre(nodes: int) -> tuple[Vector, Vector]:
    """Return Gauss–Legendre nodes on [−1, 1], increasing, and the logarithms of their weights: [n].

    Weights are 2/((1 − x²)·P′(x)²), which hardly depends on the last digit of x; those of SciPy
    lose up to nine digits near the ends. Newton's method finds the nodes from Tricomi's guess.
    """
    angle = np.pi * (np.arange((nodes + 1) // 2) + 0.75) / (nodes + 0.5)
    place = (1 - (nodes - 1) / (8 * nodes**3)) * np.cos(angle)  # the nodes ≥ 0
    for _ in range(3):
        value = eval_legendre(nodes, place)
        slope = nodes * (place * value - eval_legendre(nodes - 1, place))  # (x² − 1)·P′
        place -= value * (place**2 - 1) / slope
    if nodes % 2:
        place[-1] = 0.0
    slope = nodes * (place * eval_legendre(nodes, place) - eval_legendre(nodes - 1, place))
    log_weight = np.log(2 * (1 - place**2) / slope**2)
    others = slice(nodes % 2, None)  # the mirror images, without a node at 0
    places = np.concatenate([-place, place[::-1][others]])
    return places, np.concatenate([log_weight, log_weight[::-1][others]])


def decay(tilted: Tilted, t: float) -> Vector:
    """Return b ≥ 0 with |φ(u)| ≤ e^−b for all u ≥ t, where φ(t) = E[e^{itL}] under the tilt: [p].

    Let f be the tilted density of y and F(y) = f(y)·e^{itL(y)}, analytic for |Im y| < πz. At
    y + id, with θ = d/z and the probability p(y) that the user took part,

        log |F(y + id)/f(y)| = d²/2 + s·log |1 − p + p·e^{iθ}| ∓ t·arg(1 − p + p·e^{iθ}),

    and by Cauchy's theorem |φ(t)| ≤ ∫ |F(y + i·d(y))|·√(1 + d'²) dy for any d that vanishes at the
    ends of the window. On a fixed path every factor e^{−u·arg} decreases with u. For small t the
    bound is 1 − α·t²·E[p²]/z² + α²·t²·(…)/2 if d = α·t·p/z. The integral is a sum over the nodes;
    its error is not proved, and a tenth of b is left for it.
    """
    losses = tilted.losses
    p, z = losses.present, losses.z
    slope = p * losses.absent / z
    gain = (tilted.mass * p**2).sum(axis=1, keepdims=True)
    cost = slope**2 - tilted.order * slope / z * p**2
    cost = (tilted.mass * cost).sum(axis=1, keepdims=True)
    alpha = gain / np.maximum(gain + cost, gain / 4 + TINY)
    half = (losses.high - losses.low) / 2
    taper = 1 - losses.place**_TAPER
    taper_slope = -_TAPER * losses.place ** (_TAPER - 1) / half
    ideal = _SHARE * alpha * t * p / z**2
    limit = 1 + ideal / LARGEST_ANGLE
    angle = ideal / limit * taper
    bend = _SHARE * alpha * t * slope / z / limit**2 * taper + z * ideal / limit * taper_slope
    change, argument = turned(p, losses.absent, angle)
    exponent = (z * angle) ** 2 / 2 + tilted.order * change
    exponent += np.log1p(bend**2) / 2 - t * argument
    exponent = np.minimum(exponent, 600.0)
    rise = (tilted.mass * np.expm1(exponent)).sum(axis=1) + losses.beyond_cut
    whole = (tilted.mass * np.exp(exponent)).sum(axis=1) + losses.beyond_cut
    bound = np.where(rise > -0.5, np.log1p(np.maximum(rise, -0.5)), np.log(whole))
    return np.asarray(np.maximum(-_TRUSTED * bound, 0.0))


def turned(present: Vector, absent: Vector, angle: Vector) -> tuple[Vector, Vector]:
    """Return log |1 − p + p·e^{iθ}|, and arg(1 − p + p·e^{iθ}) in [0, π)."""
    sine, cosine = np.sin(angle / 2), np.cos(angle / 2)
    square = sine * sine
    modulus = np.log1p(-4 * present * absent * square) / 2
    argument = np.arctan2(2 * present * sine * cosine, 1 - 2 * present * square)
    return np.asarray(modulus), np.asarray(argument)


def log_errors(
    rounds: DirectedRounds, low: Vector, high: Vector, c: float, t: float, semiaxes: Vector
) -> tuple[Vector, Vector]:
    """Return log ρ of ellipses, and bounds on log(error of n nodes·ρ^{2n}) up to Im w = t: [k, p].

    Let F be the tilted density without the factor 1/E[A^s], times e^{itL}. Let |F| ≤ m on the
    ellipse around a window whose semiaxes add up to ρ·half, where half is half the window's width.
    Then the error of n Gauss–Legendre nodes is at most half·(64/15)·m·ρ^{2 − 2n}/(1 − ρ^{−2})
    (Trefethen 2013, Theorem 19.3).

    At u + id, with θ = d/z, |A(u + id)| ≤ A(u) and 0 ≤ arg A(u + id) ≤ arg(1 − p + p·e^{iθ}),
    which increases with p and so with u. For s < 0 a lower bound on |A(u + id)/A(u)| is needed,
    which decreases with p up to ½ and increases from there on.
    """
    log_f, present = _peaks(rounds, low, high, c)
    coin = np.minimum(present, 0.5)
    half = (high - low)[:, 0] / 2
    log_rho = np.arcsinh(semiaxes / half)
    error = semiaxes**2 / 2 + 2 * log_rho - np.log(-np.expm1(-2 * log_rho))
    error += np.log(half) + math.log(64 / 15)
    for k, semiaxis in enumerate(semiaxes):
        angle, exponent = (semiaxis / rounds.z)[:, None], log_f
        if t > 0.0:
            exponent = exponent + t * turned(present, 1 - present, angle)[1]
        if rounds.direction is Direction.ADD:
            exponent = exponent - c * turned(coin, 1 - coin, angle)[0]
        error[k] += exponent.max(axis=1)
    return log_rho, error


def _peaks(rounds: DirectedRounds, low: Vector, high: Vector, c: float) -> tuple[Vector, Vector]:
    """Return bounds on log f and p of `log_errors` between neighbours of k + 1 outputs: [p, k].

    (log f)'' ≥ −1 + min(s, 0)·p(1 − p)/z² bounds log f between two outputs.
    """
    q, z = rounds.q[:, None], rounds.z[:, None]
    half = (high - low) / 2
    overhang = np.hypot(half, np.minimum(HEIGHTS[-1], LARGEST_ANGLE * z)) - half
    y = (low - overhang) + (high - low + 2 * overhang) * np.linspace(0.0, 1.0, _INTERVALS + 1)
    log_r = (y - 0.5 / z) / z
    log_ratio = log_likelihood_ratio(log_r, q)
    log_f = power(rounds.direction, c) * log_ratio - y * y / 2 - math.log(2 * math.pi) / 2
    present = np.exp(np.log(q) + log_r - log_ratio)[:, 1:]
    bend: float | Vector = 1.0
    if rounds.direction is Direction.ADD:
        coin = np.minimum(present, 0.5)
        bend = 1.0 + c / z**2 * coin * (1 - coin)
    spacing = y[:, 1:2] - y[:, :1]
    return np.maximum(log_f[:, 1:], log_f[:, :-1]) + bend * spacing**2 / 8, present
