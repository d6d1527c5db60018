"""A run: rounds, evaluation, metrics, callbacks and checkpoints, in one folder.

`conduct` is the loop, the same in a simulation and in a deployment. `run_rounds` conducts an
experiment in its folder, and `carry_out` is a whole run around it, with all that it prints.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.numpy import save

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.pricing import weakest_arithmetic, weakest_randomness
from fedpriv.build import Experiment
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.ledger import Ledger
from fedpriv.privacy.round import PrivacyRecords, Transport
from fedpriv.report.run_page import write_run_figures
from fedpriv.report.tables import format_epsilon
from fedpriv.run.evaluation import Evaluation, Evaluator
from fedpriv.run.folder import RunFolder, held
from fedpriv.run.setup import RunSetup
from fedpriv.training.checkpoint import (
    Checkpoint,
    checkpoints,
    resume,
    save_checkpoint,
    write_atomically,
)
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import OnRound, RoundResult, ServerState, Stop, train

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a run ended: why, with which state, and how good its model is."""

    stop: Stop
    state: ServerState
    evaluation: Evaluation


Hosted = Callable[[Experiment, PrivacyRecords], Transport]
"""Makes the transport to the users of an experiment, once its records are open."""
Follow = Callable[[Experiment, int, Callable[[OnRound], Outcome]], Outcome]
"""Shows a run: gets the first round to come, and the function that runs it with an observer."""


def state_to_start_from(
    folder: RunFolder, plan: TrainingPlan, records: PrivacyRecords, initial: ServerState
) -> ServerState:
    """State of the newest checkpoint, or the initial state; it must fit the plan and the ledger."""
    found = checkpoints(folder.checkpoints)
    return resume(found[-1], plan, records.ledger) if found else initial


def conduct(
    folder: RunFolder,
    experiment: Experiment,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    on_round: OnRound,
    clock: Callable[[], float] | None = None,
) -> Outcome:
    """Run an experiment to its end or to the end of its budget, writing everything into a folder.

    A line of metrics is written after each release, and then the checkpoint, before `on_round` is
    called and the next round begins. So if every round has a checkpoint, a crash leaves at most one
    round that was charged and is in no checkpoint. A run that is resumed repeats the rounds since
    its last checkpoint as new attempts, with new charges. The last round always has a checkpoint.
    `clock` gives the seconds that time the rounds of a simulation; it is None in a deployment.
    """
    plan, output = experiment.plan, experiment.config.output
    evaluate = Evaluator(experiment.task, experiment.held_out, experiment.device)

    def keep() -> None:
        checkpoint = Checkpoint(state, plan.digest, records.ledger.head)
        save_checkpoint(folder.checkpoints, checkpoint)

    rounds = train(plan, state, transport, records, experiment.entropy)
    while True:
        began = clock() if clock else 0.0
        try:
            state, result = next(rounds)
        except StopIteration as end:
            stop: Stop = end.value
            break
        seconds = clock() - began if clock else None
        result = replace(result, simulation_only_seconds=seconds)
        if state.round % output.evaluate_every == 0 or state.round == plan.rounds:
            measured = evaluate(state.model)
            result = replace(result, loss=measured.loss, accuracy=measured.accuracy)
        folder.append_metrics(asdict(result))
        if state.round % output.checkpoint_every == 0:
            keep()
        on_round(result)
    keep()
    tensors = {name: np.asarray(p, order="C") for name, p in state.model.items()}
    write_atomically(folder.model, save(tensors))
    return Outcome(stop, state, evaluate(state.model))


def run_rounds(
    setup: RunSetup,
    experiment: Experiment,
    hosted: Hosted,
    follow: Follow,
    clock: Callable[[], float] | None,
) -> Outcome:
    """Start or resume an experiment in its folder, and run it to its end; see `carry_out`."""
    folder, plan, output = setup.folder, experiment.plan, experiment.config.output
    if output.tensorboard and find_spec("tensorboard") is None:
        raise InvalidValueError(
            "output.tensorboard is true, but tensorboard cannot be imported; "
            "pip install 'fedpriv[tensorboard]' installs it"
        )
    setup.write_plan(experiment)
    record = folder.participation_of(setup.ledger)
    with (
        held(folder.plan, f"{folder.path} holds a run"),
        PrivacyRecords.open(setup.ledger, record, plan.population, experiment.budget) as records,
        ExitStack() as stack,
    ):
        state = state_to_start_from(folder, plan, records, experiment.initial_state)
        callbacks = dict(experiment.on_round)
        if output.tensorboard:
            events = stack.enter_context(_event_files(folder.tensorboard, state.round))
            callbacks = {"tensorboard": events, **callbacks}
        transport = hosted(experiment, records)

        def run(show: OnRound) -> Outcome:
            def on_round(result: RoundResult) -> None:
                _tell(callbacks, replace(result, simulation_only_seconds=None))
                show(result)

            return conduct(folder, experiment, state, transport, records, on_round, clock)

        return follow(experiment, state.round, run)


def _tell(callbacks: Mapping[str, OnRound], result: RoundResult) -> None:
    """Call each callback; one that raises is logged, and called again after the next round.

    A service that is down must not cost a run what it has spent.
    """
    for name, callback in callbacks.items():
        try:
            callback(result)
        except Exception as error:
            kind = type(error).__name__
            _log.warning("callback %s raised %s in round %d: %s", name, kind, result.round, error)


