"""Tests of the user store, guarantee by guarantee."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv import Population
from fedpriv.data import UserStore
from fedpriv.errors import DataError, InvalidValueError


def make_store(sizes=(2, 0, 3), user_ids=("ann", "bob", "eve")):
    rows = sum(sizes)
    fields = {
        "x": np.arange(rows * 4, dtype=np.float32).reshape(rows, 2, 2),
        "y": np.arange(rows, dtype=np.int64) * 10,
    }
    return UserStore(fields, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64), user_ids)


def assert_same(store, other):
    assert store.population == other.population
    assert store.fields.keys() == other.fields.keys()
    for name, field in store.fields.items():
        assert field.dtype == other.fields[name].dtype
        np.testing.assert_array_equal(field, other.fields[name])
    np.testing.assert_array_equal(store.offsets, other.offsets)
    assert [store.id_of(u) for u in range(3)] == [other.id_of(u) for u in range(3)]


sizes_of_users = st.lists(st.integers(0, 4), min_size=1, max_size=8)


def test_shape_of_a_store():
    store = make_store()
    assert (store.population, store.rows) == (3, 5)
    assert store.sizes.dtype == np.int64
    assert store.sizes.tolist() == [2, 0, 3]
    assert store.offsets.dtype == np.int64
    assert [store.id_of(user) for user in range(3)] == ["ann", "bob", "eve"]
    assert store.rows_of(2) == slice(2, 5)


def test_positions_serve_as_ids_and_cost_nothing():
    store = make_store(user_ids=None)
    assert store.user_ids is None
    assert [store.id_of(user) for user in range(3)] == ["0", "1", "2"]


def test_integer_ids_are_kept_as_integers():
    store = make_store(user_ids=np.array([7, 3, 11], dtype=np.int32))
    assert store.user_ids.dtype == np.int32
    assert store.id_of(1) == "3"


def test_examples_are_views_of_the_users_rows():
    store = make_store()
    examples = store.examples_of(2)
    np.testing.assert_array_equal(examples["y"], [20, 30, 40])
    assert np.shares_memory(examples["x"], store.fields["x"])
    assert store.examples_of(1)["x"].shape == (0, 2, 2)


def test_construction_holds_arrays_without_a_copy():
    x = np.zeros((3, 2))
    offsets = np.array([0, 3])
    assert UserStore({"x": x}, offsets).fields["x"] is x
    assert offsets.flags.writeable  # the caller's array is left as it was


def test_offsets_and_ids_cannot_be_written_to():
    store = make_store(user_ids=np.array([1, 2, 3]))
    with pytest.raises(ValueError, match="read-only"):
        store.offsets[1] = 5
    with pytest.raises(ValueError, match="read-only"):
        store.user_ids[0] = 2


def test_repr_names_no_user_and_no_data():
    text = repr(make_store())
    assert "population=3" in text
    assert "x: float32[2, 2]" in text
    assert "ann" not in text
    assert "40" not in text


def test_store_can_be_pickled_and_copied():
    store = make_store()
    assert_same(store, pickle.loads(pickle.dumps(store)))
    assert_same(store, copy.deepcopy(store))


X = np.zeros((3, 2))


@pytest.mark.parametrize(
    ("fields", "offsets", "user_ids", "message"),
    [
        ({}, [0, 3], None, "no field"),
        ({"x": X, "y": np.zeros(2)}, [0, 3], None, r"rows \(x 3, y 2\)"),
        ({"x": [1, 2, 3]}, [0, 3], None, "'x' is a list"),
        ({"x": np.float64(1)}, [0, 3], None, "'x' is a float64"),
        ({"x": np.array(3.0)}, [0, 3], None, "'x' is a ndarray"),
        ({"x": np.array([1, "a", None])}, [0, 3], None, "'x' has dtype object"),
        ({"../x": X}, [0, 3], None, "'../x' is not a Python identifier"),
        ({1: X}, [0, 3], None, "1 is not a Python identifier"),
        ({"x": X}, [0], None, "no users"),
        ({"x": X}, [0, 2], None, "run from 0 to 2"),
        ({"x": X}, [1, 3], None, "run from 1 to 3"),
        ({"x": X}, [0, 2, 1, 3], None, "decrease after user 1"),
        ({"x": X}, [0.0, 3.0], None, "dtype float64"),
        ({"x": X}, [[0, 3]], None, r"shape \(1, 2\)"),
        ({"x": X}, [0, 1, 3], ["a"], "1 user ids for 2 users"),
        ({"x": X}, [0, 1, 2, 3], ["a", "b", "b"], "'b' occurs twice"),
        ({"x": X}, [0, 1, 2, 2, 3], [4, 9, 9, 5], "'9' occurs twice"),
        ({"x": X}, [0, 1, 3], ["a", 1], "number 1 is 1"),
        ({"x": X}, [0, 1, 3], ["a", None], "number 1 is None"),
        ({"x": X}, [0, 1, 3], [1.0, 2.0], "number 0 is 1.0"),
        ({"x": X}, [0, 1, 3], [0, True], "number 1 is True"),
        ({"x": X}, [0, 1, 3], [1, 2**70], "beyond 64 bits"),
        ({"x": X}, [0, 1, 3], np.array([[1], [2]]), "one-dimensional"),
    ],
)
def test_bad_stores_are_refused(fields, offsets, user_ids, message):
    with pytest.raises(DataError, match=message):
        UserStore(fields, np.array(offsets), user_ids)


@pytest.mark.parametrize("user", [-1, 3, 1.0, True])
def test_positions_out_of_range_are_refused(user):
    store = make_store()
    for method in (store.id_of, store.rows_of, store.examples_of):
        with pytest.raises(InvalidValueError, match="user is"):
            method(user)


@given(sizes=sizes_of_users, data=st.data())
def test_every_row_is_in_exactly_one_users_slice(sizes, data):
    store = make_store(sizes, user_ids=None)
    rows = [np.arange(store.rows)[store.rows_of(user)] for user in range(store.population)]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(store.rows))
    np.testing.assert_array_equal(store.sizes, sizes)


@given(data=st.data(), shape=st.sampled_from([(0,), (4,), (2, 3)]))
def test_take_equals_a_loop_over_rows(data, shape):
    store = make_store()
    count = int(np.prod(shape))
    flat = data.draw(st.lists(st.integers(0, 4), min_size=count, max_size=count))
    taken = store.take(np.array(flat, dtype=np.int32).reshape(shape))
    for name, field in store.fields.items():
        slow = np.array([field[row] for row in flat]).reshape(*shape, *field.shape[1:])
        np.testing.assert_array_equal(taken[name], slow)
        assert taken[name].dtype == field.dtype
        assert taken[name].flags.writeable
        assert not np.shares_memory(taken[name], field)


@pytest.mark.parametrize("rows", [[-1], [5], [0, 5], [0.0], [True]])
def test_take_refuses_rows_out_of_range(rows):
    with pytest.raises(InvalidValueError, match="rows"):
        make_store().take(np.array(rows))


@given(sizes=sizes_of_users, with_ids=st.booleans(), data=st.data())
def test_subset_equals_a_loop_over_users(sizes, with_ids, data):
    ids = [f"u{i}" for i in range(len(sizes))] if with_ids else None
    store = make_store(sizes, user_ids=ids)
    users = data.draw(
        st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=len(sizes), unique=True)
    )
    subset = store.subset(users)
    assert subset.population == len(users)
    for position, user in enumerate(users):
        assert subset.id_of(position) == store.id_of(user)
        for name, field in subset.examples_of(position).items():
            np.testing.assert_array_equal(field, store.examples_of(user)[name])


def test_subset_refuses_a_user_twice_even_without_ids():
    with pytest.raises(DataError, match="'2' occurs twice"):
        make_store(user_ids=None).subset([0, 2, 2])


@pytest.mark.parametrize("users", [[-1], [3], [0.5], [[0, 1]]])
def test_subset_refuses_what_is_not_a_position(users):
    with pytest.raises(InvalidValueError, match="users"):
        make_store().subset(users)


def test_subset_of_nobody_is_refused():
    with pytest.raises(DataError, match="no users"):
        make_store().subset([])


@pytest.mark.parametrize(
    ("ids", "place"),
    [
        (np.array([1.0, np.nan, 2.0]).astype(str), "1 is nan"),
        (np.array([1, 2, -(2**63)]), "2 is -9223372036854775808"),  # NaN, as astype(int) has it
        (np.array(["a", None, "b"], dtype=object).astype(str), "1 is None"),
        (["a", "b", None], "2 is None"),
        ([1, float("nan"), 2], "1 is nan"),
        (["a", "NaT", "b"], "1 is NaT"),
    ],
)
def test_rows_without_an_id_do_not_become_one_user(ids: Any, place: str) -> None:
    x, y = np.zeros((3, 2), np.float32), np.zeros(3, np.int64)
    with pytest.raises(DataError, match=f"user id number {place}, which stands for a missing id"):
        Population.from_arrays(x, y, ids, held_out=(x[:1], y[:1]), name="people")
