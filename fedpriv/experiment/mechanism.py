"""The privacy mechanism of a run as users state it: sampling, clipping, noise and budget.

These are values: nothing here draws, clips or spends. Derive a class from `CohortPolicy` or
`ClippingPolicy` to add a way to sample or clip.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self, TypeGuard

from fedpriv.accounting.accountants import Bound, accountant_named
from fedpriv.accounting.calibration import smallest_noise
from fedpriv.accounting.factorisation import Objective, optimal_bands, optimal_buffers
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.grouping import (
    Allocation,
    ClippingPolicy,
    Flat,
    Joint,
    PerLayer,
    check_choice,
)
from fedpriv.ledger.events import (
    WITH_STRATEGY,
    NeighbouringRelation,
    PrivacyBudget,
    Projection,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
    Unit,
)
from fedpriv.privacy.correlated_noise import BandedStrategy, BufferedStrategy, Strategy
from fedpriv.privacy.gaussian_mechanism import INDEPENDENT, Averaging
from fedpriv.privacy.sampling import (
    BandedPoissonSampling,
    EveryUserSampling,
    ExampleSampling,
    FixedSizeSampling,
    PoissonSampling,
    RandomAllocationSampling,
    Sampling,
    SeparatedSampling,
)
from fedpriv.support.checks import (
    check_fields,
    check_range,
    check_ranges,
    check_types,
    hold_numbers,
    hold_plain_numbers,
    named_value,
    plain_numbers,
)
from fedpriv.training.plan import AdaptiveClipping

# The noise on the update grows by 1/√(1 − ω), half a per cent. The count has noise of z/√ω = 10·z
# users: much in one round of a small cohort, but only 1/√T of that in the mean over T rounds.
CONTRIBUTORS_SHARE = 0.01
DEFAULT_PROBABILITY, DEFAULT_ROUNDS = 0.3, 100  # `simulations.defaults` is the study behind them

Numbers = Mapping[str, float | Sequence[float]]  # a metric's options, by name


class CohortPolicy(ABC):
    """A way to draw cohorts from any population."""

    @abstractmethod
    def of(self, users: int | None, unit: Unit) -> Sampling:
        """Return the policy for N enrolled users, which draws cohorts and names the sampling event.

        Calibration passes None if N is unknown; InvalidValueError if the price depends on N.
        """


class _Checked(CohortPolicy):
    """A policy that can be priced without N, and refuses numbers for which no event exists."""

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        self.of(None, Unit.USER)


@dataclass(frozen=True)
class Poisson(_Checked):
    """Each user joins each round independently with probability q in (0, 1]."""

    probability: float

    def of(self, users: int | None, unit: Unit) -> PoissonSampling:
        """Return Poisson sampling of N users."""
        return PoissonSampling(users or 1, self.probability, unit)


@dataclass(frozen=True)
class AsIf(CohortPolicy):
    """Poisson sampling of users who represent a larger population, in a simulation.

    Averages have the noise of the larger population's cohort. They are over as many actual users,
    or fewer. The budget is that of the larger population.
    """

    drawn: Poisson  # of the larger population
    population: int  # N'
    cohort: int | None = None  # expected users of a round; None: q·N', but at most all

    def __post_init__(self) -> None:
        check_range("cohort", self.cohort, f"[1, {self.drawn.probability * self.population:g}]?")

    def of(self, users: int | None, unit: Unit) -> PoissonSampling:
        """Return Poisson sampling of N users, up to N', with the probability of the cohort."""
        enrolled, q = users or 1, self.drawn.probability
        if not (self.cohort or 0) <= enrolled <= self.population:
            values = f"as_if is {self.population} and cohort is {self.cohort}"
            limit = f"cohort ≤ {enrolled} ≤ as_if, as there are {enrolled} {unit}s"
            raise InvalidValueError(f"{values}; it must be {limit}")
        probability = min(1.0, (self.cohort or q * self.population) / enrolled)
        return PoissonSampling(enrolled, probability, unit, Projection(self.population, q))


@dataclass(frozen=True)
class PoissonExamples(_Checked):
    """Each of up to k examples of a user joins each round independently with probability q.

    The guarantee still protects users (Charles et al. 2024, example-level sampling). If a user has
    n > k rows, the same k count in all rounds: rows ⌊j·n/k⌋ for j < k, in order. `total_examples`
    is a public estimate of the number of rows that count, over all users; averages divide by q
    times this number, by default by q·N·k.
    """

    probability: float
    examples_per_user: int  # k in [1, 10⁶]
    total_examples: float | None = None

    def of(self, users: int | None, unit: Unit) -> ExampleSampling:
        """Return sampling of the examples of N users."""
        k, total = self.examples_per_user, None if users is None else self.total_examples
        return ExampleSampling(users or 1, self.probability, k, total, unit)


