"""The sentences of a study, and the tables that are printed of it."""

import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedpriv.report.study_page import print_study, results_json, results_table
from fedpriv.studies import Cell, ReadStudy
from fedpriv.studies.results import results_text, verdict
from fedpriv.studies.study import load_study
from tests.studies.studying import result, study_file

AXES = {"a": {"base": [], "up": ["rounds=3"], "down": ["rounds=4"], "like": ["rounds=5"]}}
SHIFT = {"base": 0.0, "up": 0.05, "down": -0.05, "like": 0.001}


def read(folder: Path, changes: Callable[[Cell], dict[str, object]], **study: object) -> ReadStudy:
    """A study whose results were made up."""
    asked = load_study(study_file(folder, **({"axes": AXES, "seeds": 4} | study)))
    results = tuple((cell, result(asked, cell, **changes(cell))) for cell in asked.cells)
    return ReadStudy(folder, asked, results)


def accuracy(cell: Cell) -> dict[str, object]:
    noise = 0.002 * (-1) ** cell.seed * (cell.arm.name != "base")
    return {"accuracy": 0.5 + 0.1 * cell.seed + SHIFT[cell.arm.name] + noise}


def loss(cell: Cell) -> dict[str, object]:
    return {"accuracy": None, "loss": 1.0 - accuracy(cell)["accuracy"]}


def sentences(study: ReadStudy) -> str:
    (text,) = verdict(study.study, study.arms)
    return text


# A mean of four values that differ by 0.002 either way: t(3) at 97.5% is 3.1824.
HALF = 3.1824 * 0.002 * math.sqrt(4 / 3) / math.sqrt(4)


@pytest.mark.parametrize(
    ("changes", "end", "gap", "signs"),
    [
        (accuracy, "highest accuracy, 70.00%", f"5.00 ± {100 * HALF:.2f} points", "-+"),
        (loss, "lowest loss, 0.3", f"0.05 ± {HALF:.2g}", "+-"),
    ],
)
def test_the_best_arm_comes_first_then_where_intervals_leave_zero_out(
    tmp_path: Path,
    changes: Callable[[Cell], dict[str, object]],
    end: str,
    gap: str,
    signs: str,
) -> None:
    first, second = sentences(read(tmp_path, changes)).split(". Against base, ")
    assert first == (
        f"At ε = 8, up has the {end}, better than base by {gap} (a 95% interval over 4 seeds)"
    )
    worse, unclear = second.removeprefix("with 95% intervals, ").split("; ")
    assert worse == f"worse: down ({signs[0]}{gap})"
    assert unclear.startswith(f"not told apart: like ({signs[1]}0.")


def test_what_cannot_be_told_from_the_baseline_is_not_said_to_be_better(tmp_path: Path) -> None:
    axes = {"a": {"base": [], "like": ["rounds=5"]}}
    text = sentences(read(tmp_path, accuracy, axes=axes))
    said = "At ε = 8, like has the highest accuracy, 65.10%, but is not significantly different"
    assert text.startswith(f"{said} from base: ")
    assert f"from base: +0.10 ± {100 * HALF:.2f} points" in text
    assert "better" not in text


def test_the_baseline_may_be_the_best(tmp_path: Path) -> None:
    text = sentences(read(tmp_path, accuracy, baseline="up"))
    assert text.startswith("At ε = 8, up, the baseline, has the highest accuracy, 70.00%. Against")
    assert "worse: like (-4.90 ± " in text
    assert "better" not in text


def test_of_many_arms_the_best_few_are_named(tmp_path: Path) -> None:
    axes = {"rounds": list(range(2, 12))}
    study = read(tmp_path, lambda cell: {"accuracy": 0.01 * cell_rounds(cell)}, axes=axes)
    assert "better: rounds-10 (+8.00 ± 0.00 points), rounds-9 (+7.00" in sentences(study)
    assert "rounds-8 (+6.00 ± 0.00 points) and 5 more." in sentences(study)
    assert "rounds-7" not in sentences(study)


def cell_rounds(cell: Cell) -> int:
    return int(cell.arm.name.removeprefix("rounds-"))


