import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import NeighbouringRelation, SamplingEvent, SamplingPolicy, Unit
from fedpriv.privacy import sampling
from fedpriv.privacy.noise import SeededEntropy, keystream
from fedpriv.privacy.sampling import (
    EveryUserSampling,
    ExampleSampling,
    FixedSizeSampling,
    PoissonSampling,
    drawn_users,
)

KEY = SeededEntropy(0).key("cohort of the tests")
FALSE_ALARM = 1e-6
PROBABILITIES = st.floats(0.0, 1.0, exclude_min=True, allow_subnormal=True)
USERS, DRAWS, Q = 200, 20_000, 0.05


def slow_draw(population, probability, key):
    """Ask user after user: he joins if W, with all its bits, is not below what passes over him."""
    joins, all_of = probability.as_integer_ratio()
    decided = min(all_of // joins, 128)
    extra = math.ceil(decided * (all_of.bit_length() - 1) / 8)
    cohort, drawn, asked = [], 0, decided
    for user in range(population):
        if asked == decided:
            (word,) = sampling.words(key, 1, stream=0, start=drawn).tolist()
            more = keystream(key, extra, stream=1, start=drawn * extra)
            number = word * 256**extra + int.from_bytes(more.tobytes(), "little")
            limit, drawn, asked = 2**64 * 256**extra, drawn + 1, 0
        limit, lost = divmod(limit * (all_of - joins), all_of)
        assert lost == 0
        asked += 1
        if number >= limit:
            cohort.append(user)
            asked = decided
    return cohort


@pytest.fixture(scope="module")
def joined():
    """bool[DRAWS, USERS]: who was in which of many cohorts."""
    policy = PoissonSampling(USERS, Q)
    entropy = SeededEntropy(0)
    table = np.zeros((DRAWS, USERS), bool)
    for draw in range(DRAWS):
        table[draw, policy.draw(entropy.key(f"sampling/{draw}"))[0]] = True
    return table


@settings(deadline=None)
@given(q=PROBABILITIES | st.floats(1e-3, 1), data=st.data())
@example(q=1.0, data=None)
@example(q=5e-324, data=None)
@example(q=math.nextafter(1.0, 0.0), data=None)
@example(q=math.nextafter(0.5, 0.0), data=None)
def test_realised_probability_to_pass_users_over_is_exact(q, data):
    """By how many of all numbers, with all bits, are below what passes over j users or more."""
    limits = sampling._limits(q)
    most = limits.size
    assert most == min(int(1 / Fraction(q)), 128)
    j = data.draw(st.integers(1, most)) if data else most
    passes = (1 - Fraction(q)) ** j
    word, rest = divmod(2**64 * passes, 1)
    assert int(limits[most - j]) == word
    bits = 8 * math.ceil(most * (Fraction(q).denominator.bit_length() - 1) / 8)
    first = rest * 2**bits
    assert first.denominator == 1  # the limit lies between two numbers, not within one
    assert passed_exactly(q, word, int(first), most) < j
    assert first == 0 or passed_exactly(q, word, int(first) - 1, most) >= j


def passed_exactly(q, word, number, most):
    """How many users a word passes over if its other bits are those of a number."""

    def given_bits(key, size, stream, start):
        return np.frombuffer(number.to_bytes(size, "little"), np.uint8)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "keystream", given_bits)
        return sampling._skipped_exactly(KEY, word, 0, q, most)


@settings(deadline=None)
@given(population=st.integers(1, 400), q=PROBABILITIES | st.floats(0.01, 1), seed=st.integers(0))
def test_cohort_is_that_of_the_slow_draw(population, q, seed):
    key = SeededEntropy(seed).key("sampling")
    assert PoissonSampling(population, q).draw(key)[0].tolist() == slow_draw(population, q, key)


