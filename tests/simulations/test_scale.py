"""The benchmark of scale: that it measures what it says, not how fast anything is."""

import multiprocessing
import warnings
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from simulations.scale import Found, Scale, measure, mebibytes, saved, summary


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
