"""f-DP: how well releases can be told apart, by trade-off functions (Dong, Roth & Su 2019).

A test guesses from all releases whether one given user took part. Its type I error α is the
probability of a false alarm, its type II error that of a miss. Releases are f-DP if no test has a
type II error below f(α). They are

* (ε, δ)-DP if and only if they are f_{ε,δ}-DP, and (ε, δ)-DP for all pairs of a set if and only if
  sup f_{ε,δ}-DP (Proposition 2.11). So upper ends of δ at a few ε give a lower bound of the truth;
* μ-GDP if they are G_μ-DP: as hard to tell apart as N(0, 1) and N(μ, 1). Unsampled rounds are, with
  μ² = Σ 1/z². Sampled ones only tend to a G_μ (Bu et al. 2020, Section 3.1), and are μ-GDP for no
  less than without sampling: δ(ε) ≥ q^T·δ'(ε + T·log(1/q)), with δ' of T unsampled rounds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from fedpriv.accounting.accountants import Bound, accountant_named, gaussian_rounds
from fedpriv.accounting.classical import gaussian_mu
from fedpriv.accounting.round_counts import Vector
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import NeighbouringRelation, RoundEvent, merge_equal
from fedpriv.support.checks import require

_PAIRS, _LEAST_DELTA = 64, 1e-6  # (ε, δ), evenly spaced up to ε at the least δ: right to ~0.001
_ROUNDING = 2.0**-50  # of the few operations of f_{ε,δ}, whose parts that count are at most 1


@dataclass(frozen=True)
class TradeOff:
    """How badly any test must do that tells from all releases whether one user took part."""

    accountant: str  # whose δ by ε this is
    relation: NeighbouringRelation  # which two populations are to be told apart
    bound: Bound  # of an estimate, all is one; else errors are at least, powers at most as stated
    pairs: tuple[tuple[float, float], ...]  # (ε, δ(ε)), ε growing from 0; all hold at once
    mu: float | None  # of the Gaussian that the releases are, or tend to; None: none is known
    is_gdp: bool  # whether they are μ-GDP, exactly so if every user takes part; else CLT's estimate

    def type_two(self, type_one: ArrayLike) -> Vector:
        """The type II error of any test is at least this, at type I errors in [0, 1], any shape."""
        bounds = [trade_off_of_bound(type_one, *pair) for pair in self.pairs]
        return np.asarray(np.maximum(np.max(bounds, axis=0) - _ROUNDING, 0.0))

    def power(self, type_one: ArrayLike) -> Vector:
        """A user who took part is found with at most this probability, at that of false alarms."""
        return 1.0 - self.type_two(type_one)

    @property
    def advantage(self) -> float:
        """How far the power of any test is above its type I error, at most: δ at ε = 0."""
        return self.pairs[0][1]


def trade_off(events: Iterable[RoundEvent], accountant: str = "tight") -> TradeOff:
    """The trade-off function of a ledger's or plan's events, in any order, by one of `ACCOUNTANTS`.

    Raises as `epsilon`.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> found = trade_off([poisson_gaussian(q=256 / 60_000, noise_multiplier=1.3, count=3515)])
    >>> round(found.mu, 2), bool(found.power(0.05) < 0.09)
    (0.23, True)
    """
    pricing, merged = accountant_named(accountant), merge_equal(events)
    loss = pricing.epsilon(merged, _LEAST_DELTA)
    farthest = loss.epsilon if math.isfinite(loss.epsilon) else 0.0
    epsilons = sorted({float(x) for x in np.linspace(0.0, farthest, _PAIRS)})
    pairs = tuple((each, pricing.delta(merged, each)) for each in epsilons)
    try:
        rounds = gaussian_rounds(merged, "gdp")
    except UnsupportedEventError:
        return TradeOff(accountant, loss.relation, loss.bound, pairs, None, is_gdp=False)
    mu, is_gdp = gaussian_mu(rounds), all(q == 1.0 for q, _ in rounds)
    return TradeOff(accountant, loss.relation, loss.bound, pairs, mu, is_gdp)


def gaussian_trade_off(type_one: ArrayLike, mu: float) -> Vector:
    """G_μ(α) = Φ(Φ⁻¹(1 − α) − μ): least type II error of any test between N(0, 1) and N(μ, 1)."""
    require(0.0 <= mu < math.inf, f"mu is {mu}; it must be finite and not negative")
    return np.asarray(ndtr(-ndtri(_errors(type_one)) - mu))


def trade_off_of_bound(type_one: ArrayLike, epsilon: float, delta: float) -> Vector:
    """f(α) = max{0, 1 − δ − e^ε·α, e^−ε·(1 − δ − α)}: least type II error under (ε, δ)-DP.

    Bu et al. 2020, equation (2.1), at type I errors α of any shape.
    """
    require(epsilon >= 0.0, f"epsilon is {epsilon}; it must not be negative")
    require(0.0 <= delta <= 1.0, f"delta is {delta}; it must be in [0, 1]")
    errors = _errors(type_one)
    with np.errstate(over="ignore", invalid="ignore"):  # ∞·0 is where α = 0
        steep = 1 - delta - np.where(errors > 0.0, np.exp(epsilon) * errors, 0.0)
    flat = np.exp(-epsilon) * (1 - delta - errors)
    return np.asarray(np.maximum(0.0, np.maximum(steep, flat)))


def _errors(type_one: ArrayLike) -> Vector:
    errors = np.asarray(type_one, dtype=np.float64)
    outside = errors[~((errors >= 0.0) & (errors <= 1.0))]
    if outside.size:
        raise InvalidValueError(f"a type I error is {outside.flat[0]}; it must be in [0, 1]")
    return errors
