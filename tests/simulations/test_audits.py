"""The study of audits, in small; what it left; and the benchmark of what an audit costs."""

import json
import re
from pathlib import Path
from statistics import median

import pytest

from simulations import audits
from simulations.benchmarks import audit_cost

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "simulations/results"
PLAIN = "clipping left out"  # no run of which was believed


@pytest.mark.slow
def test_a_fault_is_found_and_runs_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = ["--runs", "1", "--mnist", "0", "--workers", "1", "--folder", str(tmp_path)]
    audits.main([*few, "--faults", PLAIN])
    (row,) = json.loads((tmp_path / "audits.json").read_text())
    assert row["epsilon"] <= 2.0
    assert row["by_guesses"]
    assert PLAIN in (tmp_path / "audits.txt").read_text()
    monkeypatch.setattr(audits, "of_digits", None)
    audits.main([*few, "--faults", PLAIN])
    assert json.loads((tmp_path / "audits.json").read_text()) == [row]


def test_the_figure_shows_every_canary_once() -> None:
    found = audits.audited(audits.DIGITS, ["rounds=2", "audit.canaries=40"])
    drawn = audits.chart_of(found)
    assert [sum(series.y) for series in drawn.series] == [sum(found.there), 40 - sum(found.there)]


def found_in_study() -> dict[str, list[audits.Audited]]:
    rows = [audits.Audited(**row) for row in json.loads((RESULTS / "audits.json").read_text())]
    names = [*audits.FAULTS, audits.ON_MNIST]
    return {name: [each for each in rows if each.fault == name] for name in names}


def refuted(runs: list[audits.Audited]) -> int:
    return sum(each.by_guesses or each.by_noise for each in runs)


def test_faults_are_found_and_runs_without_one_are_believed() -> None:
    found = found_in_study()
    honest = found.pop("none")
    assert len(honest) == 100
    assert refuted(honest) <= 5
    on_mnist = found.pop(audits.ON_MNIST)
    assert refuted(on_mnist) == 0
    assert median(each.epsilon_low for each in on_mnist) > 4.9
    assert refuted(found["noise halved"]) >= 95
    for runs in found.values():
        assert len(runs) == 100
        assert refuted(runs) >= 90


def test_the_page_quotes_the_study() -> None:
    page = (ROOT / "docs/audit.md").read_text(encoding="utf-8")
    for name, runs in found_in_study().items():
        middle = median(each.epsilon_low for each in runs)
        cells = name, f"{middle:.2f}", f"{refuted(runs)} of {len(runs)}"
        assert re.search(rf"^\| {re.escape(' | '.join(cells))} \|", page, re.MULTILINE), cells


@pytest.mark.slow
def test_what_an_audit_costs_is_measured_in_whole_runs() -> None:
    without, with_some = (audit_cost.rounds_of(50, 5, canaries, 3) for canaries in (0, 20))
    for found in (without, with_some):
        assert len(found["processor seconds"]) == 2
        assert min(found["processor seconds"]) > 0.0
        assert found["peak MiB"] > 0.0
