"""Backups of a ledger and its record: made in use, put back whole, and never silently older."""

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import LedgerError
from fedpriv.ledger.events import PrivacyBudget, Randomness
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord, record_path
from fedpriv.privacy.round import PrivacyRecords
from fedpriv.run.backup import back_up, restore
from tests.commandline import fedpriv, refused

BUDGET = PrivacyBudget(float("inf"), 1e-5, lambda *_: 0.0)
EVENT = poisson_gaussian(0.1, 1.0, population=100)


def opened(path: Path, **given: bool):
    return PrivacyRecords.open(path, record_path(path), "users", BUDGET, **given)


def charge(records: PrivacyRecords, number: int, run: str = "r") -> None:
    """As a round does before its release."""
    commitment = records.participation.record(run, number, 0, np.arange(5))
    proposed = ProposedCharge(run, number, 0, Randomness.SEEDED, EVENT, commitment)
    records.ledger.charge(proposed, records.budget)
    records.participation.keep_head(records.ledger.head)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    """With two charges."""
    path = tmp_path / "ledger.sqlite"
    with opened(path) as records:
        for number in range(2):
            charge(records, number)
    return path


@pytest.fixture
def backup(tmp_path: Path, ledger: Path) -> Path:
    """With two charges of the ledger, which then has four."""
    to = tmp_path / "kept" / "backup.sqlite"  # in a new folder
    assert back_up(ledger, to).count == 2
    with opened(ledger) as records:
        for number in range(2, 4):
            charge(records, number)
    return to


def content(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in (path, record_path(path))]


def verified(path: Path) -> int:
    with Ledger.open(path) as ledger, ParticipationRecord.open(record_path(path)) as record:
        ledger.verify(record)
        return ledger.head.count


class TestBackingUp:
    def test_a_backup_is_whole_and_can_be_gone_on_with(self, backup, ledger):
        assert (verified(backup), verified(ledger)) == (2, 4)
        assert record_path(backup).stat().st_mode & 0o777 == 0o600
        with opened(backup) as records:
            charge(records, 7)
        assert verified(backup) == 3

    def test_no_key_of_a_series_is_copied(self, ledger, tmp_path):
        """What goes on from a backup in its place would release the same noise on another sum."""
        with ParticipationRecord.open(record_path(ledger)) as record:
            first = record.record("r", 1, 0, np.arange(3), b"k" * 32)
            to = tmp_path / "backup.sqlite"
            back_up(ledger, to)
            assert record.series_key(first) == b"k" * 32
        with ParticipationRecord.open(record_path(to)) as copied:
            assert copied.series_key(first) is None
            np.testing.assert_array_equal(copied.users_of(first), np.arange(3))
        assert b"k" * 32 not in record_path(to).read_bytes()

    @pytest.mark.parametrize("there", ["ledger", "record"])
    def test_nothing_is_overwritten(self, ledger, tmp_path, there):
        to = tmp_path / "to.sqlite"
        taken, other = (to, record_path(to)) if there == "ledger" else (record_path(to), to)
        taken.write_bytes(b"mine")
        with pytest.raises(LedgerError, match="exists already; it is not overwritten"):
            back_up(ledger, to)
        assert taken.read_bytes() == b"mine"
        assert not other.exists()

    @pytest.mark.slow
    def test_backups_made_while_rounds_are_charged_are_consistent(self, ledger, tmp_path):
        stop = threading.Event()

        def go_on() -> None:
            with opened(ledger) as records:
                number = 2
                while not stop.is_set():
                    charge(records, number)
                    number += 1

        rounds = threading.Thread(target=go_on)
        rounds.start()
        try:
            for copy in range(15):
                with Ledger.open(ledger) as now:
                    durable = now.head.count
                to = tmp_path / f"{copy}.sqlite"
                back_up(ledger, to)
                assert verified(to) >= durable
                with opened(to, resuming=True):
                    pass
        finally:
            stop.set()
            rounds.join()

    def test_a_broken_ledger_is_not_backed_up(self, ledger, tmp_path):
        shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "kept.sqlite")
        with opened(ledger) as records:
            charge(records, 2)
        shutil.copy(tmp_path / "kept.sqlite", ledger)
        with pytest.raises(LedgerError, match="never had the head of 3 charges"):
            back_up(ledger, tmp_path / "to.sqlite")
        assert not (tmp_path / "to.sqlite").exists()


