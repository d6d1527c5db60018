"""Where the contour should cross the real axis, and how far it should go.

Nothing here has to be exact: a poor plan makes the certified interval wider, never wrong.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr, ndtri_exp

from fedpriv.accounting.cumulant import Losses, losses, tilt
from fedpriv.accounting.loss import Direction
from fedpriv.accounting.panel import Panel
from fedpriv.accounting.shifted import decay
from fedpriv.accounting.windows import window

_SURVEY = 96
"""Nodes per pair that are enough to make plans."""
_MARGIN = 7.0
"""Standard deviations from the tilted mean to the end of a wide window."""
_LARGEST_LOG_TILT = 24.0
"""Saddles are looked for between e^−24 and e^24."""
LEAST_LOG_DELTA = math.log(1e-270)
"""A smaller δ is not told from 0."""
_FEW_TERMS = 32.0
"""No better window is looked for where the sum has fewer terms."""


@dataclass(frozen=True)
class Care:
    """How good a contour should be.

    Attributes:
        certainty: log of how much smaller than δ each error is that can be chosen.
        log_tail: log of the probability of one round to be outside its window; None to choose it.
    """

    certainty: float
    log_tail: float | None


EXACT = Care(math.log(1e9), None)
"""For rounds that are taken one by one."""


@dataclass(frozen=True)
class Plan:
    """Where to integrate.

    Attributes:
        care: how good it should be.
        direction: which neighbour the mechanism ran on.
        log_tail: log of the probability of one round to be outside its window.
        c: real part of the contour.
        further: tilt > c of the bound on δ(ε + P).
        period: P; the step is 2π/P.
        stop: largest imaginary part.
        epsilon: ε, and
        log_delta: log δ(ε), roughly.
    """

    care: Care
    direction: Direction
    log_tail: float
    c: float
    further: float
    period: float
    stop: float
    epsilon: float
    log_delta: float

    @property
    def terms(self) -> float:
        """Number of terms of the sum."""
        return self.stop * self.period / (2 * math.pi)


@dataclass(frozen=True)
class _Saddle:
    """The point where |e^{K(w) − wε}/(w(w + 1))| on the real axis is least.

    Attributes:
        c: the point.
        epsilon: ε.
        log_delta: the saddle-point approximation of log δ(ε).
    """

    c: float
    epsilon: float
    log_delta: float


def plan_at_delta(panel: Panel, log_delta: float, direction: Direction, care: Care = EXACT) -> Plan:
    """A plan for the ε that belongs to δ, or for ε = 0 where that is larger.

    Args:
        panel: the rounds, or a summary of them.
        log_delta: log δ < 0.
        direction: which neighbour the mechanism ran on.
        care: how good it should be.
    """

    def plan(log_tail: float) -> Plan:
        given = survey(panel, log_tail, direction)
        return _plan(panel, given, _at_delta(panel, given, log_delta), log_tail, care)

    return _cheapest(plan, panel.rounds, log_delta, care)


def epsilon_at_delta(panel: Panel, log_delta: float, direction: Direction, care: Care) -> float:
    """The ε of `plan_at_delta`, up to what its window changes."""
    wide, _ = _log_tails(panel.rounds, log_delta, care)
    return _at_delta(panel, survey(panel, wide, direction), log_delta).epsilon


def plan_at_epsilon(panel: Panel, epsilon: float, direction: Direction, care: Care = EXACT) -> Plan:
    """A plan for the δ that belongs to ε ≥ 0; the rest is as for `plan_at_delta`."""

    def excess(at: _Saddle) -> float:
        return epsilon - at.epsilon if at.log_delta > LEAST_LOG_DELTA else -1.0

    def plan(log_tail: float) -> Plan:
        given = survey(panel, log_tail, direction)
        at = _saddle(panel, given, excess)
        return _plan(panel, given, _Saddle(at.c, epsilon, log_delta), log_tail, care)

    log_delta = -1.0
    for _ in range(6):  # the window depends on δ, and δ hardly on the window
        wide, _ = _log_tails(panel.rounds, log_delta, care)
        guess = _saddle(panel, survey(panel, wide, direction), excess).log_delta
        before, log_delta = log_delta, min(max(guess, LEAST_LOG_DELTA), -1e-3)
        if abs(log_delta - before) < 1.0:
            break
    return _cheapest(plan, panel.rounds, log_delta, care)


def survey(panel: Panel, log_tail: float, direction: Direction) -> Losses:
    """Losses at nodes that are enough to make plans."""
    ends = window(panel.q, panel.z, log_tail, direction)
    return losses(panel.q, panel.z, ends, direction, _SURVEY)


def _log_tails(rounds: float, log_delta: float, care: Care) -> tuple[float, float]:
    """A wide and a narrow window.

    Outside the narrow one is a share e^−certainty of δ. The wide one has the tilted losses of a
    single round inside; but rare, huge losses may need the narrow one.
    """
    if care.log_tail is not None:
        return care.log_tail, care.log_tail
    narrow = log_delta - care.certainty - math.log(rounds)
    wide = float(log_ndtr(ndtri_exp(log_delta) - _MARGIN))
    return min(wide, narrow), narrow


def _cheapest(plan: Callable[[float], Plan], rounds: float, log_delta: float, care: Care) -> Plan:
    """The plan with the window that needs fewer terms."""
    wide, narrow = _log_tails(rounds, log_delta, care)
    first = plan(wide)
    if first.terms < _FEW_TERMS or narrow == wide:
        return first
    return min(first, plan(narrow), key=lambda p: p.terms)


def _saddle(panel: Panel, given: Losses, excess: Callable[[_Saddle], float]) -> _Saddle:
    """The saddle where `excess`, which falls with c, is 0."""

    @cache  # the search comes back to the ends of its brackets
    def at(log_c: float) -> _Saddle:
        c = math.exp(log_c)
        tilted = tilt(given, c)
        cumulant, mean = panel.sum(tilted.log_mgf), panel.sum(tilted.mean)
        epsilon = mean - 1 / c - 1 / (1 + c)
        curvature = max(panel.sum(tilted.variance), 0.0) + 1 / c**2 + 1 / (1 + c) ** 2
        log_peak = cumulant - c * epsilon - log_c - math.log1p(c)
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


def _at_delta(panel: Panel, given: Losses, log_delta: float) -> _Saddle:
    at = _saddle(panel, given, lambda s: s.log_delta - log_delta)
    if at.epsilon < 0:
        at = _saddle(panel, given, lambda s: -s.epsilon)
    return _Saddle(at.c, max(at.epsilon, 0.0), log_delta)


def _plan(panel: Panel, given: Losses, at: _Saddle, log_tail: float, care: Care) -> Plan:
    """Choose step and length of the contour through a saddle."""
    spread = math.sqrt(max(panel.sum(tilt(given, at.c).variance), 1e-200))
    tilts = [at.c + share / spread for share in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)]
    start = Plan(
        care=care,
        direction=given.direction,
        log_tail=log_tail,
        c=at.c,
        further=at.c,
        period=math.inf,
        stop=6.0 / spread,
        epsilon=at.epsilon,
        log_delta=at.log_delta,
    )
    plans = [_with_further(panel, given, start, further) for further in tilts]
    return _with_stop(panel, given, min(plans, key=lambda p: p.period))


def fitted(panel: Panel, given: Losses, plan: Plan) -> Plan:
    """The plan with step and length for these rounds, where it was made for a summary of them."""
    return _with_stop(panel, given, _with_further(panel, given, plan, plan.further))


def _with_further(panel: Panel, given: Losses, plan: Plan, further: float) -> Plan:
    """The plan with the step that makes the bounds on δ(ε ± P) small enough."""
    values = tilt(given, further).log_mgf
    excess = panel.cumulant_above(values) - further * plan.epsilon
    right = (excess - plan.log_delta + plan.care.certainty) / (further - plan.c)
    left = (plan.care.certainty - plan.log_delta) / plan.c
    return replace(plan, further=further, period=max(left, right))


def _with_stop(panel: Panel, given: Losses, plan: Plan) -> Plan:
    """The plan with a length, at least the present one, that leaves little of the integral."""
    tilted = tilt(given, plan.c)
    scale = panel.sum(tilted.log_mgf) - plan.c * plan.epsilon - plan.log_delta
    stop = plan.stop
    for _ in range(60):
        fall = panel.least(decay(tilted, stop))
        needed = scale - math.log(math.pi * stop) + plan.care.certainty
        if fall >= needed:
            return replace(plan, stop=stop)
        stop *= float(np.clip(math.sqrt(needed / max(fall, 1e-9)), 1.1, 1.4))
    return replace(plan, stop=math.inf)
