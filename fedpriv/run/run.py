"""A run at the server: rounds, evaluation, metrics and checkpoints, in one folder.

How a run begins or goes on: its name, its folder, and what it is to be told of.

Telling of each round: callbacks of the configuration, and TensorBoard's event files.

What is printed when a run has ended.

The figures of a run folder.

`fedpriv simulate`: a whole run on simulated users, from a configuration to its figures.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
import tomli_w
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.numpy import save

from fedpriv.accounting.pricing import weakest_arithmetic, weakest_randomness
from fedpriv.accounting.registry import epsilon as epsilon_of
from fedpriv.build import Enrolled, Experiment, build, simulated
from fedpriv.config import Config, FederationSection, load_config
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import Head, Ledger
from fedpriv.privacy.noise import Entropy
from fedpriv.privacy.round import PrivacyRecords, Transport
from fedpriv.report.records import versions
from fedpriv.report.run_page import write_run_figures
from fedpriv.report.tables import format_epsilon
from fedpriv.run.callbacks import OnRound, ReleasedRound
from fedpriv.run.diagnostics import watched
from fedpriv.run.evaluation import Evaluation, Evaluator, held_out_rows
from fedpriv.run.folder import RunFolder
from fedpriv.run.reader import released_rounds
from fedpriv.training.checkpoint import (
    Checkpoint,
    checkpoints,
    resume,
    save_checkpoint,
    write_atomically,
)
from fedpriv.training.optimizers import Parameters
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import RoundReport, ServerState, Stop, train

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
class RoundRow:
    """One line of the metrics: what one release was and cost.

    Attributes:
        round: number of the round, from 0.
        attempt: number of the attempt.
        epsilon: ε of all charges of the ledger so far, at `delta`.
        delta: δ of the budget.
        test_loss: mean loss on held-out rows, if the round was evaluated.
        test_accuracy: accuracy on held-out rows, if there is one.
        simulation_only_seconds: wall time of the round. It depends on who took part and is not
            covered by the guarantee, so it exists in simulations only and is None elsewhere.
        charge: hash of the round's row in the ledger.
        clipping_norms: of the groups of the update in this round, in the plan's order.
        unclipped: noised fraction of users that were not clipped, for each of these groups; empty
            unless clipping is adaptive.
        metrics: private averages by name, at the model before the round; a vector is a list.
        metrics_noise_stddev: standard deviation of the noise in each component of a metric.
    """

    round: int
    attempt: int
    epsilon: float
    delta: float
    test_loss: float | None
    test_accuracy: float | None
    simulation_only_seconds: float | None
    charge: str
    clipping_norms: tuple[float, ...]
    unclipped: tuple[float, ...]
    metrics: Mapping[str, object]
    metrics_noise_stddev: Mapping[str, float]

    @property
    def private_metrics(self) -> tuple[str, ...]:
        """The metrics that are one number, each with its noise, in words."""
        return tuple(
            f"{name} {value:.3g} ± {self.metrics_noise_stddev[name]:.2g}"
            for name, value in self.metrics.items()
            if isinstance(value, float)
        )


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
) -> Generator[RoundRow, None, Outcome]:
    """Run a plan to its end or to the end of its budget, writing everything into a folder.

    A line of metrics is written after each release, and then the checkpoint, before the next round
    begins. So if every round has a checkpoint, a crash leaves at most one round that was charged
    and is in no checkpoint. A run that is resumed repeats the rounds since its last checkpoint as
    new attempts, with new charges.

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

    Yields:
        A row for each round.
    """
    private_metrics: tuple[str, ...] = ()
    rounds = train(plan, state, transport, records, entropy)
    while True:
        began = clock() if clock else 0.0
        try:
            report = next(rounds)
        except StopIteration as end:
            stop: Stop = end.value
            break
        seconds = clock() - began if clock else None
        state = report.state
        due = state.round % cadence.evaluate == 0 or state.round == plan.rounds
        row = _row(report, records, evaluate(state.model) if due else None, seconds)
        folder.append_metrics(asdict(row))
        private_metrics = row.private_metrics
        if state.round % cadence.checkpoint == 0:
            _save(folder, plan, state, records.ledger.head)
        yield row
    _save(folder, plan, state, records.ledger.head)
    tensors = {name: np.ascontiguousarray(p) for name, p in state.model.items()}
    write_atomically(folder.model, save(tensors))
    return Outcome(stop, state, evaluate(state.model), private_metrics)


def _row(
    report: RoundReport,
    records: PrivacyRecords,
    evaluation: Evaluation | None,
    seconds: float | None,
) -> RoundRow:
    return RoundRow(
        round=report.round,
        attempt=report.attempt,
        epsilon=records.budget.epsilon_of(records.ledger.spent()),
        delta=records.budget.delta,
        test_loss=evaluation.loss if evaluation else None,
        test_accuracy=evaluation.accuracy if evaluation else None,
        simulation_only_seconds=seconds,
        charge=report.charge_hash,
        clipping_norms=report.clipping_norms,
        unclipped=report.unclipped,
        metrics={metric.name: metric.value.tolist() for metric in report.metrics},
        metrics_noise_stddev={metric.name: metric.noise_stddev for metric in report.metrics},
    )


def _save(folder: RunFolder, plan: TrainingPlan, state: ServerState, head: Head) -> None:
    save_checkpoint(folder.checkpoints, Checkpoint(state, plan.digest, head))


@dataclass(frozen=True)
class Beginning:
    """What is known of a run before its plan is.

    Attributes:
        config: the configuration; of a run that goes on, with the noise that it began with.
        run: its name in the ledger.
        folder: where it is written.
        ledger: what it charges.
        resuming: whether it goes on.
    """

    config: Config
    run: str
    folder: RunFolder
    ledger: Path
    resuming: bool

    @classmethod
    def of(cls, file: Path, assignments: list[str], out: Path | None, *, resume: bool) -> Self:
        """Read an experiment, and the folder of the run if it is to go on.

        Args:
            file: the experiment, TOML.
            assignments: "a.b=value" overrides.
            out: folder of the run; by default a new one under runs/.
            resume: go on with the run in `out`, or start it if there is none.

        Raises:
            InvalidValueError: a file cannot be read or used.
        """
        config = load_config(file, assignments)
        run = _run_name(config)
        folder = RunFolder(out or Path("runs") / run)
        ledger = Path(config.privacy.ledger) if config.privacy.ledger else folder.ledger
        resuming = resume and folder.plan.exists()
        if resuming:
            run, config = _as_begun(folder, config)
        return cls(config, run, folder, ledger, resuming)

    @property
    def spent(self) -> list[RoundEvent]:
        """What noise is to be calibrated to; a run that goes on was calibrated when it began."""
        return [] if self.resuming else spent_in(self.ledger)

    def on_nodes(self, section: FederationSection, users: Enrolled) -> Experiment:
        """The experiment on users that nodes host.

        Args:
            section: says where the server's held-out rows are.
            users: those who are enrolled.

        Raises:
            FedprivError: something does not fit; the message says what.
        """
        self.refuse_true_figures("on nodes")
        self._refuse_unbounded_work()
        held_out = held_out_rows(self.config, section)
        return build(self.config, self.run, users, held_out, self.spent)

    def refuse_true_figures(self, where: str) -> None:
        """Refuse to record what only a simulation in one process can know.

        Args:
            where: the run is to be.

        Raises:
            InvalidValueError: the configuration asks for it.
        """
        if self.config.output.simulation_only:
            raise InvalidValueError(
                f"output.simulation_only is true; {where} it must be false, since only a "
                "simulation in one process has figures that are not private"
            )

    def _refuse_unbounded_work(self) -> None:
        """Refuse a plan in which one user can take all the time that a node has."""
        if self.config.local.max_examples is None:
            raise InvalidValueError(
                "local.max_examples is absent; on nodes it must be given, since a user with very "
                "many examples would take the time of all others of its node"
            )

    def write_plan(self, experiment: Experiment) -> None:
        """Make the folder with the resolved plan; of a run that goes on, refuse another one.

        Raises:
            InvalidValueError: the folder holds a run already, or cannot be made; or as for
                `refuse_other_plan`.
        """
        if self.resuming:
            self.refuse_other_plan(experiment.plan)
            return
        self.folder.create()
        # The plan last: a folder that has it holds a run, and then has the digest too.
        write_atomically(self.folder.plan_digest, f"{experiment.plan.digest}\n".encode())
        write_atomically(self.folder.plan, _resolved_plan(experiment).encode())

    def refuse_other_plan(self, plan: TrainingPlan) -> None:
        """Refuse to go on with another plan than the run began with, however far it has come.

        Raises:
            InvalidValueError: the run goes on and its plan is another, or not known any more.
        """
        if not self.resuming:
            return
        path = self.folder.plan_digest
        begun = path.read_text("ascii", "replace").strip() if path.exists() else "unknown"
        if begun != plan.digest:
            raise InvalidValueError(
                f"by {path} the run began with plan {begun[:12]!r}, this is {plan.digest[:12]!r}; "
                "a run can only be resumed with the plan it began with"
            )


def _run_name(config: Config) -> str:
    """Name that is new for each run, except of a seeded one, which can be repeated."""
    if config.run:
        return config.run
    suffix = os.urandom(4).hex() if config.seed is None else f"seed{config.seed}"
    return f"{config.name}-{suffix}"


def spent_in(ledger: Path) -> list[RoundEvent]:
    """What a ledger holds; nothing if there is none yet."""
    if not ledger.exists():
        return []
    with Ledger.open(ledger) as opened:
        return opened.spent()


def _as_begun(folder: RunFolder, config: Config) -> tuple[str, Config]:
    """Name of the run that a folder holds, and the configuration with the noise it began with.

    Calibrated again it would be another, as the ledger has grown since.
    """
    begun = load_config(folder.plan)
    noise_multiplier = begun.privacy.noise_multiplier
    if begun.run is None or noise_multiplier is None:
        raise InvalidValueError(
            f"{folder.plan} is damaged: a plan that was begun has run and privacy.noise_multiplier"
        )
    if config.privacy.noise_multiplier is not None:
        return begun.run, config
    privacy = config.privacy.model_copy(update={"noise_multiplier": noise_multiplier})
    return begun.run, config.model_copy(update={"privacy": privacy})


def _resolved_plan(experiment: Experiment) -> str:
    """Configuration as it was run, with a head of facts; it can be run again."""
    plan = experiment.plan
    facts = {
        "population": plan.population,
        "enrolled users": plan.sampling.population,
        "expected cohort": f"{plan.sampling.expected_cohort_size:g}",
        "parameters": plan.layout.dimension,
        "software": ", ".join(f"{name} {number}" for name, number in versions().items()),
    }
    facts |= {
        f"group {group.name}": f"clipping norm {group.clipping_norm:g}, noise stddev {stddev:g}"
        for group, stddev in zip(
            plan.mechanism.clipping.groups, plan.mechanism.query.noise_stddevs, strict=True
        )
    }
    head = "".join(f"# {name}: {value}\n" for name, value in facts.items())
    return head + tomli_w.dumps(experiment.config.model_dump(exclude_none=True))


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


_log = logging.getLogger(__name__)
Rounds = Generator[RoundRow, None, Outcome]


@contextmanager
def announced(
    rounds: Rounds, experiment: Experiment, folder: RunFolder, first: int
) -> Iterator[Rounds]:
    """The same rounds, each of which is told of before it is passed on.

    A callback that raises is logged and called again after the next round: a service that is down
    must not cost a run what it has spent.

    Args:
        rounds: from `conduct`.
        experiment: what is run.
        folder: of the run, where event files are written.
        first: the round that comes first.
    """
    if not experiment.config.output.tensorboard:
        yield _announcing(rounds, experiment.plan, experiment.on_round)
        return
    with _event_files(folder.tensorboard, first) as write:
        both = {"tensorboard": write, **experiment.on_round}
        yield _announcing(rounds, experiment.plan, both)


def _announcing(rounds: Rounds, plan: TrainingPlan, callbacks: Mapping[str, OnRound]) -> Rounds:
    while True:
        try:
            row = next(rounds)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        released = released_round(row, plan)
        for name, callback in callbacks.items():
            try:
                callback(released)
            except Exception as error:
                _log.warning(
                    "callback %s raised %s in round %d: %s",
                    name,
                    type(error).__name__,
                    row.round,
                    error,
                )
        yield row


def released_round(row: RoundRow, plan: TrainingPlan) -> ReleasedRound:
    """What of a round may be told: all of its row but how long it took."""
    names = [group.name for group in plan.groups]
    return ReleasedRound(
        run=plan.run,
        rounds=plan.rounds,
        round=row.round,
        attempt=row.attempt,
        epsilon=row.epsilon,
        delta=row.delta,
        test_loss=row.test_loss,
        test_accuracy=row.test_accuracy,
        clipping_norms=dict(zip(names, row.clipping_norms, strict=True)),
        unclipped=dict(zip(names, row.unclipped, strict=False)),
        metrics=row.metrics,
        metrics_noise_stddev=row.metrics_noise_stddev,
    )


@contextmanager
def _event_files(folder: Path, first: int) -> Iterator[OnRound]:
    """A callback that writes TensorBoard's event files; complete when the block is left."""
    from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - an extra, and slow

    # Events of rounds that a run repeats after a crash are hidden by those that are written now.
    with SummaryWriter(str(folder), purge_step=first + 1) as writer:

        def write(released: ReleasedRound) -> None:
            for name, value in released.scalars.items():
                writer.add_scalar(name, value, released.round + 1)

        yield write


