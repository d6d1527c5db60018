"""Studies: several settings at equal privacy over seeds, from Python values or from a file."""

import fcntl
import itertools
import json
import math
import multiprocessing
import os
import signal
import statistics
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, cast

import tomli_w
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedpriv.build import Experiment, on_population, settings_of
from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport, computing_with
from fedpriv.errors import FedprivError, InvalidValueError, WorkerError, known_names
from fedpriv.mechanism import Mechanism
from fedpriv.privacy.round import LocalTraining, PrivacyRecords
from fedpriv.report.studies import print_study, results_csv, results_json, runs_csv
from fedpriv.run.callbacks import event_files
from fedpriv.run.diagnostics import Row, watched
from fedpriv.run.evaluation import Evaluator
from fedpriv.run.folder import RunFolder
from fedpriv.run.reader import write_report
from fedpriv.run.run import Cadence, Outcome, Rounds, conduct
from fedpriv.run.setup import RunSetup
from fedpriv.run.simulate import experiment_of, frame
from fedpriv.studies import Arm, ArmSummary, Cell, ReadStudy, RunResult, Study, Target, read_study
from fedpriv.studies.results import (
    ALL_RESULTS,
    RESULT,
    SIMULATION_ONLY,
    STUDY,
    all_results,
    finished_result,
    holds_results_alone,
    means,
    verdict,
    write_rows,
)
from fedpriv.studies.study import check_study, load_study, study_toml
from fedpriv.training.checkpoint import write_atomically
from fedpriv.training.optimizers import FedAvg, ServerOptimizer
from fedpriv.training.rounds import RoundResult

if TYPE_CHECKING:
    import pandas as pd

_FEDAVG = FedAvg()

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
    console = Console()

    results = _finished(study, folder)
    missing = len(results) < len(study.cells)
    noise = calibrated(study) if missing else {}
    with _held(study, folder):
        if missing:
            _run_missing(study, folder, noise, results, workers or _cores(), console)
    print_study(read_study(folder), console)
    console.print(f"folder {folder}", highlight=False)


@dataclass(frozen=True)
class Comparison:
    """A study that was run; everything in it is also in its folder.

    Attributes:
        read: the study and its finished runs.
    """

    read: ReadStudy

    @property
    def folder(self) -> Path:
        """Where it is written."""
        return self.read.folder

    @property
    def arms(self) -> tuple[ArmSummary, ...]:
        """What the runs say of each arm: means over seeds with their intervals."""
        return self.read.arms

    @property
    def verdict(self) -> str:
        """Which arm is best, and which differ from the baseline, in sentences."""
        return " ".join(verdict(self.read.study, self.arms))

    def to_pandas(self) -> "pd.DataFrame":
        """One row for each run.

        Raises:
            InvalidValueError: pandas is not installed.
        """
        return frame(asdict(each) for each in self.read.runs)

    def report(self, out: Path | str | None = None) -> Path:
        """Verify all ledgers, write the report as one HTML file, and return its path.

        Args:
            out: the file; by default report.html in the folder of the study.
        """
        return write_report(self.folder, Path(out) if out else None, show=False)


