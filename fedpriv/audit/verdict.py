"""The conclusion of an audit: a lower bound on ε, and whether the ledger can be true.

Three tests share an error probability of 5%. They refute the ledger if guesses about canaries are
better than its trade-off function allows (membership), if releases have less energy than the
charged noise (noise), or if two releases are closer to each other than fresh noise allows
(freshness). The last two need no canaries; they detect faults of the noise that hardly improve
guesses about canaries.

From all releases, r of m canaries are guessed to be included or not, and c guesses are right. If
the run is f-DP for each canary, for any other canaries, c is not far above r/2. The test of
membership is that of Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-Differential Privacy in One
Run" (arXiv 2410.22235), Algorithm 3 with two choices for each canary. It rejects a true claim with
probability at most α, for any statistic and any dependence between releases.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import scipy
from scipy.special import gammainc, ndtr, ndtri

from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.fdp import TradeOff, trade_off
from fedpriv.accounting.gaussian import epsilon_interval
from fedpriv.audit.canaries import Canaries, Measurement, log_likelihood_ratios
from fedpriv.ledger.events import RoundEvent, merge_equal
from fedpriv.privacy.clipping import Flags
from fedpriv.privacy.layout import FloatVector
from fedpriv.support.checks import check_ranges, epsilon_down, epsilon_up, hold_numbers

ERROR = 0.05  # chance of refuting a true claim, or of a bound above the truth
_NOISE_ERROR = 0.0005  # share of each test of noise; the test of membership has the rest
_LARGEST_EPSILON = 40.0  # for which guesses are planned
_COMPARED = 1000  # number of earlier rounds with which a round is compared
_LARGEST_MU = 32.0
_STEPS, _ZOOMS = 33, 4  # of a search for μ, with an accuracy of a millionth of the largest
_SHARES = tuple(0.02 * 1.1**step for step in range(40))  # of canaries to guess about, up to 0.82
_WORSE = 0.9  # a share whose bound is below this part of the best bound ends the search
FEWEST_CANARIES = 20  # fewer show little even if all guesses are right
MOST_CANARIES = 100_000  # these take half a minute to plan, and 1 GB of scores over 1,000 rounds


@dataclass(frozen=True)
class Audit:
    """The settings of an audit, in which a run measures how much its own releases reveal.

    Canaries are invented users in addition to the real ones. Each is included by a secret coin.
    Included canaries are drawn, clipped, added up and noised like users, and add a little noise to
    the model: for m canaries, √(q·m/2) clipping norms in a round, compared with z·√D of noise on D
    numbers.
    """

    canaries: int  # m, from 20 to 100,000; with more, the bound on ε is closer to the truth

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_ranges(self, canaries=f"[{FEWEST_CANARIES}, {MOST_CANARIES}]")


@dataclass(frozen=True)
class AuditResult:
    """The result of an audit of one run's releases; it may be published.

    With 95% confidence, the run leaks at least (epsilon_low, δ), if its true trade-off function is
    Gaussian; the verdict needs no such assumption.
    """

    canaries: int  # m
    included: int  # number of included canaries
    rounds: int  # number of measured releases
    guesses: int  # r, for the bound
    correct: int  # c
    verdict_guesses: int  # r, for the verdict
    verdict_correct: int  # c
    mu_low: float  # μ-GDP is refuted for every smaller μ
    epsilon_low: float  # at `delta`
    # From normal laws of projections of releases on canaries (Andrew et al. 2023); not a bound.
    epsilon_estimate: float | None
    epsilon: float  # the claim: ε of the charges of the run's rounds at `delta`
    delta: float
    noise_level: float  # p-value of the test of noise: small if noise is too weak
    noise_fresh: float  # p-value of the test of freshness: small if noise was used twice
    refutations: tuple[str, ...]  # of the ledger's claim; empty if it is consistent
    scores: tuple[float, ...] = field(repr=False)  # Λ of each canary: evidence that it is included
    there: tuple[bool, ...] = field(repr=False)  # whether each canary is included

    @property
    def consistent(self) -> bool:
        """True if the releases are consistent with the ledger."""
        return not self.refutations

    @property
    def text(self) -> str:
        """The result in one sentence."""
        low = epsilon_down(self.epsilon_low)
        claim = f"claimed ≤ {epsilon_up(self.epsilon)}"
        verdict = "consistent" if self.consistent else f"refuted: {', '.join(self.refutations)}"
        return f"ε ≥ {low} at {1.0 - ERROR:.0%} confidence, {claim}: {verdict}"


@dataclass(frozen=True)
class GuessCounts:
    """Numbers of canaries to guess about, chosen before the run, independently of data."""

    epsilon: float  # the planned cost of the run
    bound: int  # guesses for the lower bound: the best number if the run leaks its planned cost
    verdict: int  # guesses for the verdict: the best number if it leaks twice that, in μ
    most: float  # the bound on ε if all these guesses are right; no larger claim can be refuted

    @classmethod
    def of(cls, canaries: int, event: RoundEvent, delta: float, accountant: str) -> Self:
        """Return the counts for m canaries and the event of a plan."""
        epsilon = accountant_named(accountant).epsilon([event], delta).epsilon
        # Above this ε nearly every guess is right, and only the number of guesses matters.
        mu = mu_of_epsilon(min(epsilon, _LARGEST_EPSILON), delta)
        bound, verdict = (best_guesses(canaries, leak, ERROR) for leak in (mu, 2.0 * mu))
        most = epsilon_of_mu(least_mu(canaries, verdict, verdict, ERROR), delta)
        return cls(epsilon, bound, verdict, most)


def conclude(
    canaries: Canaries,
    counts: GuessCounts,
    event: RoundEvent,
    measurements: Sequence[Measurement],
    charges: Iterable[RoundEvent],
    delta: float,
    accountant: str,
) -> AuditResult:
    """Return the result of an audit from measurements of an event's rounds and their charges."""
    events = merge_equal(charges)
    claim = accountant_named(accountant).epsilon(events, delta).epsilon if events else 0.0
    ratios, sums, included = np.zeros(canaries.count), np.zeros(canaries.count), canaries.included
    if measurements:
        ratios = log_likelihood_ratios(event, measurements, canaries.signs)
        sums = np.sum([measurement.scores for measurement in measurements], axis=0)
    bound, verdict = (right_guesses(ratios, included, r) for r in (counts.bound, counts.verdict))
    mu = least_mu(canaries.count, counts.bound, bound, ERROR) if measurements else 0.0
    level, freshness, refutations = noise_level(measurements), noise_fresh(measurements), []
    error = ERROR - 2.0 * _NOISE_ERROR
    if measurements and refutes(
        trade_off(events, accountant), canaries.count, counts.verdict, verdict, error
    ):
        refutations.append(
            f"{verdict} of {counts.verdict} guesses about canaries are right, more than the "
            "ledger's charges allow"
        )
    if level < _NOISE_ERROR:
        refutations.append(f"the noise is weaker than charged (p = {level:.1g})")
    elif freshness < _NOISE_ERROR:  # weak noise also brings releases closer to each other
        refutations.append(f"noise was used twice (p = {freshness:.1g})")
    return AuditResult(
        canaries=canaries.count,
        included=int(included.sum()),
        rounds=len(measurements),
        guesses=counts.bound,
        correct=bound,
        verdict_guesses=counts.verdict,
        verdict_correct=verdict,
        mu_low=mu,
        epsilon_low=epsilon_of_mu(mu, delta),
        epsilon_estimate=estimated_epsilon(sums, included, delta),
        epsilon=claim,
        delta=delta,
        noise_level=level,
        noise_fresh=freshness,
        refutations=tuple(refutations),
        scores=tuple(ratios.tolist()),
        there=tuple(included.tolist()),
    )


