"""Tests of synthetic populations: the law they state, any size, and purity in the seed."""

import numpy as np
import pytest
from scipy import stats
from sklearn.linear_model import LogisticRegression

from fedpriv.data import builtin, synthetic_population
from fedpriv.errors import InvalidValueError

FALSE_ALARM = 1e-6


def two_sided(value, law):
    return 2 * min(law.cdf(value), law.sf(value))


def test_shapes_and_names():
    population = synthetic_population(50, 4, (3, 5), classes=7, seed=2, test_rows=11)
    assert population.name == "synthetic: 50 users, 4 examples of shape 3x5, 7 classes, seed 2"
    assert population.users.sizes.tolist() == [4] * 50
    assert population.users.fields["x"].shape == (200, 3, 5)
    assert population.users.fields["x"].dtype == np.float32
    assert population.users.fields["y"].dtype == np.int64
    assert set(population.users.fields["y"].tolist()) == set(range(7))
    assert len(population.test["y"]) == 11


def test_ids_cost_nothing():
    users = synthetic_population(100_000, 1, (2,)).users
    assert users.user_ids is None
    assert users.population == 100_000
    assert users.id_of(99_999) == "99999"


def test_ragged_sizes_are_uniform_on_the_pair():
    population = synthetic_population(6_000, (0, 2), (1,))
    assert "0 to 2 examples" in population.name
    counts = np.bincount(population.users.sizes, minlength=3)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
    assert stats.chisquare(counts, 6_000 * np.array([0.3, 0.4, 0.3])).pvalue < FALSE_ALARM


def test_labels_are_uniform():
    counts = np.bincount(synthetic_population(3_000, 2, (1,), classes=4).users.fields["y"])
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_class_means_lie_on_the_sphere_of_radius_four():
    fields = synthetic_population(20_000, 1, (8,), classes=3).users.fields
    radii = [np.linalg.norm(fields["x"][fields["y"] == k].mean(axis=0)) for k in range(3)]
    # The standard error is √(1.25 / 6,667) = 0.014, so this is seven of them.
    np.testing.assert_allclose(radii, 4.0, atol=0.1)


@pytest.mark.parametrize("values_at_once", [64, 1 << 22])
def test_a_users_rows_share_one_shift(monkeypatch, values_at_once):
    """One class, m rows a user: user means vary by 1/4 + 1/m, rows about them by 1.

    Drawn in blocks of two users and in one piece; rejects a shift of variance 0.2 or 0.3.
    """
    monkeypatch.setattr(builtin, "_VALUES_AT_ONCE", values_at_once)
    n, m, d = 2_000, 4, 8
    x = synthetic_population(n, m, (d,), classes=1, seed=5).users.fields["x"]
    rows = x.reshape(n, m, d).astype(np.float64)
    means = rows.mean(axis=1)
    between = ((means - means.mean(axis=0)) ** 2).sum()
    within = ((rows - means[:, None]) ** 2).sum()
    law_between, law_within = stats.chi2((n - 1) * d), stats.chi2(n * (m - 1) * d)
    assert two_sided(between / (0.25 + 1 / m), law_between) > FALSE_ALARM
    assert two_sided(within, law_within) > FALSE_ALARM
    for wrong in (0.2, 0.3):
        assert two_sided(between / (wrong + 1 / m), law_between) < FALSE_ALARM
    for wrong in (0.95, 1.05):
        assert two_sided(within / wrong**2, law_within) < FALSE_ALARM


def test_users_and_rows_are_independent_across_blocks(monkeypatch):
    monkeypatch.setattr(builtin, "_VALUES_AT_ONCE", 64)
    x = synthetic_population(500, 1, (8,), classes=1).users.fields["x"]
    assert len(np.unique(x)) > 3_990  # a block drawn twice would repeat its values
    lagged = np.corrcoef((x - x.mean(axis=0))[:-8].ravel(), (x - x.mean(axis=0))[8:].ravel())[0, 1]
    assert abs(lagged) < 5 / np.sqrt(492 * 8)


def test_ragged_blocks_cover_every_user(monkeypatch):
    monkeypatch.setattr(builtin, "_VALUES_AT_ONCE", 8)
    users = synthetic_population(300, (0, 5), (4,), classes=3, seed=1).users
    # Rows that were left out would be whatever memory held, or all zero.
    norms = np.linalg.norm(users.fields["x"], axis=1)
    assert norms.min() > 0.5
    assert norms.max() < 15.0


def test_classes_are_nearly_linearly_separable_for_unseen_users():
    population = synthetic_population(500, 4)
    fields, test = population.users.fields, population.test
    model = LogisticRegression(max_iter=200).fit(fields["x"], fields["y"])
    accuracy = model.score(test["x"], test["y"])
    assert 0.9 < accuracy < 1.0


def test_the_seed_alone_decides():
    one, same, other = (synthetic_population(20, (1, 3), seed=seed) for seed in (3, 3, 4))
    np.testing.assert_array_equal(one.users.fields["x"], same.users.fields["x"])
    np.testing.assert_array_equal(one.test["x"], same.test["x"])
    assert one.name == same.name != other.name
    assert one.users.fields["x"].tobytes() != other.users.fields["x"].tobytes()


def test_the_enrolled_users_do_not_depend_on_the_test_rows():
    one, other = (synthetic_population(20, 3, test_rows=rows) for rows in (5, 50))
    assert one.name == other.name
    np.testing.assert_array_equal(one.users.fields["x"], other.users.fields["x"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"users": 0}, "users is 0"),
        ({"users": "ten"}, "users is 'ten'"),
        ({"examples_per_user": 0}, "examples_per_user is 0"),
        ({"examples_per_user": 2.5}, "examples_per_user is 2.5"),
        ({"examples_per_user": "12"}, "low of examples_per_user is '1'"),
        ({"examples_per_user": (3, 2)}, "high of examples_per_user is 2"),
        ({"examples_per_user": (0, 0)}, "high of examples_per_user is 0"),
        ({"examples_per_user": (-1, 2)}, "low of examples_per_user is -1"),
        ({"examples_per_user": [1, 2, 3]}, r"examples_per_user is \[1, 2, 3\]"),
        ({"shape": 3}, "shape is of the type int"),
        ({"shape": "ab"}, "each side of shape is 'a'"),
        ({"shape": (3, 0)}, "each side of shape is 0"),
        ({"classes": 0}, "classes is 0"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"test_rows": 0}, "test_rows is 0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(InvalidValueError, match=message):
        synthetic_population(**options)
