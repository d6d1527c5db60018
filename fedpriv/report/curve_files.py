"""The curves of a ledger as figures, and as CSV for other programs."""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedpriv.accounting.accountant import Bound
from fedpriv.accounting.pricing import Curves, DeltaCurve, EpsilonCurve, TradeOff
from fedpriv.errors import InvalidValueError
from fedpriv.report.figures import new_axes, save_figure
from fedpriv.report.tables import format_epsilon

_SIZE = (8.0, 4.2)
_CAPTION = {
    "epsilon_by_rounds": (
        "What the first so many rounds cost together: how much any one user, with all of their\n"
        "data, can change what was released."
    ),
    "delta_by_epsilon": (
        "All pairs (ε, δ) of a bound or interval hold at once, a smaller ε with a larger δ;\n"
        "an estimate can be too small."
    ),
    "trade_off": (
        "Whoever guesses from all releases whether a given user took part, with this chance of\n"
        "a false alarm (type I), misses the user (type II) at least this often."
    ),
}


def write_curves(curves: Curves, folder: Path, suffix: str) -> list[Path]:
    """Write each curve as a figure and as CSV, and return the files.

    * epsilon_by_rounds.csv: `accountant`, `bound` (what kind of number ε is), `delta`, `rounds`,
      `epsilon_low` (lower end, 0 if there is none), `epsilon` (inf if none is proven).
    * delta_by_epsilon.csv: `accountant`, `bound`, `epsilon`, `delta` (upper end of an interval).
    * trade_off.csv: `type_one`, `type_two` (at least this), `type_two_gaussian` (G_μ),
      `type_two_perfect` (no information).

    Args:
        curves: what to write.
        folder: made if it does not exist; files of these names are replaced.
        suffix: "png" or "svg".

    Raises:
        InvalidValueError: the folder cannot be written.
    """
    tables = {
        "epsilon_by_rounds": _rows_by_rounds(curves.cost.by_rounds),
        "delta_by_epsilon": _rows_by_epsilon(curves.by_epsilon),
        "trade_off": _rows_of_trade_off(curves.cost.trade_off),
    }
    figures = {
        "epsilon_by_rounds": figure_by_rounds(curves),
        "delta_by_epsilon": figure_by_epsilon(curves),
        "trade_off": figure_of_trade_off(curves),
    }
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, figure in figures.items():
            # A name is no formula, whatever dollar signs it contains.
            figure.suptitle(curves.population, fontsize="medium", parse_math=False)
            figure.supxlabel(_CAPTION[name], fontsize="small")
            figure.legend(loc="outside right center", fontsize="small")
            files += save_figure(figure, folder, name, [suffix])
            with (folder / f"{name}.csv").open("w", newline="", encoding="utf-8") as stream:
                csv.writer(stream).writerows(tables[name])
            files.append(folder / f"{name}.csv")
    except OSError as error:
        raise InvalidValueError(f"{folder} cannot be written: {error.strerror}") from error
    return files


def figure_by_rounds(curves: Curves) -> Figure:
    """ε against the number of rounds, by every accountant; log scale, as they differ widely."""
    cost = curves.cost
    figure, axes = new_axes(
        "Privacy spent, by number of rounds", f"user-level ε at δ = {cost.delta:g}", size=_SIZE
    )
    for curve in cost.by_rounds:
        _plot(axes, curve.rounds, curve.epsilon, curve)
    return figure


def figure_by_epsilon(curves: Curves) -> Figure:
    """δ against ε of the whole ledger, by every accountant, with the point that is reported."""
    figure, axes = new_axes(
        "All pairs (ε, δ) of the ledger", "user-level δ", "user-level ε", size=_SIZE
    )
    for curve in curves.by_epsilon:
        _plot(axes, curve.epsilon, curve.delta, curve)
    cost = curves.cost
    reported = f"ε = {format_epsilon(cost.epsilon)} at δ = {cost.delta:g}"
    axes.axvline(cost.epsilon, color="black", linestyle=":", linewidth=1.0, label=reported)
    axes.axhline(cost.delta, color="black", linestyle=":", linewidth=1.0)
    return figure


def figure_of_trade_off(curves: Curves) -> Figure:
    """Least type II error against type I error, beside G_μ and perfect privacy."""
    off = curves.cost.trade_off
    figure, axes = new_axes(
        "Least errors of any test for one user",
        "type II error: misses",
        "type I error: false alarms",
        size=_SIZE,
    )
    axes.plot(off.type_one, 1 - off.type_one, "k:", label="perfect privacy: guessing")
    axes.plot(off.type_one, off.type_two, color="tab:red", label=f"the ledger, by {off.accountant}")
    axes.fill_between(off.type_one, off.type_two, color="tab:red", alpha=0.1, label="impossible")
    same = f"Gaussian mechanism of the same\nε at δ = {curves.cost.delta:g}: μ = {off.mu:.3g}"
    axes.plot(off.type_one, off.gaussian, "--", color="tab:blue", label=same)
    axes.set_aspect("equal")
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    return figure


def _rows_by_rounds(curves: Iterable[EpsilonCurve]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [
        ("accountant", "bound", "delta", "rounds", "epsilon_low", "epsilon")
    ]
    for curve in curves:
        points = zip(curve.rounds, curve.epsilon_low, curve.epsilon, strict=True)
        rows += [(curve.accountant, curve.bound, curve.delta, *point) for point in points]
    return rows


def _rows_by_epsilon(curves: Iterable[DeltaCurve]) -> list[Sequence[object]]:
    rows: list[Sequence[object]] = [("accountant", "bound", "epsilon", "delta")]
    for curve in curves:
        points = zip(curve.epsilon, curve.delta, strict=True)
        rows += [(curve.accountant, curve.bound, *point) for point in points]
    return rows


def _rows_of_trade_off(off: TradeOff) -> list[Sequence[object]]:
    columns = [off.type_one, off.type_two, off.gaussian, 1 - off.type_one]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [("type_one", "type_two", "type_two_gaussian", "type_two_perfect"), *rows]


def _plot(
    axes: Axes,
    horizontal: Sequence[float],
    vertical: Sequence[float],
    curve: EpsilonCurve | DeltaCurve,
) -> None:
    style = "--" if curve.bound is Bound.ESTIMATE else ".-"
    label = f"{curve.accountant}: {curve.bound}"
    axes.plot(horizontal, vertical, style, label=label, markersize=4)
    if any(0.0 < value < math.inf for value in vertical):
        axes.set_yscale("log")
