"""The ways to run the rounds of `flower_overhead.toml`, timed; each in a process of its own.

python -m simulations.flower_ways WAY USERS WORKERS ROUNDS FILE
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fedpriv.clients.app import app as client_app
from fedpriv.experiment import Experiment, simulated
from fedpriv.server.beginning import Beginning
from fedpriv.server.on_ray import on_ray, simulate_on_ray
from fedpriv.server.run import Outcome, RoundRow
from fedpriv.server.simulation import carry_out
from simulations.flower_usual import WORK, federate
from simulations.flower_usual import app as usual_app


@dataclass
class Times:
    """When the rounds of a run ended, by the clock that all processes share.

    Attributes:
        first: the end of the first round.
        seconds: of each round, the first one too.
    """

    first: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def follow(
        self, rows: Generator[RoundRow, None, Outcome], _experiment: Experiment, _first: int
    ) -> Outcome:
        """Take down each round of ours."""
        while True:
            began = time.time()
            try:
                next(rows)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            self.first = self.first or time.time()
            self.seconds.append(time.time() - began)


def in_process(users: int, _workers: int, rounds: int) -> Times:
    """`fedpriv simulate` in one process, of as many threads as there are cores."""
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        beginning = Beginning.of(WORK, _set(users, rounds), Path(folder) / "run", resume=False)
        experiment, transport = simulated(beginning.config, beginning.run)
        console = Console(quiet=True)
        carry_out(beginning, experiment, lambda *_: transport, console, times.follow)
    return times


def spread(users: int, workers: int, rounds: int) -> Times:
    """`fedpriv simulate --engine flower --workers W`."""
    times = Times()
    with tempfile.TemporaryDirectory() as folder:
        given = WORK, _set(users, rounds), Path(folder) / "run", workers
        simulate_on_ray(client_app, *given, resume=False, follow=times.follow)
    return times


def usual(users: int, workers: int, rounds: int) -> Times:
    """Flower's FedAvg over a node for each user, on Ray with as many processes."""
    ends: list[float] = []
    server_app = ServerApp()

    @server_app.main()
    def main(grid: Grid, _context: Context) -> None:
        federate(grid, users, rounds, lambda: ends.append(time.time()))

    on_ray(server_app, usual_app, users, workers)
    return Times(ends[1], [end - began for began, end in pairwise(ends)])


WAYS: dict[str, Callable[[int, int, int], Times]] = {
    "in process": in_process,
    "fedpriv": spread,
    "flower": usual,
}


def _set(users: int, rounds: int) -> list[str]:
    return [f"data.options.users={users}", f"rounds={rounds}"]


def main() -> None:
    """Run one way and keep its times."""
    way, users, workers, rounds, file = sys.argv[1:]
    times = WAYS[way](int(users), int(workers), int(rounds))
    Path(file).write_text(json.dumps(asdict(times)))


if __name__ == "__main__":
    main()
