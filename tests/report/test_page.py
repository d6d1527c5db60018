"""The report of a run, read without a browser."""

import base64
import hashlib
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import altair as alt
import pytest
from jsonschema import ValidationError
from scipy.stats import norm

from fedpriv.accounting.accountants import ACCOUNTANTS
from fedpriv.accounting.accountants import epsilon as epsilon_of
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.accounting.pricing import read_ledger
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    SumQueryEvent,
)
from fedpriv.report.charts import Axis, Chart, Series, embedded, render
from fedpriv.report.guarantee import assumptions, loss_of, write_trade_off
from fedpriv.report.records import SimulationOnlyRound
from fedpriv.report.run_page import page_of_run, write_run_charts
from fedpriv.support.checks import epsilon_up
from tests.report.pages import drawn, figures, made_up, parsed, released, section, words

EVERYBODY = SamplingEvent(
    SamplingPolicy.EVERY_USER, 1.0, 300, NeighbouringRelation.ADD_OR_REMOVE_ONE
)
FULL = RoundEvent(EVERYBODY, (SumQueryEvent("update", 1.0, 4.0),))
SECTIONS = [
    "summary",
    "assumptions",
    "accuracy",
    "epsilon",
    "trade-off",
    "norms",
    "ledger",
    "plan",
    "software",
]
HOSTILE = (
    "</script><script>window.broken=1</script><img src=x onerror='window.broken=1'>&amp;\"{{7*7}}"
)


@pytest.fixture(scope="module")
def page(report: Path) -> str:
    return report.read_text(encoding="utf-8")


def test_all_sections_are_there_and_can_be_jumped_to(page: str) -> None:
    document = parsed(page)
    assert [e.get("id") for e in document.iter("section")] == SECTIONS
    links = [e.get("href") for e in document.iter("a")]
    assert links == [f"#{name}" for name in SECTIONS]
    assert all(words(e) for e in document.iter("section"))


def test_nothing_is_fetched(page: str) -> None:
    document = parsed(page)
    for element in document.iter():
        for name, value in element.items():
            if name in {"src", "srcset", "data", "action", "poster"}:
                pytest.fail(f"{element.tag} has {name} = {value}")
            if name == "href":
                assert value.startswith("#")
    assert not list(document.iter("link"))
    assert "url(" not in "".join(e.text for e in document.iter("style"))


def test_only_the_scripts_that_are_named_may_run(page: str) -> None:
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    policy = policy.replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; ")
    bodies = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(bodies) == 2
    digests = [base64.b64encode(hashlib.sha256(b.encode()).digest()).decode() for b in bodies]
    (allowed,) = re.findall(r"script-src ([^;]*);", policy)
    assert allowed.split() == [f"'sha256-{digest}'" for digest in digests]


def test_every_chart_names_its_axes_and_units(page: str) -> None:
    document = parsed(page)
    charts = figures(document)
    released_ones = {"accuracy", "loss", "front", "epsilon", "trade-off", "norms"}
    released_ones |= {"metric-contributors"}
    assert set(charts) == released_ones | {"clipped", "signal"}  # it has one layer
    for chart in charts.values():
        for axis in (chart.x, chart.y):
            # A pure number has no unit, and says none.
            pure = re.match(r"user-level ε|signal to noise", axis)
            assert pure or re.fullmatch(r".*\w.* \(.+\)", axis), axis
            assert "no unit" not in axis
    plots = [e.get("data-chart") for e in document.iter("div") if e.get("class") == "plot"]
    assert plots == list(charts)
    assert all(words(e) for e in document.iter("figcaption"))


def test_numbers_are_those_of_metrics_and_ledger(page: str, run_folder: Path) -> None:
    document = parsed(page)
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    events = read_ledger(run_folder / "ledger.sqlite").events
    summary = words(section(document, "summary"))
    assert f"{rows[-1]['accuracy']:.2%}" in summary
    (shown,) = re.findall(r"user-level ε ([0-9.]+)", summary)
    epsilon = epsilon_of(events, 1e-3).epsilon
    assert epsilon <= float(shown) <= epsilon + 1.001e-3
    charts = figures(document)
    accuracy = charts["accuracy"].series["accuracy"]
    assert accuracy["x"] == [1, 2, 3, 4, 5, 6]
    assert accuracy["y"] == pytest.approx([100 * row["accuracy"] for row in rows])
    (front,) = charts["front"].series.values()
    assert front["x"] == pytest.approx([row["epsilon"] for row in rows])
    spent, budget = (charts["epsilon"].series[name] for name in ("spent", "budget"))
    assert spent["y"] == pytest.approx([row["epsilon"] for row in rows])
    assert spent["y"][-1] == pytest.approx(epsilon)
    assert set(budget["y"]) == {2.0}
    priced = words(section(document, "epsilon"))
    for name in ACCOUNTANTS:
        last = epsilon_of(events, 1e-3, name)
        assert re.search(rf"{name} {last.bound} \S+ {epsilon_up(last.epsilon)}", priced)


