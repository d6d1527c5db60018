"""The seam between the server's round and whatever hosts the users."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.contribution import Clipping, IntegerVector
from fedpriv.privacy.metrics import Metric


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
