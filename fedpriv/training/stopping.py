"""Stopping early: when a run has got as good as its private metric can tell."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedpriv.errors import InvalidValueError, check_types, hold_numbers

Better = Literal["larger", "smaller"]
_BETTER: dict[str, Better] = {"accuracy": "larger", "loss": "smaller"}


@dataclass(frozen=True)
class Stopping:
    """Ends a run once a private metric no longer gets better.

    It reads released values alone. So it is post-processing of all rounds that were planned, which
    it costs nothing beside, and the round after which a run stops says nothing about users that the
    releases do not. But that round depends on users, so that the price of the rounds until then is
    no bound (docs/accounting.md, Adaptive rounds). A run that stops has therefore cost all planned
    rounds, up to its budget: the others are charged, though nobody is asked in them.

    Each value is noised, so that the best of many would mostly be the luckiest. Means are compared
    instead: the run stops once that of the last `patience` values is not better than that of the
    `patience` before them by more than `least_gain`. The noise on their difference is √(2/patience)
    times that on a value.

    >>> Stopping("loss", patience=2).reached([2.0, 1.8, 1.5, 1.4])
    False
    >>> Stopping("loss", patience=2).reached([1.5, 1.4, 1.5, 1.4])
    True
    """

    metric: str  # a private metric that is one number, or "evaluation/NAME" of an evaluation
    patience: int  # values, at least 1
    better: Better | None = None  # None: larger for an accuracy, smaller for a loss
    least_gain: float = 0.0  # ≥ 0, in units of the metric

    def __post_init__(self) -> None:
        hold_numbers(self)
        check_types(metric=(self.metric, str))
        if self.patience < 1:
            raise InvalidValueError(
                f"patience of stopping is {self.patience}; it must be at least 1"
            )
        if not 0.0 <= self.least_gain < math.inf:
            found = f"least_gain of stopping is {self.least_gain}"
            raise InvalidValueError(f"{found}; it must be finite and not negative")
        if self._better not in ("larger", "smaller"):
            found = f"better of stopping is {self.better!r} for metric {self.metric!r}"
            raise InvalidValueError(f"{found}; it must be 'larger' or 'smaller'")

    @property
    def _better(self) -> Better | None:
        return self.better or _BETTER.get(self.metric.rpartition("/")[2])

    def reached(self, values: Sequence[float]) -> bool:
        """Whether to stop after these values, in the order in which they were released."""
        if len(values) < 2 * self.patience:
            return False
        recent, before = values[-self.patience :], values[-2 * self.patience : -self.patience]
        gain = (math.fsum(recent) - math.fsum(before)) / self.patience
        return not (gain if self._better == "larger" else -gain) > self.least_gain
