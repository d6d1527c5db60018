"""Trade-off functions against tests whose errors are known, exact formulas and printed numbers."""

import math
from collections.abc import Callable, Sequence
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from fedpriv.accounting import (
    ACCOUNTANTS,
    Bound,
    TradeOff,
    delta,
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_examples_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
    trade_off,
)
from fedpriv.accounting import epsilon as epsilon_of
from fedpriv.accounting.accountants import IntervalAccountant, bounds_of
from fedpriv.accounting.contour import inversion
from fedpriv.accounting.fdp import gaussian_trade_off, trade_off_of_bound
from fedpriv.accounting.gaussian import clt_mu
from fedpriv.accounting.pld import queries
from fedpriv.accounting.round_counts import strategy_sensitivity
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import NeighbouringRelation, RoundEvent

ALPHA = np.linspace(0.0, 1.0, 2001)
# Both ends, which are steep, down to a millionth.
ERRORS = np.concatenate([norm.sf(np.linspace(-4.7, 4.7, 301)), [0.0, 1.0]])
ADD_OR_REMOVE, REPLACE = NeighbouringRelation


def gaussian_events(noise: Sequence[float], relation: NeighbouringRelation) -> list[RoundEvent]:
    return [every_user_gaussian(z, relation) for z in noise]


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.13, 6.0])
def test_g_mu_is_that_of_the_best_test(mu: float) -> None:
    threshold = np.linspace(-4.0, 9.0, 500)
    found = gaussian_trade_off(norm.sf(threshold), mu)
    np.testing.assert_allclose(found, norm.cdf(threshold - mu), atol=1e-12)


@pytest.mark.parametrize("mu", [0.0, 0.3, 1.13, 6.0])
def test_g_mu_is_a_symmetric_trade_off_function(mu: float) -> None:
    curve = gaussian_trade_off(ALPHA, mu)
    assert curve[0] == 1.0
    assert curve[-1] == 0.0
    assert np.all(np.diff(curve) <= 0.0)
    assert np.all(np.diff(curve, 2) >= -1e-12)
    assert np.all(curve <= 1 - ALPHA + 1e-15)
    inside = (curve > 1e-6) & (curve < 1 - 1e-6)
    np.testing.assert_allclose(gaussian_trade_off(curve[inside], mu), ALPHA[inside], atol=1e-9)
    assert np.all(gaussian_trade_off(ALPHA, mu + 0.1) <= curve)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.0, 0.1), (1.0, 1e-5), (3.0, 0.05), (800.0, 0.0)])
def test_pair_is_the_printed_formula(epsilon: float, delta: float) -> None:
    for alpha in (0.0, 1e-4, 0.02, 0.3, 0.9, 1.0):
        steep = 1 - delta - math.exp(min(epsilon, 700)) * alpha
        flat = math.exp(-epsilon) * (1 - delta - alpha)
        found = trade_off_of_bound(alpha, epsilon, delta)
        assert float(found) == pytest.approx(max(0.0, steep, flat), rel=1e-14)


def test_a_pair_of_a_huge_epsilon_proves_only_what_holds_at_no_false_alarm() -> None:
    found = trade_off_of_bound([0.0, 5e-324, 0.5], 1e300, 0.25)
    assert found.tolist() == [0.75, 0.0, 0.0]


def test_printed_sums_of_errors() -> None:
    # Bu et al. 2020, Section 4.1: at least 77.6 % for μ = 0.57, 9.4 % for (3.01, 1e-5).
    fine = np.linspace(0.0, 1.0, 200_001)
    least = (fine + gaussian_trade_off(fine, 0.57)).min()
    assert round(100 * least, 1) == 77.6
    least = (fine + trade_off_of_bound(fine, 3.01, 1e-5)).min()
    assert round(100 * least, 1) == 9.4


@pytest.mark.parametrize("relation", NeighbouringRelation)
@pytest.mark.parametrize("noise", [(4.0,), (1.0,), (0.5,), (3.0, 2.0, 2.0), (0.25,)])
def test_rounds_of_all_users_are_one_gaussian(
    noise: tuple[float, ...], relation: NeighbouringRelation
) -> None:
    found = trade_off(gaussian_events(noise, relation))
    # Dong, Roth & Su 2019, Section 3: squares of μ = sensitivity/z add up.
    mu = relation.sensitivity * math.sqrt(sum(z**-2 for z in noise))
    truth = norm.cdf(norm.isf(ERRORS) - mu)
    assert np.all(found.type_two(ERRORS) <= truth)
    assert np.all(found.type_two(ERRORS) >= truth - 1e-3 * max(1.0, mu))
    assert found.mu == pytest.approx(mu, rel=1e-12)
    assert (found.relation, found.bound) == (relation, Bound.INTERVAL)
    # The total variation of N(0, 1) and N(μ, 1).
    assert found.advantage == pytest.approx(2 * norm.cdf(mu / 2) - 1, rel=1e-9)


