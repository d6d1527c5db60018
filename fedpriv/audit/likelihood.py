"""The log-likelihood ratio of the releases, for a canary that is included and one that is not.

The statistic of an audit is the log-likelihood ratio Λ of each canary, given its scores in all
rounds and public facts. By the lemma of Neyman and Pearson no other statistic separates included
canaries better. For the rounds of one event it is

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
from scipy.linalg import toeplitz
from scipy.special import gammaln, logsumexp

from fedpriv.audit.canaries import Measurement
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
)
from fedpriv.privacy.clipping import FloatMatrix
from fedpriv.privacy.layout import FloatVector

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
