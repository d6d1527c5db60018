"""The privacy mechanism of a run, as its user states it: sampling, clipping, noise, budget.

Values only: nothing here draws, clips or spends. To add a way to sample or to clip, derive a class
from `CohortPolicy` or `ClippingPolicy`.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, Self

from fedpriv.accounting.accountants import Bound, accountant_named
from fedpriv.accounting.calibration import smallest_noise
from fedpriv.accounting.factorisation import (
    Objective,
    Workload,
    optimal_bands,
    optimal_buffers,
)
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import (
    MOST_EXAMPLES,
    WITH_STRATEGY,
    NeighbouringRelation,
    PrivacyBudget,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
    Unit,
)
from fedpriv.privacy import layout as vector_groups
from fedpriv.privacy.correlated_noise import BandedStrategy, BufferedStrategy, Strategy
from fedpriv.privacy.gaussian_mechanism import (
    INDEPENDENT,
    Averaging,
    dimension_shares,
    given_shares,
    proportional_shares,
)
from fedpriv.privacy.layout import Layout, VectorGroup
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
    check_types,
    hold_numbers,
    hold_plain_numbers,
    is_whole,
    named_value,
    plain_numbers,
    require,
)
from fedpriv.training.post_processing import AdaptiveClipping

# Noise on the update grows by 1/√(1 − ω), half a per cent. That on the count is z/√ω = 10·z users,
# much in one round of a small cohort; the mean over T rounds has 1/√T of it.
CONTRIBUTORS_SHARE = 0.01
DEFAULT_PROBABILITY, DEFAULT_ROUNDS = 0.3, 100  # `simulations.defaults` is the study behind them
Allocation = Literal["proportional", "dimension"] | Mapping[str, float]
"""How vector groups share the noise: by clipping norm, by dimension, or by given weights."""


class CohortPolicy(ABC):
    """How cohorts are drawn, whatever the population."""

    @abstractmethod
    def of(self, users: int | None, unit: Unit) -> Sampling:
        """The policy for N enrolled users: what draws cohorts and names the sampling event.

        Calibration does not know N, which is then None: InvalidValueError if the price needs it.
        """


@dataclass(frozen=True)
class Poisson(CohortPolicy):
    """Each user joins each round independently with probability q in (0, 1]."""

    probability: float

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        _check_probability(self.probability)

    def of(self, users: int | None, unit: Unit) -> PoissonSampling:
        """Poisson sampling of N users."""
        return PoissonSampling(users or 1, self.probability, unit)


@dataclass(frozen=True)
class PoissonExamples(CohortPolicy):
    """Each of up to k examples of a user joins each round independently with probability q.

    Users stay what is protected (Charles et al. 2024, example-level sampling). Which k of a user's
    n > k rows count is the same in all rounds: rows ⌊j·n/k⌋, j < k, of the order in which they are.
    `total_examples`: a public estimate of how many count, of all users together; averages are over
    q times as many, by default over q·N·k.
    """

    probability: float
    examples_per_user: int  # k in [1, 10⁶]
    total_examples: float | None = None

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        _check_probability(self.probability)
        k, legal = self.examples_per_user, f"it must be a whole number from 1 to {MOST_EXAMPLES}"
        require(is_whole(k, MOST_EXAMPLES), f"examples_per_user is {k!r}; {legal}")

    def of(self, users: int | None, unit: Unit) -> ExampleSampling:
        """Sampling of the examples of N users."""
        k, total = self.examples_per_user, None if users is None else self.total_examples
        return ExampleSampling(users or 1, self.probability, k, total, unit)


@dataclass(frozen=True)
class FixedSize(CohortPolicy):
    """Exactly m users are in each round, drawn afresh; one user is replaced by another.

    Under that relation a user moves a sum by twice the clipping norm, so that Poisson coins with as
    many users on average need about half of the noise.
    """

    cohort_size: int  # m ≥ 1

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        _check_whole("cohort_size", self.cohort_size)

    def of(self, users: int | None, unit: Unit) -> FixedSizeSampling:
        """Cohorts of m of N users."""
        if users is None:
            raise InvalidValueError(
                "users is None; calibrate(users=N) must have it, as the price of cohorts of a "
                "fixed size depends on the number of users"
            )
        return FixedSizeSampling(users, self.cohort_size, unit)


@dataclass(frozen=True)
class EveryUser(CohortPolicy):
    """All users are in each round."""

    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE

    def of(self, users: int | None, unit: Unit) -> EveryUserSampling:
        """All of N users."""
        return EveryUserSampling(users or 1, self.relation, unit)


@dataclass(frozen=True)
class RandomAllocation(CohortPolicy):
    """Each user is in exactly k random rounds of every pass of n, drawn afresh each pass.

    A pass is charged whole before its first round. A run of T rounds has ⌈T/n⌉ passes.
    """

    rounds: int  # n ≥ 1, of a pass
    participations: int = 1  # k in [1, n]

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        Schedule(self.rounds, self.participations)

    def of(self, users: int | None, unit: Unit) -> RandomAllocationSampling:
        """Random allocation of N users."""
        return RandomAllocationSampling(users or 1, self.rounds, self.participations, unit)


@dataclass(frozen=True)
class Separated(CohortPolicy):
    """Users take turns in b groups, so that two rounds of a user are b apart.

    Nothing is secret of who takes part when, and no privacy is won by it; the noise of a series of
    n rounds may be correlated instead: DP-FTRL. A series is charged whole before its first round.
    """

    rounds: int  # n ≥ 1, of a series
    separation: int  # b in [1, n]
    relation: NeighbouringRelation = NeighbouringRelation.ADD_OR_REMOVE_ONE

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        Schedule(self.rounds, separation=self.separation)

    def of(self, users: int | None, unit: Unit) -> SeparatedSampling:
        """Turns of N users."""
        relation, enrolled = self.relation, users or self.separation
        return SeparatedSampling(enrolled, self.rounds, self.separation, relation, unit)


@dataclass(frozen=True)
class BandedPoisson(CohortPolicy):
    """Users take turns in b groups, each user of which joins with probability q.

    What coins win is won, and noise may be correlated over a band of up to b rounds (Choquette-Choo
    et al. 2023). Coins must be secret, and a series is charged whole before its first round.
    """

    probability: float  # q in (0, 1]
    rounds: int  # n ≥ 1, of a series
    separation: int  # b in [1, n]

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        _check_probability(self.probability)
        Schedule(self.rounds, separation=self.separation)

    def of(self, users: int | None, unit: Unit) -> BandedPoissonSampling:
        """Turns of N users, with coins."""
        enrolled, relation = users or self.separation, NeighbouringRelation.ADD_OR_REMOVE_ONE
        return BandedPoissonSampling(
            enrolled, self.rounds, self.separation, self.probability, relation, unit
        )


def _check_whole(name: str, value: object) -> None:
    require(is_whole(value), f"{name} is {value!r}; it must be a whole number of at least 1")


def _is_positive(number: object) -> bool:
    if not isinstance(number, int | float) or isinstance(number, bool):
        return False
    return 0.0 < number <= sys.float_info.max


def _check_probability(q: float) -> None:
    legal = _is_positive(q) and q <= 1.0
    require(legal, f"sampling_probability is {q!r}; it must be in (0, 1]")


def _check_norm(norm: object) -> None:
    require(_is_positive(norm), f"the clipping norm is {norm!r}; it must be positive and finite")


def _check_choice(name: str, given: object, *words: str, each: str = "") -> None:
    """Refuse what is none of some words nor, if there may be one for `each`, positive numbers."""
    if isinstance(given, Mapping) and each:
        legal = all(_is_positive(number) for number in given.values())
    else:
        legal = isinstance(given, str) and given in words
    of_each = f" or a positive number for each {each}" if each else ""
    known = " or ".join(map(repr, words))
    require(legal, f"{name} is {given!r}; it must be {known}{of_each}")


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
    """How noise is correlated over the rounds of a series, whatever its standard deviation."""

    @abstractmethod
    def strategy(self, sampling: SamplingEvent) -> Strategy:
        """The strategy for an event; what has no analysis is refused where the event is made."""


@dataclass(frozen=True)
class IndependentNoise(NoisePolicy):
    """Fresh noise in each round."""

    def strategy(self, sampling: SamplingEvent) -> Strategy:  # noqa: ARG002 - it fits all
        """The strategy (1,)."""
        return INDEPENDENT


@dataclass(frozen=True)
class BandedNoise(NoisePolicy):
    """Noise that cancels in part over p successive rounds of a series (banded Toeplitz, DP-FTRL).

    The coefficients are those with the least error of the models at equal privacy, unless they are
    given. A server keeps p − 1 vectors of the size of the model.
    """

    bands: int | None = None  # p in [1, n]; None: the separation b of the series
    objective: str = "mean"  # which error is small: root mean square over rounds, or the "largest"
    momentum: float = 0.0  # of the server's steps, for which errors are computed
    coefficients: Sequence[float] = ()  # c_0 = 1, then multiples of 2^-20 that never increase

    def __post_init__(self) -> None:
        hold_plain_numbers(self)

    def strategy(self, sampling: SamplingEvent) -> BandedStrategy:
        """The best, or the given one."""
        if coefficients := _numbers("coefficients", self.coefficients):
            return BandedStrategy(coefficients)
        schedule = _series(sampling)
        bands = schedule.separation if self.bands is None else self.bands
        # Columns of a user's rounds do not meet then.
        if sampling.policy is SamplingPolicy.BANDED_POISSON:
            schedule = Schedule(schedule.rounds)
        objective, workload = _objective(self.objective), Workload(self.momentum)
        return BandedStrategy(optimal_bands(schedule, bands, objective, workload))


@dataclass(frozen=True)
class BufferedNoise(NoisePolicy):
    """Noise that cancels in part over all rounds of a series (buffered linear Toeplitz, DP-FTRL).

    Decays and weights are those with the least error of the models at equal privacy, unless they
    are given. A server keeps one vector of the size of the model for each buffer.
    """

    buffers: int = 4  # from 1 to 8
    objective: str = "mean"  # which error is small: root mean square over rounds, or the "largest"
    momentum: float = 0.0  # of the server's steps, for which errors are computed
    decays: Sequence[float] = ()  # θ in [0, 1)
    weights: Sequence[float] = ()  # w in [0, 1], one for each decay

    def __post_init__(self) -> None:
        hold_plain_numbers(self)

    def strategy(self, sampling: SamplingEvent) -> BufferedStrategy:
        """The best, or the given one."""
        decays, weights = _numbers("decays", self.decays), _numbers("weights", self.weights)
        if decays or weights:
            return BufferedStrategy(decays, weights)
        objective, workload = _objective(self.objective), Workload(self.momentum)
        found = optimal_buffers(_series(sampling), self.buffers, objective, workload)
        return BufferedStrategy(*found)


NOISE_POLICIES: Mapping[str, type[NoisePolicy]] = {
    "independent": IndependentNoise,
    "banded": BandedNoise,
    "buffered": BufferedNoise,
}
"""The values of noise.correlation in a configuration."""


def given(strategy: Strategy) -> NoisePolicy:
    """The policy that gives a strategy without a search."""
    if strategy == INDEPENDENT:
        return IndependentNoise()
    if isinstance(strategy, BandedStrategy):
        return BandedNoise(coefficients=strategy.coefficients)
    return BufferedNoise(len(strategy.decays), decays=strategy.decays, weights=strategy.weights)


def _series(sampling: SamplingEvent) -> Schedule:
    if sampling.schedule is None or sampling.policy not in WITH_STRATEGY:
        raise InvalidValueError(
            f"noise is correlated and sampling is {sampling.policy}, of which there is no analysis "
            f"with such noise; it must be {' or '.join(WITH_STRATEGY)}"
        )
    return sampling.schedule


def _numbers(name: str, values: Sequence[float]) -> tuple[float, ...]:
    found = tuple(values) if isinstance(values, Sequence) else (None,)
    if not all(isinstance(value, int | float) for value in found):
        raise InvalidValueError(f"{name} of the noise is {values!r}; it must be a list of numbers")
    return tuple(map(float, found))


def _objective(name: str) -> Objective:
    return named_value(Objective, "objective", name)


@dataclass(frozen=True)
class Grouping:
    """A partition of an update into vector groups, and the share ω of the noise budget of each."""

    groups: tuple[VectorGroup, ...]
    shares: tuple[float, ...]

    @classmethod
    def of(cls, groups: tuple[VectorGroup, ...], layout: Layout, allocation: Allocation) -> Self:
        """Groups of a layout with the shares that an allocation gives them."""
        if not isinstance(allocation, str):
            return cls(groups, given_shares(groups, allocation))
        if allocation == "dimension":
            return cls(groups, dimension_shares(layout, groups))
        return cls(groups, proportional_shares(groups))


class ClippingPolicy(ABC):
    """How each user's update is clipped (McMahan et al. 2018, section 3)."""

    @abstractmethod
    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """Vector groups of an update and their shares of the noise budget."""


