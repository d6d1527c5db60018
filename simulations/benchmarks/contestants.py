"""What a contestant is, and the two that need no other library: our engine and a plain loop."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.data.population import UserStore
from fedpriv.engine import InProcessTransport, Task
from fedpriv.engine.task import cross_entropy
from fedpriv.engine.transport import chunk_memory_of
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import LocalTraining, RoundRequest
from simulations.benchmarks.works import Work, clipped, flattened, sgd

CEILING = "products"
"""Name of the contestant that only multiplies matrices."""
_SIDE, _PRODUCTS = 1024, 50
PRODUCTS_FLOPS = _PRODUCTS * 2.0 * _SIDE**3
"""Floating-point operations in a round of `products`."""


@dataclass(frozen=True)
class Turn:
    """What is asked of a contestant."""

    users: range  # positions of those who train
    local: LocalTraining  # how each trains
    seconds: float = 0.0  # for how long at least they train again and again, round after round


@dataclass(frozen=True)
class Done:
    """What came of a turn."""

    seconds: float  # a round took, on average over the turn
    total: NDArray[np.float64]  # the sum of clipped updates [D] of a round


Train: TypeAlias = Callable[[Turn], NDArray[np.float64]]
"""Trains the users of a turn and returns the sum of their clipped updates [D]."""

Contestant: TypeAlias = Callable[[Work, torch.device, Callable[[Train], None]], None]
"""Prepares for a work on a device, and lets itself be used for as long as the call takes."""


def fedpriv(work: Work, device: torch.device, use: Callable[[Train], None]) -> None:
    """Our engine, through its transport, with settings as `fedpriv simulate` has them."""
    store = UserStore({"x": work.x.numpy(), "y": work.y.numpy()}, work.offsets)
    task = Task(work.build(), cross_entropy)
    transport = InProcessTransport(task, store, device, chunk_memory_of(None, device))
    parameters = task.parameters()
    layout = Layout.of(parameters)
    clipping = Clipping(layout, flat(layout, work.clipping_norm))

    def train(turn: Turn) -> NDArray[np.float64]:
        users = np.array(turn.users)
        request = RoundRequest(
            "benchmark", 0, 0, parameters, clipping, turn.local, users, local_key=bytes(32)
        )
        total = np.zeros(layout.dimension, np.int64)
        for partial in transport.collect(request):
            total += partial.total
        return total * clipping.steps

    use(train)


def plain(work: Work, device: torch.device, use: Callable[[Train], None]) -> None:
    """The loop that one would write: SGD on a user's batches, clip, add, start again."""
    model = work.build().to(device)
    parameters: list[torch.Tensor] = list(model.parameters())
    start = [p.detach().clone() for p in parameters]
    users = [tuple(t.to(device) for t in work.examples_of(user)) for user in range(work.users)]

    def train(turn: Turn) -> NDArray[np.float64]:
        total = [torch.zeros_like(p) for p in start]
        for x, y in (users[user] for user in turn.users):
            sgd(model, x, y, turn.local)
            with torch.no_grad():
                update = [p - s for p, s in zip(parameters, start, strict=True)]
                torch._foreach_add_(total, clipped(update, work.clipping_norm))
                torch._foreach_copy_(parameters, start)
        return flattened(total)

    use(train)


def products(_work: Work, device: torch.device, use: Callable[[Train], None]) -> None:
    """Nothing but matrix products, to know how fast the machine could be."""
    left, right = torch.randn((2, _SIDE, _SIDE), device=device)

    def train(_turn: Turn) -> NDArray[np.float64]:
        for _ in range(_PRODUCTS):
            result = left @ right
        return flattened([result[0]])  # waits for the device

    use(train)
