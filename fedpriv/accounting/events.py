"""What happened to the users' data, as frozen values that any accountant can price.

These values are the whole interface between privacy mechanisms and accountants. They are kept in
ledgers for years, so they evolve by one rule: an event is never removed and never changes its
meaning, new fields are optional, and an accountant refuses an event it has no analysis for.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fedpriv.errors import InvalidValueError


class SamplingPolicy(StrEnum):
    """How the cohort of a round is drawn from the enrolled users."""

    POISSON = "poisson"
    """Each user joins independently with the sampling probability."""


class NeighbouringRelation(StrEnum):
    """Which two populations an (ε, δ) statement compares."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"
    """One population is the other plus one user."""


class Randomness(StrEnum):
    """Where the cohort and the noise came from."""

    OPERATING_SYSTEM = "operating system"
    """A CSPRNG keyed by the operating system: the guarantee holds."""
    SEEDED = "seeded: reproducible, not a guarantee"
    """A CSPRNG keyed by a seed: whoever knows the seed can subtract the noise."""


_ANALYSED = {(SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE)}


@dataclass(frozen=True)
class SamplingEvent:
    """One draw of a cohort; everything released about that cohort belongs to it.

    Attributes:
        policy: how the cohort is drawn.
        sampling_probability: q in (0, 1], the chance of each user to be in the cohort.
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
            legal = ", ".join(f"{policy} with {relation}" for policy, relation in _ANALYSED)
            raise InvalidValueError(
                f"{self.policy} sampling with {self.relation} neighbours has no analysis; "
                f"legal is: {legal}"
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
    sampling = SamplingEvent(
        SamplingPolicy.POISSON, q, population, NeighbouringRelation.ADD_OR_REMOVE_ONE
    )
    return RoundEvent(sampling, (SumQueryEvent("update", 1.0, noise_multiplier),), count)


def compose(events: Iterable[RoundEvent]) -> dict[tuple[float, float], int]:
    """Count rounds by (sampling probability, effective noise multiplier), in order of first use.

    Accountants of the Poisson-subsampled Gaussian depend on nothing else.

    >>> compose([poisson_gaussian(0.5, 2.0), poisson_gaussian(0.5, 2.0, count=3)])
    {(0.5, 2.0): 4}
    """
    rounds: dict[tuple[float, float], int] = {}
    for event in events:
        key = (event.sampling.sampling_probability, event.noise_multiplier)
        rounds[key] = rounds.get(key, 0) + event.count
    return rounds
