"""Which pairs each kind of event is bounded by."""

import math

import pytest

from fedpriv.accounting.accountants import ANALYSES, bounds_of
from fedpriv.accounting.pld.dominating_pairs import FixedSizePair, ReplacePair
from fedpriv.accounting.pld.random_allocation import SubsetPair, allocation_pairs
from fedpriv.accounting.pld.sampled_examples import PoissonPair
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
from fedpriv.ledger.events import ANALYSED, NeighbouringRelation, RoundEvent

ADD_OR_REMOVE, REPLACE = NeighbouringRelation
EXACT: list[tuple[RoundEvent, PoissonPair | ReplacePair]] = [
    (poisson_gaussian(0.1, 2.0, 5), PoissonPair(0.1, 2.0)),
    (poisson_replace_gaussian(0.1, 2.0, 5), ReplacePair(0.1, 1.0)),
    (every_user_gaussian(2.0, ADD_OR_REMOVE, 5), PoissonPair(1.0, 2.0)),
    (every_user_gaussian(2.0, REPLACE, 5), PoissonPair(1.0, 1.0)),
    (random_allocation_gaussian(1, 1, 2.0, 5), PoissonPair(1.0, 2.0)),
    (poisson_examples_gaussian(0.1, 8, 2.0, 5), PoissonPair(0.1, 2.0, examples=8)),
    (poisson_examples_gaussian(1.0, 8, 16.0, 5), PoissonPair(1.0, 2.0)),
    (poisson_examples_gaussian(0.1, 1, 2.0, 5), PoissonPair(0.1, 2.0)),
    (poisson_examples_gaussian(1.0, 8, 2.0, 5), PoissonPair(1.0, 0.25)),
]


@pytest.mark.parametrize(("event", "pair"), EXACT)
def test_what_is_known_exactly_is_its_own_bound(
    event: RoundEvent, pair: PoissonPair | ReplacePair
) -> None:
    bounds = bounds_of([event, event])
    assert bounds.above == bounds.below == {pair: 10}
    assert bounds.complete


def test_no_event_is_no_pair() -> None:
    bounds = bounds_of([])
    assert bounds.above == bounds.below == {}
    assert bounds.complete


def test_cohorts_of_a_fixed_size_are_above_a_poisson_sample_at_half_the_noise() -> None:
    bounds = bounds_of([fixed_size_gaussian(1, 10, 2.0, 5)])
    assert bounds.above == {FixedSizePair(0.1, 1.0): 5}
    assert bounds.below == {PoissonPair(0.1, 1.0): 5}
    assert bounds.complete


@pytest.mark.parametrize("relation", NeighbouringRelation)
def test_separated_series_are_one_gaussian_each(relation: NeighbouringRelation) -> None:
    fresh = separated_gaussian((1.0,), 12, 3, 4, 2.0, relation, 5)
    bounds = bounds_of([fresh])
    ((pair, count),) = bounds.above.items()
    assert bounds.below == bounds.above
    assert bounds.complete
    assert count == 5
    assert isinstance(pair, PoissonPair)
    assert pair.q == 1.0
    assert pair.z == pytest.approx(2.0 / relation.sensitivity / math.sqrt(3), rel=1e-12)


@pytest.mark.parametrize("relation", NeighbouringRelation)
def test_series_within_bands_are_the_rounds_of_one_user_exactly(
    relation: NeighbouringRelation,
) -> None:
    # Whatever the signs. Of 11 rows the user changes 1 to 4, 5 to 8, and 9 to 11 of three columns.
    event = banded_poisson_gaussian((1.0, -2.0, 2.0, 4.0), 11, 4, 0.1, 2.0, relation, 3)
    bounds = bounds_of([event])
    assert bounds.below == bounds.above
    assert bounds.complete
    kind = PoissonPair if relation is ADD_OR_REMOVE else ReplacePair
    assert {type(pair) for pair in bounds.above} == {kind}
    found = sorted((pair.q, pair.z, count) for pair, count in bounds.above.items())
    expected = [(0.1, 2.0 / norm / relation.sensitivity, n) for norm, n in ((5.0, 6), (3.0, 3))]
    assert found == [pytest.approx(each, rel=1e-12) for each in expected]


@pytest.mark.parametrize("strategy", [(1.0, 2.0), (1.0, -0.5), (1.0, 0.0, 0.1)])
def test_a_sensitivity_known_from_above_alone_has_no_lower_bound(
    strategy: tuple[float, ...],
) -> None:
    event = separated_gaussian(strategy, 12, 3, 1, 2.0, ADD_OR_REMOVE)
    exact = separated_gaussian((1.0, 0.5, 0.5), 12, 3, 1, 2.0, ADD_OR_REMOVE)
    bounds = bounds_of([event])
    assert len(bounds.above) == 1
    assert bounds.below == {}
    assert not bounds.complete
    assert bounds_of([exact]).below == bounds_of([exact]).above
    assert bounds_of([event, exact]).below == bounds_of([exact]).above


def test_random_allocation_is_exact_for_one_participation_and_an_interval_for_more() -> None:
    one = bounds_of([random_allocation_gaussian(20, 1, 2.0, 3)])
    assert one.above == one.below == dict.fromkeys(allocation_pairs(20, 1, 2.0), 3)
    some = bounds_of([random_allocation_gaussian(20, 4, 2.0, 3)])
    assert some.above == {pair: 3 * n for pair, n in allocation_pairs(20, 4, 2.0).items()}
    assert some.below == {SubsetPair(20, 4, 2.0): 3}
    # The sum of all rounds is N(k, n·z²) against N(0, n·z²).
    many = bounds_of([random_allocation_gaussian(100, 40, 2.0, 3)])
    assert many.below == {PoissonPair(1.0, 2.0 * math.sqrt(100) / 40): 3}
    assert some.complete
    always = bounds_of([random_allocation_gaussian(20, 20, 2.0, 3)])
    assert always.above == always.below == {PoissonPair(1.0, 2.0): 60}


def test_noise_that_differs_by_rounding_is_one_kind_of_pass() -> None:
    near = 2.0 * (1.0 + 2.0**-50)
    bounds = bounds_of([random_allocation_gaussian(20, 1, z, 3) for z in (near, 2.0)])
    assert bounds.above == bounds.below == dict.fromkeys(allocation_pairs(20, 1, 2.0), 6)


def test_kinds_add_up() -> None:
    events = [
        poisson_gaussian(0.1, 2.0, 5),
        every_user_gaussian(3.0, ADD_OR_REMOVE),
        poisson_gaussian(1.0, 3.0, 2),
        separated_gaussian((1.0, -0.5), 12, 3, 1, 2.0, ADD_OR_REMOVE),
    ]
    bounds = bounds_of(events)
    (series,) = bounds_of(events[3:]).above
    assert bounds.above == {PoissonPair(0.1, 2.0): 5, PoissonPair(1.0, 3.0): 3, series: 1}
    assert bounds.below == {PoissonPair(0.1, 2.0): 5, PoissonPair(1.0, 3.0): 3}
    assert not bounds.complete


def test_every_legal_event_has_an_analysis() -> None:
    assert set(ANALYSES) == set(ANALYSED)
