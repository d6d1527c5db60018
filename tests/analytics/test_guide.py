"""The guide's example runs, and its numbers are right."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedpriv.accounting import calibrate_noise_multiplier
from fedpriv.ledger import Ledger

GUIDE = (Path(__file__).parents[2] / "docs" / "analytics.md").read_text(encoding="utf-8")


def test_the_example_runs_once_within_its_budget(tmp_path: Path) -> None:
    (tmp_path / "trips.py").write_text(re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)[1])
    first, second = (
        subprocess.run(
            [sys.executable, "trips.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        for _ in range(2)
    )
    assert (first.returncode, first.stderr) == (0, "")
    mean = re.search(r"minutes on average ([\d.]+) ± ([\d.]+)", first.stdout)
    assert abs(float(mean[1]) - 32.0) < 1.0
    assert 0.0 < float(mean[2]) < 0.2
    assert 0.0 < float(re.search(r"ε = ([\d.]+)", first.stdout)[1]) <= 1.0
    assert "BudgetExceededError" in second.stderr
    assert second.stdout == ""


def test_the_price_of_sampling_is_as_stated() -> None:
    stated = re.search(r"needs z/q = ([\d.]+), ([\d.]+) and ([\d.]+)", GUIDE)
    for q, number in zip((1.0, 0.5, 0.1), stated.groups(), strict=True):
        z = calibrate_noise_multiplier(1.0, 1e-5, rounds=1, sampling_probability=q)
        assert float(number) == pytest.approx(z / q, abs=0.06)


def test_the_example_of_components_trains_on_the_same_ledger(tmp_path: Path) -> None:
    (tmp_path / "pixels.py").write_text(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[1])
    done = subprocess.run(
        [sys.executable, "pixels.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    epsilon, accuracy = re.search(r"ε = ([\d.]+) of both, accuracy (\d+)%", done.stdout).groups()
    assert 1.99 <= float(epsilon) <= 2.0
    assert int(accuracy) > 50
    with Ledger.open(tmp_path / "digits.sqlite") as ledger:
        runs = [charge.run for charge in ledger.charges()]
    assert runs[0] == "pixels"
    assert len(runs) == 51


def test_the_example_of_evaluation_asks_users_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "evaluated.py").write_text(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[2])
    done = subprocess.run(
        [sys.executable, "evaluated.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    mean, low, middle = map(float, re.findall(r"[\d.]+", done.stdout))
    # Noise of 0.025 on the mean; thresholds are a quarter apart.
    assert 0.6 < mean < 1.1
    assert 0.0 <= low <= middle <= 1.0
    with Ledger.open(tmp_path / "evaluated.sqlite") as ledger:
        runs = [charge.run for charge in ledger.charges()]
    assert runs[-1] == "evaluated"
    assert len(runs) == 21
