"""The Flower ServerApp: the run of an experiment, with workers or nodes that Flower reaches.

Where the experiment has a section `federation`, the SuperNodes are its enrolled nodes and hold the
users' data. Otherwise they are workers among which the configured population is spread.
"""

import logging
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from flwr.app import DEFAULT_TTL, Context
from flwr.serverapp import Grid, ServerApp
from pydantic import model_validator
from rich.console import Console

from fedpriv.build import Enrolled, Experiment, simulated
from fedpriv.config import Count, FederationSection, Section, checked
from fedpriv.data.population import UserStore
from fedpriv.errors import InvalidValueError
from fedpriv.logs import LogFormat, configure
from fedpriv.privacy.round import PrivacyRecords, Transport
from fedpriv.run.run import Follow, Run, RunSetup, carry_out, released_text
from fedpriv.server.collection import prices, task_of, welcomes
from fedpriv.server.enrolment import Enrolment
from fedpriv.server.flower_grid import (
    EnrolledNodes,
    GridTransport,
    Headers,
    shards,
    simulated_workers,
)
from fedpriv.training.rounds import OnRound
from fedpriv.wire import Welcome, encode_welcome
from fedpriv.wire.flower import SIMULATED, WELCOME, Simulated

_log = logging.getLogger(__name__)


def run_on_nodes(
    setup: RunSetup,
    section: FederationSection,
    grid: Grid,
    stopping: threading.Event,
    console: Console,
    follow: Follow,
) -> None:
    """Run or resume an experiment on the enrolled SuperNodes of a grid, and print how it went.

    Of the section, the keys count that say where users are and how long nodes are waited for; how
    they connect is Flower's. When `stopping` is set, the round that is collected is abandoned.
    """
    enrolment = Enrolment.load(Path(section.enrolment))
    users = Enrolled(enrolment.population_id, enrolment.population)
    experiment, least = setup.on_nodes(section, users), section.least_nodes
    if least > len(enrolment.nodes):
        raise InvalidValueError(
            f"federation.least_nodes is {least}; {len(enrolment.nodes)} nodes are enrolled"
        )
    welcome_of = welcomes(experiment.config, enrolment)

    def headers(node: str) -> Headers:
        return {WELCOME: encode_welcome(welcome_of(node)).SerializeToString()}

    def hosted(experiment: Experiment, records: PrivacyRecords) -> Transport:
        return GridTransport(
            grid,
            enrolment.hosting,
            EnrolledNodes(grid, enrolment, least, stopping),
            headers,
            prices(experiment.plan, records),
            section.deadline_seconds,
            stopping,
            fixed=section.fixed_length,
        )

    carry_out(setup, experiment, hosted, console, follow, clock=None)


@dataclass(frozen=True)
class GridSimulation:
    """A simulation that is ready to start, with its users spread among the workers of a grid."""

    setup: RunSetup
    experiment: Experiment
    users: UserStore  # all
    workers: int

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= self.users.population:
            raise InvalidValueError(
                f"workers is {self.workers}; it must be from 1 to {self.users.population}, the "
                "number of users"
            )

    @classmethod
    def of(cls, setup: RunSetup, workers: int) -> Self:
        """Load the users of an experiment, and refuse what cannot be run or resumed."""
        setup.refuse_true_figures("on workers")
        experiment, here = simulated(setup.config, setup.run, setup.spent)
        setup.refuse_other_plan(experiment.plan)
        return cls(setup, experiment, here.users, workers)

    def run(
        self,
        grid: Grid,
        stopping: threading.Event,
        console: Console,
        follow: Follow | None = None,
    ) -> None:
        """Run it to its end on the workers of a grid, and write and print as `fedpriv simulate`.

        When `stopping` is set, the round that is collected is abandoned. WorkerError: a worker does
        not do its part.
        """
        plan, config, workers = self.experiment.plan, self.experiment.config, self.workers
        data, engine = config.data, config.engine
        trained = engine.device, engine.chunk_mebibytes, engine.activations
        loaded = {SIMULATED: Simulated(data.name, data.options, *trained).encode()}
        present = simulated_workers(grid, plan.population, self.users, workers, loaded, stopping)
        # Which users a worker has follows from its number.
        no_users = np.empty(0, np.int64)
        welcome = Welcome(plan.population, plan.sampling.population, no_users, task_of(config))
        headers = loaded | {WELCOME: encode_welcome(welcome).SerializeToString()}

        def hosted(experiment: Experiment, records: PrivacyRecords) -> Transport:
            return GridTransport(
                grid,
                shards(self.users.population, workers),
                lambda: present,
                lambda _worker: headers,
                prices(experiment.plan, records),
                DEFAULT_TTL,
                stopping,
                required=True,
            )

        carry_out(self.setup, self.experiment, hosted, console, follow)


class RunConfig(Section):
    """What Flower calls the run config; docs/flower.md says what its keys mean."""

    experiment: str  # path of a TOML file, absolute or relative to the app; or the TOML itself
    set: str = ""  # assignments "a.b=value", separated by semicolons
    out: str = ""  # empty: a new folder under runs/ where the ServerApp runs
    resume: bool = False
    workers: Count = 2  # SuperNodes among whom simulated users are spread

    @model_validator(mode="after")
    def _resume_needs_out(self) -> Self:
        if self.resume and not self.out:
            raise ValueError("resume is true; out must then be given")
        return self

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Read a run config, and refuse what is not legal."""
        return checked(cls, given, "run config")

    def setup(self) -> RunSetup:
        """Read the experiment, and the folder of the run if it is to go on."""
        assignments = [part.strip() for part in self.set.split(";") if part.strip()]
        out = Path(self.out) if self.out else None
        if "\n" not in self.experiment:
            # Flower puts the folder of the app in front of the import path.
            found = (Path(folder) / self.experiment for folder in sys.path)
            file = next((path for path in found if path.is_file()), Path(self.experiment))
            return RunSetup.of(file, assignments, out, resume=self.resume)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "experiment.toml"
            file.write_text(self.experiment, encoding="utf-8")
            return RunSetup.of(file, assignments, out, resume=self.resume)


app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume an experiment; FedprivError if its input is wrong or the run cannot go on."""
    configure(LogFormat.TEXT)
    logging.getLogger("flwr").propagate = False  # it has a handler of its own
    logging.getLogger("httpx").setLevel(logging.WARNING)  # Flower's calls, several a second
    config = RunConfig.of(context.run_config)
    setup, stopping, console = config.setup(), threading.Event(), Console()
    console.print(f"folder {setup.folder.path.absolute()}", soft_wrap=True, highlight=False)
    section = setup.config.federation
    try:
        if section is None:
            GridSimulation.of(setup, config.workers).run(grid, stopping, console, _log_rounds)
        else:
            run_on_nodes(setup, section, grid, stopping, console, _log_rounds)
    finally:
        stopping.set()


def _log_rounds(experiment: Experiment, first: int, run: Callable[[OnRound], Run]) -> Run:
    """Log a line for each release."""
    rounds = experiment.plan.rounds
    _log.info("round %d of %d is next", first, rounds)
    return run(lambda result: _log.info(released_text(result, rounds)))