def symmetrised(q: float, z: float) -> np.ndarray:
    """min{f, f⁻¹}** of f = q·G_{1/z} + (1 − q)·Id at `ERRORS`, or a little above."""
    # Bu et al. 2020, Section 2; a chord of a convex curve lies above it.
    one = np.concatenate([norm.sf(np.linspace(-9.0, 9.0, 4_001)), [0.0, 1.0]])
    two = q * norm.cdf(norm.isf(one) - 1 / z) + (1 - q) * (1 - one)
    points = sorted(zip(np.concatenate([one, two]), np.concatenate([two, one]), strict=True))
    hull = list[tuple[float, float]]()  # the lower convex hull, from the left
    for x, y in points:
        while len(hull) > 1 and (hull[-1][0] - hull[-2][0]) * (y - hull[-2][1]) <= (
            hull[-1][1] - hull[-2][1]
        ) * (x - hull[-2][0]):
            hull.pop()
        hull.append((x, y))
    return np.interp(ERRORS, *zip(*hull, strict=True))


@pytest.mark.parametrize(("q", "z"), [(0.03, 0.8), (0.9, 2.0)])
def test_one_sampled_round_is_the_exact_formula(q: float, z: float) -> None:
    found, truth = trade_off([poisson_gaussian(q, z)]).type_two(ERRORS), symmetrised(q, z)
    assert np.all(found <= truth + 1e-12)
    assert np.all(found >= truth - 2e-3)


def test_no_threshold_of_the_sum_of_sampled_rounds_beats_the_curve() -> None:
    q, z, rounds = 0.2, 1.0, 5
    found = trade_off([poisson_gaussian(q, z, count=rounds)])
    threshold, k = np.linspace(-8.0, 13.0, 400)[:, None], np.arange(rounds + 1)
    law = np.array([math.comb(rounds, i) * q**i * (1 - q) ** (rounds - i) for i in k])
    scale = z * math.sqrt(rounds)
    with_user = norm.sf((threshold - k) / scale) @ law  # the sum is above the threshold
    without = norm.sf(threshold[:, 0] / scale)
    assert np.all(found.power(without) >= with_user)
    assert np.all(found.power(1 - with_user) >= 1 - without)
    assert float(np.max(found.power(without) - with_user)) < 0.1
    assert found.advantage >= float(np.max(with_user - without))


