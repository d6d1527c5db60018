"""The participation record: the cohorts, kept secret and apart from the ledger, never exported.

The ledger holds only a commitment to each cohort: SHA-256 over a salt of 32 random bytes and the
cohort. The commitment binds the server to the cohort and, without the salt, reveals nothing.

For an unfinished series of rounds, the record also holds the key. The key is valid in this file
alone: if two copies of a folder continued with it, they would draw the same noise twice. For each
run, the record holds a digest of the users' ids, since a run must continue with the users it
started with: different users at their positions could join more rounds than the series charged.
"""

import hashlib
import hmac
import json
import os
import secrets
import zlib
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.database import Database, FileFormat, InFile
from fedpriv.support.checks import require
from fedpriv.support.disk import keep_from_git

Users = npt.NDArray[np.int64]  # positions in the population, ascending: [cohort]
Attempt = tuple[str, int, int]  # run, round and attempt

SERIES_KEYS = "series"  # table of the secret keys; copies of a record omit its rows
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
CREATE TABLE drawn (commitment TEXT PRIMARY KEY, run TEXT NOT NULL, terms TEXT NOT NULL);
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
    """A point in a ledger's chain: the number of charges and the digest of the last text."""

    count: int
    hash: str

    @property
    def line(self) -> str:
        """The last line of an export, as JSON."""
        return json.dumps({"head": vars(self)})


def record_path(ledger: Path) -> Path:
    """Return the path of a ledger's participation record; no two ledgers in a folder share one.

    All symbolic links to a ledger give the same path.
    """
    if ledger.is_symlink():
        ledger = Path(os.path.realpath(ledger))  # accepts a loop, unlike `resolve`
    stem = ledger.name.removesuffix(".sqlite")
    suffix = ".participation" if stem == ledger.name else ".participation.sqlite"
    return ledger.with_name(stem + suffix)


