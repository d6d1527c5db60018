"""The privacy ledger: every release about one population is charged before it is made.

A ledger is a chain of texts in a SQLite file. The first identifies the ledger; each of the others
is a charge, as JSON, and contains the SHA-256 digest of the text before it. The digest of the last
text, the head, therefore fixes them all. Whoever can write to the file can also write a new chain,
so what makes a ledger or its export credible is a head that was kept elsewhere: in a checkpoint, a
report or a client.
"""

import hashlib
import json
import re
import secrets
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime
from functools import cached_property, partial
from operator import index
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np
import numpy.typing as npt

from fedpriv.errors import BudgetExceededError, FedprivError, InvalidValueError, LedgerError
from fedpriv.ledger.database import Database, FileFormat, insertion
from fedpriv.ledger.events import (
    NeighbouringRelation,
    PrivacyBudget,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    Selection,
    SumQueryEvent,
    Trial,
    Unit,
    repeated,
)
from fedpriv.ledger.participation import Head, ParticipationRecord
from fedpriv.support.checks import check_types, hold_numbers, named_value, require

_FORMAT = "fedpriv ledger 1"  # in the first text of a chain
_ROWS_AT_ONCE = 1000
MAX_LINE = 2**24  # characters: a charge with many sum queries or a long strategy
_LONGEST_REASON = 400  # characters: a sentence must not be as long as the input it is about
# What reading a value from hostile JSON may raise.
_MALFORMED = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)

