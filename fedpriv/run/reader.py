"""Reading a run back from its folder and its ledger, which is verified first.

`fedpriv report`: one HTML page of a run or a study, from its folder and its ledgers.
"""

import webbrowser
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from fedpriv.accounting.pricing import LedgerContent
from fedpriv.config import load_config
from fedpriv.errors import DataError, InvalidValueError, LedgerError
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.report.page import Page, render, write_page
from fedpriv.report.records import (
    Figures,
    RunRecord,
    SimulationOnlyRound,
    Verification,
)
from fedpriv.report.run_page import page_of_run
from fedpriv.report.study_page import page_of_study
from fedpriv.run.folder import RunFolder, reason
from fedpriv.studies import read_study
from fedpriv.studies.results import STUDY, holds_results_alone
from fedpriv.training.rounds import RoundResult


@dataclass(frozen=True)
class _Seen:
    """What is read of a line of figures that are not private."""

    round: int
    attempt: int
    simulation_only_group_norms: Figures = field(default_factory=dict)
    simulation_only_update_norms: Figures = field(default_factory=dict)
    simulation_only_clipped: Figures = field(default_factory=dict)
    simulation_only_signal_to_noise: Figures = field(default_factory=dict)


_SEEN = TypeAdapter(list[_Seen])


def read_run(folder: Path) -> RunRecord:
    """Read a run and check its ledger.

    Guarantees: the hash chain of the ledger holds, cohorts fit their commitments where the record
    of them can be read, and each release of the run has its charge.

    Raises:
        InvalidValueError: the folder holds no run.
        DataError: its metrics cannot be read.
        LedgerError: its ledger cannot be believed, or does not have the charge of a release.
    """
    run = RunFolder(folder)
    if not run.plan.exists():
        raise InvalidValueError(f"{folder} holds no run; {run.plan.name} is absent")
    config = load_config(run.plan)
    path = Path(config.privacy.ledger) if config.privacy.ledger else run.ledger
    with Ledger.open(path) as ledger:
        cohorts = _verified(ledger, run.participation_of(path))
        charges = tuple(ledger.charges())
        content = LedgerContent(path, ledger.ledger_id, ledger.population_name, charges)
        head = ledger.head
    rows = run.results()
    charged = {charge.hash: charge for charge in charges}
    for row in rows:
        found = charged.get(row.charge)
        if found is None or (found.run, found.round) != (config.run, row.round):
            raise LedgerError(
                f"ledger {path} does not have the charge of round {row.round} of {run.path}; "
                "its ε would leave out what was released"
            )
    return RunRecord(
        name=config.run or config.name,
        folder=folder,
        plan=run.plan.read_text(encoding="utf-8"),
        rounds_planned=config.rounds,
        delta=config.privacy.delta,
        budget=config.privacy.epsilon,
        accountant=config.privacy.accountant,
        ledger=content,
        verification=Verification(head, cohorts, len(rows)),
        rounds=tuple(rows),
        simulation_only=_simulation_only(run, rows),
    )


def _verified(ledger: Ledger, participation: Path) -> bool:
    """Verify a ledger, and the cohorts too where the record of them can be read."""
    try:
        participation.open("rb").close()
    except OSError:
        ledger.verify()
        return False
    with ParticipationRecord.open(participation) as record:
        ledger.verify(record)
    return True


def _simulation_only(run: RunFolder, rows: list[RoundResult]) -> tuple[SimulationOnlyRound, ...]:
    """True figures of the attempts that were released."""
    try:
        seen = _SEEN.validate_python(list(run.read_simulation_only()))
    except (ValidationError, UnicodeDecodeError) as error:
        raise DataError(
            f"{run.simulation_only} cannot be read as figures of rounds: {reason(error)}"
        ) from error
    numbers = {(row.round, row.attempt): row.number for row in rows}
    found = {}
    for each in seen:
        figures = asdict(each)
        number = numbers.get((figures.pop("round"), figures.pop("attempt")))
        if number is not None:
            found[number] = SimulationOnlyRound(number, **figures)
    return tuple(found[number] for number in sorted(found))


def write_report(folder: Path, out: Path | None, *, show: bool) -> Path:
    """Write the report of a run or a study and return the file.

    Args:
        folder: of the run or the study.
        out: the file; by default report.html in the folder.
        show: whether to open it in the browser of the machine.

    Raises:
        InvalidValueError: the folder holds no run or study, or the file cannot be written.
        DataError: metrics or results cannot be read.
        LedgerError: a ledger cannot be believed, or does not have the charge of a release.
        UnsupportedEventError: the plan's accountant has no analysis of a ledger.
    """
    path = out or folder / "report.html"
    write_page(render(_page(folder)), path)
    if show:
        webbrowser.open(path.absolute().as_uri())
    return path


def _page(folder: Path) -> Page:
    if (folder / STUDY).exists():
        read = read_study(folder)
        if holds_results_alone(folder):
            raise InvalidValueError(
                f"{folder} holds the results of a study without its runs and ledgers, which a page "
                "verifies; --figures draws what results can show"
            )
        return page_of_study(
            read, {cell: read_run(read.run_folder(cell)) for cell, _ in read.finished}
        )
    plan = RunFolder(folder).plan
    if not plan.exists():
        raise InvalidValueError(
            f"{folder} holds no run and no study; {plan.name} and {STUDY} are absent"
        )
    return page_of_run(read_run(folder))
