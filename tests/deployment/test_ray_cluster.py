"""A cluster of Ray that is up: `RAY_ADDRESS=… fedpriv simulate --engine flower`."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
import uuid
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from sysconfig import get_path

import pytest

from tests.deployment.digits import DIGITS, NOISELESS, assert_same_model, in_process
from tests.deployment.processes import clear
from tests.deployment.superlink import await_that

# Ray would open the port of its client server on all interfaces, without any authentication.
HOOK = """
def close(parameters, head):
    parameters.ray_client_server_port = None
"""


@pytest.mark.slow
def test_a_cluster_gives_what_one_process_gives_and_stays_up(tmp_path: Path) -> None:
    in_process(tmp_path / "here")
    with cluster(tmp_path, Path(sys.executable)) as (head, environment):
        done = simulate(tmp_path, environment)
        assert done.returncode == 0, done.stderr
        assert head.poll() is None
    assert_same_model(tmp_path / "here", tmp_path / "there")


@pytest.mark.slow
def test_a_cluster_without_the_code_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    # Another environment on the same machine, which has all but fedpriv.
    venv.create(tmp_path / "bare", symlinks=True)
    with cluster(tmp_path, tmp_path / "bare" / "bin" / "python") as (_, environment):
        done = simulate(tmp_path, environment)
    assert done.returncode == 2
    # Nothing else, such as pages of Flower's.
    assert re.fullmatch("error: .*; fedpriv must be installed there\n", done.stderr)
    assert not (tmp_path / "there").exists()


def simulate(folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`fedpriv simulate` on a cluster, into the folder `there`."""
    given = [f"--set={text}" for text in NOISELESS]
    command = [sys.executable, "-c", "from fedpriv.cli import main; main()", "simulate"]
    return subprocess.run(
        [*command, DIGITS, *given, "--engine=flower", "--workers=2", "--out=there"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300.0,
    )


@contextmanager
def cluster(folder: Path, python: Path) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, str]]]:
    """A cluster of two cores that runs this Python: its head, and the environment of its users.

    All that it has started ends with the block.
    """
    (folder / "hook.py").write_text(HOOK, encoding="utf-8")
    mark = uuid.uuid4().hex
    environment = os.environ | {
        "MARK": mark,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    of_head = {"PYTHONPATH": f"{folder}{os.pathsep}{get_path('purelib')}"}
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as scratch,  # paths of sockets must be short
        (folder / "head.log").open("wb") as log,
    ):
        head = subprocess.Popen(
            [
                *(python, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--port=0", "--num-cpus=2", "--include-dashboard=false", f"--temp-dir={scratch}"),
            ],
            cwd=folder,
            env=environment | of_head | {"RAY_START_HOOK": "hook.close"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            known = Path(scratch, "ray_current_cluster")
            await_that(lambda: known.exists() or head.poll() is not None)
            assert head.poll() is None, (folder / "head.log").read_text()
            port = known.read_text().rpartition(":")[2]
            yield head, environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
        finally:
            clear(mark)
            head.wait()
