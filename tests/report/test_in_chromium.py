"""The report in a real browser: it opens offline, without a complaint, on a phone and a desktop."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.report.charts import render, write_page
from fedpriv.report.records import SimulationOnlyRound
from fedpriv.report.run_page import page_of_run
from tests.report.browser import Tab, browsing
from tests.report.pages import made_up, released

pytestmark = pytest.mark.slow

PHONE, DESKTOP = 360, 1280
HOSTILE = "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'><b>%{x}"
# Each plot, how much text is along its axes and in its legend, and what of it is cut off.
CUT_OFF = """
[...document.querySelectorAll(".plot")].map((plot) => {
  const around = plot.getBoundingClientRect();
  const texts = plot.querySelectorAll("svg text");
  const outside = [...texts].filter((text) => {
    const at = text.getBoundingClientRect();
    return at.left < around.left - 1 || at.right > around.right + 1
      || at.top < around.top - 1 || at.bottom > around.bottom + 1;
  });
  return [plot.dataset.chart, texts.length, outside.map((text) => text.textContent)];
})
"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browsing(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    rounds = [
        released(number, metrics={HOSTILE: 1.0}, metrics_noise_stddev={HOSTILE: 0.1})
        for number in (1, 2, 3)
    ]
    seen = [
        SimulationOnlyRound(number - 1, {HOSTILE: 2.0}, {HOSTILE: 2.0}, {HOSTILE: 0.5})
        for number in (1, 2, 3)
    ]
    record = made_up(
        folder / "ledger.sqlite",
        [poisson_gaussian(0.5, 4.0, population=300)] * 3,
        rounds,
        name=HOSTILE,
        population=HOSTILE,
        plan=HOSTILE,
        simulation_only=seen,
    )
    write_page(render(page_of_run(record)), folder / "report.html")
    return folder / "report.html"


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("which", ["report", "study_report", "hostile"])
def test_it_is_drawn_without_a_complaint(
    tab: Tab, request: pytest.FixtureRequest, which: str, width: int
) -> None:
    page: Path = request.getfixturevalue(which)
    tab.events.clear()
    tab.open(page, width)
    assert tab.complaints() == []
    asked = [address for address in tab.requested() if not address.startswith("data:")]
    assert set(asked) == {page.as_uri()}
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("window.broken") is None
    plots = tab.evaluate(CUT_OFF)
    assert len(plots) >= 6
    for name, texts, cut_off in plots:
        assert texts > 6, name
        assert [text for text in cut_off if HOSTILE not in text] == [], name


@pytest.mark.parametrize(("width", "height"), [(390, 844), (DESKTOP, 900)])
@pytest.mark.parametrize("which", ["report", "study_report"])
def test_accuracy_against_epsilon_is_whole_on_the_first_screen(
    tab: Tab, request: pytest.FixtureRequest, which: str, width: int, height: int
) -> None:
    tab.open(request.getfixturevalue(which), width, height)
    assert tab.evaluate("window.scrollY") == 0
    top, bottom, right = tab.evaluate("""(() => {
        const plot = document.querySelector(".plot[data-chart=front]");
        const at = plot.getBoundingClientRect(), drawn = plot.querySelector("svg.marks");
        const { bottom } = drawn.getBoundingClientRect();
        return [at.top, Math.max(at.bottom, bottom), at.right];
    })()""")
    assert 0 < top < bottom <= height
    assert right <= width
    axis = "document.querySelector('[data-chart=front] .role-axis-title text').textContent"
    assert tab.evaluate(axis).startswith("user-level ε")


def test_names_are_shown_as_they_are(tab: Tab, hostile: Path) -> None:
    tab.open(hostile, DESKTOP)
    assert tab.evaluate("document.querySelector('h1').textContent") == HOSTILE
    legend = "document.querySelector('[data-chart=clipped] .role-legend-label text').textContent"
    assert tab.evaluate(legend) == HOSTILE


def test_dark_and_light(tab: Tab, report: Path) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    axis = "getComputedStyle(document.querySelector('.role-axis-title text')).fill"
    light, dark = (
        ("rgb(255, 255, 255)", "rgb(27, 31, 36)"),
        ("rgb(20, 23, 28)", "rgb(230, 233, 238)"),
    )
    click = "document.getElementById('theme').click()"
    for scheme, first, then in (("light", light, dark), ("dark", dark, light)):
        wished = [{"name": "prefers-color-scheme", "value": scheme}]
        tab.call("Emulation.setEmulatedMedia", features=wished)
        tab.open(report, DESKTOP)
        assert (tab.evaluate(paper), tab.evaluate(axis)) == first
        tab.evaluate(click)
        assert (tab.evaluate(paper), tab.evaluate(axis)) == then


def test_paper_is_white_and_charts_fit_it(tab: Tab, report: Path) -> None:
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    paper = "getComputedStyle(document.body).backgroundColor"
    width = "getComputedStyle(document.body).width"
    tab.call("Emulation.setEmulatedMedia", features=dark)
    tab.open(report, DESKTOP)
    assert tab.evaluate(paper) == "rgb(20, 23, 28)"
    tab.call("Emulation.setEmulatedMedia", media="print", features=dark)
    # A4 between margins of 1.5 cm is 18 cm wide, at 96 dpi.
    tab.evaluate("document.body.style.width = '680px'")
    assert tab.evaluate(width) == "680px"
    drawn = "[...document.querySelectorAll('.plot svg.marks')].map((e) => e.clientWidth)"
    assert 500 < min(tab.evaluate(drawn)) <= max(tab.evaluate(drawn)) <= 680
    assert tab.evaluate(paper) == "rgb(255, 255, 255)"
    assert tab.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
    tab.call("Emulation.setEmulatedMedia", media="", features=dark)
    assert tab.evaluate(paper) == "rgb(20, 23, 28)"


def test_a_chart_can_be_zoomed_and_says_its_numbers(tab: Tab, report: Path) -> None:
    tab.open(report, DESKTOP)
    tab.evaluate("document.querySelector('[data-chart=accuracy]').scrollIntoView()")
    ticks = """[...document.querySelectorAll(
        '[data-chart=accuracy] .role-axis-label text')].map((e) => e.textContent).join()"""
    middle = """(() => { const at = document.querySelector(
        '[data-chart=accuracy] .mark-symbol path').getBoundingClientRect();
        return [at.x + at.width / 2, at.y + at.height / 2]; })()"""
    x, y = tab.evaluate(middle)
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tab.wait_for("!!document.querySelector('#vg-tooltip-element.visible')")
    told = tab.evaluate("document.querySelector('#vg-tooltip-element').textContent")
    assert "rounds released (count)" in told
    before = tab.evaluate(ticks)
    wheel = {"type": "mouseWheel", "x": x, "y": y, "deltaX": 0, "deltaY": -400}
    tab.call("Input.dispatchMouseEvent", **wheel, modifiers=8)  # shift
    tab.wait_for(f"({ticks}) !== {before!r}")
    assert tab.complaints() == []
