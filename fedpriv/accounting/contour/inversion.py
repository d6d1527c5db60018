"""ε and δ of composed rounds by an integral along a contour: no lattice, no convolution.

For the loss S of all rounds together, K(w) = log E[e^{wS}] and any c > 0,

    δ(ε) = E[(1 − e^{ε − S})₊] = (1/2π) ∫ e^{K(w) − wε}/(w(w + 1)) dt,   w = c + it,

(Alghamdi et al. 2023, Theorem 3.1). By Poisson's summation formula the trapezoidal rule with step
2π/P gives Σ_k e^{kcP}·δ(ε + kP) over all integers k. The terms k ≠ 0 are its error; they are
positive, and bounded here. A plan sets the real part, the step and the length of the contour, from
rough estimates: a poor plan makes the interval wider, never wrong.

Eight digits cost some thousand exponentials for each different (q, z), for any count. A run prices
the same few (q, z) again and again, each time with more rounds. So plans are on a grid, on which
many numbers of rounds share a contour, and the values of one round of each (q, z) along it are
cached. An answer depends only on rounds and δ, not on earlier calls.

The method refuses if rare, huge losses make the integrand decrease too slowly: for z·√(Σq²) < 0.1
with, mostly, Σq < 1, and for a few rounds with q < 1.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log1p, log_ndtr, ndtri_exp

from fedpriv.accounting.contour.cumulant import (
    EPS,
    HEIGHTS,
    LARGEST_ANGLE,
    ComplexVector,
    DirectedRounds,
    RoundSettings,
    Tilted,
    View,
    decay,
    log_errors,
    log_mgf_along,
    losses,
    support,
    tilt,
)
from fedpriv.accounting.round_counts import Direction, Ends, Rounds, Vector, arrays, grouped
from fedpriv.errors import UnsupportedEventError

_LEAST_LOG_DELTA = math.log(1e-100)  # of the smallest δ
_CERTAINTY_OF_MANY = math.log(1e5)  # instead of that of `DirectedRounds`
_MARGIN = 7.0  # standard deviations from the tilted mean to the end of a wide window
_GRID = 32  # plans have tilts c = e^{j/32}
_LARGEST_PLACE = 24 * _GRID  # saddle points are searched between e^−24 and e^24
_FINE, _END = 4, 2  # periods are powers of 2^{1/4}, and ends powers of √2
_ENDS = 60  # candidates for the end of a contour
_FEW_TERMS = 32.0  # a sum with fewer terms does not need a better window
_SIZES = (32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048, 3072)
# Limits on the multiplications of a contour; above them, a convolution is faster.
_WORK, _WORK_PER_SETTING, _MOST_WORK = 2e7, 1e6, 1e9
_PART = 128  # settings in one array
_WIDEST = 1e-3  # largest width of an interval, relative to its upper end
_NEARLY = 5e-3  # no other contour is tried if δ has at most this relative width at all of many ε
_LEAST_NOISE, _MOST_NOISE, _LEAST_PROBABILITY = 0.02, 1e6, 1e-12
_MOST_EPSILON = 1e200  # products of larger ones overflow
# Distances at which a bound is tried, relative to the estimated one.
_STEPS = [0.0] + [1.01 * 1.5**k for k in range(40)]
_PLANNED = 48  # groups of rounds in a plan
_KEPT = 4  # largest number of settings whose contours are cached
_BEYOND = 1e150  # a loss instead of ∞
_MOST_EXAMPLES = 24  # of a user, so that no probability of their number underflows

Views = Sequence[View]
USERS: Views = tuple(map(View, Direction))


class ContourUnsuitableError(UnsupportedEventError):
    """The contour cannot compute ε or δ to a thousandth; the composition by FFT may."""


@dataclass(frozen=True)
class ContourPlan:
    """Points w = c + i·2πj/P to integrate over, up to imaginary part `stop`."""

    certainty: float  # log of the ratio of δ to each error that the plan controls
    log_tail: float  # log of the probability that one round is outside its window
    c: float
    further: float  # tilt > c of the bound on δ(ε + P)
    period: float  # P
    stop: float
    epsilon: float  # approximate, like log δ(ε)
    log_delta: float

    @property
    def last(self) -> float:
        """Number of the last point."""
        return self.stop * self.period / (2 * math.pi)


class _Saddle(NamedTuple):
    """A c > 0, the ε for which it minimises |e^{K(c) − cε}/(c(c + 1))|, and log δ(ε)."""

    c: float
    epsilon: float
    log_delta: float


def plan_at_delta(rounds: DirectedRounds, log_delta: float) -> ContourPlan:
    """Return a plan for the ε ≥ 0 at δ."""

    def plan(log_tail: float) -> ContourPlan:
        saddle = _saddle(rounds, log_tail, lambda s: s.log_delta - log_delta)
        epsilon = saddle.epsilon + (saddle.log_delta - log_delta) / saddle.c  # to first order
        if epsilon < 0:
            saddle, epsilon = _saddle(rounds, log_tail, lambda s: -s.epsilon), 0.0
        return _plan(rounds, saddle.c, epsilon, log_delta, log_tail)

    return _cheapest(plan, rounds, log_delta)


def plan_at_epsilon(rounds: DirectedRounds, epsilon: float) -> ContourPlan:
    """Return a plan for the δ at ε ≥ 0."""

    def excess(saddle: _Saddle) -> float:
        return epsilon - saddle.epsilon if saddle.log_delta > _LEAST_LOG_DELTA else -1.0

    def plan(log_tail: float) -> ContourPlan:
        return _plan(rounds, _saddle(rounds, log_tail, excess).c, epsilon, log_delta, log_tail)

    log_delta = -1.0
    for _ in range(6):  # the window depends on δ, but δ hardly depends on the window
        wide, _ = _log_tails(rounds, log_delta)
        saddle = _saddle(rounds, wide, excess)
        guess = saddle.log_delta + (saddle.epsilon - epsilon) * saddle.c  # to first order
        previous, log_delta = log_delta, min(max(guess, _LEAST_LOG_DELTA), -1e-3)
        if abs(log_delta - previous) < 1.0:
            break
    return _cheapest(plan, rounds, log_delta)


def _log_tails(rounds: DirectedRounds, log_delta: float) -> tuple[float, float]:
    """Return log tails of a wide window, for most losses, and a narrow one, for rare huge ones."""
    narrow = log_delta - rounds.certainty - math.log(_power(rounds.number))
    return min(float(log_ndtr(ndtri_exp(log_delta) - _MARGIN)), narrow), narrow


def _power(rounds: float) -> float:
    """Return a number of rounds, rounded up to a power of two."""
    return 2.0 ** math.ceil(math.log2(rounds))


def _cheapest(
    plan: Callable[[float], ContourPlan], rounds: DirectedRounds, log_delta: float
) -> ContourPlan:
    """Return the plan with fewer terms, by the wide or the narrow window."""
    wide, narrow = _log_tails(rounds, log_delta)
    wide_plan = plan(wide)
    if wide_plan.last < _FEW_TERMS or narrow == wide:
        return wide_plan
    return min(wide_plan, plan(narrow), key=lambda p: p.last)


class _Moments(NamedTuple):
    """Moments of the tilted loss of one round of each setting: [p] each."""

    log_mgf: Vector
    mean: Vector
    variance: Vector


_survey = lru_cache(maxsize=16)(RoundSettings.survey)


@lru_cache(maxsize=2048)
def _moments(settings: RoundSettings, log_tail: float, c: float) -> _Moments:
    tilted = tilt(_survey(settings, log_tail), c)
    return _Moments(tilted.log_mgf, tilted.mean, tilted.variance)


@lru_cache(maxsize=2048)
def _decay(settings: RoundSettings, log_tail: float, c: float, t: float) -> Vector:
    return decay(tilt(_survey(settings, log_tail), c), t)


def _saddle(rounds: DirectedRounds, log_tail: float, excess: Callable[[_Saddle], float]) -> _Saddle:
    """Return the last saddle point of the grid with a positive `excess`, which decreases with c."""

    @cache  # the search returns to the ends of its brackets
    def at(place: int) -> _Saddle:
        c = math.exp(place / _GRID)
        moments = _moments(rounds.settings, log_tail, c)
        epsilon = rounds.sum(moments.mean) - 1 / c - 1 / (1 + c)
        curvature = max(rounds.sum(moments.variance), 0.0) + 1 / c**2 + 1 / (1 + c) ** 2
        log_peak = rounds.sum(moments.log_mgf) - c * epsilon - math.log(c) - math.log1p(c)
        return _Saddle(c, epsilon, log_peak - 0.5 * math.log(2 * math.pi * curvature))

    def gap(place: int) -> float:
        return excess(at(place))

    low, high = 0, 2 * _GRID
    while gap(high) > 0 and high < _LARGEST_PLACE:
        low, high = high, high + 2 * _GRID
    while gap(low) < 0 and low > -_LARGEST_PLACE:
        low, high = low - 2 * _GRID, low
    above = range(low + 1, high + 1)
    return at(low + bisect_left(above, x=True, key=lambda place: gap(place) <= 0))


def _plan(
    rounds: DirectedRounds, c: float, epsilon: float, log_delta: float, log_tail: float
) -> ContourPlan:
    place, certainty = (rounds.settings, log_tail), rounds.certainty
    moments = _moments(*place, c)
    spread = math.sqrt(max(rounds.sum(moments.variance), 1e-200))

    def period_of(further: float) -> float:
        excess = rounds.sum(_moments(*place, further).log_mgf) - further * epsilon
        right = (excess - log_delta + certainty) / (further - c)
        return max((certainty - log_delta) / c, right)

    tilts = [c + 2.0 ** (k - round(math.log2(spread))) for k in range(-2, 5)]
    period, further = min((period_of(tilt), tilt) for tilt in tilts)
    scale = rounds.sum(moments.log_mgf) - c * epsilon - log_delta
    least = math.floor(_END * math.log2(6.0 / spread))

    def suffices(end: int) -> bool:
        """Return whether the integral beyond this end, and so beyond later ones, is negligible."""
        stop = 2.0 ** ((least + end) / _END)
        decay_needed = scale - math.log(math.pi * stop) + certainty
        return rounds.sum(_decay(*place, c, stop)) >= decay_needed

    end = bisect_left(range(_ENDS), x=True, key=suffices)
    stop = 2.0 ** ((least + end) / _END) if end < _ENDS else math.inf
    period = 2.0 ** (math.ceil(_FINE * math.log2(period)) / _FINE)
    return ContourPlan(certainty, log_tail, c, further, period, stop, epsilon, log_delta)


@dataclass(frozen=True)
class Contour:
    """The values that bound δ at any ε; the bounds are tight near the ε of the plan."""

    plan: ContourPlan
    cumulant: ComplexVector  # [points] K
    error: Vector  # [points] bounds on the errors of e^K, relative to its modulus
    fall: float  # |e^{K(c + it)}| ≤ e^{K(c) − fall} for all t beyond the last point
    further: float  # an upper bound of K at the further tilt
    dropped: float  # bound on the part of δ from losses outside the windows

    def log_scale(self, epsilon: Vector) -> Vector:
        """Return K(c) − cε, whose exponential is the unit of the other results."""
        return np.asarray(self.cumulant[0].real - self.plan.c * epsilon)

    def value(self, epsilon: float) -> tuple[float, float]:
        """Return δ(ε) and −dδ(ε)/dε without their errors, in units of e^{K(c) − cε}."""
        w, terms = self._terms(np.array(epsilon))
        return float(terms.sum().real), float((w * terms).sum().real)

    def bounds(self, epsilon: Vector) -> tuple[Vector, Vector]:
        """Return lower and upper bounds of δ from losses inside the windows, in these units.

        The result has the shape of ε.
        """
        plan, scale = self.plan, self.log_scale(epsilon)
        w, terms = self._terms(epsilon)
        rounding = 32 + 4 * np.abs(self.cumulant.imag) + 4 * w.imag * np.max(epsilon)
        size = 4 * EPS * (1.0 + abs(self.cumulant[0].real) + plan.c * epsilon)
        value = terms.sum(axis=-1).real
        growth = np.expm1(np.minimum(self.error + EPS * rounding, 600.0))
        error = float(np.abs(self._at_zero[1]) @ growth) + size * np.abs(value)
        # Σ_{t > stop} |term|·2π/P ≤ sup|φ| ∫ dt/t², and both signs of t count.
        error += math.exp(-self.fall) / (math.pi * float(w[-1].imag))
        # k < 0: δ ≤ 1. k > 0: δ(u) ≤ e^{K(c') − c'u}. Both are geometric series.
        gap = plan.further - plan.c
        left = np.exp(np.minimum(-plan.c * plan.period - scale, 700.0))
        right = self.further - plan.further * epsilon - scale - gap * plan.period
        aliases = left / -math.expm1(-plan.c * plan.period)
        aliases += np.exp(np.minimum(right, 700.0)) / -math.expm1(-gap * plan.period)
        return value - error - aliases, value + error

    def delta_ends(self, epsilon: Vector) -> tuple[Vector, Vector]:
        """Return lower and upper bounds of δ of all losses, of the shape of ε."""
        below, above = (
            np.log(bound, out=np.full(bound.shape, -np.inf), where=bound > 0.0)
            for bound in map(np.asarray, self.bounds(epsilon))
        )
        scale = self.log_scale(epsilon)
        up = np.where(above > -np.inf, np.exp(np.minimum(above + scale, 0.0)), 1.0)
        up = np.clip(up + self.dropped, math.exp(_LEAST_LOG_DELTA), 1.0)
        return np.exp(np.minimum(below + scale, 0.0)), up

    def _terms(self, epsilon: Vector) -> tuple[ComplexVector, ComplexVector]:
        """Return the points w, and their terms of the sum over both signs of t: [ε, points]."""
        w, at_zero = self._at_zero
        return w, at_zero * np.exp(np.multiply.outer(-1j * epsilon, w.imag))

    @cached_property
    def _at_zero(self) -> tuple[ComplexVector, ComplexVector]:
        """`_terms` at ε = 0."""
        step = 2 * math.pi / self.plan.period
        times = step * np.arange(len(self.cumulant))
        w: ComplexVector = np.asarray(self.plan.c + 1j * times, np.complex128)
        terms: ComplexVector = np.exp(self.cumulant - self.cumulant[0].real)
        terms *= (step / math.pi) / (w * (w + 1))
        terms[0] /= 2
        return w, terms


def contour(rounds: DirectedRounds, plan: ContourPlan) -> Contour | None:
    """Return the sums over all rounds along a planned contour; None if they cost too much."""
    if not math.isfinite(plan.last):
        return None
    # A key of the cache without the values that change with the exact number of rounds.
    key = rounds.settings, replace(plan, epsilon=0.0), _power(rounds.number)
    parts = _kept_along(*key) if len(rounds.q) <= _KEPT else _along(*key)
    if parts is None:
        return None
    points = math.ceil(plan.last) + 1
    cumulant = np.zeros(points, dtype=np.complex128)
    error, fall, further = np.zeros(points), 0.0, 0.0
    for part in parts:
        counts = rounds.counts[part.at]
        cumulant += counts @ part.cumulant
        error += counts @ part.error + len(rounds.q) * EPS * (counts @ np.abs(part.cumulant))
        fall += float(counts @ part.fall)
        further += float(counts @ part.further)
    further += len(rounds.q) * EPS * abs(further)
    return Contour(plan, cumulant, error, fall, further, rounds.number * math.exp(plan.log_tail))


def cumulant_bound(rounds: DirectedRounds, plan: ContourPlan) -> float:
    """Return an upper bound of K(c) at the plan's c; ∞ if it costs too much."""
    sums = contour(rounds, replace(plan, stop=0.0))
    return float(sums.cumulant[0].real + sums.error[0]) if sums else math.inf


