"""A SuperLink and two SuperNodes on loopback, with TLS and keys, train what one process trains."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpriv.run.folder import RunFolder
from fedpriv.training.rounds import checkpoints
from simulations import loopback
from tests.deployment.digits import assert_same_model, in_process, on_nodes
from tests.deployment.superlink import SuperLink, await_that, superlink, supernodes

NODES = {"node-1": "", "node-2": ""}
Federation = tuple[SuperLink, dict[str, subprocess.Popen[bytes]]]


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    """A SuperLink and the processes of its SuperNodes."""
    folder = tmp_path / "link"
    folder.mkdir()
    loopback.lay_out_digits(folder, (144, 143))
    with superlink(folder) as link, supernodes(link, NODES) as processes:
        yield link, processes


@pytest.mark.slow
def test_enrolled_supernodes_train_what_one_process_trains_and_one_that_is_killed_is_zero(
    federation: Federation, tmp_path: Path
) -> None:
    link, processes = federation
    in_process(tmp_path / "here", "rounds=2")
    text = on_nodes(link.folder, "rounds=2", "federation.least_nodes=2")
    link.await_completed(link.run(experiment=text, out=str(tmp_path / "there")))
    assert_same_model(tmp_path / "here", tmp_path / "there")
    assert len(checkpoints(tmp_path / "there" / "checkpoints")) > 0

    settings = ("privacy.sampling_probability=1.0", "federation.deadline_seconds=40.0")
    text = on_nodes(link.folder, "rounds=2", *settings, "federation.least_nodes=1")
    folder = RunFolder(tmp_path / "killed")
    run = link.run(experiment=text, out=str(folder.path))
    await_that(lambda: list(folder.read_metrics()))
    os.killpg(processes["node-2"].pid, signal.SIGKILL)
    link.await_completed(run)
    rows = list(folder.read_metrics())
    assert [row["round"] for row in rows] == [1, 2]
    # The other node's users went on to train the model.
    assert len({row["loss"] for row in rows}) == 2
