"""Rounds in which few users are sampled, and these are nearly identified: no cliff, no gap."""

import math
from collections.abc import Mapping
from itertools import product

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

from fedpriv.accounting import calibrate_noise_multiplier, epsilon, poisson_gaussian
from fedpriv.accounting.accountants import poisson_pairs
from fedpriv.accounting.pld import noise_of_sampled
from fedpriv.accounting.pld.dominating_pairs import FixedSizePair, ReplacePair
from fedpriv.accounting.pld.lattice import LossPair
from fedpriv.accounting.pld.queries import delta_interval, epsilon_interval, exposure
from fedpriv.accounting.pld.random_allocation import AllocationPair
from fedpriv.accounting.pld.sampled_examples import PoissonPair
from fedpriv.accounting.round_counts import Direction
from tests.accounting import poisson_rounds
from tests.accounting.closed_forms import one_round_delta, poisson_delta

Floats = NDArray[np.float64]


@pytest.mark.parametrize("z", [1e-3, 0.019, 0.021, 0.049, 0.05, 0.08, 0.3])
@pytest.mark.parametrize("name", ["tight", "pld"])
def test_a_delta_above_the_chance_of_being_sampled_costs_nothing(name: str, z: float) -> None:
    q, rounds, delta = 1.36e-6, 11379, 0.0395
    assert -math.expm1(rounds * math.log1p(-q)) < delta
    loss = epsilon([poisson_gaussian(q, z, rounds)], delta, name)
    assert (loss.epsilon_low, loss.epsilon) == (0.0, 0.0)
    below, above = poisson_rounds.delta_interval({(q, z): rounds}, 0.0)
    assert below <= above <= -math.expm1(rounds * math.log1p(-q)) * (1 + 1e-9)


def test_calibration_finds_the_least_noise_where_delta_covers_all_users_sampled() -> None:
    assert calibrate_noise_multiplier(1.0, 0.0395, 11379, 1.36e-6) == 0.05


@pytest.mark.parametrize("pair", [PoissonPair(1e-6, 0.05), PoissonPair(1e-6, 0.1, examples=3)])
def test_no_loss_of_an_added_user_is_above_the_largest(pair: PoissonPair) -> None:
    examples = getattr(pair, "examples", 1)
    assert pair.law.least == pytest.approx(examples * math.log1p(-pair.q), rel=1e-12)
    # The probability of a loss near the least is almost 1, and none is below it.
    losses = pair.law.least * np.array([1 + 1e-9, 1 - 1e-3])
    assert list(pair.law.masses(losses)[1]) == pytest.approx([0.0, 1.0, 0.0], abs=1e-5)


@pytest.mark.parametrize("z", [0.021, 0.025, 0.03, 0.04, 0.05])
@pytest.mark.parametrize("q", [1e-9, 1e-4, 0.2])
def test_one_round_of_little_noise_has_the_closed_form(q: float, z: float) -> None:
    for at in (0.0, 0.1, 80.0, 300.0, 590.0):
        low, up = delta_interval(poisson_pairs({(q, z): 1}), at)
        assert low <= one_round_delta(q, z, at) <= up
    for share in (0.99, 0.5, 0.01):
        low, up = epsilon_interval(poisson_pairs({(q, z): 1}), share * q)
        assert low == 0.0 or one_round_delta(q, z, low) >= share * q
        assert up == math.inf or one_round_delta(q, z, up) <= share * q
        assert up == math.inf or low >= (1 - 2e-3) * up


def of_two(q: float, z: float, at: float, direction: Direction) -> float:
    """δ of two rounds, by integration over the output of the first; its grid is far finer than z.

    Given the first loss, that of the second is in closed form.
    """
    x = np.linspace(-12 * z, 1 + 12 * z, 601)
    total = mpmath.mpf(0)
    for each in map(mpmath.mpf, x):
        ratio = mpmath.exp((each - mpmath.mpf(1) / 2) / mpmath.mpf(z) ** 2)
        density = mpmath.npdf(each, 0, z)
        if direction is Direction.REMOVE:
            density *= 1 - q + q * ratio
        rest = at - direction * mpmath.log(1 - q + q * ratio)
        total += density * poisson_delta(q, z, rest, direction)
    return float(total * (x[1] - x[0]))


