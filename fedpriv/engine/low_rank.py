"""Linear layers of many users without weights for each.

A gradient of a linear layer is a sum of outer products δ xᵀ, one per example. So a user's weights
after some steps are W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so far, with coefficients a_t
that follow from learning rate, momentum and proximal term alone, and the layer's output is

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t:

one matrix product for all users of a chunk, and a small correction for each. The result is that of
weights per user up to the rounding of float32.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.updates import OuterProducts
from fedpriv.federated.transport import LocalTraining


@dataclass(frozen=True)
class Coefficients:
    """A user's place and velocity as weights of its gradients so far: each [C, S]."""

    position: torch.Tensor
    velocity: torch.Tensor

    @classmethod
    def begin(cls, lanes: int, steps: int, device: torch.device) -> "Coefficients":
        """Before the first step."""
        zeros = torch.zeros((lanes, steps), device=device)
        return cls(zeros, zeros)

    def after(self, step: int, active: torch.Tensor | None, local: LocalTraining) -> "Coefficients":
        """Coefficients after a step of SGD; only users that are active [C] move, None: all."""
        direction = self.position * local.proximal
        direction[:, step] += 1.0
        velocity = self.velocity * local.momentum + direction
        position = self.position - local.learning_rate * velocity
        if active is None:
            return Coefficients(position, velocity)
        return Coefficients(
            torch.where(active[:, None], position, self.position),
            torch.where(active[:, None], velocity, self.velocity),
        )


class LowRankLinear(nn.Module):
    """Stands in for a `torch.nn.Linear` that is called once in each step of C users in S steps.

    Its parameters are the shared ones; it remembers what it saw and was told.

    Attributes:
        output: what it gave in the step in progress, [C·r…, out].
    """

    def __init__(self, layer: nn.Linear, lanes: int, steps: int) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self.output = torch.empty(0)
        self._lanes, self._steps = lanes, steps
        self._rows = torch.empty(0)  # of the step in progress, [C, r, in]
        self._inputs = torch.empty(0)  # of the steps so far, [C, S·r, in]
        self._gradients = torch.empty(0)  # by the outputs of the steps so far, [C, S·r, out]
        self._scaled = torch.empty(0, 0, 0)  # these times their coefficients, [C, n, out]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        output = functional.linear(x, self.weight, self.bias)
        rows = x.reshape(self._lanes, -1, x.shape[-1])
        before = self._scaled.shape[1]
        if before:
            products = rows @ self._inputs[:, :before].transpose(1, 2)
            if self.bias is not None:
                products = products + 1.0
            own = output.view(self._lanes, -1, output.shape[-1])
            output = torch.baddbmm(own, products, self._scaled).view_as(output)
        if not output.requires_grad:  # nothing before this layer is trained
            output = output.detach().requires_grad_()
        self._rows, self.output = rows.detach(), output
        return output

    def learn(self, gradient: torch.Tensor, position: torch.Tensor) -> None:
        """End a step.

        Args:
            gradient: of the users' losses by `output`, same shape.
            position: [C, S] coefficients after the step.
        """
        rows = gradient.reshape(self._lanes, -1, gradient.shape[-1])
        before, count = self._scaled.shape[1], rows.shape[1]
        after = before + count
        if before == 0:
            self._inputs, self._gradients = (_room(r, self._steps) for r in (self._rows, rows))
        self._inputs[:, before:after], self._gradients[:, before:after] = self._rows, rows
        of_rows = position.repeat_interleave(count, 1)[:, :after, None]
        self._scaled = self._gradients[:, :after] * of_rows

    def updates(self) -> list[torch.Tensor | OuterProducts]:
        """Each user's weights (and bias) minus the shared ones: [C, out, in], [C, out]."""
        weight = OuterProducts(self._scaled, self._inputs)
        return [weight] if self.bias is None else [weight, self._scaled.sum(1)]


def _room(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Memory for the rows [C, r, d] of all steps."""
    lanes, count, width = rows.shape
    return rows.new_empty((lanes, steps * count, width))
