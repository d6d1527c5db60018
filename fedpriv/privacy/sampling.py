"""Sampling policies: Poisson, fixed-size, full cohorts, and cohorts over a series of rounds.

A policy draws the cohorts and defines the event they are accounted as, so the price always matches
the draw. All arithmetic is on integers: a key and a population give the same cohorts on every
machine.
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
    Projection,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    Unit,
)
from fedpriv.privacy.noise import keystream, words
from fedpriv.support.checks import is_whole

Users = NDArray[np.int64]  # positions in the population, ascending: [cohort]

_MOST_SKIPPED = 128
_WORDS_AT_ONCE = 1 << 14
_WORDS, _MORE_BITS = 0, 1  # streams of a key


class Sampling(ABC):
    """Draws the cohorts of one event, which spans one round or a series of rounds."""

    population: int  # N ≥ 1, the number of enrolled users, a public constant
    unit: Unit  # the enrolled unit, called a user here

    @abstractmethod
    def event(self) -> SamplingEvent:
        """Return the event that its draws are priced as."""

    @abstractmethod
    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the secret cohorts that a key determines, one for each round of the event.

        The key is 32 secret bytes and has no other use.
        """

    def _event(
        self,
        policy: SamplingPolicy,
        probability: float,
        relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE,
        **others: Any,
    ) -> SamplingEvent:
        """Return the event of these draws, with other fields of it."""
        return SamplingEvent(
            policy, probability, self.population, relation, unit=self.unit, **others
        )

    @cached_property
    def rounds(self) -> int:
        """Number of rounds in one event."""
        schedule = self.event().schedule
        return 1 if schedule is None else schedule.rounds

    @property
    def places(self) -> int:
        """Number of places to draw from: N users, or k examples of each."""
        return self.event().places

    @property
    def drawn(self) -> Unit:
        """The unit that is drawn: the enrolled unit, or the examples of users."""
        return self.unit if self.event().examples_per_user is None else Unit.EXAMPLE

    @property
    def expected_cohort_size(self) -> float:
        """Public denominator of an average in a round; the realised size is secret."""
        return self.event().expected_cohort_size


@dataclass(frozen=True)
class PoissonSampling(Sampling):
    """Each user of the population joins the cohort independently with the same probability.

    The number of users skipped before the next one joins is geometric and computed by inversion
    (Devroye 1986, X.2). W uniform on [0, 1) skips j users, and the user after them joins, if
    (1 − q)^(j+1) ≤ W < (1 − q)^j. One W decides on at most G = min(⌊1/q⌋, 128) users: below
    (1 − q)^G it skips all G. The next W starts after the users that the last one decided on.

    A float64 q is a multiple of 2^-e for some e ≤ 1074, so these limits are multiples of 2^-eG, and
    W has eG bits. Its first 64 are a word of keystream. They decide unless they equal those of a
    limit; only then are the others read.

    Guarantees, for an observer who does not know the key and cannot tell AES-256 from random bits:

    * the probability to join is exactly the float64 sampling_probability, for every valid value
      down to the smallest subnormal (2^-1074): the price matches the draw;
    * users join independently of each other and of draws with other keys;
    * the cohort depends on the key, the population and the probability only, and is the same on
      every machine, since all arithmetic is on integers;
    * an empty cohort is valid.
    """

    population: int  # N ≥ 1, the number of enrolled users, a public constant
    sampling_probability: float  # q in (0, 1]
    unit: Unit = Unit.USER  # the enrolled unit, called a user here
    projection: Projection | None = None  # the larger population that these users stand for

    def __post_init__(self) -> None:
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of one draw, for accountants of the add-or-remove-one relation."""
        q = self.sampling_probability
        return self._event(SamplingPolicy.POISSON, q, projection=self.projection)

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw one cohort.

        It reads a 64-bit word for each member and for each G users skipped, and needs twice the
        memory of the cohort plus some megabytes.
        """
        limits = _limits(self.sampling_probability)
        largest = limits.size
        cohort = []
        start = number = 0
        while start < self.population:
            expected = (self.population - start) * (1 / largest + self.sampling_probability)
            count = min(int(expected) + 1, _WORDS_AT_ONCE)
            skipped = _skipped(key, number, count, self.sampling_probability, limits)
            ends = start + np.cumsum(np.minimum(skipped + 1, largest))
            cohort.append(ends[skipped < largest] - 1)
            start, number = int(ends[-1]), number + count
        users = np.concatenate(cohort)
        return (users[: np.searchsorted(users, self.population)],)