@dataclass(frozen=True)
class Flat(ClippingPolicy):
    """The whole update to one norm S.

    Without noise S may be infinite, which clips nothing.

    >>> Flat(0.5).grouping(Layout(("w", "b"), ((2, 3), (3,))), "proportional").shares
    (1.0,)
    """

    norm: float

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        if self.norm != math.inf:
            _check_norm(self.norm)

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """One group."""
        norm = vector_groups.NO_CLIPPING if self.norm == math.inf else self.norm
        return Grouping.of(vector_groups.flat(layout, norm), layout, allocation)


@dataclass(frozen=True)
class PerLayer(ClippingPolicy):
    """Each layer, or each tensor, to its own norm S_g, with Σ S_g² = S².

    The norms are equal, or ∝ √dimension, or S_g by name; S is then not read.
    """

    norm: float
    parts: Literal["layer", "tensor"] = "layer"
    split: Literal["equal", "dimension"] | Mapping[str, float] = "equal"

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        _check_choice("parts", self.parts, "layer", "tensor")
        _check_choice("split", self.split, "equal", "dimension", each="part")
        if isinstance(self.split, str):
            _check_norm(self.norm)

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """A group for each part."""
        parts: Mapping[str, tuple[str, ...]] = {name: (name,) for name in layout.names}
        if self.parts == "layer":
            parts = vector_groups.layers(layout)
        norms = self.split
        if norms == "equal":
            norms = vector_groups.equal_split(parts, self.norm)
        elif norms == "dimension":
            norms = vector_groups.split_by_dimension(layout, parts, self.norm)
        return Grouping.of(vector_groups.per_layer(layout, parts, norms), layout, allocation)