class TestRestoring:
    def test_a_lost_pair_comes_back(self, backup, tmp_path):
        path = tmp_path / "new.sqlite"
        head, missing = restore(backup, path, older=False)
        assert (head.count, missing, verified(path)) == (2, [], 2)

    def test_an_older_state_must_be_asked_for_and_names_what_it_lacks(self, backup, ledger):
        before = content(ledger)
        with pytest.raises(LedgerError, match=r"it lacks charge 3 \(run r, round 2, attempt 0\)"):
            restore(backup, ledger, older=False)
        assert content(ledger) == before
        head, missing = restore(backup, ledger, older=True)
        assert missing == [
            "charge 3 (run r, round 2, attempt 0)",
            "charge 4 (run r, round 3, attempt 0)",
        ]
        assert (head.count, verified(ledger)) == (2, 2)

    def test_a_newer_state_needs_no_word(self, backup, ledger):
        assert restore(ledger, backup, older=False)[1] == []
        assert verified(backup) == 4

    def test_a_lost_ledger_is_older_where_its_record_is_still_there(self, backup, ledger):
        ledger.unlink()
        with pytest.raises(LedgerError, match="it lacks charges 3 to 4, which only the record has"):
            restore(backup, ledger, older=False)
        assert not ledger.exists()
        assert restore(backup, ledger, older=True)[1][0].startswith("charges 3 to 4")
        assert verified(ledger) == 2

    def test_a_backup_of_another_ledger_is_refused(self, ledger, tmp_path):
        other, gone = tmp_path / "other.sqlite", tmp_path / "gone.sqlite"
        for path in (other, gone):
            with opened(path) as records:
                charge(records, 0)
        before = content(ledger)
        for older in (False, True):
            with pytest.raises(LedgerError, match="the backup is of ledger"):
                restore(other, ledger, older=older)
        assert content(ledger) == before
        gone.unlink()
        with pytest.raises(LedgerError, match="belongs to another ledger"):
            restore(other, gone, older=True)

    def test_half_an_older_backup_is_refused(self, backup, ledger):
        """The record that stays would hold against the ledger what it lacks."""
        record_path(backup).unlink()
        before = content(ledger)
        with pytest.raises(LedgerError, match=r"participation.sqlite is missing"):
            restore(backup, ledger, older=True)
        assert content(ledger) == before

    def test_copies_that_grew_apart_do_not_replace_each_other(self, backup, ledger):
        with opened(backup) as records:
            charge(records, 0, "elsewhere")
        for older in (False, True):
            with pytest.raises(LedgerError, match="grew apart"):
                restore(backup, ledger, older=older)

    def test_a_broken_backup_is_refused(self, backup, ledger):
        backup.write_bytes(backup.read_bytes()[:-4096])
        before = content(ledger)
        with pytest.raises(LedgerError):
            restore(backup, ledger, older=True)
        assert content(ledger) == before

    def test_a_run_at_it_can_charge_the_old_file_no_more(self, backup, ledger):
        with opened(ledger) as records:
            restore(backup, ledger, older=True)
            with pytest.raises(LedgerError, match="moved or replaced"):
                charge(records, 9)
        assert verified(ledger) == 2

    def test_a_link_to_a_shared_ledger_stays_one(self, backup, ledger, tmp_path):
        link = tmp_path / "link.sqlite"
        link.symlink_to(ledger)
        restore(backup, link, older=True)
        assert link.is_symlink()
        with Ledger.open(ledger) as restored:
            assert restored.head.count == 2

    @pytest.mark.parametrize("lost", [False, True])
    def test_a_series_that_was_under_way_is_over(self, ledger, tmp_path, lost, monkeypatch):
        """More of it may have been released than the backup knows, by noise that it determines.

        Whenever the process is killed: no file that gets a name has the key.
        """
        with ParticipationRecord.open(record_path(ledger)) as record:
            first = record.record("r", 1, 0, np.arange(3), b"k" * 32)
        to = tmp_path / "backup.sqlite"
        for source, copy in ((ledger, to), (record_path(ledger), record_path(to))):
            shutil.copy(source, copy)  # not by `back_up`, which copies no key
        if lost:
            ledger.unlink()
            record_path(ledger).unlink()
        named, link, replace = [], os.link, Path.replace

        def note(draft, path) -> None:
            named.append(Path(path).name)
            assert b"k" * 32 not in Path(draft).read_bytes()

        monkeypatch.setattr("os.link", lambda draft, to: note(draft, to) or link(draft, to))
        monkeypatch.setattr(
            Path, "replace", lambda draft, to: note(draft, to) or replace(draft, to)
        )
        restore(to, ledger, older=False)
        assert {ledger.name, record_path(ledger).name} <= {*named}
        with ParticipationRecord.open(record_path(ledger)) as record:
            assert record.series_key(first) is None
        assert b"k" * 32 not in record_path(ledger).read_bytes()


