"""Linear layers of many users without weights for each.

A gradient of a linear layer is a sum of outer products δ xᵀ, one per example. So a user's weights
after some steps are W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so far, with coefficients a_t
that follow from learning rate, momentum and proximal term alone, and the layer's output is

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t:

one matrix product for all users of a chunk, and a small correction for each. The result is that of
weights per user up to the rounding of float32.

Local training of a chunk of users at once, for models whose trained layers are known.

The examples of all users go through the model side by side. Layers that are trained are replaced
by others that know what each user has learnt: by weights for each user, or, where that is cheaper,
by low-rank corrections to the shared weights. All else works on examples alone and stays.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from fedpriv.engine.batches import Batches
from fedpriv.engine.layers import Layers
from fedpriv.engine.matmul import OuterProducts, product, shared_product
from fedpriv.engine.sgd import Descent
from fedpriv.engine.task import Activations, Task, lowered
from fedpriv.privacy.clipping_torch import TorchTensors, Updates
from fedpriv.privacy.round import LocalTraining


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

    Its parameters are the shared ones; it remembers what it saw, and the losses' gradients by what
    it gave, of which the backward pass tells it.

    Attributes:
        probe: to be differentiated by, so that autograd's backward pass comes by.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        entering: torch.Tensor | None = None,
    ) -> None:
        """Before the first step.

        Args:
            weight: [out, in] shared by all users.
            bias: [out] shared by all users.
            shape: C and S.
            entering: what the layer will see, in the order of C, S and rows, if that is known: then
                it is called with tensors of the right shape on the device "meta", without numbers.
        """
        self.probe = torch.zeros((), device=weight.device, requires_grad=True)
        self._weight, self._bias = weight, bias
        self._lanes, self._steps = shape
        # Of the steps so far [C, S·r, in]; of all steps if these are known.
        self._inputs = torch.empty(0, 0, 0)
        if entering is not None:
            self._inputs = entering.view(self._lanes, -1, weight.shape[1])
        self._by_shared: torch.Tensor | None = None
        self._gradient: torch.Tensor | None = None  # of the step in progress
        # By the outputs of the steps so far, [C, S·r, out]; times their coefficients if settled.
        self._gradients = torch.empty(0)
        self._scaled = torch.empty(0, 0, 0)  # these times their coefficients, [C, n, out]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[C·B, …, in] → [C·B, …, out]."""
        return _through(self, self.probe, x).view(*x.shape[:-1], -1)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """What it gives for x, [C, r, out] in memory of its own; autograd does not see it."""
        return self._of_entering() if x.is_meta else self._of_rows(x.detach())

    def told(self, gradient: torch.Tensor) -> None:
        """Hear of the gradient [C, r, out] of the users' losses by what was given in this step."""
        self._gradient = gradient

    def by_inputs(self, gradient: torch.Tensor) -> torch.Tensor:
        """The losses' gradient by what it saw in this step, [C, r, in]."""
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
            shape = self._lanes, self._steps * self._count, len(self._weight)
            self._gradients = self._weight.new_empty(shape)
        now = self._gradients[:, before:after]
        gradient, self._gradient = self._gradient, None
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

    def _of_entering(self) -> torch.Tensor:
        """Outputs [C, r, out] in a step; those of the shared parameters are one product for all."""
        if self._by_shared is None:
            self._by_shared = self._shared(self._inputs)
        now = slice(self._scaled.shape[1], self._scaled.shape[1] + self._count)
        return self._corrected(self._by_shared[:, now], self._inputs[:, now])

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Outputs [C, r, out] of what it sees in a step, which it keeps for the steps to come."""
        rows, before = x.reshape(self._lanes, -1, x.shape[-1]), self._scaled.shape[1]
        if before == 0:
            shape = self._lanes, self._steps * rows.shape[1], rows.shape[2]
            self._inputs = self._weight.new_empty(shape)
        self._inputs[:, before : before + self._count] = rows
        return self._corrected(self._shared(rows), rows)

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


class _OfLayer(Protocol):
    layer: LowRankLinear
    shape: torch.Size

    @property
    def needs_input_grad(self) -> tuple[bool, ...]: ...


class _Through(torch.autograd.Function):
    """Through a layer, which hears of the gradient by what it gave before anything changed that."""

    @staticmethod
    def forward(
        ctx: _OfLayer, layer: LowRankLinear, _probe: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        ctx.layer, ctx.shape = layer, x.shape
        return layer.outputs(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: _OfLayer, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradient.contiguous()
        ctx.layer.told(gradient)
        if not ctx.needs_input_grad[2]:
            return None, None, None
        return None, None, ctx.layer.by_inputs(gradient).view(ctx.shape)


_through: Callable[..., torch.Tensor] = _Through.apply


def train_layers_chunk(
    layers: Layers,
    task: Task,
    parameters: TorchTensors,
    constants: TorchTensors,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
    named: Iterable[str] = (),
) -> Updates:
    """Train the users of a chunk; the result is as of `train_chunk`.

    Args:
        layers: of the task.
        task: model and loss.
        parameters: the model at the start of the round.
        constants: frozen parameters and buffers.
        batches: of the users.
        local: learning rate, momentum and proximal term.
        activations: of the model.
        named: linear layers that get low-rank corrections.
    """
    lanes, steps, width = batches.shape
    low_rank = {}
    for name in named:
        entering = batches.x if name == layers.entrance else None
        of_layer = _weight_and_bias(layers, name, parameters)
        low_rank[name] = LowRankLinear(*of_layer, (lanes, steps), entering)
    shared = {key for name in low_rank for key in layers.parameters(name)}
    own = {n: _as_gradients_lie(p) for n, p in parameters.items() if n not in shared}
    descent = Descent.begin(own, local)
    coefficients = Coefficients.begin(lanes, steps, batches.weights.device)
    settled = local.momentum == local.proximal == 0.0
    # A mean over each user's real examples; users are apart in the sum, so are its gradients.
    shares = batches.weights / batches.weights.sum(2, keepdim=True).clamp(min=1.0)
    model = layers.side_by_side(low_rank)
    # What enters by one layer, which has it, needs no copy for the model.
    entered = layers.entrance in low_rank
    shape = lanes * width, *batches.x.shape[3:]
    seen = batches.x.new_empty(shape, device="meta") if entered else None
    with model.corrected(low_rank):
        for step in range(steps):
            descent = descent.placed()
            own = {n: p.detach().requires_grad_() for n, p in descent.of_lanes(lanes).items()}
            x = batches.x[:, step].flatten(0, 1) if seen is None else seen
            y, share = (t[:, step].flatten(0, 1) for t in (batches.y, shares))
            outputs = model.outputs(own, constants, x, activations, y.device)
            gradients = torch.autograd.grad(
                (task.losses_of(outputs, y) * share).sum(),
                [*own.values(), *(layer.probe for layer in low_rank.values())],
                materialize_grads=True,
            )
            active = batches.active(step)
            descent = descent.after(dict(zip(own, gradients, strict=False)), active)
            coefficients = coefficients.after(step, active, local)
            for layer in low_rank.values():
                layer.learn(coefficients.position, settled=settled)
    learnt: dict[str, torch.Tensor | OuterProducts] = {**descent.updates()}
    for name, layer in low_rank.items():
        learnt |= zip(layers.parameters(name), layer.updates(), strict=True)
    return {name: learnt[name] for name in parameters}


def _weight_and_bias(
    layers: Layers, name: str, parameters: TorchTensors
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Those of a linear layer."""
    weight, *bias = (parameters[key] for key in layers.parameters(name))
    return weight, bias[0] if bias else None


def _as_gradients_lie(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter in the order in memory of its gradients: those of convolutions by patches."""
    if parameter.dim() != 4:
        return parameter
    return parameter.contiguous(memory_format=torch.channels_last)
