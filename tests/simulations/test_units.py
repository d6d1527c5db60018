"""The study of units and samplings, in small on DIGITS."""

from pathlib import Path

import pytest

from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import load_config
from simulations import units

DIGITS = experiment_file(Path("digits"))


@pytest.mark.slow
def test_three_ways_are_trained_at_one_epsilon_and_say_what_it_is_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = {units.EXAMPLES: {0.0: 9.0, 8.0: 0.2}, units.ALONE: {0.0: 0.5}}
    work = units.Work(str(DIGITS), ("rounds=3",), ("rounds=3", "clipping.norm=1.0"), rates, 4, 0.2)
    monkeypatch.setattr(units, "WORKS", {"digits": work})
    shown = tmp_path / "units.png"
    given = ["--epsilon", "8", "--seeds", "2", "--folder", str(tmp_path), "--figure", str(shown)]
    units.main(["--tasks", "digits", *given])
    found = units.read(tmp_path, "digits")
    assert [(each.way, each.unit) for each in found] == [
        (units.USERS, "user"),
        (units.EXAMPLES, "user"),
        (units.ALONE, "example"),
    ]
    for each in found:
        assert len(each.accuracy) == 2
        assert all(0.9 * 8.0 < spent <= 8.0 for spent in each.epsilon)
    _, examples, alone = found
    # Equal lots, of which a user may be four examples.
    assert examples.expected_cohort == pytest.approx(alone.expected_cohort)
    assert examples.noise_multiplier > 1.5 * alone.noise_multiplier
    assert shown.stat().st_size > 1000


@pytest.mark.parametrize("task", units.WORKS)
def test_the_base_files_are_there(task: str) -> None:
    work = units.WORKS[task]
    config = load_config(units.HERE / work.file, list(work.users))
    assert config.privacy.unit == "user"
    assert config.sampling.policy == "poisson"