@dataclass(frozen=True)
class FixedSize(CohortPolicy):
    """Exactly m users join each round, drawn afresh; neighbours differ by replacing one user.

    Replacing a user moves a sum by up to twice the clipping norm, so Poisson sampling with the same
    average number of users needs about half the noise.
    """

    cohort_size: int  # m ≥ 1

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        check_ranges(self, cohort_size="whole")

    def of(self, users: int | None, unit: Unit) -> FixedSizeSampling:
        """Return cohorts of m of N users."""
        if users is None:
            raise InvalidValueError(
                "users is None; calibrate(users=N) needs it, as the price of cohorts of a "
                "fixed size depends on the number of users"
            )
        return FixedSizeSampling(users, self.cohort_size, unit)


@dataclass(frozen=True)
class EveryUser(_Checked):
    """All users join each round."""

    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE

    def of(self, users: int | None, unit: Unit) -> EveryUserSampling:
        """Return the policy that draws all N users; without `users`, N is 1."""
        return EveryUserSampling(users or 1, self.relation, unit)


@dataclass(frozen=True)
class RandomAllocation(_Checked):
    """Each user joins exactly k random rounds of every pass of n rounds, drawn afresh each pass.

    A whole pass is charged before its first round. A run of T rounds has ⌈T/n⌉ passes.
    """

    rounds: int  # n ≥ 1, of a pass
    participations: int = 1  # k in [1, n]

    def of(self, users: int | None, unit: Unit) -> RandomAllocationSampling:
        """Return the policy that allocates N users to random rounds; without `users`, N is 1."""
        return RandomAllocationSampling(users or 1, self.rounds, self.participations, unit)


@dataclass(frozen=True)
class Separated(_Checked):
    """Users take turns in b groups, so that any two rounds of a user are at least b apart.

    Participation is public and does not amplify privacy. In return, the noise of a series of n
    rounds may be correlated (DP-FTRL). A whole series is charged before its first round.
    """

    rounds: int  # n ≥ 1, of a series
    separation: int  # b in [1, n]
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE

    def of(self, users: int | None, unit: Unit) -> SeparatedSampling:
        """Return the policy by which N users take turns; without `users`, N is `separation`."""
        relation, enrolled = self.relation, users or self.separation
        return SeparatedSampling(enrolled, self.rounds, self.separation, relation, unit)


@dataclass(frozen=True)
class BandedPoisson(_Checked):
    """Users take turns in b groups; each user of a group joins with probability q.

    Sampling amplifies privacy, and noise may be correlated over a band of up to b rounds
    (Choquette-Choo et al. 2023). Coins must be secret. A whole series is charged before its first
    round.
    """

    probability: float  # q in (0, 1]
    rounds: int  # n ≥ 1, of a series
    separation: int  # b in [1, n]

    def of(self, users: int | None, unit: Unit) -> BandedPoissonSampling:
        """Return the policy by which N users take turns and flip coins."""
        enrolled, q = users or self.separation, self.probability
        return BandedPoissonSampling(enrolled, self.rounds, self.separation, q, unit=unit)


SAMPLING_POLICIES: Mapping[str, type[CohortPolicy]] = {
    "poisson": Poisson,
    "poisson-examples": PoissonExamples,
    "fixed-size": FixedSize,
    "every-user": EveryUser,
    "random-allocation": RandomAllocation,
    "separated": Separated,
    "poisson-within-bands": BandedPoisson,
}
"""The values of sampling.policy in a configuration."""


class NoisePolicy(ABC):
    """A correlation of noise over the rounds of a series, for any standard deviation."""

    def __post_init__(self) -> None:
        hold_plain_numbers(self)

    @abstractmethod
    def strategy(self, sampling: SamplingEvent) -> Strategy:
        """Return the strategy for a sampling event; round events refuse pairs without analysis."""


@dataclass(frozen=True)
class IndependentNoise(NoisePolicy):
    """Fresh noise in each round."""

    def strategy(self, sampling: SamplingEvent) -> Strategy:  # noqa: ARG002 - it fits all
        """Return the strategy (1,)."""
        return INDEPENDENT


