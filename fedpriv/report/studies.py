"""What a study found: charts and tables of its arms, printed, drawn, and for other programs."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.report.charts import Axis, Chart, Series, save, spans_decades
from fedpriv.report.tables import Column, Table, format_epsilon, number, print_table
from fedpriv.studies import ArmSummary, Interval, ReadStudy, Study, Target
from fedpriv.studies.results import verdict
from fedpriv.studies.study import Line, NumericAxis, numeric_axes
from fedpriv.training.rounds import RoundResult

CAVEAT = (
    "Intervals are Student's 95% over seeds on the same users; differences are paired by seed. ε "
    "is what each run cost alone. All runs on the same users cost more together, and anyone who "
    "knows a seed knows the noise: a study is for simulated users or for public data."
)
_BARS = "Bars are Student's 95% intervals over seeds on the same users."
_NAMES = {
    "data.options.users": ("users enrolled", "count"),
    "rounds": ("rounds", "count"),
    "clipping.norm": ("clipping norm", "scaled L2"),
    "privacy.sampling_probability": ("sampling probability", "no unit"),
    "local.epochs": ("local epochs", "count"),
    "local.learning_rate": ("local learning rate", "no unit"),
}
_WIDTH = 0.6  # of the distance between two ε that points of several arms take
_NONE = "–"


@dataclass(frozen=True)
class Measure:
    """What arms are compared by.

    Attributes:
        name: attribute of rounds and arms that holds it.
        axis: what a chart names it.
        unit: of a difference.
        better: where a chart shows what is better.
        scale: what values are multiplied by to be in these units.
    """

    name: str
    axis: Axis
    unit: str
    better: str
    scale: float

    def of(self, each: RoundResult) -> float | None:
        """Its value after a round, None if it was not measured."""
        value: float | None = getattr(each, self.name)
        return None if value is None else self.scale * value

    def end(self, arm: ArmSummary) -> Interval | None:
        """Its mean over seeds at the end."""
        return self._scaled(getattr(arm, self.name))

    def difference(self, arm: ArmSummary) -> Interval | None:
        """Its mean paired difference from the baseline at the end; None without one."""
        return self._scaled(getattr(arm, f"{self.name}_difference"))

    def _scaled(self, found: Interval | None) -> Interval | None:
        if found is None or found.half_width is None:
            return found and replace(found, mean=self.scale * found.mean)
        return replace(
            found, mean=self.scale * found.mean, half_width=self.scale * found.half_width
        )


_ACCURACY = Measure("accuracy", Axis("accuracy on held-out rows", "%"), "points", "higher", 100.0)
_LOSS = Measure(
    "loss",
    Axis("mean loss of held-out rows", "unit of the loss"),
    "unit of the loss",
    "lower",
    1.0,
)


def measure_of(arms: Sequence[ArmSummary]) -> Measure:
    """Accuracy, or loss if an arm has no accuracy."""
    return _ACCURACY if all(arm.accuracy is not None for arm in arms) else _LOSS


def line_of(name: str, x: Sequence[float], found: Sequence[Interval | None]) -> Series:
    """Means over seeds with their intervals, where more than one seed gives one."""
    low = [None if interval is None else interval.low for interval in found]
    high = [None if interval is None else interval.high for interval in found]
    means = [None if interval is None else interval.mean for interval in found]
    known = any(end is not None for end in low)
    return Series(name, x, means, low if known else (), high if known else ())


def front_chart(arms: Sequence[ArmSummary]) -> Chart:
    """Accuracy in the end against ε spent, a line for each arm with all its targets."""
    measure = measure_of(arms)
    series = []
    for name in _names(arms):
        of_arm = [arm for arm in arms if arm.arm == name]
        series.append(_with_bars(name, [arm.epsilon for arm in of_arm], of_arm, measure.end))
    spent = [arm.epsilon for arm in arms]
    return Chart(
        "front",
        f"{measure.name.capitalize()} against ε",
        "Each point is an arm that was trained from the beginning with the noise of its ε. "
        f"{_BARS} {measure.better.capitalize()} and further left is better; where lines are flat, "
        "less ε would have cost nothing.",
        _axis(f"user-level ε at δ = {arms[0].target.delta:g}", "no unit", spent),
        measure.axis,
        series,
    )


def arms_chart(arms: Sequence[ArmSummary]) -> Chart:
    """Accuracy in the end, arms beside each other at each target."""
    measure = measure_of(arms)
    targets = _targets(arms)
    return Chart(
        "arms",
        f"{measure.name.capitalize()} of each arm",
        f"{_BARS} Arms at the same ε stand beside each other.",
        _targets_axis(targets),
        measure.axis,
        _beside(_names(arms), arms, targets, measure.end),
    )


def differences_chart(study: Study, arms: Sequence[ArmSummary]) -> Chart | None:
    """Paired differences from the baseline, an interval for each arm and target.

    None if no arm has a seed in common with the baseline.
    """
    measure = measure_of(arms)
    found = [arm for arm in arms if measure.difference(arm) is not None]
    if not found:
        return None
    targets, names = _targets(found), _names(arms)
    series = _beside(names, found, targets, measure.difference)
    # In the place of the baseline, so that arms keep the colour and marker of other charts.
    series[names.index(study.baseline)] = Series(
        f"{study.baseline}, the baseline",
        [-0.5, len(targets) - 0.5],
        [0.0, 0.0],
        dashed=True,
        marked=False,
    )
    return Chart(
        "differences",
        f"Difference in {measure.name} from {study.baseline}",
        f"An arm minus the baseline, seed by seed; {measure.better} is better. {_BARS} An arm "
        "whose bar does not cross the dashed line differs from the baseline; the others cannot be "
        "told apart from it. Each bar is for one arm: of twenty arms that are all alike, one is "
        "expected not to cross.",
        _targets_axis(targets),
        Axis(f"{measure.name} minus baseline's", measure.unit),
        series,
    )


def varied_charts(study: Study, arms: Sequence[ArmSummary]) -> list[Chart]:
    """Accuracy in the end against each number that the study varies.

    A line is a combination of all else that arms vary, and there is a chart for each target; if
    there is one combination only, lines are targets.
    """
    charts = []
    targets = _targets(arms)
    for count, axis in enumerate(numeric_axes(study)):
        if len(axis.lines) == 1:
            lines = [(f"ε = {target.epsilon:g}", axis.lines[0], target) for target in targets]
            charts.append(_varied_chart(axis, lines, arms, f"along-{count}"))
            continue
        for index, target in enumerate(targets):
            lines = [(line.name, line, target) for line in axis.lines]
            at = f" at ε = {target.epsilon:g}"
            charts.append(_varied_chart(axis, lines, arms, f"along-{count}-{index}", at))
    return charts


def write_study_figures(read: ReadStudy, folder: Path) -> list[Path]:
    """Write the figures of a study as PNG and SVG, and return the files.

    * front: accuracy in the end against ε spent, a line for each arm, with Student's intervals;
      arms: the same without lines, instead, where the study has one ε.
    * differences: from the baseline, paired by seed, where there are any.
    * along-…: accuracy against each number that the arms vary.

    Args:
        read: the study and its results; ledgers are not looked at.
        folder: made if it does not exist; files of these names are replaced.

    Raises:
        DataError: no run is finished.
        InvalidValueError: the folder cannot be written.
    """
    if not read.arms:
        raise DataError(f"no run of the study in {read.folder} is finished; run it first")
    end = front_chart if len(_targets(read.arms)) > 1 else arms_chart
    compared = differences_chart(read.study, read.arms)
    charts = [
        end(read.arms),
        *([compared] if compared else []),
        *varied_charts(read.study, read.arms),
    ]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [file for chart in charts for file in save(chart, folder)]
    except OSError as error:
        raise InvalidValueError(f"{folder} cannot be written: {error.strerror}") from error


def results_table(read: ReadStudy, target: Target) -> Table:
    """How arms compare at a target."""
    arms = [arm for arm in read.arms if arm.target == target]
    measure = measure_of(arms)
    levels = read.study.accuracies
    columns = (
        Column("arm", number=False),
        Column("accuracy\n(%)" if measure is _ACCURACY else "loss"),
        Column("difference"),
        *(Column(f"rounds\nto {100 * level:g}%") for level in levels),
        Column("noise\nz"),
        Column("ε\nspent"),
    )
    rows = [
        (
            _named(arm, read.study),
            _text(measure.end(arm)),
            "baseline" if arm.arm == read.study.baseline else _text(measure.difference(arm), "+"),
            *(_rounds(arm, level) for level in levels),
            f"{arm.noise_multiplier:.4g}",
            format_epsilon(arm.epsilon),
        )
        for arm in arms
    ]
    seeds, baseline = len(read.study.seeds), read.study.baseline
    caption = (
        f"At ε = {target.epsilon:g}, δ = {target.delta:g}: means over {seeds} seeds ± Student's "
        f"95% interval, differences from {baseline} paired by seed"
    )
    return Table(caption, columns, rows)


def clipping_table(read: ReadStudy, target: Target) -> Table:
    """What arms clipped at a target, and how the rest stands against the noise."""
    columns = (
        Column("arm", number=False),
        Column("users clipped (%)", number=False),
        Column("layer", number=False),
        Column("mean update\nnorm (L2)"),
        Column("signal\nto noise"),
        Column("users/s"),
    )
    rows = []
    for arm in read.arms:
        if arm.target != target:
            continue
        shares = ", ".join(
            f"{name}: {100 * share:.0f}" for name, share in arm.simulation_only_clipped.items()
        )
        first = (arm.arm, shares, f"{arm.simulation_only_users_per_second:,.0f}")
        for layer, norm in arm.simulation_only_update_norms.items():
            ratio = arm.simulation_only_signal_to_noise.get(layer)
            shown = _NONE if ratio is None else f"{ratio:.3g}"
            rows.append((*first[:2], layer, f"{norm:.3g}", shown, first[2]))
            first = ("", "", "")
    caption = (
        f"At ε = {target.epsilon:g}: means over rounds and seeds, from users' data without "
        "noise; they must not be published of real users"
    )
    return Table(caption, columns, rows, simulation_only=True)


def print_study(read: ReadStudy, console: Console) -> None:
    """Print the verdict first, then tables for each target."""
    for sentence in verdict(read.study, read.arms):
        console.print(sentence, style="bold", highlight=False, markup=False)
    for target in _targets(read.arms):
        print_table(results_table(read, target), console)
        print_table(clipping_table(read, target), console)
    console.print(CAVEAT, highlight=False)
    if read.missing:
        console.print(f"{read.missing} runs are not finished.", style="yellow")


def results_json(read: ReadStudy) -> str:
    """One JSON object: the study's name, seeds, baseline and verdict, and a row for each arm.

    Means have the ends of their 95% intervals beside them; null where one seed has none.
    """
    study = read.study
    content = {
        "name": study.name,
        "baseline": study.baseline,
        "seeds": list(study.seeds),
        "missing_runs": read.missing,
        "verdict": list(verdict(study, read.arms)),
        "arms": [_arm_row(arm) for arm in read.arms],
    }
    return json.dumps(_as_json(content), indent=2, allow_nan=False) + "\n"


def _names(arms: Sequence[ArmSummary]) -> list[str]:
    return list(dict.fromkeys(arm.arm for arm in arms))


def _targets(arms: Sequence[ArmSummary]) -> list[Target]:
    return list(dict.fromkeys(arm.target for arm in arms))


def _varied_chart(
    axis: NumericAxis,
    lines: Sequence[tuple[str, Line, Target]],
    arms: Sequence[ArmSummary],
    name: str,
    at: str = "",
) -> Chart:
    """Accuracy against a number, a series for each line at its target."""
    measure = measure_of(arms)
    found = {(arm.arm, arm.target): arm for arm in arms}
    series, all_values = [], []
    for label, line, target in lines:
        points = [(x, found[arm, target]) for x, arm in line.arms if (arm, target) in found]
        values = [x for x, _ in points]
        series.append(_with_bars(label, values, [arm for _, arm in points], measure.end))
        all_values += values
    title, unit = _NAMES.get(axis.key, (axis.key, "as in the study's file"))
    with_it = f" With it change: {', '.join(axis.follows)}." if axis.follows else ""
    return Chart(
        name,
        f"{measure.name.capitalize()} against {title}{at}",
        f"Each point was trained from the beginning, its noise calibrated to its ε.{with_it} "
        f"{_BARS}",
        _axis(title, unit, all_values),
        measure.axis,
        series,
    )


def _with_bars(
    name: str,
    x: Sequence[float],
    arms: Sequence[ArmSummary],
    of: Callable[[ArmSummary], Interval | None],
) -> Series:
    return replace(line_of(name, x, [of(arm) for arm in arms]), bars=True)


def _beside(
    names: Sequence[str],
    arms: Sequence[ArmSummary],
    targets: Sequence[Target],
    of: Callable[[ArmSummary], Interval | None],
) -> list[Series]:
    """Points of each arm around the place of each target."""
    series = []
    for count, name in enumerate(names):
        of_arm = [arm for arm in arms if arm.arm == name]
        shift = _WIDTH * ((count + 0.5) / len(names) - 0.5)
        x = [targets.index(arm.target) + shift for arm in of_arm]
        series.append(replace(_with_bars(name, x, of_arm, of), joined=False))
    return series


def _targets_axis(targets: Sequence[Target]) -> Axis:
    """A place for each target, side by side."""
    return Axis(
        f"user-level ε of each run at δ = {targets[0].delta:g}",
        "no unit",
        ends=(-0.5, len(targets) - 0.5),
        ticks=tuple((float(n), f"{target.epsilon:g}") for n, target in enumerate(targets)),
    )


def _axis(name: str, unit: str, values: Sequence[float]) -> Axis:
    """An axis of these values; on a log scale each of them is marked, if they are few."""
    log = spans_decades(values)
    marked = sorted({float(f"{value:.3g}") for value in values}) if log else []
    ticks = tuple((value, f"{value:g}") for value in marked) if len(marked) <= 8 else ()
    return Axis(name, unit, log=log, ticks=ticks)


def _text(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return _NONE
    around = "" if found.half_width is None else f" ± {found.half_width:.2f}"
    return f"{found.mean:{sign}.2f}{around}"


def _rounds(arm: ArmSummary, level: float) -> str:
    """When an arm reached an accuracy, and how many of its seeds did, if some did not."""
    found = arm.rounds_to[level]
    median = "never" if found.median is None else f"{found.median:g}"
    some = found.reached not in {0, len(arm.seeds)}
    return f"{median}\n({found.reached} of {len(arm.seeds)})" if some else median


def _named(arm: ArmSummary, study: Study) -> str:
    """The name of an arm, and how many of its seeds are finished, if some are not."""
    finished = len(arm.seeds)
    return arm.arm if finished == len(study.seeds) else f"{arm.arm} ({finished} seeds)"


def _arm_row(arm: ArmSummary) -> dict[str, object]:
    row = asdict(arm)
    for name in ("accuracy", "loss", "accuracy_difference", "loss_difference"):
        found: Interval | None = getattr(arm, name)
        row[name] = {end: found and getattr(found, end) for end in ("mean", "low", "high")}
    row["rounds_to"] = {f"{level:g}": asdict(found) for level, found in arm.rounds_to.items()}
    row["seeds"] = len(arm.seeds)
    return row


def _as_json(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if isinstance(value, float):
        return None if math.isnan(value) else number(value)
    return value
