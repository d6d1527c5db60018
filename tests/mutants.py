"""Break the guarantee on purpose, one edit at a time, and see that tests notice.

Each edit of `mutants.toml` is made in a copy of the working tree, where the tests that it names
must fail. Ends with 1 if an edit survives or tests fail without one, with 2 if the list is wrong.
"""

import argparse
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("clients", "fedpriv", "server", "simulations", "tests", "pyproject.toml")
ALIASES = {"clients": "fedpriv/clients", "server": "fedpriv/server"}
SECONDS = 120.0  # in which tests that need a few should have failed
PASSED, FAILED, TIMED_OUT = 0, 1, -1

_IMPORTED = """
import importlib.util, json, os, sys
for module, file in json.loads(sys.argv[1]).items():
    found = importlib.util.find_spec(module).origin
    if not os.path.samefile(found, file):
        sys.exit(f"{module} would be imported from {found}, not from {file}")
"""


class ListError(Exception):
    """The list, or a target of it, is wrong."""


@dataclass(frozen=True)
class Mutant:
    """An edit that breaks the guarantee."""

    name: str  # what is broken
    file: str  # relative to the root of the repository
    find: str  # occurs once in the file
    replace: str  # what is put in its place
    tests: tuple[str, ...]  # targets of pytest that notice

    def applied(self, text: str) -> str:
        """The text of the file with the edit."""
        if (times := text.count(self.find)) != 1:
            raise ListError(f"{self.name}: {self.file} has what to find {times} times, not once")
        return text.replace(self.find, self.replace)


def listed(path: Path = LIST) -> list[Mutant]:
    """The mutants of a list."""
    rows = tomllib.loads(path.read_text("utf-8"))["mutant"]
    return [Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows]


class Processes:
    """Runs Python in copies; `close` ends all that runs, and lets nothing begin."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, copy: Path, *arguments: str, seconds: float | None = None) -> tuple[int, str]:
        """Exit code and output of Python, which imports from the copy before anywhere else."""
        own = {"PYTHONPATH": str(copy), "TMPDIR": str(copy.parent)}
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            with self._lock:
                if self._closed:
                    raise InterruptedError
                process = subprocess.Popen(
                    [sys.executable, *arguments],
                    cwd=copy,
                    env=os.environ | own,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self._running.add(process.pid)
            try:
                code = process.wait(seconds)
            except subprocess.TimeoutExpired:
                code = TIMED_OUT
            finally:
                with self._lock:
                    self._running.discard(process.pid)
                    _kill_group(process.pid)
                process.wait()
            output.seek(0)
            return code, output.read()

    def pytest(
        self, copy: Path, targets: Sequence[str], seconds: float | None = None
    ) -> tuple[int, str]:
        """Exit code and output of tests; those marked slow are left out."""
        how = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow")
        return self.run(copy, *how, *targets, seconds=seconds)

    def close(self) -> None:
        """End what runs, and whatever it has begun."""
        with self._lock:
            self._closed = True
            for group in self._running:
                _kill_group(group)


def _kill_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _copy(root: Path, copy: Path) -> None:
    """Copy what tests need, with packages under the names by which they are installed too.

    Otherwise an editable installation would have them from where it was made.
    """
    copy.mkdir()
    for source in filter(Path.exists, (root / name for name in COPIED)):
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / source.name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(source, copy)
    for folder, alias in ALIASES.items():
        if (copy / folder).exists():
            (copy / alias).unlink(missing_ok=True)  # of the tree that was copied
            (copy / alias).symlink_to(copy / folder)


def _refuse_other_imports(processes: Processes, copy: Path, files: set[str]) -> None:
    """Raise ListError unless tests import these files from the copy."""
    modules = {}
    for file in files:
        first, *rest = Path(file).with_suffix("").parts
        modules[".".join([*ALIASES.get(first, first).split("/"), *rest])] = str(copy / file)
    code, said = processes.run(copy, "-c", _IMPORTED, json.dumps(modules))
    if code != PASSED:
        raise ListError(said.strip())


def _try(
    mutant: Mutant, number: int, copies: "queue.SimpleQueue[Path]", processes: Processes
) -> tuple[int, float]:
    """Exit code of a mutant's tests, and seconds."""
    began, copy = monotonic(), copies.get()
    file = copy / mutant.file
    honest, stat = file.read_text("utf-8"), file.stat()
    try:
        file.write_text(mutant.applied(honest), "utf-8")
        os.utime(file, (number, number))  # bytecode is told apart by time and size
        code, said = processes.pytest(copy, mutant.tests, SECONDS)
        if code not in (PASSED, FAILED, TIMED_OUT):
            raise ListError(f"{mutant.name}: pytest ends with {code}\n{said}")
        return code, monotonic() - began
    finally:
        file.write_text(honest, "utf-8")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        copies.put(copy)


def _told(mutant: Mutant, done: "Future[tuple[int, float]]") -> int:
    """Say what came of a mutant, and return the exit code for it."""
    try:
        code, seconds = done.result()
    except ListError as error:
        _say(f"WRONG             {error}")
        return 2
    verdict = {PASSED: "SURVIVED", FAILED: "killed", TIMED_OUT: "timeout"}[code]
    where = f" ({mutant.file}; {' '.join(mutant.tests)})" if code == PASSED else ""
    _say(f"{verdict:8} {seconds:6.1f} s  {mutant.name}{where}")
    return int(code == PASSED)


def run(root: Path, mutants: Sequence[Mutant], jobs: int) -> int:
    """Try mutants of a working tree, so many at a time; returns the exit code."""
    began, processes = monotonic(), Processes()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        try:
            for mutant in mutants:
                mutant.applied((root / mutant.file).read_text("utf-8"))
            copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
            for number in range(jobs):
                copy = Path(folder).resolve() / str(number)
                _copy(root, copy)
                copies.put(copy)
            _refuse_other_imports(processes, copy, {mutant.file for mutant in mutants})
            targets = sorted({target for mutant in mutants for target in mutant.tests})
            code, said = processes.pytest(copy, targets)
            if code != PASSED:
                _say(f"without any edit, pytest ends with {code}\n{said}")
                return 1 if code == FAILED else 2
            _say(f"without any edit, tests pass in {monotonic() - began:.0f} s")
            codes = _tried(mutants, jobs, copies, processes)
        except ListError as error:
            _say(str(error))
            return 2
        finally:
            processes.close()
    killed, survived, wrong = (codes.count(code) for code in range(3))
    _say(f"{killed} mutants killed, {survived} survived, {wrong} wrong in the list")
    _say(f"in {monotonic() - began:.0f} s")
    return max(codes)


def _tried(
    mutants: Sequence[Mutant], jobs: int, copies: "queue.SimpleQueue[Path]", processes: Processes
) -> list[int]:
    """Exit codes of all mutants, in the order in which they were tried."""
    with ThreadPoolExecutor(jobs) as pool:
        try:
            tried = {
                pool.submit(_try, mutant, number, copies, processes): mutant
                for number, mutant in enumerate(mutants, 1)
            }
            return [_told(tried[done], done) for done in as_completed(tried)]
        except BaseException:
            processes.close()
            pool.shutdown(cancel_futures=True)
            raise


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutants with one of these in their names")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="how many at a time")
    given = parser.parse_args()
    mutants = [m for m in listed() if any(word in m.name for word in given.words or [""])]
    if not mutants:
        parser.error(f"no name has any of {given.words} in it")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        return run(ROOT, mutants, max(1, min(given.jobs, len(mutants))))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
