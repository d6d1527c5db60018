"""Series of rounds: charged whole by the first, and each further round written down once."""

import hashlib
import io
import json
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.policies import (
    poisson_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)
from fedpriv.errors import BudgetExceededError, InvalidValueError, LedgerError
from fedpriv.ledger.events import NeighbouringRelation, PrivacyBudget, Randomness
from fedpriv.ledger.ledger import (
    ChargedRow,
    ExportedLedger,
    Ledger,
    ProposedCharge,
    SeriesBook,
    paid_events,
)
from fedpriv.ledger.participation import ParticipationRecord

ADD = NeighbouringRelation.ADD_OR_REMOVE_ONE
N = 4  # rounds of a pass
PASS, LOUD = (random_allocation_gaussian(N, 2, z, population=10) for z in (2.0, 3.0))
SINGLE = poisson_gaussian(0.1, 1.0)
SEPARATED = separated_gaussian((1.0, 0.5), 3, 2, 2, 1.5, ADD)


def propose(number, event=PASS, part=0, series=None, *, run="r", attempt=0):
    source = Randomness.SEEDED
    return ProposedCharge(run, number, attempt, source, event, "0f" * 32, part, series)


def spent(events, delta):
    """A price that is easy to follow: one for each event."""
    del delta
    return float(sum(event.count for event in events))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ledger"


@pytest.fixture
def ledger(path):
    with Ledger.open_or_create(path, "users") as ledger:
        yield ledger


def charge_pass(ledger, first=1, event=PASS, rounds=N, budget=None, **given):
    """Charge the first rounds of a series; returns the position of the charge that paid."""
    ledger.charge(propose(first, event, **given), budget)
    paid = ledger.head.count
    for part in range(1, rounds):
        ledger.charge(propose(first + part, event, part, paid, **given), budget)
    return paid


def exported(ledger):
    stream = io.StringIO()
    ledger.export(stream)
    return stream.getvalue().splitlines()


class TestProposals:
    @pytest.mark.parametrize(
        ("event", "part", "series", "message"),
        [
            (PASS, 4, 1, "part 4; it must be a whole number from 0 to 3"),
            (PASS, -1, 1, "part -1; "),
            (PASS, 1.0, 1, "part is 1.0"),
            (SINGLE, 1, 1, "part 1; it must be a whole number from 0 to 0"),
            (PASS, 0, 1, "part 0 has series 1"),
            (PASS, 1, None, "part 1 has series None"),
            (PASS, 1, 0, "part 1 has series 0"),
            (PASS, 1, -1, "part 1 has series -1"),
            (PASS, 1, "1", "series is '1'"),
            (PASS, 1, 1.0, "series is 1.0"),
        ],
    )
    def test_parts_that_cannot_be_are_refused(self, event, part, series, message):
        with pytest.raises(InvalidValueError, match=message):
            propose(1, event, part, series)


