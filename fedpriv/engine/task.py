"""What users train, a `Task`, and the arithmetic in which they train it.

Batch normalisation uses its running statistics in training too, so that neither examples nor users
mix; the server moves the statistics by a private metric, "batch-norm".
"""

import copy
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedpriv.errors import InvalidValueError, ModelError, known_names
from fedpriv.importing import import_function
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.privacy.round import RoundRequest

HeldOut = Mapping[str, npt.NDArray[np.generic]]
"""Rows of no enrolled user, by field."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Maps outputs and targets [B, …] to one loss per example [B], or to losses [B, …]."""
MetricFunction = Callable[[Tensor, Tensor], Tensor]
Activations = Literal["float32", "bfloat16"]
"""Under "bfloat16" layers multiply numbers of 8 significant bits, as under `torch.autocast`, while
users train. Parameters, losses, updates, their sums and all metrics stay float32."""

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SMALLEST = torch.finfo(torch.float32).tiny
_ROWS = 2_000  # held-out rows that are evaluated at once
_PER_THREAD = 2**15  # torch gives a thread no fewer numbers


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of class scores [B, K, …] against classes [B, …]."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error of outputs against targets of the same shape [B, …]."""
    return functional.mse_loss(outputs, targets, reduction="none")


LOSSES: Mapping[str, Loss] = {"cross-entropy": cross_entropy, "squared-error": squared_error}


def find_loss(name: str) -> Loss:
    """Loss of a name, or "package.module:function"; another is a `ModelError`."""
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ModelError(
            f"unknown loss {name!r}; {known_names(name, LOSSES)}, or package.module:function"
        )
    return cast(Loss, import_function(f"loss {name!r}", name, ModelError))


