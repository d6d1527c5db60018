"""Second moments and principal components: truth, noise, enemies, one price, one ledger."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedpriv.accounting import epsilon
from fedpriv.analytics import Mean, PrincipalComponents, SecondMoments, ask
from fedpriv.analytics.questions import Answer
from fedpriv.data import UserStore, load_digits
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.privacy.layout import squared_bound
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.privacy.outer_products import SHRINK
from tests.analytics.people import average, exact, follows, released, survey, total
from tests.privacy.exact import squares
from tests.training.federation import open_records

QUESTION = SecondMoments("moments", "x", inputs=4)
ROUNDS = 1000


def store(people: Sequence[np.ndarray]) -> UserStore:
    offsets = np.cumsum([0, *map(len, people)])
    return UserStore({"x": np.concatenate(people)}, offsets)


def some_people(count: int, inputs: int = 4, seed: int = 0) -> UserStore:
    """People of zero to three records, along few directions."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((inputs, inputs)) * 2.0 ** -np.arange(inputs)
    return store([rng.standard_normal((n, inputs)) @ mixing for n in rng.integers(0, 4, count)])


def true_moments(users: UserStore) -> np.ndarray:
    """Mean over users of the mean of x xᵀ/|x|², by loops."""
    inputs = users.fields["x"][0].size
    moments = np.zeros((inputs, inputs))
    for user in range(users.population):
        rows = users.examples_of(user)["x"].reshape(-1, inputs).astype(np.float64)
        rows = [row for row in rows if np.all(np.isfinite(row)) and np.any(row)]
        for row in rows:
            unit = row / np.linalg.norm(row)
            moments += np.outer(unit, unit) / len(rows)
    return moments / users.population


def test_without_noise_and_sampling_the_answer_is_the_truth() -> None:
    users = some_people(300)
    answer = exact(survey(300, questions=(QUESTION,)), users)["moments"]
    np.testing.assert_allclose(answer.value, true_moments(users), atol=2e-5)
    np.testing.assert_array_equal(answer.value, answer.value.T)
    np.testing.assert_array_equal(answer.noise_stddev, 0.0)


def test_components_are_those_of_numpy_without_noise() -> None:
    digits = load_digits()
    question = SecondMoments("moments", "x", inputs=64)
    users = digits.users.population
    answer = exact(survey(users, questions=(question,)), digits.users)["moments"]
    found = PrincipalComponents.of(answer, 10)
    moments, directions = np.linalg.eigh(true_moments(digits.users))
    np.testing.assert_allclose(found.moments, moments[:-11:-1], atol=1e-4)
    np.testing.assert_allclose(found.directions.T @ found.directions, np.eye(10), atol=1e-12)
    for mine, true in zip(found.directions.T, directions[:, ::-1].T, strict=False):
        assert abs(mine @ true) > 0.999
    assert found.noise_norm == 0.0


@pytest.mark.parametrize("q", [1.0, 0.5])
def test_noise_has_the_stated_law_and_no_other(q: float) -> None:
    users = some_people(400, seed=5)
    asked = survey(400, q, 1.3, questions=(QUESTION,))
    rounds = [released(asked, users, seed)["moments"] for seed in range(ROUNDS)]
    values = np.array([answer.value for answer in rounds])
    assert np.all(values == values.transpose(0, 2, 1))
    cohorts = [
        asked.mechanism.sampling.draw(SeededEntropy(s).key("sampling"))[0] for s in range(ROUNDS)
    ]
    plain = [asked.answers(average(asked, users, cohort))[0].value for cohort in cohorts]
    errors = (values - np.array(plain)) / rounds[0].noise_stddev
    for i in range(4):
        for j in range(i, 4):
            assert follows(errors[:, i, j], 1.0)
            assert not follows(errors[:, i, j], 2 / 3)
            assert not follows(errors[:, i, j], 3 / 2)
    # Numbers of the matrix have independent noise, but for its symmetry.
    above = errors[:, *np.triu_indices(4)]
    correlations = np.corrcoef(above.T) - np.eye(above.shape[1])
    assert np.abs(correlations).max() < 6.0 / math.sqrt(ROUNDS)


def test_noise_is_as_large_in_every_direction_and_as_charged() -> None:
    asked = survey(400, 0.5, 1.3, questions=(QUESTION,))
    (event,) = asked.event.queries
    assert event.clipping_norm == 1.0
    assert event.noise_stddev == pytest.approx(1.3)
    assert event.noise_stddev >= 1.3
    users = some_people(400, seed=5)
    rounds = [released(asked, users, seed)["moments"].value for seed in range(ROUNDS)]
    plain = [
        asked.answers(average(asked, users, cohort))[0].value
        for seed in range(ROUNDS)
        for cohort in [asked.mechanism.sampling.draw(SeededEntropy(seed).key("sampling"))[0]]
    ]
    noise = np.array(rounds) - np.array(plain)
    for direction in (np.eye(4)[0], np.full(4, 0.5), np.array([0.6, 0.0, -0.8, 0.0])):
        along = np.einsum("i,rij,j->r", direction, noise, direction)
        assert follows(along, 1.3 / 200.0 / SHRINK)