def drawn_users(event: SamplingEvent, users: int, key: bytes) -> Users:
    """Return the users that a node's own coins draw, ascending, by the law of a round's event.

    `users` is the number of the node's users, and the result holds positions below it. Since all
    users join independently, the nodes' draws together have the law of one draw from all users.
    """
    if event.policy is SamplingPolicy.EVERY_USER or not users:
        return np.arange(users)
    if event.policy is not SamplingPolicy.POISSON:
        raise InvalidValueError(f"{event.policy} sampling needs a server that draws cohorts")
    return PoissonSampling(users, event.sampling_probability).draw(key)[0]


@dataclass(frozen=True)
class ExampleSampling(Sampling):
    """Each of a user's up to k examples joins the cohort independently with the same probability.

    A user has k places. A place without an example is empty and contributes zero if it is drawn. So
    the number of places and the denominator are public constants: places are numbered from 0 to
    N·k − 1, user i has the k places from i·k on, and adding or removing a user fills or empties its
    own places. The draw is that of `PoissonSampling` over all places, with its guarantees.

    Sensitivity: each example is clipped separately to norm S, so adding or removing one user moves
    the sum of a cohort by at most j·S, where j ~ Bin(k, q) is the number of its places drawn. The
    event states k, and its price is that of this mixture; S alone, as for users, would be wrong.
    """

    population: int  # N ≥ 1, the number of enrolled users, a public constant
    sampling_probability: float  # q in (0, 1], of each example
    examples_per_user: int  # k ≥ 1; further examples of a user never count
    # A public estimate, above 0 and up to N·k, of the number of examples of all users together,
    # with at most k of each; it must not be computed from their data. None: N·k.
    total_examples: float | None = None
    unit: Unit = Unit.USER  # other units have no examples to draw

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
        """Denominator of an average: q times the public estimate of the number of examples.

        The true number of examples is not a public constant, since one user changes it.
        """
        return self.sampling_probability * (self.total_examples or self.places)

    def event(self) -> SamplingEvent:
        """Return the event of one draw, for accountants of the add-or-remove-one relation."""
        q, k = self.sampling_probability, self.examples_per_user
        return self._event(SamplingPolicy.EXAMPLES, q, examples_per_user=k)

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the secret places that a key determines, in [0, N·k), ascending."""
        return PoissonSampling(self.places, self.sampling_probability).draw(key)


@dataclass(frozen=True)
class FixedSizeSampling(Sampling):
    """The cohort of each round is exactly m of the N users, all such sets equally likely.

    The size of a cohort is public, so neighbours replace one user, which moves a sum by up to 2S.
    """

    population: int
    cohort_size: int  # m in [1, N]
    unit: Unit = Unit.USER

    def __post_init__(self) -> None:
        size, population = self.cohort_size, self.population
        if not is_whole(size, population):
            limit = f"a whole number from 1 to the population of {population}"
            raise InvalidValueError(f"cohort_size is {size!r}; it must be {limit}")
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of one draw, for accountants of the replace-one relation."""
        q, relation = self.cohort_size / self.population, NeighbouringRelation.REPLACE_ONE
        return self._event(SamplingPolicy.FIXED_SIZE, q, relation)

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw one cohort: the first m distinct uniform values, or the complement of N − m."""
        n, m = self.population, self.cohort_size
        size = min(m, n - m)
        values = np.empty(0, np.int64)
        count = 2 * size + 64
        while values.size < size:  # all sets of this many distinct values are equally likely
            batch = uniform_below(n, key, count)
            first_indices = np.sort(np.unique(batch, return_index=True)[1])
            values, count = batch[first_indices][:size], 2 * count
        chosen = np.zeros(n, np.bool_)
        chosen[values] = True
        return (np.flatnonzero(chosen == (size == m)),)


@dataclass(frozen=True)
class EveryUserSampling(Sampling):
    """The cohort of each round is all enrolled users; sampling adds no privacy."""

    population: int
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    unit: Unit = Unit.USER

    def __post_init__(self) -> None:
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of one round."""
        return self._event(SamplingPolicy.EVERY_USER, 1.0, self.relation)

    def draw(self, key: bytes) -> tuple[Users, ...]:  # noqa: ARG002 - the draw is not random
        """Return all users."""
        return (np.arange(self.population),)


