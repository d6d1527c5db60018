"""A round that was drawn is charged, whatever ends it and wherever, or when its run is resumed.

Not a list of what may fail: the round is ended at each of its own lines and at each call of a
function of fedpriv, one after another, from the draw until it is charged.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import fedpriv
from fedpriv.errors import BudgetExceededError, ModelError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import (
    PartialSum,
    PrivacyRecords,
    RoundAttempt,
    draw_cohort,
    private_round,
    release,
)
from fedpriv.privacy.sampling import PoissonSampling, RandomAllocationSampling
from tests.training.federation import open_records

FILES = __file__, str(Path(fedpriv.__file__).parent)  # the steps of which count
LAYOUT, SEEDED = Layout(("w",), ((3,),)), SeededEntropy(3)
CLIPPING = Clipping(LAYOUT, flat(LAYOUT, 1.0))
POISSON, PASS = (
    GaussianMechanism.calibrated(sampling, CLIPPING, 50.0, (1.0,))
    for sampling in (PoissonSampling(12, 0.5), RandomAllocationSampling(12, 4, 2))
)
LOUDER = GaussianMechanism.calibrated(PoissonSampling(12, 0.5), CLIPPING, 99.0, (1.0,))
SOURCE, FIRST_LINE = inspect.getsourcelines(private_round)
CHARGING = FIRST_LINE + next(n for n, line in enumerate(SOURCE) if "commitment or" in line)


def ask(_: RoundAttempt, users: np.ndarray) -> Iterable[PartialSum]:
    yield PartialSum("node", users.size, np.ones(3, np.int64), users.size)


@dataclass
class Steps:
    """A trace function that calls `at` with the number of each step of a round, and its frame."""

    at: Callable[[int, FrameType], object] = lambda *_: None
    count: int = 0
    drawing: bool = False

    def __call__(self, frame: FrameType, event: str, _: object) -> "Steps | None":
        code = frame.f_code
        self.drawing |= code is draw_cohort.__code__
        if code is release.__code__:
            sys.settrace(None)
            return None
        own = code is private_round.__code__
        called = event == "call" and code.co_filename.startswith(FILES)
        if self.drawing and (called or (own and event == "line")):
            self.count += 1
            self.at(self.count, frame)
        return self if own else None


def carry_out(
    records: PrivacyRecords,
    mechanism: GaussianMechanism,
    number: int,
    steps: Steps | None = None,
) -> None:
    sys.settrace(steps)
    try:
        private_round(mechanism, "run", number, ask, records, SEEDED)
    finally:
        sys.settrace(None)


def charging(frame: FrameType) -> bool:
    """Whether the round is past its cohort, and is being charged."""
    while frame.f_code is not private_round.__code__:
        frame = frame.f_back
    return frame.f_lineno >= CHARGING


def check(records: PrivacyRecords, mechanism: GaussianMechanism) -> None:
    """All that was ever drawn is charged, parts of a pass in order."""
    sql = "SELECT round, attempt FROM participation WHERE run = ?"
    drawn = {tuple(row) for row in records.participation.database.read(sql, ("run",))}
    rows, rounds = [*records.ledger.charges()], mechanism.sampling.rounds
    assert drawn == {(row.round, row.attempt) for row in rows}
    assert [row.part for row in rows] == [n % rounds for n in range(len(rows))]
    records.ledger.verify(records.participation)


ROUNDS = pytest.mark.parametrize(
    ("mechanism", "part"), [(POISSON, 0), (PASS, 0), (PASS, 1)], ids=["alone", "first", "later"]
)


@ROUNDS
@pytest.mark.parametrize("error", [KeyboardInterrupt, ModelError])
def test_whatever_is_raised_the_round_is_charged(
    tmp_path: Path, mechanism: GaussianMechanism, part: int, error: type[BaseException]
) -> None:
    """At once; where that is what fails, when the run goes on."""
    number, ended, excused = 0, 0, 0
    with open_records(tmp_path) as records:
        for number in range(part):
            carry_out(records, mechanism, number)

        def end(step: int, frame: FrameType) -> None:
            nonlocal ended, excused
            if step > ended:
                sys.settrace(None)
                ended, excused = step, excused + charging(frame)
                raise error("here")

        while True:
            number, before = number + 1, excused
            try:
                carry_out(records, mechanism, number, Steps(end))
            except error:
                now = records.ledger.next_attempt("run", number) == 1
                assert now or excused > before
            else:
                break  # it had no more steps
            for _ in range(max(1, mechanism.sampling.rounds - 1)):  # to the same part of a pass
                carry_out(records, mechanism, number)
        check(records, mechanism)
    assert 0 < excused < ended - 20


@ROUNDS
def test_a_round_that_is_killed_is_charged_when_its_run_goes_on(
    tmp_path: Path, mechanism: GaussianMechanism, part: int
) -> None:
    """From what is in the files at each step, in their place: of a copy no series goes on."""
    moments = list[dict[str, bytes]]()

    def keep(*_: object) -> None:
        moments.append({each.name: each.read_bytes() for each in tmp_path.iterdir()})

    with open_records(tmp_path) as records:
        for number in range(part):
            carry_out(records, mechanism, number)
        carry_out(records, mechanism, part, Steps(keep))
    assert len(moments) > 40
    for moment in moments:
        for name in {each.name for each in tmp_path.iterdir()} - moment.keys():
            (tmp_path / name).unlink()
        for name, content in moment.items():
            (tmp_path / name).write_bytes(content)
        with open_records(tmp_path) as records:
            carry_out(records, mechanism, part)
            check(records, mechanism)


@pytest.mark.parametrize("lost", [LOUDER, POISSON, PASS], ids=["louder", "quieter", "a pass"])
def test_a_killed_round_is_charged_as_it_was_drawn_by_a_run_that_draws_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: GaussianMechanism
) -> None:
    goes_on = POISSON if lost is LOUDER else LOUDER
    with open_records(tmp_path) as records, monkeypatch.context() as patched:
        patched.setattr(PrivacyRecords, "charge", lambda *_: (_ for _ in ()).throw(OSError("here")))
        with pytest.raises(OSError, match="here"):
            carry_out(records, lost, 1)
    with open_records(tmp_path) as records:
        private_round(goes_on, "run", 1, ask, records, OperatingSystemEntropy())
        rows = [*records.ledger.charges()]
        assert [row.event for row in rows] == [lost.event, goes_on.event]
        seeded, fresh = SEEDED.randomness, OperatingSystemEntropy().randomness
        assert [row.randomness for row in rows] == [seeded, fresh] != [fresh, seeded]
        assert not records.participation.drawn("run")
        records.ledger.verify(records.participation)


def test_a_round_that_is_killed_is_charged_after_later_attempts_of_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_records(tmp_path) as records, monkeypatch.context() as patched:
        patched.setattr(PrivacyRecords, "settle", lambda *_: None)  # the other one began before

        def overtaken(*_: object) -> Iterable[PartialSum]:
            with open_records(tmp_path) as others:
                private_round(POISSON, "run", 1, ask, others, SEEDED)
            patched.setattr(PrivacyRecords, "charge", lambda *_: 1 / 0)
            return ()

        with pytest.raises(ZeroDivisionError):
            private_round(POISSON, "run", 1, overtaken, records, SEEDED)
    with open_records(tmp_path) as records:
        carry_out(records, POISSON, 2)
        rows = [(row.round, row.attempt) for row in records.ledger.charges()]
        assert rows == [(1, 1), (1, 0), (2, 0)]
        assert not records.participation.drawn("run")
        records.ledger.verify(records.participation)


def test_a_charge_that_others_left_no_budget_for_ends_the_run_until_there_is_more(
    tmp_path: Path,
) -> None:
    with open_records(tmp_path, limit=1.0) as records, open_records(tmp_path, limit=1.0) as others:

        def overtaken(*_: object) -> Iterable[PartialSum]:
            private_round(POISSON, "other", 1, ask, others, SEEDED)
            return ()

        for collect in (overtaken, ask):
            with pytest.raises(BudgetExceededError):
                private_round(POISSON, "run", 1, collect, records, SEEDED)
        assert records.next_attempt("run", 1) == 1  # nobody else was asked
    with open_records(tmp_path, limit=3.0) as records:
        private_round(POISSON, "run", 1, ask, records, SEEDED)
        rows = [(row.run, row.attempt) for row in records.ledger.charges()]
    assert rows == [("other", 0), ("run", 0), ("run", 1)]
