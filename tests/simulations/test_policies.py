"""The noise of sampling policies, in a small plan."""

import json
from pathlib import Path

import pytest

from fedpriv.accounting import epsilon, poisson_gaussian, random_allocation_gaussian
from simulations import policies


def test_policies_are_compared_at_equal_epsilon_rounds_and_cohorts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policies, "USERS", 30)
    monkeypatch.setattr(policies, "ROUNDS", 4)
    policies.main(["--epsilon", "4", "--passes", "2", "--folder", str(tmp_path)])
    rows = json.loads((tmp_path / "policies.json").read_text())
    named = {row["policy"]: row for row in rows}
    assert named.keys() == {"every user", "poisson", "random allocation", "fixed size"}
    z = {name: row["noise_multiplier"] for name, row in named.items()}
    for event in (
        poisson_gaussian(0.5, z["poisson"], 4),
        random_allocation_gaussian(2, 1, z["random allocation"], 2),
    ):
        assert 3.95 < epsilon([event], policies.DELTA).epsilon <= 4.0 + 1e-9
    assert [row["cohort"] for row in rows] == [30.0, 15.0, 15.0, 15.0]
    assert named["fixed size"]["relation"] == "replace-one"
    assert "random allocation" in (tmp_path / "policies.txt").read_text()
