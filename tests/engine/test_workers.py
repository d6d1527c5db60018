"""Chunks side by side in processes: the sums of one process, and nothing left behind."""

import fcntl
import gc
import logging
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray
from torch import nn

import fedpriv
from fedpriv.data.population import UserStore
from fedpriv.engine import forks
from fedpriv.engine.examples import Chunk
from fedpriv.engine.forks import PipeEnd
from fedpriv.engine.measuring import SimulationOnlyDiagnostics
from fedpriv.engine.roads import Path as Road
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.trainer import ChunkSum, SimulationOnlyDropped, Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.experiment.models import mlp
from fedpriv.privacy.clipping import Clipping, Indicator
from fedpriv.privacy.layout import Layout
from fedpriv.privacy.round import PartialSum, merge_sums
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import make_task, request_under, torch_threads, users_of
from tests.engine.test_transport import TestInProcessTransport as InOneProcess
from tests.engine.test_transport import transport_with

SIZES = [3, 8, 8, 8, 3, 8, 8, 8, 3, 8, 8, 8]


@pytest.fixture(scope="class", autouse=True)  # of a function that is in no class: for itself
def two_of_them() -> Iterator[None]:
    with torch_threads(2):
        yield
    transport_with.cache_clear()
    gc.collect()
    assert not multiprocessing.active_children()


class TestProcesses(InOneProcess):
    processes = 2


def parts(
    task: Task | None = None, path: Road = "together"
) -> tuple[InProcessTransport, RoundRequest]:
    """A transport of two processes, and a request to all of its users."""
    users = users_of(SIZES)
    task = task or make_task()
    request = request_under(task, LocalTraining(0.1, batch_size=4, epochs=2), len(SIZES), 0.3)
    given = task, users, torch.device("cpu"), 10**6
    return InProcessTransport(*given, processes=2, path=path), request


def summed(partials: Iterator[PartialSum]) -> tuple[int, list[int], int]:
    """Users, total and weight of all chunks; how many there are depends on the processes."""
    some = list(partials)
    whole = merge_sums("", some, len(some[0].total))
    return whole.users, whole.total.tolist(), whole.weight


@pytest.mark.parametrize("path", ["alone", "together"])
def test_sums_are_those_of_one_process_to_the_last_bit(path: Road) -> None:
    transport, request = parts(path=path)
    here = replace(transport, processes=1)
    expected = summed(here.collect(request))
    assert summed(transport.collect(request)) == expected
    assert len(multiprocessing.active_children()) == 2
    later = replace(request, round=1, local_key=bytes(32))
    changed = summed(transport.collect(later))
    assert changed == summed(here.collect(later)) != expected
    assert summed(transport.collect(request)) == expected


def test_requests_and_sums_of_any_size_find_their_way() -> None:
    transport, request = parts()
    before = request.clipping
    indicator = Indicator.of(before.groups)
    layout = Layout((*before.layout.names, indicator.tensor), (*before.layout.shapes, (1,)))
    longer = Clipping(layout, (*before.groups, indicator.group), indicator)
    for asked in (request, replace(request, clipping=longer), request):
        expected = summed(replace(transport, processes=1).collect(asked))
        assert len(expected[1]) == asked.clipping.layout.dimension
        assert summed(transport.collect(asked)) == expected


@given(
    arrays=st.lists(
        npst.arrays(
            st.sampled_from([np.float32, np.int64, np.uint8]), npst.array_shapes(min_side=0)
        ),
        max_size=6,
    ),
    size=st.integers(1, 500),
)
def test_messages_of_both_directions_arrive_whether_or_not_they_fit_in_the_memory(
    arrays: list[NDArray[np.generic]], size: int
) -> None:
    memory, pipe = mmap.mmap(-1, size), multiprocessing.Pipe()
    one, other = (PipeEnd(connection, memory) for connection in pipe)
    with pipe[0], pipe[1]:
        one.send(arrays)
        first = other.receive()
        other.send(first[::-1])  # overwrites the memory, not what came
        second = one.receive()
    for ours, theirs, returned in zip(arrays, first, reversed(second), strict=True):
        assert theirs.dtype == returned.dtype == ours.dtype
        assert theirs.tobytes() == returned.tobytes() == ours.tobytes()
        assert theirs.shape == returned.shape == ours.shape


def test_none_reaches_the_memory_of_another() -> None:
    transport, request = parts()
    list(transport.collect(request))
    shared = [
        {
            line.split()[4]
            for line in Path(f"/proc/{child.pid}/maps").read_text().splitlines()
            if "/dev/zero" in line
        }
        for child in multiprocessing.active_children()
    ]
    assert [len(inodes) for inodes in shared] == [1, 1]
    assert shared[0] != shared[1]


