"""Algorithms for local training, and their names in a configuration.

Each algorithm is one frozen class with the fields of `LocalTraining` and its own fields. The
argument for privacy is the same for all: a user's contribution is a function of the user's own data
and the round's request, and is clipped afterwards to the norms of the round's vector groups. Users
keep no results.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from fedpriv.errors import InvalidValueError
from fedpriv.support.checks import check_range, check_ranges, is_whole
from fedpriv.training.request import ControlVariates, LocalStep, LocalTraining

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SGD(LocalTraining):
    """Minibatch SGD on a user's own examples, with heavy-ball momentum and FedProx's term.

    One step on all examples is FedSGD (McMahan et al. 2017); `proximal` > 0 is FedProx
    (Li et al. 2020). The fields are those of `LocalTraining`. Give either `epochs` or `steps`. The
    learning rate may be a schedule over rounds, as it may for server optimisers.

    >>> SGD(0.5, batch_size=10, epochs=2).proximal
    0.0
    """


@dataclass(frozen=True)
class AdamW(LocalTraining):
    """Adam with decoupled weight decay (Loshchilov & Hutter 2019, algorithm 2), as in torch.

    m ← β₁·m + (1 − β₁)·g;  v ← β₂·v + (1 − β₂)·g²;  in step t, from 1,
    y ← y − η·(m/(1 − β₁ᵗ)/(√(v/(1 − β₂ᵗ)) + ε) + λ·y).

    Privacy: m, v and t start at zero for each user in each round and are discarded after it. The
    update, which is clipped like any other, therefore depends only on the user's own data and the
    model.
    """

    weight_decay: float = 0.01  # λ ≥ 0
    beta1: float = 0.9  # in [0, 1)
    beta2: float = 0.999  # in [0, 1)
    epsilon: float = 1e-8  # ε > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_momentum(self, "beta1 is in its place")
        check_ranges(self, beta1="[0, 1)", beta2="[0, 1)", weight_decay="[0, inf)")
        check_range("epsilon of AdamW", self.epsilon, "(0, inf)")

    @property
    def memories(self) -> int:
        """Two tensors per parameter: m and v."""
        return 2

    def direction(self, step: LocalStep) -> tuple["Tensor", tuple["Tensor", ...]]:
        """Return the direction [C, *shape] of a step, and the pair (m, v)."""
        steps, (m, v) = step.number + 1, step.memory
        m = m.mul_(self.beta1).add_(step.gradient * (1.0 - self.beta1))
        v = v.mul_(self.beta2).add_(step.gradient.square() * (1.0 - self.beta2))
        root = (v / (1.0 - self.beta2**steps)).sqrt_().add_(self.epsilon)
        direction = (m / (1.0 - self.beta1**steps)).div_(root)
        return direction.add_(step.parameter * self.weight_decay), (m, v)


@dataclass(frozen=True)
class Scaffold(LocalTraining):
    """SCAFFOLD (Karimireddy et al. 2020, algorithm 1) with option I, without state at users.

    At the round's model x, a user's control variate is the gradient c_i = ∇f_i(x) on all of the
    user's examples. Each step is y ← y − η·(∇f_i(y) − c_i + c): it follows the common direction c,
    corrected by the change of the user's own gradient since x. In addition to the update, the user
    sends Δc_i = c_i − c.

    In the paper, users keep c_i until they take part again. Here they compute c_i again in each
    round, as the gradient of the first step, and need no state. The server then sets
    c ← c + β·Δc, with β in place of the paper's |S|/N.

    Privacy: Δc_i is a separate vector group, clipped to `control_norm`, in the same round: one
    cohort, one query, one charge. The group gets `control_share` of the round's privacy, at the
    expense of the update's groups: in total Σ_g (Δ_g/σ_g)² is 1/z², as it is without control
    variates. c was released. Users have no state, so a user's contribution to a round depends only
    on that round's request and the user's own data.
    """

    control_norm: float = field(kw_only=True)  # S > 0, the bound on the L2 norm of Δc_i
    control_share: float = 0.3  # in (0, 1), of the round's privacy
    control_rate: float = 0.5  # β in (0, 1]

    def __post_init__(self) -> None:
        super().__post_init__()
        _refuse_momentum(self, "control variates take its place")

    @property
    def memories(self) -> int:
        """One tensor per parameter: Δc_i."""
        return 1

    @property
    def control(self) -> ControlVariates:
        """The clipping norm of Δc_i, its share of privacy, and the server's rate β."""
        return ControlVariates(self.control_norm, self.control_share, self.control_rate)

    def direction(self, step: LocalStep) -> tuple["Tensor", tuple["Tensor", ...]]:
        """Return the direction ∇f_i(y) − Δc_i, [C, *shape], and Δc_i as the only memory."""
        change = step.memory[0] if step.number else step.gradient - step.control
        return step.gradient - change, (change,)


@dataclass(frozen=True)
class FedRecon(LocalTraining):
    """Federated reconstruction (Singhal et al. 2021, algorithm 1) on all of a user's examples.

    In the first `personal_steps` steps, a user trains only the task's personal parameters, at
    `personal_rate`, from initial values that are the same for all users. In the remaining steps,
    the user trains only the other parameters. The paper splits a user's examples into a support set
    and a query set, one for each phase; here both phases use all examples.

    Privacy: personal parameters are not part of the update, and users do not keep them: each round
    trains them again from the user's own examples and the round's parameters. The update, which is
    clipped like any other, therefore depends only on the user's own data and the model. A model
    that is personalised later is a function of released numbers and of that user's data.
    """

    personal_steps: int = field(kw_only=True)  # from 1 to steps − 1
    personal_rate: float = field(kw_only=True)  # step size > 0 of the personal parameters

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps is None:
            raise InvalidValueError(
                f"epochs of FedRecon is {self.epochs}; give steps instead, the first of which "
                "train the personal parameters"
            )
        if not is_whole(self.personal_steps, self.steps - 1):
            setting = f"personal_steps is {self.personal_steps!r} of {self.steps} steps"
            raise InvalidValueError(f"{setting}; it must be a whole number from 1 to steps - 1")
        check_ranges(self, personal_rate="(0, inf)")

    def direction(self, step: LocalStep) -> tuple["Tensor", tuple["Tensor", ...]]:
        """Return SGD's direction in the parameter's own phase, else zeros; and the memory.

        The direction is [C, *shape]. That of a personal parameter is scaled from the learning rate
        to `personal_rate`.
        """
        if step.personal != (step.number < self.personal_steps):
            return step.gradient.new_zeros(step.gradient.shape), step.memory
        direction, memory = super().direction(step)
        return direction * (self.personal_rate / self.rate) if step.personal else direction, memory


GRADIENT = SGD(1.0, steps=1)
"""The update is minus the gradient of the mean loss. If the unit is an example or a microbatch, no
other local training is allowed; the server sets the step size (Abadi et al. 2016, Algorithm 1)."""

ALGORITHMS: Mapping[str, type[LocalTraining]] = {
    "sgd": SGD,
    "adamw": AdamW,
    "scaffold": Scaffold,
    "fedrecon": FedRecon,
}
"""Algorithms by name, as local.algorithm in a configuration; nodes accept only these."""

COMMON = tuple(field.name for field in fields(LocalTraining))
"""The fields that all algorithms have."""


def _refuse_momentum(local: LocalTraining, reason: str) -> None:
    if local.momentum:
        setting = f"momentum of {type(local).__name__} is {local.momentum}"
        raise InvalidValueError(f"{setting}; it must be 0, as {reason}")
