"""How cohorts are drawn: by coins, of a fixed size, everybody, or over a series of rounds.

A sampling policy draws the cohorts and names the event that they are accounted as, so what is
priced is what is drawn. Integer arithmetic throughout: a key and a population give the same cohorts
on every machine.
"""

import hmac
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, repeat
from operator import mul
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    Unit,
)
from fedpriv.privacy.noise import keystream, words
from fedpriv.support.checks import is_whole

Users = NDArray[np.int64]  # positions in the population, ascending: [cohort]

_MOST_PASSED = 128
_WORDS_AT_ONCE = 1 << 14
_WORDS, _MORE_BITS = 0, 1  # streams of a key


class Sampling(ABC):
    """Draws the cohorts of one event, of one round or of a series of them."""

    population: int  # N ≥ 1, the number of enrolled users, a public constant
    unit: Unit  # what is enrolled, and here called a user

    @abstractmethod
    def event(self) -> SamplingEvent:
        """Return the event of its draws."""

    @abstractmethod
    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the cohorts that a key determines, one for each round of the event; a secret.

        The key is 32 secret bytes, used for no other draw.
        """

    @cached_property
    def rounds(self) -> int:
        """How many rounds one event spans."""
        schedule = self.event().schedule
        return 1 if schedule is None else schedule.rounds

    @property
    def places(self) -> int:
        """How many may be drawn: N users, or k examples of each."""
        return self.event().places

    @property
    def drawn(self) -> Unit:
        """What is drawn: whole users, or whatever is enrolled, or the examples of users."""
        return self.unit if self.event().examples_per_user is None else Unit.EXAMPLE

    @property
    def expected_cohort_size(self) -> float:
        """Public denominator of an average over a round; the realised size is secret."""
        return self.event().expected_cohort_size


@dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Each user of the population joins the cohort independently with one probability.

    The number of users passed over before the next one joins is geometric, and found by inversion
    (Devroye 1986, X.2). W uniform on [0, 1) passes over j users, and the one after them joins, if
    (1 − q)^(j+1) ≤ W < (1 − q)^j. One W decides on at most G = min(⌊1/q⌋, 128) users: below
    (1 − q)^G it passes over all G. The next W starts after the users that the last one decided on.

    A float64 q is a multiple of 2^-e for some e ≤ 1074, so these limits are multiples of 2^-eG, and
    W has as many bits. Its first 64 are a word of keystream and decide, unless they equal those of
    a limit: then the others are read.

    Guarantees, for an observer who does not know the key and cannot tell AES-256 from random bits:

    * the probability to join is exactly the float64 sampling_probability, for every legal value
      down to the smallest subnormal (2^-1074): what is priced is what is drawn;
    * users join independently of each other, and of draws with other keys;
    * the cohort depends on the key, the population and the probability only, and is the same on
      every machine: integer arithmetic throughout;
    * an empty cohort is a legal cohort.
    """

    population: int  # N ≥ 1, the number of enrolled users, a public constant
    sampling_probability: float  # q in (0, 1]
    unit: Unit = Unit.USER  # what is enrolled, and here called a user

    def __post_init__(self) -> None:
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of one draw, for accountants of the add-or-remove-one relation."""
        return SamplingEvent(
            SamplingPolicy.POISSON,
            self.sampling_probability,
            self.population,
            NeighbouringRelation.ADD_OR_REMOVE_ONE,
            unit=self.unit,
        )

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw one cohort.

        A 64-bit word is read for each member and for each G users passed over; memory is twice the
        cohort and some megabytes.
        """
        limits = _limits(self.sampling_probability)
        most = limits.size
        cohort = []
        start = number = 0
        while start < self.population:
            expected = (self.population - start) * (1 / most + self.sampling_probability)
            count = min(int(expected) + 1, _WORDS_AT_ONCE)
            passed = _passed(key, number, count, self.sampling_probability, limits)
            ends = start + np.cumsum(np.minimum(passed + 1, most))
            cohort.append(ends[passed < most] - 1)
            start, number = int(ends[-1]), number + count
        users = np.concatenate(cohort)
        return (users[: np.searchsorted(users, self.population)],)