def test_the_ledger_is_told_of(page: str, run_folder: Path) -> None:
    text = words(section(parsed(page), "ledger"))
    charges = read_ledger(run_folder / "ledger.sqlite").charges
    assert f"fedpriv ledger verify ledger.sqlite --head 6:{charges[-1].hash}" in text
    assert "All 6 releases of this run have their charge" in text
    assert "fits the commitment" in text
    plan = words(section(parsed(page), "plan"))
    assert " ".join((run_folder / "plan.toml").read_text().split()) in plan


def test_rounds_are_counted_where_lines_are_missing(tmp_path: Path) -> None:
    page = render(page_of_run(made_up(tmp_path / "a", [FULL] * 4, [released(4)])))
    assert "rounds 3 of 4 planned" in words(section(parsed(page), "summary"))


def test_it_says_of_which_model_the_accuracy_is(tmp_path: Path) -> None:
    rounds = [released(2), released(3, loss=None, accuracy=None)]
    record = made_up(tmp_path / "a", [FULL] * 2, rounds)
    summary = words(section(parsed(render(page_of_run(record))), "summary"))
    assert "50.00% on held-out rows, after round 1 " in summary
    both = words(
        section(parsed(render(page_of_run(replace(record, rounds=tuple(rounds[:1]))))), "summary")
    )
    assert "50.00% on held-out rows, last model " in both


def test_a_seed_is_warned_of(page: str) -> None:
    assert "seeded randomness" in words(section(parsed(page), "summary"))


@pytest.mark.parametrize("randomness", list(Randomness))
def test_a_chart_of_epsilon_warns_without_its_page_too(
    tmp_path: Path, randomness: Randomness
) -> None:
    record = made_up(tmp_path / "a", [FULL], [released(1)], randomness=randomness)
    drawn = {file.name: file for file in write_run_charts(record, tmp_path / "run")}
    drawn |= {file.name: file for file in write_trade_off(record.ledger, tmp_path / "curves")}
    for name in ("epsilon.svg", "trade_off.svg"):
        warned = "seeded randomness" in drawn[name].read_text(encoding="utf-8")
        assert warned is (randomness is Randomness.SEEDED)


def test_it_says_over_which_numbers_the_noise_was(page: str, tmp_path: Path) -> None:
    assert "follows exactly a rounded normal distribution" in words(
        section(parsed(page), "assumptions")
    )
    rounded = render(page_of_run(made_up(tmp_path / "a", [FULL])))
    assert "gaps can in principle be exploited" in words(section(parsed(rounded), "assumptions"))


def test_whatever_files_hold_is_text(tmp_path: Path) -> None:
    events = [RoundEvent(EVERYBODY, (SumQueryEvent(HOSTILE, 1.0, 4.0),))]
    rounds = [
        released(
            1,
            clipping_norms={HOSTILE: 0.5},
            metrics={HOSTILE: 1.0, "": 2.0},
            metrics_noise_stddev={HOSTILE: 0.1},
        )
    ]
    seen = [SimulationOnlyRound(0, {HOSTILE: 2.0}, {HOSTILE: 2.0}, {HOSTILE: 0.5}, {HOSTILE: 0.1})]
    record = made_up(
        tmp_path / "a",
        events,
        rounds,
        name=HOSTILE,
        population=HOSTILE,
        plan=f'name = "{HOSTILE}"',
        simulation_only=seen,
    )
    document = parsed(render(page_of_run(record)))
    assert not list(document.iter("img"))
    scripts = [e for e in document.iter("script") if e.get("type") != "application/json"]
    assert len(scripts) == 2
    assert words(next(document.iter("h1"))) == HOSTILE
    assert HOSTILE in words(section(document, "ledger"))
    assert HOSTILE in words(section(document, "plan"))
    assert set(figures(document)["clipped"].series) == {HOSTILE}


