"""Events of one vector group under each sampling policy and relation.

Throughout, z = `noise_multiplier` ≥ 0 is the noise_stddev of the sum released in one round, divided
by the clipping norm, for every relation and number of rounds. The whole event happens `count` (or
`passes`) ≥ 1 times; `population` is the number N of enrolled users. Each function returns the
event, and raises `InvalidValueError` if a number is out of range.
"""

from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
)
from fedpriv.support.checks import check_range, is_whole, plain_numbers, require

_ADD_OR_REMOVE, _REPLACE = NeighbouringRelation


def poisson_gaussian(
    q: float, noise_multiplier: float, count: int = 1, population: int = 1
) -> RoundEvent:
    """Return the event of Poisson-sampled rounds when one user is added or removed.

    >>> poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000).noise_multiplier
    4.0
    """
    sampling = SamplingEvent(SamplingPolicy.POISSON, q, population, _ADD_OR_REMOVE)
    return _one_group(sampling, noise_multiplier, count)


def poisson_replace_gaussian(
    q: float, noise_multiplier: float, count: int = 1, population: int = 1
) -> RoundEvent:
    """Return the event of Poisson-sampled rounds when one user is replaced."""
    sampling = SamplingEvent(SamplingPolicy.POISSON, q, population, _REPLACE)
    return _one_group(sampling, noise_multiplier, count)


def poisson_examples_gaussian(
    q: float, examples_per_user: int, noise_multiplier: float, count: int = 1, population: int = 1
) -> RoundEvent:
    """Return the event of rounds that draw and clip examples when one user is added or removed.

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
    """Return the event of rounds with all enrolled users."""
    sampling = SamplingEvent(SamplingPolicy.EVERY_USER, 1.0, population, relation)
    return _one_group(sampling, noise_multiplier, count)


def fixed_size_gaussian(
    cohort_size: int, population: int, noise_multiplier: float, count: int = 1
) -> RoundEvent:
    """Return the event of rounds on m of N users, drawn without replacement, if one is replaced.

    Each round draws a new cohort of m = `cohort_size` users.
    """
    cohort_size, population = plain_numbers((cohort_size, population))
    check_range("population", population, "whole")
    limit = f"it must be a whole number from 1 to the population of {population}"
    require(is_whole(cohort_size, population), f"cohort_size is {cohort_size!r}; {limit}")
    policy, q = SamplingPolicy.FIXED_SIZE, cohort_size / population
    return _one_group(SamplingEvent(policy, q, population, _REPLACE), noise_multiplier, count)


def random_allocation_gaussian(
    rounds: int, participations: int, noise_multiplier: float, passes: int = 1, population: int = 1
) -> RoundEvent:
    """Return the event of passes with each user in k random rounds of n, under add-or-remove.

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
    """Return the event of series of rounds with correlated noise (DP-FTRL).

    If X are the n sums of a series, the release is X + C⁻¹Z = C⁻¹(C·X + Z), where the rows of Z are
    independent noise of standard deviation z clipping norms. A user is in at most k of the rounds,
    any two at least b apart. `strategy` is (c_0, c_1, …), at most n coefficients: the first column
    of the lower triangular Toeplitz matrix C, with c_0 > 0 and missing ones 0. (1,) is
    independent noise.
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
    """Return the event of series of Poisson rounds of b groups that take turns.

    Noise is correlated as in `separated_gaussian`, by at most b coefficients. Users are assigned to
    groups independently of their data. Each user of group t mod b is in round t with probability q.

    >>> from fedpriv.ledger.events import NeighbouringRelation
    >>> relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    >>> event = banded_poisson_gaussian((1.0, 0.5), 100, 8, 0.2, 1.0, relation)
    >>> event.sampling.schedule
    Schedule(rounds=100, participations=13, separation=8)
    """
    rounds, groups = Schedule(rounds).rounds, plain_numbers(groups)
    limit = f"it must be a whole number from 1 to the {rounds} rounds"
    require(is_whole(groups, rounds), f"groups is {groups!r}; {limit}")
    schedule = Schedule(rounds, -(-rounds // groups), groups)
    sampling = SamplingEvent(SamplingPolicy.BANDED_POISSON, q, population, relation, schedule)
    return _one_group(sampling, noise_multiplier, count, strategy)


def _one_group(
    sampling: SamplingEvent, z: float, count: int, strategy: tuple[float, ...] = (1.0,)
) -> RoundEvent:
    return RoundEvent(sampling, (SumQueryEvent("update", 1.0, z),), count, strategy)
