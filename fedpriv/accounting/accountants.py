"""What an accountant is, every accountant by its name, and two functions that ask one.

An accountant states which sampling policies and neighbouring relations it has an analysis of, and
refuses the rest: a policy and an accountant that do not match must not yield an ε. To add one,
subclass `Accountant`, put it into `ACCOUNTANTS`, and inherit its tests from the conformance suite.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from fedpriv.accounting import analyses, classical, pld, rdp
from fedpriv.accounting.analyses import ADD_OR_REMOVE, ANALYSES, REPLACE, bounds_of
from fedpriv.accounting.gaussian import Ends, check_epsilon
from fedpriv.accounting.pld.lattice import Pairs
from fedpriv.accounting.round_counts import Rounds, Vector, compose
from fedpriv.errors import InvalidValueError, UnsupportedEventError, known_names
from fedpriv.ledger.events import (
    LEAST_DELTA,
    EventKind,
    NeighbouringRelation,
    RoundEvent,
    SamplingPolicy,
    check_delta,
    kinds_text,
)

# Keeps lower ends below, though `compose` counts noise that is smaller by up to a part in 2³⁶.
_BELOW = 1.0 - 2.0**-30
_LOG_LEAST, _LOG_MOST, _PRECISION = math.log(1e-300), math.log1p(-1e-12), 1e-6

_GAUSSIAN = tuple(
    kind
    for kind in ANALYSES
    if kind[0] in (SamplingPolicy.EVERY_USER, SamplingPolicy.SHUFFLED, SamplingPolicy.SEPARATED)
    or kind == (SamplingPolicy.POISSON, ADD_OR_REMOVE)
)
"""What costs no more than the Poisson-subsampled Gaussian of `compose`, q = 1 included.

A shuffled pass costs at most one Gaussian, because in every order of the users only one of its
batches has the user (joint convexity); it can cost less (Chua et al. 2024).
"""


class Bound(StrEnum):
    """What kind of statement an ε is, in words for readers."""

    UPPER = "upper bound"  # the true ε is at most this
    INTERVAL = "interval"  # the true ε is at most this and at least `epsilon_low`
    ESTIMATE = "estimate"  # near the true ε for many rounds; it can be below: no guarantee


@dataclass(frozen=True)
class PrivacyLoss:
    """What events cost together, for the least ε that holds at δ."""

    epsilon_low: float  # of a bound, the true ε is at least this; 0 where it cannot be told
    epsilon: float  # of a bound, the true ε is at most this: the number to report. ∞: not proven
    delta: float  # in [1e-60, 1)
    accountant: str  # its name in `ACCOUNTANTS`
    relation: NeighbouringRelation  # which two populations are compared
    bound: Bound  # what kind of statement `epsilon` is
    assumptions: str  # one sentence for readers

    @property
    def low(self) -> float:
        """Short for `epsilon_low`."""
        return self.epsilon_low

    @property
    def up(self) -> float:
        """Short for `epsilon`."""
        return self.epsilon


class Accountant(ABC):
    """Prices events; all its numbers are on the safe side, unless they are tagged as estimates.

    Every accountant keeps these promises; the conformance suite tests each:

    * No events cost ε = 0 and δ = 0 exactly; a round without noise costs ε = ∞.
    * ε falls in the noise multiplier and in δ, and grows in the sampling probability and in the
      number of rounds.
    * Events of two neighbouring relations are refused: an ε compares one kind of neighbours.
    * Neither the order of events, nor how equal events are counted, nor how a round's noise is
      split among its queries changes ε, as long as its noise multiplier is the same.

    An argument out of range raises `InvalidValueError`, and events that the accountant has no
    analysis of `UnsupportedEventError`.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in `ACCOUNTANTS`."""

    @abstractmethod
    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """What the events, in any order, cost together at δ in [1e-60, 1)."""

    def upper_epsilon(self, events: Iterable[RoundEvent], delta: float) -> float:
        """ε that the events cost at δ, as `PrivacyBudget` asks for it."""
        return self.epsilon(events, delta).epsilon

    @abstractmethod
    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """A δ in [0, 1] for which the events together are (ε, δ)-DP; ε ≥ 0 is finite."""


@dataclass(frozen=True)
class IntervalAccountant(Accountant):
    """Intervals of every policy, by default by composing privacy losses (`pld`).

    Its `epsilon` is an upper bound alone where an event has no share in the lower end: shuffled
    passes without a schedule, and separated series whose sensitivity is known from above alone. Its
    `delta` is the upper end of an interval, at least 1e-60 where there is an event.
    """

    name: str = "pld"
    epsilon_interval: Callable[[Pairs, float], Ends] = pld.epsilon_interval  # of ε at δ
    delta_interval: Callable[[Pairs, float], Ends] = pld.delta_interval  # of δ at ε

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """An interval of ε, or its upper end alone."""
        check_delta(delta)
        events = _checked(events, self.name, tuple(ANALYSES))
        bounds = bounds_of(events)
        low, up = self.epsilon_interval(bounds.above, delta)
        if bounds.below is not bounds.above and bounds.below != bounds.above:
            low, _ = self.epsilon_interval(bounds.below, delta)
        kind = Bound.INTERVAL if bounds.complete else Bound.UPPER
        return _loss(events, (float(low) * _BELOW, float(up)), delta, self.name, kind)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The upper end of an interval of δ."""
        check_epsilon(epsilon)
        above = bounds_of(_checked(events, self.name, tuple(ANALYSES))).above
        return max(self.delta_interval(above, epsilon)[1], LEAST_DELTA) if above else 0.0


