"""The page of one run, and the figures in its folder."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from fedpriv import __version__
from fedpriv.accounting.accountant import PrivacyLoss
from fedpriv.accounting.accountants import accountant_named
from fedpriv.accounting.pricing import Cost, cost_of
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.budget import merge_equal
from fedpriv.report.charts import ROUNDS, Axis, Chart, Series, save
from fedpriv.report.guarantee import assumptions, privacy_sections, users_of, warnings
from fedpriv.report.page import Card, Page, Section, Term
from fedpriv.report.records import Figures, RunRecord, versions
from fedpriv.report.tables import format_epsilon
from fedpriv.training.rounds import RoundResult

FOOTER = (
    f"Written by fedpriv {__version__}. Everything on this page was released by the run and is "
    "covered by its (ε, δ), except accuracy and loss on held-out rows, and what is marked as "
    "simulation only."
)
_NO_GUARANTEE = (
    "Dashed lines were computed from users' data without noise: they exist in simulations only, "
    "and must not be published of real users."
)


def page_of_run(record: RunRecord) -> Page:
    """The page of a run: what came out, what it cost, and how both can be checked.

    Raises:
        UnsupportedEventError: the plan's accountant has no analysis of the ledger's events.
    """
    loss = loss_of(record)
    front = front_chart(record)
    norms = [*norms_charts([record]), *_clipped_charts(record)] if record.rounds else []
    sections = [
        _summary(record, loss),
        *([assumptions(loss, record.ledger)] if loss else []),
        Section(
            "accuracy",
            "How good the model is",
            [] if record.rounds else ["No round was released."],
            charts=round_charts(record.rounds),
        ),
        *([Section("front", "Accuracy and privacy", charts=[front])] if front else []),
        *privacy_sections(loss, cost_or_reason(record), record.ledger),
        *([Section("norms", "Clipping", charts=norms)] if norms else []),
        _ledger_section(record),
        Section(
            "plan",
            "Resolved plan",
            ["As it was run, with every default filled in; it can be run again."],
            listing=record.plan,
        ),
        software_section(),
    ]
    return Page(record.name, f"A run on {record.ledger.population}, by fedpriv", sections, FOOTER)


def write_run_figures(
    rounds: Sequence[RoundResult], name: str, delta: float, budget: float, folder: Path
) -> None:
    """Write accuracy, loss, ε and private metrics by round as PNG and SVG.

    Args:
        rounds: of the run, in order.
        name: of the run.
        delta: δ at which ε was computed.
        budget: the most ε; infinity if there is none.
        folder: of the run; figures in it are replaced.

    Raises:
        OSError: a file cannot be written.
    """
    charts = round_charts(rounds)
    if rounds and all(math.isfinite(each.epsilon) for each in rounds):
        charts.append(_spent_chart(rounds, delta, budget))
    for chart in charts:
        save(replace(chart, title=f"{name}: {chart.title}"), folder)


def loss_of(record: RunRecord) -> PrivacyLoss | None:
    """What all charges of a run's ledger cost, by the plan's accountant; None without charges."""
    if not record.ledger.charges:
        return None
    events = merge_equal(record.ledger.events)
    return accountant_named(record.accountant).epsilon(events, record.delta)


def cost_or_reason(record: RunRecord) -> Cost | str:
    """Curves of a run's ledger, or the sentence why it has none."""
    try:
        return cost_of(record.ledger, record.delta)
    except (InvalidValueError, UnsupportedEventError) as error:
        return str(error)


def software_section() -> Section:
    """The versions that wrote the page; those of a run are in its plan."""
    note = (
        "With these versions the ledger was verified and priced and this page was written. The "
        "versions a run began with are at the head of its plan."
    )
    terms = [Term(*each) for each in versions().items()]
    return Section("software", "Software", [note], terms=terms)


def _summary(record: RunRecord, loss: PrivacyLoss | None) -> Section:
    last = next((each for each in reversed(record.rounds) if each.loss is not None), None)
    cards = []
    if last is not None:
        measured = (
            ("loss", f"{last.loss:.4g}")
            if last.accuracy is None
            else ("accuracy", f"{last.accuracy:.2%}")
        )
        cards.append(Card(*measured, "on held-out rows, last model"))
    cards += [
        Card("user-level ε", format_epsilon(loss.epsilon if loss else 0.0), _epsilon_note(record)),
        Card("δ", f"{record.delta:g}", f"N = {users_of(record.ledger):,} users enrolled"),
        Card("rounds", f"{len(record.rounds):,}", f"of {record.rounds_planned:,} planned"),
    ]
    return Section(
        "summary",
        "Summary",
        [_statement(record, loss)],
        answers=1,
        warnings=warnings(record.delta, record.ledger),
        cards=cards,
    )


