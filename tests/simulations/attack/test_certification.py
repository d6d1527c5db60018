"""Certified bounds on ε: against SciPy's binomial test, and their coverage by simulation."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr
from scipy.stats import binom, binomtest

from fedpriv.accounting.gaussian import epsilon_interval
from simulations.attack.certification import (
    ThresholdTest,
    best_test,
    certified,
    certify,
    largest_certifiable,
    largest_rate,
    least_rate,
)


@pytest.mark.parametrize("runs", [1, 2, 7, 40, 500])
def test_rates_are_those_of_clopper_and_pearson(runs: int) -> None:
    successes = np.unique(np.linspace(0, runs, 9).astype(int))
    low, high = least_rate(successes, runs, 0.025), largest_rate(successes, runs, 0.025)
    for k, least, most in zip(successes.tolist(), low, high, strict=True):
        oracle = binomtest(k, runs).proportion_ci(0.95, method="exact")
        assert (least, most) == (pytest.approx(oracle.low), pytest.approx(oracle.high))


@given(st.integers(1, 300), st.data())
def test_a_rate_at_its_bound_would_hardly_be_seen(runs: int, data: st.DataObject) -> None:
    seen = data.draw(st.integers(0, runs))
    low = float(least_rate(np.array(seen), runs, 0.025))
    high = float(largest_rate(np.array(seen), runs, 0.025))
    assert low <= seen / runs <= high
    if seen:  # so many or more
        assert binom.sf(seen - 1, runs, low) == pytest.approx(0.025)
    if seen < runs:  # so many or fewer
        assert binom.cdf(seen, runs, high) == pytest.approx(0.025)


@pytest.mark.parametrize(("hits", "false"), [(90, 3), (97, 60), (50, 50), (3, 90), (100, 0)])
def test_a_bound_is_the_larger_of_both_directions(hits: int, false: int) -> None:
    delta = 1e-2
    true = binomtest(hits, 100).proportion_ci(0.95, method="exact").low
    alarm = binomtest(false, 100).proportion_ci(0.95, method="exact").high
    quotients = [(true - delta) / alarm, (1.0 - alarm - delta) / (1.0 - true)]
    expected = max(0.0, *(math.log(each) if each > 0.0 else 0.0 for each in quotients))
    assert float(certified(np.array(hits), 100, np.array(false), 100, delta)) == pytest.approx(
        expected
    )


def test_nothing_is_certified_of_what_is_seen_as_often_or_never() -> None:
    for hits in (0, 5, 10):
        assert float(certified(np.array(hits), 10, np.array(hits), 10, 0.0)) == 0.0


@pytest.mark.parametrize("runs", [4, 30, 1000])
def test_no_test_certifies_more_than_one_that_never_errs(runs: int) -> None:
    counts = np.arange(0, runs + 1, max(1, runs // 30))
    hits, false = np.meshgrid(counts, counts)
    most = largest_certifiable(runs, 1e-3)
    assert certified(hits, runs, false, runs, 1e-3).max() <= most
    # All hits have probability α/2 at a rate of (α/2)^(1/n), and so have no false alarms.
    rate = 0.025 ** (1.0 / runs)
    assert most == pytest.approx(max(0.0, math.log((rate - 1e-3) / (1.0 - rate))), abs=1e-9)


@given(
    st.lists(st.integers(-4, 4), min_size=1, max_size=25),
    st.lists(st.integers(-4, 4), min_size=1, max_size=25),
)
def test_the_best_test_is_the_best_of_all_thresholds_on_both_sides(
    without: list[int], with_one: list[int]
) -> None:
    one, other = np.array(without, float), np.array(with_one, float)
    found, chosen = best_test(one, other, 1e-3)
    tests = [ThresholdTest(cut, above) for cut in np.arange(-4.5, 5.0) for above in (True, False)]
    assert found == pytest.approx(max(certify(each, one, other, 1e-3).epsilon for each in tests))
    assert certify(chosen, one, other, 1e-3).epsilon == pytest.approx(found)


def test_neighbouring_floats_are_told_apart() -> None:
    low = np.full(200, 1.0)
    high = np.nextafter(low, 2.0)
    found, chosen = best_test(low, high, 0.0)
    assert found == pytest.approx(largest_certifiable(200, 0.0))
    assert certify(chosen, low, high, 0.0).epsilon == pytest.approx(found)


@pytest.mark.parametrize(
    ("true", "false", "runs"), [(0.6, 0.2, 60), (0.95, 0.5, 200), (0.1, 0.01, 500)]
)
def test_a_fixed_test_certifies_too_much_at_most_once_in_twenty(
    true: float, false: float, runs: int
) -> None:
    rng = np.random.default_rng(0)
    hits, alarms = rng.binomial(runs, true, 20_000), rng.binomial(runs, false, 20_000)
    epsilon = max(math.log(true / false), math.log((1.0 - false) / (1.0 - true)))
    beyond, careless = (
        float((certified(hits, runs, alarms, runs, 0.0, confidence) > epsilon).mean())
        for confidence in (0.95, 0.2)
    )
    assert beyond <= 0.05 < careless


@pytest.mark.parametrize("z", [0.5, 1.0, 3.0])
def test_choosing_the_test_among_many_on_other_runs_leaves_the_confidence(z: float) -> None:
    """Five numbers of a Gaussian query, four of them noise: the whole protocol of the suite."""
    rng, delta, runs = np.random.default_rng(1), 1e-3, 100
    epsilon, beyond, bounds = epsilon_interval(delta, z)[0], 0, []
    for _ in range(200):
        worlds = []
        for moved in (0.0, 1.0 / z):
            numbers = rng.standard_normal((5, 2 * runs))
            numbers[2] += moved
            worlds.append(numbers)
        tests = [best_test(*(w[at, :runs] for w in worlds), delta) for at in range(5)]
        at = max(range(5), key=lambda each: tests[each][0])
        bounds.append(certify(tests[at][1], *(w[at, runs:] for w in worlds), delta).epsilon)
        beyond += bounds[-1] > epsilon
    assert beyond / 200 <= 0.05
    assert z > 1.0 or np.median(bounds) > 0.1 * epsilon  # and it is no empty statement


def test_the_bound_of_many_runs_comes_near_the_truth() -> None:
    """Of the Gaussian mechanism with μ = 1, the best test at each ε is known."""
    runs, epsilon = 10**8, 1.0
    cut = 0.5 + epsilon  # where the likelihood ratio is e^ε
    true, false = ndtr(1.0 - cut), ndtr(-cut)
    delta = true - math.exp(epsilon) * false
    hits, alarms = (np.array(round(rate * runs)) for rate in (true, false))
    assert 0.998 * epsilon < float(certified(hits, runs, alarms, runs, delta)) <= epsilon
