"""What is left of a round's privacy for one more sum query, when the noise of the others is fixed.

Queries over one cohort add up to one query with 1/z² = Σ_g 1/z_g², z_g = σ_g / S_g (McMahan et al.
2018, equation (1)). A group's share of the round is ω_g = (z / z_g)², so that Σ_g ω_g = 1 and
σ_g = z·S_g / √ω_g. To fix the other groups and to ask for one more is to ask for its z_g.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.calibration import check_target, smallest_noise
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent, SumQueryEvent

_GROUP = "one more"


def smallest_noise_stddev(
    target_epsilon: float,
    delta: float,
    others: RoundEvent,
    clipping_norm: float,
    accountant: str = "tight",
) -> float:
    """The smallest σ of one more sum query of clipping norm S, given the others of the round.

    * With a query of (S, σ), the accountant prices the rounds at ε ≤ target_epsilon.
    * With a σ that is smaller by a thousandth, it prices them above, unless σ/S is 0.05.

    >>> from fedpriv.accounting.policies import poisson_gaussian
    >>> others = poisson_gaussian(q=0.01, noise_multiplier=1.0, count=1000)
    >>> round(smallest_noise_stddev(2.5, 1e-5, others, clipping_norm=0.5), 2)
    0.89

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        others: the rounds with the queries that are fixed, under any policy.
        clipping_norm: S > 0 of the query.
        accountant: a key of `ACCOUNTANTS`.

    Returns:
        σ, in the units of S.

    Raises:
        InvalidValueError: an argument is out of range, or the others alone cost more than ε, or so
            much that no σ up to 1e5·S is enough.
        UnsupportedEventError: the accountant has no analysis of the rounds.
    """

    def query(z: float) -> SumQueryEvent:
        return SumQueryEvent(_GROUP, clipping_norm, clipping_norm * z)

    return _least(target_epsilon, delta, others, query, accountant).noise_stddev


def largest_clipping_norm(
    target_epsilon: float,
    delta: float,
    others: RoundEvent,
    noise_stddev: float,
    accountant: str = "tight",
) -> float:
    """The largest S of one more sum query with noise σ, given the others of the round.

    * With a query of (S, σ), the accountant prices the rounds at ε ≤ target_epsilon.
    * With an S that is larger by a thousandth, it prices them above, unless σ/S is 0.05.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        others: the rounds with the queries that are fixed, under any policy.
        noise_stddev: σ > 0 of the query.
        accountant: a key of `ACCOUNTANTS`.

    Returns:
        S, in the units of σ.

    Raises:
        InvalidValueError: an argument is out of range, or the others alone cost more than ε, or so
            much that no S from 1e-5·σ on is small enough.
        UnsupportedEventError: the accountant has no analysis of the rounds.
    """
    if not 0.0 < noise_stddev < math.inf:
        raise InvalidValueError(f"noise_stddev is {noise_stddev}; it must be positive and finite")

    def query(z: float) -> SumQueryEvent:
        return SumQueryEvent(_GROUP, noise_stddev / z, noise_stddev)

    return _least(target_epsilon, delta, others, query, accountant).clipping_norm


def largest_share(
    target_epsilon: float, delta: float, others: RoundEvent, accountant: str = "tight"
) -> float:
    """The largest share ω of the round that one more sum query may have, given the others.

    It is (z / z_g)² of the round with the query of `smallest_noise_stddev`: the weight by which
    σ_g = z·S_g / √ω_g; the others have the rest of the weights.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        others: the rounds with the queries that are fixed, under any policy.
        accountant: a key of `ACCOUNTANTS`.

    Returns:
        ω in (0, 1).

    Raises:
        InvalidValueError: an argument is out of range, or the others alone cost more than ε, or
            almost ε.
        UnsupportedEventError: the accountant has no analysis of the rounds.
    """
    z_g = smallest_noise_stddev(target_epsilon, delta, others, 1.0, accountant)
    whole = _joined(others, SumQueryEvent(_GROUP, 1.0, z_g))
    return (whole.noise_multiplier / z_g) ** 2


def _least(
    target_epsilon: float,
    delta: float,
    others: RoundEvent,
    query: Callable[[float], SumQueryEvent],
    accountant: str,
) -> SumQueryEvent:
    check_target(target_epsilon)
    query(1.0)  # refuses an illegal norm or noise before anything is priced
    alone = accountant_named(accountant).epsilon([others], delta).epsilon
    if alone > target_epsilon:
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon} at delta {delta}; the other queries of the round "
            f"alone cost {alone}, which leaves nothing for one more"
        )
    least = smallest_noise(target_epsilon, delta, lambda z: [_joined(others, query(z))], accountant)
    return query(least)


def _joined(others: RoundEvent, query: SumQueryEvent) -> RoundEvent:
    return replace(others, queries=(*others.queries, query))
