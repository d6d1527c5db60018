"""Start and rounds of a simulation on Ray, compared with Flower's usual way and with one process.

The work is the rounds of `flower_overhead.toml`, in which all users take part. fedpriv sends one
message to each worker in a round, and charges, noises and records each round as `fedpriv simulate`
does. Flower's usual way has a node and a message for each user, FedAvg, and neither noise nor
ledger. All nodes take part, which is Flower's best case. On both sides Ray has one process per
worker, each with one thread; the single process has one thread too.

Every measurement runs in its own process, and the two sides take turns. The start lasts from the
command until all workers, who import and load, have answered once; the rounds after it count.

    python -m simulations.flower_overhead [--workers W ...] [--users N ...] [--json FILE]
"""

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from fedpriv.errors import WorkerError
from fedpriv.flower.ray import switch_off_telemetry

ROOT = Path(__file__).parents[1]
IN_PROCESS, FEDPRIV, FLOWER = "in process", "fedpriv", "flower"
_ROUNDS = 12
_MESSAGES = 300  # of Flower's usual way that count, approximately
_LIBRARIES = ("fedpriv", "flwr", "numpy", "ray", "torch")


@dataclass(frozen=True)
class Measured:
    """The measurements of one process."""

    way: str  # of `simulations.flower_ways`
    users: int  # in each round
    workers: int  # processes of Ray; 1 for the one process
    start_seconds: float  # from the command until all workers have answered once
    round_seconds: list[float]  # of each round after that

    @property
    def seconds(self) -> float:
        """Return the median time of a round."""
        return statistics.median(self.round_seconds)

    @property
    def speed(self) -> float:
        """Users per second."""
        return self.users / self.seconds


def measured(way: str, users: int, workers: int, rounds: int) -> Measured:
    """Run at least 2 rounds of a way in a new process; the first is part of the start."""
    switch_off_telemetry()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        numbers = map(str, (users, workers, rounds))
        began = time.time()
        process = subprocess.run(
            [sys.executable, "-m", "simulations.flower_ways", way, *numbers, str(file)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode != 0:
            raise WorkerError(f"{way} with {workers} workers has failed: {process.stderr[-2000:]}")
        times = json.loads(file.read_text(encoding="utf-8"))
    return Measured(way, users, workers, times["ready"] - began, times["seconds"])


def all_measured(sizes: Sequence[int], workers: Sequence[int]) -> Iterator[Measured]:
    """Measure each way, with each number of users and of workers, in turns."""
    for users in sizes:
        yield measured(IN_PROCESS, users, 1, _ROUNDS)
        for count in workers:
            yield measured(FEDPRIV, users, count, _ROUNDS)
            yield measured(FLOWER, users, count, max(2, 1 + _MESSAGES // users))


def summary(measurements: Sequence[Measured], cores: int) -> list[dict[str, float]]:
    """Return a row for each number of users and of workers.

    The time of a round beyond its training is the time beyond that of the single process, if all
    cores that have a worker shared its work evenly.
    """
    by = {(m.way, m.users, m.workers): m for m in measurements}
    rows = []
    for (way, users, workers), own in by.items():
        if way != FEDPRIV:
            continue
        flower, single = by[FLOWER, users, workers], by[IN_PROCESS, users, 1]
        training = single.seconds / min(workers, cores)
        rows.append(
            {
                "users": users,
                "workers": workers,
                "fedpriv's start in seconds": own.start_seconds,
                "flower's start in seconds": flower.start_seconds,
                "start of one process in seconds": single.start_seconds,
                "fedpriv's round in seconds": own.seconds,
                "flower's round in seconds": flower.seconds,
                "round in one process in seconds": single.seconds,
                "of fedpriv's round beyond training": own.seconds - training,
                "of flower's round beyond training": flower.seconds - training,
                "fedpriv's users per second": own.speed,
                "flower's users per second": flower.speed,
                "users per second in one process": single.speed,
                "fedpriv's users per second over flower's": own.speed / flower.speed,
                "fedpriv's users per second over one process": own.speed / single.speed,
            }
        )
    return rows


def main() -> None:
    """Measure, print and, if requested, write the numbers."""
    parser = argparse.ArgumentParser(description="a simulation on Ray, and Flower's usual way")
    parser.add_argument("--users", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    measurements, cores = [], os.cpu_count() or 1
    print(f"{'users':>6} {'workers':>7} {'way':10} {'start s':>7} {'round s':>7} {'users/s':>7}")
    for m in all_measured(options.users, options.workers):
        measurements.append(m)
        numbers = f"{m.start_seconds:7.1f} {m.seconds:7.3f} {m.speed:7,.0f}"
        print(f"{m.users:6,} {m.workers:7} {m.way:10} {numbers}", flush=True)
    rows = summary(measurements, cores)
    for row in rows:
        ratio = row["fedpriv's users per second over flower's"]
        print(f"{row['users']:,} users, {row['workers']} workers: {ratio:.1f} × Flower's users/s")
    if options.json:
        content = {
            "command": shlex.join(["python", "-m", "simulations.flower_overhead", *sys.argv[1:]]),
            "machine": {"cores": cores, "python": sys.version.split()[0]}
            | {name: version(name) for name in _LIBRARIES},
            "summary": rows,
            "measured": [asdict(m) for m in measurements],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