def _epsilon_note(record: RunRecord) -> str:
    runs = record.ledger.runs()
    if len(runs) < 2:
        return "no budget was set" if record.budget is None else f"budget {record.budget:g}"
    own = merge_equal(runs.get(record.name, []))
    alone = accountant_named(record.accountant).epsilon(own, record.delta).epsilon if own else 0.0
    return f"all runs of the ledger; this run alone {format_epsilon(alone)}"


def _statement(record: RunRecord, loss: PrivacyLoss | None) -> str:
    if loss is None:
        return "Nothing was released, so nothing about anyone's data was."
    if math.isinf(loss.epsilon):
        return "No finite ε is proven for what was released: it guarantees nothing."
    accountant = f"by the {loss.accountant} accountant, {loss.bound}"
    return (
        f"Everything that was released is ({format_epsilon(loss.epsilon)}, {record.delta:g})-"
        f"differentially private for each whole user ({loss.relation} neighbours; {accountant})."
    )


def _ledger_section(record: RunRecord) -> Section:
    """What was checked of the ledger."""
    checked = record.verification
    head = f"{checked.head.count}:{checked.head.hash}"
    terms = {
        "Hash chain": f"Intact: {checked.head.count} charges, none altered.",
        "Cohorts": (
            "Each recorded cohort fits the commitment in its charge."
            if checked.cohorts
            else "Not checked: the record of who took part is not here, as is right in a copy."
        ),
        "Releases": f"All {checked.releases} releases of this run have their charge in the ledger.",
        "Population": record.ledger.population,
        "Runs in the ledger": ", ".join(record.ledger.runs()) or "none",
        "Head": head,
        "Check it yourself": f"fedpriv ledger verify {record.ledger.path.name} --head {head}",
    }
    return Section("ledger", "Ledger verification", terms=[Term(*each) for each in terms.items()])


def round_charts(rounds: Sequence[RoundResult]) -> list[Chart]:
    """Accuracy and loss by round where they were measured, and private metrics with their noise."""
    charts = []
    measured = [each for each in rounds if each.accuracy is not None]
    if measured:
        caption = (
            "Share of held-out rows that the released model classifies correctly. The rows belong "
            "to no enrolled user, and the guarantee does not cover them."
        )
        axis = Axis("accuracy on held-out rows", "%")
        line = Series("accuracy", *_by_round(measured, [_percent(r.accuracy) for r in measured]))
        charts.append(Chart("accuracy", "Accuracy by round", caption, ROUNDS, axis, [line]))
    measured = [each for each in rounds if each.loss is not None]
    if measured:
        caption = "Mean loss of the released model on the same held-out rows."
        axis = Axis("mean loss of held-out rows", "unit of the loss")
        line = Series("loss", *_by_round(measured, [each.loss for each in measured]))
        charts.append(Chart("loss", "Loss by round", caption, ROUNDS, axis, [line]))
    names = dict.fromkeys(name for each in rounds for name in each.scalar_metrics)
    return [*charts, *(_metric_chart(rounds, name) for name in names)]


def front_chart(record: RunRecord) -> Chart | None:
    """Accuracy against the ε spent until then; None if accuracy was not measured."""
    points = [each for each in record.rounds if each.accuracy is not None]
    if not points:
        return None
    spent = [each.epsilon for each in points]
    return Chart(
        "front",
        "Accuracy against ε",
        "Each point is a released model: how accurate it is, and what all releases of the ledger "
        "up to it cost. A curve that rises late pays for its accuracy with privacy; one that has "
        "gone flat pays for nothing.",
        Axis(f"user-level ε spent, at δ = {record.delta:g}", "no unit"),
        Axis("accuracy on held-out rows", "%"),
        [Series("models of this run", spent, [_percent(each.accuracy) for each in points])],
    )


def _metric_chart(rounds: Sequence[RoundResult], name: str) -> Chart:
    found = [each for each in rounds if name in each.scalar_metrics]
    values = [each.scalar_metrics[name] for each in found]
    noise = [2.0 * each.metrics_noise_stddev.get(name, 0.0) for each in found]
    line = Series(
        "released, ± 2 std. dev. of its noise",
        *_by_round(found, values),
        low=[value - width for value, width in zip(values, noise, strict=True)],
        high=[value + width for value, width in zip(values, noise, strict=True)],
    )
    return Chart(
        f"metric-{quote(name, safe='')}",
        f"Private metric {name} by round",
        "Average over the users of a round, measured at the model before it and released with "
        "noise: the guarantee covers it.",
        ROUNDS,
        Axis("average over users", "unit of the metric"),
        [line],
    )


def _spent_chart(rounds: Sequence[RoundResult], delta: float, budget: float) -> Chart:
    series = [Series("spent", *_by_round(rounds, [each.epsilon for each in rounds]))]
    if math.isfinite(budget):
        ends = [rounds[0].number, rounds[-1].number]
        series.append(Series("budget", ends, [budget, budget], dashed=True, marked=False, colour=7))
    return Chart(
        "epsilon",
        "ε by round",
        "What all charges of the ledger up to each round cost together.",
        ROUNDS,
        Axis(f"user-level ε spent, at δ = {delta:g}", "no unit", from_zero=True),
        series,
    )


