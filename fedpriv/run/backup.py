"""Backups of a ledger and of the participation record next to it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from fedpriv.errors import LedgerError
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import SERIES_KEYS, Head, ParticipationRecord, record_path


@contextmanager
def _intact(path: Path) -> Iterator[tuple[Ledger, ParticipationRecord | None]]:
    """Open and verify a ledger, and the participation record next to it, if there is one."""
    with ExitStack() as stack:
        ledger, record = stack.enter_context(Ledger.open(path)), None
        if record_path(path).exists():
            record = stack.enter_context(ParticipationRecord.open(record_path(path)))
        ledger.verify(record)
        yield ledger, record


def back_up(ledger: Path, to: Path) -> Head:
    """Copy a ledger, and the record next to it, to new files, and return the head of the copy.

    Both may be in use: the copied record has the cohort of every copied charge and no later charge.
    The copy lacks the keys of unfinished series of rounds, so a run that continues from it never
    draws the noise of the original again.
    """
    for path in (to, record_path(to)):
        if path.exists():
            raise LedgerError(f"{path} exists already; it is not overwritten")
    to.parent.mkdir(parents=True, exist_ok=True)
    with _intact(ledger) as (opened, record), ExitStack() as stack:
        if record is not None:
            # Meanwhile no cohort is recorded, but a recorded cohort may still be charged.
            second_record = stack.enter_context(ParticipationRecord.open(record_path(ledger)))
            stack.enter_context(second_record.database.transaction())
            record.database.copy(record_path(to), without=SERIES_KEYS)
        opened.database.copy(to)  # last: a ledger without its record would be half a backup
    with Ledger.open(to) as copy:
        return copy.head


def restore(backup: Path, path: Path, *, older: bool) -> tuple[Head, list[str]]:
    """Replace a ledger and its record by a backup; return its head and the charges that it lacks.

    LedgerError, and nothing is changed: the backup is of another ledger or, unless `older`, lacks
    charges of the ledger that it would replace. A process that has the ledger open can no longer
    charge it. A series of rounds that was under way ends, since the backup may lack some of its
    releases, and correlated noise must not be drawn twice: the run charges a new series.
    """
    with _intact(backup) as (saved, saved_record), ExitStack() as stack:
        ledger = record = None
        if path.exists():
            ledger = stack.enter_context(Ledger.open(path))
            stack.enter_context(ledger.database.transaction())
        if record_path(path).exists():
            record = stack.enter_context(ParticipationRecord.open(record_path(path)))
            stack.enter_context(record.database.transaction())
        missing_charges = _missing(saved, ledger, record)
        if missing_charges and not older:
            rest = f" and {len(missing_charges) - 1} more" if len(missing_charges) > 1 else ""
            raise LedgerError(
                f"{backup} is older than the ledger that it would replace: it lacks "
                f"{missing_charges[0]}{rest}; --older restores it nevertheless"
            )
        if missing_charges and record is not None and saved_record is None:
            raise LedgerError(
                f"{record_path(backup)} is missing; {record_path(path)} has charges that {backup} "
                "lacks, so both must be restored"
            )
        _put(saved, path, ledger)
        if saved_record is not None:
            _put(saved_record, record_path(path), record, without=SERIES_KEYS)
        return saved.head, missing_charges


def _missing(saved: Ledger, ledger: Ledger | None, record: ParticipationRecord | None) -> list[str]:
    """Return the charges in the replaced ledger or its record that a backup lacks."""
    charges, saved_head = list[str](), saved.head
    if ledger is not None:
        if ledger.ledger_id != saved.ledger_id:
            raise LedgerError(f"the backup is of ledger {saved.ledger_id}, not {ledger.ledger_id}")
        if not (saved.contains_head(ledger.head) or ledger.contains_head(saved_head)):
            raise LedgerError("backup and ledger grew apart: each lacks charges of the other")
        charges = [str(row) for row in ledger.charges() if row.position > saved_head.count]
    recorded_head = None if record is None else record.ledger_head
    if recorded_head is not None:
        if recorded_head.count <= saved_head.count and not saved.contains_head(recorded_head):
            raise LedgerError("the participation record to replace belongs to another ledger")
        number = saved_head.count + len(charges) + 1
        if number <= recorded_head.count:
            charges.append(f"charges {number} to {recorded_head.count}, which only the record has")
    return charges


def _put(
    source: Ledger | ParticipationRecord,
    path: Path,
    target: Ledger | ParticipationRecord | None,
    without: str | None = None,
) -> None:
    if target is None:
        source.database.copy(path, without=without)
    else:
        target.database.replace(source.database, without=without)
