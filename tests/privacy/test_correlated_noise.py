"""Noise correlated over rounds: against fractions to the bit, its joint law, and its bounds."""

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.linalg import toeplitz

from fedpriv.errors import InvalidValueError, NoiseError
from fedpriv.privacy import correlated_noise
from fedpriv.privacy.correlated_noise import (
    COEFFICIENT_STEP,
    BandedStrategy,
    BufferedStrategy,
    CorrelatedNoise,
    Strategy,
)
from fedpriv.privacy.noise import SeededEntropy, rounded_gaussian, words
from tests.privacy.test_noise import more_bits, normal_of

STDDEV = 2.0**24  # in steps, about as in a release
LIMIT = stats.norm.isf(1e-7 / 2)  # of one comparison; each test makes fewer than a hundred


def on_grid(*coefficients: float) -> BandedStrategy:
    return BandedStrategy(
        tuple(round(c / COEFFICIENT_STEP) * COEFFICIENT_STEP for c in coefficients)
    )


ROOT = on_grid(1.0, 1 / 2, 3 / 8, 5 / 16, 35 / 128)  # of the prefix sums, five bands
TWO = on_grid(1.0, 1 / 3)
RISING = on_grid(1.0, 0.0, 0.1, 0.7)
BUFFERS = BufferedStrategy((0.9, 0.4, 0.0), (0.2, 0.3, 0.1))
SLOW = BufferedStrategy((0.999, 0.96), (0.02, 0.3))
ALL: list[Strategy] = [BandedStrategy((1.0,)), TWO, ROOT, RISING, BUFFERS, SLOW]
FLAT = BandedStrategy((1.0,) * 8)


def keys(count: int, seed: int = 0) -> list[bytes]:
    return [SeededEntropy(seed).key(f"round {t}") for t in range(count)]


def normals(key: bytes, count: int, stddev: float) -> list[Fraction]:
    """Z, to 200 bits after the point."""
    drawn, found = words(key, count + count % 2), []
    for place in range(count):
        pair = place - place % 2
        first, second = (int(word) for word in drawn[pair : pair + 2])
        with mpmath.workprec(500):
            more = (more_bits(key, pair), more_bits(key, pair + 1))
            scaled = normal_of(first, second, more, place % 2) * mpmath.mpf(stddev)
            found.append(Fraction(int(mpmath.floor(scaled * mpmath.mpf(2) ** 200)), 2**200))
    return found


def column(strategy: Strategy, rounds: int) -> list[Fraction]:
    """1, c_1, …, c_{n−1} without any rounding."""
    if isinstance(strategy, BandedStrategy):
        given = [Fraction(c) for c in strategy.coefficients[:rounds]]
        return given + [Fraction(0)] * (rounds - len(given))
    pairs = [
        (Fraction(w), Fraction(t)) for t, w in zip(strategy.decays, strategy.weights, strict=True)
    ]
    return [Fraction(1), *(sum(w * t**j for w, t in pairs) for j in range(rounds - 1))]


def matrix(strategy: Strategy, rounds: int) -> np.ndarray:
    c = [float(value) for value in column(strategy, rounds)]
    return np.asarray(toeplitz(c, np.zeros(rounds)))


def past(c: Sequence[Fraction], earlier: Sequence[Sequence[int]], place: int) -> Fraction:
    """Σ_{j ≥ 1} c_j·N_{t−j} in one component."""
    return sum(
        (a * int(n[place]) for a, n in zip(c[1:], reversed(earlier), strict=False)), Fraction(0)
    )


def nearest(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))


def state_after(noise: CorrelatedNoise, given: Sequence[bytes]) -> correlated_noise.NoiseState:
    state = noise.start()
    for key in given:
        state, _ = noise.step(state, key)
    return state


def drawn(noise: CorrelatedNoise, given: Sequence[bytes]) -> list[np.ndarray]:
    state, rounds = noise.start(), []
    for key in given:
        state, vector = noise.step(state, key)
        rounds.append(vector)
    return rounds