def test_a_matrix_is_what_its_vector_says() -> None:
    # (M_11, M_22, M_33, then √2 times M_12, M_13, M_23), all times SHRINK.
    matrix = np.array([[0.5, 0.1, -0.2], [0.1, 0.3, 0.05], [-0.2, 0.05, 0.2]])
    vector = SHRINK * np.array([0.5, 0.3, 0.2, *(math.sqrt(2.0) * np.array([0.1, -0.2, 0.05]))])
    answer = SecondMoments("m", "x", 3).answer(vector, 0.01, survey(10).sampling)
    np.testing.assert_allclose(answer.value, matrix)
    assert np.linalg.norm(vector) == pytest.approx(SHRINK * np.linalg.norm(matrix))
    # Noise of N(0, s²) in each number of the vector is s, or s/√2, in each of the matrix.
    diagonal = np.eye(3, dtype=bool)
    np.testing.assert_allclose(answer.noise_stddev[diagonal], 0.01 / SHRINK)
    np.testing.assert_allclose(answer.noise_stddev[~diagonal], 0.01 / SHRINK / math.sqrt(2.0))


@pytest.mark.slow
def test_intervals_hold_as_often_as_they_say() -> None:
    users = some_people(300, seed=6)
    for q, z in ((1.0, 3.0), (0.4, 0.3)):
        asked = survey(300, q, z, questions=(QUESTION,))
        true = true_moments(users)
        answers = [released(asked, users, seed)["moments"] for seed in range(ROUNDS)]
        held = np.mean([(a.low <= true) & (true <= a.high) for a in answers], axis=0)
        assert np.all(held > 0.954 - 5 * math.sqrt(0.954 * 0.046 / ROUNDS))


numbers = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.0, 1.0])
enemies = st.integers(0, 5).flatmap(lambda n: hnp.arrays(np.float64, (n, 4), elements=numbers))


@given(enemies)
def test_whatever_a_user_holds_it_moves_the_sum_by_at_most_its_norm(rows: np.ndarray) -> None:
    others = [np.eye(4)[:2], np.ones((1, 4))]
    asked = survey(3, questions=(QUESTION,))
    beside = total(asked, store([others[0], rows, others[1]]), [0, 1, 2])
    without = total(asked, store([others[0], rows, others[1]]), [0, 2])
    np.testing.assert_array_equal(
        beside - without, total(survey(1, questions=(QUESTION,)), store([rows]), [0])
    )
    assert squares(beside - without) <= squared_bound(1.0)
    if np.any([np.all(np.isfinite(row)) and np.any(row) for row in rows]):
        # A user with a record counts as much as any other.
        assert np.sum((beside - without)[:4]) > 0.99 * 2**24


@pytest.mark.parametrize("row", [[math.nan, 1, 1, 1], [math.inf, 0, 0, 0], [0.0] * 4])
def test_rows_that_are_no_records_do_not_count(row: list[float]) -> None:
    asked = survey(1, questions=(QUESTION,))
    alone = store([np.array([row])])
    np.testing.assert_array_equal(total(asked, alone, [0]), 0)
    beside = store([np.array([row, [1.0, 2.0, 3.0, 4.0], row])])
    record = store([np.array([[1.0, 2.0, 3.0, 4.0]])])
    np.testing.assert_array_equal(total(asked, beside, [0]), total(asked, record, [0]))


def test_length_and_number_of_records_do_not_matter() -> None:
    asked = survey(1, questions=(QUESTION,))
    record = np.array([[1.0, -2.0, 3.0, 4.0]])
    expected = total(asked, store([record]), [0])
    for rows in (1e300 * record, 1e-300 * record, -record):
        np.testing.assert_array_equal(total(asked, store([rows]), [0]), expected)
    many = total(asked, store([np.repeat(record, 100, axis=0)]), [0])
    np.testing.assert_allclose(many, expected, atol=2e-3 * 2**24)


