"""What the users of a chunk train on, on the device where they train."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.engine.schedule import Schedule


@dataclass(frozen=True)
class Batches:
    """Batches of C users in S steps of at most B examples.

    Attributes:
        x: [C, S, B, …] inputs of each user, step and example.
        y: [C, S, B, …] targets.
        weights: [C, S, B] 1 for examples, 0 for padding; a step without examples does nothing.
        full: for each step, whether all users have it; known without asking the device.
        widths: for each step, how many examples are enough to hold all users' real ones.
    """

    x: torch.Tensor
    y: torch.Tensor
    weights: torch.Tensor
    full: tuple[bool, ...]
    widths: tuple[int, ...]

    @classmethod
    def of(
        cls,
        plan: Schedule,
        x: npt.NDArray[np.generic],
        y: npt.NDArray[np.generic],
        device: torch.device,
    ) -> "Batches":
        """Bring batches to a device; a GPU does other work meanwhile.

        Args:
            plan: of the users.
            x: [C, S, B, …] inputs.
            y: [C, S, B, …] targets.
            device: where users train.
        """
        tensors = (torch.from_numpy(array) for array in (x, y, plan.weights))
        if device.type == "cuda":
            tensors = (t.pin_memory().to(device, non_blocking=True) for t in tensors)
        inputs, targets, weights = tensors
        full = tuple((plan.weights.max(2) > 0).all(0).tolist())
        places = np.arange(1, plan.weights.shape[2] + 1)
        widths = tuple(((plan.weights.max(0) > 0) * places).max(1).tolist())
        return cls(inputs, targets, weights, full, widths)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, S, B)."""
        lanes, steps, width = self.weights.shape
        return lanes, steps, width

    def active(self, step: int) -> torch.Tensor | None:
        """Which users have a step, [C]; None: all."""
        return None if self.full[step] else self.weights[:, step].amax(1) > 0
