"""Durable SQLite files: created whole, extended in transactions, shared by threads and processes.

When a call returns, everything it created or wrote is on the disk (fsync), directory entries
included, and in the file itself, so that a copy of the file is complete. A copy made during a
transaction may be torn and is then refused. Every failure is a LedgerError of one sentence.
"""

import errno
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fedpriv.errors import LedgerError, reason_of
from fedpriv.support.disk import sync

_BUSY_SECONDS = 60.0
_VERSION = 1  # of all schemas

Row = Mapping[str, object]  # values by column name


@dataclass(frozen=True)
class FileFormat:
    """The format of fedpriv's SQLite files of one kind; other kinds and versions are refused."""

    kind: str  # name in messages
    application_id: int  # number in the header of every such file
    schema: str  # SQL that creates an empty file
    mode: int  # permissions of a new file, before the umask; looser ones are refused


class Database:
    """One open file of a known format, shared by the threads of one process.

    Guarantees:
        * a transaction is applied completely and is durable when it ends, or not applied at all;
        * at most one transaction is open on a file, across all threads and processes;
        * no thread sees rows of another thread's unfinished transaction.
    """

    def __init__(
        self, path: Path, file_format: FileFormat, rows: Mapping[str, Row] | None = None
    ) -> None:
        """Open a file; if `rows` gives the first row of tables, create the file if it is absent."""
        if rows is not None and not path.exists():
            _create(path, file_format, lambda draft: _fill(draft, file_format, rows))
        self.path = path.absolute()
        self._format = file_format
        self._name = f"{file_format.kind} {path}"
        self._lock = threading.RLock()
        with self._failing("opened"):
            self._file = path.stat()
            if path.is_dir():  # SQLite would report too many open files
                raise LedgerError(f"{self._name} is a folder; it must be a file")
            if not os.access(path, os.R_OK):  # likewise
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            mode = self._file.st_mode & 0o777
            if mode & 0o066 & ~file_format.mode:
                raise LedgerError(
                    f"{self._name} can be read or written by others than its owner "
                    f"(mode {mode:04o}); it must have mode {file_format.mode:04o}"
                )
            uri = f"{path.resolve().as_uri()}?mode=rw"
            self._connection = sqlite3.connect(
                uri,
                timeout=_BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
                uri=True,
            )
            try:
                self._prepare()
            except BaseException:
                self.close()
                raise

    @property
    def inode(self) -> int:
        """Inode number of the file, unique on its disk while the file exists."""
        return self._file.st_ino

    def read(self, sql: str, parameters: Sequence[object] = ()) -> list[sqlite3.Row]:
        """Return all rows of one query, from one consistent state of the file."""
        with self._lock, self._failing("read"):
            return self._connection.execute(sql, parameters).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Write everything inside the context together, or nothing if it raises."""
        with self._lock:
            try:
                self.write("BEGIN IMMEDIATE")
                in_place = False
                with suppress(OSError):
                    in_place = os.path.samestat(self.path.stat(), self._file)
                if not in_place:  # SQLite would keep writing to an unlinked file
                    raise LedgerError(f"{self._name} was moved or replaced while it was open")
                yield
                self.write("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # SQLite may have rolled back already
                    self._connection.execute("ROLLBACK")
                raise

    def write(self, sql: str, parameters: Row | Sequence[object] = ()) -> None:
        """Execute one statement; for use within a transaction."""
        with self._failing("extended, so nothing was written"):
            try:
                self._connection.execute(sql, parameters)
            except sqlite3.OperationalError:
                # If it cannot create a journal, SQLite reports that it cannot open the file.
                if os.access(self.path.resolve().parent, os.W_OK):
                    raise
                raise PermissionError(errno.EACCES, "its folder cannot be written to") from None

    def copy(self, to: Path, *, without: str | None = None) -> None:
        """Write a consistent copy of the file, even while it is in use, to a free path.

        The copy omits the rows of the table `without`; no file contains them, even temporarily.
        """

        def fill(draft: sqlite3.Connection) -> None:
            if without is None:
                self._connection.backup(draft)
                return
            with closing(sqlite3.connect(":memory:", isolation_level=None)) as copied:
                self._connection.backup(copied)
                copied.execute("PRAGMA secure_delete = ON")
                copied.execute(f"DELETE FROM {without}")
                copied.backup(draft)

        with self._lock:
            if to.exists() or not _create(to, self._format, fill):
                raise LedgerError(f"{to} exists already; it is not overwritten")

    def replace(self, by: "Database", *, without: str | None = None) -> None:
        """Replace this file by a `copy` of another; for use within a transaction.

        Processes that have this file open can no longer extend it. The caller must close it next.
        """
        path = self.path.resolve()
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        by.copy(draft, without=without)
        with self._failing("replaced"):
            draft.replace(path)
            sync(path.parent)

    def altered_schema(self) -> list[str]:
        """Return names of tables, indices and triggers that differ from the file's format."""
        query = "SELECT name, sql FROM sqlite_master"
        with closing(sqlite3.connect(":memory:")) as pristine:
            pristine.executescript(self._format.schema)
            expected = set(pristine.execute(query).fetchall())
        return sorted({name for name, _ in expected ^ {tuple(row) for row in self.read(query)}})

    def close(self) -> None:
        """Close the file; any later use raises LedgerError."""
        with self._lock:
            self._connection.close()

    def _prepare(self) -> None:
        """Refuse other kinds of files, and make every transaction wait for the disk."""

        def pragma(name: str) -> object:
            return self._connection.execute(f"PRAGMA {name}").fetchone()[0]

        self._connection.row_factory = sqlite3.Row
        if pragma("application_id") != self._format.application_id:
            raise LedgerError(f"{self.path} is not a {self._format.kind}")
        version = pragma("user_version")
        if version != _VERSION:
            raise LedgerError(
                f"{self._name} has schema version {version}; this fedpriv reads version {_VERSION}"
            )
        # With a write-ahead log, a copy of the file alone would lack charges.
        if pragma("journal_mode = DELETE") != "delete":
            raise LedgerError(f"{self._name} has a write-ahead log that cannot be ended")
        # EXTRA also syncs the folder: otherwise a crash could restore a deleted journal, and so the
        # state before the transaction.
        self._connection.executescript("PRAGMA synchronous = EXTRA; PRAGMA fullfsync = ON")
        # Overwrite deleted rows in the file; the journal, which contained them, is only unlinked.
        self._connection.execute("PRAGMA secure_delete = ON")
        *_, result = str(pragma("integrity_check(1)")).splitlines()
        if result != "ok":
            torn = "is damaged, or was copied while it was written"
            raise LedgerError(f"{self._name} {torn}: {result}")

    @contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, OverflowError, UnicodeError) as error:
            raise LedgerError(f"{self._name} cannot be {action}: {reason_of(error)}") from error


