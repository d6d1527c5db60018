"""The page of baselines is made by one command, of what was measured."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from simulations import baselines
from simulations.baselines import BASELINES, Baseline, Outcome, Row
from tests.simulations.datasets.people_files import write


def made(monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> str:
    """The page after a command that writes into a folder."""
    places = ("--results", str(folder / "baselines.json"), "--page", str(folder / "page.md"))
    monkeypatch.setattr("sys.argv", ["baselines", *arguments, *places])
    baselines.main()
    return (folder / "page.md").read_text(encoding="utf-8")


def rows_of(page: str) -> list[list[str]]:
    """Cells of each row below the heading."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.mark.slow
def test_the_command_runs_a_task_scaled_down_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = Outcome(18, "softmax, 205 parameters", 0.5, (Row(("a=1",), 2.0, 1e-3, (0.6, 0.7)),))
    baselines.write({"har": kept}, tmp_path / "baselines.json", tmp_path / "page.md")
    page = made(monkeypatch, tmp_path, "--only", "digits", "--seeds", "2", "--set", "rounds=2")
    digits, har = rows_of(page)
    assert digits[2:5] == ["287", "softmax, 650 parameters", "0.0001"]
    assert all(score.endswith("%") for score in digits[5:])
    assert har == [
        *("`har`", "HAR: which of five activities", "18", "softmax, 205 parameters", "0.001"),
        *("65.0 ± 7.1%", "", "", "50.0%"),
    ]
    numbers = json.loads((tmp_path / "baselines.json").read_text())
    assert [*numbers] == ["digits", "har"]
    digits, tighter, without = numbers["digits"]["rows"]
    assert digits["epsilon"] <= 2.0 < tighter["epsilon"] <= 8.0
    assert without["epsilon"] is None
    assert len(digits["scores"]) == 2


@pytest.mark.parametrize("task", ["har", "parkinsons", "employment", "income"])
def test_each_experiment_fits_its_data(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"employment": "census", "income": "census"}.get(task, task)
    write(name, tmp_path / "data")
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path / "data"))
    monkeypatch.setitem(BASELINES, task, replace(BASELINES[task], epsilons=(8.0,)))
    page = made(monkeypatch, tmp_path, "--only", task, "--seeds", "1", "--set", "rounds=1")
    (row,) = rows_of(page)
    assert row[2] == {"har": "2", "parkinsons": "9", "census": "36"}[name]
    assert row[6].endswith("points" if task == "parkinsons" else "%")


def test_without_data_the_command_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FEDPRIV_DATA", str(tmp_path))
    with pytest.raises(SystemExit) as caught:
        made(monkeypatch, tmp_path, "--only", "har")
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: har_raw.npz is absent from")
    assert [*tmp_path.iterdir()] == []


def test_regressions_have_errors_in_points() -> None:
    severity = Baseline("severity", "simulations/parkinsons.toml", 1e-3, unit=10.0)
    assert baselines.score(severity, {"loss": 2.25, "accuracy": None}) == 15.0
    assert baselines.shown(severity, [14.0, 16.0]) == "15.0 ± 1.4 points"


def test_the_committed_page_is_of_the_committed_numbers() -> None:
    outcomes = baselines.read_outcomes(baselines.RESULTS)
    assert [*outcomes] == [*BASELINES]
    assert baselines.PAGE.read_text(encoding="utf-8") == baselines.page(outcomes)
    for task, outcome in outcomes.items():
        baseline = BASELINES[task]
        assert baseline.delta * outcome.users < 0.1
        assert [len(row.scores) for row in outcome.rows] == [3] * len(baseline.epsilons)
        for row, epsilon in zip(outcome.rows, baseline.epsilons, strict=True):
            assert list(row.keys) == baselines.assignments(baseline, epsilon)
            if epsilon is not None:
                assert row.epsilon is not None
                assert 0.98 * epsilon < row.epsilon <= epsilon
