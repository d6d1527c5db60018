"""The ledger as its users see it: charges, receipts, heads, exports, and what it refuses."""

import hashlib
import io
import json
import math
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    SamplingEvent,
    SamplingPolicy,
    Schedule,
    SumQueryEvent,
)
from fedpriv.ledger.ledger import ChargedRow, Ledger, ProposedCharge, event_from, event_text

COMMITMENT = "0f" * 32


def propose(run="a", round_number=0, attempt=0, event=None, randomness=Randomness.SEEDED):
    return ProposedCharge(
        run=run,
        round=round_number,
        attempt=attempt,
        randomness=randomness,
        event=event or poisson_gaussian(0.1, 1.1),
        cohort_commitment=COMMITMENT,
    )


def positive(**bounds):
    return st.floats(min_value=5e-324, allow_nan=False, allow_infinity=False, **bounds)


@st.composite
def sum_queries(draw):
    """Queries with and without a granularity."""
    query = SumQueryEvent(
        draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=5)),
        draw(positive()),
        draw(st.just(-0.0) | st.just(0.0) | positive()),
    )
    most = math.frexp(max(query.clipping_norm, query.noise_stddev))[1]
    exponents = range(max(-1074, most - 1024), math.frexp(query.clipping_norm)[1])
    if not exponents or draw(st.booleans()):
        return query
    return replace(query, granularity=math.ldexp(1.0, draw(st.sampled_from(exponents))))


PLAIN = st.builds(
    RoundEvent,
    sampling=st.builds(
        SamplingEvent,
        policy=st.just(SamplingPolicy.POISSON),
        sampling_probability=positive(max_value=1.0),
        population=st.integers(1, 2**63 - 1),
        relation=st.sampled_from(NeighbouringRelation),
    ),
    queries=st.lists(sum_queries(), min_size=1, max_size=4).map(tuple),
)


@st.composite
def series(draw):
    """Events with a schedule, and often with a strategy."""
    rounds = draw(st.integers(1, 2**53))
    schedule = Schedule(rounds, draw(st.integers(1, rounds)), draw(st.integers(1, rounds)))
    others = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=min(rounds - 1, 5))
    plain = draw(PLAIN)
    sampling = replace(
        plain.sampling,
        policy=SamplingPolicy.SEPARATED,
        sampling_probability=1.0,
        schedule=schedule,
    )
    strategy = (draw(positive()), *draw(others))
    return replace(plain, sampling=sampling, strategy=strategy)


