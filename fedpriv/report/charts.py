"""Charts: one declaration is interactive on a page, and a document's PNG or SVG."""

import json
import math
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import altair as alt
import vl_convert

from fedpriv.errors import InvalidValueError

# Distinguishable with colour vision deficiency, on white and on black; marker shapes and dashes
# tell lines apart where colour cannot, as in print.
COLOURS = ("#3a86c8", "#d9622b", "#1a9a72", "#c973a6", "#c98a00", "#8a74c9", "#2aa3b8", "#8a8a8a")
_SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left")
_MARKERS = 20  # on a line, at most
_LARGEST = 400  # of markers with sizes, in square pixels
_BREAK = 40  # characters of an axis title that fit on a phone
_SIZE = (600, 300)  # of the plot in a file, in pixels at 96 per inch
# Of the legend; that of the plot is known too late.
_WIDTH = f"(isFinite(containerSize()[0]) ? containerSize()[0] - 70 : {_SIZE[0]})"
# 1, 2 and 5 of each decade; all where there is less than one.
_LOG_LABEL = (
    "domain('SCALE')[1] < 10 * domain('SCALE')[0] || "
    "indexof('125', slice(format(datum.value, '.0e'), 0, 1)) >= 0 ? "
    "format(datum.value, '.4~g') : ''"
)
_TEMPLATES = files("fedpriv.report") / "templates"


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: a quantity and its unit, empty for a pure number."""

    name: str
    unit: str = ""
    log: bool = False
    ends: tuple[float, float] | None = None  # None: as far as the data go
    from_zero: bool = False  # of a linear scale without ends
    ticks: tuple[tuple[float, str], ...] = ()  # values and their text; none: round numbers

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidValueError(
                f"an axis with unit {self.unit!r} has no name; it must have one"
            )

    @property
    def title(self) -> str:
        """The quantity with its unit, if it has one."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Series:
    """A line or points, and a band or error bars; what an axis has no place for is left out."""

    name: str  # in the legend; unique in the chart
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dashed: bool = False
    joined: bool = True  # a line joins the points
    marked: bool = True  # points have markers
    sizes: Sequence[float] = ()  # areas of markers, in proportion; none: all alike
    bars: bool = False  # error bars instead of a band
    colour: int | None = None  # index in COLOURS; None: the next


@dataclass(frozen=True)
class Chart:
    """What a chart shows; its caption says in a few sentences what that means."""

    name: str  # identifies it in a page, and names its files
    title: str
    caption: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    simulation_only: bool = False  # whether it shows what no guarantee covers


@cache
def texts() -> dict[str, Any]:
    """What reports say: the content of `templates/texts.toml`."""
    return tomllib.loads(_TEMPLATES.joinpath("texts.toml").read_text("utf-8"))


@cache
def _style() -> alt.Config:
    return alt.Config.from_dict(json.loads(_TEMPLATES.joinpath("charts.json").read_text("utf-8")))


def declared(
    kind: str,
    series: Sequence[Series],
    words: Mapping[str, object] = MappingProxyType({}),
    name: str = "",
    x: Axis | None = None,
    y: Axis | None = None,
) -> Chart:
    """A chart of a kind in `texts`, filled in with words; its name and axes may be given."""
    told = texts()["charts"][kind]
    marked = told.get("simulation_only", False)
    caption = f"{told['caption']} {texts()['simulation_only']}" if marked else told["caption"]
    x, y = (
        given or Axis(**{**told[end], "name": told[end]["name"].format(**words)})
        for end, given in (("x", x), ("y", y))
    )
    title, caption = told["title"].format(**words), caption.format(**words)
    return Chart(name or kind, title, caption, x, y, series, marked)


def spans_decades(values: Sequence[float]) -> bool:
    """Whether positive values span more than a factor of ten, so that they need a log scale."""
    return min(values) > 0.0 and max(values) > 10.0 * min(values)


