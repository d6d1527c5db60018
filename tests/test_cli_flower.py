"""What `fedpriv simulate --engine flower` refuses before Ray is started."""

from pathlib import Path

import pytest

from tests.commandline import refused
from tests.deployment.superlink import free_port

DIGITS = Path(__file__).parents[1] / "simulations" / "digits.toml"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--workers", "2"], "only --engine flower has workers"),
        (["--engine", "flower", "--workers", "0"], "--workers"),
        (["--engine", "flower", "--workers", "288"], "from 1 to 287"),
        (["--engine", "gossip"], "--engine"),
        (
            ["--engine", "flower", "--set", "output.simulation_only=true"],
            "output.simulation_only is true; on workers it must be false",
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
    for name in ("FLWR_HOME", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):  # which it sets
        monkeypatch.setenv(name, "")
    said = refused("simulate", DIGITS, "--engine", "flower", cwd=tmp_path)
    assert said == "error: Ray cannot run the workers: nobody there"
    assert list(tmp_path.iterdir()) == []
