"""Events: which are legal, what they mean for a sum, and how a ledger keeps them."""

import math
import re
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.accounting.accountants import ACCOUNTANTS, Accountant, PrivacyLoss
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
from fedpriv.accounting.round_counts import compose, strategy_sensitivity
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
    Unit,
)
from fedpriv.ledger.ledger import Ledger, ProposedCharge

POISSON, EVERY_USER = SamplingPolicy.POISSON, SamplingPolicy.EVERY_USER
FIXED_SIZE = SamplingPolicy.FIXED_SIZE
ALLOCATED, SEPARATED = SamplingPolicy.RANDOM_ALLOCATION, SamplingPolicy.SEPARATED
EXAMPLES = SamplingPolicy.EXAMPLES
ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
ONE_OF_EACH = (
    poisson_gaussian(0.25, 2.0),
    poisson_replace_gaussian(0.25, 2.0),
    every_user_gaussian(2.0, ADD_OR_REMOVE),
    every_user_gaussian(2.0, REPLACE),
    fixed_size_gaussian(1, 3, 2.0),
    random_allocation_gaussian(8, 2, 2.0),
    poisson_examples_gaussian(0.25, 3, 2.0),
    separated_gaussian((1.0,), 9, 4, 2, 2.0, ADD_OR_REMOVE),
    separated_gaussian((1.0,), 9, 4, 2, 2.0, REPLACE),
    banded_poisson_gaussian((1.0, 0.5), 9, 2, 0.25, 2.0, ADD_OR_REMOVE),
    banded_poisson_gaussian((1.0, 0.5), 9, 2, 0.25, 2.0, REPLACE),
)


@pytest.mark.parametrize(
    ("policy", "relation"),
    [(FIXED_SIZE, ADD_OR_REMOVE), (ALLOCATED, REPLACE), (EXAMPLES, REPLACE)],
)
def test_a_pair_without_analysis_cannot_be_constructed(
    policy: SamplingPolicy, relation: NeighbouringRelation
) -> None:
    sentence = f"{policy} sampling with {relation} neighbours has no analysis; allowed: poisson wi"
    with pytest.raises(InvalidValueError, match=sentence):
        SamplingEvent(policy, 1.0, 10, relation, Schedule(1))


@pytest.mark.parametrize("event", ONE_OF_EACH, ids=str)
def test_names_given_as_text_are_the_names(event: RoundEvent) -> None:
    given = event.sampling
    names = {name: str(getattr(given, name)) for name in ("policy", "relation", "unit")}
    made = replace(given, **names)
    assert all(getattr(made, name) is getattr(given, name) for name in names)


def test_a_policy_given_as_text_is_checked() -> None:
    with pytest.raises(InvalidValueError, match="examples_per_user is None"):
        SamplingEvent("poisson-examples", 0.1, 10, "add-or-remove-one")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["policy", "relation", "unit"])
