"""Measuring a released model on rows that belong to no enrolled user."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.func import functional_call

from fedpriv.engine.task import Task
from fedpriv.federated.optimizers import Parameters

_ROWS = 2_000  # at once


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on held-out rows.

    Attributes:
        loss: mean loss of the rows.
        accuracy: share of right classes in [0, 1]; None if targets are not classes.
    """

    loss: float
    accuracy: float | None


@dataclass(frozen=True)
class Evaluator:
    """Evaluates models of one task on fixed rows.

    The rows are the server's own: no enrolled user trains on them, and the guarantee does not
    speak of them. The model is evaluated in its evaluation mode (no dropout).

    Attributes:
        task: model and loss.
        rows: name of field → array [rows, …].
        device: where to evaluate.
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
            losses = self.task.loss(outputs, targets)
            loss += float(
                losses.double().flatten(1).mean(1).sum()
                if losses.dim() > 1
                else losses.double().sum()
            )
            if not targets.dtype.is_floating_point and outputs.dim() == targets.dim() + 1:
                right += int((outputs.argmax(1) == targets).sum())
                classes += targets.numel()
        model.train(was_training)
        return Evaluation(loss / len(x), right / classes if classes else None)
