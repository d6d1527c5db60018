"""What an accountant is, and what it says: the seam between events and (ε, δ)."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fedpriv.accounting.events import NeighbouringRelation, RoundEvent, SamplingPolicy, compose
from fedpriv.accounting.loss import Rounds
from fedpriv.errors import InvalidValueError, UnsupportedEventError

_POISSON_ADD_OR_REMOVE = frozenset(
    {(SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE)}
)


class Bound(StrEnum):
    """What kind of statement an ε is, in words for readers."""

    UPPER = "upper bound"
    """The true ε is at most this."""
    INTERVAL = "certified interval"
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


class Accountant(ABC):
    """Prices events; all its numbers are on the safe side, unless they are tagged as estimates.

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


def rounds_of(events: Iterable[RoundEvent], name: str) -> Rounds:
    """Rounds by (q, z), once every event is known to be Poisson-sampled under add-or-remove-one.

    Raises:
        UnsupportedEventError: an event is something else; names the accountant and what is legal.
    """
    checked = tuple(events)
    for event in checked:
        sampling = event.sampling
        if (sampling.policy, sampling.relation) not in _POISSON_ADD_OR_REMOVE:
            legal = ", ".join(
                f"{policy} with {relation}" for policy, relation in sorted(_POISSON_ADD_OR_REMOVE)
            )
            raise UnsupportedEventError(
                f"the {name} accountant has no analysis of {sampling.policy} sampling with "
                f"{sampling.relation} neighbours; legal is: {legal}"
            )
    return compose(checked)


def poisson_loss(low: float, up: float, delta: float, name: str, bound: Bound) -> PrivacyLoss:
    """A loss under the one analysis of Poisson sampling."""
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    sentence = (
        f"User-level differential privacy for {relation} neighbours, "
        f"{SamplingPolicy.POISSON} sampling of users and Gaussian noise on clipped sums; "
        f"ε is the {bound} of the {name} accountant."
    )
    return PrivacyLoss(low, up, delta, name, relation, bound, sentence)


def check_delta(delta: float) -> None:
    """Raise InvalidValueError unless δ is in (0, 1)."""
    if not 0.0 < delta < 1.0:
        raise InvalidValueError(f"delta is {delta}; it must be in (0, 1)")


def check_epsilon(epsilon: float) -> None:
    """Raise InvalidValueError unless ε is finite and not negative."""
    if not 0.0 <= epsilon < float("inf"):
        raise InvalidValueError(f"epsilon is {epsilon}; it must be at least 0 and finite")
