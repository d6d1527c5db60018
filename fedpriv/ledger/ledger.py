"""The privacy ledger: every release about one population is charged before it is made.

A ledger is a chain of texts in a SQLite file. The first text identifies the ledger; each of the
others is a charge, as JSON, and contains the SHA-256 digest of the text before it. The digest of
the last text, the head, therefore fixes them all. Anyone with write access to the file can also
write a new chain, so a ledger or its export is credible only if it matches a head that was stored
elsewhere: in a checkpoint, a report or a client.
"""

import hashlib
import json
import re
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime
from functools import cached_property, partial
from operator import index
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np
import numpy.typing as npt

from fedpriv.errors import BudgetExceededError, FedprivError, InvalidValueError, LedgerError
from fedpriv.ledger.database import Database, FileFormat, InFile, insertion
from fedpriv.ledger.events import (
    NeighbouringRelation,
    PrivacyBudget,
    Projection,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SecureSum,
    Selection,
    SumQueryEvent,
    Trial,
    Unit,
    repeated,
)
from fedpriv.ledger.participation import Head, ParticipationRecord
from fedpriv.support.checks import check_types, hold_numbers, named_value, require

_FORMAT = "fedpriv ledger 1"  # part of the first text of a chain
_ROWS_AT_ONCE = 1000
MAX_LINE = 2**24  # characters: a charge with many sum queries or a long strategy
_LONGEST_REASON = 400  # characters: an error must not be as long as the input it describes
# The exceptions that reading a value from hostile JSON may raise.
_MALFORMED = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)

# SQLite itself enforces that a ledger only grows, for every program that writes to it. The insert
# triggers also stop INSERT OR REPLACE, which deletes without firing delete triggers.
_SCHEMA = """
CREATE TABLE head (
    singleton INTEGER PRIMARY KEY CHECK (singleton = 1), count INTEGER NOT NULL, hash TEXT NOT NULL
);
CREATE TABLE chain (
    position INTEGER PRIMARY KEY, run TEXT, round INTEGER, attempt INTEGER,
    text TEXT NOT NULL, hash TEXT NOT NULL, UNIQUE (run, round, attempt)
);
CREATE TRIGGER chain_no_update BEFORE UPDATE ON chain BEGIN SELECT RAISE(ABORT, 'only grows'); END;
CREATE TRIGGER chain_no_delete BEFORE DELETE ON chain BEGIN SELECT RAISE(ABORT, 'only grows'); END;
CREATE TRIGGER head_no_delete BEFORE DELETE ON head BEGIN SELECT RAISE(ABORT, 'has a head'); END;
CREATE TRIGGER head_once BEFORE INSERT ON head WHEN EXISTS (SELECT 1 FROM head)
BEGIN SELECT RAISE(ABORT, 'a ledger has one head'); END;
CREATE TRIGGER chain_follows_the_head BEFORE INSERT ON chain
WHEN NEW.position IS NOT (SELECT coalesce(max(count) + 1, 0) FROM head)
    OR EXISTS (SELECT 1 FROM chain WHERE position = NEW.position)
    OR EXISTS (SELECT 1 FROM chain WHERE (run, round, attempt) = (NEW.run, NEW.round, NEW.attempt))
BEGIN SELECT RAISE(ABORT, 'a charge must follow the head and be new'); END;
CREATE TRIGGER head_moves_by_one BEFORE UPDATE ON head
WHEN NEW.count IS NOT OLD.count + 1
    OR NEW.hash IS NOT (SELECT hash FROM chain WHERE position = NEW.count)
BEGIN SELECT RAISE(ABORT, 'the head must move to the next charge'); END;
"""
LEDGER = FileFormat("ledger", 0x66707276, _SCHEMA, 0o666)


@dataclass(frozen=True)
class Genesis:
    """The first text of a chain, which identifies the ledger."""

    ledger_id: str  # 32 random lower-case hexadecimal digits
    population: str  # name of the population, printable and not empty
    created_at: str  # the day, UTC, ISO 8601: finer times would reveal how long rounds take

    def __post_init__(self) -> None:
        _check_name("the population's name", self.population)
        _check_digits("ledger_id", self.ledger_id, 32)
        _check_name("created_at", self.created_at)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the first text of a ledger; LedgerError if it is not one."""
        try:
            fields = json.loads(text)
            genesis = cls(fields["ledger_id"], fields["population"], fields["created_at"])
            require(genesis.text == text, f"it is not written in the format {_FORMAT!r}")
        except _MALFORMED as error:
            raise LedgerError(f"it is not the first line of a ledger: {_reason(error)}") from error
        return genesis

    @property
    def text(self) -> str:
        """The text in the chain, as JSON."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @property
    def head(self) -> Head:
        """The head of the ledger before its first charge."""
        return Head(0, digest(self.text))


