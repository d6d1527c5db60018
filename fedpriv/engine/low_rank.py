"""Linear layers of many users without weights for each.

A gradient of a linear layer is a sum of outer products δ xᵀ, one per example. So a user's weights
after some steps are W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so far, with coefficients a_t
that follow from learning rate, momentum and proximal term alone, and the layer's output is

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t:

one matrix product for all users of a chunk, and a small correction for each. The result is that of
weights per user up to the rounding of float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from fedpriv.engine.matmul import product
from fedpriv.engine.precision import lowered
from fedpriv.engine.products import Context
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


class LowRankLinear:
    """Stands in for a `torch.nn.Linear` that is called once in each step of C users in S steps.

    Its parameters are the shared ones; it remembers what it saw and was told.

    Attributes:
        output: what it gave in the step in progress, [C·r…, out].
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, examples: torch.Tensor, steps: int
    ) -> None:
        """Before the first step.

        Args:
            weight: [out, in] shared by all users.
            bias: [out] shared by all users.
            examples: [C, S, B, …] what all steps begin from.
            steps: S.
        """
        self._weight, self._bias = weight, bias
        self.output = torch.empty(0)
        self._examples, self._steps = examples, steps
        self._given = torch.empty(0)
        self._version = 0
        self._inputs = torch.empty(0, 0, 0)  # of the steps so far, [C, S·r, in]
        # By the outputs of the steps so far, [C, S·r, out]; times their coefficients if settled.
        self._gradients = torch.empty(0)
        self._scaled = torch.empty(0, 0, 0)  # these times their coefficients, [C, n, out]

    def give(self, x: torch.Tensor) -> None:
        """Begin a step in which the model gets x [C·B, …], a part of the examples."""
        self._given, self._version = x, x._version

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        rows = x.reshape(len(self._examples), -1, x.shape[-1])
        self._remember(x, rows.detach().float())
        seen = self._inputs[:, : self._scaled.shape[1]]
        output = _correct(rows, self._weight, self._bias, seen, self._scaled)
        output = output.view(*x.shape[:-1], -1)
        if not output.requires_grad:  # nothing before this layer is trained
            output = output.detach().requires_grad_()
        self.output = output
        return output

    def learn(self, gradient: torch.Tensor, position: torch.Tensor, *, settled: bool) -> None:
        """End a step.

        Args:
            gradient: of the users' losses by `output`, same shape.
            position: [C, S] coefficients after the step.
            settled: whether those of earlier steps are as they were.
        """
        rows = gradient.float().reshape(len(self._examples), -1, gradient.shape[-1])
        before, count = self._scaled.shape[1], rows.shape[1]
        after = before + count
        if before == 0:
            self._gradients = _room(rows, self._steps)
        of_rows = position.repeat_interleave(count, 1)[:, :after, None]
        if settled:
            torch.mul(rows, of_rows[:, before:], out=self._gradients[:, before:after])
            self._scaled = self._gradients[:, :after]
        else:
            self._gradients[:, before:after] = rows
            self._scaled = self._gradients[:, :after] * of_rows

    def updates(self) -> list[torch.Tensor | OuterProducts]:
        """Each user's weights (and bias) minus the shared ones: [C, out, in], [C, out]."""
        weight = OuterProducts(self._scaled, self._inputs)
        return [weight] if self._bias is None else [weight, self._scaled.sum(1)]

    def _remember(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Keep what the layer sees, rows [C, r, in] of x, for the steps to come."""
        before, sees_examples = self._scaled.shape[1], self._sees_examples(x)
        if before == 0:
            examples = self._examples
            self._inputs = (
                examples.view(len(rows), -1, rows.shape[2])
                if sees_examples
                else _room(rows, self._steps)
            )
        kept = self._inputs.data_ptr() == self._examples.data_ptr()
        if kept and not sees_examples:
            self._inputs = self._inputs.clone()
        if not (kept and sees_examples):
            self._inputs[:, before : before + rows.shape[1]] = rows

    def _sees_examples(self, x: torch.Tensor) -> bool:
        """Whether x holds the examples of the step in progress, as they are."""
        given = self._given
        same = x.data_ptr() == given.data_ptr() and x.numel() == given.numel()
        return same and x.is_contiguous() and x._version == self._version


class _Corrected(torch.autograd.Function):
    """Rows [C, r, in] through the shared layer and the corrections for n rows seen [C, n, in]."""

    @staticmethod
    def forward(
        ctx: Context,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        seen: torch.Tensor,
        scaled: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, seen, scaled)
        flat, matrix = lowered(rows).flatten(0, 1), lowered(weight)
        shift = None if bias is None else bias.to(matrix.dtype)
        # The 1 of the bias would be lost in fewer bits beside products of long rows.
        with torch.autocast(rows.device.type, enabled=False):
            y = product(flat, matrix.t(), shift).view(*rows.shape[:2], -1)
            if not scaled.shape[1]:
                return y
            products = product(rows.float(), seen.transpose(1, 2))
            if bias is not None:
                products += 1.0
            return y.float().add_(product(products, scaled)).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, seen, scaled = ctx.saved_tensors
        of_rows = product(gradient.flatten(0, 1), weight.to(gradient.dtype)).float()
        of_rows = of_rows.view(*gradient.shape[:2], -1)
        if scaled.shape[1]:
            of_rows += product(product(gradient.float(), scaled.transpose(1, 2)), seen)
        return of_rows, None, None, None, None


_correct: Callable[..., torch.Tensor] = _Corrected.apply


def _room(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Memory for the rows [C, r, d] of all steps."""
    lanes, count, width = rows.shape
    return rows.new_empty((lanes, steps * count, width))
