"""What the command line prints of a ledger."""

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fedpriv.accounting.accountant import Bound, PrivacyLoss
from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.events import Randomness, RoundEvent
from fedpriv.accounting.ledger import Head, Ledger
from fedpriv.accounting.participation import ParticipationRecord
from fedpriv.errors import InvalidValueError


def default_delta(events: Sequence[RoundEvent]) -> float:
    """Largest power of ten below 1/N for the largest population N of the events.

    >>> from fedpriv.accounting.events import poisson_gaussian
    >>> default_delta([poisson_gaussian(0.1, 1.0, population=1000)])
    0.0001
    """
    population = max((event.sampling.population for event in events), default=1)
    return 10.0 ** -(math.floor(math.log10(population)) + 1)


def randomness_of(ledger: Ledger) -> Randomness:
    """The weakest source of randomness of all charges."""
    seeded = any(row.randomness is Randomness.SEEDED for row in ledger.charges())
    return Randomness.SEEDED if seeded else Randomness.OPERATING_SYSTEM


def format_epsilon(epsilon: float) -> str:
    """ε to three decimals, rounded up: what is printed is never below what is true.

    >>> format_epsilon(1.9991), format_epsilon(0.0), format_epsilon(float("inf"))
    ('2.000', '0.000', '∞')
    """
    return "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000) / 1000:.3f}"


def print_epsilon(path: Path, delta: float | None, accountant: str) -> None:
    """Print ε of each run of a ledger and of all runs together, by one or all accountants."""
    names = list(ACCOUNTANTS) if accountant == "all" else [accountant]
    with Ledger.open(path) as ledger:
        runs = {run: ledger.events(run) for run in ledger.runs()}
        events = [event for of_run in runs.values() for event in of_run]
        randomness = randomness_of(ledger)
        population = ledger.population_name
    delta = default_delta(events) if delta is None else delta
    if len(runs) > 1:
        runs["all runs"] = events
    table = Table(title=f"user-level ε of {population} at δ = {delta:g}")
    for column in ("run", "rounds", "accountant", "ε", "what it is"):
        table.add_column(column, justify="right" if column in ("rounds", "ε") else "left")
    console = Console()
    assumptions: dict[str, None] = {}
    for run, of_run in runs.items() or {"(no charge)": []}.items():
        for name in names:
            loss = epsilon_of(of_run, delta, name)
            assumptions[loss.assumptions] = None
            rounds = sum(event.count for event in of_run)
            table.add_row(run, str(rounds), name, format_epsilon(loss.epsilon), _kind(loss))
    console.print(table)
    for sentence in assumptions:
        console.print(sentence)
    console.print(f"Randomness: {randomness}.")


def print_ledger(path: Path, last: int | None) -> None:
    """Print the charges of a ledger, one line each."""
    with Ledger.open(path) as ledger:
        rows = list(ledger.charges())
        title = f"{ledger.population_name}: {len(rows)} charges"
    table = Table(title=title)
    for column in ("#", "run", "round", "attempt", "q", "N", "group: S, σ", "z", "randomness"):
        table.add_column(column)
    for row in rows[-(last or len(rows)) :]:
        groups = "\n".join(
            f"{q.group}: {q.clipping_norm:.4g}, {q.noise_stddev:.4g}" for q in row.event.queries
        )
        table.add_row(
            str(row.position),
            row.run,
            str(row.round),
            str(row.attempt),
            f"{row.event.sampling.sampling_probability:g}",
            str(row.event.sampling.population),
            groups,
            f"{row.event.noise_multiplier:.4g}",
            row.randomness.partition(":")[0],
        )
    Console().print(table)


def print_verification(path: Path, participation: Path | None, head: str | None) -> None:
    """Verify a ledger and say what was checked; a LedgerError names the first bad row."""
    expected = None if head is None else _parsed_head(head)
    with Ledger.open(path) as ledger:
        if participation is None:
            ledger.verify(head=expected)
        else:
            with ParticipationRecord.open(participation) as record:
                ledger.verify(record, expected)
        found = ledger.head
    Console().print(
        f"{path} is intact: {found.count} charges"
        + (", each with the cohort it commits to" if participation else "")
        + f"; head {found.count}:{found.hash}",
        soft_wrap=True,
        highlight=False,
    )


def _kind(loss: PrivacyLoss) -> str:
    low = math.floor(loss.epsilon_low * 1000) / 1000 if math.isfinite(loss.epsilon) else 0.0
    if low > 0.0:
        return f"upper bound; the truth is at least {low:.3f}"
    return str(Bound.ESTIMATE if loss.bound is Bound.ESTIMATE else Bound.UPPER)


def _parsed_head(head: str) -> Head:
    count, separator, digest = head.partition(":")
    if not separator or not count.isdecimal():
        raise InvalidValueError(f"--head is {head!r}; it must be COUNT:HASH")
    return Head(int(count), digest)
