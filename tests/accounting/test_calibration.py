"""Calibration lands on the safe side, and close to the edge, for every policy."""

import math

import pytest

from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.calibration import (
    calibrate_noise_multiplier,
    largest_number,
    largest_probability,
    plan_within,
    smallest_noise,
)
from fedpriv.accounting.policies import (
    banded_poisson_gaussian,
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_examples_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import NeighbouringRelation, RoundEvent, SamplingPolicy

ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE

BUDGETS = [
    (2.0, 1e-6, 1000, 0.01),
    (0.1, 1e-9, 50, 0.3),
    (8.0, 1e-5, 1, 1.0),
    (30.0, 1e-5, 10_000, 1e-3),
]
# Every accountant is searched alike.
PRICED = [*((*budget, "tight") for budget in BUDGETS), (*BUDGETS[1], "pld"), (*BUDGETS[0], "rdp")]


def largest_rounds(
    target: float, delta: float, z: float, q: float, accountant: str = "tight"
) -> int:
    def events(number: int) -> list[RoundEvent]:
        return [poisson_gaussian(q, z, number)]

    return largest_number(target, delta, events, 2**30, accountant)


def largest_sampling_probability(
    target: float, delta: float, rounds: int, z: float, accountant: str = "tight"
) -> float:
    def events(q: float) -> list[RoundEvent]:
        return [poisson_gaussian(q, z, rounds)]

    return largest_probability(target, delta, events, accountant)


def price(z: float, rounds: int, q: float, delta: float, accountant: str) -> float:
    return epsilon([poisson_gaussian(q, z, rounds)], delta, accountant).epsilon


@pytest.mark.parametrize(("target", "delta", "rounds", "q", "accountant"), PRICED)
def test_noise_is_the_smallest_within_the_budget(
    target: float, delta: float, rounds: int, q: float, accountant: str
) -> None:
    z = calibrate_noise_multiplier(target, delta, rounds, q, accountant)
    assert price(z, rounds, q, delta, accountant) <= target
    assert price(0.999 * z, rounds, q, delta, accountant) > target


@pytest.mark.parametrize(("target", "delta", "rounds", "q", "accountant"), PRICED)
def test_rounds_are_the_most_within_the_budget(
    target: float, delta: float, rounds: int, q: float, accountant: str
) -> None:
    z = calibrate_noise_multiplier(target, delta, rounds, q, accountant)
    most = largest_rounds(target, delta, z, q, accountant)
    assert most >= rounds
    assert price(z, most, q, delta, accountant) <= target
    assert price(z, most + 1, q, delta, accountant) > target


# z for the rounds of BUDGETS at which some sampling, but not q = 1, is within the budget.
NOISES = [1.0, 20.0, 0.6, 0.7]
PRICED_NOISES = [
    (target, delta, rounds, NOISES[BUDGETS.index((target, delta, rounds, q))], accountant)
    for target, delta, rounds, q, accountant in PRICED
]


@pytest.mark.parametrize(("target", "delta", "rounds", "z", "accountant"), PRICED_NOISES)
def test_sampling_probability_is_the_largest_within_the_budget(
    target: float, delta: float, rounds: int, z: float, accountant: str
) -> None:
    q = largest_sampling_probability(target, delta, rounds, z, accountant)
    assert price(z, rounds, q, delta, accountant) <= target
    assert price(z, rounds, 1.001 * q, delta, accountant) > target


POLICIES = {
    "poisson, replaced": lambda z, count: poisson_replace_gaussian(0.02, z, count),
    "poisson examples": lambda z, count: poisson_examples_gaussian(0.02, 8, z, count),
    "every user": lambda z, count: every_user_gaussian(z, ADD_OR_REMOVE, count),
    "every user, replaced": lambda z, count: every_user_gaussian(z, REPLACE, count),
    "fixed size": lambda z, count: fixed_size_gaussian(20, 1000, z, count),
    "random allocation": lambda z, count: random_allocation_gaussian(50, 1, z, count),
    "separated": lambda z, count: separated_gaussian(
        (1.0, 0.5, 0.3), 100, 3, 20, z, ADD_OR_REMOVE, count
    ),
    "poisson within bands": lambda z, count: banded_poisson_gaussian(
        (1.0, 0.5, 0.3), 100, 20, 0.1, z, ADD_OR_REMOVE, count
    ),
}


LONGEST = "random allocation"
OTHERS = [policy for policy in POLICIES if policy != LONGEST]


@pytest.mark.parametrize("policy", [*OTHERS, pytest.param(LONGEST, marks=pytest.mark.slow)])
def test_noise_and_number_of_every_policy(policy: str) -> None:
    def price(z: float, count: int) -> float:
        return epsilon([event(z, count)], 1e-6, "tight").epsilon

    event = POLICIES[policy]
    z = smallest_noise(3.0, 1e-6, lambda z: [event(z, 20)])
    assert price(z, 20) <= 3.0 < price(0.999 * z, 20)
    most = largest_number(3.0, 1e-6, lambda count: [event(z, count)], 1000)
    assert price(z, most) <= 3.0 < price(z, most + 1)
    assert most >= 20


def test_one_setting_of_events_of_several_kinds() -> None:
    """Rounds that are charged already, and later ones whose sampling is to be found."""
    charged = [poisson_gaussian(0.01, 1.0, 100), poisson_gaussian(0.02, 2.0, 50)]

    def events(q: float) -> list[RoundEvent]:
        return [*charged, poisson_gaussian(q, 1.5, 300)]

    q = largest_probability(2.0, 1e-6, events)
    assert epsilon(events(q), 1e-6, "tight").epsilon <= 2.0
    assert epsilon(events(1.001 * q), 1e-6, "tight").epsilon > 2.0


def test_a_cohort_is_at_most_as_large_as_it_may_be() -> None:
    def price(size: int) -> float:
        return epsilon([fixed_size_gaussian(size, 1000, 4.0, 50)], 1e-6, "pld").epsilon

    size = largest_number(3.0, 1e-6, lambda m: [fixed_size_gaussian(m, 1000, 4.0, 50)], 1000, "pld")
    assert price(size) <= 3.0 < price(size + 1)
    everyone = largest_number(
        300.0, 1e-6, lambda m: [fixed_size_gaussian(m, 1000, 4.0, 50)], 1000, "pld"
    )
    assert everyone == 1000


@pytest.mark.parametrize("most", [0, -3, 2**53 + 1])
def test_numbers_have_an_end(most: int) -> None:
    with pytest.raises(InvalidValueError, match=f"most is {most}"):
        largest_number(1.0, 1e-5, lambda n: [poisson_gaussian(0.1, 1.0, n)], most)


def test_an_accountant_refuses_what_it_cannot_price() -> None:
    with pytest.raises(UnsupportedEventError, match="rdp accountant has no analysis of fixed"):
        smallest_noise(1.0, 1e-5, lambda z: [fixed_size_gaussian(1, 10, z)], "rdp")


def test_the_accountant_is_tight_by_default() -> None:
    z = calibrate_noise_multiplier(2.0, 1e-5, 1000, 0.01)
    assert z == calibrate_noise_multiplier(2.0, 1e-5, 1000, 0.01, "tight")
    assert z < calibrate_noise_multiplier(2.0, 1e-5, 1000, 0.01, "pld")


def test_the_three_calibrations_are_inverses() -> None:
    z = calibrate_noise_multiplier(2.0, 1e-5, 1000, 0.01)
    assert largest_sampling_probability(2.0, 1e-5, 1000, z) == pytest.approx(0.01, rel=2e-3)
    assert largest_rounds(2.0, 1e-5, z, 0.01) == pytest.approx(1000, rel=3e-3)


def test_known_sampling_probability() -> None:
    # ε of q = 0.01, z = 4, T = 10,000 at δ = 1e-5 is 0.94687 (to five digits).
    q = largest_sampling_probability(0.94687, 1e-5, 10_000, 4.0)
    assert 0.999 * 0.01 <= q <= 1.00002 * 0.01


def test_one_rare_round_is_known_in_closed_form() -> None:
    # H_{1+q(a−1)}((1−q)P + qQ ‖ P) = q·H_a(Q ‖ P), so that what is (ε0, δ0) with q = 1 costs
    # log(1 + q(e^{ε0} − 1)) at qδ0 (Balle et al. 2018, Theorem 2).
    epsilon_0 = epsilon([poisson_gaussian(1.0, 2.0)], 1e-3).epsilon_low
    target = math.log1p(0.01 * math.expm1(epsilon_0))
    q = largest_sampling_probability(target, 0.01 * 1e-3, 1, 2.0)
    assert q == pytest.approx(0.01, rel=5e-3)


def test_known_noise_multiplier() -> None:
    # ε = 0.5 at δ = 1e-4 in 20,000 rounds with q = 0.01 needs 8.374.
    z = calibrate_noise_multiplier(0.5, 1e-4, 20_000, 0.01)
    assert 8.374 <= z <= 8.374 * 1.001


def test_not_even_one_round_fits() -> None:
    assert largest_rounds(0.1, 1e-6, 0.3, 0.5) == 0
    assert largest_rounds(5.0, 1e-6, 0.0, 0.5) == 0


def test_the_least_noise_is_enough_where_delta_covers_the_sampling() -> None:
    assert calibrate_noise_multiplier(1.0, 1e-2, 1, 1e-3) == 0.05


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_out_of_reach_is_an_error(accountant: str) -> None:
    with pytest.raises(InvalidValueError, match="epsilon is 1e-09 at delta 1e-09"):
        calibrate_noise_multiplier(1e-9, 1e-9, 10_000, 1.0, accountant)


def test_figure_4_lowers_the_noise_too_far() -> None:
    # Printed: σ = 1.3 costs 1.34 by moments, and so does σ = 1.06 by the CLT. It really costs more.
    q, rounds = 256 / 60_000, 4687
    by_clt = plan_within(1.34, 1e-5, rounds, q, accountant="gdp").noise_multiplier
    assert by_clt == pytest.approx(1.06, abs=0.005)
    proved = plan_within(1.34, 1e-5, rounds, q).noise_multiplier
    assert by_clt < proved < 1.3
    assert epsilon([poisson_gaussian(q, by_clt, rounds)], 1e-5).epsilon_low > 1.34


@pytest.mark.parametrize("population", [0, 10**20])
def test_a_population_out_of_range_is_refused(population: int) -> None:
    with pytest.raises(InvalidValueError, match=f"population is {population}"):
        plan_within(
            1.0, 1e-5, 10, noise_multiplier=4.0, policy=SamplingPolicy.FIXED_SIZE,
            relation=REPLACE, population=population,
        )  # fmt: skip


def test_too_many_rounds_are_an_error() -> None:
    with pytest.raises(InvalidValueError, match=r"more than 1073741824 rounds"):
        plan_within(
            100.0, 1e-5, sampling_probability=1e-6, noise_multiplier=1000.0, accountant="rdp"
        )


def test_sampling_that_is_no_limit_is_an_error() -> None:
    with pytest.raises(InvalidValueError, match="at delta 1e-05"):
        largest_sampling_probability(5.0, 1e-5, 10, 100.0)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_no_sampling_makes_rounds_without_noise_private(accountant: str) -> None:
    with pytest.raises(
        InvalidValueError,
        match=r"is 5\.0 at delta 1e-05",
    ):
        largest_sampling_probability(5.0, 1e-5, 10, 0.0, accountant)


@pytest.mark.parametrize("target", [0.0, -1.0, math.inf, math.nan])
def test_illegal_target_is_named(target: float) -> None:
    with pytest.raises(InvalidValueError, match=f"epsilon is {target}"):
        calibrate_noise_multiplier(target, 1e-5, 10, 0.1)
    with pytest.raises(InvalidValueError, match=f"epsilon is {target}"):
        largest_rounds(target, 1e-5, 1.0, 0.1)
    with pytest.raises(InvalidValueError, match=f"epsilon is {target}"):
        largest_sampling_probability(target, 1e-5, 10, 1.0)


def test_other_illegal_arguments_are_named() -> None:
    with pytest.raises(InvalidValueError, match=r"delta is 1.0"):
        calibrate_noise_multiplier(1.0, 1.0, 10, 0.1)
    with pytest.raises(InvalidValueError, match=r"count is 0"):
        calibrate_noise_multiplier(1.0, 1e-5, 0, 0.1)
    with pytest.raises(InvalidValueError, match=r"sampling_probability is 1.5"):
        largest_rounds(1.0, 1e-5, 1.0, 1.5)
    with pytest.raises(InvalidValueError, match=r"noise_stddev of group 'update' is nan"):
        largest_sampling_probability(1.0, 1e-5, 10, math.nan)
    with pytest.raises(InvalidValueError, match=r"accountant 'clt'"):
        largest_rounds(1.0, 1e-5, 1.0, 0.5, "clt")
