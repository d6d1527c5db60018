"""`fedpriv compare`: all runs of a study, side by side, and what they say."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from rich.console import Console

from fedpriv.data.population import Population
from fedpriv.data.registry import load_population
from fedpriv.errors import FedprivError, InvalidValueError
from fedpriv.experiment import on_population
from fedpriv.federated.checkpoint import write_atomically
from fedpriv.report.studies import print_study, results_csv, results_json, runs_csv
from fedpriv.studies import Arm, Study, Target, read_study
from fedpriv.studies.file import load_study, study_toml
from fedpriv.studies.reading import STUDY, finished_result, holds_results_alone
from fedpriv.studies.results import ALL_RESULTS, all_results

from .study_display import show
from .study_run import Task
from .study_workers import cores, run_all


def run_study(file: Path, out: Path | None, workers: int | None) -> None:
    """Run what is missing of a study, and print how its arms compare.

    Guarantees: no run begins before all arms could be built and calibrated; a finished run is not
    run again; of a run that was cut short nothing counts.

    Args:
        file: the study, TOML.
        out: folder of the study; by default studies/NAME.
        workers: how many runs at once; by default as many as there are cores.

    Raises:
        FedprivError: something is wrong with the input; the message says what.
    """
    study = load_study(file)
    folder = out or Path("studies") / study.name
    if holds_results_alone(folder):
        raise InvalidValueError(
            f"{folder} holds the results of a study without its runs; choose another folder"
        )
    console = Console()
    missing = [cell for cell in study.cells if finished_result(folder, study, cell) is None]
    noise = calibrated(study) if missing else {}
    with _held(folder):
        write_atomically(folder / STUDY, study_toml(study).encode())
        tasks = [Task(study, cell, folder, noise[cell.arm, cell.target]) for cell in missing]
        try:
            if tasks:
                steps = run_all(tasks, workers or cores())
                with closing(steps):
                    show(read_study(folder), steps, console)
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


def calibrated(study: Study) -> dict[tuple[Arm, Target], float]:
    """Noise multiplier of every arm at every target, from the plan that its runs will have.

    Raises:
        FedprivError: an arm cannot be built, or no noise keeps it within a target.
    """
    noise: dict[tuple[Arm, Target], float] = {}
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
