"""What the command line prints of ledgers and of settings within a budget."""

import math
from decimal import ROUND_CEILING, Context
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedpriv.accounting.accountant import Bound, PrivacyLoss
from fedpriv.accounting.calibration import Plan
from fedpriv.accounting.pricing import (
    Arithmetic,
    Spending,
    read_ledger,
    weakest_arithmetic,
    weakest_randomness,
)
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import Randomness, SamplingEvent, SumQueryEvent
from fedpriv.ledger.export import ExportedLedger, is_export
from fedpriv.ledger.ledger import Head, Ledger
from fedpriv.ledger.participation import ParticipationRecord


def randomness_of(ledger: Ledger) -> Randomness:
    """The weakest source of randomness of all charges."""
    return weakest_randomness(ledger.charges())


def arithmetic_of(ledger: Ledger) -> Arithmetic:
    """Exact if sums and noise of all charges are."""
    return weakest_arithmetic(ledger.charges())


def format_epsilon(epsilon: float) -> str:
    """ε to three decimals, rounded up: what is printed is never below what is true.

    >>> format_epsilon(1.9991), format_epsilon(0.0), format_epsilon(float("inf"))
    ('2.000', '0.000', '∞')
    """
    return "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def format_delta(delta: float) -> str:
    """δ to three digits, rounded up: what is printed is never below what is true.

    >>> format_delta(1.2341e-6), format_delta(0.5), format_delta(0.0)
    ('1.24e-6', '0.500', '0')
    """
    if delta == 0.0:
        return "0"
    rounded = Context(prec=3, rounding=ROUND_CEILING).create_decimal_from_float(delta)
    return f"{rounded:.3f}" if delta >= 0.1 else f"{rounded:.2e}"


def print_spending(spending: Spending) -> None:
    """Print what each run, each ledger and all ledgers cost, in the accountants' words."""
    several = len(spending.ledgers) > 1
    table = Table(title=_title(spending))
    if several:
        table.add_column("ledger")
    table.add_column("run")
    table.add_column("rounds", justify="right", no_wrap=True)
    table.add_column("accountant", no_wrap=True)
    table.add_column("ε" if spending.epsilon is None else "δ", justify="right", no_wrap=True)
    table.add_column("what it is")
    for price in spending.prices:
        part, loss = price.part, price.loss
        ledger = [part.ledger or "all ledgers"] if several else []
        run = part.run or ("all runs" if part.events else "(no charge)")
        if spending.epsilon is None:
            found = format_epsilon(price.epsilon), _kind(loss)
        else:
            found = format_delta(price.delta), _kind_of_delta(loss)
        table.add_row(*ledger, run, str(part.rounds), loss.accountant, *found)
    # Names and paths are no markup, whatever brackets they contain.
    console = Console(markup=False, emoji=False)
    console.print(table)
    for ledger_without in (ledger for ledger in spending.ledgers if not ledger.charges):
        console.print(f"{ledger_without.path} has no charge: nothing was released, so ε = 0.")
    if several:
        console.print("All ledgers: for a user who may be in each of their populations.")
    # The table says which accountant gives what; what all assume is said once.
    words = dict.fromkeys(
        price.loss.assumptions.partition(";")[0] + "." for price in spending.prices
    )
    for sentence in (*words, *(f"Not priced: {refusal}." for refusal in spending.refusals)):
        console.print(sentence)
    console.print(f"Randomness: {spending.randomness}.")
    console.print(f"Sums and noise: {spending.arithmetic}.")


def print_plan(plan: Plan) -> None:
    """Print settings that stay within a budget, and what they really cost."""
    values = {
        "noise_multiplier": ("noise multiplier z", "smallest", plan.noise_multiplier),
        "rounds": ("rounds T", "largest", plan.rounds),
        "sampling_probability": ("sampling probability q", "largest", plan.sampling_probability),
    }
    loss = plan.loss
    title = f"within ε = {plan.target_epsilon:g} at δ = {loss.delta:g}"
    table = Table(title=title, show_header=False)
    for name, (words, extreme, value) in values.items():
        # In full, as a digit less would be another price.
        table.add_row(words, str(value), f"{extreme} that fits" if name == plan.found else "given")
    if plan.share is not None:
        noise = f"noise {plan.share_noise_multiplier:.6g} times its clipping norm"
        table.add_row("one more sum query per round", noise, "least that fits")
        table.add_row("its share of the round", f"{plan.share:.2%}", "largest that fits")
    table.add_row("sampling", str(plan.sampled.policy), str(plan.sampled.relation))
    table.add_row("user-level ε", format_epsilon(loss.epsilon), _kind(loss))
    table.add_row("accountant", loss.accountant, "")
    console = Console()
    console.print(table)
    console.print(loss.assumptions)


