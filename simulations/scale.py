"""Growth of cost and memory with users, data, cohorts, rounds, and arms of a study.

    python -m simulations.scale PART... --json simulations/results/scale.json

Each part is written when it ends, and replaces its earlier figures. The parts:

* users: rounds of 1,000 users of 10 million, and rounds of 1,000 users of 10,000. Both populations
  are in memory-mapped stores. Their rounds, with ledger, participation record and noise, alternate.
  Then a cohort whose data are several times the used memory trains in one round.
* data: rounds of 1,000 users of a memory-mapped store of 20 GB, and of a small one.
* cohorts: rounds of 1,000, 10,000 and 100,000 of a million users.
* rounds, adaptive-rounds: 200 rounds of 20 users after round 1,000, 10,000 and 99,000 of a run of
  100,000, with fixed and with adaptive clipping norms. The rounds before have cohorts, charges and
  metrics like all others, but nobody trained in them. Durable writes take no time if `--folder` is
  in memory, such as `/dev/shm`.
* arms: studies of 10 and 100 arms, and their reports.

Every measurement except those of users runs in its own process, and users train in forks of it, as
in `fedpriv simulate`. Seconds are processor time unless stated otherwise. Peaks of memory are the
kernel's `VmHWM`, added up over processes, so shared memory counts several times.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from pydantic_core import to_json

import fedpriv
from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.data.builtin import synthetic_population
from fedpriv.data.population import UserStore
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of
from fedpriv.experiment.models import mlp
from fedpriv.ledger.events import PrivacyBudget
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.compare import run_study
from fedpriv.run.folder import RunFolder, write_report
from fedpriv.training.optimizers import FedAvg
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import LocalTraining
from fedpriv.training.rounds import (
    CONTRIBUTORS_METRIC,
    RoundResult,
    checkpoints,
    initial_state,
    load_checkpoint,
    save_checkpoint,
    train,
)
from simulations.benchmarks.machine import made_by

P = ParamSpec("P")
T = TypeVar("T")

_PART = 4_000_000  # numbers of x that are made at once
_FEW = (4, (16,))  # examples of a user and shape of one, for many users
_MANY = (50, (784,))  # the same, for large data
_MEBIBYTE = 2**20


@dataclass(frozen=True)
class Scale:
    """Settings of the part "users"."""

    users: int  # of the large population
    fewer: int  # of the small one
    cohort: int  # expected, of both
    rounds: int  # of both, after one with all one-time costs
    streamed: int  # users of the large cohort, all of its population


@dataclass(frozen=True)
class Found:
    """Measurements of the part "users"."""

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
    """Return the memory of this process and its training processes, as counted by Linux.

    Shared memory counts once, and pages of mapped files count.
    """
    kibibytes = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text(encoding="ascii").splitlines()
        kibibytes += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return kibibytes / 1024


def saved(folder: Path, users: int, examples: int, shape: tuple[int, ...]) -> UserStore:
    """Write a population part by part, and return it memory-mapped."""
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
    """Yield an iterator that runs one whole round after another and yields its seconds."""
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
        seconds_of_all, few = (
            begun(f"{store.population}", store, small, scale.cohort, few_steps) for store in stores
        )
        triples = [(next(seconds_of_all), next(few), mebibytes()) for _ in range(scale.rounds + 1)]
        seconds, seconds_of_fewer, memory = zip(*triples[1:], strict=True)
        large_store = saved(folder / "streamed", scale.streamed, *_MANY)
        streamed = begun("streamed", large_store, large, scale.streamed, one_pass)
        streamed_seconds = next(streamed)
        taken_by_stream = mebibytes()
        size = sum(file.stat().st_size for file in (folder / "streamed").glob("field-*"))
    return Found(
        seconds=list(seconds),
        seconds_of_fewer=list(seconds_of_fewer),
        sampling_seconds=_sampling_seconds(scale),
        peak_mebibytes=max(memory),
        streamed_mebibytes=size / _MEBIBYTE,
        streamed_peak_mebibytes=max(*memory, taken_by_stream),
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
    """Return a summary in a few numbers."""
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


@dataclass(frozen=True)
class Rounds:
    """Rounds of one size."""

    users: int  # of the population
    cohort: int  # expected
    mebibytes: float  # size of the population's data
    seconds: list[float]  # of each round after the first, on the wall
    cpu_seconds: list[float]  # likewise, of all processes together
    peak_mebibytes: float  # of memory, to the end of the rounds

    @property
    def users_per_cpu_second(self) -> float:
        """Expected users of all rounds divided by their total processor time."""
        return self.cohort * len(self.cpu_seconds) / sum(self.cpu_seconds)


def cpu_seconds() -> float:
    """Return the processor time of this process and its running children, in seconds."""
    ticks = 0
    for child in multiprocessing.active_children():
        stat = Path(f"/proc/{child.pid}/stat").read_text(encoding="utf-8")
        ticks += sum(map(int, stat.rpartition(")")[2].split()[11:13]))  # utime and stime
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def peak_mebibytes() -> float:
    """Return the peak memory of this process, plus that of each of its running children."""
    kibibytes = 0
    for process in ("self", *(child.pid for child in multiprocessing.active_children())):
        lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
        kibibytes += next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))
    return kibibytes / 1024


def apart(measured: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in a new process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(measured, *args, **kwargs).result()


def rounds_on(store: Path, cohort: int, rounds: int, *, large: bool) -> Rounds:
    """Run rounds on a saved store, of an MLP if its examples are `large`, else of a smaller MLP."""
    users, device = UserStore.load(store), torch.device("cpu")
    task = Task(mlp() if large else mlp(16, 32), cross_entropy)
    local = LocalTraining(learning_rate=0.1, batch_size=10, epochs=1)
    memory = chunk_memory_of(None, device)
    transport = InProcessTransport(task, users, device, memory, timed=True, cohort=cohort)
    with tempfile.TemporaryDirectory(dir=store.parent) as folder:
        with rounds_of(Path(folder) / "run", transport, cohort, local) as seconds:
            wall_times, spent = [next(seconds)], [cpu_seconds()]
            for _ in range(rounds):
                wall_times.append(next(seconds))
                spent.append(cpu_seconds())
        peak = peak_mebibytes()
        transport.release_resources()
    size = sum(file.stat().st_size for file in store.glob("field-*")) / _MEBIBYTE
    cpu = [b - a for a, b in itertools.pairwise(spent)]
    return Rounds(users.population, cohort, size, wall_times[1:], cpu, peak)


def of_data(folder: Path, users: int, fewer: int, cohort: int, rounds: int) -> list[Rounds]:
    """Run rounds of a small population, and the same number of one with much data."""
    stores = {folder / "small": fewer, folder / "large": users}
    for store, count in stores.items():
        apart(_save, store, count, *_MANY)
    return [apart(rounds_on, store, cohort, rounds, large=True) for store in stores]


def of_cohorts(folder: Path, users: int, rounds: Mapping[int, int]) -> list[Rounds]:
    """Run `rounds[size]` rounds with cohorts of each size, of one population."""
    store = folder / "users"
    apart(_save, store, users, *_FEW)
    return [apart(rounds_on, store, size, n, large=False) for size, n in rounds.items()]


def _save(folder: Path, users: int, examples: int, shape: tuple[int, ...]) -> None:
    if not folder.exists():
        saved(folder, users, examples, shape)


@dataclass(frozen=True)
class AtRound:
    """A run that was resumed late, with its ledger and report."""

    round: int  # after which it was resumed
    epsilon: float  # when it was stopped again
    resume_seconds: float  # from the call to the end of one more round
    cpu_milliseconds: float  # of each of the next rounds
    wall_milliseconds: float  # likewise
    peak_mebibytes: float  # of memory
    open_seconds: float  # opening the ledger and pricing its charges
    verify_seconds: float  # checking every charge and every cohort
    ledger_mebibytes: float
    participation_mebibytes: float
    metrics_mebibytes: float
    report_seconds: float
    report_mebibytes: float  # size of the page
    report_peak_mebibytes: float  # of memory


def long_run(
    folder: Path, planned: int, positions: Sequence[int], rounds: int, *, adaptive: bool
) -> list[AtRound]:
    """Begin a run, bring it to each of some late rounds, and resume it there for more rounds."""
    run = folder / "run"
    apart(resumed, run, planned, 2, adaptive=adaptive)
    measurements = []
    for number in positions:
        fill(run, number, adaptive=adaptive)
        went_on = apart(resumed, run, planned, rounds, adaptive=adaptive)
        files = ("ledger.sqlite", "ledger.participation.sqlite", "metrics.jsonl")
        sizes = ((run / file).stat().st_size / _MEBIBYTE for file in files)
        figures = (*went_on, *ledger_seconds(run / files[0]), *sizes, *apart(reported_in, run))
        measurements.append(AtRound(number, *figures))
    return measurements


def resumed(
    out: Path, planned: int, rounds: int, *, adaptive: bool
) -> tuple[float, float, float, float, float]:
    """Begin or resume a run with 20 of 200 users per round, and stop it after `rounds` rounds.

    Returns ε, seconds to the end of the first round, milliseconds of processor and of wall time of
    each of the others, and the peak of memory.
    """
    marks = []

    def mark(result: RoundResult) -> None:
        marks.append((result.epsilon, time.perf_counter(), time.process_time()))
        if len(marks) == rounds:
            raise KeyboardInterrupt

    torch.set_num_threads(1)
    users = synthetic_population(200, 4, (8,), classes=4, test_rows=100)
    mechanism = fedpriv.Mechanism.poisson(
        q=0.1,
        clipping=fedpriv.Flat(0.5),
        adaptive=fedpriv.AdaptiveClipping() if adaptive else None,
    )
    began = time.process_time()
    with suppress(KeyboardInterrupt):
        fedpriv.simulate(
            users,
            fedpriv.Task(torch.nn.Linear(8, 4)),
            mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=planned),
            local=fedpriv.SGD(0.5, batch_size=4, epochs=1),
            server=fedpriv.FedAvg(),
            out=out,
            resume=True,
            evaluate_every=100,
            trackers=[mark],
            engine=fedpriv.Engine(processes=1),
            quiet=True,
        )
    (_, first, first_cpu), (epsilon, last, last_cpu) = marks[0], marks[-1]
    step = 1000.0 / (rounds - 1)
    cpu, wall = step * (last_cpu - first_cpu), step * (last - first)
    return epsilon, first_cpu - began, cpu, wall, peak_mebibytes()


def fill(out: Path, until: int, *, adaptive: bool) -> None:
    """Bring a run to a round, with cohorts, charges, metrics and a checkpoint, but no training.

    `adaptive` clipping norms differ in each round. Writes are durable only at the end.
    """
    folder, rng = RunFolder(out), np.random.default_rng(0)
    checkpoint = load_checkpoint(checkpoints(folder.checkpoints)[-1])
    last = folder.results()[-1]
    # As if all users counted: a repeated noisy count would not average out, and could end the run.
    metrics = {**last.metrics, CONTRIBUTORS_METRIC: last.expected_cohort_size}
    with (
        Ledger.open(folder.ledger) as ledger,
        ParticipationRecord.open(record_path(folder.ledger)) as record,
        ExitStack() as processes,
    ):
        (*_, row) = ledger.charges()
        for database in (ledger.database, record.database):
            processes.enter_context(database.transaction())
            processes.enter_context(patch.object(database, "transaction", nullcontext))
        lines = processes.enter_context(folder.metrics.open("ab"))
        for number in range(last.round + 1, until + 1):
            scale = rng.uniform(0.5, 1.0) if adaptive else 1.0
            queries = tuple(
                replace(
                    q, clipping_norm=q.clipping_norm / scale, noise_stddev=q.noise_stddev / scale
                )
                for q in row.event.queries
            )
            commitment = record.record(row.run, number, 0, np.flatnonzero(rng.random(200) < 0.1))
            event = replace(row.event, queries=queries)
            proposed = ProposedCharge(row.run, number, 0, row.randomness, event, commitment)
            charge = ledger.charge(proposed)
            result = replace(last, round=number, charge=charge.hash, metrics=metrics)
            lines.write(to_json(asdict(result), inf_nan_mode="strings") + b"\n")
        record.keep_head(ledger.head)
    with Ledger.open(folder.ledger) as ledger:
        state = replace(checkpoint.state, round=until)
        moved = replace(checkpoint, state=state, ledger_head=ledger.head)
    save_checkpoint(folder.checkpoints, moved)


def ledger_seconds(path: Path) -> tuple[float, float]:
    """Return the seconds to open and price a ledger, and the seconds to verify it."""
    began = time.process_time()
    with Ledger.open(path) as ledger:
        ledger.epsilon(PrivacyBudget(100.0, 1e-3, ACCOUNTANTS["tight"].upper_epsilon))
        opened = time.process_time()
        with ParticipationRecord.open(record_path(path)) as record:
            ledger.verify(record)
    return opened - began, time.process_time() - opened


def reported_in(folder: Path) -> tuple[float, float, float]:
    """Write a report; return seconds, MiB of the page, and the peak of memory in MiB."""
    began = time.process_time()
    page = write_report(folder)
    return time.process_time() - began, page.stat().st_size / _MEBIBYTE, peak_mebibytes()


@dataclass(frozen=True)
class ManyArms:
    """A study of many arms."""

    arms: int
    seconds: float  # of the study, on the wall
    cpu_seconds: float  # likewise, of all processes together
    peak_mebibytes: float  # of the process that started it; its workers have ended
    report_seconds: float
    report_mebibytes: float  # size of the page
    report_peak_mebibytes: float  # of memory


def study_of(folder: Path, arms: int, rounds: int) -> ManyArms:
    """Run a study whose arms differ in their learning rates, each with one seed; report it."""
    file = folder / f"{arms}-arms.toml"
    rates = ", ".join(f"{0.01 * (n + 1):.2f}" for n in range(arms))
    file.write_text(_STUDY.format(rounds=rounds, rates=rates), encoding="utf-8")
    return ManyArms(arms, *apart(_studied, file), *apart(reported_in, file.with_suffix("")))


def _studied(file: Path) -> tuple[float, float, float]:
    began = time.perf_counter()
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing):
        run_study(file, file.with_suffix(""), None)
    took = time.perf_counter() - began
    spent = sum(os.times()[:4])  # the last two are of children that have ended
    return took, spent, peak_mebibytes()


_STUDY = """
name = "arms"
seeds = 1
target = {{ epsilon = 8.0, delta = 1e-3 }}
[base]
name = "arms"
rounds = {rounds}
data = {{ name = "synthetic", options = {{ users = 200, examples_per_user = 4, shape = [8] }} }}
model = {{ name = "softmax", options = {{ inputs = 8, classes = 10 }} }}
local = {{ learning_rate = 0.5, batch_size = 4, epochs = 1 }}
server = {{ optimizer = "fedavg", options = {{ learning_rate = 1.0 }} }}
clipping = {{ strategy = "flat", norm = 0.5 }}
privacy = {{ sampling_probability = 0.1 }}
[axes]
"local.learning_rate" = [{rates}]
"""


def _of_users(folder: Path) -> dict[str, object]:
    scale = Scale(users=10_000_000, fewer=10_000, cohort=1_000, rounds=21, streamed=20_000)
    result = measure(scale, folder)
    return {"scale": asdict(scale), "summary": summary(result), **asdict(result)}


def _found(rounds: Sequence[Rounds]) -> dict[str, object]:
    rows = []
    for entry in rounds:
        row = asdict(entry) | {"seconds": statistics.median(entry.seconds)}
        row["cpu_seconds"] = statistics.fmean(entry.cpu_seconds)
        row["rounds"], row["users_per_cpu_second"] = (
            len(entry.seconds),
            entry.users_per_cpu_second,
        )
        rows.append(row)
    return {"rounds": rows}


def _late(folder: Path, positions: Sequence[int], *, adaptive: bool) -> dict[str, object]:
    run = long_run(folder, 100_000, positions, 200, adaptive=adaptive)
    return {"at": [asdict(entry) for entry in run]}


PARTS: Mapping[str, Callable[[Path], Mapping[str, object]]] = {
    "users": _of_users,
    "data": lambda folder: _found(of_data(folder, 128_000, 2_000, 1_000, 24)),
    "cohorts": lambda folder: _found(
        of_cohorts(folder, 1_000_000, {1_000: 300, 10_000: 30, 100_000: 10})
    ),
    "rounds": lambda folder: _late(folder, [1_000, 10_000, 99_000], adaptive=False),
    "adaptive-rounds": lambda folder: _late(folder, [1_000, 10_000], adaptive=True),
    "arms": lambda folder: {
        "studies": [asdict(study_of(folder, arms, rounds=5)) for arms in (10, 100)]
    },
}


def main() -> None:
    """Measure parts, print them and, if requested, write each."""
    parser = argparse.ArgumentParser(description="growth of cost and memory")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--folder", type=Path, help="folder for data until their part ends")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    for part in options.parts:
        folder = options.folder / part if options.folder else Path(tempfile.mkdtemp())
        folder.mkdir(parents=True, exist_ok=True)
        part_results = PARTS[part](folder)
        shutil.rmtree(folder)
        print(part, json.dumps(part_results, indent=1))
        if options.json:
            keep(options.json, part, part_results)


def keep(file: Path, part: str, part_results: Mapping[str, object]) -> None:
    """Write the figures of a part into a file, in place of its earlier ones."""
    machine = made_by("scale", ["fedpriv", "torch", "numpy"], threads=torch.get_num_threads())
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content[part] = {**machine, **part_results}
    file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
