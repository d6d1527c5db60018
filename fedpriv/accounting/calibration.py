"""The noise, rounds or sampling that a privacy budget allows.

The budget is ε = target_epsilon > 0 at δ in [1e-60, 1), by an accountant of `ACCOUNTANTS`; every
result is priced within the budget. Functions raise `InvalidValueError` if an argument is out of
range, or if nothing or everything stays within the budget, and `UnsupportedEventError` if the
accountant cannot analyse an event.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import count
from numbers import Real

from fedpriv.accounting.accountants import PrivacyLoss, accountant_named, epsilon
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
)
from fedpriv.support.checks import is_whole, require

_LEAST_NOISE, _MOST_NOISE = 0.05, 1e5
_MOST_ROUNDS, _MOST_USERS = 1 << 30, 1 << 53
_LEAST_PROBABILITY = 1e-12
_PRECISION, _NUDGE = 1.0005, 1.0002
_NEAR, _FAR = 1e-12, 40.0
_BISECT_EVERY, _LEAST_STRIDE = 8, 0.02


def smallest_noise(
    target_epsilon: float,
    delta: float,
    events_of: Callable[[float], Iterable[RoundEvent]],
    accountant: str = "tight",
) -> float:
    """Return the smallest noise multiplier ≥ 0.05 whose events stay within (ε, δ).

    A multiplier smaller by a thousandth is priced above ε, unless the result is 0.05.

    >>> from fedpriv.ledger.events import NeighbouringRelation
    >>> from fedpriv.accounting.policies import every_user_gaussian
    >>> relation = NeighbouringRelation.REPLACE_ONE
    >>> round(smallest_noise(1.0, 1e-5, lambda z: [every_user_gaussian(z, relation)]), 2)
    7.46
    """
    price = _price(target_epsilon, delta, events_of, accountant)
    z = last_within(price, target_epsilon, 1.0, _MOST_NOISE, _LEAST_NOISE)
    if z is None:
        problem = f"no noise multiplier up to {_MOST_NOISE:g} stays within it"
        raise _budget_error(target_epsilon, delta, problem)
    return z


def calibrate_noise_multiplier(
    target_epsilon: float,
    delta: float,
    rounds: int,
    sampling_probability: float,
    accountant: str = "tight",
) -> float:
    """Return the `smallest_noise` of Poisson-sampled rounds when one user is added or removed."""
    events = partial(poisson_gaussian, sampling_probability, count=rounds)
    return smallest_noise(target_epsilon, delta, lambda z: [events(z)], accountant)


def largest_number(
    target_epsilon: float,
    delta: float,
    events_of: Callable[[int], Iterable[RoundEvent]],
    most: int,
    accountant: str = "tight",
) -> int:
    """Return the largest number up to `most` whose events stay within (ε, δ), or 0.

    It may count rounds, passes, or users in a cohort. The next number is priced above ε, unless the
    result is `most`.
    """
    require(1 <= most <= _MOST_USERS, f"most is {most}; it must be from 1 to 2⁵³")
    price = _price(target_epsilon, delta, lambda number: events_of(int(number)), accountant)
    return int(last_within(price, target_epsilon, 1.0, 1.0, float(most), whole=True) or 0)


def largest_probability(
    target_epsilon: float,
    delta: float,
    events_of: Callable[[float], Iterable[RoundEvent]],
    accountant: str = "tight",
) -> float:
    """Return the largest sampling probability whose events stay within (ε, δ).

    The result is exact to one part in a thousand: the price of 1.001 times the result exceeds ε.
    InvalidValueError: no probability stays within (ε, δ), or all of them do.
    """
    price = _price(target_epsilon, delta, events_of, accountant)
    q = last_within(price, target_epsilon, 1.0, _LEAST_PROBABILITY, 1.0)
    if q is None:
        problem = f"no sampling probability from {_LEAST_PROBABILITY:g} on stays within it"
        raise _budget_error(target_epsilon, delta, problem)
    if q == 1.0:
        problem = "every sampling probability up to 1 stays within it"
        raise _budget_error(target_epsilon, delta, problem)
    return q


def _price(
    target_epsilon: float,
    delta: float,
    events_of: Callable[[float], Iterable[RoundEvent]],
    accountant: str,
) -> Callable[[float], float]:
    """Return the function from settings to ε; ε is ∞ if no finite value is proven."""
    in_range = isinstance(target_epsilon, Real) and 0.0 < target_epsilon < math.inf
    require(in_range, f"epsilon is {target_epsilon!r}; it must be positive and finite")
    pricing = accountant_named(accountant)
    return lambda setting: pricing.upper_epsilon(events_of(setting), delta)


def _budget_error(target_epsilon: float, delta: float, problem: str) -> InvalidValueError:
    return InvalidValueError(f"epsilon is {target_epsilon} at delta {delta}; {problem}")


def last_within(
    price: Callable[[float], float],
    target: float,
    start: float,
    safest: float,
    boldest: float,
    *,
    whole: bool = False,
) -> float | None:
    """Return the positive setting nearest to `boldest` whose price is at most the target.

    Some setting that is bolder by less than a thousandth, or by one if `whole`, is priced above the
    target, unless the result is `boldest`. None if not even `safest` is within the target.
    """

    def excess(setting: float) -> float:
        """Return log(price / target) within ±40, below 0 if and only if price ≤ target."""
        cost = price(setting)
        size = abs(math.log(cost) - math.log(target)) if cost > 0.0 else _FAR
        return math.copysign(min(max(size, _NEAR), _FAR), -1.0 if cost <= target else 1.0)

    last = newest = (start, excess(start))
    end = boldest if last[1] < 0.0 else safest
    # If a price is near the target in logarithms, so is the setting.
    factor = 2.0 if whole else math.exp(min(max(abs(last[1]), _LEAST_STRIDE), math.log(2.0)))
    factor = factor if end > start else 1.0 / factor
    while (newest[1] < 0.0) == (last[1] < 0.0):
        last = newest
        if last[0] == end:
            return end if last[1] < 0.0 else None
        setting = (min if end > start else max)(last[0] * factor, end)
        newest, factor = (setting, excess(setting)), factor * factor
    inside, outside = (last, newest) if last[1] < 0.0 else (newest, last)
    for number in count(1):
        a, b = inside[0], outside[0]
        if abs(a - b) <= 1.0 if whole else max(a, b) <= _PRECISION * min(a, b):
            break
        # The secant of the last two trials or of the ends; every eighth time the middle.
        guess = _secant(last, newest) if number % _BISECT_EVERY else math.sqrt(a) * math.sqrt(b)
        if not min(a, b) < guess < max(a, b):
            guess = _secant(inside, outside)
        setting = _between(a, b, guess, whole=whole)
        last, newest = newest, (setting, excess(setting))
        inside, outside = (newest, outside) if newest[1] < 0.0 else (inside, newest)
    return inside[0]


def _secant(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return the setting at which the line through two trials, in logarithms, is 0; NaN if flat."""
    (a, at_a), (b, at_b) = first, second
    if at_a == at_b:
        return math.nan
    return math.exp(max(-700.0, min(700.0, math.log(a) + at_a / (at_a - at_b) * math.log(b / a))))


