"""`fedpriv serve`: the plan that was simulated, on real nodes."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console
from threadpoolctl import threadpool_limits

from fedpriv.errors import InvalidValueError
from fedpriv.federated.books import Books
from fedpriv.federated.loop import Stop

from .beginning import Beginning, warn
from .door import Door, door_of
from .drawing import draw
from .result import print_result
from .run import state_to_start_from
from .running import Deployment


def serve(
    file: Path,
    assignments: list[str],
    out: Path | None,
    *,
    resume: bool,
    insecure: bool,
    leave: bool,
) -> None:
    """Run or resume an experiment on the nodes that connect, and print how it went.

    SIGTERM and SIGINT end it cleanly: a round that is collected is abandoned without a charge, one
    that is charged is released, and a checkpoint is written. A second one ends it at once.

    Args:
        file: the experiment, TOML, with a section `federation`.
        assignments: "a.b=value" overrides.
        out: folder of the run; by default a new one under runs/.
        resume: go on with the run in `out`, or start it if there is none.
        insecure: plain text, on loopback only.
        leave: end when the run is over; otherwise go on serving ledger and status until stopped.

    Raises:
        FedprivError: something is wrong with the input, or the run cannot go on; the message says
            what.
    """
    console = Console()
    beginning = Beginning.of(file, assignments, out, resume=resume)
    section = beginning.config.federation
    if section is None:
        raise InvalidValueError(f"{file} has no section federation, which `fedpriv serve` needs")
    door = door_of(section, insecure=insecure)
    experiment, enrolment = beginning.on_nodes(section)
    warn(experiment, console)
    beginning.write_plan(experiment)
    folder, ledger = beginning.folder, beginning.ledger
    participation = folder.participation_of(ledger)
    population, budget = experiment.plan.population, experiment.budget
    with folder.held(), Books.open(ledger, participation, population, budget) as books:
        deployment = Deployment(experiment, section, enrolment, books, folder, ledger)
        _run(deployment, door, console, leave=leave)
    draw(folder, experiment)


def _run(deployment: Deployment, door: Door, console: Console, *, leave: bool) -> None:
    """Run all rounds and print the result; then, unless told to leave, serve until stopped."""
    experiment, books, folder = deployment.experiment, deployment.books, deployment.folder
    plan, enrolment = experiment.plan, deployment.enrolment
    state = state_to_start_from(folder, plan, books, experiment.initial_state)
    with (
        # Updates are added up in threads that are many already; more only wait for each other.
        threadpool_limits(1, "blas"),
        deployment.listening(door, state.round) as server,
        _until_asked(server.stop) as asked,
    ):
        console.print(
            f"{plan.run}: listening on {server.address}, {len(enrolment.nodes)} nodes and "
            f"{enrolment.population} users are enrolled, round {state.round} of {plan.rounds} is "
            f"next, folder {folder.path}",
            soft_wrap=True,
            highlight=False,
        )
        outcome = deployment.run(server, state)
        print_result(experiment, folder, deployment.ledger, outcome, books, console)
        if outcome.stop is not Stop.ASKED and not leave:
            console.print("serving ledger and status until stopped")
            asked.wait()


@contextmanager
def _until_asked(stop: Callable[[], None]) -> Iterator[threading.Event]:
    """Call `stop` and set the event at the first SIGTERM or SIGINT; a second has its old effect."""
    asked = threading.Event()
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in signals]

    def put_back() -> None:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)

    def handle(_number: int, _frame: FrameType | None) -> None:
        put_back()
        asked.set()
        stop()

    for number in signals:
        signal.signal(number, handle)
    try:
        yield asked
    finally:
        put_back()
