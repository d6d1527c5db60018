"""The average over the cohort's own weight, with a floor: f̃_c of McMahan et al. 2018.

Dividing by the realised weight Σ w_i tracks the cohort, at twice the sensitivity; see
`GaussianAverageQuery` for the estimator with a fixed denominator.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from fedpriv.accounting.events import SumQueryEvent
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.query import GaussianAverageQuery, GaussianSumQuery

SENSITIVITY = 2.0
"""How far one user moves m·A/max(m, B), in clipping norms; see `FlooredAverageQuery.release`."""


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

    @cached_property
    def events(self) -> tuple[SumQueryEvent, ...]:
        """What one release is charged as: weighted groups move by twice their clipping norm."""
        weighted = self.sum_query.clipping.weighted
        return tuple(
            replace(event, clipping_norm=SENSITIVITY * event.clipping_norm)
            if event.group in weighted
            else event
            for event in self.sum_query.events
        )

    @property
    def noise_stddevs(self) -> FloatVector:
        """Standard deviation of the noise in each component of a release: [D]."""
        return self.average.noise_stddevs

    def release(
        self, total: FloatVector, weight: float, entropy: Entropy, purpose: str
    ) -> tuple[FloatVector, tuple[SumQueryEvent, ...]]:
        """Noised average [D] in units of the tensors, with its events.

        Args:
            total: [D] sum of the contributions of the cohort.
            weight: B, the sum of the weights of the users in it.
            entropy: where the noise comes from.
            purpose: names this release; must never be used for another.

        Raises:
            InvalidValueError: the weight is negative or not finite, or the total misshapen.
        """
        if not 0.0 <= weight < math.inf:
            raise InvalidValueError(f"weight is {weight}; it must be finite and not negative")
        floor = self.average.weighted_denominator or 1.0
        shrunk = total.copy()
        # Sensitivity of m·A/max(m, B), with ‖A‖ ≤ S·B and one user (w·c, w) more, ‖c‖ ≤ S, w ≤ 1.
        # Where B + w ≤ m it moves by w·c. Where B ≥ m, by m·(w·c·B − w·A)/(B·(B + w)), at most
        # 2·S·w·m/(B + w) ≤ 2·S. Where m lies between, by A·(m/(B + w) − 1) + w·c·m/(B + w), of
        # norm at most S·B·(B + w − m)/(B + w) + S·w ≤ S·B·w/(B + w) + S·w ≤ 2·S.
        clipping = self.sum_query.clipping
        for group, spans in zip(clipping.groups, clipping.spans, strict=True):
            if group.name in clipping.weighted:
                for span in spans:
                    shrunk[span] *= floor / max(floor, weight)
        average, _ = self.average.release(shrunk, entropy, purpose)
        return average, self.events
