"""Studies: several settings at equal privacy over seeds, from Python values or from a file."""

import itertools
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from fedpriv.build import Experiment, settings_of
from fedpriv.data.population import Population
from fedpriv.engine.task import Task
from fedpriv.errors import InvalidValueError, known_names, writing
from fedpriv.mechanism import Mechanism
from fedpriv.privacy.round import LocalTraining
from fedpriv.report.studies import print_study, results_json
from fedpriv.run.folder import RunFolder, held
from fedpriv.run.reader import write_report
from fedpriv.run.simulate import FEDAVG, experiment_of, frame
from fedpriv.run.study_runs import Ended, calibrated, in_processes, naming_arm, run_prepared
from fedpriv.studies import ArmSummary, Cell, ReadStudy, RunResult, Study, read_study
from fedpriv.studies.results import (
    ALL_RESULTS,
    STUDY,
    finished_runs,
    holds_results_alone,
    results_text,
    verdict,
)
from fedpriv.studies.study import load_study, study_of_settings, study_toml
from fedpriv.training.checkpoint import write_atomically
from fedpriv.training.optimizers import ServerOptimizer

if TYPE_CHECKING:
    import pandas as pd

_Parts = tuple[Task, Mechanism, LocalTraining, ServerOptimizer]


def run_study(file: Path, out: Path | None, workers: int | None) -> None:
    """Run what is missing of a study, and print how its arms compare.

    Guarantees: no run begins before all arms could be built and calibrated; a finished run is not
    run again; of a run that was cut short nothing counts; a run that fails does not stop the
    others; no process is left when this ends, however it ends.

    Raises:
        WorkerError: a run failed, which is reported once all others ended, or a process was killed.
        FedprivError: something is wrong with the input; the message says what.
    """
    study, console = load_study(file), Console()
    folder = out or Path("studies") / study.name

    def start(missing: Sequence[Cell]) -> Generator[Ended | None]:
        noise = calibrated(study) if missing else {}
        return in_processes(study, folder, missing, noise, workers, console)

    _complete(study, folder, start, console)
    console.print(f"folder {folder}", highlight=False)


@dataclass(frozen=True)
class Comparison:
    """A study that was run; everything in it is also in its folder.

    Attributes:
        folder: where it is written.
        runs: the result of each run.
        arms: what the runs say of each arm: means over seeds with their intervals.
        verdict: which arm is best, and which differ from the baseline, in sentences.
    """

    folder: Path
    runs: tuple[RunResult, ...]
    arms: tuple[ArmSummary, ...]
    verdict: str

    def to_pandas(self) -> "pd.DataFrame":
        """One row for each run; pandas must be installed."""
        return frame(asdict(each) for each in self.runs)

    def report(self, out: Path | str | None = None) -> Path:
        """Verify all ledgers, write the report as one HTML file, and return its path.

        By default it is report.html in the folder of the study.
        """
        return write_report(self.folder, Path(out) if out else None)


