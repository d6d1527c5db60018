"""Cohorts of each sampling policy: what every one of them keeps to, and the law of each."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import replace
from itertools import combinations
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    WITH_STRATEGY,
    NeighbouringRelation,
    SamplingPolicy,
    Schedule,
    Unit,
)
from fedpriv.privacy import sampling
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.sampling import (
    BandedPoissonSampling,
    CanarySampling,
    EveryUserSampling,
    ExampleSampling,
    FixedSizeSampling,
    PoissonSampling,
    RandomAllocationSampling,
    SeparatedSampling,
    uniform_below,
)

FALSE_ALARM = 1e-6
ENTROPY = SeededEntropy(5)
DRAWS = 3000
ADD, REPLACE = NeighbouringRelation


def key_of(number):
    return ENTROPY.key(f"sampling/{number}")


def fair(counts, expected=None):
    return stats.chisquare(counts, expected).pvalue > FALSE_ALARM


class SamplingConformance(ABC):
    """What a mechanism relies on, of every policy."""

    @abstractmethod
    def of(self, population, unit=Unit.USER):
        """The policy for N users, from 6 on."""

    @pytest.mark.parametrize("population", [6, 7, 40, 1000])
    def test_cohorts_are_ascending_positions_one_for_each_round_of_the_event(self, population):
        policy = self.of(population)
        schedule = policy.event().schedule
        cohorts = policy.draw(key_of(0))
        assert len(cohorts) == policy.rounds == (1 if schedule is None else schedule.rounds)
        for users in cohorts:
            assert users.dtype == np.int64
            assert users.ndim == 1
            assert (np.diff(users) > 0).all()
            assert ((users >= 0) & (users < population)).all()

    def test_cohorts_are_a_function_of_the_key_and_of_nothing_else(self):
        first, second, other = self.of(500), self.of(500), self.of(500)
        other.draw(key_of(1))
        for policy in (second, other):
            for one, two in zip(first.draw(key_of(0)), policy.draw(key_of(0)), strict=True):
                np.testing.assert_array_equal(one, two)

    def test_each_user_is_in_the_cohort_of_each_round_with_the_chance_that_is_stated(self):
        """q of the event, or of one of b groups that take turns, of which nothing is secret."""
        users, draws = 12, 4000
        policy = self.of(users)
        chance = policy.expected_cohort_size / users
        joined = np.zeros((policy.rounds, users), np.int64)
        for number in range(draws):
            for at, cohort in enumerate(policy.draw(key_of(number))):
                joined[at, cohort] += 1
        alarm = FALSE_ALARM / 2 / joined.size
        low, high = stats.binom.ppf([alarm, 1 - alarm], draws, chance)
        assert ((low <= joined) & (joined <= high)).all()
        in_turn = policy.event().policy in WITH_STRATEGY
        groups = policy.event().schedule.separation if in_turn else 1
        assert policy.event().sampling_probability == pytest.approx(chance * groups)

    def test_cohorts_have_the_expected_size_and_variance(self):
        policy, draws = self.of(30), 2000
        sizes = np.array([[c.size for c in policy.draw(key_of(n))] for n in range(draws)])
        spread = math.sqrt(policy.event().cohort_variance / draws)
        means = sizes.mean(axis=0)
        if policy.event().policy is SamplingPolicy.SEPARATED:  # groups differ by one user
            assert (abs(sizes - policy.expected_cohort_size) < 1.0).all()
            return
        assert (abs(means - policy.expected_cohort_size) <= 6.0 * spread).all()
        variance = policy.event().cohort_variance
        np.testing.assert_allclose(sizes.var(axis=0), variance, rtol=0.25)

    @pytest.mark.parametrize("unit", Unit)
    def test_the_event_states_population_and_unit(self, unit):
        event = self.of(50, unit).event()
        assert (event.population, event.unit) == (50, unit)

    @pytest.mark.parametrize("population", [0, -3])
    def test_a_population_without_users_is_refused(self, population):
        with pytest.raises(InvalidValueError, match=f"population (is|of) {population}"):
            self.of(population)


CANARIES = {
    "poisson": lambda n: PoissonSampling(n, 0.4),
    "examples": lambda n: ExampleSampling(n, 0.4, 3, total_examples=20.0),
    "every-user": EveryUserSampling,
    "random-allocation": lambda n: RandomAllocationSampling(n, 5, 2),
    "separated": lambda n: SeparatedSampling(n, 6, 3),
    "banded": lambda n: BandedPoissonSampling(n, 6, 3, 0.5),
}


@pytest.mark.parametrize("policy", CANARIES)
def test_canaries_are_drawn_as_users_are_and_change_no_denominator(policy):
    of = CANARIES[policy]
    with_canaries, users, all_of_them = CanarySampling(of(12), 7), of(12), of(19)
    for one, other in zip(with_canaries.draw(key_of(3)), all_of_them.draw(key_of(3)), strict=True):
        np.testing.assert_array_equal(one, other)
    assert with_canaries.expected_cohort_size == users.expected_cohort_size
    event = with_canaries.event()
    assert event == replace(users.event(), canaries=7)
    assert event.places == all_of_them.event().places == with_canaries.places
    assert (with_canaries.population, with_canaries.unit) == (12, Unit.USER)
    assert with_canaries.rounds == users.rounds


def test_coins_of_users_do_not_depend_on_canaries():
    for number in range(20):
        (alone,), (beside,) = (
            policy.draw(key_of(number))
            for policy in (PoissonSampling(50, 0.3), CanarySampling(PoissonSampling(50, 0.3), 90))
        )
        np.testing.assert_array_equal(beside[beside < 50], alone)


def test_a_fixed_size_has_no_room_for_canaries():
    with pytest.raises(InvalidValueError, match="canaries is 5"):
        CanarySampling(FixedSizeSampling(12, 4), 5)


class TestPoisson(SamplingConformance):
    def of(self, population, unit=Unit.USER):
        return PoissonSampling(population, 0.4, unit)


class TestFixedSize(SamplingConformance):
    def of(self, population, unit=Unit.USER):
        return FixedSizeSampling(population, 3, unit)

    @pytest.mark.parametrize(("n", "m"), [(5, 2), (6, 3), (6, 4), (6, 1), (5, 4)])
    def test_every_set_of_that_size_is_equally_likely(self, n, m):
        policy = FixedSizeSampling(n, m)
        found = Counter(tuple(policy.draw(key_of(i))[0].tolist()) for i in range(DRAWS))
        counts = [found.pop(subset, 0) for subset in combinations(range(n), m)]
        assert not found
        assert fair(counts)
        assert len(counts) == comb(n, m)

    def test_a_near_law_is_rejected(self):
        """One user that is passed over in one draw of four, and sets of neighbours."""
        rng = np.random.default_rng(0)
        found, neighbours = Counter(), Counter()
        for _ in range(DRAWS):
            users = rng.choice(6 if rng.random() < 0.75 else 5, 3, replace=False)
            found[tuple(sorted(users.tolist()))] += 1
            neighbours[tuple(sorted(((rng.integers(6) + np.arange(3)) % 6).tolist()))] += 1
        for counts in (found, neighbours):
            assert not fair([counts[subset] for subset in combinations(range(6), 3)])

    def test_all_users_or_one_of_one(self):
        for n in (1, 2, 17):
            assert FixedSizeSampling(n, n).draw(key_of(0))[0].tolist() == list(range(n))

    @settings(deadline=None, max_examples=60)
    @given(data=st.data(), n=st.integers(1, 3000), seed=st.integers(0, 2**32))
    def test_the_size_is_exact(self, data, n, seed):
        m = data.draw(st.integers(1, n))
        (users,) = FixedSizeSampling(n, m).draw(SeededEntropy(seed).key("sampling"))
        assert users.size == m
        assert users.tolist() == sorted({*range(n)} & {*users.tolist()})

    def test_more_words_are_read_where_many_values_come_twice(self, monkeypatch):
        """Until enough distinct ones are found, from the beginning of the stream each time."""
        asked = []

        def often_zero(bound, key, count):
            asked.append(count)
            return np.array(([0] * 150 + [7, 7, 3, 0, 9, 5])[:count], np.int64)

        monkeypatch.setattr(sampling, "uniform_below", often_zero)
        assert FixedSizeSampling(10, 4).draw(key_of(0))[0].tolist() == [0, 3, 7, 9]
        assert asked == [72, 144, 288]

    def test_what_is_not_drawn_is_the_cohort_where_it_is_more_than_half(self, monkeypatch):
        def given_values(bound, key, count):
            return np.array([4, 4, 1, 0], np.int64)

        monkeypatch.setattr(sampling, "uniform_below", given_values)
        assert FixedSizeSampling(6, 4).draw(key_of(0))[0].tolist() == [0, 2, 3, 5]
        assert FixedSizeSampling(6, 2).draw(key_of(0))[0].tolist() == [1, 4]

    @settings(max_examples=200)
    @given(n=st.integers(1, 10**9), data=st.data())
    def test_the_event_is_that_of_every_legal_size(self, n, data):
        m = data.draw(st.integers(1, n))
        event = FixedSizeSampling(n, m).event()
        assert (event.policy, event.relation) == (SamplingPolicy.FIXED_SIZE, REPLACE)
        assert event.sampling_probability == m / n
        assert event.expected_cohort_size == pytest.approx(m, rel=1e-15)

    @pytest.mark.parametrize("m", [0, -1, 11])
    def test_a_size_out_of_range_is_refused(self, m):
        with pytest.raises(InvalidValueError, match=f"cohort_size is {m}; .*population of 10"):
            FixedSizeSampling(10, m)


class TestEveryUser(SamplingConformance):
    def of(self, population, unit=Unit.USER):
        return EveryUserSampling(population, unit=unit)

    @pytest.mark.parametrize("relation", NeighbouringRelation)
    def test_everybody_is_in_each_round_and_the_relation_is_that_which_was_given(self, relation):
        policy = EveryUserSampling(9, relation)
        assert policy.draw(key_of(0))[0].tolist() == list(range(9))
        assert policy.event().relation is relation
        assert policy.event().sampling_probability == 1.0


class TestRandomAllocation(SamplingConformance):
    def of(self, population, unit=Unit.USER):
        return RandomAllocationSampling(population, 5, 2, unit)

    def sets(self, n, k, users, draws):
        """The rounds of each user in each pass: [draws, users] of tuples."""
        policy = RandomAllocationSampling(users, n, k)
        for number in range(draws):
            table = np.zeros((users, n), np.bool_)
            for at, cohort in enumerate(policy.draw(key_of(number))):
                table[cohort, at] = True
            yield [tuple(np.flatnonzero(row).tolist()) for row in table]

    @pytest.mark.parametrize(("n", "k"), [(1, 1), (4, 1), (4, 4), (5, 2), (5, 3), (6, 5)])
    def test_each_user_is_in_exactly_k_rounds_every_set_equally_likely(self, n, k):
        found = [each for one in self.sets(n, k, 40, 60) for each in one]
        counts = Counter(found)
        assert {len(each) for each in counts} == {k}
        subsets = [*combinations(range(n), k)]
        assert sum(counts[each] for each in subsets) == len(found)
        assert len(subsets) == 1 or fair([counts[each] for each in subsets])

    def test_a_near_law_is_rejected(self):
        """k = 2 of 3: the next round, or the last, where a round comes twice."""
        rng, found = np.random.default_rng(0), Counter()
        for _ in range(DRAWS):
            first, second = rng.integers(3, size=2)
            found[tuple(sorted((first, (first + 1) % 3 if first == second else second)))] += 1
        assert fair([found[each] for each in combinations(range(3), 2)])  # that is fair
        found = Counter()
        for _ in range(DRAWS):
            first, second = rng.integers(3, size=2)
            found[tuple(sorted((first, max(2, first) if first == second else second)))] += 1
        assert not fair([found[each] for each in combinations(range(3), 2)])

    def test_users_are_independent_of_each_other_and_passes_of_each_other(self):
        n, k = 4, 2
        subsets = {each: at for at, each in enumerate(combinations(range(n), k))}
        numbers = np.array(
            [[subsets[each] for each in one] for one in self.sets(n, k, 3, 4000)], np.int64
        )
        for one, two in combinations(range(3), 2):
            assert fair(np.bincount(6 * numbers[:, one] + numbers[:, two], minlength=36))
        assert fair(np.bincount(6 * numbers[:-1, 0] + numbers[1:, 0], minlength=36))
        coupled = numbers.copy()
        coupled[::4, 1] = coupled[::4, 0]
        assert not fair(np.bincount(6 * coupled[:, 0] + coupled[:, 1], minlength=36))

    def test_a_user_draws_the_same_rounds_whoever_else_is_enrolled_after_it(self):
        """So that neighbouring populations differ in one user alone, by the same key."""
        more, fewer = (RandomAllocationSampling(n, 7, 3).draw(key_of(0)) for n in (100, 99))
        for one, two in zip(more, fewer, strict=True):
            np.testing.assert_array_equal(one[one < 99], two)

    def test_the_event_is_that_of_a_pass(self):
        event = RandomAllocationSampling(30, 7, 3).event()
        assert event.policy is SamplingPolicy.RANDOM_ALLOCATION
        assert event.schedule == Schedule(7, 3)
        assert event.sampling_probability == 3 / 7
        assert event.relation is ADD
        assert event.expected_cohort_size == pytest.approx(30 * 3 / 7)

    @pytest.mark.parametrize(("n", "k"), [(0, 1), (3, 0), (3, 4), (-1, 1)])
    def test_numbers_out_of_range_are_refused(self, n, k):
        with pytest.raises(InvalidValueError, match=r"schedule (has|is)"):
            RandomAllocationSampling(10, n, k)


class TestSeparated(SamplingConformance):
    def of(self, population, unit=Unit.USER):
        return SeparatedSampling(population, 8, 3, ADD, unit)

    @settings(deadline=None, max_examples=60)
    @given(data=st.data(), rounds=st.integers(1, 40), population=st.integers(1, 60))
    def test_rounds_of_a_user_are_as_the_event_says(self, data, rounds, population):
        b = data.draw(st.integers(1, min(rounds, population)))
        policy = SeparatedSampling(population, rounds, b)
        schedule, at = policy.event().schedule, {}
        cohorts = policy.draw(key_of(data.draw(st.integers(0, 9))))
        for number, users in enumerate(cohorts):
            for user in users.tolist():
                at.setdefault(user, []).append(number)
        assert at.keys() == set(range(population))
        assert schedule == Schedule(rounds, math.ceil(rounds / b), b)
        for numbers in at.values():
            assert len(numbers) <= schedule.participations
            assert (np.diff(numbers) >= b).all()
        sizes = [users.size for users in cohorts]
        assert max(sizes) - min(sizes) <= 1

    def test_groups_are_dealt_at_random(self):
        policy = SeparatedSampling(4, 2, 2)
        found = Counter(tuple(policy.draw(key_of(i))[0].tolist()) for i in range(DRAWS))
        assert fair([found[each] for each in combinations(range(4), 2)])

    @pytest.mark.parametrize(("rounds", "b"), [(3, 4), (3, 0), (0, 1), (3, -1)])
    def test_numbers_out_of_range_are_refused(self, rounds, b):
        with pytest.raises(InvalidValueError, match=r"schedule (has|is)"):
            SeparatedSampling(10, rounds, b)

    def test_each_group_needs_a_user(self):
        with pytest.raises(InvalidValueError, match="separation is 11"):
            SeparatedSampling(10, 20, 11)


class TestBandedPoisson(SamplingConformance):
    def of(self, population, unit=Unit.USER):
        return BandedPoissonSampling(population, 7, 3, 0.4, ADD, unit)

    def test_groups_take_turns_and_coins_are_fresh_in_each_round(self):
        """Of a user, and of users of a group: joins are independent, and of no other round."""
        rounds, groups, users, q = 6, 2, 4, 0.4
        policy = BandedPoissonSampling(users, rounds, groups, q)
        turns = SeparatedSampling(users, rounds, groups)
        joined = np.zeros((DRAWS, rounds, users), np.bool_)
        for number in range(DRAWS):
            mine = turns.draw(key_of(number))
            for at, cohort in enumerate(policy.draw(key_of(number))):
                assert {*cohort.tolist()} <= {*mine[at].tolist()}
                joined[number, at, cohort] = True
        twice = joined[:, 0] & joined[:, 2]  # of a group's first and second turn
        assert stats.binomtest(int(twice.sum()), DRAWS * users, q * q / groups).pvalue > FALSE_ALARM
        both = joined[:, 0].sum(axis=1) == users // groups
        assert stats.binomtest(int(both.sum()), DRAWS, q * q).pvalue > FALSE_ALARM


class TestUniformBelow:
    @pytest.mark.parametrize("bound", [1, 2, 3, 10, 64, 1000])
    def test_values_are_uniform(self, bound):
        drawn = uniform_below(bound, key_of(bound), 20_000)
        assert drawn.dtype == np.int64
        assert bound == 1 or fair(np.bincount(drawn, minlength=bound))
        assert ((drawn >= 0) & (drawn < bound)).all()

    @pytest.mark.parametrize("bound", [3, 10, 2**62 + 1, 2**63 - 1])
    def test_words_from_the_last_whole_multiple_on_are_replaced_by_the_next(
        self, monkeypatch, bound
    ):
        limit = 2**64 // bound * bound
        stream = [limit - 1, limit, 2**64 - 1, 5, limit, limit - 2, 2**64 - 1, limit, 4, 1, 0, 0]
        read = []

        def given_words(key, count, stream_=0, start=0, **given):
            read.append((start, count))
            return np.array(stream[start : start + count], np.uint64)

        monkeypatch.setattr(sampling, "words", given_words)
        drawn = uniform_below(bound, b"", 4)
        assert read == [(0, 4), (4, 2), (6, 1), (7, 1), (8, 1)]
        assert drawn.tolist() == [word % bound for word in (limit - 1, 4, limit - 2, 5)]

    @pytest.mark.parametrize("bound", [1, 2, 2**32, 2**63])
    def test_no_word_is_refused_where_the_bound_is_a_power_of_two(self, monkeypatch, bound):
        def highest(_, count, **given):
            return np.full(count, 2**64 - 1, np.uint64)

        monkeypatch.setattr(sampling, "words", highest)
        assert uniform_below(bound, b"", 3).tolist() == [bound - 1] * 3

    def test_streams_of_a_key_differ(self):
        drawn = {tuple(uniform_below(100, key_of(0), 20, stream=s).tolist()) for s in range(5)}
        assert len(drawn) == 5
