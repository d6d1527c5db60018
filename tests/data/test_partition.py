"""Tests of the partitioners: they are partitions, pure in the seed, and of the law they state."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedpriv.data.partition import dirichlet, iid, partition, shards
from fedpriv.errors import DataError, InvalidValueError

FALSE_ALARM = 1e-6


def p_value(observed, probabilities):
    """Chi-square p-value of counts against a law given as value → probability."""
    assert set(observed) <= set(probabilities)
    total = sum(observed.values())
    counts = [observed.get(value, 0) for value in probabilities]
    return stats.chisquare(counts, [total * float(p) for p in probabilities.values()]).pvalue


def count(values):
    return {value: values.count(value) for value in set(values)}


@st.composite
def cases(draw):
    labels = np.array(draw(st.lists(st.integers(0, 3), min_size=1, max_size=40)))
    return labels, draw(st.integers(1, len(labels))), draw(st.integers(0, 2**40))


def partitioners(labels, users, seed):
    yield iid(len(labels), users, seed)
    for alpha in (1e-9, 0.3, 1e6):
        yield dirichlet(labels, users, alpha, seed)
    yield shards(labels, users, len(labels) // users, seed)
    yield shards(labels, users, 1, seed)


@given(case=cases())
def test_partitioners_make_partitions(case):
    labels, users, seed = case
    results = zip(partitioners(labels, users, seed), partitioners(labels, users, seed), strict=True)
    for user_of_row, again in results:
        assert user_of_row.dtype == np.int64
        assert user_of_row.shape == labels.shape
        assert set(user_of_row.tolist()) == set(range(users))  # every user has a row
        np.testing.assert_array_equal(user_of_row, again)


@given(case=cases())
def test_iid_and_dirichlet_users_are_equally_large(case):
    labels, users, seed = case
    for user_of_row in (iid(len(labels), users, seed), dirichlet(labels, users, 0.1, seed)):
        sizes = np.bincount(user_of_row)
        assert sizes.max() - sizes.min() <= 1


def test_the_seed_alone_decides():
    labels = np.arange(100) % 5
    first = list(partitioners(labels, 10, 3))
    for one, same, other in zip(
        first, partitioners(labels, 10, 3), partitioners(labels, 10, 4), strict=True
    ):
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, other)


def test_iid_deals_every_pairing_equally_often():
    """Four rows, two users of two: six ways; rejects a deal that keeps row 0 with user 0."""
    deals = count(["".join(map(str, iid(4, 2, seed))) for seed in range(3000)])
    ways = ["0011", "0101", "0110", "1001", "1010", "1100"]
    assert p_value(deals, dict.fromkeys(ways, 1 / 6)) > FALSE_ALARM
    kept = {way: (0.32 if way[0] == "0" else 0.04 / 3) for way in ways}
    assert p_value(deals, kept) < FALSE_ALARM


def test_dirichlet_is_of_concentration_alpha_times_the_shares():
    """User 0 of two, two equally frequent labels: its count is beta-binomial(m, α/2, α/2)."""
    labels, alpha, size = np.repeat([0, 1], 8), 1.0, 8
    drawn = []
    for seed in range(10_000):
        user_of_row = dirichlet(labels, 2, alpha, seed)
        drawn.append(int(np.sum(labels[user_of_row == 0])))
    observed = count(drawn)

    def law(concentration):
        pmf = stats.betabinom(size, concentration / 2, concentration / 2).pmf
        return {k: pmf(k) for k in range(size + 1)}

    assert p_value(observed, law(alpha)) > FALSE_ALARM
    # Dir(α·1), the other convention, and α a quarter too large or too small.
    for wrong in (2 * alpha, 1.25 * alpha, 0.75 * alpha):
        assert p_value(observed, law(wrong)) < FALSE_ALARM


def counts_one_draw_at_a_time(left, mixture, size):
    """Exact law of label counts, drawing one row after the other and dropping used-up labels."""
    if size == 0:
        return {(0,) * len(left): Fraction(1)}
    total = sum(share for share, rest in zip(mixture, left, strict=True) if rest)
    law = {}
    for label, rest in enumerate(left):
        if rest:
            after = tuple(n - (k == label) for k, n in enumerate(left))
            for counts, p in counts_one_draw_at_a_time(after, mixture, size - 1).items():
                key = tuple(n + (k == label) for k, n in enumerate(counts))
                law[key] = law.get(key, 0) + p * mixture[label] / total
    return law


def test_dirichlet_draws_without_replacement_from_a_fixed_mixture():
    """α → ∞ fixes the mixture; labels 1, 2 and 3 times, a user takes three of six rows."""
    labels, shares = np.array([0, 1, 1, 2, 2, 2]), [Fraction(k, 6) for k in (1, 2, 3)]
    drawn = []
    for seed in range(3000):
        mine = labels[dirichlet(labels, 2, 1e12, seed) == 0]
        drawn.append(tuple(np.bincount(mine, minlength=3).tolist()))
    observed = count(drawn)
    assert p_value(observed, counts_one_draw_at_a_time((1, 2, 3), shares, 3)) > FALSE_ALARM
    hypergeometric = stats.multivariate_hypergeom([1, 2, 3], 3).pmf
    plain = {counts: hypergeometric(counts) for counts in observed}
    assert p_value(observed, plain) < FALSE_ALARM


def test_dirichlet_picks_rows_of_a_label_at_random():
    """One label, two users: every pair of the four rows is as likely as another."""
    pairs = count(
        [tuple(np.flatnonzero(dirichlet(np.zeros(4), 2, 1.0, s) == 0)) for s in range(1500)]
    )
    ways = [(i, j) for i in range(4) for j in range(i + 1, 4)]
    assert p_value(pairs, dict.fromkeys(ways, 1 / 6)) > FALSE_ALARM


def test_dirichlet_goes_from_one_label_per_user_to_the_shares():
    labels = np.repeat(np.arange(10), 1000)
    narrow = dirichlet(labels, 20, 1e-9, 0)
    wide = dirichlet(labels, 20, 1e9, 0)
    # 20 users of 500: the first ones find whole labels, only the last take what is left.
    assert len(np.unique(labels[narrow == 0])) == 1
    assert np.bincount(labels[wide == 0]).min() > 20


@given(
    users=st.integers(1, 5),
    per_user=st.integers(1, 4),
    rows_per_shard=st.integers(1, 4),
    seed=st.integers(0, 2**40),
    data=st.data(),
)
def test_shards_deal_whole_pieces_of_the_sorted_rows(users, per_user, rows_per_shard, seed, data):
    total = users * per_user * rows_per_shard
    labels = np.array(data.draw(st.lists(st.integers(0, 9), min_size=total, max_size=total)))
    user_of_row = shards(labels, users, per_user, seed)
    by_label = sorted(range(total), key=lambda row: (labels[row], row))
    pieces = user_of_row[by_label].reshape(users * per_user, rows_per_shard)
    assert (pieces == pieces[:, :1]).all()
    assert np.bincount(pieces[:, 0]).tolist() == [per_user] * users


@given(labels=st.lists(st.integers(0, 9), min_size=6, max_size=40), seed=st.integers(0, 99))
def test_ragged_shards_differ_by_at_most_one_row_each(labels, seed):
    sizes = np.bincount(shards(np.array(labels), 2, 3, seed))
    assert abs(int(sizes[0]) - int(sizes[1])) <= 3


def test_shards_are_dealt_equally_often():
    """Two users, two shards each of one row: six ways."""
    labels = np.arange(4)
    deals = count(["".join(map(str, shards(labels, 2, 2, seed))) for seed in range(1500)])
    ways = ["0011", "0101", "0110", "1001", "1010", "1100"]
    assert p_value(deals, dict.fromkeys(ways, 1 / 6)) > FALSE_ALARM


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: iid(3, 4, 0), "4 users for 3 rows"),
        (lambda: iid(3, 0, 0), "users is 0"),
        (lambda: iid(0, 1, 0), "rows is 0"),
        (lambda: iid(3, 2.0, 0), "users is 2.0"),
        (lambda: iid(3, True, 0), "users is True"),
        (lambda: iid(3, 2, -1), "seed is -1"),
        (lambda: iid(3, 2, None), "seed is None"),
        (lambda: dirichlet(np.zeros(3), 4, 1.0, 0), "4 users for 3 rows"),
        (lambda: dirichlet(np.zeros(3), 2, 0.0, 0), "alpha is 0.0"),
        (lambda: dirichlet(np.zeros(3), 2, np.nan, 0), "alpha is nan"),
        (lambda: dirichlet(np.zeros(3), 2, np.inf, 0), "alpha is inf"),
        (lambda: dirichlet(np.zeros(3), 2, "1", 0), "alpha is '1'"),
        (lambda: dirichlet(np.zeros((3, 1)), 2, 1.0, 0), r"labels have shape \(3, 1\)"),
        (lambda: shards(np.zeros(3), 2, 2, 0), "4 shards .* for 3 rows"),
        (lambda: shards(np.zeros(3), 2, 0, 0), "shards_per_user is 0"),
        (lambda: shards(np.zeros((3, 1)), 2, 1, 0), r"labels have shape \(3, 1\)"),
    ],
)
def test_bad_settings_are_refused(call, message):
    with pytest.raises(InvalidValueError, match=message):
        call()


@given(owners=st.lists(st.integers(0, 6), min_size=1, max_size=30))
def test_partition_equals_a_loop_and_keeps_every_row(owners):
    rows = np.arange(len(owners))
    store = partition({"row": rows, "x": rows[:, None] / 2}, np.array(owners))
    assert store.population == max(owners) + 1
    for user in range(store.population):
        expected = [row for row, owner in enumerate(owners) if owner == user]
        assert store.examples_of(user)["row"].tolist() == expected
        assert store.examples_of(user)["x"][:, 0].tolist() == [row / 2 for row in expected]
    assert sorted(store.fields["row"].tolist()) == rows.tolist()


def test_partition_takes_ids_and_users_without_rows():
    store = partition({"x": np.arange(3)}, np.array([1, 0, 1], dtype=np.uint64), ["a", "b", "c"])
    assert store.sizes.tolist() == [1, 2, 0]
    assert store.id_of(2) == "c"


@pytest.mark.parametrize(
    ("owners", "ids", "message"),
    [
        ([0, -1, 0], None, "integers ≥ 0"),
        ([0.0, 1.0, 0.0], None, "integers ≥ 0"),
        ([[0], [1], [2]], None, "integers ≥ 0"),
        ([0, 1], None, r"field 'x' has shape \(3,\)"),
        ([0, 2, 1], ["a", "b"], "names user 2"),
        ([0, 0, 1], ["a", "a"], "'a' occurs twice"),
    ],
)
def test_partition_refuses_what_does_not_fit(owners, ids, message):
    with pytest.raises(DataError, match=message):
        partition({"x": np.arange(3)}, np.array(owners), ids)
