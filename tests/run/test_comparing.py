"""`fedpriv compare` with real processes: what is finished stands, what is not is run."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w

from fedpriv.studies import read_study
from fedpriv.studies.results import ALL_RESULTS, RESULT, read_results
from tests.commandline import printed, refused
from tests.studies.studying import BASE, study_file

MINE = """
import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
from torch import nn

from fedpriv.data import Population, from_arrays


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = nn.Linear(4, width)
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        if multiprocessing.parent_process() is not None:  # in a worker
            if Path("die").exists() and list(Path("part").glob("runs/*/*/*/result.json")):
                os.kill(os.getpid(), signal.SIGKILL)
            while Path("wait").exists():
                Path(f"waiting-{os.getpid()}").touch()
                time.sleep(0.01)
        return self.out(self.hidden(x).tanh())


def net(width=4):
    return Net(width)


def people(number):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((number * 5 + 60, 4)).astype(np.float32)
    y = x[:, :3].argmax(1).astype(np.int64)
    rows = number * 5
    users = from_arrays({"x": x[:rows], "y": y[:rows]}, np.arange(rows) % number)
    return Population("people of a test", users, {"x": x[rows:], "y": y[rows:]})
"""
OWN = BASE | {"model": "mine:net", "data": {"name": "mine:people", "options": {"number": 30}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def results(study: Path) -> dict[str, dict[str, object]]:
    """The results of a study without what depends on the clock."""
    found = {}
    for path in sorted(study.glob(f"runs/*/*/*/{RESULT}")):
        found[str(path.relative_to(study))] = json.loads(path.read_text())
        del found[str(path.relative_to(study))]["simulation_only_users_per_second"]
    return found


def test_a_study_of_an_own_model_and_own_data(folder: Path) -> None:
    axes = {"model.options.width": [2, 6]}
    (folder / "base.toml").write_text(tomli_w.dumps(OWN))
    file = study_file(folder, base="base.toml", axes=axes, seeds=[3, 5], baseline="width-6")
    told = printed("compare", file, "--workers", "1", cwd=folder)
    study = folder / "studies" / "tiny-study"
    assert "differences from width-6" in " ".join(told.split())
    assert "simulation only" in told
    read = read_study(study)
    assert read.missing == 0
    assert [arm.arm for arm in read.arms] == ["width-2", "width-6"]
    for run in read.runs:
        assert run.epsilon <= 8.0
        assert run.rounds == 2
    written = json.loads((study / "results.json").read_text())
    for row, arm in zip(written["arms"], read.arms, strict=True):
        assert row["arm"] == arm.arm
        assert row["accuracy"]["mean"] == arm.accuracy.mean
        assert row["accuracy"]["low"] == arm.accuracy.low
    assert read_results(study / ALL_RESULTS) == list(read.runs)
    # What was written is a study that runs again; here there is nothing left to run.
    before = {path: path.stat().st_mtime_ns for path in study.glob(f"runs/*/*/*/{RESULT}")}
    printed("compare", study / "study.toml", "--out", study, cwd=folder)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert len(before) == 4


@pytest.mark.slow
def test_a_process_that_dies_costs_its_run_and_the_same_command_goes_on(folder: Path) -> None:
    file = study_file(folder, base=OWN)
    (folder / "die").touch()
    sentence = refused("compare", file, "--out", "part", "--workers", "1", cwd=folder)
    assert "was killed, perhaps because memory ran out; finished runs are kept" in sentence
    (first,) = results(folder / "part")
    assert read_study(folder / "part").missing == 3
    stamp = (folder / "part" / first).stat().st_mtime_ns
    (folder / "die").unlink()
    printed("compare", file, "--out", "part", cwd=folder)
    assert (folder / "part" / first).stat().st_mtime_ns == stamp
    printed("compare", file, "--out", "whole", "--workers", "1", cwd=folder)
    assert results(folder / "part") == results(folder / "whole")
    assert len(results(folder / "whole")) == 4


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_however_it_ends(folder: Path, how: signal.Signals) -> None:
    file = study_file(folder, base=OWN)
    (folder / "wait").touch()
    # Of a shell in the background, a process inherits that it is not to be interrupted.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{start}; from fedpriv.cli import main; main()"
    command = [sys.executable, "-c", code, "compare", file, "--out", "part"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: list(folder.glob("waiting-*")))
            process.send_signal(how)
            _, told = process.communicate(timeout=60)
        finally:
            process.kill()
            (folder / "wait").unlink(missing_ok=True)
    until(lambda: not any(alive(int(path.name[8:])) for path in folder.glob("waiting-*")))
    assert results(folder / "part") == {}
    if how is signal.SIGINT:
        assert process.returncode == 130
        assert told == "interrupted; continue with the same command\n"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 180.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_study_that_another_process_is_at_is_left_alone(folder: Path) -> None:
    (folder / "part").mkdir()
    descriptor = os.open(folder / "part", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        sentence = refused("compare", study_file(folder), "--out", "part", cwd=folder)
    finally:
        os.close(descriptor)
    assert "part holds a study that another process uses" in sentence


def test_bad_input_is_refused_before_anything_is_written(folder: Path) -> None:
    file = study_file(folder, base=OWN | {"model": "mine:nett"})
    assert "arm 'flat': model 'mine:nett' cannot be imported" in refused(
        "compare", file, cwd=folder
    )
    assert "nowhere.toml cannot be read" in refused("compare", "nowhere.toml", cwd=folder)
    assert "base" in refused("compare", study_file(folder, base=3), cwd=folder)
    (folder / "run").mkdir()
    (folder / "run" / "plan.toml").write_text("")  # a report of both would be of the study alone
    taken = refused("compare", study_file(folder, base=OWN), "--out", "run", cwd=folder)
    assert "run holds a run already" in taken
    assert not (folder / "studies").exists()


@pytest.mark.slow
def test_a_run_that_fails_is_named_and_the_others_are_run(folder: Path) -> None:
    base = OWN | {"averaging": {"floor": 0.5}}
    bad = 'metrics.report={"mine:broken"={radius=1.0}}'
    (folder / "mine.py").write_text(MINE + BROKEN)
    file = study_file(folder, base=base, axes={"metric": {"bad": [bad], "good": []}})
    sentence = refused("compare", file, "--workers", "1", cwd=folder)
    assert "arm 'bad', seed 0: " in sentence
    assert sentence.endswith("; 1 more failed")
    read = read_study(folder / "studies" / "tiny-study")
    assert [(run.arm, run.seed) for run in read.runs] == [("good", 0), ("good", 1)]
    assert (folder / "studies" / "tiny-study" / "results.json").exists()


@pytest.mark.slow
def test_users_that_a_worker_cannot_read_end_the_study_in_a_sentence(folder: Path) -> None:
    base = OWN | {"data": {"name": "mine:gone"}}
    (folder / "mine.py").write_text(MINE + GONE)
    sentence = refused("compare", study_file(folder, base=base), "--workers", "1", cwd=folder)
    assert "arm 'flat', seed 0: " in sentence
    assert "the share is not there" in sentence


GONE = """
def gone():
    if multiprocessing.parent_process() is not None:
        raise ConnectionError("the share is not there")
    return people(30)
"""


BROKEN = """
def broken(outputs, targets):
    if multiprocessing.parent_process() is not None:
        raise ValueError("it is broken")
    return outputs[:, 0]
"""
