"""What a node remembers: the answers it gave, and the ledgers it was shown."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from sqlite3 import Row
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger import Head
from fedpriv.ledger.database import Database, FileFormat
from fedpriv.ledger.events import RoundEvent, Schedule
from fedpriv.ledger.ledger import event_from, event_text
from fedpriv.wire import RoundOffer, encode_offer

_SCHEMA = """
CREATE TABLE answers (
    population_name TEXT NOT NULL,
    digest BLOB NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    event BLOB NOT NULL,
    part INTEGER NOT NULL,
    at TEXT NOT NULL,
    PRIMARY KEY (population_name, digest)
) WITHOUT ROWID;
CREATE INDEX answers_by_time ON answers (at);
CREATE TABLE events (digest BLOB PRIMARY KEY, text TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE asked (
    population_name TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    part INTEGER NOT NULL,
    users BLOB NOT NULL,
    PRIMARY KEY (population_name, run, round, attempt, part, users)
) WITHOUT ROWID;
CREATE TABLE populations (name TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE ledgers (
    ledger_id TEXT PRIMARY KEY,
    population_name TEXT NOT NULL UNIQUE,
    count INTEGER NOT NULL,
    hash TEXT NOT NULL
) WITHOUT ROWID;
"""
_FORMAT = FileFormat("journal", 0x66707064, _SCHEMA, 0o600)
_RECORD = """
INSERT INTO answers VALUES (
    :population_name, :digest, :run, :round, :attempt, :event, :part, :at
)
"""
# Once for all rounds that have it: with a strategy it is as long as the run.
_RECORD_EVENT = "INSERT OR IGNORE INTO events VALUES (:event, :text)"
_TAKEN_PART = """
SELECT DISTINCT run, round, attempt, event, part FROM answers WHERE population_name = ?
ORDER BY run, round, attempt, event, part
"""
_REMEMBER = """
INSERT INTO ledgers VALUES (:ledger_id, :population_name, :count, :hash)
ON CONFLICT (ledger_id) DO UPDATE SET count = excluded.count, hash = excluded.hash
WHERE excluded.count > ledgers.count
"""


@dataclass(frozen=True)
class TakenPart:
    """What was offered of an attempt at a round that the node took part in."""

    run: str
    round: int
    attempt: int
    event: RoundEvent  # as which the round was to be charged
    part: int  # which round of the event it was, from 0


@dataclass(frozen=True)
class RoundSeries:
    """An event of several rounds, by the attempt with which it was charged, or is to be."""

    run: str
    round: int
    attempt: int
    schedule: Schedule


@dataclass(frozen=True)
class Remembered:
    """What a node remembers of a population at some moment."""

    ledger_id: str | None  # of its ledger, if a head of one was remembered
    head: Head | None  # the newest that was verified
    taken_part: tuple[TakenPart, ...]  # of an attempt several, if its offers differed in them


class Journal:
    """A SQLite file of a node, made if there is none, with mode 0600.

    It says when users of the node were drawn and, of a series of rounds that is under way, which:
    keep it as secret as their data.

    Guarantees:
        * what is recorded or remembered is durable (fsync) when the call returns;
        * each offer is recorded once; of one attempt, two that differ in users, nonce or anything
          else but the time that is left are two;
        * a population has one ledger, from its first charge or the node's first answer on, and the
          remembered head of a ledger never goes back.

    Every method raises InvalidValueError if the file cannot be used, from any thread.
    """

    def __init__(self, path: Path) -> None:
        with _refusing():
            self._database = Database(path, _FORMAT, {})

    def record(
        self,
        population_name: str,
        offer: RoundOffer,
        now: datetime,
        objection: Callable[[], str | None] = lambda: None,
    ) -> str | None:
        """Record that an offer is answered, and return None, unless there is an objection.

        It is asked for, and what it reads of the journal holds, until the answer is recorded. If
        there is one, or this raises, the node must not answer.
        """
        text, part = event_text(offer.price.event), offer.price.part
        event = hashlib.sha256(text.encode()).digest()
        row = {"population_name": population_name, "digest": _digest_of(offer), "at": _text(now)}
        with _refusing(), self._database.transaction():
            if (why := objection()) is None:
                self._database.write(_RECORD_EVENT, {"event": event, "text": text})
                self._database.write(_RECORD, vars(offer.id) | row | {"event": event, "part": part})
        return why

    def populations(self) -> frozenset[str]:
        """Names of the populations of which anything is remembered."""
        named = "UNION SELECT population_name FROM"
        rows = self._read(f"SELECT name FROM populations {named} answers {named} ledgers")
        return frozenset(str(name) for (name,) in rows)

    def remember_population(self, name: str) -> None:
        """Keep that the node takes part in this population."""
        if name not in self.populations():
            with _refusing(), self._database.transaction():
                self._database.write("INSERT OR IGNORE INTO populations VALUES (?)", (name,))

    def answered(self, population_name: str, offer: RoundOffer) -> bool:
        """Whether this offer was recorded."""
        sql = "SELECT 1 FROM answers WHERE population_name = ? AND digest = ?"
        return bool(self._read(sql, population_name, _digest_of(offer)))

    def answers_since(self, moment: datetime) -> int:
        """How many offers were recorded at this moment or later, of all populations."""
        (row,) = self._read("SELECT count(*) FROM answers WHERE at >= ?", _text(moment))
        return int(row[0])

    def admit(
        self, population_name: str, series: RoundSeries, part: int, users: NDArray[np.int64]
    ) -> bool:
        """Record whom a part of a series asks, unless its schedule does not allow it; whether so.

        Each user is a number that stays the same whatever the server says.
        A user may be asked again in the same part, as after a stop of the server. Other series of
        the run are forgotten at the second part of this one, which is charged by then.
        """
        of_run, key = (population_name, series.run), (series.round, series.attempt)
        where = "WHERE population_name = ? AND run = ? AND (round, attempt)"
        with _refusing(), self._database.transaction():
            if part:
                self._database.write(f"DELETE FROM asked {where} <> (?, ?)", (*of_run, *key))
            before: dict[int, list[NDArray[np.int64]]] = {}
            known = f"SELECT part, users FROM asked {where} = (?, ?) AND part <> ?"
            for other, there in self._database.read(known, (*of_run, *key, part)):
                before.setdefault(other, []).append(np.frombuffer(there, "<i8"))
            times, schedule = np.ones(users.size, np.int64), series.schedule
            for other, there in before.items():
                again = np.isin(users, np.concatenate(there))
                times += again
                if again.any() and abs(other - part) < schedule.separation:
                    return False
            if times.max(initial=0) > schedule.participations:
                return False
            row = (*of_run, *key, part, users.astype("<i8").tobytes())
            self._database.write("INSERT OR IGNORE INTO asked VALUES (?, ?, ?, ?, ?, ?)", row)
            return True

    def remembered(self, population_name: str) -> Remembered:
        """All that is remembered of a population now; what it took part in by run and round."""
        ledger_id, head = self._ledger_of(population_name)
        rows = self._read(_TAKEN_PART, population_name)  # first: their events are there by now
        texts = self._read("SELECT digest, text FROM events")
        events = {digest: event_from(text) for digest, text in texts}
        taken_part = tuple(
            TakenPart(run, number, attempt, events[event], part)
            for run, number, attempt, event, part in rows
        )
        if head is not None and head.count == 0 and not taken_part:
            return Remembered(None, None, ())  # a plan that was changed begins another ledger
        return Remembered(ledger_id, head, taken_part)

    def remember_head(self, ledger_id: str, population_name: str, head: Head) -> None:
        """Keep the newest verified head of a ledger; that of fewer charges changes nothing."""
        names = {"ledger_id": ledger_id, "population_name": population_name}
        with _refusing(), self._database.transaction():
            known = self.remembered(population_name).ledger_id
            if known not in (None, ledger_id):
                found = f"population {population_name!r} has the ledger {known}"
                raise InvalidValueError(f"{found}, not {ledger_id}")
            if known is None:
                forget = "DELETE FROM ledgers WHERE population_name = ?"
                self._database.write(forget, (population_name,))
            self._database.write(_REMEMBER, names | vars(head))

    def _ledger_of(self, population_name: str) -> tuple[str | None, Head | None]:
        """Id and head of the ledger of a population, if a head of one was remembered."""
        sql = "SELECT ledger_id, count, hash FROM ledgers WHERE population_name = ?"
        rows = self._read(sql, population_name)
        return (str(rows[0][0]), Head(*rows[0][1:])) if rows else (None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def _read(self, sql: str, *parameters: object) -> Sequence[Row]:
        with _refusing():
            return self._database.read(sql, parameters)


@contextmanager
def _refusing() -> Iterator[None]:
    """A broken journal must not be taken for a broken ledger."""
    try:
        yield
    except LedgerError as error:
        raise InvalidValueError(str(error)) from error


def _digest_of(offer: RoundOffer) -> bytes:
    """SHA-256 of all that is offered; the model itself is sent once for each answer."""
    message = encode_offer(replace(offer, seconds=1.0))
    return hashlib.sha256(message.SerializeToString(deterministic=True)).digest()


def _text(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise InvalidValueError(f"the moment {moment} has no time zone; it must have one")
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
