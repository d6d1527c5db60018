"""Poisson sampling when a user is replaced: the pair, and that no other placement is worse."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedpriv.accounting.pld import delta_interval as delta_interval_of
from fedpriv.accounting.pld import epsilon_interval as epsilon_interval_of
from fedpriv.accounting.pld.dominating_pairs import ReplacePair
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import Direction
from tests.accounting.pair_conformance import PairConformance


def replace_delta(q: float, z: float, epsilon: float) -> float:
    """P(x > c) − e^ε·Q(x > c), c where the densities say so, at 60 digits."""
    with mpmath.workdps(60):
        q, e, noise = mpmath.mpf(q), mpmath.mpf(epsilon), 2 * mpmath.mpf(z)

        def excess(x: mpmath.mpf) -> mpmath.mpf:
            up, down = (mpmath.exp((s * x - 0.5) / noise**2) for s in (1, -1))
            return mpmath.log((1 - q + q * up) / (1 - q + q * down)) - e

        low, high = mpmath.mpf(-1), mpmath.mpf(1)
        while excess(low) > 0:
            low *= 2
        while excess(high) < 0:
            high *= 2
        c = mpmath.findroot(excess, (low, high), solver="anderson", tol=1e-50, maxsteps=500)
        absent, present, other = (mpmath.ncdf((m - c) / noise) for m in (0, 1, -1))
        p, o = ((1 - q) * absent + q * each for each in (present, other))
        return float(p - mpmath.exp(e) * o)


class TestReplacePair(PairConformance):
    def pair(self, q: float, z: float) -> ReplacePair:
        return ReplacePair(q, z)

    def exact_delta(self, q: float, z: float, epsilon: float, direction: Direction) -> float:
        assert direction in Direction  # both agree
        return replace_delta(q, z, epsilon)


@pytest.mark.parametrize(("q", "z"), [(1e-7, 0.3), (0.01, 1.0), (0.9, 20.0), (1.0, 0.5)])
def test_loss_is_odd_increasing_and_inverted(q: float, z: float) -> None:
    pair = ReplacePair(q, z)
    x = np.linspace(0.0, 2 + 10 * z, 101)
    loss = pair.loss(x)
    assert pair.loss(-x) == pytest.approx(-loss, abs=0)
    assert (np.diff(loss) > 0).all()
    assert pair.sample_at(loss) == pytest.approx(x, rel=1e-9, abs=1e-9 * z)


def test_certain_sampling_is_a_gaussian_of_twice_the_sensitivity() -> None:
    certain = epsilon_interval_of({ReplacePair(1.0, 0.5): 1}, 1e-5)
    gaussian = epsilon_interval_of({PoissonPair(1.0, 0.5): 1}, 1e-5)
    for low, up in (certain, gaussian):
        assert low <= 9.9972561463 <= up  # z = 1 when a user is replaced, by 30 digits


@pytest.mark.parametrize("epsilon", [-0.7, -0.1, 0.0, 0.05, 0.5, 2.0])
@settings(max_examples=25, deadline=None)
@given(
    q=st.floats(0.01, 1.0),
    noise=st.floats(0.4, 3.0),
    norms=st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1.0)),
    angle=st.floats(0.0, math.pi),
)
def test_no_two_updates_cost_more_than_opposite_ones(
    epsilon: float, q: float, noise: float, norms: tuple[float, float], angle: float
) -> None:
    # Two updates of norm at most 1 in the plane, integrated on a grid.
    axis = np.linspace(-8.0, 8.0, 321)
    x, y = np.meshgrid(axis, axis)
    weight = np.exp(-(x**2 + y**2) / 2) * (axis[1] - axis[0]) ** 2 / (2 * math.pi)
    v = np.array([norms[0], 0.0]) / noise
    w = norms[1] * np.array([math.cos(angle), math.sin(angle)]) / noise
    user, other = (np.exp(u[0] * x + u[1] * y - u @ u / 2) for u in (v, w))
    gain = (1 - q) + q * user - math.exp(epsilon) * ((1 - q) + q * other)
    cost = float((weight * np.maximum(gain, 0.0)).sum())
    assert cost <= replace_delta(q, noise / 2, epsilon) + 3e-5


def test_a_user_that_is_merely_missing_costs_less() -> None:
    # The trap: sensitivity S, as under add-or-remove-one.
    for q, z in ((0.01, 1.0), (0.3, 2.0)):
        missing = epsilon_interval_of({PoissonPair(q, z): 100}, 1e-6)
        replaced = epsilon_interval_of({ReplacePair(q, z / 2): 100}, 1e-6)
        halved = epsilon_interval_of({PoissonPair(q, z / 2): 100}, 1e-6)
        assert missing[1] < replaced[0]
        assert replaced[1] < halved[0]


@pytest.mark.parametrize(("q", "noise"), [(0.2, 0.8), (0.7, 2.0)])
def test_every_population_of_three_stays_below(q: float, noise: float) -> None:
    # From first principles: two users' updates in {−1, 0, 1}, the third is replaced.
    grid = np.linspace(-20.0, 20.0, 40_001)
    below, above = delta_interval_of({ReplacePair(q, noise / 2): 1}, 0.4)
    worst = 0.0
    for others in itertools.product((-1, 0, 1), repeat=2):
        for user, new in itertools.product((-1, 0, 1), repeat=2):
            p, p_new = (
                sum(
                    math.prod(q if coin else 1 - q for coin in coins)
                    * norm.pdf(grid, np.dot(coins, (*others, own)), noise)
                    for coins in itertools.product((0, 1), repeat=3)
                )
                for own in (user, new)
            )
            gain = np.maximum(p - math.exp(0.4) * p_new, 0.0)
            worst = max(worst, float(gain.sum()) * (grid[1] - grid[0]))
    assert below - 1e-6 <= worst <= above + 1e-6
