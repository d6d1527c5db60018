"""Local training: from gradients to updates, for the users of a chunk at once.

An `Algorithm` says what a step does with a gradient; `algorithm_of` finds it by the type of the
round's `LocalTraining`. To add one, derive a frozen dataclass from `LocalTraining` for its settings
and register a function that makes its algorithm:

    @algorithm_of.register
    def _(local: MyTraining) -> Algorithm: ...

Products and sums are operations of their own: torch may round what it fuses differently at the end
of a loop over all lanes, and a user's place in the chunk would then matter.
"""

from abc import ABC, abstractmethod
from functools import singledispatch

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedpriv.engine.batches import Batches
from fedpriv.engine.layers import Layers, LowRankLinear
from fedpriv.engine.matmul import OuterProducts
from fedpriv.engine.task import Activations, RoundParameters, Task, outputs_of
from fedpriv.privacy.clipping_torch import TorchTensors, Updates
from fedpriv.privacy.round import LocalTraining


class Algorithm(ABC):
    """What a step of local training does with a gradient, for each user separately."""

    learning_rate: float  # a step goes this far against its direction
    # Whether directions are linear in gradients, displacement and memory, with the same
    # coefficients for all parameters. Others train without low-rank corrections.
    linear: bool
    memories: int  # how many tensors like its parameters a user keeps from step to step

    @abstractmethod
    def direction(
        self, gradient: Tensor, displacement: Tensor | None, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The direction of a step, and what to remember of it.

        Args:
            gradient: by a parameter of each user, [C, *shape]; must not be written to.
            displacement: of that parameter from the round's, [C, *shape]; must not be written to.
                None in the first step, where it is zero.
            memory: from the step before, free to be overwritten; None in the first step.
        """


class HeavyBall(Algorithm):
    """Gradient descent with momentum and FedProx's proximal term (Li et al. 2020)."""

    linear = True

    def __init__(self, learning_rate: float, momentum: float = 0.0, proximal: float = 0.0) -> None:
        self.learning_rate, self.momentum, self.proximal = learning_rate, momentum, proximal
        self.memories = int(momentum > 0.0)

    def direction(
        self, gradient: Tensor, displacement: Tensor | None, memory: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Velocity ← momentum · velocity + gradient + proximal · displacement."""
        if displacement is not None and self.proximal:
            gradient = (displacement * self.proximal).add_(gradient)
        if not self.momentum:
            return gradient, None
        velocity = gradient.clone() if memory is None else memory.mul_(self.momentum).add_(gradient)
        return velocity, velocity


@singledispatch
def algorithm_of(local: LocalTraining) -> Algorithm:
    """The algorithm of a round, by the type of its local training."""
    return HeavyBall(local.learning_rate, local.momentum, local.proximal)


class Descent:
    """How far C users have moved from the same parameters, which are never written to."""

    def __init__(self, start: TorchTensors, algorithm: Algorithm) -> None:
        self.displacement: TorchTensors = {}  # [C, *shape]; empty before the first step
        self._start, self._algorithm = start, algorithm
        self._memory: dict[str, Tensor | None] = {}
        self._parameters: TorchTensors = {}

    def parameters(self, users: int) -> TorchTensors:
        """Parameters of each user, [C, *shape], in memory that the next call overwrites."""
        if not self.displacement:
            return same_for_all(self._start, users)
        self._parameters = {
            name: torch.add(self._start[name], moved, out=self._parameters.get(name))
            for name, moved in self.displacement.items()
        }
        return self._parameters

    def step(self, gradients: TorchTensors, active: Tensor | None) -> None:
        """Take a step along gradients [C, *shape], where a user is active, [C]; None: all are."""
        for name, gradient in gradients.items():
            moved = self.displacement.get(name)
            found = self._algorithm.direction(gradient, moved, self._memory.get(name))
            direction, self._memory[name] = found
            if active is not None:
                direction = torch.where(
                    active.view(-1, *[1] * (direction.dim() - 1)), direction, 0.0
                )
            way = direction * -self._algorithm.learning_rate
            self.displacement[name] = way if moved is None else moved.add_(way)


def same_for_all(parameters: TorchTensors, count: int) -> TorchTensors:
    """Parameters of C users that share one copy, which a stride of 0 shows."""
    return {
        name: p.as_strided((count, *p.shape), (0, *p.stride())) for name, p in parameters.items()
    }


def train_chunk(
    task: Task,
    start: RoundParameters,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
    *,
    alone: bool = False,
) -> TorchTensors:
    """Train the users of a chunk side by side by `torch.func`, whatever the model is made of.

    Training draws no random numbers, unless one user trains `alone`, as the model itself would.
    Returns updates (trained minus initial parameters), each tensor [L, *shape].
    """

    def mean_loss(parameters: TorchTensors, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        outputs = outputs_of(task.model, {**parameters, **start.constants}, x, activations)
        losses = task.losses_of(outputs, y)
        return (losses * weights).sum() / weights.sum().clamp(min=1.0)

    def of_one(current: TorchTensors, x: Tensor, y: Tensor, weights: Tensor) -> TorchTensors:
        own = {name: p[0].detach().requires_grad_() for name, p in current.items()}
        loss = mean_loss(own, x[0], y[0], weights[0])
        found = torch.autograd.grad(loss, [*own.values()], materialize_grads=True)
        return {name: g.unsqueeze(0) for name, g in zip(own, found, strict=True)}

    # In the first step, too, each user has parameters of its own: one product for all users would
    # round a user's numbers according to their place in it.
    gradient = of_one if alone else vmap(grad(mean_loss), randomness="error")
    descent = Descent(start.parameters, algorithm_of(local))
    lanes, steps, _ = batches.shape
    for step in range(steps):
        examples = (t[:, step] for t in (batches.x, batches.y, batches.weights))
        descent.step(gradient(descent.parameters(lanes), *examples), batches.active(step))
    return descent.displacement


def train_layers_chunk(
    layers: Layers,
    task: Task,
    start: RoundParameters,
    batches: Batches,
    local: LocalTraining,
    activations: Activations = "float32",
) -> Updates:
    """Train the users of a chunk in layers of the task; the result is as of `train_chunk`.

    A linear algorithm moves a user's weights to W₀ + Σ_t a_t·δ_t x_tᵀ over the examples t seen so
    far, and moves the coefficients a_t likewise: by the same descent, from zero along unit vectors.
    """
    users, steps, width = batches.shape
    algorithm, parameters = algorithm_of(local), start.parameters
    names = layers.low_rank(steps, width) if algorithm.linear else ()
    keys = {name: layers.parameters(name) for name in names}
    low_rank = {n: LowRankLinear(batches.x, *(parameters[k] for k in keys[n])) for n in names}
    model, shared = layers.batched(names), {key for name in names for key in keys[name]}
    own = {n: _as_gradients_lie(p) for n, p in parameters.items() if n not in shared}
    descent = Descent(own, algorithm)
    coefficients = Descent({"": batches.weights.new_zeros(steps)}, algorithm)
    # A mean over each user's real examples; users are apart in the sum, so are its gradients.
    shares = batches.weights / batches.weights.sum(2, keepdim=True).clamp(min=1.0)
    for step in range(steps):
        own = {n: p.detach().requires_grad_() for n, p in descent.parameters(users).items()}
        x, y, share = (t[:, step].flatten(0, 1) for t in (batches.x, batches.y, shares))
        for layer in low_rank.values():
            layer.expect(x)
        outputs = model.outputs(own, start.constants, x, activations, low_rank)
        gradients = torch.autograd.grad(
            (task.losses_of(outputs, y) * share).sum(),
            [*own.values(), *(layer.probe for layer in low_rank.values())],
            materialize_grads=True,
        )
        active = batches.active(step)
        descent.step(dict(zip(own, gradients, strict=False)), active)
        unit = batches.weights.new_zeros((users, steps))
        unit[:, step] = 1.0
        coefficients.step({"": unit}, active)
        for layer in low_rank.values():
            layer.learn(coefficients.displacement[""])
    learnt: dict[str, Tensor | OuterProducts] = {**descent.displacement}
    for name, layer in low_rank.items():
        learnt |= zip(keys[name], layer.updates(), strict=True)
    return {name: learnt[name] for name in parameters}


def _as_gradients_lie(parameter: Tensor) -> Tensor:
    """A parameter in the order in memory of its gradients: those of convolutions by patches."""
    if parameter.dim() != 4:
        return parameter
    return parameter.contiguous(memory_format=torch.channels_last)
