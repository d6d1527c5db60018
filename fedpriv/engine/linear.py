"""Local training of many users at once without weights per user, for models of linear layers.

A gradient of a linear layer is a sum of outer products δ xᵀ, one per example. So a user's weights
after some steps are W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so far, with coefficients a_t
that follow from learning rate, momentum and proximal term alone, and the layer's output is

    W x + b = W₀ x + b₀ + Σ_t a_t·(x_t·x + 1)·δ_t:

one matrix product for all users of a chunk, and a small correction for each. The result is that of
`train_chunk` up to the rounding of float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from fedpriv.engine.task import Task, TorchTensors
from fedpriv.engine.updates import OuterProducts, Updates
from fedpriv.federated.transport import LocalTraining


@dataclass(frozen=True)
class LinearLayers:
    """The linear layers of a task that has nothing else to train.

    Attributes:
        layers: by name, each called once in a forward pass.
        rows: how many rows one example puts through each layer.
    """

    layers: dict[str, nn.Linear]
    rows: dict[str, int]

    def pays(self, examples: int) -> bool:
        """Whether corrections cost less than weights per user, for so many examples a user."""
        shapes = {n: (layer.in_features, layer.out_features) for n, layer in self.layers.items()}
        corrections = sum(examples * self.rows[n] * (i + o) for n, (i, o) in shapes.items())
        return corrections <= sum(2 * i * o for i, o in shapes.values())


def linear_layers(task: Task, example: torch.Tensor) -> LinearLayers | None:
    """Linear layers of a task if they hold all that is trained, else None.

    Layers that share a parameter, are trained in part or are not called exactly once do not count.

    Args:
        task: the task.
        example: [1, …] one input.
    """
    layers: dict[str, nn.Linear] = {}
    for name, layer in task.model.named_modules():
        own = dict(layer.named_parameters(recurse=False))
        trained = [p.requires_grad for p in own.values()]
        if any(trained):
            if type(layer) is not nn.Linear or not all(trained):
                return None
            layers[name] = layer
    # A parameter shared by two layers is listed once by the task and twice here.
    if sum(len(list(layer.parameters())) for layer in layers.values()) != len(task.parameters()):
        return None
    rows: dict[str, list[int]] = {name: [] for name in layers}
    handles = [
        layer.register_forward_hook(
            lambda _layer, _inputs, output, name=name: rows[name].append(output[..., 0].numel())
        )
        for name, layer in layers.items()
    ]
    with _removing(handles), torch.no_grad(), torch.random.fork_rng(devices=[]):
        task.model(example)
    if any(len(calls) != 1 for calls in rows.values()):
        return None
    return LinearLayers(layers, {name: calls[0] for name, calls in rows.items()})


def train_linear_chunk(
    linear: LinearLayers,
    task: Task,
    parameters: TorchTensors,
    constants: TorchTensors,
    x: torch.Tensor,
    y: torch.Tensor,
    weights: torch.Tensor,
    local: LocalTraining,
) -> Updates:
    """Train C users from the same parameters; arguments and result as of `train_chunk`."""
    lanes, steps, batch = weights.shape
    counts = weights.sum(2)  # [C, S]
    traces = {name: _Trace(lanes, steps, layer) for name, layer in linear.layers.items()}
    coefficients = _Coefficients(torch.zeros_like(counts), torch.zeros_like(counts))
    handles = [
        layer.register_forward_hook(traces[name].corrected) for name, layer in linear.layers.items()
    ]
    with _removing(handles):
        for step in range(steps):
            outputs = functional_call(
                task.model, {**parameters, **constants}, (x[:, step].flatten(0, 1),)
            )
            per_example = task.losses_of(outputs, y[:, step].flatten(0, 1))
            share = weights[:, step] / counts[:, step : step + 1].clamp(min=1.0)
            # Users are apart in the sum, so its gradient holds each user's own.
            total = (per_example.view(lanes, batch) * share).sum()
            gradients = torch.autograd.grad(total, [t.output for t in traces.values()])
            coefficients = coefficients.after(step, counts[:, step] > 0, local)
            for trace, gradient in zip(traces.values(), gradients, strict=True):
                trace.append(gradient, coefficients.position)
    return {
        f"{name}.{p}" if name else p: update
        for name, trace in traces.items()
        for p, update in trace.updates().items()
    }


@dataclass(frozen=True)
class _Coefficients:
    """A user's place and velocity as weights of its gradients so far: each [C, S]."""

    position: torch.Tensor
    velocity: torch.Tensor

    def after(self, step: int, active: torch.Tensor, local: LocalTraining) -> "_Coefficients":
        """Coefficients after a step of SGD; users without a step stay where they are."""
        direction = self.position * local.proximal
        direction[:, step] += 1.0
        velocity = self.velocity * local.momentum + direction
        position = self.position - local.learning_rate * velocity
        return _Coefficients(
            torch.where(active[:, None], position, self.position),
            torch.where(active[:, None], velocity, self.velocity),
        )


@dataclass
class _Trace:
    """What one layer saw and was told in the steps so far.

    Attributes:
        lanes: number of users C.
        steps: number of steps S.
        layer: the layer.
        inputs: [C, S·r, in], rows of the steps so far.
        gradients: [C, S·r, out], of each user's loss by the layer's outputs.
        scaled: [C, n, out], the gradients so far times their coefficients.
        rows: what the layer saw in the step in progress, [C, r, in].
        output: what it gave.
    """

    lanes: int
    steps: int
    layer: nn.Linear
    inputs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    gradients: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    scaled: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, 0))
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def corrected(
        self, _layer: nn.Module, inputs: tuple[torch.Tensor], output: torch.Tensor
    ) -> torch.Tensor:
        """Forward hook: from the shared weights' output to each user's own."""
        rows = inputs[0].reshape(self.lanes, -1, self.layer.in_features)
        before = self.scaled.shape[1]
        if before:
            products = rows @ self.inputs[:, :before].transpose(1, 2)
            if self.layer.bias is not None:
                products = products + 1.0
            own = output.view(self.lanes, -1, self.layer.out_features)
            output = torch.baddbmm(own, products, self.scaled).view_as(output)
        if not output.requires_grad:  # nothing before this layer is trained
            output = output.detach().requires_grad_()
        self.rows, self.output = rows.detach(), output
        return output

    def append(self, gradient: torch.Tensor, position: torch.Tensor) -> None:
        """Take the step's gradients [C·r, out] and the coefficients [C, S] after the step."""
        rows = gradient.reshape(self.lanes, -1, self.layer.out_features)
        before, count = self.scaled.shape[1], rows.shape[1]
        after = before + count
        if before == 0:
            self.inputs = _room(self.rows, self.steps)
            self.gradients = _room(rows, self.steps)
        self.inputs[:, before:after], self.gradients[:, before:after] = self.rows, rows
        of_rows = position.repeat_interleave(count, 1)[:, :after, None]
        self.scaled = self.gradients[:, :after] * of_rows

    def updates(self) -> Updates:
        """Each user's weights (and bias) minus the shared ones: [C, out, in], [C, out]."""
        updates: dict[str, torch.Tensor | OuterProducts] = {
            "weight": OuterProducts(self.scaled, self.inputs)
        }
        if self.layer.bias is not None:
            updates["bias"] = self.scaled.sum(1)
        return updates


def _room(rows: torch.Tensor, steps: int) -> torch.Tensor:
    """Memory for the rows [C, r, d] of all steps."""
    lanes, count, width = rows.shape
    return rows.new_empty((lanes, steps * count, width))


@contextmanager
def _removing(handles: list[RemovableHandle]) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
