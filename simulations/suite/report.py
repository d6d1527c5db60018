"""The results of the suite: all arms as JSON, a figure, and the table of docs/baselines.md.

    python -m simulations.suite.report

makes that table again from the committed numbers.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import altair as alt

from fedpriv.report.charts import COLOURS
from simulations.suite.arms import PRIVACY
from simulations.suite.tasks import ROOT, TASKS

Result = Mapping[str, Any]  # the result of an arm
RESULTS, PAGE = ROOT / "simulations/results/suite", ROOT / "docs/baselines.md"
TOOLS = ("fedpriv", "pfl")
_TITLES = {"2": "2", "8": "8", "2-as-if": "2 as if 10⁶", "none": "none"}  # in the figure's order


@dataclass(frozen=True)
class Cell:
    """The arms of a task that differ in their seed alone."""

    task: str
    privacy: str
    tool: str
    arms: Sequence[Result]

    @property
    def part(self) -> tuple[str, str]:
        """Its task and number of rounds: results with others are shown apart."""
        ran, declared = self.arms[0]["settings"]["rounds"], self.arms[0]["declared_rounds"]
        return self.task, f"{ran:,}" if ran == declared else f"{ran:,} of {declared:,}"

    @property
    def scores(self) -> list[float]:
        """By seed, in percent or points."""
        scale = 100.0 if TASKS[self.task]().points is None else 1.0
        return [scale * arm["score"] for arm in self.arms]

    @property
    def text(self) -> str:
        """Mean and, of several, standard deviation of scores."""
        unit = "%" if TASKS[self.task]().points is None else ""
        end = f" ± {stdev(self.scores):.1f}" if len(self.arms) > 1 else ""
        return f"{fmean(self.scores):.1f}{end}{unit}"


def cells(arms: Iterable[Result]) -> list[Cell]:
    """Arms by task, rounds, privacy and tool, in the order of the suite."""

    def place(arm: Result) -> tuple[int, ...]:
        names = (TASKS, "task"), (PRIVACY, "privacy"), (TOOLS, "tool")
        task, privacy, tool = ([*order].index(arm[name]) for order, name in names)
        return task, arm["settings"]["rounds"], privacy, tool

    in_order = sorted(arms, key=lambda arm: (*place(arm), arm["seed"]))
    groups = (list(same) for _, same in groupby(in_order, place))
    return [Cell(same[0]["task"], same[0]["privacy"], same[0]["tool"], same) for same in groups]


def read(folder: Path) -> list[Result]:
    """The arms of a file that `write` left."""
    arms: list[Result] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["arms"]
    return arms


def write(folder: Path) -> None:
    """Write results.json and accuracy.png of all arms in a folder."""
    files = sorted((folder / "arms").glob("*.json"))
    if arms := [json.loads(file.read_text(encoding="utf-8")) for file in files]:
        lines = ",\n".join(json.dumps({"command": _command(arm), **arm}) for arm in arms)
        text = f'{{"arms": [\n{lines}\n]}}\n'
        (folder / "results.json").write_text(text, encoding="utf-8")
        figure(cells(arms)).save(folder / "accuracy.png", scale_factor=2)


def _command(arm: Result) -> str:
    """Return the command that repeats this arm in the environment of the rivals."""
    settings, task = arm["settings"], TASKS[arm["task"]]()
    changed = [
        f"--{name} {settings[name]}"
        for name in ("rounds", "pretraining")
        if settings[name] < getattr(task, name)
    ]
    if (processes := arm.get("processes", 1)) > 1:
        changed.append(f"--processes {processes}")
    chosen = f"--privacy {arm['privacy']} --tools {arm['tool']} --seeds {arm['seed'] + 1}"
    return " ".join(["python -m simulations.suite", arm["task"], chosen, *changed])


def figure(results: Sequence[Cell]) -> alt.VConcatChart:
    """Scores against ε: mean, least and largest of seeds; a panel for each task and its rounds."""
    panels = []
    counts = Counter(cell.part for cell in results)
    for (name, rounds), count in counts.items():
        if count == 1 < max(counts.values()):  # there is nothing to compare
            continue
        task, of_task = TASKS[name](), [cell for cell in results if cell.part == (name, rounds)]
        rows = [
            {"epsilon": _TITLES[cell.privacy], "tool": cell.tool, "mean": fmean(cell.scores)}
            | {"low": min(cell.scores), "high": max(cell.scores)}
            for cell in of_task
        ]
        order = alt.Scale(domain=[*_TITLES.values()])
        colours = alt.Scale(domain=TOOLS, range=COLOURS[: len(TOOLS)])
        base = alt.Chart(alt.InlineData(values=rows)).encode(
            x=alt.X("epsilon:N", title="ε", scale=order, axis=alt.Axis(labelAngle=0)),
            xOffset=alt.XOffset("tool:N", sort=TOOLS),
            color=alt.Color("tool:N", title=None, scale=colours),
        )
        what = "accuracy (%)" if task.points is None else "error (points)"
        scores = [score for cell in of_task for score in cell.scores]
        low, high = min(scores), max(scores)
        margin = max(0.5, (high - low) / 10)  # so that a hundredth of a point looks like one
        scale = alt.Scale(domain=[low - margin, high + margin], zero=False)
        y = alt.Y("mean:Q", title=what, scale=scale)
        marks = (
            base.mark_rule(strokeWidth=2).encode(y=alt.Y("low:Q", scale=scale), y2="high:Q"),
            base.mark_point(filled=True, size=60, opacity=1).encode(
                y=y, shape=alt.Shape("tool:N", title=None, scale=alt.Scale(domain=TOOLS))
            ),
        )
        title = alt.TitleParams(task.title, subtitle=f"{rounds} rounds")
        panels.append(alt.layer(*marks, title=title).properties(width=230, height=170))
    lines = [alt.hconcat(*panels[first : first + 3]) for first in range(0, len(panels), 3)]
    return alt.vconcat(*lines, background="white", padding=12)


def page(text: str, results: Sequence[Cell]) -> str:
    """The page with the rows of its table made anew."""
    rows = []
    for task, rounds in dict.fromkeys(cell.part for cell in results):
        of_part = [cell for cell in results if cell.part == (task, rounds)]
        any_arm = of_part[0].arms[0]
        guess = Cell(task, "none", "", [{"score": any_arm["guess"]}]).text
        users, parameters = (f"{any_arm[name]:,}" for name in ("users", "parameters"))
        first = [TASKS[task]().title, users, parameters, rounds, guess]
        for tool in dict.fromkeys(cell.tool for cell in of_part):
            by = {cell.privacy: cell for cell in of_part if cell.tool == tool}
            scores = (by[name].text if name in by else "" for name in PRIVACY)
            cpu = fmean(arm["cpu_seconds"] for cell in by.values() for arm in cell.arms)
            rows.append(f"| {' | '.join([*first, tool, *scores, f'{cpu:.1f}'])} |\n")
            first = [""] * 5
    head, tail = re.split(r"(?<=\| --- \|\n)(?:\|.*\n)*", text, maxsplit=1)
    return head + "".join(rows) + tail


def main() -> None:
    """Make the table of the committed numbers."""
    results = cells(read(RESULTS))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")


if __name__ == "__main__":
    main()