def noise_level(measurements: Sequence[Measurement]) -> float:
    """Return the p-value of the claim that releases have fresh noise of the charged size.

    In units of the charge, a release is a vector of D numbers plus fresh noise N(0, 1) for each. So
    given all earlier releases, its squared length is stochastically at least χ² with D degrees of
    freedom, and the sum over rounds is at least χ² with the sum of their degrees.
    """
    energy = sum(measurement.energy for measurement in measurements)
    return _chi_square_below(energy, sum(m.dimension for m in measurements))


def noise_fresh(measurements: Sequence[Measurement]) -> float:
    """Return the p-value of the claim that no two of 1,000 consecutive releases share noise.

    Given all earlier releases, the difference between a release and one of them is a vector plus
    fresh noise, so its squared length is distributed as in `noise_level`. The smallest p-value is
    multiplied by the number of pairs. Probes of a single number are omitted, since rounding alone
    can make them equal.
    """
    smallest, pairs = 1.0, 0
    probes = np.array([m.probe for m in measurements if m.probe.size > 1])
    for number in range(1, len(probes)):
        earlier = probes[max(0, number - _COMPARED) : number]
        nearest = float(np.square(earlier - probes[number]).sum(axis=1).min())
        smallest = min(smallest, _chi_square_below(nearest, probes.shape[1]))
        pairs += len(earlier)
    return min(1.0, smallest * pairs) if pairs else 1.0


def _chi_square_below(value: float, degrees: int) -> float:
    return float(gammainc(degrees / 2.0, value / 2.0)) if degrees else 1.0


def passes(
    least_false_alarms: Callable[[FloatVector], FloatVector],
    canaries: int,
    guesses: int,
    correct: int,
    error: float,
    claims: int = 1,
) -> Flags:
    """Return whether claims hold against the guesses, at error probability α: [claims].

    `least_false_alarms` maps powers [claims], one for each claim, to the smallest type I error at
    which any test may have that power: the inverse of 1 − f.
    """
    m, r, c = canaries, guesses, correct
    # The recursion's bounds on the chances of exactly i right guesses, and of more.
    above = np.full(claims, error * c / m)
    rest = np.full(claims, error * (r - c) / m)
    for i in range(c - 1, -1, -1):
        larger = np.maximum(rest, least_false_alarms(above))
        above = np.minimum(1.0, above + i / (r - i) * (larger - rest))
        rest = larger
    return np.asarray(above + rest <= r / m)


