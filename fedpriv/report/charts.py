"""Charts and pages.

One declaration of a chart gives an interactive chart on a page, and a PNG or SVG file. A page is
text, tables and charts in one HTML file that opens without a network.
"""

import base64
import hashlib
import json
import math
import textwrap
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import altair as alt
import vl_convert
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedpriv import __version__
from fedpriv.errors import InvalidValueError
from fedpriv.report.tables import Table
from fedpriv.support.disk import write_atomically

# Distinguishable with colour vision deficiency, on white and on black; marker shapes and dashes
# distinguish lines without colour, as in print.
COLOURS = ("#3a86c8", "#d9622b", "#1a9a72", "#c973a6", "#c98a00", "#8a74c9", "#2aa3b8", "#8a8a8a")
_SHAPES = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "triangle-left")
_MARKERS = 20  # most markers on a line
_POINTS = 2_000  # approximate limit of a series; a page could not show more, and would grow
_BREAK = 40  # characters of an axis title that fit on a phone
_SIZE = (600, 300)  # of the plot in a file, in pixels at 96 per inch
# Width of the legend, since Vega computes the width of the plot too late.
_WIDTH = f"(isFinite(containerSize()[0]) ? containerSize()[0] - 70 : {_SIZE[0]})"
# Labels at 1, 2 and 5 of each decade, or at all ticks if the axis covers less than one decade.
_LOG_LABEL = (
    "domain('SCALE')[1] < 10 * domain('SCALE')[0] || "
    "indexof('125', slice(format(datum.value, '.0e'), 0, 1)) >= 0 ? "
    "format(datum.value, '.4~g') : ''"
)
_TEMPLATES = files("fedpriv.report") / "templates"
_DOCTYPE = b"<!doctype html>"


@dataclass(frozen=True)
class Axis:
    """One axis of a chart: a quantity and its unit, empty for a pure number."""

    name: str
    unit: str = ""
    log: bool = False
    ends: tuple[float, float] | None = None  # None: the ends of the data
    from_zero: bool = False  # whether a linear scale without ends includes zero
    ticks: tuple[tuple[float, str], ...] = ()  # values and labels; empty: round numbers

    @property
    def title(self) -> str:
        """The quantity with its unit, if any."""
        return f"{self.name} ({self.unit})" if self.unit else self.name


@dataclass(frozen=True)
class Series:
    """A line or points, and a band or error bars; charts omit values that do not fit an axis."""

    name: str  # in the legend; unique in the chart
    x: Sequence[float]
    y: Sequence[float | None]
    low: Sequence[float | None] = ()
    high: Sequence[float | None] = ()
    dashed: bool = False
    joined: bool = True  # whether a line joins the points
    marked: bool = True  # whether points have markers
    bars: bool = False  # error bars instead of a band
    colour: int | None = None  # index in COLOURS; None: the next


@dataclass(frozen=True)
class Chart:
    """A chart, and a caption that explains it in a few sentences."""

    name: str  # identifies it in a page, and names its files
    title: str
    caption: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    simulation_only: bool = False  # whether it shows data that no guarantee covers


@cache
def texts() -> dict[str, Any]:
    """Return the texts of reports: the content of `templates/texts.toml`."""
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
    """Return a chart of a kind in `texts`, with words filled in.

    A name and axes replace those of the kind.
    """
    template = texts()["charts"][kind]
    simulation_only = template.get("simulation_only", False)
    caption = template["caption"] + (f" {texts()['simulation_only']}" if simulation_only else "")
    x, y = (
        axis or Axis(**{**template[key], "name": template[key]["name"].format(**words)})
        for key, axis in (("x", x), ("y", y))
    )
    title, caption = template["title"].format(**words), caption.format(**words)
    return Chart(name or kind, title, caption, x, y, series, simulation_only)


def spans_decades(values: Sequence[float]) -> bool:
    """Return whether values are positive and span more than a factor of ten."""
    return min(values) > 0.0 and max(values) > 10.0 * min(values)


def figure(*charts: Chart) -> alt.HConcatChart:
    """Return charts side by side as an Altair figure for documents, with titles and captions."""
    parts = []
    for chart in charts:
        heading = f"{chart.title} (simulation only)" if chart.simulation_only else chart.title
        caption = textwrap.wrap(chart.caption, 115)
        title = alt.TitleParams(textwrap.wrap(heading, 80), subtitle=caption)
        part = alt.LayerChart(data=_rows(chart), layer=_layers(chart, clip=False), title=title)
        parts.append(part.properties(width=_SIZE[0], height=_SIZE[1]))
    scales = alt.Resolve(scale=alt.ScaleResolveMap(color="independent", shape="independent"))
    return alt.HConcatChart(
        hconcat=parts, resolve=scales, config=_style(), background="white", padding=12
    )


