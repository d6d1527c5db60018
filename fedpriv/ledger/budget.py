"""The privacy budget: how much all releases about one population may cost together."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent

Price = Callable[[Sequence[RoundEvent], float], float]
"""An upper bound on the ε that events cost together at this δ; +inf if no finite ε holds."""


@dataclass(frozen=True)
class PrivacyBudget:
    """A limit (ε, δ) on the events of a ledger.

    Attributes:
        epsilon: ε > 0, the most that may be spent; inf if only δ and the record matter.
        delta: δ in (0, 1).
        price: prices events at δ, never below the truth, such as `Accountant.upper_epsilon`.

    Raises:
        InvalidValueError: ε or δ is out of range.
    """

    epsilon: float
    delta: float
    price: Price

    def __post_init__(self) -> None:
        if not self.epsilon > 0.0:
            raise InvalidValueError(f"epsilon is {self.epsilon}; it must be positive")
        if not 0.0 < self.delta < 1.0:
            raise InvalidValueError(f"delta is {self.delta}; it must be in (0, 1)")

    def epsilon_of(self, events: Iterable[RoundEvent]) -> float:
        """ε that the events cost together; equal events are merged before they are priced."""
        return self.price(merge_equal(events), self.delta)

    def admits(self, events: Iterable[RoundEvent]) -> bool:
        """Whether the events together stay within the budget; no, if their price is NaN."""
        return self.epsilon_of(events) <= self.epsilon


@dataclass(frozen=True)
class Headroom:
    """Rounds that were found to fit into a budget, so that not each has to be priced.

    ε never grows when rounds are left out or get more noise. So one price of many rounds ahead that
    is within the budget admits them all, and rounds with more noise in their place; they are then
    only counted.

    Attributes:
        budget: what they fit into.
        event: one of them, of count 1.
        found: how many fitted when they were priced.
        left: how many of them were not charged since.
        epsilon: the price of one round too many, where none fits.
    """

    budget: PrivacyBudget
    event: RoundEvent
    found: int
    left: int
    epsilon: float

    @classmethod
    def find(
        cls, spent: Mapping[RoundEvent, int], event: RoundEvent, budget: PrivacyBudget, most: int
    ) -> Self:
        """Price `most` more events, then half as many, until they fit or not even one does.

        Args:
            spent: events of count 1, by how often they were charged.
            event: the one to be charged next, of count 1.
            budget: the limit.
            most: how far to look ahead, at least 1.
        """
        epsilon = budget.epsilon
        while most > 0:
            ahead = {**spent, event: spent.get(event, 0) + most}
            epsilon = budget.price(repeated(ahead), budget.delta)
            if epsilon <= budget.epsilon:
                break
            most //= 2
        return cls(budget, event, most, most, epsilon)

    def covers(self, event: RoundEvent) -> bool:
        """Whether a round costs no more than one of those that were priced."""
        return (
            event.sampling == self.event.sampling
            and event.strategy == self.event.strategy
            and event.noise_multiplier >= self.event.noise_multiplier
        )

    def after(self, event: RoundEvent) -> Self:
        """What is left once an event of count 1 was charged."""
        return replace(self, left=self.left - 1 if self.left and self.covers(event) else 0)


def merge_equal(events: Iterable[RoundEvent]) -> tuple[RoundEvent, ...]:
    """The same rounds with each distinct event once and its repetitions in `count`.

    Events keep the order of their first use.
    """
    rounds = Counter[RoundEvent]()
    for event in events:
        rounds[event if event.count == 1 else replace(event, count=1)] += event.count
    return repeated(rounds)


def repeated(rounds: Mapping[RoundEvent, int]) -> tuple[RoundEvent, ...]:
    """Events of count 1, each as one event of the given count."""
    return tuple(event if n == 1 else replace(event, count=n) for event, n in rounds.items())
