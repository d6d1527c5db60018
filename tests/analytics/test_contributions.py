"""What users contribute: bounds for any data, and agreement with slow and obvious code."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.analytics import (
    Answer,
    Distribution,
    Histogram,
    Mean,
    Quantiles,
    Question,
    Sum,
    Survey,
    VectorQuestion,
)
from fedpriv.analytics.questions import UserValues
from fedpriv.analytics.survey import collect, held_by
from fedpriv.data import UserStore
from fedpriv.errors import InvalidValueError
from tests.analytics.people import (
    KINDS,
    QUESTIONS,
    THRESHOLDS,
    Person,
    some_people,
    store,
    survey,
    total,
)
from tests.privacy.exact import agree, clipped, fractions, square, squares, steps_of

values = st.one_of(st.floats(), st.sampled_from([math.nan, math.inf, -math.inf, 1e38, 1e308]))


@st.composite
def persons(draw: st.DrawFn) -> Person:
    """Anything that a user might hold, no record included."""
    x = draw(st.lists(values, max_size=5))
    return {
        "x": x,
        "kind": draw(st.lists(st.sampled_from(KINDS), min_size=len(x), max_size=len(x))),
    }


def moved(asked: Survey, contribution: np.ndarray) -> Fraction:
    """‖·‖² of a contribution with the part of each question divided by its noise: equation (1)."""
    query = asked.mechanism.query
    slices = query.clipping.layout.slices
    return sum(
        squares(contribution[slices[group.name]])
        * (steps_of(group.clipping_norm)[0] / Fraction(stddev)) ** 2
        for group, stddev in zip(query.clipping.groups, query.noise_stddevs, strict=True)
    )


@given(
    persons(),
    st.floats(0.01, 100.0),
    st.one_of(st.none(), st.tuples(*[st.floats(1e-2, 1e2)] * len(QUESTIONS))),
)
def test_one_user_moves_all_answers_together_by_at_most_one_over_z(
    person: Person, z: float, weights: tuple[float, ...] | None
) -> None:
    shares = weights and {q.name: w for q, w in zip(QUESTIONS, weights, strict=True)}
    asked = survey(1, z=z, shares=shares)
    contribution = total(asked, store([person]), [0])
    assert contribution.dtype == np.int64
    assert moved(asked, contribution) <= 1 / Fraction(z) ** 2
    for question in QUESTIONS:
        own = contribution[asked.mechanism.clipping.layout.slices[question.name]]
        assert squares(own) <= steps_of(question.clipping_norm)[1]


def test_some_user_moves_them_by_nearly_that() -> None:
    edges: Person = {"x": [9.0], "kind": ["a"]}
    asked = survey(1, z=2.0, questions=(QUESTIONS[0], Sum("total", "x", low=-1.0, high=9.0)))
    assert moved(asked, total(asked, store([edges]), [0])) >= (1 - Fraction(1, 2**18)) / 4


@given(st.lists(persons(), min_size=1, max_size=6), st.data())
def test_a_user_adds_its_own_contribution_and_changes_nobody_elses(
    people: list[Person], data: st.DataObject
) -> None:
    users, asked = store(people), survey(len(people))
    cohort = data.draw(st.sets(st.sampled_from(range(len(people))), min_size=1).map(sorted))
    gone = data.draw(st.sampled_from(cohort))
    others = [user for user in cohort if user != gone]
    difference = total(asked, users, cohort) - total(asked, users, others)
    np.testing.assert_array_equal(difference, total(asked, users, [gone]))
    alone = survey(1)
    np.testing.assert_array_equal(difference, total(alone, store([people[gone]]), [0]))


@given(persons(), st.sampled_from(QUESTIONS))
def test_contributions_are_the_exact_ones(person: Person, question: Question) -> None:
    people = store([{"x": [3.0, -70.0], "kind": ["a", "a"]}, person])
    asked = survey(2, questions=(question,))
    for user in (0, 1):
        vector = fractions(raw(question, people, user))
        expected = clipped(vector, question.clipping_norm)
        most = Fraction(question.clipping_norm) ** 2 * (1 - Fraction(1, 10**9))
        found = total(asked, people, [user])
        assert agree(found, expected, shortened=square(vector) > most)


@given(st.lists(persons(), min_size=1, max_size=5))
def test_the_sum_is_that_of_what_the_audited_function_makes_of_each_user(
    people: list[Person],
) -> None:
    users, asked = store(people), survey(len(people))
    clipping = asked.mechanism.clipping
    slow = np.zeros(clipping.layout.dimension, np.int64)
    for person in people:
        alone = store([person])
        sent = {q.name: q.contributions(held_by(q, alone, np.array([0])))[0] for q in QUESTIONS}
        slow += clipping.contribution(sent)
    np.testing.assert_array_equal(total(asked, users, range(len(people))), slow)


def raw(question: Question, users: UserStore, user: int) -> np.ndarray:
    """Contribution of one user before clipping, by loops: [d]."""
    examples = users.examples_of(user)
    if isinstance(question, Histogram):
        kinds = examples["kind"].tolist()
        return np.array([float(kinds.count(category)) for category in question.categories])
    x = [float(value) for value in examples["x"] if math.isfinite(value)]
    if not x:
        return np.zeros(question.dimension)
    if isinstance(question, Sum):
        return np.array([min(max(sum(x), question.low), question.high)])
    if isinstance(question, Mean):
        centre = (question.low + question.high) / 2.0
        mean = sum(min(max(v, question.low), question.high) - centre for v in x) / len(x)
        return np.array([mean])
    root = square_root(len(THRESHOLDS))
    bins = [sum(v > t for t in THRESHOLDS) for v in x]
    columns = [root[:, b] if b < len(THRESHOLDS) else np.zeros(len(THRESHOLDS)) for b in bins]
    return np.sum(columns, axis=0) / len(x)


def square_root(size: int) -> np.ndarray:
    """Lower triangular square root of the matrix of running sums, entry by entry."""
    root = np.eye(size)
    for gap in range(1, size):
        for row in range(gap, size):
            middle = sum(root[row, k] * root[k, row - gap] for k in range(row - gap + 1, row))
            root[row, row - gap] = (1.0 - middle) / 2.0
    np.testing.assert_allclose(root @ root, np.tri(size), atol=1e-12)
    return root


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda q: q.name)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
def test_users_without_a_record_that_counts_add_zero(
    question: Question, value: float | None
) -> None:
    nobody: Person = {"x": [] if value is None else [value], "kind": [] if value is None else ["d"]}
    asked = survey(1, questions=(question,))
    np.testing.assert_array_equal(total(asked, store([nobody]), [0]), 0.0)


def test_values_beyond_the_range_count_as_its_ends() -> None:
    far = store([{"x": [1e300], "kind": ["a"]}, {"x": [-1e300], "kind": ["a"]}])
    asked = survey(2, questions=QUESTIONS[:2])
    # Norms of 6 and 8 are counted in steps of 2^-22 and 2^-21.
    assert total(asked, far, [0]).tolist() == [6 * 2**22, 8 * 2**21]
    assert total(asked, far, [1]).tolist() == [-6 * 2**22, -1 * 2**21]


@dataclass(frozen=True)
class Told(VectorQuestion):
    """What a user contributes is said by a table."""

    name: str
    of: str
    table: tuple[tuple[float, float], ...]
    clipping_norm: float = 5.0
    dimension: int = 2

    def contributions(self, records: UserValues) -> np.ndarray:
        return np.array([self.table[int(number)] for number in records.values])

    def answer(self, *_: object) -> Answer:
        raise NotImplementedError


def test_what_cannot_be_used_is_zeroed_for_its_question_and_what_is_long_is_shortened() -> None:
    table = ((math.nan, 1.0), (math.inf, 0.0), (1e200, 0.0), (30.0, 40.0), (3.0, 4.0))
    users = store([{"x": [float(i)], "kind": ["a"]} for i in range(5)])
    asked = survey(5, questions=(Sum("before", "x", 0.0, 4.0), Told("told", "x", table)))
    step = 2**22  # per unit: both norms are below 8 and at least 4
    for user, expected in enumerate([[0, 0], [0, 0], [0, 0], [3, 4], [3, 4]]):
        before, *told = total(asked, users, [user]).tolist()
        assert before == user * step
        assert agree(told, [e * step for e in expected], shortened=user == 3)
        assert squares(told) <= 25 * step**2
    alone = [total(asked, users, [user]) for user in range(5)]
    np.testing.assert_array_equal(total(asked, users, range(5)), sum(alone))


@dataclass(frozen=True)
class Written(VectorQuestion):
    """A question of one's own, which a function answers."""

    name: str
    of: str
    written: Callable[[UserValues], object]
    clipping_norm: float = 1.0

    def contributions(self, held: UserValues) -> np.ndarray:
        return self.written(held)  # type: ignore[return-value]

    def answer(self, *_: object) -> Answer:
        raise NotImplementedError


