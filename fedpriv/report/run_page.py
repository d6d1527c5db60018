"""The page of one run, and its charts as files."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import numpy as np

from fedpriv.accounting.accountants import PrivacyLoss, accountant_named, format_epsilon
from fedpriv.audit import AuditResult
from fedpriv.errors import DataError
from fedpriv.ledger.events import SamplingEvent, Unit, merge_equal
from fedpriv.ledger.ledger import paid_events
from fedpriv.report.charts import Chart, Series, declared, save, texts
from fedpriv.report.guarantee import (
    assumptions,
    loss_of,
    privacy_sections,
    unit_of,
    unit_words,
    users_of,
    warnings,
    with_warnings,
)
from fedpriv.report.page import Card, Page, PageSection
from fedpriv.report.records import Figures, RunRecord, versions
from fedpriv.report.study_charts import measured
from fedpriv.report.tables import format_epsilon_low, plural
from fedpriv.studies.results import ACCURACY, LOSS
from fedpriv.support.disk import writing
from fedpriv.training.rounds import (
    CONTRIBUTORS_METRIC,
    EVALUATION_PREFIX,
    RoundResult,
    best_round,
    contributors_text,
    own_charges,
)


def page_of_run(record: RunRecord) -> Page:
    """The page of a run: what came out, what it cost, and how both can be checked."""
    loss = loss_of(record)
    norms = [*norms_charts([record]), *_clipped_charts(record)] if record.rounds else []
    nothing = [] if record.rounds else ["No round was released."]
    sections = [
        _summary(record, loss),
        *([assumptions(loss, record.ledger)] if loss else []),
        PageSection("accuracy", "How good the model is", nothing, charts=_charts_of_rounds(record)),
        *privacy_sections(record),
        *([_audit_section(record.audit)] if record.audit else []),
        PageSection("norms", "Clipping", charts=norms),
        _ledger_section(record),
        PageSection("plan", "Resolved plan", [texts()["plan"]["run"]], listing=record.plan),
        software_section(),
    ]
    return Page(record.name, f"A run on {record.ledger.population}, by fedpriv", sections)


def write_run_charts(record: RunRecord, folder: Path) -> list[Path]:
    """Write accuracy, loss, ε and private metrics by round as PNG and SVG; return the files."""
    rounds, charts = record.rounds, _charts_of_rounds(record)
    if rounds and all(math.isfinite(each.epsilon) for each in rounds):
        series = [Series("spent", _numbers(rounds), [each.epsilon for each in rounds])]
        if record.budget is not None and math.isfinite(record.budget):
            ends, both = [rounds[0].round, rounds[-1].round], [record.budget] * 2
            series.append(Series("budget", ends, both, dashed=True, marked=False, colour=7))
        words = {"delta": record.delta, "unit": rounds[0].unit}
        spent = declared("spent", series, words, "epsilon")
        charts.append(with_warnings(spent, record.delta, record.ledger))
    if not charts:
        raise DataError(
            f"the run in {record.folder} has released no round; there is nothing to draw"
        )
    titled = [replace(chart, title=f"{record.name}: {chart.title}") for chart in charts]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        return [file for chart in titled for file in save(chart, folder)]


def software_section() -> PageSection:
    """The versions that wrote the page."""
    return PageSection("software", "Software", [texts()["plan"]["versions"]], terms=versions())


def _summary(record: RunRecord, loss: PrivacyLoss | None) -> PageSection:
    cards, done = list[Card](), record.rounds[-1].round if record.rounds else 0
    last = next((each for each in reversed(record.rounds) if each.loss is not None), None)
    if last is not None:
        name, value = "loss", f"{last.loss:.4g}"
        if last.accuracy is not None:
            name, value = "accuracy", f"{last.accuracy:.2%}"
        shown = {name: value, **{n: f"{v:.4g}" for n, v in last.figures.items()}}
        which = "last model" if last.round == done else f"after round {last.round:,}"
        cards += [Card(n, text, f"on held-out rows, {which}") for n, text in shown.items()]
    best = best_round(record.rounds)
    if best is not None and best.round < done:
        note = f"{best.measured} on the rows that chose it, likely to be worse on others"
        cards.append(Card("best model", f"round {best.round:,}", note))
    unit, n = unit_of(record.ledger), users_of(record.ledger)
    cards += _contributors(record)
    if (audit := record.audit) is not None:
        note = f"shown by {audit.canaries:,} canaries, at 95% confidence"
        cards.append(Card("audit", f"ε ≥ {format_epsilon_low(audit.epsilon_low) or 0}", note))
    cards += [
        Card(
            f"{unit}-level ε", format_epsilon(loss.epsilon if loss else 0.0), _epsilon_note(record)
        ),
        Card("δ", f"{record.delta}", f"N = {n:,} {plural(unit)} enrolled"),
        Card("rounds", f"{done:,}", f"of {record.rounds_planned:,} planned"),
    ]
    warned, answer = warnings(record.delta, record.ledger), [_statement(record, loss)]
    if loss is not None and math.isinf(loss.epsilon):
        warned, answer = [*answer, *warned], []
    return PageSection(
        "summary",
        "Summary",
        answer,
        answers=1,
        warnings=warned,
        first=_front_charts(record),
        cards=cards,
    )


def _sampling(record: RunRecord) -> SamplingEvent | None:
    """How rounds were drawn that were released."""
    released = {result.charge for result in record.rounds}
    charges = (row.event.sampling for row in record.ledger.charges if row.hash in released)
    return next(charges, None)


def _drawn(record: RunRecord) -> Unit:
    """What rounds draw, clip and count: the unit, or examples of users in places of their own."""
    sampling = _sampling(record)
    of_users = sampling is not None and sampling.examples_per_user is not None
    return Unit.EXAMPLE if of_users else unit_of(record.ledger)


def _contributors(record: RunRecord) -> list[Card]:
    """How many updates counted, if that was released."""
    sampling = _sampling(record)
    if sampling is None:
        return []
    counted, _, expected = contributors_text(record.rounds, sampling).partition(" of ")
    note = f"of {expected} {plural(_drawn(record))} expected in a round, on average"
    return [Card("contributors", counted, note)] if counted else []


def _epsilon_note(record: RunRecord) -> str:
    charges = own_charges(record.name, record.ledger.charges)
    if len(charges) == len(record.ledger.charges):
        return "no budget was set" if record.budget is None else f"budget {record.budget:g}"
    own = merge_equal(paid_events(charges))
    alone = accountant_named(record.accountant).epsilon(own, record.delta).epsilon if own else 0.0
    return f"all runs of the ledger; this run alone {format_epsilon(alone)}"


def _statement(record: RunRecord, loss: PrivacyLoss | None) -> str:
    if loss is None:
        return "Nothing was released, so nothing about anyone's data was."
    if math.isinf(loss.epsilon):
        return "No privacy: no finite ε is proven for what was released. It guarantees nothing."
    accountant = f"by the {loss.accountant} accountant, {loss.bound}"
    return (
        f"Everything that was released is ({format_epsilon(loss.epsilon)}, {record.delta})-"
        f"differentially private for each whole {loss.unit} ({loss.relation} neighbours; "
        f"{accountant})."
    )


def _audit_section(found: AuditResult) -> PageSection:
    """What the run found in its own releases."""
    told = texts()["audit"]
    estimate = "none" if found.epsilon_estimate is None else f"{found.epsilon_estimate:.2f}"
    words = {**vars(found), "estimate": estimate, "claimed": format_epsilon(found.epsilon)}
    lows = {"low": found.epsilon_low, "mu": found.mu_low}
    words |= {name: format_epsilon_low(low) or "0" for name, low in lows.items()}
    terms = {term: text.format(**words) for term, text in told["terms"].items()}
    warned = [] if found.consistent else [told["refuted"]]
    chart = declared("audit", _scores(found), {"guesses": found.guesses})
    answer = [f"What was released shows {found.text}."]
    return PageSection(
        "audit",
        "Audit",
        [*answer, told["cannot"]],
        answers=1,
        warnings=warned,
        terms=terms,
        charts=[chart],
    )


def _scores(found: AuditResult) -> list[Series]:
    """How many canaries have which score, of those that were there and those that were not."""
    there = np.array(found.there)
    scores = np.array(found.scores)
    ends = np.histogram_bin_edges(scores, bins=30)
    middles = ((ends[1:] + ends[:-1]) / 2.0).tolist()
    return [
        Series(name, middles, np.histogram(scores[chosen], ends)[0].tolist(), dashed=dashed)
        for name, chosen, dashed in (
            ("canaries that were there", there, False),
            ("canaries that were not", ~there, True),
        )
    ]


def _ledger_section(record: RunRecord) -> PageSection:
    checked, told = record.verification, texts()["ledger"]
    words = {
        "checked": checked,
        "cohorts": told["checked"] if checked.cohorts else told["not_checked"],
        "population": record.ledger.population,
        "runs": ", ".join(record.ledger.runs()) or "none",
        "head": f"{checked.head.count}:{checked.head.hash}",
        "file": record.ledger.path.name,
    }
    terms = {term: text.format(**words) for term, text in told["terms"].items()}
    return PageSection("ledger", "Ledger verification", terms=terms)


def _charts_of_rounds(record: RunRecord) -> list[Chart]:
    return round_charts(record.rounds, _drawn(record))


def round_charts(rounds: Sequence[RoundResult], drawn: Unit) -> list[Chart]:
    """Figures on held-out rows by round where they were measured, and private metrics."""
    charts = []
    for measure in (ACCURACY, LOSS):
        found, values = measured(measure, rounds)
        if found:
            charts.append(declared(measure.name, [Series(measure.name, _numbers(found), values)]))
    charts += [
        _figure_chart(rounds, n) for n in dict.fromkeys(n for r in rounds for n in r.figures)
    ]
    users = dict.fromkeys(name for each in rounds for name in each.held_out_users)
    charts += [_users_chart(rounds, name) for name in users]
    names = dict.fromkeys(name for each in rounds for name in each.scalar_metrics)
    return [*charts, *(_metric_chart(rounds, name, drawn) for name in names)]


def _front_charts(record: RunRecord) -> list[Chart]:
    spent = [each for each in record.rounds if math.isfinite(each.epsilon)]
    points, values = measured(ACCURACY, spent)
    line = Series("models of this run", [each.epsilon for each in points], values)
    words = {"delta": record.delta, "unit": unit_of(record.ledger)}
    return [declared("front", [line], words)] if points else []


def _figure_chart(rounds: Sequence[RoundResult], name: str) -> Chart:
    found = [each for each in rounds if name in each.figures]
    line = Series(name, _numbers(found), [each.figures[name] for each in found])
    return declared("figure", [line], {"figure": name}, f"figure-{quote(name, safe='')}")


def _users_chart(rounds: Sequence[RoundResult], name: str) -> Chart:
    found = [each for each in rounds if name in each.held_out_users]
    over = [each.held_out_users[name] for each in found]
    low, median, high = ([each[end] for each in over] for end in ("q10", "q50", "q90"))
    line = Series("median of held-out users, 10% to 90%", _numbers(found), median, low, high)
    mean = Series("their mean", _numbers(found), [each["mean"] for each in over])
    return declared("users", [line, mean], {"figure": name}, f"users-{quote(name, safe='')}")


def _metric_chart(rounds: Sequence[RoundResult], name: str, drawn: Unit) -> Chart:
    found = [each for each in rounds if name in each.scalar_metrics]
    values = [each.scalar_metrics[name] for each in found]
    noise = [2.0 * each.metrics_noise_stddev.get(name, 0.0) for each in found]
    low = [value - half for value, half in zip(values, noise, strict=True)]
    high = [value + half for value, half in zip(values, noise, strict=True)]
    line = Series("released, ± 2 std. dev. of its noise", _numbers(found), values, low, high)
    words = {"metric": name, **unit_words(drawn)}
    kind = "evaluation" if name.startswith(EVALUATION_PREFIX) else "metric"
    kind = "contributors" if name == CONTRIBUTORS_METRIC else kind
    return declared(kind, [line], words, f"metric-{quote(name, safe='')}")


def norms_charts(records: Sequence[RunRecord], of: str = "") -> list[Chart]:
    """Clipping norms by round, and update norms if recorded, of a run or of an arm's seeds."""
    end = f"-{of}" if of else ""
    seeds = f"Means over {len(records)} seeds, bands from the least seed to the largest."
    words = unit_words(_drawn(records[0]))
    words |= {"of": f"{of}: " if of else "", "seeds": seeds if len(records) > 1 else ""}
    norms = _lines([[(each.round, each.clipping_norms) for each in run.rounds] for run in records])
    colours = {line.name: number for number, line in enumerate(norms)}
    released = [_group(line, "clipping norm", colours) for line in norms]
    if not all(record.simulation_only for record in records):
        return [declared("norms", released, words, f"norms{end}")]
    true = _recorded(records, "group_norms")
    released += [_group(line, "mean update norm", colours) for line in true if line.name in colours]
    charts = [declared("update-norms", released, words, f"norms{end}")]
    # One layer is one vector group, which the first chart shows.
    if len(layers := _recorded(records, "update_norms")) > 1:
        charts.append(declared("layers", layers, words, f"layers{end}"))
    return charts


