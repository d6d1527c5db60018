"""What a study found: charts and tables of its arms, printed, drawn, and for other programs."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from fedpriv.accounting.accountants import format_epsilon
from fedpriv.errors import DataError
from fedpriv.report.charts import Axis, Chart, Series, declared, save, spans_decades, texts
from fedpriv.report.tables import Column, Table, fitted, json_text, print_table, shortened
from fedpriv.studies import ArmSummary, Interval, ReadStudy, Study, Target
from fedpriv.studies.results import ACCURACY, Measure, best_of, measure_of, verdict
from fedpriv.studies.study import Line, NumericAxis, numeric_axes
from fedpriv.support.disk import writing
from fedpriv.training.rounds import RoundResult

CAVEAT: str = texts()["study"]["caveat"]
_NAMES = {
    "data.options.users": ("users enrolled", "count"),
    "rounds": ("rounds", "count"),
    "clipping.norm": ("clipping norm", "scaled L2"),
    "privacy.sampling_probability": ("sampling probability", ""),
    "local.epochs": ("local epochs", "count"),
    "local.learning_rate": ("local learning rate", ""),
}
_WIDTH = 0.6  # of the distance between two ε that points of several arms take
_NONE, _BEST = "–", "★"
_Of = Callable[[ArmSummary], Interval | None]
_Labelled = tuple[str, Line, Target]  # a label, what it names, and where


def measured(
    measure: Measure, rounds: Sequence[RoundResult]
) -> tuple[list[RoundResult], list[float]]:
    """The rounds after which a measure was taken, and its values."""
    found = [each for each in rounds if getattr(each, measure.name) is not None]
    return found, [measure.scale * getattr(each, measure.name) for each in found]


def line_of(
    name: str, x: Sequence[float], found: Sequence[Interval | None], *, bars: bool = False
) -> Series:
    """Means over seeds with their intervals, where more than one seed gives one."""
    low, high, means = (
        [getattr(each, end, None) for each in found] for end in ("low", "high", "mean")
    )
    known = any(end is not None for end in low)
    return Series(name, x, means, low if known else (), high if known else (), bars=bars)


def front_chart(study: Study, arms: Sequence[ArmSummary]) -> Chart:
    """Accuracy in the end against ε spent, a line for each arm with all its targets."""
    measure = measure_of(arms)
    series = []
    for name in _names(arms):
        own = [arm for arm in arms if arm.arm == name]
        x = [arm.epsilon for arm in own]
        series.append(line_of(name, x, [*map(measure.end, own)], bars=True))
    spent = [arm.epsilon for arm in arms]
    axis = _axis(f"{study.unit}-level ε at δ = {arms[0].target.delta}", "", spent)
    return measure_chart("study-front", measure, series, "front", axis)


def arms_chart(study: Study, arms: Sequence[ArmSummary]) -> Chart:
    """Accuracy in the end, arms beside each other at each target."""
    measure = measure_of(arms)
    series = _beside(_names(arms), arms, measure.end)
    return measure_chart("arms", measure, series, x=_beside_axis(study, arms))


def differences_chart(study: Study, arms: Sequence[ArmSummary]) -> Chart | None:
    """Paired differences from the baseline for each arm and target; None if there are none."""
    measure = measure_of(arms)
    found = [arm for arm in arms if measure.difference(arm) is not None]
    if not found:
        return None
    names, x = _names(arms), _beside_axis(study, found)
    series = _beside(names, found, measure.difference)
    # In the place of the baseline, so that arms keep the colour and marker of other charts.
    zero, ends = f"{study.baseline}, the baseline", x.ends or ()
    series[names.index(study.baseline)] = Series(zero, ends, [0.0, 0.0], dashed=True, marked=False)
    y = Axis(f"{measure.name} minus baseline's", measure.unit)
    return measure_chart("differences", measure, series, x=x, y=y, baseline=study.baseline)


def varied_charts(study: Study, arms: Sequence[ArmSummary]) -> list[Chart]:
    """Accuracy in the end against each number that the study varies, at each target.

    A line is a combination of all else that arms vary, or a target if there is just one.
    """
    charts, targets = [], _targets(arms)
    for count, axis in enumerate(numeric_axes(study)):
        name = f"along-{count}"
        if len(axis.lines) == 1:
            lines = [(f"ε = {target.epsilon:g}", axis.lines[0], target) for target in targets]
            charts.append(_varied_chart(axis, lines, arms, name, ""))
            continue
        for index, target in enumerate(targets):
            lines = [(line.name, line, target) for line in axis.lines]
            at = f" at ε = {target.epsilon:g}"
            charts.append(_varied_chart(axis, lines, arms, f"{name}-{index}", at))
    return charts


def _varied_chart(
    axis: NumericAxis, lines: Sequence[_Labelled], arms: Sequence[ArmSummary], name: str, at: str
) -> Chart:
    measure, series = measure_of(arms), []
    found = {(arm.arm, arm.target): arm for arm in arms}
    for label, line, target in lines:
        points = {x: found[arm, target] for x, arm in line.arms if (arm, target) in found}
        series.append(line_of(label, [*points], [*map(measure.end, points.values())], bars=True))
    title, unit = _NAMES.get(axis.key, (axis.key, "as in the study's file"))
    follows = f"With it change: {', '.join(axis.follows)}. " if axis.follows else ""
    x = _axis(title, unit, [x for each in series for x in each.x])
    return measure_chart("varied", measure, series, name, x, number=title, at=at, follows=follows)


def measure_chart(
    kind: str,
    measure: Measure,
    series: Sequence[Series],
    name: str = "",
    x: Axis | None = None,
    y: Axis | None = None,
    **words: object,
) -> Chart:
    """A chart of a measure against something."""
    words |= {"measure": measure.name, "Measure": measure.name.capitalize()}
    words |= {"better": measure.better, "Better": measure.better.capitalize()}
    words["bars"] = texts()["study"]["bars"]
    if y is None and measure is ACCURACY:
        series = [*map(_cut, series)]
    return declared(kind, series, words, name, x, y or declared(measure.name, []).y)


def _cut(series: Series) -> Series:
    """Without what an interval has outside of 0 to 100%."""
    low = [end and max(end, 0.0) for end in series.low]
    return replace(series, low=low, high=[end and min(end, 100.0) for end in series.high])


def write_study_charts(read: ReadStudy, folder: Path) -> list[Path]:
    """Write front or arms, differences and along-… as PNG and SVG, and return the files."""
    if not read.arms:
        raise DataError(f"no run of the study in {read.folder} is finished; run it first")
    end = front_chart if len(_targets(read.arms)) > 1 else arms_chart
    compared = differences_chart(read.study, read.arms)
    charts = [end(read.study, read.arms), *([compared] if compared else [])]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        charts += varied_charts(read.study, read.arms)
        return [file for chart in charts for file in save(chart, folder)]


def results_table(read: ReadStudy, target: Target) -> Table:
    """How arms compare at a target."""
    study, arms = read.study, [arm for arm in read.arms if arm.target == target]
    measure, seeds = measure_of(arms), len(study.seeds)
    best = best_of(arms, measure) if len(arms) > 1 else None
    heading = "accuracy\n(%)" if measure is ACCURACY else "loss"
    levels = [Column(f"rounds\nto {100 * level:g}%", spare=2) for level in study.accuracies]
    spent = [Column("noise\nz", spare=3), Column("ε\nspent", spare=1)]
    numbers = [Column(heading), Column("difference"), *levels, *spent]
    rows = []
    for arm in arms:
        some = "" if len(arm.seeds) == seeds else f" ({len(arm.seeds)} of {seeds} seeds)"
        gap = measure.difference(arm)
        against = "baseline" if arm.arm == study.baseline else _NONE
        against = against if gap is None else measure.text(gap, "+")
        reached = [_rounds(arm, level) for level in study.accuracies]
        cost = (f"{arm.noise_multiplier:.4g}", format_epsilon(arm.epsilon))
        mark = f" {_BEST}" if arm.arm == best else ""
        name = f"{arm.arm}{some}{mark}"
        end = measure.end(arm)
        shown = _NONE if end is None else measure.text(end)
        rows.append((name, shown, against, *reached, *cost))
    means = f"means over {seeds} seeds ± Student's 95% interval"
    if seeds == 1:
        means = "one seed, so no interval"
    caption = (
        f"At ε = {target.epsilon:g}, δ = {target.delta}: {means}, differences from "
        f"{study.baseline} paired by seed; {_BEST} marks the {measure.best} mean"
    )
    return Table(caption, [Column("arm", "text"), *numbers], rows)


def figures_tables(read: ReadStudy, target: Target) -> list[Table]:
    """The task's own figures of arms at a target, and figures by held-out user; none, no table."""
    arms = [arm for arm in read.arms if arm.target == target and arm.figures]
    rows = [
        (arm.arm, name, _digits(found.mean), _digits(found.half_width))
        for name in dict.fromkeys(name for arm in arms for name in arm.figures)
        for arm in arms
        if (found := arm.figures.get(name)) is not None
    ]
    caption = (
        f"At ε = {target.epsilon:g}, on held-out rows, which no guarantee covers: means over seeds "
        "± Student's 95% interval"
    )
    columns = [Column("arm", "text"), Column("figure", "text"), Column("mean"), Column("±")]
    return [Table(caption, columns, rows)] if rows else []


