"""Poisson-sampled examples of a user: the pair, its bounds by few counts, and that it is worst."""

import math
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, norm

from fedpriv.accounting.pld import delta_interval as delta_interval_of
from fedpriv.accounting.pld import epsilon_interval as epsilon_interval_of
from fedpriv.accounting.pld.lattice import Lattice, dominated, dominating
from fedpriv.accounting.pld.sampled_examples import PoissonPair, binomial
from fedpriv.accounting.round_counts import Direction
from tests.accounting.pair_conformance import PairConformance, delta_of

K = 3


def mixture_delta(k: int, q: float, z: float, epsilon: float, direction: Direction) -> float:
    """E[(1 − e^{ε − L})_+] of one round: P and Q beyond the x with L(x) = ±ε, at 60 digits."""
    with mpmath.workdps(60):
        q, z, e = mpmath.mpf(q), mpmath.mpf(z), mpmath.mpf(epsilon)
        weights = [mpmath.binomial(k, j) * q**j * (1 - q) ** (k - j) for j in range(k + 1)]
        goal = mpmath.exp(direction * e) - weights[0]
        if goal <= 0:  # every loss is on one side of ε
            return float(1 - mpmath.exp(e)) if direction is Direction.REMOVE else 0.0

        def excess(x: mpmath.mpf) -> mpmath.mpf:
            terms = (w * mpmath.exp(j * (x - j / 2) / z**2) for j, w in enumerate(weights) if j)
            return mpmath.log(mpmath.fsum(terms)) - mpmath.log(goal)

        low, high = mpmath.mpf(-1), mpmath.mpf(k)
        while excess(low) > 0:
            low *= 2
        while excess(high) < 0:
            high *= 2
        x = mpmath.findroot(excess, (low, high), solver="anderson", tol=1e-50, maxsteps=500)
        side = 1 if direction is Direction.REMOVE else -1
        absent, *present = (mpmath.ncdf(side * (j - x) / z) for j in range(k + 1))
        p = weights[0] * absent + mpmath.fsum(
            w * m for w, m in zip(weights[1:], present, strict=True)
        )
        one, other = (p, absent) if direction is Direction.REMOVE else (absent, p)
        return float(one - mpmath.exp(e) * other)


class TestExamplesPair(PairConformance):
    """With noise per user, so that q = 1 is the Gaussian of the others' suites."""

    def pair(self, q: float, z: float) -> PoissonPair:
        return PoissonPair(q, K * z, examples=K)

    def exact_delta(self, q: float, z: float, epsilon: float, direction: Direction) -> float:
        return mixture_delta(K, q, K * z, epsilon, direction)


@pytest.mark.parametrize("delta", [1e-9, 1e-3])
def test_examples_that_are_all_drawn_are_one_gaussian(delta: float) -> None:
    found = epsilon_interval_of({PoissonPair(1.0, 16.0, examples=8): 5}, delta)
    assert found == pytest.approx(epsilon_interval_of({PoissonPair(1.0, 2.0): 5}, delta))


@pytest.mark.parametrize("trials", [1, 7, 1000])
@pytest.mark.parametrize("q", [1e-12, 1e-3, 0.3, 0.999])
def test_binomial_weights(trials: int, q: float) -> None:
    exact = binom.pmf(np.arange(trials + 1), trials, q)
    assert binomial(trials, q) == pytest.approx(exact, rel=1e-10, abs=1e-300)


@pytest.mark.parametrize(("k", "q", "z"), [(10, 0.01, 0.7), (400, 0.01, 6.0), (30, 0.9, 40.0)])
def test_the_loss_is_increasing_and_inverted(k: int, q: float, z: float) -> None:
    law = PoissonPair(q, z, examples=k).law
    x = np.linspace(-3.0 * z, k * q + 3 * z, 301)
    loss = law.loss(x)
    assert (np.diff(loss) > 0).all()
    terms = binom.pmf(np.arange(k + 1), k, q)[:, None] * norm.pdf(x, np.arange(k + 1)[:, None], z)
    assert loss == pytest.approx(np.log(terms.sum(axis=0) / norm.pdf(x, 0, z)), abs=1e-9)
    # Where log w₀ is near, a loss tells little of x.
    told = loss - law.least > 1e-4
    assert told.sum() > 100
    assert law.sample_at(loss[told]) == pytest.approx(x[told], rel=1e-8, abs=1e-8 * z)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(("k", "q", "z"), [(60, 0.02, 3.0), (60, 0.5, 40.0)])
