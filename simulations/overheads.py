"""Costs of a round other than training: `python -m simulations.overheads [--rounds N]`.

It runs whole rounds like `fedpriv simulate`, with ledger, participation record, figures and
checkpoints on disk: 100 of 1,000 users of 50 images, an MLP 784–128–10, batches of 10, one local
epoch. They run in one thread under Python's profiler; times are wall time, including waiting for
the disk.
"""

import argparse
import cProfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fedpriv.data.population import Population
from fedpriv.engine.examples import Examples
from fedpriv.engine.products import OuterProducts
from fedpriv.engine.schedule import Schedule
from fedpriv.engine.side_by_side import Group
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of
from fedpriv.experiment.build import Method, on_population, settings_of
from fedpriv.experiment.grouping import Flat
from fedpriv.experiment.mechanism import Mechanism, Poisson
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.privacy.clipping_torch import add_contributions
from fedpriv.privacy.round import PrivacyRecords, draw_cohort, release
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import conduct
from fedpriv.training.optimizers import FedAvg
from fedpriv.training.rounds import close_round, save_checkpoint
from simulations.throughput import LOCAL, WORKS, request_of

BESIDE = (
    "sampling",
    "clipping",
    "noise and server step",
    "budget",
    "ledger",
    "checkpoint",
    "figures",
)


def prepared(population: int = 1_000, on: str = "cpu") -> InProcessTransport:
    """Return users who have trained once, so that how they train is decided before the run."""
    device = torch.device(on)
    torch.manual_seed(0)
    users = replace(WORKS["mlp"], users=population).population
    task = Task(WORKS["mlp"].model())
    settings = task, users, device, chunk_memory_of(None, device)
    engine = InProcessTransport(*settings, processes=1, path="together")
    for _ in engine.collect(request_of(task, users)):
        pass
    return engine


def run(folder: Path, engine: InProcessTransport, rounds: int, cohort: int = 100) -> float:
    """Train cohorts of an expected size, with all writes to disk; return seconds per round."""
    population = Population("random images", engine.users, engine.users.examples_of(0))
    sampling = Poisson(cohort / engine.users.population)
    mechanism = Mechanism(sampling, Flat(1.0), noise_multiplier=1.0, epsilon=100.0, delta=1e-6)
    output = {"evaluate_every": rounds}  # evaluation is not part of a round
    method = Method(engine.task, mechanism, LOCAL, FedAvg())
    config = settings_of("overheads", population, method, rounds=rounds, output=output)
    experiment, _ = on_population(config, "run", population, method=method)
    files, name = (folder / "ledger", folder / "participation"), population.name
    with PrivacyRecords.open(*files, name, experiment.budget) as records:
        state, run_folder, began = experiment.initial_state, RunFolder(folder), time.monotonic()
        conduct(run_folder, experiment, state, engine, records, clock=time.monotonic)
        return (time.monotonic() - began) / rounds


def parts_of(profile: cProfile.Profile) -> dict[str, float]:
    """Return the seconds of each part of the rounds, and of whole rounds."""
    watched = {entry.code: entry.totaltime for entry in profile.getstats()}

    def seconds(*functions: Callable[..., object]) -> float:
        return sum(watched[function.__code__] for function in functions)

    making, reading = seconds(OuterProducts.__getitem__), seconds(Schedule.rows, Examples.gathered)
    return {
        "reading examples": reading,
        "training": seconds(Group.trained) - reading,
        "making updates of factors": making,
        "sampling": seconds(draw_cohort),
        "clipping": seconds(add_contributions) - making,
        "noise and server step": seconds(release, close_round),
        "budget": seconds(PrivacyRecords.refuse_if_beyond),
        "ledger": seconds(
            PrivacyRecords.next_attempt,
            ParticipationRecord.record,
            Ledger.charge,
            ParticipationRecord.keep_head,
        ),
        "checkpoint": seconds(save_checkpoint),
        "figures": seconds(RunFolder.append_metrics),
        "all": seconds(conduct),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="costs of a round other than training")
    parser.add_argument("--rounds", type=int, default=1_000)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    profile = cProfile.Profile(builtins=False)  # which costs less than with builtins
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), prepared(), 2)  # pays the costs of a process's first run
    engine = prepared()
    with tempfile.TemporaryDirectory() as folder:
        profile.runcall(run, Path(folder), engine, rounds)
    parts = parts_of(profile)
    for name, seconds in parts.items():
        share = seconds / parts["all"]
        print(f"{name:24} {1e3 * seconds / rounds:8.2f} ms a round {100 * share:6.1f} %")
    others = sum(parts[name] for name in BESIDE)
    print(f"{', '.join(BESIDE)}: {100 * others / parts['all']:.1f} %")


if __name__ == "__main__":
    main()
