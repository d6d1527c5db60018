"""Training by a local step that was compiled for one number of users and of examples."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.func import grad_and_value, vmap
from torch.nn import functional

from fedpriv.engine.batches import Batches
from fedpriv.engine.descent import Descent
from fedpriv.engine.local import mean_loss_of
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.federated.transport import LocalTraining

MOST_LANES = 16
"""Users of a step at most: more are no faster, and with few there is little padding."""

Step = Callable[..., tuple[TorchTensors, TorchTensors, torch.Tensor]]
"""Start, constants, parameters and velocities of each user, x, y and weights of a step → parameters
and velocities after it, for which it takes the memory of those given, and losses before it."""


@dataclass(frozen=True)
class CompiledStep:
    """A step of L users on B examples each; fewer of either are padded.

    Several threads may use it at a time.

    Attributes:
        local: learning rate, momentum and proximal term, which are compiled in.
        lanes: L.
        width: B.
        run: takes the step.
    """

    local: LocalTraining
    lanes: int
    width: int
    run: Step

    def fits(self, batches: Batches) -> bool:
        """Whether users can train by it, and at most half of its work would be padding.

        For a single step it is not worth it: otherwise all users share the forward pass.
        """
        lanes, steps, width = batches.shape
        inside = steps > 1 and lanes <= self.lanes and width <= self.width
        return inside and 2 * lanes * width >= self.lanes * self.width

    def train(
        self, parameters: TorchTensors, constants: TorchTensors, batches: Batches
    ) -> TorchTensors:
        """Train C users that fit, as `fedpriv.engine.local.train_chunk` does but for rounding.

        Args:
            parameters: the model at the start of the round.
            constants: frozen parameters and buffers.
            batches: of the users.

        Returns:
            Updates (trained minus initial parameters), each tensor [C, *shape].
        """
        lanes, steps, width = batches.shape
        start, constants = in_order(parameters), in_order(constants)
        current, velocity = at_rest(start, self.lanes, self.local)
        absent = (0, self.width - width, 0, self.lanes - lanes)
        for step in range(steps):
            x, y = (self._padded(t[:, step]) for t in (batches.x, batches.y))
            weights = functional.pad(batches.weights[:, step], absent).contiguous()
            current, velocity, _ = self.run(start, constants, current, velocity, x, y, weights)
        updates = Descent(start, self.local, current, velocity).updates()
        return {name: updates[name][:lanes] for name in parameters}

    def _padded(self, examples: torch.Tensor) -> torch.Tensor:
        """[C, W, …] → [L, B, …], by the last example of each user and by the last user.

        No example is made up, since gradients of one need not be finite.
        """
        for dim, size in enumerate((self.lanes, self.width)):
            if examples.shape[dim] < size:
                rows = torch.arange(size).clamp_(max=examples.shape[dim] - 1)
                examples = examples.index_select(dim, rows)
        return examples.contiguous()


def step_of(task: Task, local: LocalTraining) -> Step:
    """The step of a task, not compiled."""

    def step(
        start: TorchTensors,
        constants: TorchTensors,
        current: TorchTensors,
        velocity: TorchTensors,
        x: torch.Tensor,
        y: torch.Tensor,
        weights: torch.Tensor,
    ) -> tuple[TorchTensors, TorchTensors, torch.Tensor]:
        learn = vmap(grad_and_value(mean_loss_of(task, constants)))
        gradients, losses = learn(current, x, y, weights)
        descent = Descent(start, local, current, velocity)
        descent = descent.after(gradients, weights.amax(1) > 0)
        # Compiled code that need not know the losses would not refuse targets that are none.
        return descent.current, descent.velocity, losses

    return step


def at_rest(
    start: TorchTensors, lanes: int, local: LocalTraining
) -> tuple[TorchTensors, TorchTensors]:
    """Parameters and velocities of users before their first step."""
    current = {name: p.repeat(lanes, *[1] * p.dim()) for name, p in start.items()}
    return current, {n: torch.zeros_like(p) for n, p in current.items()} if local.momentum else {}


def in_order(tensors: TorchTensors) -> TorchTensors:
    """By their names: a compiled step tells tensors apart by their places."""
    return {name: tensors[name].contiguous() for name in sorted(tensors)}
