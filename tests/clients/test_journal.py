"""The journal forgets nothing and counts nothing twice."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.clients.journal import Journal, Remembered, RoundSeries, TakenPart
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger import Schedule
from fedpriv.ledger.ledger import Head, Ledger
from fedpriv.wire import RoundId
from tests.wire.examples import priced, small_offer

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
ROOT = Path(__file__).parents[2]
OFFER = small_offer()


def offer(run="r", round_number=0, attempt=0, price=OFFER.price):
    return replace(OFFER, id=RoundId(run, round_number, attempt), price=price)


@pytest.fixture
def journal(tmp_path):
    with Journal(tmp_path / "journal.sqlite") as opened:
        yield opened


class TestTakingPart:
    def test_what_was_offered_is_kept(self, journal):
        journal.record("people", offer("r", 3, 1, priced(0.25, 1.5, 777)), NOON)
        journal.record("people", offer("a", 2, 0), NOON)
        journal.record("others", offer("r", 0, 0), NOON)
        assert journal.remembered("people").taken_part == (
            TakenPart("a", 2, 0, OFFER.price.event, 0, OFFER.users.size),
            TakenPart("r", 3, 1, poisson_gaussian(0.25, 1.5, population=777), 0, OFFER.users.size),
        )
        assert journal.remembered("nobody").taken_part == ()

    def test_an_attempt_is_answered_once_whatever_else_its_offers_say(self, journal):
        assert journal.record("people", OFFER, NOON) is None
        for again in (
            OFFER,
            replace(OFFER, id=replace(OFFER.id, nonce=OFFER.id.nonce ^ 1)),
            replace(OFFER, users=OFFER.users[:1]),
            replace(OFFER, local_key=bytes(32), price=priced(0.25, 9.0)),
        ):
            assert journal.answered("people", again.id)
            assert journal.record("people", again, NOON) == "this attempt was answered before"
        (only,) = journal.remembered("people").taken_part
        assert (only.event, only.asked) == (OFFER.price.event, OFFER.users.size)
        for other in (offer("s"), offer(round_number=9), offer(attempt=9)):
            assert not journal.answered("people", other.id)
        assert not journal.answered("others", OFFER.id)
        assert journal.answers_since(NOON) == 1

    def test_answers_are_outstanding_until_they_are_settled(self, journal):
        for attempt in range(3):
            journal.record("people", offer(attempt=attempt), NOON)
        journal.record("others", offer(), NOON)
        first, _, third = journal.remembered("people").taken_part
        journal.settle("people", [third])
        assert (journal.outstanding("people"), journal.outstanding("others")) == (2, 1)
        journal.settle("people", [first, third])
        charged = [part.charged for part in journal.remembered("people").taken_part]
        assert (journal.outstanding("people"), charged) == (1, [True, False, True])

    def test_rounds_are_counted_from_a_moment_on(self, journal):
        for number in range(5):
            moment = NOON + timedelta(hours=number)
            journal.record("people", offer("r", number), moment)
        assert journal.answers_since(NOON) == 5
        assert journal.answers_since(NOON + timedelta(hours=2)) == 3
        assert journal.answers_since(NOON + timedelta(hours=2, microseconds=1)) == 2
        elsewhere = timezone(timedelta(hours=-7))
        assert journal.answers_since((NOON + timedelta(hours=2)).astimezone(elsewhere)) == 3

    def test_rounds_of_all_populations_count(self, journal):
        journal.record("people", offer(), NOON)
        journal.record("others", offer(), NOON.astimezone(timezone(timedelta(hours=9))))
        assert journal.answers_since(NOON) == 2

    @settings(max_examples=25, deadline=None)
    @given(
        st.lists(
            st.tuples(
                st.text(st.characters(codec="utf-8"), min_size=1, max_size=5),
                st.integers(0, 2**32 - 1),
                st.integers(0, 2**32 - 1),
                st.datetimes(timezones=st.just(UTC)),
            ),
            max_size=6,
        ),
        st.datetimes(timezones=st.just(UTC)),
    )
    def test_it_says_what_a_list_would(self, tmp_path_factory, written, moment):
        with Journal(tmp_path_factory.mktemp("journal") / "journal") as journal:
            times = {}
            for run, number, attempt, at in written:
                journal.record("people", offer(run, number, attempt), at)
                times.setdefault((run, number, attempt), at)
            assert journal.answers_since(moment) == sum(at >= moment for at in times.values())
            kept = {
                (part.run, part.round, part.attempt)
                for part in journal.remembered("people").taken_part
            }
            assert kept == set(times)


FIRST = RoundSeries("r", 4, 0, Schedule(6, 2, 3))


def users(*positions):
    return np.array(positions, np.int64)


class TestSeries:
    def test_a_user_is_asked_as_often_as_the_schedule_says_and_not_sooner(self, journal):
        assert journal.admit("people", FIRST, 0, users(1, 2))
        assert not journal.admit("people", FIRST, 1, users(2, 3))
        assert not journal.admit("people", FIRST, 2, users(1))
        assert journal.admit("people", FIRST, 2, users(5))
        assert journal.admit("people", FIRST, 3, users(2))
        assert not journal.admit("people", FIRST, 5, users(5, 2))
        assert not journal.admit("people", FIRST, 9, users(2))  # would be the third time
        assert journal.admit("people", FIRST, 5, users(5))

    def test_what_is_refused_is_not_recorded(self, journal):
        assert journal.admit("people", FIRST, 0, users(1))
        assert not journal.admit("people", FIRST, 1, users(1, 2))
        assert journal.admit("people", FIRST, 2, users(2))

    def test_the_same_part_may_ask_again_and_counts_once(self, journal):
        once = replace(FIRST, schedule=Schedule(6))
        for _ in range(2):
            assert journal.admit("people", once, 1, users(1, 2))
        assert journal.admit("people", once, 1, users(2, 3))
        for user in (1, 2, 3):
            assert not journal.admit("people", once, 2, users(user))

    def test_asking_nobody_is_always_allowed(self, journal):
        for part in range(6):
            assert journal.admit("people", FIRST, part, users())

    @pytest.mark.parametrize(
        "other",
        [replace(FIRST, run="s"), replace(FIRST, round=7), replace(FIRST, attempt=1)],
    )
    def test_another_series_begins_anew_and_the_older_one_goes_on_if_it_is_not_charged(
        self, journal, other
    ):
        assert journal.admit("people", FIRST, 0, users(1))
        assert journal.admit("people", other, 0, users(1))
        assert journal.admit("others", FIRST, 1, users(1))
        assert not journal.admit("people", FIRST, 1, users(1))

    def test_of_series_that_are_over_nothing_is_kept(self, journal, tmp_path):
        later = replace(FIRST, round=10)
        assert journal.admit("people", FIRST, 0, users(1))
        assert journal.admit("people", later, 0, users(2))
        assert journal.admit("people", later, 1, users(3))
        with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as raw:
            assert raw.execute("SELECT round, part FROM asked").fetchall() == [(10, 0), (10, 1)]

    def test_it_is_remembered_when_the_node_is_started_again(self, tmp_path):
        for part, allowed in ((0, True), (1, False), (3, True)):
            with Journal(tmp_path / "journal") as opened:
                assert opened.admit("people", FIRST, part, users(1)) is allowed

    @settings(max_examples=50, deadline=None)
    @given(
        st.builds(Schedule, st.just(9), st.integers(1, 3), st.integers(1, 4)),
        st.lists(st.tuples(st.integers(0, 8), st.sets(st.integers(0, 3))), max_size=12),
    )
    def test_it_allows_what_a_list_would(self, tmp_path_factory, schedule, asked):
        series, parts = replace(FIRST, schedule=schedule), {user: set() for user in range(4)}
        with Journal(tmp_path_factory.mktemp("journal") / "journal") as journal:
            for part, drawn in asked:
                after = {user: sorted(parts[user] | {part}) for user in drawn}
                fits = all(
                    len(each) <= schedule.participations
                    and all(b - a >= schedule.separation for a, b in pairwise(each))
                    for each in after.values()
                )
                assert journal.admit("people", series, part, users(*sorted(drawn))) is fits
                if fits:
                    parts |= {user: set(each) for user, each in after.items()}


class TestHeads:
    def test_the_newest_is_remembered(self, journal):
        assert journal.remembered("people") == Remembered(None, None, ())
        for head in (Head(1, "x"), Head(3, "y")):
            journal.remember_head("a", "people", head)
            assert journal.remembered("people").head == head
        assert journal.remembered("people").ledger_id == "a"
        assert journal.remembered("others").head is None

    def test_a_ledger_is_known_from_its_first_charge_or_the_first_answer_on(self, journal):
        for ledger in ("a", "b"):
            journal.remember_head(ledger, "people", Head(0, "x"))
            assert journal.remembered("people") == Remembered(None, None, ())
        journal.record("people", offer(), NOON)
        assert journal.remembered("people").head == Head(0, "x")
        with pytest.raises(InvalidValueError, match="'people' has the ledger b, not c"):
            journal.remember_head("c", "people", Head(0, "x"))

    @pytest.mark.parametrize("older", [Head(0, "x"), Head(2, "x"), Head(3, "x")])
    def test_it_never_goes_back(self, journal, older):
        journal.remember_head("a", "people", Head(3, "y"))
        journal.remember_head("a", "people", older)
        assert journal.remembered("people").head == Head(3, "y")

    def test_a_population_has_one_ledger_and_a_ledger_one_population(self, journal):
        journal.remember_head("a", "people", Head(3, "y"))
        with pytest.raises(InvalidValueError, match="'people' has the ledger a, not b"):
            journal.remember_head("b", "people", Head(9, "z"))
        journal.remember_head("b", "others", Head(9, "z"))
        assert journal.remembered("people") == Remembered("a", Head(3, "y"), ())
        assert journal.remembered("others") == Remembered("b", Head(9, "z"), ())


WRITER = """
import os, signal, sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from fedpriv.ledger.ledger import Head
from fedpriv.clients.journal import Journal
from fedpriv.wire import RoundId
from tests.wire.examples import small_offer