def centred(held: UserValues) -> np.ndarray:
    """Less the mean of whoever else is asked."""
    sums = held.sums(held.values)[:, np.newaxis]
    return sums - sums.mean()


def for_each_value(held: UserValues) -> np.ndarray:
    """A row for each value, and for a user without any."""
    return held.values[:, np.newaxis] if held.values.size else np.zeros((1, 1))


def raising(held: UserValues) -> np.ndarray:
    if 7.0 in held.values:
        raise RuntimeError(held.values)
    return np.ones((1, 1))


def writing(held: UserValues) -> np.ndarray:
    found = held.values.sum()
    held.values[:] = 9.0
    return np.array([[found]])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (centred, [0, 0, 0, 0]),
        (for_each_value, [0.5, 0, -0.25, 0]),
        (raising, [1, 1, 1, 0]),
        (writing, [0.5, 1, -0.25, 0]),
        (lambda held: np.full((1, 1), held.values.size, np.float32), [1, 1, 1, 0]),
        (lambda held: np.full((1, 1), held.values.size), [1, 1, 1, 0]),
        (lambda held: [[held.values.size]], [1, 1, 1, 0]),
    ],
)
def test_a_question_of_ones_own_is_asked_of_each_user_alone(
    written: Callable[[UserValues], object],
    expected: list[float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    values: list[list[float]] = [[0.5], [1.0, 1.0], [-0.25], []]
    if written is raising:
        values[3] = [7.0]
    users = store([{"x": x, "kind": ["a"] * len(x)} for x in values])
    before = users.fields["x"].copy()
    asked = survey(4, questions=(Written("own", "x", written),))
    step, _ = steps_of(1.0)
    alone = [total(asked, users, [user]) for user in range(4)]
    assert [float(each[0] * step) for each in alone] == expected
    np.testing.assert_array_equal(total(asked, users, range(4)), sum(alone))
    np.testing.assert_array_equal(users.fields["x"], before)
    assert all(said.startswith("simulation only, not private: ") for said in caplog.messages)


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        (lambda held: held.values[:, np.newaxis], r"contributions float64\[0, 1\] of a user with"),
        (
            lambda _: np.zeros(3),
            r"contributions float64\[3\] of a user without values",
        ),
        (lambda _: [["a"]], "numbers"),
        (lambda _: np.zeros((1, 1), complex), "numbers"),
        (lambda held: held.values[0], "contributions that raise IndexError of a user without"),
    ],
)
def test_a_question_that_does_not_fit_is_refused_before_anybody_is_asked(
    written: Callable[[UserValues], object], complaint: str
) -> None:
    with pytest.raises(InvalidValueError, match=complaint):
        survey(4, questions=(Written("own", "x", written),))


