"""Quantiles of update norms from private rounds."""

from pathlib import Path

import numpy as np
import pytest
import torch
from federation import LAYOUT, PARAMETERS, FakeTransport, make_plan, open_records
from torch import nn

from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import BudgetExceededError, InvalidValueError
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, equal_split, flat, layers, per_layer
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import RoundRequest
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.norm_search import NormQuantile, find_quantiles
from fedpriv.training.rounds import BATCH_NORM_METRIC, RunningStatistics, initial_state

USERS = 2000
NORMS = {
    "w": np.exp(np.random.default_rng(1).normal(-3.0, 0.5, USERS)),
    "b": np.exp(np.random.default_rng(2).normal(4.0, 1.0, USERS)),
}


def sent(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
    answers = {
        m.tensor: (NORMS[m.name.partition(":")[2]][user] <= np.array(m.options)) - m.centre
        for m in request.metrics
    }
    return {"w": np.zeros((2, 2)), "b": np.zeros(3), **answers}


def plan_of(rounds: int = 5, noise_multiplier: float = 1.0) -> object:
    parts = layers(LAYOUT)
    return make_plan(
        rounds=rounds,
        groups=per_layer(LAYOUT, parts, equal_split(parts, 1.0)),
        noise_shares=(0.5, 0.5),
        noise_multiplier=noise_multiplier,
        sampling=PoissonSampling(USERS, 0.5),
    )


@pytest.mark.parametrize("quantile", [0.3, 0.5, 0.9])
@pytest.mark.parametrize("noise_multiplier", [0.0, 1.0])
def test_quantiles_of_all_groups_are_found_and_every_round_is_charged(
    quantile: float, noise_multiplier: float, tmp_path: Path
) -> None:
    plan = plan_of(noise_multiplier=noise_multiplier)
    state = initial_state(plan, PARAMETERS)
    with open_records(tmp_path) as records:
        asked = find_quantiles(
            plan, state, quantile, FakeTransport(sent), records, SeededEntropy(5)
        )
        *_, (_, known) = asked
        events = [row.event for row in records.ledger.charges()]
    assert len(events) == 5
    for event in events:
        assert event.noise_multiplier == pytest.approx(noise_multiplier)
    for each in known:
        share = float((NORMS[each.group] <= each.estimate).mean())
        assert share == pytest.approx(quantile, abs=0.06)
        assert each.low <= each.estimate <= each.high


def test_the_budget_ends_the_search_before_it_is_passed(tmp_path: Path) -> None:
    plan = plan_of()
    state = initial_state(plan, PARAMETERS)
    with open_records(tmp_path, limit=2.0) as records:
        asked = find_quantiles(plan, state, 0.5, FakeTransport(sent), records, SeededEntropy(5))
        with pytest.raises(BudgetExceededError, match="would pass the budget"):
            list(asked)
        assert records.ledger.head.count == 2


@pytest.mark.parametrize("quantile", [0.0, 1.0, float("nan")])
def test_a_quantile_is_between_0_and_1(quantile: float, tmp_path: Path) -> None:
    plan = plan_of()
    state = initial_state(plan, PARAMETERS)
    with (
        open_records(tmp_path) as records,
        pytest.raises(InvalidValueError, match="quantile is"),
    ):
        next(find_quantiles(plan, state, quantile, FakeTransport(sent), records, SeededEntropy(5)))


def test_an_interval_that_noise_put_in_the_wrong_place_moves_on() -> None:
    known = NormQuantile("w", low=2.0, high=3.0)
    for _ in range(30):
        known = known.narrowed((known.thresholds >= 0.01).astype(float), 0.05, 0.5)
    assert known.estimate == pytest.approx(0.01, rel=1e-3)


def test_noise_alone_widens_and_never_empties_the_interval() -> None:
    rng = np.random.default_rng(0)
    known = NormQuantile("w")
    for _ in range(200):
        known = known.narrowed(rng.normal(0.5, 0.3, 20), 0.3, 0.5)
        assert 0.0 < known.low < known.high


STATISTICS = {"0.running_mean": np.float32([5, 0]), "0.running_var": np.float32([9, 0.01])}


def normalised_task() -> Task:
    torch.manual_seed(0)
    return Task(nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)), cross_entropy)


def normalised_users() -> UserStore:
    rng, offsets = np.random.default_rng(3), np.arange(401) * 4
    x = rng.normal([5.0, 0.0], [3.0, 0.1], (offsets[-1], 2)).astype(np.float32)
    return UserStore({"x": x, "y": rng.integers(0, 3, len(x))}, offsets)


def slow_norms(users: UserStore, statistics: dict[str, np.ndarray]) -> np.ndarray:
    """Norms of one step of 0.1 on all examples of each user, by torch's own batch normalisation."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3)).eval()
    model.load_state_dict({n: torch.from_numpy(s) for n, s in statistics.items()}, strict=False)
    norms = []
    for user in range(users.population):
        x, y = (torch.from_numpy(users.examples_of(user)[name]) for name in "xy")
        loss = nn.functional.cross_entropy(model(x), y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norms.append(0.1 * torch.sqrt(sum(g.square().sum() for g in gradients)).item())
    return np.array(norms)


def test_norms_are_of_the_model_with_its_running_statistics_and_nothing_moves(
    tmp_path: Path,
) -> None:
    task, users = normalised_task(), normalised_users()
    layout = Layout.of(task.parameters())
    plan = make_plan(
        rounds=4,
        layout=layout,
        groups=flat(layout, 1.0),
        noise_multiplier=0.0,
        sampling=PoissonSampling(users.population, 1.0),
        metrics=(Metric(BATCH_NORM_METRIC, (4,), radius=4.0),),
        metrics_share=0.2,
        statistics=RunningStatistics(("0",), (2,), (1e-5,)),
    )
    state = initial_state(plan, task.parameters(), STATISTICS)
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**7)
    with open_records(tmp_path) as records:
        reports = list(find_quantiles(plan, state, 0.5, transport, records, SeededEntropy(5)))
        assert records.ledger.head.count == 4
    norms = slow_norms(users, STATISTICS)
    (known,) = reports[-1][1]
    assert float((norms <= known.estimate).mean()) == pytest.approx(0.5, abs=0.01)
    elsewhere = slow_norms(users, task.statistics())
    assert float((elsewhere <= known.estimate).mean()) < 0.1
    for report, _ in reports:
        assert list(report.metrics) == [f"update-norms:{known.group}"]
    for name, tensor in task.parameters().items():
        np.testing.assert_array_equal(state.parameters[name], tensor)
