"""The average over the cohort's own weight, with a floor: f̃_c of McMahan et al. 2018.

Dividing by the realised weight Σ w_i tracks the cohort, at twice the sensitivity; see
`GaussianAverageQuery` for the estimator with a fixed denominator.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from fedpriv.accounting.events import SumQueryEvent
from fedpriv.errors import InvalidValueError
from fedpriv.privacy.contribution import IntegerVector
from fedpriv.privacy.entropy import Entropy
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.layout import FloatVector, Layout
from fedpriv.privacy.query import GaussianAverageQuery, GaussianSumQuery


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
