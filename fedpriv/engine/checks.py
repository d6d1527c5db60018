"""What is refused of a task, in one sentence each, before any user's data are touched."""

import copy
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from fedpriv.engine.task import (
    HeldOut,
    Inputs,
    Task,
    called,
    each_input,
    evaluate,
    generator_apart,
)
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import TorchTensors

_ROUNDING = 0.02  # of what is close: that of bfloat16


def check_held_out(task: Task, rows: HeldOut, device: torch.device) -> None:
    """Refuse a task that cannot be evaluated on all held-out rows.

    At its initial parameters, its mean loss and all figures must be finite.
    """
    try:
        found = evaluate(task, rows, device, task.parameters() | task.statistics())
    except Exception as error:
        raise ModelError(f"the model cannot be evaluated on the held-out rows: {error}") from error
    for name, reason in found.failed.items():
        raise ModelError(f"figure {name!r} cannot be computed on the held-out rows: {reason}")
    for name, value in {"the mean loss": found.loss, **found.figures}.items():
        what = f"figure {name!r}" if name in found.figures else name
        if not math.isfinite(value):
            raise ModelError(
                f"{what} of the {len(rows[task.targets])} held-out rows is {value} at the initial "
                "parameters; it must be finite, so leave out rows with NaN or infinite numbers"
            )


def check_task(task: Task, examples: HeldOut) -> None:
    """Refuse a task that cannot train, before any user's data are touched.

    Examples are a few rows of public or held-out data. A `ModelError` says that a field is absent
    or no tensor, model or loss raise, the loss is not one finite number per example, depends on
    parameters itself or has no gradient, there is nothing to train, gradients are sparse, the model
    changes or replaces buffers or counts its forward passes, a copy of it does not use its own
    parameters, or what it gives for an example depends on those beside it or on their number.
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
        if trained and getattr(layer, "scale_grad_by_freq", False) is True:
            raise ModelError(
                f"layer {name!r} divides gradients by how often a word is in a batch, where words "
                "that fill it up count, too; make it with scale_grad_by_freq=False"
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise ModelError(
                f"layer {name!r} shortens what it looks up in its table, from which other users "
                "begin too; make it with max_norm=None"
            )
    x, y = task.given({column: _tensor(column, examples[column]) for column in task.fields})
    tensors = parameters | task.constants(torch.device("cpu"))
    _check_losses(task, tensors, x, y)
    _check_buffers(task, x)
    _check_copy(task, tensors, x)
    _check_apart(task, tensors, x, y)


def _tensor(name: str, column: npt.NDArray[np.generic]) -> Tensor:
    try:
        return torch.tensor(np.array(column))
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"field {name!r} is of type {column.dtype}, which torch cannot compute with; convert "
            "it to numbers of at most 64 bits, in the byte order of this machine"
        ) from error


def _check_losses(task: Task, tensors: TorchTensors, x: Inputs, y: Tensor) -> None:
    """Refuse a model or a loss that raises, changes buffers, or gives no finite losses."""
    before = {name: t.clone() for name, t in tensors.items()}
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
    for name, tensor in before.items():
        if not _equal(tensor, tensors[name]):
            raise _changed(name)
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


def _check_buffers(task: Task, x: Inputs) -> None:
    """Refuse a model that fails with its own parameters, or has other buffers afterwards."""
    try:
        model = copy.deepcopy(task.model).to("cpu")
        before = dict(model.named_buffers())
        _outputs_once(model, {}, x)
        once = _counts(model)
        _outputs_once(model, {}, x)
    except Exception as error:
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in task.trainable().values()})
        raise ModelError(
            "the model cannot be copied, or not evaluated with its own parameters of "
            f"{', '.join(kinds)}, which users train as float32: {error}"
        ) from error
    after = dict(model.named_buffers())
    for name in before | after:
        if before.get(name) is not after.get(name):
            raise _changed(name)
    for name, count in _counts(model).items():
        if once.get(name) not in (count, None):  # what the first pass alone sets is no count
            raise ModelError(
                f"attribute {name!r} of the model is another number after each forward pass, so "
                "that a user's update could depend on how many trained before; forward must not "
                "set it"
            )


def _counts(model: nn.Module) -> dict[str, int | float]:
    """Attributes of a model's layers that are numbers, by name."""
    return {
        f"{layer}.{name}" if layer else name: value
        for layer, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float) and value == value  # noqa: PLR0124 - not NaN
    }


def _kinds(given: Inputs) -> str:
    """The types and shapes of tensors, as messages name them."""
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')}{list(given.shape)}"
    return ", ".join(f"{name} {_kinds(tensor)}" for name, tensor in given.items())


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether tensors hold the same numbers, where NaN is one."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(one[~nan], other[~nan])


def _changed(buffer: str) -> ModelError:
    return ModelError(
        f"buffer {buffer!r} changes in the forward pass, which would carry one user's data "
        "to the next; use a layer without running state, such as GroupNorm"
    )


def _check_apart(task: Task, tensors: TorchTensors, x: Inputs, y: Tensor) -> None:
    """Refuse a task in which what an example gives depends on those beside it."""
    model = task.evaluated().model
    for row in range(len(y)):  # mixing may show in any one of them
        _check_one_apart(task, model, tensors, x, y, slice(row, row + 1))


def _check_one_apart(
    task: Task, model: nn.Module, tensors: TorchTensors, x: Inputs, y: Tensor, one: slice
) -> None:
    def amid(others: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        def several(t: Tensor) -> Tensor:  # mixing may look only ahead, or only back
            return torch.cat([others(t), t[one], others(t)])

        outputs, place = _outputs_once(model, tensors, each_input(several, x)), len(y)
        losses = task.losses_of(outputs, several(y))
        return outputs[place : place + 1], losses[place : place + 1]

    try:
        copies, zeros = amid(torch.clone), amid(torch.zeros_like)
        outputs = _outputs_once(model, tensors, each_input(lambda t: t[one], x))
        alone = outputs, task.losses_of(copies[0], y[one])
    except Exception as error:
        raise ModelError(
            f"the model cannot be evaluated on one example, alone or beside zeros: {error}"
        ) from error
    if not all(map(torch.equal, copies, zeros)):
        raise ModelError(
            "model or loss mix examples: what one example gives depends on those beside it, which "
            "would put one user's data into what another sends"
        )
    same = all(map(_close, alone, copies))
    if not same and not _draws(model, tensors, x):  # other numbers may be drawn for one
        raise ModelError(
            "what model or loss give for one example depends on how many are beside it; users have "
            "batches of any size, so it must be the same for one alone"
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


def _check_copy(task: Task, tensors: TorchTensors, x: Inputs) -> None:
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
            _outputs_once(model, {**tensors, **moved}, each_input(torch.clone, x))
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


def _outputs_once(model: nn.Module, tensors: TorchTensors, x: Inputs) -> Tensor:
    """Outputs with the same dropout masks each time, leaving torch's generator as it was."""
    with generator_apart(0), torch.no_grad():
        return called(model, tensors, x)
