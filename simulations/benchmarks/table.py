"""From what was measured to figures: medians, ratios, and the share of what the machine can do."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

OURS = "fedpriv"
_CALLED = {
    "fedpriv": "fedpriv",
    "plain": "plain PyTorch loop",
    "pfl": "pfl, one process",
    "flower": "Flower on Ray, a message per user",
    "opacus": "Opacus",
}


@dataclass(frozen=True)
class Contest:
    """What was measured of one contestant at one work."""

    contestant: str  # its name, and of several processes their number, as in pfl-2
    users: int  # how many it trained in a turn
    flops: float  # floating-point operations of the matrix products of a turn
    seconds: Sequence[float]  # of each turn
    difference: float  # of its sum from the plain loop's, relative

    @property
    def users_per_second(self) -> float:
        """Median over the turns."""
        return self.users / statistics.median(self.seconds)


@dataclass(frozen=True)
class Row:
    """All contestants at one work."""

    title: str  # of the work
    contests: Sequence[Contest]  # ours among them
    ceiling: float  # floating-point operations per second of matrix products, median over the turns

    def share_of_ceiling(self, contest: Contest) -> float:
        """Rate of a contestant's matrix products over that of nothing but matrix products."""
        return contest.flops / statistics.median(contest.seconds) / self.ceiling

    def ours_over(self, contest: Contest) -> float:
        """How many times as many users per second ours trains."""
        (ours,) = [c for c in self.contests if c.contestant == OURS]
        return ours.users_per_second / contest.users_per_second


def table(rows: Sequence[Row]) -> Table:
    """A table to print."""
    drawn = Table("work", "by", box=None)
    for column in ("users/s", "fedpriv is", "of matrix products"):
        drawn.add_column(column, justify="right")
    for row in rows:
        for number, contest in enumerate(row.contests):
            drawn.add_row(
                row.title if number == 0 else "",
                _called(contest.contestant),
                f"{contest.users_per_second:,.0f}",
                "" if contest.contestant == OURS else f"{row.ours_over(contest):.1f} ×",
                f"{row.share_of_ceiling(contest):.1%}",
            )
    return drawn


def _called(name: str) -> str:
    contestant, _, processes = name.partition("-")
    return f"{contestant}, {processes} processes" if processes else _CALLED.get(name, name)


def figures(rows: Mapping[str, Row]) -> dict[str, object]:
    """The same for a file, with the seconds of a round in each turn; by name of the work."""
    return {name: _of_row(row) for name, row in rows.items()}


def _of_row(row: Row) -> dict[str, object]:
    contests = {
        contest.contestant: {
            "users per second": contest.users_per_second,
            "ours over it": row.ours_over(contest),
            "share of the rate of matrix products": row.share_of_ceiling(contest),
            "difference of its sum from the plain loop's": contest.difference,
            "users in a turn": contest.users,
            "seconds of a round in each turn": list(contest.seconds),
        }
        for contest in row.contests
    }
    return {
        "work": row.title,
        "matrix products, GFLOP/s": row.ceiling / 1e9,
        "contestants": contests,
    }
