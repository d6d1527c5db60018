"""Local training in layers, with low-rank corrections to shared weights where they cost less.

A gradient of a linear layer is a sum of outer products δ xᵀ, one per example. So a user's weights
after some steps are W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so far, with coefficients a_t
that follow from the algorithm alone, if it is linear, and the layer's output is

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t:

one matrix product for all users of a chunk, and a small correction for each. The result is that of
weights per user up to the rounding of float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from fedpriv.engine.batches import Batches
from fedpriv.engine.layers import Layers
from fedpriv.engine.local_training import Descent, algorithm_of
from fedpriv.engine.matmul import OuterProducts, product, shared_product
from fedpriv.engine.task import Activations, RoundParameters, Task, lowered
from fedpriv.privacy.clipping_torch import Updates
from fedpriv.privacy.round import LocalTraining


class LowRankLinear:
    """A `torch.nn.Linear` that is called once in each of the S steps of C users.

    Its parameters are the shared ones; it remembers its inputs, and the losses' gradients by its
    outputs, which the backward pass hands to it.

    Args:
        weight: [out, in] shared by all users.
        bias: [out] shared by all users.
        users: C.
        steps: S.
        entering: all its inputs, in the order of C, S and rows, if they are known: then it is
            called with tensors of the right shape on the device "meta", without numbers.

    Attributes:
        probe: to be differentiated by, so that autograd's backward pass reaches the layer.
        gradient: of the losses by its outputs in the step in progress, [C, r, out].
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        users: int,
        steps: int,
        entering: torch.Tensor | None = None,
    ) -> None:
        self.probe = torch.zeros((), device=weight.device, requires_grad=True)
        self._weight, self._bias = weight, bias
        self._users, self._steps = users, steps
        # Of the steps so far [C, S·r, in]; of all steps if these are known.
        self._inputs = torch.empty(0, 0, 0)
        if entering is not None:
            self._inputs = entering.view(users, -1, weight.shape[1])
        self._by_shared: torch.Tensor | None = None
        self.gradient: torch.Tensor | None = None
        # By the outputs of the steps so far, [C, S·r, out]; times their coefficients if settled.
        self._gradients = torch.empty(0)
        self._scaled = torch.empty(0, 0, 0)  # these times their coefficients, [C, n, out]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        return _through(self, self.probe, x).view(*x.shape[:-1], -1)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """What it gives for x, [C, r, out] in memory of its own; autograd does not see it."""
        before = self._scaled.shape[1]
        if x.is_meta:  # those of the shared parameters are one product for all steps
            if self._by_shared is None:
                self._by_shared = self._shared(self._inputs)
            now = slice(before, before + self._count)
            return self._corrected(self._by_shared[:, now], self._inputs[:, now])
        rows = x.detach().reshape(self._users, -1, x.shape[-1])
        if before == 0:
            shape = self._users, self._steps * rows.shape[1], rows.shape[2]
            self._inputs = self._weight.new_empty(shape)
        self._inputs[:, before : before + self._count] = rows
        return self._corrected(self._shared(rows), rows)

    def by_inputs(self, gradient: torch.Tensor) -> torch.Tensor:
        """The losses' gradient by its inputs [C, r, in], from that by its outputs [C, r, out]."""
        weight, scaled = self._weight.to(gradient.dtype), self._scaled
        y = shared_product(gradient.flatten(0, 1), weight).float().view(*gradient.shape[:2], -1)
        if scaled.shape[1]:
            seen = self._inputs[:, : scaled.shape[1]]
            y += product(product(gradient.float(), scaled.transpose(1, 2)), seen)
        return y

    def learn(self, position: torch.Tensor, *, settled: bool) -> None:
        """End a step.

        Args:
            position: [C, S] coefficients after the step.
            settled: whether those of earlier steps are as they were.
        """
        before, after = self._scaled.shape[1], self._scaled.shape[1] + self._count
        if before == 0:
            shape = self._users, self._steps * self._count, len(self._weight)
            self._gradients = self._weight.new_empty(shape)
        now = self._gradients[:, before:after]
        gradient, self.gradient = self.gradient, None
        if gradient is None:  # no loss depends on what it gave
            now.zero_()
        elif settled:
            torch.mul(gradient, position[:, before // self._count, None, None], out=now)
        else:
            now.copy_(gradient)
        self._scaled = self._gradients[:, :after]
        if not settled:
            of_rows = position.repeat_interleave(self._count, 1)
            self._scaled = self._scaled * of_rows[:, :after, None]

    def updates(self) -> list[torch.Tensor | OuterProducts]:
        """Each user's weights (and bias) minus the shared ones: [C, out, in], [C, out]."""
        weight = OuterProducts(self._scaled, self._inputs)
        return [weight] if self._bias is None else [weight, self._scaled.sum(1)]

    @property
    def _count(self) -> int:
        """Rows of a user in a step."""
        return self._inputs.shape[1] // self._steps

    def _shared(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [C, r, in] through the shared layer: [C, r, out]."""
        flat, matrix = lowered(rows).flatten(0, 1), lowered(self._weight)
        shift = None if self._bias is None else self._bias.to(matrix.dtype)
        y = flat.new_empty((*rows.shape[:2], len(matrix)))
        with torch.autocast(rows.device.type, enabled=False):
            shared_product(flat, matrix.t().contiguous(), shift, out=y.flatten(0, 1))
        return y

    def _corrected(self, y: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Outputs y [C, r, out] of the shared layer for rows [C, r, in], plus their corrections."""
        with torch.autocast(rows.device.type, enabled=False):
            before = self._scaled.shape[1]
            if not before:
                return y.clone() if y._is_view() else y
            products = product(rows.float(), self._inputs[:, :before].transpose(1, 2))
            # The 1 of the bias would be lost in fewer bits beside products of long rows.
            inner = products if self._bias is None else products + 1.0
            return product(inner, self._scaled).add_(y).to(y.dtype)


class _Through(torch.autograd.Function):
    """Through a layer, which gets the gradient by its outputs before anything changes that."""

    @staticmethod
    def forward(
        ctx: Any, layer: LowRankLinear, _probe: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        return layer.outputs(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradient.contiguous()
        ctx.layer.gradient = gradient
        if not ctx.needs_input_grad[2]:
            return None, None, None
        return None, None, ctx.layer.by_inputs(gradient).view(ctx.shape)


_through: Callable[..., torch.Tensor] = _Through.apply


def train_layers_chunk(
    layers: Layers,
    task: Task,
    start: RoundParameters,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
) -> Updates:
    """Train the users of a chunk in layers of the task; the result is as of `train_chunk`."""
    users, steps, width = batches.shape
    algorithm, parameters = algorithm_of(local), start.parameters
    low_rank: dict[str, LowRankLinear] = {}
    for name in layers.low_rank(steps, width) if algorithm.linear else ():
        weight, *bias = (parameters[key] for key in layers.parameters(name))
        entering = batches.x if name == layers.entrance else None
        given = (weight, bias[0] if bias else None, users, steps, entering)
        low_rank[name] = LowRankLinear(*given)
    shared = {key for name in low_rank for key in layers.parameters(name)}
    own = {n: _as_gradients_lie(p) for n, p in parameters.items() if n not in shared}
    descent = Descent.begin(own, algorithm)
    coefficients = Descent.begin({"": batches.weights.new_zeros(steps)}, algorithm)
    # A mean over each user's real examples; users are apart in the sum, so are its gradients.
    shares = batches.weights / batches.weights.sum(2, keepdim=True).clamp(min=1.0)
    model = layers.batched(low_rank)
    # What enters by one layer, which has it, needs no copy for the model.
    shape = users * width, *batches.x.shape[3:]
    entered = layers.entrance in low_rank
    seen = batches.x.new_empty(shape, device="meta") if entered else None
    with model.corrected(low_rank):
        for step in range(steps):
            descent = descent.placed()
            own = {n: p.detach().requires_grad_() for n, p in descent.of_users(users).items()}
            x = batches.x[:, step].flatten(0, 1) if seen is None else seen
            y, share = (t[:, step].flatten(0, 1) for t in (batches.y, shares))
            outputs = model.outputs(own, start.constants, x, activations, y.device)
            gradients = torch.autograd.grad(
                (task.losses_of(outputs, y) * share).sum(),
                [*own.values(), *(layer.probe for layer in low_rank.values())],
                materialize_grads=True,
            )
            active = batches.active(step)
            descent = descent.after(dict(zip(own, gradients, strict=False)), active)
            if low_rank:
                # A linear algorithm moves coefficients of gradients as it moves parameters.
                unit = batches.weights.new_zeros((users, steps))
                unit[:, step] = 1.0
                coefficients = coefficients.after({"": unit}, active).placed()
            for layer in low_rank.values():
                layer.learn(coefficients.current[""], settled=algorithm.plain)
    learnt: dict[str, torch.Tensor | OuterProducts] = {**descent.updates()}
    for name, layer in low_rank.items():
        learnt |= zip(layers.parameters(name), layer.updates(), strict=True)
    return {name: learnt[name] for name in parameters}


def _as_gradients_lie(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter in the order in memory of its gradients: those of convolutions by patches."""
    if parameter.dim() != 4:
        return parameter
    return parameter.contiguous(memory_format=torch.channels_last)
