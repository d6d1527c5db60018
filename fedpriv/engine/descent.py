"""Gradient descent of many users at once.

Products and sums are operations of their own: where a loop over all lanes ends, torch may round
what it fuses elsewhere, and who is in the last lane would then count.
"""

from dataclasses import dataclass, field, replace

import torch

from fedpriv.engine.task import TorchTensors
from fedpriv.federated.transport import LocalTraining


@dataclass(frozen=True)
class Descent:
    """Where C users are on their way from the same parameters.

    A step works in the memory of the one before, as fresh memory costs more: only the newest
    descent may be used.

    Attributes:
        start: shared parameters, which nobody writes to.
        local: learning rate, momentum and proximal term.
        current: parameters of each user, [C, *shape]; before the first step those of the start.
        velocity: of each user, [C, *shape]; empty before the first step and without momentum.
        pending: whether `current` is still the direction of the first step, to be taken when it is
            known whether users take another.
    """

    start: TorchTensors
    local: LocalTraining
    current: TorchTensors
    velocity: TorchTensors = field(default_factory=dict)
    pending: bool = False

    @classmethod
    def begin(cls, start: TorchTensors, local: LocalTraining) -> "Descent":
        """Before the first step."""
        return cls(start, local, start)

    @property
    def begun(self) -> bool:
        """Whether users may differ."""
        return self.current is not self.start

    def placed(self) -> "Descent":
        """With parameters as they are, for another step."""
        if not self.pending:
            return self
        rate = self.local.learning_rate
        current = {n: self.start[n] - d * rate for n, d in self.current.items()}
        return replace(self, current=current, pending=False)

    def of_lanes(self, lanes: int) -> TorchTensors:
        """Parameters of each of C users, [C, *shape]; nobody writes to them."""
        return self.current if self.begun else same_for_all(self.current, lanes)

    def after(self, gradients: TorchTensors, active: torch.Tensor | None) -> "Descent":
        """Take a step from parameters that are placed.

        Args:
            gradients: of each user, [C, *shape]; two may share memory, so none is written to.
            active: [C] whether a user has a step, or None if all have.
        """
        directions = gradients
        if self.begun and self.local.proximal:
            directions = {
                name: (self.current[name] - self.start[name]).mul_(self.local.proximal).add_(d)
                for name, d in directions.items()
            }
        if self.local.momentum:
            directions = {
                name: self.velocity[name].mul_(self.local.momentum).add_(d)
                if self.begun
                else d.clone()
                for name, d in directions.items()
            }
        masked = directions
        if active is not None:
            masked = {name: _masked(d, active) for name, d in directions.items()}
        velocity = directions if self.local.momentum else {}
        if not self.begun:
            return replace(self, current=masked, velocity=velocity, pending=True)
        rate = self.local.learning_rate
        current = {n: self.current[n].sub_(d * rate) for n, d in masked.items()}
        return replace(self, current=current, velocity=velocity)

    def updates(self) -> TorchTensors:
        """Parameters of each user minus those at the start: [C, *shape]."""
        if self.pending:
            return {name: d * -self.local.learning_rate for name, d in self.current.items()}
        return {name: end.sub_(self.start[name]) for name, end in self.current.items()}


def same_for_all(parameters: TorchTensors, lanes: int) -> TorchTensors:
    """Parameters of each of L lanes that are all in one place: a stride of 0 says so."""
    return {
        name: p.as_strided((lanes, *p.shape), (0, *p.stride())) for name, p in parameters.items()
    }


def _masked(direction: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
    """A direction [C, *shape] that is zero for users who are not active [C]."""
    return torch.where(active.view(-1, *[1] * (direction.dim() - 1)), direction, 0.0)
