"""Likelihood ratios of canaries against all that could have happened, one thing after another."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import stats
from scipy.linalg import toeplitz

from fedpriv.audit.canaries import Measurement, check_auditable, log_likelihood_ratios
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
)

ADD, REPLACE = NeighbouringRelation.ADD_OR_REMOVE_ONE, NeighbouringRelation.REPLACE_ONE
QUERIES = (SumQueryEvent("update", 1.0, 2.0),)
M = 6


def event_of(
    policy: SamplingPolicy,
    q: float = 1.0,
    schedule: Schedule | None = None,
    examples: int | None = None,
    strategy: tuple[float, ...] = (1.0,),
) -> RoundEvent:
    sampling = SamplingEvent(policy, q, 10, ADD, schedule, examples_per_user=examples, canaries=M)
    return RoundEvent(sampling, QUERIES, strategy=strategy)


def measured(
    scores: np.ndarray, parts: Sequence[int] | None = None, drawn: np.ndarray | None = None
) -> list[Measurement]:
    return [
        Measurement(
            number + 1, 0, part, row, 1.0, 1, np.zeros(1), None if drawn is None else drawn[k]
        )
        for k, (number, part, row) in enumerate(
            zip(range(len(scores)), parts or [0] * len(scores), scores, strict=True)
        )
    ]


def plain_signs(_round: int, _attempt: int) -> np.ndarray:
    return np.ones(M)


def odd_signs(number: int, _attempt: int) -> np.ndarray:
    return np.where((np.arange(M) + number) % 2, 1.0, -1.0)


def random_scores(rounds: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.3, 1.5, (rounds, M))


def log_density(scores: np.ndarray, mean: np.ndarray | float, stddev: np.ndarray) -> float:
    return float(stats.norm.logpdf(scores, mean, stddev).sum())


def spread(scores: np.ndarray) -> np.ndarray:
    return np.sqrt(np.mean(scores**2, axis=1))


@pytest.mark.parametrize(("q", "k"), [(0.3, None), (1.0, None), (0.3, 3), (0.05, 4), (1.0, 2)])
def test_ratios_of_coins_are_those_of_all_cohorts(q: float, k: int | None) -> None:
    rounds, policy = 4, SamplingPolicy.POISSON if k is None else SamplingPolicy.EXAMPLES
    scores = random_scores(rounds)
    found = log_likelihood_ratios(event_of(policy, q, examples=k), measured(scores), plain_signs)
    for canary in range(M):
        own, chances = scores[:, canary], []
        for drawn in itertools.product(range((k or 1) + 1), repeat=rounds):
            chance = math.prod(
                math.comb(k or 1, j) * q**j * (1 - q) ** ((k or 1) - j) for j in drawn
            )
            density = log_density(own, np.array(drawn), spread(scores))
            chances.append(chance * math.exp(density))
        away = log_density(own, 0.0, spread(scores))
        assert found[canary] == pytest.approx(math.log(sum(chances)) - away, abs=1e-9)


def test_an_every_user_round_is_one_of_coins_that_never_fail() -> None:
    scores = random_scores(3)
    coins, every = (
        log_likelihood_ratios(event_of(policy, 1.0), measured(scores), plain_signs)
        for policy in (SamplingPolicy.POISSON, SamplingPolicy.EVERY_USER)
    )
    assert np.allclose(coins, every)


def allocated(own: np.ndarray, stddevs: np.ndarray, n: int, k: int, seen: list[int]) -> float:
    patterns = list(itertools.combinations(range(n), k))
    densities = []
    for pattern in patterns:
        moves = np.array([float(part in pattern) for part in seen])
        densities.append(math.exp(log_density(own, moves, stddevs)))
    return math.log(sum(densities) / len(patterns)) - log_density(own, 0.0, stddevs)


@pytest.mark.parametrize(("n", "k"), [(5, 1), (5, 2), (4, 4)])
def test_ratios_of_random_allocation_are_those_of_all_allocations(n: int, k: int) -> None:
    event = event_of(SamplingPolicy.RANDOM_ALLOCATION, k / n, Schedule(n, k))
    scores = random_scores(2 * n)
    parts = [*range(n), *range(n)]
    found = log_likelihood_ratios(event, measured(scores, parts), plain_signs)
    for canary in range(M):
        wanted = sum(
            allocated(some[:, canary], spread(some), n, k, list(range(n)))
            for some in (scores[:n], scores[n:])
        )
        assert found[canary] == pytest.approx(wanted, abs=1e-9)


def test_a_round_that_is_missing_says_nothing() -> None:
    n, k = 5, 2
    event = event_of(SamplingPolicy.RANDOM_ALLOCATION, k / n, Schedule(n, k))
    # The first pass lost its rounds 0 and 3; of the second only the first two came.
    scores, parts = random_scores(5), [1, 2, 4, 0, 1]
    found = log_likelihood_ratios(event, measured(scores, parts), plain_signs)
    for canary in range(M):
        wanted = sum(
            allocated(scores[rows, canary], spread(scores[rows]), n, k, seen)
            for rows, seen in ((slice(0, 3), [1, 2, 4]), (slice(3, 5), [0, 1]))
        )
        assert found[canary] == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("strategy", [(1.0,), (1.0, 0.5), (1.0, 0.6, 0.2, 0.1, 0.05, 0.01)])
def test_ratios_of_turns_are_those_of_gaussian_vectors(strategy: tuple[float, ...]) -> None:
    n, b = 6, 3
    event = event_of(SamplingPolicy.SEPARATED, schedule=Schedule(n, n // b, b), strategy=strategy)
    drawn = (np.arange(n)[:, None] % b) == (np.arange(M)[None, :] % b)
    scores = random_scores(n)
    found = log_likelihood_ratios(event, measured(scores, [*range(n)], drawn), odd_signs)
    matrix = toeplitz([*strategy, *[0.0] * (n - len(strategy))], np.zeros(n))
    signs = np.array([odd_signs(number, 0) for number in range(1, n + 1)])
    whitened = matrix @ (signs * scores)
    stddevs = spread(whitened)
    for canary in range(M):
        moves = matrix @ (signs[:, canary] * drawn[:, canary])
        wanted = log_density(whitened[:, canary], moves, stddevs)
        wanted -= log_density(whitened[:, canary], 0.0, stddevs)
        assert found[canary] == pytest.approx(wanted, abs=1e-9)


def test_a_series_that_is_not_whole_says_nothing_where_noise_is_correlated() -> None:
    n, drawn = 4, np.ones((3, M), np.bool_)
    for strategy, silent in {(1.0,): False, (1.0, 0.5): True}.items():
        event = event_of(SamplingPolicy.SEPARATED, schedule=Schedule(n, n, 1), strategy=strategy)
        for parts, lost in (([0, 1, 2], False), ([0, 1, 3], True), ([1, 2, 3], True)):
            found = log_likelihood_ratios(
                event, measured(random_scores(3), parts, drawn), plain_signs
            )
            assert (not found.any()) == (silent and lost)


def test_nothing_that_was_measured_is_no_ratio() -> None:
    assert log_likelihood_ratios(event_of(SamplingPolicy.POISSON, 0.5), [], plain_signs).size == 0


def test_what_cannot_be_audited_is_refused() -> None:
    replaced = SamplingEvent(SamplingPolicy.EVERY_USER, 1.0, 10, REPLACE)
    with pytest.raises(InvalidValueError, match="neighbours are replace-one"):
        check_auditable(replaced)
    fixed = SamplingEvent(SamplingPolicy.FIXED_SIZE, 0.5, 10, REPLACE)
    with pytest.raises(InvalidValueError, match=r"neighbours are replace-one"):
        check_auditable(fixed)
    banded = SamplingEvent(SamplingPolicy.BANDED_POISSON, 0.5, 10, ADD, Schedule(4, 2, 2))
    with pytest.raises(InvalidValueError, match=r"sampling.policy is 'poisson-within-bands'"):
        check_auditable(banded)
    check_auditable(SamplingEvent(SamplingPolicy.POISSON, 0.5, 10, ADD))
