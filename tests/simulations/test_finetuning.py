"""The study of fine-tuning, scaled down, and the benchmark of adapters, on a small model."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simulations import finetuning
from simulations.datasets.shakespeare import CHARACTERS
from tests.simulations.plays import plays_in

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plays_in(tmp_path)
    return tmp_path


def text_of(windows: np.ndarray) -> str:
    return "".join(CHARACTERS[code] for row in windows for code in row[:-1])


def test_plays_are_shared_out_and_users_write_without_punctuation(folder: Path) -> None:
    plays = finetuning.plays_of(folder)
    assert text_of(plays.public).startswith("Now is the winter of our discontent, made")
    assert len(plays.enrolled) == 15 * 3
    assert len(plays.held_out) == 4 * 3
    owners = [{role.split("_")[0] for role in part} for part in (plays.enrolled, plays.held_out)]
    assert not owners[0] & owners[1]
    for windows in plays.enrolled.values():
        assert finetuning.LEAST <= len(windows) <= finetuning.MOST
        assert set(text_of(windows)) <= set("abcdefghijklmnopqrstuvwxyz ")
        np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])
    other = finetuning.plays_of(folder, seed=1)
    assert other.enrolled.keys() != plays.enrolled.keys()


@pytest.mark.slow
def test_the_study_writes_a_row_for_each_arm(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDPRIV_DATA", str(folder))
    monkeypatch.setattr(finetuning, "ROUNDS", 1)
    arguments = ["--epsilon", "8", "--seeds", "2", "--steps", "3", "--folder"]
    finetuning.main([*arguments, str(tmp_path)])
    before, *rows = json.loads((tmp_path / "finetuning.json").read_text())
    assert [row["parameters"] for row in rows] == [115_040, 8_192] * 2
    assert [row["epsilon"] for row in rows] == [8.0, 8.0, None, None]
    assert [len(row["loss"]) for row in rows] == [2, 2, 1, 1]
    assert all(loss != before["loss"][0] for row in rows for loss in row["loss"])
    assert "adapters of rank 4" in (tmp_path / "finetuning.txt").read_text()


@pytest.mark.slow
def test_the_benchmark_of_large_models_runs_from_end_to_end(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, "-m", "simulations.benchmarks.large_models", str(file)]
    subprocess.run([*command, "--model", "tiny"], cwd=ROOT, check=True)
    kept = json.loads(file.read_text())["models"]["tiny"]
    assert kept["trained"] < kept["parameters"]
    for figures in kept["processor seconds of each round"].values():
        assert len(figures) == 2
        assert min(figures) > 0.0
    assert min(kept["peak MiB"].values()) > 50.0
    assert kept["MiB of a checkpoint"] > kept["MiB of the trained tensors"]
