"""The page of a study: how its arms compare at equal privacy."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedpriv.errors import DataError
from fedpriv.ledger.budget import merge_equal
from fedpriv.ledger.events import SamplingPolicy
from fedpriv.report.page.charts import Chart
from fedpriv.report.page.common import (
    FOOTER,
    assumptions_section,
    privacy_sections,
    software_section,
)
from fedpriv.report.page.content import Card, Page, Section
from fedpriv.report.page.norms_charts import norms_charts
from fedpriv.report.page.record import RunRecord
from fedpriv.report.page.run_page import cost_or_reason, loss_of
from fedpriv.report.page.study_charts import (
    ArmRuns,
    by_round_chart,
    drawn,
    on_the_way_chart,
)
from fedpriv.report.page.study_tables import clipping_table, ledgers_table, results_table
from fedpriv.report.page.words import users_of
from fedpriv.report.study_series import along_axes, differences, front
from fedpriv.studies import Cell, ReadStudy, Study, Target
from fedpriv.studies.results import STUDY, verdict

_ALONE = (
    "Intervals speak of other seeds on the same users; differences are paired by seed. ε is what "
    "each run cost alone. All runs on the same users cost more together, and whoever knows a seed "
    "knows the noise: a study is for simulated users or for data that are public."
)
# Policies under which a round costs the same among any number of users.
_ANY_NUMBER = (SamplingPolicy.POISSON, SamplingPolicy.EVERY_USER)


def page_of_study(read: ReadStudy, records: Mapping[Cell, RunRecord]) -> Page:
    """The page of a study.

    Args:
        read: the study and its results.
        records: each finished run, its ledger verified.

    Raises:
        DataError: no run is finished, or a result says less ε than its ledger holds.
    """
    arms = _arms(read, records)
    if not arms:
        raise DataError(f"no run of the study in {read.folder} is finished; run it first")
    targets = [target for target in read.study.targets if _at(arms, target)]
    sections = [
        _summary(read, arms, targets),
        *_differences(read.study, arms),
        Section(
            "accuracy",
            "How good the models are",
            charts=[by_round_chart(_at(arms, t), t, n) for n, t in enumerate(targets)],
        ),
        Section("front", "Accuracy and privacy", charts=[_front(arms, targets)]),
        *_varied(read.study, arms),
        *_privacy(arms),
        _clipping(arms, targets),
        Section("ledger", "Ledger verification", tables=[ledgers_table(arms)]),
        Section(
            "plan",
            "Resolved study",
            [
                "With base and arms written out; it can be run again. Each run has its plan, "
                "resolved, in its folder."
            ],
            listing=(read.folder / STUDY).read_text(encoding="utf-8"),
        ),
        software_section(),
    ]
    lead = f"A study on {_who(arms)}, by fedpriv"
    return Page(read.study.name, lead, sections, FOOTER)


def _arms(read: ReadStudy, records: Mapping[Cell, RunRecord]) -> list[ArmRuns]:
    found = []
    for summary in read.arms:
        of_arm = [
            (result, records[cell])
            for cell, result in read.finished
            if (cell.arm.name, cell.target) == (summary.arm, summary.target)
        ]
        for result, record in of_arm:
            loss = loss_of(record)
            if loss is None or loss.epsilon > result.epsilon * (1.0 + 1e-9):
                raise DataError(
                    f"the result of {record.folder} says ε = {result.epsilon:g}, and its ledger "
                    f"holds {loss.epsilon if loss else 0.0:g}; run the study again"
                )
        found.append(ArmRuns(summary, tuple(record for _, record in of_arm)))
    return found


def _at(arms: Sequence[ArmRuns], target: Target) -> list[ArmRuns]:
    return [arm for arm in arms if arm.summary.target == target]


def _summary(read: ReadStudy, arms: Sequence[ArmRuns], targets: Sequence[Target]) -> Section:
    study = read.study
    ledgers = [record.ledger for arm in arms for record in arm.records]
    users = sorted({users_of(ledger) for ledger in ledgers})
    said = verdict(study, read.arms)
    spent = ", ".join(f"{target.epsilon:g}" for target in targets)
    names = dict.fromkeys(arm.summary.arm for arm in arms)
    missing = [f"{read.missing} runs of the study are not finished."] if read.missing else []
    return Section(
        "summary",
        "Summary",
        [*said, _ALONE],
        answers=len(said),
        warnings=missing,
        cards=[
            Card("arms", str(len(names)), f"against {study.baseline}"),
            Card("user-level ε of each run", spent, f"at δ = {targets[0].delta:g}"),
            Card("seeds", str(len(study.seeds)), "the same in each arm"),
            Card(
                "users",
                " to ".join(f"{n:,}" for n in dict.fromkeys((users[0], users[-1]))),
                _who(arms),
            ),
        ],
        tables=[results_table(read, _at(arms, target), target) for target in targets],
    )


def _who(arms: Sequence[ArmRuns]) -> str:
    names = {record.ledger.population for arm in arms for record in arm.records}
    return min(names) if len(names) == 1 else f"{len(names)} populations"


def _front(arms: Sequence[ArmRuns], targets: Sequence[Target]) -> Chart:
    if len(targets) > 1:
        return drawn(front([arm.summary for arm in arms]))
    return on_the_way_chart(arms, targets[0])


def _differences(study: Study, arms: Sequence[ArmRuns]) -> list[Section]:
    found = differences(study, [arm.summary for arm in arms])
    return [Section("differences", "Against the baseline", charts=[drawn(found)])] if found else []


def _varied(study: Study, arms: Sequence[ArmRuns]) -> list[Section]:
    """Charts against the numbers that arms vary, if they vary any."""
    found = along_axes(study, [arm.summary for arm in arms])
    return [Section("varied", "What was varied", charts=[drawn(d) for d in found])] if found else []


def _privacy(arms: Sequence[ArmRuns]) -> list[Section]:
    """What ε says, and its curves for each kind of ledger that the arms have."""
    kinds: dict[object, list[ArmRuns]] = {}
    for arm in arms:
        kinds.setdefault(_priced_alike(arm.records[0]), []).append(arm)
    sections = []
    for number, alike in enumerate(kinds.values()):
        record = alike[0].records[0]
        loss = loss_of(record)
        if number == 0 and loss is not None:
            sections.append(assumptions_section(record, loss))
        names = ", ".join(
            f"{arm.summary.arm} at ε = {arm.summary.target.epsilon:g}" for arm in alike
        )
        sections += privacy_sections(record, loss, cost_or_reason(record), names, number)
    return sections


def _priced_alike(record: RunRecord) -> object:
    """Equal for ledgers that every accountant prices alike, however they split the noise."""
    counts: Counter[object] = Counter()
    for event in merge_equal(record.ledger.events):
        sampling = event.sampling
        if sampling.policy in _ANY_NUMBER:
            sampling = replace(sampling, population=1)
        counts[sampling, f"{event.noise_multiplier:.9g}", event.strategy] += event.count
    return record.delta, frozenset(counts.items())


def _clipping(arms: Sequence[ArmRuns], targets: Sequence[Target]) -> Section:
    last = targets[-1]
    note = (
        f"The charts are of all seeds of each arm at ε = {last.epsilon:g}, the tables of each "
        "target."
    )
    charts = []
    for arm in _at(arms, last):
        charts += norms_charts(arm.records, arm.summary.arm)
    tables = [clipping_table(_at(arms, target), target) for target in targets]
    return Section("norms", "Clipping", [note], tables=tables, charts=charts)
