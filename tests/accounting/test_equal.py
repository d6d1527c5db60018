"""Contours that are kept for equal rounds: as good as new ones, and the same in every order."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fedpriv.accounting import contour, equal
from fedpriv.accounting.answers import DeltaAt, EpsilonAt, Question
from fedpriv.accounting.contour import delta_interval, epsilon_interval
from fedpriv.accounting.equal import EqualRounds
from fedpriv.accounting.loss import Direction
from fedpriv.accounting.panel import Panel, rounds_array
from fedpriv.accounting.saddle import Plan
from tests.accounting.test_contour import gaussian_delta

QUESTIONS: st.SearchStrategy[Question] = st.one_of(
    st.floats(-25.0, -5.0).map(EpsilonAt), st.floats(0.05, 20.0).map(DeltaAt)
)
PROBABILITIES = st.floats(1e-4, 1.0)
NOISES = st.floats(0.5, 20.0)
COUNTS = st.integers(1, 10**5)


def fresh(q: float, z: float, count: int, question: Question) -> tuple[float, float]:
    """The interval of contours that are made for just these rounds."""
    return contour._both(contour._Different(rounds_array({(q, z): count}), question))


def kept(q: float, z: float, count: int, question: Question) -> tuple[float, float]:
    return contour._both(EqualRounds(q, z, count, question))


@given(q=PROBABILITIES, z=NOISES, count=COUNTS, question=QUESTIONS)
def test_intervals_of_kept_and_of_new_contours_have_the_answer_in_common(
    q: float, z: float, count: int, question: Question
) -> None:
    old, new = kept(q, z, count, question), fresh(q, z, count, question)
    assert max(old[0], new[0]) <= min(old[1], new[1])


@given(
    q=PROBABILITIES,
    z=NOISES,
    count=COUNTS,
    question=QUESTIONS,
    direction=st.sampled_from(Direction),
)
def test_a_ceiling_is_above_the_answer_in_its_direction(
    q: float, z: float, count: int, question: Question, direction: Direction
) -> None:
    new = contour._Different(rounds_array({(q, z): count}), question)
    low, _ = contour._interval(new.contours(direction), question)
    assert low <= EqualRounds(q, z, count, question).ceiling(direction)


class Above(DeltaAt):
    """Tells the bound on K(c) that a ceiling is made from, over c(c + 1)."""

    def ceiling(self, panel: Panel, plan: Plan, above: float) -> float:
        del panel
        return above / (plan.c * (plan.c + 1))


@given(z=st.floats(5.0, 100.0), count=st.integers(1, 1_000), direction=st.sampled_from(Direction))
def test_a_ceiling_is_made_from_a_tight_bound_on_the_cumulant(
    z: float, count: int, direction: Direction
) -> None:
    """Without sampling K(c) = n·c(c + 1)/2z² (Mironov 2017, Proposition 7).

    Losses outside the windows are not in it, but in the δ that is set apart for them.
    """
    exact = count / (2 * z**2)
    above = EqualRounds(1.0, z, count, Above(0.5)).ceiling(direction)
    assert exact * (1 - 1e-8) <= above <= exact * (1 + 1e-8)


@example(q=0.01, z=1.0, count=50, question=EpsilonAt(math.log(1e-6)))
@given(q=PROBABILITIES, z=NOISES, count=COUNTS, question=QUESTIONS)
def test_kept_contours_answer_only_where_they_are_narrow(
    q: float, z: float, count: int, question: Question
) -> None:
    """Elsewhere the answer is that of new ones."""
    rounds = rounds_array({(q, z): count})
    low, up = contour._answer(rounds, question)
    assert up - low <= 1e-8 * up or (low, up) == fresh(q, z, count, question)


def test_kept_contours_are_mostly_narrow_where_new_ones_are() -> None:
    """Else each round of a run would be planned for anew."""
    question = EpsilonAt(math.log(1e-6))
    narrow = []
    for q, z, count in itertools.product(
        (0.01, 0.03, 0.1, 0.3, 1.0), (1.0, 1.2, 2.0, 5.0), (20, 50, 61, 83, 333, 5_000, 20_000)
    ):
        low, up = fresh(q, z, count, question)
        if up - low <= 1e-9 * up:
            low, up = kept(q, z, count, question)
            narrow.append(up - low <= 1e-8 * up)
    assert len(narrow) > 100
    assert np.mean(narrow) >= 0.95


@pytest.mark.parametrize("count", [1, 7, 100, 12_345])
def test_without_sampling_the_answer_is_that_of_one_gaussian(count: int) -> None:
    low, up = kept(1.0, 40.0, count, EpsilonAt(math.log(1e-5)))
    mu = math.sqrt(count) / 40.0
    assert gaussian_delta(mu, up) <= 1e-5 <= gaussian_delta(mu, low)
    assert up - low <= 1e-8 * up


def test_an_answer_does_not_depend_on_what_was_asked_before() -> None:
    def asked(count: int) -> tuple[tuple[float, float], ...]:
        return epsilon_interval({(0.1, 1.0): count}, 1e-6), delta_interval({(0.2, 2.0): count}, 1.0)

    counts = np.random.default_rng(0).permutation(np.arange(30, 130)).tolist()
    answers = []
    for order in (counts, counts[::-1]):
        equal._plan.cache_clear()
        equal._contours.cache_clear()
        answers.append({count: asked(count) for count in order})
    assert answers[0] == answers[1]


def test_epsilon_rises_from_round_to_round_where_plans_change_too() -> None:
    ups = [epsilon_interval({(0.1, 2.0): n}, 1e-6)[1] for n in range(20, 400)]
    assert all(a < b for a, b in itertools.pairwise(ups))


@given(count=st.floats(1e-3, 1e9))
def test_paths_are_planned_for_at_least_as_many_rounds_and_few_more(count: float) -> None:
    planned = EqualRounds(0.5, 1.0, count, DeltaAt(1.0))._planned
    assert count * (1 - 1e-9) <= planned <= 1.1 * count * (1 + 1e-9)


@given(factor=st.floats(0.1, 10.0), direction=st.sampled_from(Direction))
def test_sums_of_every_round_so_often_are_bounds_still(factor: float, direction: Direction) -> None:
    (one, _) = equal._contours(0.1, 1.0, 100.0, EpsilonAt(math.log(1e-6)), direction)
    sums = one.sums
    times = sums.times(factor)
    exact = sums.cumulant.astype(np.clongdouble) * np.longdouble(factor)
    wrong = np.abs(times.cumulant - exact)
    assert np.all(times.error >= np.longdouble(factor) * sums.error + wrong)
    assert np.all(times.lost >= np.longdouble(factor) * sums.lost)
    assert np.all(times.beyond >= np.longdouble(factor) * sums.beyond)
    assert np.all(times.falls <= np.longdouble(factor) * sums.falls)
    assert times.further >= np.longdouble(factor) * sums.further
    assert times.dropped >= np.longdouble(factor) * sums.dropped
    np.testing.assert_allclose(times.error, factor * sums.error, rtol=1e-2)
    np.testing.assert_allclose(times.cumulant, factor * sums.cumulant, rtol=1e-14)
