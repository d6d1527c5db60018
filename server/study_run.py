"""One run of a study, from its settings to its result."""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpriv.data.population import Population
from fedpriv.experiment import Experiment, on_population
from fedpriv.federated.books import Books
from fedpriv.federated.checkpoint import write_atomically
from fedpriv.federated.transport import Transport
from fedpriv.studies import Cell, RunResult, Study
from fedpriv.studies.results import RESULT, SIMULATION_ONLY, write_rows
from fedpriv.studies.summary import means

from .announcing import announced
from .beginning import Beginning
from .evaluation import Evaluator
from .folder import RunFolder
from .run import Cadence, Outcome, RoundRow, conduct
from .watching import Row, watched


@dataclass(frozen=True)
class Task:
    """A run that is to be done.

    Attributes:
        study: the study.
        cell: which of its runs.
        folder: of the study.
        noise_multiplier: z, calibrated to the target of the cell.
    """

    study: Study
    cell: Cell
    folder: Path
    noise_multiplier: float


def run_task(task: Task, population: Population, tell: Callable[[int], None]) -> RunResult:
    """Run a cell of a study from its beginning, into its folder.

    What an interrupted run left there is removed. That gives nothing back that was spent: with the
    same seed the run draws the same cohorts and noise and releases the same once more.

    Args:
        task: the run.
        population: whom its settings name.
        tell: is given the number of rounds done.

    Returns:
        The result, durable in the folder: its file is the last to be written.

    Raises:
        FedprivError: the settings do not fit together; the message says what.
    """
    config = task.study.config_of(task.cell)
    privacy = config.privacy.model_copy(update={"noise_multiplier": task.noise_multiplier})
    config = config.model_copy(update={"privacy": privacy})
    experiment, transport = on_population(config, str(config.run), population)
    folder = RunFolder(task.folder / task.cell.path)
    _set_aside(folder.path)
    run = experiment.plan.run
    Beginning(config, run, folder, folder.ledger, resuming=False).write_plan(experiment)
    seen: list[Row] = []
    looking = watched(transport, experiment.plan, seen.append)
    rounds, outcome = _conducted(experiment, folder, looking, tell)
    result = _result(task, experiment, outcome, rounds, seen)
    write_rows(folder.path / SIMULATION_ONLY, seen)
    write_atomically(folder.path / RESULT, result.to_json().encode())
    return result


def _set_aside(cut_short: Path) -> None:
    """Move a run that did not end out of the way: a ledger is never deleted."""
    if cut_short.exists():
        names = (cut_short.with_name(f"{cut_short.name}.cut-{n}") for n in itertools.count(1))
        cut_short.rename(next(name for name in names if not name.exists()))


def _conducted(
    experiment: Experiment, folder: RunFolder, transport: Transport, tell: Callable[[int], None]
) -> tuple[list[RoundRow], Outcome]:
    """All rounds of a run that is never resumed, so that its only checkpoint is the last."""
    plan, config = experiment.plan, experiment.config
    participation = folder.participation_of(folder.ledger)
    rounds: list[RoundRow] = []
    with Books.open(folder.ledger, participation, plan.population, experiment.budget) as books:
        rows = conduct(
            folder,
            plan,
            experiment.initial_state,
            transport,
            books,
            experiment.entropy,
            Evaluator(experiment.task, experiment.held_out, experiment.device),
            Cadence(config.output.evaluate_every, config.rounds),
            time.monotonic,
        )
        with announced(rows, experiment, folder, 0) as told:
            while True:
                try:
                    rounds.append(next(told))
                except StopIteration as end:
                    outcome: Outcome = end.value
                    return rounds, outcome
                tell(len(rounds))


def _result(
    task: Task,
    experiment: Experiment,
    outcome: Outcome,
    rounds: Sequence[RoundRow],
    seen: Sequence[Row],
) -> RunResult:
    plan, cell = experiment.plan, task.cell
    names = [group.name for group in plan.groups]
    queries = plan.mechanism.average.sum_query.events
    seconds = statistics.median(row.simulation_only_seconds or math.inf for row in rounds)
    return RunResult(
        arm=cell.arm.name,
        target_epsilon=cell.target.epsilon,
        delta=cell.target.delta,
        seed=cell.seed,
        settings=task.study.digest_of(cell),
        stop=str(outcome.stop),
        rounds=len(rounds),
        noise_multiplier=plan.noise_multiplier,
        epsilon=rounds[-1].epsilon,
        accuracy=outcome.evaluation.accuracy,
        loss=outcome.evaluation.loss,
        evaluations=tuple(
            (row.round + 1, row.test_accuracy) for row in rounds if row.test_accuracy is not None
        ),
        clipping_norms=dict(zip(names, rounds[-1].clipping_norms, strict=True)),
        noise_stddevs={query.group: query.noise_stddev for query in queries[: len(names)]},
        simulation_only_users_per_second=plan.sampling.expected_cohort_size / seconds,
        simulation_only_clipped=_averaged(seen, "simulation_only_clipped"),
        simulation_only_update_norms=_averaged(seen, "simulation_only_update_norms"),
        simulation_only_signal_to_noise=_averaged(seen, "simulation_only_signal_to_noise"),
    )


def _averaged(rows: Sequence[Row], column: str) -> dict[str, float]:
    """Mean over rounds of each entry of a table; rounds in which nobody took part are left out."""
    tables = [table for row in rows if isinstance(table := row[column], dict)]
    return means(tables)