# SQLite itself lets a ledger only grow, whichever program writes to it. The insert triggers also
# stop INSERT OR REPLACE, which deletes without firing delete triggers.
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
    population: str  # its name, printable and not empty
    created_at: str  # the day, UTC, ISO 8601: finer times would tell how long rounds take

    def __post_init__(self) -> None:
        _check_name("the population's name", self.population)
        _check_digits("ledger_id", self.ledger_id, 32)
        _check_name("created_at", self.created_at)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the first text of a ledger; LedgerError if the text is something else."""
        try:
            fields = json.loads(text)
            found = cls(fields["ledger_id"], fields["population"], fields["created_at"])
            require(found.text == text, f"it is not written in the format {_FORMAT!r}")
        except _MALFORMED as error:
            raise LedgerError(f"it is not the first line of a ledger: {_words(error)}") from error
        return found

    @property
    def text(self) -> str:
        """As it is written in the chain."""
        return json.dumps({"format": _FORMAT, **asdict(self)})

    @property
    def head(self) -> Head:
        """The head of the ledger before its first charge."""
        return Head(0, digest(self.text))


@dataclass(frozen=True)
class ProposedCharge:
    """What a ledger is asked to charge before anything is released."""

    run: str  # its name, printable and not empty
    round: int  # from 0
    attempt: int  # at the round, from 0
    randomness: Randomness  # of cohort and noise
    event: RoundEvent  # of one round: its count is 1
    cohort_commitment: str  # 64 hexadecimal digits, from `ParticipationRecord.record`
    # For an event of several rounds: which of them this is, from 0, and the position of the charge
    # that paid for all. The first of them pays, so its `series` is None.
    part: int = 0
    series: int | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        _check_name("run", self.run)
        check_types(event=(self.event, RoundEvent))
        randomness = named_value(Randomness, "randomness", self.randomness)
        object.__setattr__(self, "randomness", randomness)
        numbers = f"round {self.round}, attempt {self.attempt}"
        whole = 0 <= self.round < 2**63 and 0 <= self.attempt < 2**63
        require(whole, f"{numbers}: both must be from 0 to 2^63 - 1")
        count = self.event.count
        require(count == 1, f"the event has count {count}; each round is charged by itself")
        _check_digits("cohort_commitment", self.cohort_commitment, 64)
        schedule = self.event.sampling.schedule
        parts = 1 if schedule is None else schedule.rounds
        legal = f"it must be a whole number from 0 to {parts - 1}"
        require(0 <= self.part < parts, f"part {self.part}; {legal}")
        named = self.series is not None and self.series >= 1
        legal = "the parts after the first, and they alone, name the charge that paid for them"
        fits = self.series is None if self.part == 0 else named
        require(fits, f"part {self.part} has series {self.series}; {legal}")


@dataclass(frozen=True)
class ChargedRow:
    """A charge in the chain of a ledger: what was proposed, when, and its place."""

    position: int  # from 1
    run: str
    round: int
    attempt: int
    randomness: Randomness
    event: RoundEvent
    cohort_commitment: str
    part: int  # as in `ProposedCharge`
    series: int | None
    # UTC, ISO 8601. A finer time would say how long rounds took, which depends on who was drawn.
    day: str
    previous_hash: str  # digest of the text before

    @cached_property
    def text(self) -> str:
        """As it is written in the chain: JSON that is exact for doubles.

        A part that was paid before names its charge and does not repeat the event.
        """
        own = _event_fields(self.event)
        if self.series is not None:
            own = {"series": int(self.series), "part": int(self.part)}
        return json.dumps(
            {
                "position": int(self.position),
                "run": self.run,
                "round": int(self.round),
                "attempt": int(self.attempt),
                **own,
                "randomness": self.randomness,
                "cohort_commitment": self.cohort_commitment,
                "day": self.day,
                "previous_hash": self.previous_hash,
            }
        )

    @property
    def pays(self) -> bool:
        """Whether its event is charged here, and not with an earlier round of the same series."""
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
        "schedule": schedule and {name: int(n) for name, n in asdict(schedule).items()},
        "strategy": [float(c) for c in event.strategy],
        **({} if event.selection is None else {"selection": asdict(event.selection)}),
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
    """An event of count 1 as a charge writes it down: JSON that is exact for doubles."""
    require(event.count == 1, f"the event has count {event.count}; it must be 1")
    return json.dumps(_event_fields(event))


def event_from(text: str) -> RoundEvent:
    """The event that `event_text` writes so; InvalidValueError for every other text."""
    try:
        event = _event(json.loads(text))
        require(event_text(event) == text, "it is not written as a ledger writes it")
    except _MALFORMED as error:
        raise InvalidValueError(
            f"the event is not one that this fedpriv knows: {_words(error)}"
        ) from error
    return event


def paid_events(rows: Iterable[ChargedRow]) -> list[RoundEvent]:
    """The events that were charged: of a series of rounds one."""
    return [row.event for row in rows if row.pays]


@dataclass(frozen=True)
class OpenSeries:
    """A series of rounds that was paid for and has rounds left."""

    paid: ChargedRow  # its first round, which charged its event
    part: int  # its next round


class SeriesBook:
    """The series of rounds that a chain has paid for, as far as the chain was followed.

    Guarantees:
        * a part is of the run that paid, follows the part before it and comes once;
        * so an event of n rounds is released n times at most.
    """

    def __init__(self, rows: Iterable[ChargedRow] = ()) -> None:
        self._open: dict[int, OpenSeries] = {}  # by the position of the charge
        self._last: dict[str, int] = {}  # that of each run
        for row in rows:
            self.follow(row)

    def last_of(self, run: str) -> OpenSeries | None:
        """The series that a run paid for last, unless all of its rounds were charged."""
        return self._open.get(self._last.get(run, 0))

    def event_of(self, series: object) -> RoundEvent:
        """The event that the charge at a position paid for, if rounds of it are left."""
        found = self._open.get(series) if isinstance(series, int) else None
        if found is None:
            raise InvalidValueError(f"charge {series} paid for no round that is left")
        return found.paid.event

    def check(self, row: ChargedRow) -> None:
        """LedgerError unless the row pays, or is the next part of a series of its run."""
        if row.series is None:
            return
        found = self._open.get(row.series)
        fits = found is not None and (found.part, found.paid.run) == (row.part, row.run)
        if found is None or not fits or found.paid.event != row.event:
            raise LedgerError(f"{row} is not the next round of the series of charge {row.series}")

    def follow(self, row: ChargedRow) -> None:
        """Take in the next row of the chain; LedgerError if it is a part and not the next."""
        self.check(row)
        paid = row if row.series is None else self._open[row.series].paid
        schedule = row.event.sampling.schedule
        if schedule is None or schedule.rounds == row.part + 1:
            self._open.pop(paid.position, None)
        else:
            self._open[paid.position] = OpenSeries(paid, row.part + 1)
            self._last[row.run] = paid.position


@dataclass(frozen=True)
class Charge:
    """Receipt for one charge, good for one release, copies included; it cannot be pickled."""

    run: str
    round: int
    attempt: int
    event: RoundEvent
    hash: str  # digest of the charge in the ledger
    part: int = 0  # which round of the event, from 0
    paid: int = 0  # position of the charge that paid for the event: this one, of the first part
    _used: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def redeem(self) -> RoundEvent:
        """The event to release; a LedgerError if the receipt was redeemed before."""
        if not self._used.acquire(blocking=False):
            raise LedgerError(
                f"the charge of run {self.run}, round {self.round}, attempt {self.attempt} was "
                "redeemed before: two releases on one charge could be averaged, to remove noise"
            )
        return self.event


class Ledger:
    """All charges of one population, over all runs, in an append-only SQLite file.

    Guarantees:
        * a charge is durable (fsync) when `charge` returns, and never refunded;
        * processes and threads that charge one file never pass a budget together;
        * methods that read charges raise a LedgerError that names the first charge that is missing,
          changed or out of order.
    """

    def __init__(self, database: Database) -> None:
        self.database = database
        self._lock = threading.RLock()
        try:
            first = self._only_row("first text", "SELECT text, hash FROM chain WHERE position = 0")
            self._genesis = Genesis.parse(str(first["text"]))
            if self._genesis.head.hash != first["hash"]:
                raise LedgerError("the text that identifies the ledger was changed")
        except LedgerError:
            database.close()
            raise
        self.ledger_id = self._genesis.ledger_id
        self.population_name = self._genesis.population
        self._known = self._genesis.head  # the head up to which `_rounds` counts the charges
        self._rounds = Counter[RoundEvent]()
        self._series = SeriesBook()
        self._randomness = Randomness.OPERATING_SYSTEM
        self._price: tuple[object, float] = (None, 0.0)  # the last one, and what it was asked for

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing ledger."""
        return cls(Database(path, LEDGER))

    @classmethod
    def open_or_create(cls, path: Path, population: str) -> Self:
        """Open the ledger of a population, or create it if there is no file."""
        genesis = Genesis(secrets.token_hex(16), population, _now().date().isoformat())
        first = {"position": 0, "text": genesis.text, "hash": genesis.head.hash}
        rows = {"chain": first, "head": asdict(genesis.head)}
        ledger = cls(Database(path, LEDGER, rows))
        if ledger.population_name != population:
            ledger.close()
            raise LedgerError(
                f"ledger {path} is of population {ledger.population_name!r}, not {population!r}"
            )
        return ledger

    @property
    def head(self) -> Head:
        """How many charges there are, and the digest of the last text."""
        return Head(*self._only_row("head", "SELECT count, hash FROM head"))

    def charge(self, charge: ProposedCharge, budget: PrivacyBudget | None = None) -> Charge:
        """Write down a charge, if the budget allows it, and return the receipt to release it.

        Raises, without charging anything, BudgetExceededError where all charges together would pass
        the budget, and LedgerError where the attempt was charged before or the ledger is broken. A
        part of a series that was paid for is written down at no price, if it is the next.
        """
        name = f"run {charge.run}, round {charge.round}, attempt {charge.attempt}"
        with self._lock, self.database.transaction():
            self._catch_up()
            sql = "SELECT 1 FROM chain WHERE run = ? AND round = ? AND attempt = ?"
            if self.database.read(sql, (charge.run, charge.round, charge.attempt)):
                next_attempt = self.next_attempt(charge.run, charge.round)
                raise LedgerError(f"{name} was charged before; the next attempt is {next_attempt}")
            event = charge.event if charge.series is None else None
            epsilon = 0.0 if budget is None else self.epsilon(budget, event)
            if budget is not None and event is not None and not epsilon <= budget.epsilon:
                raise BudgetExceededError(
                    f"{name} would make ε = {epsilon} at δ = {budget.delta}, which passes the "
                    f"budget of ε = {budget.epsilon}; nothing was charged"
                )
            last = self._known
            fields = vars(charge) | {"day": _now().date().isoformat(), "previous_hash": last.hash}
            row = ChargedRow(last.count + 1, **fields)
            self._series.check(row)
            _check_readable(row, self._series)
            columns = _columns(row)
            self.database.write(insertion("chain", columns), columns)
            self.database.write("UPDATE head SET count = :count, hash = :hash", asdict(row.head))
            self._price = (row.head, None, budget), epsilon
        paid = row.position if row.series is None else row.series
        return Charge(row.run, row.round, row.attempt, row.event, row.hash, row.part, paid)

    def epsilon(self, budget: PrivacyBudget, event: RoundEvent | None = None) -> float:
        """ε of all charges, and of one more event of count 1 if given, at the budget's δ."""
        with self._lock:
            self._catch_up()
            # A round asks before it starts, when it is charged and when it is reported.
            asked = (self._known, event, budget)
            if self._price[0] != asked:
                rounds = self._rounds if event is None else self._rounds + Counter([event])
                self._price = asked, budget.price(repeated(rounds), budget.delta)
            return self._price[1]

    def charges(self) -> Iterator[ChargedRow]:
        """All charges, in the order in which they were made."""
        yield from self._walk(self._genesis.head, self.head, SeriesBook())

    def open_series(self, run: str) -> OpenSeries | None:
        """The series of rounds that a run paid for last, if rounds of it are left."""
        with self._lock:
            self._catch_up()
            return self._series.last_of(run)

    def spent(self) -> list[RoundEvent]:
        """All events so far with equal ones merged, in order of first use."""
        with self._lock:
            self._catch_up()
            return list(repeated(self._rounds))

    @property
    def randomness(self) -> Randomness:
        """The weakest source of all charges: what is seeded guarantees nothing."""
        with self._lock:
            self._catch_up()
            return self._randomness

    @property
    def first_run(self) -> str | None:
        """The run that was charged first, if there is a charge."""
        rows = self.database.read("SELECT run FROM chain WHERE position = 1")
        return str(rows[0]["run"]) if rows else None

    def next_attempt(self, run: str, round_number: int) -> int:
        """One more than the highest attempt at a round that was charged; 0 if there is none."""
        sql = "SELECT max(attempt) + 1 AS next FROM chain WHERE run = ? AND round = ?"
        return self.database.read(sql, (run, index(round_number)))[0]["next"] or 0

    def contains_head(self, head: Head) -> bool:
        """Whether this ledger once had this head: it grew from there, and was not set back."""
        rows = self.database.read("SELECT hash FROM chain WHERE position = ?", (head.count,))
        return [row["hash"] for row in rows] == [head.hash]

    def verify(self, record: ParticipationRecord | None = None, head: Head | None = None) -> None:
        """Check every charge, every cohort if they are given, and that the file still only grows.

        Without a head kept elsewhere, a ledger passes that was set back or rewritten at its end.
        """
        _check(self._genesis.head, self.charges(), record, head)
        strays = "position < 0 OR position > (SELECT count FROM head)"
        for stray in self.database.read(f"SELECT position FROM chain WHERE {strays} LIMIT 1"):
            raise LedgerError(f"charge {stray['position']} was added outside the chain")
        self.check_schema()

    def check_schema(self) -> None:
        """LedgerError unless the file still only grows, whichever program writes to it."""
        if altered := self.database.altered_schema():
            raise LedgerError(f"tables or triggers were altered: {', '.join(altered)}")

    def since(self, head: Head | None) -> tuple[int, Iterator[str]] | None:
        """The export after a head, or all of it without one: its length in characters, its pieces.

        Pieces are read from the file, unchecked, as they are taken. None if the ledger never had
        the head.
        """
        if head is not None and not self.contains_head(head):
            return None
        last, begin = self.head, -1 if head is None else head.count
        within = "FROM chain WHERE position > ? AND position <= ?"
        size = self.database.read(f"SELECT total(length(text) + 1) {within}", (begin, last.count))

        def read() -> Iterator[str]:
            for start in range(begin, last.count, _ROWS_AT_ONCE):
                place = start, min(start + _ROWS_AT_ONCE, last.count)
                sql = f"SELECT text {within} ORDER BY position"
                yield "".join(f"{row['text']}\n" for row in self.database.read(sql, place))
            yield f"{last.line}\n"

        return int(size[0][0]) + len(last.line) + 1, read()

    def export(self, stream: TextIO) -> None:
        """Write the texts of the chain as lines, and a last line with the head.

        The digest of a line is SHA-256 of its bytes without the line feed.
        """
        head = self.head
        stream.write(f"{self._genesis.text}\n")
        rows = self._walk(self._genesis.head, head, SeriesBook())
        stream.writelines(f"{row.text}\n" for row in rows)
        stream.write(f"{head.line}\n")

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _only_row(self, what: str, sql: str) -> sqlite3.Row:
        rows = self.database.read(sql)
        if len(rows) != 1:
            raise LedgerError(f"the ledger has {len(rows) or 'no'} {what}; it must have one")
        return rows[0]

    def _walk(self, last: Head, end: Head, series: SeriesBook) -> Iterator[ChargedRow]:
        """The charges after `last` up to `end`, in order, each checked before it is yielded.

        The book has followed the chain up to `last`, and follows it on.
        """
        sql = "SELECT * FROM chain WHERE position > ? AND position <= ? ORDER BY position LIMIT ?"
        # Rows that were read once never change, so pages agree.
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
        for row in self._walk(self._known, self.head, self._series):
            self._rounds[row.event] += row.pays
            if row.randomness is Randomness.SEEDED:
                self._randomness = row.randomness
            self._known = row.head


