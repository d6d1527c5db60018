"""Where the contour crosses the real axis, how fine its steps are and how far it goes.

Nothing here but `decay` has to be exact: a poor plan makes the interval wider, never wrong.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri_exp

from fedpriv.accounting.contour.cumulant import Losses, Tilted, losses, tilt, window
from fedpriv.accounting.round_counts import Direction, Vector

LEAST_LOG_DELTA = math.log(1e-100)  # a smaller δ is not told from this one
CERTAINTY = math.log(1e9)  # how much smaller than δ, in logarithms, each error is that is chosen
LARGEST_ANGLE = 2.4  # θ stays below π, where A may vanish
_SURVEY = 96  # nodes per setting that are enough to make plans
_MARGIN = 7.0  # standard deviations from the tilted mean to the end of a wide window
_LARGEST_LOG_TILT = 24.0  # saddle points are looked for between e^−24 and e^24
_FEW_TERMS = 32.0  # no better window is looked for where the sum has fewer terms
_TAPER = 16
_SHARE = 0.75  # a path this much nearer is nearly as good for small t, better for rare losses
_RELIED_ON = 0.9  # share of a decay that is relied on; the rest is for its own quadrature


@dataclass(frozen=True)
class DirectedRounds:
    """Rounds of p different settings (q, z), seen from one direction."""

    q: Vector  # [p]
    z: Vector  # [p]
    counts: Vector  # [p] number of rounds of each setting
    direction: Direction

    @property
    def number(self) -> float:
        """Number of all rounds."""
        return float(self.counts.sum())

    def sum(self, values: Vector) -> float:
        """Σ over all rounds of a function with these [p] values."""
        return float(self.counts @ values)

    def survey(self, log_tail: float) -> Losses:
        """Losses at nodes that are enough to make plans."""
        ends = window(self.q, self.z, log_tail, self.direction)
        return losses(self.q, self.z, ends, self.direction, _SURVEY)


@dataclass(frozen=True)
class ContourPlan:
    """Points w = c + i·2πj/P to integrate over, up to imaginary part `stop`."""

    log_tail: float  # log of the probability of one round to be outside its window
    c: float
    further: float  # tilt > c of the bound on δ(ε + P)
    period: float  # P
    stop: float
    epsilon: float  # ε and log δ(ε), roughly
    log_delta: float

    @property
    def last(self) -> float:
        """Number of the last point."""
        return self.stop * self.period / (2 * math.pi)


@dataclass(frozen=True)
class _Saddle:
    """The c > 0 where |e^{K(w) − wε}/(w(w + 1))| is least on the real axis, for its ε, and δ(ε)."""

    c: float
    epsilon: float
    log_delta: float


def plan_at_delta(rounds: DirectedRounds, log_delta: float) -> ContourPlan:
    """A plan for the ε that belongs to δ, or for ε = 0 where that is larger."""

    def plan(log_tail: float) -> ContourPlan:
        given = rounds.survey(log_tail)
        at = _saddle(rounds, given, lambda s: s.log_delta - log_delta)
        if at.epsilon < 0:
            at = _saddle(rounds, given, lambda s: -s.epsilon)
        return _plan(rounds, given, at.c, max(at.epsilon, 0.0), log_delta, log_tail)

    return _cheapest(plan, rounds.number, log_delta)


def plan_at_epsilon(rounds: DirectedRounds, epsilon: float) -> ContourPlan:
    """A plan for the δ that belongs to ε ≥ 0."""

    def excess(at: _Saddle) -> float:
        return epsilon - at.epsilon if at.log_delta > LEAST_LOG_DELTA else -1.0

    def plan(log_tail: float) -> ContourPlan:
        given = rounds.survey(log_tail)
        return _plan(rounds, given, _saddle(rounds, given, excess).c, epsilon, log_delta, log_tail)

    log_delta = -1.0
    for _ in range(6):  # the window depends on δ, and δ hardly on the window
        wide, _ = _log_tails(rounds.number, log_delta)
        guess = _saddle(rounds, rounds.survey(wide), excess).log_delta
        before, log_delta = log_delta, min(max(guess, LEAST_LOG_DELTA), -1e-3)
        if abs(log_delta - before) < 1.0:
            break
    return _cheapest(plan, rounds.number, log_delta)


def _log_tails(rounds: float, log_delta: float) -> tuple[float, float]:
    """A wide and a narrow window.

    Outside the narrow one is a share e^−certainty of δ. The wide one has the tilted losses of a
    single round inside; but rare, huge losses may need the narrow one.
    """
    narrow = log_delta - CERTAINTY - math.log(rounds)
    return min(float(log_ndtr(ndtri_exp(log_delta) - _MARGIN)), narrow), narrow


def _cheapest(plan: Callable[[float], ContourPlan], rounds: float, log_delta: float) -> ContourPlan:
    """The plan with the window that needs fewer terms."""
    wide, narrow = _log_tails(rounds, log_delta)
    first = plan(wide)
    if first.last < _FEW_TERMS or narrow == wide:
        return first
    return min(first, plan(narrow), key=lambda p: p.last)


def _saddle(rounds: DirectedRounds, given: Losses, excess: Callable[[_Saddle], float]) -> _Saddle:
    """The saddle point where `excess`, which falls with c, is 0."""

    @cache  # the search comes back to the ends of its brackets
    def at(log_c: float) -> _Saddle:
        c = math.exp(log_c)
        tilted = tilt(given, c)
        epsilon = rounds.sum(tilted.mean) - 1 / c - 1 / (1 + c)
        curvature = max(rounds.sum(tilted.variance), 0.0) + 1 / c**2 + 1 / (1 + c) ** 2
        log_peak = rounds.sum(tilted.log_mgf) - c * epsilon - log_c - math.log1p(c)
        return _Saddle(c, epsilon, log_peak - 0.5 * math.log(2 * math.pi * curvature))

    def gap(log_c: float) -> float:
        return excess(at(log_c))

    low, high = 0.0, 2.0
    while gap(high) > 0 and high < _LARGEST_LOG_TILT:
        low, high = high, high + 2
    while gap(low) < 0 and low > -_LARGEST_LOG_TILT:
        low, high = low - 2, low
    if gap(high) > 0:
        return at(high)
    return at(low) if gap(low) < 0 else at(float(brentq(gap, low, high, xtol=1e-2)))


def _plan(
    rounds: DirectedRounds,
    given: Losses,
    c: float,
    epsilon: float,
    log_delta: float,
    log_tail: float,
) -> ContourPlan:
    """The step and length of the contour through c."""
    tilted = tilt(given, c)
    spread = math.sqrt(max(rounds.sum(tilted.variance), 1e-200))

    def period_of(further: float) -> float:
        """The period that makes the bounds on δ(ε ± P) small enough."""
        excess = rounds.sum(tilt(given, further).log_mgf) - further * epsilon
        right = (excess - log_delta + CERTAINTY) / (further - c)
        return max((CERTAINTY - log_delta) / c, right)

    tilts = [c + share / spread for share in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)]
    period, further = min((period_of(each), each) for each in tilts)
    scale = rounds.sum(tilted.log_mgf) - c * epsilon - log_delta
    stop = 6.0 / spread
    for _ in range(60):  # until little of the integral is left
        fall = rounds.sum(decay(tilted, stop))
        needed = scale - math.log(math.pi * stop) + CERTAINTY
        if fall >= needed:
            break
        stop *= float(np.clip(math.sqrt(needed / max(fall, 1e-9)), 1.1, 1.4))
    else:
        stop = math.inf
    return ContourPlan(log_tail, c, further, period, stop, epsilon, log_delta)


def decay(tilted: Tilted, t: float) -> Vector:
    """[p] numbers b ≥ 0 with |φ(u)| ≤ e^−b for all u ≥ t, where φ(t) = E[e^{itL}] under the tilt.

    Let f be the tilted density of y and F(y) = f(y)·e^{itL(y)}, analytic for |Im y| < πz. At
    y + id, with θ = d/z and the probability p(y) that the user took part,

        log |F(y + id)/f(y)| = d²/2 + s·log |1 − p + p·e^{iθ}| ∓ t·arg(1 − p + p·e^{iθ}),

    and by Cauchy's theorem |φ(t)| ≤ ∫ |F(y + i·d(y))|·√(1 + d'²) dy for any d that vanishes at the
    ends of the window. On a fixed path every factor e^{−u·arg} falls as u grows. For small t the
    bound is 1 − α·t²·E[p²]/z² + α²·t²·(…)/2 when d = α·t·p/z.

    The integral itself is a sum over the nodes. Its integrand is as smooth as f, but how far the
    sum is off is not proved: a tenth of b is kept for that.
    """
    given = tilted.losses
    p, z = given.present, given.z
    slope = p * given.absent / z
    gain = (tilted.mass * p**2).sum(axis=1, keepdims=True)
    cost = slope**2 - tilted.order * slope / z * p**2
    cost = (tilted.mass * cost).sum(axis=1, keepdims=True)
    alpha = gain / np.maximum(gain + cost, gain / 4)
    half = (given.high - given.low) / 2
    inside = 1 - given.place**_TAPER
    narrowing = -_TAPER * given.place ** (_TAPER - 1) / half
    free = _SHARE * alpha * t * p / z**2
    limit = 1 + free / LARGEST_ANGLE
    angle = free / limit * inside
    bend = _SHARE * alpha * t * slope / z / limit**2 * inside + z * free / limit * narrowing
    change, argument = turned(p, given.absent, angle)
    exponent = (z * angle) ** 2 / 2 + tilted.order * change
    exponent += np.log1p(bend**2) / 2 - t * argument
    exponent = np.minimum(exponent, 600.0)
    rise = (tilted.mass * np.expm1(exponent)).sum(axis=1) + given.beyond_cut
    whole = (tilted.mass * np.exp(exponent)).sum(axis=1) + given.beyond_cut
    bound = np.where(rise > -0.5, np.log1p(np.maximum(rise, -0.5)), np.log(whole))
    return np.asarray(np.maximum(-_RELIED_ON * bound, 0.0))


def turned(present: Vector, absent: Vector, angle: Vector) -> tuple[Vector, Vector]:
    """log |1 − p + p·e^{iθ}| and arg(1 − p + p·e^{iθ}) in [0, π)."""
    sine, cosine = np.sin(angle / 2), np.cos(angle / 2)
    square = sine * sine
    modulus = np.log1p(-4 * present * absent * square) / 2
    argument = np.arctan2(2 * present * sine * cosine, 1 - 2 * present * square)
    return np.asarray(modulus), np.asarray(argument)