def save(chart: Chart, folder: Path, formats: Iterable[str] = ("png", "svg")) -> list[Path]:
    """Write a chart in each format, "png" or "svg", and return the files.

    The same chart always gives the same bytes.
    """
    # Altair would check and draw the chart for each format; the PNG is made from the SVG.
    svg = vl_convert.vegalite_to_svg(figure(chart).to_dict(validate=False))
    paths = [folder / f"{chart.name}.{suffix}" for suffix in formats]
    for path in paths:
        is_png = path.suffix == ".png"
        path.write_bytes(vl_convert.svg_to_png(svg, scale=2) if is_png else svg.encode())
    return paths


def save_all(charts: Iterable[Chart], folder: Path) -> list[Path]:
    """Write charts as PNG and SVG into a folder, which is created, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    return [file for chart in charts for file in save(chart, folder)]


def embedded(chart: Chart) -> dict[str, Any]:
    """Return a chart as Vega-Lite for a page: as wide as its container, with zoom and tooltips."""
    selection = alt.selection_point(name="chosen", fields=["series"], bind="legend")
    # Without shift the wheel scrolls the page; pointer events would keep a phone from scrolling.
    zoom = alt.selection_interval(
        name="moved",
        bind="scales",
        translate="[mousedown, window:mouseup] > window:mousemove!",
        zoom="wheel![event.shiftKey]",
    )
    opacity = alt.when(selection).then(alt.value(1.0)).otherwise(alt.value(0.1))
    tips = [alt.Tooltip("series:N")]
    for name, axis in (("x", chart.x), ("y", chart.y)):
        tips.append(alt.Tooltip(f"{name}:Q", title=axis.title, format=".4~g"))
    if any(series.low for series in chart.series):
        tips += [alt.Tooltip(f"{end}:Q", format=".4~g") for end in ("low", "high")]
    base, _ = _encoded(chart)
    # Points are too small to hit, so larger invisible points have the tooltips.
    targets = base.mark_point(size=200, filled=True, opacity=0, clip=True).encode(tooltip=tips)
    layers = [layer.encode(opacity=opacity) for layer in _layers(chart, clip=True)]
    embedding = alt.LayerChart(
        data=_rows(chart),
        layer=[*layers, targets.add_params(selection, zoom)],
        config=_style(),
        width="container",
        height=_SIZE[1],
        autosize=alt.AutoSizeParams(type="fit-x", contains="padding"),
        background="transparent",
        description=f"{chart.title}. {chart.caption}",
    )
    return embedding.to_dict(validate=False)  # validation would take longer than all the rest


@cache
def library() -> str:
    """Return JavaScript that draws `embedded` charts: Vega, Vega-Lite and Vega-Embed."""
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")


def _layers(chart: Chart, *, clip: bool) -> list[alt.Chart]:
    base, shape = _encoded(chart)
    spread = {"y": alt.Y("low:Q"), "y2": alt.Y2("high:Q")}
    dash = alt.when("datum.dashed").then(alt.value([6, 4])).otherwise(alt.value([1, 0]))
    points = base.mark_point(filled=True, size=45, opacity=1, clip=clip)
    marks = {
        "band": base.mark_area(fillOpacity=0.2, clip=clip).encode(**spread),
        "bar": base.mark_rule(strokeWidth=1.5, clip=clip).encode(**spread),
        "joined": base.mark_line(strokeWidth=2, clip=clip).encode(strokeDash=dash),
        "marked": points.encode(shape=shape),
    }
    # Vega warns about layers without data.
    keys = {key for row in _rows(chart).values for key in row}
    return [mark.transform_filter(f"datum.{key}") for key, mark in marks.items() if key in keys]


def _encoded(chart: Chart) -> tuple[alt.Chart, alt.Shape]:
    """Return a base with positions and colours, and the shapes of markers; they share a legend."""
    names = [series.name for series in chart.series]
    widest = 40 + 7 * max(map(len, names), default=0)
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns=alt.ExprRef(f"max(1, floor({_WIDTH} / {widest}))"),
        labelLimit=alt.ExprRef(f"max(100, {_WIDTH})"),
    )
    colours, shapes = [], []
    for number, series in enumerate(chart.series):
        colour = number if series.colour is None else series.colour
        colours.append(COLOURS[colour % len(COLOURS)])
        shapes.append(_SHAPES[number % len(_SHAPES)] if series.marked else "stroke")
    base = alt.Chart().encode(
        x=alt.X("x:Q", **_axis_options(chart.x, "x")),
        y=alt.Y("y:Q", **_axis_options(chart.y, "y")),
        color=alt.Color("series:N", legend=legend, scale=alt.Scale(domain=names, range=colours)),
    )
    shape = alt.Shape("series:N", legend=legend, scale=alt.Scale(domain=names, range=shapes))
    return base, shape


def _rows(chart: Chart) -> alt.InlineData:
    """Return a row for each point that is shown, with the names of the marks that show it.

    A series of more than `_POINTS` points is thinned out evenly.
    """
    rows = []
    for series in chart.series:
        spacing, step = (math.ceil(len(series.x) / limit) for limit in (_MARKERS, _POINTS))
        for index, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
            if index % step and index % spacing and index < len(series.x) - 1:
                continue
            row: dict[str, object] = {"series": series.name, "x": _on_axis(x, chart.x)}
            row |= {"y": _on_axis(y, chart.y), "joined": series.joined, "dashed": series.dashed}
            row["marked"] = series.marked and index % spacing == 0
            if series.low:
                row["bar" if series.bars else "band"] = True
                row["low"] = _on_axis(series.low[index], chart.y)
                row["high"] = _on_axis(series.high[index], chart.y)
            rows.append({name: value for name, value in row.items() if value is not False})
    return alt.InlineData(values=rows)


def _on_axis(value: float | None, axis: Axis) -> float | None:
    if value is None or not math.isfinite(value) or (axis.log and value <= 0.0):
        return None
    return float(value)


def _axis_options(axis: Axis, name: str) -> dict[str, Any]:
    title: str | list[str] = axis.title
    if axis.unit and len(axis.name) + len(axis.unit) > _BREAK:
        title = [axis.name, f"({axis.unit})"]
    scale = alt.Scale(type="log" if axis.log else "linear", padding=6, nice=False)
    if not axis.log:
        scale.zero = axis.from_zero
    if axis.ends is not None:
        scale.domain, scale.padding = list(axis.ends), 0
    if axis.ticks:
        values, labels = zip(*axis.ticks, strict=True)
        label = f"{json.dumps(labels)}[indexof({json.dumps(values)}, datum.value)]"
        ticks = alt.Axis(values=list(values), labelExpr=label, grid=True)
        if len("".join(labels)) > _BREAK:
            ticks.labelAngle, ticks.labelOverlap = -45, False
    elif axis.log:
        ticks = alt.Axis(labelExpr=_LOG_LABEL.replace("SCALE", name), labelOverlap="greedy")
    else:
        ticks = alt.Axis(tickCount=8, tickMinStep=1 if axis.unit == "count" else 0)
    return {"title": title, "scale": scale, "axis": ticks}


@dataclass(frozen=True)
class Card:
    """A number that readers look for first, and a note on it."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class PageSection:
    """A section of a page; a page omits its empty parts."""

    name: str  # identifies it in the page; letters and hyphens
    title: str
    paragraphs: Sequence[str] = ()
    answers: int = 0  # number of first paragraphs that are the main result, in larger type
    warnings: Sequence[str] = ()
    first: Sequence[Chart] = ()  # charts above the main result
    cards: Sequence[Card] = ()
    tables: Sequence[Table] = ()
    terms: Mapping[str, str] = field(default_factory=dict)  # explanations by term
    charts: Sequence[Chart] = ()
    listing: str = ""  # preformatted text

    @property
    def empty(self) -> bool:
        """True if it has only a heading."""
        text = (self.paragraphs, self.warnings, self.cards, self.tables, self.terms)
        content = (*text, self.first, self.charts, self.listing)
        return not any(content)