@st.composite
def banded(draw):
    """Series of Poisson rounds within bands."""
    rounds = draw(st.integers(1, 2**53))
    groups = draw(st.integers(1, rounds))
    plain = draw(PLAIN)
    policy, schedule = SamplingPolicy.BANDED_POISSON, Schedule(rounds, -(-rounds // groups), groups)
    finite = st.floats(allow_nan=False, allow_infinity=False)
    strategy = (draw(positive()), *draw(st.lists(finite, max_size=min(groups - 1, 5))))
    sampling = replace(plain.sampling, policy=policy, schedule=schedule)
    return replace(plain, sampling=sampling, strategy=strategy)


EVENTS = PLAIN | series() | banded()
PROPOSALS = st.builds(
    ProposedCharge,
    run=st.text(min_size=1, max_size=5).filter(str.isprintable),
    round=st.integers(0, 3),
    attempt=st.integers(0, 2**40),
    randomness=st.sampled_from(Randomness),
    event=EVENTS,
    cohort_commitment=st.binary(min_size=32, max_size=32).map(bytes.hex),
)


def proposal_of(row):
    return ProposedCharge(
        row.run, row.round, row.attempt, row.randomness, row.event, row.cohort_commitment
    )


def sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "population.ledger"


@given(EVENTS)
def test_an_event_by_itself_is_written_as_in_its_charge(event):
    place = 1, "r", 1, 0, Randomness.SEEDED, event, COMMITMENT, 0, None, "now", "0" * 64
    text = event_text(event)
    assert text[1:-1] in ChargedRow(*place).text
    assert event_from(text) == event
    with pytest.raises(InvalidValueError, match="is not one that this fedpriv knows"):
        event_from(text.replace(": ", ":"))


def test_an_event_that_is_repeated_is_not_written():
    with pytest.raises(InvalidValueError, match="the event has count 2"):
        event_text(poisson_gaussian(0.5, 1.0, count=2))


class TestAnySequenceOfCharges:
    @settings(max_examples=25, deadline=None)
    @given(
        proposals=st.lists(PROPOSALS, max_size=6, unique_by=lambda p: (p.run, p.round, p.attempt))
    )
    def test_verifies_reopens_equal_and_exports_exactly(self, proposals):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "l"
            with Ledger.open_or_create(path, "users") as ledger:
                receipts = [ledger.charge(proposal) for proposal in proposals]
                head = ledger.head
                spent = ledger.spent()
            with Ledger.open(path) as ledger:
                rows = list(ledger.charges())
                ledger.verify(head=head)
                exported = io.StringIO()
                ledger.export(exported)
                assert ledger.spent() == spent
        assert [proposal_of(row) for row in rows] == proposals
        assert [row.hash for row in rows] == [receipt.hash for receipt in receipts]
        assert [row.position for row in rows] == list(range(1, len(proposals) + 1))
        assert head.count == len(proposals)
        self.check_export(exported.getvalue(), proposals, head)

    @staticmethod
    def check_export(exported, proposals, head):
        """Recompute every digest from the exported text alone, as `export` says it can be."""
        header, *texts, last = exported.splitlines()
        previous = sha256(header)
        assert json.loads(last) == {"head": {"count": head.count, "hash": head.hash}}
        for text, proposal in zip(texts, proposals, strict=True):
            line = json.loads(text)
            assert line["previous_hash"] == previous
            assert line["sampling_probability"] == proposal.event.sampling.sampling_probability
            assert tuple(line["strategy"]) == proposal.event.strategy
            schedule = proposal.event.sampling.schedule
            assert line["schedule"] == (schedule and asdict(schedule))
            assert line["sum_queries"] == [asdict(query) for query in proposal.event.queries]
            previous = sha256(text)
        assert previous == head.hash


class TestReading:
    def test_runs_of_one_population_add_up_in_one_file(self, path):
        other = poisson_gaussian(0.2, 3.0)
        with Ledger.open_or_create(path, "users") as ledger:
            ledger.charge(propose("b", 0))
            ledger.charge(propose("a", 0, event=other))
            ledger.charge(propose("b", 1))
            charged = [(row.run, row.round) for row in ledger.charges()]
            assert charged == [("b", 0), ("a", 0), ("b", 1)]
            assert [row.event for row in ledger.charges()] == [
                propose().event,
                other,
                propose().event,
            ]
            assert ledger.spent() == [replace(propose().event, count=2), other]

    def test_next_attempt_follows_the_highest(self, path):
        with Ledger.open_or_create(path, "users") as ledger:
            assert ledger.next_attempt("a", 0) == 0
            ledger.charge(propose("a", 0, attempt=0))
            ledger.charge(propose("a", 0, attempt=4))
            assert ledger.next_attempt("a", 0) == 5
            assert ledger.next_attempt("a", 1) == 0
            assert ledger.next_attempt("b", 0) == 0

    def test_charges_carry_the_day_and_no_finer_time(self, path):
        """Rounds take longer with users who hold more, so a time would tell who was drawn."""
        with Ledger.open_or_create(path, "users") as ledger:
            before = datetime.now(UTC).date()
            ledger.charge(propose(round_number=1))
            ledger.charge(propose(round_number=2))
            first, second = ledger.charges()
            after = datetime.now(UTC).date()
            _, lines = ledger.since(None)
            assert not re.search(r"\d\d:\d\d", "".join(lines))  # nor does its beginning
        assert {first.day, second.day} <= {before.isoformat(), after.isoformat()}
        texts = [row.text.replace(row.day, "") for row in (first, second)]
        assert not any(re.search(r"\d\d:\d\d", text) for text in texts)
        # But for the cohort, the second charge follows from the first and the calendar.
        same = replace(second, position=1, round=1, previous_hash=first.previous_hash)
        assert replace(same, cohort_commitment=first.cohort_commitment, day=first.day) == first

    def test_more_rows_than_one_page_of_reading(self, path, monkeypatch):
        """Also that a second reader catches up with what the first wrote in between."""
        monkeypatch.setattr("fedpriv.ledger.ledger._ROWS_AT_ONCE", 10)
        with Ledger.open_or_create(path, "users") as writer, Ledger.open(path) as reader:
            reader_counts = []
            for number in range(63):
                writer.charge(propose(round_number=number))
                if number % 20 == 0:
                    reader_counts.append(reader.spent()[0].count)
            assert reader_counts == [1, 21, 41, 61]
            assert [row.round for row in reader.charges()] == list(range(63))
            reader.verify()


class TestHead:
    def test_every_head_stays_a_point_of_the_chain(self, path):
        with Ledger.open_or_create(path, "users") as ledger:
            heads = [ledger.head]
            for number in range(3):
                ledger.charge(propose(round_number=number))
                heads.append(ledger.head)
            assert [head.count for head in heads] == [0, 1, 2, 3]
            assert all(ledger.contains_head(head) for head in heads)
            assert not any(ledger.contains_head(replace(head, hash="00" * 32)) for head in heads)
            assert not ledger.contains_head(replace(heads[1], count=2))
            assert not ledger.contains_head(replace(heads[3], count=4))

    def test_a_copy_that_is_behind_does_not_contain_the_head(self, path, tmp_path):
        with Ledger.open_or_create(path, "users") as ledger:
            ledger.charge(propose())
        backup = tmp_path / "backup"
        backup.write_bytes(path.read_bytes())
        with Ledger.open(path) as ledger:
            ledger.charge(propose(round_number=1))
            head = ledger.head
        with Ledger.open(backup) as restored:
            restored.verify()
            assert not restored.contains_head(head)
            with pytest.raises(LedgerError, match="never had the head of 2 charges"):
                restored.verify(head=head)
            # The same attempt; commitments have salts, so that of its cohort is another.
            restored.charge(replace(propose(round_number=1), cohort_commitment="1e" * 32))
            assert not restored.contains_head(head)

    def test_two_ledgers_of_one_population_share_no_head(self, tmp_path):
        with (
            Ledger.open_or_create(tmp_path / "1", "users") as one,
            Ledger.open_or_create(tmp_path / "2", "users") as two,
        ):
            assert one.ledger_id != two.ledger_id
            assert not one.contains_head(two.head)


class TestCharging:
    def test_an_attempt_is_charged_once(self, path):
        with Ledger.open_or_create(path, "users") as ledger:
            ledger.charge(propose("a", 2, 0))
            head = ledger.head
            with pytest.raises(LedgerError, match="charged before; the next attempt is 1"):
                ledger.charge(propose("a", 2, 0, event=poisson_gaussian(0.1, 9.0)))
            assert ledger.head == head
            ledger.charge(propose("a", 2, 1))
            ledger.verify()

    def test_threads_share_a_ledger(self, path):
        with Ledger.open_or_create(path, "users") as ledger:

            def charge(number):
                return ledger.charge(propose(f"run {number % 3}", number))

            with ThreadPoolExecutor(4) as pool:
                receipts = list(pool.map(charge, range(40)))
            ledger.verify()
            assert {row.hash for row in ledger.charges()} == {r.hash for r in receipts}
            assert ledger.head.count == 40

    @pytest.mark.parametrize(
        "event",
        [
            RoundEvent(poisson_gaussian(0.1, 1.0).sampling, (SumQueryEvent("\ud800", 1.0, 1.0),)),
            poisson_gaussian(0.1, 1.0, population=2**63),
        ],
        ids=["text that is not Unicode", "integer beyond 64 bits"],
    )
    def test_what_sqlite_has_no_column_for_is_kept(self, path, event):
        with Ledger.open_or_create(path, "users") as ledger:
            ledger.charge(propose(event=event))
            ledger.verify()
            assert [row.event for row in ledger.charges()] == [event]
