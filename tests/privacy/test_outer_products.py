"""Sums of outer products: each user within the bound exactly, by itself, and as they should be."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.privacy import outer_products
from fedpriv.privacy.layout import granularity, squared_bound
from fedpriv.privacy.outer_products import CLIPPING_NORM, SHRINK, outer_product_sum
from tests.privacy.exact import squares

BOUND = squared_bound(CLIPPING_NORM)
numbers = (
    st.floats(-1.0, 1.0)
    | st.floats()
    | st.sampled_from([math.nan, math.inf, -math.inf, 1e38, 1e150, 1e154, 1e308, 5e-324, 1.0])
)


def rows_of(inputs: int) -> st.SearchStrategy[np.ndarray]:
    """What one user may hold, no row included."""
    return st.integers(0, 6).flatmap(
        lambda n: hnp.arrays(np.float64, (n, inputs), elements=numbers)
    )


people = st.integers(1, 6).flatmap(lambda d: st.lists(rows_of(d), min_size=1, max_size=5))


def total(users: Sequence[np.ndarray]) -> np.ndarray:
    offsets = np.cumsum([0, *map(len, users)])
    return outer_product_sum(np.concatenate(users), offsets)


def exact(rows: np.ndarray) -> np.ndarray:
    """Contribution of one user without rounding, entry by entry, in the units of the norm."""
    inputs = rows.shape[1]
    matrix = np.zeros((inputs, inputs))
    for row in rows:
        matrix += np.outer(row, row)
    matrix *= SHRINK / max(1.0, float(np.trace(matrix)))
    pairs = [(i, j) for i in range(inputs) for j in range(i + 1, inputs)]
    return np.array([*np.diag(matrix), *(math.sqrt(2.0) * matrix[pair] for pair in pairs)])


@given(people)
def test_no_user_adds_more_than_the_bound(users: list[np.ndarray]) -> None:
    for rows in users:
        added = total([rows])
        assert added.dtype == np.int64
        assert added.shape == (rows.shape[1] * (rows.shape[1] + 1) // 2,)
        assert squares(added) <= BOUND


@given(people, st.data())
def test_a_user_adds_its_own_and_changes_nothing_else(
    users: list[np.ndarray], data: st.DataObject
) -> None:
    gone = data.draw(st.sampled_from(range(len(users))))
    others = [*users[:gone], np.empty((0, users[0].shape[1])), *users[gone + 1 :]]
    np.testing.assert_array_equal(total(users) - total(others), total([users[gone]]))
    np.testing.assert_array_equal(total(users), sum(total([rows]) for rows in users))


@given(st.integers(1, 8), st.integers(1, 40), st.floats(0.01, 100.0), st.integers(0, 2**31))
def test_contributions_are_the_exact_ones_but_for_rounding(
    inputs: int, count: int, scale: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((count, inputs)) * scale / math.sqrt(count * inputs)
    found = total([rows]) * granularity(CLIPPING_NORM)
    # Rounding moves each number y of a user by less than 1 step of its rows; they are 2^12.25 to 1.
    off = math.sqrt(count * inputs) / 2**12.25
    near = 2.0 * off + off**2 + math.sqrt(inputs) * 2.0**-24
    assert np.linalg.norm(found - exact(rows)) <= math.sqrt(2.0) * near


@pytest.mark.parametrize("inputs", [1, 2, 64, 300])
def test_unit_rows_add_nearly_all_of_the_norm(inputs: int) -> None:
    rng = np.random.default_rng(inputs)
    axis = np.eye(inputs)[:1]
    drawn = rng.standard_normal((1, inputs))
    for row in (axis, drawn / np.linalg.norm(drawn), 1e6 * drawn, 1e150 * drawn):
        assert squares(total([row])) >= BOUND * (1 - 2.0**-6) ** 2


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e160])
def test_a_user_with_a_number_that_does_not_count_adds_zero(value: float) -> None:
    rows = np.ones((3, 4))
    rows[1, 2] = value
    sound = np.ones((2, 4))
    np.testing.assert_array_equal(total([rows]), 0)
    np.testing.assert_array_equal(total([sound, rows, sound]), 2 * total([sound]))
    assert np.any(total([sound]))


@given(people, st.integers(1, 200))
def test_what_rounding_lengthens_stays_within_the_bound(users: list[np.ndarray], most: int) -> None:
    # With few steps to a norm, rounding to the nearest often makes rows longer than allowed.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outer_products, "_MOST", most)
        for rows in users:
            assert 2 * squares(total([rows])) <= most**2


def test_rounding_that_lengthens_is_made_up_for_towards_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In steps the row is (1.58, 1.58) before rounding: (2, 2) is too long, (1, 1) is not.
    monkeypatch.setattr(outer_products, "_MOST", 5)
    assert total([np.ones((1, 2))]).tolist() == [0, 0, 1]
    # (2.23): 2 is not too long.
    assert total([np.ones((1, 1))]).tolist() == [2]
