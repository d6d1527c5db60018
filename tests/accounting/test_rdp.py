"""RDP of the Poisson-subsampled Gaussian against high precision, a library and published values."""

import math

import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from fedpriv.accounting.rdp import (
    DEFAULT_ORDERS,
    composed_rdp,
    delta_from_rdp,
    epsilon_from_rdp,
    subsampled_gaussian_rdp,
)


def exact_rdp(q: float, z: float, order: float) -> mpmath.mpf:
    """log E_Q[(1 − q + q·r)^α]/(α − 1) by quadrature at 30 digits."""
    with mpmath.workdps(30):
        q, a = mpmath.mpf(q), mpmath.mpf(order)

        def integrand(x: mpmath.mpf) -> mpmath.mpf:
            ratio = mpmath.exp((2 * x - 1) / (2 * mpmath.mpf(z) ** 2))
            return mpmath.npdf(x, 0, z) * (1 - q + q * ratio) ** a

        points = [mpmath.mpf(x) for x in np.linspace(-14 * z, order + 14 * z, 24)]
        return mpmath.log(mpmath.quad(integrand, points)) / (a - 1)


@pytest.mark.parametrize("order", [1.0001, 3.25, 21.0])
@pytest.mark.parametrize(
    ("q", "z"), [(1e-7, 0.5), (1e-4, 100.0), (0.01, 0.2), (0.01, 1.0), (0.3, 4.0), (0.99, 0.5)]
)
def test_rdp_is_exact_and_on_the_safe_side(q: float, z: float, order: float) -> None:
    value = float(subsampled_gaussian_rdp(q, z, [order])[0] / exact_rdp(q, z, order))
    assert 1.0 <= value <= 1.0 + 1e-9


@pytest.mark.parametrize("order", [257, 2000, 16384, 100_000, 1_000_000])
@pytest.mark.parametrize(
    ("q", "z"), [(1e-10, 1e5), (7e-8, 3e3), (1e-12, 3e3), (1e-5, 3e3), (1e-3, 1e5)]
)
def test_factorials_of_large_orders_leave_it_on_the_safe_side(
    q: float, z: float, order: int
) -> None:
    with mpmath.workdps(50):
        odds, square, total = mpmath.mpf(q) / (1 - mpmath.mpf(q)), mpmath.mpf(z) ** 2, mpmath.mpf(0)
        ways = order * odds  # C(α, k)·(q/(1 − q))^k
        for k in range(2, order + 1):
            ways *= odds * (order - k + 1) / k
            term = ways * mpmath.expm1(k * (k - 1) / (2 * square))
            total += term
            if k > 2 * q * order and term < total * mpmath.mpf(10) ** -30:
                break
        exact = mpmath.log1p(total * (1 - mpmath.mpf(q)) ** order) / (order - 1)
    for asked in (float(order), order - 0.5):
        value = float(subsampled_gaussian_rdp(q, z, [asked])[0] / exact)
        assert 1.0 <= value <= 1.0 + 1e-7


def test_adding_a_user_never_has_the_larger_rdp() -> None:
    # The direction that the formula leaves out: E_Q[(1 + u)^{1 − α}].
    for q, z, order in ((0.01, 1.0, 8.0), (0.5, 0.5, 1.5), (0.9, 3.0, 30.0)):
        with mpmath.workdps(30):

            def integrand(
                x: mpmath.mpf, q: float = q, z: float = z, a: float = order
            ) -> mpmath.mpf:
                return mpmath.npdf(x, 0, z) * (
                    1 - q + q * mpmath.exp((2 * x - 1) / (2 * z**2))
                ) ** (1 - a)

            points = np.linspace(-order - 20 * z, 20 * z, 60)
            other = mpmath.log(mpmath.quad(integrand, points)) / (order - 1)
        assert float(other) <= subsampled_gaussian_rdp(q, z, [order])[0]


@pytest.mark.parametrize(("q", "z"), [(1e-4, 0.7), (0.01, 1.1), (0.2, 3.0)])
def test_integer_orders_agree_with_a_published_library(q: float, z: float) -> None:
    orders = [2, 3, 8, 32, 200, 1024]
    theirs = rdp_privacy_accountant._compute_rdp_poisson_subsampled_gaussian(q, z, orders)
    assert subsampled_gaussian_rdp(q, z, orders) == pytest.approx(theirs, rel=1e-7)


@pytest.mark.parametrize("z", [0.1, 1.0, 40.0])
def test_unsampled_rounds_are_the_gaussian_mechanism(z: float) -> None:
    orders = np.array(DEFAULT_ORDERS)
    assert subsampled_gaussian_rdp(1.0, z, orders) == pytest.approx(orders / (2 * z**2), rel=1e-15)


def test_without_noise_no_order_helps() -> None:
    assert list(subsampled_gaussian_rdp(0.5, 0.0, (2.0, 3.5))) == [math.inf, math.inf]