@dataclass(frozen=True)
class ExampleSampling(Sampling):
    """Each of up to k examples of a user joins the cohort independently with one probability.

    A user has k places; those it has no example for are empty and contribute zero, whoever draws
    them. So all that is drawn and divided by is a public constant: places are numbered from 0 to
    N·k − 1, those of user i from i·k on, and a user that is added or removed fills or empties its
    own places. The draw is that of `PoissonSampling` over all places, with its guarantees.

    Sensitivity: each example is clipped by itself to norm S, so one user more or less moves the sum
    of a cohort by at most j·S, where j ~ Bin(k, q) is how many of its places are drawn. The event
    says k, and its price is that of this mixture; S alone, as for users, would be wrong.
    """

    population: int  # N ≥ 1, the number of enrolled users, a public constant
    sampling_probability: float  # q in (0, 1], of each example
    examples_per_user: int  # k ≥ 1; a user's others never count
    # A public estimate, above 0 and up to N·k, of how many examples all users have together, with
    # at most k of each; it must not be computed from their data. None: N·k.
    total_examples: float | None = None
    unit: Unit = Unit.USER  # no other has examples to draw

    def __post_init__(self) -> None:
        self.event()
        total = self.total_examples
        number = isinstance(total, int | float)
        if total is not None and not (number and 0.0 < total <= self.places):
            raise InvalidValueError(
                f"total_examples is {total!r}; it must be above 0 and at most {self.places}, the "
                f"{self.population} users times {self.examples_per_user} examples_per_user"
            )

    @property
    def expected_cohort_size(self) -> float:
        """q times the public number of examples: the denominator of an average.

        The number that users really have is no public constant: it changes with a user.
        """
        return self.sampling_probability * (self.total_examples or self.places)

    def event(self) -> SamplingEvent:
        """Return the event of one draw, for accountants of the add-or-remove-one relation."""
        return SamplingEvent(
            SamplingPolicy.EXAMPLES,
            self.sampling_probability,
            self.population,
            NeighbouringRelation.ADD_OR_REMOVE_ONE,
            unit=self.unit,
            examples_per_user=self.examples_per_user,
        )

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the places that a key determines: in [0, N·k), ascending; a secret."""
        return PoissonSampling(self.places, self.sampling_probability).draw(key)


@dataclass(frozen=True)
class FixedSizeSampling(Sampling):
    """Exactly m of the N users are the cohort, every such set equally likely, in each round.

    The size of a cohort is public; so one user is replaced, not added, and moves a sum by 2S.
    """

    population: int
    cohort_size: int  # m in [1, N]
    unit: Unit = Unit.USER

    def __post_init__(self) -> None:
        size, most = self.cohort_size, self.population
        if not is_whole(size, most):
            legal = f"a whole number from 1 to the population of {most}"
            raise InvalidValueError(f"cohort_size is {size!r}; it must be {legal}")
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of one draw, for accountants of the replace-one relation."""
        return SamplingEvent(
            SamplingPolicy.FIXED_SIZE,
            self.cohort_size / self.population,
            self.population,
            NeighbouringRelation.REPLACE_ONE,
            unit=self.unit,
        )

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw one cohort: the first m distinct values of uniform ones, or what they leave."""
        n, m = self.population, self.cohort_size
        wanted = min(m, n - m)
        found = np.empty(0, np.int64)
        count = 2 * wanted + 64
        while found.size < wanted:  # all sets of that many distinct values are equally likely
            drawn = uniform_below(n, key, count)
            first = np.sort(np.unique(drawn, return_index=True)[1])
            found, count = drawn[first][:wanted], 2 * count
        chosen = np.zeros(n, np.bool_)
        chosen[found] = True
        return (np.flatnonzero(chosen == (wanted == m)),)


@dataclass(frozen=True)
class EveryUserSampling(Sampling):
    """All enrolled users are the cohort of each round; sampling adds no privacy."""

    population: int
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    unit: Unit = Unit.USER

    def __post_init__(self) -> None:
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of one round."""
        policy = SamplingPolicy.EVERY_USER
        return SamplingEvent(policy, 1.0, self.population, self.relation, unit=self.unit)

    def draw(self, key: bytes) -> tuple[Users, ...]:  # noqa: ARG002 - nothing is left to chance
        """Return all users."""
        return (np.arange(self.population),)


