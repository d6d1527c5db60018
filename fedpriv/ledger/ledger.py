"""The privacy ledger: every release about one population is charged before it is made.

A ledger is a chain of texts in a SQLite file. The first names the ledger; each of the others is a
charge, as JSON, and contains the SHA-256 digest of the text before it. The digest of the last text,
the head, therefore fixes them all. A forger who can write to the file can also make a new chain, so
what makes a ledger credible is a head kept elsewhere: in a checkpoint, a report or a client.
"""

import hashlib
import json
import re
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TextIO

from fedpriv.errors import BudgetExceededError, InvalidValueError, LedgerError
from fedpriv.ledger.budget import Headroom, PrivacyBudget, repeated
from fedpriv.ledger.database import Database, FileFormat
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
)
from fedpriv.ledger.participation import ParticipationRecord

FORMAT = "fedpriv ledger 1"
"""What the first text of a chain says it is."""

_ROWS_AT_ONCE = 1000

# SQLite itself lets a ledger only grow, whichever program writes to it. The insert triggers also
# stop INSERT OR REPLACE, which deletes without firing delete triggers.
_SCHEMA = """
CREATE TABLE head (
    singleton INTEGER PRIMARY KEY CHECK (singleton = 1),
    count INTEGER NOT NULL,
    hash TEXT NOT NULL
);
CREATE TABLE chain (
    position INTEGER PRIMARY KEY,
    run TEXT,
    round INTEGER,
    attempt INTEGER,
    text TEXT NOT NULL,
    hash TEXT NOT NULL,
    UNIQUE (run, round, attempt)
);
CREATE TRIGGER chain_no_update BEFORE UPDATE ON chain
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: no update'); END;
CREATE TRIGGER chain_no_delete BEFORE DELETE ON chain
BEGIN SELECT RAISE(ABORT, 'a ledger only grows: no delete'); END;
CREATE TRIGGER head_no_delete BEFORE DELETE ON head
BEGIN SELECT RAISE(ABORT, 'a ledger has a head'); END;
CREATE TRIGGER head_once BEFORE INSERT ON head WHEN EXISTS (SELECT 1 FROM head)
BEGIN SELECT RAISE(ABORT, 'a ledger has one head'); END;
CREATE TRIGGER chain_follows_the_head BEFORE INSERT ON chain
WHEN NEW.position IS NOT (SELECT coalesce(max(count) + 1, 0) FROM head)
    OR EXISTS (SELECT 1 FROM chain WHERE position = NEW.position)
    OR EXISTS (
        SELECT 1 FROM chain
        WHERE run = NEW.run AND round = NEW.round AND attempt = NEW.attempt
    )
BEGIN SELECT RAISE(ABORT, 'a charge must follow the head and be new'); END;
CREATE TRIGGER head_moves_by_one BEFORE UPDATE ON head
WHEN NEW.count IS NOT OLD.count + 1
    OR NEW.hash IS NOT (SELECT hash FROM chain WHERE position = NEW.count)
BEGIN SELECT RAISE(ABORT, 'the head must move to the next charge'); END;
"""
LEDGER = FileFormat("ledger", 0x66707276, _SCHEMA, 0o666)


@dataclass(frozen=True)
class Head:
    """A point in the chain of a ledger: the number of charges, and the digest of the last text."""

    count: int
    hash: str


@dataclass(frozen=True)
class Genesis:
    """What names a ledger: the first text of its chain.

    Attributes:
        ledger_id: 32 random hexadecimal digits.
        population: name of the population, printable and not empty.
        created_at: when, in UTC, ISO 8601.

    Raises:
        InvalidValueError: a field is not so.
    """

    ledger_id: str
    population: str
    created_at: str

    def __post_init__(self) -> None:
        if not (self.population and self.population.isprintable()):
            raise InvalidValueError(
                f"the population is named {self.population!r}; a name must be printable and not "
                "empty"
            )
        if not re.fullmatch("[0-9a-f]{32}", self.ledger_id):
            raise InvalidValueError("ledger_id is not of 32 lower-case hexadecimal digits")
        if not self.created_at.isprintable():
            raise InvalidValueError(f"created_at is {self.created_at!r}; it must be printable")

    @classmethod
    def parse(cls, text: str) -> Self:
        """What a text names.

        Raises:
            LedgerError: it is not the first text of a ledger.
        """
        try:
            found = cls(**{name: v for name, v in json.loads(text).items() if name != "format"})
            if found.text == text:
                return found
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise LedgerError(f"it is not the first line of a ledger: {error}") from error
        raise LedgerError(f"it is not the first line of a ledger of the format {FORMAT!r}")

    @property
    def text(self) -> str:
        """As it is written in the chain."""
        return json.dumps({"format": FORMAT, **asdict(self)})

    @property
    def head(self) -> Head:
        """The head of the ledger before its first charge."""
        return Head(0, digest(self.text))