@dataclass(frozen=True)
class RandomAllocationSampling(Sampling):
    """Each user is in exactly k of the n rounds of a pass, all such sets equally likely.

    Users' rounds are drawn independently of each other, and afresh for each pass. The cohorts of a
    pass are drawn at its start and take k·N positions of eight bytes.
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
        q = self.participations / self.pass_rounds
        return self._event(SamplingPolicy.RANDOM_ALLOCATION, q, schedule=schedule)

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the cohorts of a pass.

        Floyd's algorithm (Bentley & Floyd 1987) gives each user's set: for j = n − k, …, n − 1 in
        turn, add a uniform value up to j, or j itself if that value is already in the set.
        """
        n, k, users = self.pass_rounds, self.participations, self.population
        chosen = np.empty((k, users), np.int64)
        for i, j in enumerate(range(n - k, n)):
            value = uniform_below(j + 1, key, users, stream=i)
            repeated = (chosen[:i] == value).any(axis=0)
            chosen[i] = np.where(repeated, j, value)
        order = np.argsort(chosen, axis=None, kind="stable")
        ends = np.searchsorted(chosen.ravel()[order], np.arange(1, n))
        return tuple(np.sort(places % users) for places in np.split(order, ends))


@dataclass(frozen=True)
class SeparatedSampling(Sampling):
    """Each user takes part every b rounds of a series of n; users' rounds are not secret.

    Users are split at random into b groups, whose sizes differ by at most one, and the cohort of
    round t is group t mod b. So a user is in at most ⌈n/b⌉ rounds, which are b apart.
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
        schedule = _rotation(self.series_rounds, self.separation)
        return self._event(SamplingPolicy.SEPARATED, 1.0, self.relation, schedule=schedule)

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the cohorts of a series."""
        groups = _deal(self.population, self.separation, key)
        return tuple(groups[t % self.separation] for t in range(self.series_rounds))


@dataclass(frozen=True)
class BandedPoissonSampling(Sampling):
    """b groups take turns, as in a separated series, and each user of a group joins by a coin.

    Groups do not depend on users' data and are not secret. Coins are secret; they are those of
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
        schedule, q = _rotation(self.series_rounds, self.separation), self.sampling_probability
        return self._event(SamplingPolicy.BANDED_POISSON, q, self.relation, schedule=schedule)

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw the cohorts of a series."""
        groups = _deal(self.population, self.separation, key)
        cohorts = []
        for t in range(self.series_rounds):
            group = groups[t % self.separation]
            coins = hmac.digest(key, f"coins/{t}".encode(), "sha256")
            (members,) = PoissonSampling(group.size, self.sampling_probability).draw(coins)
            cohorts.append(group[members])
        return tuple(cohorts)


