"""A simulation on Flower's runtime with two workers of Ray is the simulation in this process."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import numpy as np
import pytest

from fedpriv.ledger.ledger import Ledger
from fedpriv.run.folder import RunFolder
from simulations.loopback import Program
from tests.deployment.digits import DIGITS, NOISELESS, assert_same_model, in_process
from tests.deployment.processes import await_that, clear, marked
from tests.deployment.sites import ended, refused

# Writes down whom a process looks up.
HOOK = """
import os, socket
known = socket.getaddrinfo
def written(host, *args, **kwargs):
    with open(os.environ["LOOKED_UP"], "a") as file:
        print(host, file=file)
    return known(host, *args, **kwargs)
socket.getaddrinfo = written
"""


@dataclass(frozen=True)
class Simulation:
    """A `fedpriv simulate` that runs, and the processes that it starts."""

    program: Program  # the command
    mark: str  # in the environment of all of them
    scratch: Path  # where they may write

    @property
    def workers(self) -> list[int]:
        return [p for p, line in marked(self.mark).items() if line.startswith("ray::ClientApp")]

    @property
    def addresses(self) -> set[str]:
        """Where its Ray takes calls."""
        return set(re.findall("--gcs-address=([^ ]+)", "\n".join(marked(self.mark).values())))


@contextmanager
def simulating(
    folder: Path, *arguments: str, experiment: Path = DIGITS, **environment: str
) -> Iterator[Simulation]:
    """`fedpriv simulate` with two workers in a folder; it must end within the block."""
    mark, output = uuid.uuid4().hex, folder / "output.txt"
    given = [f"--set={text}" for text in NOISELESS]
    command = [sys.executable, "-c", "from fedpriv.cli import main; main()", "simulate"]
    # Paths of sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch, output.open("wb") as file:
        process = subprocess.Popen(
            [*command, experiment, *given, "--engine=flower", "--workers=2", *arguments],
            cwd=folder,
            env=os.environ | {"MARK": mark, "RAY_TMPDIR": scratch} | environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        try:
            yield Simulation(Program(process, output), mark, Path(scratch))
            await_that(lambda: marked(mark) == {})  # workers that were told to end
        finally:
            clear(mark)
            process.wait()


@pytest.mark.slow
def test_two_workers_give_what_one_process_gives_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    looked_up = tmp_path / "looked_up"
    looked_up.touch()
    in_process(tmp_path / "here")
    environment = {
        "HOME": str(tmp_path / "home"),
        "PYTHONPATH": str(tmp_path / "hook"),
        "LOOKED_UP": str(looked_up),
    }
    with simulating(tmp_path, "--out=there", **environment) as simulation:
        await_that(lambda: simulation.addresses)
        assert_locked(*simulation.addresses)
        said = ended(simulation.program)
        assert list(simulation.scratch.iterdir()) == []
    assert not (tmp_path / "home" / ".flwr").exists()
    # Ray asks the machine's own cloud, if it is in one, which it is; it says nothing of the run.
    own = {"None", "localhost", os.uname().nodename, "metadata.google.internal"}
    strangers = {h for h in looked_up.read_text().split() if h not in own and not is_address(h)}
    assert strangers == set()
    assert "Warning" not in said
    assert_same_model(tmp_path / "here", tmp_path / "there")
    plans = [tomllib.loads((tmp_path / run / "plan.toml").read_text()) for run in ("here", "there")]
    # One process takes the time of both ways to train, or has a rule; workers have the rule alone.
    assert [plan["engine"].pop("path") for plan in plans] == ["together", "auto"]
    assert plans[0] == plans[1]
    losses = [
        [row["loss"] for row in RunFolder(tmp_path / run).read_metrics()]
        for run in ("here", "there")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def is_address(host: str) -> bool:
    """Whether nothing is asked to look it up."""
    return host.replace(".", "").isdigit()


@pytest.mark.slow
def test_a_run_that_audits_itself_is_the_simulation_in_this_process(tmp_path: Path) -> None:
    # Of up to one seed in twenty, 7 among them, chance alone refutes a true claim.
    audited = ("privacy.noise_multiplier=4.0", "audit.canaries=100", "seed=1")
    in_process(tmp_path / "here", *audited)
    with simulating(tmp_path, "--out=there", *(f"--set={each}" for each in audited)) as simulation:
        said = ended(simulation.program)
    assert_same_model(tmp_path / "here", tmp_path / "there")
    here, there = (RunFolder(tmp_path / name).read_audit() for name in ("here", "there"))
    assert here == there
    assert there is not None
    assert there.text in " ".join(said.split())


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_the_run_and_its_round_is_charged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with simulating(tmp_path, "--out=run", "--set=rounds=100000") as simulation:
        await_that(lambda: list(folder.read_metrics()))
        worker, *_ = simulation.workers
        os.kill(worker, signal.SIGKILL)
        said = refused(simulation.program)
    assert re.search("[01] of 2 workers answered in round [0-9]+; all must$", said)
    released = [row["charge"] for row in folder.read_metrics()]
    with Ledger.open(folder.ledger) as ledger:
        assert [row.hash for row in ledger.charges()][:-1] == released


def assert_locked(address: str) -> None:
    """Who has no token can do nothing in a cluster of Ray."""
    with grpc.insecure_channel(address) as channel:
        nodes = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        with pytest.raises(grpc.RpcError) as refusal:
            nodes(b"", timeout=60.0, wait_for_ready=True)
    assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