def test_functions_are_read_as_columns_are() -> None:
    users = some_people(60)
    by_column, by_function = (
        survey(60, questions=[of("x", "kind"), of(lambda u: u["x"], lambda u: u["kind"])][i])
        for i in (0, 1)
    )
    cohort = range(1, 60, 3)
    np.testing.assert_array_equal(
        total(by_column, users, cohort), total(by_function, users, cohort)
    )
    assert np.any(total(by_column, users, cohort))


def of(number: object, text: object) -> tuple[Question, ...]:
    return (
        Mean("m", number, 0.0, 4.0),
        Quantiles("q", number, THRESHOLDS),
        Histogram("h", text, KINDS),
    )


@pytest.mark.parametrize(
    "said",
    [None, "text", {}, [[1.0]], [1.0, "x"], 1j, 10**400, object(), lambda: 1.0, 1 / 3j, range(0)],
    ids=lambda said: type(said).__name__,
)
def test_a_function_may_say_anything(said: object) -> None:
    users = some_people(3)
    asked = survey(3, questions=(Mean("m", lambda _: said, -3.0, 1.0),))
    np.testing.assert_array_equal(total(asked, users, [0, 1, 2]), 0.0)


@pytest.mark.parametrize("error", [ValueError, MemoryError, RecursionError, ZeroDivisionError])
def test_a_function_that_raises_costs_its_user_only(error: type[Exception], caplog) -> None:
    def age(fields: object) -> float:
        if fields["x"][0] == 1.0:
            raise error("secret")
        return float(fields["x"][0])

    users = store([{"x": [float(i)], "kind": ["a"]} for i in range(3)])
    asked = survey(3, questions=(Sum("s", age, 0.0, 9.0), Mean("m", "x", 0.0, 2.0)))
    # Norms of 9 and 1 are counted in steps of 2^-21 and 2^-24.
    assert total(asked, users, [0, 1, 2]).tolist() == [2 * 2**21, 0]
    assert total(asked, users, [1, 2]).tolist() == [2 * 2**21, 1 * 2**24]
    said = "simulation only, not private: a user counts as zero: the function of a question gave "
    assert caplog.messages == [said + error.__name__] * 2  # once in each sum


