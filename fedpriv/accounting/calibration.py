"""From a privacy budget to the noise, the number of rounds or the sampling that it allows.

`smallest_noise`, `largest_number` and `largest_probability` solve for one setting of any events
that an accountant prices; the other three are those of equal Poisson-sampled rounds. `shares`
solves for one sum query among several of a round.
"""

import math
from collections.abc import Callable, Iterable

from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.accounting.search import Price, last_within, real, whole
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import RoundEvent

_LEAST_NOISE, _MOST_NOISE = 0.05, 1e5
_MOST_ROUNDS = 1 << 30
_LEAST_PROBABILITY = 1e-12


def smallest_noise(
    target_epsilon: float,
    delta: float,
    events_of: Callable[[float], Iterable[RoundEvent]],
    accountant: str = "tight",
) -> float:
    """The smallest noise multiplier whose events stay within (ε, δ).

    * The accountant prices the result at ε(z) ≤ target_epsilon, always.
    * A noise multiplier smaller by a thousandth is priced above it, unless the result is 0.05, the
      smallest that is returned.

    >>> from fedpriv.ledger.events import NeighbouringRelation
    >>> from fedpriv.accounting.policies import every_user_gaussian
    >>> relation = NeighbouringRelation.REPLACE_ONE
    >>> round(smallest_noise(1.0, 1e-5, lambda z: [every_user_gaussian(z, relation)]), 2)
    7.46

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        events_of: from z to the events; ε must fall in z. What z multiplies is its own matter.
        accountant: a key of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: an argument is out of range, or no z up to 1e5 is enough.
        UnsupportedEventError: the accountant has no analysis of one of the events.
    """
    price = _price(target_epsilon, delta, events_of, accountant)
    z = last_within(price, target_epsilon, 1.0, _MOST_NOISE, _LEAST_NOISE, real)
    if z is None:
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon} at delta {delta}; no noise multiplier up to "
            f"{_MOST_NOISE:g} reaches it"
        )
    return z


def largest_number(
    target_epsilon: float,
    delta: float,
    events_of: Callable[[int], Iterable[RoundEvent]],
    most: int,
    accountant: str = "tight",
) -> int:
    """The largest number, of rounds, passes, users in a cohort, that stays within (ε, δ).

    * The accountant prices the events of the result at ε ≤ target_epsilon.
    * Those of one more are priced above it, unless the result is `most`.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        events_of: from a number, 1 to `most`, to the events; ε must grow in it.
        most: the largest number to try, at least 1 and at most 2⁵³.
        accountant: a key of `ACCOUNTANTS`.

    Returns:
        The number; 0 if not even the events of 1 stay within.

    Raises:
        InvalidValueError: an argument is out of range.
        UnsupportedEventError: the accountant has no analysis of one of the events.
    """
    if not 1 <= most <= 1 << 53:
        raise InvalidValueError(f"most is {most}; it must be from 1 to 2⁵³")
    price = _price(target_epsilon, delta, lambda number: events_of(int(number)), accountant)
    return int(last_within(price, target_epsilon, 1.0, 1.0, float(most), whole) or 0)


def largest_probability(
    target_epsilon: float,
    delta: float,
    events_of: Callable[[float], Iterable[RoundEvent]],
    accountant: str = "tight",
) -> float:
    """The largest sampling probability whose events stay within (ε, δ).

    * The accountant prices the result at ε(q) ≤ target_epsilon, always.
    * A sampling probability larger by a thousandth is priced above it.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        events_of: from q in [1e-12, 1] to the events; ε must grow in q.
        accountant: a key of `ACCOUNTANTS`.

    Returns:
        q in [1e-12, 1).

    Raises:
        InvalidValueError: an argument is out of range, q = 1 stays within (ε, δ), so that sampling
            is no limit, or not even q = 1e-12 does.
        UnsupportedEventError: the accountant has no analysis of one of the events.
    """
    price = _price(target_epsilon, delta, events_of, accountant)
    q = last_within(price, target_epsilon, 1.0, _LEAST_PROBABILITY, 1.0, real)
    if q is None:
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon} at delta {delta}; every sampling probability "
            f"from {_LEAST_PROBABILITY:g} on passes it"
        )
    if q == 1.0:
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon} at delta {delta}; every sampling probability "
            "up to 1 stays within it"
        )
    return q


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    rounds: int,
    sampling_probability: float,
    accountant: str = "tight",
) -> float:
    """The smallest noise multiplier of equal Poisson-sampled rounds within (ε, δ).

    It keeps the promises of `smallest_noise` and raises what that raises.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        rounds: T ≥ 1.
        sampling_probability: q in (0, 1].
        accountant: a key of `ACCOUNTANTS`.
    """
    return smallest_noise(
        target_epsilon,
        delta,
        lambda z: [poisson_gaussian(sampling_probability, z, rounds)],
        accountant,
    )


def largest_rounds(
    target_epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_probability: float,
    accountant: str = "tight",
) -> int:
    """The largest number of equal Poisson-sampled rounds within (ε, δ); 0 if not even one is.

    It keeps the promises of `largest_number` and raises what that raises.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        noise_multiplier: z ≥ 0.
        sampling_probability: q in (0, 1].
        accountant: a key of `ACCOUNTANTS`.

    Raises:
        InvalidValueError: also if more than 2³⁰ rounds fit.
    """
    rounds = largest_number(
        target_epsilon,
        delta,
        lambda number: [poisson_gaussian(sampling_probability, noise_multiplier, number)],
        _MOST_ROUNDS + 1,
        accountant,
    )
    if rounds > _MOST_ROUNDS:
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon} at delta {delta}; more than {_MOST_ROUNDS} "
            "rounds stay within it"
        )
    return rounds


def largest_sampling_probability(
    target_epsilon: float,
    delta: float,
    rounds: int,
    noise_multiplier: float,
    accountant: str = "tight",
) -> float:
    """The largest sampling probability of equal Poisson-sampled rounds within (ε, δ).

    It keeps the promises of `largest_probability` and raises what that raises.

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        rounds: T ≥ 1.
        noise_multiplier: z ≥ 0.
        accountant: a key of `ACCOUNTANTS`.
    """
    return largest_probability(
        target_epsilon, delta, lambda q: [poisson_gaussian(q, noise_multiplier, rounds)], accountant
    )


def check_target(target_epsilon: float) -> None:
    """Raise InvalidValueError unless ε is positive and finite."""
    if not 0.0 < target_epsilon < math.inf:
        raise InvalidValueError(
            f"target_epsilon is {target_epsilon}; it must be positive and finite"
        )


def _price(
    target_epsilon: float,
    delta: float,
    events_of: Callable[[float], Iterable[RoundEvent]],
    accountant: str,
) -> Price:
    check_target(target_epsilon)
    pricing = accountant_named(accountant)
    return lambda setting: pricing.epsilon(events_of(setting), delta).epsilon
