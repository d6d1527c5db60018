import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.privacy import gaussian
from fedpriv.privacy.entropy import SeededEntropy, words
from fedpriv.privacy.gaussian import gaussian_noise, standard_normals

KEY = SeededEntropy(0).key("normals of the tests")
COUNT = 1_000_000
FALSE_ALARM = 1e-6
LIMIT = stats.norm.isf(FALSE_ALARM / 2)
EXTREME_WORDS = [0, 1, 2**53, 2**62, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2048, 2**64 - 1]


@pytest.fixture(scope="module")
def normals():
    return standard_normals(KEY, COUNT)


def slow_pair(first, second):
    """Box and Muller's two normals of two words, in 40 digits after the rounding of u."""
    with mpmath.workdps(40):
        u = float(first) * 2.0**-64 + 2.0**-65
        angle = 2 * mpmath.pi * (second - 2**64 if second >= 2**63 else second) / 2**64
        radius = mpmath.sqrt(-2 * mpmath.log(mpmath.mpf(u)))
        return float(radius * mpmath.cos(angle)), float(radius * mpmath.sin(angle))


def test_normals_are_the_slow_transform_of_the_words():
    raw = words(KEY, 4000).tolist()
    expected = [x for i in range(0, 4000, 2) for x in slow_pair(raw[i], raw[i + 1])]
    np.testing.assert_allclose(standard_normals(KEY, 4000), expected, rtol=0, atol=1e-14)


def pair_of(first, second):
    """The pair of normals that the library makes of two given words."""

    def given_words(key, count, start):
        return np.array([first, second], np.uint64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "words", given_words)
        return standard_normals(KEY, 2)


@pytest.mark.parametrize("first", EXTREME_WORDS)
@pytest.mark.parametrize("second", EXTREME_WORDS)
def test_extreme_words_give_the_stated_normals(first, second):
    pair = pair_of(first, second)
    np.testing.assert_allclose(pair, slow_pair(first, second), rtol=0, atol=1e-14)
    assert np.hypot(*pair) <= math.sqrt(130 * math.log(2)) * (1 + 1e-15)


def test_radius_ends_as_stated():
    assert pair_of(0, 0)[0] == pytest.approx(9.4926, abs=1e-4)
    # Exactly the last 2^10 of the 2^64 words give radius 0: probability 2^-54.
    assert pair_of(2**64 - 2**10, 0)[0] == 0.0
    assert pair_of(2**64 - 2**10 - 1, 0)[0] > 0.0


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([2, 64, 250]))
def test_first_normals_depend_neither_on_count_nor_on_block_size(few, more, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaussian, "_BLOCK", block)
        long = standard_normals(KEY, few + more)
    short = standard_normals(KEY, few)
    assert short.shape == (few,)
    assert short.dtype == np.float64
    np.testing.assert_array_equal(short, long[:few])


def test_blocks_of_the_real_size_join_without_a_seam(normals):
    first = gaussian._BLOCK - 100
    raw = words(KEY, 200, start=first).tolist()
    expected = [x for i in range(0, 200, 2) for x in slow_pair(raw[i], raw[i + 1])]
    np.testing.assert_allclose(normals[first : first + 200], expected, rtol=0, atol=1e-14)


def test_same_key_same_normals_other_key_other_normals():
    first = standard_normals(KEY, 1001)
    np.testing.assert_array_equal(first, standard_normals(KEY, 1001))
    keys = [SeededEntropy(0).key(f"noise/{i}") for i in range(20)]
    drawn = np.concatenate([standard_normals(key, 1001) for key in keys])
    assert np.unique(drawn).size == drawn.size


def ks_accepts(sample):
    return stats.kstest(sample, "norm").pvalue > FALSE_ALARM


def test_law_is_standard_normal(normals):
    assert ks_accepts(normals)


@pytest.mark.parametrize(
    ("scale", "shift"), [(2 / 3, 0), (1.5, 0), (1.02, 0), (0.98, 0), (1, 0.01)]
)
def test_near_laws_are_rejected(normals, scale, shift):
    assert not ks_accepts(scale * normals + shift)


def test_each_half_of_the_pairs_is_standard_normal(normals):
    assert ks_accepts(normals[0::2])
    assert ks_accepts(normals[1::2])


