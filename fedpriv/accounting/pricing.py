"""The cost of ledgers: for each run, each ledger and all ledgers together.

An accountant that cannot analyse some event is left out, and its reason is reported; if no
accountant can, the first reason is raised as an `UnsupportedEventError`. Functions raise
`InvalidValueError` if a value is out of range or missing, and `LedgerError` if a ledger cannot be
opened or verified.
"""

import math
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from fedpriv.accounting.accountants import ACCOUNTANTS, Accountant, PrivacyLoss, accountant_named
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import Randomness, RoundEvent, merge_equal
from fedpriv.ledger.ledger import ChargedRow, ExportedLedger, Ledger, paid_events
from fedpriv.support.checks import require


class Arithmetic(StrEnum):
    """The kind of numbers in which sums and noise are computed."""

    EXACT = "exact"
    FLOATING_POINT = "floating-point noise"


@dataclass(frozen=True)
class LedgerContent:
    """The content of a ledger at one moment, read and verified."""

    path: Path
    ledger_id: str
    population: str  # its name
    charges: tuple[ChargedRow, ...]

    @property
    def events(self) -> list[RoundEvent]:
        """The charged events, in order; one event for a series of rounds."""
        return paid_events(self.charges)

    def runs(self) -> dict[str, list[ChargedRow]]:
        """Return the charges by run, in the order of their first charges."""
        runs: dict[str, list[ChargedRow]] = {}
        for row in self.charges:
            runs.setdefault(row.run, []).append(row)
        return runs


@dataclass(frozen=True)
class Releases:
    """Releases that are priced together."""

    ledger: str | None  # its path; None: all ledgers
    run: str | None  # its name; None: all runs
    events: tuple[RoundEvent, ...]  # equal ones merged
    rounds: int  # number of charged rounds, including repeated attempts

    @classmethod
    def of(cls, ledger: str | None, run: str | None, charges: Sequence[ChargedRow]) -> Self:
        """Return the releases that these charges paid for."""
        return cls(ledger, run, merge_equal(paid_events(charges)), len(charges))


@dataclass(frozen=True)
class PricedReleases:
    """The cost (ε, δ) of releases by one accountant; one of the two is given, one computed."""

    releases: Releases
    epsilon: float
    delta: float
    loss: PrivacyLoss  # the accountant's full statement; its (ε, δ) differ if ε was given


@dataclass(frozen=True)
class Spending:
    """The price of each run, each ledger and all ledgers, by each accountant with an analysis."""

    ledgers: tuple[LedgerContent, ...]
    prices: tuple[PricedReleases, ...]
    refusals: tuple[str, ...]  # reasons of accountants without an analysis
    delta: float | None  # at which ε is computed; None if ε was given
    epsilon: float | None  # at which δ is computed; None if δ was given

    @property
    def randomness(self) -> Randomness:
        """The weakest source of randomness of all charges."""
        return weakest_randomness(row for ledger in self.ledgers for row in ledger.charges)

    @property
    def arithmetic(self) -> Arithmetic:
        """Exact if the arithmetic of all charges is exact."""
        return weakest_arithmetic(row for ledger in self.ledgers for row in ledger.charges)


def is_export(path: Path) -> bool:
    """Return whether a file may be an export: it is not SQLite, empty or absent."""
    # Opening and closing the file without SQLite would release this process's SQLite locks on it.
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
            file.execute("PRAGMA schema_version")
    except sqlite3.Error as error:
        return error.sqlite_errorcode == sqlite3.SQLITE_NOTADB
    return False


def read_ledger(path: Path) -> LedgerContent:
    """Read, verify and return a ledger, or an export of one."""
    if is_export(path):
        exported = ExportedLedger.load(path)
        return LedgerContent(path, exported.ledger_id, exported.population, exported.rows)
    with Ledger.open(path) as ledger:
        charges = tuple(ledger.charges())
        ledger.check_schema()
        return LedgerContent(path, ledger.ledger_id, ledger.population_name, charges)


def read_ledgers(paths: Sequence[Path]) -> tuple[LedgerContent, ...]:
    """Read, verify and return ledgers, or exports of them; InvalidValueError if one is repeated."""
    by_id: dict[str, LedgerContent] = {}
    for path in paths:
        content = read_ledger(path)
        if content.ledger_id in by_id:
            raise InvalidValueError(
                f"{by_id[content.ledger_id].path} and {path} are one ledger, {content.ledger_id}; "
                "each ledger must be given once"
            )
        by_id[content.ledger_id] = content
    return tuple(by_id.values())


