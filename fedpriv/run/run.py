"""A run: rounds, evaluation, metrics, callbacks and checkpoints, in one folder.

`conduct` is the loop, the same in a simulation and in a deployment; `carry_out` is a whole run
around it, with all that it writes and prints.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.numpy import save

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.pricing import weakest_arithmetic, weakest_randomness
from fedpriv.build import Experiment
from fedpriv.ledger.ledger import Head
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import PrivacyRecords, Transport
from fedpriv.report.run_page import write_run_figures
from fedpriv.report.tables import format_epsilon
from fedpriv.run.callbacks import event_files, require_tensorboard, tell
from fedpriv.run.evaluation import Evaluation, Evaluator
from fedpriv.run.folder import RunFolder
from fedpriv.run.setup import RunSetup
from fedpriv.training.checkpoint import (
    Checkpoint,
    checkpoints,
    resume,
    save_checkpoint,
    write_atomically,
)
from fedpriv.training.optimizers import Parameters
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import OnRound, RoundResult, ServerState, Stop, train

Evaluate = Callable[[Parameters], Evaluation]


@dataclass(frozen=True)
class Cadence:
    """How often things are done, in rounds.

    Attributes:
        evaluate: rounds between evaluations; the last round is always evaluated.
        checkpoint: rounds between checkpoints; the last round always has one.
    """

    evaluate: int
    checkpoint: int


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        stop: why.
        state: the server's state at the end.
        evaluation: the last model on held-out rows.
        private_metrics: those of the last round that was run, in words.
    """

    stop: Stop
    state: ServerState
    evaluation: Evaluation
    private_metrics: tuple[str, ...]


Rounds = Generator[RoundResult, None, Outcome]
Hosted = Callable[[Experiment, PrivacyRecords], Transport]
"""Makes the transport to the users of an experiment, once its records are open."""
Follow = Callable[[Rounds, Experiment, int], Outcome]
"""Drives the rounds of an experiment from one on, and shows each of them."""


def state_to_start_from(
    folder: RunFolder, plan: TrainingPlan, records: PrivacyRecords, initial: ServerState
) -> ServerState:
    """State of the newest checkpoint, or the initial state if there is none.

    Raises:
        CheckpointError: the checkpoint does not fit the plan or the ledger.
    """
    found = checkpoints(folder.checkpoints)
    return resume(found[-1], plan, records.ledger) if found else initial


def conduct(
    folder: RunFolder,
    plan: TrainingPlan,
    state: ServerState,
    transport: Transport,
    records: PrivacyRecords,
    entropy: Entropy,
    evaluate: Evaluate,
    cadence: Cadence,
    clock: Callable[[], float] | None = None,
    callbacks: Mapping[str, OnRound] | None = None,
) -> Rounds:
    """Run a plan to its end or to the end of its budget, writing everything into a folder.

    A line of metrics is written after each release, and then the checkpoint, before callbacks are
    called and the next round begins. So if every round has a checkpoint, a crash leaves at most one
    round that was charged and is in no checkpoint. A run that is resumed repeats the rounds since
    its last checkpoint as new attempts, with new charges.

    Args:
        folder: where to write; exists.
        plan: the plan.
        state: where to start, from `state_to_start_from`.
        transport: reaches the users.
        records: ledger, participation record and budget.
        entropy: where cohorts and noise come from.
        evaluate: measures a released model on rows of no enrolled user.
        cadence: how often to evaluate and to write checkpoints.
        clock: seconds, to time the rounds of a simulation; None in a deployment.
        callbacks: by name; they are not told how long a round took.

    Yields:
        The result of each round.
    """
    private_metrics: tuple[str, ...] = ()
    rounds = train(plan, state, transport, records, entropy)
    while True:
        began = clock() if clock else 0.0
        try:
            state, result = next(rounds)
        except StopIteration as end:
            stop: Stop = end.value
            break
        seconds = clock() - began if clock else None
        if state.round % cadence.evaluate == 0 or state.round == plan.rounds:
            measured = evaluate(state.model)
            result = replace(result, loss=measured.loss, accuracy=measured.accuracy)
        timed = replace(result, simulation_only_seconds=seconds)
        folder.append_metrics(asdict(timed))
        private_metrics = result.metrics_text
        if state.round % cadence.checkpoint == 0:
            _save(folder, plan, state, records.ledger.head)
        tell(callbacks or {}, result)
        yield timed
    _save(folder, plan, state, records.ledger.head)
    tensors = {name: np.asarray(p, order="C") for name, p in state.model.items()}
    write_atomically(folder.model, save(tensors))
    return Outcome(stop, state, evaluate(state.model), private_metrics)


def _save(folder: RunFolder, plan: TrainingPlan, state: ServerState, head: Head) -> None:
    save_checkpoint(folder.checkpoints, Checkpoint(state, plan.digest, head))


