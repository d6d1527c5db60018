"""Whole users, their examples, or examples alone: which unit and which sampling at equal ε.

    python -m simulations.units [--tasks mnist shakespeare] [--epsilon 2 8] [--seeds 2]

Three ways to train one model on one population (Charles et al. 2024, arXiv 2407.07737):

* users: cohorts of whole users, who train locally, as in the base file; user-level ε;
* their examples: lots of examples, at most k of a user, each a clipped gradient; user-level ε;
* examples alone: DP-SGD with equal lots and as many rounds, whose ε is about one example. That is
  a weaker statement of the same number, here for orientation only.

Noise is calibrated to ε at the δ of the base file. Norms and rates of the last two ways were tried
on seed 100, which is none of the results', some at ε = 2 and more at ε = 8; those of the first are
of the base files, for any ε. What that tells is not counted in ε. Data: a folder named by
FEDPRIV_DATA.
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
    """A task, and how each way trains on it."""

    file: str  # the base, which is how users train
    users: tuple[str, ...]  # assignments
    lots: tuple[str, ...]  # of both ways with lots of examples
    rates: Mapping[str, Mapping[float, float]]  # of the server, by way, from some ε on
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
    """How a way changes the base file, but for ε."""
    if way == USERS:
        return list(work.users)
    rate = work.rates[way][max(least for least in work.rates[way] if least <= epsilon)]
    server = f"{{optimizer='fedavgm',options={{learning_rate={rate},momentum=0.9}}}}"
    given = [*work.lots, _GRADIENT, f"server={server}"]
    k, q = work.examples_per_user, work.probability
    if way == EXAMPLES:
        options = f"{{examples_per_user={k},total_examples={counted(work)}}}"
        policy = f"sampling={{policy='poisson-examples',options={options}}}"
        return [*given, policy, f"privacy.sampling_probability={q}"]
    share = q * counted(work) / sizes_of(work.file).sum()  # all are enrolled, and lots as large
    return [*given, "privacy.unit=example", f"privacy.sampling_probability={share}"]


def counted(work: Work) -> float:
    """How many examples count, at most k of a user: taken to be known of these public data."""
    return float(sizes_of(work.file).clip(max=work.examples_per_user).sum())


@cache
def sizes_of(file: str) -> NDArray[np.int64]:
    """Rows of each user of a base file's population [users]."""
    return population_of(load_config(HERE / file)).users.sizes


def trained(
    task: str, way: str, epsilon: float, seeds: Sequence[int], more: Sequence[str] = ()
) -> Found:
    """Runs of a way, of which nothing is kept."""
    work = WORKS[task]
    given = [*assignments_of(work, way, epsilon), f"privacy.epsilon={epsilon}", *_QUIET, *more]
    last, plan = [], None
    for seed in seeds:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run"
            run_simulation(HERE / work.file, [*given, f"seed={seed}"], out, resume=False)
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
    """A row for each task, ε and way."""
    rows = [
        (
            each.task,
            each.way,
            f"{each.unit}-level",
            f"{each.target:g}",
            str(each.rounds),
            f"{each.expected_cohort:.0f}",
            f"{each.noise_multiplier:.3g}",
            mean_of(each.accuracy),
        )
        for each in results
    ]
    names = ("task", "what is drawn", "statement")
    columns = [Column(name, "text") for name in names]
    columns += [Column(name) for name in ("ε", "rounds", "lot", "z", "accuracy")]
    seeds = len(results[0].accuracy)
    deltas = " and ".join(sorted({f"{each.delta:g}" for each in results}))
    return Table(f"Means of {seeds} seeds, δ = {deltas}", columns, rows)


def chart_of(task: str, results: Sequence[Found]) -> Chart:
    """Accuracy by ε for each way."""
    series = []
    for way in dict.fromkeys(each.way for each in results):
        of_way = [each for each in results if (each.task, each.way) == (task, way)]
        accuracy = [[100.0 * share for share in each.accuracy] for each in of_way]
        series.append(
            Series(
                f"{way} ({of_way[0].unit}-level ε)",
                [each.target for each in of_way],
                [sum(each) / len(each) for each in accuracy],
                [min(each) for each in accuracy],
                [max(each) for each in accuracy],
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
    given = parser.parse_args(arguments)
    for task in given.tasks:
        results = list[Found]()
        for epsilon, way in product(given.epsilon, (USERS, EXAMPLES, ALONE)):
            results.append(trained(task, way, epsilon, range(given.seeds)))
            content, name = [asdict(each) for each in results], f"units_{task}"
            write_results(table_of(results), content, given.folder, name)
    if given.figure:
        charts = [chart_of(task, read(given.folder, task)) for task in given.tasks]
        figure(*charts).save(given.figure, scale_factor=2)


def read(folder: Path, task: str) -> list[Found]:
    """The results of a task, as they were written."""
    content = json.loads((folder / f"units_{task}.json").read_text(encoding="utf-8"))
    return [Found(**row) for row in content]


if __name__ == "__main__":
    main()
