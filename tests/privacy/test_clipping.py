"""Clipping: whole numbers of steps, within the bound exactly, each user by itself."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.privacy import clipping
from fedpriv.privacy.clipping import clip_vectors
from fedpriv.privacy.layout import granularity, squared_bound
from tests.privacy.exact import (
    LARGEST_SQUARE,
    agree,
    clipped,
    fractions,
    roots_of,
    square,
    squares,
    steps_of,
)

DTYPES = [np.float16, np.float32, np.float64]
HOSTILE = [np.nan, np.inf, -np.inf, 0.0, 1e38, -1e38, 1e150, 1e308, 5e-324, 1.0]
norms = st.floats(1e-30, 1e30) | st.sampled_from([1e-30, 1e30, 1.0, 2.0**-20, 1.9999999999999998])


@st.composite
def vectors(draw: st.DrawFn, *, finite: bool = False) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    largest = float(np.finfo(dtype).max)
    # Not `floats(width=16)`, which rejects most constants of the modules that a run imports.
    elements = st.floats(-largest, largest)
    if not finite:
        elements |= st.sampled_from([np.nan, np.inf, -np.inf])
    return draw(hnp.arrays(np.float64, st.integers(0, 20), elements=elements)).astype(dtype)


@st.composite
def on_the_boundary(draw: st.DrawFn) -> tuple[np.ndarray, float]:
    """A vector, and a norm that is its own up to a few units in the last place."""
    numbers = st.floats(-1e10, 1e10) | st.integers(-(2**25), 2**25).map(float)
    vector = draw(hnp.arrays(np.float64, st.integers(1, 40), elements=numbers))
    norm = math.hypot(*vector)
    for _ in range(draw(st.integers(0, 3))):
        norm = math.nextafter(norm, draw(st.sampled_from([0.0, math.inf])))
    assume(1e-30 <= norm <= 1e30)
    return vector, norm


def clip(vector: np.ndarray, norm: float) -> np.ndarray:
    """π_S of one vector, in steps."""
    row = vector.astype(np.float64)[np.newaxis]
    clip_vectors([row], norm)
    return row[0].astype(np.int64)


def too_long(vector: np.ndarray) -> bool:
    return not np.all(np.isfinite(vector)) or square(fractions(vector)) >= LARGEST_SQUARE


@given(norms)
def test_a_step_is_the_largest_power_of_two_up_to_a_part_in_2_to_the_24(norm: float) -> None:
    step, bound = steps_of(norm)
    assert Fraction(granularity(norm)) == step
    assert step.numerator == 1 or step.denominator == 1
    assert step.numerator.bit_count() == step.denominator.bit_count() == 1
    assert step * 2**24 <= Fraction(norm) < step * 2**25
    assert squared_bound(norm) == bound
    assert 2**48 <= bound <= 2**50


@given(norms)
def test_what_is_within_the_squared_bound_is_within_the_norm_and_no_more_is(norm: float) -> None:
    step, bound = Fraction(granularity(norm)), squared_bound(norm)
    assert step**2 * bound <= Fraction(norm) ** 2 < step**2 * (bound + 1)


def test_steps_by_hand() -> None:
    assert granularity(1.0) == 2.0**-24
    assert granularity(math.nextafter(2.0, 0.0)) == 2.0**-24
    assert granularity(2.0) == 2.0**-23
    assert squared_bound(1.0) == 2**48
    assert squared_bound(1.5) == 9 * 2**46
    assert squared_bound(math.nextafter(2.0, 0.0)) == 2**50 - 1


@given(vectors(), norms)
@example(np.array([3.4e38, 3.4e38], np.float32), 1.0)
@example(np.array([1.7e308, 1.7e308]), 1.0)
@example(np.array([1.7e308, 1.7e308]), 1e30)
@example(np.array([1e154, 1e-154]), 1e-30)
@example(np.array([1.3e154]), 1e30)
@example(np.array([5e-324, 5e-324]), 1e-30)
@example(np.array([1e-45], np.float32), 1e-30)
@example(np.array([6e-8] * 10, np.float16), 1e-7)
@example(np.array([3.0, 4.0]), 5.0)
@example(np.array([1e-30]), 1e-30)
@example(np.array([1e30]), 1e30)
def test_the_bound_holds_exactly(vector: np.ndarray, norm: float) -> None:
    before = vector.copy()
    steps = clip(vector, norm)
    assert steps.dtype == np.int64
    assert steps.shape == vector.shape
    assert squares(steps) <= squared_bound(norm)
    np.testing.assert_array_equal(vector, before)


@given(on_the_boundary())
def test_the_bound_holds_exactly_on_the_boundary(case: tuple[np.ndarray, float]) -> None:
    vector, norm = case
    steps = clip(vector, norm)
    assert squares(steps) <= squared_bound(norm)
    expected = clipped(fractions(vector), norm)
    assert agree(steps, expected, shortened=True)


def test_a_vector_as_long_as_the_bound_is_unchanged_and_one_step_more_is_shortened() -> None:
    # 2^50 − 1 is the bound just below a norm of 2.
    for norm in (1.0, 1.5, math.nextafter(2.0, 0.0)):
        roots = roots_of(squared_bound(norm))
        more = roots_of(squared_bound(norm) + 1)
        rows = [np.array([numbers]) * 2.0**-24 for numbers in (roots, more)]
        assert clip(rows[0][0], norm).tolist() == roots
        assert squares(clip(rows[1][0], norm)) <= squared_bound(norm)
        assert [bool(clip_vectors([row], norm)[0][0]) for row in rows] == [True, False]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_the_bound_holds_exactly_for_long_vectors(dtype: type, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vector = (rng.standard_normal(3000) * rng.choice([1e-3, 1.0, 10.0])).astype(dtype)
    norm = float(rng.uniform(0.01, 2.0)) * float(np.linalg.norm(vector.astype(float)))
    steps = clip(vector, norm)
    assert squares(steps) <= squared_bound(norm)
    length = float(np.linalg.norm(vector.astype(float)))
    assert agree(steps, clipped(fractions(vector), norm), shortened=length >= norm)


@given(vectors(), norms)
@example(np.array([1e150]), 1.0)
@example(np.array([1.34e154]), 1.0)
@example(np.array([1.35e154]), 1.0)
@example(np.array([1e154, 1e154]), 1e30)
def test_what_is_not_finite_or_has_no_finite_square_gives_zero(
    vector: np.ndarray, norm: float
) -> None:
    steps = clip(vector, norm)
    if too_long(vector):
        np.testing.assert_array_equal(steps, np.zeros_like(steps))
    elif square(fractions(vector)) * (1 - Fraction(1, 10**12)) >= Fraction(norm) ** 2:
        assert np.any(steps)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_component_zeroes_the_vector(bad: float, dtype: type) -> None:
    np.testing.assert_array_equal(clip(np.array([1.0, bad], dtype), 1.0), [0, 0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_empty_stay_so(dtype: type) -> None:
    np.testing.assert_array_equal(clip(np.zeros(3, dtype), 1.0), np.zeros(3))
    np.testing.assert_array_equal(clip(-np.zeros(3, dtype), 1.0), np.zeros(3))
    assert clip(np.zeros(0, dtype), 1.0).shape == (0,)


@given(vectors(), st.floats(1.0, 1e6), norms)
@example(np.array([1.0, -(2.0**-24), 2.0**-25, -(2.0**-25)]), 1.0000001, 1.0)
def test_what_is_within_the_norm_is_truncated_and_no_more(
    vector: np.ndarray, room: float, norm: float
) -> None:
    assume(not too_long(vector))
    norm = min(max(norm, math.hypot(*vector.tolist()) * room * (1 + 1e-12)), 1e30)
    numbers = fractions(vector)
    assume(square(numbers) * (1 + Fraction(1, 10**12)) <= Fraction(norm) ** 2)
    step = Fraction(granularity(norm))
    steps = clip(vector, norm)
    assert steps.tolist() == [math.trunc(number / step) for number in numbers]
    assert steps.tolist() == clipped(numbers, norm)
    for number, a in zip(numbers, steps.tolist(), strict=True):
        off = number - a * step
        assert abs(off) < step  # by less than a step
        assert off * number >= 0  # and towards zero


@given(vectors(finite=True), norms)
def test_what_is_clipped_keeps_its_direction_and_nearly_all_of_the_norm(
    vector: np.ndarray, norm: float
) -> None:
    assume(not too_long(vector))
    numbers = fractions(vector)
    length = square(numbers)
    norm = min(norm, math.sqrt(float(length)))
    assume(norm >= 1e-30 and length >= Fraction(norm) ** 2)
    step = Fraction(granularity(norm))
    found = [int(a) * step for a in clip(vector, norm)]
    least = 1 - 2.0**-22 - float(step / Fraction(norm)) * math.sqrt(vector.size)
    if least > 0:
        assert square(found) >= Fraction(norm) ** 2 * Fraction(least) ** 2
    # All components are shortened by one factor, and then by less than a step.
    factors = [(a / v, (abs(a) + step) / abs(v)) for a, v in zip(found, numbers, strict=True) if v]
    assert max(low for low, _ in factors) <= min(high for _, high in factors)
    assert min(low for low, _ in factors) >= 0
    assert agree(clip(vector, norm), clipped(numbers, norm), shortened=True)


def cut(rows: np.ndarray, places: list[int]) -> list[np.ndarray]:
    """Views of the columns between the places; some may be empty."""
    ends = [0, *sorted(min(place, rows.shape[1]) for place in places), rows.shape[1]]
    return [rows[:, a:b] for a, b in itertools.pairwise(ends)]


@st.composite
def companies(draw: st.DrawFn) -> np.ndarray:
    """Rows of several users, some of them hostile: [C, d]."""
    shape = draw(st.tuples(st.integers(1, 6), st.integers(1, 9)))
    rows = draw(hnp.arrays(np.float64, shape, elements=st.floats(-10.0, 10.0)))
    for user in range(shape[0]):
        if draw(st.booleans()):
            rows[user, draw(st.integers(0, shape[1] - 1))] = draw(st.sampled_from(HOSTILE))
        elif draw(st.booleans()):
            rows[user] *= draw(st.sampled_from([0.0, 1e38, 1e149, 1e-300]))
    return rows


@given(companies(), norms | st.floats(0.1, 10.0), st.lists(st.integers(0, 9), max_size=3))
def test_rows_are_clipped_in_place_and_said_to_be_within_and_finite(
    rows: np.ndarray, norm: float, places: list[int]
) -> None:
    table = rows.copy()
    within, finite = clip_vectors(cut(table, places), norm)
    for row, found, short, sound in zip(rows, table, within, finite, strict=True):
        assert squares(found) <= squared_bound(norm)
        assert sound == (not too_long(row))
        if not sound:
            assert not short
            np.testing.assert_array_equal(found, np.zeros_like(found))
            continue
        ratio = square(fractions(row)) / Fraction(norm) ** 2
        if abs(ratio - 1) > Fraction(1, 10**12):
            assert short == (ratio < 1)
            assert agree(found, clipped(fractions(row), norm), shortened=not short)


@given(
    companies(),
    companies(),
    norms | st.floats(0.1, 10.0),
    st.lists(st.integers(0, 9), max_size=3),
    st.data(),
)
def test_a_row_becomes_the_same_whatever_the_others_are_and_wherever_it_is(
    rows: np.ndarray, others: np.ndarray, norm: float, places: list[int], data: st.DataObject
) -> None:
    size = min(rows.shape[1], others.shape[1])
    rows, others = rows[:, :size], others[:, :size]
    weights = data.draw(hnp.arrays(np.int64, len(rows) + len(others), elements=st.integers(0, 5)))
    everyone = np.concatenate([rows, others])
    order = np.array(data.draw(st.permutations(range(len(everyone)))))
    alone = everyone.copy()
    for user in range(len(everyone)):
        clip_vectors(cut(alone[user : user + 1], places), norm, (weights[user : user + 1], 5))
    together, shuffled = everyone.copy(), everyone[order].copy()
    clip_vectors(cut(together, places), norm, (weights, 5))
    clip_vectors(cut(shuffled, places), norm, (weights[order], 5))
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_array_equal(shuffled, alone[order])


@pytest.mark.parametrize("size", [1, 31, 1000, 20_011])
def test_long_rows_become_the_same_at_any_address_among_any_others(size: int) -> None:
    rng = np.random.default_rng(size)
    users, norm = 12, math.sqrt(size)
    rows = rng.standard_normal((users, size)) * rng.choice([0.5, 1.0, 2.0], (users, 1))
    rows[3] *= 1e38
    rows[5, size // 2] = np.nan
    rows[7] = 0.0
    rows[9, 0] = np.inf
    places = [size // 3, size // 3, 2 * size // 3]
    alone = rows.copy()
    for user in range(users):
        clip_vectors(cut(alone[user : user + 1], places), norm)
    assert np.count_nonzero(np.any(alone != 0.0, axis=1)) == users - 3
    for offset in range(5):
        # Rows that begin at every alignment, in a table that is wider than they are.
        memory = np.full((users, size + 7), 9.0)
        order = rng.permutation(users)
        table = memory[:, offset : offset + size]
        table[:] = rows[order]
        clip_vectors(cut(table, places), norm)
        np.testing.assert_array_equal(table, alone[order])
        assert np.all(memory[:, :offset] == 9.0)
        assert np.all(memory[:, offset + size :] == 9.0)


@given(companies(), norms | st.floats(0.1, 10.0), st.lists(st.integers(0, 9), max_size=5))
def test_in_how_many_pieces_a_vector_lies_makes_no_difference(
    rows: np.ndarray, norm: float, places: list[int]
) -> None:
    # But where adding up in another order moves the norm across S, or the factor across one of
    # those of 24 bits; there both are bounded all the same.
    with np.errstate(over="ignore", invalid="ignore"):
        lengths = np.sqrt((rows * rows).sum(1)) / norm
    last = (1.0 / np.maximum(lengths, 1.0)).view(np.int64) & (2**29 - 1)
    close = (np.abs(lengths - 1.0) < 1e-12) | (lengths > 1e154 / norm)
    close |= (lengths > 1.0) & ((last < 2**10) | (last > 2**29 - 2**10))
    whole, parts = rows.copy(), rows.copy()
    clip_vectors([whole], norm)
    clip_vectors(cut(parts, places), norm)
    np.testing.assert_array_equal(whole[~close], parts[~close])
    for row in parts:
        assert squares(row) <= squared_bound(norm)


@pytest.mark.parametrize("seed", range(100))
def test_norms_that_are_added_up_in_another_order_give_the_same_integers(seed: int) -> None:
    # Shortened by S/‖v‖, each component would be whole, and rounding would decide of all.
    rng = np.random.default_rng(seed)
    some = rng.integers(0, 2**21, 40)
    whole = np.array([*some, *roots_of(2**48 - squares(some))])
    vector = rng.permutation(whole) / rng.random() * 2.0**-24
    expected = clip(vector, 1.0)
    for _ in range(20):
        places = rng.integers(0, vector.size, 3).tolist()
        row = vector[np.newaxis].copy()
        clip_vectors(cut(row, places), 1.0)
        np.testing.assert_array_equal(row[0], expected)


caps = st.integers(1, 2**31) | st.sampled_from([1, 2, 3, 2**31 - 1, 2**31])


@given(vectors() | on_the_boundary().map(lambda case: case[0]), norms, caps, st.data())
@example(np.array([3.0, 4.0]), 5.0, 3, None)
@example(np.array([1e30]), 1e30, 2**31 - 1, None)
@example(np.array([1.0]), 1.0, 2**31, None)
def test_weights_are_limited_exactly(
    vector: np.ndarray, norm: float, cap: int, data: st.DataObject | None
) -> None:
    weight = data.draw(st.integers(0, cap)) if data else cap - 1
    row = vector.astype(np.float64)[np.newaxis].copy()
    clip_vectors([row], norm, (np.array([weight]), cap))
    bound = squared_bound(norm)
    assert squares(row[0]) <= weight**2 * bound // cap**2
    if weight == 0:
        np.testing.assert_array_equal(row[0], np.zeros_like(row[0]))
    if weight == cap:
        np.testing.assert_array_equal(row[0], clip(vector, norm))
    if not too_long(vector):
        expected = clipped(fractions(vector), norm, Fraction(weight, cap))
        ratio = square(fractions(vector)) / Fraction(norm) ** 2
        assert agree(row[0], expected, shortened=ratio > 1 - Fraction(1, 10**12))


@given(
    hnp.arrays(np.float64, st.integers(1, 9), elements=st.floats(-100.0, 100.0)),
    st.floats(0.1, 100.0),
    st.integers(1, 2**31),
    st.data(),
)
def test_a_larger_weight_makes_no_component_smaller(
    vector: np.ndarray, norm: float, cap: int, data: st.DataObject
) -> None:
    weights = np.sort(data.draw(hnp.arrays(np.int64, 5, elements=st.integers(0, cap))))
    rows = np.tile(vector, (5, 1))
    clip_vectors([rows], norm, (weights, cap))
    assert np.all(np.diff(np.abs(rows), axis=0) >= 0.0)
    assert np.all(rows * vector >= 0.0)


@pytest.mark.parametrize("ones", [142, 371, 506])
@pytest.mark.parametrize("share", [15_850_751, 15_947_825, 15_989_035])
def test_what_rounding_lets_through_is_seen_and_counts_as_zero(ones: int, share: int) -> None:
    # One step too many in all, in numbers whose squares round down when they are added up.
    norm = math.nextafter(2.0, 0.0)
    bound = squared_bound(norm)
    largest, *rest = roots_of(bound + 1 - ones)
    wanted = [largest, *[1] * ones, *rest]
    assert squares(wanted) == bound + 1
    longer = np.array(wanted) * 2.0**24 / share
    longer = np.where(longer * (share / 2.0**24) < wanted, np.nextafter(longer, np.inf), longer)
    row = longer[np.newaxis] * granularity(norm)
    _, (sound,) = clip_vectors([row], norm)
    assert squares(row[0]) <= bound
    assert bool(row.any()) == sound  # in whatever order this machine adds up


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each time that squares are added up, of which the first misses a part in 2^18."""
    exactly, made = clipping._squares, []

    def rounded(pieces: list[np.ndarray]) -> np.ndarray:
        made.append(len(pieces))
        return exactly(pieces) * (1.0 - 2.0**-18 if len(made) == 1 else 1.0)

    monkeypatch.setattr(clipping, "_squares", rounded)
    return made


@pytest.mark.parametrize("size", [1, 4, 300])
def test_what_the_first_sum_of_squares_misses_the_next_one_sees(
    size: int, calls: list[int]
) -> None:
    too_many = np.full(size, math.isqrt(2**48 // size) + 1)
    assert squares(too_many) > 2**48
    steps = clip(too_many * 2.0**-24, 1.0)
    assert len(calls) == 2
    assert not steps.any()


@pytest.mark.parametrize(("weight", "cap"), [(1, 1), (1, 2), (2, 3), (5, 7), (2**31 - 1, 2**31)])
@pytest.mark.parametrize("more", [0, 1])
def test_the_limit_of_a_weight_is_held_to_the_last_unit(
    weight: int, cap: int, more: int, calls: list[int]
) -> None:
    # What weighs as much as the limit, or one more in squares, before its length is looked at.
    limit = weight**2 * 2**48 // cap**2
    wanted = np.array([roots_of(limit + more)])
    row = np.nextafter(wanted * (cap / weight) * 2.0**-24, wanted * 1e300)
    clip_vectors([row], 1.0, (np.array([weight]), cap))
    assert row.tolist() == (np.zeros_like(wanted) if more else wanted).tolist()
    assert len(calls) == 2
