"""What a charge survives: killed processes, full disks, files that go away."""

import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import cycle

import pytest

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import LedgerError
from fedpriv.ledger.events import Randomness, RoundEvent, SumQueryEvent
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.support.disk import lacks_room
from tests.ledger import disk_calls


def propose(round_number, queries=1):
    event = RoundEvent(
        poisson_gaussian(0.1, 1.0).sampling,
        tuple(SumQueryEvent(f"group {g}", 1.0, 1.0) for g in range(queries)),
    )
    return ProposedCharge("r", round_number, 0, Randomness.SEEDED, event, "00" * 32)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


CHARGES = 3
RECORDER = f"""
import os, sys
from pathlib import Path
import numpy as np
from fedpriv.ledger.events import Randomness
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord

folder = Path(sys.argv[1])
asked, returned = (
    os.open(folder / name, os.O_WRONLY | os.O_CREAT) for name in ("asked", "returned")
)
event = poisson_gaussian(0.1, 1.0)
with Ledger.open(folder / "ledger") as ledger, ParticipationRecord.open(folder / "who") as record:
    for number in range({CHARGES}):
        os.write(asked, b".")
        commitment = record.record("r", number, 0, np.arange(5))
        os.write(returned, b".")
        proposal = ProposedCharge("r", number, 0, Randomness.SEEDED, event, commitment)
        os.write(asked, b".")
        ledger.charge(proposal)
        os.write(returned, b".")
"""


@pytest.mark.parametrize("observed", disk_calls.OBSERVERS)
def test_cohorts_and_charges_are_on_the_disk_when_their_calls_return(tmp_path, observed):
    Ledger.open_or_create(tmp_path / "ledger", "users").close()
    ParticipationRecord.open_or_create(tmp_path / "who").close()
    calls = observed(RECORDER, tmp_path)
    marks = [n for n, call in enumerate(calls) if call.path.name in {"asked", "returned"}]
    assert [calls[n].path.name for n in marks] == ["asked", "returned"] * 2 * CHARGES
    spans = zip(marks[::2], marks[1::2], cycle(["who", "ledger"]), strict=False)
    for asked, returned, name in spans:
        files = {name, f"{name}-journal"}
        span = [call for call in calls[asked:returned] if call.path.name in files]
        written = {call.path for call in span if not call.syncs}
        assert written
        for file in written:
            # No write of this file comes after the last time that it was synced.
            assert [call.syncs for call in span if call.path == file][-1]


def test_sqlite_is_told_to_wait_for_the_disk(path):
    with Ledger.open_or_create(path, "users") as ledger:
        for setting, value in (("synchronous", 3), ("fullfsync", 1)):
            assert tuple(ledger.database.read(f"PRAGMA {setting}")[0]) == (value,)


class TestCreating:
    def test_creating_syncs_the_file_and_then_its_folder(self, path, monkeypatch):
        synced = []

        def record(descriptor):
            synced.append((os.fstat(descriptor).st_ino, path.exists()))

        monkeypatch.setattr(os, "fsync", record)
        Ledger.open_or_create(path, "users").close()
        assert synced == [(path.stat().st_ino, False), (path.parent.stat().st_ino, True)]

    def test_a_file_appears_whole_or_not_at_all(self, path, monkeypatch):
        def fail(descriptor):
            raise OSError("disk is gone")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(LedgerError, match="cannot be created: disk is gone"):
            Ledger.open_or_create(path, "users")
        assert list(path.parent.iterdir()) == []

    def test_many_may_open_or_create_at_once(self, path):
        with ThreadPoolExecutor(8) as pool:
            ledgers = list(pool.map(lambda _: Ledger.open_or_create(path, "users"), range(24)))
        assert len({ledger.ledger_id for ledger in ledgers}) == 1
        for number, ledger in enumerate(ledgers):
            ledger.charge(propose(number))
        ledgers[0].verify()
        for ledger in ledgers:
            ledger.close()


CHARGER = """
import sys
from pathlib import Path
from fedpriv.ledger.events import Randomness
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.ledger.ledger import Ledger, ProposedCharge

event = poisson_gaussian(0.1, 1.0)
with Ledger.open(Path(sys.argv[1])) as ledger:
    for number in range(10**6):
        attempt = ledger.next_attempt("r", number)
        proposal = ProposedCharge("r", number, attempt, Randomness.SEEDED, event, "00" * 32)
        print(ledger.charge(proposal).hash, flush=True)
"""