def norms_charts(records: Sequence[RunRecord], of: str = "") -> list[Chart]:
    """Clipping norms by round, and, where all runs recorded them, the norms they were applied to.

    Args:
        records: the run, or the runs of an arm under each seed; at least one.
        of: identifies them, if the page has several.
    """
    end, beginning = (f"-{of}", f"{of}: ") if of else ("", "")
    seeds = f"Means over {len(records)} seeds, bands from the least seed to the largest. "
    noted = seeds if len(records) > 1 else ""
    norms = _lines([(each.number, each.clipping_norms) for each in run.rounds] for run in records)
    colours = {line.name: number for number, line in enumerate(norms)}
    released = [
        replace(line, name=f"clipping norm of {line.name}", colour=colours[line.name])
        for line in norms
    ]
    caption = (
        "A user's part of a vector group is scaled down to the group's clipping norm where it is "
        f"longer. Clipping norms were released with the model. {noted}"
    )
    if not all(record.simulation_only for record in records):
        axis = Axis("clipping norm", "scaled L2", from_zero=True)
        title = f"{beginning}Clipping norms by round"
        return [Chart(f"norms{end}", title, caption, ROUNDS, axis, released)]
    true = [
        replace(line, name=f"mean update norm of {line.name}", colour=colours[line.name])
        for line in _recorded(records, "simulation_only_group_norms")
        if line.name in colours
    ]
    return [
        _simulation_only(
            f"norms{end}",
            f"{beginning}Update norms against clipping norms, by vector group",
            caption,
            Axis("norm of a user's part", "scaled L2", log=True),
            [*released, *true],
        ),
        _simulation_only(
            f"layers{end}",
            f"{beginning}Update norms by layer",
            f"Mean over the users of a round, before clipping. {noted}",
            Axis("norm of a user's update", "L2", log=True),
            _recorded(records, "simulation_only_update_norms"),
        ),
    ]


def _clipped_charts(record: RunRecord) -> list[Chart]:
    """Share of users clipped and signal to noise by round, where they were recorded."""
    shares = _recorded([record], "simulation_only_clipped")
    charts = [
        _simulation_only(
            "clipped",
            "Users that were clipped, by vector group",
            "Share of the users of a round whose part was longer. ",
            Axis("users clipped", "%", ends=(0.0, 100.0)),
            [replace(line, y=[_percent(share) for share in line.y]) for line in shares],
        ),
        _simulation_only(
            "signal",
            "Signal to noise, by layer",
            "Norm of the sum of clipped updates over that of the noise on it: below 1 a single "
            "round moves the model more by noise than by users. ",
            Axis("signal to noise", "no unit", log=True),
            _recorded([record], "simulation_only_signal_to_noise"),
        ),
    ]
    return [chart for chart in charts if chart.series]


def _simulation_only(
    name: str, title: str, caption: str, axis: Axis, series: Sequence[Series]
) -> Chart:
    warned = f"{caption}{_NO_GUARANTEE}"
    return Chart(name, title, warned, ROUNDS, axis, series, simulation_only=True)


def _recorded(records: Sequence[RunRecord], name: str) -> list[Series]:
    """Dashed lines of true figures of rounds, an attribute of `SimulationOnlyRound`."""
    lines = _lines(
        [(each.number, getattr(each, name)) for each in run.simulation_only] for run in records
    )
    return [replace(line, dashed=True) for line in lines]


def _lines(runs: Iterable[Iterable[tuple[int, Figures]]]) -> list[Series]:
    """A line by round for each name: the mean over runs, between the least and the largest.

    Where no run has a number the line has a gap. One run has no band.
    """
    values: dict[str, dict[int, list[float]]] = {}
    count = 0
    for run in runs:
        count += 1
        for number, figures in run:
            for name, value in figures.items():
                known = values.setdefault(name, {}).setdefault(number, [])
                known += [value] if value is not None and math.isfinite(value) else []
    lines = []
    for name, by_round in values.items():
        rounds = sorted(by_round)
        found = [by_round[number] for number in rounds]
        line = Series(name, rounds, [sum(each) / len(each) if each else None for each in found])
        if count > 1:
            low = [min(each, default=None) for each in found]
            line = replace(line, low=low, high=[max(each, default=None) for each in found])
        lines.append(line)
    return lines


def _by_round(
    rounds: Sequence[RoundResult], values: Sequence[float | None]
) -> tuple[list[float], Sequence[float | None]]:
    return [each.number for each in rounds], values


def _percent(share: float | None) -> float | None:
    return None if share is None else 100.0 * share
