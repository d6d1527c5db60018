"""Results of a study: its page, and charts and tables for the terminal, for files and as JSON."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from rich.console import Console

from fedpriv.errors import DataError
from fedpriv.report.charts import (
    Axis,
    Card,
    Chart,
    Page,
    PageSection,
    Series,
    declared,
    save_all,
    spans_decades,
    texts,
)
from fedpriv.report.guarantee import about_projection, assumptions, large_delta, loss_of, users_of
from fedpriv.report.records import RunRecord
from fedpriv.report.run_page import measured, norms_charts, software_section
from fedpriv.report.tables import Column, Table, json_text, plural, print_table
from fedpriv.studies import ArmSummary, Cell, Interval, ReadStudy, Study, Target
from fedpriv.studies.results import ACCURACY, STUDY, Measure, best_of, measure_of, verdict
from fedpriv.studies.study import Line, NumericAxis, numeric_axes
from fedpriv.support.checks import epsilon_up, text_down

CAVEAT: str = texts()["study"]["caveat"]
_NAMES = {
    "data.options.users": ("users enrolled", "count"),
    "rounds": ("rounds", "count"),
    "clipping.norm": ("clipping norm", "scaled L2"),
    "privacy.sampling_probability": ("sampling probability", ""),
    "local.epochs": ("local epochs", "count"),
    "local.learning_rate": ("local learning rate", ""),
}
_WIDTH = 0.6  # share of the distance between two ε that the points of arms take
_NONE, _BEST = "–", "★"
_Of = Callable[[ArmSummary], Interval | None]
_LabelledLine = tuple[str, Line, Target]


def line_of(
    name: str, x: Sequence[float], intervals: Sequence[Interval | None], *, bars: bool = False
) -> Series:
    """Return a line of means over seeds, with intervals if there are several seeds."""
    low, high, means = (
        [getattr(interval, end, None) for interval in intervals] for end in ("low", "high", "mean")
    )
    if all(end is None for end in low):
        low = high = []
    return Series(name, x, means, low, high, bars=bars)


def front_chart(study: Study, arms: Sequence[ArmSummary]) -> Chart:
    """Return a chart of final accuracy against ε spent, with a line for each arm."""
    measure = measure_of(arms)
    series = []
    for name in _names(arms):
        summaries = [arm for arm in arms if arm.arm == name]
        x = [arm.epsilon for arm in summaries]
        series.append(line_of(name, x, [*map(measure.end, summaries)], bars=True))
    epsilons = [arm.epsilon for arm in arms]
    axis = _axis(f"{study.level}-level ε at δ = {arms[0].target.delta}", "", epsilons)
    return measure_chart("study-front", measure, series, "front", axis)


def arms_chart(study: Study, arms: Sequence[ArmSummary]) -> Chart:
    """Return a chart of final accuracy, with arms side by side at each target."""
    measure = measure_of(arms)
    series = _side_by_side(_names(arms), arms, measure.end)
    return measure_chart("arms", measure, series, x=_arms_axis(study, arms))


def differences_charts(study: Study, arms: Sequence[ArmSummary]) -> list[Chart]:
    """Return a chart of paired differences from the baseline, if there are any."""
    measure = measure_of(arms)
    summaries = [arm for arm in arms if measure.difference(arm) is not None]
    if not summaries:
        return []
    names, x = _names(arms), _arms_axis(study, summaries)
    series = _side_by_side(names, summaries, measure.difference)
    # The zero line takes the baseline's place, so that arms keep their colours and markers.
    zero, ends = f"{study.baseline}, the baseline", x.ends or ()
    series[names.index(study.baseline)] = Series(zero, ends, [0.0, 0.0], dashed=True, marked=False)
    y = Axis(f"{measure.name} minus baseline's", measure.unit)
    return [measure_chart("differences", measure, series, x=x, y=y, baseline=study.baseline)]


def varied_charts(study: Study, arms: Sequence[ArmSummary]) -> list[Chart]:
    """Return charts of final accuracy against each number that the study varies.

    There is a chart for each target, with a line for each combination of the other settings that
    arms vary; or, if there is only one combination, a single chart with a line for each target.
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
    axis: NumericAxis,
    lines: Sequence[_LabelledLine],
    arms: Sequence[ArmSummary],
    name: str,
    at: str,
) -> Chart:
    measure, series = measure_of(arms), []
    summaries = {(arm.arm, arm.target): arm for arm in arms}
    for label, line, target in lines:
        points = {x: summaries[arm, target] for x, arm in line.arms if (arm, target) in summaries}
        series.append(line_of(label, [*points], [*map(measure.end, points.values())], bars=True))
    title, unit = _NAMES.get(axis.key, (axis.key, "as in the study's file"))
    follows = f"With it change: {', '.join(axis.follows)}. " if axis.follows else ""
    x = _axis(title, unit, [x for line in series for x in line.x])
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
    """Return a chart of a kind in `texts` for a measure, with `words` filled in."""
    words |= {"measure": measure.name, "Measure": measure.name.capitalize()}
    words |= {"better": measure.better, "Better": measure.better.capitalize()}
    words["bars"] = texts()["study"]["bars"]
    if y is None and measure is ACCURACY:
        series = [*map(_within_percentages, series)]
    return declared(kind, series, words, name, x, y or declared(measure.name, []).y)


