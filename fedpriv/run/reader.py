"""Reading a run back from its folder and its ledger, which is verified first; its report."""

import webbrowser
from pathlib import Path

from fedpriv.accounting.pricing import LedgerContent
from fedpriv.config import load_config
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.report.page import Page, render, write_page
from fedpriv.report.records import RunRecord, Verification
from fedpriv.report.run_page import page_of_run
from fedpriv.report.study_page import page_of_study
from fedpriv.run.folder import RunFolder
from fedpriv.studies import read_study
from fedpriv.studies.results import STUDY, holds_results_alone


def read_run(folder: Path) -> RunRecord:
    """Read a run and check its ledger.

    Guarantees: the hash chain of the ledger holds, cohorts fit their commitments where the record
    of them can be read, and each release of the run has its charge. Otherwise a LedgerError is
    raised; a DataError if the metrics cannot be read.
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
    results = run.results()
    charged = {charge.hash: (charge.run, charge.round) for charge in charges}
    for result in results:
        if charged.get(result.charge) != (config.run, result.round):
            raise LedgerError(
                f"ledger {path} does not have the charge of round {result.round} of {run.path}; "
                "its ε would leave out what was released"
            )
    released = {(result.round, result.attempt) for result in results}
    collected = [row for row in run.collected() if (row.round, row.attempt) in released]
    return RunRecord(
        name=config.run or config.name,
        folder=folder,
        plan=run.plan.read_text(encoding="utf-8"),
        rounds_planned=config.rounds,
        delta=config.privacy.delta,
        budget=config.privacy.epsilon,
        accountant=config.privacy.accountant,
        ledger=content,
        verification=Verification(head, cohorts, len(results)),
        rounds=tuple(results),
        simulation_only=tuple(collected),
    )


def _verified(ledger: Ledger, participation: Path) -> bool:
    """Verify a ledger; whether the record of cohorts could be read and was verified too."""
    try:
        participation.open("rb").close()
    except OSError:
        ledger.verify()
        return False
    with ParticipationRecord.open(participation) as record:
        ledger.verify(record)
    return True


def write_report(folder: Path, out: Path | None = None, *, show: bool = False) -> Path:
    """Write the report of a run or a study as one HTML page, and return the file.

    By default it is report.html in the folder; `show` opens it in the browser of this machine.
    """
    path = out or folder / "report.html"
    write_page(render(_page(folder)), path)
    if show:
        webbrowser.open(path.absolute().as_uri())
    return path


def _page(folder: Path) -> Page:
    if not (folder / STUDY).exists():
        plan = RunFolder(folder).plan
        if not plan.exists():
            raise InvalidValueError(
                f"{folder} holds no run and no study; {plan.name} and {STUDY} are absent"
            )
        return page_of_run(read_run(folder))
    read = read_study(folder)
    if holds_results_alone(folder):
        raise InvalidValueError(
            f"{folder} holds the results of a study without its runs and ledgers, which a page "
            "verifies; --figures draws what results can show"
        )
    return page_of_study(read, {cell: read_run(folder / cell.path) for cell, _ in read.finished})