@pytest.mark.parametrize("stddev", [0.3, 1.0, 1000.0, STDDEV, 2.0**33])
@pytest.mark.parametrize("strategy", [TWO, ROOT, RISING, on_grid(1.0, 1.0), FLAT])
def test_banded_noise_is_that_of_fractions(strategy: BandedStrategy, stddev: float) -> None:
    rounds, dimension = 12, 5
    c, expected = column(strategy, rounds), []
    for key in keys(rounds):
        z = normals(key, dimension, stddev)
        expected.append([nearest(z[i] - past(c, expected, i)) for i in range(dimension)])
    found = drawn(CorrelatedNoise(strategy, dimension, stddev, rounds), keys(rounds))
    assert [vector.tolist() for vector in found] == expected
    assert all(vector.dtype == np.int64 for vector in found)


@pytest.mark.parametrize("stddev", [0.3, 1000.0, STDDEV, 2.0**33])
@pytest.mark.parametrize("strategy", ALL)
def test_c_times_the_noise_is_the_fresh_noise_but_for_rounding(
    strategy: Strategy, stddev: float
) -> None:
    rounds, dimension = 20, 4
    c, noise = column(strategy, rounds), CorrelatedNoise(strategy, dimension, stddev, rounds)
    found = drawn(noise, keys(rounds))
    error = Fraction(noise.strategy.error(noise._bounds, rounds))
    assert (error == 0) == isinstance(strategy, BandedStrategy)
    for t, key in enumerate(keys(rounds)):
        z = normals(key, dimension, stddev)
        for i in range(dimension):
            back = int(found[t][i]) + past(c, found[:t], i)
            assert abs(back - z[i]) <= Fraction(1, 2) + error


def test_fresh_noise_is_what_is_drawn_without_a_strategy() -> None:
    given = keys(3)
    found = drawn(CorrelatedNoise(BandedStrategy((1.0,)), 50_001, 3.7, 3), given)
    for key, vector in zip(given, found, strict=True):
        np.testing.assert_array_equal(vector, rounded_gaussian(key, 50_001, 3.7))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_banded_noise_is_the_released_function_of_the_ideal_outputs(data: st.DataObject) -> None:
    rounds, dimension = data.draw(st.integers(1, 6)), 2
    bands = data.draw(st.lists(st.integers(0, 2**20), max_size=5))
    strategy = BandedStrategy((1.0, *(a * COEFFICIENT_STEP for a in bands)))
    stddev = data.draw(st.sampled_from([0.2, 1.0, 77.0, STDDEV]))
    seed = data.draw(st.integers(0, 2**32))
    sums = data.draw(
        st.lists(
            st.lists(st.integers(-(2**62), 2**62), min_size=dimension, max_size=dimension),
            min_size=rounds,
            max_size=rounds,
        )
    )
    c, outputs, released = column(strategy, rounds), [], []
    for t, key in enumerate(keys(rounds, seed)):
        z = normals(key, dimension, stddev)
        outputs.append([sums[t][i] + past(c, sums[:t], i) + z[i] for i in range(dimension)])
    for output in outputs:  # from outputs alone
        released.append([nearest(output[i] - past(c, released, i)) for i in range(dimension)])
    noise = drawn(CorrelatedNoise(strategy, dimension, stddev, rounds), keys(rounds, seed))
    for t in range(rounds):
        assert [r - x for r, x in zip(released[t], sums[t], strict=True)] == noise[t].tolist()


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = CorrelatedNoise(ROOT, 1001, STDDEV, 9)
    expected = drawn(noise, keys(9))
    monkeypatch.setattr(correlated_noise, "_CHUNK", 64)
    np.testing.assert_array_equal(drawn(noise, keys(9)), expected)


# The joint law.

COUNT, ROUNDS = 100_000, 7


def whitened(strategy: Strategy, vectors: np.ndarray, stddev: float) -> bool:
    """Whether C·N/s has the covariance of independent standard normals, [n, d] being given."""
    white = matrix(strategy, len(vectors)) @ vectors / stddev
    count = vectors.shape[1]
    off = white @ white.T / count - np.eye(len(vectors))
    spread = np.sqrt((1.0 + np.eye(len(vectors))) / count)
    means = np.abs(white.mean(axis=1)) * math.sqrt(count)
    return bool(np.all(np.abs(off) < LIMIT * spread) and np.all(means < LIMIT))


