"""How much more likely what was released is if a canary is there than if it is not.

The statistic of an audit is the log-likelihood ratio Λ of each canary, given its scores in all
rounds and what is public: by the lemma of Neyman and Pearson no other tells better who is there.
Of the rounds of one event it is

* of a user who joins each round by a coin, and j of whose k examples are drawn (k = 1 for users),
  Σ_t log Σ_j Bin(k, q)(j)·exp((2·j·s_t − j²)/(2·v_t));
* of one in exactly k of n rounds, every set of k equally likely, log(e_k(w_1, …, w_n)/(n choose k))
  with w_t = exp((2·s_t − 1)/(2·v_t)) and the elementary symmetric polynomial e_k;
* of one who takes turns that are no secret, x·y − ‖x‖²/2 in units of the noise, where x = C·π are
  the canary's moves in its rounds π, and y = C·s is what was released of them: a strategy C has
  fresh noise behind it (Choquette-Choo et al. 2023).

The variance v_t is that of the scores of a round, which is z² and what users add to it.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
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
from fedpriv.privacy.layout import FloatVector

_LEAST_LOG_CHANCE = -40.0  # of how many of a user's examples are drawn; others are left out
Matrix = NDArray[np.float64]
Signs = Callable[[int, int], FloatVector]
"""Round and attempt → ±1 [m], the way that each canary goes."""


def check_auditable(sampling: SamplingEvent) -> None:
    """Raise InvalidValueError where no likelihood ratio is known of the rounds of an event."""
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
    event: RoundEvent, measured: Sequence[Measurement], signs: Signs
) -> FloatVector:
    """Λ of each canary, [m], from what was measured of the rounds of one plan's event, in order.

    A round that was charged and not released is missing, and says nothing; where noise is
    correlated, nor do the others of its series.
    """
    sampling, schedule = event.sampling, event.sampling.schedule
    found = np.zeros(len(measured[0].scores) if measured else 0)
    for series in _series(measured):
        scores = np.array([each.scores for each in series])
        if schedule is None:
            q, k = sampling.sampling_probability, sampling.examples_per_user or 1
            found += _by_coins(scores, q, k)
        elif sampling.policy is SamplingPolicy.RANDOM_ALLOCATION:
            found += _allocated(scores, schedule)
        else:
            turns = np.array([each.drawn for each in series], dtype=np.float64)
            ways = np.array([signs(each.round, each.attempt) for each in series])
            whole = [each.part for each in series] == list(range(len(series)))
            if whole or len(event.strategy) == 1:
                found += _in_turns(scores * ways, turns * ways, event.strategy)
    return found


def _series(measured: Sequence[Measurement]) -> Iterator[list[Measurement]]:
    """The rounds of each event: their parts grow."""
    rounds: list[Measurement] = []
    for each in measured:
        if rounds and each.part <= rounds[-1].part:
            yield rounds
            rounds = []
        rounds.append(each)
    if rounds:
        yield rounds


def _variances(scores: Matrix) -> Matrix:
    """Of the scores of each round: [n, 1]."""
    return np.asarray(np.maximum(np.mean(scores**2, axis=1, keepdims=True), 1e-12))


def _by_coins(scores: Matrix, q: float, k: int) -> FloatVector:
    drawn = np.arange(k + 1)
    chances = np.full(k + 1, -math.inf)
    chances[-1] = 0.0
    if q < 1.0:
        ways = gammaln(k + 1) - gammaln(drawn + 1) - gammaln(k - drawn + 1)
        chances = ways + drawn * math.log(q) + (k - drawn) * math.log1p(-q)
    kept = chances > _LEAST_LOG_CHANCE
    v, terms = _variances(scores), []
    for j, chance in zip(drawn[kept], chances[kept], strict=True):
        terms.append(chance + (2.0 * j * scores - j**2) / (2.0 * v))
    return np.asarray(logsumexp(terms, axis=0).sum(axis=0))


def _allocated(scores: Matrix, schedule: Schedule) -> FloatVector:
    n, k = schedule.rounds, schedule.participations
    weights = np.zeros((n, scores.shape[1]))  # a round that is missing is as likely either way
    weights[: len(scores)] = (2.0 * scores - 1.0) / (2.0 * _variances(scores))
    sums = np.full((k + 1, scores.shape[1]), -math.inf)
    sums[0] = 0.0
    for weight in weights:
        sums[1:] = np.logaddexp(sums[1:], sums[:-1] + weight)
    return np.asarray(sums[k] - (gammaln(n + 1) - gammaln(k + 1) - gammaln(n - k + 1)))


def _in_turns(scores: Matrix, moves: Matrix, strategy: tuple[float, ...]) -> FloatVector:
    column = np.zeros(len(scores))
    known = strategy[: len(scores)]
    column[: len(known)] = known
    matrix = toeplitz(column, np.zeros(len(scores)))
    x, y = matrix @ moves, matrix @ scores
    return np.asarray((x * (y - x / 2.0) / _variances(y)).sum(axis=0))
