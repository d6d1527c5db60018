"""Who took part, kept apart from the ledger: secret, and never exported.

The ledger holds only a commitment to each cohort: SHA-256 over a salt of 32 random bytes and the
cohort. It binds the server to the cohort and, without the salt, says nothing about it.

Of a series of rounds that is under way, the record also holds the key. It is good in this file
alone: two copies of a folder that both went on with it would draw its noise twice. Of each run the
record holds a digest of the users' ids, since a run goes on with the users that it began with:
others at their positions would be in more rounds of a series than it has charged.
"""

import hashlib
import hmac
import json
import os
import secrets
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.database import Database, FileFormat
from fedpriv.support.checks import require

Users = npt.NDArray[np.int64]  # positions in the population, ascending: [cohort]
Attempt = tuple[str, int, int]  # run, round and attempt

SERIES_KEYS = "series"  # a table: no copy of a record has any of its rows
_SALT_BYTES = 32
_SCHEMA = """
CREATE TABLE participation (
    commitment TEXT PRIMARY KEY,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    salt BLOB NOT NULL,
    users BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX participation_by_attempt ON participation (run, round, attempt);
CREATE TABLE ledger (
    singleton INTEGER PRIMARY KEY CHECK (singleton = 1), count INTEGER NOT NULL, hash TEXT NOT NULL
);
CREATE TABLE enrolled (run TEXT PRIMARY KEY, users TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE series (
    commitment TEXT PRIMARY KEY, run TEXT NOT NULL, key BLOB NOT NULL, bound TEXT NOT NULL
) WITHOUT ROWID;
"""
_KEEP_HEAD = """
INSERT INTO ledger VALUES (1, :count, :hash)
ON CONFLICT DO UPDATE SET count = excluded.count, hash = excluded.hash
WHERE excluded.count > ledger.count
"""
_FORMAT = FileFormat("participation record", 0x66707077, _SCHEMA, 0o600)


@dataclass(frozen=True)
class Head:
    """A point in the chain of a ledger: the number of charges, and the digest of the last text."""

    count: int
    hash: str

    @property
    def line(self) -> str:
        """The last line of an export."""
        return json.dumps({"head": vars(self)})


def beside(ledger: Path) -> Path:
    """Where the participation record of a ledger lies: no two ledgers of a folder share one.

    A ledger has one, whatever symbolic links lead to it.
    """
    if ledger.is_symlink():
        ledger = Path(os.path.realpath(ledger))  # also of a loop, which `resolve` refuses
    plain = ledger.name.removesuffix(".sqlite")
    end = ".participation" if plain == ledger.name else ".participation.sqlite"
    return ledger.with_name(plain + end)