def refutes(off: TradeOff, canaries: int, guesses: int, correct: int, error: float) -> bool:
    """Return whether the guesses refute a trade-off function, at this error probability."""

    def least_false_alarms(power: FloatVector) -> FloatVector:
        # f is its own inverse, so f(1 − power) is the smallest type I error with this power.
        return off.type_two(1.0 - np.minimum(power, 1.0))

    return not passes(least_false_alarms, canaries, guesses, correct, error)[0]


def least_mu(canaries: int, guesses: int, correct: int, error: float) -> float:
    """Return the largest μ such that the guesses refute μ-GDP, rounded down; 0 if none."""
    low, high = 0.0, _LARGEST_MU
    for _ in range(_ZOOMS):
        mus = np.linspace(low, high, _STEPS)[1:]

        def least_false_alarms(power: FloatVector, mus: FloatVector = mus) -> FloatVector:
            return np.asarray(ndtr(ndtri(power) - mus))

        claims = passes(least_false_alarms, canaries, guesses, correct, error, len(mus))
        first = int(np.argmax(claims)) if claims.any() else len(mus) - 1
        low, high = (mus[first - 1] if first else low), mus[first]
    return float(low)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return the ε of G_μ at δ, never above the truth; 0 if δ exceeds that of ε = 0."""
    return epsilon_interval(delta, 1.0 / mu)[0] if mu > 0.0 else 0.0


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """Return the μ such that G_μ has this δ at ε > 0."""
    return float(
        scipy.optimize.brentq(lambda mu: epsilon_of_mu(mu, delta) - epsilon, 1e-9, _LARGEST_MU)
    )


def best_guesses(canaries: int, mu: float, error: float) -> int:
    """Return the even number r of guesses with the largest expected bound if G_μ is leaked."""
    best_count, best_bound = 2 * max(1, canaries // 20), 0.0
    for share in _SHARES:
        half = round(canaries * share / 2.0)
        if not half:
            continue
        # The share of ½·N(0, 1) + ½·N(μ, 1) above this threshold is half/canaries.
        threshold = scipy.optimize.brentq(
            _share_above, -40.0, _LARGEST_MU + 40.0, args=(mu, 2.0 * half / canaries)
        )
        correct = float(ndtr(mu - threshold)) * canaries  # expected; the bound is interpolated
        lower = math.floor(correct)
        ends = [least_mu(canaries, 2 * half, min(c, 2 * half), error) for c in (lower, lower + 1)]
        bound = ends[0] + (correct - lower) * (ends[1] - ends[0])
        if bound > best_bound:
            best_count, best_bound = 2 * half, bound
        elif bound < _WORSE * best_bound:
            break
    return best_count


def _share_above(threshold: float, mu: float, share: float) -> float:
    return float(ndtr(-threshold) + ndtr(mu - threshold)) - share


def right_guesses(ratios: FloatVector, included: Flags, guesses: int) -> int:
    """Return how many of an even number r of guesses are right.

    Canaries with the r/2 largest ratios are guessed to be included, with the r/2 smallest not.
    """
    order, half = np.argsort(ratios, kind="stable"), guesses // 2
    return int(included[order[-half:]].sum() + (~included[order[:half]]).sum())


def estimated_epsilon(sums: FloatVector, included: Flags, delta: float) -> float | None:
    """Return the ε between normal laws of a statistic of included and of excluded canaries.

    The statistic `sums` [m] is the projection of all releases together on a canary's moves. Andrew
    et al. 2023, "One-shot Empirical Privacy Estimation for Federated Learning" (arXiv 2302.03098),
    fit such laws to its cosine. It is an estimate, not a bound. None if a law has no spread.
    """
    parts = sums[included], sums[~included]
    if any(len(part) < 2 or np.ptp(part) == 0.0 for part in parts):
        return None
    one, other = ((float(part.mean()), float(part.std(ddof=1))) for part in parts)
    return max(_epsilon_between(one, other, delta), _epsilon_between(other, one, delta))


def _epsilon_between(p: tuple[float, float], q: tuple[float, float], delta: float) -> float:
    """Return the ε at which the integral of (P − e^ε·Q)₊ is δ, for normal laws (mean, stddev)."""
    (mean_p, stddev_p), (mean_q, stddev_q) = p, q
    z = np.linspace(-12.0, 12.0, 50_001)  # in standard deviations of P, which is negligible beyond
    density = np.exp(-(z**2) / 2.0) / math.sqrt(math.tau)
    losses = (mean_p - mean_q + stddev_p * z) ** 2 / stddev_q**2 / 2.0 - z**2 / 2.0
    losses -= math.log(stddev_p) - math.log(stddev_q)  # ln P/Q

    def excess(epsilon: float) -> float:
        positive_part = density * -np.expm1(np.minimum(epsilon - losses, 0.0))
        return float(np.trapezoid(positive_part, z)) - delta

    return 0.0 if excess(0.0) <= 0.0 else float(scipy.optimize.brentq(excess, 0.0, losses.max()))
