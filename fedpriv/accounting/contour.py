"""ε and δ of composed rounds by an integral along a contour: no lattice, no convolution.

The privacy loss of all rounds together has a cumulant generating function that is the sum of those
of single rounds (`cumulant`); δ(ε) is an integral of it along a line in the complex plane
(`inversion`). So eight digits cost some thousand exponentials for each different pair (q, z),
however often it occurs, and few more than 3,000 pairs are taken one by one: beyond, rounds are
replaced by mixtures of 3,000 (`mixture`), which gives three digits at the cost of a glance at each.
It refuses where rare, huge losses make the integrand fall too slowly.

Every error is bounded and moves the ends of the interval outwards.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from fedpriv.accounting.answers import DeltaAt, EpsilonAt, Question
from fedpriv.accounting.equal import EqualRounds
from fedpriv.accounting.inversion import Contour, cumulant_bound, make_contours
from fedpriv.accounting.loss import Direction
from fedpriv.accounting.mixture import MIXED, mixture, outline
from fedpriv.accounting.panel import (
    MOST_DIRECT,
    Panel,
    RoundsArray,
    direct,
    merged,
    rounds_array,
)
from fedpriv.accounting.saddle import EXACT, LEAST_LOG_DELTA, Care, Plan
from fedpriv.errors import InvalidValueError, UnsupportedEventError

Rounds = Mapping[tuple[float, float], float]
"""Number of rounds by (sampling probability q, noise multiplier z), as `events.compose` returns."""

_WIDEST = 1e-3
"""Largest width of an interval, relative to its upper end, where all pairs are taken one by one."""
_NARROW = 1e-8
"""Width of an interval, relative to its upper end, up to which kept contours do."""
_LEAST_NOISE, _MOST_NOISE = 0.1, 1e6
_LEAST_PROBABILITY = 1e-12


class ContourUnsuitableError(UnsupportedEventError):
    """The contour does not tell ε or δ to a thousandth; the composition by FFT may."""


def epsilon_interval(rounds: Rounds | RoundsArray, delta: float) -> tuple[float, float]:
    """Interval that holds the least ε for which the rounds are (ε, δ)-DP.

    * No round: [0, 0]. A round without noise: [∞, ∞].
    * Both directions are computed; the worse one is reported.
    * Up to 3,000 different pairs, two contours agree in each direction, and the ends differ by at
      most a thousandth of the upper one, or by 1e-9; usually by less than 1e-8 of it.
    * With more they differ by at most 5e-3 of the upper one; usually by 1e-3 or less.

    Args:
        rounds: numbers of rounds by (q, z), q in (0, 1], z ≥ 0; as arrays where many differ.
        delta: δ in (0, 1).

    Returns:
        (low, up) with 0 ≤ low ≤ true ε ≤ up ≤ ∞.

    Raises:
        InvalidValueError: a value is out of range.
        ContourUnsuitableError: the interval would be wider. This happens where losses are rare and
            huge, z·√(Σq²) < 0.1 and mostly Σq < 1, and for a few rounds with q < 1; it is sure for
            z outside [0.1, 1e6], q < 1e-12 and δ < 1e-270.
    """
    if not 0.0 < delta < 1.0:
        raise InvalidValueError(f"delta is {delta}; it must be in (0, 1)")
    array = rounds if isinstance(rounds, RoundsArray) else rounds_array(rounds)
    if len(array.q) == 0:
        return 0.0, 0.0
    if (array.z == 0.0).any():
        return math.inf, math.inf
    if math.log(delta) < LEAST_LOG_DELTA:
        raise ContourUnsuitableError(f"delta is {delta}; the contour needs at least 1e-270")
    return _worse(array, EpsilonAt(math.log(delta)))


def delta_interval(rounds: Rounds | RoundsArray, epsilon: float) -> tuple[float, float]:
    """Interval that holds the least δ for which the rounds are (ε, δ)-DP.

    * No round: [0, 0]. A round without noise: [0, 1].
    * Both directions are computed; the worse one is reported.
    * Up to 3,000 different pairs, two contours agree in each direction, and the ends differ by at
      most a thousandth of the upper one, or by 1e-265; usually by 1e-8 of it.
    * With more they differ by at most 5e-2 of the upper one; usually by 1e-2 or less.

    Args:
        rounds: numbers of rounds by (q, z), q in (0, 1], z ≥ 0; as arrays where many differ.
        epsilon: ε ≥ 0, finite.

    Returns:
        (low, up) with 0 ≤ low ≤ true δ ≤ up ≤ 1.

    Raises:
        InvalidValueError: a value is out of range.
        ContourUnsuitableError: the interval would be wider; see `epsilon_interval`.
    """
    if not 0.0 <= epsilon < math.inf:
        raise InvalidValueError(f"epsilon is {epsilon}; it must be finite and not negative")
    array = rounds if isinstance(rounds, RoundsArray) else rounds_array(rounds)
    if len(array.q) == 0:
        return 0.0, 0.0
    if (array.z == 0.0).any():
        return 0.0, 1.0
    return _worse(array, DeltaAt(epsilon))


def _worse(rounds: RoundsArray, question: Question) -> tuple[float, float]:
    """The answer in the worse direction, or a refusal."""
    rounds = merged(rounds)
    widest = _WIDEST if len(rounds.q) <= MOST_DIRECT else question.widest_mixed
    low, up = _answer(rounds, question) if within(rounds) else (0.0, question.largest)
    if up - low <= max(widest * up, question.negligible) and up < math.inf:
        return float(low), float(up)
    raise ContourUnsuitableError(
        f"the contour only finds [{low:.6g}, {up:.6g}] for {rounds.counts.sum():.6g} rounds; it "
        f"needs a width of at most {widest:g} of the upper end"
    )


def within(rounds: RoundsArray) -> bool:
    """Whether all numbers are of a size that a contour can do."""
    z, q = rounds.z, rounds.q
    noise = z.min() >= _LEAST_NOISE and z.max() <= _MOST_NOISE
    return bool(noise and q.min() >= _LEAST_PROBABILITY)


def _answer(rounds: RoundsArray, question: Question) -> tuple[float, float]:
    """The answer in the worse direction, as good as can be."""
    if len(rounds.q) == 1:
        q, z, count = (float(of[0]) for of in (rounds.q, rounds.z, rounds.counts))
        low, up = _both(EqualRounds(q, z, count, question))
        if up - low <= _NARROW * up < math.inf:
            return low, up
    return _both(_Different(rounds, question))


class _Known(Protocol):
    """What bounds an answer for some rounds; as of `EqualRounds`."""

    @property
    def question(self) -> Question: ...

    def contours(self, direction: Direction) -> tuple[Contour, ...]: ...

    def ceiling(self, direction: Direction) -> float: ...


@dataclass(frozen=True)
class _Different:
    """Any rounds, and what is asked of them."""

    rounds: RoundsArray
    question: Question

    def contours(self, direction: Direction) -> tuple[Contour, ...]:
        return make_contours(self._panel, self._plan(direction))

    def ceiling(self, direction: Direction) -> float:
        plan = self._plan(direction)
        return self.question.ceiling(self._panel, plan, cumulant_bound(self._panel, plan))

    @cached_property
    def _panel(self) -> Panel:
        plan = self._plan(Direction.REMOVE)
        return direct(self.rounds) if self._few else mixture(self.rounds, plan.c)

    def _plan(self, direction: Direction) -> Plan:
        if direction not in self._plans:
            self._plans[direction] = self.question.plan(self._rough, direction, self._care)
        return self._plans[direction]

    @cached_property
    def _plans(self) -> dict[Direction, Plan]:
        return {}

    @cached_property
    def _rough(self) -> Panel:
        plan, care = self.question.plan, self._care
        return outline(self.rounds, lambda rough: plan(rough, Direction.REMOVE, care).c)

    @property
    def _few(self) -> bool:
        return len(self.rounds.q) <= MOST_DIRECT

    @property
    def _care(self) -> Care:
        return EXACT if self._few else MIXED


def _both(known: _Known) -> tuple[float, float]:
    """The answer in the worse direction."""
    low, up = _interval(known.contours(Direction.REMOVE), known.question)
    if up == known.question.largest:
        return low, up
    ceiling = known.ceiling(Direction.ADD)
    if ceiling <= low:
        return low, up
    ends = _interval(known.contours(Direction.ADD), known.question)
    return max(low, ends[0]), max(up, min(ends[1], ceiling))


def _interval(contours: Iterable[Contour], question: Question) -> tuple[float, float]:
    """The answer in one direction: it is in the interval of every contour."""
    low, up = 0.0, question.largest
    for contour in contours:
        ends = question.interval(contour)
        low, up = max(low, ends[0]), min(up, ends[1])
    if low > up:
        raise ContourUnsuitableError(f"two contours contradict each other: {low} > {up}")
    return low, up
