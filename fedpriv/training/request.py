"""How users are reached in a round of training: a `RoundRequest` goes out over a `Transport`.

`fedpriv.privacy.round.PartialSum`s come back.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS, ControlVariates, Metric
from fedpriv.privacy.round import PartialSum
from fedpriv.support.checks import hold_plain_numbers, is_whole

if TYPE_CHECKING:
    from torch import Tensor


@runtime_checkable
class Rates(Protocol):
    """A learning rate by round, such as a `fedpriv.training.optimizers.RateSchedule`."""

    def at(self, number: int) -> float:
        """The rate in a round, from 1: a function of that number alone, which is public."""


class LocalStep(NamedTuple):
    """Where a step of local training begins, for one of the parameters of each of C users."""

    number: int  # of the step, from 0
    # Of the mean loss, [C, *shape], with FedProx's term; must not be written to.
    gradient: "Tensor"
    parameter: "Tensor"  # the user's own, [C, *shape]; must not be written to
    # What the step before returned, [C, *shape] each and free to be overwritten; at first zeros.
    memory: tuple["Tensor", ...]
    control: "Tensor"  # the server's control variate, [*shape]; 0 where the algorithm has none
    personal: bool  # whether the parameter stays with the user: nothing of it is sent


@dataclass(frozen=True)
class LocalTraining:
    """How a user trains: minibatch SGD from the round's parameters on the user's own examples.

    One step on all examples is FedSGD; the update is then −learning_rate × gradient.

    A local algorithm is a frozen dataclass derived from this one. It adds fields of its own, and
    overrides `direction`, with `memories` if it keeps anything from step to step, and `control` if
    users send a control variate beside their update.

    Privacy: none of this is trusted. What a user sends is clipped afterwards, group by group, and
    what an algorithm keeps begins at zero for each user in each round and is thrown away.
    """

    # Step size > 0; `at` replaces a schedule by its number for a round.
    learning_rate: float | Rates
    batch_size: int | None = None  # examples per step; None: all of a user's in one batch
    # Exactly one is given: passes over the examples, each in a fresh order, or a number of batches.
    epochs: int | None = None
    steps: int | None = None
    momentum: float = 0.0  # heavy-ball, in [0, 1), starting from rest in every round
    # μ ≥ 0 of FedProx (Li et al. 2020): the gradient of μ/2·‖y − x‖², by which y is drawn towards
    # the round's parameters x, is added to that of the loss, whatever the algorithm.
    proximal: float = 0.0
    # The most examples of a user that count in a round, chosen by the user's key; None: all do. It
    # bounds the work that one user can make for a node.
    max_examples: int | None = None

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        rate = self.learning_rate
        if not isinstance(rate, Rates) and not (isinstance(rate, Real) and 0.0 < rate < math.inf):
            raise InvalidValueError(f"learning_rate is {rate!r}; it must be positive and finite")
        if (self.epochs is None) == (self.steps is None):
            raise InvalidValueError(
                f"epochs is {self.epochs} and steps is {self.steps}; exactly one must be given"
            )
        for name in ("batch_size", "epochs", "steps", "max_examples"):
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                legal = "a whole number of at least 1"
                raise InvalidValueError(f"{name} is {value!r}; it must be {legal}")
        for name, below in (("momentum", 1.0), ("proximal", math.inf)):
            value = getattr(self, name)
            if not (isinstance(value, Real) and 0.0 <= float(value) < below):
                raise InvalidValueError(f"{name} is {value!r}; it must be in [0, {below:g})")
        if self.control is not None and self.batch_size is not None:
            raise InvalidValueError(
                f"batch_size is {self.batch_size}; with control variates it must be absent, since "
                "a user's control variate is the gradient on all of its examples"
            )

    @property
    def rate(self) -> float:
        """The learning rate as a number, which a schedule is only `at` a round."""
        if isinstance(self.learning_rate, int | float):
            return self.learning_rate
        found = f"learning_rate is {self.learning_rate}"
        raise InvalidValueError(f"{found}; a step needs its number, that of a round")

    def at(self, number: int) -> Self:
        """Local training in a round, from 1, with the number that a schedule has there."""
        rate = self.learning_rate
        return replace(self, learning_rate=rate.at(number)) if isinstance(rate, Rates) else self

    @property
    def memories(self) -> int:
        """How many tensors like its parameters a user keeps from step to step."""
        return int(self.momentum > 0.0)

    @property
    def control(self) -> ControlVariates | None:
        """What users send beside their update, if they do: the first of their memories."""
        return None

    def direction(self, step: LocalStep) -> tuple["Tensor", tuple["Tensor", ...]]:
        """The direction [C, *shape], against which a step goes by the rate, and what to remember.

        Each user's numbers may depend on its own alone. Products and sums should be operations of
        their own: torch may round what it fuses differently at the end of a loop over all users.
        Here it is the velocity, velocity ← momentum · velocity + gradient.
        """
        if not self.momentum:
            return step.gradient, ()
        velocity = step.memory[0].mul_(self.momentum).add_(step.gradient)
        return velocity, (velocity,)


@dataclass(frozen=True)
class RoundRequest:
    """All that a node needs to know to take part in an attempt at a round of training."""

    run: str
    round: int  # from 1
    attempt: int  # at this round, from 0
    parameters: Mapping[str, npt.NDArray[np.float32]]  # in the order of the update's layout
    clipping: Clipping  # of all that a user sends: its update, metrics and the indicator
    local: LocalTraining
    users: npt.NDArray[np.int64]  # positions of the cohort in the population, ascending; secret
    local_key: bytes  # 32, from which nodes derive the order of examples and dropout masks
    metrics: tuple[Metric, ...] = ()  # what users report beside their update
    # Running statistics of normalisations at the start of the round, by name.
    statistics: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)
    # The server's control variate of each parameter, where the local algorithm has some.
    control: Mapping[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics that must be computed: all but the count of contributors, 1 for each."""
        return tuple(metric for metric in self.metrics if metric != CONTRIBUTORS)


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

        StoppedError means that the server was asked to stop; nothing of the round is released.
        """

    def prepare(self, request: RoundRequest) -> None:  # noqa: B027 - most need nothing
        """Wait until a round can begin; the request has no users, who are not drawn yet.

        What this waits for, and whether it raises, may depend on nothing secret: StoppedError or
        DeclinedError, and no round takes place.
        """

    def release_resources(self) -> None:  # noqa: B027 - most need nothing
        """Release what is kept for the next round, which may come all the same."""