@dataclass(frozen=True)
class RDPAccountant(Accountant):
    """Upper bounds by the moments accountant (`rdp`), at the best of the orders α > 1.

    Cohorts of a fixed size have an interval, whose lower end is that of `pld`.
    """

    name: str = field(default="rdp", init=False)
    orders: tuple[float, ...] = rdp.DEFAULT_ORDERS

    def __post_init__(self) -> None:
        wrong = [order for order in self.orders if not 1.0 < order < math.inf]
        if wrong or not self.orders:
            raise InvalidValueError(
                f"orders are {wrong or self.orders}; there must be one or more, each above 1"
            )

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """The least ε over the orders."""
        check_delta(delta)
        events = self._checked(events)
        up = rdp.epsilon_from_rdp(self.orders, self._rdp(events), delta) if events else 0.0
        low, kind = 0.0, Bound.UPPER
        if any(event.sampling.policy is SamplingPolicy.FIXED_SIZE for event in events):
            bounds = bounds_of(events)
            low = float(pld.epsilon_interval(bounds.below, delta)[0]) * _BELOW
            kind = Bound.INTERVAL if bounds.complete else Bound.UPPER
        return _loss(events, (low, up), delta, self.name, kind)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The least δ over the orders."""
        check_epsilon(epsilon)
        events = self._checked(events)
        return rdp.delta_from_rdp(self.orders, self._rdp(events), epsilon) if events else 0.0

    def _checked(self, events: Iterable[RoundEvent]) -> tuple[RoundEvent, ...]:
        return _checked(events, self.name, (*_GAUSSIAN, (SamplingPolicy.FIXED_SIZE, REPLACE)))

    def _rdp(self, events: Sequence[RoundEvent]) -> Vector:
        """[orders] RDP of all events together."""
        fixed = [each for each in events if each.sampling.policy is SamplingPolicy.FIXED_SIZE]
        others = [each for each in events if each.sampling.policy is not SamplingPolicy.FIXED_SIZE]
        sampled = rdp.composed_rdp(compose(others), self.orders)
        return sampled + rdp.composed_rdp(compose(fixed), self.orders, rdp.fixed_size_gaussian_rdp)


@dataclass(frozen=True)
class ClassicalAccountant(Accountant):
    """One formula for ε."""

    name: str = "basic"
    price: Callable[[Rounds, float], float] = (
        classical.basic_epsilon
    )  # ε of rounds at δ; falls as δ grows
    bound: Bound = Bound.UPPER

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """What the formula says at δ."""
        check_delta(delta)
        events = _checked(events, self.name, _GAUSSIAN)
        up = self.price(compose(events), delta) if events else 0.0
        return _loss(events, (0.0, up), delta, self.name, self.bound)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The least δ in [1e-300, 1], up to a millionth of log δ, at which ε is not exceeded."""
        check_epsilon(epsilon)
        rounds = compose(_checked(events, self.name, _GAUSSIAN))
        if not rounds:
            return 0.0
        low, high = _LOG_LEAST, _LOG_MOST
        noiseless = any(z == 0.0 for _, z in rounds)
        if noiseless or self.price(rounds, math.exp(high)) > epsilon:
            return 1.0
        while high - low > _PRECISION * abs(high) + _PRECISION**2:
            middle = (low + high) / 2
            if self.price(rounds, math.exp(middle)) > epsilon:
                low = middle
            else:
                high = middle
        return math.exp(high)


