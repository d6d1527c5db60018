"""Cost of a round on a GPU, compared with its indispensable parts.

In a round 2,000 users of 50 images train the MLP 784–128–10 in batches of 10. These take turns:

* sums: users train, and their updates are clipped and added up as integers;
* plain sums: the same users train, and their updates are added up in float32;
* products: batches of matrices of the shapes of the first layer, forward and for the gradient of
  its weights, which are 98% of the operations of training.

Then whole rounds like those of `fedpriv simulate`, with noise, ledger and checkpoints on disk, of
2,000 out of 4,000 users in expectation, take turns with the same rounds without clipping and noise.
Finally several processes share the users of a round and the device.

    python -m simulations.gpu_round --json simulations/results/gpu_round.json
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch

from fedpriv.engine import trainer
from fedpriv.engine.arithmetic import tf32
from fedpriv.engine.transport import device_named
from fedpriv.errors import FedprivError, WorkerError
from fedpriv.privacy import gaussian_mechanism
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import Updates
from fedpriv.privacy.layout import FloatVector
from simulations import overheads
from simulations.benchmarks.arena import Setting, playing
from simulations.benchmarks.contestants import Train, Turn, fedpriv
from simulations.benchmarks.machine import made_by
from simulations.benchmarks.works import WORKS, Work

_LANES, _PRODUCTS = 512, 20

Run = Callable[[], float]
"""Does the timed work once or several times, and returns the seconds of one time."""


@dataclass(frozen=True)
class Turns:
    """Numbers and lengths of measurements."""

    turns: int
    seconds: float  # minimum length of a turn
    rounds: int  # of a run of whole rounds
    processes: Sequence[int]  # numbers of processes that share a device


def sums(work: Work, device: torch.device) -> Run:
    """Return a round of all users of a work, up to the sum of their updates."""
    trains, everyone = list[Train](), Turn(range(work.users), work.local)
    fedpriv(work, device, trains.append)
    (train,) = trains

    def run() -> float:
        began = time.perf_counter()
        train(everyone)
        return time.perf_counter() - began

    return run


def whole_rounds(users: int, device: torch.device, rounds: int) -> Run:
    """Return a run of `rounds` rounds with `users` expected users each."""
    engine = overheads.prepared(2 * users, device.type)

    def run() -> float:
        with tempfile.TemporaryDirectory() as folder:
            return overheads.run(Path(folder), engine, rounds, users)

    return run


@contextmanager
def without_privacy() -> Iterator[None]:
    """Within the context, add up updates without clipping and noise."""

    def added_up(updates: Updates, clipping: Clipping) -> torch.Tensor:
        sums = (updates[name][:].sum(0).flatten() for name in clipping.layout.names)
        return torch.cat([*sums]).long()

    def add(total: FloatVector, updates: Updates, clipping: Clipping, _: object) -> None:
        total += added_up(updates, clipping).numpy()

    def no_noise(_key: bytes, count: int, _stddev: float) -> npt.NDArray[np.int64]:
        return np.zeros(count, np.int64)

    with (
        patch.object(trainer, "add_contributions", add),
        patch.object(trainer, "integer_sum", lambda *arguments: added_up(*arguments[:2])),
        patch.object(trainer, "sum_by_kernels", lambda *arguments: added_up(*arguments[1:3])),
        patch.object(gaussian_mechanism, "rounded_gaussian", no_noise),
    ):
        yield


def products(device: torch.device) -> tuple[Run, float]:
    """Return batched products in the shapes of the first layer, and their operations."""
    x = torch.randn((_LANES, 10, 784), device=device)
    weights = torch.randn((_LANES, 784, 128), device=device)
    gradients = torch.randn((_LANES, 10, 128), device=device)

    def run() -> float:
        began = time.perf_counter()
        with tf32(allowed=False):
            for _ in range(_PRODUCTS):
                forward = x @ weights
                backward = x.mT @ gradients
        float(forward.sum() + backward.sum())  # waits for the device
        return (time.perf_counter() - began) / _PRODUCTS

    return run, 2 * 2.0 * _LANES * 10 * 784 * 128


def in_turns(runs: Mapping[str, Run], private: Collection[str], turns: Turns) -> dict[str, float]:
    """Return median seconds of each run, over several turns; those in `private` are private."""
    durations: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(turns.turns + 1):
        for name, run in runs.items():
            with nullcontext() if name in private else without_privacy():
                times, began = list[float](), time.perf_counter()
                while not times or time.perf_counter() - began < turns.seconds:
                    times.append(run())
                if number:  # in the first turn shapes are captured
                    durations[name].append(statistics.mean(times))
    return {name: statistics.median(seconds) for name, seconds in durations.items()}


def shared(work: str, device: str, processes: Sequence[int], turns: Turns) -> dict[int, float]:
    """Return seconds of a round, up to its sums, by number of processes that share the users.

    WorkerError: the sum of all users depends on the number of processes.
    """
    settings = {str(n): Setting("fedpriv", work, device, 1, n) for n in processes}
    definition = WORKS[work]()
    turn = Turn(range(definition.users), definition.local, turns.seconds)
    speeds: dict[int, list[float]] = {n: [] for n in processes}
    with playing(settings) as players:
        warm_up = replace(turn, seconds=0.0)
        totals = {n: players[str(n)].take(warm_up).total for n in processes}
        for n, total in totals.items():
            # Integers times the step, which float64 rounds.
            if not np.allclose(total, totals[processes[0]], rtol=1e-12, atol=0.0):
                raise WorkerError(f"{n} processes add up to other integers than {processes[0]} do")
        for number in range(turns.turns + 1):
            for n in processes:
                seconds = players[str(n)].take(turn).seconds
                if number:
                    speeds[n].append(seconds)
    return {n: statistics.median(seconds) for n, seconds in speeds.items()}


def measured(work: str, device: torch.device, turns: Turns) -> dict[str, object]:
    """Return all figures."""
    definition = WORKS[work]()
    multiply, operations = products(device)
    runs = {
        "sums": sums(definition, device),
        "plain sums": sums(definition, device),
        "products": multiply,
    }
    parts = in_turns(runs, {"sums", "products"}, turns)
    runs = {
        name: whole_rounds(definition.users, device, turns.rounds) for name in ("private", "plain")
    }
    ratios = in_turns(runs, {"private"}, turns)
    rate, possible = (
        definition.flops_of(definition.users) / parts["sums"],
        operations / parts["products"],
    )
    by_processes = shared(work, device.type, turns.processes, turns)
    return {
        "milliseconds of a sum": 1e3 * parts["sums"],
        "milliseconds of a plain sum": 1e3 * parts["plain sums"],
        "sum over plain sum": parts["sums"] / parts["plain sums"],
        "milliseconds of a whole round": 1e3 * ratios["private"],
        "milliseconds of a whole round without clipping and noise": 1e3 * ratios["plain"],
        "private over plain": ratios["private"] / ratios["plain"],
        "TFLOP/s up to the sum": rate / 1e12,
        "TFLOP/s of batched products": possible / 1e12,
        "share of the rate of products": rate / possible,
        "users per second by processes": {n: definition.users / s for n, s in by_processes.items()},
    }


def main() -> None:
    """Measure, print and, if requested, write the figures."""
    parser = argparse.ArgumentParser(description="cost of a round on a GPU")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--work", default="mlp-2000", choices=["mlp", "mlp-2000"])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a turn, at least")
    parser.add_argument("--rounds", type=int, default=50, help="of a run of whole rounds")
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    numbers = {
        "turns": options.turns,
        "rounds": options.rounds,
        "processes": min(options.processes),
    }
    for name, minimum in numbers.items():
        if minimum < 1:
            parser.error(f"--{name} is {minimum}; it must be at least 1")
    turns = Turns(options.turns, options.seconds, options.rounds, options.processes)
    try:
        figures = measured(options.work, device_named(options.device), turns)
    except FedprivError as error:  # for example, there is no such device
        parser.error(str(error))
    print(json.dumps(figures, indent=1))
    if options.json:
        content = made_by("gpu_round", ["fedpriv", "torch", "triton", "numpy"], options.device)
        options.json.write_text(json.dumps({**content, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
