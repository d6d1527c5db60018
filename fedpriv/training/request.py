"""The interface to the users of a training round.

A `Transport` takes a `RoundRequest` to the users, and returns `fedpriv.privacy.round.PartialSum`s.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS, GaussianMechanism, Metric
from fedpriv.privacy.layout import FloatVector, Layout, VectorGroup
from fedpriv.privacy.round import OpenedSum, PartialSum
from fedpriv.secure_sums.simulation import simulated_nodes
from fedpriv.support.checks import check_range, check_ranges, hold_plain_numbers
from fedpriv.training.optimizers import Parameters, Rate, RateSchedule, at_round, moved, rate_of

if TYPE_CHECKING:
    from torch import Tensor

CONTROL_PREFIX = "control/"  # starts the names of control variates' tensors and of their group


class LocalStep(NamedTuple):
    """The inputs of a step of local training, for one parameter of C users."""

    number: int  # of the step, from 0
    # Gradient of the mean loss, [C, *shape], with FedProx's term; must not be written to.
    gradient: "Tensor"
    parameter: "Tensor"  # each user's parameter, [C, *shape]; must not be written to
    # Returned by the previous step, [C, *shape] each, initially zeros; may be overwritten.
    memory: tuple["Tensor", ...]
    control: "Tensor"  # the server's control variate, [*shape]; 0 if the algorithm has none
    personal: bool  # True if the parameter stays with the user and is never sent


@dataclass(frozen=True)
class ControlVariates:
    """A second vector that users send, as large as the update, and the server's update rule for it.

    The server keeps a control variate c of the shape of the model, initially zero, and sends it
    with each round. A user sends its own difference, Δc_i = c_i − c. The server then sets
    c ← c + β·Δc, where Δc is the release: the noised average of the clipped Δc_i.
    """

    norm: float  # S, the bound on the L2 norm of Δc_i
    share: float  # ω in (0, 1), share of the round's privacy
    rate: float  # β in (0, 1]; averages the noise of about 1/β rounds

    def __post_init__(self) -> None:
        for name, limits in (("norm", "(0, inf)"), ("share", "(0, 1)"), ("rate", "(0, 1]")):
            check_range(f"control_{name}", getattr(self, name), limits)
        _ = VectorGroup.single(CONTROL_PREFIX, self.norm)  # refuses a norm beyond its range

    def group(self, layout: Layout) -> VectorGroup:
        """Return the extra vector group for an update of this layout."""
        tensors = tuple(CONTROL_PREFIX + name for name in layout.names)
        return VectorGroup(CONTROL_PREFIX + "variates", tensors, self.norm, (1.0,) * len(tensors))

    def updated(self, control: Parameters, released: Mapping[str, FloatVector]) -> Parameters:
        """Return the control variate after a round, by parameter, saturated to float32's range."""
        return moved(control, {n: released[CONTROL_PREFIX + n] for n in control}, self.rate)


