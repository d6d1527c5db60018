"""Tables and numbers in the terminal, and the same for other programs as JSON."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from fractions import Fraction
from pathlib import Path
from typing import TextIO

import rich.table
from rich import box
from rich.console import Console, JustifyMethod
from rich.text import Text

from fedpriv.accounting.accountant import Bound, PrivacyLoss
from fedpriv.accounting.calibration import Plan
from fedpriv.accounting.pricing import (
    Arithmetic,
    LedgerContent,
    Price,
    Spending,
    read_ledger,
)
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import SamplingEvent, SumQueryEvent
from fedpriv.ledger.export import ExportedLedger, is_export
from fedpriv.ledger.ledger import Head, Ledger
from fedpriv.ledger.participation import ParticipationRecord


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: its heading, with its unit if there is one; in lines for the terminal.
        number: whether it holds numbers.
        long: whether its cells may be broken anywhere, as digests are.
    """

    name: str
    number: bool = True
    long: bool = False

    @property
    def kind(self) -> str:
        """What style sheets call it."""
        return "long" if self.long else "number" if self.number else "text"


@dataclass(frozen=True)
class Table:
    """A table of a page or of the terminal.

    Attributes:
        caption: what it shows.
        columns: of each row.
        rows: cells as text.
        simulation_only: whether it shows what no guarantee covers.
    """

    caption: str
    columns: tuple[Column, ...]
    rows: Sequence[Sequence[str]]
    simulation_only: bool = False


def print_table(table: Table, console: Console) -> None:
    """Print a table; cells are text, whatever brackets they contain."""
    mark = "simulation only: " if table.simulation_only else ""
    title = Text(mark + table.caption)
    printed = rich.table.Table(
        title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    for column in table.columns:
        justify: JustifyMethod = "right" if column.number else "left"
        # Numbers stay whole, however narrow the terminal; names are broken instead.
        printed.add_column(
            Text(column.name), justify=justify, no_wrap=column.number, overflow="fold"
        )
    for row in table.rows:
        printed.add_row(*map(Text, row))
    console.print(printed)


def format_epsilon(epsilon: float) -> str:
    """ε to three decimals, rounded up: what is printed is never below what is true.

    >>> format_epsilon(1.9991), format_epsilon(0.0), format_epsilon(float("inf"))
    ('2.000', '0.000', '∞')
    """
    return "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def format_epsilon_low(epsilon: float) -> str:
    """A lower end of ε to three decimals, rounded down; empty if that is zero.

    >>> format_epsilon_low(1.9999), format_epsilon_low(0.0009)
    ('1.999', '')
    """
    down = math.floor(epsilon * 1000) / 1000
    return f"{down:.3f}" if down > 0.0 else ""


def format_delta(delta: float) -> str:
    """δ to three digits, rounded up: what is printed is never below what is true.

    >>> format_delta(1.2341e-6), format_delta(0.5), format_delta(0.0)
    ('1.24e-6', '0.500', '0')
    """
    if delta == 0.0:
        return "0"
    rounded = Context(prec=3, rounding=ROUND_CEILING).create_decimal_from_float(delta)
    return f"{rounded:.3f}" if delta >= 0.1 else f"{rounded:.2e}"


def number(value: float) -> float | str:
    """A number of JSON, or the string "Infinity", since JSON has no such number.

    >>> number(0.5), number(float("inf"))
    (0.5, 'Infinity')
    """
    return "Infinity" if math.isinf(value) else value


def print_spending(spending: Spending) -> None:
    """Print what each run, each ledger and all ledgers cost, in the accountants' words."""
    several = len(spending.ledgers) > 1
    table = rich.table.Table(title=_title(spending))
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
        "sampling_probability": ("sampling probability q", "largest", plan.sampling.sampling_probability),
    }
    loss = plan.loss
    title = f"within ε = {plan.target_epsilon:g} at δ = {loss.delta:g}"
    table = rich.table.Table(title=title, show_header=False)
    for name, (words, extreme, value) in values.items():
        # In full, as a digit less would be another price.
        table.add_row(words, str(value), f"{extreme} that fits" if name == plan.found else "given")
    if plan.share is not None:
        noise = f"noise {plan.share_noise_multiplier:.6g} times its clipping norm"
        table.add_row("one more sum query per round", noise, "least that fits")
        table.add_row("its share of the round", f"{plan.share:.2%}", "largest that fits")
    table.add_row("sampling", str(plan.sampling.policy), str(plan.sampling.relation))
    table.add_row("user-level ε", format_epsilon(loss.epsilon), _kind(loss))
    table.add_row("accountant", loss.accountant, "")
    console = Console()
    console.print(table)
    console.print(loss.assumptions)