def carry_out(
    setup: RunSetup,
    experiment: Experiment,
    hosted: Hosted,
    console: Console,
    follow: Follow | None = None,
    clock: Callable[[], float] | None = time.monotonic,
) -> Outcome:
    """Run an experiment to its end, with all that it writes and prints.

    Args:
        setup: how it starts or goes on.
        experiment: what is run.
        hosted: makes the transport to the users.
        console: where to print.
        follow: shows each round; None: a progress bar.
        clock: seconds, to time the rounds of a simulation; None in a deployment.

    Raises:
        FedprivError: the run cannot go on; the message says why.
    """
    folder, ledger, plan = setup.folder, setup.ledger, experiment.plan
    output, budget = experiment.config.output, experiment.budget
    if output.tensorboard:
        require_tensorboard()
    warn(experiment, console)
    setup.write_plan(experiment)
    participation = folder.participation_of(ledger)
    with (
        folder.held(),
        PrivacyRecords.open(ledger, participation, plan.population, budget) as records,
        ExitStack() as stack,
    ):
        state = state_to_start_from(folder, plan, records, experiment.initial_state)
        if setup.resuming:
            console.print(f"resuming {folder.path} at round {state.round}")
        callbacks = dict(experiment.on_round)
        if output.tensorboard:
            events = stack.enter_context(event_files(folder.tensorboard, state.round))
            callbacks = {"tensorboard": events, **callbacks}
        rounds = conduct(
            folder,
            plan,
            state,
            hosted(experiment, records),
            records,
            experiment.entropy,
            Evaluator(experiment.task, experiment.held_out, experiment.device),
            Cadence(output.evaluate_every, output.checkpoint_every),
            clock,
            callbacks,
        )
        show = follow or partial(_progress, console=console)
        outcome = show(rounds, experiment, state.round)
        print_result(setup, experiment, outcome, records, console)
    write_run_figures(folder.results(), plan.run, budget.delta, budget.epsilon, folder.path)
    return outcome


def _progress(rounds: Rounds, experiment: Experiment, first: int, *, console: Console) -> Outcome:
    """Drive a run under a progress bar, in a terminal or a notebook."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )
    plan, accuracy = experiment.plan, ""
    with Progress(*columns, console=console) as progress:
        line = progress.add_task(plan.run, total=plan.rounds, completed=first, figures="")
        while True:
            try:
                result = next(rounds)
            except StopIteration as end:
                outcome: Outcome = end.value
                return outcome
            if result.accuracy is not None:
                accuracy = f"accuracy {result.accuracy:.1%}  "
            # From the expected cohort, since the realised one is private.
            speed = plan.sampling.expected_cohort_size / (
                result.simulation_only_seconds or math.inf
            )
            private = "".join(f"{text}  " for text in result.metrics_text)
            spent = f"ε {format_epsilon(result.epsilon)}"
            figures = f"{accuracy}{private}{spent}  {speed:,.0f} users/s"
            progress.update(line, completed=result.number, figures=figures)


def released_text(result: RoundResult, rounds: int) -> str:
    """One line on a release, for a log."""
    accuracy = "" if result.accuracy is None else f", accuracy {result.accuracy:.1%}"
    private = "".join(f", {text}" for text in result.metrics_text)
    spent = f"ε {format_epsilon(result.epsilon)} at δ {result.delta:g}"
    return f"round {result.number} of {rounds} released{accuracy}{private}, {spent}"


def warn(experiment: Experiment, console: Console) -> None:
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


def print_result(
    setup: RunSetup,
    experiment: Experiment,
    outcome: Outcome,
    records: PrivacyRecords,
    console: Console,
) -> None:
    """Print accuracy beside the (ε, δ) of the ledger."""
    privacy, plan = experiment.config.privacy, experiment.plan
    table = Table(title=plan.run, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if outcome.evaluation.accuracy is not None:
        table.add_row("accuracy on held-out rows", f"{outcome.evaluation.accuracy:.2%}")
    table.add_row("loss on held-out rows", f"{outcome.evaluation.loss:.4f}")
    for text in outcome.private_metrics:
        table.add_row("private metric before the last round", text)
    loss = epsilon_of(records.ledger.spent(), privacy.delta, privacy.accountant)
    table.add_row("user-level (ε, δ)", f"({format_epsilon(loss.epsilon)}, {privacy.delta:g})")
    charges = tuple(records.ledger.charges())
    of_run = [row.event for row in charges if row.run == plan.run]
    if len(of_run) < len(charges):
        alone = epsilon_of(of_run, privacy.delta, privacy.accountant)
        table.add_row("of which this run alone", format_epsilon(alone.epsilon))
    if of_run:
        table.add_row("what it means", loss.assumptions)
        table.add_row("randomness", str(weakest_randomness(charges)))
        table.add_row("sums and noise", str(weakest_arithmetic(charges)))
    rounds = f"{outcome.state.round} of {plan.rounds}, {len(of_run)} charged"
    stopped = "" if outcome.stop is Stop.ROUNDS else f": stopped, {outcome.stop}"
    table.add_row("rounds", rounds + stopped)
    table.add_row(
        "mechanism",
        f"q = {plan.sampling.sampling_probability:g} of N = {plan.sampling.population} users, "
        f"z = {plan.noise_multiplier:.4g}, {_clipping_text(experiment)}",
    )
    head = records.ledger.head
    table.add_row("ledger", f"{setup.ledger}\nhead {head.count}:{head.hash}")
    table.add_row("folder", str(setup.folder.path))
    console.print(table)


def _clipping_text(experiment: Experiment) -> str:
    plan, clipping = experiment.plan, experiment.config.clipping
    what = (
        f"{len(plan.groups)} vector groups in {len(clipping.groups)} parts"
        if clipping.groups
        else f"{clipping.strategy} clipping"
    )
    return f"{what} that adapts" if plan.adaptive else what
