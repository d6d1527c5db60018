"""On Flower's own simulation: the example of an app with the strategy, and hostile ClientApps."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedpriv.accounting.accountants import epsilon
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord
from tests.deployment.processes import clear
from tests.deployment.sites import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent
APP = ROOT / "simulations" / "flower_app"
NODES, ROUNDS, DELTA = 20, 4, 1e-3


@contextmanager
def connection(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of commands for a SuperLink in memory, which the first of them starts.

    It goes on when the command has ended, with what it has started; all ends with the block.
    """
    home = folder / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "sim"\n[superlink.sim]\naddress = ":local-in-memory:"\n',
        encoding="utf-8",
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:  # paths of sockets must be short
        try:
            yield os.environ | {
                "FLWR_HOME": str(home),
                "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(free_port()),
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": os.urandom(32).hex(),
                "RAY_TMPDIR": scratch,
                "MARK": str(folder),
                "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
            }
        finally:
            clear(str(folder))


@pytest.mark.slow
def test_the_example_trains_and_says_what_its_ledger_holds(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    given = f"rounds={ROUNDS} nodes={NODES} ledger='{ledger}'"
    with connection(tmp_path) as environment:
        said = subprocess.run(
            [
                *(SCRIPTS / "flwr", "run", APP, "sim", "--stream", "--run-config", given),
                f"--federation-config=num-supernodes={NODES} client-resources-num-cpus=1",
            ],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300.0,
        ).stdout
    found = re.search(rf"after {ROUNDS} rounds, accuracy ([\d.]+) at ε = ([\d.]+)", said)
    assert found, said
    with (
        Ledger.open(ledger) as opened,
        ParticipationRecord.open(ledger.with_suffix(".participation.sqlite")) as record,
    ):
        opened.verify(record)
        charges, spent = list(opened.charges()), opened.spent()
    assert [charge.round for charge in charges] == list(range(1, ROUNDS + 1))
    assert {charge.event.sampling.population for charge in charges} == {NODES}
    price = epsilon(spent, DELTA).epsilon
    assert float(found[2]) == pytest.approx(price, rel=1e-12)
    assert 7.9 < price <= 8.0
    assert len(re.findall(rf"round \d of {ROUNDS} released, ε \d+\.\d{{3}} at δ 0.001", said)) == 4


@pytest.mark.slow
def test_hostile_nodes_count_as_they_do_in_one_process() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as scratch:  # paths of sockets must be short
        done = subprocess.run(
            [sys.executable, "-m", "tests.deployment.private_on_ray"],
            cwd=ROOT,
            env=os.environ | {"RAY_TMPDIR": scratch, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert (done.returncode, done.stdout.split("\n")[-2:]) == (0, ["as expected", ""]), done.stderr
