"""Accountants: from the events of a ledger to what they cost in (ε, δ).

An accountant states which sampling policies and neighbouring relations it has an analysis of, and
refuses the rest: a policy and an accountant that do not match must not yield an ε. To add one,
subclass `Accountant`, put it into `ACCOUNTANTS`, and inherit its tests from the conformance suite.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from fedpriv.accounting.events import NeighbouringRelation, RoundEvent, SamplingPolicy, compose
from fedpriv.accounting.loss import Rounds
from fedpriv.accounting.pld import delta_interval, epsilon_interval
from fedpriv.accounting.rdp import (
    DEFAULT_ORDERS,
    composed_rdp,
    delta_from_rdp,
    epsilon_from_rdp,
)
from fedpriv.errors import InvalidValueError, UnsupportedEventError

Analysis = tuple[SamplingPolicy, NeighbouringRelation]

_POISSON_ADD_OR_REMOVE: frozenset[Analysis] = frozenset(
    {(SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE)}
)


class Bound(StrEnum):
    """What kind of statement an ε is, in words for readers."""

    UPPER = "upper bound"
    """The true ε is at most this."""
    INTERVAL = "certified interval"
    """The true ε is at most this and at least `epsilon_low`."""


@dataclass(frozen=True)
class PrivacyLoss:
    """What events cost together, for the least ε that holds at δ.

    Attributes:
        epsilon_low: the true ε is at least this; 0 where the accountant cannot tell.
        epsilon: the true ε is at most this: the number to report. ∞ if no finite ε is proven.
        delta: δ in (0, 1).
        accountant: its name in `ACCOUNTANTS`.
        relation: which two populations are compared.
        assumptions: one sentence for readers.
    """

    epsilon_low: float
    epsilon: float
    delta: float
    accountant: str
    relation: NeighbouringRelation
    assumptions: str


class Accountant(ABC):
    """Prices events; all its numbers are on the safe side.

    Every accountant keeps these promises; the conformance suite tests each:

    * No events cost ε = 0 and δ = 0 exactly; a round without noise costs ε = ∞.
    * ε falls in the noise multiplier and in δ, and grows in the sampling probability and in the
      number of rounds.
    * Neither the order of events, nor how equal events are counted, nor how a round's noise is
      split among its queries changes ε, as long as its noise multiplier is the same.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in `ACCOUNTANTS`."""

    @abstractmethod
    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """What the events cost at δ.

        Args:
            events: any number of events, in any order.
            delta: δ in (0, 1).

        Raises:
            InvalidValueError: δ is out of range.
            UnsupportedEventError: there is no analysis of one of the events.
        """

    @abstractmethod
    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """A δ in [0, 1] for which the events are (ε, δ)-DP.

        Args:
            events: any number of events, in any order.
            epsilon: ε ≥ 0, finite.

        Raises:
            InvalidValueError: ε is out of range.
            UnsupportedEventError: there is no analysis of one of the events.
        """


@dataclass(frozen=True)
class PLDAccountant(Accountant):
    """Certified intervals by composing privacy loss distributions (`pld`)."""

    name: str = field(default="pld", init=False)

    def epsilon(self, events: Iterable[RoundEvent], delta: float) -> PrivacyLoss:
        """An interval of ε; see `pld.epsilon_interval`."""
        _check_delta(delta)
        low, up = epsilon_interval(_rounds(events, _POISSON_ADD_OR_REMOVE, self.name), delta)
        return _poisson_loss(low, up, delta, self.name, Bound.INTERVAL)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """The upper end of an interval of δ; see `pld.delta_interval`."""
        _check_epsilon(epsilon)
        return delta_interval(_rounds(events, _POISSON_ADD_OR_REMOVE, self.name), epsilon)[1]


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
        """An upper bound on ε at the best order."""
        _check_delta(delta)
        rounds = _rounds(events, _POISSON_ADD_OR_REMOVE, self.name)
        up = 0.0
        if rounds:
            up = epsilon_from_rdp(self.orders, composed_rdp(rounds, self.orders), delta)
        return _poisson_loss(0.0, up, delta, self.name, Bound.UPPER)

    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """An upper bound on δ at the best order."""
        _check_epsilon(epsilon)
        rounds = _rounds(events, _POISSON_ADD_OR_REMOVE, self.name)
        if not rounds:
            return 0.0
        return delta_from_rdp(self.orders, composed_rdp(rounds, self.orders), epsilon)


ACCOUNTANTS: Mapping[str, Accountant] = MappingProxyType(
    {each.name: each for each in (PLDAccountant(), RDPAccountant())}
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
        raise InvalidValueError(f"accountant is {name!r}; legal is: {', '.join(ACCOUNTANTS)}")
    return ACCOUNTANTS[name]


def _rounds(events: Iterable[RoundEvent], analyses: frozenset[Analysis], name: str) -> Rounds:
    """Rounds by (q, z), once every event is known to have one of the analyses."""
    checked = tuple(events)
    for event in checked:
        sampling = event.sampling
        if (sampling.policy, sampling.relation) not in analyses:
            legal = ", ".join(f"{policy} with {relation}" for policy, relation in sorted(analyses))
            raise UnsupportedEventError(
                f"the {name} accountant has no analysis of {sampling.policy} sampling with "
                f"{sampling.relation} neighbours; legal is: {legal}"
            )
    return compose(checked)


def _poisson_loss(low: float, up: float, delta: float, name: str, bound: Bound) -> PrivacyLoss:
    """A loss under the one analysis of Poisson sampling."""
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    sentence = (
        f"User-level differential privacy for {relation} neighbours, "
        f"{SamplingPolicy.POISSON} sampling of users and Gaussian noise on clipped sums; "
        f"ε is the {bound} of the {name} accountant."
    )
    return PrivacyLoss(low, up, delta, name, relation, sentence)


def _check_delta(delta: float) -> None:
    if not 0.0 < delta < 1.0:
        raise InvalidValueError(f"delta is {delta}; it must be in (0, 1)")


def _check_epsilon(epsilon: float) -> None:
    if not 0.0 <= epsilon < float("inf"):
        raise InvalidValueError(f"epsilon is {epsilon}; it must be at least 0 and finite")
