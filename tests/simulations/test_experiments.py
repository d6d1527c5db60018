"""The committed experiments reach what the README says of them."""

import os
from pathlib import Path

import pytest

from simulations.seeds import run_seed, summary

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"


@pytest.mark.slow
def test_digits_reach_ninety_percent_at_epsilon_two() -> None:
    file = ROOT / "simulations" / "digits.toml"
    result = summary([run_seed(file, seed, []) for seed in range(5)])
    assert result["mean"] >= 0.90
    assert max(result["epsilon"]) <= 2.0
    assert result["delta"] == 1e-3
    assert result["rounds"] == 100


@pytest.mark.slow
def test_mnist_by_writer_reaches_ninety_two_percent_at_epsilon_eight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "FEDPRIV_DATA" not in os.environ and not SHARED.exists():
        pytest.skip("MNIST is absent: set FEDPRIV_DATA to the folder that holds its files")
    monkeypatch.setenv("FEDPRIV_DATA", os.environ.get("FEDPRIV_DATA", str(SHARED)))
    result = summary([run_seed(ROOT / "simulations" / "mnist_writers.toml", 0, [])])
    assert result["mean"] >= 0.92
    assert max(result["epsilon"]) <= 8.0


@pytest.mark.parametrize("strategy", ["flat", "per-layer", "joint"])
def test_digits_train_under_each_clipping(strategy: str) -> None:
    rows = run_seed(
        ROOT / "simulations" / "digits.toml",
        0,
        ["rounds=30", "privacy.noise_multiplier=4.0", f"clipping.strategy={strategy}"],
    )
    assert float(str(rows[-1]["test_accuracy"])) >= 0.8