@dataclass(frozen=True)
class Page:
    """A page: a heading, a line below it, and sections; empty sections are omitted."""

    title: str
    lead: str
    sections: Sequence[PageSection]


def render(page: Page) -> str:
    """Return an HTML page with everything it needs inside.

    Guarantees: the content is always escaped; browsers run only the two scripts whose hashes the
    page names, and open no connection (Content Security Policy).
    """
    environment = Environment(
        autoescape=True,
        loader=PackageLoader("fedpriv.report"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters["embedded"] = embedded
    script, style = (
        _TEMPLATES.joinpath(f"page.{kind}").read_text("utf-8") for kind in ("js", "css")
    )
    scripts = [library(), script]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in scripts]
    sources = " ".join(f"'sha256-{digest.decode()}'" for digest in digests)
    policy = (
        f"default-src 'none'; script-src {sources}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    return environment.get_template("page.html.j2").render(
        page=page,
        scripts=[*map(Markup, scripts)],
        policy=policy,
        style=Markup(style),
        footer=texts()["footer"].format(version=__version__),
    )


def write_page(text: str, path: Path) -> None:
    """Write a page atomically; InvalidValueError if it would replace a file that is not HTML."""
    if path.exists() and not _begins_as_page(path):
        raise InvalidValueError(f"{path} exists already and is not HTML; it is not overwritten")
    write_atomically(path, text.encode())


def _begins_as_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_DOCTYPE)).lower() in (_DOCTYPE, b"")  # an empty file is replaced too
