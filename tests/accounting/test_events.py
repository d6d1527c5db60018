"""Events: which are legal, what they mean for a sum, and how a ledger keeps them."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.accounting.accountant import GAUSSIAN
from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.accounting.charge import ProposedCharge
from fedpriv.accounting.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
    compose,
    poisson_gaussian,
)
from fedpriv.accounting.ledger import Ledger
from fedpriv.accounting.policies import every_user_gaussian, fixed_size_gaussian, shuffled_gaussian
from fedpriv.errors import InvalidValueError

POISSON, EVERY_USER = SamplingPolicy.POISSON, SamplingPolicy.EVERY_USER
FIXED_SIZE, SHUFFLED = SamplingPolicy.FIXED_SIZE, SamplingPolicy.SHUFFLED
ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
ONE_OF_EACH = (
    poisson_gaussian(0.25, 2.0),
    every_user_gaussian(2.0, ADD_OR_REMOVE),
    every_user_gaussian(2.0, REPLACE),
    fixed_size_gaussian(1, 3, 2.0),
    shuffled_gaussian(2.0, ADD_OR_REMOVE),
    shuffled_gaussian(2.0, REPLACE),
)


@pytest.mark.parametrize(("policy", "relation"), [(POISSON, REPLACE), (FIXED_SIZE, ADD_OR_REMOVE)])
def test_a_pair_without_analysis_cannot_be_constructed(
    policy: SamplingPolicy, relation: NeighbouringRelation
) -> None:
    sentence = f"{policy} sampling with {relation} neighbours has no analysis; legal is: poisson wi"
    with pytest.raises(InvalidValueError, match=sentence):
        SamplingEvent(policy, 1.0, 10, relation)


def test_every_pair_that_can_be_constructed_has_an_accountant() -> None:
    pairs = {(event.sampling.policy, event.sampling.relation) for event in ONE_OF_EACH}
    assert pairs == {*GAUSSIAN, (FIXED_SIZE, REPLACE)}
    for event in ONE_OF_EACH:
        assert math.isfinite(ACCOUNTANTS["rdp"].epsilon([event], 1e-5).epsilon)


@pytest.mark.parametrize("policy", [EVERY_USER, SHUFFLED])
@pytest.mark.parametrize("q", [0.5, math.nextafter(1.0, 0.0)])
def test_who_always_takes_part_is_not_sampled(policy: SamplingPolicy, q: float) -> None:
    with pytest.raises(InvalidValueError, match=rf"is {q}; with {policy} sampling it must be 1"):
        SamplingEvent(policy, q, 10, ADD_OR_REMOVE)


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
        with pytest.raises(InvalidValueError, match=r"fixed-size sampling it must be m/N"):
            SamplingEvent(FIXED_SIZE, between, population, REPLACE)


@pytest.mark.parametrize("q", [0.01 * (1 + 2**-52), 0.015, 1e-9])
def test_a_probability_that_is_no_cohort_size_is_refused(q: float) -> None:
    with pytest.raises(InvalidValueError, match=rf"is {q}; .* a population N of 100$"):
        SamplingEvent(FIXED_SIZE, q, 100, REPLACE)


@pytest.mark.parametrize(("size", "population"), [(0, 10), (11, 10), (-1, 10), (1, 0)])
def test_a_cohort_fits_into_its_population(size: int, population: int) -> None:
    sentence = rf"cohort_size is {size}; it must be from 1 to the population of {population}"
    with pytest.raises(InvalidValueError, match=sentence):
        fixed_size_gaussian(size, population, 1.0)


def test_rounds_are_composed_by_their_noise_per_sensitivity() -> None:
    assert (ADD_OR_REMOVE.sensitivity, REPLACE.sensitivity) == (1.0, 2.0)
    assert compose(ONE_OF_EACH) == {
        (0.25, 2.0): 1,
        (1.0, 2.0): 2,
        (1.0, 1.0): 2,
        (1 / 3, 1.0): 1,
    }
    # The noise multiplier itself says nothing of neighbours.
    assert {event.noise_multiplier for event in ONE_OF_EACH} == {2.0}


def test_one_sampling_event_holds_all_groups_of_a_round() -> None:
    sampling = SamplingEvent(EVERY_USER, 1.0, 10, REPLACE)
    queries = (SumQueryEvent("a", 1.0, 2.0), SumQueryEvent("b", 3.0, 6.0))
    ((q, z),) = compose([RoundEvent(sampling, queries, 7)])
    assert q == 1.0
    assert z == pytest.approx(2.0 / math.sqrt(2) / 2)


def test_a_ledger_keeps_every_policy_and_relation(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    with Ledger.create(path, "users") as ledger:
        for number, event in enumerate(ONE_OF_EACH):
            randomness = Randomness.OPERATING_SYSTEM
            ledger.charge(ProposedCharge("run", number, 0, randomness, event, "00" * 32))
    with Ledger.open(path) as ledger:
        assert tuple(row.event for row in ledger.charges()) == ONE_OF_EACH
