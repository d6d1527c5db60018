"""A node's journal, which remembers its answers and the heads of ledgers that it has verified."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from sqlite3 import Row

import numpy as np
from numpy.typing import NDArray

from fedpriv import wire
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger import Head
from fedpriv.ledger.database import Database, FileFormat, InFile
from fedpriv.ledger.events import RoundEvent, Schedule
from fedpriv.ledger.ledger import event_from, event_text

_SCHEMA = """
CREATE TABLE answers (
    population_name TEXT NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL,
    attempt INTEGER NOT NULL, event BLOB NOT NULL, part INTEGER NOT NULL, asked INTEGER NOT NULL,
    charged INTEGER NOT NULL, at TEXT NOT NULL,
    PRIMARY KEY (population_name, run, round, attempt)
) WITHOUT ROWID;
CREATE INDEX answers_by_time ON answers (at);
CREATE TABLE events (digest BLOB PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE asked (
    population_name TEXT NOT NULL, run TEXT NOT NULL, round INTEGER NOT NULL,
    attempt INTEGER NOT NULL, part INTEGER NOT NULL, users BLOB NOT NULL,
    PRIMARY KEY (population_name, run, round, attempt, part, users)
) WITHOUT ROWID;
CREATE TABLE populations (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE equivocations (
    population_name TEXT NOT NULL, run TEXT NOT NULL, attempt BLOB NOT NULL, shown BLOB NOT NULL,
    other BLOB NOT NULL, PRIMARY KEY (population_name, run)
) WITHOUT ROWID;
CREATE TABLE ledgers (
    ledger_id TEXT PRIMARY KEY, population_name TEXT NOT NULL UNIQUE, count INTEGER NOT NULL,
    hash TEXT NOT NULL
) WITHOUT ROWID;
"""
_FORMAT = FileFormat("journal of this version", 0x66707065, _SCHEMA, 0o600)
# Stored once for all rounds that share it: an event with a strategy is as long as the run.
_RECORD_EVENT = "INSERT OR IGNORE INTO events VALUES (:event, :text)"
_TAKEN_PART = """
SELECT run, round, attempt, event, part, asked, charged FROM answers
WHERE population_name = ? ORDER BY run, round, attempt
"""
_SETTLE = """
UPDATE answers SET charged = 1
WHERE population_name = ? AND run = ? AND round = ? AND attempt = ?
"""
_REMEMBER = """
INSERT INTO ledgers VALUES (:ledger_id, :population_name, :count, :hash)
ON CONFLICT (ledger_id) DO UPDATE SET count = excluded.count, hash = excluded.hash
WHERE excluded.count > ledgers.count
"""


@dataclass(frozen=True)
class TakenPart:
    """An attempt at a round in which the node took part."""

    run: str
    round: int
    attempt: int
    event: RoundEvent  # to be charged
    part: int  # index of the round in its event, from 0
    asked: int  # number of the node's users that were drawn
    charged: bool = False  # whether a verified ledger has paid for it


@dataclass(frozen=True)
class RoundSeries:
    """An event of several rounds, identified by the attempt that pays for it."""

    run: str
    round: int
    attempt: int
    schedule: Schedule


@dataclass(frozen=True)
class Remembered:
    """A node's memory of a population at one moment."""

    ledger_id: str | None  # of the population's ledger, if a head of it was remembered
    head: Head | None  # the newest that was verified
    taken_part: tuple[TakenPart, ...]


class Journal(InFile):
    """A SQLite file of a node, created with mode 0600 if it is absent.

    It reveals when users of the node were drawn and, during a series of rounds, which users. Keep
    it as secret as their data.

    Guarantees:
        * every record is durable (fsync) when the call returns;
        * each attempt is recorded once, whatever else its offers say;
        * a population has one ledger from its first charge or the node's first answer on, and the
          remembered head of a ledger never moves backwards.

    Methods may be called from any thread. All raise InvalidValueError if the file is unusable.
    """

    def __init__(self, path: Path) -> None:
        with _refusing():
            super().__init__(Database(path, _FORMAT, {}))
        self._events: dict[bytes, RoundEvent] = {}  # by digest: parsing one takes long

    def record(
        self,
        population_name: str,
        offer: wire.RoundOffer,
        now: datetime,
        objection: Callable[[], str | None] = lambda: None,
    ) -> str | None:
        """Record that an offer is answered, or return why it must not be, in one sentence.

        An offer must not be answered if its attempt was recorded before, or if `objection` returns
        a sentence or this method raises. `objection` is called in the same transaction, so the
        journal cannot change in between.
        """
        text, attempt = event_text(offer.price.event), offer.id
        event = hashlib.sha256(text.encode()).digest()
        with _refusing(), self.database.transaction():
            if self.answered(population_name, attempt):
                return "this attempt was answered before"
            if (reason := objection()) is None:
                self.database.write(_RECORD_EVENT, {"event": event, "text": text})
                key = population_name, attempt.run, attempt.round, attempt.attempt
                row = *key, event, offer.price.part, offer.users.size, 0, _text(now)
                self.database.write("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
        return reason

    def populations(self) -> frozenset[str]:
        """Return the names of all populations in the journal."""
        union = "UNION SELECT population_name FROM"
        rows = self._read(f"SELECT name FROM populations {union} answers {union} ledgers")
        return frozenset(str(name) for (name,) in rows)

    def remember_population(self, name: str) -> None:
        """Record that the node takes part in this population."""
        if name not in self.populations():
            with _refusing(), self.database.transaction():
                self.database.write("INSERT OR IGNORE INTO populations VALUES (?)", (name,))

    def answered(self, population_name: str, attempt: wire.RoundId) -> bool:
        """Return whether an offer of this attempt was recorded, under any nonce."""
        sql = "SELECT 1 FROM answers WHERE (population_name, run, round, attempt) = (?, ?, ?, ?)"
        key = attempt.run, attempt.round, attempt.attempt
        return bool(self._read(sql, population_name, *key))

    def settle(self, population_name: str, charged: Iterable[TakenPart]) -> None:
        """Record that a verified ledger has charges for these answers."""
        with _refusing(), self.database.transaction():
            for part in charged:
                key = population_name, part.run, part.round, part.attempt
                self.database.write(_SETTLE, key)

    def outstanding(self, population_name: str) -> int:
        """Return the number of answers that no verified ledger has charged."""
        sql = "SELECT count(*) FROM answers WHERE population_name = ? AND charged = 0"
        return int(self._read(sql, population_name)[0][0])

    def answers_since(self, moment: datetime) -> int:
        """Return the number of answers to all populations recorded at this moment or later."""
        return int(self._read("SELECT count(*) FROM answers WHERE at >= ?", _text(moment))[0][0])

    def admit(
        self, population_name: str, series: RoundSeries, part: int, users: NDArray[np.int64]
    ) -> bool:
        """Record the users asked in a part of a series; return False if its schedule forbids it.

        `users` are numbers that identify users independently of the server. A user may be asked
        again in the same part, for instance after the server was stopped. The second part of a
        series, which is charged by then, deletes the records of all other series of the run.
        """
        of_run, key = (population_name, series.run), (series.round, series.attempt)
        condition = "WHERE population_name = ? AND run = ? AND (round, attempt)"
        with _refusing(), self.database.transaction():
            if part:
                self.database.write(f"DELETE FROM asked {condition} <> (?, ?)", (*of_run, *key))
            users_by_part: dict[int, list[NDArray[np.int64]]] = {}  # by part
            query = f"SELECT part, users FROM asked {condition} = (?, ?) AND part <> ?"
            for other_part, blob in self.database.read(query, (*of_run, *key, part)):
                users_by_part.setdefault(other_part, []).append(np.frombuffer(blob, "<i8"))
            participations, schedule = np.ones(users.size, np.int64), series.schedule
            for other_part, vectors in users_by_part.items():
                repeated = np.isin(users, np.concatenate(vectors))
                participations += repeated
                if repeated.any() and abs(other_part - part) < schedule.separation:
                    return False
            if participations.max(initial=0) > schedule.participations:
                return False
            row = (*of_run, *key, part, users.astype("<i8").tobytes())
            self.database.write("INSERT OR IGNORE INTO asked VALUES (?, ?, ?, ?, ?, ?)", row)
            return True

    def record_equivocation(
        self,
        population_name: str,
        attempt: wire.RoundId,
        shown: wire.SignedHead,
        other: wire.Countersignature,
    ) -> None:
        """Record, once for a run, that the server signed two heads for one proposal of it.

        The messages are kept as they were signed: `shown` to this node and `other` to another.
        """
        attempt_message, head_message = wire.ROUND_ID.encode(attempt), wire.HEAD.encode(shown)
        messages = attempt_message, head_message, wire.COUNTERSIGNATURE.encode(other)
        row = population_name, attempt.run, *(m.SerializeToString() for m in messages)
        with _refusing(), self.database.transaction():
            self.database.write("INSERT OR IGNORE INTO equivocations VALUES (?, ?, ?, ?, ?)", row)

    def equivocated(self, population_name: str, run: str) -> bool:
        """Return whether an equivocation of this run was recorded."""
        sql = "SELECT 1 FROM equivocations WHERE (population_name, run) = (?, ?)"
        return bool(self._read(sql, population_name, run))

    def remembered(self, population_name: str) -> Remembered:
        """Return the node's memory of a population, with participations by run and round."""
        sql = "SELECT ledger_id, count, hash FROM ledgers WHERE population_name = ?"
        ledgers = self._read(sql, population_name)
        rows = self._read(_TAKEN_PART, population_name)  # before `events`, which contains theirs
        texts = self._read("SELECT digest, text FROM events")
        for digest, text in texts:
            if digest not in self._events:
                self._events[digest] = event_from(text)
        taken_part = tuple(
            TakenPart(run, number, attempt, self._events[event], part, asked, bool(charged))
            for run, number, attempt, event, part, asked, charged in rows
        )
        if not ledgers:
            return Remembered(None, None, taken_part)
        ledger_id, *head = ledgers[0]
        if not head[0] and not taken_part:  # if the plan changes, a new ledger may replace it
            return Remembered(None, None, ())
        return Remembered(ledger_id, Head(*head), taken_part)

    def remember_head(self, ledger_id: str, population_name: str, head: Head) -> None:
        """Remember a verified head of a ledger, unless a newer one is known.

        InvalidValueError: the population has another ledger.
        """
        names = {"ledger_id": ledger_id, "population_name": population_name}
        with _refusing(), self.database.transaction():
            former_id = self.remembered(population_name).ledger_id
            if former_id not in (None, ledger_id):
                sentence = f"population {population_name!r} has the ledger {former_id}"
                raise InvalidValueError(f"{sentence}, not {ledger_id}")
            if former_id is None:
                delete = "DELETE FROM ledgers WHERE population_name = ?"
                self.database.write(delete, (population_name,))
            self.database.write(_REMEMBER, names | vars(head))

    def _read(self, sql: str, *parameters: object) -> Sequence[Row]:
        with _refusing():
            return self.database.read(sql, parameters)


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn LedgerError into InvalidValueError: the journal is unusable, not the server's ledger."""
    try:
        yield
    except LedgerError as error:
        raise InvalidValueError(str(error)) from error


def _text(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
