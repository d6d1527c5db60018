"""Verdicts on growing sequences of rounds, against pricing in full."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.contour import (
    ContourUnsuitableError,
    delta_interval,
    epsilon_interval,
)
from fedpriv.accounting.online import Projection
from fedpriv.accounting.panel import RoundsArray
from fedpriv.errors import InvalidValueError


def array(rounds):
    q, z = np.array(rounds, dtype=float).T
    return RoundsArray(q, z, np.ones(len(rounds)))


def noisy(n, seed):
    rng = np.random.default_rng(seed)
    q, z = np.exp(rng.uniform(np.log(0.005), np.log(0.02), n)), rng.uniform(0.9, 1.6, n)
    return list(zip(q, z, strict=True))


def drifting(n, seed):
    place = np.linspace(0.0, 1.0, n)
    wobble = np.random.default_rng(seed).uniform(0.98, 1.02, n)
    return list(zip(0.01 * wobble, 2.5 - 1.5 * place, strict=True))


def mixed(n, seed):
    rng = np.random.default_rng(seed)
    every = rng.uniform(size=n) < 0.02
    return [
        (1.0, 40.0) if e else (0.01, 1.0 + x)
        for e, x in zip(every, rng.uniform(size=n), strict=True)
    ]


class TestVerdicts:
    @settings(max_examples=15, deadline=None)
    @given(
        rounds=st.lists(
            st.tuples(st.sampled_from([1e-4, 0.003, 0.01, 0.05, 1.0]), st.floats(0.7, 30.0)),
            min_size=1,
            max_size=6,
        ),
        counts=st.lists(st.integers(1, 2_000), min_size=6, max_size=6),
        epsilon=st.floats(0.05, 12.0),
        log_delta=st.floats(math.log(1e-9), math.log(1e-3)),
    )
    def test_never_contradict_the_price(self, rounds, counts, epsilon, log_delta):
        projection = Projection.of({}, epsilon, math.exp(log_delta))
        total = {}
        for (q, z), count in zip(rounds, counts, strict=False):
            projection = projection.plus(q, z, count)
            total[q, z] = total.get((q, z), 0) + count
            verdict = projection.verdict()
            try:
                low, up = delta_interval(total, epsilon)
            except ContourUnsuitableError:
                continue
            assert not (verdict is True and low > projection.delta)
            assert not (verdict is False and up <= projection.delta)

    @pytest.mark.parametrize(
        ("make", "delta"), [(noisy, 1e-5), (noisy, 1e-9), (drifting, 1e-6), (mixed, 1e-7)]
    )
    def test_turn_where_the_price_does(self, make, delta):
        """One by one up to the budget: False from the round that passes it, and hardly a None."""
        n = 200
        rounds = make(n + 5, seed=3)
        epsilon = 0.5 * sum(epsilon_interval(array(rounds[: n + k]), delta)[0] for k in (0, 1))
        projection = Projection.of({}, epsilon, delta)
        verdicts, plans = [], 0
        for number, (q, z) in enumerate(rounds, start=1):
            projection = projection.plus(q, z)
            assert projection.rounds == number > projection.planned or number == 1
            if projection.verdict() is None:
                projection = Projection.of(array(rounds[:number]), epsilon, delta)
                plans += 1
            verdicts.append(projection.verdict())
        assert False not in verdicts[:n]
        assert verdicts[n // 2 :] == [True] * (n // 2) + [False] * 5
        assert verdicts.count(None) <= 10
        assert plans <= 20

    @pytest.mark.parametrize("part", [1e-7, 1e-5])
    def test_tell_nearby_budgets_apart(self, part):
        rounds = array(noisy(300, seed=5))
        low, up = epsilon_interval(rounds, 1e-6)
        assert Projection.of(rounds, up * (1 + part), 1e-6).verdict() is True
        assert Projection.of(rounds, low * (1 - part), 1e-6).verdict() is False

    def test_order_does_not_matter(self):
        rounds = noisy(100, seed=7)
        start = Projection.of({(0.02, 0.9): 50}, 4.0, 1e-6)
        ends = []
        for order in (rounds, rounds[::-1]):
            projection = start
            for q, z in order:
                projection = projection.plus(q, z)
            ends.append(projection)
        for one, other in zip(ends[0].contours, ends[1].contours, strict=True):
            assert one.sums.cumulant == pytest.approx(other.sums.cumulant, rel=1e-12)
        assert ends[0].verdict() is ends[1].verdict() is True

    def test_equal_rounds_may_be_counted(self):
        once = Projection.of({(0.01, 1.0): 10}, 2.0, 1e-6).plus(0.02, 1.1, 50)
        often = Projection.of({(0.01, 1.0): 10}, 2.0, 1e-6)
        for _ in range(50):
            often = often.plus(0.02, 1.1)
        for one, other in zip(once.contours, often.contours, strict=True):
            assert one.sums.cumulant == pytest.approx(other.sums.cumulant, rel=1e-12)
            assert one.sums.dropped == pytest.approx(other.sums.dropped, rel=1e-12)

    def test_what_is_remembered_of_a_round_is_what_it_adds(self):
        remembering = forgetting = Projection.of({(0.01, 1.0): 10}, 2.0, 1e-6)
        for q, z, count in [(0.02, 1.1, 1), (0.02, 1.1, 1), (0.02, 0.9, 1), (0.02, 1.1, 2)] * 2:
            remembering = remembering.plus(q, z, count)
            forgetting = replace(forgetting, last=None).plus(q, z, count)
        assert remembering.verdict() is forgetting.verdict()
        for one, other in zip(remembering.contours, forgetting.contours, strict=True):
            assert np.array_equal(one.sums.cumulant, other.sums.cumulant)
            assert np.array_equal(one.sums.error, other.sums.error)
        assert remembering.last[0] == (0.02, 1.1, 2)

    def test_many_different_rounds_start_a_plan_too(self):
        rng = np.random.default_rng(0)
        rounds = RoundsArray(
            rng.uniform(0.002, 0.006, 4_000), rng.uniform(1, 2, 4_000), np.ones(4_000)
        )
        low, up = epsilon_interval(rounds, 1e-6)
        assert Projection.of(rounds, 1.01 * up, 1e-6).verdict() is True
        assert Projection.of(rounds, 0.99 * low, 1e-6).verdict() is False
        grown = Projection.of(rounds, 1.01 * up, 1e-6).plus(0.005, 1.5, 100)
        assert grown.verdict() is False


class TestUnknown:
    def test_a_round_without_noise(self):
        projection = Projection.of({(0.01, 1.0): 100}, 3.0, 1e-6)
        assert projection.verdict() is True
        assert projection.plus(0.01, 0.0).verdict() is None
        assert projection.plus(0.01, 0.0).plus(0.01, 1.0).verdict() is None
        assert Projection.of({(0.01, 0.0): 1}, 3.0, 1e-6).verdict() is None

    def test_what_is_passed_stays_passed_whatever_comes(self):
        projection = Projection.of({(0.01, 1.0): 1_000}, 1.0, 1e-6)
        assert projection.verdict() is False
        assert projection.plus(0.01, 0.0).verdict() is False
        assert projection.plus(0.01, 0.05).verdict() is False

    @pytest.mark.parametrize(
        ("rounds", "delta"),
        [({(0.01, 0.05): 10}, 1e-6), ({(1e-13, 1.0): 10}, 1e-6), ({(0.01, 1.0): 10}, 1e-300)],
    )
    def test_what_the_contour_refuses(self, rounds, delta):
        projection = Projection.of(rounds, 1.0, delta)
        assert projection.verdict() is None
        assert projection.contours == ()
        assert projection.plus(0.01, 1.0).verdict() is None


class TestValue:
    def test_no_round_is_within_any_budget(self):
        projection = Projection.of({}, 0.0, 1e-6)
        assert projection.verdict() is True
        assert projection.contours == ()

    def test_it_is_a_value(self):
        projection = Projection.of({(0.01, 1.0): 100}, 2.0, 1e-6)
        before = projection.verdict()
        passed = projection.plus(0.01, 1.0, 900)
        assert passed.verdict() is False
        assert projection.verdict() is before is True
        assert projection.rounds == 100

    def test_its_size_does_not_grow(self):
        projection = Projection.of({(0.01, 1.0): 1}, 3.0, 1e-6)
        later = projection.plus(0.02, 1.3, 5).plus(0.013, 0.9)
        for one, other in zip(projection.contours, later.contours, strict=True):
            assert one.path == other.path
            assert one.sums.cumulant.shape == other.sums.cumulant.shape

    def test_it_counts_the_rounds_and_those_that_it_was_planned_from(self):
        projection = Projection.of({(0.01, 1.0): 100}, 3.0, 1e-6).plus(0.01, 1.0, 25)
        assert (projection.rounds, projection.planned) == (125, 100)
        first = Projection.of({}, 3.0, 1e-6).plus(0.01, 1.0).plus(0.01, 1.0)
        assert (first.rounds, first.planned) == (2, 1)

    @pytest.mark.parametrize("epsilon", [-1.0, math.inf, math.nan])
    def test_illegal_epsilon(self, epsilon):
        with pytest.raises(InvalidValueError, match=r"epsilon is .*; it must be finite"):
            Projection.of({}, epsilon, 1e-6)

    @pytest.mark.parametrize("delta", [0.0, 1.0, math.nan])
    def test_illegal_delta(self, delta):
        with pytest.raises(InvalidValueError, match=r"delta is .*; it must be in \(0, 1\)"):
            Projection.of({}, 1.0, delta)

    @pytest.mark.parametrize(("q", "z", "count"), [(0.0, 1.0, 1), (0.1, -1.0, 1), (0.1, 1.0, 0)])
    def test_illegal_rounds(self, q, z, count):
        with pytest.raises(InvalidValueError, match="it must be"):
            Projection.of({(0.01, 1.0): 1}, 1.0, 1e-6).plus(q, z, count)