def test_the_commands_say_what_they_did(ledger, tmp_path):
    to = tmp_path / "to.sqlite"
    with Ledger.open(ledger) as found:
        head = f"head 2:{found.head.hash}\n"
    assert fedpriv("ledger", "backup", ledger, to).stdout == f"{to} holds 2 charges; {head}"
    assert "exists already" in refused("ledger", "backup", ledger, to)
    with opened(ledger) as records:
        charge(records, 5)
    assert "--older restores it nevertheless" in refused("ledger", "restore", to, ledger)
    done = fedpriv("ledger", "restore", to, ledger, "--older")
    lost = "it lacks charge 3 (run r, round 5, attempt 0)\n"
    assert done.stdout == f"{ledger} holds 2 charges; {head}{lost}"


class TestStarting:
    """What is found when records are opened, before any user is asked."""

    def test_a_ledger_that_was_set_back_is_refused_by_its_record(self, backup, ledger):
        shutil.copy(backup, ledger)
        for resuming in (False, True):
            with (
                pytest.raises(LedgerError, match=r"lacks charges that .* has seen, up to head 4:"),
                opened(ledger, resuming=resuming),
            ):
                pass

    def test_so_is_an_empty_one_in_its_place(self, ledger):
        ledger.unlink()
        Ledger.open_or_create(ledger, "users").close()
        with pytest.raises(LedgerError, match="set back or replaced"), opened(ledger):
            pass

    def test_the_last_charge_on_which_nothing_was_released_may_be_missing(self, ledger):
        """A crash between a charge and its release: the record does not know it yet."""
        with opened(ledger) as records:
            commitment = records.participation.record("r", 2, 0, np.arange(5))
            proposed = ProposedCharge("r", 2, 0, Randomness.SEEDED, EVENT, commitment)
            records.ledger.charge(proposed, records.budget)
        with opened(ledger, resuming=True) as records:
            assert records.participation.ledger_head == records.ledger.head
            assert records.next_attempt("r", 2) == 1

    @pytest.mark.parametrize("resuming", [False, True])
    @pytest.mark.parametrize("lost", ["ledger", "participation record"])
    def test_one_of_two_files_is_not_replaced_by_an_empty_one(self, ledger, lost, resuming):
        path = ledger if lost == "ledger" else record_path(ledger)
        path.unlink()
        with (
            pytest.raises(LedgerError, match=f"^{lost} .* is missing; restore it from a backup$"),
            opened(ledger, resuming=resuming),
        ):
            pass
        assert not path.exists()

    def test_heads_that_the_record_keeps_never_go_back(self, ledger):
        with opened(ledger) as records:
            old = records.ledger.head
            charge(records, 2)
            records.participation.keep_head(old)
            assert records.participation.ledger_head == records.ledger.head
