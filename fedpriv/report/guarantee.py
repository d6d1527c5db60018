"""The meaning of a ledger's ε: in words, and as errors of tests."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from fedpriv.accounting.accountants import PrivacyLoss, accountant_named, trust_text
from fedpriv.accounting.fdp import TradeOff, gaussian_trade_off, trade_off
from fedpriv.accounting.pricing import (
    LedgerContent,
    default_delta,
    losses_of,
    weakest_arithmetic,
    weakest_randomness,
)
from fedpriv.accounting.risks import Risks, risks_of
from fedpriv.ledger.events import Projection, Randomness, SamplingPolicy, Unit, merge_equal
from fedpriv.report.charts import Chart, PageSection, Series, declared, save_all, texts
from fedpriv.report.records import RunRecord
from fedpriv.report.tables import Column, Table, plural, protected
from fedpriv.support.checks import epsilon_down, epsilon_up, percent_up, text_up

_PUBLIC_POLICIES = {SamplingPolicy.EVERY_USER, SamplingPolicy.SEPARATED}  # cohorts are public
_LARGE = 20.0  # from here on, e^ε is written as a power of ten
_FALSE_ALARMS = 0.05
_ERRORS, _WIDEST = 121, 4.0  # number of type I errors of a trade-off, and their range in stddevs


def users_of(ledger: LedgerContent) -> int:
    """Return N, the largest number of enrolled users in any charge; 0 without charges."""
    return max((row.event.sampling.population for row in ledger.charges), default=0)


def unit_of(ledger: LedgerContent) -> Unit:
    """Return the unit that all charges of a ledger protect; users if there are no charges."""
    return next((row.event.sampling.unit for row in ledger.charges), Unit.USER)


def unit_words(unit: str) -> dict[str, object]:
    """Return the words of texts for one protected unit and for several."""
    return {"unit": unit, "units": plural(unit)}


def warnings(delta: float, ledger: LedgerContent) -> list[str]:
    """Return warnings about the ε of a ledger."""
    return [*about_releases(ledger), *large_delta(delta, ledger)]


def about_releases(ledger: LedgerContent) -> list[str]:
    """Return warnings about a ledger's releases that do not depend on δ."""
    seeded = weakest_randomness(ledger.charges) is Randomness.SEEDED
    about_seed = [texts()["warnings"]["seeded"]] if seeded else []
    return [*about_projection(ledger), *about_seed]


def about_projection(ledger: LedgerContent) -> list[str]:
    """Return a warning if the ledger is of a simulation that represents a larger population."""
    if (larger := projection_of(ledger)) is None:
        return []
    words: dict[str, object] = {"as_if": larger.population, "enrolled": users_of(ledger)}
    words |= unit_words(unit_of(ledger))
    return [texts()["warnings"]["projection"].format(**words)]


def projection_of(ledger: LedgerContent) -> Projection | None:
    """Return the larger population that a ledger's users represent, or None."""
    return next((row.event.sampling.projection for row in ledger.charges), None)


def with_warnings(chart: Chart, sentences: Sequence[str]) -> Chart:
    """Return a chart for use outside a page, with warnings in its caption."""
    return replace(chart, caption=" ".join([chart.caption, *sentences]))


def large_delta(delta: float, ledger: LedgerContent) -> list[str]:
    """Return a warning if δ ≥ 1/N, which allows a breach."""
    text, users = texts()["warnings"]["delta"], users_of(ledger)
    if not users or delta < 1.0 / users:
        return []
    return [text.format(delta=delta, share=1.0 / users, unit=unit_of(ledger))]


