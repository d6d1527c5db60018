"""What the users of a chunk learn, in layers where their model allows it."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.engine.batches import Batches
from fedpriv.engine.layered import train_layers_chunk
from fedpriv.engine.layers import Layers
from fedpriv.engine.local import train_chunk
from fedpriv.engine.precision import Activations
from fedpriv.engine.schedule import Schedule
from fedpriv.engine.start import Start
from fedpriv.engine.task import Task, TorchTensors
from fedpriv.engine.updates import Updates
from fedpriv.errors import ModelError
from fedpriv.federated.transport import LocalTraining


def learn(
    task: Task,
    layers: Layers | None,
    start: Start,
    batches: Batches,
    local: LocalTraining,
    activations: Activations,
) -> Updates:
    """Updates of the users of a chunk.

    Args:
        task: model and loss.
        layers: of the task, or None to train whatever it is made of.
        start: what users start from.
        batches: of the users.
        local: learning rate, momentum and proximal term.
        activations: of the model.
    """
    given = (task, start.parameters, start.constants, batches, local, activations)
    return train_chunk(*given) if layers is None else train_layers_chunk(layers, *given)


def check_learning(
    task: Task,
    layers: Layers | None,
    constants: TorchTensors,
    row: Mapping[str, npt.NDArray[np.generic]],
    device: torch.device,
    activations: Activations,
) -> None:
    """Refuse activations with which every user's training would raise, and count as zero.

    Args:
        task: model and loss.
        layers: as for `learn`.
        constants: frozen parameters and buffers, on the device.
        row: one row of nobody's data.
        device: where to train.
        activations: of the model.

    Raises:
        ModelError: training on the row raises.
    """
    # A second step, since users differ only after the first.
    plan = Schedule(np.zeros((1, 2, 1), np.int64), np.ones((1, 2, 1), np.float32))
    x, y = (np.stack([row[name]] * 2)[None] for name in (task.inputs, task.targets))
    arrays = task.parameters().items()
    start = Start({name: torch.tensor(array, device=device) for name, array in arrays}, constants)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            batches = Batches.of(plan, x, y, device)
            learn(task, layers, start, batches, LocalTraining(1.0, steps=2), activations)
    except Exception as error:
        raise ModelError(
            f"the model cannot be trained with {activations} activations: {error}"
        ) from error
