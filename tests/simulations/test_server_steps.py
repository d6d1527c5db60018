"""Steps from the literature, and the choice of their rates."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.training.optimizers import FedAdam, OptimizerState, Parameters
from fedpriv.training.request import LocalStep
from simulations.server_steps import (
    CHOSEN_BY,
    NAMES,
    RATES,
    Filtered,
    Lamb,
    LessNoise,
    Results,
    Scaled,
    ScaledStep,
    WarmUp,
    model_of,
    optimizer_of,
    scales_of,
)

START = {"w": np.array([3.0, 4.0], np.float32), "b": np.zeros(1, np.float32)}


def test_lamb_moves_each_tensor_by_its_own_length() -> None:
    step = Lamb(0.1)
    average = {"w": np.array([1e-3, -1e-3]), "b": np.array([5.0])}
    after, _ = step.update(average, step.init(START), START)
    assert np.linalg.norm(after["w"] - START["w"]) == pytest.approx(0.1 * 5.0, rel=1e-5)
    assert np.linalg.norm(after["b"] - START["b"]) == pytest.approx(0.1 * 0.1, rel=1e-5)
    assert (after["w"] - START["w"])[0] > 0.0 > (after["w"] - START["w"])[1]


@pytest.mark.parametrize("block", [False, True])
def test_second_moments_lose_the_variance_of_the_noise(block: bool) -> None:
    step = LessNoise(1.0, noise=3.0, block=block)
    average = {"w": np.array([5.0, 5.0]), "b": np.array([0.1])}
    after, _ = step.update(average, step.init(START), START)
    # √(25 − 9) = 4; and at least a tenth of the noise.
    assert after["w"] - START["w"] == pytest.approx([5 / 4, 5 / 4], rel=1e-5)
    assert after["b"] - START["b"] == pytest.approx([0.1 / 0.3], rel=1e-5)


def test_a_warm_up_rises_and_ends_near_zero() -> None:
    rate = WarmUp(0.2, 100)
    assert rate.at(1) == pytest.approx(0.02, rel=0.01)
    assert 0.19 < max(map(rate.at, range(1, 101))) <= 0.2
    assert rate.at(100) < 0.001


def test_filtered_users_train_ahead_of_a_model_that_follows_the_average_of_releases() -> None:
    step, usual = Filtered(0.1), FedAdam(0.1)
    averages = [
        {"w": np.array([1.0, -2.0]), "b": np.array([0.5])},
        {"w": np.ones(2), "b": -np.ones(1)},
    ]
    start: Parameters = START
    model: Parameters = START
    state, usual_state = step.init(START), usual.init(START)
    smooth = {name: np.zeros(p.shape) for name, p in START.items()}
    for average in averages:
        smooth = {name: 0.3 * smooth[name] + 0.7 * average[name] for name in smooth}
        start, state = step.update(average, state, start)
        before, (model, usual_state) = model, usual.update(smooth, usual_state, model)
        for name, x in model.items():
            np.testing.assert_allclose(model_of(start, state)[name], x, rtol=1e-6)
            np.testing.assert_allclose(start[name], x + 0.3 / 0.7 * (x - before[name]), rtol=1e-6)


def test_other_steps_train_from_the_model() -> None:
    step = FedAdam(0.1)
    assert model_of(START, step.init(START)).keys() == START.keys()
    assert np.array_equal(model_of(START, step.init(START))["w"], START["w"])


def test_scales_are_inverse_to_roots_of_second_moments_and_of_size_one() -> None:
    state = OptimizerState({}, {"w": np.array([0.04, 0.16]), "b": np.array([0.01])})
    scales = scales_of(state)
    assert scales["w"][0] / scales["w"][1] == pytest.approx(0.401 / 0.201)
    assert scales["b"][0] / scales["w"][0] == pytest.approx(0.201 / 0.101)
    assert np.square([*scales["w"], *scales["b"]]).mean() == pytest.approx(1.0)


def test_scaled_updates_are_scaled_before_they_are_clipped_and_back_after() -> None:
    state = OptimizerState(
        FedAdam().init(START).first, {"w": np.array([0.04, 0.16]), "b": np.ones(1)}
    )
    local, scales = ScaledStep(0.3, steps=1), scales_of(state)
    local.set(state)
    gradient = torch.tensor([[1.0, 2.0], [3.0, -1.0]])  # of two users
    step = LocalStep(0, gradient, gradient, (), torch.zeros(()), personal=False)
    found = local.direction(step)[0].numpy()
    np.testing.assert_allclose(found, gradient.numpy() * scales["w"], rtol=1e-6)
    average = {"w": np.array([1.0, -1.0]), "b": np.array([0.5])}
    sent = {name: a * scales[name] for name, a in average.items()}
    after, _ = Scaled(0.1).update(sent, state, START)
    expected, _ = FedAdam(0.1).update(average, state, START)
    for name in START:
        np.testing.assert_allclose(after[name], expected[name], rtol=1e-6)


def test_a_user_of_one_batch_takes_one_step_by_default(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    row = {"task": "digits", "step": "fedadam", "rate": 0.03, "seed": 101, "reached": {"last": 9.0}}
    file.write_text(json.dumps([row]))
    assert Results(file).reached("digits", "one step", 0.03, 101) == {"last": 9.0}


def test_no_task_chooses_its_own_rate(tmp_path: Path) -> None:
    low, middle, high = RATES["lamb"]
    best = dict.fromkeys(NAMES, middle) | {NAMES[0]: high}
    rows = [
        {
            "task": task, "step": "lamb", "rate": rate, "seed": CHOSEN_BY,
            "reached": {"last": 90.0 if rate == best[task] else 10.0},
        }
        for task in NAMES
        for rate in (low, middle, high)
    ]  # fmt: skip
    file = tmp_path / "rows.json"
    file.write_text(json.dumps(rows))
    assert {Results(file).rate_for(task, "lamb") for task in NAMES} == {middle}


def test_every_step_has_an_optimiser() -> None:
    kinds = [type(optimizer_of(step, 0.1, 1.0)) for step in RATES]
    assert kinds == [FedAdam, FedAdam, Lamb, LessNoise, LessNoise, Filtered, Scaled, FedAdam]
