"""The accountants as one interface, and what is particular to each."""

import math
from itertools import permutations

import pytest

from fedpriv.accounting import gaussian
from fedpriv.accounting.accountants import (
    ACCOUNTANTS,
    Accountant,
    Bound,
    RDPAccountant,
    accountant_named,
    bounds_of,
    delta,
    epsilon,
)
from fedpriv.accounting.policies import (
    banded_poisson_gaussian,
    fixed_size_gaussian,
    poisson_examples_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    LEAST_DELTA,
    NeighbouringRelation,
    RoundEvent,
)
from tests.accounting.accountant_conformance import (
    FAMILIES,
    AccountantConformance,
    Family,
    IntervalConformance,
    banded,
)

EVENTS = [poisson_gaussian(0.01, 1.0, 1000), poisson_gaussian(1.0, 40.0, 3)]


class TestPLD(IntervalConformance):
    accountant: Accountant = ACCOUNTANTS["pld"]

    def test_it_certifies_an_interval(self) -> None:
        loss = self.accountant.epsilon(EVENTS, 1e-6)
        assert 0 < loss.epsilon_low < loss.epsilon < 1.001 * loss.epsilon_low
        assert Bound.INTERVAL in loss.assumptions


class TestTight(IntervalConformance):
    accountant: Accountant = ACCOUNTANTS["tight"]
    families = (banded,)  # of the others the pld gives the interval

    @pytest.mark.parametrize("q", [0.1, 1.0])
    @pytest.mark.parametrize("of_any", FAMILIES)
    def test_its_interval_is_within_the_plds_under_any_policy(
        self, of_any: Family, q: float
    ) -> None:
        event = of_any(q, 2.0, 5)
        tight, pld = (ACCOUNTANTS[name].epsilon([event], 1e-6) for name in ("tight", "pld"))
        assert pld.epsilon_low <= tight.epsilon_low <= tight.epsilon <= pld.epsilon < math.inf
        deltas = [ACCOUNTANTS[name].delta([event], tight.epsilon) for name in ("tight", "pld")]
        assert 0.0 < deltas[0] <= deltas[1]

    def test_it_agrees_with_the_pld_and_is_tighter(self) -> None:
        tight, pld = (ACCOUNTANTS[name].epsilon(EVENTS, 1e-6) for name in ("tight", "pld"))
        assert pld.epsilon_low <= tight.epsilon_low <= tight.epsilon <= pld.epsilon
        assert tight.epsilon - tight.epsilon_low < 1e-6
        assert tight.bound is Bound.INTERVAL

    def test_where_the_contour_is_weak_the_pld_serves(self) -> None:
        rare = [poisson_gaussian(1e-5, 0.3, 10)]
        tight, pld = (ACCOUNTANTS[name].epsilon(rare, 1e-6) for name in ("tight", "pld"))
        assert (tight.epsilon_low, tight.epsilon) == (pld.epsilon_low, pld.epsilon)

    @pytest.mark.parametrize(
        "event", [poisson_gaussian(1e-9, 0.06, 10**6), poisson_gaussian(0.1, 0.05, 10**8)]
    )
    def test_it_is_never_far_above_the_moments_accountant(self, event: RoundEvent) -> None:
        tight, rdp = (ACCOUNTANTS[name].epsilon([event], 1e-6) for name in ("tight", "rdp"))
        assert tight.epsilon_low <= tight.epsilon <= 1.2 * rdp.epsilon
        for at in (rdp.epsilon, rdp.epsilon / 2):
            deltas = [ACCOUNTANTS[name].delta([event], at) for name in ("tight", "rdp")]
            assert deltas[0] <= 1.2 * deltas[1]

    @pytest.mark.parametrize(
        ("event", "z"),
        [
            (poisson_gaussian(0.5, 0.01, 4), 0.01 / 2),
            (poisson_replace_gaussian(0.5, 0.02, 4), 0.01 / 2),
            (random_allocation_gaussian(2, 1, 0.01, 4), 0.01 / 2),
            (poisson_examples_gaussian(0.5, 8, 0.08, 4), 0.01 / 2),
        ],
    )
    def test_hardly_any_noise_costs_at_most_what_it_does_without_sampling(
        self, event: RoundEvent, z: float
    ) -> None:
        loss = ACCOUNTANTS["tight"].epsilon([event], 1e-6)
        assert 0.0 < loss.epsilon_low <= loss.epsilon <= gaussian.epsilon(1e-6, z) * (1 + 1e-9)

    def test_many_different_rounds_agree_with_the_pld(self) -> None:
        many = [poisson_gaussian(0.01 + i / 10**5, 2.0) for i in range(40)]
        tight, pld = (ACCOUNTANTS[name].epsilon(many, 1e-6) for name in ("tight", "pld"))
        assert max(tight.epsilon_low, pld.epsilon_low) <= min(tight.epsilon, pld.epsilon)
        deltas = [ACCOUNTANTS[name].delta(many, 0.5) for name in ("tight", "pld")]
        assert deltas[0] == pytest.approx(deltas[1], rel=0.06)

    def test_what_the_contour_cannot_do_the_pld_does(self) -> None:
        many = poisson_examples_gaussian(0.1, 30, 60.0)
        for event in (fixed_size_gaussian(10, 300, 3.0, 20), many):
            tight, pld = (ACCOUNTANTS[name].epsilon([event], 1e-6) for name in ("tight", "pld"))
            assert tight.epsilon == pld.epsilon
            assert tight.epsilon_low == pytest.approx(pld.epsilon_low, rel=1e-3)


