"""Composition of pairs: validity against certified intervals, tightness against slow twins."""

import math
from collections.abc import Callable
from itertools import product

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import accountant as published
from dp_accounting.pld import common
from hypothesis import given, settings
from hypothesis import strategies as st
from poisson_rounds import epsilon_interval

from fedpriv.accounting import gaussian
from fedpriv.accounting.classical import advanced_epsilon, amplified_epsilon, basic_epsilon
from fedpriv.errors import InvalidValueError

Rounds = dict[tuple[float, float], int]

GRID: list[Rounds] = [
    {(q, z): count}
    for q in (1e-4, 0.01, 0.3, 1.0)
    for z in (0.4, 1.0, 4.0, 30.0)
    for count in (1, 20, 5000)
]
MIXED: list[Rounds] = [
    {(0.01, 1.0): 100, (0.02, 2.0): 300, (0.5, 9.0): 20},
    {(1.0, 50.0): 10, (0.001, 0.5): 10},
    {(0.01 + i * 1e-4, 3.0 + i * 0.01): 1 + i for i in range(40)},
]


DELTAS = (1e-9, 1e-5, 0.05)
# Of the grid each at one δ, so that each q, z and count meets all three.
AT_DELTAS = [(rounds, DELTAS[(i + i // 3) % 3]) for i, rounds in enumerate(GRID)]
AT_DELTAS += product(MIXED, DELTAS)


def named(value: Rounds | float) -> str:
    """A short name of a case."""
    many = isinstance(value, dict) and len(value) > 3
    return f"{len(value)} distinct" if many else str(value)


def round_epsilon(q: float, z: float, delta: float) -> float:
    """ε of one round that may spend δ, step by step."""
    if delta >= q:
        return 0.0
    return math.log1p(q * math.expm1(gaussian.epsilon(delta / q, z)))


@pytest.mark.parametrize(("rounds", "delta"), AT_DELTAS, ids=named)
def test_both_are_upper_bounds(rounds: Rounds, delta: float) -> None:
    low, _ = epsilon_interval(rounds, delta)
    advanced, basic = advanced_epsilon(rounds, delta), basic_epsilon(rounds, delta)
    assert low <= advanced <= basic < math.inf


@pytest.mark.parametrize("rounds", [GRID[14], GRID[17], GRID[35], *MIXED[:2]], ids=named)
def test_basic_is_the_sum_of_the_rounds(rounds: Rounds) -> None:
    each = 1e-5 / sum(rounds.values())
    slow = sum(n * round_epsilon(q, z, each) for (q, z), n in rounds.items())
    assert basic_epsilon(rounds, 1e-5) == pytest.approx(slow, rel=1e-9)


def test_one_unsampled_round_is_the_gaussian_mechanism() -> None:
    for z in (0.3, 1.0, 8.0):
        truth = gaussian.epsilon(1e-5, z)
        assert truth <= basic_epsilon({(1.0, z): 1}, 1e-5) <= truth * (1 + 1e-9)


def test_one_sampled_round_is_exactly_the_amplified_pair() -> None:
    # One round: removing a user costs (log(1 + q(e^ε₀ − 1)), q·δ₀) and no less.
    for q, z in ((0.01, 0.5), (0.2, 1.0), (0.9, 3.0)):
        low, up = epsilon_interval({(q, z): 1}, 1e-6)
        assert low <= basic_epsilon({(q, z): 1}, 1e-6) <= up * (1 + 1e-6)


@pytest.mark.parametrize("rounds", [GRID[14], GRID[17], GRID[20], GRID[35], *MIXED], ids=named)
def test_advanced_is_the_best_of_all_splits(rounds: Rounds) -> None:
    delta, total = 1e-5, sum(rounds.values())
    slow = basic_epsilon(rounds, delta)
    for share in 1 / (1 + np.exp(np.linspace(-12, 12, 121))):
        pairs = [
            (round_epsilon(q, z, (1 - share) * delta / total), n) for (q, z), n in rounds.items()
        ]
        mean = sum(n * e * (math.exp(e) - 1) / (math.exp(e) + 1) for e, n in pairs)
        square = sum(n * e**2 for e, n in pairs)
        slow = min(slow, mean + math.sqrt(2 * square * math.log(1 / (share * delta))))
    assert advanced_epsilon(rounds, delta) == pytest.approx(slow, rel=1e-3)
    assert advanced_epsilon(rounds, delta) <= slow * (1 + 1e-9)


@pytest.mark.parametrize(("q", "z", "count"), [(0.01, 4.0, 500), (1.0, 100.0, 400)])
def test_advanced_lies_between_the_optimal_and_the_textbook(q: float, z: float, count: int) -> None:
    optimal, textbook = math.inf, math.inf
    delta = 1e-5
    for share in (0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97):
        each = (1 - share) * delta / count
        epsilon = round_epsilon(q, z, each)
        pair = common.DifferentialPrivacyParameters(epsilon, each)
        found = published.advanced_composition(pair, count, delta)
        assert found is not None
        optimal = min(optimal, found)
        tail = math.sqrt(2 * count * math.log(1 / (share * delta))) * epsilon
        textbook = min(textbook, tail + count * epsilon * math.expm1(epsilon))
    # The library's optimum may be smaller at another split, by less than this grid's coarseness.
    assert 0.98 * optimal <= advanced_epsilon({(q, z): count}, delta) <= textbook


@settings(max_examples=60, deadline=None)
@given(st.floats(-6.0, 0.0), st.floats(-0.4, 1.5), st.integers(1, 10**5), st.floats(-12.0, -1.0))
def test_grows_with_rounds_and_falls_with_noise_and_delta(
    log_q: float, log_z: float, count: int, log_delta: float
) -> None:
    q, z, delta = 10.0**log_q, 10.0**log_z, 10.0**log_delta
    for price in (basic_epsilon, advanced_epsilon):
        cost = price({(q, z): count}, delta)
        # The search for the split is not exact.
        assert price({(q, z): 2 * count}, delta) >= cost * (1 - 1e-6)
        assert price({(q, 1.1 * z): count}, delta) <= cost * (1 + 1e-6)
        assert price({(q, z): count}, delta / 2) >= cost * (1 - 1e-6)


def test_splitting_a_count_over_equal_rounds_changes_nothing() -> None:
    together, apart = {(0.01, 2.0): 60}, {(0.01, 2.0): 20, (0.01, 2.0 + 1e-15): 40}
    for price in (basic_epsilon, advanced_epsilon):
        assert price(together, 1e-6) == pytest.approx(price(apart, 1e-6), rel=1e-9)


def test_amplification_against_high_precision() -> None:
    q = np.array([1e-12, 1e-3, 0.5, 1.0])
    for epsilon in (0.0, 1e-9, 0.3, 5.0, 699.0, 701.0, 5000.0):
        found = amplified_epsilon(np.full(4, epsilon), q)
        with mpmath.workdps(60):
            truth = [mpmath.log1p(mpmath.mpf(x) * mpmath.expm1(epsilon)) for x in q]
        np.testing.assert_allclose(found, [float(t) for t in truth], rtol=1e-13)
        assert np.all(found <= epsilon * (1 + 1e-15))


def test_linear_amplification_would_be_wrong() -> None:
    # q·ε₀ in place of log(1 + q(e^ε₀ − 1)) is below the truth where ε₀ is not small.
    q, z, delta = 0.01, 0.5, 1e-5
    assert q * gaussian.epsilon(delta / q, z) < epsilon_interval({(q, z): 1}, delta)[0] / 5


@pytest.mark.parametrize("price", [basic_epsilon, advanced_epsilon])
def test_ends(price: Callable[[Rounds, float], float]) -> None:
    assert price({}, 1e-5) == 0.0
    assert price({(0.1, 0.0): 1, (0.1, 1.0): 1}, 1e-5) == math.inf
    assert price({(1e-9, 1.0): 10}, 1e-5) == 0.0  # δ covers that anybody is sampled
    for q in (1e-300, 0.5, 1.0):
        for z in (1e-149, 1e-20, 1e20, 1e300):
            for delta in (5e-324, 1e-10, 1 - 2**-53):
                assert 0.0 <= price({(q, z): 3}, delta) < math.inf
    with pytest.raises(InvalidValueError, match=r"delta is 0.0; it must be in \(0, 1\)"):
        price({}, 0.0)
    with pytest.raises(InvalidValueError, match="count is 0; it must be at least 1"):
        price({(0.1, 1.0): 0}, 0.1)


def test_ten_thousand_different_rounds() -> None:
    rounds = {(0.01 + i * 1e-7, 2.0 + i * 1e-4): 1 for i in range(10_000)}
    found = advanced_epsilon(rounds, 1e-6)
    assert advanced_epsilon({(0.011, 2.0): 10_000}, 1e-6) > found
    assert advanced_epsilon({(0.01, 3.0): 10_000}, 1e-6) < found
