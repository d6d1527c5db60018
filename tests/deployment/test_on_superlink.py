"""A SuperLink and two SuperNodes on loopback, with TLS and keys, train what one process trains."""

import os
import signal
from pathlib import Path

import pytest

from fedpriv.run.folder import RunFolder
from fedpriv.training.checkpoint import checkpoints
from simulations import loopback
from tests.deployment.digits import assert_same_model, in_process, on_nodes
from tests.deployment.superlink import await_that, superlink, supernodes

NODES = {"node-1": "", "node-2": ""}


@pytest.mark.slow
def test_enrolled_supernodes_train_what_one_process_trains(tmp_path: Path) -> None:
    loopback.lay_out_digits(tmp_path, (144, 143))
    in_process(tmp_path / "here", "rounds=2")
    text = on_nodes(tmp_path, "rounds=2", "federation.least_nodes=2")
    with superlink(tmp_path) as link, supernodes(link, NODES):
        run = link.run(experiment=text, out=str(tmp_path / "there"))
        link.await_completed(run)
    assert_same_model(tmp_path / "here", tmp_path / "there")
    assert len(checkpoints(tmp_path / "there" / "checkpoints")) > 0


@pytest.mark.slow
def test_a_node_that_is_killed_counts_as_zero_and_the_run_goes_on(tmp_path: Path) -> None:
    loopback.lay_out_digits(tmp_path, (144, 143))
    settings = ("privacy.sampling_probability=1.0", "federation.deadline_seconds=60.0")
    text = on_nodes(tmp_path, "rounds=2", *settings, "federation.least_nodes=1")
    folder = RunFolder(tmp_path / "there")
    with superlink(tmp_path) as link, supernodes(link, NODES) as processes:
        run = link.run(experiment=text, out=str(folder.path))
        await_that(lambda: list(folder.read_metrics()))
        os.killpg(processes["node-2"].pid, signal.SIGKILL)
        link.await_completed(run)
    rows = list(folder.read_metrics())
    assert [row["round"] for row in rows] == [0, 1]
    # The other node's users went on to train the model.
    assert len({row["loss"] for row in rows}) == 2
