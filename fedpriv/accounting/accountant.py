"""What an accountant is, and what it says: the seam between events and (ε, δ)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fedpriv.accounting.round_counts import Rounds
from fedpriv.accounting.strategy import compose
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import (
    ANALYSED,
    EventKind,
    NeighbouringRelation,
    RoundEvent,
    SamplingPolicy,
    kinds_text,
)

GAUSSIAN: tuple[EventKind, ...] = tuple(
    (policy, relation)
    for policy, relation in ANALYSED
    if policy in (SamplingPolicy.EVERY_USER, SamplingPolicy.SHUFFLED, SamplingPolicy.SEPARATED)
    or (policy, relation) == (SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE)
)
"""What costs no more than the Poisson-subsampled Gaussian of `strategy.compose`, q = 1 included.

Poisson and every-user rounds cost exactly that, and so does a separated series whose sensitivity is
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
    """Near the true ε for many rounds; it can be below it, so it is not a guarantee."""


@dataclass(frozen=True)
class PrivacyLoss:
    """What events cost together, for the least ε that holds at δ.

    Attributes:
        epsilon_low: the true ε is at least this; 0 where the accountant cannot tell.
        epsilon: the true ε is at most this: the number to report. ∞ if no finite ε is proven.
        delta: δ in [1e-60, 1).
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
class CheckedEvents:
    """Events that an accountant has an analysis of, all under one neighbouring relation."""

    events: tuple[RoundEvent, ...]
    relation: NeighbouringRelation

    def rounds(self) -> Rounds:
        """Rounds by (q, noise per sensitivity)."""
        return compose(self.events)

    def loss(self, low: float, up: float, delta: float, name: str, bound: Bound) -> PrivacyLoss:
        """A loss, with the sentence that says what was assumed."""
        if not low <= up:
            raise AssertionError(f"the ends contradict each other: {low} > {up}")
        used = " and ".join(dict.fromkeys(event.sampling.policy for event in self.events)) or "no"
        article = "an" if bound[0] in "aeiou" else "a"
        sentence = (
            f"User-level differential privacy for {self.relation} neighbours, "
            f"{used} sampling of users and Gaussian noise on clipped sums; "
            f"the {name} accountant gives ε as {article} {bound}."
        )
        return PrivacyLoss(low, up, delta, name, self.relation, bound, sentence)


def checked(
    events: Iterable[RoundEvent], name: str, legal: tuple[EventKind, ...] = GAUSSIAN
) -> CheckedEvents:
    """The events, once every one is known to be legal and all have one neighbouring relation."""
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
