"""Comparison of units and sampling at equal ε: whole users, their examples, or examples alone.

    python -m simulations.units [--tasks mnist shakespeare] [--epsilon 2 8] [--seeds 2]

Three ways to train one model on one population (Charles et al. 2024, arXiv 2407.07737):

* users: cohorts of whole users, who train locally, as in the base file; user-level ε;
* their examples: lots of examples, at most k of a user, each a clipped gradient; user-level ε;
* examples alone: DP-SGD with equal lots and the same number of rounds, whose ε protects one
  example. That is a weaker statement with the same number, given for orientation only.

Noise is calibrated to ε at the δ of the base file. Norms and rates of the last two ways were tuned
on seed 100, which no result uses, some at ε = 2 and more at ε = 8; those of the first are from the
base files, for any ε. ε does not include this tuning. Data: the folder in FEDPRIV_DATA.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedpriv.experiment.build import population_of
from fedpriv.experiment.config import load_config
from fedpriv.report.charts import Axis, Chart, Series, figure
from fedpriv.report.tables import Column, Table
from fedpriv.run.folder import RunFolder
from fedpriv.run.simulate import run_simulation
from simulations.papers.results import mean_of, write_results

HERE = Path(__file__).parent
USERS, EXAMPLES, ALONE = "users", "their examples", "examples alone"


@dataclass(frozen=True)
class Work:
    """A task, and the settings of each way for it."""

    file: str  # the base file; whole users train by its settings
    users: tuple[str, ...]  # assignments for whole users
    lots: tuple[str, ...]  # assignments for both ways with lots of examples
    rates: Mapping[str, Mapping[float, float]]  # of the server, by way and least ε
    examples_per_user: int  # k
    probability: float  # q of each of a user's k examples


_QUIET = ("output.evaluate_every=1000", "output.checkpoint_every=1000")
_GRADIENT = "local={learning_rate=1.0,steps=1}"
WORKS: Mapping[str, Work] = {
    "mnist": Work(
        "mnist_writers.toml",
        ("rounds=50",),
        (
            "rounds=50",
            "clipping.norm=1.0",
        ),
        {EXAMPLES: {0.0: 0.07, 8.0: 0.2}, ALONE: {0.0: 0.5}},
        64,
        0.05,
    ),
    "shakespeare": Work(
        "shakespeare_roles.toml",
        ("rounds=60",),
        (
            "rounds=50",
            "clipping.norm=1.0",
        ),
        {EXAMPLES: {0.0: 0.15, 8.0: 0.4}, ALONE: {0.0: 1.0}},
        64,
        0.05,
    ),
}


@dataclass(frozen=True)
class Found:
    """Accuracies on held-out rows under some seeds, and what they cost."""

    task: str
    way: str
    unit: str  # of ε
    target: float
    delta: float
    rounds: int
    expected_cohort: float  # users or examples
    noise_multiplier: float
    accuracy: tuple[float, ...]
    epsilon: tuple[float, ...]


def assignments_of(work: Work, way: str, epsilon: float) -> list[str]:
    """Return the changes of a way to the base file, except ε."""
    if way == USERS:
        return list(work.users)
    rate = work.rates[way][max(bound for bound in work.rates[way] if bound <= epsilon)]
    server = f"{{optimizer='fedavgm',options={{learning_rate={rate},momentum=0.9}}}}"
    assignments = [*work.lots, _GRADIENT, f"server={server}"]
    k, q = work.examples_per_user, work.probability
    if way == EXAMPLES:
        options = f"{{examples_per_user={k},total_examples={counted(work)}}}"
        policy = f"sampling={{policy='poisson-examples',options={options}}}"
        return [*assignments, policy, f"privacy.sampling_probability={q}"]
    share = q * counted(work) / sizes_of(work.file).sum()  # all are enrolled, in lots of equal size
    return [*assignments, "privacy.unit=example", f"privacy.sampling_probability={share}"]


def counted(work: Work) -> float:
    """Return how many examples count, at most k of a user; public knowledge for these data."""
    return float(sizes_of(work.file).clip(max=work.examples_per_user).sum())


@cache
def sizes_of(file: str) -> NDArray[np.int64]:
    """Return the rows of each user of a base file's population: [users]."""
    return population_of(load_config(HERE / file)).users.sizes


