"""Tests of f-DP from one run: what releases show of canaries, and guesses about which are included.

For r of m canaries one guesses, from all releases, whether they are included, and c guesses are
right. If the run is f-DP for each canary, whatever the others are, c is not far above r/2. The test
is that of Mahloujifar, Melis & Chaudhuri 2024, "Auditing f-Differential Privacy in One Run"
(arXiv 2410.22235), Algorithm 3 with two choices for each canary. It rejects a true claim with
probability at most α, for any statistic and any dependence between releases.

The statistic is the log-likelihood ratio Λ of each canary, given its scores in all rounds and
public facts. By the lemma of Neyman and Pearson no other statistic separates included canaries
better. For the rounds of one event it is

* if each of a user's k examples joins each round by a coin (k = 1 if users do),
  Σ_t log Σ_j Bin(k, q)(j)·exp((2·j·s_t − j²)/(2·v_t));
* if a user is in exactly k of n rounds, every set of k equally likely,
  log(e_k(w_1, …, w_n)/(n choose k)) with w_t = exp((2·s_t − 1)/(2·v_t)) and the elementary
  symmetric polynomial e_k;
* if a user's rounds are public, x·y − ‖x‖²/2 in units of the noise. Here x = C·π are the
  canary's moves in its rounds π, and y = C·s are its scores after the strategy C, which leaves
  fresh noise (Choquette-Choo et al. 2023).

v_t is the variance of the scores of a round: z² plus the contribution of the users.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import scipy
from scipy.linalg import toeplitz
from scipy.special import gammaln, logsumexp, ndtr, ndtri

from fedpriv.accounting.fdp import TradeOff
from fedpriv.accounting.gaussian import epsilon_interval
from fedpriv.audit.canaries import Measurement
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
)
from fedpriv.privacy.clipping import Flags, FloatMatrix
from fedpriv.privacy.layout import FloatVector

_LARGEST_MU = 32.0
_STEPS, _ZOOMS = 33, 4  # of a search for μ, with an accuracy of a millionth of the largest
_SHARES = tuple(0.02 * 1.1**step for step in range(40))  # of canaries to guess about, up to 0.82
_WORSE = 0.9  # a share with less than this part of the best bound ends the search
_LEAST_LOG_CHANCE = -40.0  # less likely numbers of a user's drawn examples are left out
Signs = Callable[[int, int], FloatVector]
"""Maps a round and an attempt to the signs of the canaries' moves, ±1 [m]."""


def check_auditable(sampling: SamplingEvent) -> None:
    """Raise InvalidValueError if there is no likelihood ratio for the rounds of an event."""
    if sampling.relation is NeighbouringRelation.REPLACE_ONE:
        raise InvalidValueError(
            f"audit is given and neighbours are {sampling.relation}; they must be "
            f"{NeighbouringRelation.ADD_OR_REMOVE_ONE}, since a canary is there or is not"
        )
    if sampling.policy is SamplingPolicy.BANDED_POISSON:
        raise InvalidValueError(
            f"audit is given and sampling.policy is {str(sampling.policy)!r}; it must be another, "
            "since nobody but the server knows in which group a canary tosses its coins"
        )


def log_likelihood_ratios(
    event: RoundEvent, measurements: Sequence[Measurement], signs: Signs
) -> FloatVector:
    """Return Λ of each canary, [m], from measurements of rounds of one plan's event, in order.

    A round that was charged and not released has no measurement and adds nothing; if noise is
    correlated, the other rounds of its series add nothing either.
    """
    sampling, schedule = event.sampling, event.sampling.schedule
    ratios = np.zeros(len(measurements[0].scores) if measurements else 0)
    for series in _series(measurements):
        scores = np.array([m.scores for m in series])
        if schedule is None:
            q, k = sampling.sampling_probability, sampling.examples_per_user or 1
            ratios += _by_coins(scores, q, k)
        elif sampling.policy is SamplingPolicy.RANDOM_ALLOCATION:
            ratios += _by_allocation(scores, schedule)
        elif len(event.strategy) == 1 or [m.part for m in series] == list(range(len(series))):
            turns = np.array([m.drawn for m in series], dtype=np.float64)
            directions = np.array([signs(m.round, m.attempt) for m in series])
            ratios += _by_turns(scores * directions, turns * directions, event.strategy)
    return ratios


def _series(measurements: Sequence[Measurement]) -> Iterator[list[Measurement]]:
    """Yield the rounds of each event; within one, their parts increase."""
    rounds: list[Measurement] = []
    for measurement in measurements:
        if rounds and measurement.part <= rounds[-1].part:
            yield rounds
            rounds = []
        rounds.append(measurement)
    if rounds:
        yield rounds


def _variances(scores: FloatMatrix) -> FloatMatrix:
    """Return the variance of the scores of each round: [n, m] → [n, 1]."""
    return np.asarray(np.maximum(np.mean(scores**2, axis=1, keepdims=True), 1e-12))