def print_ledger(path: Path, last: int | None) -> None:
    """Print the charges of a ledger or an export of one, one line each."""
    content = read_ledger(path)
    rows = content.charges
    table = Table(title=f"{content.population}: {len(rows)} charges")
    for column in ("#", "run", "round", "attempt", "sampling", "q", "N"):
        table.add_column(column)
    table.add_column("group: S, σ; noise", overflow="fold")
    for column in ("z", "randomness"):
        table.add_column(column)
    for row in rows[-(last or len(rows)) :]:
        table.add_row(
            str(row.position),
            row.run,
            str(row.round),
            str(row.attempt),
            _sampling_text(row.event.sampling),
            f"{row.event.sampling.sampling_probability:g}",
            str(row.event.sampling.population),
            "\n".join(map(_query_text, row.event.queries)),
            f"{row.event.noise_multiplier:.4g}",
            row.randomness.partition(":")[0],
        )
    Console(markup=False, emoji=False).print(table)


def _shown(name: str) -> str:
    """A name of anybody's making, without what would command the terminal."""
    return name if name.isprintable() else repr(name)


def _query_text(query: SumQueryEvent) -> str:
    """Group, clipping norm and noise, and over which numbers that noise is."""
    text = f"{_shown(query.group)}: {query.clipping_norm:.4g}, {query.noise_stddev:.4g}"
    if query.granularity is None:
        return f"{text}; {Arithmetic.FLOATING_POINT}"
    return f"{text}; {Arithmetic.EXACT}: B = {query.squared_bound}, σ/γ = {query.noise_steps:.4g}"


def _sampling_text(sampling: SamplingEvent) -> str:
    """Policy and neighbours, and which rounds users are in where an event has several."""
    text = f"{sampling.policy}, {sampling.relation}"
    schedule = sampling.schedule
    if schedule is None:
        return text
    return f"{text}, {schedule.participations} of {schedule.rounds} rounds"


def print_verification(path: Path, participation: Path | None, head: str | None) -> None:
    """Verify a ledger or an export and say what was checked; a LedgerError names the first bad row.

    An export has no place for a row outside the chain, so nothing else is to be checked in it.
    """
    expected = None if head is None else _parsed_head(head)
    if is_export(path):
        found = _verified(ExportedLedger.load(path), participation, expected)
    else:
        with Ledger.open(path) as ledger:
            found = _verified(ledger, participation, expected)
    Console(markup=False, emoji=False).print(
        f"{path} is intact: {found.count} charges"
        + (", each with the cohort it commits to" if participation else "")
        + f"; head {found.count}:{found.hash}",
        soft_wrap=True,
        highlight=False,
    )


def _verified(
    ledger: Ledger | ExportedLedger, participation: Path | None, head: Head | None
) -> Head:
    """The head of a ledger that was verified."""
    if participation is None:
        ledger.verify(head=head)
    else:
        with ParticipationRecord.open(participation) as record:
            ledger.verify(record, head)
    return ledger.head


def _title(spending: Spending) -> str:
    populations = ", ".join(dict.fromkeys(each.population for each in spending.ledgers))
    if spending.epsilon is None:
        return f"user-level ε of {populations} at δ = {spending.delta:g}"
    return f"user-level δ of {populations} at ε = {spending.epsilon:g}"


def _kind(loss: PrivacyLoss) -> str:
    low = math.floor(loss.epsilon_low * 1000) / 1000 if math.isfinite(loss.epsilon) else 0.0
    if low > 0.0:
        return f"upper bound; the truth is at least {low:.3f}"
    return loss.bound


def _kind_of_delta(loss: PrivacyLoss) -> str:
    return Bound.ESTIMATE if loss.bound is Bound.ESTIMATE else Bound.UPPER


def _parsed_head(head: str) -> Head:
    count, separator, digest = head.partition(":")
    if not separator or not count.isdecimal():
        raise InvalidValueError(f"--head is {head!r}; it must be COUNT:HASH")
    return Head(int(count), digest)