def _checked(
    events: Iterable[RoundEvent], name: str, legal: Sequence[EventKind]
) -> tuple[RoundEvent, ...]:
    """The events, if each is of a legal kind and all have one neighbouring relation."""
    kept = tuple(events)
    for event in kept:
        sampling = event.sampling
        if (sampling.policy, sampling.relation) not in legal:
            raise UnsupportedEventError(
                f"the {name} accountant has no analysis of {sampling.policy} sampling with "
                f"{sampling.relation} neighbours; legal is: {kinds_text(legal)}"
            )
    relations = dict.fromkeys(event.sampling.relation for event in kept)
    if len(relations) > 1:
        raise UnsupportedEventError(
            f"events with {' and with '.join(relations)} neighbours cannot be added up; "
            "an ε compares one kind of neighbours"
        )
    return kept


def _loss(
    events: Sequence[RoundEvent], ends: Ends, delta: float, name: str, bound: Bound
) -> PrivacyLoss:
    """A loss, with the sentence that says what was assumed."""
    low, up = ends
    if not low <= up:
        raise AssertionError(f"the ends contradict each other: {low} > {up}")
    relation = events[0].sampling.relation if events else ADD_OR_REMOVE
    used = " and ".join(dict.fromkeys(event.sampling.policy for event in events)) or "no"
    article = "an" if bound[0] in "aeiou" else "a"
    sentence = (
        f"User-level differential privacy for {relation} neighbours, {used} sampling of users and "
        f"Gaussian noise on clipped sums; the {name} accountant gives ε as {article} {bound}."
    )
    return PrivacyLoss(low, up, delta, name, relation, bound, sentence)


_ALL = (
    IntervalAccountant("tight", analyses.epsilon_interval, analyses.delta_interval),
    IntervalAccountant(),
    RDPAccountant(),
    ClassicalAccountant("gdp", classical.clt_epsilon, Bound.ESTIMATE),
    ClassicalAccountant(
        "zcdp", lambda rounds, delta: classical.zcdp_epsilon(classical.zcdp_rho(rounds), delta)
    ),
    ClassicalAccountant("advanced", classical.advanced_epsilon),
    ClassicalAccountant(),
)
ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType({each.name: each for each in _ALL})
"""Every accountant by its name, the default first."""


def accountant_named(name: str) -> Accountant:
    """The accountant of this name."""
    if name not in ACCOUNTANTS:
        raise InvalidValueError(f"unknown accountant {name!r}; {known_names(name, ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def epsilon(events: Iterable[RoundEvent], delta: float, accountant: str = "tight") -> PrivacyLoss:
    """What the events, in any order, cost together at δ in [1e-60, 1), by one of `ACCOUNTANTS`.

    Raises InvalidValueError if δ is out of range or there is no such accountant, and
    UnsupportedEventError if it has no analysis of one of the events.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> loss = epsilon([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)], delta=1e-5)
    >>> round(loss.low, 6), round(loss.up, 6)
    (0.946867, 0.946867)
    """
    return accountant_named(accountant).epsilon(events, delta)


def delta(events: Iterable[RoundEvent], epsilon: float, accountant: str = "tight") -> float:
    """A δ for which the events together are (ε, δ)-DP; ε ≥ 0 is finite. Raises as `epsilon`."""
    return accountant_named(accountant).delta(events, epsilon)
