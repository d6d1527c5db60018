"""Figures of one run: accuracy, ε and private metrics by round."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_FORMATS = ("png", "svg")


def accuracy_figure(rounds: Sequence[int], accuracy: Sequence[float], title: str) -> Figure:
    """Accuracy on held-out rows in percent against the number of rounds."""
    figure, axes = new_axes(title, "accuracy on held-out rows (%)")
    axes.plot(rounds, [100.0 * a for a in accuracy], color="tab:blue")
    axes.set_ylim(0.0, 100.0)
    return figure


def epsilon_figure(
    rounds: Sequence[int], epsilon: Sequence[float], delta: float, limit: float, title: str
) -> Figure:
    """ε spent on the ledger against the number of rounds, with the budget if it is finite."""
    figure, axes = new_axes(title, f"user-level ε spent, at δ = {delta:g}")
    axes.plot(rounds, epsilon, color="tab:red", label="spent")
    if limit < float("inf"):
        axes.axhline(limit, color="black", linestyle="--", linewidth=1.0, label="budget")
        axes.legend(loc="lower right")
    axes.set_ylim(bottom=0.0)
    return figure


def metric_figure(
    rounds: Sequence[int],
    values: Sequence[float],
    noise_stddevs: Sequence[float],
    name: str,
    title: str,
) -> Figure:
    """A private metric against the number of rounds, with twice its noise on either side."""
    figure, axes = new_axes(title, f"{name}, private")
    axes.plot(rounds, values, color="tab:green")
    low = [value - 2.0 * stddev for value, stddev in zip(values, noise_stddevs, strict=True)]
    high = [value + 2.0 * stddev for value, stddev in zip(values, noise_stddevs, strict=True)]
    axes.fill_between(
        rounds, low, high, color="tab:green", alpha=0.2, label="± 2 standard deviations of noise"
    )
    axes.legend(loc="best")
    return figure


def save_figure(
    figure: Figure, folder: Path, name: str, formats: Sequence[str] = _FORMATS
) -> list[Path]:
    """Write a figure in each format, which are "png" and "svg", and return the files."""
    paths = [folder / f"{name}.{suffix}" for suffix in formats]
    for path in paths:
        # Without a date and with settled names the same run gives the same file.
        metadata = {"Date": None} if path.suffix == ".svg" else None
        with rc_context({"svg.hashsalt": name}):
            figure.savefig(path, dpi=150, metadata=metadata)
    return paths


def new_axes(
    title: str,
    vertical: str,
    horizontal: str = "rounds",
    size: tuple[float, float] = (6.4, 3.6),
) -> tuple[Figure, Axes]:
    """An empty figure with axes of these names, its size in inches."""
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(horizontal)
    axes.set_ylabel(vertical)
    axes.grid(visible=True, alpha=0.3)
    axes.margins(x=0.01)
    return figure, axes