def compare(
    population: Population,
    task: Task | Callable[[int], Task],
    mechanism: Mechanism,
    arms: Mapping[str, Mapping[str, object]],
    *,
    local: LocalTraining,
    server: ServerOptimizer = _FEDAVG,
    seeds: int | Sequence[int] = 5,
    baseline: str | None = None,
    accuracies: Sequence[float] = (),
    out: Path | str | None = None,
    name: str = "study",
    evaluate_every: int = 1,
    device: str = "auto",
    quiet: bool = False,
) -> Comparison:
    """Run several settings at equal privacy, on the same users and seeds, and compare them.

    Runs that are finished in the folder are not run again: after an interrupt, the same call goes
    on with the others. Cohorts and noise of a seed are the same in every arm, so differences are
    paired.

    >>> import tempfile, numpy as np, torch, fedpriv
    >>> x, y = np.eye(4, dtype=np.float32).repeat(50, 0), np.arange(4).repeat(50)
    >>> people = fedpriv.Population.from_arrays(x, y, np.arange(200), held_out=(x, y))
    >>> mechanism = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0))
    >>> mechanism = mechanism.calibrate(epsilon=8.0, delta=1e-3, rounds=2)
    >>> task = fedpriv.Task(torch.nn.Linear(4, 4))
    >>> arms = {"average": {}, "adam": {"server": fedpriv.FedAdam(0.1)}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     study = fedpriv.compare(
    ...         people, task, mechanism, arms, local=fedpriv.SGD(1.0, epochs=1), seeds=2,
    ...         out=f"{folder}/study", quiet=True,
    ...     )
    ...     [(arm.arm, len(arm.seeds)) for arm in study.arms]
    [('average', 2), ('adam', 2)]

    Args:
        population: users and held-out rows.
        task: model and loss, or a function that makes them of a seed.
        mechanism: calibrated; arms with mechanisms of their own have the same (ε, δ).
        arms: by name, the arguments among task, mechanism, local and server that an arm replaces.
        local: how each user trains.
        server: how the server steps.
        seeds: the seeds, or how many from 0.
        baseline: the arm to compare with; by default the first.
        accuracies: levels of which is told when an arm reached them.
        out: folder of the study; by default studies/NAME.
        name: of the study.
        evaluate_every: rounds between evaluations on the held-out rows.
        device: where to train.
        quiet: print nothing.

    Raises:
        FedprivError: arms do not fit together or differ in privacy; the message says what.
    """
    given = {"task": task, "mechanism": mechanism, "local": local, "server": server}
    chosen = {arm: given | _known_arguments(arm, more, given) for arm, more in arms.items()}
    numbers = range(seeds) if isinstance(seeds, int) else seeds
    output = {"evaluate_every": evaluate_every}

    def parts(arm: str, seed: int) -> tuple[Task, Mechanism, LocalTraining, ServerOptimizer]:
        values = chosen[arm]
        of_seed = values["task"]
        made = (
            of_seed if isinstance(of_seed, Task) else cast("Callable[[int], Task]", of_seed)(seed)
        )
        rest = (values["mechanism"], values["local"], values["server"])
        return made, *cast("tuple[Mechanism, LocalTraining, ServerOptimizer]", rest)

    tables = {}
    targets = {}
    for arm in chosen:
        _, of_arm, *_ = parts(arm, numbers[0])
        if of_arm.rounds is None or of_arm.epsilon is None or of_arm.delta is None:
            raise InvalidValueError(f"the mechanism of arm {arm!r} is not calibrated; it must be")
        targets[arm] = Target(float(of_arm.epsilon), float(of_arm.delta))
        config = settings_of(
            "arm",
            population,
            *parts(arm, numbers[0]),
            rounds=of_arm.rounds,
            output=output,
            engine={"device": device},
            privacy={"noise_multiplier": None},
        )
        tables[arm] = config.model_dump(exclude_none=True, exclude={"name"})
    if len(set(targets.values())) > 1:
        raise InvalidValueError(f"arms are calibrated to {targets}; all must be to the same (ε, δ)")
    study = _study(name, tables, targets.popitem()[1], tuple(numbers), baseline, tuple(accuracies))
    folder, console = Path(out or Path("studies") / name), Console(quiet=quiet)
    results = _finished(study, folder)

    def prepared(cell: Cell) -> Experiment:
        config = study.config_of(cell)
        made = parts(cell.arm.name, cell.seed)
        try:
            return experiment_of(config, str(config.run), population, *made)
        except FedprivError as error:
            raise type(error)(f"arm {cell.arm.name!r}: {error}") from error

    for cell in study.cells[: len(study.arms)]:
        prepared(cell)  # no run starts before all arms could be built
    with _held(study, folder), _displayed(study, folder, results, console) as show:
        for cell in study.cells:
            if cell not in results:
                experiment = prepared(cell)
                transport = experiment.in_process(population.users)
                results[cell] = _run_prepared(study, cell, folder, experiment, transport)
                show()
    read = read_study(folder)
    print_study(read, console)
    return Comparison(read)


def _study(
    name: str,
    tables: Mapping[str, Mapping[str, object]],
    target: Target,
    seeds: tuple[int, ...],
    baseline: str | None,
    accuracies: tuple[float, ...],
) -> Study:
    """The study whose arms have these settings, written as changes of those of the first."""
    first, base = next(iter(tables.items()))
    arms = tuple(Arm(arm, tuple(_changes(base, table))) for arm, table in tables.items())
    study = Study(name, base, arms, (target,), seeds, baseline or first, accuracies)
    check_study(study, name)
    return study


def _changes(base: Mapping[str, object], table: Mapping[str, object]) -> Iterator[str]:
    for section in dict.fromkeys([*base, *table]):
        before, after = base.get(section), table.get(section, {})
        if before == after:
            continue
        if (
            isinstance(before, Mapping)
            and isinstance(after, Mapping)
            and before.keys() == after.keys()
        ):
            changed = {f"{section}.{k}": v for k, v in after.items() if v != before[k]}
        else:
            changed = {section: after}
        yield from (f"{key}={_inline(value)}" for key, value in changed.items())


