"""The cost of an audit: processor time and memory of a run with canaries and without.

    python -m simulations.benchmarks.audit_cost --json simulations/results/audit_cost.json

By default there are an MLP of 999,010 parameters, cohorts of 1,000 of a million users with one
example each, and 10,000 canaries, of whom five are present and drawn in a round on average. All
runs are whole runs of `fedpriv.simulate`, each in one thread of its own process, in alternation.
Figures are medians of processor time over all rounds except the first of each run, which tries
shapes, and of the peak memory of processes.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import fedpriv
from fedpriv.experiment.models import build_model
from simulations.benchmarks.machine import made_by

INPUTS, HIDDEN, CLASSES = 100, 9000, 10
SECONDS, PEAK = "processor seconds", "peak MiB"


def rounds_of(users: int, cohort: int, canaries: int, rounds: int) -> dict[str, Any]:
    """Run; return the processor seconds of the rounds, and the peak memory in MiB."""
    torch.set_num_threads(1)
    random = np.random.default_rng(0)
    x = random.standard_normal((users, INPUTS), dtype=np.float32)
    y = random.integers(0, CLASSES, users)
    people = fedpriv.Population.from_arrays(x, y, np.arange(users), held_out=(x[:10], y[:10]))
    options = {"inputs": INPUTS, "hidden": HIDDEN, "classes": CLASSES}
    task = fedpriv.Task(build_model("mlp", options, 0))
    mechanism = fedpriv.Mechanism.poisson(q=cohort / users, clipping=fedpriv.Flat(0.1))
    began, seconds = time.process_time(), list[float]()

    def turn(_result: fedpriv.RoundResult) -> None:
        nonlocal began
        seconds.append(time.process_time() - began)
        began = time.process_time()

    with tempfile.TemporaryDirectory() as folder:
        fedpriv.simulate(
            people,
            task,
            mechanism.calibrate(epsilon=2.0, delta=1e-6, rounds=rounds),
            local=fedpriv.SGD(0.1, epochs=1),
            server=fedpriv.FedAvg(1.0),
            audit=fedpriv.Audit(canaries) if canaries else None,
            out=f"{folder}/run",
            trackers=[turn],
            evaluate_every=rounds,
            quiet=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    return {SECONDS: seconds[1:], PEAK: peak}


def _alone(*sizes: int) -> dict[str, Any]:
    """Return the result of `rounds_of` in a new process."""
    options = zip(("--users", "--cohort", "--canaries", "--rounds"), map(str, sizes), strict=True)
    command = [sys.executable, "-m", "simulations.benchmarks.audit_cost", "--alone"]
    process = subprocess.run(
        [*command, *(part for pair in options for part in pair)],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        check=True,
    )
    result: dict[str, Any] = json.loads(process.stdout)
    return result


def main() -> None:
    """Measure, print and, if requested, write the figures."""
    parser = argparse.ArgumentParser(description="the cost of an audit")
    parser.add_argument("--users", type=int, default=1_000_000)
    parser.add_argument("--cohort", type=int, default=1000)
    parser.add_argument("--canaries", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=4, help="runs of each, in alternation")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--alone", action="store_true", help="run once, and print its cost")
    options = parser.parse_args()
    sizes = [options.users, options.cohort, options.canaries, options.rounds]
    if options.alone:
        print(json.dumps(rounds_of(*sizes)))
        return
    measurements: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    for _ in range(options.repeats):
        for name, canaries in (("without", 0), ("with", options.canaries)):
            measurements[name].append(
                _alone(options.users, options.cohort, canaries, options.rounds)
            )
    times = {n: median(t for run in runs for t in run[SECONDS]) for n, runs in measurements.items()}
    peaks = {name: median(run[PEAK] for run in runs) for name, runs in measurements.items()}
    extra, share = peaks["with"] - peaks["without"], times["with"] / times["without"] - 1.0
    print(f"{share:.1%} more processor time a round, {extra:.0f} MiB more memory")
    if options.json:
        content = made_by("benchmarks.audit_cost", ["fedpriv", "torch", "numpy"]) | {
            "users, cohort, canaries, rounds": sizes,
            "runs": measurements,
            "more processor time": share,
            "more MiB": extra,
        }
        options.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