@dataclass(frozen=True)
class CanarySampling(Sampling):
    """Draws cohorts from users and m canaries with the policy of the users.

    Canaries come after the users: their positions, or places, are the last ones. Averages divide by
    the expected number of users, as without canaries.
    """

    users: Sampling  # the policy of the N users
    canaries: int  # m ≥ 1
    population: int = field(init=False)  # N
    unit: Unit = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "population", self.users.population)
        object.__setattr__(self, "unit", self.users.unit)
        self.event()

    def event(self) -> SamplingEvent:
        """Return the event of the users' draws, with the number of canaries."""
        return replace(self.users.event(), canaries=self.canaries)

    @property
    def expected_cohort_size(self) -> float:
        """Expected number of users; canaries do not count."""
        return self.users.expected_cohort_size

    def draw(self, key: bytes) -> tuple[Users, ...]:
        """Draw with the users' policy from a population of N + m."""
        policy: Any = self.users
        return cast(Sampling, replace(policy, population=self.population + self.canaries)).draw(key)


def _rotation(rounds: int, groups: int) -> Schedule:
    """Return the schedule of users who take turns in this many groups."""
    schedule = Schedule(rounds, separation=groups)  # checks values before the division
    return replace(schedule, participations=-(-rounds // groups))


def _check_groups(groups: int, users: int) -> None:
    if groups > users:
        raise InvalidValueError(
            f"separation is {groups}; it must be at most the population of {users}, as each group "
            "needs a user"
        )


def _deal(users: int, groups: int, key: bytes) -> list[Users]:
    """Split users into groups whose sizes differ by at most one, by a keyed permutation."""
    order = np.argsort(words(key, users), kind="stable")
    return [np.sort(order[offset::groups]) for offset in range(groups)]


def uniform_below(bound: int, key: bytes, count: int, *, stream: int = 0) -> NDArray[np.int64]:
    """Return independent uniform integers in [0, bound), int64 [count], from one stream of a key.

    Words at or above the largest multiple of the bound are replaced by later words of the stream,
    so that all values are equally likely. `bound` is at most 2^63.
    """
    limit = 2**64 - 2**64 % bound  # 2^64 if the bound is a power of two
    values, words_read = words(key, count, stream=stream), count
    while limit < 2**64 and (rejected := np.flatnonzero(values >= np.uint64(limit))).size:
        values[rejected] = words(key, rejected.size, stream=stream, start=words_read)
        words_read += rejected.size
    return (values % np.uint64(bound)).astype(np.int64)


def _limits(probability: float) -> NDArray[np.uint64]:
    """Return the first 64 bits of (1 − q)^j for j = G, …, 1, ascending uint64 [G]."""
    num, den = probability.as_integer_ratio()
    largest = min(den // num, _MOST_SKIPPED)
    bits = den.bit_length() - 1
    powers = accumulate(repeat(den - num, largest), mul)
    heads = [(power << 64) >> bits * j for j, power in enumerate(powers, start=1)]
    return np.array(heads[::-1], np.uint64)


def _skipped(
    key: bytes, first: int, count: int, probability: float, limits: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return the number of users, up to G, that each word from index `first` skips: [count]."""
    heads = words(key, count, stream=_WORDS, start=first)
    skipped = np.full(count, limits.size, np.int64)
    stops = np.flatnonzero(heads >= limits[0])
    word = heads[stops]
    reached = np.searchsorted(limits, word, side="right")
    skipped[stops] = limits.size - reached
    for stop in stops[limits[reached - 1] == word].tolist():
        number = first + stop
        skipped[stop] = _skipped_exactly(key, int(heads[stop]), number, probability, limits.size)
    return skipped


def _skipped_exactly(key: bytes, word: int, number: int, probability: float, largest: int) -> int:
    """Return the number of users that the word at index `number` skips, using all bits of its W."""
    num, den = probability.as_integer_ratio()
    size = -(-(den.bit_length() - 1) * largest // 8)
    more_bytes = keystream(key, size, stream=_MORE_BITS, start=number * size)
    w = word << 8 * size | int.from_bytes(more_bytes.tobytes(), "little")
    one = 1 << 64 + 8 * size
    return sum(w * den**j < one * (den - num) ** j for j in range(1, largest + 1))
