"""Whether one more round would pass a budget, in a millisecond or two.

Cumulants add up, so the sums over all rounds so far are kept along paths that are planned for the
moment when the budget is used up; the next round only adds its own. No round is kept.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache

from scipy.optimize import brentq

from fedpriv.accounting.answers import DeltaAt
from fedpriv.accounting.contour import Rounds, within
from fedpriv.accounting.grid import Path, grid
from fedpriv.accounting.inversion import Contour, path_of
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
from fedpriv.accounting.saddle import (
    EXACT,
    LEAST_LOG_DELTA,
    Care,
    Plan,
    epsilon_at_delta,
    fitted,
    plan_at_delta,
    plan_at_epsilon,
    survey,
)
from fedpriv.accounting.sums import Sums, sums
from fedpriv.errors import InvalidValueError

_MOST_SCALE = math.log(1e12)


@dataclass(frozen=True)
class Projection:
    """What is known of rounds in order to tell whether they pass a budget (ε, δ).

    * The verdict is True only if the rounds are (ε, δ)-DP, and False only if they are not. So it
      never contradicts an interval of `contour`; where that does not tell, neither does this.
    * It is None where the bounds do not tell: next to the budget, where the contour refuses, once a
      round without noise came, or when later rounds differ much from those that the plan was made
      from. In the last case, `rounds` > `planned`, a new one by `of` from all rounds tells again.
    * Adding equal rounds one by one or together, and in any order, comes to the same sums.
    * Its size does not depend on the number of rounds, nor does the time that a round takes.

    Attributes:
        epsilon: ε ≥ 0, finite.
        delta: δ in (0, 1).
        rounds: number of rounds so far.
        planned: number of rounds that the plan was made from.
        complete: whether all rounds are in the contours.
        contours: one for each direction, or none.
        last: the rounds that were added last, as (q, z, count), and what they add to each contour:
            most that follow are equal to them.
    """

    epsilon: float
    delta: float
    rounds: float
    planned: float
    complete: bool
    contours: tuple[Contour, ...]
    last: tuple[tuple[float, float, float], tuple[Sums | None, ...]] | None = field(
        default=None, compare=False, repr=False
    )

    @staticmethod
    def of(rounds: Rounds | RoundsArray, epsilon: float, delta: float) -> "Projection":
        """Plan for a budget, assuming that future rounds are like those so far.

        Args:
            rounds: all rounds so far by (q, z), q in (0, 1], z ≥ 0.
            epsilon: ε ≥ 0, finite.
            delta: δ in (0, 1).

        Raises:
            InvalidValueError: a value is out of range.
        """
        if not 0.0 <= epsilon < math.inf:
            raise InvalidValueError(f"epsilon is {epsilon}; it must be finite and not negative")
        if not 0.0 < delta < 1.0:
            raise InvalidValueError(f"delta is {delta}; it must be in (0, 1)")
        array = merged(rounds if isinstance(rounds, RoundsArray) else rounds_array(rounds))
        total = float(array.counts.sum())
        empty = Projection(epsilon, delta, total, total, total == 0.0, ())
        if total == 0.0 or not within(array) or math.log(delta) < LEAST_LOG_DELTA:
            return empty
        found = [_contour(array, epsilon, math.log(delta), direction) for direction in Direction]
        known = tuple(contour for contour in found if contour is not None)
        return replace(empty, complete=len(known) == len(found), contours=known)

    def plus(self, q: float, z: float, count: float = 1.0) -> "Projection":
        """With more rounds.

        Args:
            q: sampling probability in (0, 1].
            z: noise multiplier ≥ 0.
            count: number of rounds > 0.

        Raises:
            InvalidValueError: a value is out of range.
        """
        if self.rounds == 0.0:
            return Projection.of({(q, z): count}, self.epsilon, self.delta)
        last = self.last
        if last is None or last[0] != (q, z, count):
            more = rounds_array({(q, z): count})
            last = (q, z, count), tuple(_sums_on(contour.path, more) for contour in self.contours)
        added = last[1]
        return replace(
            self,
            last=last,
            rounds=self.rounds + count,
            complete=self.complete and None not in added,
            # One that misses a round still has a lower bound: rounds never lower δ.
            contours=tuple(
                contour if more is None else Contour(contour.path, contour.sums.plus(more))
                for contour, more in zip(self.contours, added, strict=True)
            ),
        )

    def verdict(self) -> bool | None:
        """True if the rounds surely are (ε, δ)-DP, False if they surely are not, else None."""
        ends = [DeltaAt(self.epsilon).interval(contour) for contour in self.contours]
        if any(low > self.delta for low, _ in ends):
            return False
        return True if self.complete and all(up <= self.delta for _, up in ends) else None


def _contour(
    rounds: RoundsArray, epsilon: float, log_delta: float, direction: Direction
) -> Contour | None:
    """The sums over rounds along a path for the moment when they use up the budget."""
    few = len(rounds.q) <= MOST_DIRECT

    def planned(rough: Panel) -> tuple[Plan, float]:
        return _plan(rough, epsilon, log_delta, direction, EXACT if few else MIXED)

    plan, scale = planned(outline(rounds, lambda rough: planned(rough)[0].c))
    panel = direct(rounds) if few else mixture(rounds, plan.c)
    then = panel.times(scale)
    if math.isfinite(plan.stop):
        plan = fitted(then, survey(then, plan.log_tail, direction), plan)
    if math.isinf(plan.terms):
        return None
    path = replace(path_of(plan, then.rounds), epsilon=epsilon)
    on = grid(panel, (path,))
    return Contour(path, sums(panel, path, on)) if on else None


def _plan(
    rough: Panel, epsilon: float, log_delta: float, direction: Direction, care: Care
) -> tuple[Plan, float]:
    """A plan for as many times the rounds as use up the budget, and that number; at least 1."""

    @cache
    def excess(log_scale: float) -> float:
        then = rough.times(math.exp(log_scale))
        return epsilon_at_delta(then, log_delta, direction, care) - epsilon

    if excess(0.0) > 0.0:
        return plan_at_epsilon(rough, epsilon, direction, care), 1.0
    low, high = 0.0, 2.0
    while excess(high) <= 0.0 and high < _MOST_SCALE:
        low, high = high, high + 4.0
    if excess(high) > 0.0:
        high = float(brentq(excess, low, high, xtol=0.02))
    scale = math.exp(high)
    return plan_at_delta(rough.times(scale), log_delta, direction, care), scale


def _sums_on(path: Path, more: RoundsArray) -> Sums | None:
    """The sums over more rounds along a path; None where they need too many nodes."""
    if not within(more):
        return None
    panel = direct(more)
    on = grid(panel, (path,))
    return sums(panel, path, on) if on else None
