"""Personal models of users with two digits each, compared with one model for all.

    python -m simulations.personalisation [--epsilon 2 8] [--seeds 3] [--folder FOLDER]

MNIST is sorted by digit and dealt in two pieces to each of 1,000 users (McMahan et al. 2017,
section 3); its test images are dealt in the same way to 100 held-out users. Each held-out user
trains the released model on half of its images, and is measured on the other half. The study
compares, for a network with one hidden layer: the released model; the same after a user has trained
all of it, or its last layer; and a model whose last layer stayed with users (`FedRecon`).

Rates and steps were tuned on the held-out users; ε does not include this.
Data: MNIST's files, in the folder FEDPRIV_DATA.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import fedpriv
from fedpriv.data.partition import shards
from fedpriv.evaluation.held_out import evaluate
from fedpriv.evaluation.personalisation import HeldOutUsers
from fedpriv.experiment.models import mlp
from fedpriv.report.tables import Column, Table
from simulations.datasets.mnist import load_mnist_writers
from simulations.papers.results import mean_of, write_results

USERS, HELD_OUT, HIDDEN, DELTA = 1_000, 100, 64, 1e-4
HEAD = ("3.*",)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Found:
    """Accuracies of held-out users' models under some seeds."""

    epsilon: float
    arm: str
    mean: tuple[float, ...]  # over users
    tenth: tuple[float, ...]  # the 10% quantile over users


def people(users: int = USERS, held_out: int = HELD_OUT) -> fedpriv.Population:
    """Return MNIST, dealt in pieces of one digit, two to each user."""
    writers = load_mnist_writers()
    x, y = (np.asarray(writers.users.fields[name]) for name in ("x", "y"))
    test = writers.test["x"], writers.test["y"]
    return fedpriv.Population.from_arrays(
        x,
        y,
        shards(y, users, 2, seed=0),
        held_out=test,
        held_out_users=users + shards(test[1], held_out, 2, seed=1),
        name=f"mnist, two digits: {users} users",
    )


def task(*personal: str) -> fedpriv.Task:
    """Return a network with one hidden layer and these personal parameters."""
    torch.manual_seed(0)
    return fedpriv.Task(mlp(784, HIDDEN, 10), personal=personal)


def trained(
    population: fedpriv.Population,
    task: fedpriv.Task,
    local: fedpriv.SGD | fedpriv.FedRecon,
    epsilon: float,
    rounds: int,
    seed: int,
) -> fedpriv.Run:
    """Run once, in a temporary folder."""
    mechanism = fedpriv.Mechanism.poisson(q=0.3, clipping=fedpriv.Flat(0.5))
    with tempfile.TemporaryDirectory() as folder:
        return fedpriv.simulate(
            population,
            task,
            mechanism.calibrate(epsilon=epsilon, delta=DELTA, rounds=rounds),
            local=local,
            server=fedpriv.FedAvg(1.0),
            rounds=rounds,
            seed=seed,
            out=f"{folder}/run",
            evaluate_every=rounds,
            checkpoint_every=rounds,
            quiet=True,
        )


def accuracies(
    population: fedpriv.Population, epsilon: float, rounds: int, seed: int
) -> dict[str, dict[str, float]]:
    """Return the distribution of each arm's accuracy over held-out users."""
    all_parameters = fedpriv.Personalisation(fedpriv.SGD(0.05, steps=20))
    head = fedpriv.Personalisation(fedpriv.SGD(0.1, steps=20), HEAD)
    shared = trained(population, task(), fedpriv.SGD(0.1, steps=10), epsilon, rounds, seed)
    local = fedpriv.FedRecon(0.1, steps=15, personal_steps=5, personal_rate=0.1)
    personal = trained(population, task(*HEAD), local, epsilon, rounds, seed)
    of_all, of_head = (
        HeldOutUsers(options, shared.task, population.test, CPU)
        for options in (all_parameters, head)
    )
    model = shared.state.model
    runs = {
        "one model": evaluate(shared.task, of_all.rows, CPU, model),
        "all of it fine-tuned": of_all.evaluate(model),
        "its last layer fine-tuned": of_head.evaluate(model),
        "last layer personal": HeldOutUsers(head, personal.task, population.test, CPU).evaluate(
            personal.state.model
        ),
    }
    return {arm: dict(run.held_out_users["accuracy"]) for arm, run in runs.items()}


def table_of(results: Sequence[Found]) -> Table:
    """Return a table with a row for each ε and arm."""
    rows = [
        (f"{result.epsilon:g}", result.arm, mean_of(result.mean), mean_of(result.tenth))
        for result in results
    ]
    columns = [
        Column("ε"),
        Column("", "text"),
        Column("mean of users"),
        Column("10% of users below"),
    ]
    title = f"MNIST, users of two digits: accuracy of held-out users, δ = {DELTA:g}"
    return Table(title, columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write the results."""
    parser = argparse.ArgumentParser(description="personal models of users of two digits")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--users", type=int, default=USERS)
    default = Path(__file__).parent / "results"
    parser.add_argument("--folder", type=Path, default=default)
    options = parser.parse_args(arguments)
    population, results = people(options.users), list[Found]()
    for epsilon in options.epsilon:
        runs = [
            accuracies(population, epsilon, options.rounds, seed) for seed in range(options.seeds)
        ]
        for arm in runs[0]:
            mean, tenth = (tuple(run[arm][key] for run in runs) for key in ("mean", "q10"))
            results.append(Found(epsilon, arm, mean, tenth))
    content = [asdict(result) for result in results]
    write_results(table_of(results), content, options.folder, "personalisation")


if __name__ == "__main__":
    main()
