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
from fedpriv.accounting.event_pairs import ANALYSES, bounds_of
from fedpriv.accounting.fixed_size import composed_fixed_size_rdp
from fedpriv.accounting.pair import Pairs
from fedpriv.accounting.poisson_pair import PoissonPair
from fedpriv.accounting.rdp import (
    DEFAULT_ORDERS,
    composed_rdp,
    delta_from_rdp,
    epsilon_from_rdp,
)
from fedpriv.accounting.rounds import Rounds, Vector
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.ledger.events import NeighbouringRelation, Pair, RoundEvent, SamplingPolicy

Interval = Callable[[Pairs, float], tuple[float, float]]

WITH_FIXED_SIZE: tuple[Pair, ...] = (
    *GAUSSIAN,
    (SamplingPolicy.FIXED_SIZE, NeighbouringRelation.REPLACE_ONE),
)
"""What the RDP accountant can price."""


_BELOW = 1.0 - 2.0**-30
"""Keeps lower ends below, though `compose` counts noise that is smaller by up to a part in 2³⁶."""


@dataclass(frozen=True)
class IntervalAccountant(Accountant):
    """Certified intervals of every policy, by default by composing privacy losses (`pld`).

    Attributes:
        name: its name in `ACCOUNTANTS`.
        epsilon_interval: from pairs and δ to an interval that holds their ε.
        delta_interval: from pairs and ε to an interval that holds their δ.
    """

    name: str = "pld"
    epsilon_interval: Interval = pld.epsilon_interval_of
    delta_interval: Interval = pld.delta_interval_of

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """An interval of ε; an upper bound where some event has no share in its lower end.

        These are shuffled passes without a schedule, and separated series whose sensitivity is
        known from above alone.
        """
        check_delta(delta)
        priced = checked(events, self.name, tuple(ANALYSES))
        bounds = bounds_of(priced.events)
        low, up = self.epsilon_interval(bounds.above, delta)
        if bounds.below != bounds.above:
            low, _ = self.epsilon_interval(bounds.below, delta)
        kind = Bound.INTERVAL if bounds.complete else Bound.UPPER
        return priced.loss(float(low) * _BELOW, float(up), delta, self.name, kind)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The upper end of an interval of δ."""
        check_epsilon(epsilon)
        priced = checked(events, self.name, tuple(ANALYSES))
        return self.delta_interval(bounds_of(priced.events).above, epsilon)[1]


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

        Its lower end is that of `pld`.
        """
        check_delta(delta)
        priced = checked(events, self.name, WITH_FIXED_SIZE)
        up = epsilon_from_rdp(self.orders, self._rdp(priced), delta) if priced.events else 0.0
        if SamplingPolicy.FIXED_SIZE not in priced.policies:
            return priced.loss(0.0, up, delta, self.name, Bound.UPPER)
        bounds = bounds_of(priced.events)
        low, _ = pld.epsilon_interval_of(bounds.below, delta)
        kind = Bound.INTERVAL if bounds.complete else Bound.UPPER
        return priced.loss(float(low) * _BELOW, float(up), delta, self.name, kind)

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


def _tight_epsilon(pairs: Pairs, delta: float) -> tuple[float, float]:
    rounds = _poisson_rounds(pairs)
    if rounds is None:
        return pld.epsilon_interval_of(pairs, delta)
    return tight.epsilon_interval(rounds, delta)


def _tight_delta(pairs: Pairs, epsilon: float) -> tuple[float, float]:
    rounds = _poisson_rounds(pairs)
    if rounds is None:
        return pld.delta_interval_of(pairs, epsilon)
    return tight.delta_interval(rounds, epsilon)


def _poisson_rounds(pairs: Pairs) -> Rounds | None:
    """Rounds by (q, z) if all pairs are those of Poisson samples, which the contour can do."""
    rounds = {(p.q, p.z): count for p, count in pairs.items() if isinstance(p, PoissonPair)}
    return rounds if len(rounds) == len(pairs) else None


_TIGHT = IntervalAccountant("tight", _tight_epsilon, _tight_delta)
ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType(
    {each.name: each for each in (_TIGHT, IntervalAccountant(), RDPAccountant(), *CLASSICAL)}
)
"""Every accountant by its name, the default first."""


def epsilon(events: Iterable[RoundEvent], delta: float, accountant: str = "tight") -> PrivacyLoss:
    """What the events cost together at δ.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> loss = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
    >>> round(loss.low, 6), round(loss.up, 6)
    (0.946867, 0.946867)

    Args:
        events: any number of events, in any order.
        delta: δ in (0, 1).
        accountant: a key of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: δ is out of range, or there is no such accountant.
        UnsupportedEventError: the accountant has no analysis of one of the events.
    """
    return accountant_named(accountant).epsilon(events, delta)


def delta(events: Iterable[RoundEvent], epsilon: float, accountant: str = "tight") -> float:
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
