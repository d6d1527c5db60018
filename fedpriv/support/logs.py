"""Logs of long-running commands: one line per record on stderr, for people or for programs.

Names of nodes and reasons come from other machines, and exception messages may come from users'
data. So every record is one line of printable characters, and has only the type of an exception and
the files and lines of its traceback.
"""

import atexit
import json
import logging
import math
import os
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from pathlib import Path

SIMULATION_ONLY = "simulation only, not private"  # begins text that no guarantee covers
_NOTICE = timedelta(days=30)  # before the end of a certificate
_MINUTE = 60.0
_LAST_LINES = 10


class LogFormat(StrEnum):
    """The format of a log's lines."""

    TEXT = "text"
    JSON = "json"


_STANDARD = vars(logging.makeLogRecord({})).keys() | {"message", "asctime", "taskName"}


class LineLimit(logging.Filter):
    """Passes a limited number of records per minute and level; a later one says how many were lost.

    A level's minute begins with its first record.
    """

    def __init__(self, per_minute: int) -> None:
        super().__init__()
        self._per_minute, self._lock = per_minute, threading.Lock()
        self._minutes: dict[int, tuple[float, int]] = {}  # by level: start, and records since then
        self._lost: list[logging.LogRecord] = []  # the last of these minutes

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        with self._lock:
            level, missing = record.levelno, 0
            start, count = self._minutes.get(level, (record.created, 0))
            if not 0.0 <= record.created - start < _MINUTE:
                start, count, missing = record.created, 0, max(0, count - self._per_minute)
                self._lost = [lost for lost in self._lost if lost.levelno != level]
            self._minutes[level] = start, count + 1
            if count >= self._per_minute:
                self._lost = [*self._lost, record][-_LAST_LINES:]
        _say(record, missing)
        return count < self._per_minute

    def write_last(self, handler: logging.Handler) -> None:
        """Write the last lost records, such as why a process ends, and the number of others."""
        lost = sum(max(0, count - self._per_minute) for _, count in self._minutes.values())
        for record in self._lost:
            _say(record, lost - len(self._lost) if record is self._lost[0] else 0)
            handler.emit(record)


def _say(record: logging.LogRecord, missing: int) -> None:
    if missing:
        lines = f"{missing} lines before this one were too many in a minute, and are left out"
        record.msg, record.args = f"{record.getMessage()} ({lines})", None


def configure(form: LogFormat, per_minute: int | None = None) -> None:
    """Write all records from level INFO on, and Python's warnings, only to stderr.

    `per_minute` limits the records of each level; the last ones are written when Python ends.
    """
    # Before gRPC starts: its own lines have another format, and quote strangers unescaped.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    if per_minute is not None:
        handler.addFilter(limit := LineLimit(per_minute))
        atexit.register(limit.write_last, handler)
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.captureWarnings(capture=True)


@contextmanager
def silenced(level: int) -> Iterator[None]:
    """Log nothing of this level or below within the context."""
    previous = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(previous)


def one_line(text: str) -> str:
    r"""Return a text with unprintable characters escaped, such as newlines and colour codes.

    >>> print(one_line("a\nINFO b\x1b[2K"))
    a\nINFO b\x1b[2K
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def trouble(log: logging.Logger, node: str, what: str, why: str) -> None:
    """Log a problem at a node as a WARNING; JSON also has the fields `node`, `what` and `why`."""
    log.warning("%s: %s: %s", node, what, why, extra={"node": node, "what": what, "why": why})


def expiry(end: datetime, now: datetime, begin: datetime | None = None) -> str | None:
    """Return a warning if a certificate is not valid yet, has expired, or will within 30 days."""
    if begin is not None and begin > now:
        return f"it is valid only from {begin:%Y-%m-%d %H:%M UTC}; check the clock"
    if end > now + _NOTICE:
        return None
    day = end.strftime("%Y-%m-%d %H:%M UTC")
    if end <= now:
        return f"it expired at {day}; no new connection can be made with it"
    return f"it ends at {day}, in {(end - now).days} days; issue another"


class TextFormatter(logging.Formatter):
    """Time in UTC, level and message in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        return f"{_time(record, 'seconds')} {record.levelname:<7} {one_line(_message(record))}"


class JsonFormatter(logging.Formatter):
    """One JSON object in ASCII: time (UTC, ISO 8601), level, logger, message and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        base: dict[str, object] = {
            "time": _time(record, "milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        names = vars(record).keys() - _STANDARD - base.keys()
        extra = {name: _scalar(value) for name, value in vars(record).items() if name in names}
        return json.dumps(base | extra, allow_nan=False)


def _time(record: logging.LogRecord, precision: str) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if not record.exc_info or record.exc_info[0] is None:
        return message
    kind, _, trace = record.exc_info
    places = (f"{Path(at.filename).name}:{at.lineno}" for at in traceback.extract_tb(trace))
    return f"{message} ({kind.__name__} at {' > '.join(places)})"


def _scalar(value: object) -> object:
    exact = value is None or isinstance(value, str | int)
    return value if exact or (isinstance(value, float) and math.isfinite(value)) else str(value)
