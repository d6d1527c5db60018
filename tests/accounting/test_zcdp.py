"""zCDP: conversions against grids, a published library and mechanisms whose curve is known."""

import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import rdp as published
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting import classical, gaussian
from fedpriv.errors import InvalidValueError
from tests.accounting.poisson_rounds import epsilon_interval

RHOS = (1e-6, 1e-3, 0.02, 0.5, 3.0, 40.0, 1e4)
DELTAS = (1e-300, 1e-30, 1e-9, 1e-5, 0.01, 0.3)


def test_rho_adds_up_and_ignores_sampling() -> None:
    assert classical.zcdp_rho({(1.0, 2.0): 8}) == pytest.approx(8 / (2 * 2.0**2))
    assert classical.zcdp_rho({(1.0, 1.0): 1, (0.2, 0.5): 3}) == pytest.approx(0.5 + 6.0)
    assert classical.zcdp_rho({(1e-6, 3.0): 7}) == classical.zcdp_rho({(1.0, 3.0): 7})
    assert classical.zcdp_rho({}) == 0.0
    assert classical.zcdp_rho({(0.5, 0.0): 1}) == math.inf


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("delta", DELTAS)
def test_bun_steinke_is_the_printed_formula(rho: float, delta: float) -> None:
    truth = mpmath.mpf(rho) + 2 * mpmath.sqrt(mpmath.mpf(rho) * mpmath.log(1 / mpmath.mpf(delta)))
    found = classical.zcdp_epsilon_bun_steinke(rho, delta)
    assert truth <= found <= truth * (1 + mpmath.mpf("1e-13"))


@pytest.mark.parametrize("rho", RHOS)
@pytest.mark.parametrize("delta", DELTAS)
def test_the_tighter_conversion_is_the_minimum_over_orders(rho: float, delta: float) -> None:
    excess = np.geomspace(1e-6, 1e6, 400_001)
    bounds = (1 + excess) * rho - np.log1p(1 / excess)
    bounds += (-math.log(delta) - np.log1p(excess)) / excess
    assert classical.zcdp_epsilon(rho, delta) == pytest.approx(
        max(0.0, bounds.min()), rel=1e-7, abs=1e-9
    )
    assert classical.zcdp_epsilon(rho, delta) <= classical.zcdp_epsilon_bun_steinke(rho, delta)


@pytest.mark.parametrize("rho", [0.02, 0.5, 3.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.01])
def test_agrees_with_a_published_library(rho: float, delta: float) -> None:
    orders = 1 + np.geomspace(0.01, 1000, 4001)
    accountant = published.RdpAccountant(orders)
    accountant.compose(dp_accounting.ZCDpEvent(rho))
    theirs = accountant.get_epsilon(delta)
    assert classical.zcdp_epsilon(rho, delta) == pytest.approx(theirs, rel=1e-5)
    assert classical.zcdp_epsilon(rho, delta) <= theirs * (1 + 1e-12)


@pytest.mark.parametrize("z", [0.1, 0.7, 2.0, 30.0, 1e4])
@pytest.mark.parametrize("delta", DELTAS)
def test_holds_for_the_gaussian_mechanism(z: float, delta: float) -> None:
    truth = gaussian.epsilon(delta, z)
    tight = classical.zcdp_epsilon(classical.zcdp_rho({(1.0, z): 1}), delta)
    assert truth <= tight + 1e-12
    assert tight <= classical.zcdp_epsilon_bun_steinke(classical.zcdp_rho({(1.0, z): 1}), delta)


@pytest.mark.parametrize("pure", [0.01, 0.5, 2.0, 10.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-3, 0.2])
def test_holds_for_randomized_response(pure: float, delta: float) -> None:
    # ε₀-DP is ε₀²/2-zCDP (Bun & Steinke 2016, Proposition 1.4), and randomised response has
    # δ(ε) = (e^{ε₀} − e^ε)/(1 + e^{ε₀}), so ε(δ) = log(e^{ε₀} − δ·(1 + e^{ε₀})).
    inside = math.exp(pure) - delta * (1 + math.exp(pure))
    truth = math.log(inside) if inside > 1 else 0.0
    assert classical.zcdp_epsilon(pure**2 / 2, delta) >= truth


@pytest.mark.parametrize("q", [1e-4, 0.05, 0.5, 1.0])
def test_holds_with_any_sampling(q: float) -> None:
    for rounds in ({(q, 1.0): 20}, {(q, 0.6): 1, (q, 5.0): 300}):
        assert (
            classical.zcdp_epsilon(classical.zcdp_rho(rounds), 1e-6)
            >= epsilon_interval(rounds, 1e-6)[0]
        )


def test_amplifying_rho_like_a_variance_would_be_wrong() -> None:
    # q²·ρ is what holds in the limit of tiny ρ; taken as zCDP it is below the truth.
    q, z, delta = 0.01, 0.5, 1e-6
    wrong = classical.zcdp_epsilon(q**2 * classical.zcdp_rho({(q, z): 10}), delta)
    assert wrong < epsilon_interval({(q, z): 10}, delta)[0] / 5


@settings(max_examples=200, deadline=None)
@given(st.floats(-300.0, 300.0), st.floats(-320.0, -1e-6), st.floats(1.01, 100.0))
def test_never_warns_and_grows_with_rho(exponent: float, log10_delta: float, more: float) -> None:
    rho, delta = 10.0**exponent, max(10.0**log10_delta, 5e-324)
    small, large = classical.zcdp_epsilon(rho, delta), classical.zcdp_epsilon(rho * more, delta)
    assert 0.0 <= small <= large < math.inf
    assert small <= classical.zcdp_epsilon_bun_steinke(rho, delta)


def test_ends() -> None:
    assert classical.zcdp_epsilon(0.0, 1e-5) == classical.zcdp_epsilon_bun_steinke(0.0, 1e-5) == 0.0
    assert (
        classical.zcdp_epsilon(math.inf, 1e-5)
        == classical.zcdp_epsilon_bun_steinke(math.inf, 1e-5)
        == math.inf
    )
    assert classical.zcdp_rho({(1.0, 1e-300): 1}) == math.inf
    assert classical.zcdp_rho({(1.0, 1e300): 1}) > 0.0


@pytest.mark.parametrize("rho", [-1.0, math.nan])
def test_bad_rho_is_refused(rho: float) -> None:
    for convert in (classical.zcdp_epsilon, classical.zcdp_epsilon_bun_steinke):
        with pytest.raises(InvalidValueError, match=f"rho is {rho}"):
            convert(rho, 0.1)
        with pytest.raises(InvalidValueError, match=r"delta is 1.0"):
            convert(1.0, 1.0)
    with pytest.raises(InvalidValueError, match=r"sampling_probability is 2.0"):
        classical.zcdp_rho({(2.0, 1.0): 1})
