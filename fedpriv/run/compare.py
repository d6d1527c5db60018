"""`fedpriv compare`: all runs of a study, side by side, and what they say."""

import fcntl
import itertools
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path

import tomli_w
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedpriv.build import Experiment, on_population
from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.engine.workers import computing_with
from fedpriv.errors import FedprivError, InvalidValueError, WorkerError
from fedpriv.privacy.round import PrivacyRecords, Transport
from fedpriv.report.studies import print_study, results_csv, results_json, runs_csv
from fedpriv.run.diagnostics import Row, watched
from fedpriv.run.evaluation import Evaluator
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import Beginning, Cadence, Outcome, RoundRow, announced, conduct
from fedpriv.studies import Arm, Cell, RunResult, Study, Target, read_study
from fedpriv.studies.results import (
    ALL_RESULTS,
    RESULT,
    SIMULATION_ONLY,
    STUDY,
    all_results,
    finished_result,
    holds_results_alone,
    means,
    write_rows,
)
from fedpriv.studies.study import load_study, study_toml
from fedpriv.training.checkpoint import write_atomically

Noise = dict[tuple[Arm, Target], float]
"""Noise multiplier of every arm at every target."""

_REFRESH = 0.5  # seconds between looks at the metrics of unfinished runs


def run_study(file: Path, out: Path | None, workers: int | None) -> None:
    """Run what is missing of a study, and print how its arms compare.

    Guarantees: no run begins before all arms could be built and calibrated; a finished run is not
    run again; of a run that was cut short nothing counts; a run that fails does not stop the
    others; no process is left when this ends, however it ends.

    Args:
        file: the study, TOML.
        out: folder of the study; by default studies/NAME.
        workers: how many runs at once; by default as many as there are cores.

    Raises:
        WorkerError: a run failed, which is said once all others ended, or a process was killed.
        FedprivError: something is wrong with the input; the message says what.
    """
    study = load_study(file)
    folder = out or Path("studies") / study.name
    if holds_results_alone(folder):
        raise InvalidValueError(
            f"{folder} holds the results of a study without its runs; choose another folder"
        )
    console = Console()
    finished = {cell: finished_result(folder, study, cell) for cell in study.cells}
    results = {cell: result for cell, result in finished.items() if result is not None}
    missing = len(results) < len(study.cells)
    noise = calibrated(study) if missing else {}
    with _held(folder):
        write_atomically(folder / STUDY, study_toml(study).encode())
        try:
            if missing:
                _run_missing(study, folder, noise, results, workers or _cores(), console)
        finally:
            read = read_study(folder)
            for name, text in (
                ("results.json", results_json(read)),
                ("results.csv", results_csv(read)),
                ("runs.csv", runs_csv(read)),
                (ALL_RESULTS, all_results(read.runs)),
            ):
                write_atomically(folder / name, text.encode())
    print_study(read, console)
    console.print(f"folder {folder}", highlight=False)


def calibrated(study: Study) -> Noise:
    """Noise multiplier of every arm at every target, from the plan that its runs will have.

    Raises:
        FedprivError: an arm cannot be built, or no noise keeps it within a target.
    """
    noise: Noise = {}
    loaded: dict[str, Population] = {}
    for cell in study.cells:
        if (cell.arm, cell.target) in noise:
            continue
        config = study.config_of(cell)
        try:
            data = config.data
            if repr(data) not in loaded:
                loaded[repr(data)] = load_population(data.name, data.options)
            experiment, _ = on_population(config, str(config.run), loaded[repr(data)])
        except FedprivError as error:
            raise type(error)(f"arm {cell.arm.name!r}: {error}") from error
        noise[cell.arm, cell.target] = experiment.plan.noise_multiplier
    return noise


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make the folder, and keep other processes from it until the block is left.

    Raises:
        InvalidValueError: another process is at it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise InvalidValueError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidValueError(
                f"{folder} holds a study that another process is at; stop that one first"
            ) from error
        yield
    finally:
        os.close(descriptor)


def _cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def _run_missing(
    study: Study,
    folder: Path,
    noise: Noise,
    results: dict[Cell, RunResult],
    workers: int,
    console: Console,
) -> None:
    """Run all cells without a result, in processes, and show how far they are.

    Args:
        study: the study.
        folder: of the study.
        noise: from `calibrated`.
        results: of the finished runs; those that finish are added.
        workers: how many runs at once.
        console: where to draw.
    """
    missing = [cell for cell in study.cells if cell not in results]
    failures: list[str] = []
    with _displayed(study, folder, results, console) as show:
        try:
            with _pool(min(workers, len(missing))) as pool:
                running = {
                    pool.submit(_run_in_worker, study, cell, folder, noise[cell.arm, cell.target])
                    for cell in missing
                }
                while running:
                    done, running = wait_for(running, _REFRESH, FIRST_COMPLETED)
                    for future in done:
                        try:
                            cell, result = future.result()
                            results[cell] = result
                        except WorkerError as error:
                            failures.append(str(error))
                            console.print(f"failed: {error}", style="red", markup=False)
                    show()
        except BrokenProcessPool as error:
            raise WorkerError(
                "a process that ran the study was killed, perhaps because memory was short; "
                "finished runs are kept, and the same command goes on with the others"
            ) from error
    if failures:
        more = f"; {len(failures) - 1} more failed" if len(failures) > 1 else ""
        raise WorkerError(f"{failures[0]}{more}")