@dataclass(frozen=True)
class ProposedCharge:
    """A request to charge one attempt at a round before it releases anything."""

    run: str  # name of the run, printable and not empty
    round: int  # from 0
    attempt: int  # at the round, from 0
    randomness: Randomness  # source of the cohort and the noise
    event: RoundEvent  # its count is 1
    cohort_commitment: str  # 64 hexadecimal digits, from `ParticipationRecord.record`
    # For an event of several rounds: the index of this round, from 0, and the position of the
    # charge that paid for all. The first round pays, so its `series` is None.
    part: int = 0
    series: int | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        _check_name("run", self.run)
        check_types(event=(self.event, RoundEvent))
        randomness = named_value(Randomness, "randomness", self.randomness)
        object.__setattr__(self, "randomness", randomness)
        numbers = f"round {self.round}, attempt {self.attempt}"
        in_range = 0 <= self.round < 2**63 and 0 <= self.attempt < 2**63
        require(in_range, f"{numbers}: both must be from 0 to 2^63 - 1")
        count = self.event.count
        require(count == 1, f"the event has count {count}; each round is charged by itself")
        _check_digits("cohort_commitment", self.cohort_commitment, 64)
        schedule = self.event.sampling.schedule
        parts = 1 if schedule is None else schedule.rounds
        limit = f"it must be a whole number from 0 to {parts - 1}"
        require(0 <= self.part < parts, f"part {self.part}; {limit}")
        names_charge = self.series is not None and self.series >= 1
        limit = "parts after the first, and only those, must name the charge that paid"
        series_fits = self.series is None if self.part == 0 else names_charge
        require(series_fits, f"part {self.part} has series {self.series}; {limit}")


@dataclass(frozen=True)
class ChargedRow:
    """A charge in the chain of a ledger: the proposed charge, its day and its position."""

    position: int  # from 1
    run: str
    round: int
    attempt: int
    randomness: Randomness
    event: RoundEvent
    cohort_commitment: str
    part: int  # as in `ProposedCharge`
    series: int | None
    # UTC, ISO 8601. A finer time would reveal how long rounds took, which depends on the cohort.
    day: str
    previous_hash: str  # digest of the previous text

    @cached_property
    def text(self) -> str:
        """The text in the chain: JSON that is exact for doubles.

        A part that an earlier charge paid for names that charge and does not repeat the event.
        """
        event = _event_fields(self.event)
        if self.series is not None:
            event = {"series": int(self.series), "part": int(self.part)}
        return json.dumps(
            {
                "position": int(self.position),
                "run": self.run,
                "round": int(self.round),
                "attempt": int(self.attempt),
                **event,
                "randomness": self.randomness,
                "cohort_commitment": self.cohort_commitment,
                "day": self.day,
                "previous_hash": self.previous_hash,
            }
        )

    @property
    def pays(self) -> bool:
        """True if this row charges its event, False if an earlier round of the series did."""
        return self.series is None

    @cached_property
    def hash(self) -> str:
        """Digest of the text."""
        return digest(self.text)

    @property
    def head(self) -> Head:
        """The head of the ledger after this charge."""
        return Head(self.position, self.hash)

    def __str__(self) -> str:
        attempt = f"run {self.run}, round {self.round}, attempt {self.attempt}"
        return f"charge {self.position} ({attempt})"


