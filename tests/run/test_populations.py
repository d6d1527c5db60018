"""Runs on populations given as values: their users stay the same, and no other rows are needed."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedpriv
from fedpriv.errors import InvalidValueError


def test_a_run_goes_on_with_the_users_that_it_began_with(tmp_path: Path) -> None:
    x = np.eye(4, dtype=np.float32).repeat(10, 0)
    y = np.arange(4).repeat(10)

    def simulated(users: np.ndarray, rounds: int) -> fedpriv.Run:
        def stop(result: fedpriv.RoundResult) -> None:
            if result.round == rounds:
                raise KeyboardInterrupt

        mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
        return fedpriv.simulate(
            fedpriv.Population.from_arrays(x, y, users, held_out=(x, y)),
            fedpriv.Task(torch.nn.Linear(4, 4), loss="cross-entropy"),
            mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=3),
            out=tmp_path / "run",
            resume=True,
            trackers=[stop],
            engine=fedpriv.Engine(device="cpu"),
            quiet=True,
        )

    with pytest.raises(KeyboardInterrupt):
        simulated(np.arange(40), 1)
    with pytest.raises(InvalidValueError, match="the users are not those that run"):
        simulated(np.arange(1, 41), 9)
    assert len(simulated(np.arange(40), 9).rounds) == 3


def test_a_population_without_held_out_rows_is_trained_on_and_measured_by_metrics_alone(
    tmp_path: Path,
) -> None:
    x = np.eye(4, dtype=np.float32).repeat(10, 0)
    people = fedpriv.Population.from_arrays(x, np.arange(4).repeat(10), np.arange(40))
    task = fedpriv.Task(torch.nn.Linear(4, 4), loss="cross-entropy")
    mechanism = fedpriv.Mechanism.poisson(
        q=0.5, clipping=fedpriv.Flat(1.0), metrics={"examples": {"cap": 5}}
    ).calibrate(epsilon=8.0, delta=1e-3, rounds=2)
    given = {"engine": fedpriv.Engine("cpu"), "quiet": True}
    run = fedpriv.simulate(people, task, mechanism, out=tmp_path / "run", **given)
    assert (run.accuracy, run.loss, run.figures) == (None, None, {})
    assert ["examples" in each.metrics for each in run.rounds] == [True, True]
    arms = {"one": {}, "other": {"local": fedpriv.SGD(0.1, epochs=1)}}
    for search in (
        lambda: fedpriv.compare(people, task, mechanism, arms, out=tmp_path / "study", **given),
        lambda: fedpriv.tune(people, task, mechanism, on="public", out=tmp_path / "t", quiet=True),
    ):
        with pytest.raises(InvalidValueError, match="the population has no held-out rows"):
            search()


def test_a_task_that_cannot_train_is_refused_though_no_rows_are_held_out(tmp_path: Path) -> None:
    x, ids = np.eye(4, dtype=np.float32), np.arange(4)
    people = fedpriv.Population.from_arrays(x, ids, ids)
    mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=2)
    task = fedpriv.Task(torch.nn.Linear(5, 4), loss="cross-entropy")
    with pytest.raises(fedpriv.errors.ModelError):
        fedpriv.simulate(people, task, mechanism, out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run").exists()
