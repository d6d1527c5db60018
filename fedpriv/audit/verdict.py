"""What an audit concludes: a lower bound of ε, and whether what the ledger says can be true.

Three tests share an error probability of 5%. Membership: canaries are told from those who are not
there better than the ledger's trade-off function allows. Noise: releases hold less energy than the
noise that was charged. Freshness: two releases are closer to each other than fresh noise allows.
The last two need no canaries, and see faults of noise that hardly help to find one canary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from scipy.special import gammainc

from fedpriv.accounting.accountants import accountant_named, format_epsilon
from fedpriv.accounting.fdp import trade_off
from fedpriv.audit.canaries import Canaries, Measurement
from fedpriv.audit.likelihood import log_likelihood_ratios
from fedpriv.audit.one_run import (
    best_guesses,
    epsilon_of_mu,
    estimated_epsilon,
    guess,
    least_mu,
    mu_of_epsilon,
    refutes,
)
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent, merge_equal
from fedpriv.support.checks import hold_numbers

ERROR = 0.05  # the chance that a true claim is refuted, or that a bound is above the truth
_OF_NOISE = 0.0005  # of it, for each test of noise; the rest is for that of membership
_LARGEST_EPSILON = 40.0  # that guesses are planned for
_COMPARED = 1000  # rounds before one, that it is compared with
FEWEST_CANARIES = 20  # fewer show little even if all guesses are right
MOST_CANARIES = 100_000  # half a minute to plan for, and a gigabyte of scores over 1,000 rounds


@dataclass(frozen=True)
class Audit:
    """How a run audits itself.

    Canaries are invented users beside the real ones. Each is there by a secret coin; those that are
    there are drawn, clipped, added up and noised like users, and add a little noise to the model:
    √(q·m/2) clipping norms in a round, for m canaries, beside z·√D of noise on D numbers.
    """

    canaries: int  # m, from 20 to 100,000; with more, the bound on ε is closer to the truth

    def __post_init__(self) -> None:
        hold_numbers(self)
        if self.canaries < FEWEST_CANARIES:
            raise InvalidValueError(
                f"canaries is {self.canaries}; it must be at least {FEWEST_CANARIES}, since fewer "
                "show hardly anything"
            )
        if self.canaries > MOST_CANARIES:
            raise InvalidValueError(
                f"canaries is {self.canaries}; it must be at most {MOST_CANARIES}"
            )


@dataclass(frozen=True)
class AuditResult:
    """What an audit found in the releases of one run; it may be published.

    With a confidence of 95%, the run leaks at least as much as (epsilon_low, δ), if the trade-off
    function of what it did is Gaussian; the verdict needs no such assumption.
    """

    canaries: int  # m
    included: int  # how many of them were there
    rounds: int  # how many releases were measured
    guesses: int  # r, for the bound
    correct: int  # c
    verdict_guesses: int  # those for the verdict
    verdict_correct: int
    mu_low: float  # μ-GDP is refuted for every μ below
    epsilon_low: float  # at `delta`
    # By normal laws of how far releases go along canaries (Andrew et al. 2023): no bound.
    epsilon_estimate: float | None
    epsilon: float  # of the charges of the run's rounds at `delta`: what is claimed
    delta: float
    noise_level: float  # p-value of the test of noise: small if noise is too weak
    noise_fresh: float  # p-value of that of freshness: small if noise comes twice
    refutations: tuple[str, ...]  # in what the ledger's claim is refuted; none: it is consistent
    scores: tuple[float, ...] = field(repr=False)  # Λ of each canary: how sure it is to be there
    there: tuple[bool, ...] = field(repr=False)  # whether it was

    @property
    def consistent(self) -> bool:
        """Whether what was released can be what the ledger says."""
        return not self.refutations

    @property
    def text(self) -> str:
        """The result in one sentence."""
        low = f"{np.floor(self.epsilon_low * 100.0) / 100.0:.2f}"
        claimed = f"claimed ≤ {format_epsilon(self.epsilon)}"
        verdict = "consistent" if self.consistent else f"refuted: {', '.join(self.refutations)}"
        return f"ε ≥ {low} at {1.0 - ERROR:.0%} confidence, {claimed}: {verdict}"


@dataclass(frozen=True)
class GuessCounts:
    """How many canaries to guess about: choices that are made before the run, and see no data."""

    epsilon: float  # what the run is planned to cost
    bound: int  # for the lower bound: the best if the run leaks just that
    verdict: int  # for the verdict: the best if it leaks twice that, in μ
    most: float  # ε that would be shown if all of these were right: no larger claim can be refuted

    @classmethod
    def of(cls, canaries: int, event: RoundEvent, delta: float, accountant: str) -> Self:
        """Those for a plan."""
        epsilon = accountant_named(accountant).epsilon([event], delta).epsilon
        # Beyond, nearly every guess is right, and all that matters is how many there are.
        mu = mu_of_epsilon(min(epsilon, _LARGEST_EPSILON), delta)
        bound, verdict = (best_guesses(canaries, each, ERROR) for each in (mu, 2.0 * mu))
        most = epsilon_of_mu(least_mu(canaries, verdict, verdict, ERROR), delta)
        return cls(epsilon, bound, verdict, most)


def conclude(
    canaries: Canaries,
    counts: GuessCounts,
    event: RoundEvent,
    measured: Sequence[Measurement],
    charged: Iterable[RoundEvent],
    delta: float,
    accountant: str,
) -> AuditResult:
    """Conclude from what was measured of the rounds of an event, and what was charged for them."""
    events = merge_equal(charged)
    claimed = accountant_named(accountant).epsilon(events, delta).epsilon if events else 0.0
    ratios, sums, included = np.zeros(canaries.count), np.zeros(canaries.count), canaries.included
    if measured:
        ratios = log_likelihood_ratios(event, measured, canaries.signs)
        sums = np.sum([each.scores for each in measured], axis=0)
    found, judged = (guess(ratios, included, each) for each in (counts.bound, counts.verdict))
    mu = least_mu(canaries.count, found.count, found.correct, ERROR) if measured else 0.0
    level, fresh, refutations = noise_level(measured), noise_fresh(measured), []
    left = ERROR - 2.0 * _OF_NOISE
    if measured and refutes(
        trade_off(events, accountant), canaries.count, judged.count, judged.correct, left
    ):
        refutations.append(
            f"{judged.correct} of {judged.count} guesses about canaries are right, more than the "
            "ledger's charges allow"
        )
    if level < _OF_NOISE:
        refutations.append(f"the noise is weaker than charged (p = {level:.1g})")
    elif fresh < _OF_NOISE:  # noise that is weaker is also closer to any other
        refutations.append(f"noise was used twice (p = {fresh:.1g})")
    return AuditResult(
        canaries=canaries.count,
        included=int(included.sum()),
        rounds=len(measured),
        guesses=found.count,
        correct=found.correct,
        verdict_guesses=judged.count,
        verdict_correct=judged.correct,
        mu_low=mu,
        epsilon_low=epsilon_of_mu(mu, delta),
        epsilon_estimate=estimated_epsilon(sums, included, delta),
        epsilon=claimed,
        delta=delta,
        noise_level=level,
        noise_fresh=fresh,
        refutations=tuple(refutations),
        scores=tuple(ratios.tolist()),
        there=tuple(included.tolist()),
    )


def noise_level(measured: Sequence[Measurement]) -> float:
    """p-value of the claim that each release holds fresh noise of the size that was charged.

    A release is a vector of D numbers and fresh noise, N(0, 1) in each in units of the charge. So
    its squared length, given all that came before, is at least as large as one of χ² with D
    degrees of freedom, in law, and the sum over rounds as one of χ² with all of them.
    """
    energy = sum(each.energy for each in measured)
    return _chi_square_below(energy, sum(each.dimension for each in measured))


def noise_fresh(measured: Sequence[Measurement]) -> float:
    """p-value of the claim that no two releases share noise, among 1,000 that follow each other.

    Given an earlier release and all else that came before, the difference of a release from it is a
    vector and fresh noise, so that its squared length is as in `noise_level`. There are many pairs:
    the least p-value counts as many times. A single number says nothing, since rounding alone makes
    it come twice.
    """
    least, pairs = 1.0, 0
    probes = np.array([each.probe for each in measured if each.probe.size > 1])
    for number in range(1, len(probes)):
        before = probes[max(0, number - _COMPARED) : number]
        nearest = float(np.square(before - probes[number]).sum(axis=1).min())
        least, pairs = min(least, _chi_square_below(nearest, probes.shape[1])), pairs + len(before)
    return min(1.0, least * pairs) if pairs else 1.0


def _chi_square_below(value: float, degrees: int) -> float:
    return float(gammainc(degrees / 2.0, value / 2.0)) if degrees else 1.0