@contextmanager
def _event_files(folder: Path, first: int) -> Iterator[OnRound]:
    """A callback that writes TensorBoard's event files; complete when the block is left."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow

    # Events of rounds that a run repeats after a crash are hidden by those that are written now.
    with SummaryWriter(str(folder), purge_step=first + 1) as writer:

        def write(result: RoundResult) -> None:
            for name, value in result.scalars.items():
                writer.add_scalar(name, value, result.number)

        yield write


def carry_out(
    setup: RunSetup,
    experiment: Experiment,
    hosted: Hosted,
    console: Console,
    follow: Follow | None = None,
    clock: Callable[[], float] | None = time.monotonic,
) -> Outcome:
    """Run an experiment to its end, with all that it writes and prints.

    Callbacks are called after every round; they are not told how long it took. `follow` shows each
    round, by default in a progress bar; `clock` is as for `conduct`.
    """

    def shown(experiment: Experiment, first: int, run: Callable[[OnRound], Outcome]) -> Outcome:
        if setup.resuming:
            console.print(f"resuming {setup.folder.path} at round {first}")
        if follow:
            return follow(experiment, first, run)
        with _progress(experiment, first, console) as show:
            return run(show)

    _warn(experiment, console)
    outcome = run_rounds(setup, experiment, hosted, shown, clock)
    results, budget = setup.folder.results(), experiment.budget
    _print_result(setup, experiment, outcome, results, console)
    folder, name = setup.folder.path, experiment.plan.run
    write_run_figures(results, name, budget.delta, budget.epsilon, folder)
    return outcome


@contextmanager
def _progress(experiment: Experiment, first: int, console: Console) -> Iterator[OnRound]:
    """A progress bar, in a terminal or a notebook, that moves with each result."""
    text, plan, last = TextColumn("{task.fields[figures]}"), experiment.plan, ""
    columns = "{task.description}", BarColumn(), MofNCompleteColumn(), text, TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        line = progress.add_task(plan.run, total=plan.rounds, completed=first, figures="")

        def show(result: RoundResult) -> None:
            nonlocal last
            if result.accuracy is not None:
                last = f"accuracy {result.accuracy:.1%}"
            seconds = result.simulation_only_seconds or math.inf
            # From the expected cohort, since the realised one is private.
            speed = f"{plan.sampling.expected_cohort_size / seconds:,.0f} users/s"
            shown = (last, *result.metrics_text, f"ε {format_epsilon(result.epsilon)}", speed)
            progress.update(line, completed=result.number, figures="  ".join(filter(None, shown)))

        yield show


def released_text(result: RoundResult, rounds: int) -> str:
    """One line on a release, for a log."""
    accuracy = () if result.accuracy is None else (f"accuracy {result.accuracy:.1%}",)
    spent = f"ε {format_epsilon(result.epsilon)} at δ {result.delta:g}"
    released = f"round {result.number} of {rounds} released"
    return ", ".join((released, *accuracy, *result.metrics_text, spent))


def _warn(experiment: Experiment, console: Console) -> None:
    """Say what the experiment's settings do to its guarantee."""
    delta, population = experiment.budget.delta, experiment.plan.sampling.population
    if delta >= 1.0 / population:
        console.print(
            f"warning: δ is {delta:g}; it should be below 1/N = {1.0 / population:.3g}, since "
            "publishing one random user's data whole satisfies δ = 1/N",
            style="yellow",
        )
    if experiment.config.privacy.unsafe_no_privacy:
        consequence = "no budget limits this run"
        if experiment.plan.noise_multiplier == 0.0:
            consequence = "there is no noise, and no ε holds for this run"
        console.print(f"warning: unsafe_no_privacy is set; {consequence}", style="red")


def _print_result(
    setup: RunSetup,
    experiment: Experiment,
    outcome: Outcome,
    results: list[RoundResult],
    console: Console,
) -> None:
    """Print accuracy beside the (ε, δ) of the ledger."""
    privacy, plan, evaluation = experiment.config.privacy, experiment.plan, outcome.evaluation
    with Ledger.open(setup.ledger) as ledger:
        spent, charges, head = ledger.spent(), tuple(ledger.charges()), ledger.head
    of_run = [charge.event for charge in charges if charge.run == plan.run]
    loss = epsilon_of(spent, privacy.delta, privacy.accountant)
    table = Table(title=plan.run, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if evaluation.accuracy is not None:
        table.add_row("accuracy on held-out rows", f"{evaluation.accuracy:.2%}")
    table.add_row("loss on held-out rows", f"{evaluation.loss:.4f}")
    for text in results[-1].metrics_text if results else ():
        table.add_row("private metric before the last round", text)
    table.add_row("user-level (ε, δ)", f"({format_epsilon(loss.epsilon)}, {privacy.delta:g})")
    if len(of_run) < len(charges):
        alone = epsilon_of(of_run, privacy.delta, privacy.accountant)
        table.add_row("of which this run alone", format_epsilon(alone.epsilon))
    if of_run:
        table.add_row("what it means", loss.assumptions)
        table.add_row("randomness", str(weakest_randomness(charges)))
        table.add_row("sums and noise", str(weakest_arithmetic(charges)))
    stopped = "" if outcome.stop is Stop.ROUNDS else f": stopped, {outcome.stop}"
    rounds = f"{outcome.state.round} of {plan.rounds}, {len(of_run)} charged{stopped}"
    table.add_row("rounds", rounds)
    clipping = experiment.config.clipping
    clipped = f"{clipping.strategy} clipping"
    if clipping.groups:
        clipped = f"{len(plan.groups)} vector groups in {len(clipping.groups)} parts"
    table.add_row(
        "mechanism",
        f"q = {plan.sampling.sampling_probability:g} of N = {plan.sampling.population} users, "
        f"z = {plan.noise_multiplier:.4g}, {clipped}{' that adapts' if plan.adaptive else ''}",
    )
    table.add_row("ledger", f"{setup.ledger}\nhead {head.count}:{head.hash}")
    table.add_row("folder", str(setup.folder.path))
    console.print(table)
