"""Tables and numbers in the terminal, and the same for other programs as JSON."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context
from fractions import Fraction
from pathlib import Path
from typing import Literal, TextIO

import rich.table
from rich import box
from rich.console import Console
from rich.text import Text

from fedpriv.accounting.accountant import Bound, PrivacyLoss
from fedpriv.accounting.calibration import Plan
from fedpriv.accounting.pricing import Arithmetic, Price, Spending, read_ledger
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import SamplingEvent, SumQueryEvent
from fedpriv.ledger.ledger import ExportedLedger, Head, Ledger, is_export
from fedpriv.ledger.participation import ParticipationRecord


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, with its unit if there is one, and what its cells hold."""

    name: str
    kind: Literal["number", "text", "long"] = "number"  # what is long may be broken anywhere


@dataclass(frozen=True)
class Table:
    """A table of a page or of the terminal; cells are text."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    simulation_only: bool = False  # whether it shows what no guarantee covers


def print_table(
    table: Table, console: Console | None = None, border: box.Box = box.SIMPLE_HEAD
) -> None:
    """Print a table; cells are text, whatever brackets they contain."""
    mark = "simulation only: " if table.simulation_only else ""
    light = border is box.SIMPLE_HEAD
    printed = rich.table.Table(
        title=Text(mark + table.caption),
        box=border,
        pad_edge=not light,
        collapse_padding=light,
        show_header=any(column.name for column in table.columns),
    )
    for column in table.columns:
        number = column.kind == "number"
        # Numbers stay whole, however narrow the terminal; names are broken instead.
        printed.add_column(
            Text(column.name),
            justify="right" if number else "left",
            no_wrap=number,
            overflow="fold",
        )
    for row in table.rows:
        printed.add_row(*map(Text, row))
    (console or Console()).print(printed)


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


def lower_end(loss: PrivacyLoss) -> str:
    """The proven lower end of ε, rounded down; empty if there is none."""
    return format_epsilon_low(loss.epsilon_low) if math.isfinite(loss.epsilon) else ""


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
    populations = ", ".join(dict.fromkeys(each.population for each in spending.ledgers))
    if spending.epsilon is None:
        symbol, fixed = "ε", f"δ = {spending.delta:g}"
    else:
        symbol, fixed = "δ", f"ε = {spending.epsilon:g}"
    headings = [Column("ledger", "text")] if several else []
    headings += [Column("run", "text"), Column("rounds"), Column("accountant", "text")]
    headings += [Column(symbol), Column("what it is", "text")]
    rows = [_spending_row(price, symbol, several) for price in spending.prices]
    title = f"user-level {symbol} of {populations} at {fixed}"
    console = Console(markup=False, emoji=False)
    print_table(Table(title, headings, rows), console, box.HEAVY_HEAD)
    for ledger in spending.ledgers:
        if not ledger.charges:
            console.print(f"{ledger.path} has no charge: nothing was released, so ε = 0.")
    if several:
        console.print("All ledgers: for a user who may be in each of their populations.")
    # The table says which accountant gives what; what all assume is said once.
    assumed = (price.loss.assumptions.partition(";")[0] + "." for price in spending.prices)
    refused = (f"Not priced: {refusal}." for refusal in spending.refusals)
    for sentence in (*dict.fromkeys(assumed), *refused):
        console.print(sentence)
    console.print(f"Randomness: {spending.randomness}.")
    console.print(f"Sums and noise: {spending.arithmetic}.")


def _spending_row(price: Price, symbol: str, several: bool) -> list[str]:  # noqa: FBT001
    part, loss = price.part, price.loss
    if symbol == "ε":
        found = [format_epsilon(price.epsilon), _kind(loss)]
    else:
        bound = Bound.ESTIMATE if loss.bound is Bound.ESTIMATE else Bound.UPPER
        found = [format_delta(price.delta), bound]
    ledger = [part.ledger or "all ledgers"] if several else []
    run = part.run or ("all runs" if part.events else "(no charge)")
    return [*ledger, run, str(part.rounds), loss.accountant, *found]


def _kind(loss: PrivacyLoss) -> str:
    low = lower_end(loss)
    return f"upper bound; the truth is at least {low}" if low else loss.bound


def print_plan(plan: Plan) -> None:
    """Print settings that stay within a budget, and what they really cost."""
    loss, rows = plan.loss, []
    for name, words, extreme in (
        ("noise_multiplier", "noise multiplier z", "smallest"),
        ("rounds", "rounds T", "largest"),
        ("sampling_probability", "sampling probability q", "largest"),
    ):
        # In full, as a digit less would be another price.
        found = f"{extreme} that fits" if name == plan.found else "given"
        rows.append((words, str(getattr(plan, name)), found))
    if plan.share is not None:
        noise = f"noise {plan.share_noise_multiplier:.6g} times its clipping norm"
        rows.append(("one more sum query per round", noise, "least that fits"))
        rows.append(("its share of the round", f"{plan.share:.2%}", "largest that fits"))
    rows.append(("sampling", str(plan.sampling.policy), str(plan.sampling.relation)))
    rows.append(("user-level ε", format_epsilon(loss.epsilon), _kind(loss)))
    rows.append(("accountant", loss.accountant, ""))
    title = f"within ε = {plan.target_epsilon:g} at δ = {loss.delta:g}"
    print_table(Table(title, [Column("", "text")] * 3, rows), border=box.HEAVY_HEAD)
    Console().print(loss.assumptions)


def print_ledger(path: Path, last: int | None) -> None:
    """Print the charges of a ledger or an export of one, one line each."""
    content = read_ledger(path)
    shown = content.charges[-(last or len(content.charges)) :]
    names = ("#", "run", "round", "attempt", "sampling", "q", "N", "group: S, σ; noise", "z")
    rows = [
        (
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
        for row in shown
    ]
    title = f"{content.population}: {len(content.charges)} charges"
    columns = [Column(name, "text") for name in (*names, "randomness")]
    print_table(Table(title, columns, rows), border=box.HEAVY_HEAD)


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
    cohorts = ", each with the cohort it commits to" if participation else ""
    Console(markup=False, emoji=False).print(
        f"{path} is intact: {found.count} charges{cohorts}; head {found.count}:{found.hash}",
        soft_wrap=True,
        highlight=False,
    )


def _verified(
    ledger: Ledger | ExportedLedger, participation: Path | None, head: Head | None
) -> Head:
    if participation is None:
        ledger.verify(head=head)
    else:
        with ParticipationRecord.open(participation) as record:
            ledger.verify(record, head)
    return ledger.head


def _parsed_head(head: str) -> Head:
    count, separator, digest = head.partition(":")
    if not separator or not count.isdecimal():
        raise InvalidValueError(f"--head is {head!r}; it must be COUNT:HASH")
    return Head(int(count), digest)


def write_spending(spending: Spending, stream: TextIO) -> None:
    """Write one JSON object: what was priced, and a row for each part and accountant.

    In a row, `ledger` is null for all ledgers and `run` is null for all runs. A δ that was found
    stands in `delta` of its row, an ε in `epsilon`, with the lower end `epsilon_low`.
    `refusals` says why an accountant has no row. An infinite ε is the string "Infinity", which no
    program takes for a small number.
    """
    ledgers = [
        {
            "path": str(ledger.path),
            "ledger_id": ledger.ledger_id,
            "population": ledger.population,
            "charges": len(ledger.charges),
            "head": ledger.charges[-1].hash if ledger.charges else None,
        }
        for ledger in spending.ledgers
    ]
    runs = [
        {"ledger": str(ledger.path), "run": run, "rounds": len(events)}
        for ledger in spending.ledgers
        for run, events in ledger.runs().items()
    ]
    by_delta = spending.epsilon is None
    rows = [
        {
            "ledger": price.part.ledger,
            "run": price.part.run,
            "rounds": price.part.rounds,
            "accountant": price.loss.accountant,
            **({"epsilon_low": number(price.loss.epsilon_low)} if by_delta else {}),
            "epsilon": number(price.epsilon),
            "delta": price.delta,
            **_statement(price.loss),
        }
        for price in spending.prices
    ]
    content = {
        "ledgers": ledgers,
        "runs": runs,
        **({"delta": spending.delta} if by_delta else {"epsilon": spending.epsilon}),
        "randomness": spending.randomness,
        "arithmetic": spending.arithmetic,
        "rows": rows,
        "refusals": list(spending.refusals),
    }
    stream.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _statement(loss: PrivacyLoss) -> dict[str, str]:
    """What kind of statement an ε is."""
    return {"bound": loss.bound, "relation": loss.relation, "assumptions": loss.assumptions}


def write_plan(plan: Plan, stream: TextIO) -> None:
    """Write one JSON object: the settings, which of them was found, and what they cost."""
    names = "found rounds sampling_probability noise_multiplier share share_noise_multiplier"
    priced = ("epsilon_low", "epsilon", "delta", "accountant")
    content = (
        {name: getattr(plan, name) for name in names.split()}
        | {"policy": str(plan.sampling.policy), "target_epsilon": plan.target_epsilon}
        | {name: getattr(plan.loss, name) for name in priced}
        | _statement(plan.loss)
    )
    stream.write(json.dumps(content, indent=2, allow_nan=False) + "\n")


def _query_text(query: SumQueryEvent) -> str:
    """Group, clipping norm and noise, and over which numbers that noise is."""
    # Control characters in a name could command the terminal.
    name = query.group if query.group.isprintable() else repr(query.group)
    text = f"{name}: {query.clipping_norm:.4g}, {query.noise_stddev:.4g}"
    if query.granularity is None:
        return f"{text}; {Arithmetic.FLOATING_POINT}"
    squared_bound = math.floor(Fraction(query.clipping_norm / query.granularity) ** 2)
    steps = query.noise_stddev / query.granularity
    return f"{text}; {Arithmetic.EXACT}: B = {squared_bound}, σ/γ = {steps:.4g}"


def _sampling_text(sampling: SamplingEvent) -> str:
    """Policy and neighbours, and which rounds users are in where an event has several."""
    text, schedule = f"{sampling.policy}, {sampling.relation}", sampling.schedule
    if schedule is None:
        return text
    return f"{text}, {schedule.participations} of {schedule.rounds} rounds"
