"""The privacy budget: how much all releases about one population may cost together."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fedpriv.ledger.events import RoundEvent, require

LEAST_DELTA = 1e-60
"""A smaller δ is refused: no price tells it from 0, as doubles lose probabilities that small."""

Price = Callable[[Sequence[RoundEvent], float], float]
"""An upper bound on the ε that events cost together at this δ; +inf if no finite ε holds."""


def check_delta(delta: float) -> None:
    """Raise InvalidValueError unless δ is in [1e-60, 1)."""
    require(0.0 < delta < 1.0, f"delta is {delta}; it must be in (0, 1)")
    smallest = f"no accountant tells it from 0 below {LEAST_DELTA:g}"
    require(delta >= LEAST_DELTA, f"delta is {delta}; {smallest}")


@dataclass(frozen=True)
class PrivacyBudget:
    """A limit (ε, δ) on the events of a ledger."""

    epsilon: float  # ε > 0, the most that may be spent; inf if only δ and the record matter
    delta: float  # δ in [1e-60, 1)
    price: Price  # never below the truth, such as `Accountant.upper_epsilon`

    def __post_init__(self) -> None:
        require(self.epsilon > 0.0, f"epsilon is {self.epsilon}; it must be positive")
        check_delta(self.delta)

    def epsilon_of(self, events: Iterable[RoundEvent]) -> float:
        """ε that the events cost together; equal events are merged before they are priced."""
        return self.price(merge_equal(events), self.delta)

    def admits(self, events: Iterable[RoundEvent]) -> bool:
        """Whether the events together stay within the budget; no, if their price is NaN."""
        return self.epsilon_of(events) <= self.epsilon


def merge_equal(events: Iterable[RoundEvent]) -> tuple[RoundEvent, ...]:
    """Each distinct event once, in order of first use, with its repetitions in `count`."""
    rounds = Counter[RoundEvent]()
    for event in events:
        rounds[event if event.count == 1 else replace(event, count=1)] += event.count
    return repeated(rounds)


def repeated(rounds: Mapping[RoundEvent, int]) -> tuple[RoundEvent, ...]:
    """Events of count 1, each as one event of the given count."""
    return tuple(event if n == 1 else replace(event, count=n) for event, n in rounds.items())
