"""What `fedpriv simulate --engine flower` refuses before Ray is started."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedpriv.errors import InvalidValueError
from tests.commandline import refused
from tests.deployment.sites import free_port

DIGITS = Path(__file__).parents[1] / "fedpriv/experiment/bundled/digits.toml"


@pytest.fixture(autouse=True)
def _locked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of tests")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "2"], "only --engine flower has workers"),
        (["--engine", "flower", "--workers", "0"], "--workers"),
        (["--engine", "flower", "--workers", "288"], "from 1 to 287"),
        (["--engine", "gossip"], "--engine"),
        (
            ["--engine", "flower", "--set", "output.simulation_only=true"],
            "output.simulation_only is true",
        ),
        (["--engine", "flower", "--set", "data.name=digts"], "did you mean 'digits'"),
    ],
    ids=" ".join,
)
def test_what_does_not_fit_is_refused(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    assert sentence in refused("simulate", DIGITS, *arguments, cwd=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("port", [None, 2**16])
def test_an_address_where_no_cluster_answers_is_refused(
    port: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"127.0.0.1:{port or free_port()}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    said = refused("simulate", DIGITS, "--engine", "flower", cwd=tmp_path)
    assert f"RAY_ADDRESS is '{address}', where no cluster of Ray answers" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "initialized"), [("", False), ("token", True)])
def test_a_ray_that_is_open_or_in_use_is_left_alone(
    mode: str, initialized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = SimpleNamespace(__spec__="found", is_initialized=lambda: initialized)
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setattr("flwr.simulation.run_simulation", lambda *_, **__: pytest.fail("run"))
    said = refused("simulate", DIGITS, "--engine", "flower", cwd=tmp_path)
    assert said == "error: Ray is in use in this process already; simulate in another"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("address", [None, "", "local"])
def test_a_ray_that_is_started_is_locked_before_users_are_loaded_by_what_may_import_it(
    address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)

    def of(*_: object) -> None:
        assert "RAY_ADDRESS" not in os.environ
        raise InvalidValueError(f"the mode is {os.environ['RAY_AUTH_MODE']}")

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.setattr("fedpriv.flower.grid.GridSimulation.of", of)
    said = refused("simulate", DIGITS, "--engine", "flower", cwd=tmp_path)
    assert said == "error: the mode is token"


def test_why_ray_cannot_run_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crashes(*_: object, **__: object) -> None:
        try:
            try:
                raise ConnectionError("nobody\nthere")
            except ConnectionError as cause:
                raise RuntimeError("crashed") from cause
        except RuntimeError as crash:
            raise RuntimeError("an error was encountered") from crash

    monkeypatch.setattr("flwr.simulation.run_simulation", crashes)
    monkeypatch.setenv("FLWR_HOME", "")  # which it sets
    said = refused("simulate", DIGITS, "--engine", "flower", cwd=tmp_path)
    assert said == "error: Ray cannot run the workers: nobody there"
    assert list(tmp_path.iterdir()) == []
