"""The average over the cohort's own weight: its sensitivity, its noise and its events."""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import (
    GaussianMechanism,
    GaussianQuery,
    sensitivities,
)
from fedpriv.privacy.layout import Layout, VectorGroup, flat
from fedpriv.privacy.noise import OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.sampling import PoissonSampling
from tests.privacy.exact import squares, steps_of

SYSTEM = OperatingSystemEntropy()
CAP = 8


def floored(
    floor: float, norm: float = 1.0, stddev: float = 0.0, cap: int = CAP, dimension: int = 2
) -> GaussianQuery:
    layout = Layout(("w",), ((dimension,),))
    clipping = Clipping(layout, flat(layout, norm), weighted=("update",), weight_cap=cap)
    return GaussianQuery(clipping, (stddev,), 10.0, floor, floor=1.0)


def average(query: GaussianQuery, users: list[tuple[float, float, int]]) -> np.ndarray:
    clipping = query.clipping
    total = sum(
        (clipping.contribution({"w": np.array([x, y])}, m) for x, y, m in users),
        np.zeros(2, np.int64),
    )
    return query.noised_average(total, SYSTEM, "test", sum(m for *_, m in users))[0]


def rounded(query: GaussianQuery, total: Sequence[int], weight: int) -> list[int]:
    """y: what the library noises, in steps."""
    given = np.array(total, np.int64)
    noised = query._numerator(given, weight)
    assert noised.dtype == np.int64
    released, _ = replace(query, noise_stddevs=(0.0,) * len(query.noise_stddevs)).noised_average(
        given, SYSTEM, "test", weight
    )
    sizes = [group.dimension(query.clipping.layout) for group in query.clipping.groups]
    divisors = np.repeat(query.divisors, sizes)
    np.testing.assert_array_equal(released, query.clipping.in_units(noised) / divisors)
    return [int(y) for y in noised]


def factor(query: GaussianQuery) -> Fraction:
    """What is charged, in clipping norms."""
    (moved,) = sensitivities(query.clipping, query.weighted_denominator)
    return Fraction(moved) / Fraction(query.clipping.groups[0].clipping_norm)


@st.composite
def within(draw: st.DrawFn, dimension: int, limit: int) -> list[int]:
    """Integers whose squares add up to at most a limit, often to nearly all of it."""
    vector = []
    for _ in range(dimension):
        most = math.isqrt(limit)
        vector.append(draw(st.integers(-most, most) | st.sampled_from([-most, most, 0])))
        limit -= vector[-1] ** 2
    return vector


