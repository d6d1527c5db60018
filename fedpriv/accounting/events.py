"""What happened to the users' data, as frozen values that any accountant can price.

These values are the whole interface between privacy mechanisms and accountants. They are kept in
ledgers for years, so they evolve by one rule: an event is never removed and never changes its
meaning, new fields are optional, and an accountant refuses an event it has no analysis for.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction

from fedpriv.errors import InvalidValueError


class SamplingPolicy(StrEnum):
    """How the cohort of a round is drawn from the enrolled users."""

    POISSON = "poisson"
    """Each user joins independently with the sampling probability."""
    EVERY_USER = "every-user"
    """All enrolled users are the cohort."""
    FIXED_SIZE = "fixed-size"
    """Exactly m of the N enrolled users, every such set equally likely, drawn afresh each round."""
    SHUFFLED = "shuffled"
    """The event is one whole **pass**: users are shuffled into disjoint batches, and each batch
    gets a release of its own by the sum queries of the event. Every user is in exactly one batch of
    a pass; a user that is missing leaves its place in its batch empty. A pass that stops early is
    charged whole."""


class NeighbouringRelation(StrEnum):
    """Which two populations an (ε, δ) statement compares."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    """One population is the other plus one user."""
    REPLACE_ONE = "replace-one"
    """The populations are of equal size and differ in the data of one user."""

    @property
    def sensitivity(self) -> float:
        """How far the sum of a cohort moves at most, in clipping norms.

        A user that joins or leaves moves it by one; one that is replaced by two, because its
        update may turn from +S to −S.
        """
        return 2.0 if self is NeighbouringRelation.REPLACE_ONE else 1.0


class Randomness(StrEnum):
    """Where the cohort and the noise came from."""

    OPERATING_SYSTEM = "operating system"
    """A CSPRNG keyed by the operating system: the guarantee holds."""
    SEEDED = "seeded: reproducible, not a guarantee"
    """A CSPRNG keyed by a seed: whoever knows the seed can subtract the noise."""


Pair = tuple[SamplingPolicy, NeighbouringRelation]
"""A sampling policy under a neighbouring relation: what an accountant can analyse, or not."""

_ANALYSED: tuple[Pair, ...] = (
    (SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.EVERY_USER, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.EVERY_USER, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.FIXED_SIZE, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.SHUFFLED, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.SHUFFLED, NeighbouringRelation.REPLACE_ONE),
)
_ALWAYS_TAKING_PART = (SamplingPolicy.EVERY_USER, SamplingPolicy.SHUFFLED)


@dataclass(frozen=True)
class SamplingEvent:
    """One draw of a cohort; everything released about that cohort belongs to it.

    Attributes:
        policy: how the cohort is drawn.
        sampling_probability: q in (0, 1], the chance of each user to be in the cohort: 1 for
            every-user rounds and shuffled passes, and for fixed size the float nearest to m/N, so
            that q·N rounds to the cohort size m.
        population: N ≥ 1, the number of enrolled users, a public constant.
        relation: the neighbouring relation under which the event may be accounted.

    Raises:
        InvalidValueError: a field is out of range, or policy and relation have no joint analysis.
    """

    policy: SamplingPolicy
    sampling_probability: float
    population: int
    relation: NeighbouringRelation

    def __post_init__(self) -> None:
        if not 0.0 < self.sampling_probability <= 1.0:
            raise InvalidValueError(
                f"sampling_probability is {self.sampling_probability}; it must be in (0, 1]"
            )
        if not isinstance(self.population, int) or self.population < 1:
            raise InvalidValueError(
                f"population is {self.population}; it must be a whole number of at least 1"
            )
        if (self.policy, self.relation) not in _ANALYSED:
            raise InvalidValueError(
                f"{self.policy} sampling with {self.relation} neighbours has no analysis; "
                f"legal is: {names_of(_ANALYSED)}"
            )
        self._check_cohort()

    def _check_cohort(self) -> None:
        q = self.sampling_probability
        if self.policy in _ALWAYS_TAKING_PART and q != 1.0:
            raise InvalidValueError(
                f"sampling_probability is {q}; with {self.policy} sampling it must be 1"
            )
        if self.policy is SamplingPolicy.FIXED_SIZE:
            cohort_size = round(Fraction(q) * self.population)
            if cohort_size < 1 or q != cohort_size / self.population:
                raise InvalidValueError(
                    f"sampling_probability is {q}; with {self.policy} sampling it must be m/N for "
                    f"a whole cohort size m of at least 1 and a population N of {self.population}"
                )


@dataclass(frozen=True)
class SumQueryEvent:
    """One Gaussian sum query over the cohort of a sampling event.

    The mechanism released Σ_{i in cohort} c(v_i) + N(0, noise_stddev²·I) with ‖c(v)‖₂ ≤
    clipping_norm for every v, so its noise multiplier is noise_stddev / clipping_norm.

    Attributes:
        group: name of the vector group.
        clipping_norm: S_g > 0, in the units of the summed vector.
        noise_stddev: σ_g ≥ 0, the standard deviation of the noise on the **sum**, same units.

    Raises:
        InvalidValueError: a field is out of range.
    """

    group: str
    clipping_norm: float
    noise_stddev: float

    def __post_init__(self) -> None:
        if not (self.clipping_norm > 0.0 and math.isfinite(self.clipping_norm)):
            raise InvalidValueError(
                f"clipping_norm of group {self.group!r} is {self.clipping_norm}; "
                "it must be positive and finite"
            )
        if not (self.noise_stddev >= 0.0 and math.isfinite(self.noise_stddev)):
            raise InvalidValueError(
                f"noise_stddev of group {self.group!r} is {self.noise_stddev}; "
                "it must be finite and not negative"
            )


@dataclass(frozen=True)
class RoundEvent:
    """One cohort and all sum queries over it, repeated `count` times with fresh cohorts.

    Attributes:
        sampling: how each cohort was drawn.
        queries: at least one sum query; all of one round see the *same* cohort.
        count: how many such rounds happened.

    Raises:
        InvalidValueError: there is no query, or count < 1.
    """

    sampling: SamplingEvent
    queries: tuple[SumQueryEvent, ...]
    count: int = 1

    def __post_init__(self) -> None:
        if not self.queries:
            raise InvalidValueError("a round event has no sum query; it must have at least one")
        if self.count < 1:
            raise InvalidValueError(f"count is {self.count}; it must be at least 1")

    @property
    def noise_multiplier(self) -> float:
        """Effective noise multiplier z of one round; 0 if any query is released without noise.

        Scaling group g by 1/σ_g makes the round one query of unit noise and sensitivity
        √(Σ_g (S_g/σ_g)²); z is its inverse (McMahan et al. 2018, equation (1)).
        """
        if any(query.noise_stddev == 0.0 for query in self.queries):
            return 0.0
        return 1.0 / math.hypot(*(q.clipping_norm / q.noise_stddev for q in self.queries))


def poisson_gaussian(
    q: float, noise_multiplier: float, count: int = 1, population: int = 1
) -> RoundEvent:
    """Event of `count` rounds of the Poisson-subsampled Gaussian mechanism with one group.

    >>> poisson_gaussian(q=0.01, noise_multiplier=4.0, count=10_000).noise_multiplier
    4.0
    """
    relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
    sampling = SamplingEvent(SamplingPolicy.POISSON, q, population, relation)
    return RoundEvent(sampling, (SumQueryEvent("update", 1.0, noise_multiplier),), count)


def compose(events: Iterable[RoundEvent]) -> dict[tuple[float, float], int]:
    """Count rounds by (sampling probability q, noise_stddev per *sensitivity*), by first use.

    The second number is the effective noise multiplier z where one user is added or removed, and
    z/2 where one is replaced. Accountants of one policy depend on nothing else.

    >>> compose([poisson_gaussian(0.5, 2.0), poisson_gaussian(0.5, 2.0, count=3)])
    {(0.5, 2.0): 4}
    """
    rounds: dict[tuple[float, float], int] = {}
    for event in events:
        sampling = event.sampling
        key = (
            sampling.sampling_probability,
            event.noise_multiplier / sampling.relation.sensitivity,
        )
        rounds[key] = rounds.get(key, 0) + event.count
    return rounds


def names_of(pairs: Iterable[Pair]) -> str:
    """How messages list pairs.

    >>> names_of([(SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE)])
    'poisson with add-or-remove-one'
    """
    return ", ".join(f"{policy} with {relation}" for policy, relation in pairs)
