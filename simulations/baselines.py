"""Baselines: what a simple model reaches on each data set at ε = 2 and 8, and without noise.

    FEDPRIV_DATA=FOLDER python -m simulations.baselines

Runs each task under three seeds, keeps the numbers in simulations/results/baselines.json, and
writes the page docs/baselines.md from them. `--only TASK`, which may be repeated, runs these alone
and keeps the others' rows.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from fedpriv.data import Population
from fedpriv.errors import FedprivError
from fedpriv.experiment.build import population_of
from fedpriv.experiment.bundled import experiment_file
from fedpriv.experiment.config import Config, load_config
from fedpriv.experiment.models import build_model
from simulations.seeds import run_seed

ROOT = Path(__file__).parents[1]
EPSILONS = (2.0, 8.0, None)  # None: without noise
PAGE, RESULTS = ROOT / "docs/baselines.md", ROOT / "simulations/results/baselines.json"


@dataclass(frozen=True)
class Baseline:
    """A task, the file of its experiment, and its prices."""

    what: str  # is predicted
    file: str  # in this checkout, or the name of one that comes with fedpriv
    delta: float
    epsilons: tuple[float | None, ...] = EPSILONS
    keys: tuple[str, ...] = ()  # that differ from the file's
    unit: float | None = None  # of regressions: how many points a target of 1 is


BASELINES = {
    "digits": Baseline("DIGITS: which digit", "digits", 1e-4),
    "mnist": Baseline(
        "MNIST by writer: which digit",
        "simulations/mnist_writers.toml",
        1e-4,
        keys=("rounds=40", "privacy.sampling_probability=0.2"),
    ),
    "shakespeare": Baseline(
        "Shakespeare's roles: next character",
        "simulations/shakespeare_roles.toml",
        1e-4,
        (2.0, 8.0),
        keys=("rounds=30",),
    ),
    "har": Baseline("HAR: which of five activities", "simulations/har.toml", 1e-3),
    "parkinsons": Baseline("Parkinsons: severity", "simulations/parkinsons.toml", 1e-3, unit=10.0),
    "employment": Baseline("census: who is employed", "simulations/census_employment.toml", 1e-6),
    "income": Baseline("census: who earns over $50,000", "simulations/census_income.toml", 1e-6),
}


@dataclass(frozen=True)
class Row:
    """One task at one ε."""

    keys: tuple[str, ...]  # set beside those of the file
    epsilon: float | None  # the ledger's, the largest of all seeds; None: without noise
    delta: float
    scores: tuple[float, ...]  # by seed: accuracy, or of regressions the RMSE in points


@dataclass(frozen=True)
class Outcome:
    """All rows of a task, and what they are compared with."""

    users: int
    model: str
    guess: float  # the score of the best answer that is the same for everybody
    rows: tuple[Row, ...]


def assignments(baseline: Baseline, epsilon: float | None) -> list[str]:
    """Keys that differ from the file's."""
    keys = [*baseline.keys, f"privacy.delta={baseline.delta:g}"]
    if epsilon is None:
        return [*keys, "privacy.noise_multiplier=0.0", "privacy.unsafe_no_privacy=true"]
    return [*keys, f"privacy.epsilon={epsilon:g}"]


def measured(baseline: Baseline, seeds: int, more: Sequence[str]) -> Outcome:
    """Run a task under all seeds; `more` are keys set after those of the row."""
    file = experiment_file(Path(baseline.file), ROOT)
    config = load_config(file, more)
    population, rows = population_of(config), []
    for epsilon in baseline.epsilons:
        keys = [*assignments(baseline, epsilon), *more]
        last = [run_seed(file, seed, keys)[-1] for seed in range(seeds)]
        spent = None if epsilon is None else max(float(str(row["epsilon"])) for row in last)
        scores = tuple(score(baseline, row) for row in last)
        rows.append(Row(tuple(keys), spent, float(str(last[0]["delta"])), scores))
    users, model = population.users.population, described(baseline, config)
    return Outcome(users, model, guess(baseline, population), tuple(rows))


def score(baseline: Baseline, row: Mapping[str, object]) -> float:
    """Accuracy on held-out rows, or the root of the mean squared error in points."""
    if baseline.unit is None:
        return float(str(row["accuracy"]))
    return baseline.unit * math.sqrt(float(str(row["loss"])))


def guess(baseline: Baseline, population: Population) -> float:
    """Score of who always answers with the users' commonest label, or with their mean target.

    That is not private; it says what a model without inputs would reach.
    """
    y, test = population.users.fields["y"], population.test["y"]
    if baseline.unit is not None:
        mean = y.astype(float).mean()
        return baseline.unit * float(np.sqrt(np.square(test.astype(float) - mean).mean()))
    labels, counts = np.unique(y, return_counts=True)
    return float(np.mean(test == labels[counts.argmax()]))


