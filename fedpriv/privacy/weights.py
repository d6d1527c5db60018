"""How much each user counts in an average, and what sums are divided by."""

import math
from dataclasses import dataclass

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.contribution import MOST_WEIGHT


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
