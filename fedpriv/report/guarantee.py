"""What the ε of a ledger says: in words, as charts, and as figures with their numbers in CSV."""

import csv
import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import ROUND_CEILING, Context
from pathlib import Path

import numpy as np

from fedpriv.accounting.accountants import (
    Bound,
    PrivacyLoss,
    accountant_named,
    format_epsilon,
)
from fedpriv.accounting.pricing import (
    Cost,
    Curves,
    LedgerContent,
    cost_of,
    weakest_arithmetic,
    weakest_randomness,
)
from fedpriv.errors import InvalidValueError, UnsupportedEventError, writing
from fedpriv.ledger.events import Randomness, SamplingPolicy, merge_equal
from fedpriv.report.charts import Chart, Series, declared, save, texts
from fedpriv.report.page import Section
from fedpriv.report.records import RunRecord
from fedpriv.report.tables import Column, Table, format_epsilon_low, lower_end

_FALSE_ALARMS = 0.05


def users_of(ledger: LedgerContent) -> int:
    """N, the largest number of enrolled users that a charge names; 0 without charges."""
    return max((row.event.sampling.population for row in ledger.charges), default=0)


def warnings(delta: float, ledger: LedgerContent) -> list[str]:
    """What a reader must know before believing the ε of a ledger."""
    told, found, users = texts()["warnings"], [], users_of(ledger)
    if weakest_randomness(ledger.charges) is Randomness.SEEDED:
        found.append(told["seeded"])
    if users and delta >= 1.0 / users:
        found.append(told["delta"].format(delta=delta, share=1.0 / users))
    return found


def assumptions(loss: PrivacyLoss, ledger: LedgerContent) -> Section:
    """What the ε of a ledger with charges rests on, for readers who did not write the paper."""
    told = texts()
    words = {
        "epsilon": _epsilon(loss),
        "relation": loss.relation,
        "compares": told["relations"][loss.relation],
        "sampling": _sampling(ledger),
        "delta": loss.delta,
        "share": 1.0 / users_of(ledger),
        "accountant": _accountant(loss),
        "randomness": told["randomness"][weakest_randomness(ledger.charges).name],
        "arithmetic": told["arithmetics"][weakest_arithmetic(ledger.charges).name],
    }
    terms = {term: text.format(**words) for term, text in told["terms"].items()}
    return Section("assumptions", "What ε says", terms=terms)


def loss_of(record: RunRecord) -> PrivacyLoss | None:
    """What all charges of a run's ledger cost, by the plan's accountant; None without charges."""
    events = merge_equal(record.ledger.events)
    return accountant_named(record.accountant).epsilon(events, record.delta) if events else None


def privacy_sections(record: RunRecord, of: str = "", number: int = 0) -> list[Section]:
    """ε by every accountant, and the trade-off; pages of several ledgers number and name them."""
    notes, charges = [f"Of {of}."] if of else [], record.ledger.charges
    try:
        cost = cost_of(record.ledger, record.delta) if charges else None
    except (InvalidValueError, UnsupportedEventError) as error:
        why = f"No curve is drawn: {error}."
        sections = [Section("privacy", "Privacy", notes, warnings=[why])]
    else:
        sections = _cost_sections(cost, len(charges), notes)
    if not number:
        return sections
    end, numbered = f"-{number}", []
    for section in sections:
        name, title = f"{section.name}{end}", f"{section.title} ({number + 1})"
        charts = [replace(chart, name=f"{chart.name}{end}") for chart in section.charts]
        numbered.append(replace(section, name=name, title=title, charts=charts, linked=False))
    return numbered


def _cost_sections(cost: Cost | None, charges: int, notes: list[str]) -> list[Section]:
    if cost is None:
        nothing = "Nothing was charged, so nothing was released: ε = 0."
        return [Section("privacy", "Privacy", [*notes, nothing])]
    columns = [Column("accountant", "text"), Column("what ε is", "text")]
    rows = []
    for curve in cost.by_rounds:
        low, high = format_epsilon_low(curve.epsilon_low[-1]), format_epsilon(curve.epsilon[-1])
        rows.append((curve.accountant, str(curve.bound), low or "–", high))
    caption = f"All {charges} charges of the ledger at δ = {cost.delta:g}"
    table = Table(caption, [*columns, Column("ε, lower end"), Column("ε")], rows)
    rounds, errors = _epsilon_chart(cost), _trade_off_chart(cost)
    return [
        Section(rounds.name, "ε by round", notes, tables=[table], charts=[rounds]),
        Section(errors.name, "What an attacker can tell", notes, charts=[errors]),
    ]


def _epsilon_chart(cost: Cost) -> Chart:
    series = []
    for curve in cost.by_rounds:
        proven = curve.bound is Bound.INTERVAL and min(curve.epsilon_low) > 0.0
        band = (curve.epsilon_low, curve.epsilon) if proven else ((), ())
        name, estimate = f"{curve.accountant}: {curve.bound}", curve.bound is Bound.ESTIMATE
        series.append(Series(name, curve.rounds, curve.epsilon, *band, dashed=estimate))
    return declared("epsilon", series, {"delta": cost.delta})


