"""Creating and opening ledgers, and the rules that SQLite itself holds them to."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.accounting.pricing import is_export
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.events import Randomness
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.support.disk import lacks_room


def propose(run="a", round_number=0, attempt=0):
    return ProposedCharge(
        run=run,
        round=round_number,
        attempt=attempt,
        randomness=Randomness.SEEDED,
        event=poisson_gaussian(0.1, 1.1),
        cohort_commitment="0f" * 32,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "population.ledger"


NEXT = "INSERT INTO chain VALUES (3, 'next', 0, 0, 'text', 'next')"
APPEND_ONLY = [
    "UPDATE chain SET run = 'x'",
    "UPDATE chain SET text = 'x' WHERE position = 0",
    "DELETE FROM chain",
    "DELETE FROM chain WHERE position = 2",
    "DELETE FROM head",
    "UPDATE head SET count = 3",
    "UPDATE head SET count = 1",
    "UPDATE head SET hash = 'x'",
    "UPDATE head SET count = count",
    "INSERT OR REPLACE INTO head VALUES (1, 0, 'x')",
    "INSERT OR REPLACE INTO chain SELECT * FROM chain",
    "INSERT OR REPLACE INTO chain VALUES (0, NULL, NULL, NULL, 'text', 'x')",
    "INSERT OR REPLACE INTO chain SELECT 3, run, round, attempt, text, 'x' FROM chain",
    "INSERT INTO chain VALUES (4, 'other', 0, 0, 'text', 'x')",
    f"{NEXT}; INSERT OR REPLACE INTO chain VALUES (3, 'other', 0, 0, 'text', 'x')",
    f"{NEXT}; UPDATE head SET count = 3, hash = 'other'",
    f"{NEXT}; UPDATE head SET count = 3, hash = 'next', singleton = 2",
]


@pytest.mark.parametrize("statement", APPEND_ONLY)
def test_sqlite_itself_refuses_all_but_the_next_row(path, statement):
    with Ledger.open_or_create(path, "users") as ledger:
        ledger.charge(propose(round_number=0))
        ledger.charge(propose(round_number=1))
        head = ledger.head
        rows = list(ledger.charges())
        with closing(sqlite3.connect(path, isolation_level=None)) as raw:
            raw.execute("BEGIN")
            *legal, illegal = statement.split(";")
            for preparation in legal:
                raw.execute(preparation)
            with pytest.raises(sqlite3.IntegrityError):
                raw.execute(illegal)
            raw.execute("COMMIT" if not legal else "ROLLBACK")
        ledger.verify(head=head)
        assert list(ledger.charges()) == rows


class TestOpening:
    def test_creates_then_opens(self, path):
        with Ledger.open_or_create(path, "users") as ledger:
            ledger.charge(propose())
            ledger_id = ledger.ledger_id
        with Ledger.open_or_create(path, "users") as ledger:
            assert ledger.ledger_id == ledger_id
            assert ledger.population_name == "users"
            assert ledger.head.count == 1
        assert [entry.name for entry in path.parent.iterdir()] == [path.name]

    def test_a_ledger_is_of_one_population(self, path):
        Ledger.open_or_create(path, "users of 2023").close()
        with pytest.raises(LedgerError, match="population 'users of 2023', not 'everyone'"):
            Ledger.open_or_create(path, "everyone")

    @pytest.mark.parametrize("population", ["", "two\nlines"])
    def test_a_population_has_a_name(self, path, population):
        with pytest.raises(InvalidValueError, match="printable and not empty"):
            Ledger.open_or_create(path, population)
        assert not path.exists()

    def test_creating_never_replaces(self, path, monkeypatch):
        """Not even where another process creates the file in between."""
        Ledger.open_or_create(path, "users").close()
        content = path.read_bytes()
        monkeypatch.setattr(Path, "exists", lambda _: False)
        Ledger.open_or_create(path, "users").close()
        assert path.read_bytes() == content

    def test_opening_never_creates(self, path):
        with pytest.raises(LedgerError, match="cannot be opened"):
            Ledger.open(path)
        assert not path.exists()

    def test_what_may_not_be_read_is_no_lack_of_room(self, path, monkeypatch):
        Ledger.open_or_create(path, "users").close()
        monkeypatch.setattr(os, "access", lambda *_: False)
        with pytest.raises(LedgerError, match="cannot be opened: Permission denied") as caught:
            Ledger.open(path)
        assert not lacks_room(caught.value)

    def test_links_that_lead_nowhere_are_no_ledger(self, tmp_path):
        one, other = tmp_path / "one", tmp_path / "other"
        one.symlink_to(other)
        other.symlink_to(one)
        assert not is_export(one)
        with pytest.raises(LedgerError, match="symbolic links"):
            Ledger.open(one)

    def test_a_folder_that_is_missing_is_named(self, tmp_path):
        with pytest.raises(LedgerError, match=r"nowhere/l cannot be created"):
            Ledger.open_or_create(tmp_path / "nowhere" / "l", "users")

    @pytest.mark.parametrize(
        ("content", "message"), [(b"", "is not a ledger"), (b"text" * 999, "not a database")]
    )
    def test_files_that_are_no_ledger_are_refused(self, path, content, message):
        path.write_bytes(content)
        for attempt in (Ledger.open, lambda path: Ledger.open_or_create(path, "users")):
            with pytest.raises(LedgerError, match=message):
                attempt(path)
        assert path.read_bytes() == content

    def test_other_databases_are_refused_and_left_alone(self, path):
        with closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE t (x)")
        content = path.read_bytes()
        with pytest.raises(LedgerError, match="is not a ledger"):
            Ledger.open(path)
        assert path.read_bytes() == content

    @pytest.mark.parametrize("version", [0, -1, 2, 7])
    def test_other_versions_are_refused(self, path, version):
        Ledger.open_or_create(path, "users").close()
        with closing(sqlite3.connect(path)) as raw:
            raw.execute(f"PRAGMA user_version = {version}")
        with pytest.raises(LedgerError) as error:
            Ledger.open(path)
        assert str(error.value) == (
            f"ledger {path} has schema version {version}; this fedpriv reads version 1"
        )

    def test_a_journal_left_of_a_lost_ledger_does_not_roll_a_new_one_back(self, path):
        Path(f"{path}-journal").write_bytes(b"charges")
        with pytest.raises(LedgerError, match="left over from another ledger"):
            Ledger.open_or_create(path, "users")
        assert not path.exists()

    def test_a_closed_ledger_says_so(self, path):
        ledger = Ledger.open_or_create(path, "users")
        ledger.close()
        with pytest.raises(LedgerError, match="closed"):
            ledger.charge(propose())