def _inline(value: object) -> str:
    """A value in one line of TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_inline(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


def _known_arguments(
    arm: str, more: Mapping[str, object], given: Mapping[str, object]
) -> dict[str, object]:
    for argument in more:
        if argument not in given:
            raise InvalidValueError(
                f"arm {arm!r} sets {argument!r}; {known_names(argument, given)}"
            )
    return dict(more)


def _finished(study: Study, folder: Path) -> dict[Cell, RunResult]:
    """Results of the runs that are finished.

    Raises:
        InvalidValueError: the folder holds results without their runs.
        DataError: a result is of other settings.
    """
    if holds_results_alone(folder):
        raise InvalidValueError(
            f"{folder} holds the results of a study without its runs; choose another folder"
        )
    found = {cell: finished_result(folder, study, cell) for cell in study.cells}
    return {cell: result for cell, result in found.items() if result is not None}


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
def _held(study: Study, folder: Path) -> Iterator[None]:
    """Make the folder of a study, and keep other processes from it until the block is left.

    What the finished runs say is written in the end, however the block is left.

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
        write_atomically(folder / STUDY, study_toml(study).encode())
        try:
            yield
        finally:
            read = read_study(folder)
            for name, text in (
                ("results.json", results_json(read)),
                ("results.csv", results_csv(read)),
                ("runs.csv", runs_csv(read)),
                (ALL_RESULTS, all_results(read.runs)),
            ):
                write_atomically(folder / name, text.encode())
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
    """Run a cell of a study from its start, into its folder; see `_run_prepared`.

    Args:
        study: the study.
        cell: which of its runs.
        folder: of the study.
        noise_multiplier: z, from `calibrated`.
        population: the users that the settings of the cell name.

    Raises:
        FedprivError: the settings do not fit together; the message says what.
    """
    config = study.config_of(cell)
    privacy = config.privacy.model_copy(update={"noise_multiplier": noise_multiplier})
    config = config.model_copy(update={"privacy": privacy})
    return _run_prepared(study, cell, folder, *on_population(config, str(config.run), population))


def _run_prepared(
    study: Study, cell: Cell, folder: Path, experiment: Experiment, transport: InProcessTransport
) -> RunResult:
    """Run an experiment as a cell of a study.

    What an interrupted run left there is moved aside. That gives nothing back that was spent: with
    the same seed the run draws the same cohorts and noise and releases the same once more.

    Returns:
        The result, durable in the folder: its file is the last to be written.
    """
    run, plan, config = RunFolder(folder / cell.path), experiment.plan, experiment.config
    _set_aside(run.path)
    RunSetup(config, plan.run, run, run.ledger, resuming=False).write_plan(experiment)
    seen: list[Row] = []
    participation = run.participation_of(run.ledger)
    with (
        PrivacyRecords.open(
            run.ledger, participation, plan.population, experiment.budget
        ) as records,
        ExitStack() as stack,
    ):
        callbacks = dict(experiment.on_round)
        if config.output.tensorboard:
            callbacks["tensorboard"] = stack.enter_context(event_files(run.tensorboard, 0))
        rounds = conduct(
            run,
            plan,
            experiment.initial_state,
            watched(transport, plan, seen.append),
            records,
            experiment.entropy,
            Evaluator(experiment.task, experiment.held_out, experiment.device),
            Cadence(config.output.evaluate_every, config.rounds),
            time.monotonic,
            callbacks,
        )
        results, outcome = _drained(rounds)
    result = _result(study, cell, experiment, outcome, results, seen)
    write_rows(run.path / SIMULATION_ONLY, seen)
    write_atomically(run.path / RESULT, result.to_json().encode())
    return result


def _drained(rounds: Rounds) -> tuple[list[RoundResult], Outcome]:
    results = []
    while True:
        try:
            results.append(next(rounds))
        except StopIteration as end:
            outcome: Outcome = end.value
            return results, outcome


def _set_aside(cut_short: Path) -> None:
    """Move a run that did not end out of the way: a ledger is never deleted."""
    if cut_short.exists():
        names = (cut_short.with_name(f"{cut_short.name}.cut-{n}") for n in itertools.count(1))
        cut_short.rename(next(name for name in names if not name.exists()))


def _result(
    study: Study,
    cell: Cell,
    experiment: Experiment,
    outcome: Outcome,
    rounds: Sequence[RoundResult],
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
            (row.round + 1, row.accuracy) for row in rounds if row.accuracy is not None
        ),
        clipping_norms=rounds[-1].clipping_norms,
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
