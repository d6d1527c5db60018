"""What the charts of a study show, of results that are made up."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedpriv.report.charts import embedded, figure, save, spans_decades
from fedpriv.report.study_page import arms_chart, differences_charts, front_chart, varied_charts
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
    read = made(tmp_path, accuracy)
    chart = front_chart(read.study, read.arms)
    assert [each.name for each in chart.series][:2] == ["users-1000_flat", "users-1000_joint"]
    first = chart.series[0]
    assert first.x == [0.5, 2.0, 8.0]
    means = [10 * math.log10(1000 * epsilon) + 0.5 for epsilon in first.x]
    assert first.y == pytest.approx(means)
    # Of 0 and 1 points: t(1) at 97.5% is 12.7062, the standard error one half.
    assert first.high == pytest.approx([mean + 12.7062 / 2 for mean in means], rel=1e-5)
    assert chart.x.log
    assert chart.x.ticks == ((0.5, "0.5"), (2.0, "2"), (8.0, "8"))


@pytest.mark.parametrize("unit", ["user", "example"])
def test_the_axis_of_epsilon_says_whom_it_protects(tmp_path: Path, unit: str) -> None:
    read = made(tmp_path, accuracy)
    privacy = {**read.study.base["privacy"], "unit": unit}
    base = {key: value for key, value in read.study.base.items() if key != "local"}
    study = read.study.model_copy(update={"base": base | {"privacy": privacy}})
    drawn = [chart(study, read.arms) for chart in (front_chart, arms_chart)]
    titles = {chart.x.title for chart in [*drawn, *differences_charts(study, read.arms)]}
    assert titles == {f"{unit}-level ε at δ = {study.target.delta:g}"}


def test_page_and_files_draw_the_same(tmp_path: Path) -> None:
    """All points with their bars, ticks where they are asked for, in the same marks and colours."""
    read = made(tmp_path, accuracy)
    chart = front_chart(read.study, read.arms)
    page, whole = embedded(chart), figure(chart).to_dict()
    (document,) = whole["hconcat"]
    (rows,), (written,) = page["datasets"].values(), whole["datasets"].values()
    assert rows == written
    marks = [layer["mark"] for layer in document["layer"]]
    assert [layer["mark"] | {"clip": False} for layer in page["layer"][:-1]] == marks
    for drawn in (page["layer"][0], document["layer"][0]):
        x = drawn["encoding"]["x"]
        assert x["field"] == "x"  # each arm at its ε
        assert x["scale"]["type"] == "log"
        assert x["axis"]["values"] == [0.5, 2.0, 8.0]
        assert x["axis"]["labelExpr"].startswith('["0.5", "2", "8"]')
    for each in chart.series:
        of_series = [row for row in rows if row["series"] == each.name]
        for column in ("x", "y", "low", "high"):
            assert [row[column] for row in of_series] == pytest.approx(getattr(each, column))


@pytest.mark.parametrize(
    ("values", "log"),
    [([1.0, 10.0], False), ([1.0, 10.1], True), ([0.0, 50.0], False), ([3.0], False)],
)
def test_scales_are_logarithmic_beyond_a_factor_of_ten(values: list[float], log: bool) -> None:
    assert spans_decades(values) is log


def test_accuracy_is_drawn_along_numbers_for_each_combination_of_the_rest(tmp_path: Path) -> None:
    read = made(tmp_path, accuracy)
    charts = varied_charts(read.study, read.arms)
    assert [each.title for each in charts] == [
        f"Accuracy against users enrolled at ε = {epsilon}" for epsilon in ("0.5", "2", "8")
    ]
    last = charts[-1]
    assert [each.name for each in last.series] == ["flat", "joint"]
    for each, joint in zip(last.series, (0.0, 1.0), strict=True):
        assert each.x == [40.0, 200.0, 1000.0]
        means = [10 * math.log10(8 * users) + joint + 0.5 for users in each.x]
        assert each.y == pytest.approx(means)
    assert last.x.log
    assert [text for _, text in last.x.ticks] == ["40", "200", "1000"]


def test_with_one_combination_lines_are_targets(tmp_path: Path) -> None:
    axes = {"data.options.users": [40, 80]}
    read = made(tmp_path, accuracy, axes=axes)
    (chart,) = varied_charts(read.study, read.arms)
    assert [each.name for each in chart.series] == ["ε = 0.5", "ε = 2", "ε = 8"]
    assert not chart.x.log


def test_what_is_not_finished_is_left_out(tmp_path: Path) -> None:
    whole = made(tmp_path, accuracy)
    kept = [pair for pair in whole.finished if pair[0].arm.name != "users-200_flat"]
    read = ReadStudy(tmp_path, whole.study, tuple(kept))
    assert varied_charts(read.study, read.arms)[0].series[0].x == [40.0, 1000.0]


def test_differences_have_an_interval_for_each_arm_and_target_and_a_zero_line(
    tmp_path: Path,
) -> None:
    read = made(tmp_path, accuracy, baseline="users-40_flat")
    (chart,) = differences_charts(read.study, read.arms)
    assert chart.x.ticks == ((0.0, "0.5"), (1.0, "2"), (2.0, "8"))
    assert chart.y.unit == "points"
    zero = next(each for each in chart.series if each.name == "users-40_flat, the baseline")
    assert set(zero.y) == {0.0}
    arms = [each for each in chart.series if each is not zero]
    assert len(arms) == 5
    for each in arms:
        assert [round(x) for x in each.x] == [0, 1, 2]
        assert not each.joined
        expected = 10 * math.log10(float(each.name.split("_")[0][6:]) / 40)
        expected += each.name.endswith("joint")
        assert each.y == pytest.approx([expected] * 3)
        # The seeds' spread is the same in both, so nothing of it is left.
        assert max(up - y for up, y in zip(each.high, each.y, strict=True)) < 1e-9
    assert len({x for each in arms for x in each.x}) == 15


def test_at_one_epsilon_arms_stand_at_their_names(tmp_path: Path) -> None:
    axes = {"clipping": {name: [f"rounds={n}"] for n, name in enumerate("abc", 2)}}
    read = made(
        tmp_path, lambda cell: 0.1 * cell.seed, axes=axes, target={"epsilon": 2.0, "delta": 1e-2}
    )
    bars = arms_chart(read.study, read.arms)
    assert bars.x.ticks == ((0.0, "a"), (1.0, "b"), (2.0, "c"))
    (chart,) = differences_charts(read.study, read.arms)
    assert chart.x.ticks == ((0.0, "b"), (1.0, "c"))
    assert "labelAngle" not in embedded(chart)["layer"][0]["encoding"]["x"]["axis"]
    long = replace(chart.x, ticks=tuple((float(n), "a long name") for n in range(4)))
    axis = embedded(replace(chart, x=long))["layer"][0]["encoding"]["x"]["axis"]
    assert (axis["labelAngle"], axis["labelOverlap"]) == (-45, False)
    assert {each.name: [*each.x] for each in chart.series} == {
        "a, the baseline": [-0.5, 1.5],
        "b": [0.0],
        "c": [1.0],
    }


def test_without_a_baseline_there_are_no_differences(tmp_path: Path) -> None:
    whole = made(tmp_path, accuracy)
    kept = [pair for pair in whole.finished if pair[0].arm.name != whole.study.baseline]
    read = ReadStudy(tmp_path, whole.study, tuple(kept))
    assert differences_charts(read.study, read.arms) == []


def test_arms_keep_their_place_among_the_series_of_all_charts(tmp_path: Path) -> None:
    """Colours and markers go by place."""
    read = made(tmp_path, accuracy, baseline="users-40_flat")
    places = [
        [each.name for each in d.series]
        for d in (front_chart(read.study, read.arms), arms_chart(read.study, read.arms))
    ]
    zero = [each.name for c in differences_charts(read.study, read.arms) for each in c.series]
    assert places[0] == places[1]
    assert [name.removesuffix(", the baseline") for name in zero] == places[0]


TEXT = {f"{{http://www.w3.org/2000/svg}}{name}" for name in ("text", "tspan")}


def test_a_figure_has_its_title_axes_and_legend(tmp_path: Path) -> None:
    read = made(tmp_path, accuracy)
    for chart in (
        front_chart(read.study, read.arms),
        arms_chart(read.study, read.arms),
        *varied_charts(read.study, read.arms),
    ):
        png, svg = save(chart, tmp_path)
        assert png.read_bytes().startswith(b"\x89PNG")
        texts = {e.text for e in ElementTree.parse(svg).iter() if e.tag in TEXT}
        assert {chart.title, *(each.name for each in chart.series)} <= texts
        for axis in (chart.x, chart.y):
            assert any((text or "").startswith(axis.name) for text in texts)
            assert {text for _, text in axis.ticks} <= texts
