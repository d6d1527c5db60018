"""What an accountant is, and what it says: the seam between events and (ε, δ)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fedpriv.accounting.rounds import Rounds
from fedpriv.accounting.strategy import compose
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import (
    EventKind,
    NeighbouringRelation,
    RoundEvent,
    SamplingPolicy,
    kinds_text,
)

GAUSSIAN: tuple[EventKind, ...] = (
    (SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.EVERY_USER, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.EVERY_USER, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.SHUFFLED, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.SHUFFLED, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.SEPARATED, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.SEPARATED, NeighbouringRelation.REPLACE_ONE),
)
"""What costs no more than the Poisson-subsampled Gaussian of `events.compose`, q = 1 included.

Poisson and every-user rounds cost just that, and so does a separated series whose sensitivity is
exact. A shuffled pass costs at most one Gaussian, because in every order of the users only one of
its batches has the user (joint convexity). It can cost less, though much more than a Poisson sample
(Chua et al. 2024).
"""


class Bound(StrEnum):
    """What kind of statement an ε is, in words for readers."""

    UPPER = "upper bound"
    """The true ε is at most this."""
    INTERVAL = "interval"
    """The true ε is at most this and at least `epsilon_low`."""
    ESTIMATE = "estimate"
    """Near the true ε for many rounds; it can be below it, so it is no guarantee."""


@dataclass(frozen=True)
class PrivacyLoss:
    """What events cost together, for the least ε that holds at δ.

    Attributes:
        epsilon_low: the true ε is at least this; 0 where the accountant cannot tell.
        epsilon: the true ε is at most this: the number to report. ∞ if no finite ε is proven.
        delta: δ in (0, 1).
        accountant: its name in `ACCOUNTANTS`.
        relation: which two populations are compared.
        bound: what kind of statement `epsilon` is; the two lines above hold for bounds only.
        assumptions: one sentence for readers.
    """

    epsilon_low: float
    epsilon: float
    delta: float
    accountant: str
    relation: NeighbouringRelation
    bound: Bound
    assumptions: str

    @property
    def low(self) -> float:
        """The same as `epsilon_low`: the true ε is at least this."""
        return self.epsilon_low

    @property
    def up(self) -> float:
        """The same as `epsilon`: the true ε is at most this."""
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
            UnsupportedEventError: there is no analysis of one of the events, or of all together.
        """

    def upper_epsilon(self, events: Iterable[RoundEvent], delta: float) -> float:
        """ε that the events cost at δ, as `PrivacyBudget` asks for it."""
        return self.epsilon(events, delta).epsilon

    @abstractmethod
    def delta(self, events: Iterable[RoundEvent], epsilon: float) -> float:
        """A δ in [0, 1] for which the events are (ε, δ)-DP.

        Args:
            events: any number of events, in any order.
            epsilon: ε ≥ 0, finite.

        Raises:
            InvalidValueError: ε is out of range.
            UnsupportedEventError: there is no analysis of one of the events, or of all together.
        """


@dataclass(frozen=True)
class CheckedEvents:
    """Events that an accountant has an analysis of, all under one neighbouring relation.

    Attributes:
        events: in any order.
        relation: the relation of all; add-or-remove-one if there is no event.
    """

    events: tuple[RoundEvent, ...]
    relation: NeighbouringRelation

    @property
    def policies(self) -> tuple[SamplingPolicy, ...]:
        """The sampling policies that occur, in order of first use."""
        return tuple(dict.fromkeys(event.sampling.policy for event in self.events))

    def rounds(self, without: SamplingPolicy | None = None) -> Rounds:
        """Rounds by (q, noise per sensitivity), except those of one policy."""
        return compose(event for event in self.events if event.sampling.policy != without)

    def rounds_of(self, policy: SamplingPolicy) -> Rounds:
        """Rounds by (q, noise per sensitivity) of one policy."""
        return compose(event for event in self.events if event.sampling.policy == policy)

    def loss(self, low: float, up: float, delta: float, name: str, bound: Bound) -> PrivacyLoss:
        """A loss, with the sentence that says what was assumed."""
        policies = " and ".join(self.policies) or "no"
        article = "an" if bound[0] in "aeiou" else "a"
        sentence = (
            f"User-level differential privacy for {self.relation} neighbours, "
            f"{policies} sampling of users and Gaussian noise on clipped sums; "
            f"the {name} accountant gives ε as {article} {bound}."
        )
        return PrivacyLoss(low, up, delta, name, self.relation, bound, sentence)

    def interval(
        self,
        low: float,
        up: float,
        delta: float,
        name: str,
        complete: bool,  # noqa: FBT001
    ) -> PrivacyLoss:
        """A loss between two ends; an upper bound where the lower one leaves out some events."""
        if not low <= up:
            raise AssertionError(f"the ends contradict each other: {low} > {up}")
        return self.loss(low, up, delta, name, Bound.INTERVAL if complete else Bound.UPPER)


def checked(
    events: Iterable[RoundEvent], name: str, legal: tuple[EventKind, ...] = GAUSSIAN
) -> CheckedEvents:
    """The events, once every one is known to be legal and all have one neighbouring relation.

    Raises:
        UnsupportedEventError: an event is none of the `legal` ones; names the accountant and them.
            Or two events differ in their relation, so that no one ε says what both cost.
    """
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
    return CheckedEvents(kept, next(iter(relations), NeighbouringRelation.ADD_OR_REMOVE_ONE))


def check_epsilon(epsilon: float) -> None:
    """Raise InvalidValueError unless ε is finite and not negative."""
    if not 0.0 <= epsilon < float("inf"):
        raise InvalidValueError(f"epsilon is {epsilon}; it must be at least 0 and finite")
