"""Gradient descent of many users at once.

Products and sums are operations of their own: where a loop over all lanes ends, torch may round
what it fuses elsewhere, and who is in the last lane would then count.

Local training of users by torch.func, whatever their model is made of.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.func import grad, vmap

from fedpriv.engine.batches import Batches
from fedpriv.engine.task import Activations, Task, outputs_of
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.privacy.round import LocalTraining


@dataclass(frozen=True)
class Descent:
    """Where C users are on their way from the same parameters.

    A step works in the memory of the one before, as fresh memory costs more: only the newest
    descent may be used.

    Attributes:
        start: shared parameters, which nobody writes to.
        local: learning rate, momentum and proximal term.
        current: parameters of each user, [C, *shape]; before the first step those of the start.
        velocity: of each user, [C, *shape]; empty before the first step and without momentum.
        pending: whether `current` is still the direction of the first step, to be taken when it is
            known whether users take another.
    """

    start: TorchTensors
    local: LocalTraining
    current: TorchTensors
    velocity: TorchTensors = field(default_factory=dict)
    pending: bool = False

    @classmethod
    def begin(cls, start: TorchTensors, local: LocalTraining) -> "Descent":
        """Before the first step."""
        return cls(start, local, start)

    @property
    def begun(self) -> bool:
        """Whether users may differ."""
        return self.current is not self.start

    def placed(self) -> "Descent":
        """With parameters as they are, for another step."""
        if not self.pending:
            return self
        rate = self.local.learning_rate
        current = {n: self.start[n] - d * rate for n, d in self.current.items()}
        return replace(self, current=current, pending=False)

    def of_lanes(self, lanes: int) -> TorchTensors:
        """Parameters of each of C users, [C, *shape]; nobody writes to them."""
        return self.current if self.begun else same_for_all(self.current, lanes)

    def after(self, gradients: TorchTensors, active: torch.Tensor | None) -> "Descent":
        """Take a step from parameters that are placed.

        Args:
            gradients: of each user, [C, *shape]; two may share memory, so none is written to.
            active: [C] whether a user has a step, or None if all have.
        """
        directions = gradients
        if self.begun and self.local.proximal:
            directions = {
                name: (self.current[name] - self.start[name]).mul_(self.local.proximal).add_(d)
                for name, d in directions.items()
            }
        if self.local.momentum:
            directions = {
                name: self.velocity[name].mul_(self.local.momentum).add_(d)
                if self.begun
                else d.clone()
                for name, d in directions.items()
            }
        masked = directions
        if active is not None:
            masked = {name: _masked(d, active) for name, d in directions.items()}
        velocity = directions if self.local.momentum else {}
        if not self.begun:
            return replace(self, current=masked, velocity=velocity, pending=True)
        rate = self.local.learning_rate
        current = {n: self.current[n].sub_(d * rate) for n, d in masked.items()}
        return replace(self, current=current, velocity=velocity)

    def updates(self) -> TorchTensors:
        """Parameters of each user minus those at the start: [C, *shape]."""
        if self.pending:
            return {name: d * -self.local.learning_rate for name, d in self.current.items()}
        return {name: end.sub_(self.start[name]) for name, end in self.current.items()}


def same_for_all(parameters: TorchTensors, lanes: int) -> TorchTensors:
    """Parameters of each of L lanes that are all in one place: a stride of 0 says so."""
    return {
        name: p.as_strided((lanes, *p.shape), (0, *p.stride())) for name, p in parameters.items()
    }


def _masked(direction: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """A direction [C, *shape] that is zero for users who are not active [C]."""
    return torch.where(active.view(-1, *[1] * (direction.dim() - 1)), direction, 0.0)


Gradient = Callable[[TorchTensors, torch.Tensor, torch.Tensor, torch.Tensor], TorchTensors]
MeanLoss = Callable[[TorchTensors, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def train_chunk(
    task: Task,
    parameters: TorchTensors,
    constants: TorchTensors,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
) -> TorchTensors:
    """Train the users of a chunk side by side, from the same parameters, each on its own batches.

    Args:
        task: model and loss; training draws no random numbers.
        parameters: the model at the start of the round.
        constants: frozen parameters and buffers.
        batches: of the users.
        local: learning rate, momentum and proximal term.
        activations: of the model.

    Returns:
        Updates (trained minus initial parameters), each tensor [L, *shape].
    """
    # In the first step, too, each user has parameters of its own: one product for all users would
    # round a user's numbers according to their place in it.
    gradient = vmap(grad(_mean_loss_of(task, constants, activations)), randomness="error")
    return _descended(parameters, batches, local, gradient)


def train_alone(
    task: Task,
    parameters: TorchTensors,
    constants: TorchTensors,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
) -> TorchTensors:
    """Train one user as the model itself would; arguments and result as of `train_chunk`, L = 1."""
    loss = _mean_loss_of(task, constants, activations)

    def gradient(
        current: TorchTensors, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
    ) -> TorchTensors:
        own = {name: p[0].detach().requires_grad_() for name, p in current.items()}
        found = torch.autograd.grad(
            loss(own, x[0], y[0], weights[0]), [*own.values()], materialize_grads=True
        )
        return {name: g.unsqueeze(0) for name, g in zip(own, found, strict=True)}

    return _descended(parameters, batches, local, gradient)


def _descended(
    parameters: TorchTensors,
    batches: Batches,
    local: LocalTraining,
    gradient: Gradient,
) -> TorchTensors:
    descent = Descent.begin(parameters, local)
    lanes, steps, _ = batches.shape
    for step in range(steps):
        descent = descent.placed()
        x, y, weights = batches.x[:, step], batches.y[:, step], batches.weights[:, step]
        directions = gradient(descent.of_lanes(lanes), x, y, weights)
        descent = descent.after(directions, batches.active(step))
    return descent.updates()


def _mean_loss_of(
    task: Task, constants: Mapping[str, torch.Tensor], activations: Activations
) -> MeanLoss:
    """Mean loss over a user's real examples."""

    def mean_loss(
        trainable: TorchTensors, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        outputs = outputs_of(task.model, {**trainable, **constants}, x, activations, x.device)
        losses = task.losses_of(outputs, y)
        return (losses * weights).sum() / weights.sum().clamp(min=1.0)

    return mean_loss
