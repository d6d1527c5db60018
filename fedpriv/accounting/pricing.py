"""What ledgers cost: for each run, each ledger and all together, and as curves.

Accountants without an analysis of some events are left out, and say why; if none has one, the first
refusal is raised. `InvalidValueError` says what is out of range or missing, `LedgerError` which
ledger cannot be opened or believed.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from fedpriv.accounting import classical
from fedpriv.accounting.accountant import Accountant, Bound, PrivacyLoss
from fedpriv.accounting.accountants import ACCOUNTANTS, accountant_named
from fedpriv.accounting.round_counts import Vector
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.budget import merge_equal
from fedpriv.ledger.events import Randomness, RoundEvent
from fedpriv.ledger.export import ExportedLedger, is_export
from fedpriv.ledger.ledger import ChargedRow, Ledger

_POINTS = 30
_ERRORS = 121
_WIDEST = 4.0


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
    """Read and check a ledger, or an export of one."""
    if is_export(path):
        exported = ExportedLedger.load(path)
        return LedgerContent(path, exported.ledger_id, exported.population, exported.rows)
    with Ledger.open(path) as ledger:
        charges = tuple(ledger.charges())
        return LedgerContent(path, ledger.ledger_id, ledger.population_name, charges)


def read_ledgers(paths: Sequence[Path]) -> tuple[LedgerContent, ...]:
    """Read and check ledgers, or exports of them."""
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
    """Price ledgers, their runs and their total."""
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


@dataclass(frozen=True)
class EpsilonCurve:
    """ε at one δ after so many rounds, by one accountant.

    Attributes:
        accountant: its name.
        bound: what kind of statement ε is.
        delta: δ in (0, 1).
        rounds: [n] number of charges, growing; repeated attempts count.
        epsilon_low: [n] lower ends of ε, 0 where there is none.
        epsilon: [n] ε, inf where none is proven.
    """

    accountant: str
    bound: Bound
    delta: float
    rounds: tuple[int, ...]
    epsilon_low: tuple[float, ...]
    epsilon: tuple[float, ...]


@dataclass(frozen=True)
class DeltaCurve:
    """δ of a whole ledger by ε, by one accountant.

    Attributes:
        accountant: its name.
        bound: what kind of statement δ is; of an interval, it is the upper end.
        epsilon: [n] growing from 0.
        delta: [n] in [0, 1].
    """

    accountant: str
    bound: Bound
    epsilon: tuple[float, ...]
    delta: tuple[float, ...]


@dataclass(frozen=True)
class TradeOff:
    """How badly any test must do that tells from all releases whether one user took part.

    Attributes:
        accountant: whose δ by ε it is made from.
        mu: μ of the Gaussian mechanism that costs the same ε at δ.
        type_one: [n] type I errors, growing from 0 to 1.
        type_two: [n] the type II error is at least this: the supremum of f_{ε, δ(ε)} over ε.
        gaussian: [n] G_μ, the least type II error against that Gaussian mechanism.
    """

    accountant: str
    mu: float
    type_one: Vector
    type_two: Vector
    gaussian: Vector


@dataclass(frozen=True)
class Cost:
    """What a ledger costs, and what that means for a test.

    Attributes:
        epsilon: ε at δ by the accountant of the trade-off, finite.
        delta: δ in (0, 1).
        by_rounds: one curve for each accountant.
        trade_off: of the whole ledger, by the first accountant that has a bound.
    """

    epsilon: float
    delta: float
    by_rounds: tuple[EpsilonCurve, ...]
    trade_off: TradeOff


@dataclass(frozen=True)
class Curves:
    """All curves of one ledger.

    Attributes:
        population: its name.
        cost: ε by rounds, and the trade-off.
        by_epsilon: one curve for each accountant.
    """

    population: str
    cost: Cost
    by_epsilon: tuple[DeltaCurve, ...]


def cost_of(ledger: LedgerContent, delta: float) -> Cost:
    """Compute ε by rounds, for which each accountant is asked at most 30 times, and the trade-off.

    Accountants without an analysis of the ledger's events have no curve.
    """
    losses = _losses(ledger, delta)
    return _cost(ledger, losses, _delta_curve(ledger, _basis(losses), _widest(losses)))


def curves_of(ledger: LedgerContent, delta: float) -> Curves:
    """Compute `cost_of`, and δ by ε, for which each accountant is asked 30 times more."""
    losses = _losses(ledger, delta)
    by_epsilon = [_delta_curve(ledger, each, _widest(losses)) for each in losses]
    basis = by_epsilon[losses.index(_basis(losses))]
    return Curves(ledger.population, _cost(ledger, losses, basis), tuple(by_epsilon))


def trade_off_of(curve: DeltaCurve, mu: float) -> TradeOff:
    """The trade-off function that all points of a curve of δ prove together.

    Each (ε, δ(ε)) is a lower bound f_{ε, δ(ε)} on the type II error (Dong, Roth & Su 2019,
    Proposition 2.11), so their largest is one too.
    """
    # Even steps of the normal quantile show both ends of the curve, which is steep there.
    inner = ndtr(np.linspace(-_WIDEST, _WIDEST, _ERRORS - 2))
    type_one = np.concatenate([[0.0], inner, [1.0]])
    pairs = zip(curve.epsilon, curve.delta, strict=True)
    bounds = [classical.trade_off_of_bound(type_one, epsilon, delta) for epsilon, delta in pairs]
    return TradeOff(
        curve.accountant,
        mu,
        type_one,
        np.max(bounds, axis=0),
        classical.trade_off(type_one, mu),
    )


def _losses(ledger: LedgerContent, delta: float) -> list[PrivacyLoss]:
    """What the whole ledger costs, by each accountant that can tell; one is a finite bound."""
    if not ledger.charges:
        raise InvalidValueError(f"ledger {ledger.path} has no charge; a curve needs at least one")
    events = merge_equal(ledger.events)
    losses, refusals = [], []
    for accountant in ACCOUNTANTS.values():
        try:
            losses.append(accountant.epsilon(events, delta))
        except UnsupportedEventError as error:
            refusals.append(error)
    if all(loss.bound is Bound.ESTIMATE for loss in losses):
        raise refusals[0]
    if not np.isfinite(_basis(losses).epsilon):
        raise InvalidValueError(
            f"ε of ledger {ledger.path} at delta {delta} is infinite, as a round has too little "
            "noise or delta is too small; a curve needs a finite one"
        )
    return losses


def _basis(losses: Iterable[PrivacyLoss]) -> PrivacyLoss:
    """The first bound, from which the trade-off is made."""
    return next(loss for loss in losses if loss.bound is not Bound.ESTIMATE)


def _widest(losses: Iterable[PrivacyLoss]) -> float:
    """The largest ε of a curve of δ."""
    return 1.5 * _basis(losses).epsilon or 1.0


def _cost(ledger: LedgerContent, losses: Iterable[PrivacyLoss], basis: DeltaCurve) -> Cost:
    kept = tuple(losses)
    whole = _basis(kept)
    return Cost(
        whole.epsilon,
        whole.delta,
        tuple(_epsilon_curve(ledger, each) for each in kept),
        trade_off_of(basis, classical.equivalent_mu(whole.epsilon, whole.delta)),
    )


def _epsilon_curve(ledger: LedgerContent, whole: PrivacyLoss) -> EpsilonCurve:
    accountant = accountant_named(whole.accountant)
    events = ledger.events
    rounds = tuple(int(n) for n in np.unique(np.linspace(1, len(events), _POINTS).round()))
    losses = [accountant.epsilon(merge_equal(events[:n]), whole.delta) for n in rounds]
    return EpsilonCurve(
        whole.accountant,
        whole.bound,
        whole.delta,
        rounds,
        tuple(loss.epsilon_low for loss in losses),
        tuple(loss.epsilon for loss in losses),
    )


def _delta_curve(ledger: LedgerContent, whole: PrivacyLoss, widest: float) -> DeltaCurve:
    accountant = accountant_named(whole.accountant)
    events = merge_equal(ledger.events)
    # Most of the trade-off is made by small ε.
    epsilon = tuple(float(x) for x in widest * np.linspace(0.0, 1.0, _POINTS) ** 2)
    delta = tuple(accountant.delta(events, x) for x in epsilon)
    return DeltaCurve(whole.accountant, whole.bound, epsilon, delta)
