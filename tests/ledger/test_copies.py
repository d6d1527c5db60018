"""A file that was copied behind the ledger's back holds all that was durable, or is refused."""

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import LedgerError
from fedpriv.ledger.events import Randomness, RoundEvent, SumQueryEvent
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import Head, ParticipationRecord, record_path

PAGE = 4096


def propose(number, commitment="00" * 32, queries=1):
    """A charge; with many queries it takes several pages."""
    sampling = poisson_gaussian(0.1, 1.0).sampling
    event = RoundEvent(sampling, tuple(SumQueryEvent(f"g{k}", 1.0, 1.0) for k in range(queries)))
    return ProposedCharge("r", number, 0, Randomness.SEEDED, event, commitment)


@pytest.mark.parametrize("readers", [0, 2])
def test_a_copy_of_a_ledger_in_use_has_all_its_charges(tmp_path, readers):
    path, copy = tmp_path / "ledger", tmp_path / "copy"
    with Ledger.open_or_create(path, "users") as ledger:
        others = [Ledger.open(path) for _ in range(readers)]
        for count in range(1, 4):
            ledger.charge(propose(count))
            assert {other.head for other in others} <= {ledger.head}
            shutil.copy(path, copy)
            with Ledger.open(copy) as copied:
                copied.verify()
                assert copied.head == ledger.head
        for other in others:
            other.close()


def test_a_copy_of_a_participation_record_in_use_has_all_its_cohorts(tmp_path):
    path, copy = tmp_path / "who", tmp_path / "copy"
    with ParticipationRecord.open_or_create(path) as record:
        made = [record.record("r", number, 0, np.arange(number)) for number in range(3)]
        record.keep_head(Head(3, "x"))
        shutil.copy(path, copy)
        with ParticipationRecord.open(copy) as copied:
            assert [copied.users_of(one).size for one in made] == [0, 1, 2]
            assert copied.ledger_head == Head(3, "x")


def test_a_ledger_with_a_write_ahead_log_is_put_back_to_a_single_file(tmp_path):
    path = tmp_path / "ledger"
    Ledger.open_or_create(path, "users").close()
    with closing(sqlite3.connect(path)) as other:
        other.execute("PRAGMA journal_mode = WAL")
    with Ledger.open(path) as ledger:
        ledger.charge(propose(0))
        shutil.copy(path, tmp_path / "copy")
    with Ledger.open(tmp_path / "copy") as copied:
        assert copied.head.count == 1


CHARGES = 24


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """The bytes of a ledger after each charge, some of which take several pages."""
    path = tmp_path_factory.mktemp("states") / "ledger"
    with Ledger.open_or_create(path, "users") as ledger:
        found = [path.read_bytes()]
        for number in range(CHARGES):
            ledger.charge(propose(number, queries=60 if number % 5 == 3 else 1))
            found.append(path.read_bytes())
    return found


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_pages_of_several_moments_are_one_ledger_or_none(states, tmp_path_factory, data):
    """A copy took some pages before, and others after one or several charges."""
    before = data.draw(st.integers(0, CHARGES - 1))
    after = data.draw(st.integers(before + 1, min(CHARGES, before + 6)))
    old, new = states[before], states[after]
    pages = len(new) // PAGE
    cut = data.draw(st.integers(0, pages))
    late = data.draw(st.sampled_from(["first", "last"]) | st.sets(st.integers(0, pages - 1)))
    taken = {"first": range(cut), "last": range(cut, pages)}.get(str(late), late)
    torn = bytearray(old)
    for page in sorted(taken):
        torn.extend(bytes(max(0, page * PAGE - len(torn))))
        torn[page * PAGE : (page + 1) * PAGE] = new[page * PAGE : (page + 1) * PAGE]
    path = tmp_path_factory.mktemp("torn") / "ledger"
    path.write_bytes(torn)
    try:
        with Ledger.open(path) as ledger:
            ledger.verify()
            count = ledger.head.count
            assert [row.round for row in ledger.charges()] == list(range(count))
    except LedgerError:
        return
    assert before <= count <= after


@pytest.mark.parametrize("end", [0, 100, PAGE, 3 * PAGE, -PAGE, -1])
def test_a_copy_that_was_cut_short_is_refused(states, tmp_path, end):
    path = tmp_path / "ledger"
    path.write_bytes(states[-1][:end])
    with pytest.raises(LedgerError) as error, Ledger.open(path) as ledger:
        ledger.verify()
    assert "\n" not in str(error.value)


def test_a_torn_copy_says_what_it_is(states, tmp_path):
    path = tmp_path / "ledger"
    path.write_bytes(states[-1][: 3 * PAGE] + bytes(PAGE) + states[-1][4 * PAGE :])
    with pytest.raises(LedgerError, match="is damaged, or was copied while it was writt"):
        Ledger.open(path)


WRITER = """
import sys
from pathlib import Path
from time import sleep
import numpy as np
from tests.ledger.test_copies import propose
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord, record_path

path = Path(sys.argv[1])
with Ledger.open(path) as ledger, ParticipationRecord.open(record_path(path)) as record:
    for number in range(10**6):
        commitment = record.record("r", number, 0, np.arange(0, 20_000, 1 + number % 7))
        ledger.charge(propose(number, commitment, queries=1 + number % 60))
        record.keep_head(ledger.head)
        print(number, flush=True)
        sleep(0.005)  # rounds take time; in a file in memory nothing else would
"""


@contextmanager
def written_all_the_time(path):
    Ledger.open_or_create(path, "users").close()
    ParticipationRecord.open_or_create(record_path(path)).close()
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, path],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        writer.stdout.readline()
        yield
        assert writer.poll() is None
    finally:
        writer.kill()
        writer.communicate()


def copied_while_written(tmp_path, copies):
    """How many copies were whole; any other was refused."""
    path, copy, whole = tmp_path / "ledger.sqlite", tmp_path / "copy" / "ledger.sqlite", 0
    with written_all_the_time(path):
        for _ in range(copies):
            with Ledger.open(path) as ledger:
                durable = ledger.head.count
            copy.parent.mkdir()
            subprocess.run(["cp", "-p", record_path(path), path, copy.parent], check=True)
            try:
                with (
                    Ledger.open(copy) as ledger,
                    ParticipationRecord.open(record_path(copy)) as record,
                ):
                    ledger.verify()
                    assert durable <= ledger.head.count
                    # The head of the charge that was just made is kept next.
                    assert durable - 1 <= record.ledger_head.count
                    for row in list(ledger.charges())[:durable]:
                        attempt = row.run, row.round, row.attempt
                        record.confirm(row.cohort_commitment, attempt, 20_000)
                whole += 1
            except LedgerError:
                pass
            shutil.rmtree(copy.parent)
    return whole


def test_copies_made_while_charges_are_made_are_whole_or_refused(tmp_path):
    assert copied_while_written(tmp_path, 20) > 0


@pytest.mark.slow
def test_many_copies_made_while_charges_are_made_are_whole_or_refused(tmp_path):
    assert copied_while_written(tmp_path, 150) > 10