def _delta_chart(curves: Curves) -> Chart:
    cost = curves.cost
    reported = f"reported: ε = {format_epsilon(cost.epsilon)} at δ = {cost.delta:g}"
    series = [
        Series(f"{c.accountant}: {c.bound}", c.epsilon, c.delta, dashed=c.bound is Bound.ESTIMATE)
        for c in curves.by_epsilon
    ]
    reported_point = Series(reported, [cost.epsilon], [cost.delta], joined=False, colour=7)
    return declared("delta", [*series, reported_point])


def _trade_off_chart(cost: Cost) -> Chart:
    off, same = cost.trade_off, f"one Gaussian of the same ε: μ = {cost.trade_off.mu:.3g}"
    x, ends = off.type_one.tolist(), [0.0, 1.0]
    # One point in words; the number is rounded down, as a bound is.
    misses = float(np.interp(_FALSE_ALARMS, off.type_one, off.type_two))
    series = [
        Series(f"the ledger, by {off.accountant}", x, off.type_two.tolist()),
        Series(same, x, off.gaussian.tolist(), dashed=True),
        Series("perfect privacy: guessing", ends, ends[::-1], dashed=True, marked=False, colour=7),
    ]
    percent = math.floor(misses * 1000) / 10
    return declared("trade-off", series, {"false_alarms": _FALSE_ALARMS, "misses": percent})


def write_curves(curves: Curves, folder: Path, suffix: str) -> list[Path]:
    """Write each curve of a ledger as a figure, "png" or "svg", and as CSV, and return the files.

    `bound` is what kind of number ε is, `epsilon_low` its lower end, 0 if there is none; `epsilon`
    is inf if none is proven, `delta` the upper end of an interval, `type_two` a lower bound.
    """
    cost, off = curves.cost, curves.cost.trade_off
    by_rounds = [
        (curve.accountant, curve.bound, curve.delta, *point)
        for curve in cost.by_rounds
        for point in zip(curve.rounds, curve.epsilon_low, curve.epsilon, strict=True)
    ]
    by_epsilon = [
        (curve.accountant, curve.bound, *point)
        for curve in curves.by_epsilon
        for point in zip(curve.epsilon, curve.delta, strict=True)
    ]
    errors = np.stack([off.type_one, off.type_two, off.gaussian, 1 - off.type_one], axis=1).tolist()
    delta_names = ("accountant", "bound", "epsilon", "delta")
    rounds_names = ("accountant", "bound", "delta", "rounds", "epsilon_low", "epsilon")
    errors_names = ("type_one", "type_two", "type_two_gaussian", "type_two_perfect")
    written: dict[str, tuple[Chart, list[Sequence[object]]]] = {
        "epsilon_by_rounds": (_epsilon_chart(cost), [rounds_names, *by_rounds]),
        "delta_by_epsilon": (_delta_chart(curves), [delta_names, *by_epsilon]),
        "trade_off": (_trade_off_chart(cost), [errors_names, *errors]),
    }
    files = []
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, (chart, rows) in written.items():
            titled = replace(chart, name=name, title=f"{curves.population}: {chart.title}")
            table = folder / f"{name}.csv"
            files += [*save(titled, folder, [suffix]), table]
            with table.open("w", newline="", encoding="utf-8") as stream:
                csv.writer(stream).writerows(rows)
    return files


def _epsilon(loss: PrivacyLoss) -> str:
    if math.isinf(loss.epsilon):
        return "No finite ε is proven: the releases guarantee nothing."
    up = Context(prec=3, rounding=ROUND_CEILING)
    factor = up.create_decimal_from_float(math.exp(min(loss.epsilon, 700.0)))
    return (
        f"ε = {format_epsilon(loss.epsilon)}: any outcome of the releases is at most e^ε = "
        f"{factor:,} times as likely under one population as under the other, up to δ."
    )


def _sampling(ledger: LedgerContent) -> str:
    events = [row.event.sampling for row in ledger.charges]
    parts = []
    for policy in dict.fromkeys(event.policy for event in events):
        of_one = [event for event in events if event.policy is policy]
        q = _range({event.sampling_probability for event in of_one})
        chance = "" if policy is SamplingPolicy.EVERY_USER else f", with probability q = {q}"
        enrolled = _range({event.population for event in of_one})
        parts.append(
            f"{policy}: {texts()['policies'][policy]}{chance}; N = {enrolled} users are enrolled"
        )
    return f"{'. '.join(parts)}."


def _range(values: set[float] | set[int]) -> str:
    ends = dict.fromkeys((min(values), max(values)))
    return " to ".join(f"{end:,}" if isinstance(end, int) else f"{end:g}" for end in ends)


def _accountant(loss: PrivacyLoss) -> str:
    if loss.bound is Bound.ESTIMATE:
        return f"{loss.accountant} gives an estimate, which can be below the truth: no guarantee."
    low, known = lower_end(loss), "the true ε is at most this"
    if low:
        known = f"the true ε lies between {low} and {format_epsilon(loss.epsilon)}"
    article = "an" if loss.bound[0] in "aeiou" else "a"
    return f"{loss.accountant} gives ε as {article} {loss.bound}: {known}."