@pytest.mark.parametrize(
    ("value", "found"), [("sh", "'sh'"), (None, "None"), (["user"], "of the type list")]
)
def test_other_names_are_refused(name: str, value: object, found: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{name} is {found}"):
        replace(ONE_OF_EACH[0].sampling, **{name: value})


def test_every_pair_that_can_be_constructed_has_an_accountant() -> None:
    pairs = {(event.sampling.policy, event.sampling.relation) for event in ONE_OF_EACH}
    assert pairs == set(product(SamplingPolicy, NeighbouringRelation)) - {
        (FIXED_SIZE, ADD_OR_REMOVE),
        (ALLOCATED, REPLACE),
        (EXAMPLES, REPLACE),
    }
    for event in ONE_OF_EACH:
        assert 0.0 < ACCOUNTANTS["tight"].epsilon([event], 1e-5).epsilon < math.inf


@pytest.mark.parametrize("policy", [EVERY_USER, SEPARATED])
@pytest.mark.parametrize("q", [0.5, math.nextafter(1.0, 0.0)])
def test_who_always_takes_part_is_not_sampled(policy: SamplingPolicy, q: float) -> None:
    with pytest.raises(InvalidValueError, match=f"is {q}; with {policy} sampling"):
        SamplingEvent(policy, q, 10, ADD_OR_REMOVE, Schedule(5) if policy is SEPARATED else None)


@pytest.mark.parametrize("k", [None, 0, -1, 2.0, 10**6 + 1, 10**300])
def test_sampled_examples_are_at_most_a_whole_number_of_each_user(k: object) -> None:
    sentence = f"examples_per_user is {k}"
    with pytest.raises(InvalidValueError, match=sentence):
        SamplingEvent(EXAMPLES, 0.1, 10, ADD_OR_REMOVE, examples_per_user=k)  # type: ignore[arg-type]


def test_examples_are_sampled_for_users_and_users_for_nobody_else() -> None:
    with pytest.raises(InvalidValueError, match="unit is 'example'"):
        SamplingEvent(EXAMPLES, 0.1, 10, ADD_OR_REMOVE, unit=Unit.EXAMPLE, examples_per_user=2)
    with pytest.raises(InvalidValueError, match="examples_per_user is 2"):
        SamplingEvent(POISSON, 0.1, 10, ADD_OR_REMOVE, examples_per_user=2)
    assert SamplingEvent(EXAMPLES, 0.1, 10, ADD_OR_REMOVE, examples_per_user=2).places == 20
    assert SamplingEvent(POISSON, 0.1, 10, ADD_OR_REMOVE).places == 10


def test_canaries_are_drawn_beside_users_and_not_expected() -> None:
    event = SamplingEvent(POISSON, 0.1, 10, ADD_OR_REMOVE, canaries=30)
    assert (event.places, event.expected_cohort_size) == (40, 1.0)
    assert event.cohort_variance == SamplingEvent(POISSON, 0.1, 10, ADD_OR_REMOVE).cohort_variance
    of_each = SamplingEvent(EXAMPLES, 0.1, 10, ADD_OR_REMOVE, examples_per_user=2, canaries=30)
    assert (of_each.places, of_each.expected_cohort_size) == (80, 2.0)
    with pytest.raises(InvalidValueError, match="canaries is 1"):
        SamplingEvent(FIXED_SIZE, 1.0, 10, REPLACE, canaries=1)
    with pytest.raises(InvalidValueError, match="canaries is -1"):
        SamplingEvent(POISSON, 0.1, 10, ADD_OR_REMOVE, canaries=-1)


@given(population=st.integers(1, 2**63 - 1), data=st.data())
def test_a_fixed_size_is_read_back_from_probability_and_population(
    population: int, data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, min(population, 2**40)))
    sampling = fixed_size_gaussian(size, population, 1.0).sampling
    assert sampling.sampling_probability == size / population
    if population < 2**50:
        assert round(sampling.sampling_probability * population) == size
        between = (size - 0.5) / population
        with pytest.raises(InvalidValueError, match=r"sampling_probability is .*; with fixed-size"):
            SamplingEvent(FIXED_SIZE, between, population, REPLACE)


@pytest.mark.parametrize("q", [0.01 * (1 + 2**-52), 0.015, 1e-9])
def test_a_probability_that_is_no_cohort_size_is_refused(q: float) -> None:
    with pytest.raises(InvalidValueError, match=rf"is {q}; .* a population N of 100$"):
        SamplingEvent(FIXED_SIZE, q, 100, REPLACE)


@pytest.mark.parametrize(("size", "population"), [(0, 10), (11, 10), (-1, 10), (1.5, 10)])
def test_a_cohort_fits_into_its_population(size: int, population: int) -> None:
    sentence = f"cohort_size is {size}"
    with pytest.raises(InvalidValueError, match=sentence):
        fixed_size_gaussian(size, population, 1.0)


def test_rounds_are_composed_by_their_noise_per_sensitivity() -> None:
    assert (ADD_OR_REMOVE.sensitivity, REPLACE.sensitivity) == (1.0, 2.0)
    *others, separated, replaced, banded, banded_replaced = ONE_OF_EACH
    assert compose(others) == {
        (0.25, 2.0): 3,
        (0.25, 1.0): 1,
        (1.0, 2.0): 1,
        (1.0, 1.0): 1,
        (1 / 3, 1.0): 1,
    }
    # A user in four rounds moves the series by √4 clipping norms.
    ((q, z),) = compose([separated])
    assert (q, z) == (1.0, pytest.approx(1.0))
    ((q, z),) = compose([replaced])
    assert (q, z) == (1.0, pytest.approx(0.5))
    # One in five rounds has both coefficients four times; the last round of nine has but the first.
    for event, sensitivity in ((banded, 1.0), (banded_replaced, 2.0)):
        (both, four), (first, one) = compose([event]).items()
        assert both == (0.25, pytest.approx(2.0 / math.sqrt(1.25) / sensitivity))
        assert first == (0.25, pytest.approx(2.0 / sensitivity))
        assert (four, one) == (4, 1)
    # The noise multiplier itself says nothing of neighbours.
    assert {event.noise_multiplier for event in ONE_OF_EACH} == {2.0}


