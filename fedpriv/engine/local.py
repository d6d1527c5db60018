"""Local training of users by torch.func, whatever their model is made of."""

from collections.abc import Callable, Mapping

import torch
from torch.func import grad, vmap

from fedpriv.engine.batches import Batches
from fedpriv.engine.descent import Descent
from fedpriv.engine.precision import Activations, outputs_of
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.federated.transport import LocalTraining

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