def clipping_table(read: ReadStudy, target: Target) -> Table:
    """What arms clipped at a target, and how the rest stands against the noise."""
    texts = [Column(name, "text") for name in ("arm", "updates clipped\n(%)", "layer")]
    names = {"mean update\nnorm (L2)": 2, "signal\nto noise": 1, "updates/s": 3}
    numbers = [Column(name, spare=spare) for name, spare in names.items()]
    rows = []
    for arm in (arm for arm in read.arms if arm.target == target):
        clipped = arm.simulation_only_clipped.items()
        shares = [f"{name}: {100 * share:.0f}" for name, share in clipped]
        of_layers = []
        for layer, norm in arm.simulation_only_update_norms.items():
            ratio = arm.simulation_only_signal_to_noise.get(layer)
            of_layers.append((layer, f"{norm:.3g}", _NONE if ratio is None else f"{ratio:.3g}"))
        speed = f"{arm.simulation_only_users_per_second:,.0f}"
        # Groups beside layers, each in a line of its own.
        lines = itertools.zip_longest(shares, of_layers)
        for number, (share, of_layer) in enumerate(lines):
            first, last = ("", "") if number else (arm.arm, speed)
            rows.append((first, share or "", *(of_layer or ("", "", "")), last))
    caption = (
        f"At ε = {target.epsilon:g}: means over rounds and seeds, from users' data without "
        "noise; they must not be published of real users"
    )
    return Table(caption, [*texts, *numbers], rows, simulation_only=True)


