"""Risks of one user, for readers who are not statisticians, from a trade-off function.

An attacker sees all releases and guesses whether one given user took part. α is the probability of
a false alarm, and a trade-off function f bounds the probability of a miss from below by f(α)
(Wasserman & Zhou 2010, Theorem 2.4; Dong, Roth & Su 2019, Definition 2.3), so 1 − f(α) bounds the
power. f is the maximum of the straight lines of its pairs (ε, δ). Between two corners it is a
straight line, so a convex function minus f is largest at a corner.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import ndtr, ndtri

from fedpriv.accounting.accountants import Bound, epsilon
from fedpriv.accounting.calibration import Plan
from fedpriv.accounting.fdp import TradeOff, gaussian_trade_off, trade_off
from fedpriv.accounting.round_counts import Vector
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import Unit
from fedpriv.support.checks import percent_up, require, text_up

_FALSE_ALARMS = (0.001, 0.01, 0.05, 0.1)
_MOST_SLACK = 0.01  # with more slack, μ would say little
_ROUNDING = 1e-12
_WIDEST, _POINTS = 8.0, 2001  # normal quantiles at which a regret is measured


@dataclass(frozen=True)
class Risks:
    """Upper bounds on any attacker's success, or estimates if `bound` says so."""

    bound: Bound
    advantage: float  # largest difference between power and false alarms
    success: float  # largest probability of a right guess, if half of all guesses would be right
    power: Mapping[float, float]  # by probability of a false alarm
    mu: float  # the releases are μ-GDP, except for `slack`; ∞ if they may show everything
    slack: float  # largest excess of the power over that of μ-GDP
    regret: float  # largest overstatement of the power by μ-GDP; 0 if every user takes part

    @property
    def gaussian(self) -> str:
        """The μ of Gaussian differential privacy as text, with its slack and regret."""
        text = f"Gaussian DP: μ = {'∞' if self.mu == math.inf else text_up(self.mu, 4)}"
        if not self.slack:
            return text
        return f"{text}, up to δ = {text_up(self.slack, 2)}; regret {text_up(self.regret, 2)}"

    def text(self, unit: Unit) -> str:
        """Return sentences for a person whose data may be protected."""
        limit = "about" if self.bound is Bound.ESTIMATE else "at most"
        power_at_0_1, power_at_1 = percent_up(self.power[0.001]), percent_up(self.power[0.01])
        return (
            f"The chance to tell whether one {unit} took part rises from 50% to {limit} "
            f"{percent_up(self.success)}. Of those that took part, {limit} {power_at_1} are found "
            f"at 1% false alarms, {power_at_0_1} at 0.1%. {self.gaussian}."
        )


def risks_of(off: TradeOff) -> Risks:
    """Return the risks bounded by a trade-off function.

    μ is the least for which G_μ(α) − s ≤ f(α) at every α, with s = 1 − f(0), the δ of the largest
    ε. G_μ is convex, so the corners (α, β) of f decide: Φ(Φ⁻¹(1 − α) − μ) ≤ β + s, which is
    μ ≥ −Φ⁻¹(α) − Φ⁻¹(β + s). If every user takes part, μ is exact and s is 0. The regret is
    max f − G_μ, at least that of Gomez et al. 2025, which measures along a diagonal.

    >>> from fedpriv.accounting import poisson_gaussian, trade_off
    >>> risks = risks_of(trade_off([poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000)]))
    >>> round(risks.advantage, 3), round(risks.success, 4), round(risks.power[0.01], 4)
    (0.101, 0.5505, 0.0191)
    """
    slack, regret = float(off.power(0.0)), 0.0
    if off.mu is not None:
        mu, slack = off.mu, 0.0
    elif off.advantage >= 1.0 or slack > _MOST_SLACK:
        mu, slack = math.inf, 0.0
    else:
        corners = _corners(off)
        allowed = off.type_two(corners) + slack
        binding = (corners > 0.0) & (allowed < 1.0)
        mus = -ndtri(corners[binding]) - ndtri(allowed[binding])
        mu, slack = float(np.max(mus, initial=0.0)), slack + _ROUNDING
        alphas = ndtr(np.linspace(-_WIDEST, _WIDEST, _POINTS))
        regret = float(np.max(off.type_two(alphas) - gaussian_trade_off(alphas, mu)))
    power = {alpha: float(off.power(alpha)) for alpha in _FALSE_ALARMS}
    success = success_at(off, 0.5)
    return Risks(off.bound, off.advantage, success, power, mu, slack, max(0.0, regret))


def success_at(off: TradeOff, prior: float) -> float:
    """Return the largest probability of a right guess, if the user took part with `prior`.

    A test with false alarms α is right with probability at most
    π·(1 − f(α)) + (1 − π)·(1 − α), which is largest at a corner of f. With π = ½ it is
    ½ + advantage/2 (Kulynych et al. 2024).
    """
    require(0.0 <= prior <= 1.0, f"prior is {prior}; it must be in [0, 1]")
    corners = _corners(off)
    chances = prior * off.power(corners) + (1.0 - prior) * (1.0 - corners)
    return min(1.0, float(np.max(chances)) + _ROUNDING)


def _corners(off: TradeOff) -> Vector:
    """Return the intersections of the lines whose maximum is f: [corners], in [0, 1]."""
    epsilons, deltas = np.array(off.pairs, dtype=np.float64).T
    steep = np.exp(np.minimum(epsilons, 700.0))
    slopes = np.concatenate([steep, 1.0 / steep, [0.0]])  # downwards
    starts = np.concatenate([1.0 - deltas, (1.0 - deltas) / steep, [0.0]])
    with np.errstate(divide="ignore", invalid="ignore"):  # of parallel lines
        crossings = np.subtract.outer(starts, starts) / np.subtract.outer(slopes, slopes)
    return np.concatenate([np.unique(crossings[(crossings > 0.0) & (crossings < 1.0)]), [0.0, 1.0]])


def plan_of_advantage(
    advantage: float, delta: float, plan_within: Callable[[float, float], Plan], accountant: str
) -> Plan:
    """Return a plan with at most this `advantage`, priced at δ.

    The advantage is δ at ε = 0 (Kulynych et al. 2024), so the budget is (0, advantage).
    `plan_within` takes ε > 0 and δ; the smallest positive float stands for ε = 0, as
    δ(0) ≤ δ(ε) + tanh(ε/2). Bounds of a whole trade-off function can be looser than the bound of
    one δ, so the noise grows until they agree.
    """
    require(0.0 < advantage < 1.0, f"advantage is {advantage}; it must be in (0, 1)")
    zero, aim = math.ulp(0.0), advantage
    while True:
        try:
            plan = plan_within(zero, aim)
        except InvalidValueError as error:
            text = str(error).replace(f"epsilon is {zero} at delta {aim}", f"advantage is {aim}")
            raise InvalidValueError(text) from error
        reached = trade_off([plan.event], accountant).advantage
        if reached <= advantage:
            break
        aim *= 0.999 * advantage / reached
    return replace(plan, target_epsilon=0.0, loss=epsilon([plan.event], delta, accountant))
