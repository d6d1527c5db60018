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
from fedpriv.ledger.ledger import LEDGER, Head, Ledger, ProposedCharge

ROWS = 5
QUERIES = 3
POSITIONS = range(1, ROWS + 1)


def name(position):
    return f"charge {position} (run r, round {position - 1}, attempt 0)"


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
    with Ledger.open_or_create(path, "users") as ledger:
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


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def text_of(raw, position):
    return raw.execute("SELECT text FROM chain WHERE position = ?", (position,)).fetchone()[0]


def rewrite(raw, position, text):
    """Put a text in the place of a charge, with its digest; returns the digest."""
    raw.execute(
        "UPDATE chain SET text = ?, hash = ? WHERE position = ?", (text, sha256(text), position)
    )
    return sha256(text)


def relink(raw, first):
    """Make the whole chain from `first` on, and the head, fit again."""
    digest = sha256(text_of(raw, first))
    for position in range(first + 1, ROWS + 1):
        fields = {**json.loads(text_of(raw, position)), "previous_hash": digest}
        digest = rewrite(raw, position, json.dumps(fields))
    raw.execute("UPDATE head SET hash = ?", (digest,))


def forged(raw, position, **changes):
    """Rewrite fields of a charge; returns the digest of its new text."""
    fields = {**json.loads(text_of(raw, position)), **changes}
    return rewrite(raw, position, json.dumps(fields))


class TestChangedCells:
    @pytest.mark.parametrize("position", POSITIONS)
    @pytest.mark.parametrize("value", ["x", b"\xff", 7, 0.5, math.inf])
    @pytest.mark.parametrize("column", ["position", "run", "round", "attempt", "text", "hash"])
    def test_of_a_charge(self, path, raw, column, value, position):
        if column == "position":
            value = position + 1000
        raw.execute(f"UPDATE chain SET {column} = ? WHERE position = ?", (value, position))
        message = complaint(path)
        if column == "position":
            assert message == f"charge {position} is missing"
        else:
            assert message in {f"{name(position)} was changed", f"charge {position} was changed"}

    @pytest.mark.parametrize("position", POSITIONS)
    def test_of_any_character_of_a_text(self, path, raw, position):
        text = text_of(raw, position)
        for at in range(0, len(text), 97):
            changed = text[:at] + chr(ord(text[at]) ^ 1) + text[at + 1 :]
            raw.execute("UPDATE chain SET text = ? WHERE position = ?", (changed, position))
            assert complaint(path) == f"charge {position} was changed"

    @pytest.mark.parametrize(("column", "value"), [("text", "{}"), ("text", 7), ("hash", "x")])
    def test_of_what_names_the_ledger(self, path, raw, column, value):
        raw.execute(f"UPDATE chain SET {column} = ? WHERE position = 0", (value,))
        with pytest.raises(LedgerError, match=r"first line of a ledger|identifies the ledger"):
            Ledger.open(path)

    def test_of_what_names_the_ledger_with_its_digest(self, path, raw):
        rewrite(raw, 0, text_of(raw, 0).replace("users", "others"))
        assert complaint(path) == (
            f"{name(1)} does not follow the text that identifies the ledger: "
            "one of them was replaced"
        )

    def test_of_the_hash_of_the_head(self, path, raw):
        raw.execute("UPDATE head SET hash = 'x'")
        assert complaint(path).startswith(f"the head is charge {ROWS} with hash x, but")

    def test_of_the_count_of_the_head(self, path, raw):
        raw.execute("UPDATE head SET count = count + 1")
        assert complaint(path) == f"charge {ROWS + 1} is missing"


