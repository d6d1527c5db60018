"""The one-run test against a slow reading of its formula, and what it says of known mechanisms."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.optimize import linprog

from fedpriv.accounting import epsilon, poisson_gaussian, trade_off
from fedpriv.audit.verdict import (
    best_guesses,
    epsilon_of_mu,
    estimated_epsilon,
    least_mu,
    mu_of_epsilon,
    passes,
    refutes,
    right_guesses,
)


def slow_passes(inverse: Callable[[float], float], m: int, r: int, c: int, error: float) -> bool:
    """The recursion of "One-run audit at user level", as it is written."""
    rho, h = error * c / m, error * (r - c) / m
    for i in range(c - 1, -1, -1):
        grown = max(h, inverse(rho))
        rho = min(1.0, rho + i / (r - i) * (grown - h))
        h = grown
    return rho + h <= r / m


def gaussian(mu: float) -> Callable[[float], float]:
    return lambda rho: float(stats.norm.cdf(stats.norm.ppf(rho) - mu))


@settings(max_examples=30)
@given(
    st.integers(20, 300),
    st.floats(0.05, 0.9),
    st.floats(0.5, 1.0),
    st.floats(0.001, 0.3),
    st.floats(0.0, 4.0),
)
def test_claims_pass_as_the_formula_says(
    m: int, share: float, right: float, error: float, mu: float
) -> None:
    r = max(2, int(m * share))
    c = min(r, math.ceil(r * right))

    def inverse(power: np.ndarray) -> np.ndarray:
        return np.array([gaussian(mu)(float(each)) for each in power])

    assert passes(inverse, m, r, c, error)[0] == slow_passes(gaussian(mu), m, r, c, error)


@pytest.mark.parametrize(("m", "r", "c"), [(1000, 150, 119), (300, 60, 45), (100, 20, 20)])
def test_the_largest_mu_that_is_refuted_is_found_from_below(m: int, r: int, c: int) -> None:
    found = least_mu(m, r, c, 0.05)
    assert not slow_passes(gaussian(found), m, r, c, 0.05)
    assert slow_passes(gaussian(found + 2e-4), m, r, c, 0.05)


def test_guesses_no_better_than_coins_refute_nothing() -> None:
    assert least_mu(1000, 100, 50, 0.05) == 0.0
    assert least_mu(20, 2, 2, 0.05) == 0.0


@pytest.mark.parametrize(("epsilon_", "delta"), [(0.5, 1e-3), (2.0, 1e-5), (8.0, 1e-6)])
def test_mu_and_epsilon_are_those_of_a_gaussian_mechanism(epsilon_: float, delta: float) -> None:
    mu = mu_of_epsilon(epsilon_, delta)
    # Of one round of everybody z = 1/μ, which another analysis prices.
    exact = epsilon([poisson_gaussian(1.0, 1.0 / mu)], delta)
    assert exact.epsilon_low - 1e-6 <= epsilon_ <= exact.epsilon + 1e-6
    assert epsilon_of_mu(mu, delta) == pytest.approx(epsilon_)


def test_epsilon_of_mu_has_its_ends() -> None:
    assert epsilon_of_mu(0.0, 1e-3) == 0.0
    assert epsilon_of_mu(1e-6, 1e-3) == 0.0
    assert epsilon_of_mu(0.5, 0.999) == 0.0
    assert epsilon_of_mu(20.0, 1e-10) > 200.0


@pytest.mark.slow
@pytest.mark.parametrize(("m", "r"), [(1000, 150), (300, 100)])
def test_the_ledgers_curve_refutes_what_its_gaussian_does(m: int, r: int) -> None:
    # Rounds of everybody are exactly G_μ, so both readings agree, but for the curve's grid.
    off = trade_off([poisson_gaussian(1.0, 4.0, count=8)])
    mu = math.sqrt(8) / 4.0
    refuted = [refutes(off, m, r, c, 0.05) for c in range(r // 2, r + 1)]
    exact = [not slow_passes(gaussian(mu), m, r, c, 0.05) for c in range(r // 2, r + 1)]
    assert refuted == sorted(refuted)
    assert abs(sum(refuted) - sum(exact)) <= 1
    assert any(exact)
    assert not all(exact)
    # The curve is a lower bound of the truth: it never refutes more.
    assert sum(refuted) <= sum(exact)


def most_probable(pairs: tuple[tuple[float, float], ...], m: int, r: int, c: int) -> float:
    """The largest chance of c right guesses or more, over all laws p of how many are right.

    Σ_{i≥j} i·p_i/m is the chance to be right about a canary and in j guesses or more. Its coin
    turned around, that guess is wrong and one less is right, as of f-DP releases: all guesses are
    functions of these.
    """
    i, rows, limits = np.arange(r + 1), [], []
    for j in range(1, r + 1):
        right, wrong = np.where(i >= j, i / m, 0.0), np.where(i >= j - 1, (r - i) / m, 0.0)
        for eps, delta in pairs:
            rows += [right - math.exp(eps) * wrong, right - math.exp(-eps) * wrong]
            limits += [delta, 1.0 - math.exp(-eps) * (1.0 - delta)]
    found = linprog(
        -(i >= c).astype(float), np.array(rows), limits, np.ones((1, r + 1)), [1.0], (0.0, 1.0)
    )
    return -float(found.fun)


@pytest.mark.parametrize(("m", "r", "c"), [(40, 20, 16), (60, 30, 25), (100, 20, 19), (80, 60, 50)])
def test_a_claim_is_refuted_if_no_law_that_it_allows_is_right_so_often(
    m: int, r: int, c: int
) -> None:
    off = trade_off([poisson_gaussian(0.3, 1.5, count=20)])
    most = most_probable(off.pairs, m, r, c)
    assert 1e-3 < most < 0.9
    assert refutes(off, m, r, c, most * 1.001)
    assert not refutes(off, m, r, c, most * 0.999)


def test_a_true_claim_is_refuted_in_at_most_one_of_twenty_runs() -> None:
    random, m, r, mu = np.random.default_rng(1), 100, 20, 1.0
    refuted = 0
    for _ in range(400):
        included = random.random(m) < 0.5
        right = right_guesses(random.normal(size=m) + mu * included, included, r)
        refuted += not slow_passes(gaussian(mu), m, r, right, 0.05)
    assert refuted <= 400 * 0.05


def test_guesses_that_stand_and_fall_together_refute_no_true_claim() -> None:
    # One number is released for all canaries, and all guesses follow from it.
    random, m, r, mu, refuted = np.random.default_rng(2), 100, 20, 1.0, 0
    for _ in range(400):
        included = random.random(m) < 0.5
        released = mu * included.sum() + random.normal()
        said = released > mu * m / 2
        correct = int((included[:r] == said).sum())
        refuted += not slow_passes(gaussian(mu), m, r, correct, 0.05)
    assert refuted <= 400 * 0.05


def test_the_surest_canaries_are_guessed_about() -> None:
    ratios = np.array([0.1, -3.0, 2.0, 0.0, -0.2, 5.0])
    included = np.array([True, False, True, True, True, False])
    assert right_guesses(ratios, included, 4) == 2  # right about 1 and 2, wrong about 4 and 5


@pytest.mark.parametrize(("m", "eps"), [(1000, 2.0), (1000, 10.0), (5000, 10.0)])
def test_guesses_are_as_many_as_give_the_largest_bound(m: int, eps: float) -> None:
    mu = mu_of_epsilon(eps, 1e-3)
    r = best_guesses(m, mu, 0.05)
    assert r % 2 == 0

    def expected(guesses: int) -> float:
        random, found = np.random.default_rng(3), []
        for _ in range(60):
            included = random.random(m) < 0.5
            found.append(right_guesses(random.normal(size=m) + mu * included, included, guesses))
        return least_mu(m, guesses, int(np.mean(found)), 0.05)

    best = expected(r)
    assert best >= 0.95 * max(expected(other) for other in (r // 4 * 2, r, min(3 * r // 2 * 2, m)))


def test_few_canaries_still_have_guesses() -> None:
    assert best_guesses(20, 0.01, 0.05) >= 2
    assert best_guesses(20, 20.0, 0.05) >= 2


def slow_delta(p: tuple[float, float], q: tuple[float, float], eps: float) -> float:
    def excess(x: float) -> float:
        return max(0.0, stats.norm.pdf(x, *p) - math.exp(eps) * stats.norm.pdf(x, *q))

    low = min(mean - 12 * stddev for mean, stddev in (p, q))
    high = max(mean + 12 * stddev for mean, stddev in (p, q))
    return float(integrate.quad(excess, low, high, limit=2000)[0])


@pytest.mark.parametrize("laws", [((0.4, 0.8), (-0.2, 0.8)), ((0.4, 0.9), (-0.2, 0.7))])
def test_the_estimate_is_that_of_two_normal_laws(laws: tuple[tuple[float, float], ...]) -> None:
    quantiles = stats.norm.ppf((np.arange(4000) + 0.5) / 4000)
    values = [mean + stddev * quantiles / quantiles.std(ddof=1) for mean, stddev in laws]
    included = np.repeat([True, False], 4000)
    found = estimated_epsilon(np.concatenate(values), included, 1e-2)
    assert found is not None
    worst = max(slow_delta(laws[0], laws[1], found), slow_delta(laws[1], laws[0], found))
    assert worst == pytest.approx(1e-2, rel=1e-2)


@pytest.mark.parametrize("shift", [0.0, 3.0, 1e6])
@pytest.mark.parametrize("ratio", [1e-7, 1e-3, 1e5])
def test_laws_that_have_little_in_common_have_a_large_estimate(shift: float, ratio: float) -> None:
    values = stats.norm.ppf((np.arange(40) + 0.5) / 40)
    sums = np.concatenate([shift + ratio * values, values])
    found = estimated_epsilon(sums, np.repeat([True, False], 40), 1e-3)
    assert found is not None
    assert found > 3.0  # of the wider law, hardly anything lies where the narrower one does


@pytest.mark.parametrize("unit", [1e-40, 1e30])
def test_the_estimate_does_not_depend_on_the_unit(unit: float) -> None:
    values = np.array([0.3, 1.9, 0.8, 0.0, -0.7, 0.9])
    included = np.repeat([True, False], 3)
    expected = estimated_epsilon(values, included, 1e-4)
    assert expected is not None
    assert estimated_epsilon(unit * values, included, 1e-4) == pytest.approx(expected, rel=1e-9)


def test_the_estimate_of_a_law_as_narrow_as_rounding_is_large() -> None:
    sums = np.array([1.0, 1.0 + 2.0**-52, 0.0, -1e-7])
    found = estimated_epsilon(sums, np.array([True, True, False, False]), 1e-4)
    assert found is not None
    assert found > 3.0


def test_there_is_no_estimate_without_a_spread() -> None:
    included = np.array([True, True, False, False])
    assert estimated_epsilon(np.array([1.0, 1.0, 0.0, 0.5]), included, 1e-2) is None
    assert estimated_epsilon(np.array([1.0, 2.0, 0.0]), np.array([True, True, False]), 1e-2) is None
    same = np.array([0.0, 1.0, 0.0, 1.0])
    assert estimated_epsilon(same, included, 1e-2) == 0.0
