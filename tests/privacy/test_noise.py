"""Rounded normals: each integer exact, all of the stated law, and the band that float64 takes."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.privacy import noise
from fedpriv.privacy.noise import LARGEST_STDDEV, SeededEntropy, keystream, rounded_gaussian, words

KEY = SeededEntropy(0).key("normals of the tests")
STDDEV = 2.0**24  # in steps, about as in a release
COUNT = 1_000_000
FALSE_ALARM = 1e-6
LIMIT = stats.norm.isf(FALSE_ALARM / 2)
EXTREME_WORDS = [
    *(0, 1, 2**11, 2**44 - 1, 2**44, 2**53, 2**61, 2**62 - 1, 2**62, 2**63 - 1),
    *(2**63, 2**63 + 1, 3 * 2**62, 2**64 - 2**40, 2**64 - 2**10 - 1, 2**64 - 2**10, 2**64 - 1),
]


def normal_of(first: int, second: int, more: tuple[int, int], which: int) -> mpmath.mpf:
    """Box and Muller's cosine (0) or sine (1) of two words that 256 more bits each follow."""
    u = mpmath.mpf((first << 256) + more[0]) / 2**320
    turn = mpmath.mpf((((second ^ 2**63) - 2**63) << 256) + more[1]) / 2**320
    wave = (mpmath.cospi if which == 0 else mpmath.sinpi)(2 * turn)
    return mpmath.sqrt(-2 * mpmath.log(u)) * wave


def more_bits(key: bytes, number: int) -> int:
    """The 256 bits that follow a word of the first stream: bytes of the second, 4096 for each."""
    return int.from_bytes(keystream(key, 32, stream=1, start=4096 * number).tobytes(), "big")


def slow(key: bytes, drawn: np.ndarray, place: int, stddev: float) -> int:
    """The integer at a place, in more than 90 digits."""
    pair = place - place % 2
    first, second = (int(word) for word in drawn[pair : pair + 2])
    with mpmath.workprec(400):
        more = (more_bits(key, pair), more_bits(key, pair + 1))
        moved = normal_of(first, second, more, place % 2) * mpmath.mpf(stddev) + mpmath.mpf(0.5)
        below = mpmath.floor(moved)
        # Bits after these do not matter.
        assert 1e-60 < moved - below < 1 - mpmath.mpf(1e-60)
        return int(below)


def plain(drawn: np.ndarray) -> np.ndarray:
    """Normals of words in float64, by another formula than the library's."""
    first, second = drawn[0::2], drawn[1::2].view(np.int64)
    low = np.log((first.astype(np.float64) + 0.5) * 2.0**-64)
    high = np.log1p(-((~first).astype(np.float64) + 0.5) * 2.0**-64)
    radius = np.sqrt(-2.0 * np.where(first < 2**63, low, high))
    angle = 2.0 * math.pi * (second.astype(np.float64) * 2.0**-64)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1).ravel()


@pytest.mark.parametrize("stddev", [0.7, 3.0, 2.0**10, 2.0**24, 2.0**30])
def test_every_integer_is_that_of_all_bits(stddev: float) -> None:
    count = 100_000
    key = SeededEntropy(1).key(f"exactly/{stddev}")
    drawn = words(key, count)
    found = rounded_gaussian(key, count, stddev)
    values = stddev * plain(drawn)
    near = 0.5 - np.abs(values - np.rint(values)) < 1e-10 * stddev + 1e-9
    np.testing.assert_array_equal(found[~near], np.rint(values[~near]))
    rest = np.random.default_rng(0).choice(np.flatnonzero(~near), 1000, replace=False)
    doubtful = np.flatnonzero(near)
    assert doubtful.size < count / 2
    for place in [*doubtful.tolist(), *rest.tolist()]:
        assert found[place] == slow(key, drawn, place, stddev)


def with_all_bits(key: bytes, count: int, stddev: float) -> list[mpmath.mpf]:
    """The normals of a key before they are rounded, in more than 90 digits."""
    drawn, found = words(key, count), []
    with mpmath.workprec(500):
        for place in range(count):
            pair = place - place % 2
            first, second = (int(word) for word in drawn[pair : pair + 2])
            more = (more_bits(key, pair), more_bits(key, pair + 1))
            found.append(normal_of(first, second, more, place % 2) * mpmath.mpf(stddev))
    return found


