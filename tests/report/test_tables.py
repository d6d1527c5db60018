"""Tables of a terminal keep a row in one line, whatever the names are and however narrow it is."""

import io
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich import box
from rich.cells import cell_len
from rich.console import Console

from fedpriv.report.study_charts import print_study
from fedpriv.report.tables import Column, Table, fitted, print_table, shortened
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
def test_an_arm_of_a_study_is_one_line(tmp_path: Path, arms: dict, width: int) -> None:
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
    rows = [line for line in lines if "60.00 ± 24.84" in line]
    assert len(rows) == len(arms)
    names = [row.split()[0] for row in rows]
    assert len(set(names)) == len(arms)
    if width == 120:
        # All columns; names are shortened no more than they must be.
        assert not any(line.startswith("Left out") for line in lines)
        assert all("2 (2/3)" in row and "1.5" in row and "7.900" in row for row in rows)
    if arms is not LONG:
        assert names == list(arms)
    # Groups stand beside layers; none of their lines is broken.
    assert sum(": 50 " in line for line in lines) == len(arms)
    assert sum("100 " in line and ":" in line for line in lines) == len(arms)
    told = " ".join(line for line in lines if line.startswith("Left out"))
    assert (width == 60) <= ("noise z" in told)


def test_columns_are_left_out_from_the_highest_and_named() -> None:
    columns = [Column("arm", "text"), Column("a\nb", spare=1), Column("c", spare=2), Column("d")]
    table = Table("", columns, [("name", "1" * 20, "2" * 20, "3" * 20)])
    assert fitted(table, 72) == (table, ())
    assert fitted(table, 71)[1] == ("c",)
    small, left_out = fitted(table, 30)
    assert left_out == ("c", "a b")
    assert small.rows == [["name", "3" * 20]]


texts = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,39}", fullmatch=True)  # as arms are called


@given(st.lists(texts, min_size=1, unique=True), st.integers(5, 40))
def test_short_names_fit_and_differ(names: list[str], most: int) -> None:
    short = shortened(names, most)
    assert list(short) == names
    assert all(len(found) <= max(most, 5) for found in short.values())
    assert len(set(short.values())) == len(names)


@given(
    st.lists(st.tuples(texts, texts, st.integers(0, 10**9)), min_size=1, max_size=5),
    st.integers(48, 120),
)
def test_each_row_is_one_line(rows: list[tuple[str, str, int]], width: int) -> None:
    columns = [Column("arm", "text"), Column("layer", "text"), Column("n"), Column("m", spare=1)]
    table = Table("", columns, [(a, b, str(n), str(n)) for a, b, n in rows])
    small, _ = fitted(table, width)
    console = Console(file=io.StringIO(), width=width)
    print_table(small, console)
    # Caption, blank, head, rule and blank are around the rows.
    lines = [line for line in console.file.getvalue().splitlines() if line.strip()]  # type: ignore[attr-defined]
    assert len(lines) == 2 + len(rows)


words = st.lists(st.from_regex(r"[a-z/_.]{1,14}", fullmatch=True), min_size=1, max_size=5)


@given(
    st.lists(st.lists(words, min_size=3, max_size=5), min_size=2, max_size=4), st.integers(30, 90)
)
def test_a_table_with_borders_breaks_no_word(cells: list[list[list[str]]], width: int) -> None:
    """Neither at 30 characters, where its rows become lists."""
    count = min(map(len, cells))
    head, *rows = ([" ".join(cell) for cell in row[:count]] for row in cells)
    console = Console(file=io.StringIO(), width=width)
    print_table(Table("", [Column(name, "text") for name in head], rows), console, box.HEAVY_HEAD)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    seen = {word for line in lines for word in re.split(r"[\s│┃]+", line)}
    assert {word for row in (head, *rows) for cell in row for word in cell.split()} <= seen


def test_other_programs_read_a_row_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    table = Table("t", [Column(name, "text") for name in "abc"], [("x " * 200, "y", "z")])
    print_table(table, border=box.HEAVY_HEAD)
    (row,) = [line for line in sys.stdout.getvalue().splitlines() if "x" in line]  # type: ignore[attr-defined]
    assert row.count("x") == 200
    assert row.split()[-2:] == ["z", "│"]
