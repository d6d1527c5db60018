"""One ledger, frozen as text, so that no digest changes by accident."""

import hashlib
import io
import json
from pathlib import Path

import pytest

from fedpriv.accounting.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SumQueryEvent,
    poisson_gaussian,
)
from fedpriv.accounting.ledger import Ledger, ProposedCharge
from fedpriv.accounting.ledger_lines import ExportedLedger
from fedpriv.accounting.policies import (
    every_user_gaussian,
    fixed_size_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
    shuffled_gaussian,
)

FROZEN = (Path(__file__).parent / "frozen_ledger.jsonl").read_text(encoding="utf-8")
"""What `Ledger.export` wrote of the charges below."""
ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
REPLACE = NeighbouringRelation.REPLACE_ONE
EVENTS = [
    poisson_gaussian(0.1, 1.1, population=1000),
    every_user_gaussian(2.0, REPLACE),
    fixed_size_gaussian(1, 3, 2.0),
    shuffled_gaussian(2.0, ADD_OR_REMOVE),
    RoundEvent(
        poisson_gaussian(0.25, 1.0).sampling,
        (SumQueryEvent("a", 1.0, 2.0), SumQueryEvent("b ε", 0.5, 4.0)),
    ),
    shuffled_gaussian(2.0, ADD_OR_REMOVE, batches=7),
    random_allocation_gaussian(10, 3, 2.0),
    separated_gaussian((1.0,), 10, 3, 2, 2.0, REPLACE),
    separated_gaussian((1.0, 0.5, 1 / 3), 10, 3, 2, 2.0, ADD_OR_REMOVE),
    separated_gaussian((1.0, -5e-324), 10, 3, 2, 2.0, ADD_OR_REMOVE),
    RoundEvent(
        poisson_gaussian(0.25, 1.0).sampling,
        (SumQueryEvent("a", 1.0, 2.0, 2.0**-24), SumQueryEvent("b", 1000.0, 0.5, 8.0)),
    ),
]


def charged(path):
    """A ledger that was charged with all events."""
    with Ledger.create(path, "users of 2024") as ledger:
        for number, event in enumerate(EVENTS):
            source = Randomness.OPERATING_SYSTEM
            ledger.charge(ProposedCharge("r", number, 0, source, event, f"{number:064x}"))
    return path


def exported(ledger):
    stream = io.StringIO()
    ledger.export(stream)
    return stream.getvalue()


@pytest.fixture
def _same_name_and_times(monkeypatch):
    header, *rows = map(json.loads, FROZEN.splitlines())
    times = iter([header["created_at"], *(row["charged_at"] for row in rows)])
    monkeypatch.setattr("fedpriv.accounting.ledger_rows._now", lambda: next(times))
    monkeypatch.setattr("secrets.token_hex", lambda _: header["ledger_id"])


@pytest.mark.usefixtures("_same_name_and_times")
def test_the_same_charges_are_written_as_they_were(tmp_path):
    with Ledger.open(charged(tmp_path / "ledger")) as ledger:
        ledger.verify()
        assert ledger.events() == EVENTS
        assert exported(ledger) == FROZEN


def test_the_frozen_text_is_read_as_it_was_written():
    found = ExportedLedger.read(FROZEN.splitlines())
    assert [row.event for row in found.rows] == EVENTS
    assert found.population == "users of 2024"


def test_what_an_event_has_none_of_is_left_out():
    lines = [json.loads(line) for line in FROZEN.splitlines()[1:]]
    assert [(line.get("schedule"), line.get("strategy")) for line in lines] == [
        *[(None, None)] * 5,
        ('{"participations":1,"rounds":7,"separation":1}', None),
        ('{"participations":3,"rounds":10,"separation":1}', None),
        ('{"participations":3,"rounds":10,"separation":2}', None),
        ('{"participations":3,"rounds":10,"separation":2}', "[1.0,0.5,0.3333333333333333]"),
        ('{"participations":3,"rounds":10,"separation":2}', "[1.0,-5e-324]"),
        (None, None),
    ]
    *plain, exact = ([query.get("granularity") for query in line["sum_queries"]] for line in lines)
    assert {each for queries in plain for each in queries} == {None}
    assert exact == [2.0**-24, 8.0]
    cells = [
        value for line in lines for row in (line, *line["sum_queries"]) for value in row.values()
    ]
    assert None not in cells


def test_the_frozen_digests_are_what_export_documents():
    """So that the frozen text itself is known to be sound."""

    def digest(row):
        hashed = {name: value for name, value in row.items() if name != "hash"}
        compact = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(compact.encode()).hexdigest()

    header, *rows = (json.loads(line) for line in FROZEN.splitlines())
    head, _ = header.pop("head"), header.pop("format")
    previous = digest(header)
    for row in rows:
        assert [digest(query) for query in row["sum_queries"]] == [
            query["hash"] for query in row["sum_queries"]
        ]
        row["sum_queries"] = [query["hash"] for query in row["sum_queries"]]
        assert row["previous_hash"] == previous
        assert digest(row) == row["hash"]
        previous = row["hash"]
    assert head == {"count": len(rows), "hash": previous}
