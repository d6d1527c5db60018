"""`flwr run .`: the app trains on Flower's own simulation what one process trains."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedpriv.ledger.ledger import Ledger
from fedpriv.run.folder import RunFolder
from fedpriv.training.rounds import checkpoints, load_checkpoint
from tests.deployment.digits import NOISELESS, assert_same_model, in_process
from tests.deployment.processes import clear
from tests.deployment.sites import free_port

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(sys.executable).parent


@pytest.mark.slow
def test_flwr_run_leaves_what_one_process_leaves(tmp_path: Path) -> None:
    here, there = RunFolder(tmp_path / "here"), RunFolder(tmp_path / "there")
    in_process(here.path)
    given = f"set='{'; '.join(NOISELESS)}' out='{there.path}'"
    with connection(tmp_path) as environment:
        said = subprocess.run(
            [
                *(SCRIPTS / "flwr", "run", ROOT, "sim", "--stream", "--run-config", given),
                "--federation-config=num-supernodes=2 client-resources-num-cpus=1",
            ],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=300.0,
        ).stdout
        assert there.model.exists(), said
    assert_same_model(here.path, there.path)
    assert standing(there) == standing(here)
    assert "accuracy on held-out rows" in said
    assert files_in(there.path) == files_in(here.path)
    (bundle,) = (tmp_path / "flwr" / "apps").iterdir()
    assert files_in(bundle) == {"LICENSE", "pyproject.toml"}


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


def standing(folder: RunFolder) -> tuple[object, ...]:
    """What a run has charged, released and saved, but for times and parameters."""
    with Ledger.open(folder.ledger) as ledger:
        ledger.verify()
        charges = [(row.round, row.attempt, row.event) for row in ledger.charges()]
    rows = [(r["round"], r["attempt"], r["epsilon"]) for r in folder.read_metrics()]
    saved = [load_checkpoint(path) for path in checkpoints(folder.checkpoints)]
    return charges, rows, [(c.state.round, c.plan_digest, c.ledger_head.count) for c in saved]


def files_in(folder: Path) -> set[str]:
    """Paths of files below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
