"""Users train the same whichever library multiplies, and one that is broken stays alone."""

import numpy as np
import pytest
import torch

from fedpriv.engine import layers
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.models import cnn, mlp
from fedpriv.privacy.round import LocalTraining
from tests.engine.everyone import request_under, users_of

SIZES = [12, 12, 3, 12]
MODELS = {"mlp": (mlp, 10**6), "cnn": (cnn, 2**23)}  # with memory for a few users
LOCAL = LocalTraining(0.1, batch_size=5, epochs=2, momentum=0.5)


def total_of(task: Task, memory: int, *, broken: bool, numpy: bool) -> np.ndarray:
    users = users_of(SIZES, (1, 28, 28), 10)
    if broken:
        users.fields["x"][SIZES[0] : SIZES[0] + SIZES[1]] = 1e38
    transport = InProcessTransport(task, users, torch.device("cpu"), memory, processes=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "numpy_is_faster", lambda: numpy)
        sums = transport.collect(request_under(task, LOCAL, len(SIZES), 0.5))
        return sum((each.total for each in sums), np.zeros(1))


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("broken", [pytest.param(True, marks=pytest.mark.slow), False])
def test_sums_are_the_same_by_either_library(kind: str, *, broken: bool) -> None:
    torch.manual_seed(0)
    model, memory = MODELS[kind]
    given = Task(model(), cross_entropy), memory
    by_numpy, by_torch = (total_of(*given, broken=broken, numpy=each) for each in (True, False))
    assert np.isfinite(by_numpy).all()
    error = np.linalg.norm(by_numpy - by_torch)
    assert error <= 1e-4 * np.linalg.norm(by_torch)
    other = total_of(*given, broken=not broken, numpy=True)
    assert np.linalg.norm(other - by_torch) > 1e-2 * np.linalg.norm(by_torch)
