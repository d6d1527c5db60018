"""Which settings do well on everything? The study behind the defaults of an experiment.

    FEDPRIV_DATA=FOLDER python -m simulations.defaults simulations/results/defaults.json --again
    python -m simulations.defaults simulations/results/defaults.json --charts docs/images

The file has a row for each run: a task of `TASKS` with its own (ε, δ), a setting, a seed, and the
accuracy of the last model on held-out rows. Rows whose accuracy is null are run; `--again` runs
all, some twenty minutes of one core. The best setting on a task under seed 100 is what tuning there
would have found; a default is near the best on every task. Both were run again under other seeds,
so that the best is not measured by the run that it was chosen by. Not all were tried on the two
large tasks.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from fedpriv.data.population import Population, load_population
from fedpriv.evaluation.held_out import evaluate
from fedpriv.experiment.build import on_population
from fedpriv.experiment.config import parse_config, spelled_out
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.report.charts import Axis, Chart, Series, save
from fedpriv.training.rounds import train
from simulations.datasets.people import find_census
from simulations.papers.census_employment import HELD_OUT, load, scaled

CHOSEN_BY = 100  # the seed under which all settings were compared
OPTIMIZERS = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")


@dataclass(frozen=True)
class Run:
    """One row: a task, a setting with one epoch of local training, a seed, and what came of it."""

    task: str
    seed: int
    optimizer: str
    rate: float  # the server's learning rate
    norm: float
    local: float  # the users' learning rate
    q: float
    rounds: int
    batch: int | str
    accuracy: float | None = None

    @property
    def setting(self) -> tuple[object, ...]:
        """All but task, seed and accuracy."""
        return (
            *(self.optimizer, self.rate, self.norm, self.local),
            *(self.q, self.rounds, self.batch),
        )


DEFAULT = ("fedadam", 0.03, 0.1, 0.3, 0.3, 100, 32)


def census() -> Population:
    """Who is employed? Each of 20,000 people is a user, with one record of nine facts."""
    people, others = load(find_census()).split(HELD_OUT)
    return Population.from_arrays(
        scaled(people.x),
        people.y.astype(np.int64),
        np.arange(len(people.y)),
        held_out=(scaled(others.x), others.y.astype(np.int64)),
        name="census: employment",
    )


def activities() -> Population:
    """Five activities of 18 people with a phone and a watch; the executions are the users.

    Held out are five other people. Centres and scales of the 40 features are those of the held-out
    people, who are taken to be public.
    """
    with np.load(Path(os.environ["FEDPRIV_DATA"]) / "har_phone_watch/har_features.npz") as file:
        x, y, subject, execution = (file[n] for n in ("X", "y", "subject", "execution"))
    public = subject > 18
    x = ((x - x[public].mean(0)) / (x[public].std(0) + 1e-6)).clip(-5, 5).astype(np.float32)
    y = y.astype(np.int64)
    return Population.from_arrays(
        x[~public], y[~public], execution[~public], held_out=(x[public], y[public]), name="har"
    )


@dataclass(frozen=True)
class Task:
    """What an experiment names: data, model, ε and δ."""

    data: str | dict[str, object]
    model: dict[str, object]
    epsilon: float
    delta: float


TASKS = {
    "digits": Task(
        {"name": "digits", "options": {"users": 287}},
        {"name": "softmax", "options": {"inputs": 64, "classes": 10}},
        2.0,
        1e-3,
    ),
    "census": Task(
        "simulations.defaults:census",
        {"name": "softmax", "options": {"inputs": 9, "classes": 2}},
        1.0,
        1e-5,
    ),
    "har": Task(
        "simulations.defaults:activities",
        {"name": "mlp", "options": {"inputs": 40, "hidden": 32, "classes": 5}},
        8.0,
        1e-3,
    ),
    "mnist-writers": Task(
        "simulations.datasets.mnist:load_mnist_writers",
        {"name": "mlp", "options": {"inputs": 784, "hidden": 64, "classes": 10}},
        8.0,
        1e-3,
    ),
    "shakespeare-roles": Task(
        {
            "name": "simulations.datasets.shakespeare:load_shakespeare_roles",
            "options": {"length": 20, "windows_per_role": 16},
        },
        {"name": "character-mlp"},
        8.0,
        1e-3,
    ),
}


@lru_cache(maxsize=1)
def population_of(task: str) -> Population:
    """The users of a task."""
    data = spelled_out({"data": TASKS[task].data})["data"]
    assert isinstance(data, dict)
    return load_population(data["name"], data.get("options", {}))


def accuracy(run: Run) -> float:
    """Train, and measure the last model on the held-out rows."""
    task = TASKS[run.task]
    table: dict[str, object] = {
        "name": run.task,
        "seed": run.seed,
        "rounds": run.rounds,
        "data": task.data,
        "model": task.model | {"seed": run.seed},
        "local": {"learning_rate": run.local, "batch_size": run.batch, "epochs": 1},
        "server": {"optimizer": run.optimizer, "options": {"learning_rate": run.rate}},
        "clipping": {"norm": run.norm},
        "privacy": {
            "sampling_probability": run.q,
            "epsilon": task.epsilon,
            "delta": task.delta,
        },
        "engine": {"processes": 1},
    }
    config = parse_config(table, run.task)
    experiment, transport = on_population(config, run.task, population_of(run.task))
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "ledger.sqlite", Path(folder) / "participation.sqlite"
        with PrivacyRecords.open(*paths, run.task, experiment.budget) as records:
            state = experiment.initial_state
            rounds = train(experiment.plan, state, transport, records, experiment.entropy)
            for state, _ in rounds:  # noqa: B007 - the last one is kept
                pass
    found = evaluate(experiment.task, experiment.held_out, experiment.device, state.model)
    assert found.accuracy is not None
    return round(found.accuracy, 4)


def best_of(runs: Sequence[Run], task: str) -> Run:
    """The run of the highest accuracy on a task, under the seed that settings are compared by."""
    tried = [run for run in runs if run.task == task and run.seed == CHOSEN_BY]
    return max(tried, key=lambda run: run.accuracy or 0.0)


def summary(runs: Sequence[Run]) -> list[str]:
    """Lines of a table: the default and the best setting of each task, and their distance."""
    lines = []
    for task in TASKS:
        best = best_of(runs, task)
        accuracies = {
            setting: {r.seed: r.accuracy for r in runs if (r.task, r.setting) == (task, setting)}
            for setting in (DEFAULT, best.setting)
        }
        default, other = accuracies[DEFAULT], accuracies[best.setting]
        seeds = sorted((default.keys() & other.keys()) - {CHOSEN_BY})
        apart = [100 * ((other[seed] or 0) - (default[seed] or 0)) for seed in seeds or [CHOSEN_BY]]
        lines.append(
            f"{task}: default {100 * (default[CHOSEN_BY] or 0):.1f}%, best of "
            f"{sum(r.task == task and r.seed == CHOSEN_BY for r in runs)} settings "
            f"{100 * (best.accuracy or 0):.1f}% {best.setting}; under seeds {seeds or 'none else'} "
            f"{np.mean(apart):+.1f} points apart"
        )
    return lines


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Accuracy by the server's learning rate, for each optimiser at one norm, on two tasks."""
    found = []
    for task, named in (("digits", "DIGITS, ε = 2"), ("har", "HAR by execution, ε = 8")):
        series = []
        for optimizer in OPTIMIZERS:
            of_one = sorted(
                (run.rate, 100 * (run.accuracy or 0.0))
                for run in runs
                if (run.task, run.seed, run.optimizer) == (task, CHOSEN_BY, optimizer)
                and run.setting[2:] == (0.3, 0.3, 0.3, 100, 32)
            )
            rates, reached = zip(*of_one, strict=True)
            series.append(Series(optimizer, rates, reached))
        found.append(
            Chart(
                f"server_rates_{task}",
                f"The server's learning rate, {named}",
                "Flat clipping to 0.3, q = 0.3, 100 rounds, one seed.",
                Axis("server's learning rate", log=True),
                Axis("accuracy on held-out rows", "%"),
                series,
            )
        )
    return found


def main() -> None:
    """Run what is missing, print the table, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--again", action="store_true", help="run every row again")
    parser.add_argument("--charts", type=Path, help="folder to draw into")
    arguments = parser.parse_args()
    runs = [Run(**row) for row in json.loads(arguments.file.read_text("utf-8"))]
    for number, run in enumerate(runs):
        if run.accuracy is None or arguments.again:
            runs[number] = replace(run, accuracy=accuracy(run))
            rows = ",\n".join(json.dumps(asdict(each)) for each in runs)
            arguments.file.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    for line in summary(runs):
        print(line)
    if arguments.charts:
        for chart in charts(runs):
            save(chart, arguments.charts, ["png"])


if __name__ == "__main__":
    main()
