"""Losses by name, one number per example, and any other by import path."""

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch.nn import functional

from fedpriv.errors import ModelError, known_names
from fedpriv.importing import import_function

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps outputs and targets [B, …] to one loss per example [B], or to losses [B, …]."""


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of class scores [B, K, …] against classes [B, …]."""
    return functional.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Squared error of outputs against targets of the same shape [B, …]."""
    return functional.mse_loss(outputs, targets, reduction="none")


LOSSES: Mapping[str, Loss] = {"cross-entropy": cross_entropy, "squared-error": squared_error}


def find_loss(name: str) -> Loss:
    """Loss of a name, or "package.module:function".

    Raises:
        ModelError: there is no such loss.
    """
    if name in LOSSES:
        return LOSSES[name]
    if ":" not in name:
        raise ModelError(
            f"unknown loss {name!r}; {known_names(name, LOSSES)}, or package.module:function"
        )
    return cast(Loss, import_function(f"loss {name!r}", name, ModelError))
