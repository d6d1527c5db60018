"""What README and docs say can be done, can be done."""

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from pydantic import BaseModel
from typer.main import get_command

import fedpriv
from fedpriv.cli import app
from fedpriv.experiment.config import Config
from fedpriv.report.records import Trouble

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted(DOCS.rglob("*.md")),
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
MAKE_TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Commands of indented and fenced blocks and of code spans, as words."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(
        r"^(?: {4}|)\$? ?((?:[A-Z_]+=\S+ )?(?:fedpriv|make|python -m) .*)$", text, re.M
    )
    spans = re.findall(r"`((?:fedpriv|make|python -m) [^`]*)`", text)
    return [shlex.split(c, comments=True) for c in (*lines, *spans)]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_exist(page: Path) -> None:
    for words in commands(page):
        match words:
            case ["make", target, *_]:
                assert target in MAKE_TARGETS
            case ["python", "-m", module, *_]:
                path = ROOT.joinpath(*module.split("."))
                assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
            case ["fedpriv", *arguments]:
                check_command(arguments)


def check_command(arguments: list[str]) -> None:
    """Sub-commands exist and each option is one of theirs."""
    command = get_command(app)
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command = command.commands[arguments[0]]
        arguments = arguments[1:]
    known = {name for parameter in command.params for name in parameter.opts}
    for argument in arguments:
        if argument.startswith("--") and argument != "--help":
            assert argument in known, f"{command.name} has no option {argument}"
        if argument.startswith("simulations/"):
            assert (ROOT / argument).exists(), argument


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_and_pictures_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", text):
        if "://" in target:
            continue
        linked = page.parent / target if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(linked), f"{page.name} links to {target}#{anchor}"


def anchors_of(page: Path) -> set[str]:
    """Those that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def defaults_of(section: type) -> dict[str, Any]:
    """Keys of a section, or of a value that is read from a table, with their defaults."""
    if is_dataclass(section):
        return {field.name: field.default for field in fields(section)}
    named = section.model_fields.items()
    return {name: field.get_default(call_default_factory=True) for name, field in named}


def section_at(section: type, key: str) -> type | None:
    """The section, or the value that is read from a table, at a key of a section, if it is one."""
    annotation = get_type_hints(section)[key]
    parts = () if get_origin(annotation) is tuple else (annotation, *get_args(annotation))
    tables = [p for p in parts if is_dataclass(p) or isinstance(p, type(BaseModel))]
    return tables[0] if tables else None


def keys_of(section: type) -> set[str]:
    """Keys of a section, with those of the sections in it; a list of sections is one key."""
    keys = set()
    for name in defaults_of(section):
        inner = section_at(section, name)
        keys |= {f"{name}.{key}" for key in keys_of(inner)} if inner else {name}
    return keys


def test_every_key_is_documented_and_every_documented_key_exists() -> None:
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    table = page.partition("\n## ")[0]  # tables after it are of other things
    documented = set()
    for cell in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE):
        documented |= set(re.findall(r"`([a-z_.]+)`", cell))
    assert documented == keys_of(Config)


def default_of(key: str) -> Any:
    """The default of the configuration at a dotted key."""
    section: type = Config
    *sections, name = key.split(".")
    for each in sections:
        section = section_at(section, each)
    return defaults_of(section)[name]


def test_defaults_in_the_table_of_keys_are_those_of_the_configuration() -> None:
    table = (DOCS / "configuration.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_.]+)` \| .* \| `([^`]*)`(?: \||;)", table, re.MULTILINE)
    rows = [(key, text) for key, text in rows if key in keys_of(Config)]
    assert len(rows) > 30
    for key, text in rows:
        try:
            stated = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            stated = text
        default = default_of(key)
        assert stated == (list(default) if isinstance(default, tuple) else default), key


def test_every_public_name_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    listed = re.findall(r"^::: fedpriv\.([A-Za-z_]+)$", page, re.MULTILINE)
    packages = {"data", "analytics", "accounting", "ledger", "studies"}
    assert sorted(listed) == sorted({*fedpriv.__all__, *packages} - {"__version__"})


def test_every_page_has_its_place_in_the_site() -> None:
    places = re.findall(
        r"- (?:[^:\n]+: )?([a-z_/-]+\.(?:md|ipynb))", (ROOT / "mkdocs.yml").read_text()
    )
    pages = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb")]
    assert sorted(places) == sorted(str(page.relative_to(DOCS)) for page in pages)


def test_notebooks_are_kept_without_what_they_printed() -> None:
    notebooks = sorted((DOCS / "notebooks").glob("*.ipynb"))
    assert len(notebooks) == 2
    for path in notebooks:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        run = [cell for cell in cells if cell["cell_type"] == "code"]
        assert run
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in run)


def logged(path: Path) -> set[str]:
    """The longest part without a field of each line that a module logs as a warning or error."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Call(
                func=ast.Attribute(ast.Name("_log"), "warning" | "error"),
                args=[ast.Constant(str(text)), *_],
            ):
                parts.add(max(re.split(r"%[.\d]*[a-z]", text), key=len).strip(" :;()"))
    return parts - {""}


def test_every_warning_of_server_and_nodes_is_explained() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    modules = [path for end in ("server", "clients") for path in sorted((ROOT / end).glob("*.py"))]
    found = {part for path in modules for part in logged(path)}
    assert len(found) > 15
    assert [part for part in sorted(found) if part[:30] not in text] == []
    assert [what for what in Trouble if f": {what}: " not in text] == []


def test_the_example_of_the_data_guide_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    (tmp_path / "mine.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])
    done = subprocess.run(
        [sys.executable, "-c", "from mine import people; print(people().users.population)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("100\n", "")


def test_the_figure_of_the_guide_to_extending_can_be_computed() -> None:
    import torch

    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    names: dict[str, Callable[..., object]] = {}
    exec(re.search(r"```python\n(def worst_class.*?)```", text, re.DOTALL)[1], names)
    outputs, targets = torch.eye(3)[[0, 1, 1, 1, 2, 2]], torch.tensor([0, 0, 0, 1, 2, 2])
    assert names["worst_class"](outputs, targets, 3) == pytest.approx(1 / 3)


def test_places_where_an_update_is_checked_exist() -> None:
    text = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
    places = text.partition("### Where an update is checked")[2].partition("\nHow long")[0]
    rows = [row.split("|")[1:-1] for row in places.splitlines() if re.match(r"\| \d+ \|", row)]
    assert [int(number) for number, *_ in rows] == list(range(1, 11))
    for _, _, file, names in rows:
        (path,) = re.findall(r"`([^`]+)\.py`", file)
        assert (ROOT / f"{path}.py").exists()
        module = import_module(f"fedpriv.{path.removeprefix('fedpriv/').replace('/', '.')}")
        for name in re.findall(r"`([^`]+)`", names):
            assert callable(attrgetter(name)(module)), name
