"""The engine against the obvious: one user at a time, with torch's own optimiser."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.data.store import UserStore
from fedpriv.engine.schedule import schedule
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.federated.transport import LocalTraining, RoundRequest
from fedpriv.privacy.groups import equal_split, flat, joint, layers, per_layer, scales_by_dimension
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.query import GaussianSumQuery

KEY = bytes(range(32))
SIZES = [5, 0, 1, 12, 7, 7, 3, 30, 2, 11]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def make_task() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Linear(8, 3))
    return Task(model, cross_entropy)


def make_users() -> UserStore:
    rng = np.random.default_rng(0)
    rows = sum(SIZES)
    fields = {
        "x": rng.standard_normal((rows, 6)).astype(np.float32),
        "y": rng.integers(0, 3, rows),
    }
    return UserStore(fields, np.concatenate([[0], np.cumsum(SIZES)]).astype(np.int64))


def request_for(task: Task, local: LocalTraining, users: list[int], strategy: str) -> RoundRequest:
    parameters = task.parameters()
    layout = Layout.of(parameters)
    groups = {
        "flat": lambda: flat(layout, 0.3),
        "per-layer": lambda: per_layer(layout, layers(layout), equal_split(layers(layout), 0.3)),
        "joint": lambda: joint(layout, 0.3, scales_by_dimension(layout)),
    }[strategy]()
    return RoundRequest("run", 3, 0, parameters, groups, local, np.array(users, np.int64), KEY)


def one_at_a_time(task: Task, users: UserStore, request: RoundRequest) -> np.ndarray:
    """Contributions summed the slow way: torch.optim.SGD on a deep copy of the model per user."""
    layout = Layout.of(request.parameters)
    query = GaussianSumQuery(layout, request.groups, (0.0,) * len(request.groups))
    total = np.zeros(layout.dimension)
    local = request.local
    for user in request.users.tolist():
        size = int(users.sizes[user])
        if size == 0:
            continue
        plan = schedule([user], [int(users.offsets[user])], [size], local, KEY)
        model = copy.deepcopy(task.model)
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(
            model.parameters(), lr=local.learning_rate, momentum=local.momentum
        )
        for rows, weights in zip(plan.rows[0], plan.weights[0], strict=True):
            batch = users.take(rows[weights > 0])
            optimizer.zero_grad()
            loss = cross_entropy(
                model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"])
            ).mean()
            drift = sum(
                ((p - s) ** 2).sum() for p, s in zip(model.parameters(), start, strict=True)
            )
            (loss + local.proximal / 2 * drift).backward()
            optimizer.step()
        update = {
            name: (p.detach() - s).numpy()
            for (name, p), s in zip(model.named_parameters(), start, strict=True)
        }
        total += query.contribution(update)
    return total


LOCALS = [
    LocalTraining(0.1, batch_size=4, epochs=2),
    LocalTraining(0.1, batch_size=4, epochs=2, momentum=0.9),
    LocalTraining(0.1, batch_size=3, steps=5, proximal=0.7),
    LocalTraining(0.1, batch_size=3, steps=7, momentum=0.5, proximal=0.2),
    LocalTraining(1.0, steps=1),
]


@pytest.mark.parametrize("strategy", ["flat", "per-layer", "joint"])
@pytest.mark.parametrize("local", LOCALS, ids=str)
@pytest.mark.parametrize("lanes", [1, 3, 100])
def test_equals_one_user_at_a_time(strategy: str, local: LocalTraining, lanes: int) -> None:
    task, users = make_task(), make_users()
    request = request_for(task, local, list(range(len(SIZES))), strategy)
    transport = InProcessTransport(task, users, torch.device("cpu"), lanes * 3000)
    total = sum(partial.total for partial in transport.collect(request))
    np.testing.assert_allclose(total, one_at_a_time(task, users, request), atol=2e-6)
