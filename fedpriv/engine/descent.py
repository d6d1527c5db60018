"""From gradients to updates: the steps of local training, for one user or for many side by side.

What a step does with a gradient is up to the `direction` of the round's `LocalTraining`.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from fedpriv.privacy.clipping_torch import TorchTensors
from fedpriv.training.post_processing import CONTROL_PREFIX
from fedpriv.training.request import LocalStep, LocalTraining


def is_plain(local: LocalTraining) -> bool:
    """Whether a step goes against the gradient by the learning rate, and no more."""
    own = type(local).direction is LocalTraining.direction and local.control is None
    return own and not local.momentum and not local.proximal


class Descent:
    """How far L users have moved from the same parameters, which are never written to."""

    def __init__(
        self,
        start: TorchTensors,
        local: LocalTraining,
        control: TorchTensors | None = None,
        personal: Collection[str] = (),
    ) -> None:
        self.displacement: TorchTensors = {}  # [L, *shape]; empty before the first step
        self._memory: dict[str, tuple[Tensor, ...]] = {}  # [L, *shape] each
        self._start, self._local, self._control = start, local, control or {}
        self._personal, self._parameters = personal, TorchTensors()
        self._rate, self._steps, self._plain = local.rate, 0, is_plain(local)

    def parameters(self, users: int) -> TorchTensors:
        """Parameters of the first l users, [l, *shape], in memory that the next call overwrites."""
        if not self.displacement:
            return same_for_all(self._start, users)
        if not self._parameters:
            self._parameters = {n: torch.empty_like(m) for n, m in self.displacement.items()}
        for name, moved in self.displacement.items():
            torch.add(self._start[name], moved[:users], out=self._parameters[name][:users])
        return {name: p[:users] for name, p in self._parameters.items()}

    def step(
        self, parameters: Mapping[str, Tensor], gradients: TorchTensors, active: Tensor | None
    ) -> None:
        """Take a step along gradients [l, *shape] at these parameters; in the first, l is L.

        Active says which users take it, [l]; None: all do.
        """
        ways = self._ways(parameters, gradients)
        if active is not None:
            ways = {
                name: torch.where(active.view(-1, *[1] * (way.dim() - 1)), way, 0.0)
                for name, way in ways.items()
            }
        self._steps += 1
        if not self.displacement:
            self.displacement = ways
            return
        for name, way in ways.items():
            self.displacement[name][: len(way)].add_(way)

    def step_of_one(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take a step of the only user, with tensors [*shape] in the order of the start."""
        if self._plain and self.displacement:
            moved = [each[0] for each in self.displacement.values()]
            torch._foreach_add_(moved, [*gradients], alpha=-self._rate)
            return
        own, ways = (
            {name: tensor[None] for name, tensor in zip(self._start, tensors, strict=True)}
            for tensors in (parameters, gradients)
        )
        self.step(own, ways, None)

    def put_into(self, memory: Sequence[Tensor]) -> None:
        """Write the parameters of the only user to tensors [*shape]."""
        moved = self.displacement.values()
        for own, start, way in zip(memory, self._start.values(), moved, strict=True):
            torch.add(start, way[0], out=own)

    def _ways(self, parameters: Mapping[str, Tensor], gradients: TorchTensors) -> TorchTensors:
        """How far users go, [l, *shape]."""
        if self._plain:
            return {name: gradient * -self._rate for name, gradient in gradients.items()}
        found, local = {}, self._local
        for name, gradient in gradients.items():
            users, moved = len(gradient), self.displacement.get(name)
            if moved is not None and local.proximal:
                gradient = (moved[:users] * local.proximal).add_(gradient)  # noqa: PLW2901
            if name not in self._memory:
                kept = tuple(torch.zeros_like(gradient) for _ in range(local.memories))
                self._memory[name] = kept
            memory = tuple(held[:users] for held in self._memory[name])
            control = self._control.get(name, gradient.new_zeros(()))
            own = parameters[name], memory, control, name in self._personal
            direction, after = local.direction(LocalStep(self._steps, gradient, *own))
            for held, new in zip(memory, after, strict=True):
                held.copy_(new)
            found[name] = direction * -self._rate
        return found

    def moved(self) -> TorchTensors:
        """All displacements, and the changes of control variates."""
        changes = {CONTROL_PREFIX + name: self._memory[name][0] for name in self._control}
        return {**self.displacement, **changes}


def same_for_all(parameters: TorchTensors, users: int) -> TorchTensors:
    """Parameters of l users that share one copy, which a stride of 0 shows."""
    return {
        name: p.as_strided((users, *p.shape), (0, *p.stride())) for name, p in parameters.items()
    }
