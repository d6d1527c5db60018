"""Studies: several settings at equal privacy over seeds, from Python values or from a file."""

import itertools
import math
import multiprocessing
import os
import signal
import statistics
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from fedpriv.data.population import Population, load_population
from fedpriv.engine.forks import computing_with
from fedpriv.engine.task import Task
from fedpriv.engine.transport import Engine, InProcessTransport
from fedpriv.errors import FedprivError, InvalidValueError, WorkerError, known_names
from fedpriv.evaluation.personalisation import Personalisation
from fedpriv.experiment.build import (
    Experiment,
    Method,
    SharedRoads,
    check_measured,
    on_population,
    settings_of,
)
from fedpriv.experiment.config import DataSection, method_left_out
from fedpriv.experiment.mechanism import Mechanism
from fedpriv.experiment.trackers import Tracker, named
from fedpriv.report.records import RunEnd
from fedpriv.report.study_page import print_study, results_json
from fedpriv.report.tables import screen
from fedpriv.run.folder import RunFolder, data_frame, held, write_charts, write_report
from fedpriv.run.notes import of_settings
from fedpriv.run.run import Run, RunSetup
from fedpriv.run.simulate import in_process
from fedpriv.run.terminal import displayed
from fedpriv.studies import Arm, ArmSummary, Cell, ReadStudy, RunResult, Study, Target, read_study
from fedpriv.studies.results import (
    ALL_RESULTS,
    RESULT,
    STUDY,
    finished_runs,
    holds_results_alone,
    means,
    results_text,
    verdict,
)
from fedpriv.studies.study import load_study, study_of_settings, study_toml
from fedpriv.support.checks import check_types, checked_arguments, plain_numbers
from fedpriv.support.disk import write_atomically
from fedpriv.training.optimizers import ServerOptimizer
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.request import LocalTraining
from fedpriv.training.rounds import OnRound

if TYPE_CHECKING:
    import pandas as pd

Ended = tuple[Cell, RunResult]
_REFRESH = 0.5  # seconds between looks at the metrics of unfinished runs


def run_study(file: Path, out: Path | None, workers: int | None) -> None:
    """Run the missing runs of a study, and print how its arms compare.

    Guarantees: no run starts before all arms are built and calibrated; a finished run is not
    repeated; the files of an interrupted run do not count; a run that fails does not stop the
    others; no process is left when this function ends, even after an error.
    """
    study, console = load_study(file), screen()
    folder = out or Path("studies") / study.name

    def start(cells: Sequence[Cell]) -> Generator[Ended | None]:
        noise = calibrated(study, console) if cells else {}
        return _in_processes(study, folder, cells, noise, workers, console)

    _complete(study, folder, start, console)
    console.print(f"folder {folder}")


