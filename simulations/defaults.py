"""The study behind the defaults of an experiment: which settings do well on all tasks.

    FEDPRIV_DATA=FOLDER python -m simulations.defaults simulations/results/defaults.json --again
    python -m simulations.defaults simulations/results/defaults.json --charts docs/images

The file has two scores for each task of `TASKS`, of the best constant and of a model trained
without noise, and a row for each run: a task with its own (ε, δ), a setting, a seed, and the score
of the last model. Scores are on held-out rows: accuracy, or R² of a number. Rows whose score is
null are run; `--again` runs all, which takes about twenty minutes of one core.

Rules for the norm are compared by the share of the gap between constant and noiseless model that
they close. For each task a rule is chosen on all other tasks, under one seed (`leave_one_out`). The
best setting of a task is the result of tuning on this task under that seed. The best setting and
the defaults were run again under other seeds, so the runs that chose them do not measure them.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedpriv.engine.transport import InProcessTransport
from fedpriv.evaluation.held_out import evaluate
from fedpriv.experiment.build import Experiment, on_population
from fedpriv.experiment.config import parse_config
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.report.charts import Axis, Chart, Series, save
from fedpriv.training.rounds import train
from simulations.default_tasks import TASKS, population_of

CHOSEN_BY = 100  # the seed under which settings and rules were compared
OPTIMIZERS = ("fedavgm", "fedadam", "fedyogi", "fedadagrad")
NORMS = (0.1, 0.2, 0.3, 1.0)  # the larger ones not on all tasks
Rule = Callable[[float], float]  # from the expected size of a cohort to the norm


def constant(norm: float) -> Rule:
    """Return the rule that always gives this norm."""
    return lambda _: norm


def root(part: float) -> Rule:
    """Return the rule of a norm that grows like the root of a cohort's size, from 0.1 to 1."""
    return lambda size: min(max(0.1, math.sqrt(size) / part), 1.0)


def step(norm: float, least: float) -> Rule:
    """Return the rule of this norm for cohorts of `least` users or more, else 0.1."""
    return lambda size: norm if size >= least else 0.1


RULES = {
    **{f"{norm:g}": constant(norm) for norm in NORMS},
    **{f"√cohort/{part}, from 0.1 to 1": root(part) for part in (50, 100, 200, 400)},
    **{
        f"0.1, or {norm:g} for cohorts of {least} or more": step(norm, least)
        for norm in (0.3, 1.0)
        for least in (200, 600, 1_000)
    },
}

DEFAULT = root(100)  # as `Mechanism.for_users` has it


@dataclass(frozen=True)
class Setting:
    """Settings of an experiment with one epoch of local training."""

    optimizer: str = "fedadam"
    rate: float = 0.03  # the server's learning rate
    norm: float | None = None  # None: the default
    local: float = 0.3  # the users' learning rate
    q: float = 0.3
    rounds: int = 100
    batch: int | str = 32
    schedule: str = ""  # by which the server's rate falls to zero

    @property
    def table(self) -> dict[str, object]:
        """The sections of an experiment, except q."""
        rate: object = self.rate
        if self.schedule:
            falling = {"start": self.rate, "end": 0.0, "rounds": self.rounds}
            rate = {"schedule": self.schedule, **falling}
        return {
            "rounds": self.rounds,
            "local": {"learning_rate": self.local, "batch_size": self.batch, "epochs": 1},
            "server": {"optimizer": self.optimizer, "options": {"learning_rate": rate}},
            "clipping": {} if self.norm is None else {"norm": self.norm},
        }


@dataclass(frozen=True)
class Run(Setting):
    """One row: a task, a seed, a setting and its score."""

    task: str = ""
    seed: int = CHOSEN_BY
    score: float | None = None

    @property
    def setting(self) -> Setting:
        """The setting of this run."""
        return Setting(**{name: getattr(self, name) for name in Setting.__annotations__})