def _event_fields(event: RoundEvent) -> dict[str, object]:
    sampling, schedule = event.sampling, event.sampling.schedule
    k = sampling.examples_per_user
    return {
        "policy": sampling.policy,
        "sampling_probability": float(sampling.sampling_probability),
        "population": int(sampling.population),
        "relation": sampling.relation,
        **({} if sampling.unit is Unit.USER else {"unit": sampling.unit}),
        **({} if k is None else {"examples_per_user": int(k)}),
        **({"canaries": int(sampling.canaries)} if sampling.canaries else {}),
        **({"projection": asdict(sampling.projection)} if sampling.projection else {}),
        "schedule": schedule and {name: int(n) for name, n in asdict(schedule).items()},
        "strategy": [float(c) for c in event.strategy],
        **({} if event.selection is None else {"selection": asdict(event.selection)}),
        **({} if event.secure_sum is None else {"secure_sum": asdict(event.secure_sum)}),
        "sum_queries": [
            {
                "group": str(query.group),
                "clipping_norm": float(query.clipping_norm),
                "noise_stddev": float(query.noise_stddev) + 0.0,  # −0.0 becomes 0.0
                "granularity": query.granularity and float(query.granularity),
            }
            for query in event.queries
        ],
    }


def event_text(event: RoundEvent) -> str:
    """Return an event of count 1 as text, in the form of a charge: JSON, exact for doubles."""
    require(event.count == 1, f"the event has count {event.count}; it must be 1")
    return json.dumps(_event_fields(event))


def event_from(text: str) -> RoundEvent:
    """Parse the output of `event_text`; InvalidValueError for every other text."""
    try:
        event = _event(json.loads(text))
        require(event_text(event) == text, "it is not in the exact form that a ledger writes")
    except _MALFORMED as error:
        raise InvalidValueError(
            f"the event is not one that this fedpriv knows: {_reason(error)}"
        ) from error
    return event


def paid_events(rows: Iterable[ChargedRow]) -> list[RoundEvent]:
    """Return the charged events, one for each series of rounds."""
    return [row.event for row in rows if row.pays]


@dataclass(frozen=True)
class OpenSeries:
    """A series of rounds that was paid for and is not finished."""

    charge: ChargedRow  # of its first round, which paid for all rounds
    part: int  # index of its next round


class SeriesBook:
    """The unfinished series of rounds in a chain; `follow` adds the next row.

    Guarantees:
        * a part belongs to the run that paid, follows the part before it and occurs once;
        * so an event of n rounds is released at most n times.
    """

    def __init__(self, rows: Iterable[ChargedRow] = ()) -> None:
        self._open: dict[int, OpenSeries] = {}  # by the position of the charge
        self._last: dict[str, int] = {}  # position of each run's last series
        for row in rows:
            self.follow(row)

    def last_of(self, run: str) -> OpenSeries | None:
        """Return the last series that a run paid for, or None if all its rounds were charged."""
        return self._open.get(self._last.get(run, 0))

    def event_of(self, series: object) -> RoundEvent:
        """Return the event that the charge at a position paid for, if rounds of it remain."""
        current = self._open.get(series) if isinstance(series, int) else None
        if current is None:
            raise InvalidValueError(f"charge {series} paid for no round that remains")
        return current.charge.event

    def check(self, row: ChargedRow) -> None:
        """Raise LedgerError unless the row pays or is the next part of a series of its run."""
        if row.series is None:
            return
        current = self._open.get(row.series)
        is_next = current is not None and (current.part, current.charge.run) == (row.part, row.run)
        if current is None or not is_next or current.charge.event != row.event:
            raise LedgerError(f"{row} is not the next round of the series of charge {row.series}")

    def follow(self, row: ChargedRow) -> None:
        """Add the next row of the chain; LedgerError if it is a part but not the next one."""
        self.check(row)
        payment = row if row.series is None else self._open[row.series].charge
        schedule = row.event.sampling.schedule
        if schedule is None or schedule.rounds == row.part + 1:
            self._open.pop(payment.position, None)
        else:
            self._open[payment.position] = OpenSeries(payment, row.part + 1)
            self._last[row.run] = payment.position


@dataclass(frozen=True)
class Charge:
    """Receipt for one charge. It and its copies allow one release, and it cannot be pickled."""

    run: str
    round: int
    attempt: int
    event: RoundEvent
    hash: str  # digest of the charge in the ledger
    part: int = 0  # index of the round in its event, from 0
    payment: int = 0  # position of the charge that paid for the event; this one for the first part
    _used: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def redeem(self) -> RoundEvent:
        """Return the event to release; LedgerError if the receipt was redeemed before."""
        if not self._used.acquire(blocking=False):
            raise LedgerError(
                f"the charge of run {self.run}, round {self.round}, attempt {self.attempt} was "
                "redeemed before: two releases on one charge could be averaged, to remove noise"
            )
        return self.event


