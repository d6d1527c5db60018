"""Whatever is changed in a ledger behind its back is found, and named.

Every case opens the file with SQLite alone, drops the triggers and does its damage. Forgers here
hash like `export` documents, so that they can also repair the digests they broke.
"""

import hashlib
import io
import json
import math
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace

import pytest

from fedpriv.accounting.policies import poisson_gaussian, separated_gaussian
from fedpriv.errors import LedgerError
from fedpriv.ledger.events import NeighbouringRelation, Randomness, RoundEvent, SumQueryEvent
from fedpriv.ledger.ledger import Head, Ledger, ProposedCharge
from fedpriv.ledger.schema import LEDGER

ROWS = 5
QUERIES = 3
POSITIONS = range(1, ROWS + 1)


def name(position):
    return f"sampling event {position} (run r, round {position - 1}, attempt 0)"


def proposal(number):
    """A charge with and without granularity; every other one has a schedule and a strategy."""
    event = RoundEvent(
        poisson_gaussian(0.1, 1.0, population=1000).sampling,
        tuple(
            SumQueryEvent(f"group {g}", 1.0 + g, 2.5 + number, 2.0**-24 if g else None)
            for g in range(QUERIES)
        ),
    )
    if number % 2:
        series = separated_gaussian(
            (1.0, 0.5), 9, 3, 2, 1.0, NeighbouringRelation.ADD_OR_REMOVE_ONE
        )
        event = replace(event, sampling=series.sampling, strategy=series.strategy)
    return ProposedCharge("r", number, 0, Randomness.OPERATING_SYSTEM, event, f"{number:064x}")


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("ledger") / "original"
    with Ledger.create(path, "users") as ledger:
        for number in range(ROWS):
            ledger.charge(proposal(number))
        ledger.verify()
    return path


@pytest.fixture
def path(original, tmp_path):
    return shutil.copy(original, tmp_path / "copy")