def _within_percentages(series: Series) -> Series:
    low = [end and max(end, 0.0) for end in series.low]
    return replace(series, low=low, high=[end and min(end, 100.0) for end in series.high])


def write_study_charts(results: ReadStudy, folder: Path) -> list[Path]:
    """Write front or arms, differences and along-… as PNG and SVG, and return the files.

    DataError if no run is finished.
    """
    if not results.arms:
        raise DataError(f"no run of the study in {results.folder} is finished; run it first")
    first = front_chart if len(_targets(results.arms)) > 1 else arms_chart
    study, arms = results.study, results.arms
    charts = [first(study, arms), *differences_charts(study, arms), *varied_charts(study, arms)]
    return save_all(charts, folder)


def results_table(results: ReadStudy, target: Target) -> Table:
    """Return a table that compares the arms at a target."""
    study, arms = results.study, [arm for arm in results.arms if arm.target == target]
    measure, seeds = measure_of(arms), len(study.seeds)
    best = best_of(arms, measure) if len(arms) > 1 else None
    heading = "accuracy\n(%)" if measure is ACCURACY else "loss"
    levels = [Column(f"rounds\nto {100 * level:g}%") for level in study.accuracies]
    costs = [Column("noise\nz"), Column("ε\nspent")]
    columns = [Column("arm", "text"), Column(heading), Column("difference"), *levels, *costs]
    rows = []
    for arm in arms:
        count = "" if arm.as_if is None else f", as if N = {arm.as_if:,}"
        count += "" if len(arm.seeds) == seeds else f" ({len(arm.seeds)} of {seeds} seeds)"
        gap, end = measure.difference(arm), measure.end(arm)
        difference = "baseline" if arm.arm == study.baseline else _NONE
        if gap is not None:
            difference = measure.text(gap, "+")
        mark = f" {_BEST}" if arm.arm == best else ""
        mean = _NONE if end is None else measure.text(end)
        rounds = [_rounds(arm, level) for level in study.accuracies]
        cost = (text_down(arm.noise_multiplier), epsilon_up(arm.epsilon))
        rows.append((f"{arm.arm}{count}{mark}", mean, difference, *rounds, *cost))
    means = f"means over {seeds} seeds ± Student's 95% interval"
    if seeds == 1:
        means = "one seed, so no interval"
    caption = (
        f"At ε = {target.epsilon:g}, δ = {target.delta}: {means}, differences from "
        f"{study.baseline} paired by seed; {_BEST} marks the {measure.best} mean"
    )
    return Table(caption, columns, rows)


def results_tables(results: ReadStudy, target: Target) -> list[Table]:
    """Return the `results_table`, and a table of the arms' figures, if any."""
    tables = [results_table(results, target)]
    arms = [arm for arm in results.arms if arm.target == target and arm.figures]
    rows = [
        (arm.arm, name, _digits(interval.mean), _digits(interval.half_width))
        for name in dict.fromkeys(name for arm in arms for name in arm.figures)
        for arm in arms
        if (interval := arm.figures.get(name)) is not None
    ]
    caption = (
        f"At ε = {target.epsilon:g}, on held-out rows, which no guarantee covers: means over seeds "
        "± Student's 95% interval"
    )
    columns = [Column("arm", "text"), Column("figure", "text"), Column("mean"), Column("±")]
    return [*tables, Table(caption, columns, rows)] if rows else tables


