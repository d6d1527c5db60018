"""What a round costs beside training: `python -m simulations.overheads [--rounds N]`.

Whole rounds as `fedpriv simulate` runs them, with ledger, participation record, figures and
checkpoints on disk: 100 of 1,000 users of 50 images, an MLP 784–128–10, batches of 10, one local
epoch, in one thread, which Python's profiler watches; times are of the wall, and waiting for the
disk is among them.
"""

import argparse
import cProfile
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.config import EngineSection
from fedpriv.data.population import UserStore
from fedpriv.engine.batches import schedule
from fedpriv.engine.local_training import train_layers_chunk
from fedpriv.engine.matmul import OuterProducts
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.ledger.budget import PrivacyBudget
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.privacy.clipping_torch import integer_sum
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import PrivacyRecords, draw_cohort, release
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.run.evaluation import Evaluation
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import Cadence, conduct
from fedpriv.training.checkpoint import save_checkpoint
from fedpriv.training.optimizers import FedAvg, Parameters
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import close_round, initial_state
from simulations.throughput import LOCAL, WORKS, example_losses, request_of

BESIDE = (
    "sampling",
    "clipping",
    "noise and server step",
    "budget",
    "ledger",
    "checkpoint",
    "figures",
)


def plan_of(task: Task, users: int, rounds: int) -> TrainingPlan:
    """Cohorts of 100 users in expectation."""
    layout = Layout.of(task.parameters())
    return TrainingPlan(
        run="overheads",
        population="random images",
        rounds=rounds,
        layout=layout,
        groups=flat(layout, 1.0),
        noise_shares=(1.0,),
        noise_multiplier=1.0,
        sampling=PoissonSampling(users, 100 / users),
        local=LOCAL,
        optimizer=FedAvg(),
    )


def prepared(population: int = 1_000) -> InProcessTransport:
    """So many users, who have trained once: shapes are checked before the first users train."""
    torch.manual_seed(0)
    users = replace(WORKS["mlp"], users=population).population
    task = Task(WORKS["mlp"].model(), example_losses)
    memory = EngineSection().chunk_mebibytes * 2**20
    engine = InProcessTransport(task, users, torch.device("cpu"), memory, processes=1)
    for _ in engine.collect(request_of(task, users)):
        pass
    return engine


def run(folder: Path, engine: InProcessTransport, rounds: int) -> None:
    """Train for some rounds, with all that is written to disk."""
    task = engine.task
    plan = plan_of(task, engine.users.population, rounds)
    budget = PrivacyBudget(100.0, 1e-6, ACCOUNTANTS["tight"].upper_epsilon)
    files = folder / "ledger", folder / "participation"
    with PrivacyRecords.open(*files, plan.population, budget) as records:
        state, entropy = initial_state(plan, task.parameters()), OperatingSystemEntropy()
        cadence = Cadence(evaluate=rounds, checkpoint=1)
        given = RunFolder(folder), plan, state, engine, records, entropy, unmeasured, cadence
        for _ in conduct(*given, time.monotonic):
            pass


def unmeasured(model: Parameters) -> Evaluation:
    """No evaluation: it is not of every round."""
    del model
    return Evaluation(math.nan, None)


def parts_of(profile: cProfile.Profile) -> dict[str, float]:
    """Seconds of each part of the rounds, and of the rounds."""
    watched = {entry.code: entry.totaltime for entry in profile.getstats()}

    def seconds(*functions: Callable[..., object]) -> float:
        return sum(watched[function.__code__] for function in functions)

    making = seconds(OuterProducts.__getitem__)
    return {
        "reading examples": seconds(schedule, UserStore.take),
        "training": seconds(train_layers_chunk),
        "making updates of factors": making,
        "sampling": seconds(draw_cohort),
        "clipping": seconds(integer_sum) - making,
        "noise and server step": seconds(release, close_round),
        "budget": seconds(PrivacyRecords.refuse_if_beyond),
        "ledger": seconds(PrivacyRecords.next_attempt, ParticipationRecord.record, Ledger.charge),
        "checkpoint": seconds(save_checkpoint),
        "figures": seconds(PrivacyBudget.epsilon_of, RunFolder.append_metrics),
        "all": seconds(conduct),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="what a round costs beside training")
    parser.add_argument("--rounds", type=int, default=1_000)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    profile = cProfile.Profile(builtins=False)  # watching less, it costs less
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), prepared(), 2)  # what is done once per process
    engine = prepared()
    with tempfile.TemporaryDirectory() as folder:
        profile.runcall(run, Path(folder), engine, rounds)
    parts = parts_of(profile)
    for name, seconds in parts.items():
        share = seconds / parts["all"]
        print(f"{name:24} {1e3 * seconds / rounds:8.2f} ms a round {100 * share:6.1f} %")
    beside = sum(parts[name] for name in BESIDE)
    print(f"{', '.join(BESIDE)}: {100 * beside / parts['all']:.1f} %")


if __name__ == "__main__":
    main()