@dataclass(frozen=True)
class ExportedLedger:
    """A ledger as text, verified, from a source that need not be honest."""

    ledger_id: str
    population: str  # its name
    first: Head  # before any charge
    rows: tuple[ChargedRow, ...]  # all charges, in order

    @classmethod
    def read(cls, lines: Iterable[str], known: Self | None = None) -> Self:
        """Read an export, whatever it contains; a LedgerError names the first wrong line.

        Of a ledger that is known up to some head, the lines are those after that head.

        Guarantees:
            * every line is, character by character, what `Ledger.export` writes for what is
              returned, with or without a line feed at its end, and nothing is missing or follows;
            * every charge is one that a ledger accepts, and no attempt is charged twice.
        """
        numbered, number, ended = enumerate(lines, 1), 0, False
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
                if ended:
                    raise LedgerError("there is more after the head")
                if text == last.line:
                    ended = True
                elif text.startswith('{"head"'):
                    raise LedgerError(f"the head is not {last.count} charges, hash {last.hash}")
                else:
                    row = next_row(last, text, series)
                    attempts.add((row.run, row.round, row.attempt))
                    if len(attempts) == len(rows):
                        raise LedgerError(f"{row} was charged before")
                    last = row.head
                    # In memory, without its text, and with the same event as others like it.
                    rows.append(replace(row, event=events.setdefault(row.event, row.event)))
            if not ended:
                number += 1
                raise LedgerError(f"charge {last.count + 1} is missing, or the head")
        except LedgerError as error:
            reason = str(error)[:_LONGEST_REASON]
            raise LedgerError(f"line {number} of the export: {reason}") from error
        return replace(known, rows=tuple(rows))

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
    def head(self) -> Head:
        """The head of the chain."""
        return self.rows[-1].head if self.rows else self.first

    def contains(self, head: Head) -> bool:
        """Whether this ledger has, or once had, this head: it grew from there."""
        if not 0 < head.count <= len(self.rows):
            return head == self.first
        return head == self.rows[head.count - 1].head

    def verify(self, record: ParticipationRecord | None = None, head: Head | None = None) -> None:
        """Check what `read` could not: every cohort, and a head that was kept elsewhere."""
        _check(self.first, self.rows, record, head)


