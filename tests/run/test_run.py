"""A run at the server: every checkpoint is there before the next charge."""

from pathlib import Path

import pytest
from federation import CONSTANT, PARAMETERS, make_plan, open_records

from fedpriv.config import OutputSection
from fedpriv.ledger.ledger import Ledger
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run import run
from fedpriv.run.evaluation import Evaluation
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import conduct
from fedpriv.training.checkpoint import checkpoints, load_checkpoint
from fedpriv.training.rounds import RoundResult, initial_state


def conducted(folder: Path, books: PrivacyRecords, every: int = 1) -> list[RoundResult]:
    plan = make_plan(sampling=PoissonSampling(20, 1.0))
    results: list[RoundResult] = []
    conduct(
        RunFolder(folder),
        plan,
        initial_state(plan, PARAMETERS),
        CONSTANT,
        books,
        OperatingSystemEntropy(),
        lambda _: Evaluation(0.0, None),
        OutputSection(evaluate_every=5, checkpoint_every=every),
        results.append,
    )
    return results


def test_without_a_clock_no_round_is_timed(tmp_path: Path) -> None:
    # How long a round took says how many users were drawn.
    with open_records(tmp_path) as books:
        rows = conducted(tmp_path, books)
    assert [row.simulation_only_seconds for row in rows] == [None] * 5
    for row in RunFolder(tmp_path).read_metrics():
        assert row["simulation_only_seconds"] is None


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
    with open_records(tmp_path) as books:
        assert len(conducted(tmp_path, books, every)) == 5
        head = books.ledger.head
    assert saved_when_charged == [number - number % every for number in range(5)]
    last = load_checkpoint(checkpoints(RunFolder(tmp_path).checkpoints)[-1])
    assert (last.state.round, last.ledger_head) == (5, head)


def test_a_checkpoint_that_cannot_be_written_ends_the_run_before_the_next_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(run, "save_checkpoint", fails)
    with open_records(tmp_path) as books:
        with pytest.raises(OSError, match="full"):
            conducted(tmp_path, books)
        assert books.ledger.head.count == 1
