"""Commands of studies: one experiment under several settings at equal privacy."""

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to those of the command line."""
    app.command()(compare)


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
