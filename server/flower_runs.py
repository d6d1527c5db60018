"""Keeps what fedpriv starts from calling anybody: Flower and Ray report on their users.

A run on Flower nodes that hold enrolled users.

A simulation whose users are spread among the workers of a Flower grid.

`fedpriv simulate --engine flower`: Flower's simulation on Ray, begun and ended with the call.

The Flower ServerApp: the run of an experiment, with workers or nodes that Flower reaches.

Where the experiment has a section `federation`, the SuperNodes are its enrolled nodes and hold the
users' data. Otherwise they are workers among whom the configured population is spread.
"""

import logging
import math
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import numpy as np
import torch
from flwr.app import DEFAULT_TTL, ConfigRecordValues, Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from pydantic import ValidationError, model_validator
from rich.console import Console

from fedpriv.build import Experiment, simulated
from fedpriv.config import Count, FederationSection, Section
from fedpriv.data.population import UserStore
from fedpriv.errors import InvalidValueError, WorkerError
from fedpriv.logs import LogFormat, configure
from fedpriv.privacy.round import Books, PartialSum, RoundRequest, Transport
from fedpriv.run.run import Follow, Outcome, carry_out, released_text
from fedpriv.run.setup import RunSetup
from fedpriv.server.enrolment import Hosting, enrolled_experiment
from fedpriv.server.flower_grid import (
    EnrolledNodes,
    GridTransport,
    Headers,
    Nodes,
    shards,
    simulated_workers,
    welcome_header,
)
from fedpriv.server.status import prices, task_of, welcomes
from fedpriv.training.rounds import RoundResult
from fedpriv.wire import Welcome
from fedpriv.wire.flower import SIMULATED, WELCOME, Simulated, check_installed

_OFF = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # what Ray will do, and warns of until then
}


def switch_off_reports() -> None:
    """Switch telemetry, update checks, run-time installation and usage statistics off.

    For this process and those that it starts; Flower reads it when it is imported, so call it
    before.
    """
    os.environ.update(_OFF)


def require_flower() -> None:
    """Refuse where Flower or Ray is not installed.

    Raises:
        InvalidValueError: one of them is not.
    """
    missing = [name for name in ("flwr", "ray") if find_spec(name) is None]
    if missing:
        raise InvalidValueError(
            f"{' and '.join(missing)} cannot be imported; pip install 'fedpriv[flower]' installs it"
        )


def run_enrolled(
    beginning: RunSetup,
    section: FederationSection,
    grid: Grid,
    stopping: threading.Event,
    console: Console,
    follow: Follow,
) -> None:
    """Run or resume an experiment on the SuperNodes of a grid, and print how it went.

    Of the section the keys are read that say where users are and how long nodes are waited for;
    how they connect is Flower's.

    Args:
        beginning: how it begins or goes on.
        section: where users are.
        grid: of the run.
        stopping: when it is set, the round that is collected is abandoned.
        console: where to print.
        follow: as for `carry_out`.

    Raises:
        FedprivError: something is wrong with the input, or the run cannot go on.
    """
    experiment, enrolment = enrolled_experiment(beginning, section)
    if section.least_nodes > len(enrolment.nodes):
        raise InvalidValueError(
            f"federation.least_nodes is {section.least_nodes}; {len(enrolment.nodes)} nodes are "
            "enrolled"
        )
    welcome_of = welcomes(experiment.config, enrolment)

    def headers(node: str) -> Headers:
        return {WELCOME: welcome_header(welcome_of(node))}

    def hosted(experiment: Experiment, books: Books) -> Transport:
        present = EnrolledNodes(grid, enrolment, section.least_nodes, stopping)
        return GridTransport(
            grid,
            Nodes(enrolment.hosting, present, headers),
            prices(experiment.plan, books),
            section.deadline_seconds,
            stopping,
            fixed=section.fixed_length,
        )

    carry_out(beginning, experiment, hosted, console, follow, clock=None)


@dataclass(frozen=True)
class EveryWorker(Transport):
    """A transport over workers of a simulation, who must all answer.

    What fails for a user is a zero at its worker; a worker that does not answer lacks the code, or
    has died, and to go on without its users would be another experiment.

    Attributes:
        transport: asks the workers.
        hosting: which worker hosts which users.
    """

    transport: Transport
    hosting: Hosting

    def collect(self, request: RoundRequest) -> Iterator[PartialSum]:
        """Yield the sum of each worker with drawn users.

        Raises:
            WorkerError: one has not answered.
            StoppedError: it was asked to stop.
        """
        asked = self.hosting.drawn(request.users).keys()
        answered = set()
        for partial in self.transport.collect(request):
            answered.add(partial.node)
            yield partial
        if answered != asked:
            raise WorkerError(
                f"{len(answered)} of {len(asked)} workers answered in round {request.round}; all "
                "must"
            )


