"""The meaning of a ledger's ε: in words, as charts, and as numbers in CSV."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context, Decimal
from pathlib import Path

import numpy as np
from scipy.special import ndtr

from fedpriv.accounting.accountants import (
    Bound,
    PrivacyLoss,
    accountant_named,
    format_epsilon,
)
from fedpriv.accounting.fdp import TradeOff, gaussian_trade_off
from fedpriv.accounting.pricing import (
    Cost,
    EpsilonCurve,
    LedgerContent,
    cost_of,
    weakest_arithmetic,
    weakest_randomness,
)
from fedpriv.errors import InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import Randomness, SamplingPolicy, Unit, merge_equal
from fedpriv.report.charts import Chart, Series, declared, save, texts
from fedpriv.report.page import PageSection
from fedpriv.report.records import RunRecord
from fedpriv.report.tables import (
    Column,
    Table,
    format_epsilon_low,
    json_text,
    lower_end,
    plural,
    protected,
)
from fedpriv.support.disk import writing

_PUBLIC_POLICIES = {SamplingPolicy.EVERY_USER, SamplingPolicy.SEPARATED}  # cohorts are public
_FALSE_ALARMS = 0.05
_READ_AT = (0.001, 0.01, 0.05, 0.1)  # rates of false alarms in tables of a trade-off function
_LONG = 10**6  # larger numbers are written as powers of ten
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
    seeded = weakest_randomness(ledger.charges) is Randomness.SEEDED
    about_seed = [texts()["warnings"]["seeded"]] if seeded else []
    return [*about_seed, *large_delta(delta, ledger)]


def with_warnings(chart: Chart, delta: float, ledger: LedgerContent) -> Chart:
    """Return a chart of ε for use outside a page, with the warnings in its caption."""
    return replace(chart, caption=" ".join([chart.caption, *warnings(delta, ledger)]))


def large_delta(delta: float, ledger: LedgerContent) -> list[str]:
    """Return a warning if δ ≥ 1/N, which allows for a breach."""
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
        "share": 1.0 / users_of(ledger),
        "accountant": _accountant(loss),
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


def loss_of(record: RunRecord) -> PrivacyLoss | None:
    """Return the cost of all charges of a run's ledger, by the plan's accountant; None if empty."""
    events = merge_equal(record.ledger.events)
    return accountant_named(record.accountant).epsilon(events, record.delta) if events else None


def privacy_sections(record: RunRecord) -> list[PageSection]:
    """Return ε by every accountant, and the trade-off function."""
    ledger, unit = record.ledger, unit_of(record.ledger)
    if not ledger.charges:
        note = "Nothing was charged, so nothing was released: ε = 0."
        return [PageSection("privacy", "Privacy", [note])]
    try:
        cost = cost_of(ledger, record.delta)
    except (InvalidValueError, UnsupportedEventError) as error:
        return [PageSection("privacy", "Privacy", warnings=[f"No curve is drawn: {error}."])]
    columns = [Column("accountant", "text"), Column("what ε is", "text")]
    rows = []
    for curve in cost.by_rounds:
        low, high = format_epsilon_low(curve.epsilon_low[-1]), format_epsilon(curve.epsilon[-1])
        rows.append((curve.accountant, str(curve.bound), low or "–", high))
    caption = f"All {len(ledger.charges)} charges of the ledger at δ = {cost.delta}"
    table = Table(caption, [*columns, Column("ε, lower end"), Column("ε")], rows)
    rounds, errors = _epsilon_chart(cost, unit), _trade_off_chart(cost.trade_off, unit)
    tell = "What an attacker can tell"
    return [
        PageSection(rounds.name, "ε by round", tables=[table], charts=[rounds]),
        PageSection(errors.name, tell, tables=[_powers(cost.trade_off, unit)], charts=[errors]),
    ]


def _powers(off: TradeOff, unit: Unit) -> Table:
    """Return the largest power of any test at a few rates of false alarms, rounded up."""
    names = ("false alarms", f"{plural(unit)} found, at most", "by guessing")
    rows = []
    for alpha in _READ_AT:
        percent = math.ceil(1000 * float(off.power(alpha))) / 10
        rows.append((f"{alpha:.1%}", f"{percent:.1f}%", f"{alpha:.1%}"))
    share = math.ceil(1000 * off.advantage) / 10
    caption = f"No test beats guessing by more than {share:.1f} percentage points"
    return Table(caption, [*map(Column, names)], rows)


def _epsilon_chart(cost: Cost, unit: Unit) -> Chart:
    series = []
    for curve in sorted(cost.by_rounds, key=_is_on_top):
        is_interval = curve.bound is Bound.INTERVAL and min(curve.epsilon_low) > 0.0
        band = (curve.epsilon_low, curve.epsilon) if is_interval else ((), ())
        name, estimate = f"{curve.accountant}: {curve.bound}", curve.bound is Bound.ESTIMATE
        series.append(Series(name, curve.rounds, curve.epsilon, *band, dashed=estimate))
    return declared("epsilon", series, {"delta": cost.delta, "unit": unit})


def _is_on_top(curve: EpsilonCurve) -> bool:
    """Return whether a curve must be drawn last: `tight` equals the best of the others."""
    return curve.accountant == "tight"


def _trade_off_chart(off: TradeOff, unit: Unit) -> Chart:
    rows = _trade_off_rows(off)
    x, misses = [row[0] for row in rows], [row[1] for row in rows]
    series = [Series(f"the ledger, by {off.accountant}", x, misses)]
    if off.mu is not None and off.mu < math.inf:
        kind = "the ledger is μ-GDP" if off.is_gdp else "estimate by the central limit theorem"
        name = f"{kind}: μ = {_up(off.mu):.3g}"
        series.append(Series(name, x, [row[2] for row in rows], dashed=True))
    guessing = "perfect privacy: guessing"
    series.append(Series(guessing, [0.0, 1.0], [1.0, 0.0], dashed=True, marked=False, colour=7))
    # The caption has one point, a lower bound, which is rounded down.
    percent = math.floor(1000 * float(off.type_two(_FALSE_ALARMS))) / 10
    words = {"false_alarms": _FALSE_ALARMS, "misses": percent}
    return declared("trade-off", series, words | unit_words(unit))


def _trade_off_rows(off: TradeOff) -> list[tuple[float, float, float | None, float]]:
    """Return type I errors, and the type II errors of the ledger, of G_μ and of guessing."""
    # Even steps of the normal quantile show both ends of the curve, where it is steep.
    inner = ndtr(np.linspace(-_WIDEST, _WIDEST, _ERRORS - 2))
    type_one = np.concatenate([[0.0], inner, [1.0]])
    gaussian: list[float | None] = [None] * _ERRORS
    if off.mu is not None and off.mu < math.inf:
        gaussian = gaussian_trade_off(type_one, off.mu).tolist()
    columns = type_one.tolist(), off.type_two(type_one).tolist(), gaussian
    return [(*row, 1 - row[0]) for row in zip(*columns, strict=True)]


def trade_off_summary(off: TradeOff) -> dict[str, object]:
    """Return a trade-off function at a few points, for JSON.

    `power` is by the rate of false alarms. It and `advantage` are upper bounds unless `bound` is
    "estimate". `mu_is` says whether `mu` is a guarantee, "μ-GDP", or an "estimate"; both are null
    if μ is unknown.
    """
    kind = ("μ-GDP" if off.is_gdp else str(Bound.ESTIMATE)) if off.mu is not None else None
    return {
        "accountant": off.accountant,
        "bound": off.bound,
        "relation": off.relation,
        "mu": off.mu,
        "mu_is": kind,
        "advantage": off.advantage,
        "power": {f"{alpha:g}": float(off.power(alpha)) for alpha in _READ_AT},
    }


def write_curves(ledger: LedgerContent, delta: float, folder: Path, suffix: str) -> list[Path]:
    """Write each curve of a ledger as a chart, "png" or "svg", and as CSV, and return the files.

    Columns: `bound` is the kind of ε; `epsilon_low` is its lower end, or 0; `epsilon` is inf if
    none is proven; `type_two` is a lower bound;
    `type_two_gaussian` belongs to G_μ and is empty without μ. `trade_off.json` has the
    `trade_off_summary`.
    """
    cost, unit = cost_of(ledger, delta), unit_of(ledger)
    by_rounds = [
        (curve.accountant, curve.bound, curve.delta, *point)
        for curve in cost.by_rounds
        for point in zip(curve.rounds, curve.epsilon_low, curve.epsilon, strict=True)
    ]
    rounds_names = ("accountant", "bound", "delta", "rounds", "epsilon_low", "epsilon")
    errors_names = ("type_one", "type_two", "type_two_gaussian", "type_two_perfect")
    errors = _trade_off_rows(cost.trade_off)
    content: dict[str, tuple[Chart, list[Sequence[object]]]] = {
        "epsilon_by_rounds": (_epsilon_chart(cost, unit), [rounds_names, *by_rounds]),
        "trade_off": (_trade_off_chart(cost.trade_off, unit), [errors_names, *errors]),
    }
    files = []
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, (chart, rows) in content.items():
            title = f"{ledger.population}: {chart.title}"
            picture = replace(with_warnings(chart, delta, ledger), name=name, title=title)
            table = folder / f"{name}.csv"
            files += [*save(picture, folder, [suffix]), table]
            with table.open("w", newline="", encoding="utf-8") as stream:
                csv.writer(stream).writerows(rows)
        summary = folder / "trade_off.json"
        summary.write_text(f"{json_text(trade_off_summary(cost.trade_off))}\n", encoding="utf-8")
    return [*files, summary]


def _up(value: float) -> Decimal:
    """Return a bound to three digits, rounded up."""
    return Context(prec=3, rounding=ROUND_CEILING).create_decimal_from_float(value)


def _epsilon(loss: PrivacyLoss) -> str:
    if math.isinf(loss.epsilon):
        return "No finite ε is proven: the releases guarantee nothing."
    factor = _up(math.exp(min(loss.epsilon, 700.0)))
    times = f"{factor:,f}" if factor < _LONG else f"{factor:.2e}"
    return (
        f"ε = {format_epsilon(loss.epsilon)}: any outcome of the releases is at most e^ε = "
        f"{times} times as likely under one population as under the other, up to δ."
    )


def _sampling(ledger: LedgerContent) -> str:
    events = [row.event.sampling for row in ledger.charges]
    parts = []
    for policy in dict.fromkeys(event.policy for event in events):
        of_policy = [event for event in events if event.policy is policy]
        schedules = [event.schedule for event in of_policy if event.schedule is not None]
        examples = {event.examples_per_user for event in of_policy if event.examples_per_user}
        numbers: dict[str, set[float] | set[int]] = {
            "q": {event.sampling_probability for event in of_policy},
            "m": {round(event.expected_cohort_size) for event in of_policy},
            "n": {schedule.rounds for schedule in schedules},
            "k": {schedule.participations for schedule in schedules} | examples,
            "b": {schedule.separation for schedule in schedules},
        }
        words = {name: _range(values) for name, values in numbers.items() if values}
        unit, users = of_policy[0].unit, _range({event.population for event in of_policy})
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
    return " to ".join(f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in ends)


def _accountant(loss: PrivacyLoss) -> str:
    if loss.bound is Bound.ESTIMATE:
        return f"{loss.accountant} gives an estimate, which can be below the truth: no guarantee."
    if math.isinf(loss.epsilon):
        return f"{loss.accountant} proves no finite ε."
    low, meaning = lower_end(loss), "the true ε is at most this"
    if low:
        meaning = f"the true ε lies between {low} and {format_epsilon(loss.epsilon)}"
    article = "an" if loss.bound[0] in "aeiou" else "a"
    return f"{loss.accountant} gives ε as {article} {loss.bound}: {meaning}."
