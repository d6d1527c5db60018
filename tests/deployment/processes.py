"""Processes that others have started, found by what their environment holds."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path


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


def kill_marked(mark: str, what: str = "") -> int:
    """`kill -9` for those with a mark and these words in the command line; how many there were."""
    victims = [process for process, line in marked(mark).items() if what in line]
    for process in victims:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    return len(victims)


def clear(mark: str) -> None:
    """Kill all with a mark, and those that they start meanwhile."""
    while kill_marked(mark):
        time.sleep(0.1)