@pytest.mark.parametrize("strategy", ALL)
def test_covariance_over_rounds_is_that_of_the_strategy_and_of_no_near_one(
    strategy: Strategy,
) -> None:
    vectors = np.array(
        drawn(CorrelatedNoise(strategy, COUNT, STDDEV, ROUNDS), keys(ROUNDS)), np.float64
    )
    assert whitened(strategy, vectors, STDDEV)
    for scale in (0.97, 1.03, 1.1):
        assert not whitened(strategy, scale * vectors, STDDEV)
    assert not whitened(strategy, vectors + 0.03 * STDDEV, STDDEV)
    for other in ALL:
        near = np.abs(matrix(strategy, ROUNDS) - matrix(other, ROUNDS)).max() < 0.03
        assert near == (strategy is other)
        assert near or not whitened(other, vectors, STDDEV)
    for t in range(ROUNDS):  # each round is a normal of its own variance
        inverse = np.linalg.inv(matrix(strategy, t + 1))[t]
        scaled = vectors[t] / (STDDEV * math.hypot(*inverse))
        assert stats.kstest(scaled, "norm").pvalue > 1e-7
        assert stats.kstest(1.05 * scaled, "norm").pvalue < 1e-7


@pytest.mark.parametrize("strategy", [ROOT, BUFFERS])
def test_prefix_sums_have_the_variance_predicted_and_less_than_that_of_fresh_noise(
    strategy: Strategy,
) -> None:
    rounds, count = 24, 40_000
    found = drawn(CorrelatedNoise(strategy, count, STDDEV, rounds), keys(rounds))
    sums = np.cumsum(np.array(found, np.float64), axis=0) / STDDEV
    factors = np.tril(np.ones((rounds, rounds))) @ np.linalg.inv(matrix(strategy, rounds))
    predicted = np.square(factors).sum(axis=1)
    ratio = np.square(sums).mean(axis=1) / predicted
    assert np.all(np.abs(ratio - 1.0) < LIMIT * math.sqrt(2.0 / count))
    assert predicted[-1] < rounds / 2


# State.


@pytest.mark.parametrize("strategy", ALL)
def test_memory_does_not_grow_with_rounds(strategy: Strategy) -> None:
    noise, sizes = CorrelatedNoise(strategy, 1000, STDDEV, 60), []
    state = noise.start()
    for key in keys(60):
        state, _ = noise.step(state, key)
        sizes.append(sum(vector.nbytes for vector in state.memory))
    assert set(sizes[5:]) == {8 * 1000 * strategy.vectors_kept}
    assert max(sizes) == sizes[-1]


@pytest.mark.parametrize("strategy", ALL)
def test_a_state_is_made_anew_from_keys_and_is_never_written_to(strategy: Strategy) -> None:
    noise, given = CorrelatedNoise(strategy, 300, STDDEV, 12), keys(12)
    expected = drawn(noise, given)
    for t in (0, 1, 5, 11):
        state = state_after(noise, given[:t])
        before = [vector.copy() for vector in state.memory]
        _, first = noise.step(state, given[t])
        _, again = noise.step(state, given[t])
        np.testing.assert_array_equal(first, expected[t])
        np.testing.assert_array_equal(again, expected[t])
        assert all(map(np.array_equal, before, state.memory))
        with pytest.raises(ValueError, match="read-only"):
            first[0] = 0


def test_another_key_changes_this_round_and_those_after() -> None:
    noise, given = CorrelatedNoise(ROOT, 100, STDDEV, 8), keys(8)
    other = [*given[:3], keys(4, seed=1)[3], *given[4:]]
    same = list(map(np.array_equal, drawn(noise, given), drawn(noise, other)))
    assert same == [True] * 3 + [False] * 5


def test_no_more_rounds_are_drawn_than_bounds_are_for() -> None:
    noise = CorrelatedNoise(TWO, 3, STDDEV, 2)
    with pytest.raises(InvalidValueError, match="2 rounds were drawn"):
        drawn(noise, keys(3))


@pytest.mark.parametrize("strategy", [ROOT, SLOW])
def test_no_noise_is_in_the_repr_of_a_state(strategy: Strategy) -> None:
    noise = CorrelatedNoise(strategy, 2, STDDEV, 9)
    assert repr(state_after(noise, keys(8))) == "NoiseState(rounds_drawn=8)"


# The error of buffers.