def price(
    paths: Sequence[Path], delta: float | None, epsilon: float | None, accountant: str
) -> Spending:
    """Price ledgers, their runs and their total, by one accountant or "all".

    δ is given to compute ε, or ε to compute δ; without both, δ is `default_delta`.
    """
    limit = "only one can be given, to find the other"
    is_single = delta is None or epsilon is None
    require(is_single, f"delta is {delta} and epsilon is {epsilon}; {limit}")
    accountants = [*ACCOUNTANTS.values()] if accountant == "all" else [accountant_named(accountant)]
    ledgers = read_ledgers(paths)
    names = ", ".join(str(ledger.path) for ledger in ledgers)
    problem = "nothing was released, so there is nothing to price"
    require(any(row.charges for row in ledgers), f"ledger {names} has no charge; {problem}")
    if delta is None and epsilon is None:
        delta = default_delta(ledgers)

    prices, refusals = list[PricedReleases](), dict[str, None]()
    for releases in _all_releases(ledgers):
        # If ε is given, only the text of a loss is used, which is the same at any δ.
        losses, errors = _losses(accountants, releases.events, 0.5 if delta is None else delta)
        refusals |= dict.fromkeys(map(str, errors))
        for loss in losses:
            cost = loss.epsilon, loss.delta
            if epsilon is not None:
                cost = epsilon, accountant_named(loss.accountant).delta(releases.events, epsilon)
            prices.append(PricedReleases(releases, *cost, loss))
    return Spending(ledgers, tuple(prices), tuple(refusals), delta, epsilon)


def default_delta(ledgers: Iterable[LedgerContent]) -> float:
    """Return the largest power of ten below 1/N, where N counts the users of all ledgers.

    Populations with the same name are assumed to be the same users, and others to be disjoint.
    """
    enrolled: dict[str, int] = {}
    for ledger in ledgers:
        users = max((row.event.sampling.population for row in ledger.charges), default=0)
        enrolled[ledger.population] = max(enrolled.get(ledger.population, 0), users)
    return delta_for_population(sum(enrolled.values()))


def delta_for_population(users: int) -> float:
    """Return the largest power of ten below 1/N for N = max(1, `users`).

    >>> delta_for_population(999), delta_for_population(1000)
    (0.001, 0.0001)
    """
    return 10.0 ** -(math.floor(math.log10(max(1, users))) + 1)


def weakest_arithmetic(charges: Iterable[ChargedRow]) -> Arithmetic:
    """Return exact arithmetic if all sum queries of all charges add whole numbers of steps."""
    queries = (query for row in charges for query in row.event.queries)
    exact = all(query.granularity is not None for query in queries)
    return Arithmetic.EXACT if exact else Arithmetic.FLOATING_POINT


def weakest_randomness(charges: Iterable[ChargedRow]) -> Randomness:
    """Return the weakest source of randomness of all charges."""
    seeded = any(row.randomness is Randomness.SEEDED for row in charges)
    return Randomness.SEEDED if seeded else Randomness.OPERATING_SYSTEM


def _all_releases(ledgers: Sequence[LedgerContent]) -> list[Releases]:
    """Return the releases of each run, each ledger and all ledgers together, without repetition.

    A ledger is left out if it has exactly one run, and the total if there is only one ledger.
    """
    releases = []
    for ledger in ledgers:
        runs, path = ledger.runs(), str(ledger.path)
        releases += [Releases.of(path, run, charges) for run, charges in runs.items()]
        if len(runs) != 1:
            releases.append(Releases.of(path, None, ledger.charges))
    if len(ledgers) > 1:
        charges = [row for ledger in ledgers for row in ledger.charges]
        releases.append(Releases.of(None, None, charges))
    return releases


def _losses(
    accountants: Iterable[Accountant], events: Sequence[RoundEvent], delta: float
) -> tuple[list[PrivacyLoss], list[UnsupportedEventError]]:
    """Return losses by the accountants with an analysis, at least one, and errors of the others."""
    losses, refusals = list[PrivacyLoss](), list[UnsupportedEventError]()
    for accountant in accountants:
        try:
            losses.append(accountant.epsilon(events, delta))
        except UnsupportedEventError as error:
            refusals.append(error)
    if not losses:
        raise refusals[0]
    return losses, refusals


def losses_of(ledger: LedgerContent, delta: float) -> list[PrivacyLoss]:
    """Return the cost of a ledger by each accountant with an analysis; the first is a bound.

    InvalidValueError if it has no charge; UnsupportedEventError if no accountant has an analysis.
    """
    if not ledger.charges:
        raise InvalidValueError(f"ledger {ledger.path} has no charge; a curve needs at least one")
    return _losses(ACCOUNTANTS.values(), merge_equal(ledger.events), delta)[0]
