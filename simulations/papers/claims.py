"""Published claims about ε, recomputed, and compared with an interval that holds the truth.

Two questions about a claim are easily confused: whether the number is at least the exact one, and
whether its argument proves that.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from rich.console import Console
from rich.table import Table

from fedpriv.accounting.round_counts import Vector


class Argument(StrEnum):
    """The kind of argument for a claim."""

    PROOF = "proof"
    ESTIMATE = "estimate"
    """A limit without a bound on its error."""
    FLAW = "flaw"
    """A step that is not valid."""


@dataclass(frozen=True)
class Claim:
    """One number of a paper, and its check."""

    what: str  # the claim in words
    paper: str  # the number as printed; "" if the paper has none and the method is another
    recomputed: float  # the number by the paper's own method
    exact: tuple[float, float]  # the interval (low, up) of the true number
    argument: Argument  # for the claim

    @property
    def claimed(self) -> float:
        """The printed number, or the recomputed one if none is printed."""
        return float(self.paper) if self.paper else self.recomputed

    @property
    def is_below_truth(self) -> bool:
        """True if the true number is certainly above all numbers that round to the claimed one."""
        digits = len(self.paper.partition(".")[2])
        rounding = 0.5 * 10.0**-digits if self.paper else 0.0
        return self.claimed + rounding < self.exact[0]

    @property
    def is_valid_bound(self) -> bool:
        """True if the claim is proved and not refuted."""
        return self.argument is Argument.PROOF and not self.is_below_truth

    @property
    def verdict(self) -> str:
        """One phrase for readers; "not a valid bound" begins it if the claim is unreliable."""
        low, up = self.exact
        if self.is_below_truth:
            return f"not a valid bound: the truth is {_over(low / self.claimed)} it"
        excess = f"{_over(max(1.0, self.claimed / up))} the truth"
        match self.argument:
            case Argument.PROOF:
                return f"valid bound, {excess}"
            case Argument.ESTIMATE:
                return f"not a valid bound but an estimate, here {excess}"
            case Argument.FLAW:
                return f"not a valid bound: a step fails; the number is {excess}"


def epsilon_from_rdp_2016(orders: Sequence[float], rdp: Vector, delta: float) -> float:
    """Return ε as in papers: min_α rdp + log(1/δ)/(α − 1) (Abadi et al. 2016, Theorem 2)."""
    alpha = np.asarray(orders, dtype=np.float64)
    return float((rdp - math.log(delta) / (alpha - 1)).min())


def print_claims(title: str, claims: tuple[Claim, ...], notes: tuple[str, ...]) -> None:
    """Print claims as a table and the notes below it."""
    table = Table(title=title)
    table.add_column("claim")
    for column in ("paper", "recomputed", "exact"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict")
    for claim in claims:
        low, up = claim.exact
        numbers = (claim.paper, f"{claim.recomputed:.4g}", f"{low:.4f}–{up:.4f}")
        table.add_row(
            claim.what, *numbers, claim.verdict, style="red" if claim.is_below_truth else ""
        )
    console = Console()
    console.print(table)
    for note in notes:
        console.print(f"* {note}", highlight=False)


def _over(ratio: float) -> str:
    """Return a ratio above 1 in words, such as "2.5 times" or "3.1 % above"."""
    return f"{ratio:.1f} times" if ratio >= 2.0 else f"{100 * (ratio - 1):.1f} % above"
