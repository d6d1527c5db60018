"""Tables and numbers for the terminal, and as JSON for other programs."""

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from typing import Literal

import rich.table
from pydantic_core import to_json
from rich import box
from rich.console import Console
from rich.text import Text

from fedpriv.accounting.accountants import Bound, PrivacyLoss, gaussian_rounds, sampling_text
from fedpriv.accounting.calibration import Plan
from fedpriv.accounting.fdp import trade_off
from fedpriv.accounting.pricing import Arithmetic, Spending, is_export, read_ledger
from fedpriv.accounting.risks import Risks, risks_of
from fedpriv.errors import InvalidValueError
from fedpriv.ledger import Head
from fedpriv.ledger.events import SamplingEvent, SumQueryEvent, Unit
from fedpriv.ledger.ledger import ChargedRow, ExportedLedger, Ledger, paid_events
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.support.checks import epsilon_down, epsilon_up, require, text_down, text_up

_UNBROKEN = 10_000  # characters in a line that is not for a terminal


@dataclass(frozen=True)
class Column:
    """The heading of a column, with its unit if any, and the kind of its cells."""

    name: str
    kind: Literal["number", "text", "long"] = "number"  # "long" may be broken anywhere


@dataclass(frozen=True)
class Table:
    """A table of a page or of the terminal; cells are text."""

    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    simulation_only: bool = False  # whether it shows numbers without any guarantee


def screen(*, quiet: bool = False) -> Console:
    """Return a console that breaks lines only on a terminal; other programs read whole rows."""
    console = Console(markup=False, emoji=False, quiet=quiet, highlight=False)
    if not (console.is_terminal or console.is_jupyter or "COLUMNS" in os.environ):
        console.width = _UNBROKEN
    return console


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table; brackets in cells are text, not markup.

    If borders would break words, the table has none; if it still does not fit, each row is printed
    as a list of its cells with headings.
    """
    console, count, border = console or screen(), len(table.columns), box.HEAVY_HEAD
    title = Text("simulation only: " * table.simulation_only + table.caption)
    widths: Sequence[int | None] = [None] * count
    if count > 2:
        widths = _whole_words(table, console.width - 3 * count - 1)
        if not widths:
            border, widths = box.SIMPLE_HEAD, _whole_words(table, console.width - 2 * count)
        if not widths:
            _print_rows(table, title, console)
            return
    rich_table = rich.table.Table(
        title=title,
        box=border,
        pad_edge=border is box.HEAVY_HEAD,
        collapse_padding=border is box.SIMPLE_HEAD,
        show_header=any(column.name for column in table.columns),
    )
    for column, width in zip(table.columns, widths, strict=True):
        side: Literal["left", "right"] = "right" if column.kind == "number" else "left"
        rich_table.add_column(Text(column.name), justify=side, overflow="fold", width=width)
    for row in table.rows:
        rich_table.add_row(*map(Text, row))
    console.print(rich_table)


def _whole_words(table: Table, room: int) -> list[int]:
    """Return widths of columns, `room` in total, that break no word; empty if there are none."""
    words, lines = list[int](), list[int]()
    for at, column in enumerate(table.columns):
        cells = [row[at] for row in table.rows]
        lines.append(max(len(line) for cell in [column.name, *cells] for line in cell.split("\n")))
        # Numbers are not broken, nor is text next to them in a cell.
        parts = cells if column.kind == "number" else [w for cell in cells for w in cell.split()]
        words.append(max(map(len, [*column.name.split(), *parts]), default=0))
    spare, columns = room - sum(words), len(words)
    if spare < 0:
        return []
    for at in sorted(range(len(words)), key=lambda at: lines[at] - words[at]):
        extra = min(lines[at] - words[at], spare // columns)
        words[at], spare, columns = words[at] + extra, spare - extra, columns - 1
    return words


def _print_rows(table: Table, title: Text, console: Console) -> None:
    """Print each row as a list of its cells, after their headings."""
    console.print(title)
    names = [" ".join(column.name.split()) for column in table.columns]
    width = max(map(len, names))
    for row in table.rows:
        cells = (Text(f"{name:{width}}  {cell}") for name, cell in zip(names, row, strict=True))
        console.print("", *cells, sep="\n")


def plural(unit: str) -> str:
    """Return the plural of a unit.

    >>> plural("user"), plural("microbatch")
    ('users', 'microbatches')
    """
    return f"{unit}es" if unit.endswith("ch") else f"{unit}s"


def protected(charges: Iterable[ChargedRow]) -> str:
    """Return a description of the users that a ledger's ε protects; "" if none joined or left."""
    sizes = dict.fromkeys(row.event.sampling.population for row in charges)
    if len(sizes) < 2:
        return ""
    return f"those enrolled in all runs (N = {', '.join(map(str, sizes))}); others spent less"


