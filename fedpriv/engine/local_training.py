"""Local training: from gradients to updates, for the users of a chunk at once.

An `Algorithm` says what a step does with a gradient; `algorithm_of` finds it by the type of the
round's `LocalTraining`. `SGD` is built in. To add another, derive a frozen dataclass from
`LocalTraining` for its settings and register a function that makes its algorithm:

    @algorithm_of.register
    def _(local: MyTraining) -> Algorithm: ...

Products and sums are operations of their own: where a loop over all lanes ends, torch may round
what it fuses elsewhere, and a user's place in the chunk would then count.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import singledispatch

import torch
from torch.func import grad, vmap

from fedpriv.engine.batches import Batches
from fedpriv.engine.task import Activations, RoundParameters, Task, outputs_of
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.privacy.round import LocalTraining


class Algorithm(ABC):
    """What a step of local training does with a gradient; each user on its own.

    Attributes:
        learning_rate: a step goes this far against its direction.
        linear: whether directions are linear in gradients, displacement and memory, with the same
            coefficients for all parameters. Others train without low-rank corrections.
        plain: whether the direction is the gradient itself.
        memories: how many tensors like its parameters a user keeps from step to step.
    """

    learning_rate: float
    linear: bool
    plain: bool
    memories: int

    @abstractmethod
    def direction(
        self,
        gradient: torch.Tensor,
        place: tuple[torch.Tensor, torch.Tensor] | None,
        memory: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The direction of a step, and what to remember of it.

        Args:
            gradient: of a parameter of each user, [C, *shape]; not to be written to.
            place: that parameter of each user, and the round's [*shape]; None in the first step,
                where they are the same. Not to be written to.
            memory: of the step before, to be written to at will; None in the first step.
        """