def assumptions(loss: PrivacyLoss, ledger: LedgerContent) -> PageSection:
    """Return an explanation of the ε of a ledger with charges, for readers new to the subject."""
    templates = texts()
    words = {
        "epsilon": _epsilon(loss),
        "relation": loss.relation,
        "compares": templates["relations"][loss.relation].format(unit=loss.unit),
        "unit": templates["units"][loss.unit],
        "protected": protected(ledger.charges) or "all who are enrolled",
        "sampling": _sampling(ledger),
        "delta": loss.delta,
        "trust": trust_text(row.event for row in ledger.charges),
        "share": 1.0 / users_of(ledger),
        "randomness": templates["randomness"][weakest_randomness(ledger.charges).name],
        "arithmetic": templates["arithmetics"][weakest_arithmetic(ledger.charges).name],
    }
    return terms_section("assumptions", "What ε says", templates["terms"], words)


def terms_section(
    name: str, title: str, templates: Mapping[str, str], words: Mapping[str, object]
) -> PageSection:
    """Return a section of terms whose explanations are templates, with words filled in."""
    terms = {term: text.format(**words) for term, text in templates.items()}
    return PageSection(name, title, terms=terms)


def loss_of(record: RunRecord, *, projected: bool = False) -> PrivacyLoss | None:
    """Return the cost of all charges of a run's ledger, by the plan's accountant; None if empty.

    If `projected`, it is the cost for the larger population that the users represent, if any.
    """
    events = merge_equal(record.ledger.events)
    if projected:
        events = tuple(event.as_if for event in events)
    return accountant_named(record.accountant).epsilon(events, record.delta) if events else None


def privacy_sections(record: RunRecord, by_round: Sequence[Chart]) -> list[PageSection]:
    """Return sections on ε by round and by accountant, and on the power of attackers."""
    ledger, unit = record.ledger, unit_of(record.ledger)
    if not ledger.charges:
        note = "Nothing was charged, so nothing was released: ε = 0."
        return [PageSection("privacy", "Privacy", [note])]
    losses = losses_of(ledger, record.delta)
    rows = []
    for loss in losses:
        proven = epsilon_down(loss.epsilon_low) if loss.epsilon_low else "–"
        rows.append((loss.accountant, loss.bound, proven, epsilon_up(loss.epsilon)))
    caption = f"All {len(ledger.charges)} charges of the ledger at δ = {record.delta}"
    columns = [Column("accountant", "text"), Column("what ε is", "text")]
    table = Table(caption, [*columns, Column("ε, lower end"), Column("ε")], rows)
    section = PageSection("epsilon", "ε by round", tables=[table], charts=by_round)
    # After an early end, the ledger does not bound what an attacker can tell.
    if record.early_epsilon is not None or math.isinf(losses[0].epsilon):
        return [section]
    curve = trade_off(ledger.events, losses[0].accountant)
    risks, chart = risks_of(curve), _trade_off_chart(curve, unit)
    title = "What an attacker can tell"
    powers = [_powers(risks, unit)]
    return [
        section,
        PageSection(chart.name, title, [risks.text(unit)], tables=powers, charts=[chart]),
    ]


def _powers(risks: Risks, unit: Unit) -> Table:
    """Return the largest power of any test at a few rates of false alarms."""
    names = ("false alarms", f"{plural(unit)} found, at most", "by guessing")
    rates = {percent_up(alpha): percent_up(power) for alpha, power in risks.power.items()}
    rows = [(alpha, power, alpha) for alpha, power in rates.items()]
    share = percent_up(risks.advantage).removesuffix("%")
    caption = f"No test beats guessing by more than {share} percentage points"
    return Table(caption, [*map(Column, names)], rows)


def _trade_off_chart(curve: TradeOff, unit: Unit) -> Chart:
    x, misses, gaussian, _ = zip(*_trade_off_rows(curve), strict=True)
    series = [Series(f"the ledger, by {curve.accountant}", x, misses)]
    series.append(Series(risks_of(curve).gaussian, x, gaussian, dashed=True))
    guessing = "perfect privacy: guessing"
    series.append(Series(guessing, [0.0, 1.0], [1.0, 0.0], dashed=True, marked=False, colour=7))
    # The caption states one point, a lower bound, which is rounded down.
    percent = math.floor(1000 * float(curve.type_two(_FALSE_ALARMS))) / 10
    words = {"false_alarms": _FALSE_ALARMS, "misses": percent}
    return declared("trade-off", series, words | unit_words(unit))