@dataclass(frozen=True)
class ProposedCharge:
    """What a ledger is asked to charge before anything is released.

    Attributes:
        run: name of the run; printable and not empty.
        round: number of the round, from 0.
        attempt: number of the attempt at this round, from 0.
        randomness: where cohort and noise come from.
        event: the one round to charge; its count is 1.
        cohort_commitment: SHA-256, 64 hexadecimal digits, from `ParticipationRecord.record`.

    Raises:
        InvalidValueError: a field is out of range.
    """

    run: str
    round: int
    attempt: int
    randomness: Randomness
    event: RoundEvent
    cohort_commitment: str

    def __post_init__(self) -> None:
        if not (self.run and self.run.isprintable()):
            raise InvalidValueError(f"run is {self.run!r}; it must be printable and not empty")
        if not (0 <= self.round < 2**63 and 0 <= self.attempt < 2**63):
            raise InvalidValueError(
                f"round {self.round}, attempt {self.attempt}: both must be from 0 to 2^63 - 1"
            )
        if self.event.count != 1:
            raise InvalidValueError(
                f"the event has count {self.event.count}; each round is charged by itself"
            )
        if not re.fullmatch("[0-9a-f]{64}", self.cohort_commitment):
            raise InvalidValueError(
                f"cohort_commitment is {self.cohort_commitment!r}; it must be 64 lower-case "
                "hexadecimal digits"
            )


@dataclass(frozen=True)
class ChargedRow:
    """A charge in the chain of a ledger.

    Attributes:
        position: place in the ledger, from 1.
        charged_at: when, in UTC, ISO 8601.
        previous_hash: digest of the text before.
        hash: digest of `text`.

    The other attributes are those of `ProposedCharge`.
    """

    position: int
    run: str
    round: int
    attempt: int
    randomness: Randomness
    event: RoundEvent
    cohort_commitment: str
    charged_at: str
    previous_hash: str
    hash: str

    @classmethod
    def following(cls, last: Head, charge: ProposedCharge, charged_at: str) -> Self:
        """The row by which `charge` extends a ledger whose head is `last`."""
        asked = {name: getattr(charge, name) for name in charge.__dataclass_fields__}
        row = cls(last.count + 1, **asked, charged_at=charged_at, previous_hash=last.hash, hash="")
        return replace(row, hash=digest(row.text))

    @property
    def head(self) -> Head:
        """The head of the ledger after this charge."""
        return Head(self.position, self.hash)

    @property
    def text(self) -> str:
        """As it is written in the chain: JSON that is exact for doubles."""
        sampling, schedule = self.event.sampling, self.event.sampling.schedule
        return json.dumps(
            {
                "position": int(self.position),
                "run": self.run,
                "round": int(self.round),
                "attempt": int(self.attempt),
                "policy": sampling.policy,
                "sampling_probability": float(sampling.sampling_probability),
                "population": int(sampling.population),
                "relation": sampling.relation,
                "schedule": schedule and {name: int(v) for name, v in asdict(schedule).items()},
                "strategy": [float(c) for c in self.event.strategy],
                "sum_queries": [_query_fields(query) for query in self.event.queries],
                "randomness": self.randomness,
                "cohort_commitment": self.cohort_commitment,
                "charged_at": self.charged_at,
                "previous_hash": self.previous_hash,
            }
        )

    def __str__(self) -> str:
        return (
            f"charge {self.position} (run {self.run}, round {self.round}, attempt {self.attempt})"
        )