@pytest.mark.parametrize(
    ("power", "mean", "variance"), [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]
)
def test_moments(normals, power, mean, variance):
    deviation = abs(np.mean(normals**power) - mean)
    assert deviation < LIMIT * math.sqrt(variance / COUNT)


def tail_is_right(sample, threshold):
    beyond = int(np.count_nonzero(np.abs(sample) > threshold))
    chance = 2 * stats.norm.sf(threshold)
    return stats.binomtest(beyond, sample.size, chance).pvalue > FALSE_ALARM


@pytest.mark.parametrize("threshold", [1, 2, 3, 4, 5])
def test_tails_have_the_right_weight(threshold):
    assert tail_is_right(standard_normals(KEY, 8_000_000), threshold)


def test_wrong_tails_are_rejected():
    sample = standard_normals(KEY, 8_000_000)
    assert not tail_is_right(1.02 * sample, 3)
    assert not tail_is_right(sample[np.abs(sample) < 4], 4)


def uncorrelated(first, second):
    """Products of independent standard normals, and of their squares less one, average to 0."""
    count = first.size
    products = abs(np.mean(first * second)) * math.sqrt(count)
    squares = abs(np.mean((first**2 - 1) * (second**2 - 1)) / 2) * math.sqrt(count)
    return products < LIMIT and squares < LIMIT


def test_the_two_normals_of_a_pair_are_uncorrelated(normals):
    assert uncorrelated(normals[0::2], normals[1::2])


def test_neighbours_and_keys_are_uncorrelated(normals):
    for lag in (1, 2, 3, 4, 8, 64, gaussian._BLOCK):
        assert uncorrelated(normals[:-lag], normals[lag:]), lag
    other = standard_normals(SeededEntropy(1).key("normals of the tests"), COUNT)
    assert uncorrelated(normals, other)


def test_dependent_pairs_are_rejected(normals):
    x, y = normals[0::2], normals[1::2]
    assert not uncorrelated(x, y + 0.01 * x)
    # A radius shared by two pairs leaves products uncorrelated and squares correlated.
    radius, other_angle = np.hypot(x, y), np.arctan2(np.roll(y, 1), np.roll(x, 1))
    assert not uncorrelated(x, radius * np.cos(other_angle))


def pairs_fill_the_plane(first, second):
    """Chi-square of pairs over the 16 × 16 cells that independent normals fill equally."""
    cells = [np.minimum((16 * stats.norm.cdf(half)).astype(int), 15) for half in (first, second)]
    counts = np.bincount(16 * cells[0] + cells[1], minlength=256)
    return stats.chisquare(counts).pvalue > FALSE_ALARM


def test_pairs_are_jointly_normal(normals):
    x, y = normals[0::2], normals[1::2]
    assert pairs_fill_the_plane(x, y)
    assert pairs_fill_the_plane(normals[1:-1:2], normals[2::2])
    # Each coordinate alone would still be normal here.
    assert not pairs_fill_the_plane(x, np.where(np.abs(x) < 0.1, np.abs(y), y))


@pytest.mark.parametrize("stddev", [5e-324, 1e-9, 1.0, 37.5, 1e300])
def test_noise_is_stddev_times_the_normals(stddev):
    noise = gaussian_noise(KEY, 1001, stddev)
    np.testing.assert_array_equal(noise, stddev * standard_normals(KEY, 1001))


def test_noise_of_stddev_zero_is_exactly_zero():
    noise = gaussian_noise(KEY, 1001, 0.0)
    assert noise.dtype == np.float64
    assert noise.tobytes() == bytes(8 * 1001)


@pytest.mark.parametrize("stddev", [-1.0, -5e-324, math.nan, math.inf])
def test_stddev_that_is_none_is_refused(stddev):
    with pytest.raises(
        InvalidValueError, match=r"stddev is .*; it must be finite and not negative"
    ):
        gaussian_noise(KEY, 4, stddev)


@pytest.mark.parametrize("draw", [standard_normals, lambda k, n: gaussian_noise(k, n, 0.0)])
def test_negative_count_and_short_key_are_refused(draw):
    with pytest.raises(InvalidValueError, match="count is -1"):
        draw(KEY, -1)
    with pytest.raises(InvalidValueError, match="has 31 bytes"):
        draw(KEY[:31], 4)
    assert draw(KEY, 0).shape == (0,)
