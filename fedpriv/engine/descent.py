"""Local training: gradients become steps and updates, for one user or many side by side.

The `direction` of the round's `LocalTraining` turns gradients into steps. `AloneModel` trains users
one after another, in plain torch, each on its own batches. No tensor holds data of two users, so a
model may compute anything from a user's rows. Between users, all tensors of the model and all
attributes of its modules are restored.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedpriv.engine.arithmetic import Activations
from fedpriv.engine.examples import Examples
from fedpriv.engine.leftovers import KeptModel, lazy_copy, named_tensors
from fedpriv.engine.task import RoundParameters, Task, outputs_of
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.training.request import CONTROL_PREFIX, LocalStep, LocalTraining


def is_plain(local: LocalTraining) -> bool:
    """Return whether a step is the negative gradient times the learning rate, and nothing else."""
    plain_direction = type(local).direction is LocalTraining.direction and local.control is None
    return plain_direction and not local.momentum and not local.proximal


class Descent:
    """The displacements of L users from common parameters, which are never overwritten."""

    def __init__(self, start: RoundParameters, local: LocalTraining) -> None:
        self.displacement: TorchTensors = {}  # [L, *shape]; empty before the first step
        self._memory: dict[str, tuple[Tensor, ...]] = {}  # of the algorithm, [L, *shape] each
        self._start, self._control, self._personal = start.parameters, start.control, start.personal
        self._local, self._rate, self._plain = local, local.rate, is_plain(local)
        self._parameters, self._steps = TorchTensors(), 0

    def parameters(self, users: int) -> TorchTensors:
        """Return parameters of the first l users, [l, *shape]; the next call overwrites them."""
        if not self.displacement:
            return same_for_all(self._start, users)
        if not self._parameters:
            self._parameters = {n: torch.empty_like(m) for n, m in self.displacement.items()}
        for name, displacement in self.displacement.items():
            torch.add(self._start[name], displacement[:users], out=self._parameters[name][:users])
        return {name: p[:users] for name, p in self._parameters.items()}

    def step(
        self, parameters: Mapping[str, Tensor], gradients: TorchTensors, active: Tensor | None
    ) -> None:
        """Take a step with the gradients [l, *shape] at these parameters; l is L in the first step.

        `active` [l] marks the users who take the step; None: all do.
        """
        moves = self._moves(parameters, gradients)
        if active is not None:
            moves = {
                name: torch.where(active.view(-1, *[1] * (move.dim() - 1)), move, 0.0)
                for name, move in moves.items()
            }
        self._steps += 1
        if not self.displacement:
            self.displacement = moves
            return
        for name, move in moves.items():
            self.displacement[name][: len(move)].add_(move)

    def step_of_one(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take a step of the only user, with tensors [*shape] in the order of the start."""
        if self._plain and self.displacement:
            displacement = [tensor[0] for tensor in self.displacement.values()]
            torch._foreach_add_(displacement, [*gradients], alpha=-self._rate)
            return
        batched_parameters, batched_gradients = (
            {name: tensor[None] for name, tensor in zip(self._start, tensors, strict=True)}
            for tensors in (parameters, gradients)
        )
        self.step(batched_parameters, batched_gradients, None)

    def put_into(self, memory: Sequence[Tensor]) -> None:
        """Write the parameters of the only user to tensors [*shape]."""
        moves = self.displacement.values()
        for tensor, start, displacement in zip(memory, self._start.values(), moves, strict=True):
            torch.add(start, displacement[0], out=tensor)

    def _moves(self, parameters: Mapping[str, Tensor], gradients: TorchTensors) -> TorchTensors:
        """Return the changes of parameters in a step, [l, *shape], and update the memory."""
        if self._plain:
            return {name: gradient * -self._rate for name, gradient in gradients.items()}
        moves, local = {}, self._local
        for name, gradient in gradients.items():
            users, displacement = len(gradient), self.displacement.get(name)
            if displacement is not None and local.proximal:
                gradient = (displacement[:users] * local.proximal).add_(gradient)  # noqa: PLW2901
            if name not in self._memory:
                zeros = tuple(torch.zeros_like(gradient) for _ in range(local.memories))
                self._memory[name] = zeros
            memory = tuple(tensor[:users] for tensor in self._memory[name])
            control = self._control.get(name, gradient.new_zeros(()))
            state = parameters[name], memory, control, name in self._personal
            step = local.direction(LocalStep(self._steps, gradient, *state))
            direction, values = _checked(local, step, gradient)
            for tensor, value in zip(memory, values, strict=True):
                tensor.copy_(value)
            moves[name] = direction * -self._rate
        return moves

    def moved(self) -> TorchTensors:
        """Return all displacements, and the changes of control variates, [L, *shape] by name."""
        changes = {CONTROL_PREFIX + name: self._memory[name][0] for name in self._control}
        return {**self.displacement, **changes}


def _checked(local: LocalTraining, step: Any, gradient: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the direction and the memory of a step; ModelError if they are something else."""
    match step:
        case [Tensor(shape=gradient.shape) as direction, [*state]] if len(state) == local.memories:
            return direction, state
    parts = step if isinstance(step, tuple) else (step,)
    kinds = (f"{type(p).__name__}{[*p.shape] if hasattr(p, 'shape') else ''}" for p in parts)
    raise ModelError(
        f"direction of {type(local).__name__} returns {', '.join(kinds)}; it must return a tensor "
        f"{[*gradient.shape]} and a tuple of {local.memories} tensors, as memories says"
    )


def same_for_all(parameters: TorchTensors, users: int) -> TorchTensors:
    """Return parameters of l users, [l, *shape], that share one copy by a stride of 0."""
    return {
        name: p.as_strided((users, *p.shape), (0, *p.stride())) for name, p in parameters.items()
    }


class AloneModel:
    """A copy of a task's model that trains one user after another."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self._task, self.model = task, lazy_copy(task.model).to(device)
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
