"""Durable writes that survive a crash, and retries while the disk is full."""

import errno
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from fedpriv.errors import FedprivError, InvalidValueError, sentence_of

_Result = TypeVar("_Result")

_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}
_NO_ROOM_IN_SQLITE = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_CANTOPEN}
_LONGEST_WAIT_SECONDS = 60.0
_IGNORED = "# Secret files of fedpriv"  # the first line of its .gitignore

_log = logging.getLogger(__name__)


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Replace the file at `path`, durably; a crash or a full disk leaves the old content.

    The content goes to a new file, which no other process has open and which has its mode, less the
    umask, from the start. Raises OSError.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        with naming(path):
            partial.unlink(missing_ok=True)
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_new(path: Path, content: bytes) -> None:
    """Write a new file, durably; InvalidValueError if it exists."""
    if path.exists():
        raise InvalidValueError(f"{path} exists already; it is not overwritten")
    write_atomically(path, content)


def keep_from_git(path: Path) -> None:
    """Have git ignore a secret file, and all files whose names begin with its name.

    The file's folder gets a `.gitignore`, or another line in it. A `.gitignore` that somebody else
    wrote is not changed, nor is a folder that cannot be written.
    """
    ignore, pattern = path.with_name(".gitignore"), f"/{path.name}*"
    with suppress(OSError):
        lines = ignore.read_text("utf-8", "replace").splitlines() if ignore.exists() else [_IGNORED]
        if lines[:1] == [_IGNORED] and pattern not in lines:
            write_atomically(ignore, "\n".join([*lines, pattern, ""]).encode())


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError; a failed write's error lacks it."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def with_room(write: Callable[[], _Result]) -> _Result:
    """Return the result of `write`; repeat it, with longer pauses, while there is no room.

    A run waits because it must not lose the privacy budget that it has spent. A failed write must
    leave nothing behind that the next one does not replace. Other errors propagate.
    """
    seconds = 1.0
    while True:
        try:
            return write()
        except (OSError, FedprivError) as error:
            if not lacks_room(error):
                raise
            sentence = sentence_of(error)
            _log.warning("%s; the run waits for room, and tries again in %g s", sentence, seconds)
        time.sleep(seconds)
        seconds = min(2.0 * seconds, _LONGEST_WAIT_SECONDS)


def lacks_room(error: BaseException | None) -> bool:
    """Return whether a full disk or too many open files caused an error; both are temporary."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return True
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _NO_ROOM_IN_SQLITE:
            return True
        error = error.__cause__
    return False