def error_of(strategy: BufferedStrategy, vectors: Sequence[np.ndarray]) -> tuple[list, list]:
    """How far f_t is from that of fractions, and the largest |B_i|, over rounds of this noise."""
    dimension = vectors[0].size
    kept = strategy.initial_memory(dimension)
    exact = [[Fraction(0)] * dimension for _ in strategy.decays]
    worst, largest = Fraction(0), [Fraction(0)] * len(strategy.decays)
    for vector in vectors:
        kept = strategy.next_memory(kept, vector)
        whole, offsets = strategy.carry_over(kept, dimension)
        assert np.all(np.abs(offsets) <= 0.5)
        for b, decay in enumerate(strategy.decays):
            exact[b] = [Fraction(decay) * x + int(n) for x, n in zip(exact[b], vector, strict=True)]
            largest[b] = max(largest[b], *map(abs, exact[b]))
        for i in range(dimension):
            f = sum(Fraction(w) * exact[b][i] for b, w in enumerate(strategy.weights))
            worst = max(worst, abs(int(whole[i]) - Fraction(float(offsets[i])) - f))
    return worst, largest


@pytest.mark.parametrize("size", [1, 2**24, 2**36 - 1, 2**44 - 1])
@pytest.mark.parametrize(
    "strategy",
    [
        *(BUFFERS, SLOW, BufferedStrategy((0.9,), (1.0,))),
        BufferedStrategy((0.98,) * 6, (0.1,) * 6),
        BufferedStrategy((1.0 - 2.0**-40,), (0.7,)),
    ],
)
def test_the_error_of_buffers_stays_within_its_bound(strategy: BufferedStrategy, size: int) -> None:
    rng = np.random.default_rng(size)
    count, dimension = 150, 6
    vectors = rng.integers(-size, size, (count, dimension), endpoint=True)
    vectors[:, 1] = size  # as large as it gets
    vectors[:, 2] = size * (-1) ** np.arange(count)
    vectors[:, 3] *= np.arange(count) < 20  # which then dies out
    vectors[:, 4] = np.sign(vectors[:, 4])
    worst, largest = error_of(strategy, list(vectors))
    bounds = np.array([float(size), *(float(b) for b in largest)])
    error = strategy.error(bounds, count)
    assert worst <= error
    # The bound is not idle: a small part of it is passed.
    assert size < 2**30 or worst > error / 2000


def test_the_sum_of_many_buffers_is_within_its_bound_at_once() -> None:
    strategy = BufferedStrategy((0.0,) * 40, tuple(1 / (3 + i) for i in range(40)))
    vectors = np.random.default_rng(0).integers(-(2**40), 2**40, (3, 200))
    worst, largest = error_of(strategy, list(vectors))
    error = strategy.error(np.array([2.0**40, *map(float, largest)]), 3)
    assert error / 300 < worst <= error


@pytest.mark.parametrize("strategy", [BUFFERS, SLOW])
def test_noise_of_buffers_is_the_fresh_noise_rounded_at_its_own_sum(
    strategy: BufferedStrategy,
) -> None:
    rounds, dimension = 10, 4
    noise = CorrelatedNoise(strategy, dimension, STDDEV, rounds)
    state = noise.start()
    for key in keys(rounds):
        whole, offsets = strategy.carry_over(state.memory, dimension)
        z = normals(key, dimension, STDDEV)
        state, found = noise.step(state, key)
        for i in range(dimension):
            f = int(whole[i]) - Fraction(float(offsets[i]))
            assert int(found[i]) == nearest(z[i] - f)


def test_inflation_is_twice_the_error_in_all_components_and_rounds() -> None:
    assert CorrelatedNoise(ROOT, 10**9, STDDEV, 10**4).sensitivity_inflation == 0.0
    one = CorrelatedNoise(SLOW, 1, STDDEV, 100)
    many = CorrelatedNoise(SLOW, 10**8, STDDEV, 100)
    error = SLOW.error(one._bounds, 100)
    assert 20.0 * error <= one.sensitivity_inflation <= 20.1 * error
    assert many.sensitivity_inflation == pytest.approx(1e4 * one.sensitivity_inflation)
    # Small beside a sensitivity of 2^24 steps.
    assert 0.0 < many.sensitivity_inflation < 2.0**24 / 1000


