"""Tests of saved stores: round trips, memory mapping, and folders that are whole or refused."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.data import UserStore
from fedpriv.errors import DataError


def make_store(sizes=(2, 0, 3)):
    rows = sum(sizes)
    fields = {"x": np.arange(rows * 2.0).reshape(rows, 2), "y": np.arange(rows) * 10}
    return UserStore(fields, np.array([0, *np.cumsum(sizes)]), ("ann", "bob", "eve"))


@settings(max_examples=30)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    kind=st.sampled_from(["none", "strings", "integers"]),
    dtype=st.sampled_from(["f4", "f2", "u1", ">i4", "?", "U3", "c8", "M8[s]"]),
    mmap=st.booleans(),
)
def test_save_and_load_round_trip(tmp_path_factory, sizes, kind, dtype, mmap):
    ids = {"none": None, "strings": [f"ü{i}" for i in range(len(sizes))]}.get(
        kind, np.arange(len(sizes)) * 3
    )
    rows = sum(sizes)
    values = np.arange(rows * 2).reshape(rows, 2).astype(dtype)
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    store = UserStore({"x": values, "größe": np.arange(rows)}, offsets, ids)
    folder = tmp_path_factory.mktemp("store") / "deep" / "saved"
    store.save(folder)
    loaded = UserStore.load(folder, mmap=mmap)
    assert list(loaded.fields) == ["x", "größe"]
    np.testing.assert_array_equal(loaded.fields["x"], values)
    assert loaded.fields["x"].dtype == values.dtype
    np.testing.assert_array_equal(loaded.offsets, offsets)
    assert [loaded.id_of(u) for u in range(len(sizes))] == [
        store.id_of(u) for u in range(len(sizes))
    ]
    assert isinstance(loaded.fields["x"], np.memmap) == mmap


def test_mapped_load_does_not_read_the_data(tmp_path):
    make_store().save(tmp_path / "store")
    loaded = UserStore.load(tmp_path / "store")
    assert type(loaded.fields["x"]) is np.memmap
    assert isinstance(loaded.examples_of(0)["x"], np.memmap)
    # What was on disk at load time is gone; only a mapping that had not read it can see this.
    with (tmp_path / "store" / "field-y.npy").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(np.array([-7]).tobytes())
    taken = loaded.take(np.array([4, 0]))
    np.testing.assert_array_equal(taken["y"], [-7, 0])
    assert type(taken["y"]) is np.ndarray


def test_mapped_fields_cannot_be_written_to(tmp_path):
    make_store().save(tmp_path / "store")
    with pytest.raises(ValueError, match="read-only"):
        UserStore.load(tmp_path / "store").examples_of(0)["x"][0] = 1.0


def test_an_existing_folder_is_never_overwritten(tmp_path):
    make_store().save(tmp_path / "store")
    with pytest.raises(DataError, match="exists; a saved store is never overwritten"):
        make_store(sizes=(1, 1, 1)).save(tmp_path / "store")
    assert UserStore.load(tmp_path / "store").sizes.tolist() == [2, 0, 3]


def test_the_folder_appears_only_when_all_of_it_is_on_disk(tmp_path, monkeypatch):
    """Every file and the folder itself are flushed first, so a kill at any time is harmless."""
    there, real = [], os.fsync

    def watching(handle):
        there.append((tmp_path / "store").exists())
        real(handle)

    monkeypatch.setattr(os, "fsync", watching)
    make_store().save(tmp_path / "store")
    assert there == [False] * 6 + [True]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


@pytest.mark.parametrize("crash_at", range(6))
def test_a_crash_while_saving_leaves_no_folder(tmp_path, monkeypatch, crash_at):
    """offsets, ids, two fields, description, folder: each is flushed before the rename."""
    calls = iter(range(100))
    real = os.fsync

    def failing(handle):
        if next(calls) == crash_at:
            raise OSError("disk full")
        real(handle)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="disk full"):
        make_store().save(tmp_path / "store")
    assert not (tmp_path / "store").exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["offsets.npy", "user_ids.npy", "field-x.npy", "store.json"])
@pytest.mark.parametrize("damage", ["absent", "cut", "empty"])
def test_a_half_written_folder_is_refused(tmp_path, name, damage):
    make_store().save(tmp_path / "store")
    path = tmp_path / "store" / name
    content = path.read_bytes()
    path.unlink()
    if damage != "absent":
        path.write_bytes(content[:-5] if damage == "cut" else b"")
    for mmap in (True, False):
        with pytest.raises((DataError, FileNotFoundError), match="store"):
            UserStore.load(tmp_path / "store", mmap=mmap)


def test_field_of_another_store_is_refused(tmp_path):
    make_store().save(tmp_path / "a")
    make_store(sizes=(1, 1, 1)).save(tmp_path / "b")
    shutil.copy(tmp_path / "b" / "field-x.npy", tmp_path / "a" / "field-x.npy")
    with pytest.raises(DataError, match=r"x 3, y 5"):
        UserStore.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "fedpriv user store, version 2"}, "store.json.*version 2.*version 1"),
        ({"format": "else"}, "store.json has the format 'else'"),
        ({"fields": ["../x"]}, "store.json"),
        ({"fields": None}, "store.json"),
        ({"broken": None}, "store.json"),
        ({"fields": []}, "no field"),
    ],
)
def test_unknown_descriptions_are_refused(tmp_path, change, message):
    make_store().save(tmp_path / "store")
    path = tmp_path / "store" / "store.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=message):
        UserStore.load(tmp_path / "store")


def test_offsets_of_another_dtype_are_refused(tmp_path):
    make_store().save(tmp_path / "store")
    np.save(tmp_path / "store" / "offsets.npy", np.array([0.0, 2.0, 2.0, 5.0]))
    with pytest.raises(DataError, match="offsets have dtype float64"):
        UserStore.load(tmp_path / "store")


def test_pickled_arrays_are_never_loaded(tmp_path):
    make_store().save(tmp_path / "store")
    path = tmp_path / "store" / "field-y.npy"
    path.unlink()
    np.save(path, np.array([{}] * 5, dtype=object), allow_pickle=True)
    for mmap in (True, False):
        with pytest.raises(DataError, match="cannot be read"):
            UserStore.load(tmp_path / "store", mmap=mmap)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_damaged_array_is_not_quoted(tmp_path, mmap):
    make_store().save(tmp_path / "store")
    path = tmp_path / "store" / "field-y.npy"
    damaged = path.read_bytes().replace(b"'shape'", b"secret!")
    path.unlink()
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"field-y\.npy cannot be read") as raised:
        UserStore.load(tmp_path / "store", mmap=mmap)
    assert "secret" not in str(raised.value)


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"not a saved user store: it has no store.json"):
        UserStore.load(tmp_path / "nowhere")