def print_ledger(path: Path, last: int | None) -> None:
    """Print the charges of a ledger or an export of one, one line each."""
    content = read_ledger(path)
    rows = content.charges
    table = rich.table.Table(title=f"{content.population}: {len(rows)} charges")
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


def write_spending(spending: Spending, stream: TextIO) -> None:
    """Write one JSON object: what was priced, and a row for each part and accountant.

    In a row, `ledger` is null for all ledgers and `run` is null for all runs. A δ that was found
    stands in `delta` of its row, an ε in `epsilon`, with the lower end `epsilon_low`.
    `refusals` says why an accountant has no row. An infinite ε is the string "Infinity", which no
    program takes for a small number.
    """
    given = {"delta": spending.delta} if spending.epsilon is None else {"epsilon": spending.epsilon}
    content = {
        "ledgers": [_ledger(ledger) for ledger in spending.ledgers],
        "runs": [
            {"ledger": str(ledger.path), "run": run, "rounds": len(events)}
            for ledger in spending.ledgers
            for run, events in ledger.runs().items()
        ],
        **given,
        "randomness": str(spending.randomness),
        "arithmetic": str(spending.arithmetic),
        "rows": [_row(price, spending) for price in spending.prices],
        "refusals": list(spending.refusals),
    }
    _write(content, stream)


def write_plan(plan: Plan, stream: TextIO) -> None:
    """Write one JSON object: the settings, which of them was found, and what they cost."""
    content = {
        "found": plan.found,
        "rounds": plan.rounds,
        "sampling_probability": plan.sampling.sampling_probability,
        "noise_multiplier": plan.noise_multiplier,
        "share": plan.share,
        "share_noise_multiplier": plan.share_noise_multiplier,
        "policy": str(plan.sampling.policy),
        "target_epsilon": plan.target_epsilon,
        "epsilon_low": plan.loss.epsilon_low,
        "epsilon": plan.loss.epsilon,
        "delta": plan.loss.delta,
        "accountant": plan.loss.accountant,
        "bound": str(plan.loss.bound),
        "relation": str(plan.loss.relation),
        "assumptions": plan.loss.assumptions,
    }
    _write(content, stream)


def _write(content: Mapping[str, object], stream: TextIO) -> None:
    stream.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _ledger(ledger: LedgerContent) -> dict[str, object]:
    return {
        "path": str(ledger.path),
        "ledger_id": ledger.ledger_id,
        "population": ledger.population,
        "charges": len(ledger.charges),
        "head": ledger.charges[-1].hash if ledger.charges else None,
    }


def _row(price: Price, spending: Spending) -> dict[str, object]:
    low = {} if spending.delta is None else {"epsilon_low": number(price.loss.epsilon_low)}
    return {
        "ledger": price.part.ledger,
        "run": price.part.run,
        "rounds": price.part.rounds,
        "accountant": price.loss.accountant,
        **low,
        "epsilon": number(price.epsilon),
        "delta": price.delta,
        "bound": str(price.loss.bound),
        "relation": str(price.loss.relation),
        "assumptions": price.loss.assumptions,
    }


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
    low = format_epsilon_low(loss.epsilon_low) if math.isfinite(loss.epsilon) else ""
    return f"upper bound; the truth is at least {low}" if low else loss.bound


def _kind_of_delta(loss: PrivacyLoss) -> str:
    return Bound.ESTIMATE if loss.bound is Bound.ESTIMATE else Bound.UPPER


def _parsed_head(head: str) -> Head:
    count, separator, digest = head.partition(":")
    if not separator or not count.isdecimal():
        raise InvalidValueError(f"--head is {head!r}; it must be COUNT:HASH")
    return Head(int(count), digest)


def _shown(name: str) -> str:
    """A name without control characters, which could command the terminal."""
    return name if name.isprintable() else repr(name)


def _query_text(query: SumQueryEvent) -> str:
    """Group, clipping norm and noise, and over which numbers that noise is."""
    text = f"{_shown(query.group)}: {query.clipping_norm:.4g}, {query.noise_stddev:.4g}"
    if query.granularity is None:
        return f"{text}; {Arithmetic.FLOATING_POINT}"
    squared_bound = math.floor(Fraction(query.clipping_norm / query.granularity) ** 2)
    steps = query.noise_stddev / query.granularity
    return f"{text}; {Arithmetic.EXACT}: B = {squared_bound}, σ/γ = {steps:.4g}"


def _sampling_text(sampling: SamplingEvent) -> str:
    """Policy and neighbours, and which rounds users are in where an event has several."""
    text = f"{sampling.policy}, {sampling.relation}"
    schedule = sampling.schedule
    if schedule is None:
        return text
    return f"{text}, {schedule.participations} of {schedule.rounds} rounds"
