"""What happened to the users' data, as frozen values that any accountant can price.

These values are the whole interface between privacy mechanisms and accountants. They are kept in
ledgers for years, so they evolve by one rule: an event is never removed and never changes its
meaning, new fields are optional, and an accountant refuses an event it has no analysis for.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import StrEnum

from fedpriv.accounting.sampling import (
    NeighbouringRelation,
    Pair,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    names_of,
)
from fedpriv.accounting.strategy import strategy_sensitivity
from fedpriv.errors import InvalidValueError

__all__ = [
    "NeighbouringRelation",
    "Pair",
    "Randomness",
    "RoundEvent",
    "SamplingEvent",
    "SamplingPolicy",
    "Schedule",
    "SumQueryEvent",
    "compose",
    "names_of",
    "poisson_gaussian",
]


_SAME = 2.0**-36
"""Relative difference of noise multipliers that is rounding."""


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
    """Count events by (sampling probability q, noise_stddev per *sensitivity*), in order of both.

    Whatever the order of events, what is computed from the counts is the same to the last bit.

    The second number is the effective noise multiplier z over the sensitivity in clipping norms:
    1 where one user is added or removed, 2 where one is replaced, times that of the strategy where
    there is one. Accountants of one policy depend on nothing else, but for the schedule of a pass.

    Noise multipliers that differ by less than a part in 2³⁶ count as the smallest of them: where
    clipping norms move, the last digits of σ/S do, though it is meant to stay.

    >>> compose([poisson_gaussian(0.5, 2.0), poisson_gaussian(0.5, 2.0, count=3)])
    {(0.5, 2.0): 4}
    """
    rounds: dict[tuple[float, float], int] = {}
    for event in events:
        sampling = event.sampling
        sensitivity = sampling.relation.sensitivity
        if sampling.policy is SamplingPolicy.SEPARATED and sampling.schedule is not None:
            sensitivity *= strategy_sensitivity(event.strategy, *astuple(sampling.schedule))
        key = sampling.sampling_probability, event.noise_multiplier / sensitivity
        rounds[key] = rounds.get(key, 0) + event.count
    return _merged(rounds)


def _merged(rounds: dict[tuple[float, float], int]) -> dict[tuple[float, float], int]:
    """The same rounds in order, with nearly equal ones counted as the worst of them."""
    merged: dict[tuple[float, float], int] = {}
    last = (0.0, 0.0)
    for (q, z), count in sorted(rounds.items()):
        if q != last[0] or z > last[1] * (1.0 + _SAME):
            last = (q, z)
        merged[last] = merged.get(last, 0) + count
    return merged
