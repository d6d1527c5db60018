"""Options that several commands of the command line share."""

from pathlib import Path
from typing import Annotated

import typer

from fedpriv.errors import InvalidValueError

ExperimentFile = Annotated[Path, typer.Argument(help="the experiment, TOML", show_default=False)]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", help="replace a key, e.g. clipping.norm=0.3; may be repeated"),
]
RunFolder = Annotated[
    Path | None, typer.Option("--out", help="folder of the run", show_default="runs/NAME-…")
]
Resume = Annotated[
    bool, typer.Option("--resume", help="go on with the run in --out, or start it there")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON object")]


def check_resume(out: Path | None, *, resume: bool) -> None:
    """Refuse to resume a run that is not named.

    Raises:
        InvalidValueError: there is no folder.
    """
    if resume and out is None:
        raise InvalidValueError("--resume needs --out, the folder of the run to go on with")
