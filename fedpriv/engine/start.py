"""The model at the start of a round, on the device where users train."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.engine.task import TorchTensors
from fedpriv.federated.transport import RoundRequest


@dataclass(frozen=True)
class Start:
    """What all users of a round start from; nobody writes to it.

    Attributes:
        parameters: what is trained.
        constants: frozen parameters and buffers.
    """

    parameters: TorchTensors
    constants: TorchTensors

    @classmethod
    def of(cls, request: RoundRequest, constants: TorchTensors, device: torch.device) -> "Start":
        """Copy the tensors of a request to a device.

        Args:
            request: of the round; its running statistics replace those among the constants.
            constants: of the task, on the device.
            device: where users train.
        """
        statistics = _on(device, request.statistics)
        return cls(_on(device, request.parameters), constants | statistics)

    @property
    def tensors(self) -> TorchTensors:
        """The whole model."""
        return self.parameters | self.constants


def _on(device: torch.device, arrays: Mapping[str, npt.NDArray[np.float32]]) -> TorchTensors:
    return {name: torch.tensor(array, device=device) for name, array in arrays.items()}
