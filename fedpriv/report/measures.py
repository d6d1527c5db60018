"""What arms of a study are compared by: accuracy where there are classes, else loss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedpriv.report.series import Axis
from fedpriv.studies import ArmSummary, Interval
from fedpriv.training.rounds import RoundResult


@dataclass(frozen=True)
class Measure:
    """What arms are compared by.

    Attributes:
        name: in a sentence.
        axis: what a chart names it.
        difference_unit: unit of a difference.
        better: where a chart shows what is better.
        of: its value after a round, None if it was not measured.
        end: its mean over seeds at the end.
        difference: its mean paired difference from the baseline at the end; None without one.
    """

    name: str
    axis: Axis
    difference_unit: str
    better: str
    of: Callable[[RoundResult], float | None]
    end: Callable[[ArmSummary], Interval | None]
    difference: Callable[[ArmSummary], Interval | None]

    @property
    def title(self) -> str:
        """The name at the beginning of a title."""
        return self.name.capitalize()


ACCURACY = Measure(
    "accuracy",
    Axis("accuracy on held-out rows", "%"),
    "points",
    "higher",
    lambda each: None if each.accuracy is None else 100.0 * each.accuracy,
    lambda arm: scaled(arm.accuracy, 100.0),
    lambda arm: scaled(arm.accuracy_difference, 100.0),
)
LOSS = Measure(
    "loss",
    Axis("mean loss of held-out rows", "unit of the loss"),
    "unit of the loss",
    "lower",
    lambda each: each.loss,
    lambda arm: arm.loss,
    lambda arm: arm.loss_difference,
)


def measure_of(arms: Sequence[ArmSummary]) -> Measure:
    """Accuracy, or loss if an arm has no accuracy."""
    return ACCURACY if all(arm.accuracy is not None for arm in arms) else LOSS


def scaled(interval: Interval | None, scale: float) -> Interval | None:
    """An interval in another unit."""
    if interval is None:
        return None
    half = interval.half_width
    return Interval(scale * interval.mean, None if half is None else scale * half, interval.count)


def ends(found: Sequence[Interval | None]) -> tuple[list[float | None], list[float | None]]:
    """Lower and upper ends of intervals, None where one seed has none; empty if all have none."""
    low = [None if interval is None else interval.low for interval in found]
    high = [None if interval is None else interval.high for interval in found]
    return ([], []) if all(end is None for end in low) else (low, high)
