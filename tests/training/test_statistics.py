"""Running statistics move to the moments that users report, and stay sound whatever comes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.ledger import Head
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.training.plan import BATCH_NORM_METRIC, RunningStatistics
from fedpriv.training.rounds import Checkpoint, initial_state, load_checkpoint, save_checkpoint
from tests.training.federation import PARAMETERS, make_plan

RULE = RunningStatistics(("a", "b.c"), (3, 1), (1e-5, 0.1), 0.3)
METRICS = (Metric(BATCH_NORM_METRIC, (8,), radius=2.0),)


def start(rule: RunningStatistics = RULE) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        f"{layer}.running_{kind}": rng.random(channels).astype(np.float32) + 0.5
        for layer, channels in zip(rule.layers, rule.channels, strict=True)
        for kind in ("mean", "var")
    }


def deviations(
    rule: RunningStatistics, statistics: dict[str, np.ndarray], x: np.ndarray
) -> np.ndarray:
    """The metric of inputs x [n, ΣC] that all layers share out among them."""
    vector, first = [], 0
    for layer, channels, eps in zip(rule.layers, rule.channels, rule.eps, strict=True):
        part = x[:, first : first + channels]
        first += channels
        scale = np.sqrt(statistics[f"{layer}.running_var"].astype(np.float64) + eps)
        standard = (part - statistics[f"{layer}.running_mean"]) / scale
        vector += [standard.mean(0), np.square(standard).mean(0) - 1.0]
    return np.concatenate(vector)


def test_statistics_become_those_of_the_inputs() -> None:
    x = np.random.default_rng(1).normal([1.0, -3.0, 0.0, 10.0], [1.0, 5.0, 0.1, 2.0], (500, 4))
    statistics = start()
    for _ in range(200):
        statistics = RULE.moved(statistics, deviations(RULE, statistics, x))
    mean = np.concatenate([statistics["a.running_mean"], statistics["b.c.running_mean"]])
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-3, atol=1e-3)
    var = np.concatenate([statistics["a.running_var"] + 1e-5, statistics["b.c.running_var"] + 0.1])
    np.testing.assert_allclose(var, x.var(0), rtol=1e-3)


def test_a_full_step_gives_the_moments_at_once() -> None:
    rule = replace(RULE, momentum=1.0)
    statistics = start()
    x = np.random.default_rng(1).normal(0.8, 1.2, (50, 4))
    after = rule.moved(statistics, deviations(rule, statistics, x))
    np.testing.assert_allclose(after["a.running_mean"], x[:, :3].mean(0), rtol=1e-5)
    np.testing.assert_allclose(after["a.running_var"], x[:, :3].var(0) - 1e-5, rtol=1e-5)


def test_nothing_deviating_moves_nothing() -> None:
    after = RULE.moved(start(), np.zeros(8))
    for name, tensor in start().items():
        np.testing.assert_allclose(after[name], tensor, rtol=1e-6)
        assert after[name].dtype == np.float32


@given(hnp.arrays(np.float64, 8, elements=st.floats(-1e9, 1e9)), st.floats(0.01, 1.0))
def test_any_release_leaves_sound_statistics(released: np.ndarray, momentum: float) -> None:
    rule = replace(RULE, momentum=momentum)
    before = start()
    after = rule.moved(before, released)
    for (name, old), eps in zip(before.items(), np.repeat(rule.eps, 2), strict=True):
        new = after[name].astype(np.float64)
        assert np.all(np.isfinite(new))
        if name.endswith("var"):
            assert np.all(new >= 0.0)
            ratio = (new + eps) / (old + eps)
            assert np.all(ratio <= 4.0 + 1e-5)
            assert np.all((ratio >= 0.25 - 1e-5) | (new == 0.0))


def test_statistics_stay_finite_under_the_same_noise_for_ever() -> None:
    for released in (np.full(8, 1e6), np.full(8, -1e6), np.tile([0.0, 1e6], 4)):
        statistics = start()
        for _ in range(500):
            statistics = RULE.moved(statistics, released)
        assert all(np.all(np.isfinite(tensor)) for tensor in statistics.values())


def test_a_bad_momentum_is_refused() -> None:
    with pytest.raises(InvalidValueError, match=r"momentum .* is 0\.0"):
        replace(RULE, momentum=0.0)


def test_a_plan_needs_the_metric_and_the_statistics() -> None:
    with pytest.raises(InvalidValueError, match="the plan has none"):
        make_plan(statistics=RULE)
    plan = make_plan(statistics=RULE, metrics=METRICS, metrics_share=0.1)
    assert plan.digest != make_plan(metrics=METRICS, metrics_share=0.1).digest
    with pytest.raises(InvalidValueError, match=r"running statistics are \{\}"):
        initial_state(plan, PARAMETERS)
    state = initial_state(plan, PARAMETERS, start())
    np.testing.assert_array_equal(state.statistics["a.running_var"], start()["a.running_var"])


def test_checkpoints_hold_the_statistics(tmp_path: Path) -> None:
    plan = make_plan(statistics=RULE, metrics=METRICS, metrics_share=0.1)
    state = initial_state(plan, PARAMETERS, start())
    path = save_checkpoint(tmp_path, Checkpoint(state, plan.digest, Head(0, "0" * 64)))
    loaded = load_checkpoint(path).state
    assert set(loaded.statistics) == set(start())
    for name, tensor in start().items():
        np.testing.assert_array_equal(loaded.statistics[name], tensor)
