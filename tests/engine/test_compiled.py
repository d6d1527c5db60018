"""Compiled steps against those that are not, and what becomes of a run that cannot have any."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.data.store import UserStore
from fedpriv.engine import compiling
from fedpriv.engine.batches import Batches
from fedpriv.engine.compiled import CompiledStep, step_of
from fedpriv.engine.local import train_chunk
from fedpriv.engine.schedule import schedule
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.federated.transport import LocalTraining, RoundRequest
from fedpriv.losses import cross_entropy
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import flat
from fedpriv.privacy.layout import Layout

CPU = torch.device("cpu")
KEY = bytes(range(32))
SIZES = [5, 0, 1, 12, 7, 7, 3, 30, 2, 11, 9, 8, 4, 6, 10, 12, 12, 11, 9, 7, 8, 5, 6, 13] * 3
RAISING = 5
LOCAL = LocalTraining(0.1, batch_size=4, epochs=2)


class OwnWeights(nn.Module):
    """Layers that the engine does not know; the gradient at an example of zeros is NaN."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(6, 3, generator=generator) / 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.w
        return torch.tanh(self.norm(x / x.norm(dim=-1, keepdim=True))) * self.scale


def make_users() -> UserStore:
    rng, rows = np.random.default_rng(0), sum(SIZES)
    fields = {
        "x": rng.standard_normal((rows, 6)).astype(np.float32),
        "y": rng.integers(0, 3, rows),
    }
    return UserStore(fields, np.concatenate([[0], np.cumsum(SIZES)]).astype(np.int64))


def batches_of(users: UserStore, chosen: list[int], local: LocalTraining) -> Batches:
    positions = np.array(chosen)
    plan = schedule(positions, users.offsets[positions], users.sizes[positions], local, KEY)
    fields = users.take(plan.rows)
    return Batches.of(plan, fields["x"], fields["y"], CPU)


def request_to_all(task: Task, shift: float = 0.0) -> RoundRequest:
    """A request whose model is not quite that of the task."""
    parameters = {name: p + np.float32(shift) for name, p in task.parameters().items()}
    statistics = {name: s + np.float32(shift) for name, s in task.statistics().items()}
    layout = Layout.of(parameters)
    clipping = Clipping(layout, flat(layout, 0.3))
    users = np.arange(len(SIZES))
    return RoundRequest("run", 0, 0, parameters, clipping, LOCAL, users, KEY, statistics=statistics)


@pytest.mark.parametrize(
    "local",
    [
        LOCAL,
        LocalTraining(0.1, batch_size=5, epochs=2, momentum=0.5),
        LocalTraining(0.1, steps=3, proximal=0.7),
    ],
)
@pytest.mark.parametrize("lanes", [4, 6])
def test_padding_changes_nobodys_update(local: LocalTraining, lanes: int) -> None:
    task, users = Task(OwnWeights(), cross_entropy), make_users()
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    batches = batches_of(users, [0, 3, 4, 6], local)
    step = CompiledStep(local, lanes, 14, step_of(task, local))
    given = (parameters, task.constants(CPU), batches)
    expected, found = train_chunk(task, *given, local), step.train(*given)
    assert list(found) == list(parameters)
    for name, update in expected.items():
        assert bool(update.abs().amax(dim=tuple(range(1, update.dim()))).all())
        torch.testing.assert_close(found[name], update)


@pytest.mark.parametrize(
    ("lanes", "width", "local", "fits"),
    [
        (4, 4, LOCAL, True),
        (8, 4, LOCAL, True),
        (4, 8, LOCAL, True),
        (9, 4, LOCAL, False),
        (3, 4, LOCAL, False),
        (4, 3, LOCAL, False),
        (4, 12, LocalTraining(0.1, steps=1), False),
        (4, 12, LocalTraining(0.1, steps=2), True),
    ],
)
def test_steps_are_for_users_who_fill_half_of_them(
    lanes: int, width: int, local: LocalTraining, fits: bool
) -> None:
    batches = batches_of(make_users(), [3, 15, 9, 4], local)
    assert CompiledStep(local, lanes, width, step_of).fits(batches) == fits


def test_known_layers_are_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    task = Task(nn.Linear(6, 3), cross_entropy)
    request, users = request_to_all(task), make_users()
    caplog.set_level(logging.INFO, "fedpriv")
    transports = [InProcessTransport(task, users, CPU, 10**9, compiled_for=r) for r in (0, 9)]
    totals = [sum(part.total for part in each.collect(request)) for each in transports]
    list(transports[1].collect(request))
    assert [record.message for record in caplog.records] == [
        "local steps are not compiled, as these would gain nothing"
    ]
    np.testing.assert_array_equal(*totals)


