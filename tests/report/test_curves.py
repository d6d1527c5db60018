"""Runs that are drawn together."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import fedpriv
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.report.curves import curves
from fedpriv.report.records import RunRecord
from fedpriv.run.folder import read_run
from fedpriv.studies import read_study
from tests.commandline import printed, refused


@pytest.fixture(scope="module")
def records(study_folder: Path) -> list[RunRecord]:
    return [read_run(study_folder / cell.path) for cell, _ in read_study(study_folder).finished]


def metrics(record: RunRecord) -> list[dict]:
    text = (record.folder / "metrics.jsonl").read_text()
    return [row for row in map(json.loads, text.splitlines()) if row["accuracy"] is not None]


def test_runs_that_differ_in_seeds_are_one_line(records: list[RunRecord]) -> None:
    by_arm: dict[Path, list[RunRecord]] = {}
    for record in records:
        by_arm.setdefault(record.folder.parent, []).append(record)
    chart = next(chart for chart in curves(records) if chart.name == "by-epsilon")
    assert len(chart.series) == len(by_arm) < len(records)
    assert len({line.name for line in chart.series}) == len(by_arm)
    for line, runs in zip(chart.series, by_arm.values(), strict=True):
        rows = [metrics(run) for run in runs]
        assert list(line.x) == [row["epsilon"] for row in rows[0]]
        values = 100 * np.array([[row["accuracy"] for row in run] for run in rows])
        assert list(line.y) == pytest.approx(values.mean(0))
        half = stats.t.ppf(0.975, len(runs) - 1) * values.std(0, ddof=1) / math.sqrt(len(runs))
        assert list(line.low) == pytest.approx(np.maximum(values.mean(0) - half, 0.0))
        assert list(line.high) == pytest.approx(np.minimum(values.mean(0) + half, 100.0))


def test_time_is_that_of_all_rounds_so_far(records: list[RunRecord]) -> None:
    seconds = next(chart for chart in curves(records[:1]) if chart.name == "by-seconds")
    rows = metrics(records[0])
    taken = np.cumsum([row["simulation_only_seconds"] for row in rows])
    assert list(seconds.series[0].x) == pytest.approx(taken)
    untimed = [replace(r, simulation_only_seconds=None) for r in records[0].rounds]
    names = [chart.name for chart in curves([replace(records[0], rounds=tuple(untimed))])]
    assert names == ["by-epsilon"]


def test_a_projection_stands_at_the_users_that_it_is_for(tmp_path: Path) -> None:
    common = ["simulate", "digits", "--set", "rounds=2", "--set", "data.options.users=40"]
    printed(*common, "--out", tmp_path / "enrolled")
    printed(*common, "--set", "population.as_if=5000", "--out", tmp_path / "larger")
    charts = tmp_path / "charts"
    folders = [tmp_path / "enrolled", tmp_path / "larger"]
    by_users = next(
        chart for chart in curves(list(map(read_run, folders))) if "users" in chart.name
    )
    (line,) = by_users.series
    assert list(line.x) == [40, 5000]
    ends = [100 * metrics(read_run(folder))[-1]["accuracy"] for folder in folders]
    assert list(line.y) == pytest.approx(ends)
    assert "projection" in by_users.caption
    text = printed("report", *folders, "--charts", charts)
    assert sorted(path.stem for path in charts.glob("*.png")) == [
        "by-epsilon", "by-seconds", "by-users",
    ]  # fmt: skip
    assert str(charts / "by-users.svg") in text


def test_runs_without_a_common_axis_are_refused(records: list[RunRecord], tmp_path: Path) -> None:
    other = replace(records[1], delta=1e-9)
    with pytest.raises(InvalidValueError, match=r"delta is .* and 1e-09"):
        curves([records[0], other])
    rounds = tuple(replace(r, loss=None, accuracy=None) for r in records[0].rounds)
    with pytest.raises(DataError, match="not measured on held-out rows"):
        curves([replace(records[0], rounds=rounds)])
    with pytest.raises(InvalidValueError, match="no run to draw"):
        fedpriv.draw([], tmp_path)
    assert "2 folders are given" in refused("report", records[0].folder, records[1].folder)
