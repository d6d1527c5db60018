"""What ledgers cost: for each run, each ledger and all together, and as curves.

Accountants without an analysis of some events are left out, and say why; if none has one, the first
refusal is raised. `InvalidValueError` says what is out of range or missing, `LedgerError` which
ledger cannot be opened or verified.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

import numpy as np

from fedpriv.accounting.accountants import (
    ACCOUNTANTS,
    Accountant,
    Bound,
    PrivacyLoss,
    accountant_named,
)
from fedpriv.accounting.fdp import TradeOff, trade_off
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import Randomness, RoundEvent, merge_equal
from fedpriv.ledger.ledger import ChargedRow, ExportedLedger, Ledger, is_export, paid_events

_POINTS = 30  # of a curve


class Arithmetic(StrEnum):
    """Over which numbers sums and noise are."""

    EXACT = "exact"
    FLOATING_POINT = "floating-point noise"


@dataclass(frozen=True)
class LedgerContent:
    """A ledger that was read and verified, at one moment."""

    path: Path
    ledger_id: str
    population: str  # its name
    charges: tuple[ChargedRow, ...]

    @property
    def events(self) -> list[RoundEvent]:
        """What was charged, in order; of a series of rounds one event."""
        return paid_events(self.charges)

    def runs(self) -> dict[str, list[ChargedRow]]:
        """Charges by run, in the order of the runs' first ones."""
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
    rounds: int  # how many are in the ledgers, repeated attempts included

    @classmethod
    def of(cls, ledger: str | None, run: str | None, charges: Sequence[ChargedRow]) -> Self:
        """What charges paid for, and how many rounds they are of."""
        return cls(ledger, run, merge_equal(paid_events(charges)), len(charges))


@dataclass(frozen=True)
class PricedReleases:
    """What one accountant says of some releases: ε and δ, one given and the other found."""

    releases: Releases
    epsilon: float
    delta: float
    loss: PrivacyLoss  # in the accountant's own words; its ε is the one above unless ε was given


@dataclass(frozen=True)
class Spending:
    """What each run, each ledger and all ledgers cost, by each accountant that can tell."""

    ledgers: tuple[LedgerContent, ...]
    prices: tuple[PricedReleases, ...]
    refusals: tuple[str, ...]  # why accountants could not price some of these
    delta: float | None  # at which ε was found; None if ε was given
    epsilon: float | None  # at which δ was found; None if δ was given

    @property
    def randomness(self) -> Randomness:
        """The weakest source of randomness of all charges."""
        return weakest_randomness(row for ledger in self.ledgers for row in ledger.charges)

    @property
    def arithmetic(self) -> Arithmetic:
        """Exact if that of all charges is."""
        return weakest_arithmetic(row for ledger in self.ledgers for row in ledger.charges)


def read_ledger(path: Path) -> LedgerContent:
    """Read and verify a ledger, or an export of one."""
    if is_export(path):
        exported = ExportedLedger.load(path)
        return LedgerContent(path, exported.ledger_id, exported.population, exported.rows)
    with Ledger.open(path) as ledger:
        charges = tuple(ledger.charges())
        ledger.check_schema()
        return LedgerContent(path, ledger.ledger_id, ledger.population_name, charges)


def read_ledgers(paths: Sequence[Path]) -> tuple[LedgerContent, ...]:
    """Read and verify ledgers, or exports of them, all different."""
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
    """Price ledgers, their runs and their total, by one accountant or "all"."""
    if delta is not None and epsilon is not None:
        raise InvalidValueError(
            f"delta is {delta} and epsilon is {epsilon}; only one can be given, to find the other"
        )
    accountants = [*ACCOUNTANTS.values()] if accountant == "all" else [accountant_named(accountant)]
    ledgers = read_ledgers(paths)
    if not any(ledger.charges for ledger in ledgers):
        named = ", ".join(str(ledger.path) for ledger in ledgers)
        raise InvalidValueError(
            f"ledger {named} has no charge; nothing was released, and there is nothing to price"
        )
    if delta is None and epsilon is None:
        delta = default_delta(ledgers)

    prices, refusals = list[PricedReleases](), dict[str, None]()
    for releases in _all_releases(ledgers):
        # Where ε is given, only the words of a loss are used, which are the same at any δ.
        losses, refused = _losses(accountants, releases.events, 0.5 if delta is None else delta)
        refusals |= dict.fromkeys(map(str, refused))
        for loss in losses:
            at, held = loss.epsilon, loss.delta
            if epsilon is not None:
                at, held = (
                    epsilon,
                    accountant_named(loss.accountant).delta(releases.events, epsilon),
                )
            prices.append(PricedReleases(releases, at, held, loss))
    return Spending(ledgers, tuple(prices), tuple(refusals), delta, epsilon)


