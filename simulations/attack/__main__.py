"""Attack the plan of an experiment, and print certified bounds on ε next to the ledger's ε.

    python -m simulations.attack [FILE] [--set KEY=VALUE] [--population NAME] [--runs 1000] [--json]

Exit code 3 if a bound is above the ledger's ε, and 2 for bad input.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedpriv.errors import FedprivError
from fedpriv.experiment.build import population_of
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import load_config
from fedpriv.report.tables import json_text
from simulations.attack.populations import POPULATIONS
from simulations.attack.report import Report
from simulations.attack.suite import AttackedPlan


def main(arguments: Sequence[str] | None = None) -> None:
    """Attack, print the results, and exit with the exit code."""
    parser = argparse.ArgumentParser("simulations.attack", description="attacks on an experiment")
    parser.add_argument("file", type=Path, nargs="?", default=Path("digits"))
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    parser.add_argument("--runs", type=int, default=1000, help="of each of the two worlds")
    parser.add_argument("--rounds", type=int, default=2, help="of each run")
    parser.add_argument("--users", type=int, default=20, help="of the experiment, the first ones")
    parser.add_argument(
        "--population", action="append", choices=POPULATIONS, help="may be repeated; default: all"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    try:
        report = attacked(options)
    except FedprivError as error:
        parser.exit(2, f"error: {error}\n")
    if options.json:
        print(json_text(report.content))
    else:
        report.print()
    sys.exit(3 if report.refuted else 0)


def attacked(options: argparse.Namespace) -> Report:
    """Attack with the requested populations."""
    config = load_config(experiment_file(options.file), options.assignments)
    target = AttackedPlan.of(config, population_of(config), options.rounds, options.users)
    populations = [POPULATIONS[name] for name in options.population or POPULATIONS]
    return Report.of(config.name, target, populations, options.runs)


if __name__ == "__main__":
    main()