@settings(deadline=None)
@given(q=PROBABILITIES | st.floats(0.01, 1), population=st.integers(1, 400), data=st.data())
def test_words_on_a_limit_and_beside_it_count_as_in_the_slow_draw(q, population, data):
    limits = sampling._limits(q).tolist()
    near = sorted({max(0, limit + by) for limit in limits for by in (-1, 0, 1)} - {2**64})
    chosen = data.draw(st.lists(st.sampled_from(near), min_size=population, max_size=population))

    def given_words(key, count, stream, start):
        return np.array((chosen + [0] * count)[start : start + count], np.uint64)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "words", given_words)
        patch.setattr(sampling, "_WORDS_AT_ONCE", 5)
        slow = slow_draw(population, q, KEY)
        assert PoissonSampling(population, q).draw(KEY)[0].tolist() == slow


@pytest.mark.parametrize(("byte", "passed"), [(0, 2), (255, 1)])
def test_where_a_word_is_on_a_limit_its_further_bits_decide(monkeypatch, byte, passed):
    limits = sampling._limits(0.3)

    def given_words(key, count, stream, start):
        return np.full(count, limits[limits.size - 2])  # of the probability to pass over two

    def given_bits(key, size, stream, start):
        return np.full(size, byte, np.uint8)

    monkeypatch.setattr(sampling, "words", given_words)
    monkeypatch.setattr(sampling, "keystream", given_bits)
    assert sampling._skipped(KEY, 0, 1, 0.3, limits).tolist() == [passed]


@pytest.mark.parametrize(("word", "joins"), [(2**64 - 1, True), (2**62, True), (2**62 - 1, False)])
def test_a_user_joins_if_the_word_is_not_below_the_rest(monkeypatch, word, joins):
    def given_words(key, count, stream, start):
        return np.full(count, word, np.uint64)

    monkeypatch.setattr(sampling, "words", given_words)
    assert PoissonSampling(1, 0.75).draw(KEY)[0].size == joins


@settings(deadline=None)
@given(
    population=st.integers(1, 5000),
    q=st.floats(1e-4, 1),
    fewer=st.integers(0, 4999),
    block=st.sampled_from([1, 7, 64, 1024]),
)
def test_cohort_depends_neither_on_block_size_nor_on_later_users(population, q, fewer, block):
    cohort = PoissonSampling(population, q).draw(KEY)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "_WORDS_AT_ONCE", block)
        np.testing.assert_array_equal(PoissonSampling(population, q).draw(KEY)[0], cohort)
    fewer = max(1, min(fewer, population))
    np.testing.assert_array_equal(PoissonSampling(fewer, q).draw(KEY)[0], cohort[cohort < fewer])


@settings(deadline=None)
@given(population=st.integers(1, 3000), q=PROBABILITIES | st.floats(0.01, 1), seed=st.integers(0))
def test_cohort_is_ascending_unique_int64_positions(population, q, seed):
    cohort = PoissonSampling(population, q).draw(SeededEntropy(seed).key("sampling"))[0]
    assert cohort.dtype == np.int64
    assert (np.diff(cohort) > 0).all()
    assert ((cohort >= 0) & (cohort < population)).all()


@pytest.mark.parametrize("q", [1e-5, 0.3])
def test_large_population_is_sampled_in_every_block(q):
    population = 5_000_003
    cohort = PoissonSampling(population, q).draw(KEY)[0]
    assert (np.diff(cohort) > 0).all()
    assert cohort[-1] < population
    assert stats.binomtest(cohort.size, population, q).pvalue > FALSE_ALARM
    counts, _ = np.histogram(cohort, bins=10, range=(0, population))
    assert stats.chisquare(counts).pvalue > FALSE_ALARM


@pytest.mark.parametrize("population", [1, 2, 1000, 50_000])
def test_probability_one_takes_everyone(population):
    assert PoissonSampling(population, 1.0).draw(KEY)[0].tolist() == list(range(population))


@pytest.mark.parametrize("q", [5e-324, 1e-300, 1e-30])
def test_tiny_probability_takes_no_one(q):
    cohort = PoissonSampling(100_000, q).draw(KEY)[0]
    assert cohort.shape == (0,)
    assert cohort.dtype == np.int64