@dataclass(frozen=True)
class BandedNoise(NoisePolicy):
    """Noise that partly cancels over p successive rounds of a series (banded Toeplitz, DP-FTRL).

    By default the coefficients minimise the error of the models at equal privacy. A server keeps
    p − 1 vectors of the size of the model.
    """

    bands: int | None = None  # p in [1, n]; None: the separation b of the series
    objective: str = "mean"  # minimised error: root mean square over rounds, or the "largest"
    momentum: float = 0.0  # of the server's steps; errors are computed for it
    coefficients: Sequence[float] = ()  # c_0 = 1, then multiples of 2^-20 that never increase

    def strategy(self, sampling: SamplingEvent) -> BandedStrategy:
        """Return the best strategy, or the given one."""
        if coefficients := _numbers("coefficients", self.coefficients):
            return BandedStrategy(coefficients)
        schedule = _series(sampling)
        bands = schedule.separation if self.bands is None else self.bands
        # Then the columns of a user's rounds do not overlap.
        if sampling.policy is SamplingPolicy.BANDED_POISSON:
            schedule = Schedule(schedule.rounds)
        objective = named_value(Objective, "objective", self.objective)
        return BandedStrategy(optimal_bands(schedule, bands, objective, self.momentum))


@dataclass(frozen=True)
class BufferedNoise(NoisePolicy):
    """Noise that partly cancels over all rounds of a series (buffered linear Toeplitz, DP-FTRL).

    By default decays and weights minimise the error of the models at equal privacy. A server keeps
    one vector of the size of the model for each buffer.
    """

    buffers: int = 4  # from 1 to 8
    objective: str = "mean"  # minimised error: root mean square over rounds, or the "largest"
    momentum: float = 0.0  # of the server's steps; errors are computed for it
    decays: Sequence[float] = ()  # θ in [0, 1)
    weights: Sequence[float] = ()  # w in [0, 1], one for each decay

    def strategy(self, sampling: SamplingEvent) -> BufferedStrategy:
        """Return the best strategy, or the given one."""
        decays, weights = _numbers("decays", self.decays), _numbers("weights", self.weights)
        if decays or weights:
            return BufferedStrategy(decays, weights)
        objective, series = named_value(Objective, "objective", self.objective), _series(sampling)
        return BufferedStrategy(*optimal_buffers(series, self.buffers, objective, self.momentum))


NOISE_POLICIES: Mapping[str, type[NoisePolicy]] = {
    "independent": IndependentNoise,
    "banded": BandedNoise,
    "buffered": BufferedNoise,
}
"""The values of noise.correlation in a configuration."""


def given(strategy: Strategy) -> NoisePolicy:
    """Return the policy that yields a strategy without a search."""
    if strategy == INDEPENDENT:
        return IndependentNoise()
    if isinstance(strategy, BandedStrategy):
        return BandedNoise(coefficients=strategy.coefficients)
    return BufferedNoise(len(strategy.decays), decays=strategy.decays, weights=strategy.weights)


def _series(sampling: SamplingEvent) -> Schedule:
    if sampling.schedule is None or sampling.policy not in WITH_STRATEGY:
        raise InvalidValueError(
            f"noise is correlated and sampling is {sampling.policy}, which has no analysis "
            f"with such noise; it must be {' or '.join(WITH_STRATEGY)}"
        )
    return sampling.schedule


def _numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    numbers = tuple(values) if isinstance(values, Sequence) else (None,)
    if not all(isinstance(number, int | float) for number in numbers):
        raise InvalidValueError(f"{name} of the noise is {values!r}; it must be a list of numbers")
    return tuple(map(float, numbers))


