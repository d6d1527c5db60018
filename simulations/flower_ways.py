"""The ways to run the rounds of `flower_overhead.toml`, timed, each in its own process.

python -m simulations.flower_ways WAY USERS WORKERS ROUNDS FILE
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fedpriv.experiment.build import Experiment, simulated
from fedpriv.experiment.config import load_config
from fedpriv.flower.ray import run_on_ray, simulate_on_ray
from fedpriv.run.run import Follow, Run, RunSetup
from fedpriv.run.terminal import execute
from fedpriv.training.rounds import OnRound
from simulations.flower_usual import WORK, federate
from simulations.flower_usual import app as usual_app

_MESSAGES_AT_FIRST = 4


@dataclass(frozen=True)
class Times:
    """The times of a run's rounds."""

    # When all workers had answered once, in seconds since the epoch, as all processes count them
    ready: float
    seconds: list[float]  # of each later round

    @classmethod
    def of(cls, ends: list[float]) -> Self:
        """Return the times from the ends of rounds; workers import and load in the first."""
        return cls(ends[0], [end - began for began, end in pairwise(ends)])


def in_process(users: int, _workers: int, rounds: int) -> Times:
    """Run `fedpriv simulate` in one process."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        beginning = RunSetup.at(
            load_config(WORK, _set(users, rounds)), Path(folder) / "run", resume=False
        )
        experiment, transport = simulated(beginning.config, beginning.run)
        console = Console(quiet=True)
        execute(beginning, experiment, lambda *_: transport, console, _noting(ends))
    return Times.of(ends)


def spread(users: int, workers: int, rounds: int) -> Times:
    """Run `fedpriv simulate --engine flower --workers W`."""
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = WORK, _set(users, rounds), Path(folder) / "run", workers
        simulate_on_ray(*settings, resume=False, follow=_noting(ends))
    return Times.of(ends)


def usual(users: int, workers: int, rounds: int) -> Times:
    """Run Flower's FedAvg with a node for each user, on Ray with the same number of processes."""
    ends: list[float] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, _context: Context) -> None:
        count = min(users, _MESSAGES_AT_FIRST * workers)
        federate(grid, users, count, 1, lambda: None)  # so that all processes import and load
        federate(grid, users, users, rounds - 1, lambda: ends.append(time.time()))

    run_on_ray(server_app, usual_app, users, workers)
    return Times.of(ends)


WAYS: dict[str, Callable[[int, int, int], Times]] = {
    "in process": in_process,
    "fedpriv": spread,
    "flower": usual,
}


def _noting(ends: list[float]) -> Follow:
    """Return a function that runs a simulation and appends the end of each round."""

    def follow(_experiment: Experiment, _first: int, run: Callable[[OnRound], Run]) -> Run:
        return run(lambda _result: ends.append(time.time()))

    return follow


def _set(users: int, rounds: int) -> list[str]:
    return [f"data.options.users={users}", f"rounds={rounds}"]


def main() -> None:
    """Run one way and write its times."""
    way, users, workers, rounds, file = sys.argv[1:]
    times = WAYS[way](int(users), int(workers), int(rounds))
    Path(file).write_text(json.dumps(asdict(times)))


if __name__ == "__main__":
    main()
