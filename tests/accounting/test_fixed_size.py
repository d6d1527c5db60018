"""RDP of cohorts of a fixed size against high precision, a library and what surely is below."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from poisson_rounds import epsilon_interval
from scipy.stats import norm

from fedpriv.accounting.accountants import ACCOUNTANTS, Bound, RDPAccountant
from fedpriv.accounting.policies import every_user_gaussian, fixed_size_gaussian
from fedpriv.accounting.rdp import (
    DEFAULT_ORDERS,
    _log_differences,
    _log_even_moments,
    composed_rdp,
    fixed_size_gaussian_rdp,
    subsampled_gaussian_rdp,
)
from fedpriv.ledger.events import NeighbouringRelation

REPLACE = NeighbouringRelation.REPLACE_ONE
RDP = ACCOUNTANTS["rdp"]
# Where p, p' and r lie in units of the sensitivity: at most one apart.
TRIPLES = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.5, -0.5, 0.0), (1.0, 0.3, 0.0), (0.2, -0.7, 0.1)]


def grid(z: float, power: float) -> np.ndarray:
    """Where a product of the densities with powers of up to `power` is not negligible."""
    return np.linspace(-power - 12 * z, power + 12 * z, 20_001)


def log_densities(triple: tuple[float, float, float], x: np.ndarray, z: float) -> list[np.ndarray]:
    return [norm.logpdf(x, at, z) for at in triple]


def true_rdp(triple: tuple[float, float, float], q: float, z: float, order: float) -> float:
    """RDP of one round in which a cohort's sum lies at one of three places."""
    x = grid(z, order)
    p, other, r = log_densities(triple, x, z)
    user = np.logaddexp(math.log(1 - q) + r, math.log(q) + p)
    replaced = np.logaddexp(math.log(1 - q) + r, math.log(q) + other)
    moment = np.trapezoid(np.exp(order * user + (1 - order) * replaced), x)
    return math.log(moment) / (order - 1)


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize(("q", "z"), [(0.3, 0.6), (0.01, 1.0), (0.5, 3.0), (0.9, 2.0)])
@pytest.mark.parametrize("order", [1.3, 2.0, 2.5, 7.0])
def test_no_placement_of_the_users_costs_more(
    triple: tuple[float, float, float], q: float, z: float, order: float
) -> None:
    assert fixed_size_gaussian_rdp(q, z, [order])[0] >= true_rdp(triple, q, z, order)


def test_with_sensitivity_s_some_placement_would_cost_more() -> None:
    # The trap: z instead of z/2, where a user is replaced.
    assert fixed_size_gaussian_rdp(0.3, 1.2, [7.0])[0] < true_rdp((1.0, 0.0, 0.0), 0.3, 0.6, 7.0)


@pytest.mark.parametrize("triple", TRIPLES)
@pytest.mark.parametrize("z", [0.8, 1.5, 5.0])
@pytest.mark.parametrize("j", [2, 3, 6, 9])
def test_differences_are_bounded(triple: tuple[float, float, float], z: float, j: int) -> None:
    x = grid(z, j)
    p, other, r = log_densities(triple, x, z)
    high, low = np.maximum(p, other), np.minimum(p, other)
    log_gap = high + np.log(-np.expm1(np.minimum(low - high, -1e-300)))
    exact = np.trapezoid(np.exp(j * log_gap - (j - 1) * r), x)
    assert _log_differences(z, j)[j - 2] >= math.log(exact)


