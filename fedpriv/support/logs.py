"""Logs of long-running commands: one line a record on stderr, for people or for programs.

Names of nodes and reasons come from other machines, and the text of an exception may come from
users' data. So every record is one line of printable characters whatever is in it, and of an
exception only its type and the places it passed are written.
"""

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

SIMULATION_ONLY = "simulation only, not private"  # begins what no guarantee covers
_NOTICE = timedelta(days=30)  # before the end of a certificate
_MINUTE = 60.0


class LogFormat(StrEnum):
    """What a line of a log looks like."""

    TEXT = "text"
    JSON = "json"


_STANDARD = vars(logging.makeLogRecord({})).keys() | {"message", "asctime", "taskName"}


class LineLimit(logging.Filter):
    """Lets so many records of each level pass in a minute; a later one says how many did not."""

    def __init__(self, per_minute: int) -> None:
        super().__init__()
        self._per_minute, self._lock = per_minute, threading.Lock()
        self._passed: dict[int, tuple[float, int]] = {}  # by level: in the minute since, how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        with self._lock:
            since, count = self._passed.get(record.levelno, (record.created, 0))
            missing = 0
            if not 0.0 <= record.created - since < _MINUTE:
                since, count, missing = record.created, 0, max(0, count - self._per_minute)
            self._passed[record.levelno] = since, count + 1
        if missing:
            lines = f"{missing} lines before this one were too many in a minute, and are left out"
            record.msg, record.args = f"{record.getMessage()} ({lines})", None
        return count < self._per_minute


def configure(form: LogFormat, per_minute: int | None = None) -> None:
    """Write all records from level INFO on, and Python's warnings, to stderr and nowhere else.

    Of each level at most so many in a minute, where a number is given.
    """
    # Before gRPC starts: its own lines have another form and quote strangers unescaped.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form is LogFormat.JSON else TextFormatter())
    if per_minute is not None:
        handler.addFilter(LineLimit(per_minute))
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.captureWarnings(capture=True)


@contextmanager
def silenced(level: int) -> Iterator[None]:
    """Without any log of this level and below."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


def one_line(text: str) -> str:
    r"""The text with everything that is not printable escaped: ends of lines, colours, direction.

    >>> print(one_line("a\nINFO b\x1b[2K"))
    a\nINFO b\x1b[2K
    """
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text
    )


def trouble(log: logging.Logger, node: str, what: str, why: str) -> None:
    """Log at WARNING what goes wrong at a node, in JSON also as fields `node`, `what`, `why`."""
    log.warning("%s: %s: %s", node, what, why, extra={"node": node, "what": what, "why": why})


def expiry(end: datetime, now: datetime) -> str | None:
    """Why a certificate must be renewed: it has expired, or will within 30 days; else None."""
    if end > now + _NOTICE:
        return None
    day = end.strftime("%Y-%m-%d %H:%M UTC")
    if end <= now:
        return f"it expired at {day}; no new connection can be made with it"
    return f"it ends at {day}, in {(end - now).days} days; issue another"


class TextFormatter(logging.Formatter):
    """Time in UTC, level and message in one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        return f"{_time(record, 'seconds')} {record.levelname:<7} {one_line(_message(record))}"


class JsonFormatter(logging.Formatter):
    """One JSON object in ASCII: time (UTC, ISO 8601), level, logger, message and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        fixed: dict[str, object] = {
            "time": _time(record, "milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        extra = vars(record).keys() - _STANDARD - fixed.keys()
        more = {name: _scalar(value) for name, value in vars(record).items() if name in extra}
        return json.dumps(fixed | more, allow_nan=False)


def _time(record: logging.LogRecord, precision: str) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec=precision).replace("+00:00", "Z")


def _message(record: logging.LogRecord) -> str:
    message = record.getMessage()
    if not record.exc_info or record.exc_info[0] is None:
        return message
    kind, _, passed = record.exc_info
    places = (f"{Path(at.filename).name}:{at.lineno}" for at in traceback.extract_tb(passed))
    return f"{message} ({kind.__name__} at {' > '.join(places)})"


def _scalar(value: object) -> object:
    exact = value is None or isinstance(value, str | int)
    return value if exact or (isinstance(value, float) and math.isfinite(value)) else str(value)