def is_export(path: Path) -> bool:
    """Whether to read a file as an export; others are SQLite files, or empty or absent."""
    # Closing a SQLite file that was opened in another way would end this process's locks on it.
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
            file.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        return error.sqlite_errorcode == sqlite3.SQLITE_NOTADB
    return False


def _words(error: Exception) -> str:
    """What is wrong with a text that is not what a ledger writes; never Python's own words."""
    if isinstance(error, FedprivError):
        return str(error)
    if isinstance(error, json.JSONDecodeError | RecursionError):
        return "it is not JSON"
    return "a field is absent, unknown or not what a ledger writes there"


def _checked(line: str) -> str:
    """A line without its line feed."""
    text = line.removesuffix("\n")
    if len(text) > MAX_LINE:
        raise LedgerError(f"it has more than {MAX_LINE} characters")
    return text


def digest(text: str) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def next_row(last: Head, text: str, series: SeriesBook) -> ChargedRow:
    """The charge after `last` that a text describes; LedgerError if no ledger writes it so.

    The book has followed the chain up to `last`, and follows this charge too.
    """
    number = last.count + 1
    try:
        row = _row(json.loads(text), series)
        require(row.text == text, "it is not written as a ledger writes it")
    except _MALFORMED as error:
        raise LedgerError(
            f"charge {number} is not one that this fedpriv knows: {_words(error)}"
        ) from error
    if row.position != number:
        raise LedgerError(f"charge {number} is missing: {row} is in its place")
    if row.previous_hash != last.hash:
        before = f"charge {last.count}" if last.count else "the text that identifies the ledger"
        raise LedgerError(f"{row} does not follow {before}: one of them was replaced")
    series.follow(row)
    return row