@dataclass(frozen=True)
class GridSimulation:
    """A simulation that is ready to begin on a grid.

    Attributes:
        beginning: how it begins or goes on.
        experiment: what is run.
        users: all enrolled users.
        workers: among how many they are spread.

    Raises:
        InvalidValueError: there are no workers, or more than users.
    """

    beginning: RunSetup
    experiment: Experiment
    users: UserStore
    workers: int

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= self.users.population:
            raise InvalidValueError(
                f"workers is {self.workers}; it must be from 1 to {self.users.population}, the "
                "number of users"
            )

    @classmethod
    def of(
        cls, file: Path, assignments: list[str], out: Path | None, workers: int, *, resume: bool
    ) -> Self:
        """Read an experiment; args and errors as for `run_simulation`, and those of the class."""
        return cls.at(RunSetup.of(file, assignments, out, resume=resume), workers)

    @classmethod
    def at(cls, beginning: RunSetup, workers: int) -> Self:
        """Load the users of an experiment, and refuse what cannot be run or resumed.

        Errors as for `simulated` and `RunSetup.refuse_other_plan`, and those of the class.
        """
        beginning.refuse_true_figures("on workers")
        experiment, here = simulated(beginning.config, beginning.run, beginning.spent)
        beginning.refuse_other_plan(experiment.plan)
        return cls(beginning, experiment, here.users, workers)

    def run(
        self,
        grid: Grid,
        stopping: threading.Event,
        console: Console,
        follow: Follow | None = None,
    ) -> None:
        """Run it to its end, with all that `fedpriv simulate` writes and prints.

        Args:
            grid: where the workers are.
            stopping: when it is set, the round that is collected is abandoned.
            console: where to print.
            follow: as for `carry_out`.

        Raises:
            WorkerError: a worker does not do its part.
            FedprivError: the run cannot go on; the message says why.
        """
        hosting = shards(self.users.population, self.workers)
        loaded = {SIMULATED: self._simulated.encode()}
        name = self.experiment.plan.population
        present = simulated_workers(grid, name, self.users, self.workers, loaded, stopping)
        headers = loaded | {WELCOME: self._welcome}

        def hosted(experiment: Experiment, books: Books) -> Transport:
            nodes = Nodes(hosting, lambda: present, lambda _worker: headers)
            price_of = prices(experiment.plan, books)
            asking = GridTransport(grid, nodes, price_of, DEFAULT_TTL, stopping)
            return EveryWorker(asking, hosting)

        carry_out(self.beginning, self.experiment, hosted, console, follow)

    @property
    def _simulated(self) -> Simulated:
        config = self.experiment.config
        data, engine = config.data, config.engine
        trained = engine.device, engine.chunk_mebibytes, engine.activations
        return Simulated(data.name, data.options, *trained)

    @property
    def _welcome(self) -> bytes:
        """What is trained; which users a worker has follows from its number."""
        plan, nobody = self.experiment.plan, np.empty(0, np.int64)
        task = task_of(self.experiment.config)
        return welcome_header(Welcome(plan.population, plan.sampling.population, nobody, task))


_CONNECT_SECONDS = 10.0


def simulate_on_ray(
    client_app: ClientApp,
    file: Path,
    assignments: list[str],
    out: Path | None,
    workers: int,
    *,
    resume: bool,
    follow: Follow | None = None,
) -> None:
    """As `server.simulation.run_simulation`, with the users spread among workers of Ray.

    Ray runs as `on_ray` has it. Call `switch_off_reports` before this module is imported.

    Guarantees: the input is checked before Ray is started; no process and no file but those of the
    run is left on this machine.

    Args:
        client_app: what the workers run; they import it by its name.
        file: the experiment, TOML.
        assignments: "a.b=value" overrides.
        out: folder of the run; by default a new one under runs/.
        workers: how many.
        resume: go on with the run in `out`, or start it if there is none.
        follow: as for `carry_out`.

    Raises:
        InvalidValueError: nobody answers at RAY_ADDRESS.
        WorkerError: a worker does not do its part, e.g. because fedpriv is not installed there.
        FedprivError: something is wrong with the input; the message says what.
    """
    simulation = GridSimulation.of(file, assignments, out, workers, resume=resume)
    server_app, stopping = ServerApp(), threading.Event()

    @server_app.main()
    def main(grid: Grid, _context: Context) -> None:
        simulation.run(grid, stopping, Console(), follow)

    gpus = torch.cuda.device_count() if simulation.experiment.device.type == "cuda" else 0
    try:
        on_ray(server_app, client_app, workers, workers, gpus)
    finally:
        stopping.set()


