"""Training a chunk never asks the device for a number, which would make a GPU's host wait."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedpriv.engine.task import RoundParameters, Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.privacy.clipping import Clipping, Indicator
from fedpriv.privacy.clipping_torch import clip_rows
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import LocalTraining
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
        nn.Flatten(), nn.Linear(16, 27), nn.BatchNorm1d(27), nn.Linear(27, 3)
    ),
}


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_training_never_waits(kind: str) -> None:
    task = Task(MODELS[kind](), cross_entropy)
    local = LocalTraining(0.1, batch_size=2, epochs=1, momentum=0.5, proximal=0.1)
    request = request_under(task, local, len(SIZES), 0.1)
    users = users_of(SIZES, (1, 4, 4))
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**7, processes=1)
    trainer = transport._trainer
    start = RoundParameters.of(request, trainer.constants, transport.device)
    chunks = list(transport._chunks(request, start))
    assert all(chunk.together for chunk in chunks)
    with Asked() as asked:
        for chunk in chunks:
            assert trainer.sum_of(request, start, chunk)
    assert asked.operations > 100
    # Whether this thread's CPU flushes subnormal numbers.
    assert asked.names == ["_local_scalar_dense"] * len(chunks)


def test_clipping_on_a_gpu_waits_for_one_answer() -> None:
    layout = Layout(("a", "b"), ((3,), (4,)))
    indicator = Indicator.of(flat(layout, 0.5))
    layout = Layout((*layout.names, indicator.tensor), (*layout.shapes, (1,)))
    groups = (*flat(Layout(("a", "b"), ((3,), (4,))), 0.5), indicator.group)
    clipping = Clipping(layout, groups, indicator, ("update",), 5)
    rows = torch.randn(6, 8, dtype=torch.float64)
    rows[2] = torch.nan
    with Asked() as asked:
        clip_rows(rows, clipping, np.arange(6))
    assert asked.operations > 20
    assert asked.names == ["_local_scalar_dense"]