def _check_readable(row: ChargedRow, book: SeriesBook) -> None:
    """Refuse a row that would not be read back as it is: no charge could follow it."""
    try:
        same = _row(json.loads(_checked(row.text)), book) == row
    except _MALFORMED as error:
        raise InvalidValueError(f"no ledger can hold {row}: {_words(error)}") from error
    require(same, f"no ledger can hold {row}: it would be read back as another")


def _row(fields: dict[str, Any], book: SeriesBook) -> ChargedRow:
    """The charge that JSON fields describe; raises what its constructors raise."""
    series, part = fields.pop("series", None), fields.pop("part", 0)
    event = _event(fields) if series is None else book.event_of(series)
    randomness = Randomness(fields.pop("randomness"))
    place = {name: fields.pop(name) for name in ("position", "day", "previous_hash")}
    _check_day(place["day"])
    charge = ProposedCharge(**fields, randomness=randomness, event=event, part=part, series=series)
    return ChargedRow(**place, **vars(charge))


def _event(fields: dict[str, Any]) -> RoundEvent:
    """The event that JSON fields describe, which are taken out."""
    policy, q = SamplingPolicy(fields.pop("policy")), fields.pop("sampling_probability")
    population, relation = fields.pop("population"), NeighbouringRelation(fields.pop("relation"))
    found, unit = fields.pop("schedule"), Unit(fields.pop("unit", Unit.USER))
    schedule = None if found is None else Schedule(**found)
    examples, canaries = fields.pop("examples_per_user", None), fields.pop("canaries", 0)
    sampling = SamplingEvent(policy, q, population, relation, schedule, unit, examples, canaries)
    queries = tuple(SumQueryEvent(**query) for query in fields.pop("sum_queries"))
    strategy, searched = tuple(fields.pop("strategy")), fields.pop("selection", None)
    if searched is not None:
        trials = tuple(Trial(**trial) for trial in searched.pop("trials"))
        searched = Selection(trials, **searched)
    return RoundEvent(sampling, queries, strategy=strategy, selection=searched)