def _group(line: Series, what: str, colours: Mapping[str, int]) -> Series:
    return replace(line, name=f"{what} of {line.name}", colour=colours[line.name])


def _clipped_charts(record: RunRecord) -> list[Chart]:
    shares = _recorded([record], "clipped")
    percent = [replace(line, y=[y and 100.0 * y for y in line.y]) for line in shares]
    signal = _recorded([record], "signal_to_noise")
    words = unit_words(_drawn(record))
    charts = [declared("clipped", percent, words), declared("signal", signal, words)]
    return [chart for chart in charts if chart.series]


def _recorded(records: Sequence[RunRecord], name: str) -> list[Series]:
    """Dashed lines of true figures of rounds, of an attribute of `SimulationOnlyRound`."""
    name = f"simulation_only_{name}"
    lines = _lines([[(r.round, getattr(r, name)) for r in run.simulation_only] for run in records])
    return [replace(line, dashed=True) for line in lines]


def _lines(runs: Sequence[Iterable[tuple[int, Figures]]]) -> list[Series]:
    """A line by round for each name: the mean over runs, between the least and the largest."""
    values: dict[str, dict[int, list[float]]] = {}
    for number, figures in itertools.chain.from_iterable(runs):
        for name, value in figures.items():
            known = values.setdefault(name, {}).setdefault(number, [])
            known += [value] if value is not None and math.isfinite(value) else []
    lines = []
    for name, by_round in values.items():
        rounds = sorted(by_round)
        found = [by_round[number] for number in rounds]
        line = Series(name, rounds, [sum(each) / len(each) if each else None for each in found])
        low, high = ([end(each, default=None) for each in found] for end in (min, max))
        lines.append(replace(line, low=low, high=high) if len(runs) > 1 else line)
    return lines


def _numbers(rounds: Iterable[RoundResult]) -> list[float]:
    return [each.round for each in rounds]
