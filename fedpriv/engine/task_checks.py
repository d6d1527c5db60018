"""What is refused of a task, in one sentence each, before any user's data are touched."""

import copy
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedpriv.engine.arithmetic import generator_apart
from fedpriv.engine.task import HeldOut, Inputs, Task, called, each_input
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import TorchTensors

_ROUNDING = 0.02  # of what is close: that of bfloat16


def check_task(task: Task, examples: HeldOut, *, apart: bool = False) -> None:
    """Refuse a task that cannot train, before any user's data are touched.

    Examples are a few rows of public or held-out data; `apart` says that each is a record of its
    own. A `ModelError` says that a field is absent or no tensor, model or loss raise, the loss is
    not one finite number per example, depends on parameters itself or has no gradient, there is
    nothing to train, gradients are sparse, or a copy of the model does not use its own parameters;
    and, of rows that are apart, that what one gives depends on those beside it or on their number.
    """
    for column in task.fields:
        if column not in examples:
            raise ModelError(f"the data have no field {column!r}; they have {sorted(examples)}")
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    if not parameters:
        raise ModelError("the model has no trainable parameter")
    for name, layer in task.model.named_modules():
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        if trained and getattr(layer, "sparse", False) is True:
            raise ModelError(f"layer {name!r} has sparse gradients; make it with sparse=False")
    x, y = task.given({column: _tensor(column, examples[column]) for column in task.fields})
    original = task.model
    try:
        task = replace(task, model=copy.deepcopy(original))
    except Exception as error:
        raise ModelError(f"the model cannot be copied: {error}") from error
    tensors = parameters | task.constants(torch.device("cpu"))
    _check_losses(task, tensors, x, y)
    _check_copy(original, task, tensors, x)
    if apart:
        _check_apart(task, tensors, x, y)


def _tensor(name: str, column: npt.NDArray[np.generic]) -> Tensor:
    if column.dtype.kind in "US":
        raise ModelError(
            f"field {name!r} holds text; give numbers, for classes their places in a public list"
        )
    try:
        return torch.tensor(np.array(column))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"field {name!r} is of type {column.dtype}, which torch cannot compute with; convert "
            "it to numbers of at most 64 bits, in the byte order of this machine"
        ) from error


def _check_losses(task: Task, tensors: TorchTensors, x: Inputs, y: Tensor) -> None:
    """Refuse a model or a loss that raises, or gives no finite losses."""
    try:
        outputs = called(task.model, tensors, x)
        with torch.enable_grad():
            losses = task.losses_of(outputs.detach(), y)
        with torch.enable_grad(), generator_apart():
            sent = {name: tensors[name].clone().requires_grad_() for name in task.parameters()}
            trained = task.losses_of(called(task.model, {**tensors, **sent}, x), y)
    except Exception as error:
        raise ModelError(
            f"the model cannot be evaluated on the data: {error} (inputs are {_kinds(x)}, targets "
            f"{_kinds(y)}, and parameters are trained as float32)"
        ) from error
    if losses.shape != (len(y),):
        raise ModelError(
            f"the loss of {len(y)} examples has shape {list(losses.shape)}; it must be one "
            'number per example, as with reduction="none"'
        )
    if not bool(torch.isfinite(losses).all()):
        raise ModelError(
            "the model returns NaN or infinite losses at its initial parameters; "
            "check its initialisation and the scale of the inputs"
        )
    if losses.requires_grad:
        raise ModelError(
            "the loss reads parameters itself, not those of each user; it must be a function of "
            "outputs and targets alone, so have forward return what else it needs"
        )
    if not trained.requires_grad:
        raise ModelError(
            "the loss has no gradient by any parameter that users send, so that nothing would be "
            "trained; neither model nor loss may detach, round or compare what they compute"
        )


def _kinds(given: Inputs) -> str:
    """The types and shapes of tensors, as messages name them."""
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')}{list(given.shape)}"
    return ", ".join(f"{name} {_kinds(tensor)}" for name, tensor in given.items())


def _check_apart(task: Task, tensors: TorchTensors, x: Inputs, y: Tensor) -> None:
    """Refuse a task in which what an example gives depends on those beside it."""
    model = task.evaluated().model

    def losses(rows: slice) -> Tensor:
        outputs = _outputs_once(model, tensors, each_input(lambda t: t[rows], x))
        return task.losses_of(outputs, y[rows])

    try:
        alone = torch.cat([losses(slice(row, row + 1)) for row in range(len(y))])
    except Exception as error:
        raise ModelError(f"the model cannot be evaluated on one example: {error}") from error
    # What a model draws may differ for one example.
    if not _close(alone, losses(slice(None))) and not _draws(model, tensors, x):
        raise ModelError(
            "model or loss mix examples: what one gives depends on those beside it, or on their "
            "number, and each is a record of its own"
        )


def _draws(model: nn.Module, tensors: TorchTensors, x: Inputs) -> bool:
    with generator_apart(), torch.no_grad():
        before = torch.random.get_rng_state()
        called(model, tensors, x)
        return not torch.equal(before, torch.random.get_rng_state())


def _close(one: Tensor, other: Tensor) -> bool:
    """Whether tensors agree but for rounding, which may be that of bfloat16."""
    sizes = other.abs().double()
    most = float(sizes[torch.isfinite(sizes)].max()) if torch.isfinite(sizes).any() else 0.0
    return one.shape == other.shape and torch.allclose(
        one, other, rtol=0.0, atol=_ROUNDING * most, equal_nan=True
    )


def _check_copy(original: nn.Module, task: Task, tensors: TorchTensors, x: Inputs) -> None:
    """Refuse a model whose copy differs from it at other parameters: it reads the original's."""
    generator = torch.Generator().manual_seed(0)
    moved = {
        name: tensors[name] + 0.01 * torch.randn(p.shape, generator=generator)
        for name, p in task.trainable().items()
    }
    # At an input of zeros, as a blank row is, weights make no difference.
    x = each_input(lambda t: t.masked_fill(t == 0, 1) if t.is_floating_point() else t, x)
    try:
        one, other = (
            _outputs_once(model, _cloned({**tensors, **moved}), each_input(torch.clone, x))
            for model in (original, task.model)
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


def _cloned(tensors: TorchTensors) -> TorchTensors:
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _outputs_once(model: nn.Module, tensors: TorchTensors, x: Inputs) -> Tensor:
    """Outputs with the same dropout masks each time, leaving torch's generator as it was."""
    with generator_apart(0), torch.no_grad():
        return called(model, tensors, x)
