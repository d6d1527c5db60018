"""The seam between the server's round and whatever hosts the users.

Adding up partial sums that may be wrong in every way.

Where rounds are written down, before they ask and release: ledger, participation, budget.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedpriv.errors import BudgetExceededError, InvalidValueError
from fedpriv.ledger.budget import PrivacyBudget
from fedpriv.ledger.events import Randomness, RoundEvent
from fedpriv.ledger.ledger import Charge, Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.privacy.mechanism import Metric


@dataclass(frozen=True)
class LocalTraining:
    """How a user trains: minibatch SGD from the round's parameters on the user's own examples.

    Attributes:
        learning_rate: step size > 0.
        batch_size: examples per step, or None for all of a user's examples in one batch.
        epochs: passes over the user's examples, each in a fresh order; None if `steps` is given.
        steps: number of batches, however many examples the user has; None if `epochs` is given.
        momentum: heavy-ball momentum in [0, 1), starting from rest in every round.
        proximal: μ ≥ 0 of FedProx, pulling towards the round's parameters (Li et al. 2020).
        max_examples: the most examples of a user that count in a round, chosen by the user's key;
            None: all do. It bounds the work that one user can make for a node.

    One step on all examples is FedSGD; the update is then −learning_rate × gradient.

    Raises:
        InvalidValueError: a field is out of range, or not exactly one of epochs and steps is given.
    """

    learning_rate: float
    batch_size: int | None = None
    epochs: int | None = None
    steps: int | None = None
    momentum: float = 0.0
    proximal: float = 0.0
    max_examples: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.learning_rate < float("inf"):
            raise InvalidValueError(f"learning_rate is {self.learning_rate}; it must be positive")
        if (self.epochs is None) == (self.steps is None):
            raise InvalidValueError(
                f"epochs is {self.epochs} and steps is {self.steps}; exactly one must be given"
            )
        for name in ("batch_size", "epochs", "steps", "max_examples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValueError(f"{name} is {value}; it must be at least 1")
        if not 0.0 <= self.momentum < 1.0:
            raise InvalidValueError(f"momentum is {self.momentum}; it must be in [0, 1)")
        if not 0.0 <= self.proximal < float("inf"):
            raise InvalidValueError(f"proximal is {self.proximal}; it must not be negative")


@dataclass(frozen=True)
class RoundRequest:
    """All that a node needs to know to take part in a round.

    Attributes:
        run: name of the run.
        round: number of the round, from 0.
        attempt: number of the attempt at this round, from 0.
        parameters: the model at the start of the round, in the order of the update's layout.
        clipping: how what each user sends is clipped: its update, and metrics and an indicator
            where they are asked for.
        local: how each user trains.
        users: positions of the cohort's users in the enrolled population, ascending; secret.
        local_key: 32 bytes from which nodes derive the order of examples and dropout masks.
        metrics: what users report beside their update, of the round's parameters.
        statistics: running statistics of normalisations at the start of the round, by name.
    """

    run: str
    round: int
    attempt: int
    parameters: Mapping[str, npt.NDArray[np.float32]]
    clipping: Clipping
    local: LocalTraining
    users: npt.NDArray[np.int64]
    local_key: bytes
    metrics: tuple[Metric, ...] = ()
    statistics: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)


@dataclass(frozen=True)
class PartialSum:
    """Sum of the clipped contributions of some users of the cohort.

    Attributes:
        node: who sends it; a second partial sum of the same node in a round is dropped.
        users: how many contributions it holds; secret.
        total: int64[D], in steps of each group's granularity.
        weight: sum of these users' weights in units of 1/c, c the clipping's `weight_cap`; secret.
    """

    node: str
    users: int
    total: IntegerVector
    weight: int


class Transport(ABC):
    """Turns a request into partial sums, in process or across machines.

    Guarantees of every implementation:

    * each user of the request is in at most one partial sum, clipped as the groups say;
    * what a user contributes is a function of that user's own data, the request and the user's own
      key, to the last bit: the sum over a cohort is the sum of what each user gives alone;
    * a user that fails, is late, absent or malformed contributes the zero vector;
    * nothing a user or a node does raises here;
    * users outside the request never contribute.
    """

    @abstractmethod
    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sums of a round, in any order; there may be none.

        Raises:
            StoppedError: whoever runs the server asked it to stop; the round is abandoned.
        """


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CohortSum:
    """What a cohort sent; secret until it is noised.

    Attributes:
        total: int64[D] sum of contributions, in steps.
        weight: sum of the weights of the users in it, in units of 1/c.
    """

    total: IntegerVector
    weight: int