@pytest.mark.parametrize("z", [1.0, 7.0, 1e5])
def test_even_moments_are_exact(z: float) -> None:
    for j in (2, 4, 20, 256):
        with mpmath.workdps(1500):
            terms = (
                (-1) ** i
                * mpmath.binomial(j, i)
                * mpmath.exp(mpmath.mpf(i * (i - 1)) / 2 / mpmath.mpf(z) ** 2)
                for i in range(j + 1)
            )
            exact = float(mpmath.log(mpmath.fsum(terms)))
        assert _log_even_moments(z)[j // 2 - 1] == pytest.approx(exact, abs=1e-11)


@pytest.mark.parametrize("z", [0.7, 1.0])
def test_where_the_second_bound_is_left_out_it_never_is_the_smaller_one(z: float) -> None:
    j = np.arange(2, 257, 2)
    first = math.log(2) + j * (j - 1) / (2 * z**2)
    assert (math.log(4) + _log_even_moments(z) > first).all()


@pytest.mark.parametrize(("size", "z"), [(10, 1.0), (100, 4.0), (1000, 3.0), (10, 20.0)])
def test_integer_orders_agree_with_a_published_library(size: int, z: float) -> None:
    # The library takes noise per sensitivity, so z/2, and has no bound by unsampled rounds.
    orders = [2, 3, 4, 8, 17, 32, 64]
    library = RdpAccountant(orders, dp_accounting.NeighboringRelation.REPLACE_ONE)
    gaussian = dp_accounting.GaussianDpEvent(z / 2)
    library.compose(dp_accounting.SampledWithoutReplacementDpEvent(10_000, size, gaussian), 5)
    theirs = np.minimum(library.rdp, 5 * np.array(orders) / (2 * (z / 2) ** 2))
    ours = composed_rdp({(size / 10_000, z / 2): 5}, orders, fixed_size_gaussian_rdp)
    assert ours == pytest.approx(theirs, rel=1e-8)
    assert (ours >= theirs * (1 - 1e-12)).all()


@settings(max_examples=10, deadline=None)
@given(
    q=st.floats(-6.0, 0.0).map(lambda e: 10**e),
    z=st.floats(math.log(0.05), math.log(500.0)).map(math.exp),
)
def test_rdp_is_between_a_poisson_sample_and_no_sampling(q: float, z: float) -> None:
    rdp = fixed_size_gaussian_rdp(q, z, DEFAULT_ORDERS)
    assert (rdp >= subsampled_gaussian_rdp(q, z, DEFAULT_ORDERS) * (1 - 1e-8)).all()
    unsampled = np.array(DEFAULT_ORDERS) / (2 * z**2)
    assert (rdp <= unsampled * (1 + 1e-9)).all()
    assert (fixed_size_gaussian_rdp(q, 1.1 * z, DEFAULT_ORDERS) < rdp).all()
    assert (fixed_size_gaussian_rdp(0.9 * q, z, DEFAULT_ORDERS) <= rdp).all()


def test_edges() -> None:
    orders = (1.5, 2.0, 40.0)
    assert list(fixed_size_gaussian_rdp(0.5, 0.0, orders)) == [math.inf] * 3
    assert list(fixed_size_gaussian_rdp(0.5, 1e-141, orders)) == [math.inf] * 3
    assert np.isfinite(fixed_size_gaussian_rdp(0.5, 1e-139, orders)).all()
    assert (fixed_size_gaussian_rdp(0.5, 1e150, orders) < 1e-290).all()
    assert fixed_size_gaussian_rdp(1.0, 3.0, orders) == pytest.approx(np.array(orders) / 18)
    assert list(composed_rdp({}, orders, fixed_size_gaussian_rdp)) == [0.0] * 3
    twice = composed_rdp({(0.1, 2.0): 2, (0.5, 4.0): 1}, orders, fixed_size_gaussian_rdp)
    one, other = (
        fixed_size_gaussian_rdp(0.1, 2.0, orders),
        fixed_size_gaussian_rdp(0.5, 4.0, orders),
    )
    assert twice == pytest.approx(2 * one + other, rel=1e-15)


class TestAccountant:
    def test_the_known_example(self) -> None:
        loss = RDP.epsilon([fixed_size_gaussian(100, 10_000, 1.0, 1000)], 1e-5)
        assert loss.epsilon_low == pytest.approx(13.36, abs=0.01)
        assert loss.epsilon == pytest.approx(20.99, abs=0.005)
        assert loss.relation is REPLACE
        for word in ("fixed-size sampling", "replace-one neighbours", "interval", "rdp"):
            assert word in loss.assumptions

    def test_the_lower_end_is_that_of_an_explicit_pair(self) -> None:
        events = [fixed_size_gaussian(1, 20, 2.0, 30), every_user_gaussian(15.0, REPLACE, 2)]
        low, up = epsilon_interval({(0.05, 1.0): 30, (1.0, 7.5): 2}, 1e-6)
        loss = RDP.epsilon(events, 1e-6)
        assert loss.low == pytest.approx(low, rel=1e-8)
        assert loss.low <= low <= up < loss.up
        assert loss.bound is Bound.INTERVAL

    @pytest.mark.parametrize("z", [0.7, 3.0, 30.0])
    def test_delta_inverts_epsilon(self, z: float) -> None:
        events = [fixed_size_gaussian(10, 300, z, 50)]
        assert RDP.delta(events, RDP.epsilon(events, 1e-7).epsilon) == pytest.approx(1e-7, rel=1e-6)

    def test_a_cohort_of_all_users_costs_what_every_user_costs(self) -> None:
        everybody = RDP.epsilon([every_user_gaussian(4.0, REPLACE, 9)], 1e-6)
        whole = RDP.epsilon([fixed_size_gaussian(50, 50, 4.0, 9)], 1e-6)
        assert whole.epsilon == pytest.approx(everybody.epsilon, rel=1e-12)

    @settings(max_examples=12, deadline=None)
    @given(
        size=st.integers(1, 999),
        z=st.floats(math.log(0.4), math.log(40.0)).map(math.exp),
        count=st.integers(1, 2000),
        delta=st.floats(-10.0, -2.0).map(lambda e: 10**e),
    )
    def test_more_privacy_never_costs_more(
        self, size: int, z: float, count: int, delta: float
    ) -> None:
        def cost(size: int, z: float, count: int, delta: float) -> float:
            loss = RDP.epsilon([fixed_size_gaussian(size, 1000, z, count)], delta)
            assert 0.0 <= loss.epsilon_low <= loss.epsilon
            return loss.epsilon

        most = cost(size, z, count, delta)
        assert cost(size, 1.1 * z, count, delta) <= most
        assert cost(size, z, count, min(0.9, 2 * delta)) <= most
        assert cost(size, z, count + 1, delta) >= most
        assert cost(size + 1, z, count, delta) >= most

    def test_more_orders_never_cost_more(self) -> None:
        events = [fixed_size_gaussian(100, 10_000, 2.0, 1000)]
        few = RDPAccountant(orders=(2.0, 2.5)).epsilon(events, 1e-5)
        assert RDP.epsilon(events, 1e-5).epsilon < few.epsilon

    def test_without_noise_it_costs_everything(self) -> None:
        events = [fixed_size_gaussian(1, 100, 0.0)]
        assert RDP.epsilon(events, 1e-5).epsilon == math.inf
        assert RDP.delta(events, 5.0) == 1.0
