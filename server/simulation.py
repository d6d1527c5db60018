"""`fedpriv simulate`: a whole run on simulated users, from a configuration to its figures."""

import math
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedpriv.experiment import Experiment, simulated
from fedpriv.federated.books import Books
from fedpriv.federated.transport import Transport
from fedpriv.report.tables import format_epsilon

from .announcing import announced
from .beginning import Beginning, warn
from .drawing import draw
from .evaluation import Evaluator
from .result import print_result
from .run import Cadence, Outcome, RoundRow, conduct, state_to_start_from
from .watching import watched

Hosted = Callable[[Experiment, Books], Transport]
"""Makes the transport to the users of an experiment, once its books are open."""


def run_simulation(file: Path, assignments: list[str], out: Path | None, *, resume: bool) -> None:
    """Run or resume an experiment in this process and print how it went.

    Args:
        file: the experiment, TOML.
        assignments: "a.b=value" overrides.
        out: folder of the run; by default a new one under runs/.
        resume: go on with the run in `out`, or start it if there is none.

    Raises:
        FedprivError: something is wrong with the input; the message says what.
    """
    beginning = Beginning.of(file, assignments, out, resume=resume)
    experiment, transport = simulated(beginning.config, beginning.run, beginning.spent)
    reached: Transport = transport
    if experiment.config.output.simulation_only:
        reached = watched(transport, experiment.plan, beginning.folder.append_simulation_only)
    carry_out(beginning, experiment, lambda _experiment, _books: reached, Console())


Follow = Callable[[Generator[RoundRow, None, Outcome], Experiment, int], Outcome]
"""Drives the rounds of an experiment from one on, and tells somebody of each."""


def carry_out(
    beginning: Beginning,
    experiment: Experiment,
    hosted: Hosted,
    console: Console,
    follow: Follow | None = None,
    clock: Callable[[], float] | None = time.monotonic,
) -> None:
    """Run an experiment to its end, with all that it writes and prints.

    Args:
        beginning: how it begins or goes on.
        experiment: what is run.
        hosted: makes the transport to the users.
        console: where to print.
        follow: is told of each round; None: a progress bar.
        clock: seconds, to time the rounds of a simulation; None in a deployment.

    Raises:
        FedprivError: the run cannot go on; the message says why.
    """
    folder, ledger = beginning.folder, beginning.ledger
    warn(experiment, console)
    beginning.write_plan(experiment)
    participation = folder.participation_of(ledger)
    population, budget = experiment.plan.population, experiment.budget
    with folder.held(), Books.open(ledger, participation, population, budget) as books:
        state = state_to_start_from(folder, experiment.plan, books, experiment.initial_state)
        if beginning.resuming:
            console.print(f"resuming {folder.path} at round {state.round}")
        output = experiment.config.output
        rows = conduct(
            folder,
            experiment.plan,
            state,
            hosted(experiment, books),
            books,
            experiment.entropy,
            Evaluator(experiment.task, experiment.held_out, experiment.device),
            Cadence(output.evaluate_every, output.checkpoint_every),
            clock,
        )
        with announced(rows, experiment, folder, state.round) as told:
            outcome = (follow or partial(_show, console=console))(told, experiment, state.round)
        print_result(experiment, folder, ledger, outcome, books, console)
    draw(folder, experiment)


def _show(
    rows: Generator[RoundRow, None, Outcome],
    experiment: Experiment,
    first: int,
    *,
    console: Console,
) -> Outcome:
    """Drive the run under a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    expected = experiment.plan.sampling.expected_cohort_size
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(
            experiment.plan.run, total=experiment.plan.rounds, completed=first, figures=""
        )
        accuracy = ""
        while True:
            try:
                row = next(rows)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            if row.test_accuracy is not None:
                accuracy = f"accuracy {row.test_accuracy:.1%}  "
            # From the expected cohort, since the realised one is private.
            speed = expected / (row.simulation_only_seconds or math.inf)
            private = "".join(f"{text}  " for text in row.private_metrics)
            spent = f"ε {format_epsilon(row.epsilon)}"
            figures = f"{accuracy}{private}{spent}  {speed:,.0f} users/s"
            progress.update(task, completed=row.round + 1, figures=figures)
