"""What charts and figures of a study draw, of results that are made up."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fedpriv.report.page.study_charts import drawn
from fedpriv.report.series import on_log_scale
from fedpriv.report.study_figures import figure_of
from fedpriv.report.study_series import along_axes, by_target, differences, front
from fedpriv.studies import Cell, ReadStudy
from fedpriv.studies.study import load_study
from tests.studies.studying import result, study_file

TARGETS = {"epsilon": [0.5, 2.0, 8.0], "delta": 1e-2}
USERS = {
    "data.options.users": [1000, 40, 200],
    "clipping": {"flat": [], "joint": ["clipping.strategy=joint"]},
}


def accuracy(cell: Cell) -> float:
    users = float(cell.arm.name.split("_")[0].removeprefix("users-"))
    joint = 0.01 * cell.arm.name.endswith("joint")
    return 0.1 * math.log10(users * cell.target.epsilon) + joint + 0.01 * cell.seed


def made(folder: Path, of: Callable[[Cell], float], **changes: object) -> ReadStudy:
    """A study of seeds 0 and 1 with these accuracies, ε as its targets."""
    study = load_study(study_file(folder, **({"axes": USERS, "target": TARGETS} | changes)))
    results = [
        (cell, result(study, cell, accuracy=of(cell), epsilon=cell.target.epsilon))
        for cell in study.cells
    ]
    return ReadStudy(folder, study, tuple(results))


def test_the_front_has_a_line_for_each_arm_on_a_log_axis(tmp_path: Path) -> None:
    drawing = front(made(tmp_path, accuracy).arms)
    assert [each.name for each in drawing.series][:2] == ["users-1000_flat", "users-1000_joint"]
    first = drawing.series[0]
    assert first.x == [0.5, 2.0, 8.0]
    means = [10 * math.log10(1000 * epsilon) + 0.5 for epsilon in first.x]
    assert first.y == pytest.approx(means)
    # Of 0 and 1 points: t(1) at 97.5% is 12.7062, the standard error one half.
    assert first.high == pytest.approx([mean + 12.7062 / 2 for mean in means], rel=1e-5)
    assert drawing.axes[0].log
    assert drawing.axes[0].ticks == ((0.5, "0.5"), (2.0, "2"), (8.0, "8"))


def test_a_page_draws_the_same_axes_and_bars(tmp_path: Path) -> None:
    drawing = front(made(tmp_path, accuracy).arms)
    figure = json.loads(drawn(drawing).figure)
    axis = figure["layout"]["xaxis"]
    assert (axis["type"], axis["tickvals"], axis["ticktext"]) == (
        "log",
        [0.5, 2.0, 8.0],
        ["0.5", "2", "8"],
    )
    for trace, each in zip(figure["data"], drawing.series, strict=True):
        below, above = zip(*each.reach, strict=True)
        assert trace["error_y"]["array"] == pytest.approx(above)
        assert trace["error_y"]["arrayminus"] == pytest.approx(below)


@pytest.mark.parametrize(
    ("values", "log"),
    [([1.0, 10.0], False), ([1.0, 10.1], True), ([0.0, 50.0], False), ([3.0], False)],
)
def test_scales_are_logarithmic_beyond_a_factor_of_ten(values: list[float], log: bool) -> None:
    assert on_log_scale(values) is log


def test_accuracy_is_drawn_along_numbers_for_each_combination_of_the_rest(tmp_path: Path) -> None:
    read = made(tmp_path, accuracy)
    drawings = along_axes(read.study, read.arms)
    assert [each.title for each in drawings] == [
        f"Accuracy against users enrolled at ε = {epsilon}" for epsilon in ("0.5", "2", "8")
    ]
    last = drawings[-1]
    assert [each.name for each in last.series] == ["flat", "joint"]
    for each, joint in zip(last.series, (0.0, 1.0), strict=True):
        assert each.x == [40.0, 200.0, 1000.0]
        means = [10 * math.log10(8 * users) + joint + 0.5 for users in each.x]
        assert each.y == pytest.approx(means)
    assert last.axes[0].log
    assert [text for _, text in last.axes[0].ticks] == ["40", "200", "1000"]


def test_with_one_combination_lines_are_targets(tmp_path: Path) -> None:
    axes = {"data.options.users": [40, 80]}
    read = made(tmp_path, accuracy, axes=axes)
    (drawing,) = along_axes(read.study, read.arms)
    assert [each.name for each in drawing.series] == ["ε = 0.5", "ε = 2", "ε = 8"]
    assert not drawing.axes[0].log


def test_what_is_not_finished_is_left_out(tmp_path: Path) -> None:
    whole = made(tmp_path, accuracy)
    kept = [pair for pair in whole.finished if pair[0].arm.name != "users-200_flat"]
    read = ReadStudy(tmp_path, whole.study, tuple(kept))
    assert along_axes(read.study, read.arms)[0].series[0].x == [40.0, 1000.0]


def test_differences_have_an_interval_for_each_arm_and_target_and_a_zero_line(
    tmp_path: Path,
) -> None:
    read = made(tmp_path, accuracy, baseline="users-40_flat")
    drawing = differences(read.study, read.arms)
    assert drawing.axes[0].ticks == ((0.0, "0.5"), (1.0, "2"), (2.0, "8"))
    assert drawing.axes[1].unit == "points"
    zero = next(each for each in drawing.series if each.name == "users-40_flat, the baseline")
    assert set(zero.y) == {0.0}
    arms = [each for each in drawing.series if each is not zero]
    assert len(arms) == 5
    for each in arms:
        assert [round(x) for x in each.x] == [0, 1, 2]
        assert not each.joined
        expected = 10 * math.log10(float(each.name.split("_")[0][6:]) / 40)
        expected += each.name.endswith("joint")
        assert each.y == pytest.approx([expected] * 3)
        # The seeds' spread is the same in both, so nothing of it is left.
        assert max(map(max, each.reach)) < 1e-9
    assert len({x for each in arms for x in each.x}) == 15


def test_without_a_baseline_there_are_no_differences(tmp_path: Path) -> None:
    whole = made(tmp_path, accuracy)
    kept = [pair for pair in whole.finished if pair[0].arm.name != whole.study.baseline]
    read = ReadStudy(tmp_path, whole.study, tuple(kept))
    assert differences(read.study, read.arms) is None


def test_arms_keep_their_place_among_the_series_of_all_charts(tmp_path: Path) -> None:
    """Colours and markers go by place."""
    read = made(tmp_path, accuracy, baseline="users-40_flat")
    places = [[each.name for each in d.series] for d in (front(read.arms), by_target(read.arms))]
    zero = [each.name for each in differences(read.study, read.arms).series]
    assert places[0] == places[1]
    assert [name.removesuffix(", the baseline") for name in zero] == places[0]


def test_a_figure_shows_all_points_with_their_bars_and_overlaps_nothing(tmp_path: Path) -> None:
    read = made(tmp_path, accuracy)
    for drawing in (front(read.arms), by_target(read.arms), *along_axes(read.study, read.arms)):
        figure = figure_of(drawing)
        (axes,) = figure.axes
        low, high = axes.get_ylim()
        (left, right) = axes.get_xlim()
        for each in drawing.series:
            assert low < min(each.low) < max(each.high) < high
            assert left < min(each.x) < max(each.x) < right
        figure.draw_without_rendering()
        (legend,) = figure.legends
        boxes = [axes.title, axes.xaxis.label, axes.yaxis.label, legend, *axes.get_xticklabels()]
        found = [each.get_window_extent() for each in boxes]
        page = figure.bbox
        for number, one in enumerate(found):
            assert page.x0 <= one.x0 < one.x1 <= page.x1
            assert page.y0 <= one.y0 < one.y1 <= page.y1
            assert not any(one.overlaps(other) for other in found[number + 1 :])
