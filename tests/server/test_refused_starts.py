"""What a server refuses before it makes anything, and with which exit code it ends."""

import resource
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from fedpriv import cli
from fedpriv.errors import DataError, InvalidValueError, RunError, WireError
from fedpriv.server import certificates, deployment, service
from fedpriv.server.deployment import serve
from simulations.loopback import issue
from tests.support.test_disk import PASSING, STAYING

EXPERIMENT = """
name = "refused"
rounds = 1
data = {{ name = "digits", options = {{ users = 4 }} }}
model = {{ name = "softmax" }}
local = {{ learning_rate = 0.5, epochs = 1, max_examples = 20 }}
clipping = {{ norm = 0.5 }}
privacy = {{ sampling_probability = 0.5, epsilon = 100.0, delta = 1e-3, noise_multiplier = 4.0 }}
federation = {{ enrolment = "{folder}/enrolment.toml" }}
"""
ENROLMENT = """
population = "8a6f0d3c51e94b7f9c2e1d5a7b40f863"
nodes.a.users = ["0", "1"]
nodes.b.users = ["2", "3"]
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    (tmp_path / "enrolment.toml").write_text(ENROLMENT)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT.format(folder=tmp_path))
    return tmp_path / "experiment.toml"


def refused(experiment: Path, *assignments: str, insecure: bool = True) -> str:
    """Why a server does not start; it makes nothing."""
    before = set(experiment.parent.iterdir())
    given, out = list(assignments), experiment.parent / "run"
    with pytest.raises((InvalidValueError, WireError)) as caught:
        serve(experiment, given, out, resume=True, insecure=insecure, leave=True)
    assert set(experiment.parent.iterdir()) == before
    return str(caught.value)


@pytest.mark.parametrize("key", ["address", "metrics_address"])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_that_is_taken(experiment: Path, key: str, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"{host}:{other.getsockname()[1]}"
        free = () if key == "address" else ("federation.address=127.0.0.1:0",)
        sentence = refused(experiment, *free, f"federation.{key}={address}")
    reason = "where the server cannot listen: Address already in use"
    assert sentence.startswith(f"federation.{key} is {address}, {reason}")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_one_port_for_nodes_and_metrics(experiment: Path, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    metrics = f"federation.metrics_address={host}:{port}"
    sentence = refused(experiment, f"federation.address=127.0.0.1:{port}", metrics)
    assert sentence.startswith(f"federation.metrics_address is {host}:{port}, where")


def test_metrics_without_what_serves_them(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    addresses = "federation.address=127.0.0.1:0", "federation.metrics_address=127.0.0.1:0"
    assert refused(experiment, *addresses).startswith("prometheus_client cannot be imported")


@pytest.mark.parametrize(
    ("assignment", "why"),
    [(f"name={'n' * 1500}", "run has"), ("rounds=1_000_000_000_000", "rounds is")],
)
def test_a_run_of_which_nodes_could_not_be_told(
    experiment: Path, assignment: str, why: str
) -> None:
    sentence = refused(experiment, "federation.address=127.0.0.1:0", assignment)
    assert sentence.startswith(why)


def test_a_key_that_is_not_of_the_servers_certificate(experiment: Path) -> None:
    certs = experiment.parent / "certs"
    certificates.init(certs, ["localhost"])
    fingerprint, key = (
        issue(certs, "a").fingerprint,
        certs / "nodes" / "a" / "node.key",
    )
    (certs / "server" / "server.key").write_bytes(key.read_bytes())
    enrolled = ENROLMENT + f'nodes.a.certificate = "{fingerprint}"\n'
    (experiment.parent / "enrolment.toml").write_text(enrolled)
    settings = "federation.address=127.0.0.1:0", f"federation.certificates={certs / 'server'}"
    sentence = refused(experiment, *settings, insecure=False)
    assert sentence.endswith("server.key is not the key of the certificate server.pem beside it")


def test_a_host_that_no_name_server_could_know(experiment: Path) -> None:
    address, free = f"{'a' * 64}.example:9464", "federation.address=127.0.0.1:0"
    sentence = refused(experiment, free, f"federation.metrics_address={address}")
    assert sentence.startswith(f"federation.metrics_address is {address}, where")


def test_a_round_that_needs_more_nodes_than_are_enrolled(experiment: Path) -> None:
    settings = "federation.address=127.0.0.1:0", "federation.least_nodes=3"
    legal = "it must be at most 2, the number of enrolled nodes"
    assert refused(experiment, *settings) == f"federation.least_nodes is 3; {legal}"


def test_more_nodes_than_there_can_be_connections(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_MOST_CONNECTIONS", 1)
    sentence = refused(experiment, "federation.address=127.0.0.1:0")
    assert sentence.startswith("2 nodes are enrolled; the server takes 1 connections")


def test_the_server_takes_as_many_descriptors_as_it_may(experiment: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
        refused(experiment, "federation.address=192.0.2.7:1")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("metrics", [b"[1]\n", b"\xff\n", b'{"round": "none"}\n'])
def test_a_run_whose_metrics_are_damaged_is_not_listened_for(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, metrics: bytes
) -> None:
    def listening(*_: object) -> NoReturn:
        raise InvalidValueError("it would listen")

    monkeypatch.setattr(deployment, "listening", listening)
    out, settings = experiment.parent / "run", ["federation.address=127.0.0.1:0"]

    def begun() -> None:
        serve(experiment, settings, out, resume=True, insecure=True, leave=True)

    with pytest.raises(InvalidValueError, match="it would listen"):
        begun()
    (out / "metrics.jsonl").write_bytes(metrics)
    with pytest.raises(DataError, match=r"metrics\.jsonl cannot be read as metrics"):
        begun()


def of_a_run() -> None:
    raise RunError("the ledger was moved")


@pytest.mark.parametrize(
    ("failing", "code"),
    [(failing, 1) for failing in [*PASSING, of_a_run]] + [(failing, 2) for failing in STAYING],
)
def test_what_may_pass_ends_with_code_1_and_what_a_person_must_mend_with_2(
    monkeypatch: pytest.MonkeyPatch, failing: Callable[[], None], code: int
) -> None:
    monkeypatch.setattr(cli, "app", lambda **_: failing())
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == code
