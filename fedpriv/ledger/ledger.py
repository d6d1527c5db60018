"""The privacy ledger: what was spent on one population, charged before it is released."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self, TextIO

from fedpriv.errors import BudgetExceededError, LedgerError
from fedpriv.ledger import chain as ledger_chain
from fedpriv.ledger.budget import Headroom, PrivacyBudget, repeated
from fedpriv.ledger.database import Database
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.ledger.rows import (
    Charge,
    ChargedRow,
    Head,
    ProposedCharge,
    confirm,
    first_rows,
    follow,
    query_columns,
    sampling_columns,
)
from fedpriv.ledger.schema import LEDGER

__all__ = ["Charge", "ChargedRow", "Head", "Ledger", "ProposedCharge"]


class Ledger:
    """An append-only SQLite file of every sampling event of one population, over all runs.

    Guarantees:
        * a charge is durable (fsync) when `charge` returns, and never refunded;
        * processes and threads that charge one file never pass a budget together;
        * no row leaves this class that does not fit the hash chain.

    Use `create`, `open` or `open_or_create`, and close it or use it as a context manager.

    Attributes:
        ledger_id: 32 random hexadecimal digits.
        population_name: name of the population.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.RLock()
        try:
            columns = ledger_chain.ledger_columns(database.read)
        except LedgerError:
            database.close()
            raise
        self.ledger_id = columns["ledger_id"]
        self.population_name = columns["population"]
        self._known = ledger_chain.genesis(database.read)  # what follows counts the rows up to it
        self._rounds: dict[RoundEvent, int] = {}
        self._headroom: Headroom | None = None

    @classmethod
    def create(cls, path: Path, population: str) -> Self:
        """Create an empty ledger for a population.

        Raises:
            LedgerError: there is a file already, or it cannot be written.
        """
        return cls(Database.create(path, LEDGER, first_rows(population)))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing ledger.

        Raises:
            LedgerError: there is none, or it is of a version that this code does not read.
        """
        return cls(Database(path, LEDGER))

    @classmethod
    def open_or_create(cls, path: Path, population: str) -> Self:
        """Open the ledger of a population, or create it if there is no file.

        Raises:
            LedgerError: the ledger is of another population, or cannot be opened or created.
        """
        ledger = cls(Database.open_or_create(path, LEDGER, first_rows(population)))
        if ledger.population_name != population:
            ledger.close()
            raise LedgerError(
                f"ledger {path} is of population {ledger.population_name!r}, not {population!r}"
            )
        return ledger

    @property
    def head(self) -> Head:
        """How many charges there are, and the digest of the last."""
        return ledger_chain.stored_head(self._database.read)

    def charge(self, charge: ProposedCharge, budget: PrivacyBudget | None = None) -> Charge:
        """Write down a charge, if the budget allows it, and return the receipt to release it.

        Args:
            charge: what is about to be released.
            budget: what all charges of this ledger together may cost; None: no limit.

        Raises:
            BudgetExceededError: the budget would be passed.
            LedgerError: this attempt was charged before, or the ledger cannot be believed or
                written.
            In each case, nothing was charged.
        """
        with self._lock, self._database.transaction():
            self._catch_up()
            self._refuse_repetition(charge)
            if budget is not None:
                self._refuse_overspending(charge, budget)
            row = follow(self._known, charge)
            self._database.insert("sampling_events", sampling_columns(row))
            for query in query_columns(row):
                self._database.insert("sum_query_events", query)
            self._database.write(
                "UPDATE head SET count = :position, hash = :hash",
                {"position": row.position, "hash": row.hash},
            )
        return Charge(row.run, row.round, row.attempt, row.event, row.hash)

    def admits(self, event: RoundEvent, budget: PrivacyBudget) -> bool:
        """Whether `charge` would now find that one more event of count 1 is within the budget.

        Raises:
            LedgerError: names the first place at which what is new cannot be believed.
        """
        with self._lock:
            self._catch_up()
            return self._headroom_for(event, budget).left > 0

    def charges(self, run: str | None = None) -> Iterator[ChargedRow]:
        """All charges, or those of one run, in the order in which they were made.

        Raises:
            LedgerError: names the first place at which the ledger cannot be believed.
        """
        return (row for row in self._walk(self.head) if run is None or row.run == run)

    def events(self, run: str | None = None) -> list[RoundEvent]:
        """The event of each charge of `charges`, in order."""
        return [row.event for row in self.charges(run)]

    def spent(self) -> list[RoundEvent]:
        """All events so far with equal ones merged, in order of first use.

        Reads only what is new since this ledger was last asked or charged.

        Raises:
            LedgerError: names the first place at which what is new cannot be believed.
        """
        with self._lock:
            self._catch_up()
            return list(repeated(self._rounds))

    def runs(self) -> list[str]:
        """Names of the runs, in the order of their first charge."""
        sql = "SELECT run FROM sampling_events GROUP BY run ORDER BY min(id)"
        return [row["run"] for row in self._database.read(sql)]

    def next_attempt(self, run: str, round_number: int) -> int:
        """The first attempt at a round that no charge, and none after it, was made for."""
        sql = "SELECT max(attempt) + 1 AS next FROM sampling_events WHERE run = ? AND round = ?"
        return self._database.read(sql, (run, round_number))[0]["next"] or 0

    def contains_head(self, head: Head) -> bool:
        """Whether this ledger once had this head: it grew from there, and was not set back."""
        return ledger_chain.contains(self._database.read, head)

    def verify(
        self, participation: ParticipationRecord | None = None, head: Head | None = None
    ) -> None:
        """Check every row, and that the file still only grows.

        Without `head`, a ledger that was set back or rewritten from some row to its end passes.

        Args:
            participation: if given, every cohort committed to must be in it.
            head: if given, one that this ledger once had, kept elsewhere.

        Raises:
            LedgerError: names the first row that is missing, changed, out of order, added
                outside the chain or without its cohort; or the head or trigger that is wrong.
        """
        for row in self.charges():
            if participation is not None:
                confirm(row, participation)
        ledger_chain.refuse_strays(self._database.read)
        if altered := self._database.altered_schema():
            raise LedgerError(f"tables or triggers were altered: {', '.join(altered)}")
        if head is not None and not self.contains_head(head):
            raise LedgerError(
                f"the ledger never had the head of {head.count} charges with hash {head.hash}: "
                "it is another ledger, or was set back or rewritten"
            )

    def export(self, stream: TextIO) -> None:
        """Write the ledger as JSON lines; participation is never in it.

        The first line names the ledger and its head, each other line is one sampling event with
        its `sum_queries`, and with `schedule` and `strategy`, JSON as text, if it has them; a sum
        query has its `granularity` likewise. The hash of any line or sum query is SHA-256 of the
        object without `hash`, its sum queries replaced by their hashes, as JSON with sorted keys
        and no spaces; the first `previous_hash` is that of the first line without `head` and
        `format`.

        Raises:
            LedgerError: names the first place at which the ledger cannot be believed.
        """
        stream.writelines(f"{line}\n" for line in ledger_chain.exported(self._database.read))

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _walk(self, end: Head) -> Iterator[ChargedRow]:
        read = self._database.read
        return ledger_chain.walk(read, ledger_chain.genesis(read), end)

    def _catch_up(self) -> None:
        for row in ledger_chain.walk(self._database.read, self._known, self.head):
            self._rounds[row.event] = self._rounds.get(row.event, 0) + 1
            self._headroom = self._headroom and self._headroom.after(row.event)
            self._known = row.head

    def _headroom_for(self, event: RoundEvent, budget: PrivacyBudget) -> Headroom:
        """What is known to fit, or else is found to fit now, for an event of count 1."""
        known, most = self._headroom, 1
        if known is not None and known.budget == budget and known.covers(event):
            if known.left:
                return known
            most = max(1, 2 * known.found)
        self._headroom = Headroom.find(self._rounds, event, budget, most)
        return self._headroom

    def _refuse_repetition(self, charge: ProposedCharge) -> None:
        sql = "SELECT 1 FROM sampling_events WHERE run = ? AND round = ? AND attempt = ?"
        if self._database.read(sql, (charge.run, charge.round, charge.attempt)):
            raise LedgerError(
                f"run {charge.run}, round {charge.round}, attempt {charge.attempt} was charged "
                f"before; the next attempt is {self.next_attempt(charge.run, charge.round)}"
            )

    def _refuse_overspending(self, charge: ProposedCharge, budget: PrivacyBudget) -> None:
        headroom = self._headroom_for(charge.event, budget)
        if not headroom.left:
            raise BudgetExceededError(
                f"run {charge.run}, round {charge.round}, attempt {charge.attempt} would make "
                f"ε = {headroom.epsilon} at δ = {budget.delta}, which passes the budget of "
                f"ε = {budget.epsilon}; nothing was charged"
            )
