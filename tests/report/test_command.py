"""`fedpriv report`: what it writes, and what it refuses."""

import json
import shutil
import sqlite3
import webbrowser
from pathlib import Path

import pytest

from fedpriv.report.charts import write_page
from fedpriv.run.folder import read_run
from tests.commandline import printed, refused


@pytest.fixture
def copy(run_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path / "copy"))


def test_the_page_goes_where_it_is_told_and_is_opened(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(shown.append(address)) or True)
    out = tmp_path / "one page.html"
    (copy / "ledger.participation.sqlite").unlink()
    before = sorted(copy.iterdir())
    assert printed("report", copy, "--out", out, "--open") == f"{out}\n"
    assert shown == [out.as_uri()]
    assert "Not checked: the record of who took part is not here" in out.read_text("utf-8")
    assert sorted(copy.iterdir()) == before


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    assert "holds no run and no study" in refused("report", tmp_path)


def test_a_place_that_cannot_be_written_is_refused(copy: Path) -> None:
    assert "cannot be used" in refused("report", copy, "--out", copy / "no" / "page.html")


def test_a_page_replaces_pages_alone(copy: Path) -> None:
    ledger = copy / "ledger.sqlite"
    kept = ledger.read_bytes()
    line = refused("report", copy, "--out", ledger)
    assert "ledger.sqlite exists already and is not HTML; it is not overwritten" in line
    assert ledger.read_bytes() == kept
    page = copy / "report.html"
    page.write_text("<!doctype html><p>An older one")
    printed("report", copy)
    assert "<h1" in page.read_text("utf-8")
    page.write_text("")
    write_page("new", page)
    assert page.read_text() == "new"


def test_a_ledger_that_was_altered_is_refused(copy: Path) -> None:
    (copy / "report.html").unlink(missing_ok=True)
    database = sqlite3.connect(copy / "ledger.sqlite")
    names = [
        row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type='trigger'")
    ]
    for name in names:
        database.execute(f"DROP TRIGGER {name}")
    database.execute("UPDATE chain SET text = replace(text, '0.', '0.0') WHERE position > 0")
    database.commit()
    database.close()
    assert "charge 1" in refused("report", copy)
    assert not (copy / "report.html").exists()


def test_a_release_without_a_charge_is_refused(copy: Path) -> None:
    metrics = copy / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows[3]["charge"] = rows[2]["charge"]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "does not have the charge of round 4" in refused("report", copy)


def test_only_attempts_that_were_released_have_true_figures(copy: Path) -> None:
    before = read_run(copy).simulation_only
    assert [each.round for each in before] == [1, 2, 3, 4, 5, 6]
    with (copy / "simulation_only.jsonl").open("a") as file:
        row = {"round": 2, "attempt": 7, "simulation_only_update_norms": {"layer": 99.0}}
        file.write(json.dumps(row) + "\n")
    assert read_run(copy).simulation_only == before


@pytest.mark.parametrize(
    "line", ["5", '{"round": 0}', '{"round": 0, "epsilon": "x", "charge": ""}']
)
def test_metrics_that_are_none_are_refused(copy: Path, line: str) -> None:
    (copy / "metrics.jsonl").write_text(f"{line}\n")
    assert "cannot be read as metrics" in refused("report", copy)
