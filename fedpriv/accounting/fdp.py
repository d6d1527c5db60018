"""f-DP: trade-off functions of tests on releases (Dong, Roth & Su 2019).

A test guesses from all releases whether one given user took part. Its type I error α is the
probability of a false alarm, its type II error the probability of a miss. Releases are f-DP if no
test has a type II error below f(α). They are

* (ε, δ)-DP if and only if they are f_{ε,δ}-DP, and (ε, δ)-DP for all pairs of a set if and only if
  sup f_{ε,δ}-DP (Proposition 2.11). So upper ends of δ at a few ε give a lower bound of the truth;
* μ-GDP if they are G_μ-DP: as hard to distinguish as N(0, 1) and N(μ, 1). This holds for unsampled
  rounds with μ² = Σ 1/z². Sampled rounds only converge to a G_μ (Bu et al. 2020, Section 3.1), and
  the least μ for which they are μ-GDP is that without sampling: δ(ε) ≥ q^T·δ'(ε + T·log(1/q)),
  where δ' belongs to T unsampled rounds.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import ndtr, ndtri

from fedpriv.accounting.accountants import Bound, accountant_named, gaussian_rounds
from fedpriv.accounting.round_counts import Vector, unsampled_noise_multiplier
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import NeighbouringRelation, RoundEvent, merge_equal

_PAIRS, _LEAST_DELTA = 64, 1e-6  # (ε, δ) evenly spaced up to ε at the least δ: accurate to ~0.001
_PLANNED = 0.3, _LEAST_DELTA, 1e-2  # plans for these δ serve all pairs; often the first suffices
_ROUNDING = 2.0**-50  # of the few operations of f_{ε,δ}, whose relevant parts are at most 1


@dataclass(frozen=True)
class TradeOff:
    """A bound on every test that guesses from all releases whether one user took part."""

    accountant: str  # the accountant that computed δ for each ε
    relation: NeighbouringRelation  # of the two populations to distinguish
    bound: Bound  # if not an estimate, type II errors are lower bounds, and powers upper bounds
    pairs: tuple[tuple[float, float], ...]  # (ε, δ(ε)), ε increasing from 0; all hold at once
    mu: float | None  # set if releases are exactly μ-GDP, as if every user takes part in each round

    def type_two(self, type_one: ArrayLike) -> Vector:
        """Return the least type II error of any test at type I errors in [0, 1], of any shape."""
        bounds = [trade_off_of_bound(type_one, *pair) for pair in self.pairs]
        return np.asarray(np.maximum(np.max(bounds, axis=0) - _ROUNDING, 0.0))

    def power(self, type_one: ArrayLike) -> Vector:
        """Return the largest probability of detecting a user who took part, at type I errors."""
        return 1.0 - self.type_two(type_one)

    @property
    def advantage(self) -> float:
        """The largest difference between power and type I error of any test: δ at ε = 0."""
        return self.pairs[0][1]


def trade_off(events: Iterable[RoundEvent], accountant: str = "tight") -> TradeOff:
    """Return the trade-off function of events, in any order, by one of `ACCOUNTANTS`.

    Raises the errors of `accountants.epsilon`.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> f = trade_off([poisson_gaussian(q=256 / 60_000, noise_multiplier=1.3, count=3515)])
    >>> bool(f.power(0.05) < 0.09)
    True
    """
    pricing, distinct = accountant_named(accountant), merge_equal(events)
    loss = pricing.epsilon(distinct, _LEAST_DELTA)
    largest = loss.epsilon if math.isfinite(loss.epsilon) else 0.0
    epsilons = sorted({float(x) for x in np.linspace(0.0, largest, _PAIRS)})
    deltas = pricing.deltas(distinct, epsilons, _PLANNED).tolist()
    pairs = tuple(zip(epsilons, deltas, strict=True))
    mu = None
    with suppress(UnsupportedEventError):
        rounds = gaussian_rounds(distinct, "gdp")
        if all(q == 1.0 for q, _ in rounds):
            z = unsampled_noise_multiplier(rounds)
            mu = 1.0 / z if z > 0.0 else math.inf
    return TradeOff(accountant, loss.relation, loss.bound, pairs, mu)


def gaussian_trade_off(type_one: ArrayLike, mu: float) -> Vector:
    """Return G_μ(α) = Φ(Φ⁻¹(1 − α) − μ), the least type II error between N(0, 1) and N(μ, 1)."""
    return np.asarray(ndtr(-ndtri(_errors(type_one)) - mu))


def trade_off_of_bound(type_one: ArrayLike, epsilon: float, delta: float) -> Vector:
    """Return f(α) = max{0, 1 − δ − e^ε·α, e^−ε·(1 − δ − α)} at type I errors α of any shape.

    It is the least type II error under (ε, δ)-DP (Bu et al. 2020, equation (2.1)).
    """
    errors = _errors(type_one)
    with np.errstate(over="ignore", invalid="ignore"):  # ∞·0 at α = 0
        steep = 1 - delta - np.where(errors > 0.0, np.exp(epsilon) * errors, 0.0)
    flat = np.exp(-epsilon) * (1 - delta - errors)
    return np.asarray(np.maximum(0.0, np.maximum(steep, flat)))


def _errors(type_one: ArrayLike) -> Vector:
    errors = np.asarray(type_one, dtype=np.float64)
    outside = errors[~((errors >= 0.0) & (errors <= 1.0))]
    if outside.size:
        raise InvalidValueError(f"a type I error is {outside.flat[0]}; it must be in [0, 1]")
    return errors
