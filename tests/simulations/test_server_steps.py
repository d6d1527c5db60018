"""Steps from the literature, and the choice of their rates."""

import json
from pathlib import Path

import numpy as np
import pytest

from fedpriv.training.optimizers import FedAdam
from simulations.server_steps import (
    CHOSEN_BY,
    NAMES,
    RATES,
    Lamb,
    LessNoise,
    Results,
    WarmUp,
    optimizer_of,
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
    assert kinds == [FedAdam, FedAdam, Lamb, LessNoise, LessNoise]
