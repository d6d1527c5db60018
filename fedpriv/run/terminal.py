"""A run on a terminal: warnings about its settings, its progress and its result.

`execute` carries out a whole run; `displayed` shows the progress of any long work.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from rich.cells import cell_len
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Task as Line
from rich.table import Column as Cells
from rich.text import Text

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.fdp import trade_off
from fedpriv.accounting.pricing import weakest_arithmetic, weakest_randomness
from fedpriv.accounting.risks import risks_of
from fedpriv.experiment.build import Experiment
from fedpriv.experiment.trackers import Followers, StartedRun
from fedpriv.ledger.events import RoundEvent
from fedpriv.ledger.ledger import ChargedRow, Ledger, paid_events
from fedpriv.report.tables import Column, Table, cohort_text, plural, print_table, protected
from fedpriv.run import notes
from fedpriv.run.auditor import Auditor
from fedpriv.run.run import Follow, Hosted, Run, RunSetup, conduct, opened, spent_in
from fedpriv.support.checks import epsilon_up, text_down
from fedpriv.support.logs import SIMULATION_ONLY
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import (
    CONTRIBUTORS_METRIC,
    EVALUATION_PREFIX,
    Contributors,
    OnRound,
    RoundResult,
    Stop,
    own_charges,
)

_BETWEEN_LINES = 60.0  # seconds, where bars cannot move
_LONGEST = 1e9  # seconds; no longer remaining time is shown
_BAR = 10  # columns of a bar


@contextmanager
def telling_where(setup: RunSetup, console: Console) -> Iterator[None]:
    """Print the folder of an interrupted run, which may have been charged already."""
    try:
        yield
    except KeyboardInterrupt:
        if setup.folder.path.exists():
            console.print(f"{setup.folder.path} holds the run so far")
        raise


def execute(
    setup: RunSetup,
    experiment: Experiment,
    hosted: Hosted,
    console: Console,
    follow: Follow | None = None,
    clock: Callable[[], float] | None = time.monotonic,
) -> Run:
    """Run an experiment in its folder, and print its progress and result.

    `follow` replaces the progress bar. Callbacks do not learn how long rounds took.
    """
    folder, plan = setup.folder, experiment.plan
    _warn(setup, experiment, console)
    with telling_where(setup, console), opened(setup, experiment) as (records, state):
        if setup.resuming:
            console.print(f"resuming {folder.path} after {state.round} of {plan.rounds} rounds")
        auditor, transport = Auditor.of(folder, experiment), hosted(experiment, records)
        transport = auditor.beside(transport) if auditor else transport
        followers, stop = Followers(experiment.trackers), None
        work = folder, experiment, state, transport, records, followers.released
        rounds = partial(conduct, *work, clock=clock, auditor=auditor, keep_going=setup.keep_going)
        place = records.ledger.ledger_id, folder.path, state.round
        followers.start(StartedRun.of(experiment.config, plan, *place))
        try:
            run = (follow or partial(_with_progress, console))(experiment, state.round, rounds)
            stop = run.stop
        finally:
            followers.end(stop)
    _print_result(setup, experiment, run, console)
    return run


class Display:
    """The progress of long work: bars in a terminal or notebook, elsewhere one line per minute."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress, self._console = progress, console
        self._told = time.monotonic()

    def add(self, name: str, rounds: int, done: int = 0) -> TaskID:
        """Add a line."""
        return self._progress.add_task(name, total=rounds, completed=done, figures=())

    def update(self, line: TaskID, done: int, *figures: str) -> None:
        """Update a line; empty figures are left out, and the last ones if room is short."""
        self._progress.update(line, completed=done, figures=tuple(filter(None, figures)))

    def tell(self, *, last: bool = False) -> None:
        """Print all lines where bars cannot move, once a minute and at the end."""
        time_now = time.monotonic()
        if _moves(self._console) or (time_now - self._told < _BETWEEN_LINES and not last):
            return
        self._told = time_now
        for task in self._progress.tasks:
            seconds = task.time_remaining
            remaining = ""
            if seconds is not None and seconds <= _LONGEST:
                remaining = f"{timedelta(seconds=round(seconds))} left"
            figures = "  ".join(task.fields["figures"])
            rounds = f"{task.completed:.0f} of {task.total:.0f} rounds"
            self._console.print(
                f"{task.description}: {', '.join(filter(None, (rounds, figures, remaining)))}",
                soft_wrap=True,
            )  # fmt: skip