def trained(
    task: str, way: str, epsilon: float, seeds: Sequence[int], extra: Sequence[str] = ()
) -> Found:
    """Run a way under each seed, in temporary folders."""
    work = WORKS[task]
    assignments = [
        *assignments_of(work, way, epsilon),
        f"privacy.epsilon={epsilon}",
        *_QUIET,
        *extra,
    ]
    last, plan = [], None
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            run_simulation(HERE / work.file, [*assignments, f"seed={seed}"], out, resume=False)
            rows = list(RunFolder(out).read_metrics())
            plan = load_config(out / "plan.toml")
            cohort = next(
                float(line.split()[-1])
                for line in (out / "plan.toml").read_text(encoding="utf-8").splitlines()
                if line.startswith("# expected cohort")
            )
        last.append(rows[-1])
    assert plan is not None
    return Found(
        task=task,
        way=way,
        unit=plan.privacy.unit,
        target=epsilon,
        delta=plan.privacy.delta,
        rounds=plan.rounds,
        expected_cohort=cohort,
        noise_multiplier=plan.privacy.noise_multiplier or 0.0,
        accuracy=tuple(float(str(row["accuracy"])) for row in last),
        epsilon=tuple(float(str(row["epsilon"])) for row in last),
    )


def table_of(results: Sequence[Found]) -> Table:
    """Return a table with a row for each task, ε and way."""
    rows = [
        (
            result.task,
            result.way,
            f"{result.unit}-level",
            f"{result.target:g}",
            str(result.rounds),
            f"{result.expected_cohort:.0f}",
            f"{result.noise_multiplier:.3g}",
            mean_of(result.accuracy),
        )
        for result in results
    ]
    names = ("task", "what is drawn", "statement")
    columns = [Column(name, "text") for name in names]
    columns += [Column(name) for name in ("ε", "rounds", "lot", "z", "accuracy")]
    seeds = len(results[0].accuracy)
    deltas = " and ".join(sorted({f"{result.delta:g}" for result in results}))
    return Table(f"Means of {seeds} seeds, δ = {deltas}", columns, rows)


def chart_of(task: str, results: Sequence[Found]) -> Chart:
    """Return a chart of accuracy against ε for each way."""
    series = []
    for way in dict.fromkeys(result.way for result in results):
        of_way = [result for result in results if (result.task, result.way) == (task, way)]
        accuracy = [[100.0 * share for share in result.accuracy] for result in of_way]
        series.append(
            Series(
                f"{way} ({of_way[0].unit}-level ε)",
                [result.target for result in of_way],
                [sum(result) / len(result) for result in accuracy],
                [min(result) for result in accuracy],
                [max(result) for result in accuracy],
                dashed=way == ALONE,
            )
        )
    delta = results[0].delta
    x, y = Axis(f"ε at δ = {delta:g}"), Axis("accuracy on held-out rows", "%")
    return Chart(f"units-{task}", task, "", x, y, series)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print, and write the results so far."""
    parser = argparse.ArgumentParser(description="users, their examples, or examples alone")
    parser.add_argument("--tasks", nargs="+", default=[*WORKS], choices=[*WORKS])
    parser.add_argument("--epsilon", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=HERE / "results")
    parser.add_argument("--figure", type=Path)
    options = parser.parse_args(arguments)
    for task in options.tasks:
        results = list[Found]()
        for epsilon, way in product(options.epsilon, (USERS, EXAMPLES, ALONE)):
            results.append(trained(task, way, epsilon, range(options.seeds)))
            content, name = [asdict(result) for result in results], f"units_{task}"
            write_results(table_of(results), content, options.folder, name)
    if options.figure:
        charts = [chart_of(task, read(options.folder, task)) for task in options.tasks]
        figure(*charts).save(options.figure, scale_factor=2)


def read(folder: Path, task: str) -> list[Found]:
    """Return the results of a task from its file."""
    content = json.loads((folder / f"units_{task}.json").read_text(encoding="utf-8"))
    return [Found(**row) for row in content]


if __name__ == "__main__":
    main()