def by_what_is_said(
    said: str, rounds: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> list[bool]:
    """Train as without; returns of which rounds a chunk trained by a step that was "compiled"."""
    caplog.set_level(logging.INFO, "fedpriv")
    monkeypatch.setattr(compiling, "_compile", lambda graph, _given, _options: graph)
    task, users = Task(OwnWeights(), cross_entropy), make_users()
    plain, compiled = (
        InProcessTransport(task, users, CPU, 10**9, compiled_for=r) for r in (0, rounds)
    )
    whole, used = CompiledStep.train, []

    def train(step: CompiledStep, *given: object) -> object:
        used.append(True)
        return whole(step, *given)

    monkeypatch.setattr(CompiledStep, "train", train)
    request = request_to_all(task)
    for _ in range(2):
        totals = [sum(p.total for p in each.collect(request)) for each in (plain, compiled)]
        np.testing.assert_allclose(*totals, rtol=1e-4, atol=1e-6)
    (line,) = [r.message for r in caplog.records if r.name == "fedpriv.engine.compiling"]
    assert said in line
    return used


@pytest.mark.parametrize(("rounds", "compiled"), [(29, False), (31, True)])
def test_a_run_that_is_too_short_does_not_compile(
    rounds: int,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    steps = sum(2 * -(-size // 4) for size in SIZES)
    chunk = -(-len(SIZES) // torch.get_num_threads())
    seconds = iter([60.0 * chunk * 8 * torch.get_num_threads() / steps / 30, 1e-9])
    monkeypatch.setattr(compiling, "seconds_of", lambda *_: next(seconds))
    said = "were compiled in" if compiled else "this run is too short to gain by it"
    assert any(by_what_is_said(said, rounds, monkeypatch, caplog)) == compiled


@pytest.mark.parametrize(("gain", "used"), [(0.8, False), (1.1, False), (1.3, True)])
def test_what_is_no_faster_is_not_used(
    gain: float, used: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    together = -(-len(SIZES) // torch.get_num_threads())
    chunks = -(-together // 16)
    seconds = iter([1e9 * gain * chunks, 1e9])
    monkeypatch.setattr(compiling, "seconds_of", lambda *_: next(seconds))
    said = f"{'s:' if used else 'are not used:'} they are {gain:.2f} times as fast"
    assert any(by_what_is_said(said, 1, monkeypatch, caplog)) == used


@pytest.mark.slow
def test_sums_are_those_of_steps_that_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    seconds = iter([1e9, 1.0])
    monkeypatch.setattr(compiling, "seconds_of", lambda *_: next(seconds))
    caplog.set_level(logging.INFO, "fedpriv")
    task, users = Task(OwnWeights(), cross_entropy), make_users()
    users.fields["y"][users.rows_of(RAISING)] = 99
    trained: list[int] = []
    whole = CompiledStep.train

    def train(step: CompiledStep, *given: object) -> object:
        found = whole(step, *given)
        trained.extend(range(len(found["w"])))
        return found

    monkeypatch.setattr(CompiledStep, "train", train)
    plain, compiled = (InProcessTransport(task, users, CPU, 10**9, compiled_for=r) for r in (0, 9))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        for shift in (0.0, 0.3):
            request = request_to_all(task, shift)
            expected, found = (list(each.collect(request)) for each in (plain, compiled))
            assert sum(p.users for p in found) == sum(p.users for p in expected)
            totals = [sum(part.total for part in parts) for parts in (found, expected)]
            assert np.any(totals[0])
            np.testing.assert_allclose(*totals, rtol=1e-4, atol=1e-6)
    finally:
        torch.set_num_threads(before)
    (said,) = [r.message for r in caplog.records if r.name == "fedpriv.engine.compiling"]
    assert said.startswith("local steps were compiled in")
    assert len(trained) >= len(SIZES) / 3


WITHOUT_COMPILER = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(name)s %(message)s")
sys.path.insert(0, sys.argv[1])
from test_compiled import *
task, users = Task(OwnWeights(), cross_entropy), make_users()
request = request_to_all(task)
plain, compiled = (InProcessTransport(task, users, CPU, 10**9, compiled_for=r) for r in (0, 10**12))
expected = sum(p.total for p in plain.collect(request))
for _ in range(2):
    parts = list(compiled.collect(request))
    np.testing.assert_array_equal(sum(p.total for p in parts), expected)
    assert sum(p.users for p in parts) == sum(size > 0 for size in SIZES)
"""


@pytest.mark.slow
def test_without_a_compiler_one_line_says_so_and_users_train_all_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_COMPILER, str(Path(__file__).parent)],
        env=os.environ | {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (line,) = [each for each in done.stderr.splitlines() if each.startswith("fedpriv")]
    assert "local steps are not compiled" in line
    assert "No working C++ compiler" in line
