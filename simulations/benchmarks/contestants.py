"""The interface of contestants, and two that need no other library: our engine and a plain loop."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.data.population import UserStore
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.local import SGD
from fedpriv.training.request import RoundRequest
from simulations.benchmarks.works import Work, clipped, flattened, sgd, trained


@dataclass(frozen=True)
class Turn:
    """A request to a contestant."""

    users: range  # positions of the users to train
    local: SGD  # their local training
    seconds: float = 0.0  # minimum time for which they train, round after round


@dataclass(frozen=True)
class Done:
    """The result of a turn."""

    seconds: float  # of a round, on average over the turn
    total: NDArray[np.float64]  # the sum of clipped updates [D] of a round
    prepared: float = 0.0  # seconds of preparation before any turn
    mebibytes: float = 0.0  # peak memory of the process so far, beyond its data
    logged: str = ""  # by our engine, up to this turn


Train: TypeAlias = Callable[[Turn], NDArray[np.float64]]
"""Trains the users of a turn and returns the sum of their clipped updates [D]."""

Contestant: TypeAlias = Callable[[Work, torch.device, Callable[[Train], None]], None]
"""Prepares for a work on a device, and passes a `Train` that may be used during the call."""


def fedpriv(
    work: Work,
    device: torch.device,
    use: Callable[[Train], None],
    path: Path = "auto",
    *,
    timed: bool = True,
) -> None:
    """Prepare our engine, through its transport, with the settings of `fedpriv simulate`.

    On a CPU it forks one process for each of torch's threads.
    """
    store = UserStore({name: t.numpy() for name, t in work.fields.items()}, work.offsets)
    *inputs, targets = work.fields
    task = Task(work.build(), cross_entropy, inputs=tuple(inputs), targets=targets)
    transport = InProcessTransport(
        task,
        store,
        device,
        chunk_memory_of(None, device),
        path=path,
        timed=timed,
        cohort=work.users,
    )
    parameters = task.parameters()
    layout = Layout.of(parameters)
    clipping = Clipping(layout, flat(layout, work.clipping_norm))

    nobody = RoundRequest(
        *("benchmark", 0, 0, parameters, clipping, work.local),
        users=np.zeros(0, np.int64),
        local_key=bytes(32),
    )
    transport.prepare(nobody)

    def train(turn: Turn) -> NDArray[np.float64]:
        request = replace(nobody, local=turn.local, users=np.array(turn.users))
        total = np.zeros(layout.dimension, np.int64)
        for partial in transport.collect(request):
            total += partial.total
        return clipping.in_units(total)

    use(train)


def plain(work: Work, device: torch.device, use: Callable[[Train], None]) -> None:
    """Prepare the obvious loop: SGD on a user's batches, clip, add, start again."""
    model = work.build().to(device)
    parameters = trained(model)
    start = [p.detach().clone() for p in parameters]
    everyone = range(work.users + work.copies)
    users = [tuple(t.to(device) for t in work.examples_of(user)) for user in everyone]

    def train(turn: Turn) -> NDArray[np.float64]:
        total = [torch.zeros_like(p) for p in start]
        for user in turn.users:
            sgd(model, users[user], turn.local)
            with torch.no_grad():
                update = [p - s for p, s in zip(parameters, start, strict=True)]
                torch._foreach_add_(total, clipped(update, work.clipping_norm))
                torch._foreach_copy_(parameters, start)
        return flattened(total)

    use(train)