@dataclass
class Results:
    """The content of the file."""

    bounds: dict[str, tuple[float, float]]  # by task: scores of the constant, and without noise
    runs: list[Run]

    @classmethod
    def read(cls, file: Path) -> "Results":
        """Read the file."""
        content = json.loads(file.read_text("utf-8"))
        bounds = {task: (low, high) for task, (low, high) in content["bounds"].items()}
        return cls(bounds, [Run(**row) for row in content["runs"]])

    def write(self, file: Path) -> None:
        """Write the file, without fields at the default of `Run`."""
        usual = asdict(Run())
        rows = (
            {k: v for k, v in asdict(run).items() if v != usual[k] or k in ("seed", "score")}
            for run in self.runs
        )
        lines = ",\n".join(json.dumps(row) for row in rows)
        file.write_text(
            f'{{"bounds": {json.dumps(self.bounds)},\n"runs": [\n{lines}\n]}}\n', encoding="utf-8"
        )

    def of(self, task: str) -> dict[Setting, float]:
        """Return the scores of all settings that were compared on a task."""
        runs = (run for run in self.runs if (run.task, run.seed) == (task, CHOSEN_BY))
        return {run.setting: run.score for run in runs if run.score is not None}

    def mean(self, task: str, setting: Setting) -> float:
        """Return the mean score of a setting under the other seeds; NaN if there is none."""
        if setting.norm == DEFAULT(cohort_of(task)):
            setting = replace(setting, norm=None)
        runs = (run for run in self.runs if (run.task, run.setting) == (task, setting))
        scores = [run.score for run in runs if run.seed != CHOSEN_BY and run.score is not None]
        return float(np.mean(scores)) if scores else math.nan

    def share(self, task: str, score: float) -> float:
        """Return the share of the gap between constant and noiseless model that a score closes."""
        low, high = self.bounds[task]
        return (score - low) / (high - low)

    def share_of(self, rule: Rule, task: str) -> float:
        """Return the share of the gap that a rule closes, with the nearest norm that was tried."""
        norm_wanted, scores = rule(cohort_of(task)), self.of(task)
        settings = [Setting(norm=norm) for norm in NORMS if Setting(norm=norm) in scores]
        nearest = min(
            settings, key=lambda setting: abs(math.log((setting.norm or 1.0) / norm_wanted))
        )
        return self.share(task, scores[nearest])


def cohort_of(task: str) -> float:
    """Return the expected size of a cohort."""
    return Setting.q * TASKS[task].users


def leave_one_out(results: Results) -> dict[str, str]:
    """Return for each task the name of the rule that is best on all other tasks."""
    shares = {
        name: {task: results.share_of(rule, task) for task in TASKS} for name, rule in RULES.items()
    }
    return {
        task: max(RULES, key=lambda name: sum(shares[name].values()) - shares[name][task])
        for task in TASKS
    }


def experiment_of(run: Run) -> tuple[Experiment, InProcessTransport]:
    """Return the experiment of a row."""
    task = TASKS[run.task]
    privacy = {"sampling_probability": run.q, "epsilon": task.epsilon, "delta": task.delta}
    table = {
        "name": run.task,
        "seed": run.seed,
        "data": task.data,
        "model": task.model | {"seed": run.seed},
        "privacy": privacy,
        "engine": {"processes": 1},
        **run.setting.table,
    }
    config = parse_config(table, run.task)
    return on_population(config, run.task, population_of(run.task))


def measured(run: Run) -> Run:
    """Train, and measure the last model on the held-out rows."""
    experiment, transport = experiment_of(run)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "ledger.sqlite", Path(folder) / "participation.sqlite"
        with PrivacyRecords.open(*paths, run.task, experiment.budget) as records:
            state = experiment.initial_state
            rounds = train(experiment.plan, state, transport, records, experiment.entropy)
            for state, _ in rounds:  # noqa: B007 - the last one is used
                pass
    return replace(run, score=_score(experiment, state.model))


def _score(experiment: Experiment, model: Mapping[str, NDArray[np.float32]]) -> float:
    """Return the accuracy of a model on held-out rows, or R² if they have numbers."""
    figures = evaluate(experiment.task, experiment.held_out, experiment.device, model)
    if figures.accuracy is not None:
        return round(figures.accuracy, 4)
    return round(1.0 - figures.loss / float(experiment.held_out["y"].var()), 4)