def test_two_histories_move_the_sum_by_no_more_than_is_charged() -> None:
    # The adversary of the derivation: equal releases, and sums that differ by D.
    noise = CorrelatedNoise(SLOW, 6, STDDEV, 40)
    released = np.array(drawn(noise, keys(40)))
    moved = released.copy()
    moved[::8] += np.random.default_rng(0).integers(-(2**22), 2**22, (5, 6))
    c, square = column(SLOW, 41), Fraction(0)
    kept = [SLOW.initial_memory(6), SLOW.initial_memory(6)]
    for t in range(40):
        sums = []
        for which, vectors in enumerate((released, moved)):
            whole, offsets = SLOW.carry_over(kept[which], 6)
            sums.append([int(w) - Fraction(float(o)) for w, o in zip(whole, offsets, strict=True)])
            kept[which] = SLOW.next_memory(kept[which], vectors[t])
        for i in range(6):
            exact = past(c, list(moved[:t] - released[:t]), i)
            square += (sums[1][i] - sums[0][i] - exact) ** 2
    assert 0.0 < math.sqrt(square) <= noise.sensitivity_inflation


# Bounds, columns and errors.


@pytest.mark.parametrize("strategy", ALL)
def test_noise_comes_near_its_bounds_only_in_standard_deviations(strategy: Strategy) -> None:
    rounds = 30
    noise = CorrelatedNoise(strategy, 20_000, STDDEV, rounds)
    state, largest = noise.start(), np.zeros(len(noise._bounds))
    for key in keys(rounds):
        state, vector = noise.step(state, key)
        seen = [vector, *(state.memory if isinstance(strategy, BufferedStrategy) else ())]
        largest = np.maximum(largest, [np.abs(v).max() for v in seen])
    # Of 600,000 normals, the largest is expected near 5 standard deviations, of 32.
    assert np.all((largest / noise._bounds > 3.5 / 32) & (largest / noise._bounds < 7 / 32))


def test_noise_beyond_its_bound_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for strategy in (ROOT, SLOW):
        noise = CorrelatedNoise(strategy, 1000, STDDEV, 5)
        monkeypatch.setattr(correlated_noise, "_MAX_DEVIATIONS", 2.0)
        low = CorrelatedNoise(strategy, 1000, STDDEV, 5)
        monkeypatch.undo()
        drawn(noise, keys(5))
        with pytest.raises(NoiseError, match="noise exceeds its bound"):
            drawn(low, keys(5))


def test_a_buffer_beyond_its_bound_ends_the_run() -> None:
    noise = CorrelatedNoise(SLOW, 2, 1.0, 5)
    state = correlated_noise.NoiseState(1, (np.full(2, 1e9), np.zeros(2)))
    with pytest.raises(NoiseError, match="noise exceeds its bound"):
        noise.step(state, keys(1)[0])


@pytest.mark.parametrize(
    ("strategy", "stddev", "rounds"),
    [
        (on_grid(1.0, *[1.0] * 63), 2.0**33, 100),
        (on_grid(1.0, 0.5, 1.0, 1.0), STDDEV, 300),  # C⁻¹ grows without bound
        (on_grid(1.0, 0.5, 1.0, 1.0), 1e-9, 10_000),
        (BufferedStrategy((1.0 - 2.0**-30,), (0.5,)), 2.0**36, 10_000),
        (BufferedStrategy((0.9,) * 3, (1.0,) * 3), STDDEV, 10_000),
        (BufferedStrategy((0.99999,), (0.3,)), 2.0**40, 1000),
    ],
)
def test_what_could_overflow_is_refused(strategy: Strategy, stddev: float, rounds: int) -> None:
    with pytest.raises(InvalidValueError, match=r"^stddev is .* both must be smaller$"):
        CorrelatedNoise(strategy, 10, stddev, rounds)


@pytest.mark.parametrize("strategy", [TWO, ROOT, RISING, FLAT])
def test_the_largest_sums_of_bands_are_exact(strategy: BandedStrategy) -> None:
    # All noise at the largest bound that is accepted, of either sign.
    multipliers = [int(c * 2**20) for c in strategy.coefficients[1:]]
    bound = 2**62 // sum(multipliers)
    for largest in (bound, -bound):
        assert strategy.error(np.array([float(bound) * (1 - 2**-50)]), 9) == 0.0
        assert strategy.error(np.array([float(bound) * 1.001]), 9) == math.inf
        kept = (np.full(3, largest),) * len(multipliers)
        whole, offsets = strategy.carry_over(kept, 3)
        exact = Fraction(sum(multipliers) * largest, 2**20)
        assert whole.tolist() == [nearest(exact)] * 3
        assert [Fraction(float(o)) for o in offsets] == [nearest(exact) - exact] * 3


