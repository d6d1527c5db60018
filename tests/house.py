"""Measures of the house, and the most that each may be: `make house`.

Code lines are those that hold a token of code: blank lines, comments, docstrings and generated
files do not count. A ceiling is raised only in a commit of its own, which says what it buys.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = {
    "code lines of the product": 29_579,
    "code lines of privacy and ledger": 3_306,
    "modules of the product": 137,
    "names at the root of fedpriv": 2,
    "public names that stand in two modules": 6,
    "names of modules that stand twice": 2,
    "words of README": 820,
    "words of docs": 38_000,
}
_COMMANDS = {"cli", "commands"}  # modules whose functions are named as users type them
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


@dataclass(frozen=True)
class Module:
    """A file of the product."""

    name: str  # as it is imported
    path: Path

    @cached_property
    def text(self) -> str:
        """All of it."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        """What it says."""
        return ast.parse(self.text)

    @property
    def code_lines(self) -> int:
        """How many lines hold code."""
        docstrings = set[int]()
        for node in ast.walk(self.tree):
            match node:
                case ast.Expr(ast.Constant(str())):
                    docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        lines = set[int]()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in _SKIPPED:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - docstrings)

    @property
    def public_names(self) -> Iterator[str]:
        """Names of functions and classes that it defines for others."""
        for node in self.tree.body:
            if isinstance(node, _DEFINITIONS) and not node.name.startswith("_"):
                yield node.name

    @property
    def imported(self) -> Iterator[str]:
        """Names, of modules or in modules, that it imports when it is imported."""
        for node in _executed(self.tree.body):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _executed(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that importing a module executes, but for those under TYPE_CHECKING."""
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for part in ("body", "orelse", "finalbody"):
            if not isinstance(node, _DEFINITIONS):
                yield from _executed(getattr(node, part, []))


def product() -> list[Module]:
    """Modules of the product, each once, but for those that a program wrote."""
    modules = []
    for top in ("fedpriv", "server", "clients"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if path.name.endswith("_pb2.py"):
                continue
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            modules.append(Module(name if top == "fedpriv" else f"fedpriv.{name}", path))
    return modules


def circle(modules: list[Module]) -> list[str]:
    """Modules that import each other in a circle, if any do."""
    names = {module.name for module in modules}
    graph = {m.name: {n for n in names & {*m.imported} if not _holds(n, m.name)} for m in modules}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _holds(package: str, name: str) -> bool:
    """Whether a package is imported anyway before a module is."""
    return f"{name}.".startswith(f"{package}.")


def _twice(names: Iterator[str]) -> list[str]:
    return sorted(name for name, count in Counter(names).items() if count > 1)


def _words(*paths: Path) -> int:
    return sum(len(re.findall(r"\w[\w'’.-]*", p.read_text(encoding="utf-8"))) for p in paths)


def measures(modules: list[Module]) -> Mapping[str, int | list[str]]:
    """Each measure: a number, or a list that is counted."""
    ground = [m for m in modules if m.name.startswith(("fedpriv.privacy", "fedpriv.ledger"))]
    root = [p for p in (ROOT / "fedpriv").iterdir() if p.suffix == ".py" and p.stem[0] != "_"]
    return {
        "code lines of the product": sum(m.code_lines for m in modules),
        "code lines of privacy and ledger": sum(m.code_lines for m in ground),
        "modules of the product": sum(m.path.name != "__init__.py" for m in modules),
        "names at the root of fedpriv": sorted(p.stem for p in root),
        "public names that stand in two modules": _twice(
            n for m in modules if m.path.stem not in _COMMANDS for n in m.public_names
        ),
        "names of modules that stand twice": _twice(
            m.path.stem for m in modules if m.path.stem != "__init__"
        ),
        "words of README": _words(ROOT / "README.md"),
        "words of docs": _words(*(ROOT / "docs").rglob("*.md")),
    }


def main() -> int:
    """Print each measure beside its ceiling; 1 if one is passed."""
    modules, failed = product(), False
    for name, measured in measures(modules).items():
        listed = measured if isinstance(measured, list) else []
        number = len(listed) if isinstance(measured, list) else measured
        failed |= number > MOST[name]
        print(f"{number:>7,} of {MOST[name]:>7,}  {name}", *listed)  # noqa: T201
    if round_trip := circle(modules):
        print("modules import each other in a circle:", *round_trip)  # noqa: T201
    return int(failed or bool(round_trip))


if __name__ == "__main__":
    sys.exit(main())
