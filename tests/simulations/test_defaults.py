"""The study behind the defaults compares rules for the norm, and leaves each task out in turn."""

from pathlib import Path

import pytest

import fedpriv
from simulations.default_tasks import TASKS
from simulations.defaults import DEFAULT, NORMS, Results, Run, Setting, leave_one_out

FILE = Path(__file__).parents[2] / "simulations/results/defaults.json"


@pytest.mark.parametrize("users", [1, 100, 999, 5_000, 10**4, 10**6])
def test_the_rule_of_the_study_is_the_default(users: int) -> None:
    clipping = fedpriv.Mechanism.poisson(1.0).for_users(users).clipping
    assert clipping == fedpriv.Flat(DEFAULT(users))


def test_a_rule_is_chosen_without_the_task_that_it_is_tried_on() -> None:
    runs = [
        Run(task=task, norm=norm, score=0.9 if (norm == 0.1) != (task == "income") else 0.1)
        for task in TASKS
        for norm in NORMS
    ]
    assert leave_one_out(Results(dict.fromkeys(TASKS, (0.0, 1.0)), runs))["income"] == "0.1"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    runs = [
        Run(task="age", seed=3, score=0.5, rate=0.1, schedule="cosine"),
        Run(task="digits", norm=0.3, batch="all"),
    ]
    results = Results({"age": (0.0, 0.4)}, runs)
    results.write(tmp_path / "file.json")
    assert Results.read(tmp_path / "file.json") == results
    assert results.share("age", 0.3) == pytest.approx(0.75)


def test_the_best_setting_may_be_the_default() -> None:
    default = Run(task="digits", seed=101, score=0.9)
    assert Results({}, [default]).mean("digits", Setting(norm=0.1)) == 0.9


def test_defaults_and_best_settings_were_run_under_other_seeds() -> None:
    results = Results.read(FILE)
    for task in TASKS:
        tried = results.of(task)
        best = max(tried, key=lambda setting: tried[setting])
        assert results.mean(task, Setting()) > 0.0
        assert results.mean(task, best) > 0.0