@dataclass(frozen=True)
class Charge:
    """Receipt for one charge, good for one release.

    Copies share the one release: `copy`, `replace` and threads cannot double it, and it cannot be
    pickled.

    Attributes:
        run: name of the run.
        round: number of the round.
        attempt: number of the attempt.
        event: what was charged and may be released.
        hash: digest of the charge in the ledger.
    """

    run: str
    round: int
    attempt: int
    event: RoundEvent
    hash: str
    _used: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def redeem(self) -> RoundEvent:
        """The event to release, once.

        Raises:
            LedgerError: the receipt was redeemed before.
        """
        if not self._used.acquire(blocking=False):
            raise LedgerError(
                f"the charge of run {self.run}, round {self.round}, attempt {self.attempt} was "
                "redeemed before: two releases on one charge could be averaged, which removes "
                "noise that the ledger counts on"
            )
        return self.event


class Ledger:
    """All charges of one population, over all runs, in an append-only SQLite file.

    Guarantees:
        * a charge is durable (fsync) when `charge` returns, and never refunded;
        * processes and threads that charge one file never pass a budget together;
        * no charge is returned by this class that does not fit the chain.

    Use `create`, `open` or `open_or_create`, and close it or use it as a context manager.

    Attributes:
        ledger_id: 32 random hexadecimal digits.
        population_name: name of the population.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.RLock()
        try:
            self._genesis = self._first_text()
        except LedgerError:
            database.close()
            raise
        self.ledger_id = self._genesis.ledger_id
        self.population_name = self._genesis.population
        self._known = self._genesis.head  # what follows counts the charges up to this head
        self._rounds: dict[RoundEvent, int] = {}
        self._headroom: Headroom | None = None

    @classmethod
    def create(cls, path: Path, population: str) -> Self:
        """Create an empty ledger for a population.

        Raises:
            InvalidValueError: the population's name is empty or not printable.
            LedgerError: the file exists already or cannot be written.
        """
        return cls(Database.create(path, LEDGER, _first_rows(population)))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing ledger.

        Raises:
            LedgerError: there is no such file, or it is not a ledger that this code reads.
        """
        return cls(Database(path, LEDGER))

    @classmethod
    def open_or_create(cls, path: Path, population: str) -> Self:
        """Open the ledger of a population, or create it if there is no file.

        Raises:
            LedgerError: the ledger is of another population, or cannot be opened or created.
        """
        ledger = cls(Database.open_or_create(path, LEDGER, _first_rows(population)))
        if ledger.population_name != population:
            ledger.close()
            raise LedgerError(
                f"ledger {path} is of population {ledger.population_name!r}, not {population!r}"
            )
        return ledger

    @property
    def head(self) -> Head:
        """How many charges there are, and the digest of the last text."""
        row = self._only_row("SELECT count, hash FROM head")
        return Head(row["count"], row["hash"])

    def charge(self, charge: ProposedCharge, budget: PrivacyBudget | None = None) -> Charge:
        """Write down a charge, if the budget allows it, and return the receipt to release it.

        Args:
            charge: what is about to be released.
            budget: what all charges of this ledger together may cost; None: no limit.

        Raises:
            BudgetExceededError: the budget would be passed.
            LedgerError: this attempt was charged before, or the ledger is broken or cannot be
                written.
            In each case, nothing was charged.
        """
        with self._lock, self._database.transaction():
            self._catch_up()
            self._refuse_repetition(charge)
            if budget is not None:
                self._refuse_overspending(charge, budget)
            row = ChargedRow.following(self._known, charge, _now())
            self._database.insert("chain", _columns(row))
            self._database.write(
                "UPDATE head SET count = :position, hash = :hash",
                {"position": row.position, "hash": row.hash},
            )
        return Charge(row.run, row.round, row.attempt, row.event, row.hash)

    def admits(self, event: RoundEvent, budget: PrivacyBudget) -> bool:
        """Whether `charge` would now find that one more event of count 1 is within the budget.

        Raises:
            LedgerError: names the first new charge where the chain is broken.
        """
        with self._lock:
            self._catch_up()
            return self._headroom_for(event, budget).left > 0

    def charges(self, run: str | None = None) -> Iterator[ChargedRow]:
        """All charges, or those of one run, in the order in which they were made.

        Raises:
            LedgerError: names the first charge where the chain is broken.
        """
        rows = self._walk(self._genesis.head, self.head)
        return (row for row in rows if run is None or row.run == run)

    def events(self, run: str | None = None) -> list[RoundEvent]:
        """The event of each charge of `charges`, in order."""
        return [row.event for row in self.charges(run)]

    def spent(self) -> list[RoundEvent]:
        """All events so far with equal ones merged, in order of first use.

        Reads only what is new since this ledger was last asked or charged.

        Raises:
            LedgerError: names the first new charge where the chain is broken.
        """
        with self._lock:
            self._catch_up()
            return list(repeated(self._rounds))

    def runs(self) -> list[str]:
        """Names of the runs, in the order of their first charge."""
        sql = "SELECT run FROM chain WHERE position > 0 GROUP BY run ORDER BY min(position)"
        return [row["run"] for row in self._database.read(sql)]

    def next_attempt(self, run: str, round_number: int) -> int:
        """The number after the highest attempt at a round that was charged; 0 if there is none."""
        sql = "SELECT max(attempt) + 1 AS next FROM chain WHERE run = ? AND round = ?"
        return self._database.read(sql, (run, round_number))[0]["next"] or 0

    def contains_head(self, head: Head) -> bool:
        """Whether this ledger once had this head: it grew from there, and was not set back."""
        rows = self._database.read("SELECT hash FROM chain WHERE position = ?", (head.count,))
        return [row["hash"] for row in rows] == [head.hash]

    def verify(
        self, participation: ParticipationRecord | None = None, head: Head | None = None
    ) -> None:
        """Check every charge, and that the file still only grows.

        Without `head`, a ledger passes that was set back, or rewritten from some charge to its end.

        Args:
            participation: if given, every cohort committed to must be in it.
            head: if given, one that this ledger once had, kept elsewhere.

        Raises:
            LedgerError: names the first charge that is missing, changed, out of order, added
                outside the chain or without its cohort; or the head or trigger that is wrong.
        """
        for row in self.charges():
            if participation is not None:
                confirm_cohort(row, participation)
        strays = "position < 0 OR position > (SELECT count FROM head)"
        for stray in self._database.read(f"SELECT position FROM chain WHERE {strays} LIMIT 1"):
            raise LedgerError(f"charge {stray['position']} was added outside the chain")
        if altered := self._database.altered_schema():
            raise LedgerError(f"tables or triggers were altered: {', '.join(altered)}")
        if head is not None and not self.contains_head(head):
            raise never_had(head)

    def export(self, stream: TextIO) -> None:
        """Write the texts of the chain as lines, and a last line with the head.

        The digest of a line is SHA-256 of its bytes without the line feed. `ExportedLedger` reads
        it. Who took part is never in it.

        Raises:
            LedgerError: names the first charge where the chain is broken.
        """
        head = self.head
        stream.write(f"{self._genesis.text}\n")
        for row in self._walk(self._genesis.head, head):
            stream.write(f"{row.text}\n")
        stream.write(f"{head_line(head)}\n")

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _first_text(self) -> Genesis:
        row = self._only_row("SELECT text, hash FROM chain WHERE position = 0")
        genesis = Genesis.parse(row["text"])
        if genesis.head.hash != row["hash"]:
            raise LedgerError("what names the ledger was changed")
        return genesis

    def _only_row(self, sql: str) -> sqlite3.Row:
        rows = self._database.read(sql)
        if len(rows) != 1:
            raise LedgerError(f"the ledger has {len(rows)} rows for {sql!r}; it must have one")
        return rows[0]

    def _walk(self, last: Head, end: Head) -> Iterator[ChargedRow]:
        """The charges after `last` up to `end`, in order, each checked before it is yielded."""
        sql = "SELECT * FROM chain WHERE position > ? AND position <= ? ORDER BY position LIMIT ?"
        # Rows that were read once never change, so pages agree.
        while page := self._database.read(sql, (last.count, end.count, _ROWS_AT_ONCE)):
            for stored in page:
                row = self._checked(last, stored)
                yield row
                last = row.head
        if last.count < end.count:
            raise LedgerError(f"charge {last.count + 1} is missing")
        if last != end:
            raise LedgerError(
                f"the head is charge {end.count} with hash {end.hash}, but the chain leads to "
                f"charge {last.count} with hash {last.hash}"
            )

    def _checked(self, last: Head, stored: sqlite3.Row) -> ChargedRow:
        if stored["position"] != last.count + 1:
            raise LedgerError(f"charge {last.count + 1} is missing")
        if not isinstance(stored["text"], str) or digest(stored["text"]) != stored["hash"]:
            raise LedgerError(f"charge {stored['position']} was changed")
        row = next_row(last, stored["text"])
        if _columns(row) != dict(stored):
            raise LedgerError(f"{row} was changed")
        return row

    def _catch_up(self) -> None:
        for row in self._walk(self._known, self.head):
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
        sql = "SELECT 1 FROM chain WHERE run = ? AND round = ? AND attempt = ?"
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