class TestRows:
    @pytest.mark.parametrize("position", POSITIONS)
    def test_deleted(self, path, raw, position):
        raw.execute("DELETE FROM chain WHERE position = ?", (position,))
        assert complaint(path) == f"charge {position} is missing"

    @pytest.mark.parametrize("position", range(1, ROWS))
    def test_deleted_and_the_rest_renumbered(self, path, raw, position):
        raw.execute("DELETE FROM chain WHERE position = ?", (position,))
        raw.execute("UPDATE chain SET position = position - 1 WHERE position > ?", (position,))
        raw.execute("UPDATE head SET count = count - 1")
        message = complaint(path)
        assert message.startswith(f"charge {position} is missing: {name(position + 1)} is in its")

    @pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 4), (4, 5), (1, 5)])
    def test_swapped(self, path, raw, one, other):
        for old, new in [(one, 99), (other, one), (99, other)]:
            raw.execute("UPDATE chain SET position = ? WHERE position = ?", (new, old))
        assert complaint(path) == f"charge {one} is missing: {name(other)} is in its place"

    @pytest.mark.parametrize("position", [-7, ROWS + 1, 99])
    def test_added_outside_the_chain(self, path, raw, position):
        raw.execute("INSERT INTO chain VALUES (?, 'forged', 0, 0, 'text', 'x')", (position,))
        assert complaint(path) == f"charge {position} was added outside the chain"

    @pytest.mark.parametrize("position", [1, 3])
    def test_inserted_into_the_chain(self, path, raw, position):
        """The inserted charge fits what is before it; the one after it no longer does."""
        text = text_of(raw, position)
        for shift in (100, -99):
            raw.execute(
                "UPDATE chain SET position = position + ? WHERE position >= ?", (shift, position)
            )
        raw.execute("UPDATE head SET count = count + 1")
        raw.execute("INSERT INTO chain VALUES (?, 'forged', 0, 0, '', '')", (position,))
        raw.execute("UPDATE chain SET round = 0, attempt = 0 WHERE position = ?", (position,))
        fields = {**json.loads(text), "run": "forged", "round": 0}
        rewrite(raw, position, json.dumps(fields))
        assert (
            complaint(path) == f"charge {position + 1} is missing: {name(position)} is in its place"
        )


QUERY = {"group": "g", "clipping_norm": 1.0, "noise_stddev": 1.0, "granularity": None}
UNKNOWN = [
    *({"policy": value} for value in ("lucky", None, 7)),
    *({"relation": value} for value in ("none", [])),
    *({"randomness": value} for value in ("dice", True)),
    *({"sampling_probability": value} for value in (2.0, 1, "often", math.nan, None)),
    *({"population": value} for value in (0, 1000.0, True, "1000")),
    *({"run": value} for value in ("", "a\nb", 7)),
    *({"round": value} for value in (-1, 3.0, True, 2**63)),
    *({"cohort_commitment": value} for value in ("0" * 63, "G" * 64, 7)),
    *({"day": value} for value in (
        "\x1b[2J", 7, None, "2026-13-01", "20260101", "2026-01-01T09:30:00+00:00",
    )),
    *({"schedule": value} for value in (
        None, "", [9, 3, 2], {"rounds": 9}, {"participations": 3, "rounds": 9, "separation": 2},
        {"rounds": 9.0, "participations": 3, "separation": 2},
        {"rounds": 2, "participations": 3, "separation": 2},
        {"rounds": True, "participations": 1, "separation": 1},
        {"rounds": 9, "participations": 3, "separation": 2, "more": 1},
    )),
    *({"strategy": value} for value in (
        "", None, [], [1, 0.5], [1.0, math.nan], [1.0, math.inf], [0.0, 1.0], ["a"], 1.5,
        [1.0] * 10, {"0": 1.0},
    )),
    *({"sum_queries": value} for value in ([], None, {}, [{}], ["a"])),
    *({"sum_queries": [{**QUERY, **value}]} for value in (
        {"more": 1}, {"group": None}, {"group": 7}, {"clipping_norm": 1}, {"clipping_norm": 0.0},
        {"noise_stddev": -1.0}, {"noise_stddev": -0.0}, {"noise_stddev": math.inf},
        {"granularity": ""}, {"granularity": 0.75}, {"granularity": 4.0}, {"granularity": 5e-324},
        {"granularity": 1}, {"granularity": 0.0}, {"granularity": math.inf},
    )),
    {"more": 1},
]  # fmt: skip