class InFile:
    """Base class of objects stored in one file, which is closed at the end of a `with`."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def close(self) -> None:
        """Close the file."""
        self.database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(path: Path, form: FileFormat, fill: Callable[[sqlite3.Connection], object]) -> bool:
    """Create a complete file; return False if one exists, perhaps from another process."""
    if Path(f"{path}-journal").exists():
        # It belongs to a lost file, and SQLite would use it to roll the new file back.
        advice = "restore that file next to it, or move it away"
        raise LedgerError(f"{path}-journal is left over from another {form.kind}; {advice}")
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, form.mode))
        with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
            fill(connection)
        sync(draft)
        created = False
        with suppress(FileExistsError):
            os.link(draft, path)  # never replaces a file, unlike a rename
            created = True
        sync(path.parent)
        return created
    except (OSError, sqlite3.Error, UnicodeError) as error:
        raise LedgerError(f"{form.kind} {path} cannot be created: {reason_of(error)}") from error
    finally:
        draft.unlink(missing_ok=True)


def _fill(draft: sqlite3.Connection, file_format: FileFormat, rows: Mapping[str, Row]) -> None:
    draft.executescript(
        f"PRAGMA application_id = {file_format.application_id};"
        f"PRAGMA user_version = {_VERSION}; {file_format.schema}"
    )
    for table, row in rows.items():
        draft.execute(insertion(table, row), row)


def insertion(table: str, row: Row) -> str:
    """Return the SQL that inserts a row into a table."""
    return f"INSERT INTO {table} ({', '.join(row)}) VALUES ({', '.join(f':{n}' for n in row)})"