@dataclass(frozen=True)
class Joint(ClippingPolicy):
    """The whole update to one norm S, each tensor measured in units of its scale α."""

    norm: float  # S, of the scaled update
    scales: Literal["dimension"] | Mapping[str, float] = "dimension"  # α ∝ dimension^(−1/4), or α

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        _check_norm(self.norm)
        _check_choice("scales", self.scales, "dimension", each="tensor")

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """One group."""
        scales = self.scales
        if scales == "dimension":
            scales = vector_groups.scales_by_dimension(layout)
        return Grouping.of(vector_groups.joint(layout, self.norm, scales), layout, allocation)


@dataclass(frozen=True)
class Part:
    """Tensors that are clipped in their own way."""

    tensors: Sequence[str]  # globs over parameter names, such as "conv*" or "*.bias"
    clipping: ClippingPolicy
    share: float | None = None  # weight of the noise budget they get; all parts have one, or none

    def __post_init__(self) -> None:
        hold_plain_numbers(self)
        if isinstance(self.tensors, str):  # each of its letters would be a pattern
            raise InvalidValueError(f"tensors are {self.tensors!r}; they must be a list of globs")
        check_types(tensors=(self.tensors, Sequence), clipping=(self.clipping, ClippingPolicy))
        for glob in self.tensors:
            check_types(**{"one of tensors": (glob, str)})


