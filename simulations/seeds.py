"""One experiment under several seeds: accuracy by round with its spread, as JSON and a figure.

    python -m simulations.seeds FILE --seeds 5 --out RESULTS.json --figure FIGURE.png

Every run is a run of `fedpriv simulate` with a seed, in a temporary folder.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np

from fedpriv.experiment.bundled import experiment_file
from fedpriv.report.charts import Axis, Chart, Series, figure
from fedpriv.run.folder import RunFolder
from fedpriv.run.simulate import run_simulation

Row = dict[str, object]
ROUNDS = Axis("rounds released", "count")


def run_seed(file: Path, seed: int, assignments: list[str]) -> list[Row]:
    """Return the metrics of one seeded run, a row per round."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run_simulation(file, [*assignments, f"seed={seed}"], out, resume=False)
        return list(RunFolder(out).read_metrics())


def summary(runs: list[list[Row]]) -> dict[str, object]:
    """Return the README's figures: final accuracies, their mean and spread, and each run's ε.

    Without classes, these are losses on held-out rows.
    """
    last = [rows[-1] for rows in runs]
    measure = "loss" if last[0]["accuracy"] is None else "accuracy"
    scores = [float(str(row[measure])) for row in last]
    return {
        measure: scores,
        "mean": float(np.mean(scores)),
        "standard_deviation": float(np.std(scores, ddof=1)) if len(scores) > 1 else None,
        "epsilon": [row["epsilon"] for row in last],
        "delta": last[0]["delta"],
        "unit": last[0]["unit"],
        "rounds": len(runs[0]),
        "seconds_of_rounds": [
            round(sum(float(str(r["simulation_only_seconds"])) for r in rows), 2) for rows in runs
        ],
    }


def charts(runs: list[list[Row]], title: str) -> tuple[Chart, Chart]:
    """Return charts of accuracy by round, with the range of seeds, and of ε by round."""
    evaluated = [[row for row in rows if row["accuracy"] is not None] for rows in runs]
    rounds = [int(str(row["round"])) for row in evaluated[0]]
    accuracy = np.array([[float(str(r["accuracy"])) for r in rows] for rows in evaluated]) * 100
    mean = Series(
        f"mean of {len(runs)} seeds, between the least and the largest",
        rounds,
        accuracy.mean(0).tolist(),
        accuracy.min(0).tolist(),
        accuracy.max(0).tolist(),
    )
    epsilon = [float(str(row["epsilon"])) for row in runs[0]]
    numbers = list(range(1, len(epsilon) + 1))
    delta = float(str(runs[0][0]["delta"]))
    return (
        Chart(
            "accuracy",
            title,
            "",
            ROUNDS,
            Axis("accuracy on held-out rows", "%", ends=(0.0, 100.0)),
            [mean],
        ),
        Chart(
            "epsilon",
            "what it cost, from the ledger",
            "",
            ROUNDS,
            Axis(f"{runs[0][0]['unit']}-level ε spent, at δ = {delta:g}", from_zero=True),
            [Series("ε", numbers, epsilon, colour=1)],
        ),
    )


def main() -> None:
    """Run the seeds and write the requested files."""
    parser = argparse.ArgumentParser(description="one experiment under several seeds")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    file = experiment_file(arguments.file)
    runs = [run_seed(file, s, arguments.assignments) for s in range(arguments.seeds)]
    result = summary(runs)
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.figure:
        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        figure(*charts(runs, file.stem)).save(arguments.figure, scale_factor=2)


if __name__ == "__main__":
    main()
