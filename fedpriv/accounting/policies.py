"""Events of one vector group under each sampling policy and relation.

Everywhere z = `noise_multiplier` ≥ 0 is noise_stddev over the clipping norm of the sum that is
released in one round, whatever the relation and the number of rounds. `count` (or `passes`) is how
often the whole event happens, at least 1, `population` the number N of enrolled users. A number out
of range raises `InvalidValueError`.
"""

from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
)
from fedpriv.support.checks import is_whole, plain_numbers, require

_ADD_OR_REMOVE, _REPLACE = NeighbouringRelation


def poisson_gaussian(
    q: float, noise_multiplier: float, count: int = 1, population: int = 1
) -> RoundEvent:
    """Event of rounds of the Poisson-subsampled Gaussian mechanism, one user added or removed.

    >>> poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000).noise_multiplier
    4.0
    """
    sampling = SamplingEvent(SamplingPolicy.POISSON, q, population, _ADD_OR_REMOVE)
    return _one_group(sampling, noise_multiplier, count)


def poisson_replace_gaussian(
    q: float, noise_multiplier: float, count: int = 1, population: int = 1
) -> RoundEvent:
    """Event of rounds as `poisson_gaussian`, under replace-one."""
    sampling = SamplingEvent(SamplingPolicy.POISSON, q, population, _REPLACE)
    return _one_group(sampling, noise_multiplier, count)


def poisson_examples_gaussian(
    q: float, examples_per_user: int, noise_multiplier: float, count: int = 1, population: int = 1
) -> RoundEvent:
    """Event of rounds in which examples are drawn and clipped, one user added or removed.

    Each of a user's examples, at most k = `examples_per_user` ≤ 10⁶ of them, joins with
    probability q; z is relative to the clipping norm of an example.

    >>> poisson_examples_gaussian(0.01, 8, noise_multiplier=4.0).sampling.examples_per_user
    8
    """
    policy = SamplingPolicy.EXAMPLES
    sampling = SamplingEvent(
        policy, q, population, _ADD_OR_REMOVE, examples_per_user=examples_per_user
    )
    return _one_group(sampling, noise_multiplier, count)


def every_user_gaussian(
    noise_multiplier: float, relation: NeighbouringRelation, count: int = 1, population: int = 1
) -> RoundEvent:
    """Event of rounds that each release the sum over all enrolled users plus noise."""
    sampling = SamplingEvent(SamplingPolicy.EVERY_USER, 1.0, population, relation)
    return _one_group(sampling, noise_multiplier, count)


def fixed_size_gaussian(
    cohort_size: int, population: int, noise_multiplier: float, count: int = 1
) -> RoundEvent:
    """Event of rounds on m of N users, drawn afresh without replacement, under replace-one."""
    cohort_size, population = plain_numbers((cohort_size, population))
    legal = "it must be a whole number of at least 1"
    require(is_whole(population), f"population is {population!r}; {legal}")
    legal = f"it must be a whole number from 1 to the population of {population}"
    require(is_whole(cohort_size, population), f"cohort_size is {cohort_size!r}; {legal}")
    policy, q = SamplingPolicy.FIXED_SIZE, cohort_size / population
    return _one_group(SamplingEvent(policy, q, population, _REPLACE), noise_multiplier, count)


def random_allocation_gaussian(
    rounds: int, participations: int, noise_multiplier: float, passes: int = 1, population: int = 1
) -> RoundEvent:
    """Event of passes in which each user is in k random rounds of n, under add-or-remove.

    >>> random_allocation_gaussian(100, 2, noise_multiplier=1.0).sampling.sampling_probability
    0.02
    """
    schedule, policy = Schedule(rounds, participations), SamplingPolicy.RANDOM_ALLOCATION
    q = participations / rounds
    sampling = SamplingEvent(policy, q, population, _ADD_OR_REMOVE, schedule)
    return _one_group(sampling, noise_multiplier, passes)


def separated_gaussian(
    strategy: tuple[float, ...],
    rounds: int,
    participations: int,
    separation: int,
    noise_multiplier: float,
    relation: NeighbouringRelation,
    count: int = 1,
    population: int = 1,
) -> RoundEvent:
    """Event of series of rounds whose noise is correlated (DP-FTRL).

    With X the n sums of a series, what is released is X + C⁻¹Z = C⁻¹(C·X + Z), where the rows of Z
    are fresh noise of standard deviation z clipping norms; a user is in at most k of the rounds,
    any two at least b apart. `strategy` is (c_0, c_1, …), at most n long, the first column of the
    lower triangular Toeplitz matrix C: c_0 > 0, missing ones are 0, and (1,) is fresh noise.
    """
    schedule = Schedule(rounds, participations, separation)
    sampling = SamplingEvent(SamplingPolicy.SEPARATED, 1.0, population, relation, schedule)
    return _one_group(sampling, noise_multiplier, count, strategy)


def banded_poisson_gaussian(
    strategy: tuple[float, ...],
    rounds: int,
    groups: int,
    q: float,
    noise_multiplier: float,
    relation: NeighbouringRelation,
    count: int = 1,
    population: int = 1,
) -> RoundEvent:
    """Event of series as `separated_gaussian`, of Poisson rounds of b groups that take turns.

    Round t is of group t mod b, each of whose users is in it with probability q; users are put into
    groups whatever their data. The strategy has at most b coefficients.

    >>> from fedpriv.ledger.events import NeighbouringRelation
    >>> relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    >>> event = banded_poisson_gaussian((1.0, 0.5), 100, 8, 0.2, 1.0, relation)
    >>> event.sampling.schedule
    Schedule(rounds=100, participations=13, separation=8)
    """
    rounds, groups = Schedule(rounds).rounds, plain_numbers(groups)
    legal = f"it must be a whole number from 1 to the {rounds} rounds"
    require(is_whole(groups, rounds), f"groups is {groups!r}; {legal}")
    schedule = Schedule(rounds, -(-rounds // groups), groups)
    sampling = SamplingEvent(SamplingPolicy.BANDED_POISSON, q, population, relation, schedule)
    return _one_group(sampling, noise_multiplier, count, strategy)


def _one_group(
    sampling: SamplingEvent, z: float, count: int, strategy: tuple[float, ...] = (1.0,)
) -> RoundEvent:
    return RoundEvent(sampling, (SumQueryEvent("update", 1.0, z),), count, strategy)
