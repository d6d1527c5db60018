"""Training a chunk never asks the device for a number, which would make a GPU's host wait."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.federated.transport import LocalTraining
from fedpriv.losses import cross_entropy
from fedpriv.privacy.weights import Weighting
from tests.engine.everyone import request_under, users_of

SIZES = [3, 9, 4, 4]
# What reads numbers of a tensor, or has a result whose shape depends on them.
WAITS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select")


class Asked(TorchDispatchMode):
    """Keeps the names of the operations that would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.operations += 1
        name = func.overloadpacket.__name__
        if name in WAITS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


MODELS = {
    "layers": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(27, 300), nn.Linear(300, 3)
    ),
    "any": lambda: nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(27, 3)
    ),
}


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_chunk_asks_once_on_a_cpu_and_never_on_a_gpu(kind: str) -> None:
    task = Task(MODELS[kind](), cross_entropy)
    local = LocalTraining(0.1, batch_size=2, epochs=1, momentum=0.5, proximal=0.1)
    request = request_under(task, local, len(SIZES), 0.1)
    clipping = replace(request.clipping, weighted=("update",))
    request = replace(request, clipping=clipping, weighting=Weighting(5))
    users = users_of(SIZES, (1, 4, 4))
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**7)
    chunks = len(list(transport.collect(request)))  # what is measured once is known from here on
    with Asked() as asked:
        assert len(list(transport.collect(request))) == chunks
    assert asked.operations > 100
    # Whether all are finite, for the few users clipped together, and whether one adds nothing to a
    # matrix in factors: on a GPU nobody asks.
    factored = {"layers": 1, "any": 0}[kind]
    assert asked.names == ["_local_scalar_dense"] * chunks * (1 + factored)