class _Along(NamedTuple):
    """The terms of a contour for one round of each of p settings."""

    at: NDArray[np.int64]  # [p] numbers of the settings
    cumulant: ComplexVector  # [p, points] log E[e^{wL}]
    # |Π(φ + e) − Πφ| ≤ Π(|φ| + |e|) − Π|φ| for the errors e of the characteristic functions φ.
    error: Vector  # [p, points] log(1 + |e/φ|)
    fall: Vector  # [p] `decay` at the last point
    further: Vector  # [p] upper bounds of the cumulants at the further tilt


def _along(settings: RoundSettings, plan: ContourPlan, rounds: float) -> Iterator[_Along] | None:
    """Return parts precise enough for this number of rounds; None if they are too expensive."""
    points, step = math.ceil(plan.last) + 1, 2 * math.pi / plan.period
    parts = _parts(settings, plan, step * (points - 1), rounds)
    limit = min(_WORK + _WORK_PER_SETTING * len(settings.q), _MOST_WORK)
    if parts is None or points * sum(float(part.nodes.sum()) for part in parts) > limit:
        return None

    def along(part: _Part) -> _Along:
        one, ends, nodes = part.one, (part.low, part.high), int(part.nodes.max())
        tilted = tilt(losses(one.q, one.z, ends, one.view, nodes), plan.c)
        values = log_mgf_along(tilted, step, points)
        error = part.relative_error(tilted, part.log_error)[:, None]
        error = error + tilted.rounding[:, None] * step * np.arange(points)
        error /= np.exp(np.maximum(values.real - tilted.log_mgf[:, None], -600.0))
        further = part.cumulant_bounds(tilt(tilted.losses, plan.further))
        return _Along(part.at, values, np.log1p(error), decay(tilted, step * (points - 1)), further)

    return map(along, parts)