class Ledger(InFile):
    """All charges of one population, over all runs, in an append-only SQLite file.

    Guarantees:
        * a charge is durable (fsync) when `charge` returns, and is never refunded;
        * processes and threads that charge one file never exceed a budget together;
        * methods that read charges raise a LedgerError that names the first charge that is missing,
          changed or out of order.
    """

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._lock = threading.RLock()
        try:
            row = self._only_row("first text", "SELECT text, hash FROM chain WHERE position = 0")
            self._genesis = Genesis.parse(str(row["text"]))
            if self._genesis.head.hash != row["hash"]:
                raise LedgerError("the text that identifies the ledger was changed")
        except LedgerError:
            database.close()
            raise
        self.ledger_id = self._genesis.ledger_id
        self.population_name = self._genesis.population
        self._counted_head = self._genesis.head  # `_counts` and `_series` include it
        # The first event of each cost stands for all of that cost: with adaptive clipping norms the
        # events of a run differ, and pricing each one would make rounds ever slower.
        self._counts = Counter[RoundEvent]()
        self._first: dict[object, RoundEvent] = {}  # by its cost
        self._series = SeriesBook()
        self._randomness = Randomness.OPERATING_SYSTEM
        self._price: tuple[object, float] = (None, 0.0)  # the last request, and its price

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing ledger."""
        return cls(Database(path, LEDGER))

    @classmethod
    def open_or_create(cls, path: Path, population: str) -> Self:
        """Open the ledger of a population, or create it if there is no file."""
        genesis = Genesis(secrets.token_hex(16), population, _now().date().isoformat())
        first_row = {"position": 0, "text": genesis.text, "hash": genesis.head.hash}
        rows = {"chain": first_row, "head": asdict(genesis.head)}
        ledger = cls(Database(path, LEDGER, rows))
        if ledger.population_name != population:
            ledger.close()
            raise LedgerError(
                f"ledger {path} is of population {ledger.population_name!r}, not {population!r}; "
                "a population that succeeds it must say so in data.succeeds or Population.succeeds"
            )
        return ledger

    @property
    def head(self) -> Head:
        """The number of charges and the digest of the last text."""
        return Head(*self._only_row("head", "SELECT count, hash FROM head"))

    def charge(self, charge: ProposedCharge, budget: PrivacyBudget | None = None) -> Charge:
        """Record a charge, if the budget allows it, and return the receipt for its release.

        Without charging anything, raises BudgetExceededError if all charges together would exceed
        the budget, and LedgerError if the attempt was charged before or the ledger is broken. A
        part of a series that was paid for costs nothing, but must be the next part.
        """
        name = f"run {charge.run}, round {charge.round}, attempt {charge.attempt}"
        with self._lock, self.database.transaction():
            self._catch_up()
            if self.has_charge(charge.run, charge.round, charge.attempt):
                next_attempt = self.next_attempt(charge.run, charge.round)
                raise LedgerError(f"{name} was charged before; the next attempt is {next_attempt}")
            event = charge.event if charge.series is None else None
            self._refuse_mixture(charge.event)
            epsilon = 0.0 if budget is None else self.epsilon(budget, event)
            if budget is not None and event is not None and not epsilon <= budget.epsilon:
                raise BudgetExceededError(
                    f"{name} would make ε = {epsilon} at δ = {budget.delta}, which exceeds the "
                    f"budget of ε = {budget.epsilon}; nothing was charged"
                )
            last = self._counted_head
            fields = vars(charge) | {"day": _now().date().isoformat(), "previous_hash": last.hash}
            row = ChargedRow(last.count + 1, **fields)
            self._series.check(row)
            _check_readable(row, self._series)
            columns = _columns(row)
            self.database.write(insertion("chain", columns), columns)
            self.database.write("UPDATE head SET count = :count, hash = :hash", asdict(row.head))
            self._price = (row.head, None, budget), epsilon
        payment = row.position if row.series is None else row.series
        return Charge(row.run, row.round, row.attempt, row.event, row.hash, row.part, payment)

    def epsilon(self, budget: PrivacyBudget, event: RoundEvent | None = None) -> float:
        """Return ε of all charges, and of one more event if given, at the budget's δ."""
        with self._lock:
            self._catch_up()
            counts, request = self._counts, (self._counted_head, event, budget)
            if event is not None:
                self._refuse_mixture(event)
                counts = counts + Counter({self._first.get(event.cost, event): event.count})
            # A round asks before it starts, when it is charged, and when it is reported.
            if self._price[0] != request:
                self._price = request, budget.price(repeated(counts), budget.delta)
            return self._price[1]

    def _refuse_mixture(self, event: RoundEvent) -> None:
        """Refuse to mix projections with other charges, since their ε are not comparable."""
        first_event = next(iter(self._counts), event)  # all charges are of one kind
        if (first_event.sampling.projection is None) != (event.sampling.projection is None):
            contents = "either projections to larger populations or other rounds"
            raise LedgerError(f"a ledger holds {contents}, not both; this one holds the other kind")

    def charges(self) -> Iterator[ChargedRow]:
        """Yield all charges, in the order in which they were made, each checked."""
        yield from self._walk(self._genesis.head, self.head, SeriesBook())

    def open_series(self, run: str) -> OpenSeries | None:
        """Return the last series of rounds that a run paid for, or None if it is finished."""
        with self._lock:
            self._catch_up()
            return self._series.last_of(run)

    def spent(self) -> list[RoundEvent]:
        """Return all charged events in order; those of equal cost count as repeats of the first."""
        with self._lock:
            self._catch_up()
            return list(repeated(self._counts))

    @property
    def randomness(self) -> Randomness:
        """The weakest source of randomness of all charges; a seeded one guarantees nothing."""
        with self._lock:
            self._catch_up()
            return self._randomness

    @property
    def first_run(self) -> str | None:
        """The run of the first charge, or None."""
        rows = self.database.read("SELECT run FROM chain WHERE position = 1")
        return str(rows[0]["run"]) if rows else None

    def has_charge(self, run: str, round_number: int, attempt: int) -> bool:
        """Return whether an attempt at a round was charged."""
        sql = "SELECT 1 FROM chain WHERE run = ? AND round = ? AND attempt = ?"
        return bool(self.database.read(sql, (run, round_number, attempt)))

    def next_attempt(self, run: str, round_number: int) -> int:
        """Return one more than the highest charged attempt at a round; 0 if there is none."""
        sql = "SELECT max(attempt) + 1 AS next FROM chain WHERE run = ? AND round = ?"
        return self.database.read(sql, (run, index(round_number)))[0]["next"] or 0

    def contains_head(self, head: Head) -> bool:
        """Return whether this ledger has or had this head, and so was not set back before it."""
        rows = self.database.read("SELECT hash FROM chain WHERE position = ?", (head.count,))
        return [row["hash"] for row in rows] == [head.hash]

    def verify(self, record: ParticipationRecord | None = None, head: Head | None = None) -> None:
        """Check all charges, all cohorts if `record` is given, and that the file only grows.

        Raises LedgerError. Without a head that was stored elsewhere, this does not detect a ledger
        that was set back or rewritten at its end.
        """
        _check(self._genesis.head, self.charges(), record, head)
        strays = "position < 0 OR position > (SELECT count FROM head)"
        for stray in self.database.read(f"SELECT position FROM chain WHERE {strays} LIMIT 1"):
            raise LedgerError(f"charge {stray['position']} was added outside the chain")
        self.check_schema()

    def check_schema(self) -> None:
        """Raise LedgerError unless the file's triggers still make it append-only."""
        if altered := self.database.altered_schema():
            raise LedgerError(f"tables or triggers were altered: {', '.join(altered)}")

    def since(self, head: Head | None) -> tuple[int, Iterator[str]] | None:
        """Return the export after a head, or all of it: its length in characters, and its pieces.

        The pieces are read from the file during iteration, without checks. Returns None if the
        ledger never had the head.
        """
        if head is not None and not self.contains_head(head):
            return None
        last, begin = self.head, -1 if head is None else head.count
        source = "FROM chain WHERE position > ? AND position <= ?"
        size = self.database.read(f"SELECT total(length(text) + 1) {source}", (begin, last.count))

        def read() -> Iterator[str]:
            for start in range(begin, last.count, _ROWS_AT_ONCE):
                place = start, min(start + _ROWS_AT_ONCE, last.count)
                sql = f"SELECT text {source} ORDER BY position"
                yield "".join(f"{row['text']}\n" for row in self.database.read(sql, place))
            yield f"{last.line}\n"

        return int(size[0][0]) + len(last.line) + 1, read()

    def export(self, stream: TextIO) -> None:
        """Write each text of the chain as a line, then a last line with the head.

        The digest of a text is SHA-256 of its line without the line feed.
        """
        head = self.head
        stream.write(f"{self._genesis.text}\n")
        rows = self._walk(self._genesis.head, head, SeriesBook())
        stream.writelines(f"{row.text}\n" for row in rows)
        stream.write(f"{head.line}\n")

    def _only_row(self, what: str, sql: str) -> sqlite3.Row:
        rows = self.database.read(sql)
        if len(rows) != 1:
            raise LedgerError(f"the ledger has {len(rows) or 'no'} {what}; it must have one")
        return rows[0]

    def _walk(self, last: Head, end: Head, series: SeriesBook) -> Iterator[ChargedRow]:
        """Yield the charges after `last` up to `end`, in order, each checked first.

        `series` must have followed the chain up to `last`; it follows these charges too.
        """
        sql = "SELECT * FROM chain WHERE position > ? AND position <= ? ORDER BY position LIMIT ?"
        # Rows never change once they are read, so pages agree.
        while page := self.database.read(sql, (last.count, end.count, _ROWS_AT_ONCE)):
            for stored in page:
                if stored["position"] != last.count + 1:
                    raise LedgerError(f"charge {last.count + 1} is missing")
                if not isinstance(stored["text"], str) or digest(stored["text"]) != stored["hash"]:
                    raise LedgerError(f"charge {stored['position']} was changed")
                row = next_row(last, stored["text"], series)
                if _columns(row) != dict(stored):
                    raise LedgerError(f"{row} was changed")
                yield row
                last = row.head
        if last.count < end.count:
            raise LedgerError(f"charge {last.count + 1} is missing")
        if last != end:
            raise LedgerError(
                f"the head is charge {end.count} with hash {end.hash}, but the chain leads to "
                f"charge {last.count} with hash {last.hash}"
            )

    def _catch_up(self) -> None:
        for row in self._walk(self._counted_head, self.head, self._series):
            event = self._first.setdefault(row.event.cost, row.event)
            self._counts[event] += row.pays
            if row.randomness is Randomness.SEEDED:
                self._randomness = row.randomness
            self._counted_head = row.head


