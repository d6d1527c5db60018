"""ε and δ of composed rounds by an integral along a contour: no lattice, no convolution.

Eight digits cost some thousand exponentials for each different (q, z), however often it occurs. The
method refuses where rare, huge losses make the integrand fall too slowly: z·√(Σq²) < 0.1 and mostly
Σq < 1, and for a few rounds with q < 1.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedpriv.accounting.contour.cumulant import log_absent
from fedpriv.accounting.contour.integral import Contour, contour, cumulant_bound
from fedpriv.accounting.contour.saddle_point import (
    LEAST_LOG_DELTA,
    ContourPlan,
    DirectedRounds,
    plan_at_delta,
    plan_at_epsilon,
)
from fedpriv.accounting.gaussian import Ends, check_delta, check_epsilon
from fedpriv.accounting.round_counts import Direction, Rounds, arrays, check_rounds, summary
from fedpriv.errors import UnsupportedEventError

_WIDEST = 1e-3  # largest width of an interval, relative to its upper end
_NARROW = 1e-7  # width at which no second contour is tried
_SHIFTS = (1.0, 0.85)  # where contours cross the real axis, relative to the plan
_LEAST_NOISE, _MOST_NOISE, _LEAST_PROBABILITY = 0.1, 1e6, 1e-12
# Distances at which a bound is looked for, relative to the estimated one.
_STEPS = [0.0] + [1.01 * 1.5**k for k in range(40)]
_PLANNED = 48  # groups of rounds that are enough for a plan; only so few get a second contour
_BEYOND = 1e150  # a loss instead of ∞


class ContourUnsuitableError(UnsupportedEventError):
    """The contour does not tell ε or δ to a thousandth; the composition by FFT may."""


def epsilon_interval(rounds: Rounds, delta: float) -> Ends:
    """Interval around the least ε for which the rounds are (ε, δ)-DP, in the worse direction.

    Its width is at most a thousandth of its upper end, or 1e-9, and usually below 1e-8 of it; where
    it would be wider, z is outside [0.1, 1e6], q below 1e-12 or δ below 1e-100, the contour raises
    ContourUnsuitableError.
    """
    check_delta(delta)
    log_delta = math.log(delta)
    if log_delta < LEAST_LOG_DELTA:
        raise ContourUnsuitableError(f"delta is {delta}; the contour needs at least 1e-100")

    def ceiling(setting: DirectedRounds, plan: ContourPlan) -> float:
        """The largest loss or a Rényi bound (Canonne, Kamath & Steinke 2020, Proposition 12)."""
        allowed = _log_allowed(log_delta, setting.number * math.exp(plan.log_tail))
        renyi = (cumulant_bound(setting, plan) - allowed - conversion(plan.c)) / plan.c
        return max(0.0, min(renyi, _largest_loss(setting)))

    def ends(found: Contour) -> Ends:
        return _epsilon_ends(found, log_delta)

    return _worse(rounds, lambda each: plan_at_delta(each, log_delta), ends, ceiling, 1e-9)


def delta_interval(rounds: Rounds, epsilon: float) -> Ends:
    """Interval around the least δ for which the rounds are (ε, δ)-DP, in the worse direction.

    As `epsilon_interval`, but for a width of 1e-90 that never matters. Upper ends are at least
    1e-100.
    """
    check_epsilon(epsilon)

    def ceiling(setting: DirectedRounds, plan: ContourPlan) -> float:
        if epsilon >= _largest_loss(setting):
            return 0.0
        exponent = cumulant_bound(setting, plan) - plan.c * epsilon - conversion(plan.c)
        dropped = setting.number * math.exp(plan.log_tail)
        return min(1.0, math.exp(min(exponent, 0.0)) + dropped)

    def ends(found: Contour) -> Ends:
        below, above = (_log(bound) for bound in found.bounds(epsilon))
        scale = found.log_scale(epsilon)
        up = math.exp(min(above + scale, 0.0)) if above > -math.inf else 1.0
        up = min(max(up + found.dropped, math.exp(LEAST_LOG_DELTA)), 1.0)
        return math.exp(min(below + scale, 0.0)), up

    return _worse(rounds, lambda each: plan_at_epsilon(each, epsilon), ends, ceiling, 1e-90)


def conversion(c: float) -> float:
    """g(c) in δ ≤ exp(K(c) − cε − g(c)): the largest of (1 − e^{−u})·e^{−cu} is e^{−g}."""
    return math.log1p(c) + c * math.log1p(1 / c)


def _worse(
    rounds: Rounds,
    plan_of: Callable[[DirectedRounds], ContourPlan],
    ends_of: Callable[[Contour], Ends],
    ceiling: Callable[[DirectedRounds, ContourPlan], float],
    negligible: float,
) -> Ends:
    """The ends in the worse direction; the second is computed only if its ceiling is too high."""
    check_rounds(rounds)
    if not rounds:
        return 0.0, 0.0
    q, z, counts = arrays(rounds)
    if z.min() < _LEAST_NOISE or z.max() > _MOST_NOISE or q.min() < _LEAST_PROBABILITY:
        raise ContourUnsuitableError("the contour needs z from 0.1 to 1e6 and q of at least 1e-12")
    few = arrays(summary(rounds, _PLANNED))
    low = up = 0.0
    for direction in Direction:
        setting = DirectedRounds(q, z, counts, direction)
        plan = plan_of(DirectedRounds(*few, direction))
        below = 0.0
        above = ceiling(setting, plan) if direction is Direction.ADD else math.inf
        if above <= low:
            continue
        for shift in _SHIFTS if len(q) <= _PLANNED else _SHIFTS[:1]:
            moved = replace(plan, c=shift * plan.c, period=plan.period / shift)
            found = contour(setting, moved)
            if found is None:
                break
            ends = ends_of(found)
            below, above = max(below, ends[0]), min(above, ends[1])
            if above - below <= _NARROW * above:
                break
        low, up = max(low, below), max(up, above)
    if not low <= up:
        raise AssertionError(f"the ends contradict each other: {low} > {up}")
    if up - low <= max(_WIDEST * up, negligible) and up < math.inf:
        return low, up
    raise ContourUnsuitableError(
        f"the contour only finds [{low:.6g}, {up:.6g}]; it needs a width of at most {_WIDEST:g} "
        "of the upper end"
    )


def _epsilon_ends(found: Contour, log_delta: float) -> Ends:
    """δ falls with ε, so the ends are where its bounds are surely below and above."""
    epsilon = found.plan.epsilon
    for _ in range(50):  # Newton's method for log δ
        value, slope = found.value(epsilon)
        if not (value > 0.0 and slope > 0.0):
            return 0.0, math.inf
        excess = math.log(value) + found.log_scale(epsilon) - log_delta
        before, epsilon = epsilon, max(epsilon + excess * value / slope, 0.0)
        if abs(epsilon - before) <= 1e-13 * (epsilon + value / slope):
            break
    below, above = found.bounds(epsilon)
    allowed = _log_allowed(log_delta, found.dropped)
    least = 1e-13 * (epsilon + value / slope)

    def log_bound(at: float, side: int) -> float:
        return _log(found.bounds(at)[side]) + found.log_scale(at)

    ups = (epsilon + step * ((above - value) / slope + least) for step in _STEPS)
    up = next((at for at in ups if -math.inf < log_bound(at, 1) <= allowed), math.inf)
    if not below > 0.0:
        return 0.0, up
    lows = (epsilon - step * ((value - below) / slope + least) for step in _STEPS)
    low = next((at for at in lows if at <= 0.0 or log_bound(at, 0) >= log_delta), 0.0)
    return max(low, 0.0), up


def _log(x: float) -> float:
    """log x, −∞ where x is not positive."""
    return math.log(x) if x > 0.0 else -math.inf


def _log_allowed(log_delta: float, dropped: float) -> float:
    """log(δ − dropped)."""
    share = dropped * math.exp(-log_delta)
    return log_delta + math.log1p(-share) if share < 1.0 else -math.inf


def _largest_loss(setting: DirectedRounds) -> float:
    """An upper bound on the loss of all rounds, rounded up."""
    if setting.direction is Direction.REMOVE:
        return math.inf
    loss = np.minimum(-log_absent(setting.q), _BEYOND)
    return setting.sum(loss) * (1 + 1e-12)
