"""What the command line prints of a study."""

import math
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from fedpriv.report.tables import format_epsilon
from fedpriv.studies import ArmSummary, Interval, ReadStudy, Target
from fedpriv.studies.verdict import verdict

_NOTES = (
    "± is Student's 95% interval over seeds on the same users; differences are paired by seed.",
    "Simulation only: figures marked * are of users' data without noise; no guarantee covers them.",
    "ε is what each run cost alone. All runs on the same users cost more together, and whoever "
    "knows a seed knows the noise: a study is for simulated users or for data that are public.",
)


def print_study(read: ReadStudy, console: Console) -> None:
    """Print the answer first, then a table for each target."""
    for sentence in verdict(read.study, read.arms):
        console.print(sentence, style="bold", highlight=False)
    for target in read.study.targets:
        arms = [arm for arm in read.arms if arm.target == target]
        if arms:
            console.print(_results(read, target, arms))
            console.print(_layers(arms))
    for note in _NOTES:
        console.print(note, highlight=False)
    if read.missing:
        console.print(f"{read.missing} runs are not finished.", style="yellow")


def _results(read: ReadStudy, target: Target, arms: Sequence[ArmSummary]) -> Table:
    study = read.study
    table = Table(
        title=f"{study.name} at ε = {target.epsilon:g}, δ = {target.delta:g}: "
        f"{len(study.seeds)} seeds, against {study.baseline}"
    )
    table.add_column("arm", no_wrap=True)
    with_accuracy = any(arm.accuracy for arm in arms)
    measured = ("accuracy %", "difference") if with_accuracy else ("loss", "difference")
    levels = [f"rounds to {level:.4g}" for level in study.accuracies]
    for column in (*measured, *levels, "z", "ε spent", "clipped %*", "users/s*"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm in arms:
        table.add_row(
            arm.arm
            if len(arm.seeds) == len(study.seeds)
            else f"{arm.arm} ({len(arm.seeds)} seeds)",
            _interval(arm.accuracy, 100.0) if with_accuracy else _interval(arm.loss),
            _difference(arm.accuracy_difference, 100.0)
            if with_accuracy
            else _difference(arm.loss_difference),
            *(_rounds(arm, level) for level in study.accuracies),
            f"{arm.noise_multiplier:.4g}",
            format_epsilon(arm.epsilon),
            _range([100.0 * share for share in arm.simulation_only_clipped.values()]),
            f"{arm.simulation_only_users_per_second:,.0f}",
        )
    return table


def _layers(arms: Sequence[ArmSummary]) -> Table:
    """Signal to noise and update norms by layer."""
    table = Table(title="simulation only: signal to noise by layer, and mean norm of an update")
    table.add_column("layer", no_wrap=True)
    for arm in arms:
        table.add_column(arm.arm, justify="right")
    for layer in arms[0].simulation_only_signal_to_noise:
        cells = [
            f"{arm.simulation_only_signal_to_noise.get(layer, math.nan):.3g} "
            f"({arm.simulation_only_update_norms.get(layer, math.nan):.2g})"
            for arm in arms
        ]
        table.add_row(layer, *cells)
    return table


def _interval(interval: Interval | None, scale: float = 1.0) -> str:
    if interval is None:
        return ""
    mean = f"{scale * interval.mean:.2f}"
    return mean if interval.half_width is None else f"{mean} ± {scale * interval.half_width:.2f}"


def _difference(interval: Interval | None, scale: float = 1.0) -> str:
    if interval is None:
        return ""
    return f"{'+' if interval.mean > 0 else ''}{_interval(interval, scale)}"


def _rounds(arm: ArmSummary, level: float) -> str:
    found = arm.rounds_to[level]
    median = "never" if found.median is None else f"{found.median:g}"
    return median if found.reached == len(arm.seeds) else f"{median} ({found.reached} seeds)"


def _range(values: Sequence[float]) -> str:
    """One number, or the least and the largest of several."""
    low, high = min(values), max(values)
    return f"{low:.0f}" if f"{low:.0f}" == f"{high:.0f}" else f"{low:.0f}–{high:.0f}"