@dataclass(frozen=True)
class Mechanism:
    """The protection of users in each round of a run, and the budget of all rounds.

    >>> mechanism = Mechanism.poisson(q=0.1, clipping=Flat(0.5))
    >>> calibrated = mechanism.calibrate(epsilon=2.0, delta=1e-5, rounds=100)
    >>> round(calibrated.noise_multiplier, 1)
    2.2

    The noise multiplier z ≥ 0 is the noise over the sensitivity of a whole round; None: it is not
    calibrated yet. `metrics` are private averages to release with the update: their options by
    name, as for `fedpriv.measures.metrics.metric`. Raises InvalidValueError if there is no noise or
    no budget and `unsafe_no_privacy` is not set, or if `unit` and `microbatch` do not fit together.
    """

    sampling: CohortPolicy
    clipping: ClippingPolicy
    noise_multiplier: float | None = None
    epsilon: float | None = None  # never exceeded; None only with `unsafe_no_privacy`
    delta: float | None = None  # of the budget, and of every ε that is shown
    rounds: int | None = None  # T that the noise was calibrated for
    allocation: Allocation = "proportional"
    adaptive: AdaptiveClipping | None = None  # None: clipping norms are fixed
    averaging: Averaging = Averaging()  # noqa: RUF009 - frozen, so sharing it is safe
    metrics: Mapping[str, Numbers] = field(default_factory=dict)
    metrics_share: float = 0.05  # share of the round's privacy for all metrics together
    # Share of the round's privacy for the number of users whose update counts; 0: no number.
    contributors_share: float = CONTRIBUTORS_SHARE
    accountant: str = "tight"  # prices the budget; it must give upper bounds
    unsafe_no_privacy: bool = False  # allows a run without noise or without a budget
    noise: NoisePolicy = IndependentNoise()
    unit: Unit = Unit.USER  # the unit that is sampled, clipped and protected
    microbatch: int | None = None  # rows of a microbatch; only for the unit microbatch

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_fields(self, "sampling", "clipping", "noise", "adaptive", "averaging", "metrics")
        accountant_named(self.accountant)
        for name, numbers in self.metrics.items():
            check_types(
                **{"a name of metrics": (name, str), f"metric {name!r}": (numbers, Mapping)}
            )
        check_choice(
            "allocation", self.allocation, "proportional", "dimension", each="vector group"
        )
        object.__setattr__(self, "unit", checked_unit(self.unit, self.microbatch))
        if self.adaptive and getattr(self.clipping, "norm", 0.0) == math.inf:
            raise InvalidValueError("the clipping norm is infinite; to adapt, it must be finite")
        if self.noise_multiplier is not None:
            check_private(self.noise_multiplier, self.epsilon, self.unsafe_no_privacy)

    @classmethod
    def poisson(
        cls,
        q: float = DEFAULT_PROBABILITY,
        clipping: ClippingPolicy = Flat(),  # noqa: B008 - frozen, so sharing it is safe
        *,
        allocation: Allocation = "proportional",
        adaptive: AdaptiveClipping | None = None,
        averaging: Averaging | None = None,
        metrics: Mapping[str, Numbers] | Iterable[str] = (),
        metrics_share: float = 0.05,
        contributors_share: float = CONTRIBUTORS_SHARE,
        accountant: str = "tight",
        unit: Literal["user", "example", "microbatch"] = "user",
        microbatch: int | None = None,
        examples_per_user: int | None = None,
        total_examples: float | None = None,
    ) -> Self:
        """Return the Gaussian mechanism under Poisson sampling, without noise and budget yet.

        Each user joins a round with probability q in (0, 1]; with another unit, each example or
        each microbatch. With `examples_per_user`, up to that many examples of each user join, and
        the guarantee still protects users: `PoissonExamples`. Metrics without options may be given
        as names. The other arguments are attributes of the class.
        """
        options = locals()  # most have the names of the class's fields
        if isinstance(metrics, str):  # each letter would be a name
            raise InvalidValueError(f"metrics are {metrics!r}; they must be a list of names")
        check_types(metrics=(metrics, Iterable))
        policy: CohortPolicy = Poisson(q)
        if examples_per_user is not None:
            policy = PoissonExamples(q, examples_per_user, total_examples)
        elif total_examples is not None:
            raise InvalidValueError(
                f"total_examples is {total_examples}; without examples_per_user it must be absent"
            )
        fields = {name: options[name] for name in cls.__dataclass_fields__ if name in options}
        fields["averaging"] = Averaging() if averaging is None else averaging
        fields["metrics"] = metrics if isinstance(metrics, Mapping) else {n: {} for n in metrics}
        return cls(policy, **fields)

    def for_users(self, users: int) -> Self:
        """Return the mechanism for N users, with the default clipping norm if it has none.

        It is √(expected size of a cohort)/100, but at least 0.1 and at most 1: with more users
        there is less noise, and the bias of clipping pays less (docs/choosing-settings.md).
        """
        clipping = self.clipping
        if not lacks_norm(clipping):
            return self
        event = self.sampling.of(users, self.unit).event()
        cohort = event.growth * event.expected_cohort_size  # that of a projection
        norm = min(max(0.1, math.sqrt(cohort) / 100.0), 1.0)
        return replace(self, clipping=replace(clipping, norm=norm))

    def calibrate(
        self,
        *,
        epsilon: float,
        delta: float,
        rounds: int = DEFAULT_ROUNDS,
        users: int | None = None,
        spent: Iterable[RoundEvent] = (),
    ) -> Self:
        """Return the mechanism with the least noise such that all rounds cost at most (ε, δ).

        `spent` are events that are already in the ledger to be charged; they count too. Cohorts of
        a fixed size need N, the number of `users`. This also finds the strategy of correlated
        noise.
        """
        epsilon, delta, rounds, users = plain_numbers((epsilon, delta, rounds, users))
        check_range("rounds", rounds, "whole")
        check_range("users", users, "whole?")
        check_types(spent=(spent, Iterable))
        earlier, sampling = list(spent), self.sampling.of(users, self.unit)
        for event in earlier:
            check_types(**{"an event in spent": (event, RoundEvent)})
        charges, sampled = -(-rounds // sampling.rounds), sampling.event()
        strategy = self.noise.strategy(sampled)
        column = strategy.column(sampling.rounds)

        def events(z: float) -> list[RoundEvent]:
            queries = (SumQueryEvent("update", 1.0, z / sampled.growth),)
            return _as_if([*earlier, RoundEvent(sampled, queries, charges, column)])

        z = smallest_noise(epsilon, delta, events, self.accountant)
        budgeted = replace(self, epsilon=epsilon, delta=delta, rounds=rounds)
        return replace(budgeted, noise=given(strategy), noise_multiplier=z)

    def with_noise(self, noise_multiplier: float, *, epsilon: float, delta: float) -> Self:
        """Return the mechanism with this noise; training stops before exceeding (ε, δ)."""
        return replace(
            self, noise_multiplier=noise_multiplier, epsilon=epsilon, delta=delta, rounds=None
        )

    @property
    def budget(self) -> PrivacyBudget:
        """The budget of all rounds; its limit is infinite if `unsafe_no_privacy` is set."""
        delta, accountant = self.delta, accountant_named(self.accountant)
        if delta is None:
            raise InvalidValueError("delta is absent; it must be in (0, 1), best far below 1/N")
        if accountant.epsilon([], delta).bound is Bound.ESTIMATE:
            raise InvalidValueError(
                f"privacy.accountant is {self.accountant!r}, whose estimate can be below the "
                "truth; a budget needs an upper bound, such as that of tight"
            )
        limit = math.inf if self.unsafe_no_privacy or self.epsilon is None else self.epsilon
        price = accountant.upper_epsilon
        if isinstance(self.sampling, AsIf):
            return PrivacyBudget(limit, delta, lambda events, delta: price(_as_if(events), delta))
        return PrivacyBudget(limit, delta, price)


def lacks_norm(clipping: ClippingPolicy) -> TypeGuard[Flat | PerLayer | Joint]:
    """Return whether a policy needs the default norm."""
    return isinstance(clipping, Flat | PerLayer | Joint) and clipping.norm is None


def _as_if(events: Iterable[RoundEvent]) -> list[RoundEvent]:
    return [event.as_if for event in events]


def checked_unit(name: str, microbatch: int | None) -> Unit:
    """Return the unit; InvalidValueError if it is unknown or does not fit `microbatch`."""
    unit = named_value(Unit, "unit", name)
    if (microbatch is not None) != (unit is Unit.MICROBATCH):
        raise InvalidValueError(
            f"microbatch is {microbatch} and unit is {str(unit)!r}; only the unit 'microbatch' "
            "has a size, and it must have one"
        )
    if microbatch is not None:
        check_range("microbatch", plain_numbers(microbatch), "whole")
    return unit


def check_private(noise_multiplier: float | None, epsilon: float | None, unsafe: bool) -> None:  # noqa: FBT001
    """Raise InvalidValueError for settings without a finite ε, unless `unsafe` allows them."""
    if noise_multiplier == 0.0 and not unsafe:
        raise InvalidValueError(
            "noise_multiplier is 0, which gives no privacy; set unsafe_no_privacy = true if that "
            "is intended"
        )
    if unsafe and noise_multiplier is None:
        raise InvalidValueError("unsafe_no_privacy is true; noise_multiplier must then be given")
    if epsilon is None and not unsafe:
        raise InvalidValueError("epsilon is absent; it must be a positive privacy budget")
