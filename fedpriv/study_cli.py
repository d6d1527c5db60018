"""Commands of studies: one experiment under several settings at equal privacy, and reports."""

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.errors import InvalidValueError


def register(app: typer.Typer) -> None:
    """Add the commands to those of the command line."""
    for command in (compare, report):
        app.command()(command)


def compare(
    file: Annotated[Path, typer.Argument(help="the study, TOML", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="folder of the study", show_default="studies/NAME")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="runs at once", show_default="cores")
    ] = None,
) -> None:
    """Run an experiment under several settings that all cost the same ε, and compare them.

    Runs that are finished in the folder are not run again.
    """
    from fedpriv.server.comparing import run_study

    run_study(file, out, workers)


def report(
    folder: Annotated[Path, typer.Argument(help="folder of a run or a study", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="file to write", show_default="report.html in FOLDER")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="open it in the browser")] = False,
    figures: Annotated[
        Path | None,
        typer.Option(help="draw a study as PNG and SVG into this folder; no page", metavar="DIR"),
    ] = None,
) -> None:
    """Write one HTML page of a run or a study, which opens offline; ledgers are verified first."""
    if figures is not None:
        if out or show:
            raise InvalidValueError("--figures writes no page; leave out --out and --open")
        from fedpriv.report.studies import write_study_figures
        from fedpriv.studies import read_study

        for file in write_study_figures(read_study(folder), figures):
            print(file)  # noqa: T201
        return
    from fedpriv.server.reporting import write_report

    print(write_report(folder, out, show=show))  # noqa: T201