def described(baseline: Baseline, config: Config) -> str:
    """The model's name and number of trainable parameters; one score for a number is linear."""
    model = build_model(config.model.name, config.model.options, config.model.seed)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    name = config.model.name.rpartition(":")[2] if baseline.unit is None else "linear"
    return f"{name}, {count:,} parameters"


HEAD = """# Baselines
Results of a simple model on each data set, for comparison with yours; they are not records.

    FEDPRIV_DATA=/path/to/folder python -m simulations.baselines

makes this page from [the data sets](data.md#data-sets-of-papers) in that folder, and
[baselines.json](../simulations/results/baselines.json), which has the settings and ε of each run.
`--only TASK` runs one task again.

| task | prediction | users | model | δ | ε = 2 | ε = 8 | without noise | guess |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
FOOT = """
* **Users** are whole people, or roles of plays; ε and δ are user-level. Held-out rows belong to
  people who are not users, with two exceptions: for Shakespeare they are other lines of the same
  roles, and for DIGITS the writers are unknown and images were dealt to users at random.
* **Scores** are accuracies on the held-out rows after the last round, mean and standard deviation
  of {seeds} seeds, which vary cohorts and noise. For Parkinsons, a regression, they are root mean
  squared errors in points of the scale UPDRS: less is better. On unseen patients the linear model
  is no better than a guess, with noise or without.
* **Without noise**: the same training with the same clipping.
* **Guess**: the users' most common label, or their mean, for everybody. It is not private.
* Each run is priced alone. The price does not include the few tries on other seeds, on the same
  users, that chose the settings.

## Few users
The noise on an average of N users is proportional to 1/N, however much data a user has, so HAR and
Parkinsons lose most. More people would help; more recordings of each person would not. A party
that holds all the data can protect [each example](units.md) instead, which says much less about a
person.
"""


def page(outcomes: Mapping[str, Outcome]) -> str:
    """The page in Markdown."""
    seeds = max(len(row.scores) for each in outcomes.values() for row in each.rows)
    lines = []
    for task, outcome in outcomes.items():
        baseline = BASELINES[task]
        scores = dict(zip(baseline.epsilons, outcome.rows, strict=False))
        cells = [
            *(f"`{task}`", baseline.what, f"{outcome.users:,}", outcome.model),
            f"{outcome.rows[0].delta:g}",
            *(shown(baseline, scores[e].scores) if e in scores else "" for e in EPSILONS),
            shown(baseline, [outcome.guess]),
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    return HEAD + "".join(lines) + FOOT.format(seeds=seeds)


def shown(baseline: Baseline, scores: Sequence[float]) -> str:
    """Mean and, of several, standard deviation, in percent or points."""
    if baseline.unit is None:
        end = f" ± {100 * stdev(scores):.1f}" if len(scores) > 1 else ""
        return f"{100 * fmean(scores):.1f}{end}%"
    end = f" ± {stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{fmean(scores):.1f}{end} points"


def read_outcomes(file: Path) -> dict[str, Outcome]:
    """Outcomes by task; none where there is no file yet."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    outcomes = {}
    for task, each in found.items():
        rows = tuple(
            Row(tuple(r["keys"]), r["epsilon"], r["delta"], tuple(r["scores"]))
            for r in each["rows"]
        )
        outcomes[task] = Outcome(each["users"], each["model"], each["guess"], rows)
    return outcomes


def write(outcomes: Mapping[str, Outcome], results: Path, page_file: Path) -> None:
    """The numbers and the page."""
    for file in (results, page_file):
        file.parent.mkdir(parents=True, exist_ok=True)
    numbers = {task: asdict(each) for task, each in outcomes.items()}
    results.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    page_file.write_text(page(outcomes), encoding="utf-8")


def main() -> None:
    """Run what was asked for, and write numbers and page after each task."""
    parser = argparse.ArgumentParser(description="baselines of all data sets")
    parser.add_argument("--only", action="append", choices=BASELINES, metavar="TASK")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], dest="assignments")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; it must be at least 1")
    for task in arguments.only or BASELINES:
        try:
            found = measured(BASELINES[task], arguments.seeds, arguments.assignments)
        except FedprivError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        outcomes = {**read_outcomes(arguments.results), task: found}
        ordered = {each: outcomes[each] for each in BASELINES if each in outcomes}
        write(ordered, arguments.results, arguments.page)


if __name__ == "__main__":
    main()
