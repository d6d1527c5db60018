"""Basic and advanced composition of (ε, δ) pairs with amplification by subsampling. Upper bounds.

Each round is reduced to one pair: the Gaussian mechanism is (ε₀, δ₀)-DP by its exact curve, and
on a Poisson sample it is (log(1 + q·(e^{ε₀} − 1)), q·δ₀)-DP when a user is added or removed (Li,
Qardaji & Su 2012, Theorem 1; Balle, Barthe & Gaboardi 2018, Theorem 8). The pairs are composed.

One pair says little of a round's curve, so these bounds are far above the truth. They are kept for
comparison with the literature.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar

from fedpriv.accounting.analytic import check_delta, epsilons
from fedpriv.accounting.rounds import Rounds, Vector, check_rounds

_ROUNDING = 1e-12
_LARGEST_EXPONENT = 700.0
_LARGEST_LOGIT = 20.0


def basic_epsilon(rounds: Rounds, delta: float) -> float:
    """ε by basic composition: Σ count·εᵢ, each round with an equal share of δ. An upper bound.

    Dwork & Roth 2014, Theorem 3.16.

    Args:
        rounds: number of rounds by (q, z).
        delta: δ in (0, 1) of all rounds together.

    Returns:
        ε ≥ 0; 0 for no round, ∞ for a round without noise and where ε is above the largest float.

    Raises:
        InvalidValueError: δ, a q, z or count is out of range.
    """
    check_delta(delta)
    check_rounds(rounds)
    return _Pairs.of(rounds).basic(math.log(delta)) if rounds else 0.0


def advanced_epsilon(rounds: Rounds, delta: float) -> float:
    """ε by advanced composition of rounds that may differ, at the best split of δ. An upper bound.

    With a part δ' of δ for the tail, and the rest divided equally among the rounds,

        ε = Σ count·εᵢ·tanh(εᵢ/2) + √(2·log(1/δ')·Σ count·εᵢ²).

    Dwork & Roth 2014, Theorem 3.20, with the mean loss of Kairouz, Oh & Viswanath 2015, Theorem
    3.5, which is below the εᵢ·(e^{εᵢ} − 1) of the former. Every split gives a bound, so an inexact
    search for the best one errs on the safe side.

    Args:
        rounds: number of rounds by (q, z).
        delta: δ in (0, 1) of all rounds together.

    Returns:
        ε ≥ 0, at most `basic_epsilon`; 0 for no round, ∞ for a round without noise and where ε is
        above the largest float.

    Raises:
        InvalidValueError: δ, a q, z or count is out of range.
    """
    basic = basic_epsilon(rounds, delta)
    if basic in (0.0, math.inf):
        return basic
    pairs, log_delta = _Pairs.of(rounds), math.log(delta)

    def bound(logit: float) -> float:
        tail, rest = -math.log1p(math.exp(-logit)), -math.log1p(math.exp(logit))
        return pairs.advanced(log_delta + tail, log_delta + rest)

    found = minimize_scalar(bound, bounds=(-_LARGEST_LOGIT, _LARGEST_LOGIT), method="bounded")
    return min(basic, float(found.fun))


def amplified_epsilon(epsilon: Vector, q: Vector) -> Vector:
    """ε of an (ε, δ)-DP mechanism run on a Poisson sample, where its δ becomes q·δ.

    An upper bound when one user is added or removed (Li, Qardaji & Su 2012, Theorem 1).

    Args:
        epsilon: [n] ε ≥ 0 of the mechanism.
        q: [n] sampling probabilities in (0, 1].

    Returns:
        [n] log(1 + q·(e^ε − 1)), between q·ε and ε, accurate relative to its size.
    """
    near = np.log1p(q * np.expm1(np.minimum(epsilon, _LARGEST_EXPONENT)))
    far = np.logaddexp(0.0, np.log(q) + epsilon)
    return np.where(epsilon <= _LARGEST_EXPONENT, near, far)


@dataclass(frozen=True)
class _Pairs:
    """Rounds as arrays, each [n]: distinct (q, z) and how many rounds have them."""

    q: Vector
    z: Vector
    count: Vector

    @staticmethod
    def of(rounds: Rounds) -> "_Pairs":
        q, z = np.array(list(rounds)).T
        return _Pairs(q, z, np.array(list(rounds.values()), dtype=np.float64))

    def basic(self, log_delta: float) -> float:
        return float(self.count @ self._epsilons(log_delta)) * (1 + _ROUNDING)

    def advanced(self, log_tail: float, log_rest: float) -> float:
        """ε with e^log_tail of δ for the tail and e^log_rest for the rounds."""
        epsilon = self._epsilons(log_rest)
        with np.errstate(over="ignore"):  # ∞ is a bound
            mean = float(self.count @ (epsilon * np.tanh(epsilon / 2)))
            square = float(self.count @ np.square(epsilon)) + np.finfo(np.float64).tiny
        return (mean + math.sqrt(2 * (_ROUNDING - log_tail) * square)) * (1 + _ROUNDING)

    def _epsilons(self, log_delta: float) -> Vector:
        """[n] ε of one round, where all rounds together may spend δ."""
        each = log_delta - _ROUNDING - math.log(self.count.sum()) - np.log(self.q)
        # A δ₀ of 1 allows everything: the round is (0, q)-DP.
        base = epsilons(np.minimum(each, -_ROUNDING), self.z)
        return np.where(each >= 0.0, 0.0, amplified_epsilon(base, self.q))
