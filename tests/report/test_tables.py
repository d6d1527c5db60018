"""Tables of a terminal keep words whole, whatever the names are and however narrow it is."""

import io
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from fedpriv.report.study_page import print_study
from fedpriv.report.tables import Column, Table, print_table
from fedpriv.studies import ReadStudy
from fedpriv.studies.study import load_study
from tests.studies.studying import result, study_file

SHORT = {"flat": [], "joint": ["clipping.strategy=joint"]}
MANY = {f"norm-{norm}": [f"clipping.norm={norm}"] for norm in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)}
LONG = {
    f"{name}-with-the-clipping-norm-that-was-found-on-public-users": [f"clipping.norm={norm}"]
    for name, norm in (("small", 0.25), ("medium", 0.5), ("large", 1.0))
}
LAYERS = {"encoder.layers.0.self_attention.weight": 0.25, "encoder.layers.1.weight": 1.5}


def shown(read: ReadStudy, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    print_study(read, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("arms", [SHORT, MANY, LONG], ids=["two", "six", "long"])
def test_any_terminal_names_all_arms_of_a_study(tmp_path: Path, arms: dict, width: int) -> None:
    levels = [0.25, 0.5, 0.75]
    file = study_file(tmp_path, axes={"arm": arms}, seeds=3, accuracies=levels)
    study = load_study(file)
    figures = {f"simulation_only_{name}": LAYERS for name in ("update_norms", "signal_to_noise")}
    clipped = {"a-group-whose-name-is-long": 0.5, "another-group-whose-name-is-long": 1.0}
    runs = [
        result(
            study, cell, accuracy=0.5 + 0.1 * cell.seed, simulation_only_clipped=clipped,
            # Two of three seeds reach the second level.
            evaluations=((1, 0.3), (2, 0.6 if cell.seed else 0.4)), **figures,
        )
        for cell in study.cells
    ]  # fmt: skip
    read = ReadStudy(tmp_path, study, tuple(zip(study.cells, runs, strict=True)))
    lines = shown(read, width)
    assert max(map(cell_len, lines)) <= width
    named = "".join("".join(lines).split())
    assert all(named.count(f"arm{name}") == 2 for name in arms) or width > 60
    rows = [line for line in lines if "60.00 ± 24.84" in line]
    assert len(rows) == len(arms)
    if width == 120 and arms is not LONG:
        assert all("7.900" in row for row in rows)
        assert [row.split()[1] for row in rows] == list(arms)
    # Groups stand beside layers.
    assert sum(": 50" in line for line in lines) == len(arms)


words = st.lists(st.from_regex(r"[a-z/_.]{1,14}", fullmatch=True), min_size=1, max_size=5)


@given(
    st.lists(st.lists(words, min_size=3, max_size=5), min_size=2, max_size=4), st.integers(30, 90)
)
def test_a_table_with_borders_breaks_no_word(cells: list[list[list[str]]], width: int) -> None:
    """Neither at 30 characters, where its rows become lists."""
    count = min(map(len, cells))
    head, *rows = ([" ".join(cell) for cell in row[:count]] for row in cells)
    console = Console(file=io.StringIO(), width=width)
    print_table(Table("", [Column(name, "text") for name in head], rows), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    seen = {word for line in lines for word in re.split(r"[\s│┃]+", line)}
    assert {word for row in (head, *rows) for cell in row for word in cell.split()} <= seen


def test_other_programs_read_a_row_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    table = Table("t", [Column(name, "text") for name in "abc"], [("x " * 200, "y", "z")])
    print_table(table)
    (row,) = [line for line in sys.stdout.getvalue().splitlines() if "x" in line]  # type: ignore[attr-defined]
    assert row.count("x") == 200
    assert row.split()[-2:] == ["z", "│"]
