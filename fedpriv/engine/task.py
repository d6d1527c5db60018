"""What is trained: a torch module, a loss, and the names of the data fields they read."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.func import functional_call

from fedpriv.engine.normalisation import running_norms, without_batch_norm
from fedpriv.errors import ModelError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
MetricFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
TorchTensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Task:
    """A model and how it is judged.

    Attributes:
        model: any module that maps inputs [B, …] to outputs [B, …] without mixing examples and
            without changing its own buffers. Its forward finds parameters through `self`: users
            who train side by side have copies of it. Batch normalisation is replaced, in a copy, by
            `RunningNorm`, which normalises with its running statistics in training too.
        loss: maps outputs and targets [B, …] to one loss per example [B], or to losses [B, …]
            that are averaged over all but the first axis; e.g. `cross_entropy` with
            `reduction="none"`.
        inputs: name of the field that the model reads.
        targets: name of the field that the loss reads.
        metrics: own metrics by name, e.g. from `own_metrics`: a function maps outputs and
            targets [B, …] to a vector of each example, [B, *shape], and a user's metric is the
            mean over its examples. It must not change its arguments. Whoever asks for metrics can
            name only these and those built in.

    Raises:
        ModelError: a layer depends on other examples or keeps state across them.
    """

    model: nn.Module
    loss: Loss
    inputs: str = "x"
    targets: str = "y"
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", without_batch_norm(self.model))

    def evaluated(self) -> "Task":
        """The task with a copy of the model in evaluation mode: without dropout."""
        return replace(self, model=copy.deepcopy(self.model).eval())

    def parameters(self) -> dict[str, npt.NDArray[np.float32]]:
        """Copy of the trainable parameters, in the order of the model: the update's layout."""
        return {
            name: p.detach().to("cpu", torch.float32).numpy().copy()
            for name, p in self.model.named_parameters()
            if p.requires_grad
        }

    def statistics(self) -> dict[str, npt.NDArray[np.float32]]:
        """Copy of the running statistics of normalisations, by name, in the order of the model."""
        return {
            f"{layer}.{kind}" if layer else kind: tensor.detach().to("cpu").numpy().copy()
            for layer, norm in running_norms(self.model).items()
            for kind, tensor in norm.named_buffers()
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
        return self.losses_of(functional_call(self.model, {**trainable, **constants}, (x,)), y)

    def losses_of(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Loss of each example [B] from the model's outputs [B, …] and targets [B, …]."""
        losses = self.loss(outputs, y)
        return losses if losses.dim() <= 1 else losses.flatten(1).mean(1)


def check_task(task: Task, examples: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Refuse a task that cannot train before anybody's data are touched.

    Args:
        task: the task.
        examples: a few rows of public or held-out data, with at least the task's two fields.

    Raises:
        ModelError: a field is absent, the model or the loss raises, the loss is not one number
            per example or is not finite, the model has nothing to train, it changes buffers, a
            copy of it does not use its own parameters, or what it gives for an example depends on
            those beside it.
    """
    for column in (task.inputs, task.targets):
        if column not in examples:
            raise ModelError(f"the data have no field {column!r}; they have {sorted(examples)}")
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    if not parameters:
        raise ModelError("the model has no trainable parameter")
    x, y = (torch.tensor(examples[column]) for column in (task.inputs, task.targets))
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
    _check_losses(losses, len(x))
    _check_copy(task, constants, x)
    if _mixes(task, constants, x, y):
        raise ModelError(
            "model or loss mix examples: what one example gives depends on those beside it, which "
            "would put one user's data into what another sends"
        )


def _check_losses(losses: torch.Tensor, examples: int) -> None:
    if losses.shape != (examples,):
        raise ModelError(
            f"the loss of {examples} examples has shape {list(losses.shape)}; it must be one "
            'number per example, as with reduction="none"'
        )
    if not bool(torch.isfinite(losses).all()):
        raise ModelError(
            "the model returns NaN or infinite losses at its initial parameters; "
            "check its initialisation and the scale of the inputs"
        )


def _check_copy(task: Task, constants: TorchTensors, x: torch.Tensor) -> None:
    """Refuse a model of which a copy gives anything else than itself at the same parameters.

    A copy that calls the original reads the original's parameters, not those of its own users.
    """
    generator = torch.Generator().manual_seed(0)
    moved = {
        name: torch.from_numpy(p) + 0.01 * torch.randn(p.shape, generator=generator)
        for name, p in task.parameters().items()
    }
    # At an input of zeros, as a blank row is, weights make no difference.
    x = x.masked_fill(x == 0, 1) if x.is_floating_point() else x
    seen = []
    try:
        for model in (task.model, copy.deepcopy(task.model)):
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(0)
                seen.append(functional_call(model, {**moved, **constants}, (x.clone(),)))
    except Exception as error:
        raise ModelError(
            f"the model cannot be copied, or not evaluated near its initial parameters: {error}"
        ) from error
    one, other = seen
    if not torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True):
        raise ModelError(
            "a copy of the model does not use its own parameters, so that users cannot train side "
            "by side; forward must reach them through self"
        )


def _mixes(task: Task, constants: TorchTensors, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the first example gives anything else beside others than beside zeros."""
    evaluated = task.evaluated()
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    seen = []
    for beside_x, beside_y in ((x, y), (torch.zeros_like(x), torch.zeros_like(y))):
        rows = torch.cat([x[:1], beside_x]), torch.cat([y[:1], beside_y])
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            outputs = functional_call(evaluated.model, {**parameters, **constants}, (rows[0],))
            seen.append((outputs[:1], task.losses_of(outputs, rows[1])[:1]))
    return not all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