class TestChargingASeries:
    def test_the_first_round_pays_and_the_others_come_once_in_order(self, ledger):
        assert charge_pass(ledger) == 1
        rows = [*ledger.charges()]
        assert [(row.part, row.series, row.pays) for row in rows] == [
            (0, None, True), (1, 1, False), (2, 1, False), (3, 1, False)
        ]  # fmt: skip
        assert [row.event for row in rows] == [PASS] * N
        assert ledger.spent() == paid_events(rows) == [PASS]
        ledger.verify()

    def test_the_receipt_names_the_part(self, ledger):
        first = ledger.charge(propose(1))
        second = ledger.charge(propose(2, PASS, 1, 1))
        assert (first.part, second.part) == (0, 1)
        assert first.event == second.event == PASS

    @pytest.mark.parametrize(
        "refused",
        [
            propose(9, PASS, 1, 1),  # again
            propose(9, PASS, 3, 1),  # not the next
            propose(9, PASS, 2, 1, run="other"),
            propose(9, PASS, 2, 2),  # that charge is itself a part
            propose(9, PASS, 2, 3),  # that of something else
            propose(9, PASS, 2, 7),  # there is none yet
            propose(9, LOUD, 2, 1),
            propose(9, SEPARATED, 2, 1),
        ],
    )
    def test_what_is_not_the_next_round_is_refused_and_nothing_is_written(self, ledger, refused):
        charge_pass(ledger, rounds=2)
        ledger.charge(propose(3, SINGLE))
        before = ledger.head
        with pytest.raises(LedgerError, match="is not the next round of the series of charge"):
            ledger.charge(refused)
        assert ledger.head == before
        ledger.charge(propose(9, PASS, 2, 1))  # which is the next
        ledger.verify()

    def test_after_the_last_round_a_series_is_closed(self, ledger):
        charge_pass(ledger)
        assert ledger.open_series("r") is None
        for part in range(1, N):
            with pytest.raises(LedgerError, match="is not the next round"):
                ledger.charge(propose(9, PASS, part, 1))
        assert charge_pass(ledger, 5) == 5
        assert ledger.spent() == [replace(PASS, count=2)]

    def test_a_pass_of_one_round_is_closed_at_once(self, ledger):
        ledger.charge(propose(1, random_allocation_gaussian(1, 1, 2.0)))
        assert ledger.open_series("r") is None

    def test_each_attempt_is_charged_once_even_if_it_is_a_part(self, ledger):
        charge_pass(ledger, rounds=2)
        with pytest.raises(LedgerError, match="was charged before; the next attempt is 1"):
            ledger.charge(propose(2, PASS, 2, 1))
        ledger.charge(propose(2, PASS, 2, 1, attempt=1))

    def test_runs_have_series_of_their_own(self, ledger, path):
        ledger.charge(propose(1))
        ledger.charge(propose(1, run="s"))
        with Ledger.open(path) as other:
            assert [other.open_series(run).charge.position for run in "rs"] == [1, 2]
            other.charge(propose(2, PASS, 1, 2, run="s"))
        assert [ledger.open_series(run).part for run in "rs"] == [1, 2]
        with pytest.raises(LedgerError, match="not the next round of the series of charge 2"):
            ledger.charge(propose(2, PASS, 2, 2))
        ledger.charge(propose(2, PASS, 1, 1))
        ledger.verify()
        assert ledger.open_series("t") is None

    def test_the_series_paid_for_last_is_under_way(self, ledger):
        charge_pass(ledger, rounds=2)
        charge_pass(ledger, 3, LOUD, rounds=1)
        found = ledger.open_series("r")
        assert (found.charge.position, found.charge.event, found.part) == (3, LOUD, 1)
        for part in (1, 2, 3):
            ledger.charge(propose(3 + part, LOUD, part, 3))
        assert ledger.open_series("r") is None  # the one before was left in its midst


class TestBudget:
    def test_parts_cost_nothing_and_a_second_pass_is_refused(self, ledger):
        budget = PrivacyBudget(1.0, 1e-5, spent)
        charge_pass(ledger, budget=budget)
        assert ledger.epsilon(budget) == 1.0
        with pytest.raises(BudgetExceededError, match=r"ε = 2\.0 .*nothing was charged"):
            ledger.charge(propose(5), budget)
        assert ledger.head.count == N

    def test_a_budget_that_others_used_up_does_not_refuse_what_is_paid_for(self, ledger):
        budget = PrivacyBudget(1.0, 1e-5, spent)
        ledger.charge(propose(1), budget)
        for number in range(3):
            ledger.charge(propose(number, SINGLE, run="other"))
        assert ledger.epsilon(budget) == 4.0
        charge = ledger.charge(propose(2, PASS, 1, 1), budget)
        assert charge.redeem() == PASS
        assert ledger.epsilon(budget) == 4.0

    def test_a_part_that_is_refused_is_not_an_event_for_free(self, ledger):
        budget = PrivacyBudget(1.0, 1e-5, spent)
        ledger.charge(propose(1, SINGLE), budget)
        with pytest.raises(LedgerError, match="is not the next round"):
            ledger.charge(propose(2, PASS, 1, 1), budget)
        assert ledger.spent() == [SINGLE]

    def test_a_pass_left_in_its_midst_counts_whole(self, ledger):
        budget = PrivacyBudget(9.0, 1e-5, spent)
        charge_pass(ledger, rounds=2)
        charge_pass(ledger, 3, LOUD, rounds=1)
        assert ledger.epsilon(budget, SINGLE) == 3.0
        assert ledger.spent() == [PASS, LOUD]


CHOICES = st.lists(
    st.tuples(
        st.sampled_from("rs"),
        st.sampled_from([PASS, LOUD, SINGLE, SEPARATED]),
        st.integers(0, N),
        st.sampled_from(["none", "last", "any"]),
        st.integers(1, 12),
    ),
    max_size=25,
)


class SlowBook:
    """What a chain allows, from all of its rows each time."""

    def __init__(self):
        self.rows = []

    def allows(self, row):
        if row.series is None:
            return True
        paid = next((each for each in self.rows if each.position == row.series), None)
        if paid is None or paid.series is not None:
            return False
        parts = [each for each in self.rows if each.series == row.series]
        same = (paid.run, paid.event) == (row.run, row.event)
        return same and row.part == len(parts) + 1

    def last_of(self, run):
        paid = [each for each in self.rows if each.run == run and each.series is None]
        several = [each for each in paid if each.event.sampling.schedule is not None]
        if not several:
            return None
        taken = sum(each.series == several[-1].position for each in self.rows) + 1
        left = taken < several[-1].event.sampling.schedule.rounds
        return (several[-1].position, taken) if left else None


