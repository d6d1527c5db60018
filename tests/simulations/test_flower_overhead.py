"""The benchmark beside Flower: that both sides do the same work, not how fast anything is."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file

from fedpriv.experiment.build import simulated
from fedpriv.run.run import RunSetup
from fedpriv.run.terminal import execute
from simulations.flower_overhead import Measured, measured, summary
from simulations.flower_usual import WORK, app, federate, work_of
from tests.flower.local_grid import LocalGrid, in_turns

USERS, ROUNDS = 12, 3
FREE_OF_NOISE = ["privacy.noise_multiplier=0.0", "privacy.unsafe_no_privacy=true"]


def test_without_noise_flowers_usual_way_gives_the_same_model(tmp_path: Path) -> None:
    assignments = [*FREE_OF_NOISE, f"data.options.users={USERS}", f"rounds={ROUNDS}"]
    beginning = RunSetup.of(WORK, assignments, tmp_path / "run", resume=False)
    experiment, transport = simulated(beginning.config, beginning.run)
    execute(beginning, experiment, lambda *_: transport, Console(quiet=True))
    ours = load_file(beginning.folder.model)

    told = []
    nodes = {
        1 + user: (in_turns(app), {"partition-id": user, "num-partitions": USERS})
        for user in range(USERS)
    }
    grid = LocalGrid(nodes)
    try:
        theirs = federate(grid, USERS, USERS, ROUNDS, lambda: told.append(len(grid.sent)))
    finally:
        grid.close()
    assert told == [USERS * done for done in range(ROUNDS + 1)]  # a message per user and round
    assert theirs.keys() == ours.keys()
    for name, parameter in work_of(USERS).task.parameters().items():
        assert np.abs(ours[name] - parameter).max() > 1e-4
        # Norms of matrices in factors are bounds, which allow for the rounding of float32.
        np.testing.assert_allclose(theirs[name].numpy(), ours[name], atol=1e-5)


def test_the_summary_by_hand() -> None:
    found = [
        Measured("in process", 100, 1, 3.0, [0.1, 0.1, 0.2]),
        Measured("fedpriv", 100, 1, 9.0, [0.2, 0.2]),
        Measured("flower", 100, 1, 8.0, [2.0]),
        Measured("fedpriv", 100, 4, 9.5, [0.1, 0.1]),
        Measured("flower", 100, 4, 8.5, [0.9, 1.0, 1.1]),
    ]
    one, four = summary(found, cores=2)
    assert (one["users"], one["workers"], four["workers"]) == (100, 1, 4)
    assert one["fedpriv's users per second"] == pytest.approx(500.0)
    assert one["flower's users per second"] == pytest.approx(50.0)
    assert one["fedpriv's users per second over flower's"] == pytest.approx(10.0)
    assert four["fedpriv's users per second over flower's"] == pytest.approx(10.0)
    assert one["of fedpriv's round beyond training"] == pytest.approx(0.1)
    assert four["of fedpriv's round beyond training"] == pytest.approx(0.05)  # two cores
    assert four["of flower's round beyond training"] == pytest.approx(0.95)
    assert four["fedpriv's start in seconds"] == 9.5


@pytest.mark.slow
@pytest.mark.parametrize("way", ["in process", "flower"])
def test_each_way_runs_in_a_process_of_its_own(way: str) -> None:
    found = measured(way, users=6, workers=1 if way == "in process" else 2, rounds=3)
    assert len(found.round_seconds) == 2
    assert min(found.round_seconds) > 0.0
    assert found.start_seconds > 0.0
