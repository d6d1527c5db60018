"""Activations of fewer bits, as `torch.autocast` has them, while users train.

Under "bfloat16" the products of layers take and give numbers of 8 significant bits, which are half
as long in memory and which processors made for them multiply faster. What lasts longer than a step
stays float32: parameters, losses, gradients by parameters, updates and all sums of them. So does
everything that is measured.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import nn
from torch.func import functional_call

from fedpriv.errors import InvalidValueError

Activations = Literal["float32", "bfloat16"]

_SMALLEST = torch.finfo(torch.float32).tiny
_OF_A_THREAD = 2**15  # numbers, of which torch gives no thread fewer where there are several


def activations_named(name: object) -> Activations:
    """Activations of a name.

    Raises:
        InvalidValueError: there are none of this name.
    """
    for known in get_args(Activations):
        if name == known:
            found: Activations = known
            return found
    raise InvalidValueError(f"activations is {name!r}; legal are float32 and bfloat16")


def outputs_of(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    activations: Activations,
    device: torch.device,
) -> torch.Tensor:
    """Outputs of a model in training; whatever the activations, outputs are not lowered.

    The backward pass computes in the types of this one, outside of autocast.

    Args:
        model: the model.
        tensors: what to put in place of parameters and buffers of these names.
        x: inputs.
        activations: of the forward pass.
        device: where the model computes.
    """
    if activations == "float32":
        return _outputs(model, tensors, x)
    # Users' weights are lowered anew in each step, so there is nothing to keep.
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        outputs = _outputs(model, tensors, x)
    return outputs.float()


def _outputs(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    # Putting nothing in place costs as much as a small layer.
    outputs: torch.Tensor = functional_call(model, dict(tensors), (x,)) if tensors else model(x)
    return outputs


def lowered(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the type that products have in the forward pass under way."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


@contextmanager
def plain_arithmetic(device: torch.device) -> Iterator[None]:
    """Compute as the numbers' types say, whatever the caller has set in this thread.

    An autocast around it would round to fewer bits, and flushed subnormal numbers would be zero;
    without gradients nothing would be learnt.

    Args:
        device: where users train.
    """
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
    """Refuse to compute where torch's own threads take subnormal numbers for zero.

    They do if they began while their maker did, and nothing here can change them: what a user gets
    would depend on who trains it.

    Raises:
        InvalidValueError: one of them does.
    """
    halves = torch.full((torch.get_num_threads() * _OF_A_THREAD,), _SMALLEST) / 2
    if not bool(halves.all()):
        raise InvalidValueError(
            "threads of torch take subnormal numbers for zero, since they began after "
            "torch.set_flush_denormal(True); it must not be called before users train"
        )
