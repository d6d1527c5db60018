"""Start and rounds of a simulation on Ray, beside Flower's usual way and one process.

Work: the rounds of `flower_overhead.toml`, in which all users take part. fedpriv has one message
for each worker and round, and charges, noises and records each round as `fedpriv simulate` does;
Flower's usual way has a node and a message for each user, FedAvg, and neither noise nor ledger.
There are no nodes but those that take part, which is Flower's best case. On both sides Ray has as
many processes as there are workers, each with one thread; the one process has one thread too.

Every measurement is a process of its own, and the two sides take turns. The start lasts from the
command until all workers, who import and load, have answered once; the rounds after it are counted.

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
_MESSAGES = 300  # of Flower's usual way, about, that are counted
_LIBRARIES = ("fedpriv", "flwr", "numpy", "ray", "torch")


@dataclass(frozen=True)
class Measured:
    """What one process found."""

    way: str  # of `simulations.flower_ways`
    users: int  # in each round
    workers: int  # processes of Ray; 1 for the one process
    start_seconds: float  # from the command until all workers have answered once
    round_seconds: list[float]  # of each round after that

    @property
    def seconds(self) -> float:
        """Median time of a round."""
        return statistics.median(self.round_seconds)

    @property
    def speed(self) -> float:
        """Users per second."""
        return self.users / self.seconds


def measured(way: str, users: int, workers: int, rounds: int) -> Measured:
    """Run a way for at least 2 rounds in a process of its own; the first is part of the start."""
    switch_off_telemetry()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "times.json"
        numbers = map(str, (users, workers, rounds))
        began = time.time()
        done = subprocess.run(
            [sys.executable, "-m", "simulations.flower_ways", way, *numbers, str(file)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise WorkerError(f"{way} with {workers} workers has failed: {done.stderr[-2000:]}")
        times = json.loads(file.read_text(encoding="utf-8"))
    return Measured(way, users, workers, times["ready"] - began, times["seconds"])


def all_measured(sizes: Sequence[int], workers: Sequence[int]) -> Iterator[Measured]:
    """Each way, with each number of users and of workers, in turns."""
    for users in sizes:
        yield measured(IN_PROCESS, users, 1, _ROUNDS)
        for each in workers:
            yield measured(FEDPRIV, users, each, _ROUNDS)
            yield measured(FLOWER, users, each, max(2, 1 + _MESSAGES // users))


def summary(found: Sequence[Measured], cores: int) -> list[dict[str, float]]:
    """A row for each number of users and of workers.

    What a round takes beyond its training is counted from the time that the one process would take
    if all cores that have a worker shared its work evenly.
    """
    by = {(m.way, m.users, m.workers): m for m in found}
    rows = []
    for (way, users, workers), ours in by.items():
        if way != FEDPRIV:
            continue
        flower, alone = by[FLOWER, users, workers], by[IN_PROCESS, users, 1]
        training = alone.seconds / min(workers, cores)
        rows.append(
            {
                "users": users,
                "workers": workers,
                "fedpriv's start in seconds": ours.start_seconds,
                "flower's start in seconds": flower.start_seconds,
                "start of one process in seconds": alone.start_seconds,
                "fedpriv's round in seconds": ours.seconds,
                "flower's round in seconds": flower.seconds,
                "round in one process in seconds": alone.seconds,
                "of fedpriv's round beyond training": ours.seconds - training,
                "of flower's round beyond training": flower.seconds - training,
                "fedpriv's users per second": ours.speed,
                "flower's users per second": flower.speed,
                "users per second in one process": alone.speed,
                "fedpriv's users per second over flower's": ours.speed / flower.speed,
                "fedpriv's users per second over one process": ours.speed / alone.speed,
            }
        )
    return rows


def main() -> None:
    """Measure, print and, if asked, keep the numbers."""
    parser = argparse.ArgumentParser(description="a simulation on Ray, beside Flower's usual way")
    parser.add_argument("--users", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    given = parser.parse_args()
    found, cores = [], os.cpu_count() or 1
    print(f"{'users':>6} {'workers':>7} {'way':10} {'start s':>7} {'round s':>7} {'users/s':>7}")
    for m in all_measured(given.users, given.workers):
        found.append(m)
        numbers = f"{m.start_seconds:7.1f} {m.seconds:7.3f} {m.speed:7,.0f}"
        print(f"{m.users:6,} {m.workers:7} {m.way:10} {numbers}", flush=True)
    rows = summary(found, cores)
    for row in rows:
        ratio = row["fedpriv's users per second over flower's"]
        print(f"{row['users']:,} users, {row['workers']} workers: {ratio:.1f} × Flower's users/s")
    if given.json:
        kept = {
            "command": shlex.join(["python", "-m", "simulations.flower_overhead", *sys.argv[1:]]),
            "machine": {"cores": cores, "python": sys.version.split()[0]}
            | {name: version(name) for name in _LIBRARIES},
            "summary": rows,
            "measured": [asdict(m) for m in found],
        }
        given.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
