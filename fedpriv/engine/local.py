"""Local training of a chunk of users at once."""

from collections.abc import Callable

import torch
from torch.func import grad, vmap

from fedpriv.engine.task import Task, TorchTensors
from fedpriv.federated.transport import LocalTraining

Gradient = Callable[[TorchTensors, torch.Tensor, torch.Tensor, torch.Tensor], TorchTensors]


def train_chunk(
    task: Task,
    parameters: TorchTensors,
    constants: TorchTensors,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor,
    local: LocalTraining,
) -> TorchTensors:
    """Train C users from the same parameters, each on its own batches.

    Args:
        task: model and loss.
        parameters: the model at the start of the round.
        constants: frozen parameters and buffers.
        x: [C, S, B, …] inputs of each user, step and example.
        y: [C, S, B, …] targets.
        weights: [C, S, B] 1 for examples, 0 for padding; a step without examples does nothing.
        local: learning rate, momentum and proximal term.

    Returns:
        Updates (trained minus initial parameters), each tensor [C, *shape].
    """
    first, later = _gradient(task, constants, shared=True), _gradient(task, constants, shared=False)
    counts = weights.sum(2)  # [C, S]
    always_active = (counts > 0).all(0).tolist()
    current = parameters
    velocity: TorchTensors = {}
    for step, all_active in enumerate(always_active):
        gradient = later if step > 0 else first
        directions = gradient(current, x[:, step], y[:, step], weights[:, step])
        if local.proximal and step > 0:
            for name, direction in directions.items():
                direction.add_(current[name] - parameters[name], alpha=local.proximal)
        if local.momentum:
            for name, direction in directions.items():
                if step > 0:
                    direction.add_(velocity[name], alpha=local.momentum)
            velocity = directions
        if not all_active:
            directions = _masked(directions, counts[:, step] > 0)
        current = _stepped(step, current, directions, local)
    return {name: end.sub_(parameters[name]) for name, end in current.items()}


def _gradient(task: Task, constants: TorchTensors, *, shared: bool) -> Gradient:
    """Per-user gradient of the mean loss over a user's real examples.

    While the parameters are still shared by all users, the forward pass is one matrix product.
    """

    def mean_loss(
        trainable: TorchTensors, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        losses = task.example_losses(trainable, constants, x, y)
        return (losses * weights).sum() / weights.sum().clamp(min=1.0)

    in_dims = (None if shared else 0, 0, 0, 0)
    return vmap(grad(mean_loss), in_dims=in_dims, randomness="different")


def _masked(directions: TorchTensors, active: torch.Tensor) -> TorchTensors:
    """Directions with zero for users that have no step any more."""
    return {
        name: torch.where(active.view(-1, *[1] * (d.dim() - 1)), d, 0.0)
        for name, d in directions.items()
    }


def _stepped(
    step: int, current: TorchTensors, directions: TorchTensors, local: LocalTraining
) -> TorchTensors:
    """Step against the directions, in memory that is there already: fresh memory costs more."""
    if step > 0:
        for name, tensor in current.items():
            tensor.sub_(directions[name], alpha=local.learning_rate)
        return current
    # The shared parameters must not be written to; the directions may, unless they are the
    # velocity of the next step.
    return {
        name: torch.sub(p, d, alpha=local.learning_rate, out=None if local.momentum else d)
        for (name, p), d in zip(current.items(), directions.values(), strict=True)
    }
