"""ε at a given δ, or δ at a given ε, from a contour."""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from fedpriv.accounting.cumulant import log_absent
from fedpriv.accounting.inversion import Contour
from fedpriv.accounting.loss import Direction
from fedpriv.accounting.panel import Panel
from fedpriv.accounting.saddle import LEAST_LOG_DELTA, Care, Plan, plan_at_delta, plan_at_epsilon

_STEPS = [0.0] + [1.01 * 1.5**k for k in range(40)]
"""Distances at which a bound is looked for, relative to the estimated one."""
_BEYOND = 1e150
"""A loss instead of ∞."""


class Question(Protocol):
    """What is looked for; a value, so that equal questions are one."""

    negligible: ClassVar[float]
    """A width of the interval that never matters."""
    widest_mixed: ClassVar[float]
    """Largest width of an interval from a mixture, relative to its upper end."""
    largest: ClassVar[float]
    """The answer where nothing is known."""

    def __hash__(self) -> int: ...

    def plan(self, panel: Panel, direction: Direction, care: Care) -> Plan:
        """Where to integrate."""

    def ceiling(self, panel: Panel, plan: Plan, above: float) -> float:
        """An upper bound on the answer that needs no contour.

        Args:
            panel: the rounds.
            plan: where it would be integrated.
            above: a bound above K(c), where c is that of the plan.
        """

    def interval(self, contour: Contour) -> tuple[float, float]:
        """An interval around the answer."""


@dataclass(frozen=True)
class EpsilonAt:
    """The ε that belongs to δ.

    Attributes:
        log_delta: log δ.
    """

    negligible: ClassVar[float] = 1e-9
    widest_mixed: ClassVar[float] = 5e-3
    largest: ClassVar[float] = math.inf
    log_delta: float

    def plan(self, panel: Panel, direction: Direction, care: Care) -> Plan:
        """Where to integrate."""
        return plan_at_delta(panel, self.log_delta, direction, care)

    def ceiling(self, panel: Panel, plan: Plan, above: float) -> float:
        """The largest loss or a Rényi bound (Canonne, Kamath & Steinke 2020, Proposition 12)."""
        allowed = self._allowed(panel.rounds * math.exp(plan.log_tail))
        renyi = (above - allowed - _conversion(plan.c)) / plan.c
        return max(0.0, min(renyi, _largest_loss(panel, plan.direction)))

    def interval(self, contour: Contour) -> tuple[float, float]:
        """δ falls with ε, so the ends are where its bounds are surely below and above."""
        epsilon = self._crossing(contour)
        value, slope = contour.value(epsilon)
        below, above = contour.bounds(epsilon)
        if not (value > 0.0 and slope > 0.0):
            return 0.0, math.inf
        allowed = self._allowed(contour.sums.dropped)

        def small(at: float) -> bool:
            bound = contour.bounds(at)[1]
            return bound > 0.0 and math.log(bound) + contour.log_scale(at) <= allowed

        def large(at: float) -> bool:
            bound = contour.bounds(at)[0]
            return bound > 0.0 and math.log(bound) + contour.log_scale(at) >= self.log_delta

        least = 1e-13 * (epsilon + value / slope)
        ups = (epsilon + step * ((above - value) / slope + least) for step in _STEPS)
        up = next((at for at in ups if small(at)), math.inf)
        if not below > 0.0:
            return 0.0, up
        lows = (epsilon - step * ((value - below) / slope + least) for step in _STEPS)
        low = next((at for at in lows if at <= 0.0 or large(at)), 0.0)
        return max(low, 0.0), up

    def _allowed(self, dropped: float) -> float:
        """log(δ − dropped)."""
        share = dropped * math.exp(-self.log_delta)
        return self.log_delta + math.log1p(-share) if share < 1.0 else -math.inf

    def _crossing(self, contour: Contour) -> float:
        """About the ε ≥ 0 with that δ, by Newton's method for log δ."""
        epsilon = contour.path.epsilon
        for _ in range(50):
            value, slope = contour.value(epsilon)
            if not (value > 0.0 and slope > 0.0):
                break
            excess = math.log(value) + contour.log_scale(epsilon) - self.log_delta
            before, epsilon = epsilon, max(epsilon + excess * value / slope, 0.0)
            if abs(epsilon - before) <= 1e-13 * (epsilon + value / slope):
                break
        return epsilon


@dataclass(frozen=True)
class DeltaAt:
    """The δ that belongs to ε.

    Attributes:
        epsilon: ε.
    """

    negligible: ClassVar[float] = 1e-265
    widest_mixed: ClassVar[float] = 5e-2
    largest: ClassVar[float] = 1.0
    epsilon: float

    def plan(self, panel: Panel, direction: Direction, care: Care) -> Plan:
        """Where to integrate."""
        return plan_at_epsilon(panel, self.epsilon, direction, care)

    def ceiling(self, panel: Panel, plan: Plan, above: float) -> float:
        """0 beyond the largest loss, or a Rényi bound (Canonne, Kamath & Steinke 2020)."""
        if self.epsilon >= _largest_loss(panel, plan.direction):
            return 0.0
        exponent = above - plan.c * self.epsilon - _conversion(plan.c)
        return min(1.0, math.exp(min(exponent, 0.0)) + panel.rounds * math.exp(plan.log_tail))

    def interval(self, contour: Contour) -> tuple[float, float]:
        """An interval around δ; what is too small for a float counts as 1e-270."""
        below, above = contour.bounds(self.epsilon)
        scale = contour.log_scale(self.epsilon)
        low = math.exp(min(math.log(below) + scale, 0.0)) if below > 0.0 else 0.0
        up = math.exp(min(math.log(above) + scale, 0.0)) if above > 0.0 else 1.0
        return low, min(max(up + contour.sums.dropped, math.exp(LEAST_LOG_DELTA)), 1.0)


def _largest_loss(panel: Panel, direction: Direction) -> float:
    """What the loss of all rounds surely stays below, rounded up."""
    if direction is Direction.REMOVE:
        return math.inf
    loss = np.minimum(-log_absent(panel.q), _BEYOND)
    return panel.most(loss) * (1 + 1e-12)


def _conversion(c: float) -> float:
    """g(c) in δ ≤ exp(K(c) − cε − g(c)): the largest of (1 − e^{−u})·e^{−cu} is e^{−g}."""
    return math.log1p(c) + c * math.log1p(1 / c)