def default_delta(ledgers: Iterable[LedgerContent]) -> float:
    """Largest power of ten below 1/N.

    N is how many users the ledgers can hold together: populations of one name are taken to be the
    same users, others to have none in common.
    """
    enrolled: dict[str, int] = {}
    for ledger in ledgers:
        here = max((row.event.sampling.population for row in ledger.charges), default=0)
        enrolled[ledger.population] = max(enrolled.get(ledger.population, 0), here)
    return delta_for_population(sum(enrolled.values()))


def delta_for_population(users: int) -> float:
    """Largest power of ten below one over the number of users; without any, that of one.

    >>> delta_for_population(999), delta_for_population(1000)
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


def _all_releases(ledgers: Sequence[LedgerContent]) -> list[Releases]:
    """Each run, each ledger of several runs or of none, and all ledgers if there are several."""
    found = []
    for ledger in ledgers:
        runs, path = ledger.runs(), str(ledger.path)
        found += [Releases.of(path, run, charges) for run, charges in runs.items()]
        if len(runs) != 1:
            found.append(Releases.of(path, None, ledger.charges))
    if len(ledgers) > 1:
        everything = [row for ledger in ledgers for row in ledger.charges]
        found.append(Releases.of(None, None, everything))
    return found


def _losses(
    accountants: Iterable[Accountant], events: Sequence[RoundEvent], delta: float
) -> tuple[list[PrivacyLoss], list[UnsupportedEventError]]:
    """What accountants say, at least one of them, and why the others do not."""
    losses, refusals = list[PrivacyLoss](), list[UnsupportedEventError]()
    for accountant in accountants:
        try:
            losses.append(accountant.epsilon(events, delta))
        except UnsupportedEventError as error:
            refusals.append(error)
    if not losses:
        raise refusals[0]
    return losses, refusals


@dataclass(frozen=True)
class EpsilonCurve:
    """ε at one δ by number of rounds, by one accountant."""

    accountant: str
    bound: Bound
    delta: float
    # [n] number of charges, growing; repeated attempts count. A series costs all from its first on.
    rounds: tuple[int, ...]
    epsilon_low: tuple[float, ...]  # [n] lower ends of ε, 0 where there is none
    epsilon: tuple[float, ...]  # [n] inf where none is proven


@dataclass(frozen=True)
class Cost:
    """What a ledger costs by rounds, and what that means for a test."""

    epsilon: float  # finite, by the first accountant that has a bound, as is the trade-off
    delta: float
    by_rounds: tuple[EpsilonCurve, ...]  # one for each accountant
    trade_off: TradeOff


def cost_of(ledger: LedgerContent, delta: float) -> Cost:
    """ε by rounds, at up to 30 points for each accountant that can tell, and the trade-off."""
    losses, basis = _finite_losses(ledger, delta)
    by_rounds = tuple(_epsilon_curve(ledger, each) for each in losses)
    return Cost(basis.epsilon, delta, by_rounds, trade_off(ledger.events, basis.accountant))


def _finite_losses(ledger: LedgerContent, delta: float) -> tuple[list[PrivacyLoss], PrivacyLoss]:
    """What the whole ledger costs, by each accountant that can tell; the first bound is finite."""
    if not ledger.charges:
        raise InvalidValueError(f"ledger {ledger.path} has no charge; a curve needs at least one")
    losses, refusals = _losses(ACCOUNTANTS.values(), merge_equal(ledger.events), delta)
    basis = next((loss for loss in losses if loss.bound is not Bound.ESTIMATE), None)
    if basis is None:
        raise refusals[0]
    if math.isinf(basis.epsilon):
        raise InvalidValueError(
            f"ε of ledger {ledger.path} at delta {delta} is infinite, as a round has too little "
            "noise or delta is too small; a curve needs a finite one"
        )
    return losses, basis


def _epsilon_curve(ledger: LedgerContent, whole: PrivacyLoss) -> EpsilonCurve:
    accountant, charges = accountant_named(whole.accountant), ledger.charges
    rounds = tuple(int(n) for n in np.unique(np.linspace(1, len(charges), _POINTS).round()))
    events, paid = ledger.events, [sum(row.pays for row in charges[:n]) for n in rounds]
    priced = {n: accountant.epsilon(merge_equal(events[:n]), whole.delta) for n in {*paid}}
    losses = [priced[n] for n in paid]
    lows, ups = tuple(loss.epsilon_low for loss in losses), tuple(loss.epsilon for loss in losses)
    return EpsilonCurve(whole.accountant, whole.bound, whole.delta, rounds, lows, ups)
