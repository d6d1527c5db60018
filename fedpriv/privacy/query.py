"""How much each user counts in an average, and what sums are divided by.

How much of a round's privacy each vector group gets, and the noise that follows from it.

The Gaussian sum and average queries over one or more vector groups.

The average over the cohort's own weight, with a floor: f̃_c of McMahan et al. 2018.

Dividing by the realised weight Σ w_i tracks the cohort, at twice the sensitivity; see
`GaussianAverageQuery` for the estimator with a fixed denominator.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedpriv.errors import InvalidValueError
from fedpriv.ledger.events import SumQueryEvent
from fedpriv.privacy.clipping import MOST_WEIGHT, Clipping, IntegerVector
from fedpriv.privacy.layout import FloatVector, Layout, VectorGroup
from fedpriv.privacy.noise import LARGEST_STDDEV, Entropy, rounded_gaussian


@dataclass(frozen=True)
class Averaging:
    """How contributions become an average.

    Attributes:
        cap: None: every user counts the same, w = 1. Otherwise c: a user with n examples has the
            weight w = min(n, c)/c. Weights without a cap would let one user move an average without
            bound, so there are none.
        total_weight: W > 0, a public estimate of the sum of all users' weights, which must not
            follow from their data; None where every user counts the same and W is their number.
        floor: None: the denominator is the constant qW. Otherwise φ in (0, 1]: it is the cohort's
            own weight, but at least φ·qW, at twice the sensitivity (`FlooredAverageQuery`).

    Raises:
        InvalidValueError: a number is out of range, or weights have no total.
    """

    cap: int | None = None
    total_weight: float | None = None
    floor: float | None = None

    def __post_init__(self) -> None:
        if self.cap is not None and not 1 <= self.cap <= MOST_WEIGHT:
            raise InvalidValueError(
                f"cap of the weights is {self.cap}; it must be from 1 to {MOST_WEIGHT}"
            )
        if (self.cap is None) != (self.total_weight is None):
            raise InvalidValueError(
                f"total_weight is {self.total_weight} and the cap of weights is {self.cap}; both "
                "must be given, or neither"
            )
        if self.total_weight is not None and not 0.0 < self.total_weight < math.inf:
            raise InvalidValueError(f"total_weight is {self.total_weight}; it must be positive")
        if self.floor is not None and not 0.0 < self.floor <= 1.0:
            raise InvalidValueError(f"floor is {self.floor}; it must be in (0, 1]")


def proportional_shares(groups: tuple[VectorGroup, ...]) -> tuple[float, ...]:
    """ω_g = 1/G: each group pays the same, so σ_g = z·√G·S_g."""
    return (1.0 / len(groups),) * len(groups)


def dimension_shares(layout: Layout, groups: tuple[VectorGroup, ...]) -> tuple[float, ...]:
    """ω_g = d_g/D, so σ_g = z·S_g·√(D/d_g): noise in proportion to the largest RMS component."""
    return tuple(group.dimension(layout) / layout.dimension for group in groups)


def given_shares(
    groups: tuple[VectorGroup, ...], weights: Mapping[str, float]
) -> tuple[float, ...]:
    """ω_g in proportion to positive weights, one per group name.

    Raises:
        InvalidValueError: a group has no weight, a weight no group, or a weight is not positive.
    """
    names = [group.name for group in groups]
    if set(names) != set(weights):
        odd = sorted(set(names) ^ set(weights))
        raise InvalidValueError(f"weights and groups differ in {odd}; each of {names} needs one")
    for name, weight in weights.items():
        if not (weight > 0.0 and math.isfinite(weight)):
            raise InvalidValueError(f"weight of group {name!r} is {weight}; it must be positive")
    total = math.fsum(weights.values())
    return tuple(weights[name] / total for name in names)


def noise_stddevs(
    groups: tuple[VectorGroup, ...], noise_multiplier: float, shares: tuple[float, ...]
) -> tuple[float, ...]:
    """σ_g = z·S_g/√ω_g, under which the round's effective noise multiplier is z.

    By equation (1) of McMahan et al. 2018, z_eff = (Σ (S_g/σ_g)²)^(−1/2) = z·(Σ ω_g)^(−1/2) = z.
    The result is rounded up, so that the effective multiplier is never below z.

    Args:
        groups: the vector groups.
        noise_multiplier: z ≥ 0, the noise multiplier wanted of the whole round.
        shares: ω_g > 0, summing to 1 up to rounding.

    Raises:
        InvalidValueError: z is negative or not finite, or the shares are illegal.
    """
    if not (noise_multiplier >= 0.0 and math.isfinite(noise_multiplier)):
        raise InvalidValueError(
            f"noise_multiplier is {noise_multiplier}; it must be finite and not negative"
        )
    sums_to_one = math.isclose(math.fsum(shares), 1.0, rel_tol=1e-9)
    if len(shares) != len(groups) or min(shares) <= 0.0 or not sums_to_one:
        raise InvalidValueError(
            f"noise shares are {shares}; there must be {len(groups)} positive ones that sum to 1"
        )
    # One part in 2^40 covers the roundings here and in the effective multiplier.
    upward = noise_multiplier * (1.0 + 2.0**-40)
    return tuple(
        upward * group.clipping_norm * math.sqrt(math.fsum(shares) / share)
        for group, share in zip(groups, shares, strict=True)
    )


@dataclass(frozen=True)
class GaussianSumQuery:
    """Release Σ_{i in cohort} c(v_i) + N(0, σ²): McMahan et al. 2018, section 3.

    Contributions are whole numbers of steps, and the noise is rounded to such: see `noise`.

    Attributes:
        clipping: how a user's tensors become its contribution c(v).
        noise_stddevs: σ_g ≥ 0 for each group, on the sum, in the units of contributions.

    Raises:
        InvalidValueError: a σ_g is missing or illegal.
    """

    clipping: Clipping
    noise_stddevs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.noise_stddevs) != len(self.clipping.groups):
            raise InvalidValueError(
                f"{len(self.noise_stddevs)} noise_stddevs are given for "
                f"{len(self.clipping.groups)} groups"
            )
        _ = self.events  # a σ_g that no ledger would accept is refused here
        for group, stddev in zip(self.clipping.groups, self.noise_stddevs, strict=True):
            if stddev > LARGEST_STDDEV * group.granularity:
                raise InvalidValueError(
                    f"noise_stddev of group {group.name!r} is {stddev / group.clipping_norm:.6g} "
                    f"times its clipping norm; it must be at most 2^15 times"
                )

    @cached_property
    def events(self) -> tuple[SumQueryEvent, ...]:
        """What one release of this query is charged as, one event per group."""
        return tuple(
            SumQueryEvent(group.name, group.clipping_norm, stddev, group.granularity)
            for group, stddev in zip(self.clipping.groups, self.noise_stddevs, strict=True)
        )

    def release(
        self, total: IntegerVector, entropy: Entropy, purpose: str
    ) -> tuple[FloatVector, tuple[SumQueryEvent, ...]]:
        """Add noise to the sum of contributions.

        Args:
            total: [D] sum of the contributions of the cohort, in steps.
            entropy: where the noise comes from.
            purpose: names this release; must never be used for another.

        Returns:
            The noised sum [D] in units of the users' tensors, and the events it must be charged as.

        Raises:
            InvalidValueError: the total has another shape, or is not of integers.
        """
        dimension = self.clipping.layout.dimension
        if total.shape != (dimension,) or total.dtype != np.int64:
            raise InvalidValueError(
                f"total is {total.dtype}{list(total.shape)}; it must be int64[{dimension}]"
            )
        noised = np.empty(dimension, np.int64)
        # Sensitivity: one user more or less changes the part of group g by its contribution, whole
        # numbers a with Σa² ≤ B_g, so by at most γ_g·√B_g ≤ S_g, exactly. Divided by σ_g, group by
        # group, all parts together change by at most √(Σ_g (S_g/σ_g)²) = 1/z, and in these units
        # the noise is N(0, I): equation (1). Rounding it to whole steps is post-processing, since
        # the sum is whole.
        clipping = self.clipping
        for group, spans, stddev in zip(
            clipping.groups, clipping.spans, self.noise_stddevs, strict=True
        ):
            key = entropy.key(f"{purpose}/{group.name}")
            count = sum(span.stop - span.start for span in spans)
            noise = rounded_gaussian(key, count, stddev / group.granularity)
            for span in spans:
                size = span.stop - span.start
                np.add(total[span], noise[:size], out=noised[span])
                noise = noise[size:]
        # Post-processing: steps are public.
        return noised * clipping.steps, self.events


@dataclass(frozen=True)
class GaussianAverageQuery:
    """A Gaussian sum query divided by constants.

    Attributes:
        sum_query: the query that is noised.
        denominator: qN > 0, fixed before the round. Never the size of the realised cohort, which
            is itself private: dividing by it would change every other user's share.
        weighted_denominator: qW > 0, that of the weighted groups, W the public sum of the weights
            of all enrolled users; None if no group is weighted.

    Raises:
        InvalidValueError: a denominator is not positive and finite, or one is missing.
    """

    sum_query: GaussianSumQuery
    denominator: float
    weighted_denominator: float | None = None

    def __post_init__(self) -> None:
        for denominator in (self.denominator, self.weighted_denominator or 1.0):
            if not (denominator > 0.0 and math.isfinite(denominator)):
                raise InvalidValueError(
                    f"denominator is {denominator}; it must be positive and finite"
                )
        if self.sum_query.clipping.weighted and self.weighted_denominator is None:
            raise InvalidValueError(
                f"groups {self.sum_query.clipping.weighted} are weighted; their average needs a "
                "denominator of its own, q times the sum of all weights"
            )

    @property
    def events(self) -> tuple[SumQueryEvent, ...]:
        """What one release of this query is charged as, one event per group."""
        return self.sum_query.events

    @property
    def denominators(self) -> FloatVector:
        """What each component of the sum is divided by: [D]."""
        clipping = self.sum_query.clipping
        divisors = np.empty(clipping.layout.dimension)
        for spans, divisor in zip(clipping.spans, self._divisors, strict=True):
            for span in spans:
                divisors[span] = divisor
        return divisors

    @property
    def _divisors(self) -> list[float]:
        """What the part of each group is divided by."""
        weighted, denominator = self.sum_query.clipping.weighted, self.weighted_denominator
        return [
            self.denominator if denominator is None or group.name not in weighted else denominator
            for group in self.sum_query.clipping.groups
        ]

    @property
    def noise_stddevs(self) -> FloatVector:
        """Standard deviation of the noise in each component of a release: [D]."""
        layout = self.sum_query.clipping.layout
        stddevs = np.empty(layout.dimension)
        for tensor, stddev in self.tensor_stddevs.items():
            stddevs[layout.slices[tensor]] = stddev
        return stddevs

    @property
    def tensor_stddevs(self) -> dict[str, float]:
        """Standard deviation of the noise in each component of a tensor of a release, by tensor."""
        sums = self.sum_query
        return {
            tensor: stddev * scale / divisor
            for group, stddev, divisor in zip(
                sums.clipping.groups, sums.noise_stddevs, self._divisors, strict=True
            )
            for tensor, scale in zip(group.tensors, group.scales, strict=True)
        }

    def release(
        self, total: IntegerVector, entropy: Entropy, purpose: str
    ) -> tuple[FloatVector, tuple[SumQueryEvent, ...]]:
        """Noised average [D] in units of the tensors, with its events: see `GaussianSumQuery`."""
        average, events = self.sum_query.release(total, entropy, purpose)
        for spans, divisor in zip(self.sum_query.clipping.spans, self._divisors, strict=True):
            for span in spans:
                average[span] /= divisor
        return average, events


def sensitivity(group: VectorGroup, layout: Layout, floor: float) -> float:
    """How far one user moves the rounded m·A/max(m, B) of a group, in its clipping norms.

    Twice its clipping norm, see `FlooredAverageQuery.release`, and what rounding to whole steps
    adds: at most e = ½ + m·√B_g·2^-50 in each component of either of two neighbours, hence 2·e·√d
    in their difference, which is about √d·2^-25 clipping norms. Sums of nodes are admitted up to a
    part in 2^30 beyond their norm.

    Args:
        group: a weighted group.
        layout: says its dimension.
        floor: m.
    """
    rounding = 1.0 + floor * math.sqrt(group.squared_bound) * 2.0**-49
    steps = rounding * math.sqrt(group.dimension(layout))
    return (2.0 + steps * group.granularity / group.clipping_norm) * (1.0 + 2.0**-29)


@dataclass(frozen=True)
class FlooredAverageQuery:
    """Releases A/max(m, B) for the weighted groups, with noise that does not depend on the cohort.

    A is the sum of w_i·c(v_i) and B that of w_i over the cohort. Other groups are as in
    `GaussianAverageQuery`.

    Attributes:
        average: the query of the same groups with denominator m for the weighted ones. Its σ_g for
            these is on m·A/max(m, B).

    Raises:
        InvalidValueError: no group is weighted.
    """

    average: GaussianAverageQuery

    def __post_init__(self) -> None:
        if self.average.weighted_denominator is None:
            raise InvalidValueError("no group is weighted; a floor needs one that is")

    @property
    def sum_query(self) -> GaussianSumQuery:
        """The query that is noised."""
        return self.average.sum_query

    @property
    def denominator(self) -> float:
        """That of groups without weights."""
        return self.average.denominator

    @property
    def floor(self) -> float:
        """m, the least weight that is divided by."""
        return self.average.weighted_denominator or 1.0

    @cached_property
    def events(self) -> tuple[SumQueryEvent, ...]:
        """What one release is charged as: weighted groups move by more than twice their norm."""
        clipping = self.sum_query.clipping
        return tuple(
            replace(event, clipping_norm=event.clipping_norm * self._sensitivity(group))
            if group.name in clipping.weighted
            else event
            for group, event in zip(clipping.groups, self.sum_query.events, strict=True)
        )

    def _sensitivity(self, group: VectorGroup) -> float:
        return sensitivity(group, self.sum_query.clipping.layout, self.floor)

    @property
    def noise_stddevs(self) -> FloatVector:
        """Standard deviation of the noise in each component of a release: [D]."""
        return self.average.noise_stddevs

    def release(
        self, total: IntegerVector, weight: int, entropy: Entropy, purpose: str
    ) -> tuple[FloatVector, tuple[SumQueryEvent, ...]]:
        """Noised average [D] in units of the tensors, with its events.

        Args:
            total: [D] sum of the contributions of the cohort, in steps.
            weight: sum of the m_i of the users in it, so that B = weight/c.
            entropy: where the noise comes from.
            purpose: names this release; must never be used for another.

        Raises:
            InvalidValueError: the weight is negative, or the total misshapen.
        """
        if weight < 0:
            raise InvalidValueError(f"weight is {weight}; it must not be negative")
        clipping = self.sum_query.clipping
        shrunk = total.copy()
        # Sensitivity of m·A/max(m, B), with ‖A‖ ≤ S·B and one user (w·c, w) more, ‖c‖ ≤ S, w ≤ 1.
        # Where B + w ≤ m it moves by w·c. Where B ≥ m, by m·(w·c·B − w·A)/(B·(B + w)), at most
        # 2·S·w·m/(B + w) ≤ 2·S. Where m lies between, by A·(m/(B + w) − 1) + w·c·m/(B + w), of
        # norm at most S·B·(B + w − m)/(B + w) + S·w ≤ S·B·w/(B + w) + S·w ≤ 2·S.
        # Its components, at most m·√B_g steps, are rounded to whole steps: see `sensitivity`.
        share = self.floor / max(self.floor, weight / clipping.weight_cap)
        for group, spans in zip(clipping.groups, clipping.spans, strict=True):
            if group.name in clipping.weighted and share < 1.0:
                for span in spans:
                    shrunk[span] = np.rint(total[span] * share)
        average, _ = self.average.release(shrunk, entropy, purpose)
        return average, self.events
