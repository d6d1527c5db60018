"""Reading the folder of a study, finished or not."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.studies.file import load_study
from fedpriv.studies.results import ALL_RESULTS, RunResult, read_all_results, read_result
from fedpriv.studies.study import RUNS, Cell, Study
from fedpriv.studies.summary import ArmSummary, summarise

STUDY = "study.toml"


@dataclass(frozen=True)
class ReadStudy:
    """A study and the runs of it that are finished.

    Attributes:
        folder: where it lies.
        study: what was asked.
        finished: the results there are, in the order of the study's cells.
    """

    folder: Path
    study: Study
    finished: tuple[tuple[Cell, RunResult], ...]

    @property
    def runs(self) -> tuple[RunResult, ...]:
        """The results there are."""
        return tuple(result for _, result in self.finished)

    @property
    def missing(self) -> int:
        """Number of runs that are not finished."""
        return len(self.study.cells) - len(self.finished)

    @cached_property
    def arms(self) -> tuple[ArmSummary, ...]:
        """A summary for each target and arm with a finished run."""
        return summarise(self.study, self.runs)

    def run_folder(self, cell: Cell) -> Path:
        """The folder of a run: that of `fedpriv simulate`, and a few files more."""
        return self.folder / cell.path


def read_study(folder: Path) -> ReadStudy:
    """Read the folder of a study; runs that are not finished are left out.

    A folder without its runs, as it is kept beside code, is read from the file of all results.

    Raises:
        InvalidValueError: the folder holds no study.
        DataError: a result cannot be read, or is of other settings than the study has now.
    """
    file = folder / STUDY
    if not file.exists():
        raise InvalidValueError(f"{folder} holds no study; {STUDY} is absent")
    study = load_study(file)
    finished = []
    if holds_results_alone(folder):
        kept = {(r.arm, r.target_epsilon, r.seed): r for r in read_all_results(folder)}
        results = [kept.get((c.arm.name, c.target.epsilon, c.seed)) for c in study.cells]
    else:
        results = [read_result(folder / cell.path) for cell in study.cells]
    for cell, result in zip(study.cells, results, strict=True):
        if result is not None:
            finished.append((cell, _of_settings(folder / cell.path, result, study, cell)))
    return ReadStudy(folder, study, tuple(finished))


def holds_results_alone(folder: Path) -> bool:
    """Whether the folder of a study holds the results of its runs and not the runs."""
    return (folder / ALL_RESULTS).exists() and not (folder / RUNS).exists()


def finished_result(folder: Path, study: Study, cell: Cell) -> RunResult | None:
    """The result of a run; None if it is not finished.

    Raises:
        DataError: the result cannot be read, or is of other settings.
    """
    path = folder / cell.path
    result = read_result(path)
    return None if result is None else _of_settings(path, result, study, cell)


def _of_settings(path: Path, result: RunResult, study: Study, cell: Cell) -> RunResult:
    if result.settings != study.digest_of(cell):
        raise DataError(
            f"{path} holds a run of other settings than the study has now; "
            "move it away or choose another folder"
        )
    return result
