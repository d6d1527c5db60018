"""Local training of a chunk of users at once, for models whose trained layers are known.

The examples of all users go through the model side by side. Layers that are trained are replaced
by others that know what each user has learnt: by weights for each user, or, where that is cheaper,
by low-rank corrections to the shared weights. All else works on examples alone and stays.
"""

from collections.abc import Iterable

import torch

from fedpriv.engine.batches import Batches
from fedpriv.engine.descent import Descent
from fedpriv.engine.layers import Layers
from fedpriv.engine.low_rank import Coefficients, LowRankLinear
from fedpriv.engine.precision import Activations
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.engine.updates import OuterProducts, Updates
from fedpriv.federated.transport import LocalTraining


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
