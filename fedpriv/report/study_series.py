"""What charts and figures of a study show of its arms: accuracy, differences, numeric axes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedpriv.report.measures import ends, measure_of
from fedpriv.report.series import Axis, Series, on_log_scale
from fedpriv.studies import ArmSummary, Interval, Study, Target
from fedpriv.studies.study import Line, NumericAxis, numeric_axes

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


@dataclass(frozen=True)
class Drawing:
    """What a chart or a figure shows.

    Attributes:
        name: identifies it; letters, digits and hyphens.
        title: what it shows.
        caption: what it means.
        axes: along x and along y.
        series: in the order of the legend.
    """

    name: str
    title: str
    caption: str
    axes: tuple[Axis, Axis]
    series: tuple[Series, ...]


def front(arms: Sequence[ArmSummary]) -> Drawing:
    """Accuracy in the end against ε spent, a line for each arm with all its targets."""
    measure = measure_of(arms)
    series = []
    for name in dict.fromkeys(arm.arm for arm in arms):
        of_arm = [arm for arm in arms if arm.arm == name]
        series.append(_with_bars(name, [arm.epsilon for arm in of_arm], of_arm, measure.end))
    spent = [arm.epsilon for arm in arms]
    return Drawing(
        "front",
        f"{measure.title} against ε",
        "Each point is an arm that was trained from the beginning with the noise of its ε. "
        f"{_BARS} {measure.better.capitalize()} and further left is better; where lines are flat, "
        "less ε would have cost nothing.",
        (_axis(f"user-level ε at δ = {arms[0].target.delta:g}", "no unit", spent), measure.axis),
        tuple(series),
    )


def by_target(arms: Sequence[ArmSummary]) -> Drawing:
    """Accuracy in the end, arms beside each other at each target."""
    measure = measure_of(arms)
    targets = list(dict.fromkeys(arm.target for arm in arms))
    return Drawing(
        "arms",
        f"{measure.title} of each arm",
        f"{_BARS} Arms at the same ε stand beside each other.",
        (_targets_axis(targets), measure.axis),
        tuple(_beside(_names(arms), arms, targets, measure.end)),
    )


def differences(study: Study, arms: Sequence[ArmSummary]) -> Drawing | None:
    """Paired differences from the baseline, an interval for each arm and target.

    None if no arm has a seed in common with the baseline.
    """
    measure = measure_of(arms)
    found = [arm for arm in arms if measure.difference(arm) is not None]
    if not found:
        return None
    targets = list(dict.fromkeys(arm.target for arm in found))
    names = _names(arms)
    series = _beside(names, found, targets, measure.difference)
    # In the place of the baseline, so that arms have the colour and marker of other charts.
    series[names.index(study.baseline)] = Series(
        f"{study.baseline}, the baseline",
        [-0.5, len(targets) - 0.5],
        [0.0, 0.0],
        dashed=True,
        marked=False,
    )
    return Drawing(
        "differences",
        f"Difference in {measure.name} from {study.baseline}",
        f"An arm minus the baseline, seed by seed; {measure.better} is better. {_BARS} An arm "
        "whose bar leaves the dashed line out is told from the baseline, the others are not. Each "
        "bar is for one arm: of twenty arms that are all alike, one is expected to leave it out.",
        (_targets_axis(targets), Axis(f"{measure.name} minus baseline's", measure.difference_unit)),
        tuple(series),
    )


def along_axes(study: Study, arms: Sequence[ArmSummary]) -> list[Drawing]:
    """Accuracy in the end against each number that the study varies.

    A line is a combination of all else that arms vary, and there is a drawing for each target; if
    there is one combination only, lines are targets.
    """
    drawings = []
    targets = list(dict.fromkeys(arm.target for arm in arms))
    for number, axis in enumerate(numeric_axes(study)):
        if len(axis.lines) == 1:
            lines = [(f"ε = {t.epsilon:g}", axis.lines[0], t) for t in targets]
            drawings.append(_along(axis, lines, arms, f"along-{number}"))
            continue
        for index, target in enumerate(targets):
            lines = [(line.name, line, target) for line in axis.lines]
            at = f" at ε = {target.epsilon:g}"
            drawings.append(_along(axis, lines, arms, f"along-{number}-{index}", at))
    return drawings


def _along(
    axis: NumericAxis,
    lines: Sequence[tuple[str, Line, Target]],
    arms: Sequence[ArmSummary],
    name: str,
    at: str = "",
) -> Drawing:
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
    return Drawing(
        name,
        f"{measure.title} against {title}{at}",
        f"Each point was trained from the beginning, its noise calibrated to its ε.{with_it} "
        f"{_BARS}",
        (_axis(title, unit, all_values), measure.axis),
        tuple(series),
    )


def _with_bars(
    name: str,
    x: Sequence[float],
    arms: Sequence[ArmSummary],
    of: Callable[[ArmSummary], Interval | None],
) -> Series:
    found = [of(arm) for arm in arms]
    y = [None if interval is None else interval.mean for interval in found]
    return Series(name, x, y, *ends(found), bars=True)


def _beside(
    names: Sequence[str],
    arms: Sequence[ArmSummary],
    targets: Sequence[Target],
    of: Callable[[ArmSummary], Interval | None],
) -> list[Series]:
    """Points of each arm around the place of each target."""
    series = []
    for number, name in enumerate(names):
        of_arm = [arm for arm in arms if arm.arm == name]
        shift = _WIDTH * ((number + 0.5) / len(names) - 0.5)
        x = [targets.index(arm.target) + shift for arm in of_arm]
        series.append(replace(_with_bars(name, x, of_arm, of), joined=False))
    return series


def _names(arms: Sequence[ArmSummary]) -> list[str]:
    return list(dict.fromkeys(arm.arm for arm in arms))


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
    log = on_log_scale(values)
    marked = sorted({float(f"{value:.3g}") for value in values}) if log else []
    ticks = tuple((value, f"{value:g}") for value in marked) if len(marked) <= 8 else ()
    return Axis(name, unit, log=log, ticks=ticks)
