"""A whole federation of real processes on loopback, with certificates."""

import json
import sqlite3
import subprocess
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.run.folder import RunFolder
from fedpriv.run.simulate import run_simulation
from simulations import federation, loopback
from tests.deployment.sites import LIMIT, free_port, until

NOISELESS = [
    "run=same",
    "seed=7",
    "rounds=4",
    "privacy.noise_multiplier=0.0",
    "privacy.unsafe_no_privacy=true",
]


def test_a_federation_trains_within_its_budget_and_its_nodes_check_it(tmp_path: Path) -> None:
    text = federation.run(tmp_path)
    folder = RunFolder(tmp_path / "run")
    rows = list(folder.read_metrics())
    assert len(rows) == 20
    assert float(str(rows[-1]["accuracy"])) > 0.7
    assert all(row["simulation_only_seconds"] is None for row in rows)
    with (
        Ledger.open(folder.ledger) as ledger,
        ParticipationRecord.open(record_path(folder.ledger)) as participation,
    ):
        ledger.verify(participation)
        charges = list(ledger.charges())
    assert [row["charge"] for row in rows] == [charge.hash for charge in charges]
    assert all(charge.event.sampling.population == 287 for charge in charges)
    assert 7.0 < float(str(rows[-1]["epsilon"])) <= 8.0
    head = f"{len(charges)}:{charges[-1].hash}"
    assert "".join(text.split()).count(head[:20]) == 1
    for name in federation.NODES:
        log = (tmp_path / f"{name}.log").read_text(encoding="utf-8")
        assert "the ledger holds 20 charges" in log
        assert "Traceback" not in log
    assert "Traceback" not in text


@pytest.mark.slow
def test_without_noise_the_model_is_that_of_the_simulator_though_nodes_have_one_user(
    tmp_path: Path,
) -> None:
    loopback.lay_out_digits(tmp_path, (1, 1, 285))
    settings = [f"--set={setting}" for setting in NOISELESS]
    with loopback.server(tmp_path, federation.FILE, "--exit", *settings) as server:
        port = loopback.port_of(server)
        with loopback.nodes(tmp_path, federation.NODES, port, "--once") as nodes:
            for program in (server, *nodes.values()):
                assert program.process.wait() == 0, program.text
    run_simulation(federation.FILE, NOISELESS, tmp_path / "simulated", resume=False)
    deployed, simulated = (
        load_file(RunFolder(tmp_path / name).model) for name in ("run", "simulated")
    )
    assert deployed.keys() == simulated.keys()
    for name, tensor in simulated.items():
        assert np.linalg.norm(tensor) > 0.01
        # How users train, and so how sums round, follows from how many a node has.
        np.testing.assert_allclose(deployed[name], tensor, rtol=0.0, atol=1e-4)


@pytest.mark.slow
def test_a_federation_audits_itself_as_its_simulation_does(tmp_path: Path) -> None:
    """Its nodes verify a ledger whose events name canaries, whom only the server knows."""
    settings = ["run=same", "seed=7", "rounds=4", "audit.canaries=100"]
    loopback.lay_out_digits(tmp_path)
    given = [f"--set={setting}" for setting in settings]
    with loopback.server(tmp_path, federation.FILE, "--exit", *given) as server:
        port = loopback.port_of(server)
        asked = ("--verify-ledger", "--once")
        with loopback.nodes(tmp_path, federation.NODES, port, *asked) as nodes:
            for program in (server, *nodes.values()):
                assert program.process.wait() == 0, program.text
    run_simulation(federation.FILE, settings, tmp_path / "simulated", resume=False)
    deployed, simulated = (RunFolder(tmp_path / name) for name in ("run", "simulated"))
    models = load_file(deployed.model), load_file(simulated.model)
    for name, tensor in models[1].items():
        np.testing.assert_array_equal(models[0][name], tensor)
    found = deployed.read_audit()
    assert found == simulated.read_audit()
    assert found is not None
    assert found.rounds == 4
    assert found.text in " ".join(server.text.split())


def without_coins(folder: Path) -> Path:
    """The plan of a federation whose users are in two rounds of each pass."""
    text = federation.FILE.read_text(encoding="utf-8")
    coins = [line for line in text.splitlines() if line.startswith("sampling_probability")]
    other = (
        '[sampling]\npolicy = "random-allocation"\noptions = { rounds = 16, participations = 2 }\n'
    )
    given = ("epsilon = 8.0", "epsilon = 1e6\nnoise_multiplier = 1.0")
    changed = text.replace(*coins, "").replace(*given).replace("rounds = 20", "rounds = 40")
    file = folder / "other.toml"
    file.write_text(f"{changed}\n{other}", encoding="utf-8")
    return file


