"""Charts of a study: arms beside each other, with intervals over seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedpriv.report.measures import Measure, ends, measure_of
from fedpriv.report.page.charts import Chart, chart
from fedpriv.report.page.record import RunRecord
from fedpriv.report.series import ROUNDS, Axis, Series
from fedpriv.report.study_series import Drawing
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


def by_round_chart(arms: Sequence[ArmRuns], target: Target, number: int) -> Chart:
    """Mean accuracy by round with 95% intervals over seeds, for each arm at a target.

    Args:
        arms: with at least one run each.
        target: of all of them.
        number: of the chart in the page.
    """
    measure = measure_of([arm.summary for arm in arms])
    lines = [(arm.summary.arm, *_over_seeds(arm, measure)) for arm in arms]
    series = [
        Series(
            name,
            rounds,
            [interval.mean for interval in found],
            *ends(found),
        )
        for name, rounds, found in lines
    ]
    return chart(
        f"accuracy-{number}",
        f"{measure.title} by round at ε = {target.epsilon:g}",
        "Mean over seeds, each arm with its own noise, calibrated to the same ε. Bands are "
        "Student's 95% intervals: they speak of other seeds on the same users, and of one round at "
        "a time. The rows are of no enrolled user, and the guarantee does not speak of them.",
        (ROUNDS, measure.axis),
        series,
    )


def on_the_way_chart(arms: Sequence[ArmRuns], target: Target) -> Chart:
    """Accuracy against the ε spent until then, for each arm at one target."""
    measure = measure_of([arm.summary for arm in arms])
    series = []
    for arm in arms:
        rounds, found = _over_seeds(arm, measure)
        spent = {each.number: each.epsilon for each in arm.records[0].rounds}
        x = [spent[number] for number in rounds]
        series.append(Series(arm.summary.arm, x, [i.mean for i in found], *ends(found)))
    return chart(
        "front",
        f"{measure.title} against ε spent until then",
        "Each arm's models on their way to the end of the budget, mean over seeds with Student's "
        "95% intervals. An arm that stopped early would have paid what is below its last point; "
        "planned for fewer rounds, it would have needed less noise.",
        (Axis(f"user-level ε spent, δ = {target.delta:g}", "no unit"), measure.axis),
        series,
    )


def drawn(drawing: Drawing) -> Chart:
    """A chart of what figures show too."""
    return chart(drawing.name, drawing.title, drawing.caption, drawing.axes, drawing.series)


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