@dataclass(frozen=True)
class Task:
    """A model, its loss and its own metrics.

    >>> task = Task(nn.Linear(4, 3), loss="cross-entropy")
    >>> sorted(task.parameters())
    ['bias', 'weight']

    A layer that depends on other examples or keeps state across them is a `ModelError`.

    Attributes:
        model: any module that maps inputs [B, …] to outputs [B, …] without mixing examples or
            changing its own buffers. Its forward must reach parameters through `self`, since users
            train on copies of it. Batch normalisation is replaced, in a copy, by `RunningNorm`.
        loss: maps outputs and targets [B, …] to one loss per example [B], or to losses [B, …]
            that are averaged over all but the first axis; or the name of one: "cross-entropy",
            "squared-error" or "package.module:function".
        inputs: name of the field that the model reads; `targets`: of that which the loss reads.
        metrics: own metrics by name, e.g. from `own_metrics`: functions of outputs and targets
            [B, …], which they must not change, to a vector of each example, [B, *shape]. A user's
            metric is the mean over its examples. A round can ask for these and for built-in ones.
    """

    model: nn.Module
    loss: Loss | str = "cross-entropy"
    inputs: str = "x"
    targets: str = "y"
    metrics: Mapping[str, MetricFunction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", without_batch_norm(self.model))
        if isinstance(self.loss, str):
            object.__setattr__(self, "loss", find_loss(self.loss))

    def evaluated(self) -> "Task":
        """The task with a copy of the model in evaluation mode: without dropout."""
        return replace(self, model=copy.deepcopy(self.model).eval())

    def parameters(self) -> dict[str, npt.NDArray[np.float32]]:
        """Copy of the trainable parameters, in the order of the model: the update's layout."""
        return {n: p.to("cpu", torch.float32).numpy().copy() for n, p in self.trainable().items()}

    def statistics(self) -> dict[str, npt.NDArray[np.float32]]:
        """Copy of the running statistics of normalisations, by name, in the order of the model."""
        return {
            f"{layer}.{kind}" if layer else kind: tensor.detach().to("cpu").numpy().copy()
            for layer, norm in running_norms(self.model).items()
            for kind, tensor in norm.named_buffers()
        }

    def trainable(self) -> TorchTensors:
        """Trainable parameters, where the model has them."""
        return {n: p.detach() for n, p in self.model.named_parameters() if p.requires_grad}

    def constants(self, device: torch.device) -> TorchTensors:
        """Frozen parameters and buffers, which no user changes."""
        trained = self.trainable()
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {n: t.detach().to(device) for n, t in tensors.items() if n not in trained}

    def losses_of(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Loss of each example [B] from the model's outputs [B, …] and targets [B, …]."""
        losses = cast(Loss, self.loss)(outputs, y)
        return losses if losses.dim() <= 1 else losses.flatten(1).mean(1)


@dataclass(frozen=True)
class RoundParameters:
    """The model at the start of a round, on the device where users train; never written to."""

    parameters: TorchTensors  # what is trained
    constants: TorchTensors  # frozen parameters and buffers

    @classmethod
    def of(
        cls, request: RoundRequest, constants: TorchTensors, device: torch.device
    ) -> "RoundParameters":
        """Copy a request's tensors to a device; its statistics replace those of the constants."""
        parameters = {n: torch.tensor(p, device=device) for n, p in request.parameters.items()}
        statistics = {n: torch.tensor(s, device=device) for n, s in request.statistics.items()}
        return cls(parameters, constants | statistics)


@torch.no_grad()
def evaluate(
    task: Task,
    rows: HeldOut,
    device: torch.device,
    parameters: Mapping[str, npt.NDArray[np.float32]],
) -> tuple[float, float | None]:
    """Mean loss of a model without dropout, and accuracy in [0, 1] if it classifies."""
    tensors = task.constants(device)
    tensors |= {name: torch.tensor(p, device=device) for name, p in parameters.items()}
    x, y, was_training = rows[task.inputs], rows[task.targets], task.model.training
    loss, right, classes = 0.0, 0, 0
    task.model.eval()
    try:
        for start in range(0, len(x), _ROWS):
            inputs = torch.tensor(x[start : start + _ROWS], device=device)
            targets = torch.tensor(y[start : start + _ROWS], device=device)
            outputs = functional_call(task.model, tensors, (inputs,))
            loss += float(task.losses_of(outputs, targets).double().sum())
            if not targets.dtype.is_floating_point and outputs.dim() == targets.dim() + 1:
                right += int((outputs.argmax(1) == targets).sum())
                classes += targets.numel()
    finally:
        task.model.train(was_training)
    return loss / len(x), right / classes if classes else None


def check_held_out(task: Task, rows: HeldOut, device: torch.device) -> None:
    """Refuse a task that cannot be evaluated on all held-out rows, or has no finite mean loss."""
    try:
        loss, _ = evaluate(task, rows, device, task.parameters() | task.statistics())
    except Exception as error:
        raise ModelError(f"the model cannot be evaluated on the held-out rows: {error}") from error
    if not math.isfinite(loss):
        raise ModelError(
            f"the mean loss of the {len(rows[task.inputs])} held-out rows is {loss} at the initial "
            "parameters; it must be finite, so leave out rows with NaN or infinite numbers"
        )


def check_task(task: Task, examples: HeldOut) -> None:
    """Refuse a task that cannot train, before any user's data are touched.

    Examples are a few rows of public or held-out data. A `ModelError` says that a field is absent,
    model or loss raise, the loss is not one finite number per example, there is nothing to train,
    the model changes buffers, a copy of it does not use its own parameters, or what it gives for an
    example depends on those beside it.
    """
    for column in (task.inputs, task.targets):
        if column not in examples:
            raise ModelError(f"the data have no field {column!r}; they have {sorted(examples)}")
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    if not parameters:
        raise ModelError("the model has no trainable parameter")
    x, y = (torch.tensor(examples[column]) for column in (task.inputs, task.targets))
    constants = task.constants(torch.device("cpu"))
    tensors, before = parameters | constants, {n: t.clone() for n, t in constants.items()}
    try:
        losses = task.losses_of(functional_call(task.model, tensors, (x,)), y)
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
            f"the loss of {len(x)} examples has shape {list(losses.shape)}; it must be one "
            'number per example, as with reduction="none"'
        )
    if not bool(torch.isfinite(losses).all()):
        raise ModelError(
            "the model returns NaN or infinite losses at its initial parameters; "
            "check its initialisation and the scale of the inputs"
        )
    _check_copy(task, tensors, x)
    # What the first example gives, beside others and beside zeros.
    seen = []
    for beside_x, beside_y in ((x, y), (torch.zeros_like(x), torch.zeros_like(y))):
        outputs = _outputs_once(task.evaluated().model, tensors, torch.cat([x[:1], beside_x]))
        seen.append((outputs[:1], task.losses_of(outputs, torch.cat([y[:1], beside_y]))[:1]))
    if not all(torch.equal(one, other) for one, other in zip(*seen, strict=True)):
        raise ModelError(
            "model or loss mix examples: what one example gives depends on those beside it, which "
            "would put one user's data into what another sends"
        )


def _check_copy(task: Task, tensors: TorchTensors, x: Tensor) -> None:
    """Refuse a model whose copy differs from it at other parameters: it reads the original's."""
    generator = torch.Generator().manual_seed(0)
    moved = {
        name: tensors[name] + 0.01 * torch.randn(p.shape, generator=generator)
        for name, p in task.trainable().items()
    }
    # At an input of zeros, as a blank row is, weights make no difference.
    x = x.masked_fill(x == 0, 1) if x.is_floating_point() else x
    try:
        one, other = (
            _outputs_once(model, {**tensors, **moved}, x.clone())
            for model in (task.model, copy.deepcopy(task.model))
        )
    except Exception as error:
        raise ModelError(
            f"the model cannot be copied, or not evaluated near its initial parameters: {error}"
        ) from error
    if not torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True):
        raise ModelError(
            "a copy of the model does not use its own parameters, so that users cannot train side "
            "by side; forward must reach them through self"
        )