def cohort_text(sampling: SamplingEvent) -> str:
    """Return a description of how cohorts are drawn, and from how many units."""
    k, larger = sampling.examples_per_user, sampling.projection
    examples = f"up to {k} examples of each of " if k else ""
    text = f"{sampling_text(sampling)} of {examples}N = {sampling.population} "
    text += plural(sampling.unit)
    if larger is None:
        return text
    return f"{text}, as if q = {text_up(larger.sampling_probability)} of N = {larger.population:,}"


def _risks(spending: Spending) -> Risks | None:
    """Return the risks of all releases together, by the first accountant; None without releases."""
    total = spending.prices[-1].releases
    first = next(price.loss for price in spending.prices if price.releases is total)
    return risks_of(trade_off(total.events, first.accountant)) if total.events else None


def print_spending(spending: Spending) -> None:
    """Print the cost of each run, each ledger and all ledgers, in the accountants' words."""
    several = len(spending.ledgers) > 1
    populations = ", ".join(dict.fromkeys(content.population for content in spending.ledgers))
    symbol, fixed = "ε", f"δ = {spending.delta}" if spending.delta is not None else ""
    if spending.epsilon is not None:
        symbol, fixed = "δ", f"ε = {spending.epsilon}"
    headings = [Column("run", "text"), Column("rounds"), Column("accountant", "text")]
    headings += [Column(symbol), Column("what it is", "text")]
    headings = [Column("ledger", "text"), *headings] if several else headings
    rows = []
    for price in spending.prices:
        releases, loss = price.releases, price.loss
        cells = [epsilon_up(price.epsilon), _kind(loss)]
        if symbol == "δ":
            bound = Bound.ESTIMATE if loss.bound is Bound.ESTIMATE else Bound.UPPER
            cells = [text_up(price.delta, 3), bound]
        run = releases.run or ("all runs" if releases.events else "(no charge)")
        ledger = [releases.ledger or "all ledgers"] if several else []
        rows.append([*ledger, run, str(releases.rounds), loss.accountant, *cells])
    charged = [price for price in spending.prices if price.releases.events]
    unit = charged[0].loss.unit
    title = f"{unit}-level {symbol} of {populations} at {fixed}"
    console = screen()
    print_table(Table(title, headings, rows), console)
    for content in spending.ledgers:
        if not content.charges:
            console.print(f"{content.path} has no charge: nothing was released, so ε = 0.")
    if several:
        console.print(f"All ledgers: for one {unit} that may be in each of their populations.")
    # The table shows each accountant's result; their assumptions are printed once.
    assumptions = (p.loss.assumptions.partition(";")[0].rstrip(".") + "." for p in charged)
    refusals = (f"Not priced: {refusal}." for refusal in spending.refusals)
    risks = _risks(spending)
    power = [risks.text(unit)] if risks else []
    for sentence in (*dict.fromkeys(assumptions), *power, *refusals):
        console.print(sentence)
    console.print(f"Randomness: {spending.randomness}.")
    console.print(f"Sums and noise: {spending.arithmetic}.")
    if any(row.event.sampling.projection for c in spending.ledgers for row in c.charges):
        console.print("Runs were projections to larger populations: this is for enrolled users.")


def _kind(loss: PrivacyLoss) -> str:
    if loss.epsilon_low > 0.0 and math.isfinite(loss.epsilon):
        return f"upper bound; the truth is at least {epsilon_down(loss.epsilon_low)}"
    return Bound.UPPER if loss.bound is Bound.INTERVAL else loss.bound