def _between(a: float, b: float, guess: float, *, whole: bool) -> float:
    """Return a setting slightly past the guess, towards the farther end.

    The root is then likely between the nearer end and this setting, which replaces the farther end.
    """
    low, high = min(a, b), max(a, b)
    upwards = high / guess > guess / low
    if whole:
        rounded = float(math.ceil(guess) if upwards else math.floor(guess))
        return min(max(rounded, low + 1.0), high - 1.0)
    nudged = guess * _NUDGE if upwards else guess / _NUDGE
    return nudged if low < nudged < high else math.sqrt(low) * math.sqrt(high)


@dataclass(frozen=True)
class Plan:
    """Equal rounds that stay within a privacy budget."""

    found: str  # name of the computed setting
    rounds: int
    sampling: SamplingEvent
    noise_multiplier: float
    target_epsilon: float
    loss: PrivacyLoss  # of the rounds at δ; `loss.epsilon` ≤ `target_epsilon`

    @property
    def sampling_probability(self) -> float:
        """q in (0, 1]."""
        return self.sampling.sampling_probability

    @property
    def event(self) -> RoundEvent:
        """All rounds."""
        return _rounds_of(self.sampling, self.rounds, self.noise_multiplier)


def _rounds_of(sampling: SamplingEvent, rounds: int, noise_multiplier: float) -> RoundEvent:
    return RoundEvent(sampling, (SumQueryEvent("update", 1.0, noise_multiplier),), rounds)