@dataclass(frozen=True)
class Grouped(ClippingPolicy):
    """Parts of the model, each clipped in its own way; a tensor is in the first part that fits.

    >>> parts = {"conv": Part(["conv*"], Joint(0.3)), "rest": Part(["*"], Flat(0.5))}
    >>> layout = Layout(("conv.weight", "fc.weight", "fc.bias"), ((4, 4), (2, 4), (2,)))
    >>> [group.name for group in Grouped(parts).grouping(layout, "proportional").groups]
    ['conv', 'rest']
    """

    parts: Mapping[str, Part]

    def __post_init__(self) -> None:
        check_types(parts=(self.parts, Mapping))
        for name, part in self.parts.items():
            check_types(**{"a name of parts": (name, str), f"part {name!r}": (part, Part)})

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """The groups of all parts, named after their part."""
        weights = [part.share for part in self.parts.values() if part.share is not None]
        if weights and len(weights) < len(self.parts):
            raise InvalidValueError("some groups have a share; all must have one, or none")
        if weights and not isinstance(allocation, str):
            raise InvalidValueError(
                "noise.allocation is a table and clipping.groups have shares; only one may be given"
            )
        inner = allocation if isinstance(allocation, str) else "proportional"
        layouts = self._layouts(layout)
        found = {n: p.clipping.grouping(layouts[n], inner) for n, p in self.parts.items()}
        groups = tuple(
            replace(group, name=name if group.name == "update" else f"{name}/{group.name}")
            for name, each in found.items()
            for group in each.groups
        )
        if not weights:
            return Grouping.of(groups, layout, allocation)
        shares = tuple(
            weight / sum(weights) * share
            for weight, each in zip(weights, found.values(), strict=True)
            for share in each.shares
        )
        return Grouping(groups, shares)

    def _layouts(self, layout: Layout) -> dict[str, Layout]:
        """The tensors of each part."""
        left, layouts = dict(zip(layout.names, layout.shapes, strict=True)), {}
        for name, part in self.parts.items():
            fit = [t for t in left if any(fnmatchcase(t, pattern) for pattern in part.tensors)]
            if not fit:
                raise InvalidValueError(
                    f"group {name!r} has no tensor that fits {list(part.tensors)} and no group "
                    f"before it; the tensors are {list(layout.names)}"
                )
            layouts[name] = Layout(tuple(fit), tuple(left.pop(tensor) for tensor in fit))
        if left:
            raise InvalidValueError(
                f"tensor {next(iter(left))!r} fits no pattern of clipping.groups; every tensor "
                'must be in one, and a last group with the pattern "*" takes the rest'
            )
        return layouts


