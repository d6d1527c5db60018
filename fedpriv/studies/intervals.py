"""Means over seeds with their confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over seeds, with Student's interval around it.

    Attributes:
        mean: of the values.
        half_width: the interval is mean ± half_width; None if there is one value only, which says
            nothing of its spread.
        count: number of values.
    """

    mean: float
    half_width: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float], confidence: float = CONFIDENCE) -> Self:
        """t-interval of independent values: x̄ ± t_{(1+c)/2, n−1}·s/√n.

        It covers the true mean with probability `confidence` if values are normal. It speaks of
        other seeds on the same users, not of other users. If a value is not finite, as the loss of
        a model that diverged, the half width is NaN.

        Args:
            values: at least one.
            confidence: c in (0, 1).
        """
        count = len(values)
        mean = sum(values) / count  # fsum refuses infinities of both signs
        if count == 1:
            return cls(mean, None, 1)
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        quantile = float(stats.t.ppf((1.0 + confidence) / 2.0, count - 1))
        return cls(mean, quantile * math.sqrt(variance / count), count)

    @property
    def low(self) -> float | None:
        """Lower end."""
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        """Upper end."""
        return None if self.half_width is None else self.mean + self.half_width
