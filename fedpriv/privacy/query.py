"""The Gaussian sum and average queries over one or more vector groups."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.accounting.events import SumQueryEvent
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.gaussian import gaussian_noise
from fedpriv.privacy.layout import FloatVector


@dataclass(frozen=True)
class GaussianSumQuery:
    """Release Σ_{i in cohort} c(v_i) + N(0, σ²): McMahan et al. 2018, section 3.

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

    @cached_property
    def events(self) -> tuple[SumQueryEvent, ...]:
        """What one release of this query is charged as, one event per group."""
        return tuple(
            SumQueryEvent(group.name, group.clipping_norm, stddev)
            for group, stddev in zip(self.clipping.groups, self.noise_stddevs, strict=True)
        )

    def release(
        self, total: FloatVector, entropy: Entropy, purpose: str
    ) -> tuple[FloatVector, tuple[SumQueryEvent, ...]]:
        """Add noise to the sum of contributions.

        Args:
            total: [D] sum of the contributions of the cohort.
            entropy: where the noise comes from.
            purpose: names this release; must never be used for another.

        Returns:
            The noised sum [D] in units of the users' tensors, and the events it must be charged as.

        Raises:
            InvalidValueError: the total has another shape.
        """
        dimension = self.clipping.layout.dimension
        if total.shape != (dimension,):
            raise InvalidValueError(
                f"total has shape {list(total.shape)}; it must be [{dimension}]"
            )
        noised = np.empty(dimension)
        # Sensitivity: one user more or less changes the part of group g by its contribution, of
        # norm at most S_g. Divided by σ_g, group by group, all parts together change by at most
        # √(Σ_g (S_g/σ_g)²) = 1/z, and the noise below is N(0, I) in these units: equation (1).
        clipping = self.clipping
        for group, spans, stddev in zip(
            clipping.groups, clipping.spans, self.noise_stddevs, strict=True
        ):
            key = entropy.key(f"{purpose}/{group.name}")
            noise = gaussian_noise(key, sum(s.stop - s.start for s in spans), stddev)
            for span in spans:
                size = span.stop - span.start
                np.add(total[span], noise[:size], out=noised[span])
                noise = noise[size:]
        # Post-processing: the scales are public.
        clipping.multiply_by_scales(noised)
        return noised, self.events


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
        self, total: FloatVector, entropy: Entropy, purpose: str
    ) -> tuple[FloatVector, tuple[SumQueryEvent, ...]]:
        """Noised average [D] in units of the tensors, with its events: see `GaussianSumQuery`."""
        average, events = self.sum_query.release(total, entropy, purpose)
        for spans, divisor in zip(self.sum_query.clipping.spans, self._divisors, strict=True):
            for span in spans:
                average[span] /= divisor
        return average, events
