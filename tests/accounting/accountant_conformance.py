"""What every accountant promises, as tests that each accountant's test class inherits."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from fedpriv.accounting.accountants import ACCOUNTANTS, Accountant, Bound
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
from fedpriv.accounting.round_counts import compose
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
)

ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
PROBABILITIES = st.one_of(st.just(1.0), st.floats(-5.0, 0.0).map(lambda e: 10**e))
NOISES = st.floats(math.log(0.4), math.log(20.0)).map(math.exp)
COUNTS = st.integers(1, 2000)
DELTAS = st.floats(-10.0, -2.0).map(lambda e: 10**e)
# Several classes inherit one property, so no example of one may be replayed for another.
few = settings(
    max_examples=12,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.differing_executors],
)


def analytic_gaussian(mu: float, delta: float) -> float:
    """The exact ε of an unsampled Gaussian of sensitivity/stddev μ."""

    def excess(epsilon: float) -> float:
        upper = norm.logcdf(mu / 2 - epsilon / mu)
        lower = norm.logcdf(-mu / 2 - epsilon / mu) + epsilon
        return float(upper + math.log(-math.expm1(lower - upper))) - math.log(delta)

    return float(brentq(excess, 1e-9 * mu, mu**2 / 2 + 40 * mu, xtol=1e-14, rtol=1e-13))


def in_groups(q: float, z: float, weights: list[float]) -> RoundEvent:
    """One round whose noise is split among groups; together they have the multiplier z."""
    sampling = SamplingEvent(SamplingPolicy.POISSON, q, 1000, ADD_OR_REMOVE)
    total = sum(weights)
    queries = tuple(
        SumQueryEvent(f"group {g}", float(g + 1), z * (g + 1) / math.sqrt(weight / total))
        for g, weight in enumerate(weights)
    )
    return RoundEvent(sampling, queries)


class AccountantConformance(ABC):
    """Inherit as `class TestX(AccountantConformance)` and name the accountant."""

    amplifies = True
    """Whether rarer sampling makes rounds cheaper."""
    analytic_slack: tuple[float, float] = (1.3, 0.2)
    """Factor and summand by which unsampled rounds may cost more than the analytic Gaussian."""
    prices: tuple[SamplingPolicy, ...] = ()
    """Which of the policies are priced that not every accountant has an analysis of."""

    @property
    @abstractmethod
    def accountant(self) -> Accountant: ...

    def epsilon(self, *events: RoundEvent, delta: float = 1e-6) -> float:
        loss = self.accountant.epsilon(events, delta)
        assert 0.0 <= loss.epsilon_low <= loss.epsilon
        return loss.epsilon

    def test_the_upper_end_alone_is_that_of_the_interval(self) -> None:
        events = [poisson_gaussian(0.02, 1.0, 2), poisson_gaussian(0.01, 2.0)]
        assert self.accountant.upper_epsilon(events, 1e-5) == (
            self.accountant.epsilon(events, 1e-5).epsilon
        )

    def test_no_event_costs_nothing(self) -> None:
        loss = self.accountant.epsilon([], 1e-5)
        assert (loss.epsilon_low, loss.epsilon) == (0.0, 0.0)
        assert self.accountant.delta([], 0.0) == 0.0

    def test_a_round_without_noise_costs_everything(self) -> None:
        events = [poisson_gaussian(0.01, 1.0, 10), poisson_gaussian(0.01, 0.0)]
        assert self.epsilon(*events) == math.inf
        assert self.accountant.delta(events, 3.0) == 1.0
        # Even where δ alone covers the chance of being sampled.
        assert self.accountant.epsilon(events[1:], 0.5).epsilon == math.inf

    def test_the_loss_says_what_it_is(self) -> None:
        loss = self.accountant.epsilon(iter([poisson_gaussian(0.01, 1.0, 10)]), 1e-7)
        assert loss.delta == 1e-7
        assert ACCOUNTANTS[loss.accountant] == self.accountant
        assert loss.relation is ADD_OR_REMOVE
        for word in ("User-level", "add-or-remove-one", "poisson", loss.accountant):
            assert word in loss.assumptions

    @few
    @given(q=PROBABILITIES, z=NOISES, count=COUNTS, delta=DELTAS)
    def test_more_privacy_never_costs_more(
        self, q: float, z: float, count: int, delta: float
    ) -> None:
        cost = self.epsilon(poisson_gaussian(q, z, count), delta=delta)
        noisier = self.epsilon(poisson_gaussian(q, 1.05 * z, count), delta=delta)
        rarer = self.epsilon(poisson_gaussian(q / 1.05, z, count), delta=delta)
        longer = self.epsilon(poisson_gaussian(q, z, math.ceil(1.05 * count)), delta=delta)
        looser = self.epsilon(poisson_gaussian(q, z, count), delta=min(0.9, 1.5 * delta))
        if cost > 0.0:
            assert noisier < cost
            assert rarer < cost or (rarer == cost and not self.amplifies)
            assert looser < cost
            assert longer > cost
        else:
            assert noisier == rarer == looser == 0.0

    @few
    @given(q=PROBABILITIES, z=NOISES, count=COUNTS, delta=DELTAS)
    def test_delta_and_epsilon_agree(self, q: float, z: float, count: int, delta: float) -> None:
        event = poisson_gaussian(q, z, count)
        loss = self.accountant.epsilon([event], delta)
        # δ at the reported ε may exceed the target only by what bounds on it are apart.
        at_least = 0.95 * self.accountant.delta([event], 1.002 * loss.epsilon + 1e-12)
        assert at_least <= delta
        assert self.accountant.delta([event], 0.5 * loss.epsilon_low) >= delta or (
            loss.epsilon_low == 0.0
        )

    @few
    @given(
        pairs=st.lists(st.tuples(PROBABILITIES, NOISES, COUNTS), min_size=2, max_size=4),
        data=st.data(),
    )
    def test_order_and_counting_do_not_matter(
        self, pairs: list[tuple[float, float, int]], data: st.DataObject
    ) -> None:
        whole = [poisson_gaussian(q, z, count + 1) for q, z, count in pairs]
        split = [poisson_gaussian(q, z, n) for q, z, count in pairs for n in (count, 1)]
        split = data.draw(st.permutations(split))
        assert self.epsilon(*split) == self.epsilon(*whole)

    @pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [0.2, 3.0, 1.0, 0.01]])
    def test_only_the_effective_noise_multiplier_matters(self, weights: list[float]) -> None:
        grouped = [in_groups(0.05, 1.3, weights)] * 20
        assert self.epsilon(*grouped) == pytest.approx(
            self.epsilon(poisson_gaussian(0.05, 1.3, 20)), rel=1e-9
        )

    @few
    @given(z=NOISES, count=COUNTS, delta=DELTAS)
    def test_unsampled_rounds_cost_at_least_one_analytic_gaussian(
        self, z: float, count: int, delta: float
    ) -> None:
        exact = analytic_gaussian(math.sqrt(count) / z, delta)
        loss = self.accountant.epsilon([poisson_gaussian(1.0, z, count)], delta)
        assert loss.epsilon_low * (1 - 1e-9) <= exact <= loss.epsilon * (1 + 1e-9)
        factor, summand = self.analytic_slack
        assert loss.epsilon <= factor * exact + summand

    @few
    @given(q=PROBABILITIES, z=NOISES, count=COUNTS, delta=DELTAS)
    def test_sampling_never_costs_more_than_taking_part_always(
        self, q: float, z: float, count: int, delta: float
    ) -> None:
        exact = analytic_gaussian(math.sqrt(count) / z, delta)
        assert self.accountant.epsilon([poisson_gaussian(q, z, count)], delta).epsilon_low <= exact

    def test_a_round_of_every_user_is_one_with_certain_sampling(self) -> None:
        event = every_user_gaussian(2.0, ADD_OR_REMOVE, 5)
        certain = self.accountant.epsilon([poisson_gaussian(1.0, 2.0, 5)], 1e-6)
        loss = self.accountant.epsilon([event], 1e-6)
        assert (loss.epsilon_low, loss.epsilon) == (certain.epsilon_low, certain.epsilon)
        assert loss.relation is ADD_OR_REMOVE
        for word in ("add-or-remove-one neighbours", "every-user sampling"):
            assert word in loss.assumptions
        assert self.accountant.delta([event], 1.0) == self.accountant.delta(
            [poisson_gaussian(1.0, 2.0, 5)], 1.0
        )

    def test_replacing_a_user_moves_the_sum_twice_as_far(self) -> None:
        halved, event = (
            every_user_gaussian(1.0, ADD_OR_REMOVE, 5),
            every_user_gaussian(2.0, REPLACE, 5),
        )
        same = every_user_gaussian(2.0, ADD_OR_REMOVE, 5)
        loss = self.accountant.epsilon([event], 1e-6)
        assert loss.epsilon == self.epsilon(halved) > self.epsilon(same)
        # The exact ε; with sensitivity S instead of 2S it would be 4.377.
        assert self.epsilon(every_user_gaussian(1.0, REPLACE), delta=1e-5) >= 9.9972 * (1 - 1e-5)
        assert loss.relation is REPLACE
        for word in ("replace-one neighbours", "every-user sampling"):
            assert word in loss.assumptions
        assert self.accountant.delta([event], 1.0) == self.accountant.delta([halved], 1.0)

    def test_of_a_sensitivity_known_from_above_alone_nobody_knows_how_much_less_it_costs(
        self,
    ) -> None:
        series = separated_gaussian((1.0, -0.5), 12, 3, 1, 4.0, ADD_OR_REMOVE, 5)
        ((_, z),) = compose([series])
        loss = self.accountant.epsilon([series], 1e-6)
        at_most = self.epsilon(every_user_gaussian(z, ADD_OR_REMOVE, 5))
        assert loss.epsilon == pytest.approx(at_most, rel=1e-7)
        assert loss.epsilon_low == 0.0
        assert Bound.INTERVAL not in loss.assumptions

    def test_policies_compose_under_one_relation(self) -> None:
        rounds = [poisson_gaussian(0.01, 1.0, 100), every_user_gaussian(9.0, ADD_OR_REMOVE, 3)]
        alike = [poisson_gaussian(0.01, 1.0, 100), poisson_gaussian(1.0, 9.0, 3)]
        loss, expected = (self.accountant.epsilon(events, 1e-6) for events in (rounds, alike))
        assert (loss.epsilon_low, loss.epsilon) == (expected.epsilon_low, expected.epsilon)
        assert "poisson and every-user sampling" in loss.assumptions
        # What is known of a part from below holds for the whole.
        series = separated_gaussian((1.0, -0.5), 12, 3, 1, 9.0, ADD_OR_REMOVE, 2)
        ((_, z),) = compose([series])
        more = self.accountant.epsilon([*rounds, series], 1e-6)
        at_most = self.epsilon(*rounds, every_user_gaussian(z, ADD_OR_REMOVE, 2))
        assert more.epsilon_low == loss.epsilon_low
        assert more.epsilon == pytest.approx(at_most, rel=1e-7)

    def test_two_relations_do_not_add_up(self) -> None:
        events = [poisson_gaussian(0.1, 1.0), every_user_gaussian(1.0, REPLACE)]
        sentence = "add-or-remove-one and with replace-one neighbours cannot be added up"
        with pytest.raises(UnsupportedEventError, match=sentence):
            self.accountant.epsilon(events, 1e-5)
        with pytest.raises(UnsupportedEventError, match=sentence):
            self.accountant.delta(events, 1.0)

    @pytest.mark.parametrize(
        ("event", "name"),
        [
            (fixed_size_gaussian(100, 10_000, 1.0), "fixed-size sampling with replace-one"),
            (poisson_replace_gaussian(0.01, 1.0), "poisson sampling with replace-one"),
            (random_allocation_gaussian(10, 1, 1.0), "random-allocation .* add-or-remove-one"),
            (
                banded_poisson_gaussian((1.0,), 3, 3, 0.1, 1.0, REPLACE),
                "poisson-within-bands sampling with replace-one",
            ),
            (poisson_examples_gaussian(0.01, 4, 1.0), "poisson-examples .* add-or-remove-one"),
        ],
    )
    def test_other_policies_are_priced_or_refused(self, event: RoundEvent, name: str) -> None:
        if event.sampling.policy in self.prices:
            assert 0.0 < self.epsilon(event) < math.inf
            assert 0.0 < self.accountant.delta([event], 1.0) < 1.0
            return
        sentence = f"no analysis of {name} neighbours; allowed: poisson with add"
        with pytest.raises(UnsupportedEventError, match=sentence):
            self.accountant.epsilon([event], 1e-5)
        with pytest.raises(UnsupportedEventError, match=sentence):
            self.accountant.delta([event], 1.0)

    @pytest.mark.parametrize("relation", NeighbouringRelation)
    def test_a_separated_series_costs_one_gaussian(self, relation: NeighbouringRelation) -> None:
        # A user in 3 of the rounds moves the series by √3 sensitivities.
        series = separated_gaussian((1.0,), 12, 3, 4, 4.0, relation, 5)
        rounds = every_user_gaussian(4.0 / math.sqrt(3), relation, 5)
        loss, expected = (self.accountant.epsilon([each], 1e-6) for each in (series, rounds))
        assert loss.epsilon == pytest.approx(expected.epsilon, rel=1e-7)
        assert loss.epsilon_low == pytest.approx(expected.epsilon_low, rel=1e-7)
        assert "separated sampling" in loss.assumptions
        assert self.accountant.delta([series], 1.0) == pytest.approx(
            self.accountant.delta([rounds], 1.0), rel=1e-4
        )

    def test_a_series_within_bands_costs_the_rounds_of_one_group(self) -> None:
        # 12 rounds of 4 groups, whose columns (1, ½, ½) are √1.5 long.
        series = banded_poisson_gaussian((1.0, 0.5, 0.5), 12, 4, 0.1, 2.0, ADD_OR_REMOVE, 5)
        rounds = poisson_gaussian(0.1, 2.0 / math.sqrt(1.5), 15)
        loss, expected = (self.accountant.epsilon([each], 1e-6) for each in (series, rounds))
        assert loss.epsilon == pytest.approx(expected.epsilon, rel=1e-7)
        assert loss.epsilon_low == pytest.approx(expected.epsilon_low, rel=1e-7)
        assert loss.bound is expected.bound
        assert "poisson-within-bands sampling" in loss.assumptions
        assert self.accountant.delta([series], 1.0) == pytest.approx(
            self.accountant.delta([rounds], 1.0), rel=1e-4
        )

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan])
    def test_illegal_delta_is_named(self, delta: float) -> None:
        with pytest.raises(InvalidValueError, match=f"delta is {delta}"):
            self.accountant.epsilon([poisson_gaussian(0.1, 1.0)], delta)

    @pytest.mark.parametrize("epsilon", [-0.1, math.inf, math.nan])
    def test_illegal_epsilon_is_named(self, epsilon: float) -> None:
        with pytest.raises(InvalidValueError, match=f"epsilon is {epsilon}"):
            self.accountant.delta([poisson_gaussian(0.1, 1.0)], epsilon)

    @pytest.mark.parametrize(("field", "value"), [("relation", "replace-two"), ("policy", "fixed")])
    def test_an_event_without_analysis_is_refused(self, field: str, value: str) -> None:
        event = poisson_gaussian(0.1, 1.0)
        object.__setattr__(event.sampling, field, value)  # as a later version may allow
        legal = "allowed: poisson with add-or-remove-one"
        events = [poisson_gaussian(0.1, 1.0), event]
        with pytest.raises(UnsupportedEventError, match=rf"no analysis of .*{value}.*; {legal}"):
            self.accountant.epsilon(events, 1e-5)
        with pytest.raises(UnsupportedEventError, match=rf"no analysis of .*{value}.*; {legal}"):
            self.accountant.delta(events, 1.0)


Family = Callable[[float, float, int], RoundEvent]


def replaced(q: float, z: float, count: int) -> RoundEvent:
    return poisson_replace_gaussian(q, z, count)


def fixed(q: float, z: float, count: int) -> RoundEvent:
    return fixed_size_gaussian(max(1, round(1000 * q)), 1000, z, count)


def allocated(q: float, z: float, count: int) -> RoundEvent:
    """Passes of few rounds, to be fast."""
    return random_allocation_gaussian(round(q**-0.5), 1, z, count)


def banded(q: float, z: float, count: int) -> RoundEvent:
    """Series of one round for each of three groups."""
    return banded_poisson_gaussian((1.0,), 3, 3, q, z, ADD_OR_REMOVE, count)


def banded_replaced(q: float, z: float, count: int) -> RoundEvent:
    return banded_poisson_gaussian((1.0,), 3, 3, q, z, REPLACE, count)


def examples(q: float, z: float, count: int) -> RoundEvent:
    """With noise per user, so that all examples together are one Gaussian of z."""
    return poisson_examples_gaussian(q, 4, 4.0 * z, count)


FAMILIES: tuple[Family, ...] = (replaced, fixed, allocated, banded, banded_replaced, examples)


class IntervalConformance(AccountantConformance):
    """Inherit if the accountant certifies intervals of every policy."""

    prices = (
        SamplingPolicy.FIXED_SIZE,
        SamplingPolicy.POISSON,
        SamplingPolicy.RANDOM_ALLOCATION,
        SamplingPolicy.BANDED_POISSON,
        SamplingPolicy.EXAMPLES,
    )
    families = FAMILIES
    """Of which all that is said of any policy is tested."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "family" in metafunc.fixturenames:
            metafunc.parametrize("family", self.families)

    @pytest.mark.parametrize(
        ("q", "z", "count", "delta"), [(0.01, 1.0, 30, 1e-5), (0.2, 4.0, 200, 1e-8)]
    )
    def test_more_privacy_never_costs_more_under_any_policy(
        self, family: Family, q: float, z: float, count: int, delta: float
    ) -> None:
        loss = self.accountant.epsilon([family(q, z, count)], delta)
        assert 0.0 < loss.epsilon_low <= loss.epsilon < math.inf
        assert loss.bound is Bound.INTERVAL
        assert self.epsilon(family(q, 1.05 * z, count), delta=delta) < loss.epsilon
        assert self.epsilon(family(q, z, math.ceil(1.05 * count)), delta=delta) > loss.epsilon
        assert self.epsilon(family(q, z, count), delta=1.5 * delta) < loss.epsilon
        rarer = self.epsilon(family(q / 2, z, count), delta=delta)
        assert rarer < loss.epsilon
        assert self.accountant.delta([family(q, z, count)], loss.epsilon * 1.002) <= 1.01 * delta

    @few
    @given(z=NOISES, count=COUNTS, delta=DELTAS)
    def test_a_user_that_is_always_there_costs_one_analytic_gaussian(
        self, family: Family, z: float, count: int, delta: float
    ) -> None:
        event = family(1.0, z, count)
        noise = z / event.sampling.relation.sensitivity
        exact = analytic_gaussian(math.sqrt(count) / noise, delta)
        loss = self.accountant.epsilon([event], delta)
        assert loss.epsilon_low * (1 - 1e-9) <= exact <= loss.epsilon * (1 + 1e-9)
        assert loss.epsilon - loss.epsilon_low <= 2e-3 * exact + 1e-6
        assert loss.relation is event.sampling.relation

    def test_order_and_counting_do_not_matter_under_any_policy(self, family: Family) -> None:
        first, second = family(0.1, 2.0, 5), family(0.05, 1.5, 3)
        whole = self.accountant.epsilon([first, second], 1e-6)
        split = [family(0.05, 1.5, 1), family(0.1, 2.0, 5), family(0.05, 1.5, 2)]
        loss = self.accountant.epsilon(split, 1e-6)
        assert loss.epsilon == pytest.approx(whole.epsilon, rel=1e-9)
        assert loss.epsilon_low == pytest.approx(whole.epsilon_low, rel=1e-9)

    def test_every_policy_composes_with_others_of_its_relation_alone(self, family: Family) -> None:
        event = family(0.1, 2.0, 5)
        relation = event.sampling.relation
        (other,) = set(NeighbouringRelation) - {relation}
        more = self.epsilon(event, every_user_gaussian(9.0, relation, 2))
        assert more > self.epsilon(event)
        assert more > self.epsilon(every_user_gaussian(9.0, relation, 2))
        with pytest.raises(UnsupportedEventError, match="cannot be added up"):
            self.accountant.epsilon([event, every_user_gaussian(9.0, other, 2)], 1e-6)

    def test_rounds_without_noise_cost_everything_under_any_policy(self, family: Family) -> None:
        assert self.accountant.epsilon([family(0.1, 0.0, 2)], 1e-5).epsilon == math.inf
        assert self.accountant.delta([family(0.1, 0.0, 2)], 5.0) == 1.0

    def test_replacing_a_sampled_user_is_between_sensitivities(self) -> None:
        loss = self.accountant.epsilon([poisson_replace_gaussian(0.01, 1.0, 1000)], 1e-5)
        low, up = (self.epsilon(poisson_gaussian(0.01, z, 1000), delta=1e-5) for z in (1.0, 0.5))
        assert 1.05 * low < loss.epsilon_low <= loss.epsilon < 0.95 * up

    def test_the_known_cohort_of_a_fixed_size(self) -> None:
        loss = self.accountant.epsilon([fixed_size_gaussian(100, 10_000, 1.0, 1000)], 1e-5)
        assert loss.epsilon_low == pytest.approx(13.36, abs=0.01)
        assert loss.epsilon < 14.83