def test_one_sampling_event_holds_all_groups_of_a_round() -> None:
    sampling = SamplingEvent(EVERY_USER, 1.0, 10, REPLACE)
    queries = (SumQueryEvent("a", 1.0, 2.0), SumQueryEvent("b", 3.0, 6.0))
    ((q, z),) = compose([RoundEvent(sampling, queries, 7)])
    assert q == 1.0
    assert z == pytest.approx(2.0 / math.sqrt(2) / 2)


def test_a_round_that_releases_anything_without_noise_has_no_noise() -> None:
    queries = (SumQueryEvent("a", 1.0, 2.0), SumQueryEvent("b", 1.0, 0.0))
    assert replace(poisson_gaussian(0.5, 1.0), queries=queries).noise_multiplier == 0.0


def test_a_ledger_keeps_every_policy_and_relation(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger.open_or_create(path, "users") as ledger:
        for number, event in enumerate(ONE_OF_EACH):
            randomness = Randomness.OPERATING_SYSTEM
            ledger.charge(ProposedCharge("run", number, 0, randomness, event, "00" * 32))
    with Ledger.open(path) as ledger:
        assert tuple(row.event for row in ledger.charges()) == ONE_OF_EACH


def exact(event: RoundEvent) -> RoundEvent:
    """The same event, but that every sum query has a granularity."""
    queries = tuple(replace(query, granularity=2.0**-24) for query in event.queries)
    return replace(event, queries=queries)


class TestGranularity:
    @given(st.floats(5e-324, 1e308), st.floats(0.0, 1e308), st.integers(-1074, 1023))
    def test_is_believed_just_where_its_steps_are_exact_and_no_longer_than_the_bound(
        self, norm: float, stddev: float, exponent: int
    ) -> None:
        step = math.ldexp(1.0, exponent)
        if step > norm or math.isinf(max(norm, stddev) / step):
            with pytest.raises(InvalidValueError, match="granularity of group 'u' is "):
                SumQueryEvent("u", norm, stddev, step)
        else:
            assert SumQueryEvent("u", norm, stddev, step).granularity == step

    @pytest.mark.parametrize(
        "step", [0.0, -0.0, -0.5, 3.0, 0.1, math.nan, math.inf, -math.inf, 1.0 + 2**-52, 2.0]
    )
    def test_is_a_power_of_two_up_to_the_clipping_norm(self, step: float) -> None:
        sentence = f"granularity of group 'u' is {step}"
        with pytest.raises(InvalidValueError, match=sentence):
            SumQueryEvent("u", 1.5, 2.0, step)

    @pytest.mark.parametrize(("norm", "stddev"), [(1.0, 0.0), (1e-300, 1.0)])
    def test_is_no_smaller_than_numbers_can_tell(self, norm: float, stddev: float) -> None:
        sentence = f"{norm} and noise_stddev {stddev} must be finite in its steps"
        with pytest.raises(InvalidValueError, match=sentence):
            SumQueryEvent("u", norm, stddev, 5e-324)

    @pytest.mark.parametrize("name", ACCOUNTANTS)
    def test_changes_no_price(self, name: str) -> None:
        def price(accountant: Accountant, event: RoundEvent) -> PrivacyLoss | str:
            try:
                return accountant.epsilon([event], 1e-5)
            except UnsupportedEventError as error:
                return str(error)

        for event in ONE_OF_EACH:
            assert exact(event).noise_multiplier == event.noise_multiplier
            assert compose([exact(event)]) == compose([event])
            accountant = ACCOUNTANTS[name]
            assert price(accountant, exact(event)) == price(accountant, event)


SERIES = separated_gaussian((1.0, 0.5), 9, 4, 2, 2.0, ADD_OR_REMOVE)
BANDED = banded_poisson_gaussian((1.0, 0.5), 9, 2, 0.25, 2.0, ADD_OR_REMOVE)


class TestSchedules:
    @pytest.mark.parametrize("rounds", [0, -1, 2.0, "3", True])
    def test_have_rounds(self, rounds):
        with pytest.raises(InvalidValueError, match=f"has {rounds!r} rounds"):
            Schedule(rounds)

    @pytest.mark.parametrize("name", ["participations", "separation"])
    @pytest.mark.parametrize("value", [0, -1, 8, 1.0])
    def test_have_numbers_up_to_their_rounds(self, name, value):
        sentence = f"{name} of the schedule is {value}"
        with pytest.raises(InvalidValueError, match=sentence):
            Schedule(7, **{name: value})

    @pytest.mark.parametrize("event", ONE_OF_EACH[:5])
    def test_are_of_several_rounds(self, event):
        with pytest.raises(InvalidValueError, match=f"{event.sampling.policy} sampling is of one"):
            replace(event.sampling, schedule=Schedule(7))

    @pytest.mark.parametrize("event", [ONE_OF_EACH[5], SERIES, BANDED])
    def test_are_needed_where_accountants_use_them(self, event):
        sentence = f"the schedule is None; {event.sampling.policy}"
        with pytest.raises(InvalidValueError, match=sentence):
            replace(event.sampling, schedule=None)

    def test_say_nothing_of_distances_where_these_are_random(self):
        with pytest.raises(InvalidValueError, match="separation of the schedule is 3"):
            replace(ONE_OF_EACH[5].sampling, schedule=Schedule(8, 1, 3))

    @given(st.integers(1, 10**6), st.data())
    def test_of_a_random_allocation_have_its_probability(self, n, data):
        k = data.draw(st.integers(1, n))
        sampling = random_allocation_gaussian(n, k, 1.0).sampling
        assert sampling.sampling_probability == k / n
        between = math.nextafter(k / n, 0.0)
        with pytest.raises(InvalidValueError, match=f"k/n, {k / n}"):
            replace(sampling, sampling_probability=between)

    @pytest.mark.parametrize("participations", [4, 6])
    def test_within_bands_have_as_many_participations_as_a_group_has_rounds(self, participations):
        sentence = f"participations of the schedule is {participations}; with poisson-within-bands"
        with pytest.raises(InvalidValueError, match=rf"{sentence} sampling it must be ⌈n/b⌉, 5"):
            replace(BANDED.sampling, schedule=Schedule(9, participations, 2))


class TestStrategies:
    @pytest.mark.parametrize("event", ONE_OF_EACH[:6])
    def test_are_of_series(self, event):
        with pytest.raises(InvalidValueError, match="fresh noise in every round, the strategy"):
            replace(event, strategy=(1.0, 0.5))

    @pytest.mark.parametrize("strategy", [(), (0.5,) * 10])
    def test_are_no_longer_than_the_series(self, strategy):
        sentence = f"has {len(strategy)} coefficients"
        with pytest.raises(InvalidValueError, match=sentence):
            replace(SERIES, strategy=strategy)

    def test_within_bands_are_no_longer_than_the_groups_are_many(self):
        sentence = "has 3 coefficients; with poisson-within-bands sampling it must have at most one"
        with pytest.raises(InvalidValueError, match=f"{sentence} per group, 2"):
            replace(BANDED, strategy=(1.0, 0.5, 0.25))

    @pytest.mark.parametrize(
        "strategy", [(0.0, 1.0), (-1.0,), (math.nan,), (1.0, math.inf), (1.0, math.nan)]
    )
    def test_begin_with_a_positive_coefficient_and_are_finite(self, strategy):
        with pytest.raises(InvalidValueError, match="the strategy begins with "):
            replace(SERIES, strategy=strategy)

    @pytest.mark.parametrize("kind", [np.float16, np.float32, Fraction, np.longdouble])
    def test_are_priced_in_full_precision_whatever_they_are_given_as(self, kind):
        strategy = [kind((1.0 + j) ** -0.5) for j in range(9)]
        plain = replace(SERIES, strategy=tuple(map(float, strategy)))
        made = replace(SERIES, strategy=strategy, queries=[*SERIES.queries])
        assert {*map(type, made.strategy)} == {float}
        assert made == plain
        strategy_sensitivity.cache_clear()
        priced = compose([made])
        strategy_sensitivity.cache_clear()
        assert priced == compose([plain])

    @pytest.mark.parametrize(
        ("strategy", "sentence"),
        [
            ("1.0", "a coefficient of the strategy is '1'"),
            ((1.0, None), "a coefficient of the strategy is None"),
            (1.0, "strategy is of the type float"),
            ((10**400,), "a coefficient of the strategy is a whole number of 1329 bits"),
        ],
    )
    def test_are_numbers(self, strategy, sentence):
        with pytest.raises(InvalidValueError, match=re.escape(sentence)):
            replace(SERIES, strategy=strategy)

    def test_scale_the_noise_by_their_sensitivity(self):
        """(1, ½) four times, two rounds apart: the columns do not meet, so √4·√(1 + ¼)."""
        ((q, z),) = compose([SERIES])
        assert (q, z) == (1.0, pytest.approx(2.0 / math.sqrt(4 * 1.25)))
        assert SERIES.noise_multiplier == 2.0