@pytest.mark.parametrize("tail", [1e-3, 1e-8])
def test_few_counts_enclose_all(
    k: int, q: float, z: float, tail: float, direction: Direction
) -> None:
    pair = PoissonPair(q, z, examples=k)
    below, above = pair.at_most_as_bad(tail), pair.at_least_as_bad(tail)
    assert below is not pair
    assert len(above.counts) < len(binomial(k, q))
    for j in range(k + 1):
        at_least = binomial(k, q)[j:].sum()
        assert below.weights[below.counts >= j].sum() <= at_least * (1 + 1e-12)
        assert above.weights[above.counts >= j].sum() >= at_least * (1 - 1e-12)
    lattice = Lattice(0.01, 1.0, 0.03, 1e-14)
    low, up = dominated(below, lattice, direction), dominating(above, lattice, direction)
    for epsilon in (0.0, 0.1, 0.5, 1.0, 2.0):
        exact = mixture_delta(k, q, z, epsilon, direction)
        assert delta_of(low, lattice, epsilon) <= exact + 1e-15
        assert delta_of(up, lattice, epsilon) >= exact - 1e-15
        if tail == 1e-8:
            assert delta_of(up, lattice, epsilon) - delta_of(low, lattice, epsilon) < 3e-4


@pytest.mark.parametrize("direction", Direction)
def test_many_counts_are_put_together_in_runs_outward(direction: Direction) -> None:
    k, q, z = 100_000, 0.5, 50_000.0
    pair, weights = PoissonPair(q, z, examples=k), binom.pmf(np.arange(k + 1), k, q)
    below, above = pair.at_most_as_bad(1e-10), pair.at_least_as_bad(1e-10)
    assert len(above.counts) < 1100 < (weights > 1e-20).sum()
    at_least = np.cumsum(weights[::-1])[::-1]
    for j in range(49_000, 51_000, 7):
        assert below.weights[below.counts >= j].sum() <= at_least[j] + 1e-10
        assert above.weights[above.counts >= j].sum() >= at_least[j] - 1e-10
    lattice = Lattice(0.005, 1.0, 0.03, 1e-14)
    low, up = dominated(below, lattice, direction), dominating(above, lattice, direction)
    for epsilon in (0.0, 0.5, 2.0):
        ends = delta_of(low, lattice, epsilon), delta_of(up, lattice, epsilon)
        assert ends[0] <= ends[1] <= 1.001 * ends[0]


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5, 2.0])
@settings(max_examples=25, deadline=None)
@given(
    q=st.floats(0.02, 0.98),
    noise=st.floats(0.6, 4.0),
    norms=st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3),
    angles=st.lists(st.floats(0.0, 2 * math.pi), min_size=3, max_size=3),
)
def test_no_three_gradients_cost_more_than_equal_ones(
    epsilon: float, q: float, noise: float, norms: list[float], angles: list[float]
) -> None:
    # Gradients of norm at most 1 in the plane, any three, integrated on a grid.
    axis = np.linspace(-8.0, 8.0, 321)
    x, y = np.meshgrid(axis, axis)
    weight = np.exp(-(x**2 + y**2) / 2) * (axis[1] - axis[0]) ** 2 / (2 * math.pi)
    gradients = [
        n * np.array([math.cos(a), math.sin(a)]) / noise for n, a in zip(norms, angles, strict=True)
    ]
    ratio = np.zeros(x.shape)
    for drawn in range(8):
        chosen = [i for i in range(3) if drawn >> i & 1]
        v = sum((gradients[i] for i in chosen), np.zeros(2))
        share = q ** len(chosen) * (1 - q) ** (3 - len(chosen))
        ratio += share * np.exp(v[0] * x + v[1] * y - v @ v / 2)
    for direction, gain in (
        (Direction.REMOVE, ratio - math.exp(epsilon)),
        (Direction.ADD, 1 - math.exp(epsilon) * ratio),
    ):
        cost = float((weight * np.maximum(gain, 0.0)).sum())
        # The grid ends where rare outputs of three equal gradients would still count.
        assert cost <= mixture_delta(3, q, noise, epsilon, direction) + 1e-3


