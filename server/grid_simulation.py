"""A simulation whose users are spread among the workers of a Flower grid."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from flwr.app import DEFAULT_TTL
from flwr.serverapp import Grid
from rich.console import Console

from fedpriv.data.store import UserStore
from fedpriv.errors import InvalidValueError, WorkerError
from fedpriv.experiment import Experiment, simulated
from fedpriv.federated.books import Books
from fedpriv.federated.transport import PartialSum, RoundRequest, Transport
from fedpriv.flower import SIMULATED, WELCOME, Simulated
from fedpriv.wire import Welcome

from .asked import Hosting
from .beginning import Beginning
from .grid import GridTransport, Nodes, welcome_header
from .grid_nodes import shards, simulated_workers
from .simulation import Follow, carry_out
from .standing import prices, task_of


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

    beginning: Beginning
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
        return cls.at(Beginning.of(file, assignments, out, resume=resume), workers)

    @classmethod
    def at(cls, beginning: Beginning, workers: int) -> Self:
        """Load the users of an experiment, and refuse what cannot be run or resumed.

        Errors as for `simulated` and `Beginning.refuse_other_plan`, and those of the class.
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
