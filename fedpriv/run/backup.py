"""Copies of a ledger and of the participation record beside it, and their way back."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedpriv.errors import LedgerError
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import SERIES_KEYS, Head, ParticipationRecord, record_path
from fedpriv.support.disk import writing


@dataclass(frozen=True)
class _Pair:
    """An intact ledger, and the participation record beside it, if there is one."""

    ledger: Ledger
    record: ParticipationRecord | None

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["_Pair"]:
        with ExitStack() as stack:
            ledger, record = stack.enter_context(Ledger.open(path)), None
            if record_path(path).exists():
                record = stack.enter_context(ParticipationRecord.open(record_path(path)))
            ledger.verify(record)
            yield cls(ledger, record)


def back_up(ledger: Path, to: Path) -> Head:
    """Copy a ledger, and the record beside it, to where there is nothing; the head of the copy.

    Both may be in use: every charge of the copy has its cohort, and the record knows no newer one.
    Of a series of rounds that is under way the copy has no key: what goes on from it never draws
    the noise of the original once more.
    """
    for path in (to, record_path(to)):
        if path.exists():
            raise LedgerError(f"{path} exists already; it is not overwritten")
    with writing(to.parent):
        to.parent.mkdir(parents=True, exist_ok=True)
    with _Pair.open(ledger) as pair, ExitStack() as stack:
        if pair.record is not None:
            # No cohort is recorded meanwhile; one that is recorded may still be charged.
            other = stack.enter_context(ParticipationRecord.open(record_path(ledger)))
            stack.enter_context(other.database.transaction())
            pair.record.database.copy(record_path(to), without=SERIES_KEYS)
        pair.ledger.database.copy(to)  # last: a ledger without its record would be half a backup
    with Ledger.open(to) as copy:
        return copy.head


def restore(backup: Path, path: Path, *, older: bool) -> tuple[Head, list[str]]:
    """Put a backup in the place of a ledger and its record; its head, and what charges it lacks.

    LedgerError, and nothing is changed, if it is of another ledger, and unless `older` if it lacks
    charges that are there. A process that has the ledger open can charge it no more. A series of
    rounds that was under way is over, since more of it may have been released than the backup
    knows, and correlated noise must not be drawn twice: the run charges a new one.
    """
    with _Pair.open(backup) as kept, ExitStack() as stack:
        ledger = record = None
        if path.exists():
            ledger = stack.enter_context(Ledger.open(path))
            stack.enter_context(ledger.database.transaction())
        if record_path(path).exists():
            record = stack.enter_context(ParticipationRecord.open(record_path(path)))
            stack.enter_context(record.database.transaction())
        missing = _missing(kept.ledger, ledger, record)
        if missing and not older:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise LedgerError(
                f"{backup} is older than what it would replace: it lacks {missing[0]}{more}; "
                "--older restores it all the same"
            )
        if missing and record is not None and kept.record is None:
            raise LedgerError(
                f"{record_path(backup)} is missing; {record_path(path)} knows what {backup} lacks, "
                "so both must be restored"
            )
        _put(kept.ledger, path, ledger)
        if kept.record is not None:
            _put(kept.record, record_path(path), record, without=SERIES_KEYS)
        return kept.ledger.head, missing


def _missing(kept: Ledger, ledger: Ledger | None, record: ParticipationRecord | None) -> list[str]:
    """What charges a backup lacks that the ledger to replace, or its record, has seen."""
    missing, last = list[str](), kept.head
    if ledger is not None:
        if ledger.ledger_id != kept.ledger_id:
            raise LedgerError(f"the backup is of ledger {kept.ledger_id}, not {ledger.ledger_id}")
        if not (kept.contains_head(ledger.head) or ledger.contains_head(last)):
            raise LedgerError("backup and ledger grew apart: each lacks charges of the other")
        missing = [str(row) for row in ledger.charges() if row.position > last.count]
    seen = None if record is None else record.ledger_head
    if seen is not None:
        if seen.count <= last.count and not kept.contains_head(seen):
            raise LedgerError("the participation record to replace belongs to another ledger")
        first = last.count + len(missing) + 1
        if first <= seen.count:
            missing.append(f"charges {first} to {seen.count}, of which only the record knows")
    return missing


def _put(
    kept: Ledger | ParticipationRecord,
    path: Path,
    old: Ledger | ParticipationRecord | None,
    without: str | None = None,
) -> None:
    if old is None:
        kept.database.copy(path, without=without)
    else:
        old.database.replace(kept.database, without=without)