def print_study(read: ReadStudy, console: Console) -> None:
    """Print the verdict first, then tables for each target."""
    for sentence in verdict(read.study, read.arms):
        console.print(sentence, style="bold", highlight=False, markup=False)
    for target in _targets(read.arms):
        tables = results_table(read, target), *figures_tables(read, target)
        for table in (*tables, clipping_table(read, target)):
            shown, left_out = fitted(table, console.width)
            print_table(shown, console)
            if left_out:
                names, width = ", ".join(left_out), console.width
                told = f"Left out of {width} columns, and in results.json: {names}."
                console.print(told, highlight=False, markup=False)
    console.print(CAVEAT, highlight=False)
    if read.missing:
        console.print(f"{read.missing} runs are not finished.", style="yellow")


def results_json(read: ReadStudy) -> str:
    """One JSON object: the study's name, seeds, baseline and verdict, and a row for each arm.

    Means have the ends of their 95% intervals beside them; null where one seed has none. Numbers
    that are not finite are the strings "Infinity" and "NaN".
    """
    study = read.study
    content = {
        "name": study.name,
        "baseline": study.baseline,
        "seeds": study.seeds,
        "missing_runs": read.missing,
        "verdict": verdict(study, read.arms),
        "arms": [_arm_row(arm) for arm in read.arms],
    }
    return json_text(content)


def _arm_row(arm: ArmSummary) -> dict[str, object]:
    row = asdict(arm)
    for name in ("accuracy", "loss", "accuracy_difference", "loss_difference"):
        found: Interval | None = getattr(arm, name)
        row[name] = {end: found and getattr(found, end) for end in ("mean", "low", "high")}
    row["figures"] = {
        name: {end: getattr(found, end) for end in ("mean", "low", "high")}
        for name, found in arm.figures.items()
    }
    row["rounds_to"] = {f"{level:g}": asdict(found) for level, found in arm.rounds_to.items()}
    row["seeds"] = len(arm.seeds)
    return row


def _names(arms: Sequence[ArmSummary]) -> list[str]:
    return list(dict.fromkeys(arm.arm for arm in arms))


def _targets(arms: Sequence[ArmSummary]) -> list[Target]:
    return list(dict.fromkeys(arm.target for arm in arms))


def _beside(names: Sequence[str], arms: Sequence[ArmSummary], of: _Of) -> list[Series]:
    """Points of arms beside each other at each target, as `_beside_axis` marks them."""
    series, targets, shown = [], _targets(arms), _names(arms)
    for name in names:
        own = [arm for arm in arms if arm.arm == name]
        x = [float(targets.index(arm.target)) for arm in own]
        if own and len(targets) > 1:
            shift = _WIDTH * ((shown.index(name) + 0.5) / len(shown) - 0.5)
            x = [place + shift for place in x]
        elif own:
            x = [float(shown.index(name))]
        line = line_of(name, x, [*map(of, own)], bars=True)
        series.append(replace(line, joined=False))
    return series


def _beside_axis(study: Study, arms: Sequence[ArmSummary]) -> Axis:
    """Targets in order, or the arms if there is just one."""
    targets, level = _targets(arms), f"{study.unit}-level ε"
    marked = [f"{target.epsilon:g}" for target in targets]
    title = f"{level} at δ = {targets[0].delta}"
    if len(targets) == 1:
        title = f"arm, at {level} = {marked[0]} and δ = {targets[0].delta}"
        marked = [*shortened(_names(arms), 16).values()]
    ticks = tuple((float(place), text) for place, text in enumerate(marked))
    return Axis(title, ends=(-0.5, len(marked) - 0.5), ticks=ticks)


def _axis(name: str, unit: str, values: Sequence[float]) -> Axis:
    """An axis of these values; on a log scale each of them is marked, if they are few."""
    log = spans_decades(values)
    marked = sorted({float(f"{value:.3g}") for value in values}) if log else []
    ticks = tuple((value, f"{value:g}") for value in marked) if len(marked) <= 8 else ()
    return Axis(name, unit, log=log, ticks=ticks)


def _digits(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"


def _rounds(arm: ArmSummary, level: float) -> str:
    """When an arm reached an accuracy, and how many of its seeds did, if some did not."""
    found = arm.rounds_to[level]
    median = "never" if found.median is None else f"{found.median:g}"
    some = found.reached not in {0, len(arm.seeds)}
    return f"{median} ({found.reached}/{len(arm.seeds)})" if some else median