def print_result(
    experiment: Experiment,
    folder: RunFolder,
    ledger: Path,
    outcome: Outcome,
    records: PrivacyRecords,
    console: Console,
) -> None:
    """Print accuracy beside the (ε, δ) of the ledger."""
    privacy, plan = experiment.config.privacy, experiment.plan
    table = Table(title=f"{plan.run}", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    if outcome.evaluation.accuracy is not None:
        table.add_row("accuracy on held-out rows", f"{outcome.evaluation.accuracy:.2%}")
    table.add_row("loss on held-out rows", f"{outcome.evaluation.loss:.4f}")
    for text in outcome.private_metrics:
        table.add_row("private metric before the last round", text)
    loss = epsilon_of(records.ledger.spent(), privacy.delta, privacy.accountant)
    table.add_row("user-level (ε, δ)", f"({format_epsilon(loss.epsilon)}, {privacy.delta:g})")
    of_run = records.ledger.events(plan.run)
    if len(records.ledger.runs()) > 1:
        alone = epsilon_of(of_run, privacy.delta, privacy.accountant)
        table.add_row("of which this run alone", format_epsilon(alone.epsilon))
    if of_run:
        table.add_row("what it means", loss.assumptions)
        table.add_row("randomness", str(weakest_randomness(records.ledger.charges())))
        table.add_row("sums and noise", str(weakest_arithmetic(records.ledger.charges())))
    table.add_row("rounds", _rounds_text(outcome, len(of_run), plan.rounds))
    table.add_row(
        "mechanism",
        f"q = {plan.sampling.sampling_probability:g} of N = {plan.sampling.population} users, "
        f"z = {plan.noise_multiplier:.4g}, {_clipping_text(experiment)}",
    )
    head = records.ledger.head
    table.add_row("ledger", f"{ledger}\nhead {head.count}:{head.hash}")
    table.add_row("folder", str(folder.path))
    console.print(table)


def released_text(row: RoundRow, rounds: int) -> str:
    """One line on a release, for a log."""
    accuracy = "" if row.test_accuracy is None else f", accuracy {row.test_accuracy:.1%}"
    private = "".join(f", {text}" for text in row.private_metrics)
    spent = f"ε {format_epsilon(row.epsilon)} at δ {row.delta:g}"
    return f"round {row.round + 1} of {rounds} released{accuracy}{private}, {spent}"


def _clipping_text(experiment: Experiment) -> str:
    plan, clipping = experiment.plan, experiment.config.clipping
    what = (
        f"{len(plan.groups)} vector groups in {len(clipping.groups)} parts"
        if clipping.groups
        else f"{clipping.strategy} clipping"
    )
    return f"{what} that adapts" if plan.adaptive else what


def _rounds_text(outcome: Outcome, charged: int, planned: int) -> str:
    text = f"{outcome.state.round} of {planned}, {charged} charged"
    return text if outcome.stop is Stop.ROUNDS else f"{text}: stopped, {outcome.stop}"


def draw(folder: RunFolder, experiment: Experiment) -> None:
    """Write the figures of all rounds, the last attempt at each, into the folder of the run."""
    budget = experiment.budget
    rounds = released_rounds(folder)
    write_run_figures(rounds, experiment.plan.run, budget.delta, budget.epsilon, folder.path)


Hosted = Callable[[Experiment, PrivacyRecords], Transport]
"""Makes the transport to the users of an experiment, once its records are open."""


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
    with folder.held(), PrivacyRecords.open(ledger, participation, population, budget) as records:
        state = state_to_start_from(folder, experiment.plan, records, experiment.initial_state)
        if beginning.resuming:
            console.print(f"resuming {folder.path} at round {state.round}")
        output = experiment.config.output
        rows = conduct(
            folder,
            experiment.plan,
            state,
            hosted(experiment, records),
            records,
            experiment.entropy,
            Evaluator(experiment.task, experiment.held_out, experiment.device),
            Cadence(output.evaluate_every, output.checkpoint_every),
            clock,
        )
        with announced(rows, experiment, folder, state.round) as told:
            outcome = (follow or partial(_show, console=console))(told, experiment, state.round)
        print_result(experiment, folder, ledger, outcome, records, console)
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