def test_one_seed_tells_nothing_and_each_target_has_a_sentence(tmp_path: Path) -> None:
    one = read(tmp_path, accuracy, seeds=1)
    (alone,) = verdict(one.study, one.arms)
    assert "(fewer than two seeds shared with base: no interval" in alone
    two = read(tmp_path, accuracy, target={"epsilon": [1, 8.0], "delta": 1e-2})
    assert [text.partition(",")[0] for text in verdict(two.study, two.arms)] == [
        "At ε = 1",
        "At ε = 8",
    ]


def test_without_the_baseline_the_best_is_named_by_the_same_figure(tmp_path: Path) -> None:
    complete = read(tmp_path, accuracy)

    def without(seeds: set[int]) -> str:
        kept = [
            (cell, found)
            for cell, found in complete.finished
            if cell.arm.name != "base" or cell.seed not in seeds
        ]
        return sentences(replace(complete, finished=tuple(kept)))

    best = "At ε = 8, up has the highest accuracy, 70.00%"
    for missing in ({0, 1, 2, 3}, {1, 2, 3}):
        assert without(missing).startswith(f"{best} (fewer than two seeds shared with base: no")


def test_losses_of_any_size_can_be_read(tmp_path: Path) -> None:
    study = read(tmp_path, lambda cell: {"accuracy": None, "loss": 1e-7 * loss(cell)["loss"]})
    assert f"better than base by 5e-09 ± {1e-7 * HALF:.2g}" in sentences(study)
    text = results_table(study, study.study.targets[0]).rows[1]
    assert text[1].startswith("3e-08 ± ")
    assert text[2] == f"-5e-09 ± {1e-7 * HALF:.2g}"


def test_a_model_that_diverged_makes_no_arm_better(tmp_path: Path) -> None:
    bad = {"up": math.inf, "down": math.nan, "like": 1.0, "base": 1.0}
    study = read(tmp_path, lambda cell: {"accuracy": None, "loss": bad[cell.arm.name]})
    (sentence,) = verdict(study.study, study.arms)
    assert "better" not in sentence
    assert "not told apart: like (+0 ± 0)" in sentence
    assert "not finite: up (+inf ± nan), down (+nan ± nan)." in sentence
    text = results_json(study)
    assert json.loads(text, parse_constant=pytest.fail)["arms"][1]["loss"]["mean"] == "Infinity"


def figures(cell: Cell) -> dict[str, object]:
    per_layer = {"1": 0.5, "3": math.nan}
    return accuracy(cell) | {
        "simulation_only_clipped": {"1": 0.25, "3": 0.75},
        "simulation_only_signal_to_noise": per_layer,
        "simulation_only_update_norms": per_layer,
        "simulation_only_users_per_second": 1234.0,
    }


def test_what_is_printed_fits_eighty_columns_and_holds_the_figures(tmp_path: Path) -> None:
    study = read(tmp_path, figures, accuracies=[0.5, 0.9])
    stream = io.StringIO()
    print_study(study, Console(file=stream, width=80))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert "0 seeds" not in text
    for cell in ("65.00 ± ", "+5.00 ± ", "never", "1,234", "1: 25", "3: 75", "7.900", "1.5"):
        assert cell in text
    assert re.search(r"65\.00 ± \d+\.\d\d ", text)


def test_a_figure_that_the_first_run_lacks_is_told(tmp_path: Path) -> None:
    study = read(tmp_path, lambda cell: {"figures": {"late": 0.5} if cell.seed else {"early": 1.0}})
    for arm in study.arms:
        assert set(arm.figures) == {"early", "late"}
        assert math.isnan(arm.figures["late"].mean)  # of a seed it is not known


def test_what_programs_read_names_what_is_not_private(tmp_path: Path) -> None:
    study = read(tmp_path, figures)
    arms = json.loads(results_json(study))["arms"]
    runs = [json.loads(line) for line in results_text(study.runs).splitlines()]
    assert (len(arms), len(runs)) == (4, 16)
    assert arms[1]["simulation_only_clipped"]["3"] == 0.75
    assert runs[5]["simulation_only_users_per_second"] == 1234.0
    private = ("clipped", "norm", "signal", "per_second")
    for column in (*arms[0], *runs[0]):
        if any(word in column for word in private) and column != "clipping_norms":
            assert column.startswith("simulation_only_"), column