def test_halves_and_negative_sums_are_rounded_up() -> None:
    half = on_grid(1.0, 0.5)
    whole, offsets = half.carry_over((np.array([1, -1, 3, -3, 2, 0]),), 6)
    assert whole.tolist() == [1, 0, 2, -1, 1, 0]
    assert offsets.tolist() == [0.5, 0.5, 0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize("strategy", [BUFFERS, SLOW, BufferedStrategy((0.0,), (0.5,))])
def test_a_column_is_that_of_c_rounded_up(strategy: BufferedStrategy) -> None:
    found = strategy.column(300)
    for exact, value in zip(column(strategy, 300), found, strict=False):
        assert exact <= Fraction(value) <= exact * (1 + Fraction(1, 2**52)) + Fraction(1, 2**110)
    assert all(a >= b for a, b in pairwise(found))
    assert len(strategy.column(1)) == 1


def test_columns_end_where_zeros_begin() -> None:
    assert BandedStrategy((1.0, 0.0, 0.5, 0.0, 0.0)).column(9) == (1.0, 0.0, 0.5)
    assert BandedStrategy((1.0, 0.0, 0.5)).column(2) == (1.0,)
    assert BandedStrategy((1.0, 0.0, 0.5, 0.0)).vectors_kept == 2
    assert BufferedStrategy((0.0,), (0.5,)).column(9) == (1.0, 0.5)
    assert BufferedStrategy((0.5,), (0.0,)).column(9) == (1.0,)


@pytest.mark.parametrize(
    ("coefficients", "sentence"),
    [
        ((), r"begin with \(\); they must begin with 1"),
        ((0.5, 0.1), r"begin with \(0.5,\)"),
        ((1.0, 0.3), "coefficient 1 is 0.3"),
        ((1.0, 0.5, -0.5), "coefficient 2 is -0.5"),
        ((1.0, 1.5), "coefficient 1 is 1.5"),
        ((1.0, math.nan), "coefficient 1 is nan"),
        ((1.0, math.inf), "coefficient 1 is inf"),
        ((math.nan,), "must begin with 1"),
    ],
)
def test_bad_bands_are_refused(coefficients: tuple[float, ...], sentence: str) -> None:
    with pytest.raises(InvalidValueError, match=sentence):
        BandedStrategy(coefficients)


@pytest.mark.parametrize(
    ("decays", "weights", "sentence"),
    [
        ((), (), "0 decays are given and 0 weights"),
        ((0.5,), (0.1, 0.1), "1 decays are given and 2 weights"),
        ((1.0,), (0.1,), r"a decay is 1.0"),
        ((-0.1,), (0.1,), "a decay is -0.1"),
        ((math.nan,), (0.1,), "a decay is nan"),
        ((0.5,), (-0.1,), "a weight is -0.1"),
        ((0.5,), (1.1,), "a weight is 1.1"),
        ((0.5,), (math.nan,), "a weight is nan"),
    ],
)
def test_bad_buffers_are_refused(
    decays: tuple[float, ...], weights: tuple[float, ...], sentence: str
) -> None:
    with pytest.raises(InvalidValueError, match=sentence):
        BufferedStrategy(decays, weights)


@pytest.mark.parametrize(
    ("dimension", "stddev", "rounds", "sentence"),
    [
        (0, 1.0, 1, "dimension of noise is 0"),
        (1, 1.0, 0, "rounds of noise is 0"),
        (1, -1.0, 1, "stddev is -1.0 steps"),
        (1, math.nan, 1, "stddev is nan steps"),
        (1, 2.0**41, 1, "stddev is 2199023255552.0 steps"),
    ],
)
def test_bad_noise_is_refused(dimension: int, stddev: float, rounds: int, sentence: str) -> None:
    with pytest.raises(InvalidValueError, match=sentence):
        CorrelatedNoise(TWO, dimension, stddev, rounds)


@pytest.mark.parametrize("strategy", ALL)
def test_without_noise_there_is_none(strategy: Strategy) -> None:
    assert not np.any(drawn(CorrelatedNoise(strategy, 5, 0.0, 6), keys(6)))
