import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpriv.accounting.events import NeighbouringRelation, SamplingEvent, SamplingPolicy
from fedpriv.errors import InvalidValueError
from fedpriv.privacy import sampling
from fedpriv.privacy.entropy import SeededEntropy, keystream, words
from fedpriv.privacy.sampling import PoissonSampling

KEY = SeededEntropy(0).key("cohort of the tests")
FALSE_ALARM = 1e-6
PROBABILITIES = st.floats(0.0, 1.0, exclude_min=True, allow_subnormal=True)
USERS, DRAWS, Q = 200, 20_000, 0.05


def slow_draw(population, probability, key):
    """Toss every user's coins one after the other, comparing exact fractions."""
    q = Fraction(probability)
    layers = 0
    while q * 2 ** (layers + 1) < 1:
        layers += 1
    bits = [keystream(key, -(-population // 8), stream=1 + layer) for layer in range(layers)]
    coins = iter(words(key, population).tolist())
    cohort = []
    for user in range(population):
        survives = all(layer[user // 8] >> (user % 8) & 1 for layer in bits)
        if survives and Fraction(next(coins), 2**64) < q * 2**layers:
            cohort.append(user)
    return cohort


@pytest.fixture(scope="module")
def joined():
    """bool[DRAWS, USERS]: who was in which of many cohorts."""
    policy = PoissonSampling(USERS, Q)
    entropy = SeededEntropy(0)
    table = np.zeros((DRAWS, USERS), bool)
    for draw in range(DRAWS):
        table[draw, policy.draw(entropy.key(f"sampling/{draw}"))] = True
    return table


@given(PROBABILITIES)
@example(5e-324)
@example(2.0**-1022)
@example(1.0)
@example(0.5)
@example(math.nextafter(1.0, 0.0))
@example(math.nextafter(0.5, 0.0))
def test_realised_probability_is_exactly_the_stated_one(q):
    layers, threshold = sampling._thinning(q)
    words_that_join = Fraction(threshold, 2**64)
    assert words_that_join <= 1
    realised = Fraction(1, 2**layers) * words_that_join
    assert realised <= Fraction(q)
    assert realised == Fraction(q)


@settings(deadline=None)
@given(population=st.integers(1, 400), q=PROBABILITIES | st.floats(0.01, 1), seed=st.integers(0))
def test_cohort_is_that_of_the_slow_draw(population, q, seed):
    key = SeededEntropy(seed).key("sampling")
    assert PoissonSampling(population, q).draw(key).tolist() == slow_draw(population, q, key)


@pytest.mark.parametrize(("word", "joins"), [(0, True), (2**62 * 3 - 1, True), (2**62 * 3, False)])
def test_a_user_joins_if_the_word_is_below_q(monkeypatch, word, joins):
    def given_words(key, count, stream, start):
        return np.full(count, word, np.uint64)

    monkeypatch.setattr(sampling, "words", given_words)
    assert PoissonSampling(1, 0.75).draw(KEY).size == joins


@settings(deadline=None)
@given(
    population=st.integers(1, 5000),
    q=st.floats(1e-4, 1),
    fewer=st.integers(0, 4999),
    block=st.sampled_from([64, 192, 1024]),
)
def test_cohort_depends_neither_on_block_size_nor_on_later_users(population, q, fewer, block):
    cohort = PoissonSampling(population, q).draw(KEY)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_BLOCK", block)
        np.testing.assert_array_equal(PoissonSampling(population, q).draw(KEY), cohort)
    fewer = max(1, min(fewer, population))
    np.testing.assert_array_equal(PoissonSampling(fewer, q).draw(KEY), cohort[cohort < fewer])


@settings(deadline=None)
@given(population=st.integers(1, 3000), q=PROBABILITIES | st.floats(0.01, 1), seed=st.integers(0))
def test_cohort_is_ascending_unique_int64_positions(population, q, seed):
    cohort = PoissonSampling(population, q).draw(SeededEntropy(seed).key("sampling"))
    assert cohort.dtype == np.int64
    assert (np.diff(cohort) > 0).all()
    assert ((cohort >= 0) & (cohort < population)).all()


@pytest.mark.parametrize("q", [1e-5, 0.3])
def test_large_population_is_sampled_in_every_block(q):
    population = 5_000_003
    cohort = PoissonSampling(population, q).draw(KEY)
    assert (np.diff(cohort) > 0).all()
    assert cohort[-1] < population
    assert stats.binomtest(cohort.size, population, q).pvalue > FALSE_ALARM
    counts, _ = np.histogram(cohort, bins=10, range=(0, population))
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


def test_positions_beyond_float64_integers_are_exact():
    start = 2**60
    survivors = sampling._survivors(KEY, start, start + 1000, layers=1)
    bits = np.unpackbits(keystream(KEY, 125, stream=1, start=start // 8), bitorder="little")
    assert survivors.tolist() == [start + user for user in range(1000) if bits[user]]


@pytest.mark.parametrize("population", [1, 63, 64, 65, 1000])
def test_probability_one_takes_everyone(population):
    assert PoissonSampling(population, 1.0).draw(KEY).tolist() == list(range(population))


@pytest.mark.parametrize("q", [5e-324, 1e-300, 1e-30])
def test_tiny_probability_takes_no_one(q):
    cohort = PoissonSampling(100_000, q).draw(KEY)
    assert cohort.shape == (0,)
    assert cohort.dtype == np.int64


def test_one_user_joins_with_the_stated_probability():
    policy, entropy = PoissonSampling(1, 0.3), SeededEntropy(3)
    times = sum(policy.draw(entropy.key(f"sampling/{i}")).size for i in range(5000))
    assert stats.binomtest(times, 5000, 0.3).pvalue > FALSE_ALARM
    assert stats.binomtest(times, 5000, 0.35).pvalue < FALSE_ALARM


def sizes_are_binomial(sizes, q):
    """Chi-square of cohort sizes against Binomial(USERS, q), tails pooled."""
    low, high = stats.binom.ppf([0.005, 0.995], USERS, q)
    inner = np.arange(low, high)
    expected = stats.binom.pmf(inner, USERS, q)
    expected = np.concatenate(
        [[stats.binom.cdf(low - 1, USERS, q)], expected, [stats.binom.sf(high - 1, USERS, q)]]
    )
    clipped = np.clip(sizes, low - 1, high).astype(int) - int(low - 1)
    observed = np.bincount(clipped, minlength=expected.size)
    return stats.chisquare(observed, expected * sizes.size).pvalue > FALSE_ALARM


def test_cohort_size_is_binomial(joined):
    sizes = joined.sum(axis=1)
    assert sizes_are_binomial(sizes, Q)
    assert not sizes_are_binomial(sizes, 1.05 * Q)
    assert not sizes_are_binomial(sizes, 0.95 * Q)


def test_fixed_and_poisson_distributed_sizes_are_rejected():
    sizes = np.random.default_rng(0).poisson(USERS * 0.5, DRAWS)
    assert not sizes_are_binomial(sizes, 0.5)
    assert not sizes_are_binomial(np.full(DRAWS, round(USERS * Q)), Q)


def inclusion_is_fair(joined):
    """Largest standardised inclusion count, and the sum of squares of all, within their limits."""
    deviations = (joined.sum(axis=0) - DRAWS * Q) / math.sqrt(DRAWS * Q * (1 - Q))
    largest = stats.norm.isf(FALSE_ALARM / 2 / USERS)
    total = stats.chi2.isf(FALSE_ALARM, USERS)
    return np.abs(deviations).max() < largest and (deviations**2).sum() < total


def test_every_user_is_included_equally_often(joined):
    assert inclusion_is_fair(joined)
    without_one_in_four = joined.copy()
    without_one_in_four[::4, 17] = False
    assert not inclusion_is_fair(without_one_in_four)


def pairs_are_independent(joined):
    """Whether all pairs are in one cohort Binomial(DRAWS, Q²) times, within Bonferroni limits."""
    coins = joined.astype(np.float64)
    together = (coins.T @ coins)[np.triu_indices(USERS, 1)]
    alarm = FALSE_ALARM / 2 / together.size
    low, high = stats.binom.ppf([alarm, 1 - alarm], DRAWS, Q * Q)
    return ((low <= together) & (together <= high)).all()


def test_pairs_of_users_are_independent(joined):
    assert pairs_are_independent(joined)
    coupled = joined.copy()
    coupled[::10, 3] = coupled[::10, 90]  # each user alone remains fair
    assert not pairs_are_independent(coupled)


def test_successive_cohorts_are_independent(joined):
    both = int(np.count_nonzero(joined[:-1] & joined[1:]))
    assert stats.binomtest(both, joined[1:].size, Q * Q).pvalue > FALSE_ALARM


def test_same_key_same_cohort_other_key_other_cohort():
    policy = PoissonSampling(100_000, 0.01)
    np.testing.assert_array_equal(policy.draw(KEY), policy.draw(KEY))
    cohorts = {policy.draw(SeededEntropy(1).key(str(i))).tobytes() for i in range(50)}
    assert len(cohorts) == 50


def test_event_and_expected_size_state_the_policy():
    policy = PoissonSampling(1000, 0.25)
    assert policy.expected_cohort_size == 250.0
    assert policy.event() == SamplingEvent(
        SamplingPolicy.POISSON, 0.25, 1000, NeighbouringRelation.ADD_OR_REMOVE_ONE
    )


@pytest.mark.parametrize("q", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_probability_out_of_range_is_refused(q):
    with pytest.raises(InvalidValueError, match="sampling_probability is"):
        PoissonSampling(10, q)


@pytest.mark.parametrize("population", [0, -5])
def test_population_out_of_range_is_refused(population):
    with pytest.raises(InvalidValueError, match="population is"):
        PoissonSampling(population, 0.5)


@pytest.mark.parametrize("q", [1.0, 0.6, 0.01])
def test_short_key_is_refused(q):
    with pytest.raises(InvalidValueError, match="has 16 bytes"):
        PoissonSampling(10, q).draw(KEY[:16])
