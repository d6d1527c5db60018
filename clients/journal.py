"""What a node remembers: the answers it gave, and the ledgers it was shown."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from sqlite3 import Row
from typing import Self

from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger import Head
from fedpriv.ledger.database import Database, FileFormat
from fedpriv.wire import RoundOffer, encode_offer

_SCHEMA = """
CREATE TABLE answers (
    population_name TEXT NOT NULL,
    digest BLOB NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    population INTEGER NOT NULL,
    sampling_probability REAL NOT NULL,
    noise_multiplier REAL NOT NULL,
    at TEXT NOT NULL,
    PRIMARY KEY (population_name, digest)
) WITHOUT ROWID;
CREATE INDEX answers_by_time ON answers (at);
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
    :population_name, :digest, :run, :round, :attempt,
    :population, :sampling_probability, :noise_multiplier, :at
)
"""
# Where an attempt was answered several times, the loosest offer counts: the node agreed to it.
_TAKEN_PART = """
SELECT run, round, attempt, max(population), max(sampling_probability), min(noise_multiplier)
FROM answers WHERE population_name = ? GROUP BY run, round, attempt ORDER BY run, round, attempt
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
    population: int  # N
    sampling_probability: float  # q; the largest, if the attempt was offered several times
    noise_multiplier: float  # z; the smallest, likewise


@dataclass(frozen=True)
class Remembered:
    """What a node remembers of a population at some moment."""

    ledger_id: str | None  # of its ledger, if a head of one was remembered
    head: Head | None  # the newest that was verified
    taken_part: tuple[TakenPart, ...]


class Journal:
    """A SQLite file of a node, made if there is none, with mode 0600.

    It says when users of the node were drawn, though not which: keep it as secret as their data.

    Guarantees:
        * what is recorded or remembered is durable (fsync) when the call returns;
        * each offer is recorded once; of one attempt, two that differ in users, nonce or anything
          else but the time that is left are two;
        * a population has one ledger, and the remembered head of a ledger never goes back.

    Every method raises InvalidValueError if the file cannot be used, from any thread.
    """

    def __init__(self, path: Path) -> None:
        with _refusing():
            self._database = Database(path, _FORMAT, {})

    def record(self, population_name: str, offer: RoundOffer, now: datetime) -> None:
        """Record that an offer is answered; if that raises, the node must not answer it."""
        row = {"population_name": population_name, "digest": _digest_of(offer), "at": _text(now)}
        self._write(_RECORD, vars(offer.price) | vars(offer.id) | row)

    def answered(self, population_name: str, offer: RoundOffer) -> bool:
        """Whether this offer was recorded."""
        sql = "SELECT 1 FROM answers WHERE population_name = ? AND digest = ?"
        return bool(self._read(sql, population_name, _digest_of(offer)))

    def answers_since(self, moment: datetime) -> int:
        """How many offers were recorded at this moment or later, of all populations."""
        (row,) = self._read("SELECT count(*) FROM answers WHERE at >= ?", _text(moment))
        return int(row[0])

    def taken_part(self, population_name: str) -> tuple[TakenPart, ...]:
        """What was recorded of a population, by run, round and attempt."""
        return tuple(TakenPart(*row) for row in self._read(_TAKEN_PART, population_name))

    def remembered(self, population_name: str) -> Remembered:
        """All that is remembered of a population now."""
        known = self.ledger_of(population_name)
        head = None if known is None else self.last_head(known)
        return Remembered(known, head, self.taken_part(population_name))

    def remember_head(self, ledger_id: str, population_name: str, head: Head) -> None:
        """Keep the newest verified head of a ledger; that of fewer charges changes nothing."""
        known = self.ledger_of(population_name)
        if known not in (None, ledger_id):
            found = f"population {population_name!r} has the ledger {known}"
            raise InvalidValueError(f"{found}, not {ledger_id}")
        names = {"ledger_id": ledger_id, "population_name": population_name}
        self._write(_REMEMBER, names | vars(head))

    def last_head(self, ledger_id: str) -> Head | None:
        """The remembered head of a ledger, if there is one."""
        rows = self._read("SELECT count, hash FROM ledgers WHERE ledger_id = ?", ledger_id)
        return Head(*rows[0]) if rows else None

    def ledger_of(self, population_name: str) -> str | None:
        """Id of the ledger of a population, or None if no head of one was remembered."""
        rows = self._read(
            "SELECT ledger_id FROM ledgers WHERE population_name = ?", population_name
        )
        return str(rows[0][0]) if rows else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def _write(self, sql: str, row: Mapping[str, object]) -> None:
        with _refusing(), self._database.transaction():
            self._database.write(sql, row)

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
