"""The benchmark of scale: that it measures what it says, not how fast anything is."""

import json
import multiprocessing
import os
import time
import warnings
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.run.folder import read_run
from fedpriv.studies import read_study
from simulations import scale
from simulations.scale import (
    Found,
    Rounds,
    Scale,
    apart,
    cpu_seconds,
    fill,
    keep,
    ledger_seconds,
    long_run,
    measure,
    mebibytes,
    of_cohorts,
    of_data,
    peak_mebibytes,
    resumed,
    rounds_on,
    saved,
    study_of,
    summary,
)


@pytest.mark.slow
def test_a_small_scale_is_measured(tmp_path: Path) -> None:
    found = measure(Scale(users=3_000, fewer=300, cohort=20, rounds=2, streamed=30), tmp_path)
    assert [len(found.seconds), len(found.seconds_of_fewer)] == [2, 2]
    assert min(*found.seconds, *found.seconds_of_fewer, found.streamed_seconds) > 0.0
    assert found.streamed_mebibytes == pytest.approx(30 * 50 * (784 * 4 + 8) / 2**20, rel=1e-3)
    assert 0.0 < found.peak_mebibytes <= found.streamed_peak_mebibytes


def test_memory_of_all_processes_counts_once() -> None:
    before = mebibytes()
    block = np.frombuffer(mmap(-1, 50 * 2**20), np.float64)  # the allocator may have kept some
    block[:] = 1.0
    alone = mebibytes()
    assert 45.0 < alone - before < 60.0
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do nothing here
        child = context.Process(target=_hold, args=(theirs,))
        child.start()
    ours.recv()
    together = mebibytes()
    ours.send(None)
    child.join()
    ours.close()
    theirs.close()
    assert 28.0 < together - alone < 60.0
    assert block.sum() == block.size


def _hold(end: Connection) -> None:
    block = np.ones(30 * 2**17)
    end.send(block.size)
    end.recv()


def test_a_population_is_made_in_parts_and_mapped(tmp_path: Path) -> None:
    store = saved(tmp_path / "store", users=25, examples=50, shape=(8_000,))
    assert store.population == 25
    assert set(np.diff(store.offsets).tolist()) == {50}
    assert isinstance(store.fields["x"], np.memmap)
    # Ten users fit in a part; other parts hold other numbers.
    firsts = store.fields["x"][::500, 0]
    assert len(set(firsts.tolist())) == len(firsts) == 3


def test_the_summary_by_hand() -> None:
    found = Found(
        seconds=[1.1, 9.0, 1.0],
        seconds_of_fewer=[0.5, 1.0, 8.0],
        sampling_seconds=0.01,
        peak_mebibytes=700.0,
        streamed_mebibytes=3000.0,
        streamed_peak_mebibytes=800.0,
        streamed_seconds=20.0,
    )
    numbers = summary(found)
    assert numbers["ratio"] == pytest.approx(1.1)
    assert numbers["most MiB of memory after a round, with both"] == 700.0
    assert numbers["most MiB of memory until after it"] == 800.0


def test_a_measurement_apart_has_another_process() -> None:
    assert apart(os.getpid) != os.getpid()


def test_time_and_memory_count_children() -> None:
    seconds, peak = cpu_seconds(), peak_mebibytes()
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do nothing here
        child = context.Process(target=_work, args=(theirs,))
        child.start()
    spent = ours.recv()
    assert cpu_seconds() - seconds > 0.9 * spent > 0.0
    assert peak_mebibytes() > 1.2 * peak
    ours.send(None)
    child.join()
    ours.close()
    theirs.close()


def _work(end: Connection) -> None:
    while time.process_time() < 0.3:
        pass
    end.send(0.3)
    end.recv()


@pytest.mark.parametrize("large", [False, True])
def test_rounds_on_a_store_are_whole_ones(tmp_path: Path, large: bool) -> None:
    shape = (784,) if large else (16,)
    saved(tmp_path / "store", 30, 4, shape)
    found = rounds_on(tmp_path / "store", 10, 3, large=large)
    assert (found.users, found.cohort) == (30, 10)
    assert found.mebibytes == pytest.approx(30 * 4 * (shape[0] * 4 + 8) / 2**20, rel=0.2)
    assert len(found.seconds) == len(found.cpu_seconds) == 3
    assert min(found.seconds) > 0.0
    assert found.peak_mebibytes > found.mebibytes
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_users_per_second_are_those_of_all_rounds() -> None:
    rounds = Rounds(100, 30, 1.0, seconds=[9.0, 9.0], cpu_seconds=[1.0, 3.0], peak_mebibytes=1.0)
    assert rounds.users_per_cpu_second == 15.0


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_run_that_was_brought_to_a_late_round_goes_on_as_any_other(
    tmp_path: Path, adaptive: bool
) -> None:
    out = tmp_path / "run"
    resumed(out, 400, 2, adaptive=adaptive)
    fill(out, 60, adaptive=adaptive)
    epsilon, *costs = resumed(out, 400, 3, adaptive=adaptive)
    assert min(costs) > 0.0
    record = read_run(out)  # each release has its charge, and each charge its cohort
    assert record.verification.cohorts
    assert [result.round for result in record.rounds] == list(range(1, 64))
    assert [row.round for row in record.ledger.charges] == list(range(1, 64))
    # Norms of two of the five rounds that train may agree.
    assert len(set(record.ledger.events)) in (range(58, 64) if adaptive else (1,))
    charged, last = record.ledger.events, record.rounds[-1]
    assert (last.round, last.epsilon) == (63, epsilon)
    assert epsilon == ACCOUNTANTS["tight"].upper_epsilon(charged, 1e-3)
    open_seconds, verify_seconds = ledger_seconds(out / "ledger.sqlite")
    assert min(open_seconds, verify_seconds) > 0.0


def test_parts_are_kept_beside_others(tmp_path: Path) -> None:
    file = tmp_path / "scale.json"
    for part, number in (("data", 1), ("arms", 2), ("data", 3)):
        keep(file, part, {"number": number})
    kept = json.loads(file.read_text())
    assert {part: each["number"] for part, each in kept.items()} == {"data": 3, "arms": 2}
    assert set(kept["arms"]) == {"command", "machine", "versions", "number"}


@pytest.mark.slow
def test_all_parts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_PART", 100_000)
    data = of_data(tmp_path / "data", users=60, fewer=20, cohort=8, rounds=4)
    assert [(found.users, len(found.seconds)) for found in data] == [(20, 4), (60, 4)]
    cohorts = of_cohorts(tmp_path / "cohorts", 200, {10: 2, 100: 1})
    assert [(found.users, found.cohort) for found in cohorts] == [(200, 10), (200, 100)]
    first, second = long_run(tmp_path / "rounds", 30, [5, 20], 3, adaptive=False)
    assert (first.round, second.round) == (5, 20)
    assert 0.0 < first.epsilon < second.epsilon < 8.0
    assert first.ledger_mebibytes < second.ledger_mebibytes
    assert len(read_run(tmp_path / "rounds" / "run").rounds) == 23
    study = study_of(tmp_path, 2, rounds=1)
    assert study.arms == len(read_study(tmp_path / "2-arms").arms) == 2
    assert study.report_mebibytes > 0.1