def test_what_no_guarantee_covers_is_marked(tmp_path: Path) -> None:
    layers = {"dense": 2.0, "last": 1.0}
    seen = [SimulationOnlyRound(0, {"update": 2.0}, layers, {"update": 0.5}, {"dense": 0.1})]
    document = parsed(
        render(page_of_run(made_up(tmp_path / "a", [FULL], [released(1)], simulation_only=seen)))
    )
    norms = words(section(document, "norms"))
    assert norms.count("simulation only") == 4
    assert norms.count("must not be published for real users") == 4
    assert "seeded" not in words(document)
    plain = made_up(tmp_path / "b", [FULL], [released(1)])
    assert "simulation" not in words(section(parsed(render(page_of_run(plain))), "norms"))


def test_true_figures_of_a_simulation_are_those_that_were_recorded(
    page: str, run_folder: Path
) -> None:
    lines = (run_folder / "simulation_only.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["round"] for row in rows] == list(range(1, 7))
    charts = figures(parsed(page))
    clipping_norm, true = charts["norms"].series.values()
    assert clipping_norm["y"] == [0.5] * 6
    norms = [row["simulation_only_group_norms"]["update"] for row in rows]
    assert true["y"] == pytest.approx(norms)
    assert len(set(charts["norms"].colours.values())) == 1
    shares = [100 * row["simulation_only_clipped"]["update"] for row in rows]
    assert charts["clipped"].series["update"]["y"] == pytest.approx(shares)


def test_the_trade_off_says_no_more_than_is_true(tmp_path: Path) -> None:
    noise = 1.24
    record = made_up(tmp_path / "a", [RoundEvent(EVERYBODY, (SumQueryEvent("u", 1.0, noise),))])
    text = words(section(parsed(render(page_of_run(record))), "trade-off"))
    (percent,) = re.findall(r"at least ([0-9.]+)% of the users that took part go unnoticed", text)
    # Dong, Roth & Su 2019, equation (6): G_μ(α) = Φ(Φ⁻¹(1 − α) − μ) with μ = 1/z.
    true = norm.cdf(norm.ppf(0.95) - 1.0 / noise)
    assert true - 0.03 < float(percent) / 100 <= true
    powers = re.findall(r"([0-9.]+)% ([0-9.]+)% \1%", text)
    assert [alarms for alarms, _ in powers] == ["0.1", "1", "5", "10"]
    for alarms, power in powers:
        true = norm.sf(norm.isf(float(alarms) / 100) - 1.0 / noise)
        assert true <= float(power) / 100 < true + 3e-3
    (lines,) = [c for s in page_of_run(record).sections for c in s.charts if c.name == "trade-off"]
    (mu,) = (re.search(r"Gaussian DP: μ = ([0-9.]+)", each.name) for each in lines.series[1:2])
    assert mu is not None
    assert 1.0 / noise <= float(mu[1]) < 1.0 / noise + 1e-3
    (advantage,) = re.findall(r"beats guessing by more than ([0-9.]+) percentage points", text)
    true = 2 * norm.cdf(0.5 / noise) - 1  # the total variation of the two Gaussians
    assert true <= float(advantage) / 100 < true + 1.1e-3


@pytest.mark.parametrize(
    ("relation", "said"),
    [
        (NeighbouringRelation.ADD_OR_REMOVE_ONE, "are there, or none"),
        (NeighbouringRelation.REPLACE_ONE, "replaced by another user's"),
    ],
)
def test_the_assumptions_are_those_of_the_ledger(
    tmp_path: Path, relation: NeighbouringRelation, said: str
) -> None:
    sampling = SamplingEvent(SamplingPolicy.POISSON, 0.25, 4000, relation)
    record = made_up(tmp_path / "a", [RoundEvent(sampling, (SumQueryEvent("u", 1.0, 4.0),))])
    loss = loss_of(record)
    assert loss is not None
    text = str(assumptions(loss, record.ledger))
    for part in (f"{relation}.", said, "poisson", "q = 0.25", "N = 4,000", "1/N = 0.00025"):
        assert part in text


@pytest.mark.parametrize(
    ("epsilon", "times"), [(1.0, "2.72"), (8.0, "2,990"), (19.9, "4.39e+08"), (900.0, "10^391")]
)
def test_what_epsilon_allows_is_rounded_up_and_readable(
    tmp_path: Path, epsilon: float, times: str
) -> None:
    record = made_up(tmp_path / "a", [FULL])
    loss = loss_of(record)
    assert loss is not None
    said = assumptions(replace(loss, epsilon=epsilon), record.ledger)
    assert f"e^ε = {times} times as likely" in str(said)


def test_a_large_delta_is_warned_of(tmp_path: Path) -> None:
    record = made_up(tmp_path / "a", [FULL], delta=0.01)
    assert "not below 1/N = 0.00333" in words(parsed(render(page_of_run(record))))


def test_without_noise_there_is_no_guarantee(tmp_path: Path) -> None:
    record = made_up(tmp_path / "a", [poisson_gaussian(0.1, 0.0, population=300)], [released(1)])
    without = [released(2, epsilon=math.inf)]
    page = page_of_run(replace(record, rounds=tuple(without), budget=None))
    document = parsed(render(page))
    (warning,) = (e.text for e in section(document, "summary").iter("p") if e.get("class"))
    assert "guarantees nothing" in warning
    assert "tight interval" in words(section(document, "epsilon"))
    assert {"trade-off", "epsilon"}.isdisjoint(figures(document))
    assert "No finite ε is proven" in words(section(document, "assumptions"))
    assert "front" not in figures(document)  # there is no place for its points


def test_nothing_released_costs_nothing(tmp_path: Path) -> None:
    document = parsed(render(page_of_run(made_up(tmp_path / "a", []))))
    assert "Nothing was released" in words(section(document, "summary"))
    assert "user-level ε 0.000" in words(section(document, "summary"))


def test_a_shared_ledger_counts_whole(tmp_path: Path) -> None:
    record = made_up(tmp_path / "a", [FULL] * 4, name="other", randomness=Randomness.SEEDED)
    both = made_up(tmp_path / "b", [FULL], name="run")
    charges = (*record.ledger.charges, *both.ledger.charges)
    shared = type(record.ledger)(tmp_path / "c", "0" * 32, "people", charges)
    changed = type(both)(**{**vars(both), "ledger": shared})
    summary = words(section(parsed(render(page_of_run(changed))), "summary"))
    (all_runs, alone) = re.findall(r"user-level ε ([0-9.]+) .* this run alone ([0-9.]+)", summary)[
        0
    ]
    for text, count in ((all_runs, 5), (alone, 1)):
        true = epsilon_of([FULL] * count, 1e-5).epsilon
        assert true <= float(text) <= true + 1.001e-3


def test_charts_are_legal_vega_lite(page: str) -> None:
    texts = [e.text for e in parsed(page).iter("script") if e.get("type") == "application/json"]
    assert len(texts) > 3
    for text in texts:
        alt.LayerChart.from_json(text)
    with pytest.raises(ValidationError):
        alt.LayerChart.from_json(text.replace('"quantitative"', '"quantity"'))


def test_a_band_is_drawn_around_its_line() -> None:
    line = Series("mean", [1, 2], [3.0, 4.0], [2.0, 3.5], [4.0, 4.5])
    made = embedded(Chart("a", "title", "caption", Axis("x", "s"), Axis("y", "m"), [line]))
    assert drawn(made).series == {
        "mean": {"x": [1, 2], "y": [3.0, 4.0], "low": [2.0, 3.5], "high": [4.0, 4.5]}
    }
    band = made["layer"][0]
    assert band["mark"]["type"] == "area"
    assert (band["encoding"]["y"]["field"], band["encoding"]["y2"]["field"]) == ("low", "high")


def test_what_an_axis_has_no_place_for_is_left_out() -> None:
    line = Series("a", [1, 2, 3, 4], [0.0, float("inf"), None, 2.0])
    made = Chart("a", "title", "caption", Axis("x", "s"), Axis("y", "m", log=True), [line])
    assert drawn(embedded(made)).series["a"]["y"] == [None, None, None, 2.0]


@pytest.mark.parametrize(("count", "shown"), [(2_000, 2_000), (2_001, 1_011), (100_003, 1_980)])
def test_a_long_series_is_thinned_out(count: int, shown: int) -> None:
    x = range(count)
    line = Series("mean", x, [3.0 * at for at in x], [at - 1.0 for at in x], [at + 1.0 for at in x])
    made = embedded(Chart("a", "title", "caption", Axis("x", "s"), Axis("y", "m"), [line]))
    kept = drawn(made).series["mean"]
    assert len(kept["x"]) == shown
    assert (kept["x"][0], kept["x"][-1]) == (0, count - 1)
    assert kept["y"] == [3.0 * at for at in kept["x"]]
    assert kept["low"] == [at - 1.0 for at in kept["x"]]
    assert kept["high"] == [at + 1.0 for at in kept["x"]]
    gaps = [b - a for a, b in pairwise(kept["x"])]
    assert max(gaps) == math.ceil(count / 2_000)
    (rows,) = made["datasets"].values()
    assert sum(row.get("marked", False) for row in rows) == 20
