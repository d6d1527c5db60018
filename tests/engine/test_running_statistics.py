"""Rounds with batch normalisation: statistics travel, are measured, released and moved."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task, cross_entropy, running_norms
from fedpriv.engine.transport import InProcessTransport
from fedpriv.measures.metrics import metric
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.plan import RunningStatistics, TrainingPlan
from fedpriv.training.request import LocalTraining
from fedpriv.training.rounds import initial_state, train
from tests.opening import open_round
from tests.training.federation import open_records

USERS = 40


def make_task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), cross_entropy)


def make_users() -> UserStore:
    rng = np.random.default_rng(0)
    offsets = np.arange(USERS + 1) * 5
    x = rng.normal([5.0, -0.2], [3.0, 0.1], (offsets[-1], 2)).astype(np.float32)
    return UserStore({"x": x, "y": rng.integers(0, 3, len(x))}, offsets)


def make_plan(task: Task, noise_multiplier: float) -> TrainingPlan:
    layers = running_norms(task.model)
    layout = Layout.of(task.parameters())
    rule = RunningStatistics(
        tuple(layers),
        tuple(layer.channels for layer in layers.values()),
        tuple(layer.eps for layer in layers.values()),
    )
    return TrainingPlan(
        run="run",
        population="people",
        rounds=150,
        layout=layout,
        groups=flat(layout, 1.0),
        noise_shares=(1.0,),
        noise_multiplier=noise_multiplier,
        sampling=PoissonSampling(USERS, 1.0),
        local=LocalTraining(0.01, steps=1),
        metrics=(metric("batch-norm", channels=sum(rule.channels), bound=4.0),),
        metrics_share=0.2,
        statistics=rule,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("noise_multiplier", "tolerance"), [(0.0, 1e-3), (0.05, 0.2)])
def test_released_statistics_find_those_of_the_population(
    noise_multiplier: float, tolerance: float, tmp_path: Path
) -> None:
    task, users = make_task(), make_users()
    plan = make_plan(task, noise_multiplier)
    state = initial_state(plan, task.parameters(), task.statistics())
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**5)
    with open_records(tmp_path) as books:
        *_, (state, _) = train(plan, state, transport, books, SeededEntropy(0))
    x = users.fields["x"].astype(np.float64)
    spread = x.std(0)
    found = state.statistics
    assert np.all(np.abs(found["0.running_mean"] - x.mean(0)) <= tolerance * spread)
    np.testing.assert_allclose(found["0.running_var"], x.var(0), rtol=2 * tolerance)


def test_a_round_trains_with_the_statistics_it_is_sent() -> None:
    task, users = make_task(), make_users()
    plan = replace(make_plan(task, 0.0), rounds=1)
    other = {"0.running_mean": np.float32([5, 0]), "0.running_var": np.float32([9, 0.01])}
    sent = task.statistics()
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**5)
    state = initial_state(plan, task.parameters(), sent)
    request = open_round(plan, state, 0, SeededEntropy(0))
    (usual,) = transport.collect(request)
    (moved,) = transport.collect(replace(request, statistics=other))
    for name, tensor in other.items():
        dict(task.model.named_buffers())[name].copy_(torch.from_numpy(tensor))
    fresh = InProcessTransport(task, users, torch.device("cpu"), 10**5)
    (expected,) = fresh.collect(replace(request, statistics={}))
    assert not np.allclose(usual.total, moved.total)
    np.testing.assert_allclose(moved.total, expected.total, rtol=1e-12)