@lru_cache(maxsize=64)
def _kept_along(
    settings: RoundSettings, plan: ContourPlan, rounds: float
) -> tuple[_Along, ...] | None:
    parts = _along(settings, plan, rounds)
    return None if parts is None else tuple(parts)


@dataclass(frozen=True)
class _Part:
    """Some of the settings, with enough nodes, and the bounds on their error of `log_errors`."""

    at: NDArray[np.int64]  # [p] numbers of the settings
    one: DirectedRounds  # one round of each
    low: Vector  # [p, 1] ends of the window
    high: Vector
    nodes: Vector  # [p] numbers of nodes
    log_rho: Vector  # [p]
    log_error: Vector  # [p] along the contour
    further_error: Vector  # the same at the further tilt, where Im w = 0

    def relative_error(self, tilted: Tilted, log_error: Vector) -> Vector:
        """Return bounds on errors of E[e^{wL}]/E[e^{cL}], with the rounding of E[e^{cL}]: [p]."""
        error = log_error - 2 * int(self.nodes.max()) * self.log_rho - tilted.log_mgf
        rounding = tilted.rounding * max(map(abs, tilted.powers))
        return 3 * np.exp(np.minimum(error, 600.0)) + tilted.losses.beyond_cut + rounding

    def cumulant_bounds(self, tilted: Tilted) -> Vector:
        """Return upper bounds of cumulants at the further tilt, with the rounding of a sum: [p]."""
        values = tilted.log_mgf + self.relative_error(tilted, self.further_error)
        return values + len(values) * EPS * np.abs(values)


