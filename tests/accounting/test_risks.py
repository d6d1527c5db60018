"""Risks of attacks against closed forms, brute force, and dp-accounting's privacy losses."""

import math
import warnings
from functools import partial

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from riskcal.analysis import get_advantage_from_pld, get_bayes_risk_from_pld, get_beta_from_pld
from scipy.integrate import quad
from scipy.stats import norm

from fedpriv.accounting import (
    Bound,
    TradeOff,
    delta,
    epsilon,
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_gaussian,
    trade_off,
)
from fedpriv.accounting.calibration import plan_within
from fedpriv.accounting.fdp import gaussian_trade_off
from fedpriv.accounting.risks import plan_of_advantage, risks_of, success_at
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import NeighbouringRelation, SamplingPolicy

ADD_OR_REMOVE, REPLACE = NeighbouringRelation
FINE = np.concatenate([norm.cdf(np.linspace(-7.5, 7.5, 200_001)), [0.0, 1.0]])
SAMPLED = [(0.01, 4.0, 10_000), (0.01, 1.0, 1_000), (0.3, 4.45, 100), (0.1, 0.7, 100)]


@pytest.mark.parametrize("relation", NeighbouringRelation)
@pytest.mark.parametrize(("z", "rounds"), [(1.0, 1), (4.0, 4), (20.0, 3), (0.6, 2)])
def test_one_gaussian_has_closed_forms(z: float, rounds: int, relation: str) -> None:
    relation = NeighbouringRelation(relation)
    found = risks_of(trade_off([every_user_gaussian(z, relation, count=rounds)]))
    mu = relation.sensitivity * math.sqrt(rounds) / z
    advantage = 2.0 * norm.cdf(mu / 2.0) - 1.0
    assert found.mu == pytest.approx(mu, rel=1e-12)
    assert (found.slack, found.regret, found.bound) == (0.0, 0.0, Bound.INTERVAL)
    assert found.advantage == pytest.approx(advantage, rel=1e-9)
    assert found.success == pytest.approx((1.0 + advantage) / 2.0, abs=1e-9)
    assert set(found.power) == {0.001, 0.01, 0.05, 0.1}
    for alpha, power in found.power.items():
        truth = norm.cdf(norm.ppf(alpha) + mu)
        assert truth <= power <= truth + 1e-3


@pytest.mark.parametrize(("q", "z", "rounds"), SAMPLED)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sampled_rounds_are_between_both_ends_of_dp_accounting(
    q: float, z: float, rounds: int
) -> None:
    off = trade_off([poisson_gaussian(q, z, count=rounds)])
    found = risks_of(off)
    composed = [
        privacy_loss_distribution.from_gaussian_mechanism(
            z,
            sampling_prob=q,
            value_discretization_interval=1e-4,
            pessimistic_estimate=pessimistic,
            use_connect_dots=pessimistic,
        ).self_compose(rounds)
        for pessimistic in (False, True)
    ]
    low, high = map(get_advantage_from_pld, composed)
    assert max(low, high - 1e-3) - 1e-6 <= found.advantage <= high + 3e-3
    alphas = np.array([*found.power])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        low, high = (1.0 - get_beta_from_pld(each, alphas) for each in composed)
    powers = np.array([*found.power.values()])
    assert np.all(powers >= np.maximum(low, high - 1e-3) - 1e-6)
    assert np.all(powers <= high + 3e-3)
    for prior in (0.01, 0.3, 0.5):
        risks = [get_bayes_risk_from_pld(each, 1.0 - prior) for each in composed]
        low, high = (1.0 - risk for risk in risks)
        assert max(low, high - 1e-3) - 1e-6 <= success_at(off, prior) <= high + 3e-3
    # No test beats one Gaussian by more than the slack.
    errors = FINE[::500]
    missed = get_beta_from_pld(composed[0], np.sort(errors))
    promised = gaussian_trade_off(np.sort(errors), found.mu) - found.slack
    assert np.all(missed >= promised - 1e-6)


@pytest.mark.parametrize(("q", "z", "rounds"), SAMPLED)
def test_mu_is_the_least_that_holds_and_its_regret_the_largest_gap(
    q: float, z: float, rounds: int
) -> None:
    off = trade_off([poisson_gaussian(q, z, count=rounds)])
    found, missed = risks_of(off), off.type_two(FINE)
    assert 0.0 < found.slack < 2e-6
    assert np.all(gaussian_trade_off(FINE, found.mu) - found.slack <= missed + 1e-10)
    smaller = gaussian_trade_off(FINE, found.mu * (1.0 - 1e-3))
    assert np.any(smaller - found.slack > missed)
    gap = float(np.max(missed - gaussian_trade_off(FINE, found.mu)))
    assert found.regret == pytest.approx(gap, abs=1e-5)
    assert found.mu <= math.sqrt(rounds) / z


