"""What a node remembers: the rounds it took part in, and the ledgers it was shown."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from sqlite3 import Row
from typing import Self

from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger import Head
from fedpriv.ledger.database import Database, FileFormat
from fedpriv.wire import RoundOffer

_SCHEMA = """
CREATE TABLE taken_part (
    population_name TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    population INTEGER NOT NULL,
    sampling_probability REAL NOT NULL,
    noise_multiplier REAL NOT NULL,
    at TEXT NOT NULL,
    PRIMARY KEY (population_name, run, round, attempt)
) WITHOUT ROWID;
CREATE INDEX taken_part_by_time ON taken_part (at);
CREATE TABLE ledgers (
    ledger_id TEXT PRIMARY KEY,
    population_name TEXT NOT NULL UNIQUE,
    count INTEGER NOT NULL,
    hash TEXT NOT NULL
) WITHOUT ROWID;
"""
_FORMAT = FileFormat("journal", 0x66707064, _SCHEMA, 0o600)

# An interrupted attempt is offered again by the same name: the looser of the two offers counts,
# since the node has agreed to it, and the later time.
_RECORD = """
INSERT INTO taken_part VALUES (
    :population_name, :run, :round, :attempt,
    :population, :sampling_probability, :noise_multiplier, :at
) ON CONFLICT DO UPDATE SET
    sampling_probability = max(sampling_probability, excluded.sampling_probability),
    noise_multiplier = min(noise_multiplier, excluded.noise_multiplier),
    at = max(at, excluded.at)
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
        * an attempt counts once, however often it is recorded;
        * a population has one ledger, and the remembered head of a ledger never goes back.

    Every method raises InvalidValueError if the file cannot be used, from any thread.
    """

    def __init__(self, path: Path) -> None:
        with _refusing():
            self._database = Database(path, _FORMAT, {})

    def record(self, population_name: str, offer: RoundOffer, now: datetime) -> None:
        """Record that the node takes part; if that raises, the node must not train."""
        row = {"population_name": population_name, "at": _text(now)}
        self._write(_RECORD, vars(offer.price) | vars(offer.id) | row)

    def rounds_since(self, moment: datetime) -> int:
        """How many attempts were recorded at this moment or later, of all populations."""
        (row,) = self._read("SELECT count(*) FROM taken_part WHERE at >= ?", _text(moment))
        return int(row[0])

    def taken_part(self, population_name: str) -> tuple[TakenPart, ...]:
        """What was recorded of a population, by run, round and attempt."""
        sql = (
            "SELECT run, round, attempt, population, sampling_probability, noise_multiplier "
            "FROM taken_part WHERE population_name = ? ORDER BY run, round, attempt"
        )
        return tuple(TakenPart(*row) for row in self._read(sql, population_name))

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

    def _read(self, sql: str, parameter: str) -> Sequence[Row]:
        with _refusing():
            return self._database.read(sql, (parameter,))


@contextmanager
def _refusing() -> Iterator[None]:
    """A broken journal must not be taken for a broken ledger."""
    try:
        yield
    except LedgerError as error:
        raise InvalidValueError(str(error)) from error


def _text(moment: datetime) -> str:
    if moment.tzinfo is None:
        raise InvalidValueError(f"the moment {moment} has no time zone; it must have one")
    return moment.astimezone(UTC).isoformat(timespec="microseconds")