def _outputs_once(model: nn.Module, tensors: TorchTensors, x: Tensor) -> Tensor:
    """Outputs with the same dropout masks each time, leaving torch's generator as it was."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        outputs: Tensor = functional_call(model, tensors, (x,))
        return outputs


class RunningNorm(nn.Module):
    """A batch normalisation (Ioffe & Szegedy 2015) that is always in evaluation mode.

    Output is x̂·weight + bias per channel with x̂ = (x − running_mean)/√(running_var + eps), so that
    examples do not mix and no buffer changes. Parameters and buffers keep their names.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, layer: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        if layer.running_mean is None or layer.running_var is None:
            raise ModelError("a layer without running statistics cannot normalise with them")
        self.eps = layer.eps
        self.weight, self.bias = layer.weight, layer.bias
        self.register_buffer("running_mean", layer.running_mean.clone())
        self.register_buffer("running_var", layer.running_var.clone())

    @property
    def channels(self) -> int:
        """Number of channels."""
        return len(self.running_mean)

    def standardised(self, x: Tensor) -> Tensor:
        """x̂ of inputs [n, channels, …]: same shape."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        scale = torch.rsqrt(self.running_var + self.eps)
        return (x - self.running_mean.view(shape)) * scale.view(shape)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise inputs [n, channels, …]."""
        x, shape = self.standardised(x), (1, -1, *[1] * (x.dim() - 2))
        return x if self.weight is None else x * self.weight.view(shape) + self.bias.view(shape)


def without_batch_norm(model: nn.Module) -> nn.Module:
    """A copy of the model with `RunningNorm` for every batch normalisation; itself if it has none.

    Another layer that mixes examples or keeps statistics of them is a `ModelError`.
    """
    for name, layer in model.named_modules(remove_duplicate=False):
        # torch has no public common base of the normalisations with running statistics.
        batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        tracking = bool(getattr(layer, "track_running_stats", False))
        if (batch_norm or tracking) and not (tracking and type(layer) in _BATCH_NORMS):
            raise ModelError(
                f"layer {name!r} is {type(layer).__name__}, which mixes examples or keeps "
                "statistics of them; replace it by GroupNorm, or by BatchNorm that tracks running "
                "statistics"
            )
    memo: dict[int, object] = {}
    for layer in model.modules():
        if isinstance(layer, _BATCH_NORMS):
            memo[id(layer)] = RunningNorm(copy.deepcopy(layer, memo))
    return copy.deepcopy(model, memo) if memo else model


def running_norms(model: nn.Module) -> dict[str, RunningNorm]:
    """The layers that normalise with running statistics, by name, in the order of the model."""
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, RunningNorm)}


def activations_named(name: object) -> Activations:
    """Activations of a name; another is an `InvalidValueError`."""
    if name not in get_args(Activations):
        raise InvalidValueError(f"activations is {name!r}; legal are float32 and bfloat16")
    return cast(Activations, name)


def outputs_of(
    model: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, activations: Activations
) -> Tensor:
    """Outputs, float32, of a model in training, with tensors put in by name."""
    # Users' weights are lowered anew in each step, so there is nothing to cache.
    lower = activations == "bfloat16"
    with torch.autocast(x.device.type, torch.bfloat16, enabled=lower, cache_enabled=False):
        # functional_call costs as much as a small layer.
        outputs: Tensor
        outputs = functional_call(model, dict(tensors), (x,)) if tensors else model(x)
    return outputs.float() if lower else outputs


def lowered(x: Tensor) -> Tensor:
    """A tensor in the type that products have in the forward pass under way."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute as the numbers' types say, whatever the caller has set in this thread."""
    flushed = bool(torch.full((), _SMALLEST) / 2 == 0)
    torch.set_flush_denormal(False)
    try:
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        torch.set_flush_denormal(flushed)


def refuse_flushing_threads() -> None:
    """Refuse threads of torch that flush subnormal numbers: users' bits would depend on them."""
    halves = torch.full((torch.get_num_threads() * _PER_THREAD,), _SMALLEST) / 2
    if not bool(halves.all()):
        raise InvalidValueError(
            "threads of torch take subnormal numbers for zero, since they started after "
            "torch.set_flush_denormal(True); it must not be called before users train"
        )


@contextmanager
def seeded(local_key: bytes, user: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators, as for dropout, by key and user, and restore them afterwards."""
    own = hashlib.sha256(local_key + user.to_bytes(8, "little")).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(own[:8], "little") >> 1)
        yield