@settings(max_examples=25, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.floats(0.01, 9.0), st.floats(0.0, 0.9)), max_size=6),
    advantage=st.floats(0.01, 0.95),
    prior=st.floats(0.0, 1.0),
)
def test_success_is_that_of_the_best_test_of_all(
    pairs: list[tuple[float, float]], advantage: float, prior: float
) -> None:
    """Any pairs, also those that no convex function has."""
    sound = ((0.0, advantage), *sorted((e, d * advantage) for e, d in pairs))
    off = TradeOff("tight", ADD_OR_REMOVE, Bound.UPPER, sound, None)
    by_force = prior * off.power(FINE) + (1.0 - prior) * (1.0 - FINE)
    found = success_at(off, prior)
    assert float(np.max(by_force)) <= found + 1e-15
    assert found <= float(np.max(by_force)) + 1e-4
    assert found >= max(prior, 1.0 - prior)


@pytest.mark.parametrize("prior", [0.1, 0.5, 0.8])
def test_success_against_one_sampled_round_is_an_integral(prior: float) -> None:
    q, z = 0.4, 0.8

    def right(x: float) -> float:
        without, joined = norm.pdf(x, 0.0, z), norm.pdf(x, 1.0, z)
        return max(prior * (q * joined + (1.0 - q) * without), (1.0 - prior) * without)

    truth, _ = quad(right, -8.0, 9.0, limit=500)
    found = success_at(trade_off([poisson_gaussian(q, z)]), prior)
    # Either population may be the one with the user, which is worse for the larger prior.
    assert truth - 1e-9 <= found
    assert prior > 0.5 or found <= truth + 1e-3


def test_nothing_released_and_nothing_hidden() -> None:
    nothing = risks_of(trade_off([]))
    assert (nothing.advantage, nothing.mu, nothing.regret) == (0.0, 0.0, 0.0)
    assert nothing.success == pytest.approx(0.5, abs=1e-9)
    bare = risks_of(trade_off([poisson_gaussian(0.3, 0.0)]))
    assert (bare.advantage, bare.success, bare.mu) == (1.0, 1.0, math.inf)


def test_other_policies_have_a_mu() -> None:
    found = risks_of(trade_off([fixed_size_gaussian(10, 100, 4.0, count=5)]))
    assert 0.0 < found.mu <= 2.0 * math.sqrt(5) / 4.0
    assert 0.0 <= found.regret < 0.1


@pytest.mark.parametrize("advantage", [0.01, 0.2, 0.9])
def test_an_advantage_of_all_users_is_that_of_one_gaussian(advantage: float) -> None:
    find = partial(plan_within, rounds=7, policy=SamplingPolicy.EVERY_USER)
    plan = plan_of_advantage(advantage, 1e-5, find, "tight")
    z = math.sqrt(7) / (2.0 * norm.ppf((1.0 + advantage) / 2.0))
    assert z <= plan.noise_multiplier <= z * 1.001
    assert plan.loss == epsilon(
        [every_user_gaussian(plan.noise_multiplier, ADD_OR_REMOVE, 7)], 1e-5
    )


@pytest.mark.parametrize(
    "given",
    [
        {"rounds": 1000, "sampling_probability": 0.01},
        {"rounds": 1000, "noise_multiplier": 1.0},
        {"sampling_probability": 0.01, "noise_multiplier": 1.0},
    ],
    ids=["noise", "sampling", "rounds"],
)
def test_an_advantage_is_spent_and_not_passed(given: dict[str, float]) -> None:
    plan = plan_of_advantage(0.2, 1e-5, partial(plan_within, **given), "tight")
    event = plan.event
    assert 0.199 <= delta([event], 0.0) <= 0.2
    assert plan.loss == epsilon([event], 1e-5)


@pytest.mark.parametrize(
    ("advantage", "given", "message"),
    [
        (0.0, {}, "advantage is 0.0; it must be in"),
        (1.0, {}, "advantage is 1.0; it must be in"),
        (math.nan, {}, "advantage is nan; it must be in"),
        (0.2, {"rounds": 10, "noise_multiplier": 500.0}, "advantage is 0.2; every sampling"),
        (0.2, {"rounds": 0}, "rounds is 0; it must be"),
    ],
)
def test_bad_advantages_are_refused(
    advantage: float, given: dict[str, float], message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        plan_of_advantage(advantage, 1e-5, partial(plan_within, **given), "tight")


def test_a_prior_is_a_probability() -> None:
    with pytest.raises(InvalidValueError, match="prior is"):
        success_at(trade_off([]), 1.5)


def test_mu_says_nothing_of_releases_that_may_show_everything() -> None:
    risks = risks_of(trade_off([poisson_gaussian(0.17, 0.007, 100)]))
    assert risks.power[0.001] > 0.99
    assert (risks.mu, risks.slack) == (math.inf, 0.0)
    assert risks.gaussian == "Gaussian DP: μ = ∞"


def test_noise_for_an_advantage_keeps_within_it_under_every_policy() -> None:
    for policy, relation in (
        (SamplingPolicy.FIXED_SIZE, NeighbouringRelation.REPLACE_ONE),
        (SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    ):
        find = partial(
            plan_within,
            rounds=100,
            sampling_probability=0.1,
            policy=policy,
            relation=relation,
            population=1000,
        )
        plan = plan_of_advantage(0.2, 1e-5, find, "tight")
        assert 0.19 < trade_off([plan.event]).advantage <= 0.2
