"""Reading the folder of a study, and what its runs amount to."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.studies import Interval, read_study
from fedpriv.studies.results import ALL_RESULTS, RESULT, RoundsTo, results_text, summarise, verdict
from fedpriv.studies.study import Cell, Study, load_study
from tests.studies.studying import result, study_file

RESULTS = Path(__file__).parents[2] / "simulations" / "results"
KEPT = sorted(file.parent for file in RESULTS.glob("*/study.toml"))


def write(folder: Path, study: Study, cell: Cell, **changes: object) -> None:
    run = folder / cell.path
    run.mkdir(parents=True)
    (run / RESULT).write_text(results_text([result(study, cell, **changes)]))


def test_what_was_written_is_read_and_what_is_not_finished_is_missing(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path))
    for number, cell in enumerate(study.cells[:3]):
        write(tmp_path, study, cell, accuracy=0.1 * number, loss=math.inf)
    (tmp_path / study.cells[3].path).mkdir(parents=True)
    read = read_study(str(tmp_path))
    assert read.missing == 1
    assert [cell for cell, _ in read.finished] == list(study.cells[:3])
    assert read.runs == tuple(
        result(study, cell, accuracy=0.1 * number, loss=math.inf)
        for number, cell in enumerate(study.cells[:3])
    )
    assert [(arm.arm, arm.seeds) for arm in read.arms] == [("flat", (0, 1)), ("joint", (0,))]


def test_a_run_of_other_settings_is_refused(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path))
    write(tmp_path, study, study.cells[0])
    study_file(tmp_path, target={"epsilon": 8.0, "delta": 1e-3})
    with pytest.raises(DataError, match="holds a run with settings that differ"):
        read_study(tmp_path)


def test_more_seeds_and_arms_leave_finished_runs_valid(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path))
    write(tmp_path, study, study.cells[0])
    axes = {"clipping": {"flat": [], "joint": ["clipping.strategy=joint"], "new": ["rounds=3"]}}
    study_file(tmp_path, seeds=[1, 0], axes=axes)
    assert len(read_study(tmp_path).finished) == 1


def test_folders_without_a_study_and_broken_results_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="holds no study"):
        read_study(tmp_path)
    study = load_study(study_file(tmp_path))
    write(tmp_path, study, study.cells[0])
    (tmp_path / study.cells[0].path / RESULT).write_text('{"arm": 1')
    with pytest.raises(DataError, match="cannot be read as the result of a run"):
        read_study(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    assert read_study(tmp_path).arms == ()


def test_the_file_of_all_results_stands_in_where_there_are_no_runs(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path))
    results = [result(study, cell, loss=math.inf) for cell in study.cells[1:]]
    strange = result(study, study.cells[0], arm="of another study")
    kept = tmp_path / ALL_RESULTS
    kept.write_text(results_text([strange, *reversed(results)]))
    assert read_study(tmp_path).runs == tuple(results)
    kept.write_text(results_text([result(study, study.cells[0], settings="others")]))
    with pytest.raises(DataError, match="holds a run with settings that differ"):
        read_study(tmp_path)
    kept.write_text("5\n")
    with pytest.raises(DataError, match="cannot be read as the result"):
        read_study(tmp_path)
    # Where there are runs, they are what counts.
    write(tmp_path, study, study.cells[2])
    assert [cell for cell, _ in read_study(tmp_path).finished] == [study.cells[2]]


@pytest.mark.parametrize("folder", KEPT, ids=[folder.name for folder in KEPT])
def test_results_that_are_committed_are_whole_and_say_what_their_runs_do(folder: Path) -> None:
    read = read_study(folder)
    assert read.missing == 0
    kept = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert kept["verdict"] == list(verdict(read.study, read.arms))
    means = [(row["arm"], row["target"]["epsilon"], row["loss"]["mean"]) for row in kept["arms"]]
    assert means == [(arm.arm, arm.target.epsilon, arm.loss.mean) for arm in read.arms]


def test_the_interval_is_students() -> None:
    values = [0.2, 0.5, 0.4, 0.9, 0.1]
    interval = Interval.of(values)
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-12)
    assert Interval.of([0.3]) == Interval(0.3, None, 1)
    for diverged in ([math.inf, 1.0], [math.inf, -math.inf], [math.nan, 1.0]):
        assert math.isnan(Interval.of(diverged).half_width)
    assert Interval.of([1e200, 3e200]) == Interval(2e200, math.inf, 2)


def test_the_interval_covers_the_mean_as_often_as_it_says() -> None:
    draws = np.random.default_rng(5).standard_normal((2_000, 4))
    covered = sum(
        interval.low <= 0.0 <= interval.high for interval in map(Interval.of, draws.tolist())
    )
    # Binomial(2000, 0.95): beyond this once in a hundred thousand seeds.
    assert abs(covered - 1_900) < 4.4 * math.sqrt(2_000 * 0.95 * 0.05)


def test_differences_are_paired_by_seed(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, seeds=4))
    wide, shift = [0.1, 0.5, 0.9, 0.3], [0.05, 0.06, 0.04, 0.05]
    runs = [
        result(
            study, cell, accuracy=wide[cell.seed] + shift[cell.seed] * (cell.arm.name == "joint")
        )
        for cell in reversed(study.cells)
    ]
    flat, joint = summarise(study, runs)
    assert flat.accuracy_difference is None
    expected = stats.ttest_1samp(shift, 0.0).confidence_interval(0.95)
    difference = joint.accuracy_difference
    assert (difference.low, difference.high) == pytest.approx((expected.low, expected.high))
    assert joint.accuracy.half_width > 5 * difference.half_width


def test_arms_are_compared_at_the_same_target_only(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, target={"epsilon": [1.0, 8.0], "delta": 1e-2}))
    runs = [
        result(study, cell, accuracy=0.1 * cell.target.epsilon + 0.01 * len(cell.arm.name))
        for cell in study.cells
    ]
    found = summarise(study, runs)
    assert [(arm.target.epsilon, arm.arm) for arm in found] == [
        (1.0, "flat"),
        (1.0, "joint"),
        (8.0, "flat"),
        (8.0, "joint"),
    ]
    for arm in found[1::2]:
        assert arm.accuracy_difference.mean == pytest.approx(0.01)


def test_a_seed_that_never_reached_an_accuracy_counts_as_late(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path, seeds=3))
    reached = {"flat": [4, 10, None], "joint": [None, 3, None]}

    def measured(cell: Cell) -> tuple[tuple[int, float], ...]:
        first = reached[cell.arm.name][cell.seed] or 13
        return tuple((rounds, 0.5 * (rounds >= first)) for rounds in range(1, 13))

    flat, joint = summarise(study, [result(study, c, evaluations=measured(c)) for c in study.cells])
    assert flat.rounds_to == {0.5: RoundsTo(10, 2)}
    assert joint.rounds_to == {0.5: RoundsTo(None, 1)}


def test_a_study_without_accuracy_compares_losses(tmp_path: Path) -> None:
    study = load_study(study_file(tmp_path))
    runs = [result(study, c, accuracy=None, loss=float(len(c.arm.name))) for c in study.cells]
    _, joint = summarise(study, runs)
    assert joint.accuracy is joint.accuracy_difference is None
    assert joint.loss_difference == Interval(1.0, 0.0, 2)
