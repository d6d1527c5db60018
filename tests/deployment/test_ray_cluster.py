"""A cluster of Ray that is up: `RAY_ADDRESS=… fedpriv simulate --engine flower`.

All tests that need workers of Ray, and not a Ray of their own, share one cluster.
"""

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

import datasets
import numpy as np
import pytest

from fedpriv.data import load_population
from tests.deployment.digits import DIGITS, NOISELESS, assert_same_model, in_process
from tests.deployment.processes import await_that, clear

ROOT = Path(__file__).parents[2]

# Ray would open the port of its client server on all interfaces, without any authentication.
HOOK = """
def close(parameters, head):
    parameters.ray_client_server_port = None
"""


KIND = "dropout"  # which draws, and trains one user at a time
# Images of DIGITS saved as a dataset, whose partitioner makes users of unequal size.
DEALT = """
[data]
name = "hugging-face"

[data.options]
train = "{folder}/train"
test = "{folder}/test"
partitioner = "DirichletPartitioner"

[data.options.arguments]
num_partitions = 40
partition_by = "label"
alpha = 0.5
min_partition_size = 0
"""


Cluster = tuple[subprocess.Popen[bytes], dict[str, str]]
"""The head, and the environment of its users."""


@pytest.fixture(scope="module")
def with_fedpriv(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose workers have the code, and the tests'."""
    with cluster(tmp_path_factory.mktemp("cluster"), Path(sys.executable), str(ROOT)) as made:
        yield made


@pytest.mark.slow
def test_a_cluster_gives_what_one_process_gives_and_stays_up(
    with_fedpriv: Cluster, tmp_path: Path
) -> None:
    head, environment = with_fedpriv
    in_process(tmp_path / "here")
    done = simulate(tmp_path, environment)
    assert done.returncode == 0, done.stderr
    assert head.poll() is None
    assert_same_model(tmp_path / "here", tmp_path / "there")


@pytest.mark.slow
def test_a_dealt_dataset_is_the_same_population_for_workers(
    with_fedpriv: Cluster, tmp_path: Path
) -> None:
    experiment = dealt_digits(tmp_path)
    in_process(tmp_path / "here", experiment=experiment)
    done = simulate(tmp_path, with_fedpriv[1], experiment)
    assert done.returncode == 0, done.stderr
    assert_same_model(tmp_path / "here", tmp_path / "there")


@pytest.mark.slow
def test_one_user_moves_one_vector_and_nothing_else(with_fedpriv: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.deployment.additive_on_ray", KIND],
        cwd=ROOT,
        env=with_fedpriv[1] | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, [KIND]), done.stderr


@pytest.mark.slow
def test_a_cluster_without_the_code_is_refused_before_anything_is_charged(tmp_path: Path) -> None:
    # Another environment on the same machine, which has all but fedpriv.
    venv.create(tmp_path / "bare", symlinks=True)
    with cluster(tmp_path, tmp_path / "bare" / "bin" / "python") as (_, environment):
        done = simulate(tmp_path, environment)
    assert done.returncode == 2, done.stderr
    # Nothing else, such as pages of Flower's.
    assert re.fullmatch("error: .*; fedpriv must be installed there\n", done.stderr)
    assert not (tmp_path / "there").exists()


def dealt_digits(folder: Path) -> Path:
    """Write images of DIGITS into a folder, and an experiment on them."""
    digits = load_population("digits", {"users": 1})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for split, rows in (("train", digits.users.fields), ("test", digits.test)):
        images = [(16 * image[0]).astype(np.uint8) for image in rows["x"]]
        columns = {"image": images, "label": rows["y"]}
        datasets.Dataset.from_dict(columns, features=features).save_to_disk(folder / split)
    start, rest = DIGITS.read_text(encoding="utf-8").split("[data]")
    model = rest[rest.index("[model]") :]
    file = folder / "dealt.toml"
    file.write_text(start + DEALT.format(folder=folder) + model, encoding="utf-8")
    return file


def simulate(
    folder: Path, environment: Mapping[str, str], experiment: Path = DIGITS
) -> subprocess.CompletedProcess[str]:
    """`fedpriv simulate` on a cluster, into the folder `there`."""
    given = [f"--set={text}" for text in NOISELESS]
    command = [sys.executable, "-c", "from fedpriv.cli import main; main()", "simulate"]
    return subprocess.run(
        [*command, experiment, *given, "--engine=flower", "--workers=2", "--out=there"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300.0,
    )


@contextmanager
def cluster(folder: Path, python: Path, *code: str) -> Iterator[Cluster]:
    """A cluster of two cores that runs this Python, with more folders of code.

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
    of_head = {"PYTHONPATH": os.pathsep.join([str(folder), get_path("purelib"), *code])}
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as scratch,  # paths of sockets must be short
        (folder / "head.log").open("wb") as log,
    ):
        head = subprocess.Popen(
            [
                *(python, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
                *("--port=0", "--min-worker-port=0", "--max-worker-port=0"),  # all free ones
                *("--num-cpus=2", "--include-dashboard=false", f"--temp-dir={scratch}"),
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
