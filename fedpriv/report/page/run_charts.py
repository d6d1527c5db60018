"""Charts of the rounds of one run."""

from collections.abc import Sequence

from fedpriv.report.page.charts import Chart, chart
from fedpriv.report.page.record import RunRecord
from fedpriv.report.series import ROUNDS, Axis, Series
from fedpriv.training.rounds import RoundResult


def accuracy_charts(record: RunRecord) -> list[Chart]:
    """Accuracy and loss by round, and private metrics with their noise."""
    charts = []
    measured = [each for each in record.rounds if each.accuracy is not None]
    if measured:
        charts.append(
            chart(
                "accuracy",
                "Accuracy by round",
                "Share of held-out rows that the released model classifies rightly. The rows are "
                "of no enrolled user, and the guarantee does not speak of them.",
                (ROUNDS, Axis("accuracy on held-out rows", "%")),
                [
                    _line(
                        "accuracy", measured, [100.0 * (each.accuracy or 0.0) for each in measured]
                    )
                ],
            )
        )
    measured = [each for each in record.rounds if each.loss is not None]
    if measured:
        charts.append(
            chart(
                "loss",
                "Loss by round",
                "Mean loss of the released model on the same held-out rows.",
                (ROUNDS, Axis("mean loss of held-out rows", "unit of the loss")),
                [_line("loss", measured, [each.loss for each in measured])],
            )
        )
    names = dict.fromkeys(name for each in record.rounds for name in each.scalar_metrics)
    charts += [_metric_chart(record, number, name) for number, name in enumerate(names)]
    return charts


def front_chart(record: RunRecord) -> Chart | None:
    """Accuracy against the ε spent until then; None if accuracy was not measured."""
    points = [each for each in record.rounds if each.accuracy is not None]
    if not points:
        return None
    return chart(
        "front",
        "Accuracy against ε",
        "Each point is a released model: how accurate it is, and what all releases of the ledger "
        "up to it cost. A curve that rises late pays for its accuracy with privacy; one that has "
        "gone flat pays for nothing.",
        (
            Axis(f"user-level ε spent, at δ = {record.delta:g}", "no unit"),
            Axis("accuracy on held-out rows", "%"),
        ),
        [
            Series(
                "models of this run",
                [each.epsilon for each in points],
                [100.0 * (each.accuracy or 0.0) for each in points],
            )
        ],
    )


def _metric_chart(record: RunRecord, number: int, name: str) -> Chart:
    rounds = [each for each in record.rounds if name in each.scalar_metrics]
    values = [each.scalar_metrics[name] for each in rounds]
    noise = [2.0 * each.metrics_noise_stddev.get(name, 0.0) for each in rounds]
    line = Series(
        "released, ± 2 std. dev. of its noise",
        [each.number for each in rounds],
        values,
        [value - width for value, width in zip(values, noise, strict=True)],
        [value + width for value, width in zip(values, noise, strict=True)],
    )
    return chart(
        f"metric-{number}",
        f"Private metric {name} by round",
        "Average over the users of a round, measured at the model before it and released with "
        "noise: the guarantee covers it.",
        (ROUNDS, Axis("average over users", "unit of the metric")),
        [line],
    )


def _line(name: str, rounds: Sequence[RoundResult], values: Sequence[float | None]) -> Series:
    return Series(name, [each.number for each in rounds], values)
