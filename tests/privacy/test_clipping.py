import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import clip, clip_in_place, norm_of

DTYPES = [np.float16, np.float32, np.float64]
norms = st.floats(1e-30, 1e30)


@st.composite
def vectors(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    width = np.dtype(dtype).itemsize * 8
    size = draw(st.integers(0, 20))
    return draw(hnp.arrays(dtype, size, elements=st.floats(width=width)))


def exact_square(vector: np.ndarray) -> Fraction:
    """‖v‖² without any rounding."""
    return sum((Fraction(float(x)) ** 2 for x in vector), Fraction(0))


@given(vectors(), norms)
@example(np.array([3.4e38, 3.4e38], np.float32), 1.0)
@example(np.array([1.7e308, 1.7e308]), 1.0)
@example(np.array([1.7e308, 1.7e308]), 1e30)
@example(np.array([5e-324, 5e-324]), 1e-30)
@example(np.array([1e-45], np.float32), 1e-30)
@example(np.array([6e-8] * 10, np.float16), 1e-7)
@example(np.array([3.0, 4.0]), 5.0)
def test_norm_never_exceeds_the_bound(vector: np.ndarray, clipping_norm: float) -> None:
    clipped = clip(vector, clipping_norm)
    assert clipped.dtype == vector.dtype
    assert clipped.shape == vector.shape
    assert exact_square(clipped) <= Fraction(clipping_norm) ** 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(20))
def test_norm_of_long_vectors_never_exceeds_the_bound(dtype: type, seed: int) -> None:
    rng = np.random.default_rng(seed)
    vector = (rng.standard_normal(3000) * rng.choice([1e-3, 1.0, 10.0])).astype(dtype)
    clipping_norm = float(rng.uniform(0.01, 2.0)) * float(np.linalg.norm(vector.astype(float)))
    assert exact_square(clip(vector, clipping_norm)) <= Fraction(clipping_norm) ** 2


@pytest.mark.parametrize("size", [2**13 - 1, 2**13, 2**13 + 1, 30_000])
def test_the_norm_of_a_long_vector_is_that_of_all_of_it(size: int) -> None:
    vector = np.random.default_rng(size).standard_normal(size)
    expected = math.sqrt(math.fsum(x * x for x in vector.tolist()))
    assert norm_of([vector]) == pytest.approx(expected, rel=1e-14)
    vector[-1] = np.nan
    assert math.isnan(norm_of([vector]))


@given(vectors(), norms)
def test_non_finite_gives_zero(vector: np.ndarray, clipping_norm: float) -> None:
    if np.all(np.isfinite(vector)):
        assert np.all(np.isfinite(clip(vector, clipping_norm)))
    else:
        np.testing.assert_array_equal(clip(vector, clipping_norm), np.zeros_like(vector))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_component_zeroes_the_vector(bad: float, dtype: type) -> None:
    np.testing.assert_array_equal(clip(np.array([1.0, bad], dtype), 1.0), [0.0, 0.0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_and_empty_are_unchanged(dtype: type) -> None:
    np.testing.assert_array_equal(clip(np.zeros(3, dtype), 1.0), np.zeros(3))
    assert clip(np.zeros(0, dtype), 1.0).shape == (0,)


@given(vectors(), norms)
def test_short_vectors_are_unchanged_and_never_aliased(
    vector: np.ndarray, clipping_norm: float
) -> None:
    clipped = clip(vector, clipping_norm)
    assert clipped is not vector
    short = exact_square(vector) if np.all(np.isfinite(vector)) else None
    if short is not None and short * Fraction(1 + 1e-12) < Fraction(clipping_norm) ** 2:
        np.testing.assert_array_equal(clipped, vector)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_equals_the_formula(dtype: type, scale: float) -> None:
    vector = (np.random.default_rng(1).standard_normal(50) * scale).astype(dtype)
    exact = vector.astype(float)
    expected = exact * min(1.0, 2.0 / float(np.linalg.norm(exact)))
    np.testing.assert_allclose(clip(vector, 2.0), expected, rtol=4 * np.finfo(dtype).eps + 1e-14)


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e31, 1e-31])
def test_illegal_norms_are_refused(bad: float) -> None:
    with pytest.raises(InvalidValueError, match="clipping_norm of a vector is"):
        clip(np.ones(2), bad)


