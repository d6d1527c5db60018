"""Pricing a charge only where the budget may be near: a running verdict on the rounds so far.

Pricing thousands of rounds that all differ takes a fraction of a second, which adds up when each
round is charged. A `Projection` tells in a millisecond that one more surely stays below the budget.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from fedpriv.accounting.budget import PrivacyBudget
from fedpriv.accounting.events import NeighbouringRelation, RoundEvent, SamplingPolicy, compose
from fedpriv.accounting.online import Projection

_BELOW = 0.994
"""Share of the budget up to which projections tell: no interval of `tight` is wider than the rest,
so that what a projection admits, a price would too."""
_ROOM = 4.0
"""How far ahead a projection looks where the budget has no limit."""
_CLEARLY = 0.98
_GROWN = 1.02


@dataclass(frozen=True)
class Forecast:
    """Rounds so far, and whether one more surely costs less than a budget.

    Attributes:
        budget: one that can be projected.
        projection: of all rounds so far, for nearly all of the budget.
    """

    budget: PrivacyBudget
    projection: Projection
    _next: dict[RoundEvent, Self | None] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    def of(
        cls, budget: PrivacyBudget, rounds: Mapping[RoundEvent, int], epsilon: float = math.inf
    ) -> Self | None:
        """Plan from rounds so far; None if the budget or a round cannot be projected.

        Args:
            budget: any.
            rounds: all events so far, of count 1, by how often they occurred.
            epsilon: what they cost, about; needed where the budget has no limit.
        """
        if budget.project is None or not all(map(_projectable, rounds)):
            return None
        ahead = _ROOM * epsilon if math.isinf(budget.epsilon) else _BELOW * budget.epsilon
        if not math.isfinite(ahead):
            return None
        counts: dict[tuple[float, float], int] = {}
        for event, count in rounds.items():
            for key, each in compose([event]).items():
                counts[key] = counts.get(key, 0) + each * count
        return cls(budget, budget.project(counts, ahead, budget.delta))

    def plus(self, event: RoundEvent) -> Self | None:
        """With one more event; None if that cannot be projected.

        The last answer is kept, since each round asks twice: whether it may begin, and for what
        comes after it.
        """
        if event not in self._next:
            self._next.clear()
            self._next[event] = self._plus(event) if _projectable(event) else None
        return self._next[event]

    def _plus(self, event: RoundEvent) -> Self:
        projection = self.projection
        for (q, z), count in compose([event]).items():
            projection = projection.plus(q, z, count)
        return type(self)(self.budget, projection)

    @cached_property
    def below(self) -> bool:
        """Whether the rounds surely cost less than the projection was made for."""
        return self.projection.verdict() is True

    def should_have_told(self, epsilon: float) -> bool:
        """Whether another plan may tell what this one could not, now that ε is known."""
        projection = self.projection
        if math.isinf(self.budget.epsilon) and epsilon > _CLEARLY * projection.epsilon:
            return True
        grown = projection.rounds >= _GROWN * projection.planned
        return grown and epsilon <= _CLEARLY * projection.epsilon


def price(
    forecast: Forecast | None,
    budget: PrivacyBudget,
    spent: Mapping[RoundEvent, int],
    event: RoundEvent,
) -> tuple[float, Forecast | None]:
    """What the rounds so far and one more cost together, or an ε within the budget that they keep.

    * It is above the budget's ε, or NaN, just where `budget.loss` is, and then it is that price.
    * Elsewhere it is an upper bound on ε, as `budget.loss` is.

    Args:
        forecast: of the rounds so far, for any budget; None if there is none.
        budget: what may be spent.
        spent: all events so far, of count 1, by how often they occurred.
        event: the one more, of count 1.

    Returns:
        ε, and the forecast of the rounds so far to go on with.
    """
    known = forecast if forecast is not None and forecast.budget == budget else None
    known = known or Forecast.of(budget, spent)
    ahead = known.plus(event) if known is not None else None
    if ahead is not None and ahead.below:
        return ahead.projection.epsilon, known
    epsilon = budget.epsilon_of_rounds({**spent, event: spent.get(event, 0) + 1})
    poor = ahead.should_have_told(epsilon) if ahead is not None else known is None
    if poor and epsilon <= budget.epsilon:
        known = Forecast.of(budget, spent, epsilon)
    return epsilon, known


def _projectable(event: RoundEvent) -> bool:
    sampling = event.sampling
    return (
        sampling.policy is SamplingPolicy.POISSON
        and sampling.relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    )
