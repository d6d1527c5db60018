"""ε and δ of composed rounds by an integral along a contour: no lattice, no convolution.

Eight digits cost some thousand exponentials for each different (q, z), however often it occurs. The
method refuses where rare, huge losses make the integrand fall too slowly: z·√(Σq²) < 0.1 and mostly
Σq < 1, and for a few rounds with q < 1.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from fedpriv.accounting.contour.integral import Contour, contour, cumulant_bound
from fedpriv.accounting.contour.plan import (
    LEAST_LOG_DELTA,
    Plan,
    Setting,
    plan_at_delta,
    plan_at_epsilon,
)
from fedpriv.accounting.contour.privacy_loss import log_absent
from fedpriv.accounting.round_counts import Direction, Rounds, arrays, check_rounds, summary
from fedpriv.errors import InvalidValueError, UnsupportedEventError

_WIDEST = 1e-3
"""Largest width of an interval, relative to its upper end."""
_NARROW = 1e-7
"""Width at which no second contour is tried."""
_SHIFTS = (1.0, 0.85)
"""Where contours cross the real axis, relative to the plan; many rounds have the first alone."""
_NEGLIGIBLE = 1e-9
"""A width of ε that never matters; of δ, the least δ that is told from 0."""
_LEAST_NOISE, _MOST_NOISE, _LEAST_PROBABILITY = 0.1, 1e6, 1e-12
_STEPS = [0.0] + [1.01 * 1.5**k for k in range(40)]
"""Distances at which a bound is looked for, relative to the estimated one."""
_PLANNED = 48
"""Groups of rounds that are enough for a plan."""
_BEYOND = 1e150
"""A loss instead of ∞."""

Ends = tuple[float, float]


class ContourUnsuitableError(UnsupportedEventError):
    """The contour does not tell ε or δ to a thousandth; the composition by FFT may."""


def epsilon_interval(rounds: Rounds, delta: float) -> Ends:
    """Interval around the least ε for which the rounds are (ε, δ)-DP, in the worse direction.

    Returns:
        (low, up) with 0 ≤ low ≤ true ε ≤ up; they differ by at most a thousandth of up, or 1e-9,
        and usually by less than 1e-8 of it.

    Raises:
        InvalidValueError: a value is out of range.
        ContourUnsuitableError: the interval would be wider, or z is outside [0.1, 1e6], q below
            1e-12 or δ below 1e-100.
    """
    if not 0.0 < delta < 1.0:
        raise InvalidValueError(f"delta is {delta}; it must be in (0, 1)")
    log_delta = math.log(delta)
    if log_delta < LEAST_LOG_DELTA:
        raise ContourUnsuitableError(f"delta is {delta}; the contour needs at least 1e-100")

    def ceiling(setting: Setting, plan: Plan) -> float:
        """The largest loss or a Rényi bound (Canonne, Kamath & Steinke 2020, Proposition 12)."""
        allowed = _allowed(log_delta, setting.rounds * math.exp(plan.log_tail))
        renyi = (cumulant_bound(setting, plan) - allowed - conversion(plan.c)) / plan.c
        return max(0.0, min(renyi, _largest_loss(setting)))

    return _worse(
        rounds,
        lambda setting: plan_at_delta(setting, log_delta),
        lambda found: _epsilon_ends(found, log_delta),
        ceiling,
        _NEGLIGIBLE,
    )


def delta_interval(rounds: Rounds, epsilon: float) -> Ends:
    """Interval around the least δ for which the rounds are (ε, δ)-DP, in the worse direction.

    Returns:
        (low, up) with 0 ≤ low ≤ true δ ≤ up ≤ 1; they differ by at most a thousandth of up, or
        1e-90, and usually by 1e-8 of it. Upper ends are at least 1e-100.

    Raises:
        As `epsilon_interval`.
    """
    if not 0.0 <= epsilon < math.inf:
        raise InvalidValueError(f"epsilon is {epsilon}; it must be finite and not negative")

    def ceiling(setting: Setting, plan: Plan) -> float:
        if epsilon >= _largest_loss(setting):
            return 0.0
        exponent = cumulant_bound(setting, plan) - plan.c * epsilon - conversion(plan.c)
        dropped = setting.rounds * math.exp(plan.log_tail)
        return min(1.0, math.exp(min(exponent, 0.0)) + dropped)

    def ends(found: Contour) -> Ends:
        below, above = found.bounds(epsilon)
        scale = found.log_scale(epsilon)
        low = math.exp(min(math.log(below) + scale, 0.0)) if below > 0.0 else 0.0
        up = math.exp(min(math.log(above) + scale, 0.0)) if above > 0.0 else 1.0
        return low, min(max(up + found.dropped, math.exp(LEAST_LOG_DELTA)), 1.0)

    return _worse(rounds, lambda setting: plan_at_epsilon(setting, epsilon), ends, ceiling, 1e-90)


def conversion(c: float) -> float:
    """g(c) in δ ≤ exp(K(c) − cε − g(c)): the largest of (1 − e^{−u})·e^{−cu} is e^{−g}."""
    return math.log1p(c) + c * math.log1p(1 / c)


def _worse(
    rounds: Rounds,
    plan_of: Callable[[Setting], Plan],
    ends_of: Callable[[Contour], Ends],
    ceiling: Callable[[Setting, Plan], float],
    negligible: float,
) -> Ends:
    """The answer in the worse direction; the second is worked out if its ceiling is too high."""
    check_rounds(rounds)
    if not rounds:
        return 0.0, 0.0
    q, z, counts = arrays(rounds)
    if z.min() < _LEAST_NOISE or z.max() > _MOST_NOISE or q.min() < _LEAST_PROBABILITY:
        raise ContourUnsuitableError("the contour needs z from 0.1 to 1e6 and q of at least 1e-12")
    few = arrays(summary(rounds, _PLANNED))
    low = up = 0.0
    for direction in Direction:
        setting = Setting(q, z, counts, direction)
        plan = plan_of(Setting(*few, direction))
        most = ceiling(setting, plan) if direction is Direction.ADD else math.inf
        if most <= low:
            continue
        below, above = 0.0, most
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
    epsilon = _crossing(found, log_delta)
    value, slope = found.value(epsilon)
    below, above = found.bounds(epsilon)
    if not (value > 0.0 and slope > 0.0):
        return 0.0, math.inf
    allowed = _allowed(log_delta, found.dropped)

    def small(at: float) -> bool:
        bound = found.bounds(at)[1]
        return bound > 0.0 and math.log(bound) + found.log_scale(at) <= allowed

    def large(at: float) -> bool:
        bound = found.bounds(at)[0]
        return bound > 0.0 and math.log(bound) + found.log_scale(at) >= log_delta

    least = 1e-13 * (epsilon + value / slope)
    ups = (epsilon + step * ((above - value) / slope + least) for step in _STEPS)
    up = next((at for at in ups if small(at)), math.inf)
    if not below > 0.0:
        return 0.0, up
    lows = (epsilon - step * ((value - below) / slope + least) for step in _STEPS)
    return max(next((at for at in lows if at <= 0.0 or large(at)), 0.0), 0.0), up


def _crossing(found: Contour, log_delta: float) -> float:
    """About the ε ≥ 0 with that δ, by Newton's method for log δ."""
    epsilon = found.plan.epsilon
    for _ in range(50):
        value, slope = found.value(epsilon)
        if not (value > 0.0 and slope > 0.0):
            break
        excess = math.log(value) + found.log_scale(epsilon) - log_delta
        before, epsilon = epsilon, max(epsilon + excess * value / slope, 0.0)
        if abs(epsilon - before) <= 1e-13 * (epsilon + value / slope):
            break
    return epsilon


def _allowed(log_delta: float, dropped: float) -> float:
    """log(δ − dropped)."""
    share = dropped * math.exp(-log_delta)
    return log_delta + math.log1p(-share) if share < 1.0 else -math.inf


def _largest_loss(setting: Setting) -> float:
    """What the loss of all rounds surely stays below, rounded up."""
    if setting.direction is Direction.REMOVE:
        return math.inf
    loss = np.minimum(-log_absent(setting.q), _BEYOND)
    return setting.sum(loss) * (1 + 1e-12)
