"""Activations of fewer bits, as `torch.autocast` has them, while users train.

Under "bfloat16" the products of layers take and give numbers of 8 significant bits, which are half
as long in memory and which processors made for them multiply faster. What lasts longer than a step
stays float32: parameters, losses, gradients by parameters, updates and all sums of them. So does
everything that is measured.
"""

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import nn
from torch.func import functional_call

from fedpriv.errors import InvalidValueError

Activations = Literal["float32", "bfloat16"]


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
