"""What answers say: true values without noise, unbiasedness, the law of the noise, intervals."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedpriv.analytics import Distribution, Mean, Quantiles
from fedpriv.analytics.questions import crossings
from tests.analytics.people import (
    QUESTIONS,
    THRESHOLDS,
    average,
    exact,
    follows,
    released,
    some_people,
    store,
    survey,
)

UNBIASED = QUESTIONS[:4]
ROUNDS = 1000


def test_without_noise_and_sampling_answers_are_the_truth() -> None:
    rng = np.random.default_rng(1)
    x, kind = rng.uniform(-3.0, 9.0, 500), rng.choice(["a", "b", "c"], 500)
    users = store([{"x": [v], "kind": [k]} for v, k in zip(x, kind, strict=True)])
    answers = exact(survey(500), users)
    assert answers["mean"].value == pytest.approx(x.mean())
    assert answers["sum"].value == pytest.approx(np.clip(x, -1.0, 8.0).sum())
    assert answers["histogram"].value == pytest.approx([sum(kind == k) for k in "bac"])
    assert answers["distribution"].value == pytest.approx([(x <= t).mean() for t in THRESHOLDS])
    inverted = stats.mstats.mquantiles(x, [0.2, 0.5, 0.9], alphap=0, betap=1)
    least = [min(t for t in THRESHOLDS if t >= value) for value in inverted]
    assert answers["quantiles"].value.tolist() == least
    for answer in answers.values():
        np.testing.assert_allclose(answer.noise_stddev, 0.0)
        np.testing.assert_allclose(answer.low, answer.high, atol=1e-9)


@pytest.mark.parametrize("q", [0.3, 0.8])
def test_answers_are_unbiased_over_all_cohorts(q: float) -> None:
    count = 7
    users = some_people(count, seed=3)
    asked, truth = survey(count, q, questions=UNBIASED), exact(survey(count), users)
    mean = {question.name: 0.0 for question in UNBIASED}
    for chosen in itertools.product([False, True], repeat=count):
        probability = math.prod(q if c else 1.0 - q for c in chosen)
        for answer in asked.answers(average(asked, users, np.flatnonzero(chosen))):
            mean[answer.question] = mean[answer.question] + probability * answer.value
    for name, value in mean.items():
        np.testing.assert_allclose(value, truth[name].value, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_answers_are_unbiased_over_seeded_rounds() -> None:
    users = some_people(80, seed=4)
    asked, truth = survey(80, 0.5, 1.5, questions=UNBIASED), exact(survey(80), users)
    rounds = [released(asked, users, seed) for seed in range(2 * ROUNDS)]
    for question in UNBIASED:
        values = np.array([answers[question.name].value for answers in rounds])
        error = values.std(0) / math.sqrt(2 * ROUNDS)
        away = (values.mean(0) - truth[question.name].value) / error
        assert np.all(np.abs(away) < 5.5), question.name
        shrunk = (0.8 * values.mean(0) - truth[question.name].value) / error
        assert np.max(np.abs(shrunk)) > 5.5, question.name


@pytest.mark.parametrize("shares", [None, {q.name: 1.0 + i for i, q in enumerate(UNBIASED)}])
def test_noise_has_the_stated_law_and_no_other(shares: dict[str, float] | None) -> None:
    users = some_people(400, seed=5)
    asked = survey(400, 1.0, 1.3, questions=UNBIASED, shares=shares)
    truth = exact(survey(400), users)
    rounds = [released(asked, users, seed) for seed in range(ROUNDS)]
    for question in UNBIASED:
        answers = [each[question.name] for each in rounds]
        errors = np.array([a.value - truth[question.name].value for a in answers])
        stddevs = np.array([a.noise_stddev for a in answers])
        standardised = (errors / stddevs).reshape(ROUNDS, -1)
        for component in standardised.T:
            assert follows(component, 1.0), question.name
            assert not follows(component, 2 / 3), question.name
            assert not follows(component, 3 / 2), question.name


def test_noise_is_what_the_ledger_is_charged() -> None:
    asked = survey(400, 0.5, 1.3)
    by_group = {event.group: event.noise_stddev for event in asked.event.queries}
    users = some_people(400, seed=5)
    answers = released(asked, users, 0)
    assert answers["mean"].noise_stddev == pytest.approx(by_group["mean"] / 200.0)
    assert answers["sum"].noise_stddev == pytest.approx(by_group["sum"] / 0.5)
    assert answers["histogram"].noise_stddev == pytest.approx(by_group["histogram"] / 0.5)
    rows = np.sqrt(
        np.cumsum(np.array([1.0, 1 / 2, 3 / 8, 5 / 16, 35 / 128, 63 / 256, 231 / 1024]) ** 2)
    )
    expected = rows * by_group["distribution"] / 200.0
    np.testing.assert_allclose(answers["distribution"].noise_stddev, expected)
    assert asked.event.noise_multiplier == pytest.approx(1.3)
    assert asked.event.noise_multiplier >= 1.3


@pytest.mark.parametrize("size", [1, 2, 16, 64, 1000, 4096])
def test_the_noise_of_a_curve_grows_with_the_logarithm(size: int) -> None:
    question = Distribution("d", "x", range(size))
    answer = question.answer(np.zeros(size), question.clipping_norm, survey(1).sampling)
    assert answer.noise_stddev.max() <= 1.07 + math.log(size) / math.pi


@pytest.mark.slow
@pytest.mark.parametrize(("q", "z"), [(1.0, 3.0), (0.4, 3.0), (0.4, 0.3)])
def test_intervals_hold_as_often_as_they_say_and_of_all_users_no_more(q: float, z: float) -> None:
    users = some_people(300, seed=6)
    asked, truth = survey(300, q, z), exact(survey(300), users)
    rounds = [released(asked, users, seed) for seed in range(ROUNDS)]
    for question in QUESTIONS:
        true = truth[question.name].value
        answers = [each[question.name] for each in rounds]
        held = np.mean([(a.low <= true) & (true <= a.high) for a in answers], axis=0)
        # 95.4% but for a chance of one in a million per component.
        chance = 5 * math.sqrt(0.954 * 0.046 / ROUNDS)
        assert np.all(held > 0.954 - chance), question.name
        if q == 1.0 and question in UNBIASED:
            assert np.all(held < 0.954 + chance), question.name
        assert all(np.all((a.low <= a.value) & (a.value <= a.high)) for a in answers)


def test_quantiles_are_read_off_the_curve_made_rising() -> None:
    question = Quantiles("q", "x", (1.0, 2.0, 3.0, 4.0), (0.1, 0.25, 0.5, 0.75, 0.9))
    root = np.array(
        [[1, 0, 0, 0], [1 / 2, 1, 0, 0], [3 / 8, 1 / 2, 1, 0], [5 / 16, 3 / 8, 1 / 2, 1]]
    )
    curve = np.array([0.2, 0.6, 0.4, 0.8])  # pooled: 0.2, 0.5, 0.5, 0.8
    answer = question.answer(np.linalg.solve(root, curve), 0.0, survey(1).sampling)
    assert answer.value.tolist() == [1.0, 2.0, 2.0, 4.0, 4.0]
    assert answer.low.tolist() == [1.0, 2.0, 2.0, 4.0, 4.0]
    assert answer.high.tolist() == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_quantiles_may_be_as_far_apart_as_numbers_are() -> None:
    largest = float(np.finfo(np.float64).max)
    question = Quantiles("q", "x", (-largest, 0.0, largest))
    answer = question.answer(np.zeros(3), 1.0, survey(1).sampling)
    assert answer.noise_stddev.tolist() == [largest / 2.0] * 3
    assert answer.low.tolist() == [-largest] * 3
    assert answer.high.tolist() == [largest] * 3


def test_quantiles_bracket_their_probability_up_to_the_noise_of_the_curve() -> None:
    rng = np.random.default_rng(8)
    x = rng.normal(0.0, 1.0, 5000)
    users = store([{"x": [v], "kind": ["a"]} for v in x])
    points = np.linspace(-4.0, 4.0, 161)
    question = Quantiles("q", "x", points, (0.05, 0.5, 0.95))
    asked = survey(5000, 1.0, 5.0, questions=(question,))
    curve = Distribution("q", "x", points)
    for seed in range(30):
        answer = released(asked, users, seed)["q"]
        (again,) = [
            a.noise_stddev.max()
            for a in released(survey(5000, 1.0, 5.0, questions=(curve,)), users, seed).values()
        ]
        for p, value in zip(question.probabilities, answer.value, strict=True):
            assert (x <= value).mean() >= p - 6.0 * again
            assert (x <= value - 0.05).mean() <= p + 6.0 * again


def test_crossings_by_hand() -> None:
    curve, levels = np.array([0.1, 0.3, 0.2, 0.6]), np.array([0.25, 0.6, 0.9])
    first, last = crossings(curve, np.zeros(4), levels)
    assert (first.tolist(), last.tolist()) == ([1, 3, 4], [3, 3, 4])
    first, last = crossings(curve, np.full(4, 0.06), levels)
    assert (first.tolist(), last.tolist()) == ([1, 3, 4], [3, 4, 4])
    first, last = crossings(curve, np.full(4, 0.5), levels)
    assert (first.tolist(), last.tolist()) == ([0, 0, 3], [4, 4, 4])


def test_a_user_without_a_value_counts_as_one_in_the_middle() -> None:
    people = [{"x": [1.0], "kind": ["a"]}, {"x": [2.0], "kind": ["a"]}]
    question = Mean("m", "x", 0.0, 8.0)
    absent = store([*people, {"x": [], "kind": []}])
    middle = store([*people, {"x": [4.0], "kind": ["a"]}])
    asked = survey(3, questions=(question,))
    assert exact(asked, absent)["m"].value == pytest.approx(exact(asked, middle)["m"].value)
