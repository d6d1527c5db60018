"""Charts of what was clipped, of one run or of the same run under several seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fedpriv.report.page.charts import Chart, chart
from fedpriv.report.page.record import RunRecord
from fedpriv.report.series import ROUNDS, Axis, Series

# Figures by round, of one run.
_ByRound = Iterable[tuple[int, Mapping[str, float | None]]]

_NO_GUARANTEE = (
    "The dashed lines were computed from users' data without noise: they exist in simulations "
    "only, and must not be published of real users."
)
_SEEDS = "Lines are means over {count} seeds, bands reach from the least seed to the largest. "


def norms_charts(records: Sequence[RunRecord], of: str = "") -> list[Chart]:
    """Clipping norms by round, and, where all runs recorded them, what they clipped.

    Args:
        records: the run, or the runs of an arm under each seed; at least one.
        of: identifies them, if the page has several.
    """
    groups = _lines(
        [(each.number, each.clipping_norms) for each in record.rounds] for record in records
    )
    released = [
        replace(line, name=f"clipping norm of {line.name}", colour=number)
        for number, line in enumerate(groups)
    ]
    caption = (
        "A user's part of a vector group is scaled down to the group's clipping norm where it is "
        f"longer. Clipping norms were released with the model. {_of_seeds(records)}"
    )
    if not all(record.simulation_only for record in records):
        axes = (ROUNDS, Axis("clipping norm", "scaled L2", from_zero=True))
        title = _title("Clipping norms by round", of)
        return [chart(_name("norms", of), title, caption, axes, released)]
    colours = {line.name: number for number, line in enumerate(groups)}
    of_groups = _dashed(
        [(each.number, each.simulation_only_group_norms) for each in record.simulation_only]
        for record in records
    )
    true = [
        replace(line, name=f"mean update norm of {line.name}", colour=colours[line.name])
        for line in of_groups
        if line.name in colours
    ]
    return [
        chart(
            _name("norms", of),
            _title("Update norms against clipping norms, by vector group", of),
            f"{caption}{_NO_GUARANTEE}",
            (ROUNDS, Axis("norm of a user's part", "scaled L2", log=True)),
            [*released, *true],
            simulation_only=True,
        ),
        _layers_chart(records, of),
    ]


def _layers_chart(records: Sequence[RunRecord], of: str) -> Chart:
    layers = _dashed(
        [(each.number, each.simulation_only_update_norms) for each in record.simulation_only]
        for record in records
    )
    return chart(
        _name("layers", of),
        _title("Update norms by layer", of),
        f"Mean over the users of a round, before clipping. {_of_seeds(records)}{_NO_GUARANTEE}",
        (ROUNDS, Axis("norm of a user's update", "L2", log=True)),
        layers,
        simulation_only=True,
    )


def _of_seeds(records: Sequence[RunRecord]) -> str:
    """What lines and bands are, if there are several seeds."""
    return _SEEDS.format(count=len(records)) if len(records) > 1 else ""


def clipped_charts(record: RunRecord) -> list[Chart]:
    """Share of users clipped and signal to noise by round, where they were recorded."""
    seen = record.simulation_only
    if not seen:
        return []
    shares = _dashed([[(each.number, each.simulation_only_clipped) for each in seen]])
    ratios = _dashed([[(each.number, each.simulation_only_signal_to_noise) for each in seen]])
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


def _lines(runs: Iterable[_ByRound]) -> list[Series]:
    """A line for each name, by round: the mean over runs, between the least and the largest.

    Where no run has a number the line has a gap. One run has no band.
    """
    found = [list(run) for run in runs]
    values: dict[str, dict[int, list[float]]] = {}
    for run in found:
        for number, figures in run:
            for name, value in figures.items():
                known = values.setdefault(name, {}).setdefault(number, [])
                known += [value] if value is not None and math.isfinite(value) else []
    return [_line(name, by_round, band=len(found) > 1) for name, by_round in values.items()]


def _line(name: str, by_round: Mapping[int, Sequence[float]], *, band: bool) -> Series:
    rounds = sorted(by_round)
    known = [by_round[number] for number in rounds]
    return Series(
        name,
        rounds,
        [sum(each) / len(each) if each else None for each in known],
        [min(each, default=None) for each in known] if band else (),
        [max(each, default=None) for each in known] if band else (),
    )


def _dashed(runs: Iterable[_ByRound]) -> list[Series]:
    return [replace(line, dashed=True) for line in _lines(runs)]


def _name(chart_name: str, of: str) -> str:
    return f"{chart_name}-{of}" if of else chart_name


def _title(title: str, of: str) -> str:
    return f"{of}: {title[0].lower()}{title[1:]}" if of else title


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share
