"""What is trained: a torch module, a loss, and the names of the data fields they read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call

from fedpriv.errors import ModelError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TorchTensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model and how it is judged.

    Attributes:
        model: any module that maps inputs [B, …] to outputs [B, …] without mixing examples and
            without changing its own buffers.
        loss: maps outputs and targets [B, …] to one loss per example [B], or to losses [B, …]
            that are averaged over all but the first axis; e.g. `cross_entropy` with
            `reduction="none"`.
        inputs: name of the field that the model reads.
        targets: name of the field that the loss reads.

    Raises:
        ModelError: a layer depends on other examples or keeps state across them.
    """

    model: nn.Module
    loss: Loss
    inputs: str = "x"
    targets: str = "y"

    def __post_init__(self) -> None:
        for name, layer in self.model.named_modules():
            _refuse_state(name, layer)

    def parameters(self) -> dict[str, npt.NDArray[np.float32]]:
        """Copy of the trainable parameters, in the order of the model: the update's layout."""
        return {
            name: p.detach().to("cpu", torch.float32).numpy().copy()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def constants(self, device: torch.device) -> TorchTensors:
        """Frozen parameters and buffers, which no user changes."""
        frozen = {n: p.detach() for n, p in self.model.named_parameters() if not p.requires_grad}
        return {n: t.to(device) for n, t in {**frozen, **dict(self.model.named_buffers())}.items()}

    def example_losses(
        self,
        trainable: Mapping[str, torch.Tensor],
        constants: TorchTensors,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> torch.Tensor:
        """Loss of each example [B] at the given parameters."""
        outputs = functional_call(self.model, {**trainable, **constants}, (x,))
        losses = self.loss(outputs, y)
        return losses if losses.dim() <= 1 else losses.flatten(1).mean(1)


def check_task(task: Task, examples: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Refuse a task that cannot train before anybody's data are touched.

    Args:
        task: the task.
        examples: a few rows of public or held-out data, with at least the task's two fields.

    Raises:
        ModelError: a field is absent, the model or the loss raises, the loss is not one number
            per example or is not finite, the model has nothing to train, or it changes buffers.
    """
    for field in (task.inputs, task.targets):
        if field not in examples:
            raise ModelError(f"the data have no field {field!r}; they have {sorted(examples)}")
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    if not parameters:
        raise ModelError("the model has no trainable parameter")
    x, y = (torch.tensor(examples[field]) for field in (task.inputs, task.targets))
    constants = task.constants(torch.device("cpu"))
    before = {name: tensor.clone() for name, tensor in constants.items()}
    try:
        losses = task.example_losses(parameters, constants, x, y)
    except Exception as error:
        raise ModelError(f"the model cannot be evaluated on the data: {error}") from error
    for name, tensor in before.items():
        if not torch.equal(tensor, constants[name]):
            raise ModelError(
                f"buffer {name!r} changes in the forward pass, which would carry one user's data "
                "to the next; use a layer without running state, such as GroupNorm"
            )
    if losses.shape != (len(x),):
        raise ModelError(
            f"the loss of {len(x)} examples has shape {list(losses.shape)}; it must be one number "
            'per example, as with reduction="none"'
        )
    if not bool(torch.isfinite(losses).all()):
        raise ModelError(
            "the model returns NaN or infinite losses at its initial parameters; "
            "check its initialisation and the scale of the inputs"
        )


def _refuse_state(name: str, layer: nn.Module) -> None:
    """Raise for layers whose output for one example depends on others or on the past."""
    # torch has no public common base of the normalisations with running statistics.
    batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
    tracking = bool(getattr(layer, "track_running_stats", False))
    if batch_norm or tracking:
        raise ModelError(
            f"layer {name!r} is {type(layer).__name__}, which mixes examples or keeps statistics "
            "of them; replace it by GroupNorm"
        )
