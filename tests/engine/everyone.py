"""A small task, users for it, and requests to everyone of a population under any clipping."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.experiment.grouping import scales_by_dimension
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import TorchTensors, Updates
from fedpriv.privacy.gaussian_mechanism import Averaging, Metric
from fedpriv.privacy.layout import Layout, flat, joint, layers, per_layer
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import add_up
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.plan import AdaptiveClipping, TrainingPlan
from fedpriv.training.request import LocalTraining, RoundRequest, Transport
from fedpriv.training.rounds import initial_state
from tests.opening import open_round


def whole(updates: Updates) -> TorchTensors:
    """The tensors of all users of a chunk: [C, *shape]."""
    return {name: update[:] for name, update in updates.items()}


def make_task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), cross_entropy)


def users_of(
    sizes: Sequence[int], shape: tuple[int, ...] = (6,), classes: int = 3, scale: float = 1.0
) -> UserStore:
    """Users of these sizes, with normal inputs of a shape and a standard deviation."""
    rng, rows = np.random.default_rng(0), sum(sizes)
    x = scale * rng.standard_normal((rows, *shape)).astype(np.float32)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return UserStore({"x": x, "y": rng.integers(0, classes, rows)}, offsets)


def request_under(task: Task, local: LocalTraining, users: int, norm: float) -> RoundRequest:
    """A request to so many users, under flat clipping."""
    parameters = task.parameters()
    layout = Layout.of(parameters)
    clipping = Clipping(layout, flat(layout, norm))
    key = bytes(range(32))
    return RoundRequest("run", 0, 0, parameters, clipping, local, np.arange(users), key)


def request_to_all(
    users: int,
    local: LocalTraining,
    strategy: str,
    metrics: Sequence[Metric],
    averaging: Averaging,
    *,
    norm: float = 0.2,
    adaptive: bool = True,
) -> RoundRequest:
    """The request of a plan's first round, whose coins all fall the same way."""
    parameters = make_task().parameters()
    layout = Layout.of(parameters)
    groups = {
        "flat": lambda: flat(layout, norm),
        "per-layer": lambda: per_layer(layout, layers(layout), {"0": norm / 4, "2": norm * 1.5}),
        "joint": lambda: joint(layout, norm, scales_by_dimension(layout)),
    }[strategy]()
    plan = TrainingPlan(
        run="run",
        population="people",
        rounds=1,
        layout=layout,
        groups=groups,
        noise_shares=(1.0 / len(groups),) * len(groups),
        noise_multiplier=1.0,
        sampling=PoissonSampling(users, 1.0),
        local=local,
        metrics=tuple(metrics),
        metrics_share=0.1 if metrics else 0.0,
        adaptive=AdaptiveClipping() if adaptive else None,
        averaging=averaging,
    )
    return open_round(plan, initial_state(plan, parameters), 0, SeededEntropy(0))


def total_of(transport: Transport, request: RoundRequest) -> np.ndarray:
    """The sum of a round, int64[D]."""
    return add_up(transport.collect(request), request.clipping, request.users.size).total


def alone(transport: Transport, request: RoundRequest, user: int) -> np.ndarray:
    """What one user gives by itself, int64[D]."""
    return total_of(transport, replace(request, users=np.array([user])))


def unclipped(transport: Transport, request: RoundRequest) -> dict[str, np.ndarray]:
    """The sum of a round's updates in the model's units, as if there were no clipping."""
    layout = Layout.of(request.parameters)
    clipping = Clipping(layout, flat(layout, 2.0**10))
    total = total_of(transport, replace(request, clipping=clipping, metrics=()))
    return layout.unflatten(clipping.in_units(total))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