def plan_within(
    target_epsilon: float,
    delta: float,
    rounds: int | None = None,
    sampling_probability: float | None = None,
    noise_multiplier: float | None = None,
    policy: SamplingPolicy = SamplingPolicy.POISSON,
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE,
    population: int | None = None,
    accountant: str = "tight",
) -> Plan:
    """Return the smallest noise, the most rounds, or the largest sampling probability in (ε, δ).

    Given two of rounds T ≥ 1, sampling probability q in (0, 1] and noise multiplier z > 0, it finds
    the third. q may be omitted if every user takes part. Fixed-size sampling, of q·N users, needs
    the population N; policies of whole passes have no plan.
    """
    users = population if policy is SamplingPolicy.FIXED_SIZE else None
    limit = "for fixed-size sampling it must be from 1 to 2⁵³, and the cohort is q·N"
    in_range = policy is not SamplingPolicy.FIXED_SIZE or is_whole(users, _MOST_USERS)
    require(in_range, f"population is {users}; {limit}")
    in_range = rounds is None or 1 <= rounds <= _MOST_ROUNDS
    require(in_range, f"rounds is {rounds}; it must be from 1 to {_MOST_ROUNDS}")
    limit = "it must be positive and finite, as no ε holds without noise"
    in_range = noise_multiplier is None or 0.0 < noise_multiplier < math.inf
    require(in_range, f"noise_multiplier is {noise_multiplier}; {limit}")

    def events(n: int, q: float, z: float) -> list[RoundEvent]:
        return [_rounds_of(SamplingEvent(policy, q, users or 1, relation), n, z)]

    budget = target_epsilon, delta
    n, q, z = rounds, sampling_probability, noise_multiplier
    if policy is SamplingPolicy.EVERY_USER:
        q = q or 1.0
    if n is not None and q is not None and z is None:
        name, z = "noise_multiplier", smallest_noise(*budget, partial(events, n, q), accountant)
    elif n is not None and q is None and z is not None:
        name = "sampling_probability"
        q = _largest_sampling(budget, partial(events, n, z=z), users, accountant)
    elif n is None and q is not None and z is not None:
        name, n = "rounds", _most_rounds(budget, partial(events, q=q, z=z), accountant)
    else:
        raise InvalidValueError(
            "give two of rounds, sampling probability and noise multiplier, to find the third"
        )
    (event,) = events(n, q, z)
    loss = epsilon([event], delta, accountant)
    return Plan(name, n, event.sampling, z, target_epsilon, loss)


def _largest_sampling(
    budget: tuple[float, float],
    events_of: Callable[[float], list[RoundEvent]],
    users: int | None,
    accountant: str,
) -> float:
    """Return the largest q, or the largest m/N of N = `users`."""
    if users is None:
        return largest_probability(*budget, events_of, accountant)
    size = largest_number(*budget, lambda m: events_of(m / users), users, accountant)
    if size == 0:
        raise _budget_error(*budget, "not even a cohort of one user stays within it")
    return size / users


def _most_rounds(
    budget: tuple[float, float], events_of: Callable[[int], list[RoundEvent]], accountant: str
) -> int:
    rounds = largest_number(*budget, events_of, _MOST_ROUNDS + 1, accountant)
    if rounds == 0:
        raise _budget_error(*budget, "not even one round stays within it")
    if rounds > _MOST_ROUNDS:
        raise _budget_error(*budget, f"more than {_MOST_ROUNDS} rounds stay within it")
    return rounds