def on_ray(
    server_app: ServerApp, client_app: ClientApp, nodes: int, processes: int, gpus: int = 0
) -> None:
    """Run an app in Flower's simulation, on Ray that is started for it and ends with it.

    Where the environment variable RAY_ADDRESS says so, its processes are on a cluster that is up
    and stays up.

    Args:
        server_app: what this process runs.
        client_app: what nodes run.
        nodes: how many there are.
        processes: in how many, each with a core, they get their turns; of a cluster, all cores.
        gpus: how many these share.

    Guarantees: nobody else can use the Ray that is started here, although its ports are open to
    all.

    Raises:
        InvalidValueError: nobody answers at RAY_ADDRESS.
        WorkerError: Ray does not start, or breaks.
        Exception: whatever the ServerApp raises.
    """
    if "RAY_ADDRESS" in os.environ:
        _check_cluster(os.environ["RAY_ADDRESS"])
    else:
        _lock_ray()
    # Its pages on what a worker raised may hold users' data; what matters is in our own sentence.
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    # Paths of sockets must be short, which those of other temporary folders need not be.
    short = os.environ.get("RAY_TMPDIR", "/tmp")
    with tempfile.TemporaryDirectory(
        prefix="fedpriv-", dir=short, ignore_cleanup_errors=True
    ) as folder:
        os.environ["FLWR_HOME"] = folder  # where it writes an id, even of those it is not to report
        try:
            backend = _backend(processes, gpus, folder)
            run_simulation(server_app, client_app, nodes, backend_config=backend)
        except RuntimeError as error:  # Flower's, when Ray does not start or breaks
            cause = " ".join(str(_cause(error)).split())
            raise WorkerError(f"Ray cannot run the workers: {cause}") from error


def _backend(processes: int, gpus: int, folder: str) -> dict[str, dict[str, ConfigRecordValues]]:
    """What Flower is to ask of Ray: one core for each process, and shares of the GPUs."""
    of_ray: dict[str, ConfigRecordValues] = {"log_to_driver": False}
    if "RAY_ADDRESS" not in os.environ:
        of_ray |= {"num_cpus": processes, "_temp_dir": folder}
    share = gpu_share(gpus, processes)
    return {"init_args": of_ray, "client_resources": {"num_cpus": 1, "num_gpus": share}}


def gpu_share(gpus: int, workers: int) -> float:
    """Share of one GPU for each worker, so that all of them are placed at once.

    A worker trains on one GPU, and Ray places it on one: shares of 2/3 on two GPUs would leave the
    third of three workers waiting for ever.

    >>> [gpu_share(gpus, 3) for gpus in (0, 2, 3, 4)]
    [0.0, 0.5, 1.0, 1.0]

    Args:
        gpus: of the machine; 0 to train on its cores.
        workers: at least one.
    """
    return 1.0 / math.ceil(workers / gpus) if gpus else 0.0


def _lock_ray() -> None:
    """Let only processes that this one starts use its Ray.

    Ray's ports are open on all interfaces, and whoever reaches them could run code here.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # a process reads it once


def _check_cluster(address: str) -> None:
    """Refuse a HOST:PORT where nobody answers; Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not port.isdecimal():
        return  # one of the other forms that Ray knows
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InvalidValueError(
            f"RAY_ADDRESS is {address!r}, where no cluster of Ray answers: {error}"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """What lies behind errors of Flower, which only say that there was one."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error


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

    def beginning(self) -> RunSetup:
        """Read the experiment, and the folder of the run if it is to go on.

        Raises:
            InvalidValueError: a file cannot be read or used.
        """
        assignments = [part.strip() for part in self.set.split(";") if part.strip()]
        out = Path(self.out) if self.out else None
        if "\n" not in self.experiment:
            file = _BUNDLE / self.experiment
            return RunSetup.of(file, assignments, out, resume=self.resume)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "experiment.toml"
            file.write_text(self.experiment, encoding="utf-8")
            return RunSetup.of(file, assignments, out, resume=self.resume)


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


def _say(
    rows: Generator[RoundResult, None, Outcome], experiment: Experiment, first: int
) -> Outcome:
    """Log a line for each release."""
    _log.info("round %d of %d is next", first, experiment.plan.rounds)
    while True:
        try:
            _log.info(released_text(next(rows), experiment.plan.rounds))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
