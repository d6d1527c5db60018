"""What the command line prints of a study."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from fedpriv.report.tables import format_epsilon
from fedpriv.studies import ArmSummary, Interval, ReadStudy, Target
from fedpriv.studies.results import verdict

_NOTES = (
    "± is Student's 95% interval over seeds on the same users; differences are paired by seed.",
    "Clipped is the share of users in each vector group, signal/noise the norm of a round's sum of "
    "clipped updates over that of its noise, update norm a user's mean before clipping.",
    "ε is what each run cost alone. All runs on the same users cost more together, and whoever "
    "knows a seed knows the noise: a study is for simulated users or for data that are public.",
)


def print_study(read: ReadStudy, console: Console) -> None:
    """Print the answer first, then tables for each target."""
    for sentence in verdict(read.study, read.arms):
        console.print(sentence, style="bold", highlight=False)
    for target in read.study.targets:
        arms = [arm for arm in read.arms if arm.target == target]
        if arms:
            console.print(_results(read, target, arms))
            console.print(_simulation_only(arms))
    for note in _NOTES:
        console.print(note, highlight=False)
    if read.missing:
        console.print(f"{read.missing} runs are not finished.", style="yellow")


def _results(read: ReadStudy, target: Target, arms: Sequence[ArmSummary]) -> Table:
    study = read.study
    title = (
        f"{study.name} at ε = {target.epsilon:g}, δ = {target.delta:g}: "
        f"{len(study.seeds)} seeds, against {study.baseline}"
    )
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column("arm", overflow="fold")
    with_accuracy = any(arm.accuracy for arm in arms)
    levels = [f"rounds\nto {level:.4g}" for level in study.accuracies]
    measure = "accuracy\n%" if with_accuracy else "loss"
    for column in (measure, "difference", *levels, "z", "ε spent"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm in arms:
        short = "" if len(arm.seeds) == len(study.seeds) else f" ({len(arm.seeds)} seeds)"
        table.add_row(
            f"{arm.arm}{short}",
            _interval(arm.accuracy, 100.0) if with_accuracy else _interval(arm.loss),
            _difference(arm.accuracy_difference, 100.0)
            if with_accuracy
            else _difference(arm.loss_difference),
            *(_rounds(arm, level) for level in study.accuracies),
            f"{arm.noise_multiplier:.4g}",
            format_epsilon(arm.epsilon),
        )
    return table


def _simulation_only(arms: Sequence[ArmSummary]) -> Table:
    """What nobody may know of real users, an arm after the other."""
    table = Table(title="simulation only: what no guarantee covers", box=box.SIMPLE_HEAD)
    table.add_column("arm", overflow="fold")
    for column in ("users/s", "clipped %"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("layer", no_wrap=True)
    for column in ("signal/noise", "update norm"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm in arms:
        shares = [100.0 * share for share in arm.simulation_only_clipped.values()]
        speed = f"{arm.simulation_only_users_per_second:,.0f}"
        cells = [arm.arm, speed, _range(shares)]
        for layer, ratio in arm.simulation_only_signal_to_noise.items():
            norm = arm.simulation_only_update_norms.get(layer, math.nan)
            table.add_row(*cells, layer, f"{ratio:.3g}", f"{norm:.3g}")
            cells = ["", "", ""]
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
    return median if found.reached in {0, len(arm.seeds)} else f"{median} ({found.reached} seeds)"


def _range(values: Sequence[float]) -> str:
    """One number, or the least and the largest of several."""
    low, high = min(values), max(values)
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f}–{high:.0f}"