def figure(*charts: Chart) -> alt.HConcatChart:
    """Charts side by side as an Altair figure for documents, with their titles and captions."""
    parts = []
    for chart in charts:
        marked = f"{chart.title} (simulation only)" if chart.simulation_only else chart.title
        caption = textwrap.wrap(chart.caption, 115)
        title = alt.TitleParams(textwrap.wrap(marked, 80), subtitle=caption)
        drawn = alt.LayerChart(data=_rows(chart), layer=_layers(chart, clip=False), title=title)
        parts.append(drawn.properties(width=_SIZE[0], height=_SIZE[1]))
    apart = alt.Resolve(scale=alt.ScaleResolveMap(color="independent", shape="independent"))
    return alt.HConcatChart(
        hconcat=parts, resolve=apart, config=_style(), background="white", padding=12
    )


def save(chart: Chart, folder: Path, formats: Iterable[str] = ("png", "svg")) -> list[Path]:
    """Write a chart in each format, "png" or "svg", always to the same bytes; return the files."""
    # Altair would check and draw it for each format; a PNG is a picture of the SVG.
    svg = vl_convert.vegalite_to_svg(figure(chart).to_dict(validate=False))
    paths = [folder / f"{chart.name}.{suffix}" for suffix in formats]
    for path in paths:
        png = path.suffix == ".png"
        path.write_bytes(vl_convert.svg_to_png(svg, scale=2) if png else svg.encode())
    return paths


def embedded(chart: Chart) -> dict[str, Any]:
    """The chart as Vega-Lite for a page: as wide as its place, with zoom and tooltips."""
    chosen = alt.selection_point(name="chosen", fields=["series"], bind="legend")
    # Without shift the wheel scrolls the page; pointer events would keep a phone from scrolling.
    moved = alt.selection_interval(
        name="moved",
        bind="scales",
        translate="[mousedown, window:mouseup] > window:mousemove!",
        zoom="wheel![event.shiftKey]",
    )
    faded = alt.when(chosen).then(alt.value(1.0)).otherwise(alt.value(0.1))
    tips = [alt.Tooltip("series:N")]
    for name, axis in (("x", chart.x), ("y", chart.y)):
        tips.append(alt.Tooltip(f"{name}:Q", title=axis.title, format=".4~g"))
    if any(each.low for each in chart.series):
        tips += [alt.Tooltip(f"{end}:Q", format=".4~g") for end in ("low", "high")]
    base, _ = _encoded(chart)
    # Around each point, as it is too small to be hit.
    targets = base.mark_point(size=200, filled=True, opacity=0, clip=True).encode(tooltip=tips)
    layers = [layer.encode(opacity=faded) for layer in _layers(chart, clip=True)]
    drawn = alt.LayerChart(
        data=_rows(chart),
        layer=[*layers, targets.add_params(chosen, moved)],
        config=_style(),
        width="container",
        height=_SIZE[1],
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        background="transparent",
        description=f"{chart.title}. {chart.caption}",
    )
    return drawn.to_dict(validate=False)  # a check takes longer than all else


