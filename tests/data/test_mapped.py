"""Tests of gathering rows of mapped fields: right values, and no memory that stays."""

import copy
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.data import UserStore

ROWS = 4000
SPARSE = np.random.default_rng(0).permutation(np.arange(0, ROWS, 97).repeat(2))


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
)
def test_rows_of_a_mapped_field_equal_those_of_the_array(
    tmp_path_factory, rows, shape, dtype, number
):
    values = np.arange(500 * int(np.prod(shape))).reshape(500, *shape).astype(dtype)
    folder = tmp_path_factory.mktemp("store") / "saved"
    UserStore({"x": values, "y": np.arange(500)}, np.array([0, 500])).save(folder)
    asked = np.array(rows, number).reshape(-1, 2 if len(rows) % 2 == 0 else 1)
    taken = UserStore.load(folder).take(asked)
    for name, array in (("x", values), ("y", np.arange(500))):
        np.testing.assert_array_equal(taken[name], array[asked])
        assert (taken[name].dtype, type(taken[name])) == (array.dtype, np.ndarray)
        assert taken[name].flags.writeable


def test_sparse_rows_and_whole_stretches_are_taken(folder):
    store = UserStore.load(folder)
    for rows in (SPARSE, np.arange(ROWS), np.arange(ROWS - 700, ROWS), np.array([ROWS - 1])):
        assert_taken(store, rows)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a mapped file has no name")
@pytest.mark.parametrize("replaced", [False, True])
def test_a_store_whose_file_is_gone_or_another_still_has_its_rows(folder, replaced):
    store = UserStore.load(folder)
    for name in ("x", "y"):
        path = folder / f"field-{name}.npy"
        path.unlink()
        if replaced:
            np.save(path, np.zeros_like(store.fields[name]))
    assert_taken(store, SPARSE)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_of_a_store_is_in_memory(folder, duplicate):
    copied = duplicate(UserStore.load(folder))
    for path in folder.iterdir():
        path.write_bytes(b"")
    assert_taken(copied, SPARSE)


def test_threads_may_take_at_the_same_time(folder):
    store = UserStore.load(folder)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda first: assert_taken(store, (SPARSE + first) % ROWS), range(40)))


def resident_of_files() -> int:
    """KiB of pages of files that this process has mapped and touched, by Linux's count."""
    lines = Path("/proc/self/status").read_text().splitlines()
    # Of files in memory too, where those of tests may be.
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssFile", "RssShmem")))


@pytest.mark.skipif(sys.platform != "linux", reason="no other system counts so")
def test_what_was_taken_of_a_mapped_store_does_not_stay_resident(tmp_path):
    values = np.arange(2**21, dtype=np.float64).reshape(-1, 8)  # 16 MiB
    UserStore({"x": values}, np.array([0, len(values)])).save(tmp_path / "store")
    store = UserStore.load(tmp_path / "store")
    view = store.examples_of(0)["x"]
    before = resident_of_files()
    for rows in np.array_split(np.random.default_rng(0).permutation(len(values)), 16):
        np.testing.assert_array_equal(store.take(rows)["x"], values[rows])
    assert resident_of_files() - before < 4 * 1024
    np.testing.assert_array_equal(view, values)


def test_taking_from_an_array_mapped_by_someone_else_changes_nothing(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(4096))
    mine = np.load(tmp_path / "x.npy", mmap_mode="c")  # changes are in memory alone
    mine[:] = 1.0
    store = UserStore({"x": mine}, np.array([0, 4096]))
    assert store.take(np.arange(4096))["x"].min() == 1.0
    assert mine.min() == 1.0
