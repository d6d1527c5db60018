"""What was done with users' data, as frozen values that any accountant can price, and the budget.

Events are the whole interface between privacy mechanisms and accountants. Ledgers keep them for
years, so they evolve by one rule: an event is never removed and never changes its meaning, new
fields are optional, and an accountant refuses an event that it has no analysis of.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from itertools import product
from numbers import Real

from fedpriv.errors import InvalidValueError
from fedpriv.support.checks import (
    check_types,
    hold_numbers,
    hold_plain_numbers,
    is_whole,
    named_value,
    plain_numbers,
    require,
)

# The most rounds of a schedule, and repetitions of an event: as floats such numbers are exact.
MOST_REPEATS = 1 << 53
MOST_EXAMPLES = 10**6  # of a user, where examples are sampled: the price has a term for each number


class SamplingPolicy(StrEnum):
    """How the cohort of a round is drawn from the enrolled users."""

    POISSON = "poisson"  # each user joins independently with the sampling probability
    EVERY_USER = "every-user"  # all enrolled users are the cohort
    # Exactly m of the N enrolled users, every such set equally likely, drawn afresh each round.
    FIXED_SIZE = "fixed-size"
    # The event is one whole pass of n rounds, each with its own release; every user is in exactly k
    # of them, every such set equally likely, drawn afresh for each user and each pass. A pass that
    # stops early is charged whole.
    RANDOM_ALLOCATION = "random-allocation"
    # The event is a series of n rounds, each with its own release; every user is in at most k of
    # them, any two at least b rounds apart; in which ones is not secret. It is charged whole.
    SEPARATED = "separated"
    # The event is a series of n rounds, each with its own release. Users are in b groups, whatever
    # their data, so that groups need not be secret; round t ∈ {0, …, n − 1} is of group t mod b,
    # whose users each join it independently with the sampling probability. It is charged whole.
    BANDED_POISSON = "poisson-within-bands"
    # Of each user at most k examples count, always the same ones, and each of them joins
    # independently with the sampling probability; the cohort is of examples.
    EXAMPLES = "poisson-examples"


# The policies of series whose noise a strategy may correlate.
WITH_STRATEGY = (SamplingPolicy.SEPARATED, SamplingPolicy.BANDED_POISSON)


class NeighbouringRelation(StrEnum):
    """Which two populations an (ε, δ) statement compares."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"  # one population is the other plus one user
    REPLACE_ONE = "replace-one"  # equally many users, of whom one has other data

    @property
    def sensitivity(self) -> float:
        """How far the sum of a cohort moves at most, in clipping norms."""
        # Replacing a user may turn its update from +S to −S.
        return 2.0 if self is NeighbouringRelation.REPLACE_ONE else 1.0


class Unit(StrEnum):
    """Unit of privacy: what is added, removed or replaced. Elsewhere "user" stands for any."""

    USER = "user"  # all of a user's data
    EXAMPLE = "example"  # one row
    MICROBATCH = "microbatch"  # some rows of one user, always the same


EventKind = tuple[SamplingPolicy, NeighbouringRelation]
_NOT_ANALYSED = {
    (SamplingPolicy.FIXED_SIZE, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.RANDOM_ALLOCATION, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.EXAMPLES, NeighbouringRelation.REPLACE_ONE),
}
# The kinds of events that can be constructed.
ANALYSED: tuple[EventKind, ...] = tuple(
    kind for kind in product(SamplingPolicy, NeighbouringRelation) if kind not in _NOT_ANALYSED
)


@dataclass(frozen=True)
class Schedule:
    """Which rounds each user takes part in, for an event that spans several."""

    rounds: int  # n in [1, 2⁵³], each with its own release
    participations: int = 1  # k in [1, n]: a user is in k of a pass, in at most k of a series
    separation: int = 1  # b in [1, n], the least distance between two rounds of a user

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        n = self.rounds
        legal = "it must have a whole number of at least 1"
        require(is_whole(n), f"the schedule has {n!r} rounds; {legal}")
        require(n <= MOST_REPEATS, f"the schedule has {n} rounds; it must have at most 2^53")
        legal = f"it must be a whole number from 1 to its {n} rounds"
        for name in ("participations", "separation"):
            value = getattr(self, name)
            require(is_whole(value, n), f"{name} of the schedule is {value!r}; {legal}")