@pytest.mark.parametrize("dtype", [np.uint8, np.int64, np.float32, np.float64])
def test_records_may_have_any_shape_and_kind_of_numbers(dtype: type) -> None:
    rng = np.random.default_rng(3)
    flat = rng.integers(0, 200, (50, 4)).astype(dtype)
    offsets = np.arange(0, 51, 5)
    shaped = UserStore({"x": flat.reshape(50, 1, 2, 2)}, offsets)
    asked = survey(10, questions=(QUESTION,))
    expected = total(asked, UserStore({"x": flat.astype(np.float64)}, offsets), range(10))
    np.testing.assert_array_equal(total(asked, shaped, range(10)), expected)
    by_function = SecondMoments("moments", lambda user: user["x"], inputs=4)
    found = total(survey(10, questions=(by_function,)), shaped, range(10))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("said", [None, [], [1.0] * 4, [["a"] * 4], [[1.0] * 3], [[[1.0] * 3]]])
def test_a_function_may_return_anything(said: object) -> None:
    asked = survey(2, questions=(SecondMoments("moments", lambda _: said, inputs=4),))
    np.testing.assert_array_equal(total(asked, some_people(2), [0, 1]), 0)


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    users, asked = some_people(60), survey(60, questions=(QUESTION,))
    whole = total(asked, users, range(60))
    monkeypatch.setattr("fedpriv.analytics.survey._NUMBERS", 17)
    np.testing.assert_array_equal(total(asked, users, range(60)), whole)


def test_components_are_one_charge_beside_others_on_one_ledger(tmp_path: Path) -> None:
    users = some_people(100, seed=2)
    both = survey(100, 0.5, 2.0, questions=(QUESTION, Mean("first", first, -1.0, 1.0)))
    alone = survey(100, 0.5, 3.0, questions=(QUESTION,), round=2)
    with open_records(tmp_path) as records:
        for asked in (both, alone):
            ask(asked, users, records, SeededEntropy(0))
        events = records.ledger.spent()
    assert events == [both.event, alone.event]
    assert [query.group for query in both.event.queries] == ["moments", "first"]
    assert both.event.noise_multiplier == pytest.approx(2.0)
    together = epsilon(events, 1e-5).epsilon
    assert together > max(epsilon([event], 1e-5).epsilon for event in events)


def first(user: dict[str, np.ndarray]) -> np.ndarray:
    return user["x"][:, 0]


def test_noise_of_this_norm_is_what_the_largest_eigenvalue_of_noise_is() -> None:
    inputs = 100
    nobody = store([np.zeros((0, inputs))] * 10)
    asked = survey(10, 1.0, 1.0, questions=(SecondMoments("moments", "x", inputs),))
    found = [PrincipalComponents.of(released(asked, nobody, s)["moments"], 1) for s in range(20)]
    largest = np.mean([each.moments[0] for each in found])
    assert largest == pytest.approx(found[0].noise_norm, rel=0.1)


def test_components_survive_noise_that_is_small_beside_them() -> None:
    users = some_people(4000, inputs=20, seed=7)
    question = SecondMoments("moments", "x", inputs=20)
    noised = released(survey(4000, 1.0, 4.0, questions=(question,)), users, 0)["moments"]
    found = PrincipalComponents.of(noised, 2)
    true = np.linalg.eigh(true_moments(users))
    assert found.moments[0] > 10.0 * found.noise_norm
    assert abs(found.directions[:, 0] @ true.eigenvectors[:, -1]) > 0.99
    assert abs(found.moments[0] - true.eigenvalues[-1]) < 2.0 * found.noise_norm


@pytest.mark.parametrize(
    ("field", "message"),
    [
        (np.zeros((2, 3)), r"'x', which is float64\[2, 3\]"),
        (np.zeros(2), r"which is float64\[2\]"),
        (np.full((2, 4), "a"), r"which is <U1\[2, 4\]"),
    ],
)
def test_columns_that_do_not_fit_are_refused(field: np.ndarray, message: str) -> None:
    users = UserStore({"x": field}, np.array([0, 2]))
    with pytest.raises(DataError, match=message):
        survey(1, questions=(QUESTION,)).check(users)


@pytest.mark.parametrize("inputs", [0, -1, 4097, 2.0])
def test_inputs_out_of_range_are_refused(inputs: float) -> None:
    limit = f"'m' has {inputs} inputs; there must be 1 to|inputs is {inputs}; it must be a whole"
    with pytest.raises(InvalidValueError, match=limit):
        SecondMoments("m", "x", inputs)


@pytest.mark.parametrize("components", [0, 5])
def test_components_out_of_range_are_refused(components: int) -> None:
    answer = exact(survey(3, questions=(QUESTION,)), some_people(3))["moments"]
    with pytest.raises(InvalidValueError, match=f"components is {components}"):
        PrincipalComponents.of(answer, components)


def test_components_of_another_answer_are_refused() -> None:
    one = np.zeros(3)
    with pytest.raises(InvalidValueError, match=r"'h' has shape \[3\]"):
        PrincipalComponents.of(Answer("h", one, one, one, one), 1)
