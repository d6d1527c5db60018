"""What happened to the users' data, as frozen values that any accountant can price.

These values are the whole interface between privacy mechanisms and accountants. They are kept in
ledgers for years, so they evolve by one rule: an event is never removed and never changes its
meaning, new fields are optional, and an accountant refuses an event it has no analysis for.
"""

import math
import sys
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
    RANDOM_ALLOCATION = "random-allocation"
    """The event is one whole pass of n rounds, each with a release of its own; every user is in
    exactly k of them, every such set equally likely, drawn afresh for each user and each pass. A
    pass that stops early is charged whole."""
    SEPARATED = "separated"
    """The event is a series of n rounds, each with a release of its own; every user is in at most k
    of them, any two at least b rounds apart, in which ones is nobody's secret. It is charged
    whole."""


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


Pair = tuple[SamplingPolicy, NeighbouringRelation]
"""A sampling policy under a neighbouring relation: what an accountant can analyse, or not."""

_ANALYSED: tuple[Pair, ...] = (
    (SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.POISSON, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.EVERY_USER, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.EVERY_USER, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.FIXED_SIZE, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.SHUFFLED, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.SHUFFLED, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.RANDOM_ALLOCATION, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.SEPARATED, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.SEPARATED, NeighbouringRelation.REPLACE_ONE),
)
_ALWAYS_TAKING_PART = (
    SamplingPolicy.EVERY_USER,
    SamplingPolicy.SHUFFLED,
    SamplingPolicy.SEPARATED,
)
_MANY_ROUNDS = (
    SamplingPolicy.SHUFFLED,
    SamplingPolicy.RANDOM_ALLOCATION,
    SamplingPolicy.SEPARATED,
)


@dataclass(frozen=True)
class Schedule:
    """Which rounds each user is in, of an event that spans several.

    Attributes:
        rounds: n ≥ 1, the number of rounds, each with a release of its own.
        participations: k in [1, n], the number of rounds that a user is in: exactly so many of a
            pass, at most so many of a separated series.
        separation: b in [1, n], the least distance of two rounds that a user is in; 1 asks nothing.

    Raises:
        InvalidValueError: a number is out of range.
    """

    rounds: int
    participations: int = 1
    separation: int = 1

    def __post_init__(self) -> None:
        if not isinstance(self.rounds, int) or self.rounds < 1:
            raise InvalidValueError(
                f"the schedule has {self.rounds} rounds; it must have a whole number of at least 1"
            )
        for name, value in (
            ("participations", self.participations),
            ("separation", self.separation),
        ):
            if not isinstance(value, int) or not 1 <= value <= self.rounds:
                raise InvalidValueError(
                    f"{name} of the schedule is {value}; it must be a whole number from 1 to its "
                    f"{self.rounds} rounds"
                )


@dataclass(frozen=True)
class SamplingEvent:
    """One draw of a cohort; everything released about that cohort belongs to it.

    Attributes:
        policy: how the cohort is drawn.
        sampling_probability: q in (0, 1], the chance of each user to be in the cohort of a round:
            for fixed size the float nearest to m/N, so that q·N rounds to the cohort size m; for
            random allocation the float nearest to k/n; 1 for every-user rounds, and for shuffled
            passes and separated series, which sampling does not make cheaper.
        population: N ≥ 1, the number of enrolled users, a public constant.
        relation: the neighbouring relation under which the event may be accounted.
        schedule: which rounds users are in, where the event spans several; None elsewhere, and for
            shuffled passes that do not say how many batches they had.

    Raises:
        InvalidValueError: a field is out of range, or policy and relation have no joint analysis.
    """

    policy: SamplingPolicy
    sampling_probability: float
    population: int
    relation: NeighbouringRelation
    schedule: Schedule | None = None

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
        self._check_schedule()

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

    def _check_schedule(self) -> None:
        schedule, policy = self.schedule, self.policy
        if schedule is None:
            if policy in (SamplingPolicy.RANDOM_ALLOCATION, SamplingPolicy.SEPARATED):
                raise InvalidValueError(f"the schedule is None; {policy} sampling must have one")
            return
        if policy not in _MANY_ROUNDS:
            raise InvalidValueError(
                f"the schedule is {schedule}; {policy} sampling is of one round and must have none"
            )
        if policy is SamplingPolicy.SHUFFLED and schedule.participations != 1:
            raise InvalidValueError(
                f"participations of the schedule is {schedule.participations}; with {policy} "
                "sampling it must be 1"
            )
        if policy is not SamplingPolicy.SEPARATED and schedule.separation != 1:
            raise InvalidValueError(
                f"separation of the schedule is {schedule.separation}; with {policy} sampling it "
                "must be 1"
            )
        share = schedule.participations / schedule.rounds
        if policy is SamplingPolicy.RANDOM_ALLOCATION and self.sampling_probability != share:
            raise InvalidValueError(
                f"sampling_probability is {self.sampling_probability}; with {policy} sampling it "
                f"must be k/n, {share}"
            )


def names_of(pairs: Iterable[Pair]) -> str:
    """How messages list pairs.

    >>> names_of([(SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE)])
    'poisson with add-or-remove-one'
    """
    return ", ".join(f"{policy} with {relation}" for policy, relation in pairs)


