"""The largest batch sum of a shuffled pass, against direct integration."""

import math

import mpmath
import numpy as np
import pytest
from scipy.stats import norm

from fedpriv.accounting.pld import delta_interval as delta_interval_of
from fedpriv.accounting.pld import epsilon_interval as epsilon_interval_of
from fedpriv.accounting.pld import queries
from fedpriv.accounting.pld.dominating_pairs import LargestBatchPair, PoissonPair, _largest_masses


def direct_delta(n: int, z: float, base: float, epsilon: float) -> float:
    """∫(f_P − e^ε·f_Q)₊ of the maximum in the worse direction, on a fine grid."""
    y = np.linspace(-12 * z, base + 1 + 12 * z, 400_001)
    others = (n - 1) * norm.logcdf(y / z)
    p, q = (
        np.exp(norm.logpdf(y, mean, z) + others)
        + (n - 1)
        * np.exp(norm.logcdf(y, mean, z) + others - norm.logcdf(y / z) + norm.logpdf(y, 0, z))
        for mean in (base + 1, base)
    )
    e = math.exp(epsilon)
    worst = max(float(np.maximum(p - e * q, 0).sum()), float(np.maximum(q - e * p, 0).sum()))
    return worst * (y[1] - y[0])


@pytest.mark.parametrize("base", [0.0, 1.0])
@pytest.mark.parametrize(("n", "z"), [(1, 1.0), (2, 0.5), (1000, 1.0), (100_000, 0.6), (50, 20.0)])
def test_one_pass_is_the_integral(n: int, z: float, base: float) -> None:
    for epsilon in (0.0, 0.5 / z, 2.0 / z):
        below, _ = delta_interval_of({LargestBatchPair(n, z, base): 1}, epsilon)
        exact = direct_delta(n, z, base, epsilon)
        assert below <= exact * (1 + 1e-9) + 1e-12
        assert below >= exact * 0.99 - 1e-9


def test_the_known_example() -> None:
    low, _ = epsilon_interval_of({LargestBatchPair(1000, 1.0, 1.0): 1}, 1e-6)
    assert 3.72 <= low <= 3.7245
    _, poisson = epsilon_interval_of({PoissonPair(1e-3, 1.0): 1000}, 1e-6)
    assert poisson < 0.19 * 2  # what a Poisson sample of the same size would cost


@pytest.mark.parametrize("base", [0.0, 1.0])
def test_two_batches_stay_below_the_whole_pass_and_that_below_a_gaussian(base: float) -> None:
    # From first principles: both sums, not only the larger one.
    z, epsilon = 0.9, 0.7
    x = np.linspace(-8.0, 10.0, 1501)
    near, far, none = (norm.pdf(x, mean, z) for mean in (base, base + 1, 0.0))
    p, q = ((np.outer(own, none) + np.outer(none, own)) / 2 for own in (far, near))
    step = (x[1] - x[0]) ** 2
    whole = float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) * step
    below, _ = delta_interval_of({LargestBatchPair(2, z, base): 1}, epsilon)
    _, above = delta_interval_of({PoissonPair(1.0, z): 1}, epsilon)
    assert 0 < below <= whole + 1e-7
    assert whole <= above


def test_one_batch_is_a_gaussian() -> None:
    for base in (0.0, 1.0):
        only = epsilon_interval_of({LargestBatchPair(1, 1.0, base): 4}, 1e-5)
        gaussian = epsilon_interval_of({PoissonPair(1.0, 1.0): 4}, 1e-5)
        assert only == pytest.approx(gaussian, rel=5e-4)


@pytest.mark.parametrize(("n", "z"), [(1, 1.0), (30, 0.3), (10_000, 2.0)])
def test_largest_masses_are_relatively_accurate(n: int, z: float) -> None:
    edges = np.linspace(-2 * z, 2 + 10 * z, 7)
    edges = np.sort(np.concatenate([edges, edges + z / 300]))
    masses = _largest_masses(edges, n, 1.0, z)[::2]
    for mass, low, high in zip(masses, edges[::2], edges[1::2], strict=True):
        with mpmath.workdps(60):
            a, b = (
                mpmath.ncdf((mpmath.mpf(y) - 1) / z) * mpmath.ncdf(mpmath.mpf(y) / z) ** (n - 1)
                for y in (low, high)
            )
            exact = float(b - a)
        if exact > 1e-30:
            assert mass == pytest.approx(exact, rel=2e-13)


def test_beyond_the_computed_range() -> None:
    assert LargestBatchPair(5, 1.0, 1.0).at(0.5, 2.0) == LargestBatchPair(4, 2.0, 1.0)
    assert epsilon_interval_of({LargestBatchPair(5, 2e6, 1.0): 1}, 1e-5)[0] == 0.0
    # Less noise is taken to be 0.05, which costs less.
    low, _ = epsilon_interval_of({LargestBatchPair(5, 0.01, 1.0): 1}, 1e-5)
    assert 200.0 < low < 300.0


def test_many_numbers_of_batches_become_few_larger_ones() -> None:
    passes = {LargestBatchPair(100 + i, 2.0, 1.0): 3 for i in range(100)}
    below = queries._few(passes)[1]
    assert len(below) <= 32
    assert sum(below.values()) == 300
    more = {LargestBatchPair(199, 2.0, 1.0): 300}
    fewer = {LargestBatchPair(100, 2.0, 1.0): 300}
    low = epsilon_interval_of(passes, 1e-6)[0]
    assert epsilon_interval_of(more, 1e-6)[0] < low < epsilon_interval_of(fewer, 1e-6)[1]


def test_more_batches_cost_less() -> None:
    lows = [epsilon_interval_of({LargestBatchPair(n, 1.0, 1.0): 3}, 1e-6)[0] for n in (1, 10, 1000)]
    assert lows[0] > lows[1] > lows[2] > 0