@dataclass(frozen=True)
class LocalTraining:
    """Local training: minibatch SGD from the round's parameters on the user's own examples.

    One step on all examples is FedSGD; the update is then −learning_rate × gradient.

    A local algorithm is a frozen dataclass derived from this one. It may add fields, and overrides
    `direction`, `memories` if it keeps tensors from step to step, and `control` if users send a
    control variates with their update.

    Privacy: nothing here is trusted. Each user's update is clipped afterwards, group by group. The
    memory of an algorithm starts at zero for each user in each round and is discarded afterwards.
    """

    # Step size > 0; `at` replaces a schedule by its value in a round.
    learning_rate: Rate
    batch_size: int | None = None  # examples per step; None: one batch of all of a user's examples
    # Exactly one is set: passes over the examples, each in a fresh order, or a number of batches.
    epochs: int | None = None
    steps: int | None = None
    momentum: float = 0.0  # heavy-ball, in [0, 1); the velocity starts at 0 in every round
    # μ ≥ 0 of FedProx (Li et al. 2020): for every algorithm, the gradient of μ/2·‖y − x‖² is added
    # to that of the loss and pulls y towards the round's parameters x.
    proximal: float = 0.0
    # The most examples of a user that count in a round, chosen by the user's key; None: all count.
    # It bounds the work that one user can cause a node.
    max_examples: int | None = None

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        rate = self.learning_rate
        if not isinstance(rate, RateSchedule):
            check_range("learning_rate", rate, "(0, inf)")
        if (self.epochs is None) == (self.steps is None):
            raise InvalidValueError(
                f"epochs is {self.epochs} and steps is {self.steps}; exactly one must be given"
            )
        check_ranges(self, batch_size="whole?", epochs="whole?", steps="whole?")
        check_ranges(self, momentum="[0, 1)", proximal="[0, inf)", max_examples="whole?")
        if self.control is not None and self.batch_size is not None:
            raise InvalidValueError(
                f"batch_size is {self.batch_size}; with control variates it must be absent, since "
                "a user's control variate is the gradient on all of its examples"
            )

    @property
    def rate(self) -> float:
        """The learning rate as a number; InvalidValueError if it is still a schedule."""
        return rate_of(self.learning_rate)

    def at(self, number: int) -> Self:
        """Return the settings for a round, from 1, with a schedule replaced by its value."""
        return at_round(self, number)

    @property
    def memories(self) -> int:
        """Number of tensors per parameter that a user keeps from step to step."""
        return int(self.momentum > 0.0)

    @property
    def control(self) -> ControlVariates | None:
        """Control variates if users send their first memory with the update, else None."""
        return None

    def direction(self, step: LocalStep) -> tuple["Tensor", tuple["Tensor", ...]]:
        """Return the direction [C, *shape] of a step, and the memory for the next step.

        A step subtracts rate × direction from the parameter. Each user's numbers may depend only on
        that user's own. Products and sums should be separate operations: torch may round fused ones
        differently at the end of a loop over all users. The default direction is the velocity,
        velocity ← momentum · velocity + gradient.
        """
        if not self.momentum:
            return step.gradient, ()
        velocity = step.memory[0].mul_(self.momentum).add_(step.gradient)
        return velocity, (velocity,)


@dataclass(frozen=True)
class RoundRequest:
    """Everything a node needs to take part in an attempt at a training round."""

    run: str
    round: int  # from 1
    attempt: int  # at this round, from 0
    parameters: Parameters  # in the order of the update's layout
    clipping: Clipping  # of a user's whole contribution: update, metrics and indicator
    local: LocalTraining
    users: npt.NDArray[np.int64]  # positions of the cohort in the population, ascending; secret
    local_key: bytes  # 32 bytes; nodes derive the order of examples and dropout masks from it
    metrics: tuple[Metric, ...] = ()  # reported by users in addition to their update
    # Running statistics of normalisation layers at the start of the round, by name.
    statistics: Parameters = field(default_factory=dict)
    # The server's control variate of each parameter, if the local algorithm has any.
    control: Parameters = field(default_factory=dict)

    @property
    def measured(self) -> tuple[Metric, ...]:
        """The metrics to compute: all except the count of contributors, which is 1 per user."""
        return tuple(metric for metric in self.metrics if metric != CONTRIBUTORS)


class Transport(ABC):
    """Turns a request into partial sums, in process or across machines.

    Guarantees of every implementation:

    * each user of the request is in at most one partial sum, clipped as its vector groups state;
    * a user's contribution is a function of that user's own data, the request and the user's own
      key, to the last bit: the sum over a cohort is the sum of its users' separate contributions;
    * a user that fails, is late, absent or malformed contributes the zero vector;
    * no action of a user or a node raises here;
    * users outside the request never contribute.
    """

    @abstractmethod
    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the partial sums of a round, in any order; there may be none.

        Raises StoppedError if the server was asked to stop; then the round releases nothing.
        """

    def collect_masked(
        self, request: RoundRequest, mechanism: GaussianMechanism, dropout: float
    ) -> Callable[[], OpenedSum | None]:
        """Send a request without users to nodes that draw them; see `privacy.round.secure_round`.

        By default the nodes are simulated here, and each drops out with probability `dropout`.
        """

        def collect(users: npt.NDArray[np.int64]) -> Iterator[PartialSum]:
            return self.collect(replace(request, users=users))

        binding = f"{request.run}/{request.round}/{request.attempt}"
        return simulated_nodes(mechanism, binding, collect, request.local_key, dropout)

    def prepare(self, request: RoundRequest) -> None:  # noqa: B027 - most need nothing
        """Wait until a round can begin; the request has no users yet, since none are drawn.

        The wait and the errors must not depend on anything secret. If this raises StoppedError or
        DeclinedError, no round takes place.
        """

    def release_resources(self) -> None:  # noqa: B027 - most need nothing
        """Free resources held for the next round; a next round may still follow."""
