"""The privacy loss of one round: its cumulant generating function, and bounds on its error.

One round with sampling probability q and noise multiplier z on up to k examples of each user is
dominated by a pair of P = Σ_j Bin(k, q)(j)·N(j, z²) and Q = N(0, z²), with k = 1 for users
(`pld` has the proofs). With x = z·y its likelihood ratio is A(y) = Σ_j Bin(k, q)(j)·r_j(y),
r_j(y) = exp(jy/z − j²/(2z²)). If a user is replaced, Q is the mirror image of P, with the ratio
A(−y) to N(0, z²). For y ~ N(0, 1),

    E[e^{wL}] = E[A(y)^a·A(−y)^b],   (a, b) = (1 + w, 0) when the user is removed,
    (a, b) = (−w, 0) when it is added,   (a, b) = (1 + w, −w) when it is replaced.

The expectation is taken over a window of y: losses outside it are too rare to matter for δ, but may
be large enough to spoil the cumulant. Inside it, Gauss–Legendre quadrature keeps all digits. Arrays
with a row for each setting (q, z) have p rows, and arrays with a column for each node n columns.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import eval_legendre, expm1, log1p, ndtr, ndtri_exp

from fedpriv.accounting.round_counts import Direction, Vector

ComplexVector = NDArray[np.complex128]

EPS, TINY = (float(x) for x in (np.finfo(np.float64).eps, np.finfo(np.float64).tiny))
LARGEST_ANGLE = 2.4  # keeps θ below π, where A may vanish
HEIGHTS = (0.2, 0.5, 1.2, 2.4, 4.8)  # of ellipses in the imaginary direction
_CUT = 50.0  # densities below e^−50 of the largest are left out
_SURVEY = 96  # nodes per setting, enough for plans
_CHUNK = 1 << 15  # numbers of a temporary array, which fit into the cache
_POWERS = 16  # largest number of factors of one e^{itL}, twice; more would add up roundings
_NODES = 128  # nodes of one matrix product: too few for any BLAS library to start threads
_TAPER = 16
_SHARE = 0.75  # of the best shift of a path: nearly as good for small t, better for rare losses
_TRUSTED = 0.9  # share of a decay that counts; the rest covers the error of its quadrature
_INTERVALS = 96  # parts of a window; a density's peak is bounded in each


class View(NamedTuple):
    """The kind of pairs, and the neighbour that the mechanism ran on."""

    direction: Direction = Direction.REMOVE
    examples: int = 1  # k
    replaced: bool = False  # then both directions agree, and z is relative to one clipping norm

    def powers(self, c: float) -> tuple[float, ...]:
        """Return a for w = c, and b if a user is replaced."""
        if self.replaced:
            return 1.0 + c, -c
        return (1.0 + c,) if self.direction is Direction.REMOVE else (-c,)

    @property
    def signs(self) -> tuple[int, ...]:
        """The loss is the sum of these times log A(y) and log A(−y)."""
        return (1, -1) if self.replaced else (int(self.direction),)


class Side(NamedTuple):
    """log A, at y or at −y, of p settings and n nodes."""

    log_ratio: Vector  # [p, n]
    shares: Vector  # [k, p, n] probabilities given y that j = 1, …, k examples took part

    @property
    def present(self) -> Vector:
        """[p, n] probability that the user took part given y; it increases with y."""
        return np.asarray(self.shares.sum(axis=0))

    @property
    def moments(self) -> tuple[Vector, Vector]:
        """Mean and variance of j given y, [p, n] each."""
        mean = sum(j * share for j, share in enumerate(self.shares, 1))
        square = sum(j * j * share for j, share in enumerate(self.shares, 1))
        return np.asarray(mean), np.maximum(square - mean**2, 0.0)


@dataclass(frozen=True)
class Losses:
    """The privacy loss of one round of each of p settings, at n nodes in a window."""

    view: View
    q: Vector  # [p, 1]
    z: Vector  # [p, 1]
    low: Vector  # [p, 1] ends of the window
    high: Vector
    place: Vector  # [n] the nodes, from −1 at the lower end to 1 at the upper end
    y: Vector  # [p, n] the nodes
    weight: Vector  # [p, n] probabilities of the nodes under Q
    log_weight: Vector
    sides: tuple[Side, ...]  # at y, and at −y if a user is replaced

    @property
    def beyond_cut(self) -> Vector:
        """[p] bounds on the tilted mass that `support` leaves out."""
        return np.asarray(np.exp(1.0 - _CUT) * (_CUT + self.high - self.low)[:, 0])


@dataclass(frozen=True)
class DirectedRounds:
    """Rounds of p different settings (q, z), in one direction."""

    q: Vector  # [p]
    z: Vector  # [p]
    counts: Vector  # [p] number of rounds of each setting
    view: View
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
        return RoundSettings(tuple(self.q.tolist()), tuple(self.z.tolist()), self.view)


class RoundSettings(NamedTuple):
    """The p different settings of rounds, without counts."""

    q: tuple[float, ...]
    z: tuple[float, ...]
    view: View

    def survey(self, log_tail: float) -> Losses:
        """Return losses at a few nodes, enough for plans."""
        q, z = np.array(self.q), np.array(self.z)
        return losses(q, z, window(q, z, log_tail, self.view), self.view, _SURVEY)


@dataclass(frozen=True)
class Tilted:
    """Losses under the tilt e^{cL}/E[e^{cL}]."""

    losses: Losses
    powers: tuple[float, ...]  # of the likelihood ratios for w = c
    log_mgf: Vector  # [p] log E[e^{cL}]
    mass: Vector  # [p, n] probabilities under the tilt

    @cached_property
    def mean(self) -> Vector:
        """Mean of the loss, [p]."""
        return np.asarray((self.mass * _combined(self.losses, self.losses.view.signs)).sum(axis=1))

    @cached_property
    def loss(self) -> Vector:
        """The loss minus its mean, [p, n]."""
        return _combined(self.losses, self.losses.view.signs) - self.mean[:, None]

    @cached_property
    def variance(self) -> Vector:
        """Variance of the loss, [p]."""
        return np.asarray((self.mass * self.loss**2).sum(axis=1))

    @cached_property
    def rounding(self) -> Vector:
        """Bound on the relative error of sums over the nodes, per unit of max(|a|, |b|): [p]."""
        # The error of a sum of n products is at most n + 2 roundings of its absolute terms, which
        # are at most |s|·|log A|·max(1, A^s) for E[A^s − 1]. A loss has some 60 roundings (k times
        # as many, of all terms, for examples), a product of 32 factors e^{iL} has 5 for each, and a
        # weight has (60 + n/32)/(1 − x²), since 1 − x² cancels near the ends.
        n, square, k = self.mass.shape[1], 1 - self.losses.place**2, self.losses.view.examples
        size = sum(np.abs(side.log_ratio) for side in self.losses.sides)
        if k > 1:
            size = k * (size + np.minimum(self.losses.sides[0].present, self.losses.q))
        terms = (self.mass + self.losses.weight) * size
        return np.asarray(EPS * (terms @ (n + 160 + (64 + n / 32) / square)))


def losses(q: Vector, z: Vector, ends: tuple[Vector, Vector], view: View, nodes: int) -> Losses:
    """Return the loss of one round of settings [p] between the ends [p, 1] of a window."""
    q, z = q[:, None], z[:, None]
    low, high = ends
    place, log_rule = gauss_legendre(nodes)
    y = low + (high - low) / 2 * (1 + place)
    log_weight = np.log((high - low) / np.sqrt(8 * np.pi)) + log_rule - y * y / 2
    sides = _sides(view, q, z, y)
    return Losses(view, q, z, low, high, place, y, np.exp(log_weight), log_weight, sides)


def _sides(view: View, q: Vector, z: Vector, y: Vector) -> tuple[Side, ...]:
    """Return log A at outputs y [p, n], and at −y if a user is replaced, for q and z [p, 1]."""
    return tuple(_side(view.examples, q, z, x) for x in ((y, -y) if view.replaced else (y,)))


def _side(k: int, q: Vector, z: Vector, y: Vector) -> Side:
    if k == 1:
        log_r = (y - 0.5 / z) / z
        log_ratio = log_likelihood_ratio(log_r, q)
        return Side(log_ratio, np.exp(np.log(q) + log_r - log_ratio)[None])
    weights, j = np.array(_binomial(k, q)), np.arange(k + 1.0)[:, None, None]
    with np.errstate(divide="ignore"):  # of probabilities that are 0, for q = 1
        exponents = np.log(weights) + j * (y - j / z / 2) / z
    top = exponents.max(axis=0)
    terms = np.exp(exponents - top)
    rise = terms[1:].sum(axis=0) * np.exp(np.minimum(top, 1.0)) - weights[1:].sum(axis=0)
    near, total = np.log1p(np.clip(rise, -0.5, 0.5)), terms.sum(axis=0)
    log_ratio = np.where(np.abs(rise) < 0.5, near, top + np.log(total))
    return Side(log_ratio, terms[1:] / total)


def _binomial(k: int, q: Vector) -> list[Vector]:
    """Return Bin(k, q)(j) for j = 0, …, k."""
    return [math.comb(k, j) * q**j * (1.0 - q) ** (k - j) for j in range(k + 1)]


def _combined(losses: Losses, factors: Iterable[float]) -> Vector:
    """Return the sum of the logarithms of both sides times these factors: [p, n]."""
    terms = (x * side.log_ratio for x, side in zip(factors, losses.sides, strict=True))
    return np.asarray(sum(terms))


def tilt(untilted: Losses, c: float) -> Tilted:
    """Return losses tilted by e^{cL}, c > 0."""
    powers = untilted.view.powers(c)
    change = _combined(untilted, powers)
    exponent = untilted.log_weight + change
    top = exponent.max(axis=1, keepdims=True)
    mass = np.exp(exponent - top)
    log_mgf = top[:, 0] + np.log(mass.sum(axis=1))
    if (log_mgf < 0.5).any():
        # E[e^change − 1] keeps all digits of a tiny q.
        rise = untilted.weight * np.expm1(np.minimum(change, 30.0))
        rise = np.where(change > 30.0, np.exp(np.minimum(exponent, 1.0)), rise).sum(axis=1)
        rise -= (ndtr(untilted.low) + ndtr(-untilted.high))[:, 0]
        log_mgf = np.where(log_mgf < 0.5, np.log1p(np.maximum(rise, -0.5)), log_mgf)
    mass *= np.exp(top - log_mgf[:, None])
    return Tilted(untilted, powers, log_mgf, mass)


def log_likelihood_ratio(log_r: Vector, q: Vector) -> Vector:
    """Return log(1 − q + q·r), with a small relative error for tiny q and for q = 1."""
    rise = q * np.expm1(np.minimum(log_r, 500.0))
    log_ratio = np.log1p(np.maximum(rise, -0.5))
    is_far = (rise <= -0.5) | (log_r >= 500.0)
    if not is_far.any():
        return log_ratio
    return np.where(is_far, np.logaddexp(log1p(-q), np.log(q) + log_r), log_ratio)


def window(q: Vector, z: Vector, log_tail: float, view: View) -> tuple[Vector, Vector]:
    """Return ends [p, 1] of intervals that contain y except with probability e^log_tail."""
    # A third of the tail each for y below without the user, above without, and above with it.
    log_third = log_tail - np.log(3.0)
    absent = np.full((len(q), 1), -ndtri_exp(log_third))
    if view.direction is Direction.ADD:
        return -absent, absent
    high, k = absent, view.examples
    for j, weight in enumerate(_binomial(k, q)[1:], 1):
        with np.errstate(divide="ignore"):
            log_present = np.minimum(log_third - np.log(k * weight), -np.log(2.0))
        high = np.maximum(high, (j / z - ndtri_exp(log_present))[:, None])
    return -absent, high


def support(survey: Losses, tilts: tuple[float, ...]) -> tuple[Vector, Vector]:
    """Return ends [p, 1] of the part of a window where a tilted density is ≥ e^−50 of its peak.

    log f = −y²/2 + a·log A(y) + b·log A(−y), and log A is convex with (log A)'' ≤ k²/(4z²). So f is
    log-concave when a user is added; else (log f)'' ≥ −1 − c·k²/(4z²) bounds peaks between nodes.
    """
    is_inside, view = np.zeros(survey.y.shape, dtype=np.bool_), survey.view
    widest = np.diff(survey.y, axis=1).max(axis=1, keepdims=True)
    for c in tilts:
        cut = _CUT + (c / 32 * (view.examples * widest / survey.z) ** 2 if view.replaced else 0.0)
        exponent = _combined(survey, view.powers(c)) - survey.y**2 / 2
        is_inside |= exponent > exponent.max(axis=1, keepdims=True) - cut
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

    Their number n is even. Weights are 2/((1 − x²)·P′(x)²), which hardly depends on the last digit
    of x; those of SciPy lose up to nine digits near the ends. Newton's method finds the nodes from
    Tricomi's guess.
    """
    angle = np.pi * (np.arange(nodes // 2) + 0.75) / (nodes + 0.5)
    place = (1 - (nodes - 1) / (8 * nodes**3)) * np.cos(angle)  # the nodes > 0
    for _ in range(3):
        value = eval_legendre(nodes, place)
        slope = nodes * (place * value - eval_legendre(nodes - 1, place))  # (x² − 1)·P′
        place -= value * (place**2 - 1) / slope
    slope = nodes * (place * eval_legendre(nodes, place) - eval_legendre(nodes - 1, place))
    log_weight = np.log(2 * (1 - place**2) / slope**2)
    places = np.concatenate([-place, place[::-1]])
    return places, np.concatenate([log_weight, log_weight[::-1]])


def decay(tilted: Tilted, t: float) -> Vector:
    """Return b ≥ 0 with |φ(u)| ≤ e^−b for all u ≥ t, where φ(t) = E[e^{itL}] under the tilt: [p].

    Let f be the tilted density of y and F(y) = f(y)·e^{itL(y)}, analytic for |Im y| < πz/k. At
    y + id, with θ = d/z and the distribution of the number j of examples given y,

        log |F(y + id)/f(y)| = d²/2 + a·log |E[e^{ijθ}]| ∓ t·arg E[e^{ijθ}]

    with the like terms of b, at −y, if a user is replaced. By Cauchy's theorem
    |φ(t)| ≤ ∫ |F(y + i·d(y))|·√(1 + d'²) dy for any d that vanishes at the ends of the window. On a
    fixed path every factor e^{−u·arg} decreases with u. For small t the bound is
    1 − α·t²·E[L'²] + α²·t²·(…)/2 if d = α·t·L', where zL' is the mean of j, or the sum of those at
    y and −y. The integral is a sum over the nodes; its error is not proved, and a tenth of b is
    left for it.
    """
    losses, view = tilted.losses, tilted.losses.view
    z, moments = losses.z, [side.moments for side in losses.sides]
    mean = sum(m for m, _ in moments)
    spread = [v for _, v in moments]
    slope = (spread[0] - spread[1] if view.replaced else spread[0]) / z
    gain = (tilted.mass * mean**2).sum(axis=1, keepdims=True)
    cost = (
        slope**2 - sum(x * v for x, v in zip(tilted.powers, spread, strict=True)) * (mean / z) ** 2
    )
    cost = (tilted.mass * cost).sum(axis=1, keepdims=True)
    alpha = gain / np.maximum(gain + cost, gain / 4 + TINY)
    half = (losses.high - losses.low) / 2
    taper = 1 - losses.place**_TAPER
    taper_slope = -_TAPER * losses.place ** (_TAPER - 1) / half
    ideal = _SHARE * alpha * t * mean / z**2
    limit = 1 + ideal / (LARGEST_ANGLE / view.examples)
    angle = ideal / limit * taper
    bend = _SHARE * alpha * t * slope / z / limit**2 * taper + z * ideal / limit * taper_slope
    exponent = (z * angle) ** 2 / 2 + np.log1p(bend**2) / 2
    for x, side in zip(tilted.powers, losses.sides, strict=True):
        change, argument = turned(side.shares, angle)
        exponent += x * change - t * argument
    exponent = np.minimum(exponent, 600.0)
    rise = (tilted.mass * np.expm1(exponent)).sum(axis=1) + losses.beyond_cut
    whole = (tilted.mass * np.exp(exponent)).sum(axis=1) + losses.beyond_cut
    bound = np.where(rise > -0.5, np.log1p(np.maximum(rise, -0.5)), np.log(whole))
    return np.asarray(np.maximum(-_TRUSTED * bound, 0.0))


def turned(shares: Vector, angle: Vector) -> tuple[Vector, Vector]:
    """Return log |E[e^{ijθ}]|, and its argument in [0, π), for probabilities [k, …] of j ≥ 1."""
    fall, rise = np.zeros_like(angle + shares[0]), np.zeros_like(angle + shares[0])
    for j, share in enumerate(shares, 1):
        fall += 2 * share * np.sin(j * angle / 2) ** 2
        rise += share * np.sin(j * angle)
    modulus = np.log1p(np.maximum(fall * fall - 2 * fall + rise * rise, TINY - 1)) / 2
    return np.asarray(modulus), np.asarray(np.arctan2(rise, 1 - fall))


def log_errors(
    rounds: DirectedRounds, low: Vector, high: Vector, c: float, t: float, semiaxes: Vector
) -> tuple[Vector, Vector]:
    """Return log ρ of ellipses, and bounds on log(error of n nodes·ρ^{2n}) up to Im w = t: [k, p].

    Let F be the tilted density without the factor 1/E[A^s], times e^{itL}. Let |F| ≤ m on the
    ellipse around a window whose semiaxes add up to ρ·half, where half is half the window's width.
    Then the error of n Gauss–Legendre nodes is at most half·(64/15)·m·ρ^{2 − 2n}/(1 − ρ^{−2})
    (Trefethen 2013, Theorem 19.3).

    At u + id, let ψ = kd/z < π and p be the probability that the user took part. Then
    A(u + id)/A(u) = 1 − p + p·ρ', where ρ' is a mean of points e^{iχ}, 0 ≤ χ ≤ ψ. So its modulus is
    at most 1 and its argument at most that of 1 − p + p·e^{iχ} for some such χ, which increases
    with p, and with χ until cos χ = −p/(1 − p). A negative power needs a lower bound on the
    modulus: |1 − p + p·e^{iψ}| for p ≤ ½, as e^{iψ} is then the nearest of all ρ' to −(1 − p)/p,
    and cos(ψ/2) for all p. It decreases with p, and with ψ.
    """
    log_f, presents = _peaks(rounds, low, high, c)
    powers = rounds.view.powers(c)
    half = (high - low)[:, 0] / 2
    log_rho = np.arcsinh(semiaxes / half)
    error = semiaxes**2 / 2 + 2 * log_rho - np.log(-np.expm1(-2 * log_rho))
    error += np.log(half) + math.log(64 / 15)
    for i, semiaxis in enumerate(semiaxes):
        angle, exponent = (rounds.view.examples * semiaxis / rounds.z)[:, None], log_f
        for power, present in zip(powers, presents, strict=True):
            coin = np.minimum(present, 0.5)
            if t > 0.0:
                widest = np.arccos(-coin / (1 - coin))
                exponent = exponent + t * turned(present[None], np.minimum(angle, widest))[1]
            if power < 0.0:
                exponent = exponent + power * turned(coin[None], angle)[0]
        error[i] += exponent.max(axis=1)
    return log_rho, error


def _peaks(
    rounds: DirectedRounds, low: Vector, high: Vector, c: float
) -> tuple[Vector, list[Vector]]:
    """Return bounds on log f and each p of `log_errors` between neighbours of outputs: [p, i].

    (log f)'' ≥ −1 + Σ min(s, 0)·V(j)/z² over the powers s, with V(j) ≤ k²·p(1 − p) for p ≤ ½ and
    V(j) ≤ k²/4 otherwise, bounds log f between two outputs.
    """
    q, z, view = rounds.q[:, None], rounds.z[:, None], rounds.view
    half = (high - low) / 2
    overhang = np.hypot(half, np.minimum(HEIGHTS[-1], LARGEST_ANGLE * z / view.examples)) - half
    y = (low - overhang) + (high - low + 2 * overhang) * np.linspace(0.0, 1.0, _INTERVALS + 1)
    sides, powers = _sides(view, q, z, y), view.powers(c)
    log_f = -y * y / 2 - math.log(2 * math.pi) / 2
    bend, presents = np.ones_like(log_f[:, 1:]), []
    for power, side, end in zip(powers, sides, (slice(1, None), slice(-1)), strict=False):
        log_f = log_f + power * side.log_ratio
        presents.append(side.present[:, end])  # the end of the interval where p is larger
        coin = np.minimum(presents[-1], 0.5)
        bend -= min(power, 0.0) * (view.examples / z) ** 2 * coin * (1 - coin)
    spacing = y[:, 1:2] - y[:, :1]
    return np.maximum(log_f[:, 1:], log_f[:, :-1]) + bend * spacing**2 / 8, presents