class ParticipationRecord:
    """A SQLite file of cohorts, readable and writable by its owner alone.

    Guarantees:
        * a cohort is durable when `record` returns its commitment;
        * the salt comes from the operating system, in seeded runs too;
        * a cohort that is read back is the one that was committed to.
    """

    def __init__(self, database: Database) -> None:
        self.database = database

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing record."""
        return cls(Database(path, _FORMAT))

    @classmethod
    def open_or_create(cls, path: Path) -> Self:
        """Open the record at `path`, or create it if there is nothing."""
        return cls(Database(path, _FORMAT, {}))

    def record(
        self,
        run: str,
        round_number: int,
        attempt: int,
        users: npt.NDArray[np.integer],
        series_key: bytes | None = None,
    ) -> str:
        """Keep a cohort, distinct positions in any order, and return its commitment.

        Call it before asking the cohort, so that every commitment in the ledger has a cohort, and
        an attempt that is killed can be charged. The same attempt may be recorded again.

        Where the cohort is the first of a series of rounds, the key that determines the others, and
        noise, is kept with it, so that what is interrupted can go on. Those of other series of the
        run are forgotten: they are over.
        """
        attempted = run, index(round_number), index(attempt)
        cohort = _ascending(users)
        salt = secrets.token_bytes(_SALT_BYTES)
        commitment = _commitment(salt, attempted, cohort)
        row = (commitment, *attempted, salt, zlib.compress(cohort.tobytes(), level=1))
        with self.database.transaction():
            self.database.write("INSERT INTO participation VALUES (?, ?, ?, ?, ?, ?)", row)
            if series_key is not None:
                self.database.write("DELETE FROM series WHERE run = ?", (run,))
                kept = commitment, run, series_key, self._bound(commitment, series_key)
                self.database.write("INSERT INTO series VALUES (?, ?, ?, ?)", kept)
        return commitment

    def bind(self, run: str, users: str) -> None:
        """Keep who a run's users are, as `digest_of_users` says; InvalidValueError for others."""
        with self.database.transaction():
            self.database.write("INSERT OR IGNORE INTO enrolled VALUES (?, ?)", (run, users))
        (bound,) = self.database.read("SELECT users FROM enrolled WHERE run = ?", (run,))
        if bound["users"] != users:
            raise InvalidValueError(
                f"the users are not those that run {run!r} began with, though there are as many; a "
                "run can only go on with the same users: start another"
            )

    def keep_head(self, head: Head) -> None:
        """Keep the head of the ledger, durably; that of fewer charges changes nothing.

        Call it after a charge and before its release: then a ledger that lacks a charge on which
        anything was released lacks the head that is kept here.
        """
        with self.database.transaction():
            self.database.write(_KEEP_HEAD, vars(head))

    @property
    def ledger_head(self) -> Head | None:
        """The head that is kept, if there is one."""
        rows = self.database.read("SELECT count, hash FROM ledger")
        return Head(*rows[0]) if rows else None

    def series_key(self, commitment: str) -> bytes | None:
        """The key of the series of which this cohort is the first, if it is kept, in this file.

        None too if the file is a copy, as of a whole folder, or if the key was changed.
        """
        sql = "SELECT key, bound FROM series WHERE commitment = ?"
        for key, bound in self.database.read(sql, (commitment,)):
            if self._bound(commitment, key) == bound:
                return bytes(key)
        return None

    def forget_series(self, run: str) -> None:
        """Forget the key of a run's series, which is over.

        It is overwritten in the file. The journal of the transaction had it, and is only unlinked.
        """
        with self.database.transaction():
            self.database.write("DELETE FROM series WHERE run = ?", (run,))

    def next_attempt(self, run: str, round_number: int) -> int:
        """One more than the highest attempt at a round with a cohort; 0 if there is none."""
        sql = "SELECT max(attempt) + 1 AS next FROM participation WHERE run = ? AND round = ?"
        return int(self.database.read(sql, (run, index(round_number)))[0]["next"] or 0)

    def attempts(self, run: str) -> list[tuple[int, int, str]]:
        """Round, attempt and commitment of each cohort of a run, in the order of rounds."""
        sql = "SELECT round, attempt, commitment FROM participation WHERE run = ? ORDER BY 1, 2"
        return [
            (n, attempt, commitment) for n, attempt, commitment in self.database.read(sql, (run,))
        ]

    def has_other_than(self, run: str) -> bool:
        """Whether a cohort of another run is recorded."""
        return bool(
            self.database.read("SELECT 1 FROM participation WHERE run <> ? LIMIT 1", (run,))
        )

    def users_of(self, commitment: str) -> Users:
        """Positions of the users of a cohort; LedgerError if there is none or it was changed."""
        return self._cohort_of(commitment)[1]

    def confirm(self, commitment: str, attempt: Attempt, population: int) -> Users:
        """The cohort of an attempt; LedgerError unless it is recorded, and of the population."""
        recorded, users = self._cohort_of(commitment)
        if recorded != attempt:
            raise LedgerError("its cohort is of run {}, round {}, attempt {}".format(*recorded))
        if (users >= population).any():
            raise LedgerError(f"its cohort has user {users[-1]} of a population of {population}")
        return users

    def _bound(self, commitment: str, key: bytes) -> str:
        text = f"{commitment}/{self.database.inode}"
        return hmac.digest(key, text.encode(), "sha256").hex()

    def _cohort_of(self, commitment: str) -> tuple[Attempt, Users]:
        sql = "SELECT * FROM participation WHERE commitment = ?"
        rows = self.database.read(sql, (commitment,))
        if not rows:
            raise LedgerError(f"no cohort with commitment {commitment} is recorded")
        _, *attempt, salt, compressed = rows[0]
        recorded: Attempt = tuple(attempt)
        with suppress(TypeError, ValueError, zlib.error):
            users = np.frombuffer(zlib.decompress(compressed), dtype="<i8")
            if _commitment(salt, recorded, users) == commitment:
                return recorded, users.astype(np.int64)
        raise LedgerError(f"the cohort with commitment {commitment} was changed")

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def digest_of_users(ids: Iterable[object] | None) -> str:
    """SHA-256 of users' ids in the order of their positions; None: positions are their only ids."""
    text = json.dumps(None if ids is None else [str(user) for user in ids])
    return hashlib.sha256(text.encode()).hexdigest()


def _ascending(users: npt.NDArray[np.integer]) -> Users:
    found = f"users have shape {users.shape} and type {users.dtype}"
    proper = users.ndim == 1 and np.issubdtype(users.dtype, np.integer)
    require(proper, f"{found}; they must be a vector of integers")
    ascending = np.unique(users.astype("<i8"))
    twice = users.size - ascending.size
    require(twice == 0, f"{twice} users occur twice; a user joins a cohort once")
    lowest = ascending.min(initial=0)
    require(lowest >= 0, f"user {lowest} is not a position; positions start at 0")
    return ascending


def _commitment(salt: bytes, attempt: Attempt, users: Users) -> str:
    # The JSON array ends itself, so no two cohorts have the same encoding.
    return hashlib.sha256(salt + json.dumps(attempt).encode() + users.tobytes()).hexdigest()
