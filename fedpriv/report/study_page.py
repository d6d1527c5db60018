"""The page of a study: a comparison of its arms at equal privacy."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedpriv.accounting.accountants import PrivacyLoss
from fedpriv.errors import DataError
from fedpriv.report import run_page, study_charts
from fedpriv.report.charts import Chart, texts
from fedpriv.report.guarantee import (
    assumptions,
    large_delta,
    loss_of,
    users_of,
)
from fedpriv.report.page import Card, Page, PageSection
from fedpriv.report.records import RunRecord
from fedpriv.report.tables import Column, Table, plural
from fedpriv.studies import ArmSummary, Cell, Interval, ReadStudy, Study, Target
from fedpriv.studies.results import STUDY, Measure, measure_of, verdict


@dataclass(frozen=True)
class _Arm:
    """An arm at a target, and its finished runs in the order of the summary's seeds."""

    summary: ArmSummary
    records: tuple[RunRecord, ...]
    losses: tuple[PrivacyLoss, ...]  # of their ledgers


def page_of_study(read: ReadStudy, records: Mapping[Cell, RunRecord]) -> Page:
    """Return the page of a study, from its results and the verified record of each finished run.

    DataError if no run is finished, or a result and a ledger differ.
    """
    arms = _arms(read, records)
    if not arms:
        raise DataError(f"no run of the study in {read.folder} is finished; run it first")
    targets = [target for target in read.study.targets if _at(arms, target)]
    differences = study_charts.differences_chart(read.study, read.arms)
    text = (read.folder / STUDY).read_text(encoding="utf-8")
    record, loss = arms[0].records[0], arms[0].losses[0]
    by_round = [_by_round_chart(_at(arms, t), t, f"accuracy-{n}") for n, t in enumerate(targets)]
    if len(targets) > 1:
        front = study_charts.front_chart(read.study, read.arms)
    else:
        front = _spent_chart(read.study, arms, targets[0])
    sections = [
        _summary(read, arms, targets, front),
        PageSection(
            "differences", "Against the baseline", charts=[differences] if differences else []
        ),
        PageSection("accuracy", "How good the models are", charts=by_round),
        PageSection(
            "varied", "What was varied", charts=study_charts.varied_charts(read.study, read.arms)
        ),
        assumptions(loss, record.ledger),
        _clipping(read, arms, targets),
        PageSection("ledger", "Ledger verification", tables=[_ledgers_table(arms)]),
        PageSection("plan", "Resolved study", [texts()["plan"]["study"]], listing=text),
        run_page.software_section(),
    ]
    return Page(read.study.name, f"A study on {_who(arms)}, by fedpriv", sections)


def _arms(read: ReadStudy, records: Mapping[Cell, RunRecord]) -> list[_Arm]:
    arms = []
    for summary in read.arms:
        runs = [
            (result, records[cell])
            for cell, result in read.finished
            if (cell.arm.name, cell.target) == (summary.arm, summary.target)
        ]
        losses = []
        for result, record in runs:
            loss = loss_of(record)
            if loss is None or loss.epsilon > result.epsilon * (1.0 + 1e-9):
                raise DataError(
                    f"the result of {record.folder} says ε = {result.epsilon:g}, and its ledger "
                    f"holds {loss.epsilon if loss else 0.0:g}; run the study again"
                )
            losses.append(loss)
        arms.append(_Arm(summary, tuple(record for _, record in runs), tuple(losses)))
    return arms


def _at(arms: Sequence[_Arm], target: Target) -> list[_Arm]:
    return [arm for arm in arms if arm.summary.target == target]


def _who(arms: Sequence[_Arm]) -> str:
    names = {record.ledger.population for arm in arms for record in arm.records}
    return min(names) if len(names) == 1 else f"{len(names)} populations"


def _summary(
    read: ReadStudy, arms: Sequence[_Arm], targets: Sequence[Target], front: Chart
) -> PageSection:
    study = read.study
    records = [record for arm in arms for record in arm.records]
    users = {users_of(record.ledger) for record in records}
    missing = [f"{read.missing} runs of the study are not finished."] if read.missing else []
    breaches = (large_delta(record.delta, record.ledger) for record in records)
    answers = verdict(study, read.arms)
    epsilons = ", ".join(f"{target.epsilon:g}" for target in targets)
    names = dict.fromkeys(arm.summary.arm for arm in arms)
    counts = " to ".join(f"{n:,}" for n in dict.fromkeys((min(users), max(users))))
    return PageSection(
        "summary",
        "Summary",
        [*answers, study_charts.CAVEAT],
        answers=len(answers),
        first=[front],
        warnings=list(dict.fromkeys([*missing, *itertools.chain.from_iterable(breaches)])),
        cards=[
            Card("arms", str(len(names)), f"against {study.baseline}"),
            Card(f"{study.unit}-level ε of each run", epsilons, f"at δ = {targets[0].delta}"),
            Card("seeds", str(len(study.seeds)), "the same in each arm"),
            Card(plural(study.unit), counts, _who(arms)),
        ],
        tables=[t for target in targets for t in study_charts.results_tables(read, target)],
    )


def _by_round_chart(arms: Sequence[_Arm], target: Target, name: str) -> Chart:
    measure = measure_of([arm.summary for arm in arms])
    series = [study_charts.line_of(arm.summary.arm, *_over_seeds(arm, measure)) for arm in arms]
    return study_charts.measure_chart("study-rounds", measure, series, name, epsilon=target.epsilon)


def _spent_chart(study: Study, arms: Sequence[_Arm], target: Target) -> Chart:
    measure = measure_of([arm.summary for arm in arms])
    series = []
    for arm in arms:
        rounds, intervals = _over_seeds(arm, measure)
        epsilons = {result.round: result.epsilon for result in arm.records[0].rounds}
        x = [epsilons[number] for number in rounds]
        series.append(study_charts.line_of(arm.summary.arm, x, intervals))
    return study_charts.measure_chart(
        "study-spent", measure, series, "front", unit=study.unit, delta=target.delta
    )


def _over_seeds(arm: _Arm, measure: Measure) -> tuple[list[int], list[Interval]]:
    """Return the rounds that were evaluated under every seed, and intervals over seeds."""
    values: dict[int, list[float]] = {}
    for record in arm.records:
        for result, value in zip(*study_charts.measured(measure, record.rounds), strict=True):
            values.setdefault(result.round, []).append(value)
    rounds = [number for number in sorted(values) if len(values[number]) == len(arm.records)]
    return rounds, [Interval.of(values[number]) for number in rounds]


def _clipping(read: ReadStudy, arms: Sequence[_Arm], targets: Sequence[Target]) -> PageSection:
    last, charts = targets[-1], list[Chart]()
    note = f"Charts show all seeds of each arm at ε = {last.epsilon:g}; tables are for each ε."
    for arm in _at(arms, last):
        charts += run_page.norms_charts(arm.records, arm.summary.arm)
    tables = [study_charts.clipping_table(read, target) for target in targets]
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
