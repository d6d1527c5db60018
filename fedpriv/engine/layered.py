"""Local training of a chunk of users at once, for models whose trained layers are known.

The examples of all users go through the model side by side. Layers that are trained are replaced
by others that know what each user has learnt: by weights for each user, or, where that is cheaper,
by low-rank corrections to the shared weights. All else works on examples alone and stays.
"""

import torch

from fedpriv.engine.batches import Batches
from fedpriv.engine.descent import Descent
from fedpriv.engine.layers import Layers
from fedpriv.engine.low_rank import Coefficients, LowRankLinear
from fedpriv.engine.precision import Activations, outputs_of
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
) -> Updates:
    """Train C users from the same parameters; arguments and result as of `train_chunk`."""
    lanes, steps, width = batches.shape
    low_rank = {
        name: LowRankLinear(layer, batches.x, steps)
        for name, layer in layers.low_rank(steps, width).items()
    }
    # Corrections count on equal steps; other layers are spared what all users' batches lack.
    widths = (width,) * steps if low_rank else batches.widths
    models = {width: layers.replaced(low_rank, lanes * width) for width in set(widths)}
    shared = {key: parameters[key] for name in low_rank for key in layers.parameters(name)}
    own = {n: _as_gradients_lie(p) for n, p in parameters.items() if n not in shared}
    descent = Descent.begin(own, local)
    coefficients = Coefficients.begin(lanes, steps, batches.weights.device)
    # A mean over each user's real examples; users are apart in the sum, so are its gradients.
    shares = batches.weights / batches.weights.sum(2, keepdim=True).clamp(min=1.0)
    for step, width in enumerate(widths):
        descent = descent.placed()
        own = descent.of_lanes(lanes)
        x, y, share = (t[:, step, :width].flatten(0, 1) for t in (batches.x, batches.y, shares))
        for layer in low_rank.values():
            layer.give(x)
        outputs = outputs_of(models[width], {**shared, **own, **constants}, x, activations)
        gradients = torch.autograd.grad(
            (task.losses_of(outputs, y) * share).sum(),
            [*own.values(), *(layer.output for layer in low_rank.values())],
            materialize_grads=True,
        )
        active = batches.active(step)
        descent = descent.after(dict(zip(own, gradients, strict=False)), active)
        coefficients = coefficients.after(step, active, local)
        for layer, gradient in zip(low_rank.values(), gradients[len(own) :], strict=True):
            layer.learn(gradient, coefficients.position)
    learnt: dict[str, torch.Tensor | OuterProducts] = {**descent.updates()}
    for name, layer in low_rank.items():
        learnt |= zip(layers.parameters(name), layer.updates(), strict=True)
    return {name: learnt[name] for name in parameters}


def _as_gradients_lie(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter in the order in memory of its gradients: those of convolutions by patches."""
    if parameter.dim() != 4:
        return parameter
    return parameter.contiguous(memory_format=torch.channels_last)
