"""Figures of one run: accuracy by round and ε by round."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_FORMATS = ("png", "svg")


def accuracy_figure(rounds: Sequence[int], accuracy: Sequence[float], title: str) -> Figure:
    """Accuracy on held-out rows in percent against the number of rounds."""
    figure, axes = _axes(title, "accuracy on held-out rows (%)")
    axes.plot(rounds, [100.0 * a for a in accuracy], color="tab:blue")
    axes.set_ylim(0.0, 100.0)
    return figure


def epsilon_figure(
    rounds: Sequence[int], epsilon: Sequence[float], delta: float, limit: float, title: str
) -> Figure:
    """ε spent on the ledger against the number of rounds, with the budget if it is finite."""
    figure, axes = _axes(title, f"user-level ε spent, at δ = {delta:g}")
    axes.plot(rounds, epsilon, color="tab:red", label="spent")
    if limit < float("inf"):
        axes.axhline(limit, color="black", linestyle="--", linewidth=1.0, label="budget")
        axes.legend(loc="lower right")
    axes.set_ylim(bottom=0.0)
    return figure


def save_figure(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG and return the files."""
    paths = [folder / f"{name}.{suffix}" for suffix in _FORMATS]
    for path in paths:
        # Without a date the same run gives the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    return paths


def _axes(title: str, vertical: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel("rounds")
    axes.set_ylabel(vertical)
    axes.grid(visible=True, alpha=0.3)
    axes.margins(x=0.01)
    return figure, axes
