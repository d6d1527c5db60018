"""Events of one vector group under the sampling policies that are not Poisson's.

Noise multipliers are noise_stddev over the clipping norm under every relation; that replacing a
user moves a sum by two clipping norms is the accountants' to know.
"""

from fedpriv.accounting.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
)
from fedpriv.errors import InvalidValueError


def every_user_gaussian(
    noise_multiplier: float, relation: NeighbouringRelation, count: int = 1, population: int = 1
) -> RoundEvent:
    """Event of rounds of the Gaussian mechanism on all users, with one group.

    Args:
        noise_multiplier: z ≥ 0.
        relation: the neighbouring relation to account them under.
        count: number of rounds, at least 1.
        population: N ≥ 1.

    Raises:
        InvalidValueError: a number is out of range.
    """
    sampling = SamplingEvent(SamplingPolicy.EVERY_USER, 1.0, population, relation)
    return _one_group(sampling, noise_multiplier, count)


def fixed_size_gaussian(
    cohort_size: int, population: int, noise_multiplier: float, count: int = 1
) -> RoundEvent:
    """Event of rounds of the Gaussian mechanism on m of N users under replace-one, with one group.

    >>> fixed_size_gaussian(100, 10_000, noise_multiplier=1.0).sampling.sampling_probability
    0.01

    Args:
        cohort_size: m in [1, N].
        population: N ≥ 1.
        noise_multiplier: z ≥ 0.
        count: number of rounds, at least 1.

    Raises:
        InvalidValueError: a number is out of range, or the cohort does not fit into the population.
    """
    if not 1 <= cohort_size <= population:
        raise InvalidValueError(
            f"cohort_size is {cohort_size}; it must be from 1 to the population of {population}"
        )
    q, relation = cohort_size / population, NeighbouringRelation.REPLACE_ONE
    sampling = SamplingEvent(SamplingPolicy.FIXED_SIZE, q, population, relation)
    return _one_group(sampling, noise_multiplier, count)


def shuffled_gaussian(
    noise_multiplier: float, relation: NeighbouringRelation, passes: int = 1, population: int = 1
) -> RoundEvent:
    """Event of passes of the Gaussian mechanism over shuffled disjoint batches, with one group.

    Args:
        noise_multiplier: z ≥ 0 of the release of each batch.
        relation: the neighbouring relation to account them under.
        passes: number of passes, not of batches, at least 1.
        population: N ≥ 1.

    Raises:
        InvalidValueError: a number is out of range.
    """
    sampling = SamplingEvent(SamplingPolicy.SHUFFLED, 1.0, population, relation)
    return _one_group(sampling, noise_multiplier, passes)


def _one_group(sampling: SamplingEvent, noise_multiplier: float, count: int) -> RoundEvent:
    return RoundEvent(sampling, (SumQueryEvent("update", 1.0, noise_multiplier),), count)
