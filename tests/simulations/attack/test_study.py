"""The study of attacks, in small, and what it left."""

import json
import re
from pathlib import Path

import pytest

from simulations import broken_engines
from simulations.attack import POPULATIONS, study

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_the_study_attacks_the_real_engine_and_broken_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study, "ROUNDS", 1)
    monkeypatch.setattr(study, "USERS", 3)
    kept = {name: POPULATIONS[name] for name in ("late", "alone")}
    monkeypatch.setattr(study, "POPULATIONS", kept)
    silent = study.Attempt("silent", broken_engines.no_noise, "alone", 80, 1.0, 1.0)
    monkeypatch.setattr(study, "BROKEN", (silent,))
    study.main(["--epsilon", "1", "--runs", "8", "--folder", str(tmp_path)])
    text = (tmp_path / "attack.json").read_text()
    rows = json.loads(text)
    found = [(row["engine"], row["population"], row["verdict"]) for row in rows]
    real = [("as it is", name, "consistent") for name in kept]
    assert found == [*real, ("silent", "alone", "refuted")]
    for row in rows:
        certified, ledger = row["epsilon_low"], row["ledger_epsilon"]
        assert (row["verdict"] == "refuted") == (certified > ledger)
    assert "refuted" in (tmp_path / "attack.txt").read_text()
    monkeypatch.setattr(study, "attacked", None)  # nothing is done again
    study.main(["--epsilon", "1", "--runs", "8", "--folder", str(tmp_path)])
    assert (tmp_path / "attack.json").read_text() == text


def test_no_kept_population_refutes_the_engine_and_each_broken_one_is_refuted() -> None:
    rows = json.loads((ROOT / "simulations/results/attack.json").read_text())
    real = [row for row in rows if row["engine"] == "as it is"]
    asked = {(name, epsilon) for name in POPULATIONS for epsilon in (2.0, 8.0)}
    assert {(row["population"], row["epsilon"]) for row in real} == asked
    assert all(row["ledger_epsilon"] <= row["epsilon"] for row in rows)
    assert all(row["epsilon_low"] <= row["ledger_epsilon"] for row in real)
    broken = [row for row in rows if row["engine"] != "as it is"]
    assert {row["engine"] for row in broken} == {attempt.engine for attempt in study.BROKEN}
    assert all(row["epsilon_low"] > row["ledger_epsilon"] for row in broken)


def test_the_page_quotes_the_study() -> None:
    page = (ROOT / "docs/attack.md").read_text(encoding="utf-8")
    rows = json.loads((ROOT / "simulations/results/attack.json").read_text())
    by_population = {name: [f"`{name}`"] for name in POPULATIONS}
    quoted = []
    for row in rows:
        low = f"{row['epsilon_low']:.2f}"
        if row["engine"] == "as it is":
            by_population[row["population"]].append(low)
        else:
            quoted.append([row["engine"], f"`{row['population']}`", low])
    for cells in (*by_population.values(), *quoted):
        assert re.search(rf"^\| {re.escape(' | '.join(cells))} \|", page, re.MULTILINE), cells
