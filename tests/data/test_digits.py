"""Tests of the DIGITS population against scikit-learn's arrays."""

import numpy as np
import pytest
from sklearn.datasets import load_digits as load_embedded

from fedpriv.data import load_digits
from fedpriv.errors import InvalidValueError


def images_of(x):
    return sorted(map(bytes, np.ascontiguousarray(x.reshape(len(x), 64))))


def test_digits_has_287_users_of_about_five_images():
    population = load_digits()
    assert population.name == "digits: 287 users, iid, seed 0"
    assert population.users.population == 287
    assert population.users.rows == 1437
    assert set(population.users.sizes.tolist()) == {5, 6}
    assert population.test["x"].shape == (360, 1, 8, 8)
    for rows in (population.users.fields, population.test):
        assert (rows["x"].dtype, rows["y"].dtype) == (np.float32, np.int64)
        assert rows["x"].shape[1:] == (1, 8, 8)
        assert rows["x"].min() == 0.0
        assert rows["x"].max() == 1.0


def test_every_image_is_used_once_with_its_label():
    pixels, digits = load_embedded(return_X_y=True)
    population = load_digits(users=100, seed=7)
    x = np.concatenate([population.users.fields["x"], population.test["x"]])
    y = np.concatenate([population.users.fields["y"], population.test["y"]])
    expected = {
        bytes((image / 16).astype(np.float32)): d for image, d in zip(pixels, digits, strict=True)
    }
    assert images_of(x) == images_of((pixels / 16).astype(np.float32))
    assert all(expected[bytes(image)] == digit for image, digit in zip(x, y, strict=True))


def test_the_test_images_are_stratified_and_fixed():
    one, other = load_digits(seed=0), load_digits(users=20, seed=1)
    np.testing.assert_array_equal(one.test["x"], other.test["x"])
    shares = np.bincount(one.test["y"]) / np.bincount(one.users.fields["y"])
    np.testing.assert_allclose(shares, 360 / 1437, rtol=0.04)


@pytest.mark.parametrize(
    ("options", "how"),
    [
        ({}, "iid"),
        ({"partition": "dirichlet", "alpha": 0.1}, "dirichlet alpha 0.1"),
        ({"partition": "dirichlet", "alpha": 0.2}, "dirichlet alpha 0.2"),
        ({"partition": "shards", "shards_per_user": 2}, "2 shards per user"),
        ({"partition": "shards", "shards_per_user": 1}, "1 shards per user"),
    ],
)
def test_the_name_says_who_the_users_are(options, how):
    for users, seed in ((287, 0), (287, 1), (50, 0)):
        population = load_digits(users=users, seed=seed, **options)
        assert population.name == f"digits: {users} users, {how}, seed {seed}"
        assert population.users.population == users
        assert population.users.sizes.min() >= 1


def test_partitions_differ_in_how_many_digits_a_user_holds():
    def digits_per_user(**options):
        users = load_digits(users=100, **options).users
        return np.mean([len(np.unique(users.examples_of(u)["y"])) for u in range(100)])

    mixed = digits_per_user()
    assert digits_per_user(partition="dirichlet", alpha=0.1) < mixed - 3
    assert digits_per_user(partition="shards", shards_per_user=2) < mixed - 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"users": 0}, "users is 0"),
        ({"users": 1438}, "1438 users for 1437 rows"),
        ({"seed": -1}, "seed is -1"),
        ({"partition": "idd"}, "unknown partition 'idd'"),
        ({"partition": 3}, "unknown partition 3"),
        ({"partition": "dirichlet"}, "alpha is None"),
        ({"alpha": 0.5}, "alpha is 0.5"),
        ({"partition": "shards"}, "shards_per_user is None"),
        ({"partition": "iid", "shards_per_user": 2}, "shards_per_user is 2"),
        ({"partition": "dirichlet", "alpha": -1.0}, "alpha is -1.0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(InvalidValueError, match=message):
        load_digits(**options)