def clipping_table(results: ReadStudy, target: Target) -> Table:
    """Return a table of the clipping of arms at a target, and of their signal to noise."""
    texts = [Column(name, "text") for name in ("arm", "updates clipped\n(%)", "layer")]
    numbers = [*map(Column, ("mean update\nnorm (L2)", "signal\nto noise", "updates/s"))]
    rows = []
    for arm in (arm for arm in results.arms if arm.target == target):
        groups = [f"{n}: {100 * share:.0f}" for n, share in arm.simulation_only_clipped.items()]
        layers = []
        for layer, norm in arm.simulation_only_update_norms.items():
            ratio = arm.simulation_only_signal_to_noise.get(layer)
            layers.append((layer, f"{norm:.3g}", _NONE if ratio is None else f"{ratio:.3g}"))
        speed = f"{arm.simulation_only_users_per_second:,.0f}"
        # A row holds one group and one layer, which are unrelated.
        for number, (group, cells) in enumerate(itertools.zip_longest(groups, layers)):
            first, last = ("", "") if number else (arm.arm, speed)
            rows.append((first, group or "", *(cells or ("", "", "")), last))
    caption = (
        f"At ε = {target.epsilon:g}: means over rounds and seeds, from users' data without "
        "noise; they must not be published for real users"
    )
    return Table(caption, [*texts, *numbers], rows, simulation_only=True)


def print_study(results: ReadStudy, console: Console) -> None:
    """Print the verdict, and then tables for each target."""
    for sentence in verdict(results.study, results.arms):
        console.print(sentence, style="bold")
    for target in _targets(results.arms):
        for table in (*results_tables(results, target), clipping_table(results, target)):
            print_table(table, console)
    console.print(CAVEAT)
    if results.missing:
        console.print(f"{results.missing} runs are not finished.", style="yellow")


def results_json(results: ReadStudy) -> str:
    """Return a JSON object: the study's name, seeds, baseline and verdict, and a row for each arm.

    Means come with the ends of their 95% intervals, which are null for a single seed. Numbers that
    are not finite are the strings "Infinity" and "NaN".
    """
    study = results.study
    content = {
        "name": study.name,
        "baseline": study.baseline,
        "seeds": study.seeds,
        "missing_runs": results.missing,
        "verdict": verdict(study, results.arms),
        "arms": [_arm_row(arm) for arm in results.arms],
    }
    return json_text(content)


def _arm_row(arm: ArmSummary) -> dict[str, object]:
    row = asdict(arm)
    for name in ("accuracy", "loss", "accuracy_difference", "loss_difference"):
        row[name] = _ends(getattr(arm, name))
    row["figures"] = {name: _ends(interval) for name, interval in arm.figures.items()}
    row["rounds_to"] = {f"{level:g}": asdict(rounds) for level, rounds in arm.rounds_to.items()}
    row["seeds"] = len(arm.seeds)
    return row


def _ends(interval: Interval | None) -> dict[str, float | None]:
    return {name: getattr(interval, name, None) for name in ("mean", "low", "high")}


def _names(arms: Sequence[ArmSummary]) -> list[str]:
    return list(dict.fromkeys(arm.arm for arm in arms))


def _targets(arms: Sequence[ArmSummary]) -> list[Target]:
    return list(dict.fromkeys(arm.target for arm in arms))


def _side_by_side(names: Sequence[str], arms: Sequence[ArmSummary], of: _Of) -> list[Series]:
    """Return points of arms side by side at each target, on the axis of `_arms_axis`."""
    series, targets, places = [], _targets(arms), _names(arms)
    for name in names:
        summaries = [arm for arm in arms if arm.arm == name]
        x = [float(targets.index(arm.target)) for arm in summaries]
        if summaries and len(targets) > 1:
            shift = _WIDTH * ((places.index(name) + 0.5) / len(places) - 0.5)
            x = [place + shift for place in x]
        elif summaries:
            x = [float(places.index(name))]
        line = line_of(name, x, [*map(of, summaries)], bars=True)
        series.append(replace(line, joined=False))
    return series


def _arms_axis(study: Study, arms: Sequence[ArmSummary]) -> Axis:
    """Return an axis of the targets, or of the arms if there is only one target."""
    targets, level = _targets(arms), f"{study.level}-level ε"
    labels = [f"{target.epsilon:g}" for target in targets]
    title = f"{level} at δ = {targets[0].delta}"
    if len(targets) == 1:
        title = f"arm, at {level} = {labels[0]} and δ = {targets[0].delta}"
        labels = _names(arms)
    ticks = tuple((float(place), label) for place, label in enumerate(labels))
    return Axis(title, ends=(-0.5, len(labels) - 0.5), ticks=ticks)