class TestRDP(AccountantConformance):
    accountant: Accountant = RDPAccountant()

    def test_it_bounds_from_above(self) -> None:
        loss = self.accountant.epsilon(EVENTS, 1e-6)
        assert loss.epsilon_low == 0.0
        assert Bound.UPPER in loss.assumptions
        assert loss.epsilon > epsilon(EVENTS, 1e-6).epsilon

    def test_more_orders_never_cost_more(self) -> None:
        few = RDPAccountant(orders=(2.0, 64.0)).epsilon(EVENTS, 1e-6).epsilon
        assert self.accountant.epsilon(EVENTS, 1e-6).epsilon < few

    def test_no_delta_is_below_the_least_that_is_told_from_zero(self) -> None:
        assert self.accountant.delta([EVENTS[1]], 1e6) == LEAST_DELTA
        assert self.accountant.delta([], 1e6) == 0.0


class TestGDP(AccountantConformance):
    accountant: Accountant = ACCOUNTANTS["gdp"]
    amplifies = False  # it is capped by what unsampled rounds cost

    def test_it_is_an_estimate_that_can_be_below_the_truth(self) -> None:
        # Bu et al. 2020, Table 1, σ = 0.7: 5.07 where the truth is 5.640.
        events = [poisson_gaussian(256 / 60000, 0.7, 45 * 60000 // 256)]
        loss = self.accountant.epsilon(events, 1e-5)
        assert loss.bound is Bound.ESTIMATE
        assert Bound.ESTIMATE in loss.assumptions
        assert loss.epsilon == pytest.approx(5.07, abs=0.005)
        assert loss.epsilon < epsilon(events, 1e-5).epsilon_low


def test_moments_are_above_the_truth() -> None:
    loss = epsilon(EVENTS, 1e-6, "rdp")
    assert loss.bound is Bound.UPPER
    assert loss.epsilon >= epsilon(EVENTS, 1e-6).epsilon_low


@pytest.mark.parametrize("budget", [1e-3, 1.0, 4.0])
@pytest.mark.parametrize("rounds", [(0.3, 4.0, 10), (1.0, 0.5, 1), (1e-4, 0.5, 10**6)], ids=str)
def test_epsilon_and_delta_of_the_clt_agree(
    rounds: tuple[float, float, int], budget: float
) -> None:
    q, z, count = rounds
    found = ACCOUNTANTS["gdp"].delta([poisson_gaussian(q, z, count)], budget)
    assert found < 1e-60 or epsilon([poisson_gaussian(q, z, count)], found, "gdp").epsilon == (
        pytest.approx(budget, rel=1e-6)
    )


def test_every_accountant_is_listed_under_its_name() -> None:
    assert list(ACCOUNTANTS) == ["tight", "pld", "rdp", "gdp"]
    assert all(name == each.name for name, each in ACCOUNTANTS.items())
    for name in ACCOUNTANTS:
        assert accountant_named(name) is ACCOUNTANTS[name]


@pytest.mark.parametrize("name", list(ACCOUNTANTS))
def test_functions_ask_the_named_accountant(name: str) -> None:
    assert epsilon(EVENTS, 1e-6, name) == ACCOUNTANTS[name].epsilon(EVENTS, 1e-6)
    assert delta(EVENTS, 2.0, name) == ACCOUNTANTS[name].delta(EVENTS, 2.0)


def test_the_default_is_tight() -> None:
    assert epsilon(EVENTS, 1e-6) == ACCOUNTANTS["tight"].epsilon(EVENTS, 1e-6)
    assert delta(EVENTS, 2.0) == ACCOUNTANTS["tight"].delta(EVENTS, 2.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tight", "the tight accountant gives ε as an interval; the server is trusted."),
        ("rdp", "the rdp accountant gives ε as an upper bound; the server is trusted."),
        ("gdp", "the gdp accountant gives ε as an estimate; the server is trusted."),
    ],
)
def test_the_assumptions_are_one_grammatical_sentence(name: str, words: str) -> None:
    sentence = epsilon(EVENTS, 1e-6, name).assumptions
    assert sentence.endswith(words)
    assert sentence.count(".") == 1


def test_an_unknown_accountant_is_named() -> None:
    with pytest.raises(InvalidValueError, match="unknown accountant 'clt'"):
        epsilon(EVENTS, 1e-6, "clt")
    with pytest.raises(InvalidValueError, match="unknown accountant 'moments'"):
        delta(EVENTS, 1.0, "moments")


@pytest.mark.parametrize("name", ACCOUNTANTS)
@pytest.mark.parametrize("event", [EVENTS[0], EVENTS[1]])
def test_the_largest_epsilons_have_the_least_deltas(name: str, event: RoundEvent) -> None:
    for large in (1e201, 1e308):  # warnings are errors
        assert 0.0 < delta([event], large, name) <= LEAST_DELTA


@pytest.mark.parametrize("name", ["tight", "pld"])
def test_no_order_of_events_of_different_kinds_changes_a_digit(name: str) -> None:
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    events = [
        banded_poisson_gaussian((1.0, -0.5, 0.25), 22, 5, 0.3, 2.0, relation, 3),
        poisson_examples_gaussian(0.05, 7, 4.0, 20),
        separated_gaussian((1.0, -0.5), 12, 3, 4, 20.0, relation, 2),
    ]
    ends = {
        (epsilon(each, 1e-5, name).epsilon_low, epsilon(each, 1e-5, name).epsilon)
        for each in permutations(events)
    }
    assert len(ends) == 1


@pytest.mark.parametrize(
    "events",
    [
        [random_allocation_gaussian(n, 1, 5.0, 2) for n in (7, 20, 12)],
        [poisson_examples_gaussian(0.1, k, 9.0, 3) for k in (2, 5, 3)],
    ],
)
def test_no_order_of_schedules_or_examples_changes_the_bounds(events: list[RoundEvent]) -> None:
    first = bounds_of(events)
    for each in permutations(events):
        assert list(bounds_of(each).above.items()) == list(first.above.items())
        assert list(bounds_of(each).below.items()) == list(first.below.items())
