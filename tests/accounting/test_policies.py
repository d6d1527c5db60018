"""Constructors of events: what each says of sampling, and that a number out of range is refused."""

import math
from collections.abc import Callable

import pytest

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
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
)

ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
N, T, Z = 1000, 7, 1.25

CASES = {
    "poisson": (
        poisson_replace_gaussian(0.3, Z, T, N),
        SamplingEvent(SamplingPolicy.POISSON, 0.3, N, REPLACE),
        (1.0,),
    ),
    "poisson examples": (
        poisson_examples_gaussian(0.3, 8, Z, T, N),
        SamplingEvent(SamplingPolicy.EXAMPLES, 0.3, N, ADD_OR_REMOVE, examples_per_user=8),
        (1.0,),
    ),
    "every user": (
        every_user_gaussian(Z, REPLACE, T, N),
        SamplingEvent(SamplingPolicy.EVERY_USER, 1.0, N, REPLACE),
        (1.0,),
    ),
    "fixed size": (
        fixed_size_gaussian(30, N, Z, T),
        SamplingEvent(SamplingPolicy.FIXED_SIZE, 0.03, N, REPLACE),
        (1.0,),
    ),
    "random allocation": (
        random_allocation_gaussian(20, 3, Z, T, N),
        SamplingEvent(SamplingPolicy.RANDOM_ALLOCATION, 0.15, N, ADD_OR_REMOVE, Schedule(20, 3)),
        (1.0,),
    ),
    "separated": (
        separated_gaussian((2.0, 0.5), 20, 3, 6, Z, REPLACE, T, N),
        SamplingEvent(SamplingPolicy.SEPARATED, 1.0, N, REPLACE, Schedule(20, 3, 6)),
        (2.0, 0.5),
    ),
    "poisson within bands": (
        banded_poisson_gaussian((2.0, 0.5), 20, 6, 0.3, Z, REPLACE, T, N),
        SamplingEvent(SamplingPolicy.BANDED_POISSON, 0.3, N, REPLACE, Schedule(20, 4, 6)),
        (2.0, 0.5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_event_is_the_one_described(name: str) -> None:
    event, sampling, strategy = CASES[name]
    # z is relative to the clipping norm of one round's sum, whatever the relation.
    assert event == RoundEvent(sampling, (SumQueryEvent("update", 1.0, Z),), T, strategy)
    assert event.noise_multiplier == Z


ILLEGAL: list[tuple[Callable[[], RoundEvent], str]] = [
    (lambda: poisson_replace_gaussian(0.0, 1.0), "sampling_probability is 0.0"),
    (lambda: poisson_replace_gaussian(1.5, 1.0), "sampling_probability is 1.5"),
    (lambda: poisson_replace_gaussian(0.5, math.nan), "noise_stddev of group 'update' is nan"),
    (lambda: poisson_examples_gaussian(0.3, 0, 1.0), "examples_per_user is 0; with poisson-ex"),
    (lambda: every_user_gaussian(-1.0, REPLACE), "noise_stddev of group 'update' is -1.0"),
    (lambda: every_user_gaussian(1.0, REPLACE, 0), "count is 0"),
    (lambda: every_user_gaussian(1.0, REPLACE, 10**320), r"from 1 to 2\^53"),
    (lambda: random_allocation_gaussian((1 << 53) + 1, 1, 1.0), r"it must have at most 2\^53"),
    (lambda: fixed_size_gaussian(0, 10, 1.0), "cohort_size is 0"),
    (lambda: every_user_gaussian(1.0, REPLACE, population=0), "population is 0"),
    (lambda: random_allocation_gaussian(0, 1, 1.0), "the schedule has 0 rounds"),
    (lambda: random_allocation_gaussian(5, 6, 1.0), "participations of the schedule is 6"),
    (lambda: random_allocation_gaussian(5, 2, 1.0, passes=0), "count is 0"),
    (lambda: separated_gaussian((1.0,), 5, 0, 1, 1.0, REPLACE), "participations of the schedule"),
    (lambda: separated_gaussian((1.0,), 5, 1, 6, 1.0, REPLACE), "separation of the schedule is 6"),
    (lambda: banded_poisson_gaussian((1.0,), 5, 0, 0.5, 1.0, REPLACE), "groups is 0"),
    (lambda: banded_poisson_gaussian((1.0,), 5, 6, 0.5, 1.0, REPLACE), "from 1 to the 5 rounds"),
    (lambda: banded_poisson_gaussian((1.0,), 5, 2, 0.0, 1.0, REPLACE), "probability is 0.0"),
    (lambda: separated_gaussian((), 5, 1, 1, 1.0, REPLACE), "the strategy has 0 coefficients"),
    (lambda: separated_gaussian((0.0, 1.0), 5, 1, 1, 1.0, REPLACE), "the strategy begins with 0.0"),
    (lambda: poisson_gaussian("0.1", 1.0), "sampling_probability is '0.1'"),
    (lambda: poisson_gaussian(0.1, None), "noise_stddev is None"),
    (lambda: fixed_size_gaussian("1", 10, 1.0), "cohort_size is '1'"),
    (lambda: fixed_size_gaussian(1, "10", 1.0), "population is '10'"),
    (lambda: separated_gaussian("1.0", 5, 1, 1, 1.0, REPLACE), "a coefficient of the strategy is"),
    (lambda: banded_poisson_gaussian((1.0,), 5, "2", 0.5, 1.0, REPLACE), "groups is '2'"),
    (lambda: banded_poisson_gaussian((1.0,), "5", 2, 0.5, 1.0, REPLACE), "schedule has '5' rounds"),
    (lambda: poisson_examples_gaussian(1.0, 10**6, 1.0, population=10**305), "times examples_per_"),
]


@pytest.mark.parametrize(("make", "message"), ILLEGAL)
def test_numbers_out_of_range_are_named(make: Callable[[], RoundEvent], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()
