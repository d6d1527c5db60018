"""Break the guarantee on purpose, one edit at a time, and see that tests notice.

Each edit of `mutants.toml` is made in a copy of the working tree, where the tests that it names
must fail. Ends with 1 if an edit survives or tests fail without one, with 2 if the list is wrong.
"""

import argparse
import ast
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("mutants.toml")
COPIED = ("clients", "fedpriv", "server", "simulations", "tests", "pyproject.toml")
PACKAGES = ("clients", "server")  # folders that are installed inside fedpriv
SECONDS = 120.0  # in which tests that need a few should have failed
PASSED, FAILED, TIMED_OUT = 0, 1, -1
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)

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
    """An edit that breaks the guarantee, of one function, class or constant."""

    name: str  # what is broken
    place: str  # module:qualified name, as fedpriv.privacy.noise:SeededEntropy.key
    how: str  # replace, drop or never: see `applied`
    find: str  # occurs once in the place, whatever the spaces and line breaks in it
    put: str  # what replaces it; further lines are indented as the line that it is in
    tests: tuple[str, ...]  # targets of pytest that notice

    @property
    def file(self) -> str:
        """The file of the place, relative to the root of the repository."""
        return self.place.partition(":")[0].replace(".", "/") + ".py"

    def applied(self, text: str) -> str:
        """The text of the file with the edit.

        `replace` puts `put` for what is found, `drop` a `pass` for the smallest statement that
        contains it, and `never` a False for the smallest condition of an `if` that contains it.
        """
        source = Source(text)
        node = source.place(self.place.partition(":")[2])
        found = [m.span() for m in _pattern(self.find).finditer(text, *source.span(node))]
        if len(found) != 1:
            raise ListError(f"{self.name}: {self.place} has {self.find!r} {len(found)} times")
        match self.how:
            case "replace":
                (begin, end), put = found[0], self.put
            case "drop":
                statements = [n for n in ast.walk(node) if isinstance(n, ast.stmt)]
                (begin, end), put = source.around(found[0], statements), "pass"
            case "never":
                conditions = [n.test for n in ast.walk(node) if isinstance(n, ast.If)]
                (begin, end), put = source.around(found[0], conditions), "False"
            case _:
                raise ListError(f"{self.name}: {self.how!r} is no kind of edit")
        line = text[text.rfind("\n", 0, begin) + 1 : begin]
        indent = line[: len(line) - len(line.lstrip())]
        return text[:begin] + put.replace("\n", f"\n{indent}") + text[end:]


def _pattern(find: str) -> re.Pattern[str]:
    """Whole words, and what is between them, with any space or none around each."""
    words = re.findall(r"\w+|\S", find)
    begin, end = (r"\b" if re.match(r"\w", word) else "" for word in (words[0], words[-1]))
    return re.compile(begin + r"\s*".join(map(re.escape, words)) + end)


class Source:
    """A file of Python, and where its parts are."""

    def __init__(self, text: str) -> None:
        self._tree = ast.parse(text)
        self._lines = text.split("\n")
        self._begins = [0, *accumulate(len(line) + 1 for line in self._lines)]

    def place(self, name: str) -> ast.AST:
        """The function, class or constant of a qualified name, unless there are none or several."""
        nodes: list[ast.AST] = [self._tree]
        for part in name.split("."):
            nodes = [inner for node in nodes for inner in _inside(node) if part in _names(inner)]
        if len(nodes) != 1:
            raise ListError(f"{name} is defined {len(nodes)} times")
        return nodes[0]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Where a node begins and ends in the text."""
        at = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        begin, end = (self._begins[line - 1] + self._characters(line, col) for line, col in at)
        return begin, end

    def around(self, span: tuple[int, int], nodes: Sequence[ast.AST]) -> tuple[int, int]:
        """Where the smallest of the nodes that contain a span begins and ends."""
        spans = [s for s in map(self.span, nodes) if s[0] <= span[0] and span[1] <= s[1]]
        if not spans:
            raise ListError(f"there is no condition around characters {span[0]} to {span[1]}")
        return min(spans, key=lambda s: s[1] - s[0])

    def _characters(self, line: int, width: int) -> int:
        return len(self._lines[line - 1].encode()[:width].decode())


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in a node, but for those inside its functions and classes."""
    for inner in ast.iter_child_nodes(node):
        yield inner
        if not isinstance(inner, _DEFINITIONS):
            yield from _inside(inner)


def _names(node: ast.AST) -> set[str]:
    """What a node defines: a function, a class or constants."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {node.name}
        case ast.Assign(targets):
            return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        case ast.AnnAssign(ast.Name(name)):
            return {name}
    return set()


def listed(path: Path = LIST) -> list[Mutant]:
    """The mutants of a list, which is grouped by place and by tests."""
    mutants = []
    for place, groups in tomllib.loads(path.read_text("utf-8")).items():
        for group in groups:
            tests = tuple(group.pop("tests"))
            for name, edit in group.items():
                pair = edit if isinstance(edit, list) else [*edit.values(), ""]
                how = "replace" if isinstance(edit, list) else next(iter(edit))
                mutants.append(Mutant(name, place, how, *pair, tests))
    return mutants


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
    for folder in PACKAGES:
        if (copy / folder).exists():
            alias = copy / "fedpriv" / folder
            alias.unlink(missing_ok=True)  # of the tree that was copied
            alias.symlink_to(copy / folder)


def _refuse_other_imports(processes: Processes, copy: Path, mutants: Sequence[Mutant]) -> None:
    """Raise ListError unless tests import the mutants' modules from the copy."""
    modules = {m.place.partition(":")[0]: str(copy / m.file) for m in mutants}
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
            _refuse_other_imports(processes, copy, mutants)
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