@settings(max_examples=300, deadline=None)
@given(CHOICES)
def test_the_book_is_that_of_a_slow_model(choices):
    book, slow = SeriesBook(), SlowBook()
    for run, event, part, kind, any_series in choices:
        last = slow.last_of(run)
        named = last[0] if kind == "last" and last else any_series
        series = None if kind == "none" or part == 0 else named
        schedule = event.sampling.schedule
        part_of = part if series is not None else 0
        if part_of >= (1 if schedule is None else schedule.rounds):
            continue
        place = len(slow.rows) + 1
        source = Randomness.SEEDED
        row = ChargedRow(
            place, run, place, 0, source, event, "0f" * 32, part_of, series, "now", "00"
        )
        if slow.allows(row):
            book.follow(row)
            slow.rows.append(row)
        else:
            with pytest.raises(LedgerError, match="is not the next round"):
                book.follow(row)
        for name in "rs":
            found = book.last_of(name)
            assert (found and (found.charge.position, found.part)) == slow.last_of(name)


class TestTexts:
    @pytest.fixture
    def filled(self, ledger):
        """Two runs that take turns, one pass not at its end, an event of one round between."""
        charge_pass(ledger, rounds=2)
        charge_pass(ledger, event=SEPARATED, rounds=3, run="s")
        ledger.charge(propose(3, SINGLE))
        ledger.charge(propose(4, PASS, 2, 1))
        return ledger

    def test_a_part_names_its_charge_and_has_no_event_of_its_own(self, filled):
        fields = json.loads(exported(filled)[2])
        assert fields["series"] == 1
        assert fields["part"] == 1
        assert "policy" not in fields
        assert "sum_queries" not in fields
        assert "part" not in json.loads(exported(filled)[1])

    def test_what_is_exported_is_what_is_read_again(self, filled):
        lines, rows = exported(filled), tuple(filled.charges())
        read = ExportedLedger.read(lines)
        assert read.rows == rows
        assert [row.text for row in read.rows] == lines[1:-1]
        assert Counter(paid_events(read.rows)) == Counter([PASS, SEPARATED, SINGLE])
        assert Counter(filled.spent()) == Counter([PASS, SEPARATED, SINGLE])
        for kept in range(len(rows)):
            lasting = [*lines[: kept + 1], _head_of(lines[kept], kept)]
            known = ExportedLedger.read(lasting)
            assert ExportedLedger.read(lines[kept + 1 :], known).rows == rows

    def test_a_book_that_is_opened_in_the_middle_goes_on(self, filled, path):
        with Ledger.open(path) as opened:
            assert opened.open_series("r").part == 3
            opened.charge(propose(5, PASS, 3, 1))
            assert opened.open_series("r") is None
        assert filled.open_series("r") is None

    @pytest.mark.parametrize(
        ("line", "changes"),
        [
            (2, {"part": 2}),
            (2, {"part": 0}),
            (2, {"part": True}),
            (2, {"part": 1.0}),
            (2, {"part": None}),
            (2, {"series": 2}),
            (2, {"series": 9}),
            (2, {"series": 0}),
            (2, {"series": True}),  # equals 1, and is not written so
            (2, {"series": 1.0}),
            (2, {"series": "1"}),
            (2, {"series": None}),
            (2, {"series": [1]}),
            (2, {"series": {}}),
            (2, {"run": "s"}),
            (4, {"series": 1}),
            (5, {"series": 1, "part": 2}),
            (7, {"part": 1}),
            (7, {"part": 3}),
            (7, {"series": 3}),
            (6, {"series": 1, "part": 2}),  # beside its own event
            (1, {"series": None, "part": 0}),
            (1, {"part": 0}),
        ],
    )
    def test_forged_parts_are_refused_though_the_chain_fits(self, filled, line, changes):
        """By whoever reads the text, wherever it comes from: digests and head are repaired."""
        lines = exported(filled)
        forged = [*lines[:line], json.dumps({**json.loads(lines[line]), **changes})]
        for text in lines[line + 1 : -1]:
            fields = {**json.loads(text), "previous_hash": _sha256(forged[-1])}
            forged.append(json.dumps(fields))
        forged.append(_head_of(forged[-1], len(lines) - 2))
        with pytest.raises(LedgerError, match=f"line {line + 1} of the export: ") as error:
            ExportedLedger.read(forged)
        assert "\n" not in str(error.value)

    def test_a_forged_event_of_a_series_is_that_of_all_its_parts(self, filled):
        """A part has no event that could differ from the one that was paid for."""
        lines = exported(filled)
        rows = ExportedLedger.read(lines).rows
        assert rows[6].event is rows[1].event is rows[0].event

    def test_a_part_that_is_left_out_is_missed(self, filled):
        """In the file itself, with all digests repaired."""
        lines = exported(filled)
        texts = [*lines[:2], *lines[3:-1]]
        for at, text in enumerate(texts[2:], start=2):
            fields = {**json.loads(text), "previous_hash": _sha256(texts[at - 1]), "position": at}
            if "series" in fields:
                fields["series"] -= fields["series"] > 1
            texts[at] = json.dumps(fields)
        texts.append(_head_of(texts[-1], len(texts) - 1))
        with pytest.raises(LedgerError, match="is not the next round of the series of charge 1"):
            ExportedLedger.read(texts)


