"""The privacy mechanism of a run, as its user states it: sampling, clipping, noise, budget.

Values only: nothing here draws, clips or spends. To add a way to sample or to clip, derive a class
from `SamplingPolicy` or `ClippingPolicy`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Literal, Self

from fedpriv.accounting.accountants import Bound, accountant_named
from fedpriv.accounting.calibration import smallest_noise
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import InvalidValueError, known_names
from fedpriv.ledger.events import PrivacyBudget, RoundEvent, Unit
from fedpriv.privacy import layout as vector_groups
from fedpriv.privacy.gaussian_mechanism import (
    AdaptiveClipping,
    Averaging,
    dimension_shares,
    given_shares,
    proportional_shares,
)
from fedpriv.privacy.layout import Layout, VectorGroup
from fedpriv.privacy.sampling import PoissonSampling

# Noise on the update grows by 1/√(1 − ω), half a per cent. That on the count is z/√ω = 10·z users,
# much in one round of a small cohort; the mean over T rounds has 1/√T of it.
CONTRIBUTORS_SHARE = 0.01
DEFAULT_PROBABILITY, DEFAULT_ROUNDS = 0.3, 100  # `simulations.defaults` is the study behind them
Allocation = Literal["proportional", "dimension"] | Mapping[str, float]
"""How vector groups share the noise: by clipping norm, by dimension, or by given weights."""


class SamplingPolicy(ABC):
    """How the cohort of a round is drawn, whatever the population."""

    @abstractmethod
    def of(self, users: int) -> PoissonSampling:
        """The policy for N enrolled users: what draws cohorts and names the sampling event."""

    @abstractmethod
    def events(self, noise_multiplier: float, rounds: int) -> RoundEvent:
        """The event that this many rounds are charged as, for calibration."""


@dataclass(frozen=True)
class Poisson(SamplingPolicy):
    """Each user joins each round independently with probability q in (0, 1]."""

    probability: float

    def of(self, users: int) -> PoissonSampling:
        """Poisson sampling of N users."""
        return PoissonSampling(users, self.probability)

    def events(self, noise_multiplier: float, rounds: int) -> RoundEvent:
        """Poisson-subsampled Gaussian rounds."""
        return poisson_gaussian(self.probability, noise_multiplier, rounds)


SAMPLING_POLICIES: Mapping[str, type[SamplingPolicy]] = {"poisson": Poisson}
"""The values of sampling.policy in a configuration."""


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

    >>> Flat(0.5).grouping(Layout(("w", "b"), ((2, 3), (3,))), "proportional").shares
    (1.0,)
    """

    norm: float

    def grouping(self, layout: Layout, allocation: Allocation) -> Grouping:
        """One group."""
        return Grouping.of(vector_groups.flat(layout, self.norm), layout, allocation)


@dataclass(frozen=True)
class PerLayer(ClippingPolicy):
    """Each layer, or each tensor, to its own norm S_g, with Σ S_g² = S².

    The norms are equal, or ∝ √dimension, or S_g by name; S is then not read.
    """

    norm: float
    parts: Literal["layer", "tensor"] = "layer"
    split: Literal["equal", "dimension"] | Mapping[str, float] = "equal"

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


@dataclass(frozen=True)
class Grouped(ClippingPolicy):
    """Parts of the model, each clipped in its own way; a tensor is in the first part that fits.

    >>> parts = {"conv": Part(["conv*"], Joint(0.3)), "rest": Part(["*"], Flat(0.5))}
    >>> layout = Layout(("conv.weight", "fc.weight", "fc.bias"), ((4, 4), (2, 4), (2,)))
    >>> [group.name for group in Grouped(parts).grouping(layout, "proportional").groups]
    ['conv', 'rest']
    """

    parts: Mapping[str, Part]

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
    name, as for `fedpriv.engine.metrics.metric`. InvalidValueError: there is no noise, or no
    budget, and `unsafe_no_privacy` is not set; or `unit` and `microbatch` do not fit together.
    """

    sampling: SamplingPolicy
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
    unit: Unit = Unit.USER  # what is sampled, clipped and protected
    microbatch: int | None = None  # rows of a microbatch; given for that unit alone

    def __post_init__(self) -> None:
        check_unit(self.unit, self.microbatch)
        object.__setattr__(self, "unit", Unit(self.unit))
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
    ) -> Self:
        """The Gaussian mechanism under Poisson sampling, without noise or budget so far.

        Each user joins a round with probability q in (0, 1]; with another unit, each example or
        each microbatch. Metrics may be names alone where they need no numbers. The other arguments
        are attributes of the class.
        """
        return cls(
            Poisson(q),
            clipping,
            allocation=allocation,
            adaptive=adaptive,
            averaging=averaging or Averaging(),
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
        spent: Iterable[RoundEvent] = (),
    ) -> Self:
        """The mechanism with the least noise for which all rounds cost at most (ε, δ).

        What the ledger that will be charged holds already, `spent`, counts too.
        """
        if rounds < 1:
            raise InvalidValueError(f"rounds is {rounds}; it must be at least 1")
        before = list(spent)

        def events(z: float) -> list[RoundEvent]:
            event = self.sampling.events(z, rounds)
            return [*before, replace(event, sampling=replace(event.sampling, unit=self.unit))]

        z = smallest_noise(epsilon, delta, events, self.accountant)
        return replace(self, noise_multiplier=z, epsilon=epsilon, delta=delta, rounds=rounds)

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
    if unit not in [*Unit]:
        raise InvalidValueError(f"unit is {unit!r}; {known_names(unit, [*Unit])}")
    if (microbatch is not None) != (unit == Unit.MICROBATCH):
        raise InvalidValueError(
            f"microbatch is {microbatch} and unit is {str(unit)!r}; a size is given for the unit "
            "'microbatch', and for no other"
        )
    if microbatch is not None and microbatch < 1:
        raise InvalidValueError(f"microbatch is {microbatch}; it must be at least 1")
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