def _axis(name: str, unit: str, values: Sequence[float]) -> Axis:
    """Return an axis for values; a log scale has a tick at each of a few values."""
    log = spans_decades(values)
    marks = sorted({float(f"{value:.3g}") for value in values}) if log else []
    ticks = tuple((value, f"{value:g}") for value in marks) if len(marks) <= 8 else ()
    return Axis(name, unit, log=log, ticks=ticks)


def _digits(value: float | None) -> str:
    return _NONE if value is None else f"{value:.4g}"


def _rounds(arm: ArmSummary, level: float) -> str:
    """Return the median number of rounds in which an arm reached an accuracy, as text.

    If only some seeds reached the accuracy, it includes their number.
    """
    rounds, seeds = arm.rounds_to[level], len(arm.seeds)
    median = "never" if rounds.median is None else f"{rounds.median:g}"
    return median if rounds.reached in {0, seeds} else f"{median} ({rounds.reached}/{seeds})"


@dataclass(frozen=True)
class _Arm:
    """An arm at a target, and its finished runs in the order of the summary's seeds."""

    summary: ArmSummary
    records: tuple[RunRecord, ...]


def page_of_study(results: ReadStudy, records: Mapping[Cell, RunRecord]) -> Page:
    """Return the page of a study, from its results and the verified record of each finished run.

    DataError if no run is finished, or a result and a ledger differ.
    """
    arms = _arms(results, records)
    if not arms:
        raise DataError(f"no run of the study in {results.folder} is finished; run it first")
    targets = [target for target in results.study.targets if _at(arms, target)]
    differences = differences_charts(results.study, results.arms)
    text = (results.folder / STUDY).read_text(encoding="utf-8")
    record = arms[0].records[0]
    loss = loss_of(record)
    by_round = [_by_round_chart(_at(arms, t), t, f"accuracy-{n}") for n, t in enumerate(targets)]
    if len(targets) > 1:
        front = front_chart(results.study, results.arms)
    else:
        front = _spent_chart(results.study, arms, targets[0])
    sections = [
        _summary(results, arms, targets, front),
        PageSection("differences", "Against the baseline", charts=differences),
        PageSection("accuracy", "How good the models are", charts=by_round),
        PageSection("varied", "What was varied", charts=varied_charts(results.study, results.arms)),
        *([assumptions(loss, record.ledger)] if loss else []),
        _clipping(results, arms, targets),
        PageSection("ledger", "Ledger verification", tables=[_ledgers_table(arms)]),
        PageSection("plan", "Resolved study", [texts()["plan"]["study"]], listing=text),
        software_section(),
    ]
    return Page(results.study.name, f"A study on {_who(arms)}, by fedpriv", sections)


def _arms(results: ReadStudy, records: Mapping[Cell, RunRecord]) -> list[_Arm]:
    arms = []
    for summary in results.arms:
        runs = [
            (result, records[cell])
            for cell, result in results.finished
            if (cell.arm.name, cell.target) == (summary.arm, summary.target)
        ]
        for result, record in runs:
            loss = loss_of(record, projected=True)
            if loss is None or loss.epsilon > result.epsilon * (1.0 + 1e-9):
                raise DataError(
                    f"the result of {record.folder} says ε = {result.epsilon}, and its ledger "
                    f"holds {loss.epsilon if loss else 0.0}; run the study again"
                )
        arms.append(_Arm(summary, tuple(record for _, record in runs)))
    return arms


def _at(arms: Sequence[_Arm], target: Target) -> list[_Arm]:
    return [arm for arm in arms if arm.summary.target == target]


def _who(arms: Sequence[_Arm]) -> str:
    names = {record.ledger.population for arm in arms for record in arm.records}
    return min(names) if len(names) == 1 else f"{len(names)} populations"


