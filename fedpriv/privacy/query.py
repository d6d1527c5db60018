"""The Gaussian sum and average queries over one or more vector groups."""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fedpriv.accounting.events import SumQueryEvent
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.clipping import clip
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.gaussian import gaussian_noise
from fedpriv.privacy.groups import VectorGroup, check_partition
from fedpriv.privacy.layout import FloatVector, Layout, Tensors

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GaussianSumQuery:
    """Release Σ_{i in cohort} c(v_i) + N(0, σ²): McMahan et al. 2018, section 3.

    Contributions and sums are float64 vectors [D] in the units of the *scaled* update
    u_j = v_j/α_j; a release is back in the units of the update.

    Attributes:
        layout: tensors of the update.
        groups: a partition of the tensors.
        noise_stddevs: σ_g ≥ 0 for each group, on the sum, in the units of u.

    Raises:
        InvalidValueError: groups are no partition, or a σ_g is missing or illegal.
    """

    layout: Layout
    groups: tuple[VectorGroup, ...]
    noise_stddevs: tuple[float, ...]

    def __post_init__(self) -> None:
        check_partition(self.layout, self.groups)
        if len(self.noise_stddevs) != len(self.groups):
            raise InvalidValueError(
                f"{len(self.noise_stddevs)} noise_stddevs are given for {len(self.groups)} groups"
            )
        _ = self.events  # a σ_g that no ledger would accept is refused here

    @cached_property
    def events(self) -> tuple[SumQueryEvent, ...]:
        """What one release of this query is charged as, one event per group."""
        return tuple(
            SumQueryEvent(group.name, group.clipping_norm, stddev)
            for group, stddev in zip(self.groups, self.noise_stddevs, strict=True)
        )

    @cached_property
    def scales(self) -> FloatVector:
        """α of each component of the flat vector: [D]."""
        scales = np.ones(self.layout.dimension)
        for group in self.groups:
            for tensor, scale in zip(group.tensors, group.scales, strict=True):
                scales[self.layout.slices[tensor]] = scale
        return scales

    def contribution(self, update: Tensors) -> FloatVector:
        """What one user adds to the sum: [D]; total.

        Guarantees: the part of each group g has a norm of at most S_g whatever the update; a
        malformed update (missing, unknown or misshapen tensors, not floating point) contributes
        zero everywhere, and so does one with a component that is not finite, in any group.
        """
        try:
            vector = self.layout.flatten(update)
        except InvalidValueError as error:
            _log.warning("a malformed update counts as zero: %s", error)
            return np.zeros(self.layout.dimension)
        if not np.all(np.isfinite(vector)):
            return np.zeros(self.layout.dimension)
        with np.errstate(over="ignore"):  # an overflow to inf is clipped to zero
            vector /= self.scales
        for group, indices in self._parts():
            vector[indices] = clip(vector[indices], group.clipping_norm)
        return vector

    def admits(self, total: FloatVector, users: int) -> bool:
        """Whether `total` can be a sum of `users` contributions: shape, finite, norm ≤ users·S."""
        if total.shape != (self.layout.dimension,) or not np.all(np.isfinite(total)):
            return False
        # A sum of contributions may exceed its bound by the rounding of the additions.
        slack = 1.0 + (users + 8) * 2.0**-53
        return all(
            float(np.linalg.norm(total[indices])) <= users * group.clipping_norm * slack
            for group, indices in self._parts()
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
            The noised sum [D] in units of the update, and the events it must be charged as.

        Raises:
            InvalidValueError: the total has another shape.
        """
        if total.shape != (self.layout.dimension,):
            raise InvalidValueError(
                f"total has shape {list(total.shape)}; it must be [{self.layout.dimension}]"
            )
        noised = total.copy()
        # Sensitivity: one user more or less changes the part of group g by its contribution, of
        # norm at most S_g. Divided by σ_g, group by group, all parts together change by at most
        # √(Σ_g (S_g/σ_g)²) = 1/z, and the noise below is N(0, I) in these units: equation (1).
        for (group, indices), stddev in zip(self._parts(), self.noise_stddevs, strict=True):
            key = entropy.key(f"{purpose}/{group.name}")
            noised[indices] += gaussian_noise(key, indices.size, stddev)
        # Post-processing: the scales are public.
        return noised * self.scales, self.events

    def _parts(self) -> Iterator[tuple[VectorGroup, np.ndarray]]:
        return zip(self.groups, self._indices, strict=True)

    @cached_property
    def _indices(self) -> tuple[np.ndarray, ...]:
        """Positions of each group in the flat vector."""
        positions = np.arange(self.layout.dimension)
        return tuple(
            np.concatenate([positions[self.layout.slices[tensor]] for tensor in group.tensors])
            for group in self.groups
        )


@dataclass(frozen=True)
class GaussianAverageQuery:
    """A Gaussian sum query divided by a constant.

    Attributes:
        sum_query: the query that is noised.
        denominator: qN > 0, fixed before the round. Never the size of the realised cohort, which
            is itself private: dividing by it would change every other user's share.

    Raises:
        InvalidValueError: the denominator is not positive and finite.
    """

    sum_query: GaussianSumQuery
    denominator: float

    def __post_init__(self) -> None:
        if not (self.denominator > 0.0 and math.isfinite(self.denominator)):
            raise InvalidValueError(
                f"denominator is {self.denominator}; it must be positive and finite"
            )

    def release(
        self, total: FloatVector, entropy: Entropy, purpose: str
    ) -> tuple[FloatVector, tuple[SumQueryEvent, ...]]:
        """Noised average [D] in units of the update, with its events: see `GaussianSumQuery`."""
        noised, events = self.sum_query.release(total, entropy, purpose)
        return noised / self.denominator, events
