"""Which analysis serves which events, every accountant by its name, and two functions that ask one.

An accountant states which sampling policies and neighbouring relations it has an analysis of, and
refuses the rest: a policy and an accountant that do not match must not yield an ε. To add one,
subclass `Accountant`, put it into `ACCOUNTANTS`, and inherit its tests from the conformance suite.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import MappingProxyType

from fedpriv.accounting import pld, tight
from fedpriv.accounting.accountant import (
    GAUSSIAN,
    LEAST_DELTA,
    Accountant,
    Bound,
    CheckedEvents,
    PrivacyLoss,
    check_delta,
    check_epsilon,
    checked,
)
from fedpriv.accounting.classical import CLASSICAL
from fedpriv.accounting.pld.dominating_pairs import (
    FixedSizePair,
    LargestBatchPair,
    PoissonPair,
    ReplacePair,
)
from fedpriv.accounting.pld.lattice import GaussianPair, Pairs
from fedpriv.accounting.pld.random_allocation import allocation_pairs
from fedpriv.accounting.rdp import (
    DEFAULT_ORDERS,
    composed_fixed_size_rdp,
    composed_rdp,
    delta_from_rdp,
    epsilon_from_rdp,
)
from fedpriv.accounting.rounds import Vector
from fedpriv.accounting.strategy import compose
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.ledger.events import NeighbouringRelation, RoundEvent, SamplingPolicy, Schedule
from fedpriv.ledger.events import Pair as Kind

Interval = Callable[[Pairs, float], tuple[float, float]]
ADD_OR_REMOVE, REPLACE = NeighbouringRelation

WITH_FIXED_SIZE: tuple[Kind, ...] = (*GAUSSIAN, (SamplingPolicy.FIXED_SIZE, REPLACE))
"""What the RDP accountant can price."""
_BELOW = 1.0 - 2.0**-30
"""Keeps lower ends below, though `compose` counts noise that is smaller by up to a part in 2³⁶."""


@dataclass(frozen=True)
class PairBounds:
    """Pairs whose compositions cost no less, and pairs whose compositions cost no more.

    Attributes:
        above: together they dominate the events, adaptively chosen ones included.
        below: together they are something that the events may show. Equal to `above`: exact.
        complete: whether `below` has a share in every event, so that the two are an interval.
    """

    above: Pairs
    below: Pairs
    complete: bool


def bounds_of(events: Iterable[RoundEvent]) -> PairBounds:
    """Bounds of all events together, each of a kind in `ANALYSES`."""
    kinds: dict[Kind, list[RoundEvent]] = {}
    for event in events:
        kinds.setdefault((event.sampling.policy, event.sampling.relation), []).append(event)
    return _together(ANALYSES[kind](alike) for kind, alike in kinds.items())


def _together(bounds: Iterable[PairBounds]) -> PairBounds:
    def both(first: PairBounds, second: PairBounds) -> PairBounds:
        above, below = _sum(first.above, second.above), _sum(first.below, second.below)
        return PairBounds(above, below, first.complete and second.complete)

    return reduce(both, bounds, _exact({}))


def _sum(first: Pairs, second: Pairs) -> Pairs:
    total = dict(first)
    for pair, count in second.items():
        total[pair] = total.get(pair, 0) + count
    return total


def _exact(pairs: Pairs) -> PairBounds:
    return PairBounds(pairs, pairs, complete=True)


def _of(kind: type[GaussianPair], events: Iterable[RoundEvent]) -> Pairs:
    """One pair for each (q, noise per sensitivity); with q = 1 all kinds are one Gaussian."""
    return {
        (PoissonPair if q == 1.0 else kind)(q, z): count
        for (q, z), count in compose(events).items()
    }


def _poisson(events: Sequence[RoundEvent]) -> PairBounds:
    """Poisson samples when a user is added or removed; all users are a sample with q = 1."""
    return _exact(_of(PoissonPair, events))


def _poisson_replaced(events: Sequence[RoundEvent]) -> PairBounds:
    return _exact(_of(ReplacePair, events))


def _fixed_size(events: Sequence[RoundEvent]) -> PairBounds:
    return PairBounds(_of(FixedSizePair, events), _of(PoissonPair, events), complete=True)


def _shuffled(events: Sequence[RoundEvent]) -> PairBounds:
    """At most one Gaussian for each pass, as in every order one batch alone has the user."""
    below: Pairs = {}
    scheduled = _scheduled(events)
    for event, schedule in scheduled:
        relation = event.sampling.relation
        base = 1.0 if relation is ADD_OR_REMOVE else 0.0
        z = event.noise_multiplier / relation.sensitivity
        below = _sum(below, {LargestBatchPair(schedule.rounds, z, base): event.count})
    return PairBounds(_of(PoissonPair, events), below, len(scheduled) == len(events))


def _scheduled(events: Iterable[RoundEvent]) -> list[tuple[RoundEvent, Schedule]]:
    """The events that say how many rounds they had."""
    each = ((event, event.sampling.schedule) for event in events)
    return [(event, schedule) for event, schedule in each if schedule is not None]


def _separated(events: Sequence[RoundEvent]) -> PairBounds:
    """One Gaussian for each series; from below where its sensitivity is exact.

    It is where coefficients never increase and stay ≥ 0; see `strategy_sensitivity`.
    """

    def falls(strategy: tuple[float, ...]) -> bool:
        return all(a >= b for a, b in zip(strategy, (*strategy[1:], 0.0), strict=True))

    exact = [event for event in events if falls(event.strategy)]
    below = _of(PoissonPair, exact)
    return PairBounds(_of(PoissonPair, events), below, len(exact) == len(events))


def _allocated(events: Sequence[RoundEvent]) -> PairBounds:
    """Exact for one participation or n; else what the sum of all rounds shows is below."""

    def one(event: RoundEvent, schedule: Schedule) -> PairBounds:
        n, k, z = schedule.rounds, schedule.participations, event.noise_multiplier
        above: Pairs = {pair: m * event.count for pair, m in allocation_pairs(n, k, z).items()}
        below: Pairs = {PoissonPair(1.0, z * n**0.5 / k): event.count}
        return PairBounds(above, above if k in (1, n) else below, complete=True)

    return _together(one(event, schedule) for event, schedule in _scheduled(events))


ANALYSES: Mapping[Kind, Callable[[Sequence[RoundEvent]], PairBounds]] = MappingProxyType(
    {
        (SamplingPolicy.POISSON, ADD_OR_REMOVE): _poisson,
        (SamplingPolicy.POISSON, REPLACE): _poisson_replaced,
        (SamplingPolicy.EVERY_USER, ADD_OR_REMOVE): _poisson,
        (SamplingPolicy.EVERY_USER, REPLACE): _poisson,
        (SamplingPolicy.FIXED_SIZE, REPLACE): _fixed_size,
        (SamplingPolicy.SHUFFLED, ADD_OR_REMOVE): _shuffled,
        (SamplingPolicy.SHUFFLED, REPLACE): _shuffled,
        (SamplingPolicy.RANDOM_ALLOCATION, ADD_OR_REMOVE): _allocated,
        (SamplingPolicy.SEPARATED, ADD_OR_REMOVE): _separated,
        (SamplingPolicy.SEPARATED, REPLACE): _separated,
    }
)
"""The analysis of events, at least one, of each policy under each relation."""


@dataclass(frozen=True)
class IntervalAccountant(Accountant):
    """Intervals of every policy, by default by composing privacy losses (`pld`).

    Attributes:
        name: its name in `ACCOUNTANTS`.
        epsilon_interval: from pairs and δ to an interval that holds their ε.
        delta_interval: from pairs and ε to an interval that holds their δ.
    """

    name: str = "pld"
    epsilon_interval: Interval = pld.epsilon_interval
    delta_interval: Interval = pld.delta_interval

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
        return priced.interval(float(low) * _BELOW, float(up), delta, self.name, bounds.complete)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The upper end of an interval of δ, at least 1e-60 where there is an event."""
        check_epsilon(epsilon)
        priced = checked(events, self.name, tuple(ANALYSES))
        above = bounds_of(priced.events).above
        return max(self.delta_interval(above, epsilon)[1], LEAST_DELTA) if above else 0.0


@dataclass(frozen=True)
class RDPAccountant(Accountant):
    """Upper bounds by the moments accountant (`rdp`).

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
        low, _ = pld.epsilon_interval(bounds.below, delta)
        return priced.interval(float(low) * _BELOW, float(up), delta, self.name, bounds.complete)

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


_TIGHT = IntervalAccountant("tight", tight.epsilon_interval_of, tight.delta_interval_of)
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
        delta: δ in [1e-60, 1).
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