@dataclass(frozen=True)
class SamplingEvent:
    """One draw of a cohort; everything released about that cohort belongs to it.

    q in (0, 1] is each user's chance to be in the cohort of a round:

    * Poisson sampling: any; of examples, the chance of each example; within bands, the chance in a
      round of the user's group;
    * fixed size: the float nearest to m/N, so that q·N rounds to the cohort size m;
    * random allocation: the float nearest to k/n;
    * all others, which sampling does not make cheaper: 1.
    """

    policy: SamplingPolicy
    sampling_probability: float  # q
    population: int  # N ≥ 1, the number of enrolled users, a public constant
    relation: NeighbouringRelation  # under which the event may be accounted
    # None where the event is one round.
    schedule: Schedule | None = None
    unit: Unit = Unit.USER
    # k in [1, 10⁶], the most examples of a user that count, where these are sampled; else None.
    examples_per_user: int | None = None
    # How many are drawn beside the N users, and like them, who are nobody: an audit's canaries.
    canaries: int = 0

    def __post_init__(self) -> None:
        hold_numbers(self)
        # Analyses compare by identity, so a string equal to a member becomes the member.
        named = {"policy": SamplingPolicy, "relation": NeighbouringRelation, "unit": Unit}
        for name, kind in named.items():
            if type(held := getattr(self, name)) is not kind:
                object.__setattr__(self, name, named_value(kind, name, held))
        check_types(schedule=(self.schedule, Schedule | None))
        q, n, policy = self.sampling_probability, self.population, self.policy
        require(0.0 < q <= 1.0, f"sampling_probability is {q}; it must be in (0, 1]")
        require(is_whole(n), f"population is {n}; it must be a whole number of at least 1")
        if (policy, self.relation) not in ANALYSED:
            found = f"{policy} sampling with {self.relation} neighbours has no analysis"
            raise InvalidValueError(f"{found}; legal is: {kinds_text(ANALYSED)}")
        self._check_schedule()
        self._check_examples()
        self._check_canaries()
        plain_numbers(self.places, "the population, times examples_per_user,")
        if policy is SamplingPolicy.FIXED_SIZE:
            m = round(Fraction(q) * n)
            exact = m >= 1 and q == m / n
            legal = f"m/N for a whole cohort size m of at least 1 and a population N of {n}"
        elif policy is SamplingPolicy.RANDOM_ALLOCATION and self.schedule is not None:
            share = self.schedule.participations / self.schedule.rounds
            exact, legal = q == share, f"k/n, {share}"
        else:
            coins = (SamplingPolicy.POISSON, SamplingPolicy.EXAMPLES, SamplingPolicy.BANDED_POISSON)
            exact, legal = q == 1.0 or policy in coins, "1"
        require(exact, f"sampling_probability is {q}; with {policy} sampling it must be {legal}")

    @property
    def text(self) -> str:
        """How cohorts are drawn, in a few words.

        >>> policy, relation = SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE
        >>> SamplingEvent(policy, 0.3, 10, relation).text
        'q = 0.3'
        """
        q, schedule = f"q = {self.sampling_probability:g}", self.schedule
        if self.policy in (SamplingPolicy.POISSON, SamplingPolicy.EXAMPLES):
            return q
        if self.policy is SamplingPolicy.FIXED_SIZE:
            return f"{self.policy} cohorts, m = {self.expected_cohort_size:.0f}"
        if self.policy is SamplingPolicy.RANDOM_ALLOCATION and schedule is not None:
            return f"{self.policy} to {schedule.participations} of {schedule.rounds} rounds"
        if self.policy in WITH_STRATEGY and schedule is not None:
            chance = "" if q == "q = 1" else f", {q}"
            turns = f"{schedule.separation} groups in turn{chance}"
            return f"{self.policy}, {turns}, {schedule.rounds} rounds at once"
        return str(self.policy)

    @property
    def expected_cohort_size(self) -> float:
        """How many users are in the cohort of a round on average: of one of b groups, q·N/b.

        Of examples, how many there would be if every user had k. Canaries do not count.
        """
        grouped = self.policy in WITH_STRATEGY and self.schedule is not None
        groups = self.schedule.separation if grouped and self.schedule else 1
        users = self.population * (self.examples_per_user or 1)
        return self.sampling_probability * (users / groups)

    @property
    def cohort_variance(self) -> float:
        """Variance of the size of the cohort of a round; 0 where its size is public."""
        if self.policy is SamplingPolicy.FIXED_SIZE:
            return 0.0
        return self.expected_cohort_size * (1.0 - self.sampling_probability)

    def _check_schedule(self) -> None:
        schedule, policy = self.schedule, self.policy
        needed = policy in (*WITH_STRATEGY, SamplingPolicy.RANDOM_ALLOCATION)
        if schedule is None:
            require(not needed, f"the schedule is None; {policy} sampling must have one")
            return
        one_round = f"{policy} sampling is of one round and must have none"
        require(needed, f"the schedule is {schedule}; {one_round}")
        k, b = schedule.participations, schedule.separation
        legal = f"with {policy} sampling it must be 1"
        apart = b == 1 or policy in WITH_STRATEGY
        require(apart, f"separation of the schedule is {b}; {legal}")
        most = -(-schedule.rounds // b)
        legal = f"with {policy} sampling it must be ⌈n/b⌉, {most}"
        every = k == most or policy is not SamplingPolicy.BANDED_POISSON
        require(every, f"participations of the schedule is {k}; {legal}")

    def _check_examples(self) -> None:
        k, policy = self.examples_per_user, self.policy
        found = f"examples_per_user is {k!r}"
        if policy is not SamplingPolicy.EXAMPLES:
            require(k is None, f"{found}; {policy} sampling is of whole users and must have none")
            return
        legal = f"with {policy} sampling it must be a whole number from 1 to {MOST_EXAMPLES}"
        require(is_whole(k, MOST_EXAMPLES), f"{found}; {legal}")
        legal = f"with {policy} sampling it must be {str(Unit.USER)!r}"
        require(self.unit is Unit.USER, f"unit is {str(self.unit)!r}; {legal}")

    def _check_canaries(self) -> None:
        m, found = self.canaries, f"canaries is {self.canaries}"
        require(isinstance(m, int) and m >= 0, f"{found}; it must be a whole number from 0 on")
        # In a cohort of a fixed size a canary that is drawn would take the place of a user.
        without = self.policy is SamplingPolicy.FIXED_SIZE
        require(m == 0 or not without, f"{found}; with {self.policy} sampling it must be 0")

    @property
    def places(self) -> int:
        """How many may be drawn: N users and the canaries, or k places of each for examples."""
        return (self.population + self.canaries) * (self.examples_per_user or 1)


def kinds_text(kinds: Iterable[EventKind]) -> str:
    """How messages list kinds of events."""
    return ", ".join(f"{policy} with {relation}" for policy, relation in kinds)


class Randomness(StrEnum):
    """Where the cohort and the noise came from."""

    OPERATING_SYSTEM = "operating system"  # a CSPRNG that it keyed: the guarantee holds
    # A CSPRNG keyed by a seed: anyone who knows the seed can subtract the noise.
    SEEDED = "seeded: reproducible, not a guarantee"


@dataclass(frozen=True)
class SumQueryEvent:
    """One Gaussian sum query over the cohort of a sampling event.

    The mechanism released Σ_{i in cohort} c(v_i) + N(0, noise_stddev²·I) with ‖c(v)‖₂ ≤
    clipping_norm for every v, so its noise multiplier is noise_stddev / clipping_norm.

    With a granularity γ, the mechanism released γ(Σ_i a_i + K), where user i's a_i is a vector of
    integers with ‖a_i‖₂² ≤ B and K = round(η/γ), η ~ N(0, noise_stddev²·I). As Σ_i a_i is whole,
    this is post-processing of the continuous Gaussian mechanism with sensitivity γ√B ≤
    clipping_norm, so nothing in its price changes.
    """

    group: str  # name of the vector group
    clipping_norm: float  # S_g > 0, in the units of the summed vector
    noise_stddev: float  # σ_g ≥ 0, the standard deviation of the noise on the **sum**
    # γ, a power of two up to clipping_norm; None if the noise was real or floating-point numbers.
    granularity: float | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        norm, stddev, step = self.clipping_norm, self.noise_stddev, self.granularity
        of, legal = f"of group {self.group!r} is", "it must be positive and finite"
        require(0.0 < norm < math.inf, f"clipping_norm {of} {norm}; {legal}")
        legal = "it must be finite and not negative"
        require(0.0 <= stddev < math.inf, f"noise_stddev {of} {stddev}; {legal}")
        if step is None:
            return
        # A mantissa of ½ is that of powers of two, not of NaN, infinity, 0 or negative numbers.
        power = math.frexp(step)[0] == 0.5 and step <= norm
        legal = f"it must be a power of two up to the clipping_norm {norm}"
        require(power, f"granularity {of} {step}; {legal}")
        legal = f"clipping_norm {norm} and noise_stddev {stddev} must be finite in its steps"
        require(max(norm, stddev) / step < math.inf, f"granularity {of} {step}; {legal}")


@dataclass(frozen=True)
class Trial:
    """What one trial of a search may be: Poisson-sampled rounds, each with fresh noise."""

    sampling_probability: float  # q in (0, 1]
    noise_multiplier: float  # z > 0 of each round
    rounds: int  # T in [1, 2⁵³]

    def __post_init__(self) -> None:
        hold_numbers(self)
        q, z, t = self.sampling_probability, self.noise_multiplier, self.rounds
        require(0.0 < q <= 1.0, f"sampling_probability of a trial is {q}; it must be in (0, 1]")
        legal = "it must be positive and finite"
        require(0.0 < z < math.inf, f"noise_multiplier of a trial is {z}; {legal}")
        legal = "it must be a whole number from 1 to 2^53"
        require(is_whole(t, MOST_REPEATS), f"rounds of a trial is {t}; {legal}")


@dataclass(frozen=True)
class Selection:
    """A whole search: of K trials the best is released; nothing of the others is, nor K.

    K and what each trial is, one of `trials`, are drawn independently, whatever the data and the
    other trials. The best is told by what the trials themselves would have released. K has Poisson
    law with this mean, or with a shape η the truncated negative binomial law of Papernot & Steinke
    2022, Definition 1: P[K = k] ∝ (1 − γ)^k·Π_{l<k} (l + η)/(l + 1) for k ≥ 1, with the γ that
    gives the mean.
    """

    trials: tuple[Trial, ...]  # at least one, all different
    mean: float  # E[K] ≥ 1, above 1 with a shape
    shape: float | None = None  # η > 0; None: Poisson

    def __post_init__(self) -> None:
        hold_numbers(self)
        kinds, mean, shape = self.trials, self.mean, self.shape
        found = f"a selection has {len(kinds)} kinds of trials"
        distinct = len(set(kinds)) == len(kinds) > 0
        require(distinct, f"{found}; there must be at least one, and all must differ")
        proper = 1.0 <= mean < math.inf and (shape is None or mean > 1.0)
        legal = "it must be finite and at least 1, and above 1 with a shape"
        require(proper, f"the mean number of trials is {mean}; {legal}")
        legal = "it must be positive and finite, or None"
        require(shape is None or 0.0 < shape < math.inf, f"the shape is {shape}; {legal}")


@dataclass(frozen=True)
class RoundEvent:
    """One cohort and all sum queries over it, repeated `count` times with fresh cohorts.

    The strategy is the first column (c_0, c_1, …) of the lower triangular Toeplitz matrix C that
    correlates noise over the rounds of a series: with X the sums of its n rounds and Z fresh noise
    as in `SumQueryEvent`, C⁻¹(C·X + Z) is released. Missing coefficients are 0, and within bands
    there are at most b; (1,) is fresh noise in every round, the only strategy of other policies.
    """

    sampling: SamplingEvent
    queries: tuple[SumQueryEvent, ...]  # at least one; all of one round see the *same* cohort
    # How many such events happened, each of one round unless there is a schedule; in [1, 2⁵³].
    count: int = 1
    strategy: tuple[float, ...] = (1.0,)
    # The event is a whole search; sampling and queries are those of one round of its first trial.
    selection: Selection | None = None

    def __post_init__(self) -> None:
        check_types(sampling=(self.sampling, SamplingEvent), queries=(self.queries, Iterable))
        object.__setattr__(self, "queries", tuple(self.queries))
        object.__setattr__(self, "strategy", _coefficients(self.strategy))
        if type(self.count) is not int:
            object.__setattr__(self, "count", plain_numbers(self.count))
        for query in self.queries:
            check_types(**{"a sum query": (query, SumQueryEvent)})
        strategy, policy, schedule = self.strategy, self.sampling.policy, self.sampling.schedule
        require(self.queries != (), "a round event has no sum query; it must have at least one")
        legal = "it must be a whole number from 1 to 2^53"
        require(is_whole(self.count, MOST_REPEATS), f"count is {self.count!r}; {legal}")
        if self.selection is not None:
            self._check_selection(self.selection)
        if strategy == (1.0,):
            return
        found = f"the strategy has {len(strategy)} coefficients"
        if policy not in WITH_STRATEGY or schedule is None:
            raise InvalidValueError(
                f"{found}; {policy} sampling has fresh noise in every round, the strategy (1,)"
            )
        legal = f"it must have from 1 to the {schedule.rounds} of the schedule's rounds"
        require(1 <= len(strategy) <= schedule.rounds, f"{found}; {legal}")
        b, banded = schedule.separation, policy is SamplingPolicy.BANDED_POISSON
        legal = f"with {policy} sampling it must have at most as many as groups, {b}"
        require(len(strategy) <= b or not banded, f"{found}; {legal}")
        legal = "its first coefficient must be positive and all must be finite"
        proper = strategy[0] > 0.0 and all(map(math.isfinite, strategy))
        require(proper, f"the strategy begins with {strategy[0]}; {legal}")

    def _check_selection(self, selection: Selection) -> None:
        kind = self.sampling.policy, self.sampling.relation
        legal = (SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE)
        found = f"a selection has {kinds_text([kind])}; legal is: {kinds_text([legal])}"
        require(kind == legal, found)
        first, z = selection.trials[0], self.noise_multiplier
        same = self.sampling.sampling_probability == first.sampling_probability
        same = same and math.isclose(z, first.noise_multiplier, rel_tol=2.0**-40)
        require(same, f"the round of a selection has z = {z}; it must be one of its first trial")

    @property
    def noise_multiplier(self) -> float:
        """Effective noise multiplier z of one round; 0 if any query is released without noise.

        Scaling group g by 1/σ_g makes the round one query of unit noise and sensitivity
        √(Σ_g (S_g/σ_g)²); z is its inverse (McMahan et al. 2018, equation (1)).
        """
        if any(query.noise_stddev == 0.0 for query in self.queries):
            return 0.0
        # Never 0, even where S/σ underflows; then z is below the truth, the safe side.
        ratios = (query.clipping_norm / query.noise_stddev for query in self.queries)
        return 1.0 / max(math.hypot(*ratios), sys.float_info.min)


def _coefficients(strategy: Iterable[float]) -> tuple[float, ...]:
    """The strategy as Python's floats: sensitivities must not be computed in fewer bits."""
    check_types(strategy=(strategy, Iterable))
    found = plain_numbers(tuple(strategy), "a coefficient of the strategy")
    for number in found:
        legal = isinstance(number, int | float)
        require(legal, f"a coefficient of the strategy is {number!r}; it must be a number")
    return tuple(map(float, found))


def check_query(noise_multiplier: object, sampling_probability: object) -> None:
    """Raise InvalidValueError unless z is positive and finite, and q in (0, 1]."""
    z, q = noise_multiplier, sampling_probability
    proper = isinstance(z, Real) and 0.0 < float(z) < math.inf
    require(proper, f"noise_multiplier is {z!r}; it must be positive and finite")
    proper = isinstance(q, Real) and 0.0 < float(q) <= 1.0
    require(proper, f"sampling_probability is {q!r}; it must be in (0, 1]")


# A smaller δ is refused: no price tells it from 0, as doubles lose probabilities that small.
LEAST_DELTA = 1e-60


def check_delta(delta: float) -> None:
    """Raise InvalidValueError unless δ is in [1e-60, 1)."""
    number = plain_numbers(delta, "delta")
    proper = isinstance(number, int | float) and 0.0 < number < 1.0
    require(proper, f"delta is {delta!r}; it must be in (0, 1)")
    smallest = f"no accountant tells it from 0 below {LEAST_DELTA:g}"
    require(delta >= LEAST_DELTA, f"delta is {delta}; {smallest}")


@dataclass(frozen=True)
class PrivacyBudget:
    """A limit (ε, δ) on the events of a ledger."""

    epsilon: float  # ε > 0, the most that may be spent; inf if only δ and the record matter
    delta: float  # δ in [1e-60, 1)
    # At least the ε that events cost together at a δ, as `Accountant.upper_epsilon`; +inf if no
    # finite ε holds.
    price: Callable[[Sequence[RoundEvent], float], float]

    def __post_init__(self) -> None:
        hold_numbers(self)
        require(self.epsilon > 0.0, f"epsilon is {self.epsilon}; it must be positive")
        check_delta(self.delta)

    def epsilon_of(self, events: Iterable[RoundEvent]) -> float:
        """ε that the events cost together; equal events are merged before they are priced."""
        return self.price(merge_equal(events), self.delta)

    def admits(self, events: Iterable[RoundEvent]) -> bool:
        """Whether the events together stay within the budget; no, if their price is NaN."""
        return self.epsilon_of(events) <= self.epsilon


def merge_equal(events: Iterable[RoundEvent]) -> tuple[RoundEvent, ...]:
    """Each distinct event once, in order of first use, with its repetitions in `count`."""
    rounds = Counter[RoundEvent]()
    for event in events:
        rounds[event if event.count == 1 else replace(event, count=1)] += event.count
    return repeated(rounds)


def repeated(rounds: Mapping[RoundEvent, int]) -> tuple[RoundEvent, ...]:
    """Events of count 1, each as one event of the given count."""
    return tuple(event if n == 1 else replace(event, count=n) for event, n in rounds.items())
