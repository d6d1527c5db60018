"""The report of a study, read without a browser."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from scipy import stats

from fedpriv.accounting.pricing import read_ledger
from fedpriv.report.study_page import page_of_study
from fedpriv.run.folder import RunFolder, read_run
from fedpriv.studies import read_study
from fedpriv.studies.results import (
    ALL_RESULTS,
    RESULT,
    results_text,
    verdict,
)
from fedpriv.support.checks import text_down
from tests.commandline import printed, refused
from tests.report.pages import figures, parsed, section, words


@pytest.fixture(scope="module")
def page(study_report: Path) -> str:
    return study_report.read_text(encoding="utf-8")


def metrics(folder: Path, arm: str, target: int, seed: int) -> list[dict]:
    path = folder / "runs" / arm / f"epsilon-{target}" / f"seed-{seed}" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_answer_comes_first(page: str, study_folder: Path) -> None:
    read = read_study(study_folder)
    document = parsed(page)
    first = next(e for e in section(document, "summary").iter("p"))
    assert first.get("class") == "answer"
    assert words(first) == verdict(read.study, read.arms)[0]
    summary = words(section(document, "summary"))
    for arm in read.arms:
        low, high = arm.accuracy.low, arm.accuracy.high
        assert f"{50 * (low + high):.2f} ± {50 * (high - low):.2f}" in summary
        assert text_down(arm.noise_multiplier) in summary


def test_a_large_delta_is_warned_of(study_folder: Path) -> None:
    read = read_study(study_folder)
    records = {cell: read_run(study_folder / cell.path) for cell, _ in read.finished}
    assert page_of_study(read, records).sections[0].warnings == []
    large = {cell: replace(record, delta=0.03) for cell, record in records.items()}
    (warning,) = page_of_study(read, large).sections[0].warnings
    assert warning.startswith("δ is 0.03, which is not below 1/N = 0.025")


def test_every_chart_names_its_axes_and_units(page: str) -> None:
    charts = figures(parsed(page))
    named = {"accuracy-0", "accuracy-1", "differences", "front", "norms-flat", "norms-joint"}
    assert named <= set(charts)
    for chart in charts.values():
        for axis in (chart.x, chart.y):
            # A pure number has no unit, and says none.
            pure = re.match(r"user-level ε|signal to noise", axis)
            assert pure or re.fullmatch(r".*\w.* \(.+\)", axis), axis
            assert "no unit" not in axis


def test_bands_are_students_over_seeds(page: str, study_folder: Path) -> None:
    mean = figures(parsed(page))["accuracy-1"].series["flat"]
    values = [
        [100 * metrics(study_folder, "flat", 8, seed)[number]["accuracy"] for seed in (0, 1)]
        for number in (0, 1)
    ]
    assert mean["y"] == pytest.approx([sum(pair) / 2 for pair in values])
    # Of two values the standard error is half their distance.
    widths = [stats.t.ppf(0.975, 1) * abs(one - two) / 2 for one, two in values]
    ends = list(zip(mean["y"], widths, strict=True))
    assert mean["low"] == pytest.approx([max(0.0, y - width) for y, width in ends])
    assert mean["high"] == pytest.approx([min(100.0, y + width) for y, width in ends])
    assert 100.0 in mean["high"]  # beyond which no accuracy is


def test_the_front_has_a_point_for_each_target(page: str, study_folder: Path) -> None:
    for name, line in figures(parsed(page))["front"].series.items():
        for number, target in enumerate((4, 8)):
            last = [metrics(study_folder, name, target, seed)[-1] for seed in (0, 1)]
            assert line["x"][number] == pytest.approx(max(row["epsilon"] for row in last))
            mean = sum(100 * row["accuracy"] for row in last) / 2
            assert line["y"][number] == pytest.approx(mean)
            assert line["low"][number] < mean < line["high"][number]


def test_update_norms_are_of_all_seeds(page: str, study_folder: Path) -> None:
    """The mean over seeds, between the least and the largest."""
    lines = figures(parsed(page))["norms-flat"].series
    folder = study_folder / "runs" / "flat" / "epsilon-8"
    rows = [
        [row.simulation_only_group_norms for row in RunFolder(folder / f"seed-{seed}").collected()]
        for seed in (0, 1)
    ]
    for group in rows[0][0]:
        line = lines[f"mean update norm of {group}"]
        seeds = [[row[group] for row in seed] for seed in rows]
        assert line["y"] == pytest.approx([sum(pair) / 2 for pair in zip(*seeds, strict=True)])
        assert line["high"] == pytest.approx([max(pair) for pair in zip(*seeds, strict=True)])
        assert line["low"] == pytest.approx([min(pair) for pair in zip(*seeds, strict=True)])


def test_differences_are_those_of_the_summary(page: str, study_folder: Path) -> None:
    series = figures(parsed(page))["differences"].series
    assert series["flat, the baseline"]["y"] == [0.0, 0.0]
    joint = series["joint"]
    found = [arm.accuracy_difference for arm in read_study(study_folder).arms if arm.arm == "joint"]
    assert joint["y"] == pytest.approx([100 * each.mean for each in found])
    assert joint["high"] == pytest.approx([100 * each.high for each in found])


def test_results_alone_can_be_drawn_and_make_no_page(study_folder: Path, tmp_path: Path) -> None:
    read = read_study(study_folder)
    kept = tmp_path / "kept"
    kept.mkdir()
    shutil.copy(study_folder / "study.toml", kept)
    (kept / ALL_RESULTS).write_text(results_text(read.runs))
    assert read_study(kept).arms == read.arms
    drawn = [tmp_path / name for name in ("whole", "alone")]
    for folder, out in zip((study_folder, kept), drawn, strict=True):
        files = printed("report", folder, "--charts", out).split()
        assert [Path(file).name for file in files] == [
            "front.png",
            "front.svg",
            "differences.png",
            "differences.svg",
        ]
    whole, alone = ({f.name: f.read_bytes() for f in out.iterdir()} for out in drawn)
    assert whole == alone
    assert whole["front.png"].startswith(b"\x89PNG")
    assert "without its runs and ledgers" in refused("report", kept)
    assert "without its runs" in refused("compare", kept / "study.toml", "--out", kept)


def test_charts_that_cannot_be_drawn_are_refused(study_folder: Path, tmp_path: Path) -> None:
    charts = ("--charts", tmp_path / "charts")
    assert "holds no run and no study" in refused("report", tmp_path, *charts)
    assert "leave out --out and --open" in refused("report", study_folder, *charts, "--open")
    shutil.copy(study_folder / "study.toml", tmp_path)
    assert "no run of the study" in refused("report", tmp_path, *charts)
    assert not charts[1].exists()
    (tmp_path / "file").touch()
    inside = tmp_path / "file" / "charts"
    assert "cannot be used" in refused("report", study_folder, "--charts", inside)


def test_every_ledger_was_verified(page: str, study_folder: Path) -> None:
    text = words(section(parsed(page), "ledger"))
    for path in study_folder.glob("runs/*/*/*/ledger.sqlite"):
        assert read_ledger(path).charges[-1].hash in text
    assert text.count(" yes ") == 8


def test_a_result_that_says_too_little_is_refused(study_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(study_folder, tmp_path / "copy"))
    file = next(copy.glob(f"runs/flat/epsilon-8/seed-0/{RESULT}"))
    told = json.loads(file.read_text())
    file.write_text(json.dumps(told | {"epsilon": 0.5 * told["epsilon"]}))
    assert "and its ledger holds" in refused("report", copy)


def test_a_study_without_a_finished_run_is_refused(study_folder: Path, tmp_path: Path) -> None:
    shutil.copy(study_folder / "study.toml", tmp_path)
    assert "no run of the study" in refused("report", tmp_path)


def test_what_is_missing_is_said(study_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(study_folder, tmp_path / "copy"))
    for folder in copy.glob("runs/*/epsilon-4"):
        shutil.rmtree(folder)
    shutil.rmtree(copy / "runs" / "joint" / "epsilon-8" / "seed-1")
    document = parsed(Path(printed("report", copy).strip()).read_text(encoding="utf-8"))
    assert "5 runs of the study are not finished" in words(section(document, "summary"))
    # With one target, accuracy is drawn against what was spent on the way.
    front = figures(document)["front"].series
    assert list(front) == ["flat", "joint"]
    spent = [row["epsilon"] for row in metrics(copy, "joint", 8, 0)]
    assert front["joint"]["x"] == pytest.approx(spent)