@pytest.mark.parametrize(("q", "z"), [(1e-3, 0.021), (1e-5, 0.031), (0.1, 0.045), (0.3, 0.08)])
def test_two_rounds_of_little_noise_agree_with_an_integral(q: float, z: float) -> None:
    for at in (0.01, 30.0, 200.0):
        low, up = delta_interval(poisson_pairs({(q, z): 2}), at)
        exact = max(of_two(q, z, at, direction) for direction in Direction)
        assert low <= exact * (1 + 1e-4)
        assert exact * (1 - 1e-4) <= up


def settings_from(a: float, b: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(a), math.log(b)).map(math.exp)


@settings(max_examples=25, deadline=None)
@given(
    q=settings_from(1e-7, 1.0),
    z=settings_from(1e-3, 50.0),
    rounds=settings_from(1.0, 1e6).map(math.ceil),
    delta=st.one_of(settings_from(1e-30, 0.5), st.sampled_from([0.5, 0.9, 0.99, 1.01, 2.0])),
)
@example(q=1.36e-6, z=0.0499, rounds=11379, delta=0.99)
@example(q=1e-6, z=0.0199, rounds=1000, delta=0.5)
@example(q=4e-7, z=0.0261, rounds=202, delta=0.9)
def test_more_noise_and_less_of_everything_else_never_costs_more(
    q: float, z: float, rounds: int, delta: float
) -> None:
    if delta in (0.5, 0.9, 0.99, 1.01, 2.0):  # near the chance of being sampled at all
        delta *= -math.expm1(rounds * math.log1p(-min(q, 0.5)))
        delta = min(max(delta, 1e-60), 0.9)
    dear = epsilon([poisson_gaussian(min(q, 1.0), z, rounds)], delta)
    for cheaper in (
        (min(q, 1.0), 1.05 * z, rounds, delta),
        (min(q, 1.0) / 1.05, z, rounds, delta),
        (min(q, 1.0), z, max(1, int(rounds / 1.05)), delta),
        (min(q, 1.0), z, rounds, min(0.95, 1.05 * delta)),
    ):
        cheap = epsilon([poisson_gaussian(*cheaper[:3])], cheaper[3])
        assert cheap.epsilon_low <= dear.epsilon
        assert cheap.epsilon <= 1.001 * dear.epsilon + 1e-6, cheaper


def test_one_round_of_little_noise_leaves_the_interval_narrow() -> None:
    for z, width in ((0.09, 1e-6), (0.05, 1e-3), (0.03, 1e-3)):
        loss = epsilon([poisson_gaussian(0.01, 1.0, 2000), poisson_gaussian(0.001, z)], 1e-2)
        assert loss.epsilon - loss.epsilon_low <= width * loss.epsilon


EXPOSED: list[tuple[Mapping[LossPair, int], float]] = [
    ({PoissonPair(0.01, 1.0): 3}, 1 - 0.99**3),
    ({ReplacePair(0.01, 1.0): 2, FixedSizePair(0.2, 1.0): 1}, 1 - 0.99**2 * 0.8),
    ({PoissonPair(0.01, 1.0, examples=5): 2}, 1 - 0.95**2),
    ({AllocationPair(100, 1.0): 1}, 1.0),
    ({PoissonPair(1e-9, 0.0): 1}, 1.0),
]


@pytest.mark.parametrize(("pairs", "chance"), EXPOSED)
def test_the_exposure_bounds_the_chance_of_being_sampled(
    pairs: Mapping[LossPair, int], chance: float
) -> None:
    assert chance * (1 - 1e-12) <= exposure(pairs) <= chance * (1 + 1e-8)


