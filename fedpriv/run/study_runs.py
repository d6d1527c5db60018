"""The runs of a study: calibrated together, run one by one, in processes side by side."""

import itertools
import math
import multiprocessing
import os
import signal
import statistics
import threading
import tomllib
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic

import tomli_w
import torch
from rich.console import Console

from fedpriv.build import Experiment, on_population
from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.engine.transport import InProcessTransport, computing_with
from fedpriv.errors import FedprivError, WorkerError
from fedpriv.run.diagnostics import ObservedTransport
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import Outcome, run_rounds
from fedpriv.run.setup import RunSetup
from fedpriv.studies import Arm, Cell, RunResult, Study, Target
from fedpriv.studies.results import RESULT, means, results_text
from fedpriv.training.checkpoint import write_atomically

Ended = tuple[Cell, RunResult]
_REFRESH = 0.5  # seconds between looks at the metrics of unfinished runs


@contextmanager
def naming_arm(arm: Arm) -> Iterator[None]:
    """Name the arm in errors."""
    try:
        yield
    except FedprivError as error:
        raise type(error)(f"arm {arm.name!r}: {error}") from error


def calibrated(study: Study) -> dict[tuple[Arm, Target], float]:
    """Noise multiplier of every arm at every target, from the plan that its runs will have.

    Raises:
        FedprivError: an arm cannot be built, or no noise keeps it within a target.
    """
    noise = {}
    for arm, target in itertools.product(study.arms, study.targets):
        config = study.config_of(Cell(arm, target, study.seeds[0]))
        with naming_arm(arm):
            population = _loaded(tomli_w.dumps(config.data.model_dump()))
            experiment, _ = on_population(config, str(config.run), population)
        noise[arm, target] = experiment.plan.noise_multiplier
    _loaded.cache_clear()
    return noise


def run_cell(
    study: Study, cell: Cell, folder: Path, noise_multiplier: float, population: Population
) -> RunResult:
    """Run a cell of a study from its start, with noise from `calibrated`; see `run_prepared`."""
    config = study.config_of(cell)
    privacy = config.privacy.model_copy(update={"noise_multiplier": noise_multiplier})
    config = config.model_copy(update={"privacy": privacy})
    return run_prepared(study, cell, folder, *on_population(config, str(config.run), population))


def run_prepared(
    study: Study, cell: Cell, folder: Path, experiment: Experiment, transport: InProcessTransport
) -> RunResult:
    """Run an experiment as a cell of a study; its result is the last file to be written.

    What an interrupted run left there is moved aside, as a ledger is never deleted. That gives
    nothing back that was spent: with the same seed the run draws the same cohorts and noise and
    releases the same once more.
    """
    run, plan, config = RunFolder(folder / cell.path), experiment.plan, experiment.config
    if run.path.exists():
        names = (run.path.with_name(f"{run.path.name}.cut-{n}") for n in itertools.count(1))
        run.path.rename(next(name for name in names if not name.exists()))
    output = config.output.model_copy(update={"checkpoint_every": config.rounds})
    experiment = replace(experiment, config=config.model_copy(update={"output": output}))
    observed = ObservedTransport(transport, plan, run.append_simulation_only)
    outcome = run_rounds(
        RunSetup(experiment.config, plan.run, run, run.ledger, resuming=False),
        experiment,
        lambda _experiment, _records: observed,
        lambda _experiment, _first, rounds: rounds(lambda _result: None),
        monotonic,
    )
    result = _result(study, cell, experiment, outcome, run)
    write_atomically(run.path / RESULT, results_text([result]).encode())
    return result


def _result(
    study: Study, cell: Cell, experiment: Experiment, outcome: Outcome, run: RunFolder
) -> RunResult:
    plan, rounds, collected = experiment.plan, run.results(), run.collected()
    queries = plan.mechanism.query.events[: len(plan.groups)]
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
        evaluations=tuple((row.number, row.accuracy) for row in rounds if row.accuracy is not None),
        clipping_norms=rounds[-1].clipping_norms,
        noise_stddevs={query.group: query.noise_stddev for query in queries},
        simulation_only_users_per_second=plan.sampling.expected_cohort_size / seconds,
        simulation_only_clipped=means([row.simulation_only_clipped for row in collected]),
        simulation_only_update_norms=means([row.simulation_only_update_norms for row in collected]),
        simulation_only_signal_to_noise=means(
            [row.simulation_only_signal_to_noise for row in collected]
        ),
    )


def in_processes(
    study: Study,
    folder: Path,
    missing: Sequence[Cell],
    noise: Mapping[tuple[Arm, Target], float],
    workers: int | None,
    console: Console,
) -> Generator[Ended | None]:
    """Run cells in processes; yields each that ended, and None whenever some time has passed."""
    failures = []
    try:
        with _pool(max(1, min(workers or torch.get_num_threads(), len(missing)))) as pool:
            running = {
                pool.submit(_run_in_worker, study, cell, folder, noise[cell.arm, cell.target])
                for cell in missing
            }
            while running:
                ended, running = wait_for(running, _REFRESH, FIRST_COMPLETED)
                for future in ended:
                    error = future.exception()
                    if not isinstance(error, WorkerError):
                        yield future.result()
                        continue
                    failures.append(str(error))
                    console.print(f"failed: {error}", style="red", markup=False)
                yield None
    except BrokenProcessPool as error:
        raise WorkerError(
            "a process that ran the study was killed, perhaps because memory was short; "
            "finished runs are kept, and the same command goes on with the others"
        ) from error
    if failures:
        more = f"; {len(failures) - 1} more failed" if len(failures) > 1 else ""
        raise WorkerError(f"{failures[0]}{more}")


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that all end, whatever they are doing, if the block raises or this process dies."""
    context = multiprocessing.get_context("spawn")  # a fork would copy torch's threads and locks
    with ProcessPoolExecutor(workers, context, _begin) as pool:
        try:
            yield pool
        except BaseException:
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _begin() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _run_in_worker(study: Study, cell: Cell, folder: Path, noise_multiplier: float) -> Ended:
    """Run a cell with one thread, so that results do not depend on the number of workers."""
    try:
        population = _loaded(tomli_w.dumps(study.config_of(cell).data.model_dump()))
        with computing_with(1):
            return cell, run_cell(study, cell, folder, noise_multiplier, population)
    except Exception as error:
        kind = "" if isinstance(error, FedprivError) else f"{type(error).__name__}: "
        raise WorkerError(f"arm {cell.arm.name!r}, seed {cell.seed}: {kind}{error}") from error


@lru_cache(maxsize=1)
def _loaded(data: str) -> Population:
    """The population of a section `data`, as TOML, kept for the next run of this process."""
    section = tomllib.loads(data)
    return load_population(section["name"], section["options"])