def _by_coins(scores: FloatMatrix, q: float, k: int) -> FloatVector:
    counts = np.arange(k + 1)
    log_chances = np.full(k + 1, -math.inf)
    log_chances[-1] = 0.0
    if q < 1.0:
        log_binomials = gammaln(k + 1) - gammaln(counts + 1) - gammaln(k - counts + 1)
        log_chances = log_binomials + counts * math.log(q) + (k - counts) * math.log1p(-q)
    likely = log_chances > _LEAST_LOG_CHANCE
    v, terms = _variances(scores), []
    for j, log_chance in zip(counts[likely], log_chances[likely], strict=True):
        terms.append(log_chance + (2.0 * j * scores - j**2) / (2.0 * v))
    return np.asarray(logsumexp(terms, axis=0).sum(axis=0))


def _by_allocation(scores: FloatMatrix, schedule: Schedule) -> FloatVector:
    n, k = schedule.rounds, schedule.participations
    weights = np.zeros((n, scores.shape[1]))  # 0 for missing rounds, which give no evidence
    weights[: len(scores)] = (2.0 * scores - 1.0) / (2.0 * _variances(scores))
    sums = np.full((k + 1, scores.shape[1]), -math.inf)
    sums[0] = 0.0
    for weight in weights:
        sums[1:] = np.logaddexp(sums[1:], sums[:-1] + weight)
    return np.asarray(sums[k] - (gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)))


def _by_turns(scores: FloatMatrix, moves: FloatMatrix, strategy: tuple[float, ...]) -> FloatVector:
    column = np.zeros(len(scores))
    column[: len(strategy)] = strategy[: len(scores)]
    matrix = toeplitz(column, np.zeros(len(scores)))
    x, y = matrix @ moves, matrix @ scores
    return np.asarray((x * (y - x / 2.0) / _variances(y)).sum(axis=0))


def passes(
    least_false_alarms: Callable[[FloatVector], FloatVector],
    canaries: int,
    guesses: int,
    correct: int,
    error: float,
    claims: int = 1,
) -> Flags:
    """Return whether claims hold against the guesses, at the error probability α: [claims].

    `least_false_alarms` maps powers [claims], each for its own claim, to the smallest type I error
    at which any test may have that power: the inverse of 1 − f.
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
        # f is symmetric: misses as rare as these false alarms make false alarms as rare as misses.
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
    """Return the ε of G_μ at δ, never above the truth; 0 if δ is larger than that of ε = 0."""
    return epsilon_interval(delta, 1.0 / mu)[0] if mu > 0.0 else 0.0


def mu_of_epsilon(epsilon: float, delta: float) -> float:
    """Return the μ such that G_μ has this δ at ε > 0."""
    return float(
        scipy.optimize.brentq(lambda mu: epsilon_of_mu(mu, delta) - epsilon, 1e-9, _LARGEST_MU)
    )


def best_guesses(canaries: int, mu: float, error: float) -> int:
    """Return the even number of guesses, r, with the largest expected bound if G_μ is leaked."""
    m = canaries
    best_count, best_bound = 2 * max(1, m // 20), 0.0
    for share in _SHARES:
        half = round(m * share / 2.0)
        if not half:
            continue
        # The share of ½·N(0, 1) + ½·N(μ, 1) above this threshold is half/m.
        threshold = scipy.optimize.brentq(
            _share_above, -40.0, _LARGEST_MU + 40.0, args=(mu, 2.0 * half / m)
        )
        correct = float(ndtr(mu - threshold)) * m  # expected; the bound is interpolated
        below = math.floor(correct)
        ends = [least_mu(m, 2 * half, min(c, 2 * half), error) for c in (below, below + 1)]
        bound = ends[0] + (correct - below) * (ends[1] - ends[0])
        if bound > best_bound:
            best_count, best_bound = 2 * half, bound
        elif bound < _WORSE * best_bound:
            break
    return best_count


def _share_above(threshold: float, mu: float, share: float) -> float:
    return float(ndtr(-threshold) + ndtr(mu - threshold)) - share


def right_guesses(ratios: FloatVector, included: Flags, guesses: int) -> int:
    """Return how many of an even number r of guesses are right.

    One guesses that the canaries with the r/2 largest ratios are included, the r/2 smallest not.
    """
    order, half = np.argsort(ratios, kind="stable"), guesses // 2
    return int(included[order[-half:]].sum() + (~included[order[:half]]).sum())


def estimated_epsilon(sums: FloatVector, included: Flags, delta: float) -> float | None:
    """Return the ε between normal laws of a statistic of included and of excluded canaries.

    The statistic `sums` [m] is the projection of all releases together on a canary's moves. Andrew
    et al. 2023, "One-shot Empirical Privacy Estimation for Federated Learning" (arXiv 2302.03098),
    fit such laws to its cosine. It is an estimate and no bound. None if a law has no spread.
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
