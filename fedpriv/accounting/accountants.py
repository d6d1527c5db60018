"""Every accountant by its name, and the two functions that ask one.

An accountant states which sampling policies and neighbouring relations it has an analysis of, and
refuses the rest: a policy and an accountant that do not match must not yield an ε. To add one,
subclass `Accountant`, put it into `ACCOUNTANTS`, and inherit its tests from the conformance suite.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from fedpriv.accounting import pld, tight
from fedpriv.accounting.accountant import (
    GAUSSIAN,
    Accountant,
    Bound,
    CheckedEvents,
    PrivacyLoss,
    check_delta,
    check_epsilon,
    checked,
)
from fedpriv.accounting.classical import CLASSICAL
from fedpriv.accounting.events import NeighbouringRelation, Pair, RoundEvent, SamplingPolicy
from fedpriv.accounting.fixed_size import composed_fixed_size_rdp
from fedpriv.accounting.loss import Rounds, Vector
from fedpriv.accounting.rdp import (
    DEFAULT_ORDERS,
    composed_rdp,
    delta_from_rdp,
    epsilon_from_rdp,
)
from fedpriv.errors import InvalidValueError, known_names

Interval = Callable[[Rounds, float], tuple[float, float]]

WITH_FIXED_SIZE: tuple[Pair, ...] = (
    *GAUSSIAN,
    (SamplingPolicy.FIXED_SIZE, NeighbouringRelation.REPLACE_ONE),
)
"""What the RDP accountant can price."""


@dataclass(frozen=True)
class IntervalAccountant(Accountant):
    """Certified intervals, by default by composing privacy loss distributions (`pld`).

    Attributes:
        name: its name in `ACCOUNTANTS`.
        epsilon_interval: from rounds and δ to an interval that holds ε.
        delta_interval: from rounds and ε to an interval that holds δ.
    """

    name: str = "pld"
    epsilon_interval: Interval = pld.epsilon_interval
    delta_interval: Interval = pld.delta_interval

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """An interval of ε.

        Shuffled passes count for its upper end alone: with them it is an upper bound.
        """
        check_delta(delta)
        priced = checked(events, self.name)
        low, up = self.epsilon_interval(priced.rounds(), delta)
        if SamplingPolicy.SHUFFLED not in priced.policies:
            return priced.loss(low, up, delta, self.name, Bound.INTERVAL)
        low, _ = self.epsilon_interval(priced.rounds(without=SamplingPolicy.SHUFFLED), delta)
        return priced.loss(low, up, delta, self.name, Bound.UPPER)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The upper end of an interval of δ."""
        check_epsilon(epsilon)
        return self.delta_interval(checked(events, self.name).rounds(), epsilon)[1]


@dataclass(frozen=True)
class RDPAccountant(Accountant):
    """Upper bounds by the moments accountant (`rdp`, `fixed_size`).

    Attributes:
        orders: the orders α > 1 to choose from.

    Raises:
        InvalidValueError: there is no order, or one is not above 1.
    """

    name: str = field(default="rdp", init=False)
    orders: tuple[float, ...] = DEFAULT_ORDERS

    def __post_init__(self) -> None:
        wrong = [order for order in self.orders if not 1.0 < order < float("inf")]
        if wrong or not self.orders:
            raise InvalidValueError(
                f"orders are {wrong or self.orders}; there must be one or more, each above 1"
            )

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """An upper bound on ε at the best order; an interval with cohorts of a fixed size.

        Its lower end is what they cost if every user but one contributes −S, and that one +S or −S:
        the sums then are −mS, and (2 − m)·S with probability m/N. This is the pair of a Poisson
        sample at the same noise per sensitivity, which `pld` bounds from below.
        """
        check_delta(delta)
        priced = checked(events, self.name, WITH_FIXED_SIZE)
        up = epsilon_from_rdp(self.orders, self._rdp(priced), delta) if priced.events else 0.0
        if SamplingPolicy.FIXED_SIZE not in priced.policies:
            return priced.loss(0.0, up, delta, self.name, Bound.UPPER)
        low, _ = pld.epsilon_interval(priced.rounds(without=SamplingPolicy.SHUFFLED), delta)
        return priced.loss(low, up, delta, self.name, Bound.INTERVAL)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """An upper bound on δ at the best order."""
        check_epsilon(epsilon)
        priced = checked(events, self.name, WITH_FIXED_SIZE)
        return delta_from_rdp(self.orders, self._rdp(priced), epsilon) if priced.events else 0.0

    def _rdp(self, priced: CheckedEvents) -> Vector:
        """[orders] RDP of all events together."""
        others = composed_rdp(priced.rounds(without=SamplingPolicy.FIXED_SIZE), self.orders)
        fixed = priced.rounds_of(SamplingPolicy.FIXED_SIZE)
        return others + composed_fixed_size_rdp(fixed, self.orders)


_TIGHT = IntervalAccountant("tight", tight.epsilon_interval, tight.delta_interval)
ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType(
    {each.name: each for each in (IntervalAccountant(), _TIGHT, RDPAccountant(), *CLASSICAL)}
)
"""Every accountant by its name."""


def epsilon(events: Iterable[RoundEvent], delta: float, accountant: str = "pld") -> PrivacyLoss:
    """What the events cost together at δ.

    >>> from fedpriv.accounting.events import poisson_gaussian
    >>> loss = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
    >>> loss.epsilon_low <= 0.94687 <= loss.epsilon < 0.9475
    True

    Args:
        events: any number of events, in any order.
        delta: δ in (0, 1).
        accountant: a key of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: δ is out of range, or there is no such accountant.
        UnsupportedEventError: the accountant has no analysis of one of the events.
    """
    return accountant_named(accountant).epsilon(events, delta)


def delta(events: Iterable[RoundEvent], epsilon: float, accountant: str = "pld") -> float:
    """A δ for which the events together are (ε, δ)-DP.

    Args:
        events: any number of events, in any order.
        epsilon: ε ≥ 0, finite.
        accountant: a key of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: ε is out of range, or there is no such accountant.
        UnsupportedEventError: the accountant has no analysis of one of the events.
    """
    return accountant_named(accountant).delta(events, epsilon)


def accountant_named(name: str) -> Accountant:
    """The accountant of this name.

    Raises:
        InvalidValueError: there is none.
    """
    if name not in ACCOUNTANTS:
        raise InvalidValueError(f"unknown accountant {name!r}; {known_names(name, ACCOUNTANTS)}")
    return ACCOUNTANTS[name]