EVENTS = st.lists(
    st.builds(
        poisson_gaussian,
        q=st.sampled_from([0.003, 0.1, 0.7, 1.0]),
        noise_multiplier=st.floats(0.4, 20.0),
        count=st.integers(20, 300),  # fewer are priced by `pld`, which takes seconds
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=3, deadline=None)
@given(EVENTS)
def test_a_trade_off_is_a_symmetric_trade_off_function(events: list[RoundEvent]) -> None:
    found = trade_off(events)
    curve = found.type_two(ALPHA)
    assert np.all((curve >= 0.0) & (curve <= 1 - ALPHA))
    assert np.all(np.diff(curve) <= 0.0)
    assert np.all(np.diff(curve, 2) >= -1e-12)
    # Where it is neither 0 nor at its ends, the curve is its own inverse.
    inside = (curve > 1e-6) & (ALPHA > 1e-6)
    np.testing.assert_allclose(found.type_two(curve[inside]), ALPHA[inside], atol=1e-7)
    least = float(np.min(ALPHA + curve))
    assert least == pytest.approx(1 - found.advantage, abs=1e-3)
    # Back to δ by ε: the curve proves every pair.
    fine = found.type_two(ERRORS)
    for epsilon, at in found.pairs[:: len(found.pairs) // 5]:
        assert at == pytest.approx(delta(events, epsilon), rel=0.06, abs=1e-5)
        back = float(np.max(1 - fine - math.exp(min(epsilon, 500.0)) * ERRORS))
        assert back <= at + 1e-9


@pytest.mark.slow
@settings(max_examples=4, deadline=None)
@given(EVENTS, st.floats(1.05, 3.0))
def test_more_noise_and_fewer_rounds_tell_less(events: list[RoundEvent], factor: float) -> None:
    found = trade_off(events)
    (q, z, n) = events[0].sampling.sampling_probability, events[0].noise_multiplier, events[0].count
    quieter = trade_off([poisson_gaussian(q, z * factor, count=n), *events[1:]])
    fewer = trade_off(events[1:])
    for other in quieter, fewer:
        assert np.all(other.type_two(ALPHA) >= found.type_two(ALPHA) - 5e-3)
        assert found.mu is None or other.mu <= found.mu
        assert other.advantage <= found.advantage * 1.01


def test_nothing_released_and_nothing_hidden() -> None:
    nothing = trade_off([])
    assert np.allclose(nothing.type_two(ALPHA), 1 - ALPHA, atol=1e-15)
    assert (nothing.advantage, nothing.mu) == (0.0, 0.0)
    bare = trade_off([poisson_gaussian(0.3, 0.0)])
    assert not np.any(bare.type_two(ALPHA[1:]))


def test_mu_is_proved_only_where_no_round_is_sampled() -> None:
    # Bu et al. 2020, Table 1: μ = 0.23, and 0.57.
    for z, epochs, mu in ((1.3, 15, 0.23), (1.1, 60, 0.57)):
        q = 256 / 60_000
        found = trade_off([poisson_gaussian(q, z, count=int(epochs / q))])
        assert found.mu is None
        # The CLT is below in the tails: some test tells more than N(0, 1) from N(μ, 1).
        assert np.any(found.type_two(ERRORS) < gaussian_trade_off(ERRORS, mu))
    series = trade_off([separated_gaussian((1.0, -0.5), 12, 3, 1, 2.0, ADD_OR_REMOVE, count=4)])
    assert series.bound is Bound.UPPER
    assert series.mu == pytest.approx(strategy_sensitivity((1.0, -0.5), 12, 3, 1))


def test_sampled_rounds_have_the_tails_of_rounds_of_all_users() -> None:
    # δ(ε) ≥ q^T·δ'(ε + T·log(1/q)), from which no μ below that of all users follows.
    q, z, rounds = 0.5, 1.0, 3
    for epsilon in (0.0, 2.0, 8.0, 20.0):
        whole = every_user_gaussian(z, ADD_OR_REMOVE, count=rounds)
        least = q**rounds * delta([whole], epsilon - rounds * math.log(q))
        assert delta([poisson_gaussian(q, z, count=rounds)], epsilon) >= least * (1 - 1e-9)


def test_other_policies_have_a_curve_without_a_mu() -> None:
    found = trade_off([poisson_replace_gaussian(0.1, 4.0, count=5)])
    assert found.mu is None
    assert 0.0 < found.advantage < 1.0
    for alpha in (0.01, 0.05, 0.5):
        assert alpha < float(found.power(alpha)) < 1.0


@pytest.mark.slow
def test_a_curve_is_of_one_accountant() -> None:
    events = [poisson_gaussian(0.1, 1.0, count=20)]
    curves = {name: trade_off(events, name) for name in ACCOUNTANTS}
    tight = curves["tight"].type_two(ALPHA)
    for name, curve in curves.items():
        assert curve.accountant == name
        if curve.bound is not Bound.ESTIMATE:
            assert np.all(curve.type_two(ALPHA) <= tight + 1e-2)
    # Of the CLT's estimate the curve is its G_μ.
    by_clt, mu = curves["gdp"], clt_mu({(0.1, 1.0): 20})
    assert by_clt.bound is Bound.ESTIMATE
    np.testing.assert_allclose(by_clt.type_two(ALPHA), gaussian_trade_off(ALPHA, mu), atol=2e-3)


SOME = TradeOff("tight", ADD_OR_REMOVE, Bound.INTERVAL, ((0.0, 0.5),), None)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: gaussian_trade_off(ALPHA + 0.1, 1.0), r"a type I error is 1.0\d+"),
        (lambda: trade_off_of_bound(-ALPHA, 1.0, 0.1), "a type I error is -0.0005"),
        (lambda: SOME.type_two(1.5), r"a type I error is 1.5"),
        (lambda: SOME.power(math.nan), "a type I error is nan"),
        (lambda: trade_off([], "moments"), "unknown accountant 'moments'"),
    ],
)
def test_bad_values_are_refused_with_a_sentence(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        call()


def test_two_relations_have_no_common_curve() -> None:
    with pytest.raises(UnsupportedEventError, match="cannot be added up"):
        trade_off([poisson_gaussian(0.1, 1.0), poisson_replace_gaussian(0.1, 1.0)])


CURVES = {
    "poisson": [poisson_gaussian(0.01, 1.0, 1000)],
    "a large ε": [poisson_gaussian(0.2, 0.8, 2000)],
    "rare, huge losses": [poisson_gaussian(1e-5, 0.3, 10_000)],
    "different rounds": [poisson_gaussian(0.01 + i / 10**4, 1.0) for i in range(80)],
    "replace": [poisson_replace_gaussian(0.01, 1.0, 1000)],
    "fixed size": [fixed_size_gaussian(100, 10_000, 1.0, count=300)],
    "allocation": [random_allocation_gaussian(40, 1, 1.0, 3)],
    "examples": [poisson_examples_gaussian(0.01, 4, 2.0, 1000)],
    "little noise": [poisson_gaussian(0.5, 0.005, 3)],
}


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("accountant", ["tight", "pld"])
def test_few_compositions_give_the_delta_of_each_epsilon(
    name: str, accountant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, pricing = CURVES[name], ACCOUNTANTS[accountant]
    assert isinstance(pricing, IntervalAccountant)
    largest = epsilon_of(events, 1e-6, accountant).epsilon
    with monkeypatch.context() as patch:
        sums = [Mock(wraps=queries.compose_atoms), Mock(wraps=inversion.contour)]
        patch.setattr(queries, "compose_atoms", sums[0])
        patch.setattr(inversion, "contour", sums[1])
        pairs = trade_off(events, accountant).pairs
        assert sum(each.call_count for each in sums) <= 12
    assert len(pairs) == (64 if math.isfinite(largest) else 1)
    above = bounds_of(events).above
    for at, found in pairs[::9]:
        low, up = pricing.delta_interval(above, at)
        assert low <= found <= 1.05 * up + 1e-6