def _trade_off_rows(curve: TradeOff) -> list[list[float]]:
    """Return type I errors, and the type II errors of the ledger, of G_μ and of guessing."""
    # Even steps of the normal quantile show both ends of the curve, where it is steep.
    inner = ndtr(np.linspace(-_WIDEST, _WIDEST, _ERRORS - 2))
    type_one = np.concatenate([[0.0], inner, [1.0]])
    # The curve of a larger μ looks the same.
    gaussian = gaussian_trade_off(type_one, min(risks_of(curve).mu, 1e3))
    errors = type_one, curve.type_two(type_one), gaussian, 1.0 - type_one
    return [[*map(float, row)] for row in np.column_stack(errors)]


def write_trade_off(ledger: LedgerContent, folder: Path) -> list[Path]:
    """Write the trade-off function of a ledger as PNG, SVG and CSV, and return the files.

    The column `type_two` is a lower bound; `type_two_gaussian` belongs to G_μ.
    """
    best, *_ = losses_of(ledger, default_delta([ledger]))
    curve, table = trade_off(ledger.events, best.accountant), folder / "trade_off.csv"
    chart = with_warnings(_trade_off_chart(curve, unit_of(ledger)), about_releases(ledger))
    chart = replace(chart, name=table.stem, title=f"{ledger.population}: {chart.title}")
    files = save_all([chart], folder)
    with table.open("w", newline="", encoding="utf-8") as stream:
        names = ("type_one", "type_two", "type_two_gaussian", "type_two_perfect")
        csv.writer(stream).writerows([names, *_trade_off_rows(curve)])
    return [*files, table]


def _epsilon(loss: PrivacyLoss) -> str:
    if math.isinf(loss.epsilon):
        return "No finite ε is proven: the releases guarantee nothing."
    times = f"10^{math.ceil(loss.epsilon / math.log(10.0))}"
    if loss.epsilon < _LARGE:
        times = f"{float(text_up(math.exp(loss.epsilon), 3)):,.6g}"
    return (
        f"ε = {epsilon_up(loss.epsilon)}: any outcome of the releases is at most e^ε = "
        f"{times} times as likely under one population as under the other, up to δ."
    )


def _sampling(ledger: LedgerContent) -> str:
    events = [row.event.sampling for row in ledger.charges]
    parts = []
    for policy in dict.fromkeys(event.policy for event in events):
        selected = [event for event in events if event.policy is policy]
        schedules = [event.schedule for event in selected if event.schedule is not None]
        examples = {event.examples_per_user for event in selected if event.examples_per_user}
        numbers: dict[str, set[float] | set[int]] = {
            "q": {event.sampling_probability for event in selected},
            "m": {round(event.expected_cohort_size) for event in selected},
            "n": {schedule.rounds for schedule in schedules},
            "k": {schedule.participations for schedule in schedules} | examples,
            "b": {schedule.separation for schedule in schedules},
        }
        words = {name: _range(values) for name, values in numbers.items() if values}
        unit, users = selected[0].unit, _range({event.population for event in selected})
        draw = texts()["policies"][policy].format(unit=unit, **words)
        parts.append(f"{policy}: {draw}; N = {users} {plural(unit)} are enrolled")
    secret = {event.policy for event in events} - _PUBLIC_POLICIES
    secrecy = "is assumed to stay secret" if secret else "need not be secret"
    text = f"{'. '.join(parts)}. Who took part {secrecy}."
    if any(row.event.strategy != (1.0,) for row in ledger.charges):
        text += " Noise is correlated over the rounds of a series, and its key must stay secret."
    return text


def _range(values: set[float] | set[int]) -> str:
    ends = dict.fromkeys((min(values), max(values)))
    return " to ".join(f"{end:,}" if isinstance(end, int) else text_up(end) for end in ends)
