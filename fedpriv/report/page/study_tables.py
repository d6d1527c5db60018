"""Tables of a study: the arms at a target, what they clipped, and the ledgers of its runs."""

from collections.abc import Sequence

from fedpriv.report.measures import ACCURACY, measure_of
from fedpriv.report.page.content import Column, Table
from fedpriv.report.page.study_charts import ArmRuns
from fedpriv.report.tables import format_epsilon
from fedpriv.studies import ArmSummary, Interval, ReadStudy, Target

_NONE = "–"


def results_table(read: ReadStudy, arms: Sequence[ArmRuns], target: Target) -> Table:
    """How arms compare at a target."""
    measure = measure_of([arm.summary for arm in arms])
    in_points = measure is ACCURACY
    levels = read.study.accuracies
    columns = (
        Column("arm", number=False),
        Column("accuracy (%)" if in_points else "loss"),
        Column("difference (points)" if in_points else "difference"),
        *(Column(f"rounds to {100 * level:g}%") for level in levels),
        Column("noise multiplier z"),
        Column("ε spent"),
        Column("seeds"),
    )
    rows = [
        (
            arm.arm,
            _text(measure.end(arm)),
            "baseline" if arm.arm == read.study.baseline else _text(measure.difference(arm), "+"),
            *(_rounds(arm, level) for level in levels),
            f"{arm.noise_multiplier:.4g}",
            format_epsilon(arm.epsilon),
            str(len(arm.seeds)),
        )
        for arm in (each.summary for each in arms)
    ]
    caption = (
        f"At ε = {target.epsilon:g}, δ = {target.delta:g}: means over seeds ± Student's 95% "
        f"interval; differences against {read.study.baseline} are paired by seed"
    )
    return Table(caption, columns, rows)


def clipping_table(arms: Sequence[ArmRuns], target: Target) -> Table:
    """What arms clipped at a target, and how the rest stands against the noise."""
    columns = (
        Column("arm", number=False),
        Column("users clipped (%)", number=False),
        Column("layer", number=False),
        Column("mean update norm (L2)"),
        Column("signal to noise"),
        Column("users/s"),
    )
    rows = []
    for arm in (each.summary for each in arms):
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


def ledgers_table(arms: Sequence[ArmRuns]) -> Table:
    """The ledger of each run, as it was verified."""
    columns = (
        Column("arm", number=False),
        Column("target ε"),
        Column("seed"),
        Column("charges"),
        Column("cohorts checked", number=False),
        Column("head of the chain", number=False, long=True),
    )
    rows = [
        (
            arm.summary.arm,
            f"{arm.summary.target.epsilon:g}",
            str(seed),
            str(record.verification.head.count),
            "yes" if record.verification.cohorts else "no record here",
            record.verification.head.hash,
        )
        for arm in arms
        for seed, record in zip(arm.summary.seeds, arm.records, strict=True)
    ]
    return Table(
        "One ledger for each run: its chain holds, and every release has its charge", columns, rows
    )


def _text(found: Interval | None, sign: str = "") -> str:
    if found is None:
        return _NONE
    around = "" if found.half_width is None else f" ± {found.half_width:.2f}"
    return f"{found.mean:{sign}.2f}{around}"


def _rounds(arm: ArmSummary, level: float) -> str:
    found = arm.rounds_to[level]
    median = "never" if found.median is None else f"{found.median:g}"
    return median if found.reached in {0, len(arm.seeds)} else f"{median} ({found.reached} seeds)"
