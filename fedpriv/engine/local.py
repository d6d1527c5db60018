"""Local training of a chunk of users at once, whatever their model is made of."""

from collections.abc import Callable

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
    """Train C users from the same parameters, each on its own batches.

    Args:
        task: model and loss.
        parameters: the model at the start of the round.
        constants: frozen parameters and buffers.
        batches: of the users.
        local: learning rate, momentum and proximal term.
        activations: of the model.

    Returns:
        Updates (trained minus initial parameters), each tensor [C, *shape].
    """
    first, later = (_gradient(task, constants, activations, shared=s) for s in (True, False))
    descent = Descent.begin(parameters, local)
    for step in range(len(batches.full)):
        descent = descent.placed()
        gradient = later if descent.begun else first
        x, y, weights = batches.x[:, step], batches.y[:, step], batches.weights[:, step]
        directions = gradient(descent.current, x, y, weights)
        descent = descent.after(directions, batches.active(step))
    return descent.updates()


def mean_loss_of(
    task: Task, constants: TorchTensors, activations: Activations = "float32"
) -> MeanLoss:
    """Mean loss over a user's real examples."""

    def mean_loss(
        trainable: TorchTensors, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        outputs = outputs_of(task.model, {**trainable, **constants}, x, activations, x.device)
        losses = task.losses_of(outputs, y)
        return (losses * weights).sum() / weights.sum().clamp(min=1.0)

    return mean_loss


def _gradient(
    task: Task, constants: TorchTensors, activations: Activations, *, shared: bool
) -> Gradient:
    """Per-user gradient of the mean loss over a user's real examples.

    While the parameters are still shared by all users, the forward pass is one matrix product.
    """
    in_dims = (None if shared else 0, 0, 0, 0)
    loss = mean_loss_of(task, constants, activations)
    return vmap(grad(loss), in_dims=in_dims, randomness="different")