@pytest.mark.slow
def test_under_another_policy_nodes_agree_and_the_model_is_that_of_the_simulator(
    tmp_path: Path,
) -> None:
    """A server that ends in the middle of a pass goes on with it, asking and noising the same.

    Other policies are tried without processes, in tests/server/test_policies_on_nodes.py.
    """
    file, settings, port = without_coins(tmp_path), ["run=same", "seed=7"], free_port()
    loopback.lay_out_digits(tmp_path)
    given = ("--exit", "--resume", *(f"--set={setting}" for setting in settings))
    serving = partial(loopback.server, tmp_path, file, *given, port=port)
    run = RunFolder(tmp_path / "run")
    with loopback.nodes(tmp_path, federation.NODES, port, "--verify-ledger", "--once") as nodes:
        with serving() as server:
            until(lambda: run.metrics.exists() and any(run.read_metrics()), server)
            server.process.terminate()
            assert server.process.wait() == 0, server.text
        stopped_after = len(list(run.read_metrics()))
        assert 0 < stopped_after < 40
        with serving() as server:
            for program in (server, *nodes.values()):
                assert program.process.wait(LIMIT) == 0, program.text
    for name in federation.NODES:
        log = (tmp_path / f"{name}.log").read_text(encoding="utf-8")
        assert "the ledger holds 40 charges" in log
        assert "believed" not in log
        assert "declined" not in log
    with Ledger.open(run.ledger) as ledger:
        rows = list(ledger.charges())
    assert [row.part for row in rows] == [number % 16 for number in range(40)]
    run_simulation(file, settings, tmp_path / "simulated", resume=False)
    deployed, simulated = (
        load_file(RunFolder(tmp_path / name).model) for name in ("run", "simulated")
    )
    assert deployed.keys() == simulated.keys()
    for name, tensor in simulated.items():
        np.testing.assert_array_equal(deployed[name], tensor)


@pytest.mark.slow
def test_a_node_fetches_the_model_that_was_released(tmp_path: Path) -> None:
    loopback.lay_out_digits(tmp_path)
    with loopback.server(tmp_path, federation.FILE, "--set=rounds=2") as server:
        port = loopback.port_of(server)
        command = [
            *(*loopback.COMMAND, "model", f"--server=localhost:{port}"),
            f"--certificates={tmp_path / 'certs' / 'nodes' / 'node-1'}",
            f"--out={tmp_path / 'model.safetensors'}",
        ]
        early = subprocess.run(command, capture_output=True, text=True, check=False)
        assert early.returncode == 1
        assert "no round was released yet" in early.stderr
        with loopback.nodes(tmp_path, federation.NODES, port, "--once") as nodes:
            for program in nodes.values():
                assert program.process.wait() == 0, program.text
        server.await_text("serving ledger and status until stopped")
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        server.process.terminate()
        assert server.process.wait() == 0, server.text
    assert "round 2 of 2, ε = " in done.stdout
    files = RunFolder(tmp_path / "run").model, tmp_path / "model.safetensors"
    kept, fetched = map(load_file, files)
    assert kept.keys() == fetched.keys()
    for name, tensor in kept.items():
        np.testing.assert_array_equal(fetched[name], tensor)


@pytest.mark.slow
def test_status_tells_where_the_run_stands_and_nothing_else(tmp_path: Path) -> None:
    loopback.lay_out_digits(tmp_path)
    with loopback.server(tmp_path, federation.FILE) as server:
        port = loopback.port_of(server)
        asked = [
            *loopback.COMMAND,
            "status",
            f"--server=localhost:{port}",
            f"--certificates={tmp_path / 'certs' / 'nodes' / 'node-1'}",
            "--json",
        ]
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
        status = json.loads(done.stdout)
        server.process.terminate()
        assert server.process.wait() == 0, server.text
    run = RunFolder(tmp_path / "run")
    assert run.sites.stat().st_mode & 0o777 == 0o600
    sites = run.read_sites()
    assert list(sites.sites) == ["node-1", "node-2", "node-3"]
    assert sites.server_certificate_end > sites.written
    assert status["nodes_enrolled"] == 3
    assert status["nodes_connected"] == 0
    assert status["users_enrolled"] == 287
    assert status["round"] == 0
    assert status["epsilon"] == 0.0
    assert status["epsilon_limit"] == 8.0
    assert "the run ended: it was asked to stop" in server.text
    with sqlite3.connect(RunFolder(tmp_path / "run").ledger) as ledger:
        assert ledger.execute("SELECT count FROM head").fetchone() == (0,)