@dataclass(frozen=True)
class RandomAllocationSampling(Sampling):
    """Each user is in exactly k of the n rounds of a pass, every such set equally likely.

    Users are drawn independently of each other, and afresh for each pass. The cohorts of a pass are
    made at its start: k·N positions of eight bytes.
    """

    population: int
    pass_rounds: int  # n ≥ 1
    participations: int = 1  # k in [1, n]
    unit: Unit = Unit.USER

    def __post_init__(self) -> None:
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of a pass, for accountants of the add-or-remove-one relation."""
        schedule = Schedule(self.pass_rounds, self.participations)
        return SamplingEvent(
            SamplingPolicy.RANDOM_ALLOCATION,
            self.participations / self.pass_rounds,
            self.population,
            NeighbouringRelation.ADD_OR_REMOVE_ONE,
            schedule,
            self.unit,
        )

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the cohorts of a pass.

        Each user's set is that of Floyd (Bentley & Floyd 1987): for j = n − k, …, n − 1 in turn, a
        uniform value up to j, or j itself where that value was drawn before.
        """
        n, k, users = self.pass_rounds, self.participations, self.population
        taken = np.empty((k, users), np.int64)
        for at, j in enumerate(range(n - k, n)):
            drawn = uniform_below(j + 1, key, users, stream=at)
            before = (taken[:at] == drawn).any(axis=0)
            taken[at] = np.where(before, j, drawn)
        order = np.argsort(taken, axis=None, kind="stable")
        ends = np.searchsorted(taken.ravel()[order], np.arange(1, n))
        return tuple(np.sort(each % users) for each in np.split(order, ends))


@dataclass(frozen=True)
class SeparatedSampling(Sampling):
    """Each user takes part every b rounds of a series of n; who does when is no secret.

    The users are dealt into b groups of sizes that differ by one at most, and round t asks group
    t mod b. So a user is in at most ⌈n/b⌉ rounds, any two of them b apart.
    """

    population: int
    series_rounds: int  # n ≥ 1
    separation: int  # b in [1, n]
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    unit: Unit = Unit.USER

    def __post_init__(self) -> None:
        self.event()
        _check_groups(self.separation, self.population)

    def event(self) -> SamplingEvent:
        """Return the event of a series."""
        policy, schedule = SamplingPolicy.SEPARATED, _turns(self.series_rounds, self.separation)
        return SamplingEvent(policy, 1.0, self.population, self.relation, schedule, self.unit)

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the cohorts of a series."""
        groups = _dealt(self.population, self.separation, key)
        return tuple(groups[t % self.separation] for t in range(self.series_rounds))


@dataclass(frozen=True)
class BandedPoissonSampling(Sampling):
    """Users take turns in b groups, as in a separated series, and each joins by a coin.

    Groups are dealt whatever users' data, and are no secret; coins are, and are those of
    `PoissonSampling`, with its guarantees.
    """

    population: int
    series_rounds: int  # n ≥ 1
    separation: int  # b in [1, n]
    sampling_probability: float  # q in (0, 1], within a group
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    unit: Unit = Unit.USER

    def __post_init__(self) -> None:
        self.event()
        _check_groups(self.separation, self.population)

    def event(self) -> SamplingEvent:
        """Return the event of a series."""
        return SamplingEvent(
            SamplingPolicy.BANDED_POISSON,
            self.sampling_probability,
            self.population,
            self.relation,
            _turns(self.series_rounds, self.separation),
            self.unit,
        )

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the cohorts of a series."""
        groups = _dealt(self.population, self.separation, key)
        cohorts = []
        for t in range(self.series_rounds):
            group = groups[t % self.separation]
            coins = hmac.digest(key, f"coins/{t}".encode(), "sha256")
            (joined,) = PoissonSampling(group.size, self.sampling_probability).draw(coins)
            cohorts.append(group[joined])
        return tuple(cohorts)