@dataclass(frozen=True)
class ExportedLedger:
    """A verified ledger, read from text of an untrusted source."""

    ledger_id: str
    population: str  # name of the population
    first: Head  # the head before any charge
    rows: tuple[ChargedRow, ...]  # all charges, in order

    @classmethod
    def read(cls, lines: Iterable[str], known: Self | None = None) -> Self:
        """Read an untrusted export; a LedgerError names the first wrong line.

        If `known` is given, the lines are those after its head, and the result contains both.

        Guarantees:
            * every line is, character by character, what `Ledger.export` writes for the returned
              ledger, with or without a line feed at its end; no line is missing and none follows;
            * every charge is one that a ledger accepts, and no attempt is charged twice.
        """
        numbered, number, at_end = enumerate(lines, 1), 0, False
        try:
            if known is None:
                number, line = next(numbered, (1, ""))
                genesis = Genesis.parse(_checked(line))
                known = cls(genesis.ledger_id, genesis.population, genesis.head, ())
            rows, last = list(known.rows), known.head
            attempts = {(row.run, row.round, row.attempt) for row in rows}
            events = {row.event: row.event for row in rows}
            series = SeriesBook(rows)
            for number, line in numbered:  # noqa: B007 - errors name it
                text = _checked(line)
                if at_end:
                    raise LedgerError("there is more after the head")
                if text == last.line:
                    at_end = True
                elif text.startswith('{"head"'):
                    raise LedgerError(f"the head is not {last.count} charges, hash {last.hash}")
                else:
                    row = next_row(last, text, series)
                    attempts.add((row.run, row.round, row.attempt))
                    if len(attempts) == len(rows):
                        raise LedgerError(f"{row} was charged before")
                    last = row.head
                    # To save memory, drop the cached text and share equal events.
                    rows.append(replace(row, event=events.setdefault(row.event, row.event)))
            if not at_end:
                number += 1
                raise LedgerError(f"charge {last.count + 1} is missing, or the head")
        except LedgerError as error:
            reason = str(error)[:_LONGEST_REASON]
            raise LedgerError(f"line {number} of the export: {reason}") from error
        return replace(known, rows=tuple(rows))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read an export from a file; LedgerError if it cannot be read or is not valid."""
        try:
            # An export is ASCII; other bytes are escaped and fail the check of their line.
            with path.open(encoding="ascii", errors="surrogateescape") as stream:
                return cls.read(iter(partial(stream.readline, MAX_LINE + 2), ""))
        except OSError as error:
            raise LedgerError(f"{path} cannot be read: {error.strerror}") from error
        except LedgerError as error:
            raise LedgerError(f"{path} is not a valid export of a ledger: {error}") from error

    @property
    def head(self) -> Head:
        """The number of charges and the digest of the last text."""
        return self.rows[-1].head if self.rows else self.first

    def contains(self, head: Head) -> bool:
        """Return whether this ledger has or had this head."""
        if not 0 < head.count <= len(self.rows):
            return head == self.first
        return head == self.rows[head.count - 1].head

    def verify(self, record: ParticipationRecord | None = None, head: Head | None = None) -> None:
        """Check what `read` does not: all cohorts in `record`, and a head stored elsewhere."""
        _check(self.first, self.rows, record, head)


def _reason(error: Exception) -> str:
    """Return a sentence on a malformed text, without Python's own message."""
    if isinstance(error, FedprivError):
        return str(error)
    if isinstance(error, json.JSONDecodeError | RecursionError):
        return "it is not JSON"
    return "a field is absent, unknown or not what a ledger writes there"


