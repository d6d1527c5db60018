"""Asking: charge before release, refusals, attempts, records of who took part."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.accounting import poisson_gaussian
from fedpriv.analytics import Answers, Histogram, Mean, Survey
from fedpriv.analytics.survey import ask
from fedpriv.errors import BudgetExceededError, DataError, InvalidValueError, LedgerError
from fedpriv.ledger import Ledger, NeighbouringRelation, ProposedCharge, SamplingPolicy
from fedpriv.privacy import round as private
from fedpriv.privacy.noise import OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import (
    EveryUserSampling,
    ExampleSampling,
    FixedSizeSampling,
    PoissonSampling,
    Sampling,
)
from tests.analytics.people import QUESTIONS, some_people, survey
from tests.training.federation import open_records

USERS = some_people(40)


def values(answers: Answers) -> np.ndarray:
    return np.concatenate([answer.value.ravel() for answer in answers.answers])


def test_all_questions_are_one_charge_and_one_sampling_event(tmp_path: Path) -> None:
    asked = survey(40, 0.5, 2.0)
    with open_records(tmp_path) as records:
        answers = ask(asked, USERS, records, OperatingSystemEntropy())
        (row,) = records.ledger.charges()
        records.ledger.verify(records.participation)
        cohort = records.participation.users_of(row.cohort_commitment)
    assert (row.run, row.round, row.attempt) == ("run", 1, answers.attempt) == ("run", 1, 0)
    assert row.hash == answers.charge_hash
    assert row.event == asked.event
    assert [query.group for query in row.event.queries] == [q.name for q in QUESTIONS]
    assert row.event.sampling.policy is SamplingPolicy.POISSON
    assert row.event.sampling.relation is NeighbouringRelation.ADD_OR_REMOVE_ONE
    assert (row.event.sampling.population, row.event.sampling.sampling_probability) == (40, 0.5)
    assert row.event.noise_multiplier == pytest.approx(poisson_gaussian(0.5, 2.0).noise_multiplier)
    assert 0 < cohort.size < 40
    assert [answer.question for answer in answers.answers] == [q.name for q in QUESTIONS]
    assert answers["sum"] is answers.answers[1]
    with pytest.raises(InvalidValueError, match="the survey has no question 'summ'"):
        _ = answers["summ"]


def test_nothing_is_noised_before_the_charge_is_on_disk(tmp_path: Path, monkeypatch) -> None:
    release, charged_when_noised = private.release, []

    def spy(*arguments: object) -> object:
        with open_records(tmp_path) as another_process:
            charged_when_noised.append(another_process.ledger.head.count)
        return release(*arguments)

    monkeypatch.setattr(private, "release", spy)
    with open_records(tmp_path) as records:
        for _ in range(3):
            ask(survey(40, z=1.0), USERS, records, SeededEntropy(0))
    assert charged_when_noised == [1, 2, 3]


def test_a_refused_budget_asks_nobody_charges_nothing_and_releases_nothing(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(private, "release", None)
    said = []
    asked = survey(40, z=1.0, questions=(Mean("m", said.append, 0.0, 1.0),))
    with open_records(tmp_path, limit=0.5) as records:
        with pytest.raises(BudgetExceededError, match="no user was asked"):
            ask(asked, USERS, records, SeededEntropy(0))
        assert records.ledger.head.count == 0
        assert records.ledger.next_attempt("run", 0) == 0
    assert said == []


def test_a_budget_that_another_process_used_up_meanwhile_is_refused_by_the_charge(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(PrivacyRecords, "refuse_if_beyond", lambda *_: None)
    monkeypatch.setattr(private, "release", None)
    with (
        open_records(tmp_path, limit=0.5) as records,
        pytest.raises(BudgetExceededError, match="nothing was charged"),
    ):
        ask(survey(40, z=1.0), USERS, records, SeededEntropy(0))


def test_the_budget_is_that_of_all_runs_of_the_ledger(tmp_path: Path) -> None:
    with open_records(tmp_path, limit=2.0) as records:
        for run in ("one", "two"):
            ask(
                Survey(run, QUESTIONS, PoissonSampling(40, 0.5), 1.0),
                USERS,
                records,
                SeededEntropy(0),
            )
        with pytest.raises(BudgetExceededError):
            ask(survey(40, 0.5, 1.0), USERS, records, SeededEntropy(0))
        assert [row.run for row in records.ledger.charges()] == ["one", "two"]


def test_asking_again_is_a_new_attempt_with_fresh_cohort_noise_and_charge(tmp_path: Path) -> None:
    asked = survey(40, 0.5, 1.0)
    with open_records(tmp_path) as records:
        first, second = (ask(asked, USERS, records, SeededEntropy(0)) for _ in range(2))
        rows = list(records.ledger.charges())
        cohorts = [records.participation.users_of(row.cohort_commitment) for row in rows]
    assert (first.attempt, second.attempt) == (0, 1) == (rows[0].attempt, rows[1].attempt)
    assert not np.array_equal(cohorts[0], cohorts[1])
    assert not np.any(values(first)[:8] == values(second)[:8])


def test_a_crash_after_the_draw_costs_the_charge(tmp_path: Path, monkeypatch) -> None:
    def crash(*_: object) -> None:
        raise OSError("power cut")

    with open_records(tmp_path) as records:
        for name, charged in (("add_up", 1), ("release", 2)):
            with monkeypatch.context() as patch:
                patch.setattr(private, name, crash)
                with pytest.raises(OSError, match="power cut"):
                    ask(survey(40, z=1.0), USERS, records, SeededEntropy(0))
            assert records.ledger.head.count == charged
        assert ask(survey(40, z=1.0), USERS, records, SeededEntropy(0)).attempt == 2
        records.ledger.verify(records.participation)


def test_a_charge_of_something_else_releases_nothing(tmp_path: Path, monkeypatch) -> None:
    charge, other = Ledger.charge, survey(40, z=2.0).event

    def charge_other(ledger: Ledger, proposed: ProposedCharge, *given: object) -> object:
        return charge(ledger, replace(proposed, event=other), *given)

    monkeypatch.setattr(Ledger, "charge", charge_other)
    with (
        open_records(tmp_path) as records,
        pytest.raises(LedgerError, match="the event charged is"),
    ):
        ask(survey(40, z=1.0), USERS, records, SeededEntropy(0))


def test_an_empty_cohort_is_charged_and_answered(tmp_path: Path) -> None:
    with open_records(tmp_path) as records:
        answers = ask(survey(40, 1e-12, 1.0), USERS, records, OperatingSystemEntropy())
        assert records.ledger.head.count == 1
    assert np.all(np.isfinite(values(answers)))


def test_seeded_surveys_repeat_and_others_do_not(tmp_path: Path) -> None:
    found = []
    for number, entropy in enumerate(
        [SeededEntropy(7), SeededEntropy(7), OperatingSystemEntropy()]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        with open_records(folder) as records:
            found.append(values(ask(survey(40, 0.5, 1.0), USERS, records, entropy)))
            assert [row.randomness for row in records.ledger.charges()] == [entropy.randomness]
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_rounds_of_a_run_are_charged_as_such(tmp_path: Path) -> None:
    with open_records(tmp_path) as records:
        for month in (1, 2, 3):
            assert (
                ask(survey(40, z=1.0, round=month), USERS, records, SeededEntropy(0)).attempt == 0
            )
        assert [row.round for row in records.ledger.charges()] == [1, 2, 3]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (Mean("m", "ages", 0, 1), "question 'm' asks for column 'ages'"),
        (Mean("m", "kind", 0, 1), r"'kind', which is <U1\[\d+\]"),
        (Histogram("m", "x", ("a",)), r"which is float64\[\d+\]"),
    ],
)
def test_columns_that_do_not_fit_are_refused_before_anything_is_charged(
    tmp_path: Path, question: object, message: str
) -> None:
    with open_records(tmp_path) as records:
        with pytest.raises(DataError, match=message):
            ask(survey(40, questions=(question,)), USERS, records, SeededEntropy(0))
        assert records.ledger.head.count == 0


def test_users_that_are_not_the_enrolled_ones_are_refused(tmp_path: Path) -> None:
    with (
        open_records(tmp_path) as records,
        pytest.raises(InvalidValueError, match="the store holds 40 users; the sampling is for 41"),
    ):
        ask(survey(41), USERS, records, SeededEntropy(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"questions": ()}, r"the questions are \[\]"),
        ({"questions": QUESTIONS[:1] * 2}, r"the questions are \['mean', 'mean'\]"),
        ({"round": -1}, "round is -1"),
        ({"round": 1.5}, "round is 1.5"),
        ({"z": -1.0}, "noise_multiplier is -1.0"),
        ({"shares": {"mean": 1.0}}, "weights and groups differ"),
        ({"questions": ("mean",)}, "question 1 is of the type str"),
        ({"questions": QUESTIONS[0]}, "questions is of the type"),
        ({"round": "1"}, "round is '1'"),
        ({"z": "1"}, "noise_multiplier is '1'"),
        ({"shares": 1.0}, "shares is of the type float"),
    ],
)
def test_surveys_that_make_no_sense_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        survey(40, **changes)


@pytest.mark.parametrize(
    "sampling",
    [EveryUserSampling(40), FixedSizeSampling(40, 9), ExampleSampling(40, 0.5, 3)],
    ids=lambda sampling: type(sampling).__name__,
)
def test_other_cohorts_than_by_coins_are_refused(sampling: Sampling) -> None:
    kind = type(sampling).__name__
    with pytest.raises(InvalidValueError, match=f"sampling is of the type {kind}"):
        Survey("run", QUESTIONS, sampling, 1.0)


@pytest.mark.parametrize("run", ["", "a/b", "a\nb", 5])
def test_bad_names_of_runs_are_refused(run: object) -> None:
    with pytest.raises(InvalidValueError, match="run is"):
        Survey(run, QUESTIONS, PoissonSampling(40, 0.5), 1.0)
