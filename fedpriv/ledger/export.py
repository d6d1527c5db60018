"""A ledger as `Ledger.export` writes it, read from lines that anybody may have written.

Digests find every change that leaves the head as it was. Whoever writes the whole export can make
the head fit too, so what makes an export believable is a head that was kept elsewhere.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from fedpriv.errors import LedgerError
from fedpriv.ledger.chain import EXPORT_FORMAT, checked, header_line, refuse_other_end, row_line
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.ledger.rows import ChargedRow, Head, ProposedCharge, confirm, digest

MAX_LINE = 2**24
"""Most characters of a line: a sampling event with many sum queries or a long strategy."""

_SQLITE = b"SQLite format 3\0"
_LONGEST_REASON = 400  # a sentence about hostile input must not be as long as the input

_NAMES = ("ledger_id", "population", "created_at")
_HEADER = {"format": str, **dict.fromkeys(_NAMES, str), "head": dict}
_HEAD = {"count": int, "hash": str}
_TEXTS = ("run", "policy", "relation", "randomness", "cohort_commitment", "charged_at")
_SAMPLING = {
    **dict.fromkeys(("id", "round", "attempt", "population"), int),
    **dict.fromkeys((*_TEXTS, "schedule", "strategy", "previous_hash", "hash"), str),
    "sampling_probability": float,
    "sum_queries": list,
}
_QUERY = {
    **dict.fromkeys(("sampling_event", "position"), int),
    **dict.fromkeys(("clipping_norm", "noise_stddev", "granularity"), float),
    **dict.fromkeys(("group_name", "hash"), str),
}
_OPTIONAL = {"schedule", "strategy", "granularity"}


@dataclass(frozen=True)
class ExportedLedger:
    """A ledger that was read from its export and believed.

    Attributes:
        ledger_id: 32 hexadecimal digits.
        population: name of the population.
        created_at: when, as the ledger says.
        head: the head of the chain.
        rows: all sampling events, in order.
    """

    ledger_id: str
    population: str
    created_at: str
    head: Head
    rows: tuple[ChargedRow, ...]

    @classmethod
    def read(cls, lines: Iterable[str]) -> Self:
        """Read an export; total.

        Guarantees:
            * every line is, character by character, what `Ledger.export` writes of what is
              returned;
            * every digest is right, the chain leads from what names the ledger to the head in the
              first line, and nothing follows;
            * every charge is one that a ledger takes, and no attempt is charged twice.

        Args:
            lines: each with or without a line feed at its end.

        Raises:
            LedgerError: names the first line that is wrong or missing.
        """
        numbered = enumerate(lines, 1)
        _, first = next(numbered, (1, ""))
        with _naming(1):
            named, head = _header(first.removesuffix("\n"))
            last = Head(0, digest(named))
            if head.count == 0:
                refuse_other_end(last, head)
        rows: list[ChargedRow] = []
        attempts = set[tuple[str, int, int]]()
        for number, line in numbered:
            with _naming(number):
                row = _row(last, head, line.removesuffix("\n"))
                attempts.add((row.run, row.round, row.attempt))
                if len(attempts) == len(rows):
                    raise LedgerError(f"{row} was charged before")
            rows.append(row)
            last = row.head
        with _naming(len(rows) + 2):
            refuse_other_end(last, head)
        return cls(**named, head=head, rows=tuple(rows))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an export from a file.

        Raises:
            LedgerError: the file cannot be read, or is no export that `read` believes.
        """
        try:
            # What is not ASCII is in no export; escaped, it reaches the check of its line.
            with path.open(encoding="ascii", errors="surrogateescape") as stream:
                return cls.read(iter(partial(stream.readline, MAX_LINE + 2), ""))
        except OSError as error:
            raise LedgerError(f"{path} cannot be read: {error.strerror}") from error
        except LedgerError as error:
            raise LedgerError(f"{path} is no ledger that can be believed: {error}") from error

    @property
    def genesis(self) -> Head:
        """The head before the first charge: the digest of what names the ledger."""
        return Head(0, digest({name: getattr(self, name) for name in _NAMES}))

    def contains(self, head: Head) -> bool:
        """Whether this ledger has, or once had, this head: it grew from there."""
        if head.count == 0:
            return head == self.genesis
        return 1 <= head.count <= len(self.rows) and self.rows[head.count - 1].head == head

    def verify(
        self, participation: ParticipationRecord | None = None, head: Head | None = None
    ) -> None:
        """Check what `read` could not: who took part, and a head that was kept elsewhere.

        Args:
            participation: if given, every cohort committed to must be in it.
            head: if given, one that this ledger once had.

        Raises:
            LedgerError: names the first row without its cohort, or the head that is not there.
        """
        if participation is not None:
            for row in self.rows:
                confirm(row, participation)
        if head is not None and not self.contains(head):
            raise LedgerError(
                f"the ledger never had the head of {head.count} charges with hash {head.hash}: "
                "it is another ledger, or was set back or rewritten"
            )