@dataclass(frozen=True)
class Comparison:
    """A finished study; everything in it is also in its folder."""

    folder: Path
    runs: tuple[RunResult, ...]
    arms: tuple[ArmSummary, ...]  # means over seeds with their intervals
    verdict: str  # sentences on the best arm and the arms that differ from the baseline

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row for each run; pandas must be installed."""
        return data_frame(list(map(asdict, self.runs)))

    def report(self, out: Path | str | None = None) -> Path:
        """Verify all ledgers, and write one HTML page, by default report.html in the folder."""
        return write_report(self.folder, out)

    def draw(self, out: Path | str | None = None) -> list[Path]:
        """Write charts as PNG and SVG, by default into `charts` in the folder; return the files."""
        return write_charts(self.folder, out)


@checked_arguments
def compare(
    population: Population,
    task: Task | Callable[[int], Task],
    mechanism: Mechanism,
    arms: Mapping[str, Mapping[str, Any]],
    *,
    local: LocalTraining | None = None,
    server: ServerOptimizer | None = None,
    seeds: int | Sequence[int] = 5,
    baseline: str | None = None,
    accuracies: Sequence[float] = (),
    out: Path | str | None = None,
    name: str = "study",
    evaluate_every: int = 1,
    personalisation: Personalisation | None = None,
    trackers: Sequence[Tracker | OnRound] = (),
    engine: Engine | None = None,
    quiet: bool = False,
    resume: bool = False,
) -> Comparison:
    """Run several settings at equal privacy, on the same users and seeds, and compare them.

    Cohorts and noise of a seed are the same in every arm, so differences are paired.

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

    Arguments that `simulate` also has mean the same here, except for the first two:

    * task: model and loss, or a function from a seed to them.
    * mechanism: calibrated; mechanisms of arms must have the same (ε, δ).
    * arms: by name, the arguments among task, mechanism, local and server that an arm replaces.
      Without a server all arms have the default for `mechanism`, for any norms of their own.
    * seeds: the seeds, or their number, counted from 0.
    * baseline: the arm to compare with; by default the first.
    * accuracies: levels; the first round in which an arm reached each is reported.
    * personalisation: as for `simulate`, for all arms; their personal parameters may differ.
    * trackers: follow every run, one after another, under its study, arm and seed.
    * out: folder of the study; by default studies/NAME, where NAME is `name`.
    * resume: continue the study in that folder; finished runs are not repeated. Runs of other
      settings, layers or weights are refused. With this argument the caller confirms that data and
      code, which `study.toml` does not describe, are the same as before.

    A FedprivError names the arms that do not fit together or differ in privacy.
    """
    _, server = method_left_out(mechanism, local, server)
    shared = {"task": task, "mechanism": mechanism, "local": local, "server": server}
    methods = _Methods(population, shared, arms, personalisation)
    seeds = plain_numbers(seeds)
    check_types(seeds=(seeds, int | Iterable))
    numbers = tuple(range(seeds)) if isinstance(seeds, int) else plain_numbers(tuple(seeds))
    sections = {"output": {"evaluate_every": evaluate_every}, "engine": engine}
    study = study_of_settings(
        methods.tables(next(iter(numbers), 0), **sections),
        name=name,
        seeds=numbers,
        baseline=baseline or "",
        accuracies=tuple(accuracies),
    )
    folder, followers = Path(out or Path("studies") / name), named(trackers)
    console = screen(quiet=quiet)
    if (folder / STUDY).exists() and not resume:
        raise InvalidValueError(
            f"{folder} holds a study already; continue it with resume=True if nothing changed, "
            "or choose another folder"
        )

    def start(cells: Sequence[Cell]) -> Generator[Ended]:
        # No run starts before all arms are built.
        firsts = study.cells[: len(study.arms)]
        arms = {cell.arm.name: methods.prepared(study, cell)[0] for cell in firsts}
        _check_comparable(arms, console)
        return ((cell, run(cell)) for cell in cells)

    def run(cell: Cell) -> RunResult:
        experiment, transport = methods.prepared(study, cell)
        followed = replace(experiment, trackers=followers)
        return _run_prepared(study, cell, folder, followed, transport)

    result = _complete(study, folder, start, console)
    return Comparison(folder, result.runs, result.arms, " ".join(verdict(study, result.arms)))


@dataclass(frozen=True)
class _Methods:
    """The training of each arm of a comparison, as values; errors name the arm."""

    population: Population
    shared: Mapping[str, Any]  # task, mechanism, local and server of all arms
    arms: Mapping[str, Mapping[str, Any]]  # the values that an arm replaces
    personalisation: Personalisation | None
    roads: SharedRoads = field(default_factory=SharedRoads)

    def __post_init__(self) -> None:
        for arm, changes in self.arms.items():
            check_types(**{f"arm {arm!r}": (changes, Mapping)})
            for key in changes:
                if key not in self.shared:
                    choices = known_names(key, self.shared)
                    raise InvalidValueError(f"arm {arm!r} sets {key!r}; {choices}")

    def of(self, arm: str, seed: int) -> Method:
        """Return the method of an arm; its task may depend on the seed."""
        chosen = {**self.shared, **self.arms[arm]}
        if callable(make := chosen["task"]) and not isinstance(make, torch.nn.Module):
            chosen["task"] = make(seed)
        check_types(
            task=(chosen["task"], Task),
            mechanism=(chosen["mechanism"], Mechanism),
            local=(chosen["local"], LocalTraining | None),
            server=(chosen["server"], ServerOptimizer),
        )
        chosen["local"], _ = method_left_out(chosen["mechanism"], chosen["local"], chosen["server"])
        return Method(**chosen, personalisation=self.personalisation)

    def tables(self, seed: int, **sections: Any) -> dict[str, dict[str, Any]]:
        """Return the settings of each arm, for the file of a study."""
        tables, first_arms = dict[str, dict[str, Any]](), dict[str, str]()
        for arm, changes in self.arms.items():
            with _naming_arm(arm):
                config = settings_of("arm", self.population, self.of(arm, seed), **sections)
            table = config.model_dump(exclude_none=True, exclude={"name"})
            twin = self.arms[first_arms.setdefault(repr(table), arm)]
            is_same = changes.keys() == twin.keys() and all(changes[k] is twin[k] for k in changes)
            if not is_same:  # the arms differ in values that no table describes
                table["model"]["options"]["arm"] = arm
            tables[arm] = table
        return tables

    def prepared(self, study: Study, cell: Cell) -> tuple[Experiment, InProcessTransport]:
        """Return the experiment of a run, and a transport that trains in this process."""
        with _naming_arm(cell.arm.name):
            method = self.of(cell.arm.name, cell.seed)
            config = study.config_of(cell)
            return on_population(config, "", self.population, (), method, self.roads)


def _complete(
    study: Study,
    folder: Path,
    start: Callable[[Sequence[Cell]], Generator[Ended | None]],
    console: Console,
) -> ReadStudy:
    """Run the missing runs of a study, show progress, and print how its arms compare.

    Results of finished runs are written even after an error or an interrupt. The generator from
    `start` yields each run that ended, and None from time to time.
    """
    RunFolder(folder).refuse_run()
    if holds_results_alone(folder):
        sentence = f"{folder} holds results of a study without its runs; choose another folder"
        raise InvalidValueError(sentence)
    finished = finished_runs(study, folder)
    runs = start([cell for cell in study.cells if cell not in finished])
    folder.mkdir(parents=True, exist_ok=True)
    with held(folder, f"{folder} holds a study"):
        if finished_runs(study, folder).keys() != finished.keys():
            raise InvalidValueError(
                f"{folder} has runs that another process finished meanwhile; run the command again"
            )
        write_atomically(folder / STUDY, study_toml(study, folder).encode())
        try:
            with _progress(study, folder, finished, console) as show, closing(runs):
                for ended in runs:
                    if ended:
                        finished[ended[0]] = ended[1]
                    show()
        finally:
            result = read_study(folder)
            write_atomically(folder / "results.json", f"{results_json(result)}\n".encode())
            write_atomically(folder / ALL_RESULTS, results_text(result.runs).encode())
    print_study(result, console)
    return result


@contextmanager
def _progress(
    study: Study, folder: Path, finished: Mapping[Cell, RunResult], console: Console
) -> Iterator[Callable[[], None]]:
    """Show a line for each arm and target; yield a function that updates all lines."""
    with displayed(console) as display:
        lines = {}
        for target, arm in itertools.product(study.targets, study.arms):
            cells = [Cell(arm, target, seed) for seed in study.seeds]
            suffix = f" at ε = {target.epsilon:g}" if len(study.targets) > 1 else ""
            total = len(cells) * study.config_of(cells[0]).rounds
            lines[display.add(f"{arm.name}{suffix}", total)] = cells

        def show() -> None:
            for line, cells in lines.items():
                results = [finished[cell] for cell in cells if cell in finished]
                accuracies = [run.accuracy for run in results if run.accuracy is not None]
                mean = f"accuracy {statistics.fmean(accuracies):.1%}" if accuracies else ""
                metrics = [RunFolder(folder / c.path).metrics for c in cells if c not in finished]
                rounds = sum(run.rounds for run in results)  # without reading their files each time
                rounds += sum(path.read_bytes().count(b"\n") for path in metrics if path.exists())
                display.update(line, rounds, f"{len(results)} of {len(cells)} seeds", mean)
            display.tell()

        show()
        yield show


@contextmanager
def _naming_arm(arm: str) -> Iterator[None]:
    """Name the arm in errors."""
    try:
        yield
    except FedprivError as error:
        raise type(error)(f"arm {arm!r}: {error}") from error


def calibrated(study: Study, console: Console | None = None) -> dict[tuple[Arm, Target], float]:
    """Return the noise multiplier of every arm at every target, from the plan of its runs.

    A console shows a warning if δ is too large.
    """
    noise, experiments = {}, dict[str, Experiment]()
    for arm, target in itertools.product(study.arms, study.targets):
        config = study.config_of(Cell(arm, target, study.seeds[0]))
        with _naming_arm(arm.name):
            population, _ = _loaded(config.simulated_data.model_dump_json())
            experiment, _ = on_population(config, str(config.run), population)
        noise[arm, target] = experiment.plan.noise_multiplier
        experiments[arm.name] = experiment
    _loaded.cache_clear()
    _check_comparable(experiments, console)
    return noise


def _check_comparable(arms: Mapping[str, Experiment], console: Console | None) -> None:
    """Refuse arms without measurements, or with different neighbouring relations.

    Warnings are about the settings of the arm with the most users.
    """
    for name, arm in arms.items():
        with _naming_arm(name):
            check_measured(arm)
    relations = {arm.plan.sampling.event().relation: name for name, arm in arms.items()}
    if len(relations) > 1:
        (relation, name_1), (relation_2, name), *_ = relations.items()
        raise InvalidValueError(
            f"arms {name_1!r} and {name!r} are for {relation} and {relation_2} neighbours; their ε "
            "are not comparable, so all arms must be for the same"
        )
    if console:
        for note in of_settings(max(arms.values(), key=lambda arm: arm.plan.sampling.population)):
            console.print(f"warning: {note}", style="yellow")


def _run_prepared(
    study: Study, cell: Cell, folder: Path, experiment: Experiment, transport: InProcessTransport
) -> RunResult:
    """Run an experiment as a cell of a study; its result is the last file written.

    The files of an interrupted run are moved aside, since a ledger is never deleted. This refunds
    nothing: with the same seed, the run draws the same cohorts and noise and makes the same
    releases again.
    """
    run, config, console = RunFolder(folder / cell.path), experiment.config, Console(quiet=True)
    if run.path.exists():
        names = (run.path.with_name(f"{run.path.name}.cut-{n}") for n in itertools.count(1))
        run.path.rename(next(name for name in names if not name.exists()))
    changes = {"checkpoint_every": config.rounds, "simulation_only": True}
    config = config.changed(output=changes)
    setup = RunSetup(config, experiment.plan.run, run, run.ledger, resuming=False)
    outcome = in_process(setup, replace(experiment, config=config), transport, console)
    result = _result(study.digest_of(cell, folder), cell, experiment.plan, outcome, run)
    write_atomically(run.path / RESULT, results_text([result]).encode())
    return result


def _result(digest: str, cell: Cell, plan: TrainingPlan, outcome: Run, run: RunFolder) -> RunResult:
    rounds, collected = run.results(), run.collected()
    queries = plan.mechanism.query.events[: len(plan.groups)]
    seconds = statistics.median(row.simulation_only_seconds or math.inf for row in rounds)
    names = {field.name for field in fields(RunResult)} & {field.name for field in fields(RunEnd)}
    shared: dict[str, Any] = {name: getattr(outcome, name) for name in names}
    figures = [f"simulation_only_{n}" for n in ("clipped", "update_norms", "signal_to_noise")]
    shared |= {name: means([getattr(row, name) for row in collected]) for name in figures}
    return RunResult(
        arm=cell.arm.name,
        target_epsilon=cell.target.epsilon,
        seed=cell.seed,
        settings=digest,
        rounds=len(rounds),
        noise_multiplier=plan.noise_multiplier,
        evaluations=tuple((row.round, row.accuracy) for row in rounds if row.accuracy is not None),
        clipping_norms=rounds[-1].clipping_norms,
        noise_stddevs={query.group: query.noise_stddev for query in queries},
        simulation_only_users_per_second=plan.sampling.expected_cohort_size / seconds,
        **shared,
    )


def _in_processes(
    study: Study,
    folder: Path,
    cells: Sequence[Cell],
    noise: Mapping[tuple[Arm, Target], float],
    workers: int | None,
    console: Console,
) -> Generator[Ended | None]:
    """Run cells in processes; yield each cell that ended, and None from time to time."""
    failures = []
    try:
        with _pool(max(1, min(workers or torch.get_num_threads(), len(cells)))) as pool:
            started = [
                pool.submit(run_cell, study, cell, folder, noise[cell.arm, cell.target])
                for cell in cells
            ]
            running = set(started)
            while running:
                ended, running = wait(running, _REFRESH, FIRST_COMPLETED)
                for future in sorted(ended, key=started.index):
                    error = future.exception()
                    if not isinstance(error, WorkerError):
                        yield future.result()
                        continue
                    failures.append(str(error))
                    console.print(f"failed: {error}", style="red")
                yield None
    except BrokenProcessPool as error:
        raise WorkerError(
            "a process of the study was killed, perhaps because memory ran out; "
            "finished runs are kept, and the same command continues the others"
        ) from error
    if failures:
        rest = f"; {len(failures) - 1} more failed" if len(failures) > 1 else ""
        raise WorkerError(f"{failures[0]}{rest}")


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool whose processes end if the block raises or this process dies."""
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads and locks
    with ProcessPoolExecutor(workers, context, _begin) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def run_cell(study: Study, cell: Cell, folder: Path, noise_multiplier: float) -> Ended:
    """Run a cell of a study from its start, with noise from `calibrated`; WorkerError if it fails.

    It uses one thread, so that results do not depend on the number of workers.
    """
    try:
        config = study.config_of(cell).with_noise(noise_multiplier)
        population, roads = _loaded(config.simulated_data.model_dump_json())
        with computing_with(1):
            prepared = on_population(config, str(config.run), population, roads=roads)
            return cell, _run_prepared(study, cell, folder, *prepared)
    except Exception as error:
        kind = "" if isinstance(error, FedprivError) else f"{type(error).__name__}: "
        raise WorkerError(f"arm {cell.arm.name!r}, seed {cell.seed}: {kind}{error}") from error


@lru_cache(maxsize=1)
def _loaded(data: str) -> tuple[Population, SharedRoads]:
    """Return the population of a section `data` in JSON, and roads for this process's runs."""
    section = DataSection.model_validate_json(data)
    return load_population(section.name, section.options), SharedRoads()