class Randomness(StrEnum):
    """Where the cohort and the noise came from."""

    OPERATING_SYSTEM = "operating system"
    """A CSPRNG keyed by the operating system: the guarantee holds."""
    SEEDED = "seeded: reproducible, not a guarantee"
    """A CSPRNG keyed by a seed: whoever knows the seed can subtract the noise."""


@dataclass(frozen=True)
class SumQueryEvent:
    """One Gaussian sum query over the cohort of a sampling event.

    The mechanism released Σ_{i in cohort} c(v_i) + N(0, noise_stddev²·I) with ‖c(v)‖₂ ≤
    clipping_norm for every v, so its noise multiplier is noise_stddev / clipping_norm.

    With a granularity γ, the mechanism released γ(Σ_i a_i + K), where user i's a_i is a vector of
    integers with ‖a_i‖₂² ≤ B and K = round(η/γ), η ~ N(0, noise_stddev²·I). As Σ_i a_i is whole,
    this is post-processing of the continuous Gaussian mechanism with sensitivity γ√B ≤
    clipping_norm, so nothing in its price changes.

    Attributes:
        group: name of the vector group.
        clipping_norm: S_g > 0, in the units of the summed vector.
        noise_stddev: σ_g ≥ 0, the standard deviation of the noise on the **sum**, same units.
        granularity: γ, a power of two up to clipping_norm, same units; None: the noise was over
            real numbers, as in examples and comparisons, or floating point.

    Raises:
        InvalidValueError: a field is out of range.
    """

    group: str
    clipping_norm: float
    noise_stddev: float
    granularity: float | None = None

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
        if self.granularity is not None:
            self._check_granularity(self.granularity)

    def _check_granularity(self, granularity: float) -> None:
        # A mantissa of ½ is that of powers of two, not of NaN, infinity, 0 or what is negative.
        if math.frexp(granularity)[0] != 0.5 or granularity > self.clipping_norm:
            raise InvalidValueError(
                f"granularity of group {self.group!r} is {granularity}; it must be a power of two "
                f"up to the clipping_norm {self.clipping_norm}"
            )
        if math.isinf(max(self.clipping_norm, self.noise_stddev) / granularity):
            raise InvalidValueError(
                f"granularity of group {self.group!r} is {granularity}; clipping_norm "
                f"{self.clipping_norm} and noise_stddev {self.noise_stddev} must be finite in its "
                "steps"
            )

    @property
    def squared_bound(self) -> int | None:
        """B = ⌊(clipping_norm/γ)²⌋ ≥ 1, exactly; None without a granularity."""
        if self.granularity is None:
            return None
        numerator, denominator = (self.clipping_norm / self.granularity).as_integer_ratio()
        return numerator**2 // denominator**2

    @property
    def noise_steps(self) -> float | None:
        """noise_stddev/γ: standard deviation of η in steps of γ; None without a granularity."""
        return None if self.granularity is None else self.noise_stddev / self.granularity


@dataclass(frozen=True)
class RoundEvent:
    """One cohort and all sum queries over it, repeated `count` times with fresh cohorts.

    Attributes:
        sampling: how each cohort was drawn.
        queries: at least one sum query; all of one round see the *same* cohort.
        count: how many such events happened; of one round, but where there is a schedule.
        strategy: the first column (c_0, c_1, …) of the lower triangular Toeplitz matrix C that
            correlates noise over the rounds of a separated series: with X the sums of its n rounds
            and Z fresh noise as in `SumQueryEvent`, what is released is C⁻¹(C·X + Z). Missing
            coefficients are 0; (1,) is fresh noise in every round, and is all that others have.

    Raises:
        InvalidValueError: there is no query, count < 1, or no such strategy.
    """

    sampling: SamplingEvent
    queries: tuple[SumQueryEvent, ...]
    count: int = 1
    strategy: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        if not self.queries:
            raise InvalidValueError("a round event has no sum query; it must have at least one")
        if self.count < 1:
            raise InvalidValueError(f"count is {self.count}; it must be at least 1")
        self._check_strategy()

    def _check_strategy(self) -> None:
        strategy, sampling = self.strategy, self.sampling
        if strategy == (1.0,):
            return
        if sampling.policy is not SamplingPolicy.SEPARATED or sampling.schedule is None:
            raise InvalidValueError(
                f"the strategy has {len(strategy)} coefficients; {sampling.policy} sampling has "
                "fresh noise in every round, the strategy (1,)"
            )
        if not 1 <= len(strategy) <= sampling.schedule.rounds:
            raise InvalidValueError(
                f"the strategy has {len(strategy)} coefficients; it must have from 1 to the "
                f"{sampling.schedule.rounds} of the schedule's rounds"
            )
        if not all(map(math.isfinite, strategy)) or not strategy[0] > 0.0:
            raise InvalidValueError(
                f"the strategy begins with {strategy[0]}; its first coefficient must be positive "
                "and all must be finite"
            )

    @property
    def noise_multiplier(self) -> float:
        """Effective noise multiplier z of one round; 0 if any query is released without noise.

        Scaling group g by 1/σ_g makes the round one query of unit noise and sensitivity
        √(Σ_g (S_g/σ_g)²); z is its inverse (McMahan et al. 2018, equation (1)).
        """
        if any(query.noise_stddev == 0.0 for query in self.queries):
            return 0.0
        # Never 0, even where S/σ underflows; then z is below the truth, which is the safe side.
        ratios = (query.clipping_norm / query.noise_stddev for query in self.queries)
        return 1.0 / max(math.hypot(*ratios), sys.float_info.min)