def is_export(path: Path) -> bool:
    """Whether a file is to be read as an export; others are SQLite files, or empty or absent."""
    try:
        with path.open("rb") as stream:
            return stream.read(len(_SQLITE)) not in (_SQLITE, b"")
    except OSError:
        return False


@contextmanager
def _naming(number: int) -> Iterator[None]:
    """Raise what is wrong with a line as a LedgerError that names it."""
    try:
        yield
    except (LedgerError, TypeError, ValueError, RecursionError) as error:
        reason = str(error)
        if len(reason) > _LONGEST_REASON:
            reason = reason[:_LONGEST_REASON] + "…"
        raise LedgerError(f"line {number} of the export: {reason}") from error


def _header(line: str) -> tuple[dict[str, str], Head]:
    """What names the ledger, and the head that the export must lead to."""
    fields = _fields(_value(line), _HEADER)
    if fields["format"] != EXPORT_FORMAT:
        raise LedgerError(f"the format is {fields['format']!r}; it must be {EXPORT_FORMAT!r}")
    head = Head(**_fields(fields["head"], _HEAD))
    named = {name: fields[name] for name in _NAMES}
    for name, text, digits in (("ledger_id", named["ledger_id"], 32), ("hash", head.hash, 64)):
        if not re.fullmatch(f"[0-9a-f]{{{digits}}}", text):
            raise LedgerError(f"{name} is not of {digits} lower-case hexadecimal digits")
    if not named["population"]:
        raise LedgerError("the population has no name")
    _refuse_other_text(line, header_line(named, head))
    return named, head


def _row(last: Head, end: Head, line: str) -> ChargedRow:
    """The sampling event of a line that follows `last`, in a ledger with the head `end`."""
    if last.count == end.count:
        raise LedgerError(f"there is more than the {end.count} sampling events of the first line")
    cells = _fields(_value(line), _SAMPLING)
    queries = [_fields(query, _QUERY) for query in cells.pop("sum_queries")]
    row = checked(last, cells, queries, lambda _: False)
    # Its constructor refuses what no ledger would have charged.
    ProposedCharge(
        row.run, row.round, row.attempt, row.randomness, row.event, row.cohort_commitment
    )
    _refuse_other_text(line, row_line(row))
    if row.position == end.count:
        refuse_other_end(row.head, end)
    return row


def _value(line: str) -> object:
    if len(line) > MAX_LINE:
        raise LedgerError(f"it has more than {MAX_LINE} characters")
    try:
        value: object = json.loads(line)
    except RecursionError as error:
        raise LedgerError("it is nested too deeply") from error
    except ValueError as error:
        raise LedgerError(f"it is no JSON: {error}") from error
    return value


def _fields(value: object, kinds: Mapping[str, type]) -> dict[str, Any]:
    """The fields of a JSON object, each of its kind."""
    if not isinstance(value, dict):
        raise LedgerError("there is no JSON object where one must be")
    needed = kinds.keys() - _OPTIONAL
    odd = sorted((needed - value.keys()) | (value.keys() - kinds.keys()))
    if odd:
        raise LedgerError(f"key {odd[0]!r} is {'absent' if odd[0] in needed else 'unknown'}")
    for name, field in value.items():
        _check(name, field, kinds[name])
    return value


def _check(name: str, field: object, kind: type) -> None:
    if type(field) is not kind:  # true is no integer
        raise LedgerError(f"{name} is of type {type(field).__name__}, not {kind.__name__}")
    if isinstance(field, int) and not 0 <= field < 2**63:
        raise LedgerError(f"{name} is {field}; it must be from 0 to 2^63 - 1")
    # Messages show these texts; names of groups may be any.
    if isinstance(field, str) and name != "group_name" and not field.isprintable():
        raise LedgerError(f"{name} is {field!r}; it must be printable")


def _refuse_other_text(line: str, written: str) -> None:
    if line != written:
        raise LedgerError("it says the same as a line of an export, but is not written like one")
