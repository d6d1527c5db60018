"""The walk through the guarantee names functions and tests that there are."""

import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "guarantee.md").read_text("utf-8")
WALK = TEXT.partition("## The walk")[2].partition("\n## ")[0]
NODES = TEXT.partition("## What a node checks")[2].partition("\n## ")[0]


ROOMS = "privacy|ledger|training|analytics|run|secure_sums|clients|wire"


def rows_of(section: str) -> list[list[str]]:
    return [row.split("|")[1:-1] for row in section.splitlines() if re.match(r"\| \d+ \|", row)]


ROWS, NODE_ROWS = rows_of(WALK), rows_of(NODES)


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_statements_are_numbered() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, len(ROWS) + 1))
    assert len(ROWS) >= 15
    assert [int(row[0]) for row in NODE_ROWS] == list(range(1, len(NODE_ROWS) + 1))


@pytest.mark.parametrize("row", ROWS + NODE_ROWS, ids=lambda row: row[0].strip())
def test_what_holds_a_statement_and_its_tests_exist(row: list[str]) -> None:
    _, _, holders, tests = row
    module = None
    for name in quoted(holders):
        if re.fullmatch(rf"({ROOMS})\.\w+", name):
            module = importlib.import_module(f"fedpriv.{name}")
            continue
        owners = [module, importlib.import_module("fedpriv.ledger")]
        assert any(_has(owner, name) for owner in owners), name
    assert module is not None or "no other" in holders
    text = ""
    for name in quoted(tests):
        if name.endswith(".py"):
            text += (ROOT / "tests" / name).read_text("utf-8")
        else:
            assert f"def {name.rstrip('…')}" in text, name
    assert text


def _has(owner: object, name: str) -> bool:
    try:
        attrgetter(name)(owner)
    except AttributeError:
        return False
    return True
