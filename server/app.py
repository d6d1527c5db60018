"""The Flower ServerApp: the run of an experiment, with workers or nodes that Flower reaches.

Where the experiment has a section `federation`, the SuperNodes are its enrolled nodes and hold the
users' data. Otherwise they are workers among whom the configured population is spread.
"""

import logging
import tempfile
import threading
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Self

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from pydantic import ValidationError, model_validator
from rich.console import Console

from fedpriv.choices import LogFormat
from fedpriv.errors import InvalidValueError
from fedpriv.experiment import Experiment
from fedpriv.flower import check_installed
from fedpriv.logs import configure
from fedpriv.sections import Count, Section

from .beginning import Beginning
from .grid_deployment import run_enrolled
from .grid_simulation import GridSimulation
from .result import released_text
from .run import Outcome, RoundRow

app = ServerApp()
_log = logging.getLogger(__name__)
_BUNDLE = Path(__file__).parents[1]


class RunConfig(Section):
    """What Flower calls the run config.

    Attributes:
        experiment: path of a TOML file, absolute or relative to the bundle; or the TOML itself.
        set: assignments "a.b=value" that replace keys, separated by semicolons.
        out: folder of the run; empty: a new one under runs/ where the ServerApp runs.
        resume: go on with the run in `out`, or start it if there is none.
        workers: among how many SuperNodes simulated users are spread.

    Raises:
        pydantic.ValidationError: a value is of another type, a key is unknown, or `resume` is given
            without `out`.
    """

    experiment: str
    set: str = ""
    out: str = ""
    resume: bool = False
    workers: Count = 2

    @model_validator(mode="after")
    def _must_know_where_to_go_on(self) -> Self:
        if self.resume and not self.out:
            raise ValueError("resume is true; out must then be given")
        return self

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Read a run config.

        Raises:
            InvalidValueError: it is not legal.
        """
        try:
            return cls.model_validate(dict(given))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidValueError(f"run config: {where or 'a value'}: {first['msg']}") from error

    def beginning(self) -> Beginning:
        """Read the experiment, and the folder of the run if it is to go on.

        Raises:
            InvalidValueError: a file cannot be read or used.
        """
        assignments = [part.strip() for part in self.set.split(";") if part.strip()]
        out = Path(self.out) if self.out else None
        if "\n" not in self.experiment:
            file = _BUNDLE / self.experiment
            return Beginning.of(file, assignments, out, resume=self.resume)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "experiment.toml"
            file.write_text(self.experiment, encoding="utf-8")
            return Beginning.of(file, assignments, out, resume=self.resume)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume an experiment.

    Raises:
        FedprivError: something is wrong with the input, or the run cannot go on.
    """
    configure(LogFormat.TEXT)
    logging.getLogger("flwr").propagate = False  # it has a handler of its own
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Flower's calls, several a second
    check_installed()
    given = RunConfig.of(context.run_config)
    beginning, stopping, console = given.beginning(), threading.Event(), Console()
    console.print(f"folder {beginning.folder.path.absolute()}", soft_wrap=True, highlight=False)
    section = beginning.config.federation
    try:
        if section is None:
            GridSimulation.at(beginning, given.workers).run(grid, stopping, console, _say)
        else:
            run_enrolled(beginning, section, grid, stopping, console, _say)
    finally:
        stopping.set()


def _say(rows: Generator[RoundRow, None, Outcome], experiment: Experiment, first: int) -> Outcome:
    """Log a line for each release."""
    _log.info("round %d of %d is next", first, experiment.plan.rounds)
    while True:
        try:
            _log.info(released_text(next(rows), experiment.plan.rounds))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
