"""Events record each use of users' data as frozen values that any accountant can price.

Events are the whole interface between privacy mechanisms and accountants. Ledgers keep them for
years, so they evolve by one rule: an event is never removed and never changes its meaning, new
fields are optional, and an accountant refuses any event that it has no analysis for.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from itertools import product

from fedpriv.errors import InvalidValueError
from fedpriv.support.checks import (
    check_range,
    check_ranges,
    check_types,
    hold_numbers,
    hold_plain_numbers,
    is_whole,
    named_value,
    plain_numbers,
    require,
    text_down,
    text_up,
)

# The most rounds of a schedule and repetitions of an event; floats hold such numbers exactly.
MOST_REPEATS = 1 << 53
LEAST_SHARE = 2.0**10  # steps: the smallest standard deviation of a node's share of the noise
MOST_EXAMPLES = 10**6  # of one user, if examples are sampled; a price has one term per example


class SamplingPolicy(StrEnum):
    """The rule that draws the cohort of a round from the enrolled users."""

    POISSON = "poisson"  # each user joins independently with the sampling probability
    EVERY_USER = "every-user"  # the cohort is all enrolled users
    # Exactly m of the N enrolled users, all such sets equally likely, drawn afresh each round.
    FIXED_SIZE = "fixed-size"
    # The event is one whole pass of n rounds, each with its own release. Every user is in exactly k
    # of them, all such sets equally likely, drawn afresh for each user and each pass. A pass that
    # stops early is charged in full.
    RANDOM_ALLOCATION = "random-allocation"
    # The event is a series of n rounds, each with its own release. Every user is in at most k of
    # them, any two at least b rounds apart; a user's rounds are not secret. It is charged in full.
    SEPARATED = "separated"
    # The event is a series of n rounds, each with its own release. Users are in b groups, which do
    # not depend on their data and need not be secret. Round t ∈ {0, …, n − 1} belongs to group
    # t mod b, whose users join it independently with the sampling probability. It is charged in
    # full.
    BANDED_POISSON = "poisson-within-bands"
    # At most k examples of each user count, always the same ones, and each example joins
    # independently with the sampling probability; the cohort consists of examples.
    EXAMPLES = "poisson-examples"


# The policies whose series may have correlated noise.
WITH_STRATEGY = (SamplingPolicy.SEPARATED, SamplingPolicy.BANDED_POISSON)


class NeighbouringRelation(StrEnum):
    """The relation between the two populations that an (ε, δ) statement compares."""

    ADD_OR_REMOVE_ONE = "add-or-remove-one"  # one population is the other plus one user
    REPLACE_ONE = "replace-one"  # the same number of users, one of them with different data

    @property
    def sensitivity(self) -> float:
        """The largest distance that the sum of a cohort can move, in clipping norms."""
        # Replacing a user may turn its update from +S to −S.
        return 2.0 if self is NeighbouringRelation.REPLACE_ONE else 1.0


class Unit(StrEnum):
    """The unit that neighbours add, remove or replace; elsewhere "user" means any unit."""

    USER = "user"  # all of a user's data
    EXAMPLE = "example"  # one row
    MICROBATCH = "microbatch"  # some rows of one user, always the same ones


EventKind = tuple[SamplingPolicy, NeighbouringRelation]
_NOT_ANALYSED = {
    (SamplingPolicy.FIXED_SIZE, NeighbouringRelation.ADD_OR_REMOVE_ONE),
    (SamplingPolicy.RANDOM_ALLOCATION, NeighbouringRelation.REPLACE_ONE),
    (SamplingPolicy.EXAMPLES, NeighbouringRelation.REPLACE_ONE),
}
# All kinds of events that can be constructed.
ANALYSED: tuple[EventKind, ...] = tuple(
    kind for kind in product(SamplingPolicy, NeighbouringRelation) if kind not in _NOT_ANALYSED
)


@dataclass(frozen=True)
class Schedule:
    """Constraints on the rounds each user joins, for an event that spans several rounds."""

    rounds: int  # n in [1, 2⁵³], each with its own release
    participations: int = 1  # k in [1, n]: a user joins k rounds of a pass, at most k of a series
    separation: int = 1  # b in [1, n], the smallest distance between two rounds of a user

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        n = self.rounds
        limit = "it must have a whole number of at least 1"
        require(is_whole(n), f"the schedule has {n!r} rounds; {limit}")
        require(n <= MOST_REPEATS, f"the schedule has {n} rounds; it must have at most 2^53")
        limit = f"it must be a whole number from 1 to its {n} rounds"
        for name in ("participations", "separation"):
            value = getattr(self, name)
            require(is_whole(value, n), f"{name} of the schedule is {value!r}; {limit}")


@dataclass(frozen=True)
class Projection:
    """The larger population that a simulation represents, under Poisson sampling.

    The average of a round gets the noise that it would have with the cohort of that population.
    """

    population: int  # N' ≥ 1
    sampling_probability: float  # q' in (0, 1]

    def __post_init__(self) -> None:
        hold_numbers(self)
        n, q = self.population, self.sampling_probability
        require(is_whole(n), f"as_if is {n}; it must be a whole number of at least 1")
        require(0.0 < q <= 1.0, f"sampling_probability is {q}; it must be in (0, 1]")


@dataclass(frozen=True)
class SamplingEvent:
    """One draw of a cohort; everything released about that cohort belongs to it.

    q in (0, 1] is each user's probability to be in the cohort of a round:

    * Poisson sampling: any value. For examples it is the probability of each example; within bands
      it is the probability in a round of the user's group;
    * fixed size: the float nearest to m/N, so that q·N rounds to the cohort size m;
    * random allocation: the float nearest to k/n;
    * all other policies, whose sampling does not reduce the price: 1.
    """

    policy: SamplingPolicy
    sampling_probability: float  # q
    population: int  # N ≥ 1, the number of enrolled users, a public constant
    relation: NeighbouringRelation  # the relation that its price is for
    # None if the event is one round.
    schedule: Schedule | None = None
    unit: Unit = Unit.USER
    # k in [1, 10⁶], the most examples of a user that count, if examples are sampled; else None.
    examples_per_user: int | None = None
    # Number of an audit's canaries, fictitious users drawn like the N users.
    canaries: int = 0
    # Set if the draw simulates a draw from a larger population. It never changes the price: q, N
    # and the noise are those of the N enrolled users.
    projection: Projection | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        # Analyses compare by identity, so a string equal to a member becomes the member.
        enums = {"policy": SamplingPolicy, "relation": NeighbouringRelation, "unit": Unit}
        for name, kind in enums.items():
            if type(value := getattr(self, name)) is not kind:
                object.__setattr__(self, name, named_value(kind, name, value))
        check_types(schedule=(self.schedule, Schedule | None))
        check_types(projection=(self.projection, Projection | None))
        q, n, policy = self.sampling_probability, self.population, self.policy
        require(0.0 < q <= 1.0, f"sampling_probability is {q}; it must be in (0, 1]")
        require(is_whole(n), f"population is {n}; it must be a whole number of at least 1")
        if (policy, self.relation) not in ANALYSED:
            problem = f"{policy} sampling with {self.relation} neighbours has no analysis"
            raise InvalidValueError(f"{problem}; allowed: {kinds_text(ANALYSED)}")
        self._check_schedule()
        self._check_examples()
        self._check_canaries()
        is_plain = policy is SamplingPolicy.POISSON and not self.canaries
        limit = "a projection has poisson sampling without canaries"
        require(is_plain or not self.projection, limit)
        plain_numbers(self.places, "the population, times examples_per_user,")
        if policy is SamplingPolicy.FIXED_SIZE:
            m = round(Fraction(q) * n)
            exact = m >= 1 and q == m / n
            limit = f"m/N for a whole cohort size m of at least 1 and a population N of {n}"
        elif policy is SamplingPolicy.RANDOM_ALLOCATION and self.schedule is not None:
            share = self.schedule.participations / self.schedule.rounds
            exact, limit = q == share, f"k/n, {share}"
        else:
            coins = (SamplingPolicy.POISSON, SamplingPolicy.EXAMPLES, SamplingPolicy.BANDED_POISSON)
            exact, limit = q == 1.0 or policy in coins, "1"
        require(exact, f"sampling_probability is {q}; with {policy} sampling it must be {limit}")

    @property
    def expected_cohort_size(self) -> float:
        """Mean number of users in the cohort of a round: q·N, or q·N/b with b groups.

        For sampled examples, the mean if every user had k examples. Canaries do not count.
        """
        grouped = self.policy in WITH_STRATEGY and self.schedule is not None
        groups = self.schedule.separation if grouped and self.schedule else 1
        users = self.population * (self.examples_per_user or 1)
        return self.sampling_probability * (users / groups)

    @property
    def cohort_variance(self) -> float:
        """Variance of the size of a round's cohort; 0 if the size is public."""
        if self.policy is SamplingPolicy.FIXED_SIZE:
            return 0.0
        return self.expected_cohort_size * (1.0 - self.sampling_probability)

    def largest_cohort(self, rare: float) -> float:
        """Return a size that a cohort of Poisson sampling passes with probability below e^-rare.

        It is qN + √(2qN·L) + L for L = `rare` (Bernstein), or the population if that is smaller.
        """
        expected = self.expected_cohort_size
        return min(self.population, expected + math.sqrt(2.0 * expected * rare) + rare)

    @property
    def growth(self) -> float:
        """Ratio of the projected cohort's size to the drawn cohort's; 1 without a projection."""
        if (larger := self.projection) is None:
            return 1.0
        return larger.sampling_probability * larger.population / self.expected_cohort_size

    def _check_schedule(self) -> None:
        schedule, policy = self.schedule, self.policy
        has_schedule = policy in (*WITH_STRATEGY, SamplingPolicy.RANDOM_ALLOCATION)
        if schedule is None:
            require(not has_schedule, f"the schedule is None; {policy} sampling must have one")
            return
        one_round = f"{policy} sampling is of one round and must have none"
        require(has_schedule, f"the schedule is {schedule}; {one_round}")
        k, b = schedule.participations, schedule.separation
        limit = f"with {policy} sampling it must be 1"
        separable = b == 1 or policy in WITH_STRATEGY
        require(separable, f"separation of the schedule is {b}; {limit}")
        participations = -(-schedule.rounds // b)
        limit = f"with {policy} sampling it must be ⌈n/b⌉, {participations}"
        is_full = k == participations or policy is not SamplingPolicy.BANDED_POISSON
        require(is_full, f"participations of the schedule is {k}; {limit}")

    def _check_examples(self) -> None:
        k, policy = self.examples_per_user, self.policy
        problem = f"examples_per_user is {k!r}"
        if policy is not SamplingPolicy.EXAMPLES:
            require(k is None, f"{problem}; {policy} sampling is of whole users and must have none")
            return
        limit = f"with {policy} sampling it must be a whole number from 1 to {MOST_EXAMPLES}"
        require(is_whole(k, MOST_EXAMPLES), f"{problem}; {limit}")
        limit = f"with {policy} sampling it must be {str(Unit.USER)!r}"
        require(self.unit is Unit.USER, f"unit is {str(self.unit)!r}; {limit}")

    def _check_canaries(self) -> None:
        m, problem = self.canaries, f"canaries is {self.canaries}"
        require(isinstance(m, int) and m >= 0, f"{problem}; it must be a whole number from 0 on")
        # In a cohort of fixed size, a drawn canary would take the place of a user.
        fixed_size = self.policy is SamplingPolicy.FIXED_SIZE
        require(m == 0 or not fixed_size, f"{problem}; with {self.policy} sampling it must be 0")

    @property
    def places(self) -> int:
        """Number of places to draw from: users and canaries, each with k places for examples."""
        return (self.population + self.canaries) * (self.examples_per_user or 1)


def kinds_text(kinds: Iterable[EventKind]) -> str:
    """Return a list of kinds of events for messages."""
    return ", ".join(f"{policy} with {relation}" for policy, relation in kinds)


class Randomness(StrEnum):
    """The source of randomness of the cohort and the noise."""

    OPERATING_SYSTEM = "operating system"  # a CSPRNG with its keys: the guarantee holds
    # A CSPRNG with keys from a seed: anyone who knows the seed can subtract the noise.
    SEEDED = "seeded: reproducible, not a guarantee"


@dataclass(frozen=True)
class SumQueryEvent:
    """One Gaussian sum query over the cohort of a sampling event.

    The mechanism released Σ_{i in cohort} c(v_i) + N(0, noise_stddev²·I) with ‖c(v)‖₂ ≤
    clipping_norm for every v, so its noise multiplier is noise_stddev / clipping_norm.

    With a granularity γ, the mechanism released γ(Σ_i a_i + K), where user i's a_i is a vector of
    integers with ‖a_i‖₂² ≤ B and K = round(η/γ), η ~ N(0, noise_stddev²·I). Since Σ_i a_i is whole,
    this is post-processing of the continuous Gaussian mechanism with sensitivity γ√B ≤
    clipping_norm, so the price is the same.
    """

    group: str  # name of the vector group
    clipping_norm: float  # S_g > 0, in the units of the summed vector
    noise_stddev: float  # σ_g ≥ 0, the standard deviation of the noise on the **sum**
    # γ, a power of two up to clipping_norm; None if the noise was not rounded to steps.
    granularity: float | None = None

    def __post_init__(self) -> None:
        hold_numbers(self)
        norm, stddev, step = self.clipping_norm, self.noise_stddev, self.granularity
        suffix, subject = f" of group {self.group!r}", f"of group {self.group!r} is"
        check_ranges(self, suffix, clipping_norm="(0, inf)", noise_stddev="[0, inf)")
        if step is None:
            return
        # Only positive powers of two have the mantissa ½; NaN, infinity, 0 and negatives do not.
        valid = math.frexp(step)[0] == 0.5 and step <= norm
        limit = f"it must be a power of two up to the clipping_norm {norm}"
        require(valid, f"granularity {subject} {step}; {limit}")
        limit = f"clipping_norm {norm} and noise_stddev {stddev} must be finite in its steps"
        require(max(norm, stddev) / step < math.inf, f"granularity {subject} {step}; {limit}")


@dataclass(frozen=True)
class Trial:
    """One kind of trial in a search: Poisson-sampled rounds, each with fresh noise."""

    sampling_probability: float  # q in (0, 1]
    noise_multiplier: float  # z > 0 of each round
    rounds: int  # T in [1, 2⁵³]

    def __post_init__(self) -> None:
        hold_numbers(self)
        t = self.rounds
        check_query(self.noise_multiplier, self.sampling_probability)
        limit = "it must be a whole number from 1 to 2^53"
        require(is_whole(t, MOST_REPEATS), f"rounds of a trial is {t}; {limit}")


@dataclass(frozen=True)
class Selection:
    """A whole search: it releases the best of K trials, and neither the other trials nor K.

    K and the kind of each trial, one of `trials`, are drawn independently of the data and of each
    other. The best trial is chosen from the outputs that the trials themselves would have released.
    K has a Poisson distribution with this mean or, with a shape η, the truncated negative binomial
    distribution of Papernot & Steinke 2022, Definition 1: P[K = k] ∝ (1 − γ)^k·Π_{l<k} (l + η)/(l +
    1) for k ≥ 1, with γ such that the mean is right.
    """

    trials: tuple[Trial, ...]  # at least one, all different
    mean: float  # E[K] ≥ 1; above 1 with a shape
    shape: float | None = None  # η > 0; None: Poisson

    def __post_init__(self) -> None:
        hold_numbers(self)
        kinds, mean, shape = self.trials, self.mean, self.shape
        problem = f"a selection has {len(kinds)} kinds of trials"
        distinct = len(set(kinds)) == len(kinds) > 0
        require(distinct, f"{problem}; there must be at least one, and all must differ")
        valid = 1.0 <= mean < math.inf and (shape is None or mean > 1.0)
        limit = "it must be finite and at least 1, and above 1 with a shape"
        require(valid, f"the mean number of trials is {mean}; {limit}")
        limit = "it must be positive and finite, or None"
        require(shape is None or 0.0 < shape < math.inf, f"the shape is {shape}; {limit}")


@dataclass(frozen=True)
class SecureSum:
    """Bounds on the nodes of a round whose server need not be trusted: see `fedpriv.secure_sums`.

    At least n nodes agree to a round. Users of honest nodes are protected against the server and t
    nodes that collude with it. A round succeeds if at most d of its nodes drop out. The shares of
    n − t − d nodes add up to the noise of the event.
    """

    nodes: int  # n ≥ 2
    colluding: int = 0  # t in [0, n − 2]
    dropouts: int = 0  # d: n − d nodes must suffice for a quorum

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        n, t, d = self.nodes, self.colluding, self.dropouts
        limit = "it must be a whole number of at least 2"
        require(is_whole(n) and n >= 2, f"least_nodes is {n!r}; {limit}")
        valid = type(t) is int and 0 <= t <= n - 2
        require(valid, f"colluding_nodes is {t!r}; of {n} nodes it must be from 0 to {n - 2}")
        maximum = n - self.quorum(n)
        limit = f"of {n} nodes, {t} of which may collude, it must be from 0 to {maximum}"
        require(type(d) is int and 0 <= d <= maximum, f"dropouts is {d!r}; {limit}")

    def quorum(self, nodes: int) -> int:
        """Return w = ⌊(n + t)/2⌋ + 1: any two sets of w out of n nodes share an honest node."""
        return (nodes + self.colluding) // 2 + 1

    def sharing(self, nodes: int) -> int:
        """Return n − t − d, the least number of honest nodes whose shares are in a total."""
        return nodes - self.colluding - self.dropouts

    def __str__(self) -> str:
        plural = "" if self.colluding == 1 else "s"
        colluders = f" and any {self.colluding} node{plural}" if self.colluding else ""
        return (
            f"for users of honest nodes, of at least {self.nodes} nodes, this holds for everything "
            f"that the server{colluders} saw, under X25519, AES-256, HKDF-SHA256 and the nodes' "
            "signatures, at δ + δ′ with δ′ below 1e-300"
        )


@dataclass(frozen=True)
class RoundEvent:
    """One cohort and all sum queries over it, repeated `count` times with fresh cohorts.

    The strategy is the first column (c_0, c_1, …) of the lower triangular Toeplitz matrix C that
    correlates noise over the rounds of a series: if X are the sums of its n rounds and Z is fresh
    noise as in `SumQueryEvent`, the release is C⁻¹(C·X + Z). Missing coefficients are 0; within
    bands there are at most b. (1,) is fresh noise in every round, the only allowed strategy of
    policies outside `WITH_STRATEGY`.
    """

    sampling: SamplingEvent
    queries: tuple[SumQueryEvent, ...]  # at least one; all of them query the *same* cohort
    # Number of such events in [1, 2⁵³], each of one round unless it has a schedule.
    count: int = 1
    strategy: tuple[float, ...] = (1.0,)
    # Set for a whole search; sampling and queries describe one round of its first trial.
    selection: Selection | None = None
    # Set if nodes draw users and add the noise, so that the server need not be trusted. The price
    # is the same: the excess δ′ is below every float, see `fedpriv.secure_sums.parameters`.
    secure_sum: SecureSum | None = None

    def __post_init__(self) -> None:
        check_types(sampling=(self.sampling, SamplingEvent), queries=(self.queries, Iterable))
        check_types(secure_sum=(self.secure_sum, SecureSum | None))
        object.__setattr__(self, "queries", tuple(self.queries))
        object.__setattr__(self, "strategy", _coefficients(self.strategy))
        if type(self.count) is not int:
            object.__setattr__(self, "count", plain_numbers(self.count))
        for query in self.queries:
            check_types(**{"a sum query": (query, SumQueryEvent)})
        strategy, policy, schedule = self.strategy, self.sampling.policy, self.sampling.schedule
        require(self.queries != (), "a round event has no sum query; it must have at least one")
        limit = "it must be a whole number from 1 to 2^53"
        require(is_whole(self.count, MOST_REPEATS), f"count is {self.count!r}; {limit}")
        if self.selection is not None:
            self._check_selection(self.selection)
        if self.secure_sum is not None:
            self._check_secure(self.secure_sum.sharing(self.secure_sum.nodes))
        if strategy == (1.0,):
            return
        problem = f"the strategy has {len(strategy)} coefficients"
        if policy not in WITH_STRATEGY or schedule is None:
            raise InvalidValueError(
                f"{problem}; {policy} sampling has fresh noise in every round, the strategy (1,)"
            )
        limit = f"it must have from 1 to the {schedule.rounds} of the schedule's rounds"
        require(1 <= len(strategy) <= schedule.rounds, f"{problem}; {limit}")
        b, banded = schedule.separation, policy is SamplingPolicy.BANDED_POISSON
        limit = f"with {policy} sampling it must have at most one per group, {b}"
        require(len(strategy) <= b or not banded, f"{problem}; {limit}")
        limit = "its first coefficient must be positive and all must be finite"
        valid = strategy[0] > 0.0 and all(map(math.isfinite, strategy))
        require(valid, f"the strategy begins with {strategy[0]}; {limit}")

    def _check_secure(self, sharing: int) -> None:
        sampling, limit = self.sampling, "if the server need not be trusted, it must be"
        coins = (SamplingPolicy.POISSON, SamplingPolicy.EVERY_USER)
        policy = f"sampling is {sampling.policy}; {limit} {' or '.join(coins)}"
        require(sampling.policy in coins and not sampling.canaries, policy)
        require(sampling.unit is Unit.USER, f"unit is {sampling.unit}; {limit} {Unit.USER}")
        for query in self.queries:
            minimum = LEAST_SHARE * math.sqrt(sharing)
            steps = query.noise_stddev / (query.granularity or math.inf)
            noise = f"the noise of group {query.group!r} is {text_down(steps)} steps"
            require(steps >= minimum, f"{noise}; {limit} at least {text_up(minimum)}")

    def _check_selection(self, selection: Selection) -> None:
        kind = self.sampling.policy, self.sampling.relation
        limit = (SamplingPolicy.POISSON, NeighbouringRelation.ADD_OR_REMOVE_ONE)
        sentence = f"a selection has {kinds_text([kind])}; allowed: {kinds_text([limit])}"
        require(kind == limit, sentence)
        trial, z = selection.trials[0], self.noise_multiplier
        matches = self.sampling.sampling_probability == trial.sampling_probability
        matches = matches and math.isclose(z, trial.noise_multiplier, rel_tol=2.0**-40)
        require(matches, f"the round of a selection has z = {z}; it must be one of its first trial")

    @property
    def as_if(self) -> "RoundEvent":
        """This event for the projected population; the event itself without a projection."""
        if (larger := self.sampling.projection) is None:
            return self
        growth = self.sampling.growth
        queries = [replace(q, noise_stddev=q.noise_stddev * growth) for q in self.queries]
        sampling = replace(self.sampling, **vars(larger), projection=None)
        return replace(self, sampling=sampling, queries=tuple(queries))

    @property
    def cost(self) -> tuple[object, ...]:
        """Everything that determines a price, except `count`; the split of noise does not."""
        return tuple((vars(self) | {"queries": self.noise_multiplier, "count": 1}).values())

    @property
    def noise_multiplier(self) -> float:
        """Effective noise multiplier z of one round; 0 if any query is released without noise.

        Scaling group g by 1/σ_g makes the round one query of unit noise and sensitivity
        √(Σ_g (S_g/σ_g)²); z is its inverse (McMahan et al. 2018, equation (1)).
        """
        if any(query.noise_stddev == 0.0 for query in self.queries):
            return 0.0
        # Never 0, even if S/σ underflows; then z is below the true value, which is safe.
        ratios = (query.clipping_norm / query.noise_stddev for query in self.queries)
        return 1.0 / max(math.hypot(*ratios), sys.float_info.min)


def _coefficients(strategy: Iterable[float]) -> tuple[float, ...]:
    """Return the strategy as Python floats, so that sensitivities have full precision."""
    check_types(strategy=(strategy, Iterable))
    coefficients = plain_numbers(tuple(strategy), "a coefficient of the strategy")
    for number in coefficients:
        is_number = isinstance(number, int | float)
        require(is_number, f"a coefficient of the strategy is {number!r}; it must be a number")
    return tuple(map(float, coefficients))


def check_query(noise_multiplier: object, sampling_probability: object) -> None:
    """Raise InvalidValueError unless z is positive and finite, and q in (0, 1]."""
    check_range("noise_multiplier", noise_multiplier, "(0, inf)")
    check_range("sampling_probability", sampling_probability, "(0, 1]")


# Smaller δ are refused: doubles lose such probabilities, so a price cannot tell them from 0.
LEAST_DELTA = 1e-60


def check_delta(delta: float) -> None:
    """Raise InvalidValueError unless δ is in [1e-60, 1)."""
    number = plain_numbers(delta, "delta")
    valid = isinstance(number, int | float) and 0.0 < number < 1.0
    require(valid, f"delta is {delta!r}; it must be in (0, 1)")
    smallest = f"below {LEAST_DELTA:g} no accountant can tell it from 0"
    require(delta >= LEAST_DELTA, f"delta is {delta}; {smallest}")


@dataclass(frozen=True)
class PrivacyBudget:
    """A limit (ε, δ) on the events of a ledger."""

    epsilon: float  # ε > 0, the limit; inf if only δ and the record matter
    delta: float  # δ in [1e-60, 1)
    # Returns an upper bound on the ε of events together at a δ, as `Accountant.upper_epsilon`;
    # +inf if no finite ε holds. It may depend only on each event's `cost` and `count`.
    price: Callable[[Sequence[RoundEvent], float], float]

    def __post_init__(self) -> None:
        hold_numbers(self)
        require(self.epsilon > 0.0, f"epsilon is {self.epsilon}; it must be positive")
        check_delta(self.delta)

    def epsilon_of(self, events: Iterable[RoundEvent]) -> float:
        """Return the ε of the events together; equal events are merged before they are priced."""
        return self.price(merge_equal(events), self.delta)

    def admits(self, events: Iterable[RoundEvent]) -> bool:
        """Return whether the events together stay within the budget; False if the price is NaN."""
        return self.epsilon_of(events) <= self.epsilon


def merge_equal(events: Iterable[RoundEvent]) -> tuple[RoundEvent, ...]:
    """Return each distinct event once, in order of first use, with its repetitions in `count`."""
    counts = Counter[RoundEvent]()
    for event in events:
        counts[event if event.count == 1 else replace(event, count=1)] += event.count
    return repeated(counts)


def repeated(counts: Mapping[RoundEvent, int]) -> tuple[RoundEvent, ...]:
    """Return events of count 1 with the given counts instead."""
    return tuple(event if n == 1 else replace(event, count=n) for event, n in counts.items())
