"""The study of personal models, scaled down, with images that are made up."""

import json
from pathlib import Path

import numpy as np
import pytest

import fedpriv
from fedpriv.data.population import HELD_OUT_USER
from simulations import personalisation


def two_digits(users: int = 30) -> fedpriv.Population:
    """Users of two classes each, which are as far apart as digits are."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(10, 1, 28, 28)).astype(np.float32)
    owners = np.repeat(np.arange(users + 10), 20)
    y = np.where(rng.random(len(owners)) < 0.5, owners % 10, (3 * owners + 1) % 10)
    x = 0.3 * centres[y] + 0.8 * rng.normal(size=(len(y), 1, 28, 28)).astype(np.float32)
    enrolled = owners < users
    return fedpriv.Population.from_arrays(
        x[enrolled],
        y[enrolled],
        owners[enrolled],
        held_out=(x[~enrolled], y[~enrolled]),
        held_out_users=owners[~enrolled],
    )


@pytest.mark.slow
def test_the_study_writes_a_row_for_each_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two_digits()
    assert len(np.unique(made.test[HELD_OUT_USER])) == 10
    monkeypatch.setattr(personalisation, "people", lambda _: made)
    arguments = ["--epsilon", "8", "--rounds", "2", "--seeds", "2", "--folder"]
    personalisation.main([*arguments, str(tmp_path)])
    rows = json.loads((tmp_path / "personalisation.json").read_text())
    by_arm = {row["arm"]: row for row in rows}
    assert len(by_arm) == len(rows) == 4
    assert all(len(row["mean"]) == 2 for row in rows)
    # With two rounds of 30 users nobody knows ten classes; a user's own two are learnt.
    assert max(by_arm["one model"]["mean"]) < 0.5
    assert min(by_arm["all of it fine-tuned"]["mean"]) > 0.8
    assert "last layer personal" in (tmp_path / "personalisation.txt").read_text()
