"""Curves of a ledger: ε by rounds, δ by ε, and the least errors of a test for one user."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from fedpriv.accounting import gdp
from fedpriv.accounting.accountant import Bound, PrivacyLoss
from fedpriv.accounting.accountants import ACCOUNTANTS, accountant_named
from fedpriv.accounting.rounds import Vector
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.budget import merge_equal
from fedpriv.report.spending import LedgerContent

_POINTS = 30
_ERRORS = 121
_WIDEST = 4.0


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

    Raises:
        InvalidValueError: δ is out of range, or the ledger has no charge or an infinite ε.
        UnsupportedEventError: no accountant has a bound for the ledger's events.
    """
    losses = _losses(ledger, delta)
    return _cost(ledger, losses, _delta_curve(ledger, _basis(losses), _widest(losses)))


def curves_of(ledger: LedgerContent, delta: float) -> Curves:
    """Compute `cost_of`, and δ by ε, for which each accountant is asked 30 times more.

    Raises:
        As `cost_of`.
    """
    losses = _losses(ledger, delta)
    by_epsilon = [_delta_curve(ledger, each, _widest(losses)) for each in losses]
    basis = by_epsilon[losses.index(_basis(losses))]
    return Curves(ledger.population, _cost(ledger, losses, basis), tuple(by_epsilon))


def trade_off_of(curve: DeltaCurve, mu: float) -> TradeOff:
    """The trade-off function that all points of a curve of δ prove together.

    Each (ε, δ(ε)) is a lower bound f_{ε, δ(ε)} on the type II error (Dong, Roth & Su 2019,
    Proposition 2.11), so their largest is one too.

    Args:
        curve: δ by ε, upper bounds.
        mu: μ ≥ 0 of the Gaussian mechanism to compare with.
    """
    # Even steps of the normal quantile show both ends of the curve, which is steep there.
    inner = ndtr(np.linspace(-_WIDEST, _WIDEST, _ERRORS - 2))
    type_one = np.concatenate([[0.0], inner, [1.0]])
    pairs = zip(curve.epsilon, curve.delta, strict=True)
    bounds = [gdp.trade_off_of_pair(type_one, epsilon, delta) for epsilon, delta in pairs]
    return TradeOff(
        curve.accountant,
        mu,
        type_one,
        np.max(bounds, axis=0),
        gdp.trade_off(type_one, mu),
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
        trade_off_of(basis, gdp.equivalent_mu(whole.epsilon, whole.delta)),
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
