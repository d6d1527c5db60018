"""From a privacy budget to the noise, the rounds, the sampling or the queries that it allows.

`smallest_noise`, `largest_number` and `largest_probability` solve for one setting of any events
that an accountant prices; `calibrate_noise_multiplier`, `largest_rounds` and
`largest_sampling_probability` are those of equal Poisson-sampled rounds. `smallest_noise_stddev`,
`largest_clipping_norm` and `largest_share` solve for one more sum query of a round: queries over
one cohort add up to one with 1/z² = Σ_g 1/z_g², z_g = σ_g/S_g (McMahan et al. 2018, equation (1)),
and a group's share of the round is ω_g = (z/z_g)². `plan_within` finds whichever setting is left.

The budget is ε = target_epsilon > 0 at δ in [1e-60, 1), by an accountant of `ACCOUNTANTS`. A result
was priced within it, always. `InvalidValueError` says what is out of range, or that nothing, or
everything, stays within; `UnsupportedEventError` that the accountant has no analysis of an event.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import count

from fedpriv.accounting.accountant import PrivacyLoss
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.accounting.registry import accountant_named, epsilon
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
)

_ONE_MORE = "one more"
_LEAST_NOISE, _MOST_NOISE = 0.05, 1e5
_MOST_ROUNDS = 1 << 30
_LEAST_PROBABILITY = 1e-12
Price = Callable[[float], float]
"""ε of a setting, which is positive; +inf if no finite ε holds."""

Place = Callable[[float, float, float], float | None]
"""From the last setting within, the first one outside and a guess to the next setting to price,
which lies between them; None if they are near enough."""

_PRECISION = 1.0005
_NUDGE = 1.0002
_NEAR, _FAR = 1e-12, 40.0
_FIRST_STEP, _LONGEST_STEP = math.log(2.0), math.log(64.0)
_BISECT_EVERY = 4


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


@dataclass(frozen=True)
class Probe:
    """A setting that was priced.

    Attributes:
        setting: positive.
        fits: whether its ε is at most the target.
        excess: log(ε / target ε) within ±40, negative if it fits and else positive.
    """

    setting: float
    fits: bool
    excess: float


def last_within(
    price: Price, target: float, start: float, safest: float, boldest: float, place: Place
) -> float | None:
    """The setting nearest to `boldest` whose price is at most the target, up to a precision.

    * The price of the result is at most the target, always.
    * The price of some setting beyond it, as near as `place` asks, is above the target, unless the
      result is `boldest`.

    Returns:
        The setting, or None if not even `safest` is within the target.
    """

    def probe(setting: float) -> Probe:
        return _compared(setting, price(setting), target)

    here = probe(start)
    end = boldest if here.fits else safest
    length = _FIRST_STEP
    while True:
        if here.setting == end:
            return here.setting if here.fits else None
        there = probe(_towards(end, here.setting, length, place))
        if there.fits != here.fits:
            break
        here, length = there, _next_step(here, there)
    inside, outside = (here, there) if here.fits else (there, here)
    return _narrow(probe, inside, outside, place).setting


def real(inside: float, outside: float, guess: float) -> float | None:
    """Until the two differ by less than a thousandth."""
    low, high = min(inside, outside), max(inside, outside)
    if high <= _PRECISION * low:
        return None
    # A step beyond the guess, towards the farther end, moves that end next to the edge.
    nudged = guess * _NUDGE if high / guess > guess / low else guess / _NUDGE
    middle = math.sqrt(low) * math.sqrt(high)
    return nudged if low < nudged < high else middle


def whole(inside: float, outside: float, guess: float) -> float | None:
    """Whole numbers, until they are neighbours."""
    low, high = min(inside, outside), max(inside, outside)
    if high - low <= 1.0:
        return None
    nudged = math.ceil(guess) if high - guess > guess - low else math.floor(guess)
    return float(min(max(nudged, low + 1.0), high - 1.0))


def _narrow(probe: Callable[[float], Probe], inside: Probe, outside: Probe, place: Place) -> Probe:
    """The last probe within, once `place` asks for no more."""
    for step in count(1):
        secant = step % _BISECT_EVERY != 0
        share = inside.excess / (inside.excess - outside.excess) if secant else 0.5
        guess = inside.setting * (outside.setting / inside.setting) ** share
        setting = place(inside.setting, outside.setting, guess)
        if setting is None:
            break
        there = probe(setting)
        inside, outside = (there, outside) if there.fits else (inside, there)
    return inside


def _towards(end: float, here: float, length: float, place: Place) -> float:
    """The setting that lies so far, in logarithms, from `here` towards `end`, or `end`."""
    guess = here * math.exp(math.copysign(length, end - here))
    low, high = min(here, end), max(here, end)
    between = place(here, end, min(max(guess, low), high))
    return end if between is None else between


def _next_step(before: Probe, here: Probe) -> float:
    """How far to go to pass the edge, if the price goes on like this."""
    moved = abs(math.log(here.setting / before.setting))
    gained = abs(before.excess) - abs(here.excess)
    if gained <= 0.0:
        return 2.0 * moved
    return min(0.01 + 1.1 * abs(here.excess) * moved / gained, _LONGEST_STEP)


def _compared(setting: float, price: float, target: float) -> Probe:
    fits = price <= target
    size = abs(math.log(price) - math.log(target)) if price > 0.0 else _FAR
    return Probe(setting, fits, math.copysign(min(max(size, _NEAR), _FAR), -1.0 if fits else 1.0))


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
    """

    def query(z: float) -> SumQueryEvent:
        return SumQueryEvent(_ONE_MORE, clipping_norm, clipping_norm * z)

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
    """
    if not 0.0 < noise_stddev < math.inf:
        raise InvalidValueError(f"noise_stddev is {noise_stddev}; it must be positive and finite")

    def query(z: float) -> SumQueryEvent:
        return SumQueryEvent(_ONE_MORE, noise_stddev / z, noise_stddev)

    return _least(target_epsilon, delta, others, query, accountant).clipping_norm


def largest_share(
    target_epsilon: float, delta: float, others: RoundEvent, accountant: str = "tight"
) -> float:
    """The largest share ω of the round that one more sum query may have, given the others.

    It is (z / z_g)² of the round with the query of `smallest_noise_stddev`: the weight by which
    σ_g = z·S_g / √ω_g; the others have the rest of the weights.
    """
    z_g = smallest_noise_stddev(target_epsilon, delta, others, 1.0, accountant)
    whole = _joined(others, SumQueryEvent(_ONE_MORE, 1.0, z_g))
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


@dataclass(frozen=True)
class Sampled:
    """How users are sampled, and between which populations ε compares.

    Attributes:
        policy: poisson, every-user or fixed-size.
        relation: the neighbouring relation.
        population: N ≥ 1; read by fixed-size sampling, of m = q·N users.
    """

    policy: SamplingPolicy = SamplingPolicy.POISSON
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    population: int | None = None

    def __post_init__(self) -> None:
        legal = (SamplingPolicy.POISSON, SamplingPolicy.EVERY_USER, SamplingPolicy.FIXED_SIZE)
        if self.policy not in legal:
            raise InvalidValueError(
                f"{self.policy} sampling is of whole passes; legal is: {', '.join(legal)}"
            )
        if self.policy is SamplingPolicy.FIXED_SIZE and self.population is None:
            raise InvalidValueError(
                "fixed-size sampling has no population; it must be given, and the cohort is q·N"
            )

    def event(self, q: float, z: float, rounds: int) -> RoundEvent:
        """Equal rounds of one sum query."""
        sampling = SamplingEvent(self.policy, q, self.population or 1, self.relation)
        return RoundEvent(sampling, (SumQueryEvent("update", 1.0, z),), rounds)


@dataclass(frozen=True)
class Plan:
    """Equal rounds that stay within a privacy budget.

    Attributes:
        found: name of the attribute that was not given.
        sampled: how users are sampled.
        rounds: T ≥ 1.
        sampling_probability: q in (0, 1].
        noise_multiplier: z > 0 of the round, without the one more query.
        target_epsilon: ε of the budget.
        loss: what the rounds cost at δ of the budget; `loss.epsilon` ≤ `target_epsilon`.
        share: ω of one more sum query per round, the largest that fits; None if it was not asked.
        share_noise_multiplier: its noise over its clipping norm, σ/S.
    """

    found: str
    sampled: Sampled
    rounds: int
    sampling_probability: float
    noise_multiplier: float
    target_epsilon: float
    loss: PrivacyLoss
    share: float | None = None
    share_noise_multiplier: float | None = None


def plan_within(
    target_epsilon: float,
    delta: float,
    accountant: str,
    rounds: int | None = None,
    sampling_probability: float | None = None,
    noise_multiplier: float | None = None,
    sampled: Sampled = Sampled(),
) -> Plan:
    """The smallest noise, the most rounds, the largest sampling or share within (ε, δ).

    Args:
        target_epsilon: ε > 0.
        delta: δ in (0, 1).
        accountant: a key of `ACCOUNTANTS`.
        rounds: T ≥ 1, or None to find the most.
        sampling_probability: q in (0, 1], or None to find the largest; every user takes part with
            1, and it may be left out.
        noise_multiplier: z ≥ 0, or None to find the smallest.
        sampled: how users are sampled.

    Returns:
        The plan. With all three given: what share one more sum query of every round may have.
    """
    if rounds is not None and not 1 <= rounds <= _MOST_ROUNDS:
        raise InvalidValueError(f"rounds is {rounds}; it must be from 1 to {_MOST_ROUNDS}")
    q, z = sampling_probability, noise_multiplier
    if sampled.policy is SamplingPolicy.EVERY_USER:
        q = q or 1.0
    budget = target_epsilon, delta
    match rounds, q, z:
        case int(), float(), None:
            given_q, given_rounds = q, rounds
            found = "noise_multiplier"
            z = smallest_noise(
                *budget, lambda z: [sampled.event(given_q, z, given_rounds)], accountant
            )
        case int(), None, float():
            found = "sampling_probability"
            q = _largest_sampling(budget, sampled, rounds, z, accountant)
        case None, float(), float():
            found = "rounds"
            rounds = _most_rounds(budget, sampled, q, z, accountant)
        case int(), float(), float():
            return _with_share(budget, sampled.event(q, z, rounds), accountant, sampled)
        case _:
            given = [x for x in (rounds, q, z) if x is not None]
            raise InvalidValueError(
                f"{len(given)} of rounds, sampling probability and noise multiplier are given; "
                "two must be, to find the third, or all, to find the share of one more query"
            )
    loss = epsilon([sampled.event(q, z, rounds)], delta, accountant)
    return Plan(found, sampled, rounds, q, z, target_epsilon, loss)


def _largest_sampling(
    budget: tuple[float, float], sampled: Sampled, rounds: int, z: float, accountant: str
) -> float:
    population = sampled.population
    if sampled.policy is not SamplingPolicy.FIXED_SIZE or population is None:
        return largest_probability(*budget, lambda q: [sampled.event(q, z, rounds)], accountant)
    size = largest_number(
        *budget, lambda m: [sampled.event(m / population, z, rounds)], population, accountant
    )
    if size == 0:
        raise InvalidValueError(
            f"target_epsilon is {budget[0]} at delta {budget[1]}; not even a cohort of one user "
            f"stays within it in {rounds} rounds with noise multiplier {z}"
        )
    return size / population


def _most_rounds(
    budget: tuple[float, float], sampled: Sampled, q: float, z: float, accountant: str
) -> int:
    rounds = largest_number(
        *budget, lambda number: [sampled.event(q, z, number)], _MOST_ROUNDS + 1, accountant
    )
    if not 0 < rounds <= _MOST_ROUNDS:
        number = "not even one round" if rounds == 0 else f"more than {_MOST_ROUNDS} rounds"
        verb = "stays" if rounds == 0 else "stay"
        raise InvalidValueError(
            f"target_epsilon is {budget[0]} at delta {budget[1]}; {number} with noise multiplier "
            f"{z} and sampling probability {q} {verb} within it"
        )
    return rounds


def _with_share(
    budget: tuple[float, float], others: RoundEvent, accountant: str, sampled: Sampled
) -> Plan:
    z_g = smallest_noise_stddev(*budget, others, 1.0, accountant)
    query = SumQueryEvent(_ONE_MORE, 1.0, z_g)
    joined = replace(others, queries=(*others.queries, query))
    return Plan(
        found="share",
        sampled=sampled,
        rounds=others.count,
        sampling_probability=others.sampling.sampling_probability,
        noise_multiplier=others.noise_multiplier,
        target_epsilon=budget[0],
        loss=epsilon([joined], budget[1], accountant),
        share=(joined.noise_multiplier / z_g) ** 2,
        share_noise_multiplier=z_g,
    )
