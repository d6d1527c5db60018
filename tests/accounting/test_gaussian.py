"""The Gaussian mechanism's curve against high precision, a published library and its guarantees."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting import gaussian_mechanism as published
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting import gaussian
from fedpriv.accounting.round_counts import unsampled_noise_multiplier
from tests.accounting.poisson_rounds import epsilon_interval

NOISE = (0.05, 0.3, 0.9, 1.0, 1.1, 4.0, 100.0, 1e4, 1e6)
DELTAS = (1e-300, 1e-100, 1e-50, 1e-15, 1e-5, 0.01, 0.3, 0.9, 0.999)
PAIRS = st.tuples(st.floats(-2.0, 6.0).map(lambda e: 10.0**e), st.floats(-300.0, -0.01))


def exact_delta(epsilon: float, z: float) -> mpmath.mpf:
    """Balle & Wang 2018, Theorem 8, as printed, with 420 digits."""
    with mpmath.workdps(420):
        z, epsilon = mpmath.mpf(z), mpmath.mpf(epsilon)
        first = mpmath.ncdf(1 / (2 * z) - epsilon * z)
        return first - mpmath.exp(epsilon) * mpmath.ncdf(-1 / (2 * z) - epsilon * z)


@pytest.mark.parametrize("z", NOISE)
@pytest.mark.parametrize("delta", DELTAS)
def test_epsilon_is_the_least_that_holds(z: float, delta: float) -> None:
    epsilon = gaussian.epsilon(delta, z)
    assert exact_delta(epsilon, z) <= delta
    smaller = epsilon - (1e-11 if delta <= 0.5 else 1e-8) * (1 + epsilon)
    if smaller > 0:
        assert exact_delta(smaller, z) > delta
    if epsilon == 0:
        assert exact_delta(0.0, z) <= delta


@pytest.mark.parametrize("z", NOISE)
@pytest.mark.parametrize("delta", [*DELTAS, 0.999999, 1 - 1e-8, 1 - 1e-12])
def test_the_ends_hold_the_truth(z: float, delta: float) -> None:
    low, up = gaussian.epsilon_interval(delta, z)
    assert 0.0 <= low <= up
    assert exact_delta(up, z) <= delta
    if low > 0.0:
        assert exact_delta(low, z) >= delta


@pytest.mark.parametrize("z", NOISE)
@pytest.mark.parametrize("x", [0.0, 1.0, 5.0, 20.0, 36.5])
def test_delta_is_never_below_the_truth_and_hardly_above(z: float, x: float) -> None:
    # a = ε·z − 1/(2z) is how far in the tail the noise has to be.
    epsilon = max(0.0, (x + 1 / (2 * z)) / z)
    truth = exact_delta(epsilon, z)
    assert truth >= 1e-300
    assert truth <= gaussian.delta(epsilon, z) <= truth * (1 + mpmath.mpf("1e-11"))


@pytest.mark.parametrize(("epsilon", "z"), [(40.0, 1.0), (950.0, 0.05), (3e-4, 1e6), (60.0, 4.0)])
def test_log_delta_goes_on_below_the_smallest_float(epsilon: float, z: float) -> None:
    truth = float(mpmath.log(exact_delta(epsilon, z)))
    assert truth < -700
    assert truth <= gaussian.log_deltas(np.array([epsilon]), z)[0] <= truth + 1e-8
    assert 0 < gaussian.delta(epsilon, z) < 1e-300


def test_what_releases_nothing_costs_nothing_and_no_noise_costs_all() -> None:
    assert gaussian.epsilon(1e-5, math.inf) == gaussian.delta(0.0, math.inf) == 0.0
    assert gaussian.log_deltas(np.array([1.0]), math.inf)[0] == -math.inf
    assert gaussian.epsilon(1e-5, 0.0) == math.inf
    assert gaussian.delta(1.0, 0.0) == 1.0


@pytest.mark.parametrize("z", [5e-324, 1e-149, 1e-20, 1e20, 1e305])
@pytest.mark.parametrize("delta", [5e-324, 1e-20, 0.5, 1 - 2**-53])
def test_extremes_neither_warn_nor_fail(z: float, delta: float) -> None:
    epsilon = gaussian.epsilon(delta, z)
    assert math.isinf(epsilon) if z < 1e-154 else math.isfinite(epsilon)
    assert 0.0 < gaussian.delta(1.0, z) <= 1.0
    assert 0.0 < gaussian.delta(1e300, z) <= 1.0
    if 0.0 < epsilon < 1e8:
        assert gaussian.delta(epsilon, z) <= delta * (1 + 1e-11)


@settings(max_examples=200, deadline=None)
@given(PAIRS)
def test_epsilon_and_delta_are_inverse(pair: tuple[float, float]) -> None:
    z, exponent = pair
    delta = 10.0**exponent
    epsilon = gaussian.epsilon(delta, z)
    if epsilon > 0:
        assert gaussian.delta(epsilon, z) == pytest.approx(delta, rel=1e-9)
    else:
        assert gaussian.delta(0.0, z) <= delta * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(PAIRS, st.floats(1.001, 10.0))
def test_more_noise_costs_less(pair: tuple[float, float], factor: float) -> None:
    z, exponent = pair
    more, less = (gaussian.epsilon(10.0**exponent, z * f) for f in (1.0, factor))
    assert less < more or more == less == 0.0


@pytest.mark.parametrize("delta", [1e-10, 1e-5, 1e-2])
def test_agrees_with_a_published_library(delta: float) -> None:
    for z in (0.3, 1.0, 7.0):
        theirs = published.get_epsilon_gaussian(z, delta)
        assert gaussian.epsilon(delta, z) == pytest.approx(theirs, rel=1e-9)


def test_the_known_value() -> None:
    # z = 1, δ = 1e-5 is ε = 4.377, and 9.997 where one user's data is replaced (z = 1/2).
    assert gaussian.epsilon(1e-5, 1.0) == pytest.approx(4.377, abs=5e-4)
    assert gaussian.epsilon(1e-5, 0.5) == pytest.approx(9.997, abs=5e-4)


def test_rounds_compose_to_one_mechanism() -> None:
    assert unsampled_noise_multiplier({(1.0, 3.0): 9}) == pytest.approx(1.0)
    mixed = {(1.0, 2.0): 4, (0.1, 1.0): 2, (0.5, 0.5): 1}
    assert unsampled_noise_multiplier(mixed) == pytest.approx(1 / math.sqrt(1 + 2 + 4))
    assert unsampled_noise_multiplier({}) == math.inf
    assert unsampled_noise_multiplier({(1.0, 0.0): 1, (1.0, 1.0): 5}) == 0.0
    assert unsampled_noise_multiplier({(1.0, 1e-200): 4}) == pytest.approx(5e-201)


@pytest.mark.parametrize("rounds", [{(1.0, 4.0): 10}, {(1.0, 1.0): 1, (1.0, 9.0): 50}])
def test_unsampled_rounds_are_exact(rounds: dict[tuple[float, float], int]) -> None:
    low, up = epsilon_interval(rounds, 1e-6)
    assert low <= gaussian.epsilon(1e-6, unsampled_noise_multiplier(rounds)) <= up


@pytest.mark.parametrize("q", [1e-4, 0.1, 0.9, 0.999])
def test_ignoring_sampling_is_a_bound(q: float) -> None:
    for z, count in ((0.5, 1), (1.0, 30), (8.0, 1000)):
        bound = gaussian.epsilon(1e-6, unsampled_noise_multiplier({(q, z): count}))
        assert bound >= epsilon_interval({(q, z): count}, 1e-6)[0]
