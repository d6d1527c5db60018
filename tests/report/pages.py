"""Reading a report without a browser, and runs that are made up."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib

from fedpriv.accounting.pricing import read_ledger
from fedpriv.ledger.events import Randomness, RoundEvent
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.report.charts import library
from fedpriv.report.records import RunRecord, SimulationOnlyRound, Verification
from fedpriv.training.rounds import RoundResult


def parsed(page: str) -> Element:
    """The document, in strict HTML 5; without the library, which takes the parser a minute."""
    assert page.count(library()) == 1
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return parser.parse(page.replace(library(), ""))


@dataclass(frozen=True)
class Drawn:
    """What a chart of a page draws: titles of its axes, and columns of each series by name."""

    x: str
    y: str
    series: dict[str, dict[str, list]]
    colours: dict[str, str]


def drawn(read: Mapping[str, Any]) -> Drawn:
    """Read the Vega-Lite specification of a chart."""
    (rows,) = read["datasets"].values()
    encoding = read["layer"][-1]["encoding"]
    scale = encoding["color"]["scale"]
    titles = [encoding[axis]["title"] for axis in "xy"]
    x, y = (title if isinstance(title, str) else " ".join(title) for title in titles)
    series = {
        name: {
            column: [row.get(column) for row in rows if row["series"] == name]
            for column in ("x", "y", "low", "high")
        }
        for name in scale["domain"]
    }
    return Drawn(x, y, series, dict(zip(scale["domain"], scale["range"], strict=True)))


def figures(document: Element) -> dict[str, Drawn]:
    """What all charts draw, by name."""
    data = [e for e in document.iter("script") if e.get("type") == "application/json"]
    return {e.get("id").removeprefix("data-"): drawn(json.loads(e.text)) for e in data}


def words(element: Element) -> str:
    """All text that is shown, with single spaces."""
    hidden = {id(e) for name in ("script", "style") for e in element.iter(name)}
    parts: list[str] = []

    def walk(each: Element) -> None:
        if id(each) not in hidden:
            parts.append(each.text or "")
            for inner in each:
                walk(inner)
                parts.append(inner.tail or "")

    walk(element)
    return " ".join(" ".join(parts).split())


def section(document: Element, name: str) -> Element:
    (found,) = [e for e in document.iter("section") if e.get("id") == name]
    return found


def made_up(
    path: Path,
    events: Sequence[RoundEvent],
    rounds: Sequence[RoundResult] = (),
    *,
    name: str = "run",
    population: str = "people",
    plan: str = "rounds = 1\n",
    delta: float = 1e-5,
    randomness: Randomness = Randomness.OPERATING_SYSTEM,
    simulation_only: Sequence[SimulationOnlyRound] = (),
) -> RunRecord:
    """A run with these charges in a real ledger, and these rounds."""
    with Ledger.open_or_create(path, population) as ledger:
        for number, event in enumerate(events):
            ledger.charge(ProposedCharge(name, number, 0, randomness, event, "0" * 64))
        head = ledger.head
    return RunRecord(
        name=name,
        folder=path.parent,
        plan=plan,
        settings={},
        rounds_planned=len(events),
        delta=delta,
        budget=None,
        accountant="tight",
        ledger=read_ledger(path),
        verification=Verification(head, cohorts=False, releases=len(rounds)),
        rounds=tuple(rounds),
        simulation_only=tuple(simulation_only),
    )


def released(number: int, **changes: object) -> RoundResult:
    """A round with one group, clipped to 0.5."""
    usual: Mapping[str, object] = {
        "epsilon": 0.1 * number,
        "accuracy": 0.5,
        "loss": 1.0,
        "clipping_norms": {"update": 0.5},
        "metrics": {},
        "metrics_noise_stddev": {},
    }
    return RoundResult(
        **{**usual, **changes},
        run="run",
        rounds=9,
        round=number - 1,
        attempt=0,
        charge="",
        delta=1e-5,
        expected_cohort_size=10.0,
    )