def test_a_long_text_takes_no_more_memory_than_a_category_and_is_none() -> None:
    texts = ["catt", "cat" * 10**5, "dog", "cat", "ca"]
    users = store([{"x": [float(i)], "kind": ["a"]} for i in range(5)])
    question = Histogram("h", lambda fields: texts[int(fields["x"][0])], ("cat", "do", "dog"))
    assert held_by(question, users, np.arange(5)).values.dtype == "<U4"
    asked = survey(5, questions=(question,))
    assert total(asked, users, range(5)).tolist() == [2**24, 0, 2**24]


@pytest.mark.parametrize("long", [1.0, "a"])
def test_a_user_with_more_values_than_memory_holds_counts_as_zero(long: object) -> None:
    def value(fields: object) -> object:
        own = float(fields["x"][0])
        return np.broadcast_to(long, 1 << 50) if own == 2.0 else "b" if long == "a" else own

    users = store([{"x": [float(i)], "kind": ["a"]} for i in range(5)])
    question = Histogram("h", value, ("b",)) if long == "a" else Sum("h", value, 0.0, 8.0)
    counted = 4 * 2**24 if long == "a" else (0 + 1 + 3 + 4) * 2**21
    assert total(survey(5, questions=(question,)), users, range(5)).tolist() == [counted]


@pytest.mark.parametrize("dimension", [1, 3, 100])
def test_long_users_contribute_all_of_the_norm_and_no_more(dimension: int) -> None:
    rng = np.random.default_rng(dimension)
    question = Histogram("h", "x", range(dimension), clipping_norm=0.7)
    _, bound = steps_of(0.7)
    for _ in range(100):
        x = rng.integers(0, dimension, rng.integers(1, 5000)).astype(float)
        users = store([{"x": x, "kind": ["a"] * x.size}])
        found = squares(total(survey(1, questions=(question,)), users, [0]))
        assert bound * (1 - 2.0**-17) < found <= bound


