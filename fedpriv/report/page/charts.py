"""Charts of a page: named axes with units, series that can be told apart, text that is text."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from plotly import graph_objects

from fedpriv.report.series import COLOURS, Axis, Series

_MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")
_FEW = 40  # points, above which markers would cover the line
_PHONE = 30  # characters that fit along an axis on a phone


@dataclass(frozen=True)
class Chart:
    """A chart as the page shows it.

    Attributes:
        name: identifies it in the page; letters and hyphens.
        title: what it shows.
        caption: what it means, in a sentence or two.
        figure: its traces and layout, JSON of plotly.
        simulation_only: whether it shows what no guarantee covers.
    """

    name: str
    title: str
    caption: str
    figure: str
    simulation_only: bool = False


def chart(
    name: str,
    title: str,
    caption: str,
    axes: tuple[Axis, Axis],
    series: Sequence[Series],
    *,
    simulation_only: bool = False,
) -> Chart:
    """Make a chart.

    Args:
        name: identifies it in the page; letters and hyphens.
        title: what it shows.
        caption: what it means.
        axes: along x and along y.
        series: in the order of the legend.
        simulation_only: whether it shows what no guarantee covers.
    """
    across, up = axes
    figure = graph_objects.Figure(layout=_layout(across, up))
    for number, each in enumerate(series):
        colour = COLOURS[(number if each.colour is None else each.colour) % len(COLOURS)]
        if each.low and not each.bars:
            figure.add_trace(_band(each, colour))
        # More series than colours differ in their marker.
        marker = _MARKERS[(number + number // len(COLOURS)) % len(_MARKERS)]
        figure.add_trace(_line(each, colour, marker, axes))
    return Chart(name, title, caption, figure.to_json(), simulation_only)


def _line(each: Series, colour: str, marker: str, axes: tuple[Axis, Axis]) -> graph_objects.Scatter:
    across, up = axes
    error = None
    if each.bars and each.low:
        below, above = zip(*each.reach, strict=True)
        error = {"array": above, "arrayminus": below, "thickness": 1.2}
    parts = {
        "lines": each.joined,
        "markers": each.marked and (len(each.x) <= _FEW or not each.joined),
    }
    return graph_objects.Scatter(
        name=_text(each.name),
        legendgroup=_text(each.name),
        x=list(each.x),
        y=list(each.y),
        error_y=error,
        mode="+".join(part for part, drawn in parts.items() if drawn),
        line={"color": colour, "dash": "dash" if each.dashed else "solid", "width": 2},
        marker={"symbol": marker, "size": 6},
        hovertemplate=f"{_text(up.name)}: %{{y:.4g}}<br>{_text(across.name)}: %{{x:.4g}}",
    )


def _band(each: Series, colour: str) -> graph_objects.Scatter:
    points = list(zip(each.x, each.low, each.high, strict=True))
    there = [point for point in points if None not in point]
    return graph_objects.Scatter(
        x=[x for x, _, _ in (*there, *reversed(there))],
        y=[*(high for _, _, high in there), *(low for _, low, _ in reversed(there))],
        legendgroup=_text(each.name),
        fill="toself",
        fillcolor=f"{colour}33",
        line={"width": 0},
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
    )


def _layout(across: Axis, up: Axis) -> graph_objects.Layout:
    """Colours of text and grid are the page's, which change with its theme."""
    return graph_objects.Layout(
        template={},
        xaxis=_axis(across),
        yaxis=_axis(up),
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 8, "r": 12, "t": 32, "b": 8},
        legend={"orientation": "h", "yref": "container", "y": 0.0, "yanchor": "bottom", "x": 0.0},
        showlegend=True,
        hovermode="closest",
    )


def _axis(axis: Axis) -> dict[str, object]:
    title = [_text(axis.name), f"({_text(axis.unit)})"]
    between = " " if sum(map(len, title)) <= _PHONE else "<br>"
    drawn: dict[str, object] = {
        "title": {"text": between.join(title), "standoff": 8},
        "automargin": True,
        "zeroline": False,
        "ticks": "outside",
        "type": "log" if axis.log else "linear",
    }
    if axis.ticks:
        values, texts = zip(*axis.ticks, strict=True)
        drawn |= {"tickvals": values, "ticktext": texts}
    if axis.ends is not None:
        drawn["range"] = list(axis.ends)
    elif axis.from_zero:
        drawn["rangemode"] = "tozero"
    return drawn


def _text(name: str) -> str:
    """A name of anybody's making, without what plotly reads as markup."""
    return html.escape(name, quote=False).replace("%{", "%&#123;")