def print_plan(plan: Plan, advantage: float | None) -> None:
    """Print settings that stay within a budget, and their cost.

    The budget is an `advantage`, or if this is None, an ε.
    """
    loss, rows = plan.loss, []
    for name, words, extreme in (
        ("noise_multiplier", "noise multiplier z", "smallest"),
        ("rounds", "rounds T", "largest"),
        ("sampling_probability", "sampling probability q", "largest"),
    ):
        # In full, since fewer digits would have another price.
        origin = f"{extreme} that fits" if name == plan.found else "given"
        rows.append((words, str(getattr(plan, name)), origin))
    rows.append(("sampling", str(plan.sampling.policy), str(plan.sampling.relation)))
    rows.append((f"{loss.unit}-level ε", epsilon_up(loss.epsilon), _kind(loss)))
    rows.append(("accountant", loss.accountant, ""))
    title = f"within ε = {epsilon_up(plan.target_epsilon)} at δ = {loss.delta}"
    if advantage is not None:
        title = f"within an advantage of {advantage}, with ε at δ = {loss.delta}"
    print_table(Table(title, [Column("", "text")] * 3, rows))
    risks = risks_of(trade_off([plan.event], loss.accountant))
    screen().print(loss.assumptions, risks.text(loss.unit), sep="\n")


def print_ledger(path: Path, last: int | None) -> None:
    """Print the charges of a ledger or an export, and below them the values that all share."""
    content = read_ledger(path)
    names = ("#", "run", "round", "attempt", "sampling", "q", "N", "group: S, σ", "z")
    rows, noise = [], dict[str, None]()
    for row in content.charges[-(last or len(content.charges)) :]:
        event, sampling = row.event, row.event.sampling
        place = map(str, (row.position, row.run, row.round, row.attempt))
        numbers = (text_up(sampling.sampling_probability), str(sampling.population))
        queries, z = "\n".join(map(_query_text, event.queries)), text_down(event.noise_multiplier)
        noise |= dict.fromkeys(map(_noise_text, event.queries))
        source = row.randomness.partition(":")[0]
        sampling_cell, schedule = f"{sampling.policy}, {sampling.relation}", sampling.schedule
        sampling_cell += "" if sampling.unit is Unit.USER else f" {sampling.unit}"
        if sampling.examples_per_user is not None:
            sampling_cell += f", {sampling.examples_per_user} of each"
        if schedule is not None:
            sampling_cell += f", {schedule.participations} of {schedule.rounds} rounds"
        if (bands := len(event.strategy)) > 1:
            sampling_cell += f", noise correlated over {bands} rounds"
        if (search := event.selection) is not None:
            sampling_cell += f", the best of about {search.mean:g} trials"
        if schedule is not None and row.series is not None:
            sampling_cell, numbers = f"round {row.part + 1} of {schedule.rounds}", ("", "")
            queries, z = f"paid by charge {row.series}", ""
        rows.append((*place, sampling_cell, *numbers, queries, z, source))
    projected = any(row.event.sampling.projection for row in content.charges)
    title = f"{content.population}: {len(content.charges)} charges"
    title += " of projections to a larger population" if projected else ""
    if paid_before := sum(not row.pays for row in content.charges):
        title += f", {paid_before} of them paid by others"
    columns = [Column(name, "text") for name in (*names, "randomness")]
    # Long values that are the same in all rows are printed once, below.
    constant = [at for at in (4, len(names)) if len({row[at] for row in rows}) == 1]
    indices = [at for at in range(len(columns)) if at not in constant]
    cells = [[row[at] for at in indices] for row in rows]
    console = screen()
    print_table(Table(title, [columns[at] for at in indices], cells), console)
    for line in (*(f"{columns[at].name}: {rows[0][at]}" for at in constant), *noise):
        console.print(line)


def print_verification(path: Path, participation: Path | None, head: str | None) -> None:
    """Verify a ledger or an export, and print the result; an error names the first bad row."""
    count, _, digest = (head or "0:").partition(":")
    if head is not None and not (digest and count.isdecimal() and len(count) < 20):
        raise InvalidValueError(f"--head is {head!r:.80}; it must be COUNT:HASH")
    expected = None if head is None else Head(int(count), digest)
    with (
        nullcontext(ExportedLedger.load(path)) if is_export(path) else Ledger.open(path) as ledger,
        ParticipationRecord.open(participation) if participation else nullcontext() as record,
    ):
        ledger.verify(record, expected)
        end = ledger.head
    cohorts = ", each with the cohort it commits to" if participation else ""
    screen().print(
        f"{path} is intact: {end.count} charges{cohorts}; head {end.count}:{end.hash}",
        soft_wrap=True,
    )