DEFAULT_CLIPPING = Flat(0.1)

CLIPPINGS: dict[str, type[ClippingPolicy]] = {"flat": Flat, "per-layer": PerLayer, "joint": Joint}
"""The values of clipping.strategy in a configuration."""


@dataclass(frozen=True)
class Mechanism:
    """What every round of a run does to protect users, and what all rounds may cost.

    >>> mechanism = Mechanism.poisson(q=0.1, clipping=Flat(0.5))
    >>> calibrated = mechanism.calibrate(epsilon=2.0, delta=1e-5, rounds=100)
    >>> round(calibrated.noise_multiplier, 1)
    2.2

    The noise multiplier z ≥ 0 is the noise over the sensitivity of a whole round; with None it is
    still to be calibrated. `metrics` are private averages to release beside the update: numbers by
    name, as for `fedpriv.engine.measuring.metric`. InvalidValueError: there is no noise, or no
    budget, and `unsafe_no_privacy` is not set; or `unit` and `microbatch` do not fit together.
    """

    sampling: CohortPolicy
    clipping: ClippingPolicy
    noise_multiplier: float | None = None
    epsilon: float | None = None  # never exceeded; None with `unsafe_no_privacy` only
    delta: float | None = None  # of the budget, and of every ε that is shown
    rounds: int | None = None  # T that the noise was calibrated for
    allocation: Allocation = "proportional"
    adaptive: AdaptiveClipping | None = None  # None: clipping norms are fixed
    averaging: Averaging = Averaging()  # noqa: RUF009 - frozen, so sharing it is safe
    metrics: Mapping[str, Mapping[str, float | Sequence[float]]] = field(default_factory=dict)
    metrics_share: float = 0.05  # of the round's privacy, for all metrics together
    # Likewise, for counting the users of a cohort whose update counted; 0 counts nobody.
    contributors_share: float = CONTRIBUTORS_SHARE
    accountant: str = "tight"  # prices the budget; it must give upper bounds
    unsafe_no_privacy: bool = False  # allows a run without noise or without a budget
    noise: NoisePolicy = IndependentNoise()
    unit: Unit = Unit.USER  # what is sampled, clipped and protected
    microbatch: int | None = None  # rows of a microbatch; given for that unit alone

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_types(
            sampling=(self.sampling, CohortPolicy),
            clipping=(self.clipping, ClippingPolicy),
            noise=(self.noise, NoisePolicy),
            adaptive=(self.adaptive, AdaptiveClipping | None),
            averaging=(self.averaging, Averaging),
            metrics=(self.metrics, Mapping),
        )
        accountant_named(self.accountant)
        for name, numbers in self.metrics.items():
            check_types(
                **{"a name of metrics": (name, str), f"metric {name!r}": (numbers, Mapping)}
            )
        _check_choice(
            "allocation", self.allocation, "proportional", "dimension", each="vector group"
        )
        check_unit(self.unit, self.microbatch)
        object.__setattr__(self, "unit", Unit(self.unit))
        if self.adaptive and getattr(self.clipping, "norm", 0.0) == math.inf:
            raise InvalidValueError(
                "the clipping norm is infinite; if it adapts, it must be finite"
            )
        if self.noise_multiplier is not None:
            check_private(self.noise_multiplier, self.epsilon, self.unsafe_no_privacy)

    @classmethod
    def poisson(
        cls,
        q: float = DEFAULT_PROBABILITY,
        clipping: ClippingPolicy = DEFAULT_CLIPPING,
        *,
        allocation: Allocation = "proportional",
        adaptive: AdaptiveClipping | None = None,
        averaging: Averaging | None = None,
        metrics: Mapping[str, Mapping[str, float | Sequence[float]]] | Iterable[str] = (),
        metrics_share: float = 0.05,
        contributors_share: float = CONTRIBUTORS_SHARE,
        accountant: str = "tight",
        unit: Literal["user", "example", "microbatch"] = "user",
        microbatch: int | None = None,
        examples_per_user: int | None = None,
        total_examples: float | None = None,
    ) -> Self:
        """The Gaussian mechanism under Poisson sampling, without noise or budget so far.

        Each user joins a round with probability q in (0, 1]; with another unit, each example or
        each microbatch; with `examples_per_user`, each of so many examples of a user, who stays
        what is protected: `PoissonExamples`. Metrics may be names alone where they need no numbers.
        The other arguments are attributes of the class.
        """
        if isinstance(metrics, str):  # each of its letters would be a name
            raise InvalidValueError(f"metrics are {metrics!r}; they must be a list of names")
        check_types(metrics=(metrics, Iterable))
        policy: CohortPolicy = Poisson(q)
        if examples_per_user is not None:
            policy = PoissonExamples(q, examples_per_user, total_examples)
        elif total_examples is not None:
            raise InvalidValueError(
                f"total_examples is {total_examples}; without examples_per_user it must be absent"
            )
        return cls(
            policy,
            clipping,
            allocation=allocation,
            adaptive=adaptive,
            averaging=Averaging() if averaging is None else averaging,
            metrics=metrics if isinstance(metrics, Mapping) else {name: {} for name in metrics},
            metrics_share=metrics_share,
            contributors_share=contributors_share,
            accountant=accountant,
            unit=Unit(check_unit(unit, microbatch)),
            microbatch=microbatch,
        )

    def calibrate(
        self,
        *,
        epsilon: float,
        delta: float,
        rounds: int = DEFAULT_ROUNDS,
        users: int | None = None,
        spent: Iterable[RoundEvent] = (),
    ) -> Self:
        """The mechanism with the least noise for which all rounds cost at most (ε, δ).

        What the ledger that will be charged holds already, `spent`, counts too. `users` are N,
        which cohorts of a fixed size need. A strategy of correlated noise is searched for here.
        """
        epsilon, delta, rounds, users = plain_numbers((epsilon, delta, rounds, users))
        _check_whole("rounds", rounds)
        if users is not None:
            _check_whole("users", users)
        check_types(spent=(spent, Iterable))
        before, sampling = list(spent), self.sampling.of(users, self.unit)
        for event in before:
            check_types(**{"an event in spent": (event, RoundEvent)})
        charges, drawn = -(-rounds // sampling.rounds), sampling.event()
        strategy = self.noise.strategy(drawn)
        column = strategy.column(sampling.rounds)

        def events(z: float) -> list[RoundEvent]:
            queries = (SumQueryEvent("update", 1.0, z),)
            return [*before, RoundEvent(drawn, queries, charges, column)]

        z = smallest_noise(epsilon, delta, events, self.accountant)
        budgeted = replace(self, epsilon=epsilon, delta=delta, rounds=rounds)
        return replace(budgeted, noise=given(strategy), noise_multiplier=z)

    def with_noise(self, noise_multiplier: float, *, epsilon: float, delta: float) -> Self:
        """The mechanism with given noise; training stops before (ε, δ) would be passed."""
        return replace(
            self, noise_multiplier=noise_multiplier, epsilon=epsilon, delta=delta, rounds=None
        )

    @property
    def budget(self) -> PrivacyBudget:
        """What all rounds may cost; without limit where there is no privacy to keep."""
        delta, accountant = self.delta, accountant_named(self.accountant)
        if delta is None:
            raise InvalidValueError("delta is absent; it must be in (0, 1), best far below 1/N")
        if accountant.epsilon([], delta).bound is Bound.ESTIMATE:
            raise InvalidValueError(
                f"privacy.accountant is {self.accountant!r}, whose estimate can be below the "
                "truth; a budget needs an upper bound, such as that of tight"
            )
        limit = None if self.unsafe_no_privacy else self.epsilon
        limit = float("inf") if limit is None else limit
        return PrivacyBudget(limit, delta, accountant.upper_epsilon)


def check_unit(unit: str, microbatch: int | None) -> str:
    """Return the unit; InvalidValueError unless there is one, of a size if it has several rows."""
    unit = named_value(Unit, "unit", unit)
    if (microbatch is not None) != (unit == Unit.MICROBATCH):
        raise InvalidValueError(
            f"microbatch is {microbatch} and unit is {str(unit)!r}; a size is given for the unit "
            "'microbatch', and for no other"
        )
    if microbatch is not None:
        _check_whole("microbatch", plain_numbers(microbatch))
    return unit


def check_private(noise_multiplier: float | None, epsilon: float | None, unsafe: bool) -> None:  # noqa: FBT001
    """Refuse settings under which no ε would hold, unless `unsafe_no_privacy` says so."""
    if noise_multiplier == 0.0 and not unsafe:
        raise InvalidValueError(
            "noise_multiplier is 0, which gives no privacy; set unsafe_no_privacy = true if that "
            "is intended"
        )
    if unsafe and noise_multiplier is None:
        raise InvalidValueError("unsafe_no_privacy is true; noise_multiplier must then be given")
    if epsilon is None and not unsafe:
        raise InvalidValueError("epsilon is absent; it must be a positive privacy budget")
