"""Rounds that release more than an update: metrics, clipped counts, weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.accounting.round_counts import compose
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.grouping import equal_split
from fedpriv.privacy.gaussian_mechanism import Averaging, Metric
from fedpriv.privacy.layout import flat, layers, per_layer
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.round import Release
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.optimizers import FedAvg
from fedpriv.training.plan import AdaptiveClipping, TrainingPlan
from fedpriv.training.request import RoundRequest
from fedpriv.training.rounds import (
    Checkpoint,
    ServerState,
    close_round,
    initial_state,
    load_checkpoint,
    resume,
    save_checkpoint,
    train,
)
from tests.training.federation import LAYOUT, PARAMETERS, FakeTransport, make_plan, open_records

METRIC = Metric("position", centre=0.5, radius=0.5)
USERS = 400
LENGTHS = np.exp(np.random.default_rng(0).normal(0.0, 0.7, (USERS, 2)))


def sent(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
    """Tensors of the lengths of the user, and its position as a metric."""
    w, b = LENGTHS[user]
    update = {"w": np.full((2, 2), w / 2.0), "b": np.full(3, b / np.sqrt(3.0))}
    metrics = {m.tensor: np.array(user / USERS - m.centre) for m in request.metrics}
    return {**update, **metrics}


def run(plan: TrainingPlan, folder: Path, transport: FakeTransport | None = None) -> list:
    with open_records(folder) as books:
        state = initial_state(plan, PARAMETERS)
        reports = train(plan, state, transport or FakeTransport(sent), books, SeededEntropy(3))
        return [list(reports), list(books.ledger.charges())]


def plan_with(**changes: object) -> TrainingPlan:
    parts = layers(LAYOUT)
    groups = per_layer(LAYOUT, parts, equal_split(parts, 1.0))
    given = {
        "rounds": 3,
        "groups": groups,
        "noise_shares": (0.5, 0.5),
        "sampling": PoissonSampling(USERS, 0.5),
        "optimizer": FedAvg(1.0),
    }
    return make_plan(**{**given, **changes})


def test_all_that_is_released_is_one_event_at_the_noise_multiplier_of_the_plan(
    tmp_path: Path,
) -> None:
    plan = plan_with(
        metrics=(METRIC,), metrics_share=0.1, adaptive=AdaptiveClipping(), noise_multiplier=1.3
    )
    reports, rows = run(plan, tmp_path)
    assert len(rows) == len(reports) == 3
    for row, (_, result) in zip(rows, reports, strict=True):
        assert [query.group for query in row.event.queries] == [
            "w",
            "b",
            "metrics/position",
            "unclipped",
        ]
        norms = tuple(query.clipping_norm for query in row.event.queries[:2])
        assert norms == tuple(
            result.clipping_norms.values()
        )  # clip and noise use the norm of this round
        assert 1.3 <= row.event.noise_multiplier <= 1.3 * (1 + 1e-9)
    assert len({row.event for row in rows}) == 3
    assert sum(compose(row.event for row in rows).values()) == 3


def test_shares_are_what_each_release_takes() -> None:
    adaptive = AdaptiveClipping(share=0.1)
    plan = plan_with(metrics=(METRIC,), metrics_share=0.2, adaptive=adaptive)
    assert plan.shares == pytest.approx((0.35, 0.35, 0.2, 0.1))
    taken = [
        (q.clipping_norm / q.noise_stddev * plan.noise_multiplier) ** 2
        for q in plan.mechanism.event.queries
    ]
    assert taken == pytest.approx(plan.shares)


def test_a_release_adds_the_centre_and_names_its_noise() -> None:
    counts = Metric("counts", (3,), radius=2.0)
    plan = plan_with(metrics=(METRIC, counts), metrics_share=0.5)
    average = np.array([0.0] * LAYOUT.dimension + [-0.25, 1.0, 2.0, 3.0])
    state = initial_state(plan, PARAMETERS)
    _, result = close_round(plan, state, Release(0, average, "hash"), 1.0, 1e-5)
    assert result.metrics == {"position": 0.25, "counts": [1.0, 2.0, 3.0]}
    # σ = z·S/√ω on the sum of half of the users, with ω a quarter.
    expected = {"position": 0.5 / 0.5 / 200.0, "counts": 2.0 / 0.5 / 200.0}
    assert result.metrics_noise_stddev == pytest.approx(expected)


def test_without_noise_metrics_and_counts_are_those_of_the_cohort(tmp_path: Path) -> None:
    plan = plan_with(
        metrics=(METRIC,),
        metrics_share=0.1,
        adaptive=AdaptiveClipping(),
        noise_multiplier=0.0,
        sampling=PoissonSampling(USERS, 1.0),
    )
    ((_, result), *_), _ = run(plan, tmp_path)
    (value,) = result.metrics.values()
    assert value == pytest.approx(float(np.mean(np.arange(USERS) / USERS)))
    assert list(result.metrics_noise_stddev.values()) == [0.0]
    expected = (np.array([*result.clipping_norms.values()]) >= LENGTHS).mean(axis=0)
    assert result.unclipped == pytest.approx(dict(zip("wb", expected, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("start", [1e-3, 1e3])
def test_norms_converge_to_the_quantile_of_each_group(start: float, tmp_path: Path) -> None:
    plan = plan_with(
        rounds=80,
        groups=per_layer(LAYOUT, layers(LAYOUT), {"w": start, "b": start}),
        adaptive=AdaptiveClipping(quantile=0.7, learning_rate=0.4, share=0.2),
        noise_multiplier=0.5,
    )
    reports, rows = run(plan, tmp_path)
    found = np.median([[*r.clipping_norms.values()] for _, r in reports[-20:]], axis=0)
    assert found == pytest.approx(np.quantile(LENGTHS, 0.7, axis=0), rel=0.15)
    assert all(0.5 <= row.event.noise_multiplier <= 0.5 * (1 + 1e-9) for row in rows)


def test_clipping_norms_are_in_the_checkpoint(tmp_path: Path) -> None:
    plan = plan_with(adaptive=AdaptiveClipping())
    with open_records(tmp_path) as books:
        state = initial_state(plan, PARAMETERS)
        rounds = train(plan, state, FakeTransport(sent), books, SeededEntropy(3))
        first: ServerState = next(rounds)[0]
        kept = Checkpoint(first, plan.digest, books.ledger.head)
        path = save_checkpoint(tmp_path, kept)
        assert load_checkpoint(path).state.clipping_norms == first.clipping_norms
        assert resume(path, plan, books.ledger).clipping_norms == first.clipping_norms
    assert first.clipping_norms != plan.clipping_norms


def weight_of(user: int) -> int:
    """In quarters."""
    return user % 4 + 1


def test_a_weighted_average_is_over_q_times_all_weights(tmp_path: Path) -> None:
    weights = np.array([weight_of(user) for user in range(USERS)]) / 4
    plan = plan_with(
        rounds=1,
        groups=flat(LAYOUT, 100.0),
        noise_shares=(1.0,),
        noise_multiplier=0.0,
        averaging=Averaging(4, float(weights.sum())),
        sampling=PoissonSampling(USERS, 1.0),
    )
    ((state, _),), _ = run(plan, tmp_path, FakeTransport(sent, weight_of))
    expected = weights @ LENGTHS / weights.sum()
    np.testing.assert_allclose(state.parameters["w"], 1.0 + expected[0] / 2.0, rtol=1e-5)


@pytest.mark.parametrize("averaging", [Averaging(), Averaging(4, 250.0)], ids=repr)
def test_a_floored_average_follows_the_cohort_and_doubles_the_noise(
    averaging: Averaging, tmp_path: Path
) -> None:
    floored = replace(averaging, floor=0.5)
    plan = plan_with(averaging=floored)
    for query in plan.mechanism.event.queries:
        assert query.clipping_norm == pytest.approx(2.0 / np.sqrt(2.0))
    assert 1.0 <= plan.mechanism.event.noise_multiplier <= 1.0 + 1e-9
    plain = plan_with(averaging=averaging)
    before, after = plain.mechanism.query.tensor_stddevs, plan.mechanism.query.tensor_stddevs
    assert after == pytest.approx({n: s * 2.0 / 0.5 for n, s in before.items()}, rel=1e-6)
    silent = plan_with(
        rounds=1,
        averaging=floored,
        noise_multiplier=0.0,
        groups=flat(LAYOUT, 100.0),
        noise_shares=(1.0,),
    )

    def same(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
        return {"w": np.full((2, 2), 0.25), "b": np.zeros(3)}

    ((state, _),), _ = run(
        silent, tmp_path, FakeTransport(same, weight_of if averaging.cap else lambda _: 1)
    )
    np.testing.assert_allclose(state.parameters["w"], 1.25, rtol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"metrics": (METRIC,)}, "metrics_share is 0.0 with 1 metrics"),
        ({"metrics_share": 0.1}, "metrics_share is 0.1 with 0 metrics"),
        (
            {"metrics": (METRIC,), "metrics_share": 0.6, "adaptive": AdaptiveClipping(share=0.4)},
            "must leave some to the update",
        ),
        ({"metrics": (METRIC, METRIC), "metrics_share": 0.1}, "tensor 'metrics/position' is in"),
    ],
)
def test_plans_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        plan_with(**changes)
