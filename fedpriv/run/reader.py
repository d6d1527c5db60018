"""Reading a run back from its folder and its ledger, which is verified first.

`fedpriv report`: one HTML page of a run or a study, from its folder and its ledgers.
"""

import webbrowser
from collections.abc import Mapping, Sequence
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
    RoundRecord,
    RunRecord,
    SimulationOnlyRound,
    Verification,
)
from fedpriv.report.run_page import page_of_run
from fedpriv.report.study_page import page_of_study
from fedpriv.run.folder import RunFolder
from fedpriv.studies import read_study
from fedpriv.studies.results import STUDY, holds_results_alone


@dataclass(frozen=True)
class _Row:
    """What is read of a line of the metrics; see `RoundRow`."""

    round: int
    attempt: int
    epsilon: float
    charge: str
    test_loss: float | None = None
    test_accuracy: float | None = None
    clipping_norms: tuple[float, ...] = ()
    metrics: Mapping[str, object] = field(default_factory=dict)
    metrics_noise_stddev: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Seen:
    """What is read of a line of figures that are not private."""

    round: int
    attempt: int
    simulation_only_group_norms: Figures = field(default_factory=dict)
    simulation_only_update_norms: Figures = field(default_factory=dict)
    simulation_only_clipped: Figures = field(default_factory=dict)
    simulation_only_signal_to_noise: Figures = field(default_factory=dict)


_ROWS = TypeAdapter(list[_Row])
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
    rows = _released_rows(run)
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
        rounds=tuple(
            _round(n, row, [query.group for query in charged[row.charge].event.queries])
            for n, row in enumerate(rows, start=1)
        ),
        simulation_only=_simulation_only(run, rows),
    )


def released_rounds(run: RunFolder) -> list[RoundRecord]:
    """What the metrics say of each round, without clipping norms, whose groups a ledger names.

    Raises:
        DataError: the metrics cannot be read.
    """
    return [_round(n, row, ()) for n, row in enumerate(_released_rows(run), start=1)]


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


def _released_rows(run: RunFolder) -> list[_Row]:
    """Rows of the last attempt at each round, in order."""
    try:
        rows = _ROWS.validate_python(list(run.read_metrics()))
    except (ValidationError, UnicodeDecodeError) as error:
        raise DataError(f"{run.metrics} cannot be read as metrics: {_reason(error)}") from error
    last = {row.round: row for row in rows}
    return [last[number] for number in sorted(last)]


def _simulation_only(run: RunFolder, rows: list[_Row]) -> tuple[SimulationOnlyRound, ...]:
    """True figures of the attempts that were released."""
    try:
        seen = _SEEN.validate_python(list(run.read_simulation_only()))
    except (ValidationError, UnicodeDecodeError) as error:
        raise DataError(
            f"{run.simulation_only} cannot be read as figures of rounds: {_reason(error)}"
        ) from error
    numbers = {(row.round, row.attempt): n for n, row in enumerate(rows, start=1)}
    found = {}
    for each in seen:
        figures = asdict(each)
        number = numbers.get((figures.pop("round"), figures.pop("attempt")))
        if number is not None:
            found[number] = SimulationOnlyRound(number, **figures)
    return tuple(found[number] for number in sorted(found))


def _round(number: int, row: _Row, groups: Sequence[str]) -> RoundRecord:
    """A round; groups of the update come first among those of its queries."""
    return RoundRecord(
        number=number,
        epsilon=row.epsilon,
        accuracy=row.test_accuracy,
        loss=row.test_loss,
        clipping_norms=dict(zip(groups, row.clipping_norms, strict=False)),
        metrics={
            name: float(value)
            for name, value in row.metrics.items()
            if isinstance(value, int | float)
        },
        metrics_noise_stddev=row.metrics_noise_stddev,
    )


def _reason(error: ValidationError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return str(error)
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


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