def digest(text: str) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def head_line(head: Head) -> str:
    """The last line of an export."""
    return json.dumps({"head": asdict(head)})


def next_row(last: Head, text: str) -> ChargedRow:
    """The charge that a text describes, after `last`.

    Raises:
        LedgerError: the text does not follow `last`, or is not what a ledger writes, character by
            character, of a charge that it takes.
    """
    try:
        fields = json.loads(text)
        found = Head(fields["position"] - 1, fields["previous_hash"])
        row = ChargedRow.following(found, _parsed(fields), fields["charged_at"])
        if row.text != text or not row.charged_at.isprintable():
            raise ValueError("it says the same as a charge, but is not written like one")
    except (
        AttributeError,
        KeyError,
        OverflowError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        raise LedgerError(
            f"charge {last.count + 1} is not one that this fedpriv knows: {error}"
        ) from error
    if found.count != last.count:
        raise LedgerError(f"charge {last.count + 1} is missing: {row} is in its place")
    if found.hash != last.hash:
        before = f"charge {last.count}" if last.count else "the text that names the ledger"
        raise LedgerError(f"{row} does not follow {before}: one of them was replaced")
    return row


def confirm_cohort(row: ChargedRow, participation: ParticipationRecord) -> None:
    """Check that the cohort of a charge is recorded and can have been drawn in its round.

    Raises:
        LedgerError: names the charge whose cohort is missing, changed, of another attempt, or not
            of the population.
    """
    try:
        cohort = participation.cohort_of(row.cohort_commitment)
    except LedgerError as error:
        raise LedgerError(f"{row}: {error}") from error
    if (cohort.run, cohort.round, cohort.attempt) != (row.run, row.round, row.attempt):
        raise LedgerError(
            f"{row}: its cohort is that of run {cohort.run}, round {cohort.round}, "
            f"attempt {cohort.attempt}"
        )
    population = row.event.sampling.population
    if cohort.users.size and cohort.users[-1] >= population:
        raise LedgerError(
            f"{row}: its cohort has user {cohort.users[-1]} of a population of {population}"
        )


def never_had(head: Head) -> LedgerError:
    """The error where a head that was kept elsewhere is not in the chain."""
    return LedgerError(
        f"the ledger never had the head of {head.count} charges with hash {head.hash}: "
        "it is another ledger, or was set back or rewritten"
    )


def _query_fields(query: SumQueryEvent) -> dict[str, object]:
    return {
        "group": str(query.group),
        "clipping_norm": float(query.clipping_norm),
        "noise_stddev": float(query.noise_stddev) + 0.0,  # there is one zero
        "granularity": None if query.granularity is None else float(query.granularity),
    }


def _parsed(fields: dict[str, Any]) -> ProposedCharge:
    """The charge that JSON fields are about; raises what its constructors raise."""
    schedule = fields["schedule"]
    sampling = SamplingEvent(
        SamplingPolicy(fields["policy"]),
        fields["sampling_probability"],
        fields["population"],
        NeighbouringRelation(fields["relation"]),
        None if schedule is None else Schedule(**schedule),
    )
    queries = tuple(SumQueryEvent(**query) for query in fields["sum_queries"])
    event = RoundEvent(sampling, queries, strategy=tuple(fields["strategy"]))
    return ProposedCharge(
        fields["run"],
        fields["round"],
        fields["attempt"],
        Randomness(fields["randomness"]),
        event,
        fields["cohort_commitment"],
    )


def _columns(row: ChargedRow) -> dict[str, object]:
    names = ("position", "run", "round", "attempt", "text", "hash")
    return {name: getattr(row, name) for name in names}


def _first_rows(population: str) -> dict[str, dict[str, object]]:
    genesis = Genesis(secrets.token_hex(16), population, _now())
    first = {"position": 0, "text": genesis.text, "hash": genesis.head.hash}
    return {"chain": first, "head": asdict(genesis.head)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
