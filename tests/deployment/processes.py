"""Processes that others have started, found by what their environment holds."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_LONGEST_SECONDS = 480.0


def marked(mark: str) -> dict[int, str]:
    """Command lines, by process id, of processes with a mark somewhere in their environment."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(process.name)] = line.decode(errors="replace").strip()
        except OSError:  # it has ended, or is another user's
            continue
    return found


def await_that(condition: Callable[[], object]) -> None:
    """Wait for a condition; one that does not come fails the test."""
    end = time.monotonic() + _LONGEST_SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.5)


def clear(mark: str) -> None:
    """Kill all with a mark, and those that they start meanwhile."""
    while victims := marked(mark):
        for process in victims:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