def _check(
    first: Head,
    charges: Iterable[ChargedRow],
    record: ParticipationRecord | None,
    head: Head | None,
) -> None:
    """Read all charges; the record must hold each cohort, and heads must lie on the chain.

    Cohorts of a series must also keep its schedule.
    """
    known = None if record is None else record.ledger_head
    kept = [each for each in (head, known) if each is not None]
    met, series = {first} & set(kept), dict[int, _Participations]()
    for row in charges:
        met |= {each for each in kept if each.count == row.position and each == row.head}
        attempt, sampling = (row.run, row.round, row.attempt), row.event.sampling
        try:
            if record is not None:
                users = record.confirm(row.cohort_commitment, attempt, sampling.places)
                if (schedule := sampling.schedule) is not None:
                    paid = row.position if row.series is None else row.series
                    taken = series.pop(paid, None) or _Participations(sampling, schedule)
                    taken.add(users, row.part)
                    if row.part + 1 < schedule.rounds:
                        series[paid] = taken
        except LedgerError as error:
            raise LedgerError(f"{row}: {error}") from error
    for each in kept:
        if each not in met:
            never = f"the ledger never had the head of {each.count} charges with hash {each.hash}"
            raise LedgerError(f"{never}: it is another ledger, or was set back or rewritten")