def compare(
    population: Population,
    task: Task | Callable[[int], Task],
    mechanism: Mechanism,
    arms: Mapping[str, Mapping[str, Any]],
    *,
    local: LocalTraining,
    server: ServerOptimizer = FEDAVG,
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
        accuracies: levels; the first round in which an arm reached them is reported.
        out: folder of the study; by default studies/NAME.
        name: of the study.
        evaluate_every: rounds between evaluations on the held-out rows.
        device: where to train.
        quiet: print nothing.

    Raises:
        FedprivError: arms do not fit together or differ in privacy; the message says what.
    """
    given = {"task": task, "mechanism": mechanism, "local": local, "server": server}
    for arm, changes in arms.items():
        for key in changes:
            if key not in given:
                raise InvalidValueError(f"arm {arm!r} sets {key!r}; {known_names(key, given)}")

    def parts(arm: str, seed: int) -> _Parts:
        chosen: dict[str, Any] = {**given, **arms[arm]}
        task = chosen["task"] if isinstance(chosen["task"], Task) else chosen["task"](seed)
        return task, chosen["mechanism"], chosen["local"], chosen["server"]

    numbers = tuple(range(seeds) if isinstance(seeds, int) else seeds)

    def settings(arm: str) -> dict[str, object]:
        of_arm = parts(arm, next(iter(numbers), 0))
        rounds = of_arm[1].rounds
        if rounds is None:
            raise InvalidValueError(f"the mechanism of arm {arm!r} is not calibrated; it must be")
        config = settings_of(
            "arm",
            population,
            *of_arm,
            rounds=rounds,
            privacy={"noise_multiplier": None},  # is calibrated
            output={"evaluate_every": evaluate_every},
            engine={"device": device},
        )
        return config.model_dump(exclude_none=True, exclude={"name"})

    study = study_of_settings(
        {arm: settings(arm) for arm in arms},
        name=name,
        seeds=numbers,
        baseline=baseline or "",
        accuracies=tuple(accuracies),
    )

    def prepared(cell: Cell) -> Experiment:
        with naming_arm(cell.arm):
            of_cell = parts(cell.arm.name, cell.seed)
            return experiment_of(study.config_of(cell), population, *of_cell)

    def run(cell: Cell) -> Ended:
        experiment = prepared(cell)
        transport = experiment.in_process(population.users)
        return cell, run_prepared(study, cell, folder, experiment, transport)

    def start(missing: Sequence[Cell]) -> Generator[Ended]:
        for cell in study.cells[: len(study.arms)]:
            prepared(cell)  # no run starts before all arms could be built
        return (run(cell) for cell in missing)

    folder = Path(out or Path("studies") / name)
    read = _complete(study, folder, start, Console(quiet=quiet))
    return Comparison(folder, read.runs, read.arms, " ".join(verdict(study, read.arms)))


def _complete(
    study: Study,
    folder: Path,
    start: Callable[[Sequence[Cell]], Generator[Ended | None]],
    console: Console,
) -> ReadStudy:
    """Run what is missing of a study, show how far it is, and print how its arms compare.

    Meanwhile other processes are kept from the folder. The results of the finished runs are written
    in the end, even after an error or an interrupt. What `start` returns yields each run that
    ended, and None now and then.
    """
    if holds_results_alone(folder):
        raise InvalidValueError(
            f"{folder} holds the results of a study without its runs; choose another folder"
        )
    finished = finished_runs(study, folder)
    runs = start([cell for cell in study.cells if cell not in finished])
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with held(folder, f"{folder} holds a study"):
        write_atomically(folder / STUDY, study_toml(study).encode())
        try:
            with _progress(study, folder, finished, console) as show, closing(runs):
                for ended in runs:
                    if ended:
                        finished[ended[0]] = ended[1]
                    show()
        finally:
            read = read_study(folder)
            write_atomically(folder / "results.json", results_json(read).encode())
            write_atomically(folder / ALL_RESULTS, results_text(read.runs).encode())
    print_study(read, console)
    return read


@contextmanager
def _progress(
    study: Study, folder: Path, finished: Mapping[Cell, RunResult], console: Console
) -> Iterator[Callable[[], None]]:
    """A line for each arm and target; call what is yielded to bring it up to date."""
    figures = TextColumn("{task.fields[figures]}")
    columns = "{task.description}", BarColumn(), figures, TimeRemainingColumn()
    with Progress(*columns, console=console) as display:
        lines = {}
        for target, arm in itertools.product(study.targets, study.arms):
            cells = [Cell(arm, target, seed) for seed in study.seeds]
            at = f" at ε = {target.epsilon:g}" if len(study.targets) > 1 else ""
            total = len(cells) * study.config_of(cells[0]).rounds
            lines[display.add_task(f"{arm.name}{at}", total=total, figures="")] = cells

        def show() -> None:
            for line, cells in lines.items():
                results = [finished[cell] for cell in cells if cell in finished]
                accuracies = [each.accuracy for each in results if each.accuracy is not None]
                mean = f", accuracy {statistics.fmean(accuracies):.1%}" if accuracies else ""
                metrics = [RunFolder(folder / cell.path).metrics for cell in cells]
                rounds = sum(path.read_bytes().count(b"\n") for path in metrics if path.exists())
                seeds = f"{len(results)} of {len(cells)} seeds{mean}"
                display.update(line, completed=rounds, figures=seeds)

        show()
        yield show
