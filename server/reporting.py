"""`fedpriv report`: one HTML page of a run or a study, from its folder and its ledgers."""

import webbrowser
from pathlib import Path

from fedpriv.errors import InvalidValueError
from fedpriv.report.page import Page, render, write_page
from fedpriv.report.run_page import page_of_run
from fedpriv.report.study_page import page_of_study
from fedpriv.studies import read_study
from fedpriv.studies.reading import STUDY, holds_results_alone

from .folder import RunFolder
from .reading import read_run


def write_report(folder: Path, out: Path | None, *, show: bool) -> Path:
    """Write the report of a run or a study and return the file.

    Args:
        folder: of the run or the study.
        out: the file; by default report.html in the folder.
        show: whether to open it in the browser of the machine.

    Raises:
        InvalidValueError: the folder holds no run or study, or the file cannot be written.
        DataError: metrics or results cannot be read.
        LedgerError: a ledger cannot be believed, or does not have the charge of a release.
        UnsupportedEventError: the plan's accountant has no analysis of a ledger.
    """
    path = out or folder / "report.html"
    write_page(render(_page(folder)), path)
    if show:
        webbrowser.open(path.absolute().as_uri())
    return path


def _page(folder: Path) -> Page:
    if (folder / STUDY).exists():
        read = read_study(folder)
        if holds_results_alone(folder):
            raise InvalidValueError(
                f"{folder} holds the results of a study without its runs and ledgers, which a page "
                "verifies; --figures draws what results can show"
            )
        return page_of_study(
            read, {cell: read_run(read.run_folder(cell)) for cell, _ in read.finished}
        )
    plan = RunFolder(folder).plan
    if not plan.exists():
        raise InvalidValueError(
            f"{folder} holds no run and no study; {plan.name} and {STUDY} are absent"
        )
    return page_of_run(read_run(folder))