def _sha256(text):
    return hashlib.sha256(text.encode()).hexdigest()


def _head_of(text, count):
    return json.dumps({"head": {"count": count, "hash": _sha256(text)}})


class TestKeys:
    @pytest.fixture
    def record(self, tmp_path):
        with ParticipationRecord.open_or_create(tmp_path / "who") as record:
            yield record

    def begun(self, record, run, round_number, key):
        """Record the first cohort of a series with its key."""
        return record.record(run, round_number, 0, np.arange(3), key)

    def test_a_key_is_found_by_the_cohort_alone_that_it_was_kept_with(self, record):
        first = self.begun(record, "r", 3, b"k" * 32)
        others = [record.record("r", 3, 0, np.arange(3)), record.record("s", 3, 0, np.arange(3))]
        assert record.series_key(first) == b"k" * 32
        assert [record.series_key(other) for other in others] == [None, None]

    def test_there_is_one_for_each_run_and_a_new_one_takes_its_place(self, record):
        """Even one of the same attempt: the cohort that is charged tells which of them holds."""
        began = [self.begun(record, run, n, k * 32) for run, n, k in (
            ("r", 1, b"a"), ("s", 1, b"b"), ("r", 5, b"c"), ("r", 5, b"d")
        )]  # fmt: skip
        found = [record.series_key(commitment) for commitment in began]
        assert found == [None, b"b" * 32, None, b"d" * 32]

    def test_it_is_durable_for_others_and_gone_when_it_is_forgotten(self, record, tmp_path):
        one, two = self.begun(record, "r", 1, b"a" * 32), self.begun(record, "s", 1, b"b" * 32)
        with ParticipationRecord.open(tmp_path / "who") as other:
            assert other.series_key(one) == b"a" * 32
            other.forget_series("r")
        assert record.series_key(one) is None
        assert record.series_key(two) == b"b" * 32
        record.forget_series("r")  # nothing to forget

    def test_a_copy_of_the_file_has_none(self, record, tmp_path):
        """Two folders that both went on with a series would draw its noise twice."""
        first = self.begun(record, "r", 1, b"a" * 32)
        shutil.copy2(tmp_path / "who", tmp_path / "copy")
        with ParticipationRecord.open(tmp_path / "copy") as copy:
            assert copy.series_key(first) is None
        (tmp_path / "who").rename(tmp_path / "moved")
        with ParticipationRecord.open(tmp_path / "moved") as moved:
            assert moved.series_key(first) == b"a" * 32

    def test_one_that_was_damaged_is_none(self, record, tmp_path):
        """SQLite would not notice, and other cohorts would follow from it than were charged."""
        key = np.random.default_rng(2).bytes(32)
        first = self.begun(record, "r", 1, key)
        content = (tmp_path / "who").read_bytes()
        other = bytes([key[0] ^ 1]) + key[1:]
        (tmp_path / "who").write_bytes(content.replace(key, other))
        with ParticipationRecord.open(tmp_path / "who") as damaged:
            assert damaged.series_key(first) is None

    def test_what_is_forgotten_is_not_left_in_the_file(self, record, tmp_path):
        key = np.random.default_rng(0).bytes(32)
        self.begun(record, "r", 1, key)
        assert key in (tmp_path / "who").read_bytes()
        record.forget_series("r")
        assert not [f for f in tmp_path.iterdir() if key in f.read_bytes()]

    def test_nobody_else_may_read_the_file(self, record, tmp_path):
        self.begun(record, "r", 1, b"a" * 32)
        for file in tmp_path.glob("who*"):
            assert file.stat().st_mode & 0o077 == 0

    def test_the_ledger_and_its_export_have_no_key(self, tmp_path, record):
        key = np.random.default_rng(1).bytes(32)
        with Ledger.open_or_create(tmp_path / "ledger", "users") as ledger:
            self.begun(record, "r", 1, key)
            charge_pass(ledger, rounds=2)
            assert key.hex() not in "".join(exported(ledger))
        assert key not in (tmp_path / "ledger").read_bytes()