def _summary(
    results: ReadStudy, arms: Sequence[_Arm], targets: Sequence[Target], front: Chart
) -> PageSection:
    study = results.study
    records = [record for arm in arms for record in arm.records]
    users = {users_of(record.ledger) for record in records}
    missing = [f"{results.missing} runs of the study are not finished."] if results.missing else []
    breaches = [large_delta(record.delta, record.ledger) for record in records]
    breaches += [
        [f"Arm {arm.summary.arm}: {text}" for text in about_projection(arm.records[0].ledger)]
        for arm in arms
    ]
    answers = verdict(study, results.arms)
    epsilons = ", ".join(f"{target.epsilon:g}" for target in targets)
    names = dict.fromkeys(arm.summary.arm for arm in arms)
    counts = " to ".join(f"{n:,}" for n in dict.fromkeys((min(users), max(users))))
    return PageSection(
        "summary",
        "Summary",
        [*answers, CAVEAT],
        answers=len(answers),
        first=[front],
        warnings=list(dict.fromkeys([*missing, *itertools.chain.from_iterable(breaches)])),
        cards=[
            Card("arms", str(len(names)), f"against {study.baseline}"),
            Card(f"{study.level}-level ε of each run", epsilons, f"at δ = {targets[0].delta}"),
            Card("seeds", str(len(study.seeds)), "the same in each arm"),
            Card(plural(study.unit), counts, _who(arms)),
        ],
        tables=[t for target in targets for t in results_tables(results, target)],
    )


def _by_round_chart(arms: Sequence[_Arm], target: Target, name: str) -> Chart:
    measure = measure_of([arm.summary for arm in arms])
    series = [line_by_round(arm.summary.arm, arm.records, measure) for arm in arms]
    return measure_chart("study-rounds", measure, series, name, epsilon=target.epsilon)


def _spent_chart(study: Study, arms: Sequence[_Arm], target: Target) -> Chart:
    measure = measure_of([arm.summary for arm in arms])
    series = [line_by_round(arm.summary.arm, arm.records, measure, spent) for arm in arms]
    return measure_chart(
        "study-spent", measure, series, "front", unit=study.level, delta=target.delta
    )


def spent(record: RunRecord) -> list[float]:
    """Return the ε of each round."""
    return [result.epsilon for result in record.rounds]


def line_by_round(
    name: str,
    runs: Sequence[RunRecord],
    measure: Measure,
    x: Callable[[RunRecord], Iterable[float]] | None = None,
) -> Series:
    """Return a line of means over runs by round, or by the mean of `x` over runs in each round."""
    rounds, intervals = over_seeds(runs, measure)
    if x is None:
        return line_of(name, rounds, intervals)
    places = [dict(zip((r.round for r in run.rounds), x(run), strict=True)) for run in runs]
    return line_of(name, [fmean(at[number] for at in places) for number in rounds], intervals)


def over_seeds(records: Sequence[RunRecord], measure: Measure) -> tuple[list[int], list[Interval]]:
    """Return the rounds in which every run was evaluated, and intervals over the runs."""
    values: dict[int, list[float]] = {}
    for record in records:
        for result, value in zip(*measured(measure, record.rounds), strict=True):
            values.setdefault(result.round, []).append(value)
    rounds = [number for number in sorted(values) if len(values[number]) == len(records)]
    return rounds, [Interval.of(values[number]) for number in rounds]


def _clipping(results: ReadStudy, arms: Sequence[_Arm], targets: Sequence[Target]) -> PageSection:
    target, charts = targets[-1], list[Chart]()
    note = f"Charts show all seeds of each arm at ε = {target.epsilon:g}; tables are for each ε."
    for arm in _at(arms, target):
        charts += norms_charts(arm.records, arm.summary.arm)
    tables = [clipping_table(results, target) for target in targets]
    return PageSection("norms", "Clipping", [note], tables=tables, charts=charts)


def _ledgers_table(arms: Sequence[_Arm]) -> Table:
    columns = [Column("arm", "text"), Column("target ε"), Column("seed"), Column("charges")]
    columns += [Column("cohorts checked", "text"), Column("head of the chain", "long")]
    rows = []
    for arm in arms:
        for seed, record in zip(arm.summary.seeds, arm.records, strict=True):
            verification, target = record.verification, f"{arm.summary.target.epsilon:g}"
            cohorts = "yes" if verification.cohorts else "no record here"
            counts = (target, str(seed), str(verification.head.count))
            rows.append((arm.summary.arm, *counts, cohorts, verification.head.hash))
    caption = "One ledger for each run: its chain is intact, and every release has its charge"
    return Table(caption, columns, rows)
