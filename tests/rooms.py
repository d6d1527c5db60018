"""The files of the product that one round passes through.

    python -m tests.rooms [simulation | federation]

Runs DIGITS, in one process or as a server and three nodes over gRPC with TLS, waits until rounds
are under way, and prints every file in which a function was called in the rounds that follow, in
any of the processes.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from simulations import federation, loopback

ROOT = Path(__file__).parents[1]
MOST = {"simulation": 42, "federation": 64}
_SECONDS = 180.0
_RECORDER = """
import os, sys, threading, time
from pathlib import Path

folder, seen = Path(os.environ["FEDPRIV_ROOMS"]), set()

def note(frame, event, _):
    if event == "call":
        seen.add(frame.f_code.co_filename)

def follow():
    while not (folder / "begin").exists():
        time.sleep(0.01)
    seen.clear()
    while not (folder / "end").exists():
        time.sleep(0.01)
    (folder / f"{os.getpid()}.files").write_text("\\n".join(seen))

def record():
    threading.Thread(target=follow, daemon=True).start()
    sys.setprofile(note)
    threading.setprofile(note)

os.register_at_fork(after_in_child=record)
record()
"""


def files_of_a_round(where: str, folder: Path) -> list[str]:
    """Paths below the repository's root, sorted.

    Args:
        where: "simulation" or "federation".
        folder: empty; for the run and the records.
    """
    (folder / "sitecustomize.py").write_text(_RECORDER, encoding="utf-8")
    run = folder / "run"
    with _recording(folder), _SETTINGS[where](folder):
        _await(lambda: _rounds(run) >= 2)
        (folder / "begin").touch()
        begun = _rounds(run)
        _await(lambda: _rounds(run) >= begun + 3)
        (folder / "end").touch()
        time.sleep(1.0)  # each process sees it and writes
    files = set()
    for record in folder.glob("*.files"):
        for name in record.read_text(encoding="utf-8").splitlines():
            path = Path(name).resolve()
            if path.is_relative_to(ROOT):
                files.add(str(path.relative_to(ROOT)))
    return sorted(f for f in files if f.startswith(("fedpriv/", "server/", "clients/")))


@contextmanager
def _recording(folder: Path):
    before = dict(os.environ)
    os.environ |= {"FEDPRIV_ROOMS": str(folder), "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _simulation(folder: Path):
    settings = ("--set=rounds=100000", "--set=engine.processes=1", "--set=privacy.epsilon=1000")
    command = ("simulate", "digits", "--out", str(folder / "run"), *settings)
    with loopback.program(folder / "simulation.log", *command) as one:
        yield one


@contextmanager
def _federation(folder: Path):
    loopback.lay_out_digits(folder)
    settings = ("--set=rounds=100000", "--set=privacy.epsilon=1000")
    with (
        loopback.server(folder, federation.FILE, *settings) as server,
        loopback.nodes(folder, federation.NODES, loopback.port_of(server), "--verify-ledger"),
    ):
        yield server


_SETTINGS = {"simulation": _simulation, "federation": _federation}


def _rounds(run: Path) -> int:
    """How many rounds a run has written."""
    path = run / "metrics.jsonl"
    return path.read_text(encoding="utf-8").count("\n") if path.exists() else 0


def _await(reached: Callable[[], bool]) -> None:
    end = time.monotonic() + _SECONDS
    while not reached():
        if time.monotonic() > end:
            raise TimeoutError(f"no rounds within {_SECONDS:g} s")
        time.sleep(0.02)


def main() -> None:
    """Print the files, and fail when they are more than the house allows."""
    failed = False
    for where in sys.argv[1:] or list(_SETTINGS):
        with tempfile.TemporaryDirectory(prefix="rooms-") as folder:
            files = files_of_a_round(where, Path(folder))
        print(f"{where}: {len(files)} files, {MOST[where]} at most", *files, sep="\n  ")  # noqa: T201
        failed |= not 0 < len(files) <= MOST[where]
    sys.exit(failed)


if __name__ == "__main__":
    main()
