"""What ledgers cost: for each run, for each ledger, and for all of them together."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

from fedpriv.accounting.accountant import Accountant, PrivacyLoss
from fedpriv.accounting.accountants import ACCOUNTANTS, accountant_named
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.budget import merge_equal
from fedpriv.ledger.events import Randomness, RoundEvent
from fedpriv.ledger.export import ExportedLedger, is_export
from fedpriv.ledger.ledger import ChargedRow, Ledger


class Arithmetic(StrEnum):
    """Over which numbers sums and noise are."""

    EXACT = "exact"
    FLOATING_POINT = "floating-point noise"


@dataclass(frozen=True)
class LedgerContent:
    """A ledger that was read and believed, at one moment.

    Attributes:
        path: the file.
        ledger_id: 32 hexadecimal digits.
        population: name of the population.
        charges: all of them, in order.
    """

    path: Path
    ledger_id: str
    population: str
    charges: tuple[ChargedRow, ...]

    @property
    def events(self) -> list[RoundEvent]:
        """The event of each charge, in order."""
        return [row.event for row in self.charges]

    def runs(self) -> dict[str, list[RoundEvent]]:
        """Events by run, in the order of the runs' first charges."""
        runs: dict[str, list[RoundEvent]] = {}
        for row in self.charges:
            runs.setdefault(row.run, []).append(row.event)
        return runs


@dataclass(frozen=True)
class Part:
    """Releases that are priced together.

    Attributes:
        ledger: path of the ledger; None: all ledgers.
        run: name of the run; None: all runs.
        events: what was released, equal events merged.
    """

    ledger: str | None
    run: str | None
    events: tuple[RoundEvent, ...]

    @property
    def rounds(self) -> int:
        """Number of rounds, repeated attempts included."""
        return sum(event.count for event in self.events)


@dataclass(frozen=True)
class Price:
    """What one accountant says of one part.

    Attributes:
        part: the releases.
        epsilon: ε, given or found.
        delta: δ, given or found.
        loss: the accountant's own words; its ε is the one above unless ε was given.
    """

    part: Part
    epsilon: float
    delta: float
    loss: PrivacyLoss


@dataclass(frozen=True)
class Spending:
    """What ledgers cost.

    Attributes:
        ledgers: what was priced.
        prices: of each run, each ledger and all ledgers, by each accountant that can tell.
        refusals: why accountants could not price some of these.
        delta: δ at which ε was found; None if ε was given.
        epsilon: ε at which δ was found; None if δ was given.
    """

    ledgers: tuple[LedgerContent, ...]
    prices: tuple[Price, ...]
    refusals: tuple[str, ...]
    delta: float | None
    epsilon: float | None

    @property
    def randomness(self) -> Randomness:
        """The weakest source of randomness of all charges."""
        return weakest_randomness(row for ledger in self.ledgers for row in ledger.charges)

    @property
    def arithmetic(self) -> Arithmetic:
        """Exact if that of all charges is."""
        return weakest_arithmetic(row for ledger in self.ledgers for row in ledger.charges)


def read_ledger(path: Path) -> LedgerContent:
    """Read and check a ledger, or an export of one.

    Raises:
        LedgerError: it cannot be opened or believed.
    """
    if is_export(path):
        exported = ExportedLedger.load(path)
        return LedgerContent(path, exported.ledger_id, exported.population, exported.rows)
    with Ledger.open(path) as ledger:
        charges = tuple(ledger.charges())
        return LedgerContent(path, ledger.ledger_id, ledger.population_name, charges)


def read_ledgers(paths: Sequence[Path]) -> tuple[LedgerContent, ...]:
    """Read and check ledgers, or exports of them.

    Raises:
        LedgerError: one cannot be opened or believed.
        InvalidValueError: two files are one ledger, whose charges would count twice.
    """
    found: dict[str, LedgerContent] = {}
    for path in paths:
        content = read_ledger(path)
        if content.ledger_id in found:
            raise InvalidValueError(
                f"{found[content.ledger_id].path} and {path} are one ledger, {content.ledger_id}; "
                "each ledger must be given once"
            )
        found[content.ledger_id] = content
    return tuple(found.values())


