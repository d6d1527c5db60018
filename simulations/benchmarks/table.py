"""Figures from measurements: medians, and ratios that have bars."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table

OURS, FORKED, RULE, ALONE, EQUAL = "fedpriv", "fedpriv-2", "rule", "alone", "equal"
"""Our engine in one process, forked, with a fixed rule instead of a clock, with users one after
another, and with users of equal sizes."""


@dataclass(frozen=True)
class Contest:
    """The measurements of one contestant at one work."""

    contestant: str  # its name, with the number of several processes, as in pfl-2
    users: int  # number of users that it trained in a turn
    prepared: float  # seconds of its process before its first round
    first: float  # seconds of the first round
    seconds: Sequence[float]  # of a later round, in each turn
    difference: float  # of its sum from the plain loop's, relative
    mebibytes: float = 0.0  # of the process, beyond the data, after the first round
    logged: str = ""  # in that round, by our engine

    @property
    def users_per_second(self) -> float:
        """The median over the turns."""
        return self.users / statistics.median(self.seconds)


@dataclass(frozen=True)
class Row:
    """All contestants at one work."""

    title: str  # of the work
    contests: Sequence[Contest]  # ours among them

    def named(self, name: str) -> Contest | None:
        """Return the contest of a contestant, if it took part."""
        return next((c for c in self.contests if c.contestant == name), None)

    def best(self, library: str) -> Contest | None:
        """Return the contest of a library with its fastest number of processes."""
        of_it = [c for c in self.contests if c.contestant.partition("-")[0] == library]
        return max(of_it, key=lambda contest: contest.users_per_second, default=None)

    def ratios(self) -> dict[str, float]:
        """Return the ratios that have bars, as far as they were measured."""
        return {name: ratio for name, ratio in self._ratios() if ratio is not None}

    def _ratios(self) -> Iterator[tuple[str, float | None]]:
        own, loop, alone_run = self.named(OURS), self.named("plain"), self.named(ALONE)
        yield "of a plain loop", _times(own, loop)
        yield "of pfl, one process each", _times(own, self.named("pfl"))
        yield "of pfl at its best", _times(self.named(FORKED) or own, self.best("pfl"))
        yield "of the road that a clock takes, by the fixed rule", _times(self.named(RULE), own)
        yield "time over equal sizes", _times(self.named(EQUAL), own)
        if own:
            yield "first round over a later one", own.first / statistics.median(own.seconds)
        if alone_run and loop and loop.mebibytes > 0:
            yield "memory of users alone over a plain loop", alone_run.mebibytes / loop.mebibytes


def _times(first: Contest | None, second: Contest | None) -> float | None:
    return first.users_per_second / second.users_per_second if first and second else None


def table(rows: Sequence[Row]) -> Table:
    """Return a table to print."""
    grid = Table("work", "by", box=None)
    for column in ("users/s", "fedpriv is", "to prepare", "first round", "MiB"):
        grid.add_column(column, justify="right")
    for row in rows:
        own = row.named(OURS)
        for number, contest in enumerate(row.contests):
            ratio = _times(own, contest)
            grid.add_row(
                row.title if number == 0 else "",
                contest.contestant,
                f"{contest.users_per_second:,.0f}",
                "" if contest is own or ratio is None else f"{ratio:.2f} ×",
                f"{contest.prepared:.2f} s",
                f"{contest.first:.2f} s",
                f"{contest.mebibytes:,.0f}",
            )
    return grid


def ratios_text(row: Row) -> str:
    """Return the ratios that have bars, in one line."""
    return ", ".join(f"{value:.2f} × {name}" for name, value in row.ratios().items())


def figures(row: Row) -> dict[str, object]:
    """Return the figures for a file, with the seconds of a round in each turn."""
    contests = {
        contest.contestant: {
            "users per second": contest.users_per_second,
            "seconds to prepare": contest.prepared,
            "seconds of the first round": contest.first,
            "seconds of a round in each turn": list(contest.seconds),
            "users in a turn": contest.users,
            "difference of its sum from the plain loop's": contest.difference,
            "MiB beyond the data": contest.mebibytes,
            "logged": contest.logged,
        }
        for contest in row.contests
    }
    return {"work": row.title, "fedpriv's": row.ratios(), "contestants": contests}
