"""Rounds of 1,000 users of 10 million, beside rounds of 1,000 users of 10,000; and large cohorts.

Both populations lie in memory-mapped stores. Their rounds, whole ones with ledger, participation
record and noise, alternate, and medians are compared. Users train in processes, as those of
`fedpriv simulate` do. Then a cohort whose data are several times the memory taken trains in one
round.

    python -m simulations.scale --json simulations/results/scale.json
"""

import argparse
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.data.builtin import synthetic_population
from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of
from fedpriv.experiment.models import mlp
from fedpriv.ledger.events import PrivacyBudget
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.optimizers import FedAvg
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import LocalTraining
from fedpriv.training.rounds import initial_state, train
from simulations.benchmarks.machine import made_by

_PART = 4_000_000  # numbers of x that are made at once
_FEW = (4, (16,))  # examples of a user and shape of one, where users are many
_MANY = (50, (784,))  # where data are large
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Scale:
    """What is measured."""

    users: int  # of the large population
    fewer: int  # of the small one
    cohort: int  # expected, of both
    rounds: int  # of both, after one that pays for what is done once
    streamed: int  # users of the large cohort, all of its population


@dataclass(frozen=True)
class Found:
    """What was measured."""

    seconds: list[float]  # of rounds of the large population
    seconds_of_fewer: list[float]  # of rounds of the small one
    sampling_seconds: float  # of drawing a cohort from the large one, median
    # Of memory after a round, with both populations open, of all processes and with their pages of
    # mapped files
    peak_mebibytes: float
    streamed_mebibytes: float  # size of the data of the large cohort
    streamed_peak_mebibytes: float  # of memory until after it has trained
    streamed_seconds: float  # of its round


def mebibytes() -> float:
    """Memory of this process and those that train for it, by Linux's count.

    What processes share counts once, and pages of mapped files count.
    """
    kibibytes = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
        kibibytes += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes / 1024


def saved(folder: Path, users: int, examples: int, shape: tuple[int, ...]) -> UserStore:
    """A memory-mapped population, made part by part."""
    at_once = max(1, _PART // (examples * math.prod(shape)))

    def parts() -> Iterator[UserStore]:
        for first in range(0, users, at_once):
            count = min(at_once, users - first)
            yield synthetic_population(count, examples, shape, seed=first, test_rows=1).users

    UserStore.save_parts(folder, parts())
    return UserStore.load(folder)


@contextmanager
def rounds_of(
    folder: Path, transport: InProcessTransport, cohort: int, local: LocalTraining
) -> Iterator[Iterator[float]]:
    """Seconds of one whole round after another."""
    users, task = transport.users.population, transport.task
    layout = Layout.of(task.parameters())
    plan = TrainingPlan(
        run="scale",
        population=f"synthetic: {users} users",
        rounds=10**6,
        layout=layout,
        groups=flat(layout, 1.0),
        noise_shares=(1.0,),
        noise_multiplier=10.0,
        sampling=PoissonSampling(users, cohort / users),
        local=local,
        optimizer=FedAvg(),
    )
    folder.mkdir()
    ledger, participation = folder / "ledger.sqlite", folder / "participation.sqlite"
    budget = PrivacyBudget(100.0, 1e-9, ACCOUNTANTS["tight"].upper_epsilon)

    def timed(reports: Iterator[object]) -> Iterator[float]:
        while True:
            began = time.perf_counter()
            next(reports)
            yield time.perf_counter() - began

    with PrivacyRecords.open(ledger, participation, plan.population, budget) as records:
        state = initial_state(plan, task.parameters())
        yield timed(train(plan, state, transport, records, OperatingSystemEntropy()))


def measure(scale: Scale, folder: Path) -> Found:
    """Make the populations in a folder and run all rounds."""
    few_steps = LocalTraining(learning_rate=0.1, batch_size=4, epochs=5)
    one_pass = LocalTraining(learning_rate=0.1, batch_size=10, epochs=1)
    small, large = Task(mlp(16, 256), cross_entropy), Task(mlp(), cross_entropy)
    with ExitStack() as stack:

        def begun(
            name: str, store: UserStore, task: Task, cohort: int, local: LocalTraining
        ) -> Iterator[float]:
            cpu = torch.device("cpu")
            transport = InProcessTransport(task, store, cpu, chunk_memory_of(None, cpu), timed=True)
            return stack.enter_context(rounds_of(folder / f"{name}-run", transport, cohort, local))

        stores = [saved(folder / str(n), n, *_FEW) for n in (scale.users, scale.fewer)]
        many, few = (
            begun(f"{store.population}", store, small, scale.cohort, few_steps) for store in stores
        )
        triples = [(next(many), next(few), mebibytes()) for _ in range(scale.rounds + 1)]
        seconds, seconds_of_fewer, taken = zip(*triples[1:], strict=True)
        large_store = saved(folder / "streamed", scale.streamed, *_MANY)
        streamed = begun("streamed", large_store, large, scale.streamed, one_pass)
        streamed_seconds = next(streamed)
        taken_by_stream = mebibytes()
        size = sum(file.stat().st_size for file in (folder / "streamed").glob("field-*"))
    return Found(
        seconds=list(seconds),
        seconds_of_fewer=list(seconds_of_fewer),
        sampling_seconds=_sampling_seconds(scale),
        peak_mebibytes=max(taken),
        streamed_mebibytes=size / _MEBIBYTE,
        streamed_peak_mebibytes=max(*taken, taken_by_stream),
        streamed_seconds=streamed_seconds,
    )


def _sampling_seconds(scale: Scale) -> float:
    sampling = PoissonSampling(scale.users, scale.cohort / scale.users)
    seconds = []
    for _ in range(scale.rounds):
        began = time.perf_counter()
        sampling.draw(os.urandom(32))
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def summary(found: Found) -> dict[str, float]:
    """What was measured, in a few numbers."""
    many, few = map(statistics.median, (found.seconds, found.seconds_of_fewer))
    return {
        "seconds of a round of the large population": many,
        "seconds of a round of the small one": few,
        "ratio": many / few,
        "seconds of drawing a cohort from the large one": found.sampling_seconds,
        "most MiB of memory after a round, with both": found.peak_mebibytes,
        "MiB of data of the large cohort": found.streamed_mebibytes,
        "most MiB of memory until after it": found.streamed_peak_mebibytes,
        "seconds of its round": found.streamed_seconds,
    }


def main() -> None:
    """Measure, print and, if asked, keep the numbers."""
    parser = argparse.ArgumentParser(description="rounds of small and large populations")
    parser.add_argument("--users", type=int, default=10_000_000)
    parser.add_argument("--fewer", type=int, default=10_000)
    parser.add_argument("--cohort", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--streamed", type=int, default=20_000, help="users of the large cohort")
    parser.add_argument("--folder", type=Path, help="where 6 GiB of disk are free for a while")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    given = parser.parse_args()
    scale = Scale(given.users, given.fewer, given.cohort, given.rounds, given.streamed)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        found = measure(scale, Path(folder))
    numbers = summary(found)
    for name, value in numbers.items():
        print(f"{name}: {value:.4g}")
    if given.json:
        packages = ["fedpriv", "torch", "numpy"]
        kept = made_by("scale", packages, threads=torch.get_num_threads())
        kept |= {"scale": asdict(scale), "summary": numbers}
        given.json.write_text(json.dumps(kept | asdict(found), indent=1) + "\n")


if __name__ == "__main__":
    main()
