"""Torch's own generators, which draw dropout masks, for as long as a user trains."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedpriv.engine.task import Task, TorchTensors


@contextmanager
def seeded(local_key: bytes, user: int, device: torch.device) -> Iterator[None]:
    """Seed the generators of the CPU and of a device, and put them back afterwards.

    Args:
        local_key: 32 bytes of this round.
        user: the user's position in the population.
        device: where the user trains.
    """
    own = hashlib.sha256(local_key + user.to_bytes(8, "little")).digest()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(int.from_bytes(own[:8], "little") >> 1)
        yield


def draws(task: Task, constants: TorchTensors, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether training draws from torch's generators, which all threads share.

    Args:
        task: the task.
        constants: frozen parameters and buffers, on the device where users train.
        x: [1, …] one input.
        y: [1, …] one target.

    Returns:
        True also if it cannot be known, since the task cannot be evaluated on the example.
    """
    device = next(iter(task.model.parameters())).device
    parameters = {n: p.detach() for n, p in task.model.named_parameters() if p.requires_grad}
    on_cpu = {name: tensor.to(device) for name, tensor in constants.items()}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        before = torch.random.get_rng_state()
        try:
            task.example_losses(parameters, on_cpu, x.to(device), y.to(device))
        except Exception:
            return True
        return not torch.equal(before, torch.random.get_rng_state())