@pytest.mark.parametrize("stddev", [1e-5, 0.01, 0.7, 1000.0, 2.0**24, 2.0**40])
def test_offsets_are_added_before_rounding(stddev: float) -> None:
    # The offset that brings each normal as near to the middle of two integers as float64 can.
    count = 600
    key = SeededEntropy(4).key(f"offsets/{stddev}")
    exact = with_all_bits(key, count, stddev)
    with mpmath.workprec(500):
        half = mpmath.mpf(0.5)
        nearest = [float(mpmath.floor(x) + half - x) for x in exact]
        rng = np.random.default_rng(0)
        spread = np.resize([0.5, -0.5, 0.0, 1e-300, 2.0**-53, 0.5 - 2.0**-20, -0.25], count)
        for offsets in (np.array(nearest), spread, rng.uniform(-0.5, 0.5, count)):
            expected = [
                int(mpmath.floor(x + mpmath.mpf(float(offset)) + half))
                for x, offset in zip(exact, offsets, strict=True)
            ]
            assert rounded_gaussian(key, count, stddev, offsets).tolist() == expected


@pytest.mark.parametrize("block", [2, 64, 1 << 14])
@pytest.mark.parametrize("count", [0, 1, 333, 1000])
def test_offsets_are_those_of_their_places(
    count: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets = np.random.default_rng(1).uniform(-0.5, 0.5, 1001)
    expected = rounded_gaussian(KEY, 1001, 0.7, offsets)
    assert not np.array_equal(expected, rounded_gaussian(KEY, 1001, 0.7))
    monkeypatch.setattr(noise, "_BLOCK", block)
    found = rounded_gaussian(KEY, count, 0.7, offsets[:count])
    np.testing.assert_array_equal(found, expected[:count])


def test_offsets_of_zero_change_nothing_and_of_no_noise_neither() -> None:
    zeros = np.zeros(1001)
    found = rounded_gaussian(KEY, 1001, 2.0**30, zeros)
    np.testing.assert_array_equal(found, rounded_gaussian(KEY, 1001, 2.0**30))
    assert not np.any(rounded_gaussian(KEY, 1001, 0.0, zeros + 0.5))


@pytest.mark.parametrize(
    "offsets", [np.zeros(4), np.zeros(0), np.full(3, 0.51), np.array([0.0, -0.51, 0.0, np.nan])]
)
def test_bad_offsets_are_refused(offsets: np.ndarray) -> None:
    with pytest.raises(InvalidValueError, match="they must be 3 from -½ to ½"):
        rounded_gaussian(KEY, 3, 1.0, offsets)
    with pytest.raises(InvalidValueError, match="they must be 4 from -½ to ½"):
        rounded_gaussian(KEY, 4, 1.0, offsets + np.nan)


def given_words(monkeypatch: pytest.MonkeyPatch, *fixed: int) -> np.ndarray:
    """Lets the library draw these words, again and again; they are what it draws."""

    def draw(key: bytes, count: int, *, stream: int, start: int) -> np.ndarray:
        assert stream == 0
        places = np.arange(start, start + count) % len(fixed)
        return np.array(fixed, np.uint64)[places]

    monkeypatch.setattr(noise, "words", draw)
    return np.array(fixed, np.uint64)


@pytest.mark.parametrize("stddev", [0.05, 1.0, 2.0**24, 2.0**40])
def test_extreme_words_give_the_integers_of_all_their_bits(
    stddev: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [
        word for first in EXTREME_WORDS for second in EXTREME_WORDS for word in (first, second)
    ]
    drawn = given_words(monkeypatch, *pairs)
    found = rounded_gaussian(KEY, len(pairs), stddev)
    expected = [slow(KEY, drawn, place, stddev) for place in range(len(pairs))]
    assert found.tolist() == expected


def test_normals_reach_beyond_what_one_word_can_say(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first word is 0 with a probability of 2^-64; then the next 64 bits decide the radius.
    drawn = given_words(monkeypatch, 0, 0)
    longest_of_a_word = math.sqrt(130 * math.log(2))
    largest = 0.0
    for seed in range(20):
        key = SeededEntropy(seed).key("tail")
        (x,) = rounded_gaussian(key, 1, STDDEV).tolist()
        assert x == slow(key, drawn, 0, STDDEV)
        largest = max(largest, x / STDDEV)
    assert largest > longest_of_a_word


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("depth", [1, 8, 9, 31, 60])
@pytest.mark.parametrize(("stddev", "boundary"), [(1.0, 2), (0.7, 0), (2.0**24, 30_000_000)])
def test_bits_are_read_until_they_decide(
    which: int, depth: int, stddev: float, boundary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # u where R·σ is the middle between two integers, in so many bytes after the first eight; the
    # angle is one at which the wave is 1.
    with mpmath.workprec(1200):
        middle = mpmath.exp(-((mpmath.mpf(boundary) + 0.5) ** 2) / (2 * mpmath.mpf(stddev) ** 2))
        head = int(mpmath.floor(middle * mpmath.mpf(2) ** (64 + 8 * depth)))
    given_words(monkeypatch, head >> (8 * depth), 0 if which == 0 else 2**62)
    rest = head & (2 ** (8 * depth) - 1)
    asked: list[int] = []

    def given_bits(end: int) -> int:
        def draw(key: bytes, size: int, *, stream: int, start: int) -> np.ndarray:
            assert stream == 1
            asked.append(size)
            bits = bytes(4096)
            if start == 0:
                bits = (rest + end).to_bytes(depth, "big").ljust(4096, b"\0")
            return np.frombuffer(bits[:size], np.uint8)

        monkeypatch.setattr(noise, "keystream", draw)
        return int(rounded_gaussian(KEY, 2, stddev)[which])

    # What is smaller than the middle by the last of these bytes is further out.
    assert given_bits(0) == boundary + 1
    assert max(asked) >= depth
    assert given_bits(1) == boundary


def chances(places: np.ndarray, stddev: float) -> np.ndarray:
    """Of each integer up to the first, in between, and from the last on: [n + 1]."""
    ends = stats.norm.cdf((places + 0.5) / stddev)
    return np.diff(np.concatenate([[0.0], ends, [1.0]]))


def has_law(drawn: np.ndarray, stddev: float) -> bool:
    """Chi-square of counts against Φ((k + ½)/σ) − Φ((k − ½)/σ), of up to 64 cells of integers."""
    places = np.unique(np.rint(stats.norm.ppf(np.arange(1, 64) / 64) * stddev))
    if places.size == 1:
        places = np.array([-1.0, 0.0])
    counts = np.bincount(np.searchsorted(places, drawn), minlength=places.size + 1)
    expected = chances(places, stddev) * drawn.size
    return bool(stats.chisquare(counts, expected).pvalue > FALSE_ALARM)


@pytest.mark.parametrize("stddev", [0.3, 0.7, 3.0, 50.0])
def test_integers_have_the_law_of_the_rounded_normal_and_no_near_one(stddev: float) -> None:
    drawn = rounded_gaussian(KEY, 3_000_000, stddev)
    assert has_law(drawn, stddev)
    assert has_law(-drawn, stddev)
    for wrong in (0.99, 1.01):
        assert not has_law(drawn, wrong * stddev)
        assert not has_law(rounded_gaussian(KEY, 3_000_000, wrong * stddev), stddev)


@pytest.mark.parametrize("stddev", [0.3, 0.7, 3.0, 50.0])
def test_other_roundings_are_rejected(stddev: float) -> None:
    normals = stddev * np.random.default_rng(0).standard_normal(3_000_000)
    assert has_law(np.rint(normals), stddev)
    assert not has_law(np.trunc(normals), stddev)
    assert not has_law(np.floor(normals), stddev)


@pytest.mark.parametrize("stddev", [0.2, 0.7, 3.0, STDDEV])
@pytest.mark.parametrize("threshold", [2, 3, 4, 5])
def test_tails_have_the_right_weight(stddev: float, threshold: int) -> None:
    drawn = np.abs(rounded_gaussian(KEY, 4_000_000, stddev))
    least = math.ceil(threshold * stddev)
    beyond = int(np.count_nonzero(drawn >= least))
    chance = 2 * stats.norm.sf((least - 0.5) / stddev)
    assert stats.binomtest(beyond, drawn.size, chance).pvalue > FALSE_ALARM


def test_wrong_tails_are_rejected() -> None:
    drawn = np.abs(rounded_gaussian(KEY, 4_000_000, STDDEV)) / STDDEV
    chance = 2 * stats.norm.sf(3.0)
    without = int(np.count_nonzero(drawn[drawn < 3.5] > 3.0))
    longer = int(np.count_nonzero(1.02 * drawn > 3.0))
    for beyond in (without, longer):
        assert stats.binomtest(beyond, drawn.size, chance).pvalue < FALSE_ALARM


@pytest.fixture(scope="module")
def normals() -> np.ndarray:
    """So many that the integers are as good as continuous, in units of σ."""
    return rounded_gaussian(KEY, COUNT, STDDEV) / STDDEV


def ks_accepts(sample: np.ndarray) -> bool:
    return bool(stats.kstest(sample, "norm").pvalue > FALSE_ALARM)


def test_law_is_standard_normal(normals: np.ndarray) -> None:
    assert ks_accepts(normals)
    assert ks_accepts(normals[0::2])
    assert ks_accepts(normals[1::2])


@pytest.mark.parametrize(
    ("scale", "shift"), [(2 / 3, 0), (1.5, 0), (1.02, 0), (0.98, 0), (1, 0.01)]
)
def test_near_laws_are_rejected(normals: np.ndarray, scale: float, shift: float) -> None:
    assert not ks_accepts(scale * normals + shift)


@pytest.mark.parametrize(
    ("power", "mean", "variance"), [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]
)
def test_moments(normals: np.ndarray, power: int, mean: float, variance: float) -> None:
    deviation = abs(np.mean(normals**power) - mean)
    assert deviation < LIMIT * math.sqrt(variance / COUNT)


def uncorrelated(first: np.ndarray, second: np.ndarray) -> bool:
    """Products of independent standard normals, and of their squares less one, average to 0."""
    count = first.size
    products = abs(np.mean(first * second)) * math.sqrt(count)
    squares = abs(np.mean((first**2 - 1) * (second**2 - 1)) / 2) * math.sqrt(count)
    return bool(products < LIMIT and squares < LIMIT)


def test_the_two_of_a_pair_are_uncorrelated(normals: np.ndarray) -> None:
    assert uncorrelated(normals[0::2], normals[1::2])


def test_neighbours_and_keys_are_uncorrelated(normals: np.ndarray) -> None:
    for lag in (1, 2, 3, 4, 8, 64, noise._BLOCK):
        assert uncorrelated(normals[:-lag], normals[lag:]), lag
    other = rounded_gaussian(SeededEntropy(1).key("normals of the tests"), COUNT, STDDEV) / STDDEV
    assert uncorrelated(normals, other)


def test_dependent_pairs_are_rejected(normals: np.ndarray) -> None:
    x, y = normals[0::2], normals[1::2]
    assert not uncorrelated(x, y + 0.01 * x)
    # A radius shared by two pairs leaves products uncorrelated and squares correlated.
    radius, other_angle = np.hypot(x, y), np.arctan2(np.roll(y, 1), np.roll(x, 1))
    assert not uncorrelated(x, radius * np.cos(other_angle))


def pairs_fill_the_plane(first: np.ndarray, second: np.ndarray) -> bool:
    """Chi-square of pairs over the 16 × 16 cells that independent normals fill equally."""
    cells = [np.minimum((16 * stats.norm.cdf(half)).astype(int), 15) for half in (first, second)]
    counts = np.bincount(16 * cells[0] + cells[1], minlength=256)
    return bool(stats.chisquare(counts).pvalue > FALSE_ALARM)


def test_pairs_are_jointly_normal(normals: np.ndarray) -> None:
    x, y = normals[0::2], normals[1::2]
    assert pairs_fill_the_plane(x, y)
    assert pairs_fill_the_plane(normals[1:-1:2], normals[2::2])
    # Each coordinate alone would still be normal here.
    assert not pairs_fill_the_plane(x, np.where(np.abs(x) < 0.1, np.abs(y), y))


UNIT = 2.0**-53
LEAST_U, LARGEST_U = 2.0**-20, math.exp(-(2.0**-15))  # where R = 2^-7


def needed(log_ulps: float, tan_ulps: float) -> float:
    """How far `_box_muller`, times σ, can be off in units of σ: the terms of the comment in full.

    Args:
        log_ulps: error of logarithms in units in the last place.
        tan_ulps: that of tangents.
    """
    u = np.concatenate(
        [np.geomspace(LEAST_U, LARGEST_U, 10_000), 1.0 - np.geomspace(1.0 - LARGEST_U, 0.5, 10_000)]
    )
    radius = np.sqrt(-2.0 * np.log(u))
    of_radius = (2.0**-65 / u + 2 * UNIT) / radius + (log_ulps + 1) * UNIT * radius
    # π/2^64 is off by π's rounding; the integer and the product are rounded, too.
    pi_off = abs(float(mpmath.mpf(math.pi) - mpmath.pi))
    angle = math.pi * 2 * UNIT + pi_off + 2 * math.pi * 2.0**-65
    assert angle < 1.1e-15
    of_wave = 1.1e-15 + (2 * tan_ulps + 5) * UNIT
    return float(np.max(of_radius + of_wave * radius + UNIT * radius))


def band_suffices() -> bool:
    return needed(log_ulps=4, tan_ulps=8) <= noise._BAND


def test_the_band_is_the_sum_of_its_terms_and_half_of_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert band_suffices()
    assert needed(4, 8) < 3.1e-14
    monkeypatch.setattr(noise, "_BAND", noise._BAND / 2)
    assert not band_suffices()


def needed_below(radius: np.ndarray) -> np.ndarray:
    """As `needed(4, 8)`, where radii, as computed, are below 2^-7."""
    of_radius = (2.0**-64 + 4 * UNIT) * (1 + 2.0**-14) / radius + 5 * UNIT * radius
    return of_radius + (1.1e-15 + 22 * UNIT) * radius


def test_the_band_of_short_radii_is_the_sum_of_its_terms_and_half_of_it_is_not() -> None:
    assert 1.0 / LARGEST_U < 1.0 + 2.0**-14
    radius = np.geomspace(2.0**-27, noise._LEAST_RADIUS, 1000)
    needed = needed_below(radius)
    assert np.all(needed < 0.6 * noise._BAND_BY_RADIUS / radius + noise._BAND / 30)
    assert not np.any(needed < 0.5 * noise._BAND_BY_RADIUS / radius)


def test_words_and_radii_outside_of_the_band_are_those_of_the_derivation() -> None:
    assert noise._LEAST_WORD == LEAST_U * 2**64
    assert math.isclose(noise._LEAST_RADIUS, math.sqrt(-2.0 * math.log(LARGEST_U)), rel_tol=1e-9)


def off_in_ulps(found: np.ndarray, arguments: np.ndarray, exact: object) -> float:
    """The largest error of a function, in units in the last place of the true value."""
    worst = 0.0
    with mpmath.workprec(160):
        for value, argument in zip(found.tolist(), arguments.tolist(), strict=True):
            true = exact(mpmath.mpf(argument))
            worst = max(worst, float(abs(value - true)) / math.ulp(float(true)))
    return worst


def arguments_of_logarithms() -> np.ndarray:
    rng = np.random.default_rng(0)
    from_one = 1.0 - np.concatenate([np.geomspace(2.0**-53, 1e-3, 3000), rng.random(2000) * 2e-4])
    below_one = np.nextafter(1.0, 0.0) - np.arange(1000) * 2.0**-53
    return np.concatenate(
        [rng.random(5000), np.exp2(rng.uniform(-20, 0, 5000)), from_one, below_one, [2.0**-20]]
    )


def arguments_of_tangents() -> np.ndarray:
    rng = np.random.default_rng(1)
    half = math.pi / 2.0
    near = half * (1.0 - np.geomspace(2.0**-53, 0.1, 3000))
    about = np.array([half, np.nextafter(half, 0.0), math.pi / 4, np.nextafter(math.pi / 4, 0)])
    tiny = np.geomspace(math.pi / 2**64, 1e-3, 1000)
    positive = np.concatenate([rng.random(5000) * half, near, about, tiny])
    return np.concatenate([positive, -positive])


def test_functions_are_as_exact_as_the_band_takes_them_to_be() -> None:
    u, t = arguments_of_logarithms(), arguments_of_tangents()
    log = off_in_ulps(np.log(u), u, mpmath.log)
    tan = off_in_ulps(np.tan(t), t, mpmath.tan)
    sqrt = off_in_ulps(np.sqrt(30.0 * u), 30.0 * u, mpmath.sqrt)
    assert 0.4 < log <= 4.0
    assert 0.4 < tan <= 8.0
    assert 0.4 < sqrt <= 0.5
    assert needed(log, tan) <= needed(4, 8) <= noise._BAND


def words_to_measure() -> np.ndarray:
    """Pairs at random, and where errors are largest: small u, small R, angles about quarters."""
    rng = np.random.default_rng(2)
    anywhere = rng.integers(0, 2**64, (4000, 2), dtype=np.uint64)
    small = rng.integers(2**44, 2**46, (1000, 2), dtype=np.uint64)
    least = int(LARGEST_U * 2**64) - 2**42
    short = rng.integers(least - 2**45, least, (4000, 2), dtype=np.uint64)
    shorter = np.uint64(2**64 - 1) - np.exp2(rng.uniform(12, 49, (4000, 2))).astype(np.uint64)
    for table in (small, short, shorter):
        table[:, 1] = rng.integers(0, 2**64, len(table), dtype=np.uint64)
    quarters = rng.integers(-(2**12), 2**12, (1000, 2)).astype(np.uint64)
    quarters[:, 0] = rng.integers(2**44, 2**62, 1000, dtype=np.uint64)
    quarters[:, 1] += rng.integers(0, 8, 1000).astype(np.uint64) * np.uint64(2**61)
    return np.concatenate([anywhere, small, short, shorter, quarters]).ravel()


def bands(radii: np.ndarray) -> np.ndarray:
    """How far the normals of each radius are taken to be off, of both numbers of a pair."""
    with np.errstate(divide="ignore"):
        wide = noise._BAND + noise._BAND_BY_RADIUS / np.abs(radii)
    return np.repeat(np.where(radii < noise._LEAST_RADIUS, wide, noise._BAND), 2)


def test_normals_are_much_nearer_than_the_band() -> None:
    drawn = words_to_measure()
    found, radii = noise._box_muller(drawn)
    undecided = noise._undecided(np.zeros(drawn.size), radii, drawn, 1.0)
    places = np.setdiff1d(np.arange(drawn.size), undecided)
    band = bands(radii)
    assert places.size > 26_000
    assert np.count_nonzero(band[places] > noise._BAND) > 6_000
    last, worst = 2**256 - 1, 0.0
    with mpmath.workprec(200):
        for place in places.tolist():
            pair = place - place % 2
            first, second = (int(word) for word in drawn[pair : pair + 2])
            for more in ((0, 0), (last, last)):
                true = normal_of(first, second, more, place % 2)
                worst = max(worst, float(abs(found[place] - true)) / float(band[place]))
    assert 2.0**-9 < worst < 0.6


def test_float64_alone_gives_wrong_integers_where_the_library_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stddev, count = 2.0**40, 40_000
    drawn = words(KEY, count)
    found = rounded_gaussian(KEY, count, stddev)
    alone = np.rint(noise._box_muller(drawn)[0] * stddev)
    differ = np.flatnonzero(found != alone).tolist()
    assert len(differ) > 3
    for place in differ:
        assert found[place] == slow(KEY, drawn, place, stddev)
    monkeypatch.setattr(noise, "_undecided", lambda *_: [])
    np.testing.assert_array_equal(rounded_gaussian(KEY, count, stddev), alone)


@pytest.mark.parametrize("stddev", [0.7, 2.0**24, 2.0**40])
def test_integers_are_the_same_wherever_functions_err_by_no_more_than_the_band(
    stddev: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 10_000
    here = rounded_gaussian(KEY, count, stddev)
    exactly, rng = noise._box_muller, np.random.default_rng(3)

    def elsewhere(drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        normals, radii = exactly(drawn)
        off = np.where(np.isfinite(bands(radii)), bands(radii), 0.0)
        return normals + rng.uniform(-0.3, 0.3, normals.size) * off, radii

    monkeypatch.setattr(noise, "_box_muller", elsewhere)
    np.testing.assert_array_equal(rounded_gaussian(KEY, count, stddev), here)


@pytest.mark.parametrize(
    ("first", "decided"),
    [
        (2**44 - 1, False),
        (2**44, True),
        (2**62, True),
        (int(LARGEST_U * 2**64) - 2**40, True),
        (int(LARGEST_U * 2**64) + 2**40, True),
        (2**64 - 2**12, True),
        (2**64 - 1, False),
    ],
)
def test_words_of_which_float64_cannot_be_sure_are_not_decided_by_it(
    first: int, decided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_words(monkeypatch, first, 2**61 + 12345)
    asked, exactly = [], noise._exactly

    def spy(*arguments: object) -> int:
        asked.append(arguments)
        return exactly(*arguments)

    monkeypatch.setattr(noise, "_exactly", spy)
    rounded_gaussian(KEY, 2, 0.01)
    assert len(asked) == (0 if decided else 2)


@pytest.mark.parametrize(
    ("stddev", "chance"), [(1.0, 2.0**-20), (2.0**27, 2.0**-16), (2.0**40, 1 / 8)]
)
def test_few_are_not_decided_by_float64(stddev: float, chance: float) -> None:
    drawn = words(KEY, 20_000_000)
    values, radii = noise._box_muller(drawn)
    values *= stddev
    few = len(noise._undecided(values - np.rint(values), radii, drawn, stddev))
    assert few / drawn.size == pytest.approx(chance, rel=0.5)


@given(st.integers(0, 300), st.integers(0, 300), st.sampled_from([2, 64, 250]))
def test_the_first_integers_depend_neither_on_count_nor_on_block_size(
    few: int, more: int, block: int
) -> None:
    # At this σ an eighth of all are not decided by float64.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "_BLOCK", block)
        long = rounded_gaussian(KEY, few + more, 2.0**40)
    short = rounded_gaussian(KEY, few, 2.0**40)
    assert short.shape == (few,)
    assert short.dtype == np.int64
    np.testing.assert_array_equal(short, long[:few])


def test_blocks_of_the_real_size_join_without_a_seam() -> None:
    count = noise._BLOCK + 100
    drawn = words(KEY, count)
    found = rounded_gaussian(KEY, count, 2.0**40)
    for place in range(count - 200, count):
        assert found[place] == slow(KEY, drawn, place, 2.0**40)


def test_each_word_has_bits_of_its_own_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    # Words that are zeros leave the radius, and the sine, to the bits that come after them.
    count = 12
    given_words(monkeypatch, 0, 0)
    drawn = np.zeros(count, np.uint64)
    monkeypatch.setattr(noise, "_BLOCK", 4)
    found = rounded_gaussian(KEY, count, 2.0**40)
    expected = [slow(KEY, drawn, place, 2.0**40) for place in range(count)]
    assert found.tolist() == expected
    assert len(set(expected[0::2])) == count // 2


def test_same_key_same_integers_other_key_other_integers() -> None:
    first = rounded_gaussian(KEY, 1001, STDDEV)
    np.testing.assert_array_equal(first, rounded_gaussian(KEY, 1001, STDDEV))
    keys = [SeededEntropy(0).key(f"noise/{i}") for i in range(20)]
    # With so many values, two alike among 20,020 are as good as impossible.
    drawn = np.concatenate([rounded_gaussian(key, 1001, 2.0**40) for key in keys])
    assert np.unique(drawn).size == drawn.size


@pytest.mark.parametrize("stddev", [0.0, 5e-324, 1e-9])
def test_noise_far_below_a_step_is_zero(stddev: float) -> None:
    drawn = rounded_gaussian(KEY, 1001, stddev)
    assert drawn.dtype == np.int64
    np.testing.assert_array_equal(drawn, np.zeros(1001))


@pytest.mark.parametrize(
    "stddev",
    [-1.0, -5e-324, math.nan, math.inf, -math.inf, math.nextafter(LARGEST_STDDEV, math.inf)],
)
def test_a_stddev_that_is_none_is_refused(stddev: float) -> None:
    with pytest.raises(InvalidValueError, match=r"stddev is .* steps"):
        rounded_gaussian(KEY, 4, stddev)


@pytest.mark.parametrize("stddev", [0.0, 1.0])
def test_a_negative_count_and_a_short_key_are_refused(stddev: float) -> None:
    with pytest.raises(InvalidValueError, match="count is -1"):
        rounded_gaussian(KEY, -1, stddev)
    with pytest.raises(InvalidValueError, match="has 31 bytes"):
        rounded_gaussian(KEY[:31], 4, stddev)
    assert rounded_gaussian(KEY, 0, stddev).shape == (0,)