@cache
def library() -> str:
    """JavaScript that draws `embedded` charts: Vega, Vega-Lite and Vega-Embed."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _layers(chart: Chart, *, clip: bool) -> list[alt.Chart]:
    base, shape = _encoded(chart)
    spread = {"y": alt.Y("low:Q"), "y2": alt.Y2("high:Q")}
    dash = alt.when("datum.dashed").then(alt.value([6, 4])).otherwise(alt.value([1, 0]))
    points = base.mark_point(filled=True, size=45, opacity=1, clip=clip)
    if any(each.sizes for each in chart.series):
        scale = alt.Scale(zero=True, rangeMin=0, rangeMax=_LARGEST)
        points = points.encode(size=alt.Size("size:Q", scale=scale, legend=None))
    marks = {
        "band": base.mark_area(fillOpacity=0.2, clip=clip).encode(**spread),
        "bar": base.mark_rule(strokeWidth=1.5, clip=clip).encode(**spread),
        "joined": base.mark_line(strokeWidth=2, clip=clip).encode(strokeDash=dash),
        "marked": points.encode(shape=shape),
    }
    # Of a layer without data Vega would complain.
    found = {flag for row in _rows(chart).values for flag in row}
    return [marks[each].transform_filter(f"datum.{each}") for each in marks if each in found]


def _encoded(chart: Chart) -> tuple[alt.Chart, alt.Shape]:
    """Places and colours of the data, and the shapes of markers; one legend explains both."""
    names = [each.name for each in chart.series]
    widest = 40 + 7 * max(map(len, names), default=0)
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns=alt.ExprRef(f"max(1, floor({_WIDTH} / {widest}))"),
        labelLimit=alt.ExprRef(f"max(100, {_WIDTH})"),
    )
    colours, shapes = [], []
    for number, each in enumerate(chart.series):
        colours.append(COLOURS[(number if each.colour is None else each.colour) % len(COLOURS)])
        shapes.append(_SHAPES[number % len(_SHAPES)] if each.marked else "stroke")
    base = alt.Chart().encode(
        x=alt.X("x:Q", **_drawn(chart.x, "x")),
        y=alt.Y("y:Q", **_drawn(chart.y, "y")),
        color=alt.Color("series:N", legend=legend, scale=alt.Scale(domain=names, range=colours)),
    )
    shape = alt.Shape("series:N", legend=legend, scale=alt.Scale(domain=names, range=shapes))
    return base, shape


def _rows(chart: Chart) -> alt.InlineData:
    """A row for each point, with the names of the marks that show it."""
    rows = []
    for each in chart.series:
        every = 1 if each.sizes else math.ceil(len(each.x) / _MARKERS)
        for index, (x, y) in enumerate(zip(each.x, each.y, strict=True)):
            row: dict[str, object] = {"series": each.name, "x": _shown(x, chart.x)}
            row["y"] = _shown(y, chart.y)
            row |= {"joined": each.joined, "dashed": each.dashed}
            row["marked"] = each.marked and index % every == 0
            if each.sizes:
                row["size"] = float(each.sizes[index])
            if each.low:
                row["bar" if each.bars else "band"] = True
                row["low"] = _shown(each.low[index], chart.y)
                row["high"] = _shown(each.high[index], chart.y)
            rows.append({name: value for name, value in row.items() if value is not False})
    return alt.InlineData(values=rows)


def _shown(value: float | None, axis: Axis) -> float | None:
    if value is None or not math.isfinite(value) or (axis.log and value <= 0.0):
        return None
    return float(value)


def _drawn(axis: Axis, scale: str) -> dict[str, Any]:
    title: str | list[str] = axis.title
    if axis.unit and len(axis.name) + len(axis.unit) > _BREAK:
        title = [axis.name, f"({axis.unit})"]
    scaled = alt.Scale(type="log" if axis.log else "linear", padding=6, nice=False)
    if not axis.log:
        scaled.zero = axis.from_zero
    if axis.ends is not None:
        scaled.domain, scaled.padding = list(axis.ends), 0
    if axis.ticks:
        values, texts = zip(*axis.ticks, strict=True)
        label = f"{json.dumps(texts)}[indexof({json.dumps(values)}, datum.value)]"
        ticks = alt.Axis(values=list(values), labelExpr=label, grid=True)
        if len("".join(texts)) > _BREAK:
            ticks.labelAngle, ticks.labelOverlap = -45, False
    elif axis.log:
        ticks = alt.Axis(labelExpr=_LOG_LABEL.replace("SCALE", scale), labelOverlap="greedy")
    else:
        ticks = alt.Axis(tickCount=8, tickMinStep=1 if axis.unit == "count" else 0)
    return {"title": title, "scale": scaled, "axis": ticks}