def spending_json(spending: Spending) -> str:
    """Return one JSON object: the ledgers, and a row for each pair of releases and accountant.

    In a row, `ledger` is null for all ledgers and `run` is null for all runs; if ε was computed,
    the row has the lower bound `epsilon_low`. `refusals` says why accountants have no rows. An
    infinite ε is the string "Infinity", which no program mistakes for a small number.
    """
    ledgers, rows = [], []
    for ledger in spending.ledgers:
        head = ledger.charges[-1].hash if ledger.charges else None
        facts = {name: getattr(ledger, name) for name in ("path", "ledger_id", "population")}
        ledgers.append(facts | {"charges": len(ledger.charges), "head": head})
    for price in spending.prices:
        place = {name: getattr(price.releases, name) for name in ("ledger", "run", "rounds")}
        row = place | asdict(price.loss) | {"epsilon": price.epsilon, "delta": price.delta}
        if spending.epsilon is not None:
            del row["epsilon_low"]
        rows.append(row)
    fixed = "delta" if spending.epsilon is None else "epsilon"
    content = {
        "ledgers": ledgers,
        fixed: getattr(spending, fixed),
        "randomness": spending.randomness,
        "arithmetic": spending.arithmetic,
        "rows": rows,
        "risks": _risks(spending),
        "refusals": spending.refusals,
    }
    return json_text(content)


def dp_events(path: Path) -> str:
    """Return a ledger, or an export of one, as a Python program for dp-accounting.

    Raises UnsupportedEventError unless Poisson-sampled Gaussians have the same price.
    """
    charges = read_ledger(path).charges
    require(bool(charges), f"ledger {path} has no charge; there is no event to write")
    rounds = gaussian_rounds(paid_events(charges), "dp-accounting")
    template = "SelfComposedDpEvent(PoissonSampledDpEvent({q}, GaussianDpEvent({z})), {count}),"
    events = (template.format(q=q, z=z, count=count) for (q, z), count in rounds.items())
    sampling, head = charges[0].event.sampling, f"{len(charges)}:{charges[-1].hash}"
    words = {"head": head, "unit": sampling.unit, "relation": sampling.relation}
    words["events"] = "\n".join(f"        {event}" for event in events)
    program = files("fedpriv.report").joinpath("templates", "dp_accounting.txt")
    return program.read_text("utf-8").format(**words)


def json_text(content: object) -> str:
    """Return indented JSON, in which numbers that are not finite are "Infinity" and "NaN"."""
    return to_json(content, indent=2, inf_nan_mode="strings").decode()


def plan_json(plan: Plan, advantage: float | None) -> str:
    """Return one JSON object: the settings, the name of the computed one, and their cost.

    The budget is the `advantage`, or if this is None, the ε.
    """
    names = ("found", "rounds", "sampling_probability", "noise_multiplier")
    content = {name: getattr(plan, name) for name in names}
    target = plan.target_epsilon if advantage is None else None
    content |= {"policy": plan.sampling.policy, "target_epsilon": target}
    content |= {"target_advantage": advantage, **asdict(plan.loss)}
    content["risks"] = risks_of(trade_off([plan.event], plan.loss.accountant))
    return json_text(content)


def _query_text(query: SumQueryEvent) -> str:
    """Return the text "group: clipping norm, standard deviation of noise" for a query."""
    norm, noise = text_up(query.clipping_norm), text_down(query.noise_stddev)
    return f"{_group(query)}: {norm}, {noise}"


def _group(query: SumQueryEvent) -> str:
    # Control characters in a name could command the terminal.
    return query.group if query.group.isprintable() else repr(query.group)


def _noise_text(query: SumQueryEvent) -> str:
    """Return a description of the arithmetic of a group's noise, with B and σ/γ if it is exact."""
    text = f"noise of {_group(query)}"
    if query.granularity is None:
        return f"{text}: {Arithmetic.FLOATING_POINT}"
    squared_bound = math.floor(Fraction(query.clipping_norm / query.granularity) ** 2)
    steps = text_down(query.noise_stddev / query.granularity)
    return f"{text}: {Arithmetic.EXACT}, B = {squared_bound}, σ/γ = {steps}"
