"""Table 1 of Ermiş & Cemgil: what each σ costs, the noise of a step, and a small rerun."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.data.builtin import load_digits
from fedpriv.experiment.models import mlp
from fedpriv.training.optimizers import OptimizerState, PowerDecay
from simulations.papers.dropout import (
    AC,
    BUDGETS,
    EXACT,
    NON_PRIVATE,
    SETTINGS,
    SGLD,
    ZCDP,
    Arm,
    Langevin,
    Setting,
    Trained,
    dropout_rates,
    results_table,
    simulated,
    train,
    write,
)
from simulations.papers.ermis_cemgil import SIGMA_AC, SIGMA_ZCDP, amplified_zcdp_epsilon

SMALL = Setting("digits", 0.1, epochs=6, hidden=32, clipping_norm=2.0, rate=PowerDecay(1.0, 0.5))


def sigma(setting: Setting, name: str, budget: float) -> float:
    (found,) = [a.sigma for a in setting.arms if (a.name, a.budget) == (name, budget)]
    return found


def test_the_formulas_ask_for_more_noise_than_the_paper_prints() -> None:
    mnist = SETTINGS["mnist"]
    assert mnist.rounds == 20_000
    assert sigma(mnist, AC, 0.5) > 6 * SIGMA_AC
    assert sigma(mnist, ZCDP, 0.5) > 3 * SIGMA_ZCDP
    digits = SETTINGS["digits"]
    for budget in BUDGETS:
        found = amplified_zcdp_epsilon(sigma(digits, ZCDP, budget), 0.05, 2000)
        assert found == pytest.approx(budget)
        assert (
            sigma(digits, ZCDP, budget) == sigma(digits, SGLD, budget) < sigma(digits, AC, budget)
        )


def test_the_exact_column_is_that_of_the_noise_of_two_clipped_layers() -> None:
    for arm in SETTINGS["digits"].arms[1:]:
        # Noise of 2Cσ; a record has C in each of two layers.
        z = 2 * 2.0 * arm.sigma / math.hypot(2.0, 2.0)
        cost = epsilon([poisson_gaussian(0.05, z, 2000)], 1e-4).epsilon
        assert arm.epsilon == pytest.approx(cost, rel=1e-7)
        assert arm.epsilon < arm.replacing
        if arm.name == EXACT:
            assert 0.999 * arm.budget < arm.epsilon <= arm.budget


@pytest.mark.slow
def test_a_step_adds_the_noise_that_the_paper_says_and_nothing_else(tmp_path: Path) -> None:
    people, setting = load_digits(), replace(SMALL, epochs=0.1, hidden=500)
    arm = Arm(setting, ZCDP, 1.0, 3.0)
    changes = []
    for each in (arm, replace(arm, name=NON_PRIVATE, sigma=0.0)):
        assert setting.rounds == 1
        changes.append(simulated(each, people, 0, tmp_path / each.name).model)
    expected = 2 * 2.0 * 3.0 / (0.1 * 1437)  # the rate is 1 in the first round
    for noisy, clean in zip(*(model.parameters() for model in changes), strict=True):
        noise = (noisy - clean).detach().numpy()
        assert np.std(noise) == pytest.approx(expected, rel=6 / math.sqrt(2 * noise.size))


def test_dropout_of_the_rate_found_is_noise_of_the_stddev_given() -> None:
    model = mlp(64, 8).double()
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    p = dropout_rates(model, 0.3)
    alpha = p / (1 - p)
    torch.testing.assert_close(alpha.sqrt() * theta.abs(), torch.full_like(theta, 0.3))


def test_langevin_noise_has_its_stddev_and_is_of_its_round() -> None:
    start = {"w": np.zeros(20_000, np.float32)}
    average = {"w": np.ones(20_000)}
    optimizer = Langevin(PowerDecay(0.5, 0.5), examples=100, seed=3)
    first, again, second = (
        optimizer.at(n).update(average, OptimizerState({}, {}), start)[0]["w"] for n in (4, 4, 5)
    )
    assert np.array_equal(first, again)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert first.mean() == pytest.approx(0.25, abs=0.01)
    assert first.std() == pytest.approx(math.sqrt(2 * 0.25 / 100), rel=0.05)


@pytest.mark.slow
def test_the_ledger_holds_the_exact_column_and_models_learn() -> None:
    people = load_digits()
    for arm in SMALL.arms:
        if arm.budget == 10.0 and arm.name in {EXACT, SGLD}:
            run = train(arm, people, 0)
            assert run.epsilon == pytest.approx(arm.epsilon, rel=1e-6)
            assert run.accuracy > 0.5


def test_a_row_has_the_means_of_its_seeds(tmp_path: Path) -> None:
    arm = next(a for a in SETTINGS["digits"].arms if (a.name, a.budget) == (ZCDP, 1.0))
    runs = [Trained(arm, seed, 0.8 + seed / 10, arm.epsilon, 0.1) for seed in (0, 1)]
    (row,) = results_table(runs).rows
    assert row[:2] == ("1", ZCDP)
    assert row[-2:] == ("93.67%", "85.00% ± 7.07%")
    assert arm.epsilon <= float(row[3]) <= arm.epsilon + 1.001e-3
    write(runs, tmp_path)
    read = json.loads((tmp_path / "dropout_digits.json").read_text())
    assert [run["accuracy"] for run in read["runs"]] == [run.accuracy for run in runs]
    assert "85.00% ± 7.07%" in (tmp_path / "dropout_digits.txt").read_text()