@contextmanager
def _displayed(
    study: Study, folder: Path, results: dict[Cell, RunResult], console: Console
) -> Iterator[Callable[[], None]]:
    """A line of progress for each arm and target; call what is yielded to bring it up to date."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as display:
        lines = []
        for target, arm in itertools.product(study.targets, study.arms):
            cells = [Cell(arm, target, seed) for seed in study.seeds]
            at = f" at ε = {target.epsilon:g}" if len(study.targets) > 1 else ""
            total = len(cells) * study.config_of(cells[0]).rounds
            lines.append((display.add_task(f"{arm.name}{at}", total=total, figures=""), cells))

        def show() -> None:
            for line, cells in lines:
                finished = [results[cell] for cell in cells if cell in results]
                accuracies = [run.accuracy for run in finished if run.accuracy is not None]
                mean = f", accuracy {statistics.fmean(accuracies):.1%}" if accuracies else ""
                display.update(
                    line,
                    completed=sum(run.rounds for run in finished)
                    + sum(_rounds_of(folder / c.path) for c in cells if c not in results),
                    figures=f"{len(finished)} of {len(cells)} seeds{mean}",
                )

        show()
        yield show


def _rounds_of(run: Path) -> int:
    """How many rounds an unfinished run has done, by its metrics."""
    try:
        return RunFolder(run).metrics.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that all end, whatever they are doing, if the block raises or this process dies."""
    # A fork would take over threads and locks of torch in whatever state they are.
    context = multiprocessing.get_context("spawn")
    watched_end, own_end = context.Pipe(duplex=False)
    with (
        watched_end,
        own_end,
        ProcessPoolExecutor(workers, context, _begin, (watched_end,)) as pool,
    ):
        try:
            yield pool
        except BaseException:
            own_end.close()
            raise


def _begin(parent: Connection) -> None:
    """Prepare a process of the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    """End this process once the other end of the pipe is closed, however long a round takes."""
    wait([parent])
    os._exit(1)


def _run_in_worker(
    study: Study, cell: Cell, folder: Path, noise_multiplier: float
) -> tuple[Cell, RunResult]:
    """Run a cell with one thread, so that results do not depend on the number of workers.

    Raises:
        WorkerError: whatever the run raised, with the arm and the seed.
    """
    try:
        data = study.config_of(cell).data
        population = _loaded(data.name, tomli_w.dumps(data.options))
        with computing_with(1):
            return cell, run_cell(study, cell, folder, noise_multiplier, population)
    except Exception as error:
        kind = "" if isinstance(error, FedprivError) else f"{type(error).__name__}: "
        raise WorkerError(f"arm {cell.arm.name!r}, seed {cell.seed}: {kind}{error}") from error


@lru_cache(maxsize=1)
def _loaded(name: str, options: str) -> Population:
    """A population by its name and options (TOML), kept for the next run of this process."""
    return load_population(name, tomllib.loads(options))


def run_cell(
    study: Study, cell: Cell, folder: Path, noise_multiplier: float, population: Population
) -> RunResult:
    """Run a cell of a study from its beginning, into its folder.

    What an interrupted run left there is moved aside. That gives nothing back that was spent: with
    the same seed the run draws the same cohorts and noise and releases the same once more.

    Args:
        study: the study.
        cell: which of its runs.
        folder: of the study.
        noise_multiplier: z, from `calibrated`.
        population: the users that the settings of the cell name.

    Returns:
        The result, durable in the folder: its file is the last to be written.

    Raises:
        FedprivError: the settings do not fit together; the message says what.
    """
    config = study.config_of(cell)
    privacy = config.privacy.model_copy(update={"noise_multiplier": noise_multiplier})
    config = config.model_copy(update={"privacy": privacy})
    experiment, transport = on_population(config, str(config.run), population)
    run = RunFolder(folder / cell.path)
    _set_aside(run.path)
    Beginning(config, experiment.plan.run, run, run.ledger, resuming=False).write_plan(experiment)
    seen: list[Row] = []
    rounds, outcome = _conducted(experiment, run, watched(transport, experiment.plan, seen.append))
    result = _result(study, cell, experiment, outcome, rounds, seen)
    write_rows(run.path / SIMULATION_ONLY, seen)
    write_atomically(run.path / RESULT, result.to_json().encode())
    return result


def _set_aside(cut_short: Path) -> None:
    """Move a run that did not end out of the way: a ledger is never deleted."""
    if cut_short.exists():
        names = (cut_short.with_name(f"{cut_short.name}.cut-{n}") for n in itertools.count(1))
        cut_short.rename(next(name for name in names if not name.exists()))


def _conducted(
    experiment: Experiment, folder: RunFolder, transport: Transport
) -> tuple[list[RoundRow], Outcome]:
    """All rounds of a run that is never resumed, so that its only checkpoint is the last."""
    plan, config = experiment.plan, experiment.config
    participation = folder.participation_of(folder.ledger)
    rounds: list[RoundRow] = []
    with PrivacyRecords.open(
        folder.ledger, participation, plan.population, experiment.budget
    ) as records:
        rows = conduct(
            folder,
            plan,
            experiment.initial_state,
            transport,
            records,
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


def _result(
    study: Study,
    cell: Cell,
    experiment: Experiment,
    outcome: Outcome,
    rounds: Sequence[RoundRow],
    seen: Sequence[Row],
) -> RunResult:
    plan = experiment.plan
    names = [group.name for group in plan.groups]
    queries = plan.mechanism.query.events
    seconds = statistics.median(row.simulation_only_seconds or math.inf for row in rounds)
    return RunResult(
        arm=cell.arm.name,
        target_epsilon=cell.target.epsilon,
        delta=cell.target.delta,
        seed=cell.seed,
        settings=study.digest_of(cell),
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
