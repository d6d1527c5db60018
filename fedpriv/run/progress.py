"""How far long work is: bars that move in a terminal or a notebook, elsewhere a line a minute."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_BETWEEN_LINES = 60.0  # seconds


class Display:
    """Lines of work, each with its rounds and some figures; use `displayed`."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._told = time.monotonic()

    def add(self, name: str, rounds: int, done: int = 0) -> TaskID:
        """A new line."""
        return self._progress.add_task(name, total=rounds, completed=done, figures="")

    def update(self, line: TaskID, done: int, *figures: str) -> None:
        """Say how far a line is; figures that are empty are left out."""
        shown = "  ".join(filter(None, figures))
        self._progress.update(line, completed=done, figures=shown)

    def tell(self) -> None:
        """Print all lines if nothing moves by itself, and the last time was a minute ago."""
        now, interactive = time.monotonic(), self._console.is_terminal or self._console.is_jupyter
        if interactive or now - self._told < _BETWEEN_LINES:
            return
        self._told = now
        for task in self._progress.tasks:
            seconds = task.time_remaining
            left = "" if seconds is None else f", {timedelta(seconds=round(seconds))} left"
            figures = f", {task.fields['figures']}" if task.fields["figures"] else ""
            rounds = f"{task.completed:.0f} of {task.total:.0f} rounds"
            self._console.print(
                f"{task.description}: {rounds}{figures}{left}",
                highlight=False, markup=False, soft_wrap=True,
            )  # fmt: skip


@contextmanager
def displayed(console: Console) -> Iterator[Display]:
    """A display that is empty at first."""
    figures = TextColumn("{task.fields[figures]}")
    rounds, left = MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(
        "{task.description}", BarColumn(), rounds, figures, left, console=console
    ) as progress:
        yield Display(progress, console)
