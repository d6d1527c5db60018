"""Measuring a released model on the server's own rows, which belong to no enrolled user."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.func import functional_call

from fedpriv.build import HeldOut
from fedpriv.config import Config, FederationSection
from fedpriv.data.files import read_npz
from fedpriv.data.population import load_population
from fedpriv.engine.task import Task
from fedpriv.errors import DataError
from fedpriv.training.optimizers import Parameters

_ROWS = 2_000  # at once


def held_out_rows(config: Config, section: FederationSection) -> HeldOut:
    """Rows of no enrolled user: those of `federation.held_out`, or of the configured data.

    Raises:
        DataError: the file cannot be read, or its fields have no rows, or not as many each.
    """
    if section.held_out is None:
        return load_population(config.data.name, config.data.options).test
    path = Path(section.held_out)
    rows = read_npz(path)
    counts = {len(array) for array in rows.values()}
    if len(counts) != 1 or 0 in counts:
        raise DataError(
            f"{path} holds fields with {sorted(counts)} rows; all need the same number, at least "
            "one"
        )
    return rows


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on held-out rows."""

    loss: float  # mean over rows
    accuracy: float | None  # in [0, 1]; None if targets are not classes


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models of one task on fixed rows, in evaluation mode (no dropout).

    No enrolled user trains on these rows, and the guarantee does not speak of them.
    """

    task: Task
    rows: Mapping[str, npt.NDArray[np.generic]]
    device: torch.device

    @torch.no_grad()
    def __call__(self, parameters: Parameters) -> Evaluation:
        """Loss and accuracy of the model with these parameters and running statistics."""
        model = self.task.model
        was_training = model.training
        model.eval()
        tensors = self.task.constants(self.device)
        tensors |= {n: torch.tensor(p, device=self.device) for n, p in parameters.items()}
        x, y = (self.rows[field] for field in (self.task.inputs, self.task.targets))
        loss, right, classes = 0.0, 0, 0
        for start in range(0, len(x), _ROWS):
            inputs = torch.tensor(x[start : start + _ROWS], device=self.device)
            targets = torch.tensor(y[start : start + _ROWS], device=self.device)
            outputs = functional_call(model, tensors, (inputs,))
            loss += float(self.task.losses_of(outputs, targets).double().sum())
            if not targets.dtype.is_floating_point and outputs.dim() == targets.dim() + 1:
                right += int((outputs.argmax(1) == targets).sum())
                classes += targets.numel()
        model.train(was_training)
        return Evaluation(loss / len(x), right / classes if classes else None)
