"""A simulation on Flower's runtime with two workers of Ray is the simulation in this process."""

import os
import subprocess
import sys
import tempfile
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import pytest
from safetensors.numpy import load_file

from fedpriv.data import load_population
from fedpriv.server.folder import RunFolder
from tests.server.loopback import until

DIGITS = Path(__file__).parents[2] / "simulations" / "digits.toml"
FREE_OF_NOISE = (
    "rounds=3",
    "seed=7",
    "privacy.noise_multiplier=0.0",
    "privacy.unsafe_no_privacy=true",
)
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


# Images of DIGITS saved as a dataset, whose partitioner makes users of unequal size.
DEALT = """
[data]
name = "hugging-face"

[data.options]
train = "images/train"
test = "images/test"
partitioner = "DirichletPartitioner"

[data.options.arguments]
num_partitions = 40
partition_by = "label"
alpha = 0.5
min_partition_size = 0
"""


def dealt_digits(folder: Path) -> None:
    """Write an experiment on images of DIGITS, and the images, into a folder."""
    digits = load_population("digits", {"users": 1})
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    for split, rows in (("train", digits.users.fields), ("test", digits.test)):
        images = [(16 * image[0]).astype(np.uint8) for image in rows["x"]]
        columns = {"image": images, "label": rows["y"]}
        saved = datasets.Dataset.from_dict(columns, features=features)
        saved.save_to_disk(folder / "images" / split)
    start, rest = DIGITS.read_text(encoding="utf-8").split("[data]")
    model = rest[rest.index("[model]") :]
    (folder / "dealt.toml").write_text(start + DEALT + model, encoding="utf-8")


def simulate(folder: Path, name: str, *arguments: str, **environment: str) -> str:
    """Run `fedpriv simulate` in a folder, and return what it printed."""
    assignments = [f"--set={text}" for text in FREE_OF_NOISE]
    command = [sys.executable, "-c", "from fedpriv.cli import main; main()"]
    done = subprocess.run(
        [*command, "simulate", "dealt.toml", *assignments, "--out", name, *arguments],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path so short that Ray can have sockets in it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def processes_with(mark: str) -> list[str]:
    """Processes that were started with something in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.slow
def test_two_workers_give_what_one_process_gives_and_leave_nothing(
    tmp_path: Path, short: Path
) -> None:
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    looked_up, mark = tmp_path / "looked_up", uuid.uuid4().hex
    looked_up.touch()
    dealt_digits(tmp_path)
    simulate(tmp_path, "here")
    said = simulate(
        tmp_path,
        "there",
        "--engine=flower",
        "--workers=2",
        MARK=mark,
        HOME=str(tmp_path / "home"),
        PYTHONPATH=str(tmp_path / "hook"),
        LOOKED_UP=str(looked_up),
        RAY_TMPDIR=str(short),
    )
    until(lambda: processes_with(mark) == [])  # workers that were told to end
    assert list(short.iterdir()) == []
    assert not (tmp_path / "home" / ".flwr").exists()
    # Ray asks the machine's own cloud, if it is in one, which it is; it says nothing of the run.
    own = {"None", "localhost", os.uname().nodename, "metadata.google.internal"}
    strangers = {h for h in looked_up.read_text().split() if h not in own and not is_address(h)}
    assert strangers == set()
    assert "Warning" not in said
    here, there = (load_file(tmp_path / run / "model.safetensors") for run in ("here", "there"))
    assert here.keys() == there.keys()
    for name, parameter in here.items():
        assert parameter.any()
        np.testing.assert_allclose(there[name], parameter, atol=1e-6)
    plans = [tomllib.loads((tmp_path / run / "plan.toml").read_text()) for run in ("here", "there")]
    assert plans[0] == plans[1]
    losses = [
        [row["test_loss"] for row in RunFolder(tmp_path / run).read_metrics()]
        for run in ("here", "there")
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def is_address(host: str) -> bool:
    """Whether nothing is asked to look it up."""
    return host.replace(".", "").isdigit()