def price(
    paths: Sequence[Path], delta: float | None, epsilon: float | None, accountant: str
) -> Spending:
    """Price ledgers, their runs and their total.

    Args:
        paths: ledger files or exports, each of another ledger.
        delta: δ at which to find ε; None without an ε: `default_delta`.
        epsilon: ε at which to find δ instead.
        accountant: a key of `ACCOUNTANTS`, or "all".

    Raises:
        InvalidValueError: δ or ε is out of range, both are given, there is no such accountant, two
            files are one ledger, or no ledger has a charge.
        LedgerError: a ledger cannot be opened or believed.
        UnsupportedEventError: none of the accountants has an analysis of the events of a run, of
            a ledger or of all ledgers together.
    """
    if delta is not None and epsilon is not None:
        raise InvalidValueError(
            f"delta is {delta} and epsilon is {epsilon}; only one can be given, to find the other"
        )
    names = list(ACCOUNTANTS) if accountant == "all" else [accountant]
    accountants = [accountant_named(name) for name in names]
    ledgers = read_ledgers(paths)
    if not any(ledger.charges for ledger in ledgers):
        named = ", ".join(str(ledger.path) for ledger in ledgers)
        raise InvalidValueError(
            f"ledger {named} has no charge; nothing was released, and there is nothing to price"
        )
    parts = _parts(ledgers)
    if epsilon is not None:
        answers = [_answers(part, accountants, partial(_delta_at, epsilon)) for part in parts]
    else:
        delta = default_delta(ledgers) if delta is None else delta
        answers = [_answers(part, accountants, partial(_epsilon_at, delta)) for part in parts]
    prices = tuple(price for found, _ in answers for price in found)
    refusals = tuple(dict.fromkeys(str(error) for _, refused in answers for error in refused))
    return Spending(ledgers, prices, refusals, delta, epsilon)


def default_delta(ledgers: Iterable[LedgerContent]) -> float:
    """Largest power of ten below 1/N.

    N is how many users the ledgers can hold together: populations of one name are taken to be the
    same users, others to have none in common.
    """
    enrolled: dict[str, int] = {}
    for ledger in ledgers:
        here = max((row.event.sampling.population for row in ledger.charges), default=0)
        enrolled[ledger.population] = max(enrolled.get(ledger.population, 0), here)
    return delta_below(sum(enrolled.values()))


def delta_below(users: int) -> float:
    """Largest power of ten below one over the number of users; without any, that of one.

    >>> delta_below(999), delta_below(1000)
    (0.001, 0.0001)
    """
    return 10.0 ** -(math.floor(math.log10(max(1, users))) + 1)


def weakest_arithmetic(charges: Iterable[ChargedRow]) -> Arithmetic:
    """Exact if every sum query of all charges is over whole numbers of steps."""
    queries = (query for row in charges for query in row.event.queries)
    exact = all(query.granularity is not None for query in queries)
    return Arithmetic.EXACT if exact else Arithmetic.FLOATING_POINT


def weakest_randomness(charges: Iterable[ChargedRow]) -> Randomness:
    """The weakest source of randomness of all charges."""
    seeded = any(row.randomness is Randomness.SEEDED for row in charges)
    return Randomness.SEEDED if seeded else Randomness.OPERATING_SYSTEM


def _parts(ledgers: Sequence[LedgerContent]) -> list[Part]:
    """Each run, each ledger of several runs or of none, and all ledgers if there are several."""
    parts = []
    for ledger in ledgers:
        runs = ledger.runs()
        path = str(ledger.path)
        parts += [Part(path, run, merge_equal(events)) for run, events in runs.items()]
        if len(runs) != 1:
            parts.append(Part(path, None, merge_equal(ledger.events)))
    if len(ledgers) > 1:
        everything = [event for ledger in ledgers for event in ledger.events]
        parts.append(Part(None, None, merge_equal(everything)))
    return parts


def _answers(
    part: Part, accountants: Sequence[Accountant], ask: Callable[[Part, Accountant], Price]
) -> tuple[list[Price], list[UnsupportedEventError]]:
    """What the accountants say of a part, and why some do not; one of them must."""
    prices, refusals = [], []
    for accountant in accountants:
        try:
            prices.append(ask(part, accountant))
        except UnsupportedEventError as error:
            refusals.append(error)
    if not prices:
        raise refusals[0]
    return prices, refusals


def _epsilon_at(delta: float, part: Part, accountant: Accountant) -> Price:
    loss = accountant.epsilon(part.events, delta)
    return Price(part, loss.epsilon, delta, loss)


def _delta_at(epsilon: float, part: Part, accountant: Accountant) -> Price:
    delta = accountant.delta(part.events, epsilon)
    # Only the words of this loss are used, and they are the same at any δ.
    return Price(part, epsilon, delta, accountant.epsilon(part.events, 0.5))
