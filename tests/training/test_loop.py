"""The loop: charge before release, stop before the budget, attempts."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from fedpriv.privacy.noise import OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import PartialSum
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training import rounds
from fedpriv.training.request import RoundRequest
from fedpriv.training.rounds import RoundResult, ServerState, Stop, initial_state, train
from tests.training.federation import CONSTANT, PARAMETERS, FakeTransport, make_plan, open_records


def run_to_the_end(generator) -> tuple[list[tuple[ServerState, RoundResult]], Stop]:
    reports = []
    while True:
        try:
            reports.append(next(generator))
        except StopIteration as end:
            return reports, end.value


def test_all_rounds_are_run_and_charged_once(tmp_path) -> None:
    plan = make_plan()
    with open_records(tmp_path) as books:
        reports, stop = run_to_the_end(
            train(plan, initial_state(plan, PARAMETERS), CONSTANT, books, OperatingSystemEntropy())
        )
        rows = list(books.ledger.charges())
        books.ledger.verify(books.participation)
    assert stop is Stop.ROUNDS
    assert [r.round for _, r in reports] == [row.round for row in rows] == [1, 2, 3, 4, 5]
    assert [r.charge for _, r in reports] == [row.hash for row in rows]
    assert {row.event for row in rows} == {plan.mechanism.event}


def test_training_stops_before_the_budget_with_nothing_charged_beyond(tmp_path) -> None:
    plan = make_plan()
    with open_records(tmp_path, limit=3.0) as books:
        reports, stop = run_to_the_end(
            train(plan, initial_state(plan, PARAMETERS), CONSTANT, books, SeededEntropy(0))
        )
        assert stop is Stop.BUDGET
        assert len(reports) == 3 == books.ledger.head.count


def test_users_are_not_asked_for_a_round_that_the_budget_forbids(tmp_path) -> None:
    asked = []

    def update_of(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
        asked.append((request.round, user))
        return {name: np.zeros(p.shape) for name, p in request.parameters.items()}

    plan = make_plan(sampling=PoissonSampling(20, 1.0))
    with open_records(tmp_path, limit=2.0) as books:
        state = initial_state(plan, PARAMETERS)
        run_to_the_end(train(plan, state, FakeTransport(update_of), books, SeededEntropy(0)))
    assert {round_number for round_number, _ in asked} == {1, 2}


def test_empty_cohorts_release_and_are_charged(tmp_path) -> None:
    plan = make_plan(sampling=PoissonSampling(1, 1e-12))
    with open_records(tmp_path) as books:
        state = initial_state(plan, PARAMETERS)
        reports, _ = run_to_the_end(train(plan, state, CONSTANT, books, OperatingSystemEntropy()))
        assert books.ledger.head.count == 5
    models = [state.parameters["w"] for state, _ in reports]
    assert all(not np.array_equal(a, b) for a, b in itertools.pairwise(models))


def test_a_repeated_round_is_a_new_attempt_with_fresh_noise_and_its_own_charge(tmp_path) -> None:
    plan = make_plan(rounds=1)
    with open_records(tmp_path) as books:
        state = initial_state(plan, PARAMETERS)
        one, first = next(train(plan, state, CONSTANT, books, SeededEntropy(0)))
        other, second = next(train(plan, state, CONSTANT, books, SeededEntropy(0)))
        assert (first.attempt, second.attempt) == (0, 1)
        assert books.ledger.head.count == 2
    assert not np.array_equal(one.parameters["w"], other.parameters["w"])


def test_an_attempt_that_was_given_up_keeps_its_number_and_its_charge(tmp_path) -> None:
    # Answers to it that come late must not count for the cohort of another.
    class GivesUp(FakeTransport):
        def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
            yield from super().collect(request)
            raise OSError("no more")

    plan = make_plan(rounds=1)
    with open_records(tmp_path) as books:
        state = initial_state(plan, PARAMETERS)
        with pytest.raises(OSError, match="no more"):
            next(train(plan, state, GivesUp(CONSTANT.update_of), books, SeededEntropy(0)))
        _, result = next(train(plan, state, CONSTANT, books, SeededEntropy(0)))
        assert result.attempt == 1
        assert books.ledger.head.count == 2


def test_nothing_is_noised_before_the_charge_is_on_disk(tmp_path, monkeypatch) -> None:
    plan = make_plan()
    with open_records(tmp_path) as books:
        charged_when_noised = []
        close = rounds.close_round

        def spy(*arguments: object) -> object:
            with open_records(tmp_path) as another_process:
                charged_when_noised.append(another_process.ledger.head.count)
            return close(*arguments)

        monkeypatch.setattr(rounds, "close_round", spy)
        state = initial_state(plan, PARAMETERS)
        run_to_the_end(train(plan, state, CONSTANT, books, SeededEntropy(0)))
    assert charged_when_noised == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("seed", [0, 1])
def test_seeded_runs_repeat_and_others_do_not(tmp_path, seed: int) -> None:
    plan = make_plan()
    ends = []
    seeded = [SeededEntropy(s) for s in (seed, seed, seed + 1)]
    for number, entropy in enumerate([*seeded, OperatingSystemEntropy()]):
        folder = tmp_path / str(number)
        folder.mkdir()
        with open_records(folder) as books:
            state = initial_state(plan, PARAMETERS)
            reports, _ = run_to_the_end(train(plan, state, CONSTANT, books, entropy))
            ends.append(reports[-1][0].parameters["w"])
            assert {row.randomness for row in books.ledger.charges()} == {entropy.randomness}
    np.testing.assert_array_equal(ends[0], ends[1])
    assert not np.array_equal(ends[0], ends[2])
    assert not np.array_equal(ends[0], ends[3])
