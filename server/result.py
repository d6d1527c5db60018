"""What is printed when a run has ended."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.experiment import Experiment
from fedpriv.federated.books import Books
from fedpriv.federated.loop import Stop
from fedpriv.report.spending import weakest_arithmetic, weakest_randomness
from fedpriv.report.tables import format_epsilon

from .folder import RunFolder
from .run import Outcome, RoundRow


def print_result(
    experiment: Experiment,
    folder: RunFolder,
    ledger: Path,
    outcome: Outcome,
    books: Books,
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
    loss = epsilon_of(books.ledger.spent(), privacy.delta, privacy.accountant)
    table.add_row("user-level (ε, δ)", f"({format_epsilon(loss.epsilon)}, {privacy.delta:g})")
    of_run = books.ledger.events(plan.run)
    if len(books.ledger.runs()) > 1:
        alone = epsilon_of(of_run, privacy.delta, privacy.accountant)
        table.add_row("of which this run alone", format_epsilon(alone.epsilon))
    if of_run:
        table.add_row("what it means", loss.assumptions)
        table.add_row("randomness", str(weakest_randomness(books.ledger.charges())))
        table.add_row("sums and noise", str(weakest_arithmetic(books.ledger.charges())))
    table.add_row("rounds", _rounds_text(outcome, len(of_run), plan.rounds))
    table.add_row(
        "mechanism",
        f"q = {plan.sampling.sampling_probability:g} of N = {plan.sampling.population} users, "
        f"z = {plan.noise_multiplier:.4g}, {_clipping_text(experiment)}",
    )
    head = books.ledger.head
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
