"""Training users alone: one after another, in plain torch, each on its own batches.

No tensor holds data of two users, so a model may compute anything from a user's rows. Between
users, all tensors of the model and all attributes of its modules are restored.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fedpriv.engine.arithmetic import Activations
from fedpriv.engine.descent import Descent
from fedpriv.engine.examples import Examples
from fedpriv.engine.leftovers import KeptModel, named_tensors
from fedpriv.engine.task import RoundParameters, Task, outputs_of
from fedpriv.privacy.clipping_torch import TorchTensors


class AloneModel:
    """A copy of a task's model that trains one user after another."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self.model = task, copy.deepcopy(task.model).to(device)
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        self._kept = KeptModel(self.model, named_tensors(self.model))

    @contextmanager
    def begun(self, start: RoundParameters, *, training: bool) -> Iterator[nn.Module]:
        """Yield the model at the start of a round."""
        self._kept.copy_from(start.parameters | start.constants)
        try:
            yield self.model if training else self.model.eval()
        finally:
            self._kept.put_back()

    def moved(
        self, start: RoundParameters, examples: Examples, activations: Activations
    ) -> TorchTensors:
        """Return one user's displacement after all steps on its examples, [1, *shape] by name.

        It includes personal parameters, and the changes of control variates if any.
        """
        with self.begun(start, training=True) as model:
            parameters = [self._kept.tensors[name] for name in start.parameters]
            memory = [self._kept.numbers[name] for name in start.parameters]
            descent = Descent(start, examples.schedule.local)
            for step, (x, y) in enumerate(examples.batches(), start=1):
                losses = self._task.losses_of(outputs_of(model, x, activations), y)
                mean = losses.sum() * self._task.weight(y).to(losses)
                gradients = torch.autograd.grad(mean, parameters, materialize_grads=True)
                descent.step_of_one(memory, gradients)
                if step < examples.steps:
                    descent.put_into(memory)
        return descent.moved()
