"""The sensitivity of correlated noise, against every participation pattern and every update."""

import math
from collections.abc import Iterator
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.round_counts import strategy_sensitivity

ULPS = 1e-11
"""More than all roundings up of the short strategies here."""


def matrix(strategy: tuple[float, ...], n: int) -> np.ndarray:
    c = np.zeros((n, n))
    for row in range(n):
        for column in range(max(0, row - len(strategy) + 1), row + 1):
            c[row, column] = strategy[row - column]
    return c


def patterns(n: int, k: int, b: int) -> Iterator[tuple[int, ...]]:
    """Every set of 1 to k of n rounds, any two at least b apart."""
    for size in range(1, k + 1):
        for chosen in combinations(range(n), size):
            if all(y - x >= b for x, y in pairwise(chosen)):
                yield chosen


def with_equal_updates(strategy: tuple[float, ...], n: int, k: int, b: int) -> float:
    """max ‖Σ_i C[:, i]‖ over all patterns: exact if no entry of CᵀC is negative."""
    c = matrix(strategy, n)
    return max(float(np.linalg.norm(c[:, p].sum(axis=1))) for p in patterns(n, k, b))


def absolute_gram(strategy: tuple[float, ...], n: int, k: int, b: int) -> float:
    """max (Σ_ij |G_ij|)^(1/2) over all patterns: no update can do more."""
    c = matrix(strategy, n)
    gram = np.abs(c.T @ c)
    return max(math.sqrt(gram[np.ix_(p, p)].sum()) for p in patterns(n, k, b))


def with_some_updates(
    strategy: tuple[float, ...], n: int, k: int, b: int, rng: np.random.Generator
) -> float:
    """‖Σ_i C[:, i]·u_iᵀ‖_F for unit vectors u_i that a local search made large."""
    c, worst = matrix(strategy, n), 0.0
    for pattern in patterns(n, k, b):
        columns = c[:, pattern]
        updates = rng.normal(size=(len(pattern), len(pattern)))
        for _ in range(30):  # the best u_i for the others is along their sum as C[:, i] sees it
            updates /= np.linalg.norm(updates, axis=1, keepdims=True)
            for i in range(len(pattern)):
                pull = (
                    columns[:, i] @ columns @ updates - columns[:, i] @ columns[:, i] * updates[i]
                )
                norm = np.linalg.norm(pull)
                if norm > 0:
                    updates[i] = pull / norm
        worst = max(worst, float(np.linalg.norm(columns @ updates)))
    return worst


@st.composite
def schedules(draw: st.DrawFn, most: int = 7) -> tuple[int, int, int]:
    n = draw(st.integers(1, most))
    return n, draw(st.integers(1, n)), draw(st.integers(1, n))


@st.composite
def series(draw: st.DrawFn, *, decreasing: bool) -> tuple[tuple[float, ...], int, int, int]:
    n, k, b = draw(schedules())
    sizes = st.floats(0.0, 1.0) if decreasing else st.floats(-1.0, 1.0)
    others = draw(st.lists(sizes, max_size=n - 1))
    if decreasing:
        others = sorted(others, reverse=True)
    return (1.0, *others), n, k, b


class TestGuarantees:
    @settings(max_examples=150, deadline=None)
    @given(series(decreasing=True))
    def test_decreasing_coefficients_have_the_exact_value(self, case):
        found = strategy_sensitivity(*case)
        expected = with_equal_updates(*case)
        assert expected <= found <= expected * (1 + ULPS)
        assert found == pytest.approx(absolute_gram(*case), rel=1e-9)

    @settings(max_examples=100, deadline=None)
    @given(series(decreasing=False))
    def test_no_updates_pass_the_bound(self, case):
        found = strategy_sensitivity(*case)
        assert with_equal_updates(*case) <= found
        assert absolute_gram(*case) <= found * (1 + 1e-15)

    @settings(max_examples=30, deadline=None)
    @given(series(decreasing=False), st.integers(0, 2**32 - 1))
    def test_nor_do_updates_that_were_searched_for(self, case, seed):
        reached = with_some_updates(*case, np.random.default_rng(seed))
        assert reached <= strategy_sensitivity(*case)

    @settings(max_examples=60, deadline=None)
    @given(st.data())
    def test_rounds_that_do_not_meet_cost_the_same_each(self, data):
        b, k = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
        others = data.draw(st.lists(st.floats(-1.0, 1.0), max_size=b - 1))
        strategy, n = (0.5, *others), k * b
        found = strategy_sensitivity(strategy, n, k, b)
        assert found == pytest.approx(math.hypot(*strategy) * math.sqrt(k), rel=1e-12)
        assert found == pytest.approx(absolute_gram(strategy, n, k, b), rel=1e-12)

    @pytest.mark.parametrize(("n", "k", "b"), [(1, 1, 1), (5, 5, 1), (9, 3, 4), (2**40, 2**20, 7)])
    def test_fresh_noise_has_the_root_of_the_participations(self, n, k, b):
        found = strategy_sensitivity((1.0,), n, k, b)
        assert math.sqrt(k) <= found <= math.sqrt(k) * (1 + ULPS)

    @settings(max_examples=100, deadline=None)
    @given(series(decreasing=True) | series(decreasing=False), st.floats(1e-3, 1e3))
    def test_grows_in_k_and_n_falls_in_b_and_scales(self, case, factor):
        strategy, n, k, b = case
        found = strategy_sensitivity(*case)
        slack = 1 + 1e-14
        assert found <= strategy_sensitivity(strategy, n + 1, min(k + 1, n), b) * slack
        assert found <= strategy_sensitivity(strategy, n + 1, k, b) * slack
        assert strategy_sensitivity(strategy, n, k, min(b + 1, n)) <= found * slack
        scaled = tuple(factor * c for c in strategy)
        assert strategy_sensitivity(scaled, n, k, b) == pytest.approx(factor * found, rel=1e-12)

    def test_no_more_participations_count_than_fit(self):
        strategy = (1.0, 0.5)
        assert strategy_sensitivity(strategy, 10, 10, 4) == strategy_sensitivity(strategy, 10, 3, 4)


