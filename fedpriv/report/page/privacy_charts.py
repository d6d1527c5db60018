"""Charts of what a ledger cost."""

import math

import numpy as np

from fedpriv.accounting.accountant import Bound
from fedpriv.accounting.pricing import Cost, TradeOff
from fedpriv.report.page.charts import Chart, chart
from fedpriv.report.series import Axis, Series
from fedpriv.report.tables import format_epsilon

_FALSE_ALARMS = 0.05


def epsilon_chart(cost: Cost, name: str = "epsilon") -> Chart:
    """ε by the number of charges, by every accountant that can price the ledger.

    An interval is drawn with its lower end, where there is one.
    """
    series = []
    for curve in cost.by_rounds:
        upper = [epsilon if math.isfinite(epsilon) else None for epsilon in curve.epsilon]
        proven = curve.bound is Bound.INTERVAL and None not in upper and min(curve.epsilon_low) > 0
        series.append(
            Series(
                f"{curve.accountant}: {curve.bound}",
                curve.rounds,
                upper,
                curve.epsilon_low if proven else (),
                curve.epsilon if proven else (),
                dashed=curve.bound is Bound.ESTIMATE,
            )
        )
    return chart(
        name,
        "ε by round, by every accountant that can price the ledger",
        "What the first so many charges of the ledger cost together. All lines price the same "
        "releases; they differ in how much the accountant can prove. The lowest solid line is the "
        "one to report; a dashed line is an estimate, which can be below the truth.",
        (
            Axis("charges of the ledger", "count"),
            Axis(f"user-level ε at δ = {cost.delta:g}", "no unit", log=True),
        ),
        series,
    )


def trade_off_chart(cost: Cost, name: str = "trade-off") -> Chart:
    """The trade-off function f(α), beside G_μ and guessing."""
    off = cost.trade_off
    x = off.type_one.tolist()
    same = f"one Gaussian of the same ε: μ = {off.mu:.3g}"
    return chart(
        name,
        "Trade-off function f(α): how well anybody can tell whether a user took part",
        meaning_of(off),
        (
            Axis("α: type I errors, false alarms", "probability", ends=(0.0, 1.0)),
            Axis("f(α): type II errors, misses", "probability", ends=(0.0, 1.0)),
        ),
        [
            Series(f"the ledger, by {off.accountant}", x, off.type_two.tolist()),
            Series(same, x, off.gaussian.tolist(), dashed=True),
            Series("perfect privacy: guessing", [0.0, 1.0], [1.0, 0.0], dashed=True, colour=7),
        ],
    )


def meaning_of(off: TradeOff) -> str:
    """One point of a trade-off function, in words; the number is rounded down, as a bound is."""
    misses = float(np.interp(_FALSE_ALARMS, off.type_one, off.type_two))
    return (
        "Somebody who sees everything that was released, and knows all about everybody else, "
        "guesses whether one given user took part. If a user who did not is suspected with "
        f"probability {_FALSE_ALARMS:.0%}, one who did goes unnoticed with probability at least "
        f"{_percent_down(misses)}, whatever is computed. The nearer to the line of guessing, the "
        "more private; no test lies below the curve."
    )


def accountants_table(cost: Cost) -> list[tuple[str, str, str, str]]:
    """Accountant, kind of number, lower end and ε of the whole ledger, for each accountant."""
    rows = []
    for curve in cost.by_rounds:
        low, epsilon = curve.epsilon_low[-1], curve.epsilon[-1]
        lower = f"{math.floor(low * 1000) / 1000:.3f}" if low > 0.0 else "–"
        rows.append((curve.accountant, str(curve.bound), lower, format_epsilon(epsilon)))
    return rows


def _percent_down(share: float) -> str:
    """A share in percent, rounded down to a tenth.

    >>> _percent_down(0.12399)
    '12.3%'
    """
    return f"{math.floor(share * 1000) / 10:.1f}%"