@pytest.fixture
def raw(path):
    """The copy without its triggers."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA synchronous = OFF")
        triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'")
        for (trigger,) in triggers.fetchall():
            connection.execute(f"DROP TRIGGER {trigger}")
        connection.execute("PRAGMA ignore_check_constraints = ON")
        yield connection


def complaint(path, head=None):
    with Ledger.open(path) as ledger, pytest.raises(LedgerError) as error:
        ledger.verify(head=head)
    return str(error.value)


def columns(table):
    with closing(sqlite3.connect(":memory:")) as pristine:
        pristine.executescript(LEDGER.schema)
        return [row[1] for row in pristine.execute(f"PRAGMA table_info({table})")]


def different(value):
    """The least different value of the same type."""
    if value is None:
        return "{}"
    if isinstance(value, float):
        return math.nextafter(value, 0.0)
    return value + 1000 if isinstance(value, int) else value + "'"


def sha256_of_json(value):
    encoded = json.dumps(value, sort_keys=True, separators=(",", ":"), default=repr).encode()
    return hashlib.sha256(encoded).hexdigest()


def without_hash(row):
    return {
        column: value
        for column, value in dict(row).items()
        if column != "hash" and value is not None
    }


def forge(raw, position, of):
    """Insert a sampling event like that at position `of`, of another run."""
    (row,) = raw.execute("SELECT * FROM sampling_events WHERE id = ?", (of,)).fetchall()
    forged = {**dict(row), "id": position, "run": "forged", "round": 0, "hash": "x"}
    values = ", ".join(f":{column}" for column in forged)
    raw.execute(f"INSERT INTO sampling_events VALUES ({values})", forged)


def rehash(raw, position):
    """Make the digests of one sampling event and its queries fit what the row says now."""
    hashes = []
    for query in raw.execute(
        "SELECT * FROM sum_query_events WHERE sampling_event = ? ORDER BY position", (position,)
    ).fetchall():
        hashes.append(sha256_of_json(without_hash(query)))
        raw.execute(
            "UPDATE sum_query_events SET hash = ? WHERE sampling_event = ? AND position = ?",
            (hashes[-1], position, query["position"]),
        )
    (row,) = raw.execute("SELECT * FROM sampling_events WHERE id = ?", (position,)).fetchall()
    content = without_hash(row)
    digest = sha256_of_json({**content, "sum_queries": hashes})
    raw.execute("UPDATE sampling_events SET hash = ? WHERE id = ?", (digest, position))
    return digest


def relink(raw, first):
    """Make the whole chain from `first` on, and the head, fit again."""
    for position in range(first, ROWS + 1):
        digest = rehash(raw, position)
        raw.execute(
            "UPDATE sampling_events SET previous_hash = ? WHERE id = ?", (digest, position + 1)
        )
    raw.execute("UPDATE head SET hash = ?", (digest,))


class TestChangedCells:
    @pytest.mark.parametrize("position", POSITIONS)
    @pytest.mark.parametrize("column", columns("sampling_events"))
    def test_of_a_sampling_event(self, path, raw, column, position):
        query = f"SELECT {column} FROM sampling_events WHERE id = ?"
        (value,) = raw.execute(query, (position,)).fetchone()
        raw.execute(
            f"UPDATE sampling_events SET {column} = ? WHERE id = ?", (different(value), position)
        )
        message = complaint(path)
        if column == "id":
            assert message == f"sampling event {position} is missing"
        else:
            assert message.startswith(f"sampling event {position} (run r")
            assert "was changed" in message

    @pytest.mark.parametrize("position", [1, 3, ROWS])
    @pytest.mark.parametrize("query", range(QUERIES))
    @pytest.mark.parametrize("column", columns("sum_query_events"))
    def test_of_a_sum_query_event(self, path, raw, column, query, position):
        where = "WHERE sampling_event = ? AND position = ?"
        (value,) = raw.execute(
            f"SELECT {column} FROM sum_query_events {where}", (position, query)
        ).fetchone()
        raw.execute(
            f"UPDATE sum_query_events SET {column} = ? {where}", (different(value), position, query)
        )
        message = complaint(path)
        moved_away = column in {"sampling_event", "position"}
        if column == "sampling_event" and query == QUERIES - 1:
            assert message.startswith(f"{name(position)} was changed, or the number of its sum")
        else:
            happened = "is missing" if moved_away else "was changed"
            assert message == f"sum query event {query} of {name(position)} {happened}"

    @pytest.mark.parametrize("value", ["text", b"\xff", math.inf, -1.0, 2**62])
    @pytest.mark.parametrize("column", ["sampling_probability", "population", "run", "hash"])
    def test_to_anything_that_sqlite_can_hold(self, path, raw, column, value):
        raw.execute(f"UPDATE sampling_events SET {column} = ? WHERE id = 2", (value,))
        assert "sampling event 2 (" in complaint(path)

    @pytest.mark.parametrize("column", ["ledger_id", "population", "created_at"])
    def test_of_the_name_of_the_ledger(self, path, raw, column):
        raw.execute(f"UPDATE ledger SET {column} = {column} || 'x'")
        assert complaint(path) == (
            f"{name(1)} does not follow the ledger's own row: one of them was replaced"
        )

    def test_of_the_hash_of_the_head(self, path, raw):
        raw.execute("UPDATE head SET hash = 'x'")
        assert complaint(path).startswith(f"the head is sampling event {ROWS} with hash x, but")

    def test_of_the_count_of_the_head(self, path, raw):
        raw.execute("UPDATE head SET count = count + 1")
        assert complaint(path) == f"sampling event {ROWS + 1} is missing"


class TestRows:
    @pytest.mark.parametrize("position", POSITIONS)
    def test_deleted(self, path, raw, position):
        raw.execute("DELETE FROM sampling_events WHERE id = ?", (position,))
        assert complaint(path) == f"sampling event {position} is missing"
        raw.execute("DELETE FROM sum_query_events WHERE sampling_event = ?", (position,))
        assert complaint(path) == f"sampling event {position} is missing"

    @pytest.mark.parametrize("position", range(1, ROWS))
    def test_deleted_and_the_rest_renumbered(self, path, raw, position):
        for table, key in [("sampling_events", "id"), ("sum_query_events", "sampling_event")]:
            raw.execute(f"DELETE FROM {table} WHERE {key} = ?", (position,))
            raw.execute(f"UPDATE {table} SET {key} = {key} - 1 WHERE {key} > ?", (position,))
        raw.execute("UPDATE head SET count = count - 1")
        assert f"sampling event {position} (run r, round {position}, attempt 0)" in complaint(path)

    @pytest.mark.parametrize("with_queries", [False, True])
    @pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 4), (4, 5), (1, 5)])
    def test_swapped(self, path, raw, one, other, with_queries):
        tables = [("sampling_events", "id"), ("sum_query_events", "sampling_event")]
        for table, key in tables[: 1 + with_queries]:
            for old, new in [(one, 99), (other, one), (99, other)]:
                raw.execute(f"UPDATE {table} SET {key} = ? WHERE {key} = ?", (new, old))
        assert complaint(path) == (
            f"sampling event {one} (run r, round {other - 1}, attempt 0) is out of order"
        )

    @pytest.mark.parametrize("position", [0, -7, ROWS + 1, 99])
    def test_inserted_outside_the_chain(self, path, raw, position):
        forge(raw, position, of=1)
        assert complaint(path) == (
            f"sampling event {position} (run forged, round 0, attempt 0) was added outside "
            "the chain"
        )

    @pytest.mark.parametrize("position", [1, 3])
    def test_inserted_into_the_chain(self, path, raw, position):
        """The inserted row fits what is before it; the one after it no longer does."""
        for shift in (100, -99):
            for table, key in [("sampling_events", "id"), ("sum_query_events", "sampling_event")]:
                raw.execute(
                    f"UPDATE {table} SET {key} = {key} + ? WHERE {key} >= ?", (shift, position)
                )
        raw.execute("UPDATE head SET count = count + 1")
        forge(raw, position, of=position + 1)
        raw.execute("INSERT INTO sum_query_events VALUES (?, 0, 'g', 1, 1, NULL, '')", (position,))
        rehash(raw, position)
        assert complaint(path) == (
            f"sampling event {position + 1} (run r, round {position - 1}, attempt 0) "
            "is out of order"
        )


class TestSumQueries:
    @pytest.mark.parametrize("query", range(QUERIES - 1))
    def test_deleted(self, path, raw, query):
        raw.execute(
            "DELETE FROM sum_query_events WHERE sampling_event = 4 AND position = ?", (query,)
        )
        assert complaint(path) == f"sum query event {query} of {name(4)} is missing"

    def test_last_deleted(self, path, raw):
        raw.execute("DELETE FROM sum_query_events WHERE sampling_event = 4 AND position = 2")
        assert complaint(path) == (
            f"{name(4)} was changed, or the number of its sum query events was"
        )

    def test_all_deleted(self, path, raw):
        raw.execute("DELETE FROM sum_query_events WHERE sampling_event = 4")
        assert complaint(path) == f"sum query event 0 of {name(4)} is missing"

    def test_added(self, path, raw):
        raw.execute("INSERT INTO sum_query_events VALUES (4, 3, 'free', 1.0, 1.0, NULL, 'x')")
        assert complaint(path) == f"sum query event 3 of {name(4)} was changed"

    def test_swapped(self, path, raw):
        for old, new in [(0, 99), (1, 0), (99, 1)]:
            raw.execute(
                "UPDATE sum_query_events SET position = ? WHERE sampling_event = 2 "
                "AND position = ?",
                (new, old),
            )
        assert complaint(path) == f"sum query event 0 of {name(2)} was changed"

    def test_of_no_sampling_event(self, path, raw):
        raw.execute("INSERT INTO sum_query_events VALUES (99, 0, 'free', 1.0, 1.0, NULL, 'x')")
        assert complaint(path) == (
            "sum query event 0 of sampling event 99 was added outside the chain"
        )


NO_SCHEDULE_OR_STRATEGY = [
    ("schedule", None),
    ("schedule", ""),
    ("schedule", "[9,3,2]"),
    ("schedule", "null"),
    ("schedule", b"\xff"),
    ("schedule", 7),
    ("schedule", '{"participations":3,"rounds":9}'[:-1]),
    ("schedule", '{"rounds":9,"participations":3,"separation":2}'),
    ("schedule", '{"participations": 3, "rounds": 9, "separation": 2}'),
    ("schedule", '{"participations":3,"rounds":9.0,"separation":2}'),
    ("schedule", '{"participations":3,"rounds":2,"separation":2}'),
    ("schedule", '{"participations":3,"rounds":9,"separation":2,"more":1}'),
    ("schedule", '{"participations":"3","rounds":9,"separation":2}'),
    ("schedule", "[" * 100_000),
    ("strategy", ""),
    ("strategy", "[1.0]"),
    ("strategy", "[]"),
    ("strategy", "[1.0, 0.5]"),
    ("strategy", "[1,0.5]"),
    ("strategy", "[1.0,0.50]"),
    ("strategy", "[1.0,NaN]"),
    ("strategy", "[1.0,1e999]"),
    ("strategy", "[1.0,Infinity]"),
    ("strategy", "[0.0,1.0]"),
    ("strategy", '["a"]'),
    ("strategy", '{"0":1.0}'),
    ("strategy", "1.5"),
    ("strategy", 1.5),
    ("strategy", b"[1.0,0.5]"),
    ("strategy", f"[{'1.0,' * 9}1.0]"),
]


class TestForgersWhoHash:
    @pytest.mark.parametrize("position", range(1, ROWS))
    def test_one_row_rehashed_breaks_the_link_after_it(self, path, raw, position):
        raw.execute(
            "UPDATE sum_query_events SET noise_stddev = 9 WHERE sampling_event = ?", (position,)
        )
        rehash(raw, position)
        assert complaint(path) == (
            f"{name(position + 1)} does not follow sampling event {position}: "
            "one of them was replaced"
        )

    def test_the_last_row_rehashed_breaks_the_head(self, path, raw):
        raw.execute("UPDATE sampling_events SET sampling_probability = 0.01 WHERE id = ?", (ROWS,))
        digest = rehash(raw, ROWS)
        assert f"leads to sampling event {ROWS} with hash {digest}" in complaint(path)

    @pytest.mark.parametrize("position", POSITIONS)
    def test_the_chain_rehashed_is_found_by_a_head_kept_elsewhere(self, path, raw, position):
        (digest,) = raw.execute("SELECT hash FROM head").fetchone()
        raw.execute(
            "UPDATE sum_query_events SET noise_stddev = 9 WHERE sampling_event = ?", (position,)
        )
        relink(raw, position)
        raw.executescript(self.triggers())
        with Ledger.open(path) as ledger:
            ledger.verify()
        assert "never had the head of 5 charges" in complaint(path, Head(ROWS, digest))

    def test_a_tail_cut_with_its_head_is_found_by_a_head_kept_elsewhere(self, path, raw):
        (digest,) = raw.execute("SELECT hash FROM head").fetchone()
        raw.execute("DELETE FROM sum_query_events WHERE sampling_event = ?", (ROWS,))
        raw.execute("DELETE FROM sampling_events WHERE id = ?", (ROWS,))
        raw.execute(
            "UPDATE head SET (count, hash) = (SELECT id, hash FROM sampling_events WHERE id = ?)",
            (ROWS - 1,),
        )
        raw.executescript(self.triggers())
        with Ledger.open(path) as ledger:
            ledger.verify()
        assert "never had the head of 5 charges" in complaint(path, Head(ROWS, digest))

    @pytest.mark.parametrize(
        ("column", "value"),
        [("policy", "lucky"), ("relation", "none"), ("randomness", "dice"),
         ("sampling_probability", 2.0), ("sampling_probability", "often"), ("population", 0)],
    )  # fmt: skip
    def test_events_that_cannot_be_priced_are_refused(self, path, raw, column, value):
        raw.execute(f"UPDATE sampling_events SET {column} = ? WHERE id = 3", (value,))
        relink(raw, 3)
        assert complaint(path).startswith(f"{name(3)} is none that this fedpriv knows: ")

    @pytest.mark.parametrize(("column", "value"), NO_SCHEDULE_OR_STRATEGY)
    def test_schedules_and_strategies_that_are_none_are_refused(self, path, raw, column, value):
        raw.execute(f"UPDATE sampling_events SET {column} = ? WHERE id = 4", (value,))
        relink(raw, 4)
        assert complaint(path).startswith(f"{name(4)} is none that this fedpriv knows: ")

    @pytest.mark.parametrize(
        "value", ["", "half", b"\xff", 0.0, -0.5, 0.75, 4.0, 5e-324, math.inf, 2**62]
    )
    def test_granularities_that_are_none_are_refused(self, path, raw, value):
        raw.execute(
            "UPDATE sum_query_events SET granularity = ? WHERE sampling_event = 3 AND position = 1",
            (value,),
        )
        relink(raw, 3)
        assert complaint(path).startswith(f"{name(3)} is none that this fedpriv knows: ")

    @staticmethod
    def triggers():
        with closing(sqlite3.connect(":memory:")) as pristine:
            pristine.executescript(LEDGER.schema)
            rows = pristine.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'")
            return ";\n".join(sql for (sql,) in rows) + ";"


def test_missing_triggers_are_named(path, raw):
    assert "head_moves_by_one" in complaint(path)


@pytest.mark.parametrize("table", ["ledger", "head"])
def test_a_ledger_without_name_or_head_is_refused(path, raw, table):
    raw.execute(f"DELETE FROM {table}")
    with pytest.raises(LedgerError, match="has 0 rows"), Ledger.open(path) as ledger:
        ledger.verify()


class TestNothingIsBuiltOnABrokenLedger:
    @pytest.mark.parametrize(
        "use",
        [
            lambda ledger: ledger.charge(proposal(ROWS)),
            lambda ledger: list(ledger.charges()),
            lambda ledger: ledger.events(),
            lambda ledger: ledger.spent(),
            lambda ledger: ledger.export(io.StringIO()),
        ],
    )
    def test_when_a_row_was_changed(self, path, raw, use):
        raw.execute("UPDATE sum_query_events SET noise_stddev = 99 WHERE sampling_event = 3")
        with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="sum query event 0 of"):
            use(ledger)
        assert raw.execute("SELECT count(*) FROM sampling_events").fetchone()[0] == ROWS

    def test_when_it_was_set_back_while_it_was_open(self, path, raw):
        with Ledger.open(path) as ledger:
            ledger.spent()
            raw.execute("UPDATE head SET (count, hash) = (SELECT id, hash FROM sampling_events)")
            with pytest.raises(LedgerError, match="the head is sampling event 1"):
                ledger.charge(proposal(ROWS))
