"""Tests of a population: its name and its held-out rows."""

import numpy as np
import pytest

from fedpriv.data import Population, UserStore
from fedpriv.data.population import HELD_OUT_USER
from fedpriv.errors import DataError

USERS = UserStore({"x": np.zeros((3, 2), np.float32), "y": np.arange(3)}, np.array([0, 3]))
TEST = {"x": np.ones((2, 2), np.float32), "y": np.arange(2)}


def test_population_holds_users_and_test_rows():
    population = Population("one user", USERS, TEST)
    assert population.users is USERS
    assert population.test == TEST
    assert "array" not in repr(population)


@pytest.mark.parametrize("name", ["", "  ", "two\nlines", "tab\t"])
def test_name_must_be_one_printable_line(name):
    with pytest.raises(DataError, match="one printable line"):
        Population(name, USERS, TEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones((2, 2))}, r"'x' is float64\[2\] per row; the users' is float32\[2\]"),
        ({"x": np.ones((2, 2), ">f4")}, r"'x' is >f4\[2\] per row; the users' is float32\[2\]"),
        ({"x": np.ones((2, 3), np.float32)}, r"float32\[3\] per row"),
        ({"y": np.arange(3)}, r"have \[2, 3\] rows"),
        ({"x": np.ones((0, 2), np.float32), "y": np.arange(0)}, r"\[0\] rows"),
    ],
)
def test_test_rows_must_fit_the_users(change, message):
    with pytest.raises(DataError, match=message):
        Population("one user", USERS, TEST | change)


def test_test_rows_have_all_fields_of_users_and_may_have_more():
    with pytest.raises(DataError, match=r"fields \['x', 'z'\].*\['x', 'y'\]"):
        Population("one user", USERS, {"x": TEST["x"], "z": np.zeros(2)})
    assert "z" in Population("one user", USERS, TEST | {"z": np.zeros(2)}).test


@pytest.mark.parametrize(
    ("ids", "owners"), [(None, [0, 7]), (["ann"], ["eve", "ann "]), ([3], [4, 3])]
)
def test_held_out_rows_of_an_enrolled_user_are_refused(ids, owners):
    users = UserStore(USERS.fields, USERS.offsets, ids)
    with pytest.raises(DataError, match="held-out rows name 1 of the enrolled users"):
        Population("one user", users, TEST | {HELD_OUT_USER: np.array(owners)})


def test_rows_are_grouped_by_the_ids_of_their_users():
    x, y = np.arange(8, dtype=np.float32).reshape(4, 2), np.arange(4)
    people = Population.from_arrays(x, y, ["b", "a", "b", "c"], held_out=(x[:1], y[:1]), name="us")
    assert people.name == "us: 3 users"
    assert list(people.users.user_ids) == ["b", "a", "c"]
    np.testing.assert_array_equal(people.users.fields["y"], [0, 2, 1, 3])
    assert people.test["x"].shape == (1, 2)


@pytest.mark.parametrize(
    "held_out",
    [
        TEST["x"],
        (TEST["x"],),
        (TEST["x"], [[1], [2, 3]]),
        (TEST["x"][:0], TEST["y"][:0]),
        (TEST["x"][:0], []),
    ],
)
def test_held_out_rows_must_be_a_pair_of_arrays(held_out):
    with pytest.raises(DataError, match=r"held|\[0\] rows"):
        Population.from_arrays(TEST["x"], TEST["y"], [0, 1], held_out=held_out)


@pytest.mark.parametrize("ids", [None, 7])
def test_ids_must_be_a_list(ids):
    kind = type(ids).__name__
    with pytest.raises(DataError, match=f"user ids .* {kind}; they must be a list, one id per row"):
        Population.from_arrays(TEST["x"], TEST["y"], ids, held_out=(TEST["x"], TEST["y"]))


def test_targets_take_no_inputs_place():
    inputs = {"x": TEST["x"], "y": TEST["x"]}
    with pytest.raises(DataError, match="an input is named 'y'"):
        Population.from_arrays(inputs, TEST["y"], [0, 1], held_out=(inputs, TEST["y"]))