def bounds(name: str) -> tuple[float, float]:
    """Return the scores of the best constant, and of Adam on all rows, without users or noise."""
    experiment, _ = experiment_of(Run(task=name))
    task, y = experiment.task, experiment.held_out["y"]
    low = 0.0  # R²
    if TASKS[name].model.get("loss") != "mse":
        is_vector = y.dtype.kind == "f"  # answers 0 and 1
        shares = [y.mean(0), 1.0 - y.mean(0)] if is_vector else np.bincount(y.ravel()) / y.size
        low = float(np.mean(np.max(shares, axis=0)))
    rows, draw, high = population_of(name).users.fields, np.random.default_rng(0), -math.inf
    adam = torch.optim.Adam(task.model.parameters(), 3e-3)
    for step in range(1, 3_001):
        batch = draw.integers(0, len(rows["y"]), 64)
        x, targets = (torch.tensor(rows[field][batch]) for field in ("x", "y"))
        adam.zero_grad()
        task.losses_of(task.model(x), targets).mean().backward()  # type: ignore[no-untyped-call]
        adam.step()
        if step in (300, 1_000, 3_000):
            high = max(high, _score(experiment, task.parameters()))
    return round(low, 4), high


def summary(results: Results) -> list[str]:
    """Return rows of a table: each task, the defaults and the best setting under other seeds."""
    lines = []
    for name, task in TASKS.items():
        settings = results.of(name)
        best = max(settings, key=lambda setting: settings[setting])
        low, high = results.bounds[name]
        columns = low, results.mean(name, Setting()), results.mean(name, best), high
        scores = " | ".join(f"{100 * score:.1f}" for score in columns)
        title = f"{task.title} | {task.users:,} | {task.epsilon:g}"
        lines.append(f"| {title} | {scores} | {len(settings)} | {best}")
    return lines


def rules(results: Results) -> list[str]:
    """Return the mean share that each rule closes, and the rule chosen without each task."""
    lines = []
    for name, rule in RULES.items():
        shares = [results.share_of(rule, task) for task in TASKS]
        lines.append(
            f"{name}: closes {np.mean(shares):.1%} in the mean, {min(shares):.1%} at least"
        )
    chosen = leave_one_out(results)
    for task in TASKS:
        closed, best = results.share_of(RULES[chosen[task]], task), max(results.of(task).values())
        lines.append(
            f"{task}: the others choose {chosen[task]}, which closes {closed:.1%}; the best of all "
            f"settings {results.share(task, best):.1%}"
        )
    return lines


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return charts of accuracy by the server's learning rate, for each optimiser at one norm."""
    drawn_charts = []
    for task, title in (("digits", "DIGITS, ε = 2"), ("activities", "HAR by execution, ε = 8")):
        series = []
        for optimizer in OPTIMIZERS:
            of_one = sorted(
                (run.rate, 100 * (run.score or 0.0))
                for run in runs
                if (run.task, run.seed) == (task, CHOSEN_BY)
                and run.setting == Setting(optimizer, run.rate, norm=0.3)
            )
            rates, reached = zip(*of_one, strict=True)
            series.append(Series(optimizer, rates, reached))
        drawn_charts.append(
            Chart(
                f"server_rates_{task}",
                f"The server's learning rate, {title}",
                "Flat clipping to 0.3, q = 0.3, 100 rounds, one seed.",
                Axis("server's learning rate", log=True),
                Axis("accuracy on held-out rows", "%"),
                series,
            )
        )
    return drawn_charts


def main() -> None:
    """Run the missing rows, print the tables, and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--again", action="store_true", help="run every row again")
    parser.add_argument("--charts", type=Path, help="folder to draw into")
    arguments = parser.parse_args()
    results = Results.read(arguments.file)
    if arguments.again:
        results = Results({}, [replace(run, score=None) for run in results.runs])
    for task in TASKS.keys() - results.bounds.keys():
        results.bounds[task] = bounds(task)
    for number, run in enumerate(results.runs):
        if run.score is None:
            results.runs[number] = measured(run)
            results.write(arguments.file)
    results.write(arguments.file)
    print(*summary(results), *rules(results), sep="\n")
    if arguments.charts:
        for chart in charts(results.runs):
            save(chart, arguments.charts, ["png"])


if __name__ == "__main__":
    main()
