"""A SuperLink and two SuperNodes on loopback, with TLS and keys, train what one process trains."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from safetensors.numpy import load_file

from fedpriv.config import load_config
from fedpriv.federated.checkpoint import checkpoints
from fedpriv.server.folder import RunFolder
from simulations import loopback
from tests.commandline import fedpriv
from tests.deployment.superlink import await_that, superlink, supernodes

DIGITS = Path(__file__).parents[2] / "simulations" / "digits.toml"
SETTINGS = (
    "rounds=2",
    "seed=7",
    "privacy.noise_multiplier=0.0",
    "privacy.unsafe_no_privacy=true",
)


def experiment(folder: Path, *assignments: str) -> str:
    """DIGITS on the nodes of a folder."""
    enrolment = f'federation.enrolment="{folder / "enrolment.toml"}"'
    config = load_config(DIGITS, [*SETTINGS, enrolment, *assignments])
    return tomli_w.dumps(config.model_dump(exclude_none=True))


def settings_of(folder: Path, name: str) -> str:
    """The node-config of a node of the folder."""
    return f'node="{name}" users="{folder / "users" / name}" device="cpu"'


@pytest.mark.slow
def test_enrolled_supernodes_train_what_one_process_trains(tmp_path: Path) -> None:
    loopback.lay_out_digits(tmp_path, (144, 143))
    given = [f"--set={text}" for text in SETTINGS]
    done = fedpriv("simulate", DIGITS, *given, "--out", tmp_path / "here")
    assert done.returncode == 0, done.stderr
    text = experiment(tmp_path, "federation.least_nodes=2")
    nodes = {name: settings_of(tmp_path, name) for name in ("node-1", "node-2")}
    with superlink(tmp_path) as link, supernodes(link, nodes):
        run = link.run(experiment=text, out=str(tmp_path / "there"))
        assert link.finished(run) == "finished:completed", logs(tmp_path)
    here, there = (load_file(tmp_path / made / "model.safetensors") for made in ("here", "there"))
    assert here.keys() == there.keys()
    for name, parameter in here.items():
        assert parameter.any()
        np.testing.assert_allclose(there[name], parameter, atol=1e-6)
    assert len(checkpoints(tmp_path / "there" / "checkpoints")) > 0


@pytest.mark.slow
def test_a_node_that_is_killed_counts_as_zero_and_the_run_goes_on(tmp_path: Path) -> None:
    loopback.lay_out_digits(tmp_path, (144, 143))
    settings = ("rounds=3", "privacy.sampling_probability=1.0", "federation.deadline_seconds=25.0")
    text = experiment(tmp_path, *settings, "federation.least_nodes=1")
    folder = RunFolder(tmp_path / "there")
    nodes = {name: settings_of(tmp_path, name) for name in ("node-1", "node-2")}
    with superlink(tmp_path) as link, supernodes(link, nodes) as processes:
        run = link.run(experiment=text, out=str(folder.path))
        await_that(lambda: list(folder.read_metrics()))
        os.killpg(processes["node-2"].pid, signal.SIGKILL)
        assert link.finished(run) == "finished:completed", logs(tmp_path)
    rows = list(folder.read_metrics())
    assert [row["round"] for row in rows] == [0, 1, 2]
    # The other node's users went on to train the model.
    assert len({row["test_loss"] for row in rows}) == 3


def logs(folder: Path) -> str:
    """What all processes printed."""
    return "\n".join(f"{p}:\n{p.read_text()}" for p in sorted(folder.glob("*.log")))
