"""Which analysis serves which events, every accountant by its name, and two functions that ask one.

An accountant states which sampling policies and neighbouring relations it has an analysis of, and
refuses the rest: a policy and an accountant that do not match must not yield an ε. To add one,
subclass `Accountant`, put it into `ACCOUNTANTS`, and inherit its tests from the conformance suite.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from fedpriv.accounting import pld, tight
from fedpriv.accounting.accountant import (
    GAUSSIAN,
    Accountant,
    Bound,
    CheckedEvents,
    PrivacyLoss,
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
from fedpriv.accounting.pld.lattice import GaussianPair, LossPair, Pairs
from fedpriv.accounting.pld.random_allocation import allocation_pairs
from fedpriv.accounting.rdp import (
    DEFAULT_ORDERS,
    composed_fixed_size_rdp,
    composed_rdp,
    delta_from_rdp,
    epsilon_from_rdp,
)
from fedpriv.accounting.round_counts import Vector
from fedpriv.accounting.strategy import compose
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.ledger.events import (
    LEAST_DELTA,
    EventKind,
    NeighbouringRelation,
    RoundEvent,
    SamplingPolicy,
    check_delta,
)

Interval = Callable[[Pairs, float], tuple[float, float]]
ADD_OR_REMOVE, REPLACE = NeighbouringRelation

_BELOW = 1.0 - 2.0**-30
"""Keeps lower ends below, though `compose` counts noise that is smaller by up to a part in 2³⁶."""


@dataclass(frozen=True)
class PairBounds:
    """Pairs whose compositions cost no less, and pairs whose compositions cost no more.

    Attributes:
        above: together they dominate the events, adaptively chosen ones included.
        below: an observer of the events can tell as much. Equal to `above`: exact.
        complete: whether `below` has a share in every event, so that the two are an interval.
    """

    above: Pairs
    below: Pairs
    complete: bool = True


Analysis = Callable[[Sequence[RoundEvent]], PairBounds]
"""From events of one kind, at least one, to their bounds."""


def bounds_of(events: Iterable[RoundEvent]) -> PairBounds:
    """Bounds of all events together, each of a kind in `ANALYSES`."""
    kinds: dict[EventKind, list[RoundEvent]] = {}
    for event in events:
        kinds.setdefault((event.sampling.policy, event.sampling.relation), []).append(event)
    above, below, complete = Counter[LossPair](), Counter[LossPair](), True
    for kind, alike in kinds.items():
        bounds = ANALYSES[kind](alike)
        above.update(bounds.above)
        below.update(bounds.below)
        complete = complete and bounds.complete
    return PairBounds(above, below, complete)


def _of(kind: type[GaussianPair], events: Iterable[RoundEvent]) -> Pairs:
    """One pair for each (q, noise per sensitivity); with q = 1 all kinds are one Gaussian."""
    return {
        (PoissonPair if q == 1.0 else kind)(q, z): count
        for (q, z), count in compose(events).items()
    }


def _exact(kind: type[GaussianPair]) -> Analysis:
    """The pairs of this kind themselves; all users are a Poisson sample with q = 1."""

    def bounds(events: Sequence[RoundEvent]) -> PairBounds:
        pairs = _of(kind, events)
        return PairBounds(pairs, pairs)

    return bounds


def _fixed_size(events: Sequence[RoundEvent]) -> PairBounds:
    return PairBounds(_of(FixedSizePair, events), _of(PoissonPair, events))


def _shuffled(events: Sequence[RoundEvent]) -> PairBounds:
    """At most one Gaussian for each pass, as in every order one batch alone has the user."""
    below = Counter[LossPair]()
    complete = True
    for event in events:
        schedule, relation = event.sampling.schedule, event.sampling.relation
        if schedule is None:  # how many batches there were is unknown
            complete = False
        else:
            base = 1.0 if relation is ADD_OR_REMOVE else 0.0
            z = event.noise_multiplier / relation.sensitivity
            below[LargestBatchPair(schedule.rounds, z, base)] += event.count
    return PairBounds(_of(PoissonPair, events), below, complete)


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
    above, below = Counter[LossPair](), Counter[LossPair]()
    for event in events:
        if event.sampling.schedule is None:
            raise AssertionError("a random allocation always has a schedule")
        n, k = event.sampling.schedule.rounds, event.sampling.schedule.participations
        z, count = event.noise_multiplier, event.count
        pairs = {pair: m * count for pair, m in allocation_pairs(n, k, z).items()}
        above.update(pairs)
        below.update(pairs if k in (1, n) else {PoissonPair(1.0, z * n**0.5 / k): count})
    return PairBounds(above, below)


ANALYSES: Mapping[EventKind, Analysis] = MappingProxyType(
    {
        (SamplingPolicy.POISSON, ADD_OR_REMOVE): _exact(PoissonPair),
        (SamplingPolicy.POISSON, REPLACE): _exact(ReplacePair),
        (SamplingPolicy.EVERY_USER, ADD_OR_REMOVE): _exact(PoissonPair),
        (SamplingPolicy.EVERY_USER, REPLACE): _exact(PoissonPair),
        (SamplingPolicy.FIXED_SIZE, REPLACE): _fixed_size,
        (SamplingPolicy.SHUFFLED, ADD_OR_REMOVE): _shuffled,
        (SamplingPolicy.SHUFFLED, REPLACE): _shuffled,
        (SamplingPolicy.RANDOM_ALLOCATION, ADD_OR_REMOVE): _allocated,
        (SamplingPolicy.SEPARATED, ADD_OR_REMOVE): _separated,
        (SamplingPolicy.SEPARATED, REPLACE): _separated,
    }
)
"""The analysis of each policy under each relation."""


@dataclass(frozen=True)
class IntervalAccountant(Accountant):
    """Intervals of every policy, by default by composing privacy losses (`pld`).

    Its `epsilon` is an upper bound alone where an event has no share in the lower end: shuffled
    passes without a schedule, and separated series whose sensitivity is known from above alone. Its
    `delta` is the upper end of an interval, at least 1e-60 where there is an event.
    """

    name: str = "pld"
    epsilon_interval: Interval = pld.epsilon_interval  # from pairs and δ to ends that hold ε
    delta_interval: Interval = pld.delta_interval  # from pairs and ε to ends that hold δ

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """An interval of ε, or its upper end alone."""
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
        above = bounds_of(priced.events).above
        return max(self.delta_interval(above, epsilon)[1], LEAST_DELTA) if above else 0.0


@dataclass(frozen=True)
class RDPAccountant(Accountant):
    """Upper bounds by the moments accountant (`rdp`), at the best of the orders α > 1.

    Cohorts of a fixed size have an interval, whose lower end is that of `pld`.
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
        """The least ε over the orders."""
        check_delta(delta)
        priced = self._checked(events)
        up = epsilon_from_rdp(self.orders, self._rdp(priced), delta) if priced.events else 0.0
        if all(e.sampling.policy is not SamplingPolicy.FIXED_SIZE for e in priced.events):
            return priced.loss(0.0, up, delta, self.name, Bound.UPPER)
        bounds = bounds_of(priced.events)
        low, _ = pld.epsilon_interval(bounds.below, delta)
        kind = Bound.INTERVAL if bounds.complete else Bound.UPPER
        return priced.loss(float(low) * _BELOW, float(up), delta, self.name, kind)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The least δ over the orders."""
        check_epsilon(epsilon)
        priced = self._checked(events)
        return delta_from_rdp(self.orders, self._rdp(priced), epsilon) if priced.events else 0.0

    def _checked(self, events: Iterable[RoundEvent]) -> CheckedEvents:
        return checked(events, self.name, (*GAUSSIAN, (SamplingPolicy.FIXED_SIZE, REPLACE)))

    def _rdp(self, priced: CheckedEvents) -> Vector:
        """[orders] RDP of all events together."""
        sizes = {True: list[RoundEvent](), False: list[RoundEvent]()}
        for event in priced.events:
            sizes[event.sampling.policy is SamplingPolicy.FIXED_SIZE].append(event)
        fixed, others = compose(sizes[True]), compose(sizes[False])
        return composed_rdp(others, self.orders) + composed_fixed_size_rdp(fixed, self.orders)


_TIGHT = IntervalAccountant("tight", tight.epsilon_interval_of, tight.delta_interval_of)
ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType(
    {each.name: each for each in (_TIGHT, IntervalAccountant(), RDPAccountant(), *CLASSICAL)}
)
"""Every accountant by its name, the default first."""


def epsilon(events: Iterable[RoundEvent], delta: float, accountant: str = "tight") -> PrivacyLoss:
    """What the events, in any order, cost together at δ in [1e-60, 1).

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> loss = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
    >>> round(loss.low, 6), round(loss.up, 6)
    (0.946867, 0.946867)

    Args:
        events: what was released.
        delta: δ.
        accountant: a key of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: δ is out of range, or there is no such accountant.
        UnsupportedEventError: the accountant has no analysis of one of the events.
    """
    return accountant_named(accountant).epsilon(events, delta)


def delta(events: Iterable[RoundEvent], epsilon: float, accountant: str = "tight") -> float:
    """A δ for which the events together are (ε, δ)-DP; ε ≥ 0 is finite. Raises as `epsilon`."""
    return accountant_named(accountant).delta(events, epsilon)


def accountant_named(name: str) -> Accountant:
    """The accountant of this name."""
    if name not in ACCOUNTANTS:
        raise InvalidValueError(f"unknown accountant {name!r}; {known_names(name, ACCOUNTANTS)}")
    return ACCOUNTANTS[name]