def _checked(line: str) -> str:
    """Return a line without its line feed; LedgerError if it is too long."""
    text = line.removesuffix("\n")
    if len(text) > MAX_LINE:
        raise LedgerError(f"it has more than {MAX_LINE} characters")
    return text


def digest(text: str) -> str:
    """Return SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def next_row(last: Head, text: str, series: SeriesBook) -> ChargedRow:
    """Parse the charge after `last`; LedgerError if no ledger would write this text.

    `series` must have followed the chain up to `last`; it follows this charge too.
    """
    number = last.count + 1
    try:
        row = _row(json.loads(text), series)
        require(row.text == text, "it is not in the exact form that a ledger writes")
    except _MALFORMED as error:
        raise LedgerError(
            f"charge {number} is not one that this fedpriv knows: {_reason(error)}"
        ) from error
    if row.position != number:
        raise LedgerError(f"charge {number} is missing: {row} is in its place")
    if row.previous_hash != last.hash:
        parent = f"charge {last.count}" if last.count else "the text that identifies the ledger"
        raise LedgerError(f"{row} does not follow {parent}: one of them was replaced")
    series.follow(row)
    return row


def _check_readable(row: ChargedRow, book: SeriesBook) -> None:
    """Refuse a row that could not be read back exactly: no charge could follow it."""
    try:
        is_equal = _row(json.loads(_checked(row.text)), book) == row
    except _MALFORMED as error:
        raise InvalidValueError(f"no ledger can hold {row}: {_reason(error)}") from error
    require(is_equal, f"no ledger can hold {row}: it would be read back as another")


def _row(fields: dict[str, Any], book: SeriesBook) -> ChargedRow:
    """Build a charge from JSON fields; raises the errors of its constructors."""
    series, part = fields.pop("series", None), fields.pop("part", 0)
    event = _event(fields) if series is None else book.event_of(series)
    randomness = Randomness(fields.pop("randomness"))
    place = {name: fields.pop(name) for name in ("position", "day", "previous_hash")}
    _check_day(place["day"])
    charge = ProposedCharge(**fields, randomness=randomness, event=event, part=part, series=series)
    return ChargedRow(**place, **vars(charge))


def _event(fields: dict[str, Any]) -> RoundEvent:
    """Build an event from JSON fields and remove them from `fields`."""
    policy, q = SamplingPolicy(fields.pop("policy")), fields.pop("sampling_probability")
    population, relation = fields.pop("population"), NeighbouringRelation(fields.pop("relation"))
    schedule_fields, unit = fields.pop("schedule"), Unit(fields.pop("unit", Unit.USER))
    schedule = None if schedule_fields is None else Schedule(**schedule_fields)
    examples, canaries = fields.pop("examples_per_user", None), fields.pop("canaries", 0)
    larger = fields.pop("projection", None)
    projection = None if larger is None else Projection(**larger)
    sampling = SamplingEvent(
        policy, q, population, relation, schedule, unit, examples, canaries, projection
    )
    queries = tuple(SumQueryEvent(**query) for query in fields.pop("sum_queries"))
    strategy, selection = tuple(fields.pop("strategy")), fields.pop("selection", None)
    if selection is not None:
        trials = tuple(Trial(**trial) for trial in selection.pop("trials"))
        selection = Selection(trials, **selection)
    secure = fields.pop("secure_sum", None)
    secure = None if secure is None else SecureSum(**secure)
    return RoundEvent(sampling, queries, strategy=strategy, selection=selection, secure_sum=secure)


def _check(
    first: Head,
    charges: Iterable[ChargedRow],
    record: ParticipationRecord | None,
    head: Head | None,
) -> None:
    """Check all charges: the record must hold each cohort, and the heads must be in the chain.

    The cohorts of a series must also follow its schedule.
    """
    recorded = None if record is None else record.ledger_head
    heads = [item for item in (head, recorded) if item is not None]
    seen_heads, series = {first} & set(heads), dict[int, _Participations]()
    for row in charges:
        seen_heads |= {item for item in heads if item.count == row.position and item == row.head}
        attempt, sampling = (row.run, row.round, row.attempt), row.event.sampling
        try:
            if record is not None:
                users = record.confirm(row.cohort_commitment, attempt, sampling.places)
                if (schedule := sampling.schedule) is not None:
                    payment = row.position if row.series is None else row.series
                    counts = series.pop(payment, None) or _Participations(sampling, schedule)
                    counts.add(users, row.part)
                    if row.part + 1 < schedule.rounds:
                        series[payment] = counts
        except LedgerError as error:
            raise LedgerError(f"{row}: {error}") from error
    for item in heads:
        if item not in seen_heads:
            never = f"the ledger never had the head of {item.count} charges with hash {item.hash}"
            raise LedgerError(f"{never}: it is another ledger, or was set back or rewritten")


class _Participations:
    """Each user's number of participations and last round in a series so far."""

    def __init__(self, sampling: SamplingEvent, schedule: Schedule) -> None:
        self._schedule = schedule
        self._times = np.zeros(sampling.places, np.int64)
        self._next = np.zeros_like(self._times)  # the round after each user's last one

    def add(self, users: npt.NDArray[np.int64], part: int) -> None:
        """Add the cohort of a round; LedgerError if it does not follow the schedule."""
        k, b, n = self._schedule.participations, self._schedule.separation, self._schedule.rounds
        next_rounds = self._next[users][self._times[users] > 0]
        if (part + 1 - next_rounds < b).any():
            raise LedgerError(f"two rounds of a user in its cohort are less than {b} apart")
        self._times[users] += 1
        self._next[users] = part + 1
        if (self._times[users] > k).any():
            raise LedgerError(f"a user in its cohort is in more than {k} of {n} rounds")


def _check_name(what: str, name: str) -> None:
    valid = isinstance(name, str) and name.isprintable() and name != ""
    require(valid, f"{what} is {name!r}; it must be printable and not empty")


def _check_digits(what: str, digits: str, length: int) -> None:
    pattern = f"[0-9a-f]{{{length}}}"
    hexadecimal = isinstance(digits, str) and re.fullmatch(pattern, digits) is not None
    require(hexadecimal, f"{what} is {digits!r}; it must be {length} lower-case hexadecimal digits")


def _columns(row: ChargedRow) -> dict[str, object]:
    names = ("position", "run", "round", "attempt", "text", "hash")
    return {name: getattr(row, name) for name in names}


def _check_day(day: str) -> None:
    is_day = date.fromisoformat(day).isoformat() == day
    require(is_day, f"day is {day!r}; it must be YYYY-MM-DD")


def _now() -> datetime:
    return datetime.now(UTC)
