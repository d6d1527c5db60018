"""Bounds that attacks certify for DIGITS, and for engines that are broken on purpose.

    python -m simulations.attack.study [--epsilon 2 8] [--runs 1000] [--folder FOLDER]

All populations attack two rounds of `digits` over its first 20 users, at each ε. Each engine of
`broken_engines` is attacked with one population that shows its fault, at ε = 2; if a leak shows
only when the cohort is known, everybody is drawn. Attempts in the folder are not repeated.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedpriv.experiment.build import population_of
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import load_config
from fedpriv.report.tables import Column, Table
from simulations import broken_engines
from simulations.attack import POPULATIONS, AttackedPlan
from simulations.attack.report import Report
from simulations.broken_engines import Broken
from simulations.papers.results import read_results, write_numbers, write_results

ROUNDS, USERS = 2, 20
Row = dict[str, Any]  # values of JSON


@dataclass(frozen=True)
class Attempt:
    """An engine and the population that attacks it."""

    engine: str  # its fault, for readers
    broken: Broken
    population: str
    runs: int = 400  # of each world
    epsilon: float = 2.0  # of the plan
    drawn: float = 0.3  # probability that a user is drawn

    @property
    def key(self) -> Row:
        """Values of JSON that identify the attempt."""
        names = ("engine", "population", "runs", "epsilon", "drawn")
        return {name: getattr(self, name) for name in names}


BROKEN = (
    Attempt("clipping left out", broken_engines.no_clipping, "large"),
    Attempt("noise left out", broken_engines.no_noise, "alone"),
    Attempt("noise halved", broken_engines.halved_noise, "alone", 4000),
    Attempt("a failure ends the run", broken_engines.failures_raise, "illegal-labels"),
    Attempt(
        "sum × size of the cohort", broken_engines.sums_of_many_louder, "far-larger", drawn=1.0
    ),
    Attempt(
        "clipped by the largest of a chunk", broken_engines.clipped_together, "large", drawn=1.0
    ),
    Attempt("NaN spoils a chunk", broken_engines.one_failure_spoils_all, "not-finite", drawn=1.0),
    Attempt("shapes of all enrolled", broken_engines.shapes_of_all_enrolled, "undrawn", drawn=1.0),
    Attempt("counts without noise", broken_engines.exact_counts, "tiny", drawn=1.0),
    Attempt("divided by who came", broken_engines.realised_denominator, "tiny", 800, drawn=1.0),
)


def attacked(attempt: Attempt) -> Row:
    """Make an attempt; return the result, with the engine and the plan."""
    keys = f"privacy.epsilon={attempt.epsilon}", f"privacy.sampling_probability={attempt.drawn}"
    config = load_config(experiment_file(Path("digits")), keys)
    target = AttackedPlan.of(config, population_of(config), ROUNDS, USERS)
    with attempt.broken():
        report = Report.of("digits", target, [POPULATIONS[attempt.population]], attempt.runs)
    content = dict(report.content)
    (population,) = content.pop("populations")
    return {**attempt.key, **content, **population}


def missing(attempts: Sequence[Attempt], rows: Sequence[Row]) -> Iterator[Attempt]:
    """Yield attempts that have no row."""
    for attempt in attempts:
        if not any(attempt.key.items() <= row.items() for row in rows):
            yield attempt


def table_of(rows: Sequence[Row]) -> Table:
    """Return a table with a row for each engine and population."""
    columns = [
        Column("engine", "text"),
        Column("population", "text"),
        Column("runs"),
        Column("ledger's ε"),
        Column("certified ε ≥"),
        Column("best distinguisher", "text"),
        Column("verdict", "text"),
    ]
    cells = [
        (
            str(row["engine"]),
            str(row["population"]),
            f"{row['runs']:,}",
            f"{row['ledger_epsilon']:.3f}",
            f"{row['epsilon_low']:.3f}",
            str(row["distinguisher"]) if row["epsilon_low"] else "",
            str(row["verdict"]),
        )
        for row in rows
    ]
    title = f"DIGITS, {ROUNDS} rounds of {USERS} users, δ = 0.001, 95% confidence"
    return Table(title, columns, cells)


def main(arguments: Sequence[str] | None = None) -> None:
    """Attack, print, and write the results."""
    parser = argparse.ArgumentParser(description="attacks on DIGITS and on broken engines")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--runs", type=int, default=1000, help="of each world, of the real engine")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args(arguments)
    real = [
        Attempt("as it is", nullcontext, name, options.runs, epsilon)
        for epsilon in options.epsilon
        for name in POPULATIONS
    ]
    attempts, rows = (*real, *BROKEN), read_results(options.folder, "attack")
    for attempt in missing(attempts, rows):
        rows.append(attacked(attempt))
        write_numbers(rows, options.folder, "attack")
    chosen = [row for attempt in attempts for row in rows if attempt.key.items() <= row.items()]
    write_results(table_of(chosen), chosen, options.folder, "attack")


if __name__ == "__main__":
    main()
