"""The Gaussian sum and average queries over one or more vector groups."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.accounting.events import SumQueryEvent
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.contribution import Clipping, IntegerVector
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.noise import LARGEST_STDDEV, rounded_gaussian


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