class TestForgersWhoHash:
    @pytest.mark.parametrize("position", range(1, ROWS))
    def test_one_charge_rewritten_breaks_the_link_after_it(self, path, raw, position):
        forged(raw, position, sum_queries=[QUERY])
        assert complaint(path) == (
            f"{name(position + 1)} does not follow charge {position}: one of them was replaced"
        )

    def test_the_last_charge_rewritten_breaks_the_head(self, path, raw):
        digest = forged(raw, ROWS, sum_queries=[QUERY])
        assert f"leads to charge {ROWS} with hash {digest}" in complaint(path)

    @pytest.mark.parametrize("position", POSITIONS)
    def test_the_chain_rewritten_is_found_by_a_head_kept_elsewhere(self, path, raw, position):
        (digest,) = raw.execute("SELECT hash FROM head").fetchone()
        forged(raw, position, sum_queries=[QUERY])
        relink(raw, position)
        raw.executescript(self.triggers())
        with Ledger.open(path) as ledger:
            ledger.verify()
        assert "never had the head of 5 charges" in complaint(path, Head(ROWS, digest))

    def test_a_tail_cut_with_its_head_is_found_by_a_head_kept_elsewhere(self, path, raw):
        (digest,) = raw.execute("SELECT hash FROM head").fetchone()
        raw.execute("DELETE FROM chain WHERE position = ?", (ROWS,))
        raw.execute(
            "UPDATE head SET (count, hash) = (SELECT position, hash FROM chain WHERE position = ?)",
            (ROWS - 1,),
        )
        raw.executescript(self.triggers())
        with Ledger.open(path) as ledger:
            ledger.verify()
        assert "never had the head of 5 charges" in complaint(path, Head(ROWS, digest))

    @pytest.mark.parametrize("changes", UNKNOWN, ids=str)
    def test_what_no_ledger_charges_is_refused(self, path, raw, changes):
        forged(raw, 4, **changes)
        relink(raw, 4)
        assert complaint(path).startswith("charge 4 is not one that this fedpriv knows: ")

    @pytest.mark.parametrize(
        "written",
        [
            lambda text: " " + text,
            lambda text: text.replace(": ", ":"),
            lambda text: text.replace('"run": "r"', '"run": "\\u0072"'),
            lambda text: text.replace('"run": "r"', '"run": "x", "run": "r"'),
            lambda text: text.replace("1.0,", "1.00,"),
            lambda text: json.dumps(dict(reversed(json.loads(text).items()))),
            lambda _: "[" * 100_000,
            lambda _: "null",
            lambda _: "",
        ],
    )
    def test_the_same_in_other_writing_is_refused(self, path, raw, written):
        text = text_of(raw, ROWS)
        assert written(text) != text
        raw.execute("UPDATE head SET hash = ?", (rewrite(raw, ROWS, written(text)),))
        said = complaint(path)
        assert said.startswith(f"charge {ROWS} is not one that this fedpriv knows: ")
        of_python = ("indices", "object", "line 1", "argument", "recursion", "NoneType", "key")
        assert not any(word in said for word in of_python)

    @staticmethod
    def triggers():
        with closing(sqlite3.connect(":memory:")) as pristine:
            pristine.executescript(LEDGER.schema)
            rows = pristine.execute("SELECT sql FROM sqlite_master WHERE type = 'trigger'")
            return ";\n".join(sql for (sql,) in rows) + ";"


def test_missing_triggers_are_named(path, raw):
    assert "head_moves_by_one" in complaint(path)


@pytest.mark.parametrize(
    ("row", "what"), [("chain WHERE position = 0", "first text"), ("head", "head")]
)
def test_a_ledger_without_name_or_head_is_refused(path, raw, row, what):
    raw.execute(f"DELETE FROM {row}")
    with pytest.raises(LedgerError, match=f"has no {what}; it must"), Ledger.open(path) as ledger:
        ledger.verify()


class TestNothingIsBuiltOnABrokenLedger:
    @pytest.mark.parametrize(
        "use",
        [
            lambda ledger: ledger.charge(proposal(ROWS)),
            lambda ledger: list(ledger.charges()),
            lambda ledger: ledger.spent(),
            lambda ledger: ledger.export(io.StringIO()),
        ],
    )
    def test_when_a_charge_was_changed(self, path, raw, use):
        raw.execute("UPDATE chain SET text = replace(text, '2.5', '9.5') WHERE position = 3")
        raw.execute("UPDATE chain SET text = replace(text, '4.5', '9.5') WHERE position = 3")
        with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="charge 3 was changed"):
            use(ledger)
        assert raw.execute("SELECT count(*) FROM chain").fetchone()[0] == ROWS + 1

    def test_when_it_was_set_back_while_it_was_open(self, path, raw):
        with Ledger.open(path) as ledger:
            ledger.spent()
            raw.execute(
                "UPDATE head SET (count, hash) = "
                "(SELECT position, hash FROM chain WHERE position = 1)"
            )
            with pytest.raises(LedgerError, match="the head is charge 1"):
                ledger.charge(proposal(ROWS))