def test_one_user_joins_with_the_stated_probability():
    policy, entropy = PoissonSampling(1, 0.3), SeededEntropy(3)
    times = sum(policy.draw(entropy.key(f"sampling/{i}"))[0].size for i in range(5000))
    assert stats.binomtest(times, 5000, 0.3).pvalue > FALSE_ALARM
    assert stats.binomtest(times, 5000, 0.35).pvalue < FALSE_ALARM


def test_draws_of_nodes_have_the_law_of_one_draw():
    """Three nodes of 1, 4 and 0 users: all sets of five users, each as likely as with one draw."""
    event, entropy, counts = PoissonSampling(5, 0.4).event(), SeededEntropy(7), Counter()
    for i in range(6000):
        parts = [drawn_users(event, n, entropy.key(f"{i}/{n}")) + at for at, n in ((0, 1), (1, 4))]
        counts[tuple(np.concatenate(parts).tolist())] += 1
        assert drawn_users(event, 0, entropy.key(f"{i}/0")).size == 0
    sets = [s for size in range(6) for s in combinations(range(5), size)]
    expected = [6000 * 0.4 ** len(s) * 0.6 ** (5 - len(s)) for s in sets]
    assert stats.chisquare([counts[s] for s in sets], expected).pvalue > FALSE_ALARM
    other = [6000 * 0.43 ** len(s) * 0.57 ** (5 - len(s)) for s in sets]
    assert stats.chisquare([counts[s] for s in sets], other).pvalue < FALSE_ALARM


def test_nodes_draw_everybody_or_by_coins_and_not_otherwise():
    np.testing.assert_array_equal(drawn_users(EveryUserSampling(9).event(), 4, bytes(32)), range(4))
    with pytest.raises(InvalidValueError, match="fixed-size"):
        drawn_users(FixedSizeSampling(9, 3).event(), 4, bytes(32))


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
    np.testing.assert_array_equal(policy.draw(KEY)[0], policy.draw(KEY)[0])
    cohorts = {policy.draw(SeededEntropy(1).key(str(i)))[0].tobytes() for i in range(50)}
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


class TestExamples:
    def test_are_drawn_as_users_are_with_a_place_for_each(self):
        drawn = ExampleSampling(30, 0.1, 7).draw(KEY)[0]
        assert drawn.tolist() == PoissonSampling(210, 0.1).draw(KEY)[0].tolist()
        assert drawn.max() < ExampleSampling(30, 0.1, 7).places == 210

    def test_are_charged_for_their_users(self):
        policy = ExampleSampling(30, 0.1, 7)
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        expected = SamplingEvent(
            SamplingPolicy.EXAMPLES, 0.1, 30, relation, unit=Unit.USER, examples_per_user=7
        )
        assert policy.event() == expected
        assert (policy.unit, policy.drawn) == (Unit.USER, Unit.EXAMPLE)
        with pytest.raises(InvalidValueError, match="unit is 'example'"):
            replace(policy, unit=Unit.EXAMPLE)

    def test_are_averaged_over_public_constants(self):
        assert ExampleSampling(30, 0.1, 7).expected_cohort_size == 0.1 * 210
        assert ExampleSampling(30, 0.1, 7, 150.0).expected_cohort_size == 0.1 * 150.0

    @pytest.mark.parametrize("total", [0.0, -1.0, 210.5, math.nan, math.inf])
    def test_are_no_more_than_all_places(self, total):
        sentence = f"total_examples is {total}; it must be above 0 and at most 210, the 30 users"
        with pytest.raises(InvalidValueError, match=sentence):
            ExampleSampling(30, 0.1, 7, total)

    @pytest.mark.parametrize("k", [0, -3])
    def test_are_at_least_one_of_each_user(self, k):
        with pytest.raises(InvalidValueError, match=f"examples_per_user is {k}; with"):
            ExampleSampling(30, 0.1, k)
