"""μ-GDP against integrals, tests and printed numbers; the CLT against certified intervals."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from poisson_rounds import epsilon_interval
from scipy.integrate import quad
from scipy.stats import norm

from fedpriv.accounting import classical, gaussian
from fedpriv.accounting.round_counts import unsampled_noise_multiplier
from fedpriv.errors import InvalidValueError

ALPHA = np.linspace(0.0, 1.0, 2001)


def loss_integral(epsilon: float, mu: float) -> float:
    """δ as E[(1 − e^{ε − L})₊] over the loss L ~ N(μ²/2, μ²) of N(μ, 1) against N(0, 1)."""

    def integrand(loss: float) -> float:
        return -math.expm1(epsilon - loss) * norm.pdf(loss, mu**2 / 2, mu)

    far = max(epsilon, mu**2 / 2) + 40 * mu
    return float(quad(integrand, epsilon, far, epsabs=0, epsrel=1e-10, limit=500)[0])


@pytest.mark.parametrize(
    ("epsilon", "mu"),
    [(e, mu) for e in (0.0, 0.1, 1.0, 5.0) for mu in (0.05, 0.57, 1.0, 4.78) if e <= 20 * mu],
)
def test_delta_is_the_expected_excess_of_the_loss(epsilon: float, mu: float) -> None:
    assert classical.gdp_delta(epsilon, mu) == pytest.approx(loss_integral(epsilon, mu), rel=1e-8)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.01, 30.0), st.floats(-200.0, -0.01))
def test_epsilon_inverts_delta(mu: float, exponent: float) -> None:
    epsilon = classical.gdp_epsilon(10.0**exponent, mu)
    if epsilon > 0.0:
        assert classical.gdp_delta(epsilon, mu) == pytest.approx(10.0**exponent, rel=1e-9)
    assert epsilon == gaussian.epsilon(10.0**exponent, 1.0 / mu)


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 50.0), st.floats(-100.0, -0.01))
def test_equivalent_mu_is_the_largest_that_holds(epsilon: float, exponent: float) -> None:
    delta = 10.0**exponent
    mu = classical.equivalent_mu(epsilon, delta)
    assert classical.gdp_delta(epsilon, mu) <= delta
    assert classical.gdp_delta(epsilon, mu * (1 + 1e-8)) > delta


def test_no_privacy_loss_and_no_privacy() -> None:
    assert (
        classical.gdp_epsilon(1e-5, 0.0)
        == classical.gdp_delta(0.0, 0.0)
        == classical.clt_mu({})
        == 0.0
    )
    assert classical.clt_epsilon({}, 1e-5) == 0.0
    assert (
        classical.gdp_epsilon(1e-5, math.inf)
        == classical.clt_mu({(0.1, 0.0): 1, (0.1, 1.0): 9})
        == math.inf
    )
    assert classical.clt_epsilon({(0.1, 0.0): 1}, 1e-5) == math.inf


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.13, 6.0])
def test_trade_off_is_that_of_the_best_test(mu: float) -> None:
    threshold = np.linspace(-4.0, 9.0, 500)
    found = classical.trade_off(norm.sf(threshold), mu)
    np.testing.assert_allclose(found, norm.cdf(threshold - mu), atol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.13, 6.0])
def test_trade_off_is_a_symmetric_trade_off_function(mu: float) -> None:
    curve = classical.trade_off(ALPHA, mu)
    assert curve[0] == 1.0
    assert curve[-1] == 0.0
    assert np.all(np.diff(curve) <= 0.0)
    assert np.all(np.diff(curve, 2) >= -1e-12)
    assert np.all(curve <= 1 - ALPHA + 1e-15)
    inside = (curve > 1e-6) & (curve < 1 - 1e-6)
    np.testing.assert_allclose(classical.trade_off(curve[inside], mu), ALPHA[inside], atol=1e-9)
    assert np.all(classical.trade_off(ALPHA, mu + 0.1) <= curve)


def test_trade_off_without_loss_is_guessing() -> None:
    np.testing.assert_allclose(classical.trade_off(ALPHA, 0.0), 1 - ALPHA, atol=1e-15)
    np.testing.assert_allclose(classical.trade_off_of_bound(ALPHA, 0.0, 0.0), 1 - ALPHA, atol=1e-15)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (1.0, 1e-5), (3.0, 0.05), (800.0, 0.0)])
def test_pair_is_the_printed_formula(epsilon: float, delta: float) -> None:
    for alpha in (0.0, 1e-4, 0.02, 0.3, 0.9, 1.0):
        steep = 1 - delta - math.exp(min(epsilon, 700)) * alpha
        flat = math.exp(-epsilon) * (1 - delta - alpha)
        found = classical.trade_off_of_bound(np.array(alpha), epsilon, delta)
        assert float(found) == pytest.approx(max(0.0, steep, flat), rel=1e-14)


@pytest.mark.parametrize("mu", [0.3, 1.13, 3.0])
def test_pairs_lie_below_the_gaussian_and_touch_it(mu: float) -> None:
    # Duality (Bu et al. 2020, Section 2): G_μ is the supremum of f_{ε,δ(ε)} over ε.
    curve = classical.trade_off(ALPHA, mu)
    below = np.zeros_like(ALPHA)
    for epsilon in np.linspace(0.0, 30.0, 3001):
        pair = classical.trade_off_of_bound(ALPHA, epsilon, classical.gdp_delta(epsilon, mu))
        assert np.all(pair <= curve + 1e-12)
        below = np.maximum(below, pair)
    np.testing.assert_allclose(below, curve, atol=1e-4)


def test_printed_sums_of_errors() -> None:
    # Bu et al. 2020, Section 4.1: at least 77.6 % for μ = 0.57, 9.4 % for (3.01, 1e-5).
    fine = np.linspace(0.0, 1.0, 200_001)
    least = (fine + classical.trade_off(fine, 0.57)).min()
    assert round(100 * least, 1) == 77.6
    least = (fine + classical.trade_off_of_bound(fine, 3.01, 1e-5)).min()
    assert round(100 * least, 1) == 9.4


def test_clt_mu_is_the_printed_formula_and_squares_add() -> None:
    for q, z, count in ((0.01, 4.0, 10_000), (0.3, 0.6, 7), (1e-5, 1.0, 10**6)):
        printed = q * math.sqrt(count * math.expm1(1 / z**2))
        assert classical.clt_mu({(q, z): count}) == pytest.approx(printed, rel=1e-12)
    first, second = {(0.1, 1.0): 50}, {(0.02, 0.7): 300}
    together = math.hypot(classical.clt_mu(first), classical.clt_mu(second))
    assert classical.clt_mu(first | second) == pytest.approx(together, rel=1e-12)


@pytest.mark.parametrize("z", [1e-3, 0.03, 1e20, 1e200])
def test_clt_has_no_overflow(z: float) -> None:
    rounds = {(1e-3, z): 1000}
    assert 0.0 < classical.clt_mu(rounds) <= math.inf
    assert 0.0 <= classical.clt_epsilon(rounds, 1e-5) < math.inf
    if z == 0.03:
        assert 2 * math.log(classical.clt_mu(rounds)) == pytest.approx(1 / z**2 + math.log(1e-3))


@pytest.mark.parametrize(
    ("rounds", "delta"),
    [
        ({(0.01, 0.7): 2000}, 1e-5),
        ({(1e-5, 1.0): 10**6}, 1e-6),
        ({(1e-3, 0.6): 10_000, (2e-3, 1.0): 500}, 1e-6),
        ({(1e-5, 0.5): 10}, 1e-5),
    ],
)
def test_clt_is_no_bound(rounds: dict[tuple[float, float], int], delta: float) -> None:
    assert classical.clt_epsilon(rounds, delta) < epsilon_interval(rounds, delta)[0]


def test_clt_can_also_be_above() -> None:
    rounds = {(256 / 60_000, 0.5): 23_437}
    assert classical.clt_epsilon(rounds, 1e-5) > epsilon_interval(rounds, 1e-5)[1]


def test_clt_converges() -> None:
    # q·√T = 0.5 throughout: ever more, ever more private rounds.
    errors = []
    for count in (100, 10_000, 1_000_000):
        rounds = {(0.5 / math.sqrt(count), 1.0): count}
        low, up = epsilon_interval(rounds, 1e-4)
        errors.append(abs(classical.clt_epsilon(rounds, 1e-4) / ((low + up) / 2) - 1))
    assert errors[0] > 5 * errors[1]
    assert errors[2] < 0.01


def test_clt_epsilon_is_exact_without_sampling_and_never_above_it() -> None:
    rounds = {(1.0, 4.0): 10, (1.0, 9.0): 3}
    low, up = epsilon_interval(rounds, 1e-5)
    assert low <= classical.clt_epsilon(rounds, 1e-5) <= up
    for q in (1e-3, 0.3, 0.99):
        sampled = {(q, 0.4): 5}
        bound = gaussian.epsilon(1e-5, unsampled_noise_multiplier(sampled))
        assert classical.clt_epsilon(sampled, 1e-5) <= bound


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: classical.gdp_epsilon(0.1, -1.0), "mu is -1.0; it must not be negative"),
        (lambda: classical.gdp_delta(0.1, math.nan), "mu is nan; it must not be negative"),
        (lambda: classical.trade_off(ALPHA, math.inf), "mu is inf; it must be finite"),
        (lambda: classical.trade_off(ALPHA + 0.1, 1.0), r"a type I error is 1.0\d+; it must be in"),
        (
            lambda: classical.trade_off_of_bound(-ALPHA, 1.0, 0.1),
            r"a type I error is -0.0005; it must",
        ),
        (
            lambda: classical.trade_off_of_bound(ALPHA, -1.0, 0.1),
            "epsilon is -1.0; it must not be neg",
        ),
        (
            lambda: classical.trade_off_of_bound(ALPHA, 1.0, 1.5),
            r"delta is 1.5; it must be in \[0, 1\]",
        ),
        (lambda: classical.clt_mu({(0.1, -1.0): 1}), "noise_multiplier is -1.0; it must be finite"),
        (
            lambda: classical.clt_epsilon({(0.1, 1.0): 1}, 0.0),
            r"delta is 0.0; it must be in \(0, 1\)",
        ),
        (lambda: classical.equivalent_mu(1.0, 0.0), r"delta is 0.0; it must be in \(0, 1\)"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        call()
