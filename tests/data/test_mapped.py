"""Tests of gathering rows of mapped fields: what is read from files is what the mapping shows."""

import copy
import os
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.data import UserStore, population
from fedpriv.errors import DataError

linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere files are mapped only")
ROWS = 4000
SPARSE = np.random.default_rng(0).permutation(np.arange(0, ROWS, 97).repeat(2))


@pytest.fixture(autouse=True)
def small_fields_are_read(monkeypatch):
    monkeypatch.setattr(population, "_LEAST_READ", 1)


@pytest.fixture
def folder(tmp_path):
    fields = {"x": np.arange(ROWS * 20.0).reshape(ROWS, 20), "y": np.arange(ROWS) * 10}
    UserStore(fields, np.array([0, ROWS])).save(tmp_path / "store")
    return tmp_path / "store"


def assert_taken(store, rows):
    taken = store.take(rows)
    assert list(taken) == ["x", "y"]
    np.testing.assert_array_equal(taken["x"], rows[..., None] * 20.0 + np.arange(20.0))
    np.testing.assert_array_equal(taken["y"], rows * 10)


@settings(deadline=None)
@given(
    rows=st.lists(st.integers(0, 499), max_size=30) | st.permutations(range(100, 130)),
    shape=st.sampled_from([(), (3,), (2, 2)]),
    dtype=st.sampled_from(["f4", "u1", ">i4", "?", "U3", "c8", "M8[s]"]),
    number=st.sampled_from(["i4", "u8", "i8"]),
    page=st.sampled_from([1, 64, 4096]),
    fault=st.sampled_from([1, 500, 65536]),
)
def test_rows_that_are_read_equal_those_of_the_array(
    tmp_path_factory, rows, shape, dtype, number, page, fault
):
    values = np.arange(500 * int(np.prod(shape))).reshape(500, *shape).astype(dtype)
    folder = tmp_path_factory.mktemp("store") / "saved"
    UserStore({"x": values, "y": np.arange(500)}, np.array([0, 500])).save(folder)
    asked = np.array(rows, number).reshape(-1, 2 if len(rows) % 2 == 0 else 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(population, "_PAGE", page)
        patch.setattr(population, "_FAULT", fault)
        taken = UserStore.load(folder).take(asked)
    for name, array in (("x", values), ("y", np.arange(500))):
        np.testing.assert_array_equal(taken[name], array[asked])
        assert (taken[name].dtype, type(taken[name])) == (array.dtype, np.ndarray)
        assert taken[name].flags.writeable


@given(rows=st.lists(st.integers(0, 60), min_size=1), near=st.integers(1, 9))
def test_runs_hold_all_rows_and_are_cut_at_wide_gaps_only(rows, near):
    distinct, which = np.unique(rows, return_inverse=True)
    runs = population.Runs.of(distinct, which, near)
    held = [range(f, f + n) for f, n in zip(runs.firsts, runs.counts, strict=True)]
    assert np.concatenate(held)[runs.places].tolist() == rows
    assert all(after[0] - before[-1] > near for before, after in pairwise(held))
    assert {run[0] for run in held} | {run[-1] for run in held} <= set(rows)
    for run in held:
        inside = [row for row in distinct if row in run]
        assert max(np.diff(inside), default=0) <= near


@linux
def test_what_is_read_is_not_mapped(folder, monkeypatch):
    def refuse(fields):
        assert not fields

    monkeypatch.setattr(population, "_release_pages", refuse)
    assert_taken(UserStore.load(folder), SPARSE)


@linux
def test_long_runs_and_small_fields_are_mapped(folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("it was read")

    monkeypatch.setattr(population.FieldFile, "read", refuse)
    monkeypatch.setattr(population, "_FAULT", ROWS * 8)
    assert_taken(UserStore.load(folder), np.arange(ROWS))
    monkeypatch.setattr(population, "_LEAST_READ", 2**24)
    assert_taken(UserStore.load(folder), SPARSE)


def test_another_file_at_the_path_is_not_read(folder):
    store = UserStore.load(folder)
    for name in ("x", "y"):
        path = folder / f"field-{name}.npy"
        path.unlink()
        np.save(path, np.zeros_like(store.fields[name]))
    assert_taken(store, SPARSE)


def test_a_file_that_is_gone_is_still_mapped(folder):
    store = UserStore.load(folder)
    (folder / "field-x.npy").unlink()
    assert_taken(store, SPARSE)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_store_is_in_memory_and_reads_no_file(folder, duplicate):
    copied = duplicate(UserStore.load(folder))
    with (folder / "field-y.npy").open("r+b") as file:
        file.seek(-ROWS * 8, os.SEEK_END)
        file.write(bytes(ROWS * 8))
    assert_taken(copied, SPARSE)


@linux
def test_a_file_that_was_cut_is_refused(folder):
    store = UserStore.load(folder)
    os.truncate(folder / "field-x.npy", 5000)
    with pytest.raises(DataError, match=r"field-x\.npy was cut"):
        store.take(SPARSE)


@linux
def test_no_descriptor_stays_open(folder):
    store = UserStore.load(folder)
    before = set(Path("/proc/self/fd").iterdir())
    assert_taken(store, SPARSE)
    os.truncate(folder / "field-x.npy", 5000)
    with pytest.raises(DataError, match="cut"):
        store.take(SPARSE)
    assert set(Path("/proc/self/fd").iterdir()) == before


@linux
def test_a_read_that_ends_early_is_continued(folder, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, to, at, how=0: real(file, [to[0][:7]], at, how))
    assert_taken(UserStore.load(folder), SPARSE)


@linux
@pytest.mark.parametrize("kind", [BlockingIOError, OSError, None])
@pytest.mark.parametrize("cached", [0, 1, 5, 10**9])
def test_the_disk_is_asked_for_what_the_cache_does_not_hold(folder, monkeypatch, cached, kind):
    at_once, asked, read = [], [], os.preadv

    def preadv(file, to, at, how=0):
        if not how:
            return read(file, to, at)
        at_once.append(at)
        if len(at_once) <= cached:
            return read(file, to, at)
        if kind is None:
            return read(file, [to[0][:7]], at)
        raise kind

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, at, *_: asked.append(at))
    store = UserStore.load(folder)
    rows = SPARSE[SPARSE % 2 == 0]
    taken = population.gathered({"x": store.fields["x"]}, {"x": store._files["x"]}, rows, {})
    np.testing.assert_array_equal(taken["x"], rows[..., None] * 20.0 + np.arange(20.0))
    runs = len(set(rows.tolist()))
    assert (len(at_once), len(asked)) == (min(cached + 1, runs), max(0, runs - cached))
    assert asked == sorted(asked)
    assert set(asked).isdisjoint(at_once[:cached])


def test_threads_may_take_at_the_same_time(folder):
    store = UserStore.load(folder)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda first: assert_taken(store, (SPARSE + first) % ROWS), range(40)))


@linux
def test_a_path_relative_to_another_folder_is_still_found(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    store = UserStore.load("store")
    monkeypatch.chdir("/")
    assert all(Path(file.path).is_absolute() for file in store._files.values())
    assert_taken(store, SPARSE)