def test_kill_9_loses_no_charge_that_returned(path):
    Ledger.open_or_create(path, "users").close()
    moments = random.Random(1)
    returned = []
    for killed in range(1, 6):
        charger = subprocess.Popen(
            [sys.executable, "-c", CHARGER, path], stdout=subprocess.PIPE, text=True
        )
        returned.append(charger.stdout.readline())
        time.sleep(moments.uniform(0.0, 0.1))
        charger.kill()
        returned += charger.communicate()[0].splitlines()
        assert charger.returncode == -signal.SIGKILL
        with Ledger.open(path) as ledger:
            ledger.verify()
            kept = [row.hash for row in ledger.charges()]
        hashes = [line.strip() for line in returned]
        assert set(hashes) <= set(kept)
        assert len(kept) <= len(hashes) + killed  # at most one unreturned charge per kill
    assert len(returned) > 5


@contextmanager
def full(ledger, path):
    """No file of this process may grow beyond what the ledger has now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def out_of_pages(ledger, path):
    """The database itself may not grow."""
    pages = ledger.database.read("PRAGMA page_count")[0][0]
    ledger.database.read(f"PRAGMA max_page_count = {pages}")
    try:
        yield
    finally:
        ledger.database.read("PRAGMA max_page_count = 1000000")


@pytest.mark.parametrize("shortage", [full, out_of_pages])
def test_a_full_disk_charges_nothing(path, shortage):
    with Ledger.open_or_create(path, "users") as ledger:
        ledger.charge(propose(0))
        head = ledger.head
        with (
            shortage(ledger, path),
            pytest.raises(LedgerError, match=r"so nothing was written: (database|disk)"),
        ):
            ledger.charge(propose(1, queries=400))
        assert ledger.head == head
        with Ledger.open(path) as other:
            other.verify()
            assert other.head == head
        ledger.charge(propose(1, queries=400))
        ledger.verify(head=head)
    with Ledger.open(path) as ledger:
        ledger.verify()
        assert ledger.head.count == 2


@contextmanager
def no_more_files():
    """This process may open no file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("read_only", [False, True])
def test_a_read_only_disk_is_no_lack_of_room(path, monkeypatch, read_only):
    """SQLite says the same of it as of too many open files, for which a run waits."""
    access = os.access
    with Ledger.open_or_create(path, "users") as ledger:
        monkeypatch.setattr(os, "access", lambda *given: not read_only and access(*given))
        with pytest.raises(LedgerError) as caught, no_more_files():
            ledger.charge(propose(0))
        assert lacks_room(caught.value) is not read_only
        assert ("nothing was written: its folder cannot be" in str(caught.value)) is read_only
        ledger.charge(propose(0))


class TestFilesThatGoAway:
    def test_nothing_is_charged_to_a_file_that_no_path_leads_to(self, path):
        with Ledger.open_or_create(path, "users") as ledger:
            path.rename(path.with_name("elsewhere"))
            with pytest.raises(LedgerError, match="moved or replaced"):
                ledger.charge(propose(0))

    def test_nothing_is_charged_to_a_file_that_was_replaced(self, path):
        with Ledger.open_or_create(path, "users") as ledger:
            copy = shutil.copy(path, path.with_name("copy"))
            copy.replace(path)
            with pytest.raises(LedgerError, match="moved or replaced"):
                ledger.charge(propose(0))

    def test_another_folder_for_the_process_changes_nothing(self, path, monkeypatch):
        monkeypatch.chdir(path.parent)
        with Ledger.open_or_create(path.relative_to(path.parent), "users") as ledger:
            monkeypatch.chdir("/")
            ledger.charge(propose(0))
            ledger.verify()


def test_a_ledger_that_is_locked_for_too_long_says_so(path, monkeypatch):
    monkeypatch.setattr("fedpriv.ledger.database._BUSY_SECONDS", 0.01)
    with Ledger.open_or_create(path, "users") as ledger:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(LedgerError, match="locked"):
                ledger.charge(propose(0))
            other.execute("ROLLBACK")
        ledger.charge(propose(0))
        assert ledger.head.count == 1