journal = Journal(Path(sys.argv[1]))
journal.record("people", replace(small_offer(), id=RoundId("r", 4, 2)), datetime.now(UTC))
journal.remember_head("a", "people", Head(3, "y"))
os.kill(os.getpid(), signal.SIGKILL)
"""


class TestFile:
    def test_a_process_that_is_killed_after_recording_has_recorded(self, tmp_path):
        path = tmp_path / "journal.sqlite"
        begin = datetime.now(UTC)
        done = subprocess.run([sys.executable, "-c", WRITER, path], cwd=ROOT, check=False)
        assert done.returncode == -signal.SIGKILL
        with Journal(path) as journal:
            found = journal.remembered("people")
            assert [(p.run, p.round, p.attempt) for p in found.taken_part] == [("r", 4, 2)]
            assert found.head == Head(3, "y")
            assert journal.answers_since(begin) == 1

    def test_only_its_owner_can_read_it(self, tmp_path):
        path = tmp_path / "journal.sqlite"
        before = os.umask(0)
        try:
            with Journal(path) as journal:
                journal.record("people", offer(), NOON)
                modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
        finally:
            os.umask(before)
        assert modes["journal.sqlite"] == 0o600
        assert set(modes.values()) == {0o600}
        path.chmod(0o644)
        with pytest.raises(InvalidValueError, match="can be read or written by others"):
            Journal(path)

    def test_it_is_opened_again(self, tmp_path):
        for attempt in range(2):
            with Journal(tmp_path / "journal") as journal:
                journal.record("people", offer(attempt=attempt), NOON)
                assert len(journal.remembered("people").taken_part) == attempt + 1

    def test_what_is_no_journal_is_refused(self, tmp_path):
        Ledger.open_or_create(tmp_path / "ledger", "people").close()
        (tmp_path / "ledger").chmod(0o600)
        (tmp_path / "text").write_text("text" * 999)
        (tmp_path / "text").chmod(0o600)
        for path, message in (
            (tmp_path / "ledger", "is not a journal"),
            (tmp_path / "text", "not a database"),
            (tmp_path / "absent" / "journal", "cannot be created"),
        ):
            with pytest.raises(InvalidValueError, match=message) as error:
                Journal(path)
            assert not isinstance(error.value, LedgerError)

    def test_a_journal_that_cannot_be_written_says_so(self, journal, tmp_path):
        with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as raw:
            raw.execute("DROP TABLE answers")
            raw.execute("DROP TABLE asked")
            raw.execute("DROP TABLE ledgers")
        uses = (
            lambda: journal.record("people", offer(), NOON),
            lambda: journal.answers_since(NOON),
            lambda: journal.admit("people", FIRST, 0, users(1)),
            lambda: journal.remember_head("a", "people", Head(1, "x")),
            lambda: journal.remembered("people"),
        )
        for use in uses:
            with pytest.raises(InvalidValueError, match="no such table"):
                use()

    def test_after_closing_it_refuses(self, tmp_path):
        with Journal(tmp_path / "journal") as journal:
            pass
        with pytest.raises(InvalidValueError, match="cannot be"):
            journal.record("people", offer(), NOON)
