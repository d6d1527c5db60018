"""What attacks certify of DIGITS, and what they do of engines that are broken on purpose.

    python -m simulations.attack [--epsilon 2 8] [--runs 1000] [--folder FOLDER]

All kept populations attack two rounds of digits.toml over its first 20 users, at each ε. Engines of
`broken_engines` are each attacked with the population that is for them, at ε = 2; where it takes
knowing who is drawn to see what leaks, everybody is.
"""

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from fedpriv.attack import POPULATIONS, Target
from fedpriv.attack.command import Report
from fedpriv.config import load_config
from fedpriv.data.population import load_population
from fedpriv.experiments import experiment_file
from fedpriv.report.tables import Column, Table
from simulations import broken_engines
from simulations.broken_engines import Broken
from simulations.papers.results import write_results

ROUNDS, USERS, EVERYBODY = 2, 20, "privacy.sampling_probability=1"


@dataclass(frozen=True)
class Attempt:
    """What is attacked, and by what."""

    engine: str  # how it is broken, for readers
    broken: Broken
    population: str
    runs: int = 200  # of each world
    assignments: tuple[str, ...] = ()


BROKEN = (
    Attempt("clipping left out", broken_engines.no_clipping, "large"),
    Attempt("noise left out", broken_engines.no_noise, "alone"),
    Attempt("noise halved", broken_engines.halved_noise, "alone", 4000),
    Attempt(
        "sum × size of the cohort",
        broken_engines.sums_of_many_louder,
        "far-larger",
        200,
        (EVERYBODY,),
    ),
    Attempt(
        "clipped by the largest of a chunk",
        broken_engines.clipped_together,
        "large",
        400,
        (EVERYBODY,),
    ),
    Attempt(
        "NaN spoils a chunk", broken_engines.one_failure_spoils_all, "not-finite", 200, (EVERYBODY,)
    ),
    Attempt("a failure ends the run", broken_engines.failures_raise, "illegal-labels"),
    Attempt(
        "shapes of all enrolled",
        broken_engines.shapes_of_all_enrolled,
        "undrawn",
        200,
        (EVERYBODY,),
    ),
    Attempt("counts without noise", broken_engines.exact_counts, "tiny", 200, (EVERYBODY,)),
    Attempt("divided by who came", broken_engines.realised_denominator, "tiny", 400, (EVERYBODY,)),
)


def target_at(*assignments: str) -> Target:
    """DIGITS, with keys replaced."""
    config = load_config(experiment_file(Path("digits")), assignments)
    data = config.simulated_data
    return Target.of(config, load_population(data.name, data.options), ROUNDS, USERS)


def attacked(
    attempt: Attempt, target: Target, populations: Sequence[str]
) -> list[dict[str, object]]:
    """What was found with each population, as values of JSON, with the engine and ε of the plan."""
    with attempt.broken():
        kept = [POPULATIONS[name] for name in populations]
        report = Report.of("digits", target, kept, attempt.runs)
    about = {key: value for key, value in report.content.items() if key != "populations"}
    rows = report.content["populations"]
    assert isinstance(rows, list)
    return [{"engine": attempt.engine, **about, **row} for row in rows]


def table_of(rows: Sequence[dict[str, object]]) -> Table:
    """A row for each engine and population."""
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
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(arguments)
    rows = list[dict[str, object]]()
    for epsilon in given.epsilon:
        real = Attempt("as it is", nullcontext, "", given.runs)
        rows += attacked(real, target_at(f"privacy.epsilon={epsilon}"), [*POPULATIONS])
    for attempt in BROKEN:
        rows += attacked(attempt, target_at(*attempt.assignments), [attempt.population])
    write_results(table_of(rows), rows, given.folder, "attack")


if __name__ == "__main__":
    main()
