"""Tests of a population: its name and its held-out rows."""

import numpy as np
import pytest

from fedpriv.data import Population, UserStore
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
        ({"z": np.zeros(2)}, r"fields \['x', 'y', 'z'\]; the users have \['x', 'y'\]"),
        ({"x": np.ones((2, 2))}, r"'x' is float64\[2\] per row; the users' is float32\[2\]"),
        ({"x": np.ones((2, 3), np.float32)}, r"float32\[3\] per row"),
        ({"y": np.arange(3)}, r"have \[2, 3\] rows"),
        ({"x": np.ones((0, 2), np.float32), "y": np.arange(0)}, r"\[0\] rows"),
    ],
)
def test_test_rows_must_fit_the_users(change, message):
    with pytest.raises(DataError, match=message):
        Population("one user", USERS, TEST | change)
