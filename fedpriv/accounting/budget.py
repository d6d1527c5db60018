"""The privacy budget: how much all releases about one population may cost together."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fedpriv.accounting.events import RoundEvent
from fedpriv.errors import InvalidValueError

Loss = Callable[[Sequence[RoundEvent], float], float]
"""ε that these events cost at this δ; +inf if no finite ε holds."""


@dataclass(frozen=True)
class PrivacyBudget:
    """A limit (ε, δ) on the events of a ledger, priced by an injected accountant.

    Attributes:
        epsilon: ε > 0, the most that may be spent; inf if only δ and the record matter.
        delta: δ in (0, 1).
        loss: prices events at δ, e.g. `lambda events, delta: epsilon(events, delta).epsilon`; it
            must never price below the truth.

    Raises:
        InvalidValueError: ε or δ is out of range.
    """

    epsilon: float
    delta: float
    loss: Loss

    def __post_init__(self) -> None:
        if not self.epsilon > 0.0:
            raise InvalidValueError(f"epsilon is {self.epsilon}; it must be positive")
        if not 0.0 < self.delta < 1.0:
            raise InvalidValueError(f"delta is {self.delta}; it must be in (0, 1)")

    def epsilon_of(self, events: Iterable[RoundEvent]) -> float:
        """ε that the events cost together; equal events are merged before they are priced."""
        return self.loss(merge_equal(events), self.delta)

    def admits(self, events: Iterable[RoundEvent]) -> bool:
        """Whether the events together stay within the budget; no, if their price is NaN."""
        return self.epsilon_of(events) <= self.epsilon


def merge_equal(events: Iterable[RoundEvent]) -> tuple[RoundEvent, ...]:
    """The same rounds with each distinct event once and its repetitions in `count`.

    Events keep the order of their first use.

    >>> from fedpriv.accounting.events import poisson_gaussian
    >>> [e.count for e in merge_equal([poisson_gaussian(0.5, 2.0, count=n) for n in (1, 3)])]
    [4]
    """
    rounds = Counter[RoundEvent]()
    for event in events:
        rounds[replace(event, count=1)] += event.count
    return tuple(replace(event, count=count) for event, count in rounds.items())
