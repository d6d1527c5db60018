"""A ledger as text, as `Ledger.export` writes it, read from a source that need not be honest.

Digests reveal every change that leaves the head as it was. A forger who writes the whole export can
make the head fit too, so what makes an export credible is a head kept elsewhere.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

from fedpriv.errors import LedgerError
from fedpriv.ledger.ledger import ChargedRow, Genesis, Head, check_charges, never_had, next_row
from fedpriv.ledger.participation import ParticipationRecord

MAX_LINE = 2**24  # characters: a charge with many sum queries or a long strategy
_LONGEST_REASON = 400  # a sentence about hostile input must not be as long as the input


@dataclass(frozen=True)
class ExportedLedger:
    """A ledger that was read from its export and verified: all charges, in order."""

    genesis: Genesis
    rows: tuple[ChargedRow, ...]

    @classmethod
    def read(cls, lines: Iterable[str]) -> Self:
        """Read an export, whatever it contains; a LedgerError names the first wrong line.

        Guarantees:
            * every line is, character by character, what `Ledger.export` writes for what is
              returned, with or without a line feed at its end;
            * every digest is right, the chain leads to the head in the last line, and nothing is
              missing or follows;
            * every charge is one that a ledger accepts, and no attempt is charged twice.
        """
        rows, attempts, ended = list[ChargedRow](), set[tuple[str, int, int]](), False
        numbered = enumerate(lines, 1)
        number, line = next(numbered, (1, ""))
        try:
            genesis = Genesis.parse(_checked(line))
            last = genesis.head
            for number, line in numbered:  # noqa: B007 - errors name it
                text = _checked(line)
                if ended:
                    raise LedgerError("there is more after the head")
                if text == last.line:
                    ended = True
                elif text.startswith('{"head"'):
                    raise LedgerError(f"the head is not {last.count} charges, hash {last.hash}")
                else:
                    row = next_row(last, text)
                    attempts.add((row.run, row.round, row.attempt))
                    if len(attempts) == len(rows):
                        raise LedgerError(f"{row} was charged before")
                    rows.append(row)
                    last = row.head
            if not ended:
                number += 1
                raise LedgerError(f"charge {last.count + 1} is missing, or the head")
        except LedgerError as error:
            reason = str(error)
            if len(reason) > _LONGEST_REASON:
                reason = f"{reason[:_LONGEST_REASON]}…"
            raise LedgerError(f"line {number} of the export: {reason}") from error
        return cls(genesis, tuple(rows))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an export from a file."""
        try:
            # An export is ASCII; other bytes are escaped, and fail the check of their line.
            with path.open(encoding="ascii", errors="surrogateescape") as stream:
                return cls.read(iter(partial(stream.readline, MAX_LINE + 2), ""))
        except OSError as error:
            raise LedgerError(f"{path} cannot be read: {error.strerror}") from error
        except LedgerError as error:
            raise LedgerError(f"{path} is not a valid export of a ledger: {error}") from error

    @property
    def ledger_id(self) -> str:
        """32 hexadecimal digits."""
        return self.genesis.ledger_id

    @property
    def population(self) -> str:
        """Name of the population."""
        return self.genesis.population

    @property
    def head(self) -> Head:
        """The head of the chain."""
        return self.rows[-1].head if self.rows else self.genesis.head

    def contains(self, head: Head) -> bool:
        """Whether this ledger has, or once had, this head: it grew from there."""
        if head.count == 0:
            return head == self.genesis.head
        return 1 <= head.count <= len(self.rows) and self.rows[head.count - 1].head == head

    def verify(
        self, participation: ParticipationRecord | None = None, head: Head | None = None
    ) -> None:
        """Check what `read` could not: every cohort, and a head that was kept elsewhere."""
        check_charges(self.rows, participation)
        if head is not None and not self.contains(head):
            raise never_had(head)


def is_export(path: Path) -> bool:
    """Whether to read a file as an export; others are SQLite files, or empty or absent."""
    try:
        with path.open("rb") as stream:
            return stream.read(15) not in (b"SQLite format 3", b"")
    except OSError:
        return False


def _checked(line: str) -> str:
    """A line without its line feed."""
    text = line.removesuffix("\n")
    if len(text) > MAX_LINE:
        raise LedgerError(f"it has more than {MAX_LINE} characters")
    return text