@pytest.mark.parametrize("tail", [0.3, 1e-3, 1e-9])
def test_the_noise_of_sampled_rounds_holds_but_for_the_tail(tail: float) -> None:
    chances, noises = [0.3, 0.02, 1e-4, 0.7], [0.05, 0.3, 0.01, 2.0]
    pairs = {PoissonPair(q, z): 2 for q, z in zip(chances, noises, strict=True)}
    v = noise_of_sampled(pairs, tail) ** -2.0
    beyond = 0.0
    for taken in product([0, 1, 2], repeat=4):  # how many of both rounds the user is in
        chance = math.prod(
            math.comb(2, n) * q**n * (1 - q) ** (2 - n) for n, q in zip(taken, chances, strict=True)
        )
        beyond += chance * (sum(n / z**2 for n, z in zip(taken, noises, strict=True)) > v)
    assert beyond <= tail
    assert v <= 2 * sum(z**-2.0 for z in noises) * (1 + 1e-6)


@pytest.mark.parametrize(("q", "z", "rounds"), [(4.6e-4, 0.0254, 11205), (1e-6, 0.0216, 30000)])
def test_the_cap_for_huge_losses_is_above_the_truth_and_not_far_above_the_lower_end(
    q: float, z: float, rounds: int
) -> None:
    loss = epsilon([poisson_gaussian(q, z, rounds)], 1e-7)
    assert 600.0 < loss.epsilon_low < loss.epsilon < 3 * loss.epsilon_low
    # At least that of a user in as many rounds as one in 10⁷ users is, if the coins stay secret.
    taken = 0
    while math.comb(rounds, taken + 1) * q ** (taken + 1) * (1 - q) ** rounds > 2e-7:
        taken += 1
    assert loss.epsilon >= taken * (0.5 / z**2 + math.log(q)) - rounds * q


def beside_a_gaussian(q: float, z: float, mu: float, at: float) -> float:
    """δ of a μ-GDP release and one sampled round: the former's, averaged over the latter's loss."""
    y: Floats = np.linspace(-12.0, 1 / z + 12.0, 200_001)
    loss = np.logaddexp(math.log1p(-q), math.log(q) + (y - 0.5 / z) / z)

    def gaussian_delta(e: Floats) -> Floats:
        e = np.clip(e, -700.0, 700.0)
        return np.asarray(ndtr(mu / 2 - e / mu) - np.exp(e + log_ndtr(-mu / 2 - e / mu)))

    without, present = np.exp(-(y**2) / 2), np.exp(-((y - 1 / z) ** 2) / 2)
    removed = ((1 - q) * without + q * present) @ gaussian_delta(at - loss)
    added = without @ gaussian_delta(at + loss)
    return float(max(removed, added) * (y[1] - y[0]) / math.sqrt(2 * math.pi))


@pytest.mark.parametrize("z", [0.03, 0.06, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("q", [1e-8, 1e-7, 1e-6, 1e-4])
def test_one_rare_round_of_little_noise_beside_a_gaussian_has_its_price(q: float, z: float) -> None:
    loss = epsilon([poisson_gaussian(1.0, 3.0), poisson_gaussian(q, z)], 1e-5)
    assert loss.epsilon_low >= (1 - 2e-3) * loss.epsilon
    above, below = (beside_a_gaussian(q, z, 1 / 3, e) for e in (loss.epsilon_low, loss.epsilon))
    assert below <= 1e-5 * (1 + 1e-7)
    assert above >= 1e-5 * (1 - 1e-7)


@pytest.mark.parametrize(
    ("q", "z", "width"),
    [(1e-7, 0.05, 0.02), (5e-7, 0.1, 0.1), (5e-7, 0.3, 1e-3), (1e-5, 0.3, 1e-3)],
)
def test_one_rare_round_of_little_noise_hardly_changes_many_others(
    q: float, z: float, width: float
) -> None:
    rng = np.random.default_rng(3)
    settings_ = zip(
        0.002 * np.exp(rng.normal(0, 0.5, 300)), rng.uniform(0.9, 1.1, 300), strict=True
    )
    others = [poisson_gaussian(float(a), float(b), 7) for a, b in settings_]
    without, loss = epsilon(others, 1e-6), epsilon([*others, poisson_gaussian(q, z)], 1e-6)
    assert (1 - width) * loss.epsilon <= loss.epsilon_low <= loss.epsilon
    # The user takes part in the rare round with probability q at most.
    assert without.epsilon_low <= loss.epsilon
    if q < 1e-6:
        assert loss.epsilon_low <= epsilon(others, 1e-6 - q).epsilon
