"""The progress of a study: one line for each arm and target."""

import statistics
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from fedpriv.studies import Cell, ReadStudy, RunResult, Study

from .study_workers import Progress as Step


def show(read: ReadStudy, steps: Iterable[Step], console: Console) -> None:
    """Drive the runs of a study to their end under the display.

    Args:
        read: the study and what is finished of it.
        steps: from `run_all`.
        console: where to draw.
    """
    study = read.study
    done = {cell: result.rounds for cell, result in read.finished}
    results = dict(read.finished)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as display:
        lines: dict[str, TaskID] = {}
        for cell in study.cells:
            if _name(study, cell) not in lines:
                total = len(study.seeds) * study.config_of(cell).rounds
                lines[_name(study, cell)] = display.add_task(
                    _name(study, cell), total=total, figures=""
                )
        for cell in study.cells:
            _move(display, lines[_name(study, cell)], _beside(study, cell), done, results)
        for step in steps:
            done[step.cell] = step.rounds
            if step.result is not None:
                results[step.cell] = step.result
            beside = _beside(study, step.cell)
            _move(display, lines[_name(study, step.cell)], beside, done, results)


def _name(study: Study, cell: Cell) -> str:
    several = len(study.targets) > 1
    return f"{cell.arm.name} at ε = {cell.target.epsilon:g}" if several else cell.arm.name


def _beside(study: Study, cell: Cell) -> list[Cell]:
    """The runs of the same line."""
    return [c for c in study.cells if (c.arm, c.target) == (cell.arm, cell.target)]


def _move(
    display: Progress,
    line: TaskID,
    cells: Sequence[Cell],
    done: dict[Cell, int],
    results: dict[Cell, RunResult],
) -> None:
    """Bring a line up to date."""
    finished = [results[cell] for cell in cells if cell in results]
    accuracies = [run.accuracy for run in finished if run.accuracy is not None]
    mean = f", accuracy {statistics.fmean(accuracies):.1%}" if accuracies else ""
    display.update(
        line,
        completed=sum(done.get(cell, 0) for cell in cells),
        figures=f"{len(finished)} of {len(cells)} seeds{mean}",
    )