def add_up(partials: Iterable[PartialSum], clipping: Clipping, users: int) -> CohortSum:
    """Sum the partial sums that can be believed.

    A partial sum counts as zero when its node was heard before, when it has the wrong shape or is
    not of integers, when a group's norm passes (users in it) × S_g or, if the group is weighted,
    (their weight) × S_g, when its weight is not from 0 to c × its users, or when more users would
    have contributed than are in the cohort. Nothing here changes a fixed denominator, and what is
    logged names no node. Takes memory for one total; each partial sum is read twice.

    Args:
        partials: in any order.
        clipping: how contributions were made.
        users: size of the cohort.
    """
    total, weight = np.zeros(clipping.layout.dimension, np.int64), 0
    heard: set[str] = set()
    contributed = 0
    for partial in partials:
        known = partial.node in heard
        heard.add(partial.node)
        fits = 0 <= partial.users <= users - contributed
        weighs = 0 <= partial.weight <= partial.users * clipping.weight_cap
        believed = not known and fits and weighs
        if not believed or not clipping.admits(partial.total, partial.users, partial.weight):
            # The name of a node may be that of its one user, and that it was drawn is secret.
            _log.warning("a partial sum counts as zero: it is not valid")
            continue
        contributed += partial.users
        weight += partial.weight
        total += partial.total
    return CohortSum(total, weight)


def merged(node: str, partials: Iterable[PartialSum], dimension: int) -> PartialSum:
    """The partial sum of a node that found several of its own.

    Args:
        node: its name.
        partials: disjoint, over `dimension` numbers each; there may be none.
        dimension: D.
    """
    total = np.zeros(dimension, np.int64)
    users = weight = 0
    for partial in partials:
        total += partial.total
        users += partial.users
        weight += partial.weight
    return PartialSum(node, users, total, weight)


@dataclass(frozen=True)
class Books:
    """Where a run is written down.

    Attributes:
        ledger: what was spent; public.
        participation: who took part; secret, and never exported.
        budget: what may be spent by all runs of the ledger together.
    """

    ledger: Ledger
    participation: ParticipationRecord
    budget: PrivacyBudget

    @classmethod
    @contextmanager
    def open(
        cls, ledger: Path, participation: Path, population: str, budget: PrivacyBudget
    ) -> Iterator[Self]:
        """Open or create ledger and participation record, and close them in the end.

        Raises:
            LedgerError: one cannot be opened or created, or is of another population.
        """
        with (
            Ledger.open_or_create(ledger, population) as opened,
            ParticipationRecord.open_or_create(participation) as record,
        ):
            yield cls(opened, record, budget)

    def refuse_if_beyond(self, event: RoundEvent, what: str) -> None:
        """Ask the budget before users are bothered; `charge` asks again, atomically.

        Args:
            event: what would be charged.
            what: how messages call it.

        Raises:
            BudgetExceededError: the budget would be passed.
        """
        if not self.ledger.admits(event, self.budget):
            raise BudgetExceededError(
                f"{what} would pass the budget of ε = {self.budget.epsilon} at "
                f"δ = {self.budget.delta}; nobody was asked and nothing charged"
            )

    def next_attempt(self, run: str, round_number: int) -> int:
        """The first attempt at a round that nobody was asked for yet, and none after it.

        One that was given up keeps its number, charged or not: an answer to it that comes late must
        not count for the cohort of another.
        """
        return max(
            self.ledger.next_attempt(run, round_number),
            self.participation.next_attempt(run, round_number),
        )

    def record(
        self, run: str, round_number: int, attempt: int, users: npt.NDArray[np.int64]
    ) -> str:
        """Write down a cohort before it is asked, durably; returns the commitment to it.

        Args:
            run: name of the run.
            round_number: from 0.
            attempt: from `next_attempt`.
            users: the cohort, positions in the population.

        Raises:
            LedgerError: the cohort cannot be written.
        """
        return self.participation.record(run, round_number, attempt, users)

    def charge(
        self,
        run: str,
        round_number: int,
        attempt: int,
        commitment: str,
        event: RoundEvent,
        randomness: Randomness,
    ) -> Charge:
        """Charge a round; the charge is durable on return.

        Args:
            run: name of the run.
            round_number: from 0.
            attempt: from `next_attempt`.
            commitment: to its cohort, from `record`.
            event: what is about to be released.
            randomness: where cohort and noise come from.

        Raises:
            BudgetExceededError: the budget would be passed; nothing was charged.
            LedgerError: the books cannot be believed or written; nothing was charged.
        """
        proposed = ProposedCharge(run, round_number, attempt, randomness, event, commitment)
        return self.ledger.charge(proposed, self.budget)
