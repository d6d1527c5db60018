"""A run at the server: every checkpoint is there before the next charge."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.build import simulated
from fedpriv.config import parse_config
from fedpriv.ledger.events import Randomness
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import beside
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.run import run
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import Run, conduct
from fedpriv.training.rounds import Stop, checkpoints, load_checkpoint
from tests.studies.studying import BASE


@contextmanager
def opened(folder: Path, every: int = 1) -> Iterator[tuple[PrivacyRecords, Callable[[], Run]]]:
    """The records of a run of five rounds, and what runs it into the folder."""
    output = {"evaluate_every": 5, "checkpoint_every": every}
    config = parse_config(BASE | {"rounds": 5, "output": output}, "test")
    experiment, transport = simulated(config, "run")
    files, state = RunFolder(folder), experiment.initial_state
    record, population = beside(files.ledger), experiment.plan.population
    with PrivacyRecords.open(files.ledger, record, population, experiment.budget) as records:
        parts = files, experiment, state, transport, records, lambda _result: None
        yield records, partial(conduct, *parts)


def test_without_a_clock_no_round_is_timed(tmp_path: Path) -> None:
    # How long a round took says how many users were drawn.
    with opened(tmp_path) as (_, conducted):
        conducted()
    rows = RunFolder(tmp_path).read_metrics()
    assert [row["simulation_only_seconds"] for row in rows] == [None] * 5


def newest(folder: Path) -> int:
    """Rounds in the newest checkpoint, 0 if there is none."""
    found = checkpoints(RunFolder(folder).checkpoints)
    return load_checkpoint(found[-1]).state.round if found else 0


@pytest.mark.parametrize("every", [1, 2])
def test_at_a_charge_every_earlier_round_that_is_to_have_a_checkpoint_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    saved_when_charged = []
    charge = Ledger.charge

    def spy(*given: object) -> object:
        saved_when_charged.append(newest(tmp_path))
        return charge(*given)

    monkeypatch.setattr(Ledger, "charge", spy)
    with opened(tmp_path, every) as (records, conducted):
        assert conducted().stop is Stop.ROUNDS
        head = records.ledger.head
    assert saved_when_charged == [number - number % every for number in range(5)]
    last = load_checkpoint(checkpoints(RunFolder(tmp_path).checkpoints)[-1])
    assert (last.state.round, last.ledger_head) == (5, head)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(run, "save_checkpoint", fails)
    with opened(tmp_path) as (records, conducted):
        with pytest.raises(OSError, match="full"):
            conducted()
        assert records.ledger.head.count == 1


def test_epsilon_is_that_of_the_ledger_where_no_round_is_left_of_the_budget(tmp_path: Path) -> None:
    with opened(tmp_path) as (records, conducted):
        loud = poisson_gaussian(1.0, 0.1, population=300)
        given = ("other", 1, 0, Randomness.SEEDED, loud, "0" * 64)
        records.ledger.charge(ProposedCharge(*given))
        found = conducted()
        assert (found.stop, found.rounds) == (Stop.BUDGET, ())
        assert found.epsilon == records.ledger.epsilon(records.budget) > records.budget.epsilon