@st.composite
def cut(draw: st.DrawFn) -> list[np.ndarray]:
    """A float64 vector of any values in one or more arrays, some of them empty."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))
    return [draw(hnp.arrays(np.float64, size, elements=st.floats())) for size in sizes]


@given(cut(), norms, st.floats(0.0, 1.0))
@example([np.array([1.7e308]), np.array([1.7e308])], 1e30, 1.0)
@example([np.array([1.7e308, 5e-324])], 1e-30, 0.3)
@example([np.array([1e154]), np.array([1e154, 1e154])], 1.0, 1.0)
@example([np.array([1e-170, 1e-170])], 1e-30, 1.0)
@example([np.array([3.0]), np.array([4.0])], 5.0, 1.0)
@example([np.array([np.inf]), np.array([np.nan, 1.0])], 1.0, 0.0)
def test_a_vector_in_several_arrays_is_clipped_as_in_one(
    parts: list[np.ndarray], clipping_norm: float, weight: float
) -> None:
    whole = np.concatenate(parts)
    bound = clip_in_place(parts, clipping_norm, weight)
    result = np.concatenate(parts)
    # What underflows when it is weighted may round up.
    underflow = whole.size * Fraction(2) ** -2000
    assert exact_square(result) <= (Fraction(clipping_norm) * Fraction(weight)) ** 2 + underflow
    if not np.all(np.isfinite(whole)):
        assert not math.isfinite(bound)
        np.testing.assert_array_equal(result, np.zeros_like(whole))
        return
    # The obvious way: one array, divided by its largest component; it decides alike if not close.
    peak = float(np.max(np.abs(whole), initial=0.0)) or 1.0
    ratio = math.hypot(*(whole / peak)) * (peak / clipping_norm)
    if abs(ratio - 1.0) > 1e-12:
        assert (bound <= clipping_norm) is (ratio < 1.0)
    if bound <= clipping_norm:
        np.testing.assert_array_equal(result, whole * weight)
    else:
        expected = whole / peak * (clipping_norm / math.hypot(*(whole / peak))) * weight
        lost = 1e-290 * clipping_norm  # to underflow
        np.testing.assert_allclose(result, expected, rtol=1e-14, atol=lost)


@given(cut())
def test_the_norm_of_several_arrays_is_that_of_one(parts: list[np.ndarray]) -> None:
    found, whole = norm_of(parts), np.concatenate(parts)
    if not np.all(np.isfinite(whole)):
        assert not math.isfinite(found)
    elif np.all(np.abs(whole) < 1e150):
        assert found == pytest.approx(math.hypot(*whole), rel=1e-14, abs=1e-140)
    else:
        assert found >= 1e149


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_above_the_norm_by_rounding_only(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal(size) for size in (1500, 0, 1, 800)]
    square = exact_square(np.concatenate(parts))
    bound = Fraction(clip_in_place(parts, 1e30))
    assert square <= bound**2 <= square * (1 + Fraction(1, 10**12))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_within_its_norm_by_rounding_only_is_clipped(seed: int) -> None:
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal(size) for size in (seed + 1, 700)]
    clipping_norm = norm_of(parts)
    assert clip_in_place(parts, clipping_norm) > clipping_norm
    assert exact_square(np.concatenate(parts)) <= Fraction(clipping_norm) ** 2


def test_arrays_are_clipped_where_they_lie() -> None:
    vector = np.array([3.0, 7.0, 4.0])
    assert clip_in_place([vector[:1], vector[2:]], 1.0, 0.5) == pytest.approx(5.0)
    np.testing.assert_allclose(vector, [0.3, 7.0, 0.4])