def _parts(
    settings: RoundSettings, plan: ContourPlan, stop: float, rounds: float
) -> list[_Part] | None:
    """Return parts of settings with similar numbers of nodes, up to Im w = `stop`.

    None if a setting needs too many nodes.
    """
    survey, q, z = settings.survey(plan.log_tail), np.array(settings.q), np.array(settings.z)
    low, high = support(survey, (plan.c, plan.further))
    log_mgf = tilt(survey, plan.c).log_mgf
    semiaxes = np.minimum(np.array(HEIGHTS)[:, None], LARGEST_ANGLE * z / settings.view.examples)
    directed = DirectedRounds(q, z, np.ones_like(q), settings.view)
    log_rho, error = log_errors(directed, low, high, plan.c, stop, semiaxes)
    required = (error - log_mgf + plan.certainty + math.log(rounds)) / (2 * log_rho)
    best = required.argmin(axis=0), np.arange(len(low))
    if not required[best].max() < _SIZES[-1]:
        return None
    nodes = np.array(_SIZES, np.float64)[np.searchsorted(_SIZES, required[best], side="right")]
    _, further = log_errors(directed, low, high, plan.further, 0.0, semiaxes[best][None])
    order, parts = np.argsort(nodes, kind="stable"), []
    arrays = (low, high, nodes, log_rho[best], error[best], further[0])
    size = max(1, _PART // settings.view.examples)
    for start in range(0, len(order), size):
        at = order[start : start + size]
        one = DirectedRounds(q[at], z[at], np.ones(len(at)), settings.view)
        parts.append(_Part(at, one, *(array[at] for array in arrays)))
    return parts


def epsilon_interval(rounds: Rounds, delta: float, views: Views = USERS) -> Ends:
    """Return an interval of the least ε for which the rounds are (ε, δ)-DP, in all views.

    Its width is usually 1e-8 of the upper end, and at most the larger of 1e-3 of it and 1e-9.
    ContourUnsuitableError if it is wider, z outside [0.02, 1e6], q below 1e-12 or δ below 1e-100.
    """
    log_delta = math.log(delta)
    if log_delta < _LEAST_LOG_DELTA:
        raise ContourUnsuitableError(f"delta is {delta}; the contour needs at least 1e-100")

    def ceiling(setting: DirectedRounds, plan: ContourPlan, low: float) -> float:
        """Return the largest loss if it is at most `low`, else the lesser of it and a Rényi bound.

        The latter is that of Canonne et al. 2020, Proposition 12.
        """
        if (largest := _largest_loss(setting)) <= low:
            return largest
        remaining = delta - setting.number * math.exp(plan.log_tail)
        if remaining <= 0.0:
            return largest
        renyi = (cumulant_bound(setting, plan) - math.log(remaining) - conversion(plan.c)) / plan.c
        return max(0.0, min(renyi, largest))

    def plan_of(groups: DirectedRounds, up: float) -> ContourPlan:
        return plan_at_delta(groups, log_delta) if up == math.inf else plan_at_epsilon(groups, up)

    return _worse(rounds, views, plan_of, partial(_epsilon_ends, delta=delta), ceiling, 1e-9)


def delta_interval(rounds: Rounds, epsilon: float, views: Views = USERS) -> Ends:
    """Return an interval of the least δ for which the rounds are (ε, δ)-DP, in all views.

    Its width is at most the larger of 1e-3 of the upper end and 1e-90; the upper end is at least
    1e-100. ContourUnsuitableError if it is wider, or for values as in `epsilon_interval`.
    """
    if epsilon > _MOST_EPSILON:
        raise ContourUnsuitableError(f"the contour needs ε of at most {_MOST_EPSILON:g}")

    def ceiling(setting: DirectedRounds, plan: ContourPlan, _low: float) -> float:
        if epsilon >= _largest_loss(setting):
            return 0.0
        exponent = cumulant_bound(setting, plan) - plan.c * epsilon - conversion(plan.c)
        dropped = setting.number * math.exp(plan.log_tail)
        return min(1.0, math.exp(min(exponent, 0.0)) + dropped)

    def ends_of(sums: Contour) -> Ends:
        low, up = sums.delta_ends(np.array(epsilon))
        return float(low), float(up)

    def plan_of(groups: DirectedRounds, _up: float) -> ContourPlan:
        return plan_at_epsilon(groups, epsilon)

    return _worse(rounds, views, plan_of, ends_of, ceiling, 1e-90)


def deltas_along(
    rounds: Rounds, epsilons: Sequence[float], near: Sequence[float], views: Views = USERS
) -> Vector:
    """Return upper bounds of δ at ascending ε: [epsilons], tight for δ between those of `near`.

    Every contour bounds δ at all ε. The one for the first delta of `near` is precise enough for all
    of them; views share its plan, and get others if bounds stay wide. ContourUnsuitableError if a
    contour is too expensive, if all are wide, or as in `epsilon_interval`.
    """
    worse, at, shared = np.zeros(len(epsilons)), np.array(epsilons), list[ContourPlan]()
    for view in views:
        setting, groups = _directed(rounds, view)
        groups = replace(groups, certainty=groups.certainty + math.log(max(near) / min(near)))
        lows, ups = np.zeros(len(at)), np.where(at < _largest_loss(setting), 1.0, 0.0)
        own_plans = (plan_at_delta(groups, math.log(delta)) for delta in near)
        for plan in chain(shared, own_plans):
            shared = shared or [plan]
            if (sums := contour(setting, plan)) is None:
                raise ContourUnsuitableError("the contour is too expensive")
            below, above = sums.delta_ends(at)
            below = np.maximum.accumulate(below[::-1])[::-1]  # as δ decreases with ε
            lows, ups = np.maximum(lows, below), np.minimum(ups, above)
            is_wide = ups > np.maximum(np.maximum(worse, min(near)), lows + _NEARLY * ups)
            if not is_wide.any():
                break
        if is_wide[lows < max(near)].any():
            raise ContourUnsuitableError("every contour leaves a wide interval of some δ")
        worse = np.maximum(worse, ups)
    return worse


def conversion(c: float) -> float:
    """Return g(c) of δ ≤ exp(K(c) − cε − g(c)): the maximum of (1 − e^{−u})·e^{−cu} is e^{−g}."""
    return math.log1p(c) + c * math.log1p(1 / c)


def _worse(
    rounds: Rounds,
    views: Views,
    plan_of: Callable[[DirectedRounds, float], ContourPlan],
    ends_of: Callable[[Contour], Ends],
    ceiling: Callable[[DirectedRounds, ContourPlan, float], float],
    negligible: float,
) -> Ends:
    """Return the ends in the worst view.

    Since the second view may take long, it is computed only if its ceiling, which is given the
    first view's lower end, is above that end.
    """
    if not rounds:
        return 0.0, 0.0
    low = up = 0.0
    for view in views:
        setting, groups = _directed(rounds, view)
        below, above = 0.0, math.inf
        # A plan for groups, or for a wrong guess of ε, may not suit the rounds.
        for planned in (groups, setting):
            plan = plan_of(planned, above)
            if view.direction is Direction.ADD:
                above = min(above, ceiling(setting, plan, low))
            if above <= low:
                break
            if (sums := contour(setting, plan)) is not None:
                ends = ends_of(sums)
                below, above = max(below, ends[0]), min(above, ends[1])
            if above - below <= _WIDEST * above:
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


def _directed(rounds: Rounds, view: View) -> tuple[DirectedRounds, DirectedRounds]:
    """Return the rounds, and fewer ones for plans; ContourUnsuitableError if out of range."""
    q, z, counts = arrays(rounds)
    k, norms = view.examples, 2.0 if view.replaced else 1.0
    noise = z * norms / k
    in_range = _LEAST_NOISE <= noise.min() <= noise.max() <= _MOST_NOISE
    if not in_range or q.min() < _LEAST_PROBABILITY or k > _MOST_EXAMPLES:
        limits = f"z from 0.02·k to 1e6·k, q of at least 1e-12 and k of at most {_MOST_EXAMPLES}"
        raise ContourUnsuitableError(f"the contour needs {limits}")
    setting = groups = DirectedRounds(q, z * norms, counts, view)
    if len(q) > _PLANNED:
        q, z, counts = arrays(grouped(rounds, _PLANNED)[0])
        groups = DirectedRounds(q, z * norms, counts, view, _CERTAINTY_OF_MANY)
    return setting, groups


def _epsilon_ends(sums: Contour, delta: float) -> Ends:
    """Return ends of ε at which the bounds of δ, which decreases with ε, are above and below δ."""
    epsilon = sums.plan.epsilon
    left, right = -math.inf, math.inf
    for _ in range(50):  # Newton's method for log δ, which need not be concave, within a bracket
        value, slope = sums.value(epsilon)
        if not (value > 0.0 and slope > 0.0):
            return 0.0, math.inf
        scale = float(sums.log_scale(np.array(epsilon)))
        excess = math.log(value) + scale - math.log(delta)
        left, right = (epsilon, right) if excess > 0.0 else (left, epsilon)
        previous, epsilon = epsilon, max(epsilon + excess * value / slope, 0.0)
        if abs(epsilon - previous) <= 1e-13 * (epsilon + value / slope):
            break
        if not left < epsilon < right:
            epsilon = max((left + right) / 2, 0.0)
    below, above = map(float, sums.bounds(np.array(epsilon)))
    above += sums.dropped * math.exp(min(-scale, 700.0))
    least = 1e-13 * (epsilon + value / slope)

    def bound(at: float, side: int) -> float:
        return float(sums.delta_ends(np.array(at))[side])

    ups = (epsilon + step * ((above - value) / slope + least) for step in _STEPS)
    up = next((at for at in ups if bound(at, 1) < delta), math.inf)
    lows = (epsilon - step * ((value - below) / slope + least) for step in _STEPS)
    low = next((at for at in lows if at <= 0.0 or bound(at, 0) >= delta), 0.0)
    return max(low, 0.0), up


def _largest_loss(setting: DirectedRounds) -> float:
    """Return an upper bound of the loss of all rounds, rounded up."""
    if setting.view.direction is Direction.REMOVE:
        return math.inf
    loss = np.minimum(-log1p(-setting.q), _BEYOND)
    return setting.view.examples * setting.sum(loss) * (1 + 1e-12)
