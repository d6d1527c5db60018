"""Charts of a report: named axes with units, series that can be told apart, text that is text."""

import html
from collections.abc import Sequence
from dataclasses import dataclass

from plotly import graph_objects

from fedpriv.errors import InvalidValueError

# Told apart by people who see few colours, on white and on black; markers help on paper.
COLOURS = ("#3a86c8", "#d9622b", "#1a9a72", "#c973a6", "#c98a00", "#8a74c9", "#2aa3b8", "#8a8a8a")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star", "hexagon")
_FEW = 40  # points, above which markers would cover the line
_PHONE = 30  # characters that fit along an axis on a phone


@dataclass(frozen=True)
class Axis:
    """What a chart shows along one side.

    Attributes:
        name: of the quantity.
        unit: its unit; "no unit" for a pure number.
        log: whether the scale is logarithmic.
        ends: first and last value shown; None: as far as the data go.
        from_zero: whether zero is shown, where there are no ends.

    Raises:
        InvalidValueError: name or unit is empty.
    """

    name: str
    unit: str
    log: bool = False
    ends: tuple[float, float] | None = None
    from_zero: bool = False

    def __post_init__(self) -> None:
        if not self.name or not self.unit:
            raise InvalidValueError(
                f"an axis has name {self.name!r} and unit {self.unit!r}; it must have both"
            )


ROUNDS = Axis("rounds released", "count")


@dataclass(frozen=True)
class Series:
    """One line or set of points of a chart.

    Attributes:
        name: in the legend; may hold anything.
        x: [n].
        y: [n]; what is None or not finite is left out.
        low: [n] lower ends of a band around the line; empty: there is none.
        high: [n] upper ends.
        dashed: whether the line is dashed.
        bars: whether low and high are error bars of single points, and not a band.
        colour: which of `COLOURS`; None: the next.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    dashed: bool = False
    bars: bool = False
    colour: int | None = None


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
        figure.add_trace(_line(each, colour, _MARKERS[number % len(_MARKERS)], axes))
    return Chart(name, title, caption, figure.to_json(), simulation_only)


def _line(each: Series, colour: str, marker: str, axes: tuple[Axis, Axis]) -> graph_objects.Scatter:
    across, up = axes
    error = None
    if each.bars and each.low:
        points = list(zip(each.y, each.low, each.high, strict=True))
        error = {
            "array": [high - (y or 0.0) for y, _, high in points],
            "arrayminus": [(y or 0.0) - low for y, low, _ in points],
            "thickness": 1.2,
        }
    return graph_objects.Scatter(
        name=_text(each.name),
        legendgroup=_text(each.name),
        x=list(each.x),
        y=list(each.y),
        error_y=error,
        mode="lines+markers" if len(each.x) <= _FEW else "lines",
        line={"color": colour, "dash": "dash" if each.dashed else "solid", "width": 2},
        marker={"symbol": marker, "size": 6},
        hovertemplate=f"{_text(up.name)}: %{{y:.4g}}<br>{_text(across.name)}: %{{x:.4g}}",
    )


def _band(each: Series, colour: str) -> graph_objects.Scatter:
    return graph_objects.Scatter(
        x=[*each.x, *reversed(each.x)],
        y=[*each.high, *reversed(each.low)],
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
    if axis.ends is not None:
        drawn["range"] = list(axis.ends)
    elif axis.from_zero:
        drawn["rangemode"] = "tozero"
    return drawn


def _text(name: str) -> str:
    """A name of anybody's making, without what plotly reads as markup."""
    return html.escape(name, quote=False).replace("%{", "%&#123;")