class TestKnownValues:
    def test_root_of_the_prefix_sum_for_one_participation(self):
        """c_l = C(2l, l)/4^l: the square root of the matrix of ones (Fichtenberger et al. 2022)."""
        n = 50
        c = tuple(math.comb(2 * i, i) / 4**i for i in range(n))
        root = matrix(c, n)
        assert np.allclose(root @ root, np.tri(n))
        found = strategy_sensitivity(c, n, 1, 1)
        assert found == pytest.approx(math.sqrt(sum(x * x for x in c)), rel=1e-12)

    def test_prefix_sums_themselves(self):
        """C is the matrix of ones: the k first rounds add up to 1, 2, …, k, k, …, k."""
        n, k = 10, 3
        expected = math.sqrt(1 + 4 + 9 * (n - 2))
        assert strategy_sensitivity((1.0,) * n, n, k, 1) == pytest.approx(expected, rel=1e-12)

    def test_momentum_of_alternating_signs_is_bounded_by_its_absolute_value(self):
        alternating = tuple((-0.5) ** i for i in range(6))
        positive = tuple(0.5**i for i in range(6))
        found = strategy_sensitivity(alternating, 6, 2, 1)
        # Updates of opposite signs in neighbouring rounds make up for the signs of C.
        assert found >= strategy_sensitivity(positive, 6, 2, 1) * (1 - 1e-12)


class TestLongSeries:
    @pytest.mark.parametrize(
        ("length", "n", "k", "b"),
        [(300, 300, 300, 1), (299, 1000, 100, 10), (40, 1000, 1000, 1), (40, 1003, 30, 33),
         (7, 1000, 60, 16), (1000, 1000, 3, 400), (16, 1000, 1000, 16), (17, 991, 62, 16)],
    )  # fmt: skip
    def test_equals_the_sum_of_shifted_columns(self, length, n, k, b):
        c = 1.0 / np.arange(1.0, 1.0 + length)
        column = np.zeros(n)
        for first in range(0, min(k, 1 + (n - 1) // b) * b, b):
            column[first : first + length] += c[: n - first]
        expected = float(np.linalg.norm(column))
        assert strategy_sensitivity(tuple(c.tolist()), n, k, b) == pytest.approx(
            expected, rel=1e-11
        )

    def test_a_long_series_needs_only_the_length_of_its_strategy(self):
        once = strategy_sensitivity((1.0, 0.5), 2**20, 2**10, 2**10)
        assert strategy_sensitivity((1.0, 0.5), 2**60, 2**50, 2**10) == pytest.approx(
            once * 2**20, rel=1e-12
        )
        rising = strategy_sensitivity((0.5, 1.0), 2**60, 2**50, 2**10)
        assert rising == pytest.approx(once * 2**20, rel=1e-12)

    @pytest.mark.parametrize("unit", [5e-324, 1e-200, 1e200, 1e308])
    def test_extreme_coefficients_neither_vanish_nor_overflow(self, unit):
        assert strategy_sensitivity((unit, unit), 9, 1, 1) == pytest.approx(math.sqrt(2) * unit)

    def test_what_no_double_holds_is_infinite(self):
        assert strategy_sensitivity((1e308,) * 9, 9, 9, 1) == math.inf
