"""Charts of the rounds of one run."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedpriv.report.page.charts import ROUNDS, Axis, Chart, Series, chart
from fedpriv.report.page.record import Figures, RoundRecord, RunRecord, SimulationOnlyRound

_NO_GUARANTEE = (
    "The dashed lines were computed from users' data without noise: they exist in simulations "
    "only, and must not be published of real users."
)


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
    names = dict.fromkeys(name for each in record.rounds for name in each.metrics)
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


def norms_charts(record: RunRecord, of: str = "") -> list[Chart]:
    """Clipping norms by round, and, where they were recorded, what they clipped.

    Args:
        record: the run.
        of: identifies the run, if the page has several.
    """
    seen = record.simulation_only
    groups = dict.fromkeys(name for each in record.rounds for name in each.clipping_norms)
    released = [
        _line(
            f"clipping norm of {name}",
            record.rounds,
            [each.clipping_norms.get(name) for each in record.rounds],
            colour=number,
        )
        for number, name in enumerate(groups)
    ]
    caption = (
        "A user's part of a vector group is scaled down to the group's clipping norm where it is "
        "longer. Clipping norms were released with the model."
    )
    if not seen:
        axes = (ROUNDS, Axis("clipping norm", "scaled L2", from_zero=True))
        return [chart(_name("norms", of), "Clipping norms by round", caption, axes, released)]
    colours = {name: number for number, name in enumerate(groups)}
    of_groups = _by_name(seen, lambda each: each.simulation_only_group_norms)
    true = [
        replace(line, name=f"mean update norm of {line.name}", colour=colours[line.name])
        for line in of_groups
        if line.name in colours
    ]
    of_layers = _by_name(seen, lambda each: each.simulation_only_update_norms)
    return [
        chart(
            _name("norms", of),
            _title("Update norms against clipping norms, by vector group", of),
            f"{caption} {_NO_GUARANTEE}",
            (ROUNDS, Axis("norm of a user's part", "scaled L2", log=True)),
            [*released, *true],
            simulation_only=True,
        ),
        chart(
            _name("layers", of),
            _title("Update norms by layer", of),
            f"Mean over the users of a round, before clipping. {_NO_GUARANTEE}",
            (ROUNDS, Axis("norm of a user's update", "L2", log=True)),
            of_layers,
            simulation_only=True,
        ),
    ]


def clipped_charts(record: RunRecord) -> list[Chart]:
    """Share of users clipped and signal to noise by round, where they were recorded."""
    seen = record.simulation_only
    if not seen:
        return []
    shares = _by_name(seen, lambda each: each.simulation_only_clipped)
    ratios = _by_name(seen, lambda each: each.simulation_only_signal_to_noise)
    return [
        chart(
            "clipped",
            "Users that were clipped, by vector group",
            f"Share of the users of a round whose part was longer. {_NO_GUARANTEE}",
            (ROUNDS, Axis("users clipped", "%", ends=(0.0, 100.0))),
            [replace(line, y=[_percent(share) for share in line.y]) for line in shares],
            simulation_only=True,
        ),
        chart(
            "signal",
            "Signal to noise, by layer",
            "Norm of the sum of clipped updates over that of the noise on it: below 1 a single "
            f"round moves the model more by noise than by users. {_NO_GUARANTEE}",
            (ROUNDS, Axis("signal to noise", "no unit", log=True)),
            ratios,
            simulation_only=True,
        ),
    ]


def _by_name(
    seen: Sequence[SimulationOnlyRound], figures: Callable[[SimulationOnlyRound], Figures]
) -> list[Series]:
    """A dashed line for each name."""
    names = dict.fromkeys(name for each in seen for name in figures(each))
    rounds = [each.number for each in seen]
    return [
        Series(name, rounds, [figures(each).get(name) for each in seen], dashed=True)
        for name in names
    ]


def _name(chart_name: str, of: str) -> str:
    return f"{chart_name}-{of}" if of else chart_name


def _title(title: str, of: str) -> str:
    return f"{of}: {title[0].lower()}{title[1:]}" if of else title


def _metric_chart(record: RunRecord, number: int, name: str) -> Chart:
    rounds = [each for each in record.rounds if name in each.metrics]
    values = [each.metrics[name] for each in rounds]
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


def _line(
    name: str,
    rounds: Sequence[RoundRecord],
    values: Sequence[float | None],
    colour: int | None = None,
) -> Series:
    return Series(name, [each.number for each in rounds], values, colour=colour)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share
