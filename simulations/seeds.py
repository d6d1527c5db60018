"""One experiment under several seeds: accuracy by round with its spread, as JSON and a figure.

    python -m simulations.seeds FILE --seeds 5 --out RESULTS.json --figure FIGURE.png

Every run is a run of `fedpriv simulate` with a seed, in a folder that is thrown away.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from fedpriv.run.folder import RunFolder
from fedpriv.run.run import run_simulation

Row = dict[str, object]


def run_seed(file: Path, seed: int, assignments: list[str]) -> list[Row]:
    """Rows of the metrics of one seeded run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        run_simulation(file, [*assignments, f"seed={seed}"], out, resume=False)
        return list(RunFolder(out).read_metrics())


def summary(runs: list[list[Row]]) -> dict[str, object]:
    """What the README quotes: final accuracies, their mean and spread, and the ε of each run."""
    last = [rows[-1] for rows in runs]
    accuracy = [float(str(row["accuracy"])) for row in last]
    return {
        "accuracy": accuracy,
        "mean": float(np.mean(accuracy)),
        "standard_deviation": float(np.std(accuracy, ddof=1)) if len(accuracy) > 1 else None,
        "epsilon": [row["epsilon"] for row in last],
        "delta": last[0]["delta"],
        "rounds": len(runs[0]),
        "seconds_of_rounds": [
            round(sum(float(str(r["simulation_only_seconds"])) for r in rows), 2) for rows in runs
        ],
    }


def draw(runs: list[list[Row]], title: str) -> Figure:
    """Accuracy by round, each seed and their mean, beside ε by round."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    measured = [[row for row in rows if row["accuracy"] is not None] for rows in runs]
    rounds = [int(str(row["round"])) + 1 for row in measured[0]]
    accuracy = np.array([[float(str(r["accuracy"])) for r in rows] for rows in measured]) * 100
    for values in accuracy:
        left.plot(rounds, values, color="tab:blue", alpha=0.25, linewidth=1.0)
    left.plot(rounds, accuracy.mean(0), color="tab:blue", label=f"mean of {len(runs)} seeds")
    left.set(xlabel="rounds", ylabel="accuracy on held-out rows (%)", ylim=(0, 100), title=title)
    left.legend(loc="lower right")
    epsilon = [float(str(row["epsilon"])) for row in runs[0]]
    right.plot(range(1, len(epsilon) + 1), epsilon, color="tab:red")
    right.set(
        xlabel="rounds",
        ylabel=f"user-level ε spent, at δ = {float(str(runs[0][0]['delta'])):g}",
        title="what it cost, from the ledger",
    )
    right.set_ylim(bottom=0.0)
    for axes in (left, right):
        axes.grid(visible=True, alpha=0.3)
        axes.margins(x=0.01)
    return figure


def main() -> None:
    """Run the seeds and write what was asked for."""
    parser = argparse.ArgumentParser(description="one experiment under several seeds")
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    arguments = parser.parse_args()
    runs = [run_seed(arguments.file, s, arguments.assignments) for s in range(arguments.seeds)]
    result = summary(runs)
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.figure:
        arguments.figure.parent.mkdir(parents=True, exist_ok=True)
        draw(runs, arguments.file.stem).savefig(arguments.figure, dpi=120)


if __name__ == "__main__":
    main()
