"""Rounds that are all equal: their contours are kept for a few rounds more.

A run asks for ε after each of its rounds, and mostly that is one round more of the same kind. Sums
along a path add up, and bounds hold for whatever rounds they are of. So a path that was planned for
N equal rounds serves n of them, with n/N of its sums; and if these are not much fewer, the bounds
are about as narrow. N is a power of a fixed number: an answer does not depend on what was asked
before.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

from fedpriv.accounting.answers import Question
from fedpriv.accounting.cumulant import EPS
from fedpriv.accounting.inversion import Contour, cumulant_bound, make_contours
from fedpriv.accounting.loss import Direction
from fedpriv.accounting.panel import Panel, direct, rounds_array
from fedpriv.accounting.saddle import EXACT, Plan

_RATIO = 1.1
"""Counts for which paths are planned are powers of this."""
_KEPT = 64
"""Paths, and plans, that are kept; a run uses two at a time."""


@dataclass(frozen=True)
class EqualRounds:
    """What bounds an answer for equal rounds.

    Attributes:
        q: their sampling probability.
        z: their noise multiplier.
        count: how many there are, > 0.
        question: what is looked for.
    """

    q: float
    z: float
    count: float
    question: Question

    def contours(self, direction: Direction) -> tuple[Contour, ...]:
        """Contours, each enough by itself; none where they would be too long."""
        kept = _contours(self.q, self.z, self._planned, self.question, direction)
        return tuple(replace(one, sums=one.sums.times(self._share)) for one in kept)

    def ceiling(self, direction: Direction) -> float:
        """An upper bound on the answer that needs no contour."""
        plan, above = _plan(self.q, self.z, self._planned, self.question, direction)
        above = self._share * above + 4 * EPS * self._share * abs(above)
        return self.question.ceiling(_panel(self.q, self.z, self.count), plan, above)

    @property
    def _planned(self) -> float:
        """For how many rounds paths are planned."""
        return float(_RATIO ** math.ceil(math.log(self.count) / math.log(_RATIO)))

    @property
    def _share(self) -> float:
        return self.count / self._planned


def _panel(q: float, z: float, count: float) -> Panel:
    return direct(rounds_array({(q, z): count}))


@lru_cache(_KEPT)
def _plan(
    q: float, z: float, count: float, question: Question, direction: Direction
) -> tuple[Plan, float]:
    """A plan for so many rounds, and a bound above their cumulant at its c."""
    panel = _panel(q, z, count)
    plan = question.plan(panel, direction, EXACT)
    return plan, cumulant_bound(panel, plan)


@lru_cache(_KEPT)
def _contours(
    q: float, z: float, count: float, question: Question, direction: Direction
) -> tuple[Contour, ...]:
    """Contours for so many rounds."""
    plan, _ = _plan(q, z, count, question, direction)
    return make_contours(_panel(q, z, count), plan)
