"""The steps of local training, from gradients to updates, for one user or many side by side.

The `direction` of the round's `LocalTraining` turns gradients into steps.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedpriv.engine.task import RoundParameters
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
