"""Tests of populations by name."""

import sys
import types

import numpy as np
import pytest

from fedpriv.data import Population, UserStore, load_population
from fedpriv.errors import DataError, InvalidValueError


def make(users, *, rows=1):
    x = np.zeros((users * rows, 1))
    store = UserStore({"x": x}, np.arange(users + 1) * rows)
    return Population(f"{users} users of {rows}", store, {"x": x})


def make_of_anything(**options):
    return make(options["users"], rows=len(options))


def fail():
    raise ValueError("secret of a user")


@pytest.fixture
def module(monkeypatch):
    own = types.ModuleType("own_populations")
    own.make = make
    own.anything = make_of_anything
    own.wrong = lambda: 3
    own.failing = fail
    own.constant = 5
    monkeypatch.setitem(sys.modules, "own_populations", own)


def test_built_in_names():
    digits = load_population("digits", {"users": 30, "seed": 4})
    assert digits.name == "digits: 30 users, iid, seed 4"
    made = load_population("synthetic", {"users": 3, "examples_per_user": [1, 2], "shape": [2]})
    assert made.users.population == 3


def test_import_path(module):
    assert load_population("own_populations:make", {"users": 2, "rows": 3}).name == "2 users of 3"
    assert load_population("own_populations:anything", {"users": 2}).name == "2 users of 1"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit", "population 'digit' is unknown"),
        ("?", "known names: digits, hugging-face, synthetic, or package.module:name"),
        ("synthetics", "is unknown; did you mean 'synthetic'"),
        ("own_populations:mak", "no function 'mak'"),
        ("own_populations:constant", "no function 'constant'"),
        ("no_such_module:make", "'no_such_module:make' cannot be imported"),
        ("own_populations.sub:make", "cannot be imported"),
        (":make", "not of the form package.module:function"),
        (".own:make", "not of the form package.module:function"),
        ("own_populations:wrong", "must return a Population, not int"),
    ],
)
def test_unknown_names_are_one_sentence(module, name, message):
    with pytest.raises(DataError, match=message):
        load_population(name, {})


def test_what_a_loader_says_is_not_told(module):
    """It may hold users' data, and nodes tell their server why they cannot take part."""
    with pytest.raises(DataError, match=r"cannot be made: ValueError at .*_by_name\.py:\d+$"):
        load_population("own_populations:failing", {})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"user": 3}, "'digits' has no option 'user'"),
        ("digits", {"": 3}, "known names: alpha, partition, seed, shards_per_user, users"),
        ("hugging-face", {"users": 3}, "no option 'users'"),
        ("own_populations:make", {"users": 1, "row": 2}, "no option 'row'"),
        ("own_populations:make", {}, "needs the option 'users'"),
        ("digits", {"users": "many"}, "users is 'many'"),
    ],
)
def test_options_are_checked_before_the_call(module, name, options, message):
    with pytest.raises((DataError, InvalidValueError), match=message):
        load_population(name, options)