@given(st.lists(persons(), min_size=1, max_size=8), st.integers(1, 80))
def test_chunks_make_no_difference(people: list[Person], components: int) -> None:
    users, asked = store(people), survey(len(people))
    whole = total(asked, users, range(len(people)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedpriv.analytics.survey._NUMBERS", components)
        np.testing.assert_array_equal(total(asked, users, range(len(people))), whole)


def test_a_cohort_is_one_partial_sum_of_integers_with_the_weight_of_its_users() -> None:
    users, asked = some_people(50), survey(50)
    clipping = asked.mechanism.clipping
    for cohort in (np.arange(50), np.arange(0)):
        (partial,) = collect(asked, users, cohort)
        assert partial.users == partial.weight == cohort.size
        assert partial.total.dtype == np.int64
        assert clipping.admits(partial.total, partial.users, partial.weight)
        assert np.any(partial.total) == bool(cohort.size)


def test_chunks_are_cut_by_what_their_users_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpriv.analytics.survey._NUMBERS", 10)
    sizes, chunks = [0, 30, 3, 3, 3, 0, 4], []
    users = store([{"x": [1.0] * n, "kind": ["a"] * n} for n in sizes])

    def seen(held: UserValues) -> np.ndarray:
        chunks.append(np.diff(held.offsets).tolist())
        return np.ones(2, np.int64)

    monkeypatch.setattr(Told, "total", lambda _, held: seen(held))
    total(survey(7, questions=(Told("told", "x", ()),)), users, range(7))
    # Users hold 2, 32, 5, 5, 5, 2 and 6 numbers; chunks end where the running sum passes tens.
    assert chunks == [[0], [30, 3], [3, 3], [0, 4]]


@pytest.mark.parametrize(
    "categories",
    [(), (1, 1), ("a", "a"), (1, "a"), (1.5, 2.0), (True, False), ((1, 2),), (2**60, 2**60 + 1)],
)
def test_bad_categories_are_refused(categories: Sequence[object]) -> None:
    with pytest.raises(InvalidValueError, match="'h' has the categories"):
        Histogram("h", "kind", categories)


@pytest.mark.parametrize("categories", [range(1, 4), [1, 2, 3], np.array([1, 2, 3])])
def test_categories_may_be_any_sequence(categories: Sequence[int]) -> None:
    assert Histogram("h", "kind", categories) == Histogram("h", "kind", (1, 2, 3))


@pytest.mark.parametrize("kind", [Mean, Sum])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (math.nan, 1), (0, math.inf)])
def test_bad_ranges_are_refused(kind: type, low: float, high: float) -> None:
    with pytest.raises(InvalidValueError, match="low must be below high"):
        kind("m", "x", low, high)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mean(3, "x", 0.0, 1.0), "name is of the type int"),
        (lambda: Sum("m", "x", "0", 1.0), "low is '0'"),
        (lambda: Histogram("m", "x", (1,), "1"), "clipping_norm is '1'"),
        (lambda: Histogram("m", "x", 5), "'m' has a list that cannot be read"),
        (lambda: Distribution("m", "x", ["a"]), "'m' has a list that cannot be read"),
        (lambda: Quantiles("m", "x", (1.0,), 0.5), "'m' has a list that cannot be read"),
    ],
)
def test_values_of_other_types_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()


@pytest.mark.parametrize("low", [-1e308, -1e31])
def test_ranges_that_cannot_be_clipped_to_are_refused(low: float) -> None:
    with pytest.raises(InvalidValueError, match="clipping_norm"):
        Mean("m", "x", low, 1e308)


@pytest.mark.parametrize(
    "thresholds", [(), (1, 1), (2, 1), (0, math.nan), (0, math.inf), range(5000)]
)
def test_bad_thresholds_are_refused(thresholds: Sequence[float]) -> None:
    for make in (Distribution, Quantiles):
        with pytest.raises(InvalidValueError, match=f"{len(thresholds)} thresholds"):
            make("d", "x", thresholds)


@pytest.mark.parametrize("probabilities", [(), (0.0,), (0.5, 1.0), (math.nan,)])
def test_bad_probabilities_are_refused(probabilities: Sequence[float]) -> None:
    with pytest.raises(InvalidValueError, match="has the probabilities"):
        Quantiles("q", "x", THRESHOLDS, probabilities)


@pytest.mark.parametrize("of", [None, 3, ["x"]])
def test_what_is_neither_column_nor_function_is_refused(of: object) -> None:
    with pytest.raises(InvalidValueError, match=f"question 'm' asks for {re.escape(repr(of))}"):
        Mean("m", of, 0.0, 1.0)


@pytest.mark.parametrize("name", ["", "a\nb"])
def test_bad_names_are_refused(name: str) -> None:
    for make in (
        lambda: Mean(name, "x", 0.0, 1.0),
        lambda: Histogram(name, "x", (1,)),
        lambda: Quantiles(name, "x", (1.0,)),
    ):
        with pytest.raises(InvalidValueError, match="a question is named"):
            make()