class SGD(Algorithm):
    """SGD with heavy-ball momentum and FedProx's proximal term (Li et al. 2020)."""

    def __init__(self, learning_rate: float, momentum: float = 0.0, proximal: float = 0.0) -> None:
        self.learning_rate, self.momentum, self.proximal = learning_rate, momentum, proximal
        self.linear = True
        self.plain = momentum == proximal == 0.0
        self.memories = int(momentum > 0.0)

    def direction(
        self,
        gradient: torch.Tensor,
        place: tuple[torch.Tensor, torch.Tensor] | None,
        memory: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Velocity ← momentum · velocity + gradient + proximal · displacement."""
        if place is not None and self.proximal:
            gradient = (place[0] - place[1]).mul_(self.proximal).add_(gradient)
        if not self.momentum:
            return gradient, None
        velocity = gradient.clone() if memory is None else memory.mul_(self.momentum).add_(gradient)
        return velocity, velocity


@singledispatch
def algorithm_of(local: LocalTraining) -> Algorithm:
    """The algorithm of a round, by the type of its local training."""
    return SGD(local.learning_rate, local.momentum, local.proximal)


@dataclass(frozen=True)
class Descent:
    """Where C users are on their way from the same parameters.

    A step works in the memory of the one before, as fresh memory costs more: only the newest
    descent may be used.

    Attributes:
        start: shared parameters, never written to.
        algorithm: of the steps.
        current: parameters of each user, [C, *shape]; before the first step those of the start.
        memory: of the algorithm, [C, *shape].
        pending: whether `current` is still the direction of the first step, to be taken when it is
            known whether users take another.
    """

    start: TorchTensors
    algorithm: Algorithm
    current: TorchTensors
    memory: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    pending: bool = False

    @classmethod
    def begin(cls, start: TorchTensors, algorithm: Algorithm) -> "Descent":
        """Before the first step."""
        return cls(start, algorithm, start)

    def placed(self) -> "Descent":
        """With parameters as they are, for another step."""
        if not self.pending:
            return self
        rate = self.algorithm.learning_rate
        current = {n: self.start[n] - d * rate for n, d in self.current.items()}
        return replace(self, current=current, pending=False)

    def of_users(self, count: int) -> TorchTensors:
        """Parameters of each user, [C, *shape], not to be written to."""
        return same_for_all(self.start, count) if self.current is self.start else self.current

    def after(self, gradients: TorchTensors, active: torch.Tensor | None) -> "Descent":
        """Take a step from parameters that are placed.

        Args:
            gradients: of each user, [C, *shape]; two may share memory, so none is written to.
            active: [C] whether a user has a step, or None if all have.
        """
        first = self.current is self.start
        steps, memory = dict[str, torch.Tensor](), dict[str, torch.Tensor | None]()
        for name, gradient in gradients.items():
            place = None if first else (self.current[name], self.start[name])
            found = self.algorithm.direction(gradient, place, self.memory.get(name))
            steps[name], memory[name] = found
        if active is not None:
            steps = {
                name: torch.where(active.view(-1, *[1] * (d.dim() - 1)), d, 0.0)
                for name, d in steps.items()
            }
        if first:
            return replace(self, current=steps, memory=memory, pending=True)
        rate = self.algorithm.learning_rate
        current = {n: self.current[n].sub_(d * rate) for n, d in steps.items()}
        return replace(self, current=current, memory=memory)

    def updates(self) -> TorchTensors:
        """Parameters of each user minus those at the start: [C, *shape]."""
        if self.pending:
            return {name: d * -self.algorithm.learning_rate for name, d in self.current.items()}
        return {name: end.sub_(self.start[name]) for name, end in self.current.items()}


def same_for_all(parameters: TorchTensors, count: int) -> TorchTensors:
    """Parameters of each of C users that are all in one place: a stride of 0 says so."""
    return {
        name: p.as_strided((count, *p.shape), (0, *p.stride())) for name, p in parameters.items()
    }


Gradient = Callable[[TorchTensors, torch.Tensor, torch.Tensor, torch.Tensor], TorchTensors]


def train_chunk(
    task: Task,
    start: RoundParameters,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
) -> TorchTensors:
    """Train the users of a chunk side by side by `torch.func`, whatever the model is made of.

    Training draws no random numbers.

    Returns:
        Updates (trained minus initial parameters), each tensor [L, *shape].
    """
    # In the first step, too, each user has parameters of its own: one product for all users would
    # round a user's numbers according to their place in it.
    loss = _mean_loss_of(task, start.constants, activations)
    return _trained(start, batches, local, vmap(grad(loss), randomness="error"))


def train_alone(
    task: Task,
    start: RoundParameters,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
) -> TorchTensors:
    """Train one user as the model itself would; arguments and result as of `train_chunk`, L = 1."""
    loss = _mean_loss_of(task, start.constants, activations)

    def gradient(
        current: TorchTensors, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
    ) -> TorchTensors:
        own = {name: p[0].detach().requires_grad_() for name, p in current.items()}
        found = torch.autograd.grad(
            loss(own, x[0], y[0], weights[0]), [*own.values()], materialize_grads=True
        )
        return {name: g.unsqueeze(0) for name, g in zip(own, found, strict=True)}

    return _trained(start, batches, local, gradient)


def _trained(
    start: RoundParameters, batches: Batches, local: LocalTraining, gradient: Gradient
) -> TorchTensors:
    descent = Descent.begin(start.parameters, algorithm_of(local))
    lanes, steps, _ = batches.shape
    for step in range(steps):
        descent = descent.placed()
        examples = (t[:, step] for t in (batches.x, batches.y, batches.weights))
        gradients = gradient(descent.of_users(lanes), *examples)
        descent = descent.after(gradients, batches.active(step))
    return descent.updates()


def _mean_loss_of(
    task: Task, constants: TorchTensors, activations: Activations
) -> Callable[[TorchTensors, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Mean loss over a user's real examples."""

    def mean_loss(
        trainable: TorchTensors, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        outputs = outputs_of(task.model, {**trainable, **constants}, x, activations, x.device)
        losses = task.losses_of(outputs, y)
        return (losses * weights).sum() / weights.sum().clamp(min=1.0)

    return mean_loss