def test_an_answer_that_came_in_time_counts_however_late_it_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, request = parts(path="alone")
    sizes = transport.users.sizes
    chunks = transport.road(request).chunks(transport._trainer, request.local, request.users, sizes)
    crew = forks.Crew([], 2, transport._trainer, request, limit=1.0)
    shares = [{int(chunk.users[0]) for chunk in part} for part in forks.shared_out(chunks, 2)]
    now, ready = [0.0], forks.wait
    monkeypatch.setattr(forks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(forks, "wait", lambda ends, _: ready(ends, 60.0)[:1])
    answered, reasons = list[int](), list[str]()
    for users, chunk_sum in crew.sums(chunks):
        answered += users.tolist()
        reasons += chunk_sum.reasons
        left = sum(not share <= {*answered} for share in shares)
        while sum(fork.connection.poll() for fork in crew.forks) < left:
            time.sleep(0.001)
        now[0] += 100.0  # the caller takes long
    assert (sorted(answered), reasons) == (request.users.tolist(), [])


def test_an_observer_is_told_the_same() -> None:
    transport, request = parts()
    seen: list[SimulationOnlyDiagnostics] = []
    for count in (2, 1):
        list(replace(transport, processes=count, observer=seen.append).collect(request))
    assert seen[0] == seen[1]


class Ending(nn.Module):
    """Ends its process, or goes on for ever, on a row that no engine knows of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how, self.home = make_task().model, how, os.getpid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            odd = bool((x == 1e3).any())
        if odd and os.getpid() != self.home:
            time.sleep(1e6 if self.how == "sleeps" else 0.0)
            os._exit(1)
        return self.inner(x)


@pytest.mark.parametrize(
    ("path", "how", "limit"),
    [
        ("alone", "ends", None),
        ("alone", "ends", 60.0),
        ("alone", "sleeps", 3.0),
        ("together", "ends", None),
        ("together", "ends", 60.0),
    ],
)
def test_users_who_end_their_processes_cost_only_themselves(
    path: Road, how: str, limit: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    transport, request = parts(Task(Ending(how), cross_entropy), path)
    hostile = [4] if how == "sleeps" else [0, 4, 5]
    others = np.setdiff1d(request.users, hostile)
    honest = replace(transport)  # whose processes have the data as they are
    expected = summed(honest.collect(replace(request, users=others)))
    for user in hostile:
        transport.users.fields["x"][transport.users.rows_of(user).start] = 1e3
    dropped = list[SimulationOnlyDropped]()
    for each in (transport, replace(transport, on_dropped=dropped.append)):
        each = replace(each, limited=limit is not None)  # noqa: PLW2901
        done, sums = zip(*each.by_chunk(request, limit), strict=True)
        assert summed(iter(sums)) == expected
        assert sorted(np.concatenate(done).tolist()) == request.users.tolist()
    assert sorted(user.user for user in dropped) == hostile
    text = "a user counts as zero: it ended the process that trained it"
    assert [record.getMessage() for record in caplog.records] == len(hostile) * [text]


def test_processes_that_are_killed_between_rounds_are_replaced() -> None:
    transport, request = parts()
    expected = summed(transport.collect(request))
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert summed(transport.collect(request)) == expected


def test_none_outlives_a_run_that_something_still_refers_to(tmp_path: Path) -> None:
    x, y = np.eye(4, dtype=np.float32).repeat(60, 0), np.arange(4).repeat(60)
    people = fedpriv.Population.from_arrays(x, y, np.arange(240) // 6, held_out=(x, y))
    mechanism = fedpriv.Mechanism.poisson(q=1.0, clipping=fedpriv.Flat(1.0))
    mechanism = mechanism.with_noise(1.0, epsilon=20.0, delta=1e-3)
    seen = []
    gc.collect()
    gc.disable()  # figures leave frames behind that refer to each other, and so to the transport
    try:
        fedpriv.simulate(
            people,
            fedpriv.Task(nn.Linear(4, 4)),
            mechanism,
            local=fedpriv.SGD(0.1, batch_size=1, epochs=3),
            rounds=1,
            out=tmp_path / "run",
            trackers=[lambda _: seen.extend(multiprocessing.active_children())],
            quiet=True,
        )
        assert seen
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


def test_reasons_are_logged_here_without_the_text_of_an_exception(
    caplog: pytest.LogCaptureFixture,
) -> None:
    conformance = TestProcesses()
    list(conformance.transport().collect(conformance.request()))
    text = "a user counts as zero: training raised IndexError"
    assert [(record.getMessage(), record.process) for record in caplog.records] == [
        (text, os.getpid())
    ]


def test_what_a_model_logs_stays_there(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    honest, log = Trainer.sum_of, logging.getLogger("of a model")
    standard_error = os.fdopen(2, "w", closefd=False)  # which forks share
    monkeypatch.setattr(log, "handlers", [logging.StreamHandler(standard_error)])

    def logs(*args: object) -> ChunkSum:
        log.critical("7 of user 3")
        return honest(*args)

    transport, request = parts()
    expected = summed(replace(transport, processes=1).collect(request))
    monkeypatch.setattr(Trainer, "sum_of", logs)
    assert summed(transport.collect(request)) == expected
    assert not caplog.records
    assert "user 3" not in "".join(capfd.readouterr())


def test_users_may_be_mapped_from_files_which_stay_nobody_elses(tmp_path: Path) -> None:
    transport, request = parts()
    expected = summed(replace(transport, processes=1).collect(request))
    transport.users.save(tmp_path / "users")
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        mapped = replace(transport, users=UserStore.load(tmp_path / "users"))
        assert summed(mapped.collect(request)) == expected
        assert len(multiprocessing.active_children()) == 2
    with (tmp_path / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert summed(mapped.collect(request)) == expected


@pytest.mark.parametrize("seconds", [0, 600], ids=["idle", "busy"])
def test_they_end_with_a_process_that_is_killed(seconds: int) -> None:
    program = (
        "import multiprocessing, os, signal, threading, time\n"
        "from fedpriv.engine.trainer import ChunkSum, Trainer\n"
        "from fedpriv.privacy.round import merge_sums\n"
        "from tests.engine.test_workers import parts, torch_threads\n"
        f"zero = lambda *_: time.sleep({seconds}) or ChunkSum(merge_sums('', (), dimension))\n"
        "Trainer.sum_of = zero\n"
        "with torch_threads(2):\n"
        "    transport, request = parts()\n"
        "    dimension = request.clipping.layout.dimension\n"
        "    collecting = threading.Thread(target=lambda: list(transport.collect(request)))\n"
        "    collecting.start()\n"
        "    while collecting.is_alive() and len(multiprocessing.active_children()) < 2:\n"
        "        time.sleep(0.01)\n"
        f"    collecting.join(timeout={2 if seconds else 60})\n"
        "    print(*(child.pid for child in multiprocessing.active_children()), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", program]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, env=found, stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    children = [Path("/proc") / pid for pid in done.stdout.split()]
    assert len(children) == 2
    deadline = time.monotonic() + 60.0
    while any(child.exists() for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_is_raised_there_costs_only_those_for_whom_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    transport, request = parts()
    others = replace(request, users=np.setdiff1d(request.users, [4]))
    expected, honest = summed(replace(transport).collect(others)), Trainer.sum_of

    def odd(trainer: Trainer, asked: RoundRequest, chunks: list[Chunk]) -> ChunkSum:
        if any(4 in chunk.users for chunk in chunks):
            raise MemoryError("of user 4")
        return honest(trainer, asked, chunks)

    monkeypatch.setattr(Trainer, "sum_of", odd)
    assert summed(transport.collect(request)) == expected
    assert "user 4" not in "".join(capfd.readouterr())


def test_they_begin_after_others_have_trained_here() -> None:
    # What torch and NumPy keep for threads of this process must not stop those of another.
    transport, request = parts(Task(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)), cross_entropy))
    expected = summed(replace(transport, processes=1).collect(request))
    model = mlp()
    model(torch.randn(512, 1, 28, 28)).sum().backward()
    np.random.default_rng(0).standard_normal((512, 512)) @ np.ones((512, 512))
    assert summed(transport.collect(request)) == expected


@pytest.mark.slow
def test_they_compute_in_one_thread_whatever_threads_this_process_has() -> None:
    program = (
        "import torch\n"
        "from torch import nn\n"
        "from tests.engine.test_workers import InProcessTransport, LocalTraining, Task\n"
        "from tests.engine.test_workers import cross_entropy, replace, request_under, users_of\n"
        "torch.set_num_threads(4)\n"
        "torch.manual_seed(0)\n"
        "model = nn.Sequential(nn.Linear(400, 400), nn.ReLU(), nn.Linear(400, 3))\n"
        "model(torch.ones(512, 400)).sum().backward()\n"  # as an evaluation: they exist
        "task, users = Task(model, cross_entropy), users_of([64, 64, 64, 100, 100], (400,))\n"
        "request = request_under(task, LocalTraining(0.05, batch_size=32, epochs=1), 5, 0.3)\n"
        "transport = InProcessTransport(task, users, torch.device('cpu'), 2**27, processes=2)\n"
        "found = sum(partial.total for partial in transport.collect(request))\n"
        "torch.set_num_threads(1)\n"
        "single = replace(transport, processes=1)\n"
        "assert (found == sum(partial.total for partial in single.collect(request))).all()\n"
    )
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "4"}
    subprocess.run([sys.executable, "-c", program], env=found, timeout=60, check=True)


@pytest.mark.parametrize("why", ["another system", "a GPU"])
def test_there_are_none_where_they_cannot_help(
    why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if why == "another system":
        monkeypatch.setattr(sys, "platform", "darwin")
    if why == "a GPU":
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    transport, request = parts()
    assert list(transport.collect(request))
    assert not multiprocessing.active_children()
    told = ["users train in 1 process, not 2: none can be forked"]
    assert [record.getMessage() for record in caplog.records] == told


def test_a_daemon_trains_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    transport, request = parts()
    assert list(transport.collect(request))
    assert not multiprocessing.active_children()
