"""The page of one run, and its charts as files."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedpriv.accounting.accountants import PrivacyLoss
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.audit.verdict import AuditResult
from fedpriv.errors import DataError
from fedpriv.ledger.events import SamplingEvent, Unit
from fedpriv.ledger.ledger import paid_events
from fedpriv.report.charts import Card, Chart, Page, PageSection, Series, declared, save_all, texts
from fedpriv.report.guarantee import (
    assumptions,
    loss_of,
    privacy_sections,
    projection_of,
    terms_section,
    unit_of,
    unit_words,
    users_of,
    warnings,
    with_warnings,
)
from fedpriv.report.records import Figures, RunRecord, versions
from fedpriv.report.tables import plural
from fedpriv.studies.results import ACCURACY, LOSS, Measure
from fedpriv.support.checks import epsilon_down, epsilon_up
from fedpriv.training.rounds import (
    CONTRIBUTORS_METRIC,
    EVALUATION_PREFIX,
    Contributors,
    RoundResult,
    Stop,
    best_round,
    own_charges,
)


def page_of_run(record: RunRecord) -> Page:
    """Return the page of a run: its results, their cost, and ways to check both."""
    loss = loss_of(record)
    figures = round_charts(record.rounds, _sampled_unit(record))
    norms = [*norms_charts([record]), *_clipped_charts(record)] if record.rounds else []
    notes = [] if record.rounds else ["No round was released."]
    sections = [
        _summary(record, loss),
        PageSection("notes", "What you should know", record.end.warnings if record.end else []),
        *([assumptions(loss, record.ledger)] if loss else []),
        PageSection("accuracy", "How good the model is", notes, charts=figures),
        *privacy_sections(record, _spent_charts(record)),
        *([_audit_section(record.audit)] if record.audit else []),
        PageSection("norms", "Clipping", charts=norms),
        _ledger_section(record),
        PageSection("plan", "Resolved plan", [texts()["plan"]["run"]], listing=record.plan),
        software_section(),
    ]
    return Page(record.name, f"A run on {record.ledger.population}, by fedpriv", sections)


def write_run_charts(record: RunRecord, folder: Path) -> list[Path]:
    """Write accuracy, loss, ε and private metrics by round as PNG and SVG; return the files.

    DataError if no round was released.
    """
    charts = [
        *round_charts(record.rounds, _sampled_unit(record)),
        *(with_warnings(c, warnings(record.delta, record.ledger)) for c in _spent_charts(record)),
    ]
    if not charts:
        sentence = f"the run in {record.folder} has released no round; there is nothing to draw"
        raise DataError(sentence)
    charts = [replace(chart, title=f"{record.name}: {chart.title}") for chart in charts]
    return save_all(charts, folder)


def _spent_charts(record: RunRecord) -> list[Chart]:
    """Return a chart of ε by round, with the budget, if all ε are finite."""
    rounds = record.rounds
    if not rounds or not all(math.isfinite(result.epsilon) for result in rounds):
        return []
    series = [Series("spent", _numbers(rounds), [result.epsilon for result in rounds])]
    if record.budget is not None and math.isfinite(record.budget):
        x, y = [rounds[0].round, rounds[-1].round], [record.budget] * 2
        series.append(Series("budget", x, y, dashed=True, marked=False, colour=7))
    words = {"delta": record.delta, "unit": _level(record)}
    return [declared("spent", series, words, "epsilon")]


def software_section() -> PageSection:
    """Return the versions of the software that wrote the page."""
    return PageSection("software", "Software", [texts()["plan"]["versions"]], terms=versions())


def _summary(record: RunRecord, loss: PrivacyLoss | None) -> PageSection:
    cards, rounds_done = list[Card](), record.rounds[-1].round if record.rounds else 0
    evaluated = [result for result in record.rounds if result.loss is not None]
    if evaluated:
        last = evaluated[-1]
        name, value = "loss", f"{last.loss:.4g}"
        if last.accuracy is not None:
            name, value = "accuracy", f"{last.accuracy:.2%}"
        figures = {n: f"{v:.4g}" for n, v in last.figures.items() if ": " not in n}
        model = "last model" if last.round == rounds_done else f"after round {last.round:,}"
        note = f"on held-out rows, {model}"
        cards += [Card(n, text, note) for n, text in {name: value, **figures}.items()]
    best = best_round(record.rounds)
    if best is not None and best.round < rounds_done:
        note = f"{best.measured} on the rows that chose it, likely to be worse on others"
        cards.append(Card("best model", f"round {best.round:,}", note))
    unit, n = unit_of(record.ledger), users_of(record.ledger)
    cards += _contributors(record)
    if (audit := record.audit) is not None:
        note = f"shown by {audit.canaries:,} canaries, at 95% confidence"
        cards.append(Card("audit", f"ε ≥ {epsilon_down(audit.epsilon_low)}", note))
    epsilon, note = loss.epsilon if loss else 0.0, _epsilon_note(record)
    if record.early_epsilon is not None:
        note = f"the budget; charges cost {epsilon_up(epsilon)}"
        epsilon = record.early_epsilon
    if (projected := _projected(record)) is not None:
        note = f"of enrolled {plural(unit)}; {epsilon_up(projected)} in the projection"
    stop = f"; {record.end.stop}" if record.end and record.end.stop is not Stop.ROUNDS else ""
    cards += [
        Card(f"{unit}-level ε", epsilon_up(epsilon), note),
        Card("δ", f"{record.delta}", f"N = {n:,} {plural(unit)} enrolled"),
        Card("rounds", f"{rounds_done:,}", f"of {record.rounds_planned:,} planned{stop}"),
    ]
    warning_texts, answer = warnings(record.delta, record.ledger), [_statement(record, loss)]
    if math.isinf(epsilon):
        warning_texts, answer = [*answer, *warning_texts], []
    return PageSection(
        "summary",
        "Summary",
        answer,
        answers=1,
        warnings=warning_texts,
        first=_front_charts(record),
        cards=cards,
    )


def _sampling(record: RunRecord) -> SamplingEvent | None:
    """Return the sampling of the released rounds."""
    released = {result.charge for result in record.rounds}
    charges = (row.event.sampling for row in record.ledger.charges if row.hash in released)
    return next(charges, None)


def _sampled_unit(record: RunRecord) -> Unit:
    """Return the unit that rounds draw, clip and count: the protected one, or examples of users."""
    sampling = _sampling(record)
    of_users = sampling is not None and sampling.examples_per_user is not None
    return Unit.EXAMPLE if of_users else unit_of(record.ledger)


def _contributors(record: RunRecord) -> list[Card]:
    """Return a card with the number of updates that counted, if it was released."""
    sampling = _sampling(record)
    if sampling is None:
        return []
    count, _, expected = str(Contributors.of(record.rounds, sampling)).partition(" of ")
    note = f"of {expected} {plural(_sampled_unit(record))} expected in a round, on average"
    return [Card("contributors", count, note)] if count else []


def _projected(record: RunRecord) -> float | None:
    """Return the ε of a projection; None if the run is not one."""
    if projection_of(record.ledger) is None:
        return None
    loss = loss_of(record, projected=True)
    return loss.epsilon if loss else None


def _level(record: RunRecord) -> str:
    """Return the unit of the ε of rounds, for texts."""
    unit = unit_of(record.ledger)
    return unit if projection_of(record.ledger) is None else f"projected {unit}"


def _epsilon_note(record: RunRecord) -> str:
    charges = own_charges(record.name, record.ledger.charges)
    if len(charges) == len(record.ledger.charges):
        return "no budget was set" if record.budget is None else f"budget {record.budget}"
    own_cost = epsilon_of(paid_events(charges), record.delta, record.accountant).epsilon
    return f"all runs of the ledger; this run alone {epsilon_up(own_cost)}"


def _statement(record: RunRecord, loss: PrivacyLoss | None) -> str:
    if loss is None:
        return "Nothing was released, so nobody's data were revealed."
    if math.isinf(loss.epsilon):
        return "No privacy: no finite ε is proven for what was released. It guarantees nothing."
    if (projected := _projected(record)) is not None and record.rounds:
        unit, delta = loss.unit, record.delta
        return (
            f"A projection: as if {record.rounds[-1].as_if:,} {plural(unit)} were enrolled, "
            f"everything that was released would be ({epsilon_up(projected)}, {delta})-"
            f"differentially private for each of them. For the {users_of(record.ledger):,} "
            f"enrolled it is ({epsilon_up(loss.epsilon)}, {delta})-differentially private."
        )
    accountant, spent = f"by the {loss.accountant} accountant, {loss.bound}", loss.epsilon
    if record.early_epsilon is not None:
        spent = record.early_epsilon
        accountant = "the budget, since the run ended because of what it released"
    return (
        f"Everything that was released is ({epsilon_up(spent)}, {record.delta})-"
        f"differentially private for each whole {loss.unit} ({loss.relation} neighbours; "
        f"{accountant})."
    )


def _audit_section(audit: AuditResult) -> PageSection:
    templates = texts()["audit"]
    estimate = "none" if audit.epsilon_estimate is None else f"{audit.epsilon_estimate:.2f}"
    words = {**vars(audit), "estimate": estimate, "claimed": epsilon_up(audit.epsilon)}
    words |= {"low": epsilon_down(audit.epsilon_low), "mu": epsilon_down(audit.mu_low)}
    return replace(
        terms_section("audit", "Audit", templates["terms"], words),
        paragraphs=[f"What was released shows {audit.text}.", templates["cannot"]],
        answers=1,
        warnings=[] if audit.consistent else [templates["refuted"]],
        charts=[declared("audit", _scores(audit), {"guesses": audit.guesses})],
    )


def _scores(audit: AuditResult) -> list[Series]:
    """Return histograms of the scores of included and of excluded canaries."""
    included, scores = np.array(audit.there), np.array(audit.scores)
    edges = np.histogram_bin_edges(scores, bins=30)
    centres = ((edges[1:] + edges[:-1]) / 2.0).tolist()
    counts, others = (np.histogram(scores[mask], edges)[0] for mask in (included, ~included))
    return [
        Series("included canaries", centres, counts.tolist()),
        Series("excluded canaries", centres, others.tolist(), dashed=True),
    ]


def _ledger_section(record: RunRecord) -> PageSection:
    verification, templates = record.verification, texts()["ledger"]
    words = {
        "checked": verification,
        "cohorts": templates["checked"] if verification.cohorts else templates["not_checked"],
        "population": record.ledger.population,
        "runs": ", ".join(record.ledger.runs()) or "none",
        "head": f"{verification.head.count}:{verification.head.hash}",
        "file": record.ledger.path.name,
        "delta": record.delta,
    }
    return terms_section("ledger", "Ledger verification", templates["terms"], words)


def measured(
    measure: Measure, rounds: Sequence[RoundResult]
) -> tuple[list[RoundResult], list[float]]:
    """Return the rounds that have a measure, and its scaled values."""
    results = [result for result in rounds if getattr(result, measure.name) is not None]
    return results, [measure.scale * getattr(result, measure.name) for result in results]


def round_charts(rounds: Sequence[RoundResult], unit: Unit) -> list[Chart]:
    """Return charts of figures on held-out rows and of private metrics, by round."""
    charts = []
    for measure in (ACCURACY, LOSS):
        results, values = measured(measure, rounds)
        if results:
            charts.append(declared(measure.name, [Series(measure.name, _numbers(results), values)]))
    figures = dict.fromkeys(name for result in rounds for name in result.figures)
    titles = dict.fromkeys(name.partition(": ")[0] for name in figures)
    charts += [_figure_chart(rounds, title, figures) for title in titles]
    spreads = dict.fromkeys(name for result in rounds for name in result.held_out_users)
    charts += [_users_chart(rounds, name) for name in spreads]
    metrics = dict.fromkeys(name for result in rounds for name in result.scalar_metrics)
    return [*charts, *(_metric_chart(rounds, name, unit) for name in metrics)]


def _front_charts(record: RunRecord) -> list[Chart]:
    finite = [result for result in record.rounds if math.isfinite(result.epsilon)]
    results, values = measured(ACCURACY, finite)
    line = Series("models of this run", [result.epsilon for result in results], values)
    words = {"delta": record.delta, "unit": _level(record)}
    return [declared("front", [line], words)] if results else []


def _figure_chart(rounds: Sequence[RoundResult], title: str, figures: Iterable[str]) -> Chart:
    """Return a chart of a figure of all rows, or of each group of rows."""
    lines = []
    for name in figures:
        figure, _, group = name.partition(": ")
        if figure == title and group != "gap":
            results = [result for result in rounds if name in result.figures]
            values = [result.figures[name] for result in results]
            lines.append(Series(group or name, _numbers(results), values))
    return declared("figure", lines, {"figure": title}, f"figure-{quote(title, safe='')}")


def _users_chart(rounds: Sequence[RoundResult], name: str) -> Chart:
    results = [result for result in rounds if name in result.held_out_users]
    spreads = [result.held_out_users[name] for result in results]
    low, median, high = ([spread[key] for spread in spreads] for key in ("q10", "q50", "q90"))
    line = Series("median of held-out users, 10% to 90%", _numbers(results), median, low, high)
    mean = Series("their mean", _numbers(results), [spread["mean"] for spread in spreads])
    return declared("users", [line, mean], {"figure": name}, f"users-{quote(name, safe='')}")


def _metric_chart(rounds: Sequence[RoundResult], name: str, unit: Unit) -> Chart:
    results = [result for result in rounds if name in result.scalar_metrics]
    values = [result.scalar_metrics[name] for result in results]
    noise = [2.0 * result.metrics_noise_stddev.get(name, 0.0) for result in results]
    low = [value - half for value, half in zip(values, noise, strict=True)]
    high = [value + half for value, half in zip(values, noise, strict=True)]
    line = Series("released, ± 2 std. dev. of its noise", _numbers(results), values, low, high)
    words = {"metric": name, **unit_words(unit)}
    kind = "evaluation" if name.startswith(EVALUATION_PREFIX) else "metric"
    kind = "contributors" if name == CONTRIBUTORS_METRIC else kind
    return declared(kind, [line], words, f"metric-{quote(name, safe='')}")


def norms_charts(records: Sequence[RunRecord], of: str = "") -> list[Chart]:
    """Return charts of clipping norms, and of update norms if recorded, by round.

    `records` are one run, or the seeds of a study's arm `of`.
    """
    suffix = f"-{of}" if of else ""
    seeds = f"Means over {len(records)} seeds, bands from the smallest value to the largest."
    words = unit_words(_sampled_unit(records[0]))
    words |= {"of": f"{of}: " if of else "", "seeds": seeds if len(records) > 1 else ""}
    norms = _lines([[(r.round, r.clipping_norms) for r in run.rounds] for run in records])
    colours = {line.name: number for number, line in enumerate(norms)}
    series = [_group(line, "clipping norm", colours) for line in norms]
    if not all(record.simulation_only for record in records):
        return [declared("norms", series, words, f"norms{suffix}")]
    exact = _simulation_only(records, "group_norms")
    series += [_group(line, "mean update norm", colours) for line in exact if line.name in colours]
    charts = [declared("update-norms", series, words, f"norms{suffix}")]
    # A single layer is a vector group, which the first chart shows.
    if len(layers := _simulation_only(records, "update_norms")) > 1:
        charts.append(declared("layers", layers, words, f"layers{suffix}"))
    return charts


def _group(line: Series, label: str, colours: Mapping[str, int]) -> Series:
    return replace(line, name=f"{label} of {line.name}", colour=colours[line.name])


def _clipped_charts(record: RunRecord) -> list[Chart]:
    shares = _simulation_only([record], "clipped")
    percent = [replace(line, y=[y and 100.0 * y for y in line.y]) for line in shares]
    signal = _simulation_only([record], "signal_to_noise")
    words = unit_words(_sampled_unit(record))
    charts = [declared("clipped", percent, words), declared("signal", signal, words)]
    return [chart for chart in charts if chart.series]


def _simulation_only(records: Sequence[RunRecord], name: str) -> list[Series]:
    """Return dashed lines of a field of `SimulationOnlyRound`."""
    name = f"simulation_only_{name}"
    lines = _lines([[(r.round, getattr(r, name)) for r in run.simulation_only] for run in records])
    return [replace(line, dashed=True) for line in lines]


def _lines(runs: Sequence[Iterable[tuple[int, Figures]]]) -> list[Series]:
    """Return a line by round for each name: the mean over runs, and the range of several runs."""
    values: dict[str, dict[int, list[float]]] = {}
    for number, figures in itertools.chain.from_iterable(runs):
        for name, value in figures.items():
            sample = values.setdefault(name, {}).setdefault(number, [])
            sample += [value] if value is not None and math.isfinite(value) else []
    lines = []
    for name, by_round in values.items():
        rounds = sorted(by_round)
        samples = [by_round[number] for number in rounds]
        means = [sum(sample) / len(sample) if sample else None for sample in samples]
        low, high = ([end(sample, default=None) for sample in samples] for end in (min, max))
        band = (low, high) if len(runs) > 1 else ((), ())
        lines.append(Series(name, rounds, means, *band))
    return lines


def _numbers(rounds: Iterable[RoundResult]) -> list[float]:
    return [result.round for result in rounds]
