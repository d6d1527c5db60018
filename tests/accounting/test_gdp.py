"""μ-GDP against integrals, tests and printed numbers; the CLT against certified intervals."""

import math

import pytest
from scipy.integrate import quad
from scipy.stats import norm

from fedpriv.accounting import gaussian
from fedpriv.accounting.round_counts import Rounds, unsampled_noise_multiplier
from tests.accounting.poisson_rounds import epsilon_interval


def clt_epsilon(rounds: Rounds, delta: float) -> float:
    return gaussian.epsilon(delta, gaussian.clt_noise(rounds))


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
    assert gaussian.delta(epsilon, 1.0 / mu) == pytest.approx(loss_integral(epsilon, mu), rel=1e-8)


def test_no_privacy_loss_and_no_privacy() -> None:
    assert gaussian.clt_mu({}) == 0.0
    assert clt_epsilon({}, 1e-5) == 0.0
    assert gaussian.clt_mu({(0.1, 0.0): 1, (0.1, 1.0): 9}) == math.inf
    assert clt_epsilon({(0.1, 0.0): 1}, 1e-5) == math.inf


def test_clt_mu_is_the_printed_formula_and_squares_add() -> None:
    for q, z, count in ((0.01, 4.0, 10_000), (0.3, 0.6, 7), (1e-5, 1.0, 10**6)):
        printed = q * math.sqrt(count * math.expm1(1 / z**2))
        assert gaussian.clt_mu({(q, z): count}) == pytest.approx(printed, rel=1e-12)
    first, second = {(0.1, 1.0): 50}, {(0.02, 0.7): 300}
    together = math.hypot(gaussian.clt_mu(first), gaussian.clt_mu(second))
    assert gaussian.clt_mu(first | second) == pytest.approx(together, rel=1e-12)


@pytest.mark.parametrize("z", [1e-3, 0.03, 1e20])
def test_clt_is_finite_at_any_noise(z: float) -> None:
    rounds = {(1e-3, z): 1000}
    assert 0.0 < gaussian.clt_mu(rounds) <= math.inf
    assert 0.0 <= clt_epsilon(rounds, 1e-5) < math.inf


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
    assert clt_epsilon(rounds, delta) < epsilon_interval(rounds, delta)[0]


def test_clt_can_also_be_above() -> None:
    rounds = {(256 / 60_000, 0.5): 23_437}
    assert clt_epsilon(rounds, 1e-5) > epsilon_interval(rounds, 1e-5)[1]


def test_clt_converges() -> None:
    # q·√T = 0.5 throughout: ever more, ever more private rounds.
    errors = []
    for count in (100, 10_000, 1_000_000):
        rounds = {(0.5 / math.sqrt(count), 1.0): count}
        low, up = epsilon_interval(rounds, 1e-4)
        errors.append(abs(clt_epsilon(rounds, 1e-4) / ((low + up) / 2) - 1))
    assert errors[0] > 5 * errors[1]
    assert errors[2] < 0.01


def test_clt_epsilon_is_exact_without_sampling_and_never_above_it() -> None:
    rounds = {(1.0, 4.0): 10, (1.0, 9.0): 3}
    low, up = epsilon_interval(rounds, 1e-5)
    assert low <= clt_epsilon(rounds, 1e-5) <= up
    for q in (1e-3, 0.3, 0.99):
        sampled = {(q, 0.4): 5}
        bound = gaussian.epsilon(1e-5, unsampled_noise_multiplier(sampled))
        assert clt_epsilon(sampled, 1e-5) <= bound
