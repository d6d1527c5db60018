"""Figures of a study for documents: accuracy against ε, paired differences, numeric axes."""

import itertools
import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation, Transform

from fedpriv.errors import DataError, InvalidValueError
from fedpriv.report.figures import new_axes, save_figure
from fedpriv.report.series import COLOURS, Axis, Series
from fedpriv.report.study_series import Drawing, along_axes, by_target, differences, front
from fedpriv.studies import ReadStudy

_MARKERS = "osD^XP*h"
_SIZE = (7.2, 4.4)
_ASIDE = 0.05  # inch between bars at the same place
_LEGEND = 84  # characters that fit below a figure


def write_study_figures(read: ReadStudy, folder: Path) -> list[Path]:
    """Write the figures of a study as PNG and SVG, and return the files.

    * front: accuracy in the end against ε spent, a line for each arm, with Student's intervals;
      arms: the same without lines, instead, where the study has one ε.
    * differences: from the baseline, paired by seed, where there are any.
    * along-…: accuracy against each number that the arms vary.

    Args:
        read: the study and its results; ledgers are not looked at.
        folder: made if it does not exist; files of these names are replaced.

    Raises:
        DataError: no run is finished.
        InvalidValueError: the folder cannot be written.
    """
    if not read.arms:
        raise DataError(f"no run of the study in {read.folder} is finished; run it first")
    several = len({arm.target for arm in read.arms}) > 1
    between = differences(read.study, read.arms)
    drawings = [
        front(read.arms) if several else by_target(read.arms),
        *([between] if between else []),
        *along_axes(read.study, read.arms),
    ]
    files = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for drawing in drawings:
            files += save_figure(figure_of(drawing), folder, drawing.name)
    except OSError as error:
        raise InvalidValueError(f"{folder} cannot be written: {error.strerror}") from error
    return files


def figure_of(drawing: Drawing) -> Figure:
    """A drawing as a figure, its legend below it."""
    across, up = drawing.axes
    figure, axes = new_axes(
        drawing.title, f"{up.name} ({up.unit})", f"{across.name} ({across.unit})", size=_SIZE
    )
    axes.set_xscale("log" if across.log else "linear")
    axes.margins(x=0.04)
    for number, each in enumerate(drawing.series):
        # Bars at the same place are drawn beside each other.
        aside = number - (len(drawing.series) - 1) / 2 if each.bars and each.joined else 0.0
        place = axes.transData + ScaledTranslation(_ASIDE * aside, 0.0, figure.dpi_scale_trans)
        _plot(axes, each, number, place)
    # Artists that are drawn aside do not stretch axes by themselves.
    axes.autoscale_view()
    _bound(axes, across)
    longest = max(len(each.name) for each in drawing.series)
    columns = max(1, _LEGEND // (longest + 8))
    figure.legend(loc="outside lower center", ncols=min(columns, len(drawing.series)))
    return figure


def _plot(axes: Axes, each: Series, number: int, place: Transform) -> None:
    heights = (height for values in (each.y, each.low, each.high) for height in values)
    places = itertools.cycle(each.x)
    corners = [(x, y) for x, y in zip(places, heights, strict=False) if y is not None]
    axes.update_datalim([corner for corner in corners if math.isfinite(corner[1])])
    line = ("--" if each.dashed else "-") if each.joined else "none"
    below_above = list(zip(*each.reach, strict=True)) if each.low else None
    axes.errorbar(
        each.x,
        [float("nan") if y is None else y for y in each.y],
        yerr=below_above,
        label=each.name,
        color=COLOURS[(number if each.colour is None else each.colour) % len(COLOURS)],
        marker=_MARKERS[(number + number // len(COLOURS)) % len(_MARKERS)] if each.marked else "",
        linestyle=line,
        markersize=5,
        capsize=3,
        elinewidth=1.2,
        transform=place,
    )


def _bound(axes: Axes, across: Axis) -> None:
    if across.ticks:
        values, texts = zip(*across.ticks, strict=True)
        axes.set_xticks(values, texts)
        axes.minorticks_off()
    if across.ends:
        axes.set_xlim(*across.ends)
