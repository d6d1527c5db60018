"""Opacus on a lot of examples: gradients per example from its hooks, its clipping, no noise."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch.nn import functional

from fedpriv.errors import InvalidValueError
from simulations.benchmarks.contestants import Train, Turn
from simulations.benchmarks.works import Work, flattened


def opacus(work: Work, device: torch.device, use: Callable[[Train], None]) -> None:
    """Prepare a step of DP-SGD, in which a user is an example."""
    x, y = (tensor.to(device) for tensor in work.fields.values())
    if len(x) != work.users + work.copies:
        raise InvalidValueError("a user has several examples; a record of Opacus is one")
    model = GradSampleModule(work.build().to(device))
    start = [p.detach().clone() for p in model.parameters()]
    rate = work.local.rate
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate),
        noise_multiplier=0.0,
        max_grad_norm=work.clipping_norm / rate,  # ours is of the update, −rate × gradient
        expected_batch_size=work.users,
    )

    def train(turn: Turn) -> NDArray[np.float64]:
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), start)
        optimizer.zero_grad()
        lot = slice(turn.users.start, turn.users.stop)
        torch.autograd.backward(functional.cross_entropy(model(x[lot]), y[lot]))
        optimizer.step()
        return -rate * flattened([p.summed_grad for p in model.parameters()])

    use(train)
