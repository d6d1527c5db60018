"""Charts of a study: arms beside each other, with intervals over seeds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedpriv.report.page.charts import ROUNDS, Axis, Chart, Series, chart
from fedpriv.report.page.record import RoundRecord, RunRecord
from fedpriv.studies import ArmSummary, Interval, Target


@dataclass(frozen=True)
class ArmRuns:
    """An arm at a target, and its finished runs.

    Attributes:
        summary: of the runs.
        records: the runs, in the order of the summary's seeds.
    """

    summary: ArmSummary
    records: tuple[RunRecord, ...]


@dataclass(frozen=True)
class Measure:
    """What arms are compared by.

    Attributes:
        axis: what a chart names it.
        of: its value after a round, None if it was not measured.
        interval: its mean over seeds at the end.
    """

    axis: Axis
    of: Callable[[RoundRecord], float | None]
    interval: Callable[[ArmSummary], Interval]


ACCURACY = Measure(
    Axis("accuracy on held-out rows", "%"),
    lambda each: None if each.accuracy is None else 100.0 * each.accuracy,
    lambda arm: scaled(arm.accuracy or arm.loss, 100.0),
)
LOSS = Measure(
    Axis("mean loss of held-out rows", "unit of the loss"),
    lambda each: each.loss,
    lambda arm: arm.loss,
)


def measure_of(arms: Sequence[ArmRuns]) -> Measure:
    """Accuracy, or loss if an arm has no accuracy."""
    return ACCURACY if all(arm.summary.accuracy is not None for arm in arms) else LOSS


def by_round_chart(arms: Sequence[ArmRuns], target: Target, number: int) -> Chart:
    """Mean accuracy by round with 95% intervals over seeds, for each arm at a target.

    Args:
        arms: with at least one run each.
        target: of all of them.
        number: of the chart in the page.
    """
    measure = measure_of(arms)
    lines = [(arm.summary.arm, *_over_seeds(arm, measure)) for arm in arms]
    series = [
        Series(
            name,
            rounds,
            [interval.mean for interval in found],
            *_ends(found),
        )
        for name, rounds, found in lines
    ]
    return chart(
        f"accuracy-{number}",
        f"{_title(measure)} by round at ε = {target.epsilon:g}",
        "Mean over seeds, each arm with its own noise, calibrated to the same ε. Bands are "
        "Student's 95% intervals: they speak of other seeds on the same users, and of one round at "
        "a time. The rows are of no enrolled user, and the guarantee does not speak of them.",
        (ROUNDS, measure.axis),
        series,
    )


def front_chart(arms: Sequence[ArmRuns], delta: float) -> Chart:
    """Accuracy in the end against ε spent, for each arm with all its targets."""
    measure = measure_of(arms)
    series = []
    for name in dict.fromkeys(arm.summary.arm for arm in arms):
        of_arm = [arm for arm in arms if arm.summary.arm == name]
        found = [measure.interval(arm.summary) for arm in of_arm]
        x = [arm.summary.epsilon for arm in of_arm]
        series.append(Series(name, x, [i.mean for i in found], *_ends(found), bars=True))
    return chart(
        "front",
        f"{_title(measure)} against ε",
        "Each point is an arm that was trained from the beginning with the noise of its ε. Bars "
        "are Student's 95% intervals over seeds. Higher and further left is better; where lines "
        "are flat, less ε would have cost nothing.",
        (Axis(f"user-level ε at δ = {delta:g}", "no unit"), measure.axis),
        series,
    )


def on_the_way_chart(arms: Sequence[ArmRuns], target: Target) -> Chart:
    """Accuracy against the ε spent until then, for each arm at one target."""
    measure = measure_of(arms)
    series = []
    for arm in arms:
        rounds, found = _over_seeds(arm, measure)
        spent = {each.number: each.epsilon for each in arm.records[0].rounds}
        x = [spent[number] for number in rounds]
        series.append(Series(arm.summary.arm, x, [i.mean for i in found], *_ends(found)))
    return chart(
        "front",
        f"{_title(measure)} against ε spent until then",
        "Each arm's models on their way to the end of the budget, mean over seeds with Student's "
        "95% intervals. An arm that stopped early would have paid what is below its last point; "
        "planned for fewer rounds, it would have needed less noise.",
        (Axis(f"user-level ε spent, δ = {target.delta:g}", "no unit"), measure.axis),
        series,
    )


def scaled(interval: Interval, scale: float) -> Interval:
    """An interval in another unit."""
    half = interval.half_width
    return Interval(scale * interval.mean, None if half is None else scale * half, interval.count)


def _over_seeds(arm: ArmRuns, measure: Measure) -> tuple[list[int], list[Interval]]:
    """Rounds that were measured under every seed, and what was found."""
    values: dict[int, list[float]] = {}
    for record in arm.records:
        for each in record.rounds:
            value = measure.of(each)
            if value is not None:
                values.setdefault(each.number, []).append(value)
    rounds = [number for number in sorted(values) if len(values[number]) == len(arm.records)]
    return rounds, [Interval.of(values[number]) for number in rounds]


def _ends(found: Sequence[Interval]) -> tuple[list[float], list[float]]:
    """Lower and upper ends; none where one seed has none."""
    low = [interval.low for interval in found if interval.low is not None]
    high = [interval.high for interval in found if interval.high is not None]
    return (low, high) if len(low) == len(found) else ([], [])


def _title(measure: Measure) -> str:
    return "Accuracy" if measure is ACCURACY else "Loss"