@dataclass(frozen=True)
class CanarySampling(Sampling):
    """The cohorts of a policy among its users and m canaries beside them, who are drawn alike.

    Canaries stand behind the users: their positions, or places, are the last ones. Averages are
    over the users that are expected, as without canaries.
    """

    users: Sampling  # how the N users are drawn
    canaries: int  # m ≥ 1
    population: int = field(init=False)  # N
    unit: Unit = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "population", self.users.population)
        object.__setattr__(self, "unit", self.users.unit)
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of the users' draws, which names the canaries."""
        return replace(self.users.event(), canaries=self.canaries)

    @property
    def expected_cohort_size(self) -> float:
        """That of the users: canaries are not divided by."""
        return self.users.expected_cohort_size

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw as the policy does from a population of N + m."""
        policy: Any = self.users
        return cast(Sampling, replace(policy, population=self.population + self.canaries)).draw(key)


def _turns(rounds: int, groups: int) -> Schedule:
    """The schedule of users who take turns in so many groups."""
    legal = Schedule(rounds, separation=groups)  # or refused, before a division by zero
    return replace(legal, participations=-(-rounds // groups))


def _check_groups(groups: int, users: int) -> None:
    if groups > users:
        raise InvalidValueError(
            f"separation is {groups}; it must be at most the population of {users}, as each group "
            "needs a user"
        )


def _dealt(users: int, groups: int, key: bytes) -> list[Users]:
    """Users in groups whose sizes differ by one at most, by a permutation that the key makes."""
    order = np.argsort(words(key, users), kind="stable")
    return [np.sort(order[at::groups]) for at in range(groups)]


def uniform_below(bound: int, key: bytes, count: int, *, stream: int = 0) -> NDArray[np.int64]:
    """Independent uniform integers in [0, bound): int64 [count], of one stream of a key.

    Words from the largest multiple of the bound on are replaced by the next ones of the stream, so
    that no value is more likely than another. `bound` is at most 2^63.
    """
    limit = 2**64 - 2**64 % bound  # 2^64 where the bound is a power of two
    drawn, read = words(key, count, stream=stream), count
    while limit < 2**64 and (high := np.flatnonzero(drawn >= np.uint64(limit))).size:
        drawn[high] = words(key, high.size, stream=stream, start=read)
        read += high.size
    return (drawn % np.uint64(bound)).astype(np.int64)


def _limits(probability: float) -> NDArray[np.uint64]:
    """First 64 bits of (1 − q)^j for j = G, …, 1, uint64 [G]; ascending."""
    joins, all_of = probability.as_integer_ratio()
    most = min(all_of // joins, _MOST_PASSED)
    bits = all_of.bit_length() - 1
    powers = accumulate(repeat(all_of - joins, most), mul)
    first = [(power << 64) >> bits * j for j, power in enumerate(powers, start=1)]
    return np.array(first[::-1], np.uint64)


def _passed(
    key: bytes, first: int, count: int, probability: float, limits: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """How many users each of the words `first` to `first + count` passes over: [count], up to G."""
    drawn = words(key, count, stream=_WORDS, start=first)
    passed = np.full(count, limits.size, np.int64)
    stops = np.flatnonzero(drawn >= limits[0])
    word = drawn[stops]
    reached = np.searchsorted(limits, word, side="right")
    passed[stops] = limits.size - reached
    for stop in stops[limits[reached - 1] == word].tolist():
        number = first + stop
        passed[stop] = _passed_exactly(key, int(drawn[stop]), number, probability, limits.size)
    return passed


def _passed_exactly(key: bytes, word: int, number: int, probability: float, most: int) -> int:
    """How many users the word of a number passes over, by all bits of its W."""
    joins, all_of = probability.as_integer_ratio()
    size = -(-(all_of.bit_length() - 1) * most // 8)
    more = keystream(key, size, stream=_MORE_BITS, start=number * size)
    w = word << 8 * size | int.from_bytes(more.tobytes(), "little")
    one = 1 << 64 + 8 * size
    return sum(w * all_of**j < one * (all_of - joins) ** j for j in range(1, most + 1))
