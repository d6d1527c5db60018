"""Training users alone: one after another, in plain torch, each on its own batches.

No tensor holds data of two users, so a model may compute anything from a user's rows. Between
users, all tensors of the model and all attributes of its modules are restored.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch
from torch import Tensor, nn

from fedpriv.engine.arithmetic import Activations, generators_apart
from fedpriv.engine.bounds import WithinBounds
from fedpriv.engine.descent import Descent
from fedpriv.engine.kept import KeptModel
from fedpriv.engine.task import Inputs, RoundParameters, Task, outputs_of
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.training.request import LocalTraining


class AloneModel:
    """A copy of a task's model that trains one user after another."""

    def __init__(self, task: Task, device: torch.device, x: Inputs, y: Tensor) -> None:
        """Call the model with two rows, to detect whether it needs `WithinBounds`."""
        model = copy.deepcopy(task.model).to(device)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.model, self._kept = model, KeptModel(model, named)
        self._bounds, self._bounded = WithinBounds(), True
        with suppress(Exception), self._bounds, generators_apart(device), torch.no_grad():
            task.losses_of(outputs_of(model, x), y)
            self._bounded = self._bounds.needed
        self._kept.put_back()

    @contextmanager
    def begun(self, start: RoundParameters, *, training: bool) -> Iterator[nn.Module]:
        """Yield the model at the start of a round."""
        self._kept.copy_from(start.parameters | start.constants)
        try:
            with self._bounds if self._bounded else nullcontext():
                yield self.model if training else self.model.eval()
        finally:
            self._kept.put_back()

    def moved(
        self,
        task: Task,
        start: RoundParameters,
        batches: Iterator[tuple[Inputs, Tensor]],
        local: LocalTraining,
        activations: Activations,
        steps: int,
    ) -> TorchTensors:
        """Return one user's displacement after these steps on these batches, [1, *shape] by name.

        It includes that of personal parameters, and the changes of control variates if any.
        """
        with self.begun(start, training=True) as model:
            trained = [self._kept.tensors[name] for name in start.parameters]
            memory = [self._kept.numbers[name] for name in start.parameters]
            descent = Descent(start.parameters, local, start.control, start.personal)
            for step, (x, y) in enumerate(batches):
                total, count = task.summed_loss(outputs_of(model, x, activations), y)
                mean = total * torch.reciprocal(count).to(total)
                gradients = torch.autograd.grad(mean, trained, materialize_grads=True)
                descent.step_of_one(memory, gradients)
                if step + 1 < steps:
                    descent.put_into(memory)
        return descent.moved()
