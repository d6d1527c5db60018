"""Metrics: bounded vectors that users report beside their updates, released as private averages."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.groups import VectorGroup
from fedpriv.privacy.layout import FloatVector
from fedpriv.privacy.query import GaussianAverageQuery

PREFIX = "metrics/"
"""Begins the names of tensors and vector groups of metrics."""


@dataclass(frozen=True)
class Metric:
    """A vector m of each user, of which the average over the cohort is released.

    What a user contributes is m − centre, clipped to the radius. The tighter the ball around the
    values that occur, the smaller the noise: it is proportional to the radius.

    Attributes:
        name: what it is, e.g. "accuracy"; whoever hosts users knows how to compute it.
        shape: of the vector; () is a number.
        centre: subtracted from every component before clipping, and added to the average.
        radius: bound on the L2 norm of m − centre.
        options: further numbers that computing it takes, e.g. thresholds.

    Raises:
        InvalidValueError: the name is empty, or a number is not finite or out of range.
    """

    name: str
    shape: tuple[int, ...] = ()
    centre: float = 0.0
    radius: float = 1.0
    options: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise InvalidValueError(
                f"a metric is named {self.name!r}; a name must be printable and not empty"
            )
        if not math.isfinite(self.centre) or not all(map(math.isfinite, self.options)):
            raise InvalidValueError(
                f"metric {self.name!r} has centre {self.centre} and options {self.options}; they "
                "must be finite"
            )
        _ = self.group  # a radius to which nothing can be clipped is refused here

    @property
    def tensor(self) -> str:
        """Name of its tensor in a contribution, and of its vector group."""
        return PREFIX + self.name

    @property
    def group(self) -> VectorGroup:
        """The vector group that it makes."""
        return VectorGroup(self.tensor, (self.tensor,), self.radius, (1.0,))


@dataclass(frozen=True)
class ReleasedMetric:
    """A private average.

    Attributes:
        name: that of the metric.
        value: noised average over the expected cohort, of the metric's shape. It is unbiased; a
            cohort larger or smaller than expected moves it away from the centre or towards it.
        noise_stddev: standard deviation of the noise in each component.
    """

    name: str
    value: npt.NDArray[np.float64]
    noise_stddev: float


def released(
    metrics: tuple[Metric, ...], average: FloatVector, query: GaussianAverageQuery
) -> tuple[ReleasedMetric, ...]:
    """The metrics in a released average.

    Args:
        metrics: those whose tensors are in the query's layout.
        average: [D] what the query released.
        query: the query.
    """
    tensors = query.sum_query.clipping.layout.unflatten(average)
    stddevs = query.tensor_stddevs
    return tuple(
        ReleasedMetric(m.name, tensors[m.tensor] + m.centre, stddevs[m.tensor]) for m in metrics
    )