@st.composite
def neighbours(
    draw: st.DrawFn,
) -> tuple[GaussianQuery, list[int], int, list[int], int]:
    """A query, the total and weight that a cohort sent, and what one user more adds to them."""
    dimension, cap = draw(st.integers(1, 6)), draw(st.integers(1, 2**31) | st.integers(1, 9))
    norm = draw(st.floats(0.5, 2.0) | st.floats(1e-30, 1e30))
    floor = draw(st.floats(0.01, 100.0) | st.floats(0.01, 2.0**37))
    query = floored(floor, norm, cap=cap, dimension=dimension)
    _, bound = steps_of(norm)
    total, weight = [0] * dimension, 0
    for _ in range(draw(st.integers(0, 4))):
        m = draw(st.integers(0, cap) | st.just(cap))
        alike = draw(st.integers(1, 3) | st.integers(1, 2**20))
        user = draw(within(dimension, m**2 * bound // cap**2))
        total = [t + alike * a for t, a in zip(total, user, strict=True)]
        weight += alike * m
    if draw(st.booleans()):  # a node of many users that sends the most that is admitted
        users = draw(st.integers(1, 2**20))
        m = draw(st.integers(0, users * cap) | st.just(users * cap))
        limit = m**2 * bound // cap**2
        sent = draw(within(dimension, limit + (limit // 2**30 if limit >= 2**53 else 0)))
        clipping = query.clipping
        # What lies so close to the limit that float64 decides counts as admitted, too.
        assert clipping.admits(np.array(sent), users, m) or squares(sent) > limit
        total = [t + a for t, a in zip(total, sent, strict=True)]
        weight += m
    mine = draw(st.integers(0, cap) | st.just(cap))
    return query, total, weight, draw(within(dimension, mine**2 * bound // cap**2)), mine


@given(neighbours())
def test_one_user_moves_what_is_noised_by_at_most_what_is_charged(
    case: tuple[GaussianQuery, list[int], int, list[int], int],
) -> None:
    query, total, weight, mine, m = case
    clipping = query.clipping
    (group,), (event,) = clipping.groups, query.events
    assert event.clipping_norm == factor(query) * Fraction(group.clipping_norm)
    assume(all(abs(t) + abs(a) < 2**62 for t, a in zip(total, mine, strict=True)))
    before = rounded(query, total, weight)
    after = rounded(query, [t + a for t, a in zip(total, mine, strict=True)], weight + m)
    moved = squares(b - a for b, a in zip(before, after, strict=True))
    step, _ = steps_of(group.clipping_norm)
    assert moved <= (factor(query) * Fraction(group.clipping_norm) / step) ** 2
    assert moved <= (Fraction(event.clipping_norm) / Fraction(event.granularity)) ** 2


@pytest.mark.parametrize(("exponent", "needed"), [(20, False), (30, True), (32, True), (36, True)])
def test_what_rounding_adds_is_needed_and_enough(exponent: int, needed: bool) -> None:
    # Everybody points one way, at about the floor, and one user the other.
    norm, rng = math.nextafter(2.0, 0.0), np.random.default_rng(exponent)
    step, bound = steps_of(norm)
    longest, beyond = math.isqrt(bound), False
    for _ in range(200):
        cohort = 2**exponent + int(rng.integers(0, 2 ** (exponent - 12)))
        query = floored(cohort - float(rng.uniform(0.0, 10.0)), norm, cap=1, dimension=1)
        (before,) = rounded(query, [cohort * longest], cohort)
        (after,) = rounded(query, [cohort * longest - longest], cohort + 1)
        assert before - after <= factor(query) * Fraction(norm) / step
        beyond = beyond or before - after > 2 * longest
    assert beyond is needed


@given(neighbours())
def test_what_is_noised_is_the_average_over_the_floor_or_the_weight_to_the_nearest_step(
    case: tuple[GaussianQuery, list[int], int, list[int], int],
) -> None:
    query, total, weight, *_ = case
    floor, cap = Fraction(query.weighted_denominator), query.clipping.weight_cap
    assume(all(abs(t) < 2**62 for t in total))
    share = floor / max(floor, Fraction(weight, cap))
    for y, a in zip(rounded(query, total, weight), total, strict=True):
        off = abs(y - a * share)
        assert off <= (0 if share == 1 else Fraction(1, 2) + abs(a * share) / 2**50)


@pytest.mark.parametrize("dimension", [1, 100])
@pytest.mark.parametrize("floor", [0.5, 40.0, 1e6])
def test_the_charge_is_twice_the_norm_and_what_rounding_can_add(
    dimension: int, floor: float
) -> None:
    query = floored(floor, norm=1.5, dimension=dimension)
    charged = factor(query)
    step, bound = steps_of(1.5)
    each = 1 + Fraction(floor) * math.isqrt(bound) / 2**49
    least = 2 + each * math.isqrt(dimension) * step / Fraction(1.5)
    assert least <= charged <= least * (1 + Fraction(1, 2**28))
    assert query.events[0].granularity == float(step)


users = st.tuples(st.floats(-5.0, 5.0), st.floats(-5.0, 5.0), st.integers(0, CAP))


@given(st.lists(users, max_size=12), users, st.floats(0.1, 10.0))
def test_one_user_moves_the_average_by_at_most_that(
    cohort: list[tuple[float, float, int]], one: tuple[float, float, int], floor: float
) -> None:
    query = floored(floor, norm=1.5)
    (event,) = query.events
    moved = average(query, [*cohort, one]) - average(query, cohort)
    assert event.clipping_norm == pytest.approx(2 * 1.5, rel=1e-6)
    assert float(np.linalg.norm(moved)) * floor <= event.clipping_norm * (1 + 1e-12)


def test_the_bound_is_nearly_reached() -> None:
    # A full cohort on one side and a user on the other: m(A + c)/(B + 1) − A with B = m large.
    query = floored(floor=1000.0)
    cohort = [(1.0, 0.0, CAP)] * 1000
    moved = average(query, [*cohort, (-1.0, 0.0, CAP)]) - average(query, cohort)
    assert float(np.linalg.norm(moved)) * 1000.0 == pytest.approx(2.0, rel=2e-3)


def test_above_the_floor_it_is_the_mean_of_the_cohort() -> None:
    query = floored(floor=2.0)
    one, other = (0.6, 0.0, CAP), (0.0, 0.2, CAP // 2)
    near = 1e-6  # a few steps
    np.testing.assert_allclose(average(query, [one] * 3), [0.6, 0.0], atol=near)
    four = average(query, [one, one, other, other])
    np.testing.assert_allclose(four, [0.4, 0.2 / 3], atol=near)
    # Below it: over the floor.
    np.testing.assert_allclose(average(query, [one]), [0.3, 0.0], atol=near)
    np.testing.assert_array_equal(average(query, []), [0.0, 0.0])


def test_noise_is_that_of_the_events_and_does_not_depend_on_the_cohort() -> None:
    layout = Layout(("w", "m"), ((20_000,), (20_000,)))
    groups = (*flat(Layout(("w",), ((20_000,),)), 1.0), VectorGroup("m", ("m",), 1.0, (1.0,)))
    clipping = Clipping(layout, groups, weighted=("update",))
    query = GaussianQuery(clipping, (6.0, 3.0), 10.0, 5.0, floor=1.0)
    found = []
    for weight in (0, 50):
        released, events = query.noised_average(
            np.zeros(40_000, np.int64), SeededEntropy(1), "noise", weight
        )
        for noise, stddev in ((released[:20_000], 6.0 / 5.0), (released[20_000:], 3.0 / 10.0)):
            assert stats.kstest(noise / stddev, "norm").pvalue > 1e-6
            for wrong in (2 / 3, 3 / 2):
                assert stats.kstest(noise / (wrong * stddev), "norm").pvalue < 1e-6
        assert [e.noise_stddev for e in events] == [6.0, 3.0]
        assert [e.granularity for e in events] == [2.0**-24, 2.0**-24]
        assert [e.clipping_norm for e in events] == pytest.approx([2.0, 1.0], rel=1e-4)
        assert events[0].clipping_norm > 2.0
        assert events == query.events
        found.append(released)
    np.testing.assert_array_equal(found[0], found[1])
    assert query.tensor_stddevs == pytest.approx({"w": 6.0 / 5.0, "m": 3.0 / 10.0})


def test_groups_without_weights_are_left_alone() -> None:
    layout = Layout(("w", "m"), ((1,), (1,)))
    groups = (VectorGroup("w", ("w",), 1.0, (1.0,)), VectorGroup("m", ("m",), 1.0, (1.0,)))
    clipping = Clipping(layout, groups, weighted=("w",))
    query = GaussianQuery(clipping, (0.0, 0.0), 10.0, 2.0, floor=1.0)
    assert rounded(query, [8_000_001, 8_000_001], 8) == [2_000_000, 8_000_001]
    assert query.events[1] == GaussianQuery(clipping, (0.0, 0.0), 10.0, 2.0).events[1]


def test_the_total_is_left_alone() -> None:
    total = np.array([100, -7], np.int64)
    floored(0.1).noised_average(total, SYSTEM, "test", 80)
    assert total.tolist() == [100, -7]


def test_the_mechanism_charges_what_it_releases() -> None:
    sampling = PoissonSampling(20, 0.5)
    mechanism = GaussianMechanism(sampling, floored(4.0, stddev=2.0))
    _, queries = mechanism.query.noised_average(np.zeros(2, np.int64), SYSTEM, "test", 3)
    event = mechanism.event
    assert event.queries == queries
    # σ = 2 against a sensitivity of 2 and a little.
    assert 1.0 - 1e-6 < event.noise_multiplier < 1.0


def test_a_bad_weight_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="weight is -1"):
        floored(1.0).noised_average(np.zeros(2, np.int64), SYSTEM, "test", -1)


@pytest.mark.parametrize(
    "total", [np.zeros(2), np.zeros(3, np.int64), np.zeros((2, 1), np.int64), np.zeros(2, np.int32)]
)
@pytest.mark.parametrize("weight", [0, 800])
def test_only_integers_of_the_right_shape_are_released(total: np.ndarray, weight: int) -> None:
    with pytest.raises(InvalidValueError, match="total is"):
        floored(1.0).noised_average(total, SYSTEM, "test", weight)


def test_a_floor_needs_a_weighted_group() -> None:
    layout = Layout(("w",), ((2,),))
    clipping = Clipping(layout, flat(layout, 1.0))
    with pytest.raises(InvalidValueError, match="no group is weighted"):
        GaussianQuery(clipping, (1.0,), 10.0, floor=0.5)