class _Participations:
    """Who took part in the rounds of a series so far, and when last."""

    def __init__(self, sampling: SamplingEvent, schedule: Schedule) -> None:
        self._schedule = schedule
        self._times = np.zeros(sampling.places, np.int64)
        self._next = np.zeros_like(self._times)  # the round after the last one of a user

    def add(self, users: npt.NDArray[np.int64], part: int) -> None:
        """Take in the cohort of a round; LedgerError if it does not keep the schedule."""
        k, b, n = self._schedule.participations, self._schedule.separation, self._schedule.rounds
        again = self._next[users][self._times[users] > 0]
        if (part + 1 - again < b).any():
            raise LedgerError(f"two rounds of a user in its cohort are less than {b} apart")
        self._times[users] += 1
        self._next[users] = part + 1
        if (self._times[users] > k).any():
            raise LedgerError(f"a user in its cohort is in more than {k} of {n} rounds")


def _check_name(what: str, name: str) -> None:
    printable = isinstance(name, str) and name.isprintable() and name != ""
    require(printable, f"{what} is {name!r}; it must be printable and not empty")


def _check_digits(what: str, digits: str, length: int) -> None:
    pattern = f"[0-9a-f]{{{length}}}"
    hexadecimal = isinstance(digits, str) and re.fullmatch(pattern, digits) is not None
    require(hexadecimal, f"{what} is {digits!r}; it must be {length} lower-case hexadecimal digits")


def _columns(row: ChargedRow) -> dict[str, object]:
    names = ("position", "run", "round", "attempt", "text", "hash")
    return {name: getattr(row, name) for name in names}


def _check_day(day: str) -> None:
    whole = date.fromisoformat(day).isoformat() == day
    require(whole, f"day is {day!r}; it must be YYYY-MM-DD")


def _now() -> datetime:
    return datetime.now(UTC)