class ParticipationRecord(InFile):
    """A SQLite file of cohorts that only its owner can read and write.

    Guarantees:
        * a cohort is durable when `record` returns its commitment;
        * the salt comes from the operating system, even in seeded runs;
        * a cohort that is read back is the one that was committed to.
    """

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an existing record."""
        return cls(Database(path, _FORMAT))

    @classmethod
    def open_or_create(cls, path: Path) -> Self:
        """Open the record at `path`, or create it, ignored by git, if there is no file."""
        if not path.exists():
            keep_from_git(path)
        return cls(Database(path, _FORMAT, {}))

    def record(
        self,
        run: str,
        round_number: int,
        attempt: int,
        users: npt.NDArray[np.integer],
        series_key: bytes | None = None,
        terms: str | None = None,
    ) -> str:
        """Store a cohort, distinct positions in any order, and return its commitment.

        Call this before asking the cohort, so that every commitment in the ledger has a cohort and
        a killed attempt can be charged: the record keeps its `terms` until `keep_head` names it.
        The same attempt may be recorded again. Raises InvalidValueError for invalid positions.

        For the first cohort of a series of rounds, give the key that determines the other cohorts
        and the noise. The record stores it, so that an interrupted series can continue, and deletes
        the keys of the run's other series, which are over.
        """
        attempt_id = run, index(round_number), index(attempt)
        cohort = _ascending(users)
        salt = secrets.token_bytes(_SALT_BYTES)
        commitment = _commitment(salt, attempt_id, cohort)
        row = (commitment, *attempt_id, salt, zlib.compress(cohort.tobytes(), level=1))
        with self.database.transaction():
            self.database.write("INSERT INTO participation VALUES (?, ?, ?, ?, ?, ?)", row)
            if terms is not None:
                self.database.write("INSERT INTO drawn VALUES (?, ?, ?)", (commitment, run, terms))
            if series_key is not None:
                self.database.write("DELETE FROM series WHERE run = ?", (run,))
                series = commitment, run, series_key, self._bound(commitment, series_key)
                self.database.write("INSERT INTO series VALUES (?, ?, ?, ?)", series)
        return commitment

    def bind(self, run: str, users: str) -> None:
        """Bind a run to the users of a `digest_of_users`; InvalidValueError if it has others."""
        with self.database.transaction():
            self.database.write("INSERT OR IGNORE INTO enrolled VALUES (?, ?)", (run, users))
        (stored,) = self.database.read("SELECT users FROM enrolled WHERE run = ?", (run,))
        if stored["users"] != users:
            raise InvalidValueError(
                f"the users are not those that run {run!r} began with, though there are as many; a "
                "run can only continue with the same users, so start a new one"
            )

    def keep_head(self, head: Head, charged: str | None = None) -> None:
        """Store the head of the ledger durably if it has more charges than the stored one.

        Call this after a charge, with the commitment that it `charged`, and before its release:
        then a ledger that lacks a charge of any release also lacks the head stored here.
        """
        with self.database.transaction():
            self.database.write(_KEEP_HEAD, vars(head))
            self.database.write("DELETE FROM drawn WHERE commitment = ?", (charged,))

    @property
    def ledger_head(self) -> Head | None:
        """The stored head of the ledger, or None."""
        rows = self.database.read("SELECT count, hash FROM ledger")
        return Head(*rows[0]) if rows else None

    def series_key(self, commitment: str) -> bytes | None:
        """Return the key of the series whose first cohort has this commitment, or None.

        It is also None if the file is a copy, for example in a copied folder, or if the key was
        changed.
        """
        sql = "SELECT key, bound FROM series WHERE commitment = ?"
        rows = self.database.read(sql, (commitment,))
        return next((bytes(k) for k, bound in rows if self._bound(commitment, k) == bound), None)

    def forget_series(self, run: str) -> None:
        """Delete the key of a run's series, which is over.

        The file overwrites it. The journal of the transaction contained it and is only unlinked.
        """
        with self.database.transaction():
            self.database.write("DELETE FROM series WHERE run = ?", (run,))

    def next_attempt(self, run: str, round_number: int) -> int:
        """Return one more than the highest attempt at a round with a cohort; 0 if there is none."""
        sql = "SELECT max(attempt) + 1 AS next FROM participation WHERE run = ? AND round = ?"
        return int(self.database.read(sql, (run, index(round_number)))[0]["next"] or 0)

    def drawn(self, run: str) -> list[tuple[int, int, str, str]]:
        """Return round, attempt, commitment and terms of each attempt that may lack a charge."""
        sql = """SELECT round, attempt, commitment, terms
        FROM drawn JOIN participation USING (commitment) WHERE drawn.run = ? ORDER BY 1, 2"""
        return [tuple(row) for row in self.database.read(sql, (run,))]

    def has_other_runs(self, run: str) -> bool:
        """Return whether the record has a cohort of another run."""
        sql = "SELECT 1 FROM participation WHERE run <> ? LIMIT 1"
        return bool(self.database.read(sql, (run,)))

    def users_of(self, commitment: str) -> Users:
        """Return a cohort's positions, int64 [cohort]; LedgerError if it is absent or changed."""
        return self._cohort_of(commitment)[1]

    def confirm(self, commitment: str, attempt: Attempt, population: int) -> Users:
        """Return an attempt's cohort; LedgerError if it is absent or outside the population."""
        recorded, users = self._cohort_of(commitment)
        if recorded != attempt:
            raise LedgerError("its cohort is from run {}, round {}, attempt {}".format(*recorded))
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


def _ascending(users: npt.NDArray[np.integer]) -> Users:
    description = f"users have shape {users.shape} and type {users.dtype}"
    valid = users.ndim == 1 and np.issubdtype(users.dtype, np.integer)
    require(valid, f"{description}; they must be a vector of integers")
    ascending = np.unique(users.astype("<i8"))
    repeated = users.size - ascending.size
    require(repeated == 0, f"{repeated} users occur twice; a user joins a cohort once")
    lowest = ascending.min(initial=0)
    require(lowest >= 0, f"user {lowest} is not a position; positions start at 0")
    return ascending


def _commitment(salt: bytes, attempt: Attempt, users: Users) -> str:
    # A JSON array marks its own end, so no two cohorts have the same encoding.
    return hashlib.sha256(salt + json.dumps(attempt).encode() + users.tobytes()).hexdigest()