def test_below_the_least_noise_a_fractional_order_gets_the_next_integer() -> None:
    fractional, integer = subsampled_gaussian_rdp(0.1, 0.04, [2.5, 3.0])
    assert fractional == integer


@settings(max_examples=40, deadline=None)
@given(
    q=st.floats(-8.0, 0.0).map(lambda e: 10**e),
    z=st.floats(math.log(0.05), math.log(1000.0)).map(math.exp),
)
def test_rdp_grows_in_the_order_and_its_moment_is_convex(q: float, z: float) -> None:
    rdp = subsampled_gaussian_rdp(q, z, DEFAULT_ORDERS)
    assert (rdp > 0).all()
    assert np.isfinite(rdp).all()
    assert (np.diff(rdp) >= -1e-9 * rdp[1:]).all()
    w = np.array(DEFAULT_ORDERS) - 1
    slopes = np.diff(w * rdp) / np.diff(w)
    assert (np.diff(slopes) >= -1e-6 * slopes[1:]).all()


def test_rounds_add_up() -> None:
    orders = (1.5, 2.0, 9.0)
    rounds = {(0.01, 1.0): 10, (1.0, 5.0): 3}
    expected = 10 * subsampled_gaussian_rdp(0.01, 1.0, orders)
    expected += 3 * subsampled_gaussian_rdp(1.0, 5.0, orders)
    assert composed_rdp(rounds, orders) == pytest.approx(expected, rel=1e-15)
    assert list(composed_rdp({}, orders)) == [0.0, 0.0, 0.0]


def test_epsilon_has_the_known_value_of_abadis_example() -> None:
    rdp = composed_rdp({(0.01, 4.0): 10_000}, DEFAULT_ORDERS)
    assert epsilon_from_rdp(DEFAULT_ORDERS, rdp, 1e-5) == pytest.approx(1.0355, abs=1e-4)


@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-12])
def test_conversions_agree_with_a_published_library(delta: float) -> None:
    orders = np.array([1.5, 2.0, 7.0, 20.0, 300.0])
    rdp = composed_rdp({(0.01, 1.0): 2000, (1.0, 20.0): 3}, orders)
    theirs, _ = rdp_privacy_accountant.compute_epsilon(orders, rdp, delta)
    assert epsilon_from_rdp(orders, rdp, delta) == pytest.approx(theirs, rel=1e-9)
    theirs, _ = rdp_privacy_accountant.compute_delta(orders, rdp, 3.0)
    assert delta_from_rdp(orders, rdp, 3.0) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("z", [0.03, 1.0, 300.0])
def test_default_orders_are_dense_enough(z: float) -> None:
    def bound(log_w: float) -> float:
        order = 1 + math.exp(log_w)
        return (
            order / (2 * z**2)
            + math.log1p(-1 / order)
            - (math.log(1e-6) + math.log(order)) / (order - 1)
        )

    best = minimize_scalar(bound, bounds=(-9.0, 9.5), method="bounded", options={"xatol": 1e-9}).fun
    rdp = composed_rdp({(1.0, z): 1}, DEFAULT_ORDERS)
    assert best <= epsilon_from_rdp(DEFAULT_ORDERS, rdp, 1e-6) <= best * 1.005


@pytest.mark.parametrize("delta", [1e-2, 1e-6, 1e-30])
def test_delta_inverts_epsilon(delta: float) -> None:
    rdp = composed_rdp({(0.02, 0.9): 500}, DEFAULT_ORDERS)
    epsilon = epsilon_from_rdp(DEFAULT_ORDERS, rdp, delta)
    assert 0 < epsilon < np.min(rdp - math.log(delta) / (np.array(DEFAULT_ORDERS) - 1))
    assert delta_from_rdp(DEFAULT_ORDERS, rdp, epsilon) == pytest.approx(delta, rel=1e-9)


def test_conversions_stay_in_range() -> None:
    tiny = composed_rdp({(1e-6, 10.0): 1}, DEFAULT_ORDERS)
    assert epsilon_from_rdp(DEFAULT_ORDERS, tiny, 0.9) == 0.0
    huge = composed_rdp({(1.0, 0.1): 1000}, DEFAULT_ORDERS)
    assert delta_from_rdp(DEFAULT_ORDERS, huge, 0.0) == 1.0


@pytest.mark.parametrize("z", [1e160, 1.7e308])
def test_more_noise_than_has_a_square_costs_no_more_than_less(z: float) -> None:
    orders = (1.5, 2.0, 64.0)
    found = subsampled_gaussian_rdp(0.5, z, orders)
    assert (found >= 0.0).all()
    assert (found <= subsampled_gaussian_rdp(0.5, 1e80, orders)).all()


def test_noise_beyond_the_square_of_floats_costs_nothing() -> None:
    assert subsampled_gaussian_rdp(1.0, 1e308, [2.0]).tolist() == [0.0]