def _moves(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


class _Figures(ProgressColumn):
    """The first figures of a line, as many as leave room for a bar."""

    def __init__(self, console: Console) -> None:
        super().__init__(Cells())  # which may shrink, since its text can be cut
        self._console = console

    def render(self, task: Line) -> Text:
        figures, rounds = list(task.fields["figures"]), f"{task.total:.0f}"
        reserved = 2 * len(rounds) + len("/ 0:00:00    ") + cell_len(task.description) + _BAR
        while len(figures) > 1 and cell_len("  ".join(figures)) > self._console.width - reserved:
            figures.pop()
        return Text("  ".join(figures), no_wrap=True, overflow="ellipsis")


@contextmanager
def displayed(console: Console) -> Iterator[Display]:
    """Yield a display without lines."""
    rounds = MofNCompleteColumn(table_column=Cells(no_wrap=True))
    remaining = TimeRemainingColumn(table_column=Cells(no_wrap=True))
    name = TextColumn("{task.description}", markup=False, table_column=Cells())
    columns = (rounds, remaining, name, BarColumn(_BAR), _Figures(console))
    with Progress(*columns, console=console, disable=not _moves(console)) as progress:
        display = Display(progress, console)
        try:
            yield display
        finally:
            display.tell(last=True)


def _with_progress(
    console: Console, experiment: Experiment, first: int, rounds: Callable[[OnRound], Run]
) -> Run:
    """Run the rounds, and show progress after each."""
    plan, accuracy, counted = experiment.plan, "", Contributors()
    units, sampling = plural(plan.sampling.drawn), plan.sampling.event()
    with displayed(console) as display:
        line = display.add(plan.run, plan.rounds, first)

        def show(result: RoundResult) -> None:
            nonlocal accuracy, counted
            if result.accuracy is not None:
                accuracy = f"accuracy {result.accuracy:.1%}"
            seconds = result.simulation_only_seconds or math.inf
            # From the expected cohort, since the realised one is private.
            speed = f"{plan.sampling.expected_cohort_size / seconds:,.0f} {units}/s"
            cost = f"ε {epsilon_up(result.epsilon)}"
            cost += "" if result.as_if is None else f" as if N = {result.as_if:,}"
            counted = counted.with_round(result, sampling)
            contributors = f"contributors {counted}" if counted else ""
            figures = (accuracy, cost, *result.metrics_text, contributors, speed)
            display.update(line, result.round, *figures)
            display.tell()

        return rounds(show)


def released_text(result: RoundResult, rounds: int) -> str:
    """Return one line on a release, for a log."""
    accuracy = () if result.accuracy is None else (f"accuracy {result.accuracy:.1%}",)
    cost = f"ε {epsilon_up(result.epsilon)} at δ {result.delta}"
    released = f"round {result.round} of {rounds} released"
    noisy = result.scalar_metrics.get(CONTRIBUTORS_METRIC)
    stddev = result.metrics_noise_stddev.get(CONTRIBUTORS_METRIC)
    counted = () if noisy is None else (f"{CONTRIBUTORS_METRIC} {noisy:.4g} ± {stddev:.2g}",)
    return ", ".join((released, *accuracy, *counted, *result.metrics_text, cost))


def _warn(setup: RunSetup, experiment: Experiment, console: Console) -> None:
    """Print warnings on the effects of the experiment's settings."""
    if not setup.resuming:
        events = spent_in(setup.ledger, experiment.plan.population)
        _warn_of_budget(events, experiment, console)
    for note in notes.of_settings(experiment):
        console.print(f"warning: {note}", style="yellow")
    for note in experiment.notes:
        console.print(f"note: {note}", style="yellow")


def _warn_of_budget(events: Sequence[RoundEvent], experiment: Experiment, console: Console) -> None:
    """Print a warning if the budget pays for the first round but not for all."""
    plan, budget, all_rounds = experiment.plan, experiment.budget, [*events, *experiment.charges]
    if budget.admits([*events, plan.mechanism.event]) and not budget.admits(all_rounds):
        console.print(
            f"warning: {plan.rounds} rounds would bring ε to "
            f"{epsilon_up(budget.epsilon_of(all_rounds))}; the run will stop before the budget of "
            f"{budget.epsilon} is passed",
            style="yellow",
        )


def _print_result(setup: RunSetup, experiment: Experiment, run: Run, console: Console) -> None:
    """Print the accuracy next to the (ε, δ) of the ledger."""
    if console.quiet:
        return
    with Ledger.open(setup.ledger) as ledger:
        events, charges, head = ledger.spent(), tuple(ledger.charges()), ledger.head
    rows = [
        *_measured_rows(run, experiment.plan),
        *_privacy_rows(experiment, run, events, charges),
        *_plan_rows(experiment, run, charges),
    ]
    print_table(Table(experiment.plan.run, [Column("", "text")] * 2, rows), console)
    # On separate lines, so that they can be copied.
    for line in (
        f"folder {setup.folder.path}",
        f"ledger {setup.ledger}",
        f"head   {head.count}:{head.hash}",
    ):
        console.print(line, soft_wrap=True)
    # Only lines with this mark may reveal that a user counts as zero; each note has its own line.
    if any(not note.startswith(SIMULATION_ONLY) for note in run.warnings):
        console.print("what you should know", style="bold")
    for note in run.warnings:
        console.print(f"- {note}", style="yellow", soft_wrap=True)
    if run.audit is not None:
        style = "green" if run.audit.consistent else "bold red"
        console.print(f"audit: {run.audit.text}", style=style)


def _measured_rows(run: Run, plan: TrainingPlan) -> list[tuple[str, str]]:
    """Return figures of the model, and the metrics that users released."""
    rows = [] if run.accuracy is None else [("accuracy on held-out rows", f"{run.accuracy:.2%}")]
    if run.loss is not None:
        rows.append(("loss on held-out rows", f"{run.loss:.4f}"))
    figures: dict[str, list[str]] = {}  # those of groups of rows share a line
    for name, value in run.figures.items():
        title, _, group = name.partition(": ")
        figures.setdefault(title, []).append(f"{group} {value:.4g}".lstrip())
    rows += [(f"{title} on held-out rows", ", ".join(texts)) for title, texts in figures.items()]
    if run.best and run.best.round < run.state.round:
        rows.append(("best on these rows", f"round {run.best.round}, {run.best.measured}"))
    if run.mean_accuracy is not None or run.mean_loss is not None:
        accuracy = run.mean_accuracy
        text = f"loss {run.mean_loss:.4g}" if accuracy is None else f"accuracy {accuracy:.2%}"
        rows.append((f"mean of the models after round {plan.mean_after}", text))
    for name, spread in run.held_out_users.items():
        quantiles = ", ".join(f"{spread[key]:.3g}" for key in ("q10", "q50", "q90"))
        label = f"{name} of {spread['users']:.0f} held-out users"
        rows.append((label, f"mean {spread['mean']:.3g}; 10/50/90%: {quantiles}"))
    private = run.rounds[-1].metrics_text if run.rounds else ()
    labels = {True: "users' evaluation of the model", False: "private metric before the last round"}
    rows += [
        (labels[text.startswith(EVALUATION_PREFIX)], text.removeprefix(EVALUATION_PREFIX))
        for text in private
    ]
    if counted := Contributors.of(run.rounds, plan.sampling.event()):
        rows.append(("contributors, of those expected", str(counted)))
    return rows


def _privacy_rows(
    experiment: Experiment, run: Run, events: Sequence[RoundEvent], charges: Sequence[ChargedRow]
) -> list[tuple[str, str]]:
    """Return the costs of the ledger and of this run, and their assumptions."""
    privacy, plan = experiment.config.privacy, experiment.plan
    run_charges = own_charges(plan.run, charges)
    loss = epsilon_of(events, privacy.delta, privacy.accountant)
    level = f"{plan.sampling.unit}-level (ε, δ)"
    cost = f"({epsilon_up(loss.epsilon)}, {privacy.delta})"
    rows = [(level, cost)]
    if larger := plan.sampling.event().projection:
        cost = f"({epsilon_up(run.epsilon)}, {privacy.delta}), a projection"
        rows = [
            (f"{level} as if N = {larger.population:,}", cost),
            (f"for the {plan.sampling.population:,} enrolled", rows[0][1]),
        ]
    early = run.epsilon > loss.epsilon and run.stop is Stop.TOO_FEW
    if early:
        rows = [(level, f"({epsilon_up(run.epsilon)}, {privacy.delta}), the budget")]
        rows.append(("all charges of the ledger", cost))
    if len(run_charges) < len(charges):
        loss_of_run = epsilon_of(paid_events(run_charges), privacy.delta, privacy.accountant)
        rows.append(("this run alone", epsilon_up(loss_of_run.epsilon)))
    if users := protected(charges):
        rows.append(("for users", users))
    if paid_events(run_charges):
        rows.append(("what it means", loss.assumptions))
        if not early:  # else the ledger's ε is not a bound
            risks = risks_of(trade_off(events, privacy.accountant))
            rows.append(("what anyone can tell", risks.text(loss.unit)))
        rows.append(("randomness", str(weakest_randomness(charges))))
        rows.append(("sums and noise", str(weakest_arithmetic(charges))))
    return rows


def _plan_rows(
    experiment: Experiment, run: Run, charges: Sequence[ChargedRow]
) -> list[tuple[str, str]]:
    """Return the number of planned rounds that took place, and their mechanism."""
    plan, clipping = experiment.plan, experiment.config.clipping
    rows = own_charges(plan.run, charges)
    paying = len(paid_events(rows))
    note = f", paid by {paying}" if paying < len(rows) else ""
    stopped = "" if run.stop is Stop.ROUNDS else f": stopped, {run.stop}"
    clipped = "no clipping" if clipping.norm == math.inf else f"{clipping.strategy} clipping"
    if clipping.groups:
        clipped = f"{len(plan.groups)} vector groups in {len(clipping.groups)} parts"
    adapts = " that adapts" if plan.adaptive else ""
    cohort = cohort_text(plan.sampling.event())
    return [
        ("rounds", f"{run.state.round} of {plan.rounds}, {len(rows)} charged{note}{stopped}"),
        ("mechanism", f"{cohort}, z = {text_down(plan.noise_multiplier)}, {clipped}{adapts}"),
    ]