@pytest.mark.parametrize(("k", "q", "z", "rounds"), [(2, 0.01, 1.0, 100), (100, 0.02, 20.0, 30)])
def test_compositions_are_those_of_a_published_library(
    k: int, q: float, z: float, rounds: int
) -> None:
    counts = np.arange(k + 1.0)
    weights = binom.pmf(counts, k, q)
    some = weights > 1e-200
    published = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        z,
        counts[some].tolist(),
        (weights[some] / weights[some].sum()).tolist(),
        value_discretization_interval=2e-3,
    )
    pessimistic = published.self_compose(rounds).get_epsilon_for_delta(1e-6)
    low, up = epsilon_interval_of({PoissonPair(q, z, examples=k): rounds}, 1e-6)
    assert low <= pessimistic <= up * 1.001


@pytest.mark.parametrize(("k", "q", "z", "delta"), [(64, 0.05, 1.6, 0.3), (100, 0.1, 5.0, 0.2)])
def test_a_large_delta_is_told_as_narrowly_as_a_small_one(
    k: int, q: float, z: float, delta: float
) -> None:
    low, up = epsilon_interval_of({PoissonPair(q, z, examples=k): 1}, delta)
    assert low < up < 1.001 * low
    at_low, at_up = (max(mixture_delta(k, q, z, e, way) for way in Direction) for e in (low, up))
    assert at_up <= delta <= at_low


def test_more_examples_more_sampling_and_less_noise_cost_more() -> None:
    settings_of = [
        [(k, 0.05, 4.0) for k in (1, 2, 5, 20, 300)],
        [(5, q, 4.0) for q in (0.01, 0.05, 0.3, 0.9, 1.0)],
        [(5, 0.05, z) for z in (8.0, 4.0, 1.0, 0.4)],
    ]
    for row in settings_of:
        prices = [epsilon_interval_of({PoissonPair(q, z, k): 20}, 1e-6) for k, q, z in row]
        assert all(first[1] < second[0] for first, second in pairwise(prices))


def test_many_settings_are_grouped_outward() -> None:
    pairs = {PoissonPair(q, 6.0, examples=8): 1 for q in np.linspace(0.01, 0.05, 60).tolist()}
    low, up = epsilon_interval_of(pairs, 1e-6)
    least, most = (
        epsilon_interval_of({PoissonPair(q, 6.0, examples=8): 60}, 1e-6) for q in (0.01, 0.05)
    )
    assert least[0] < low <= up < most[1]
    assert up < 1.1 * low


@pytest.mark.parametrize(("k", "q", "z"), [(1000, 0.3, 1.0), (1000, 0.3, 14.9), (5, 0.5, 0.04)])
def test_what_leaves_the_computed_range_has_no_upper_end(k: int, q: float, z: float) -> None:
    low, up = epsilon_interval_of({PoissonPair(q, z, examples=k): 1}, 1e-6)
    assert 0.0 < low < up == math.inf
    assert delta_interval_of({PoissonPair(q, z, examples=k): 1}, 3.0)[1] == 1.0


def test_noise_counts_relative_to_what_is_usually_drawn() -> None:
    low, up = epsilon_interval_of({PoissonPair(0.5, 2e6, examples=10**6): 10}, 1e-6)
    assert 0.0 < low < up < 1.001 * low


@pytest.mark.parametrize(("q", "z"), [(1e-9, 0.06), (1e-12, 1.0)])
def test_examples_rarer_than_delta_have_a_price(q: float, z: float) -> None:
    for delta in (1e-3, 0.5):
        low, up = epsilon_interval_of({PoissonPair(q, z, examples=2): 1}, delta)
        assert low == 0.0 <= up < math.inf
