"""Tests of stores made from arrays and tensors in memory."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.data import Population, UserStore, from_arrays, from_grouped
from fedpriv.data.partition import partition
from fedpriv.errors import DataError


def grouped_slowly(ids):
    """User → its rows, in order of first appearance, by a dictionary."""
    users = {}
    for row, user_id in enumerate(ids):
        users.setdefault(user_id, []).append(row)
    return users


@given(
    ids=st.one_of(
        st.lists(st.sampled_from(["b", "a", "ccc", "á"]), min_size=1, max_size=20),
        st.lists(st.integers(-3, 3), min_size=1, max_size=20),
    )
)
def test_grouping_equals_a_dictionary(ids):
    rows = np.arange(len(ids))
    store = from_arrays({"row": rows, "x": rows[:, None] * 1.5}, ids)
    slow = grouped_slowly(ids)
    assert [store.id_of(user) for user in range(store.population)] == [str(key) for key in slow]
    for user, expected in enumerate(slow.values()):
        examples = store.examples_of(user)
        assert examples["row"].tolist() == expected
        assert examples["x"][:, 0].tolist() == [1.5 * row for row in expected]


@pytest.mark.parametrize(
    "ids",
    [
        ("b", "a", "b"),
        np.array(["b", "a", "b"]),
        np.array(["b", "a", "b"], dtype=object),
    ],
)
def test_string_ids_of_any_container(ids):
    store = from_arrays({"x": np.array([1, 2, 3])}, ids)
    assert [store.id_of(0), store.id_of(1)] == ["b", "a"]
    assert store.fields["x"].tolist() == [1, 3, 2]


@pytest.mark.parametrize(
    "ids", [[9, 4, 9], np.array([9, 4, 9], dtype=np.uint8), torch.tensor([9, 4, 9])]
)
def test_integer_ids_of_any_container(ids):
    store = from_arrays({"x": np.array([1, 2, 3])}, ids)
    assert [store.id_of(0), store.id_of(1)] == ["9", "4"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (["a", "a\0", "b"], "number 1 is 'a"),
        (["1", 1, "2"], "number 1 is 1"),
        ([1, None, 2], "number 1 is None"),
        (np.array(["a", None, "b"], dtype=object), "number 1 is None"),
        (np.ma.array([1, 2, 3], mask=[False, True, False]), "number 1 is None"),
        (["a", "", "b"], "'' is empty"),
        (["a", "b", "a "], "'a' and 'a ' differ in spaces or Unicode's form alone"),
        (["é", "b", "e\N{COMBINING ACUTE ACCENT}"], "differ in spaces or Unicode's form alone"),
        (np.array([1.0, 2.0, np.nan]), "number 2 is nan, which stands for a missing id"),
        (np.array([True, False, True]), "number 0 is True"),
        (torch.tensor([1.0, 2.0, 3.0]), "number 0 is 1.0"),
        ([b"a", b"b", b"a"], "number 0 is b'a'"),
    ],
)
def test_ids_that_could_merge_or_split_users_are_refused(ids, message):
    with pytest.raises(DataError, match=message):
        from_arrays({"x": np.arange(3)}, ids)


def test_grouped_rows_are_held_without_a_copy():
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert np.shares_memory(from_arrays({"x": x}, [5, 5, 1]).fields["x"], x)
    assert not np.shares_memory(from_arrays({"x": x}, [5, 1, 5]).fields["x"], x)


def test_tensors_are_taken_with_or_without_gradient():
    x = torch.arange(6, dtype=torch.float32).reshape(3, 2).requires_grad_()
    store = from_arrays({"x": x, "y": torch.tensor([1, 2, 3])}, ["b", "a", "b"])
    assert store.fields["x"].dtype == np.float32
    assert store.fields["y"].dtype == np.int64
    np.testing.assert_array_equal(store.fields["x"], [[0, 1], [4, 5], [2, 3]])
    np.testing.assert_array_equal(store.fields["y"], [1, 3, 2])


def test_tensors_without_a_numpy_dtype_become_floats_or_are_refused():
    store = from_arrays({"x": torch.tensor([0.5, 2.0], dtype=torch.bfloat16)}, [1, 2])
    assert (store.fields["x"].dtype, store.fields["x"].tolist()) == (np.float32, [0.5, 2.0])
    with pytest.raises(DataError, match="field 'x' cannot be an array"):
        from_arrays({"x": torch.eye(2).to_sparse()}, [1, 2])


@pytest.mark.parametrize("ids", [{"a", "b", "c"}, {"a": 1, "b": 2, "c": 3}, "abc", b"abc"])
def test_ids_that_are_no_list_of_rows_are_refused(ids):
    with pytest.raises(DataError, match=f"^user ids are of the type {type(ids).__name__}; they mu"):
        from_arrays({"x": np.zeros(3)}, ids)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": np.zeros((2, 3))}, r"field 'x' has shape \(2, 3\), not 3 rows"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "field 'y'"),
        ({"x": np.array([{}, {}, {}])}, "'x' has a value of the type dict in all 3 rows"),
        ({"x": np.ma.masked_equal([1.0, -9.0, 2.0], -9.0)}, "field 'x' is a masked array"),
        ({}, "no field"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(DataError, match=message):
        from_arrays(fields, ["a", "b", "a"])


@pytest.mark.parametrize(
    ("x", "why", "kept"),
    [
        ([[1], [1, 2], [3]], r"arrays \[2\].*arrays \[1\]", [[1], [3]]),
        ([[1, 2], None, [3, 4]], "no value", [[1, 2], [3, 4]]),
        ([[1, 2], [3, None], [5, 6]], "no value", [[1, 2], [5, 6]]),
        (np.array([[1, True], [2.5, "a"], [0, 0]], object), "text", [[1.0, 1.0], [0.0, 0.0]]),
        ([1, {}, 3], "the type dict", [1, 3]),
        ([1, 2**70, 3], "beyond 63 bits", [1, 3]),
        (np.array([1, 2**63, 3], np.uint64), "beyond 63 bits", [1, 3]),
        (["no", 2.5, "yes"], "numbers.*text", ["no", "yes"]),
        (
            [torch.zeros(2), torch.zeros(3), torch.ones(2)],
            r"arrays \[3\]",
            [[0.0, 0.0], [1.0, 1.0]],
        ),
        ([np.zeros(1), [[1, 2], [3]], np.ones(1)], "different lengths", [[0.0], [1.0]]),
    ],
)
@pytest.mark.parametrize("ids", ["aba", "bab"])
def test_a_fault_of_a_row_breaks_its_user_and_nobody_else(x, why, kept, ids):
    store = from_arrays({"x": x, "y": [5, 6, 7]}, [*ids])
    broken = next(position for position in range(2) if store.id_of(position) == ids[1])
    assert [*store.broken] == [broken]
    assert re.search(f"'x' has .*{why}.* in row 0 of user '{ids[1]}'", store.broken[broken])
    assert store.fields["x"].tolist() == kept
    assert store.fields["y"].tolist() == [5, 7]
    assert store.examples_of(broken)["y"].size == 0
    # Types are as if nothing were wrong.
    assert store.fields["x"].dtype == from_arrays({"x": kept}, [1, 2]).fields["x"].dtype
    with pytest.raises(DataError, match=f"'x' .* row 0 of user '{ids[1]}'.*1 of 2 users"):
        store.refuse_broken()
    assert store.subset([1 - broken]).broken == {}
    assert [*store.subset([1 - broken, broken]).broken] == [1]


def test_faults_of_shared_rows_are_refused():
    with pytest.raises(DataError, match=r"'x' has no value .* row 0 of user 'c'"):
        from_arrays({"x": [1, 2, None]}, [["a", "b"], ["b"], ["c", "a"]], owners=2)


def test_what_may_be_missing_is_refused_everywhere():
    masked = np.ma.masked_equal([1.0, -9.0, 2.0], -9.0)
    whole, owners = np.ones(3), np.ma.masked_equal([0, 0, 1], 0)
    for make in (
        lambda: UserStore({"x": masked}, np.array([0, 3])),
        lambda: partition({"x": masked}, [1, 0, 0]),
        lambda: from_grouped({"a": {"x": masked}}),
        lambda: partition({"x": whole}, owners),
        lambda: Population("a", UserStore({"x": whole}, np.array([0, 3])), {"x": masked}),
        lambda: Population.from_arrays(whole, whole, [0, 1, 2], held_out=(masked, whole)),
    ):
        with pytest.raises(DataError, match="is a masked array; fill missing values"):
            make()


def test_no_rows_are_no_users():
    with pytest.raises(DataError, match="no users"):
        from_arrays({"x": np.zeros((0, 2))}, [])


def user(*values):
    return {"x": np.array(values, dtype=np.float32).reshape(-1, 1), "y": np.arange(len(values))}


def test_grouped_users_keep_their_order_and_rows():
    users = {"eve": user(1, 2), "ann": user(), "bob": user(3)}
    for source in (users, users.items(), iter(users.items())):
        store = from_grouped(source)
        assert [store.id_of(i) for i in range(3)] == ["eve", "ann", "bob"]
        assert store.sizes.tolist() == [2, 0, 1]
        assert store.fields["x"][:, 0].tolist() == [1, 2, 3]
        assert store.fields["y"].tolist() == [0, 1, 0]


def test_a_user_id_in_two_places_is_an_error():
    with pytest.raises(DataError, match="user id 'ann' occurs twice"):
        from_grouped([("ann", user(1)), ("bob", user(2)), ("ann", user(3))])


def test_grouped_tensors_and_lists():
    store = from_grouped({"a": {"x": torch.ones(2, 2)}, "b": {"x": torch.zeros(1, 2)}})
    assert store.fields["x"].tolist() == [[1, 1], [1, 1], [0, 0]]
    words = from_grouped({"a": {"x": ["one"]}, "b": {"x": ["three"]}})
    assert words.fields["x"].tolist() == ["one", "three"]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"x": np.zeros((1, 1), np.float32)}, r"the fields are \['x'\]"),
        (user(1) | {"z": np.zeros(1)}, r"\['x', 'y', 'z'\]; most users have \['x', 'y'\]"),
        (user(1) | {"y": np.zeros(2, int)}, "different numbers of rows"),
        (user(1) | {"y": np.int64(3)}, "different numbers of rows"),
        (user(1) | {"x": np.zeros((1, 2), np.float32)}, r"'x' is float32\[2\].*\[1\]"),
        (user(1) | {"y": np.zeros(1, np.float32)}, r"'y' is float32\[\].*int64\[\]"),
        (user(1, 2) | {"x": [[1], [2, 3]]}, "field 'x'.*row 1"),
        (None, "rows cannot be read from a NoneType"),
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_user_unlike_most_is_broken_and_nobody_else(other, message, place):
    others = [user(1, 2), user(3)]
    parts = [*others[:place], other, *others[place:]]
    store = from_grouped(zip("abc", parts, strict=True))
    assert [*store.broken] == [place]
    assert re.search(f"user '{'abc'[place]}': .*{message}", store.broken[place])
    expected = from_grouped(others)
    for name, field in expected.fields.items():
        np.testing.assert_array_equal(store.fields[name], field)
        assert store.fields[name].dtype == field.dtype
    assert store.sizes[place] == 0


def test_whole_numbers_of_a_user_fit_fractions_of_others():
    store = from_grouped([("a", {"x": [1.5]}), ("b", {"x": [2]}), ("c", {"x": [0.5]})])
    assert (store.fields["x"].dtype, store.fields["x"].tolist()) == (np.float32, [1.5, 2.0, 0.5])


def test_users_of_whom_none_can_be_read_are_refused():
    with pytest.raises(DataError, match="cannot be read from a NoneType"):
        from_grouped({"a": None, "b": None})


def test_grouped_nobody_is_refused():
    with pytest.raises(DataError, match="no users"):
        from_grouped({})


def test_grouped_ids_of_two_kinds_are_refused():
    with pytest.raises(DataError, match="all strings or all integers"):
        from_grouped([("1", user(1)), (1, user(2))])


def test_a_table_of_mixed_columns_becomes_numbers() -> None:
    table = np.array([[1, True, 2.5], [np.float64(3.0), np.bool_(False), np.int8(4)]], object)
    column = from_arrays({"x": table}, ["ann", "bob"]).fields["x"]
    assert column.dtype == np.float32
    np.testing.assert_array_equal(column, [[1, 1, 2.5], [3, 0, 4]])
