"""The participation record: its commitments, its secrecy and its order before the ledger."""

import hashlib
import io
import os
import sqlite3
import stat
import subprocess
from contextlib import closing
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.experiment.build import digest_of_users
from fedpriv.ledger.events import Randomness
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.ledger.participation import ParticipationRecord, record_path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "participation"


@pytest.fixture
def record(path):
    with ParticipationRecord.open_or_create(path) as record:
        yield record


def test_ledgers_of_one_folder_have_records_of_their_own(tmp_path):
    names = ["study", "study.sqlite", "study.2025", "study.2026", "study.2025.sqlite", "study.db"]
    records = [record_path(tmp_path / name) for name in names]
    assert len({*names, *(record.name for record in records)}) == 2 * len(names)
    assert {record.parent for record in records} == {tmp_path}
    assert record_path(tmp_path / "ledger.sqlite").name == "ledger.participation.sqlite"


def test_a_ledger_has_one_record_whatever_links_lead_to_it(tmp_path):
    """By two, either would lack what was charged by the other name."""
    real, link, other = tmp_path / "folder" / "ledger.sqlite", tmp_path / "link", tmp_path / "loop"
    link.symlink_to(real)
    other.symlink_to(other)
    assert record_path(link) == record_path(real)
    assert record_path(other).parent == tmp_path


class TestUsersOfARun:
    def test_they_stay_who_they_were_at_the_beginning(self, path):
        before, others = digest_of_users(["a", "b"]), digest_of_users(["b", "c"])
        for _ in range(2):
            with ParticipationRecord.open_or_create(path) as record:
                record.bind("r", before)
                with pytest.raises(InvalidValueError, match="those that run 'r' began with"):
                    record.bind("r", others)
        with ParticipationRecord.open(path) as record:
            record.bind("another", others)

    @given(st.lists(st.text(max_size=3), max_size=4), st.lists(st.text(max_size=3), max_size=4))
    def test_two_digests_are_equal_for_the_same_users_at_the_same_positions_only(self, one, other):
        assert (digest_of_users(one) == digest_of_users(other)) == (one == other)
        assert digest_of_users(one) != digest_of_users(None)


class TestRecord:
    def test_any_cohort_comes_back_sorted(self, record):
        @settings(max_examples=60, deadline=None)
        @given(
            users=st.lists(st.integers(0, 2**63 - 1), unique=True, max_size=30),
            dtype=st.sampled_from([np.int64, np.uint64]),
        )
        def check(users, dtype):
            given_users = np.array(users, dtype=dtype)
            commitment = record.record("r", 0, 0, given_users)
            assert record.users_of(commitment).tolist() == sorted(users)
            assert record.users_of(commitment).dtype == np.int64
            assert given_users.tolist() == users

        check()

    def test_an_empty_cohort_is_a_cohort(self, record):
        commitment = record.record("r", 0, 0, np.array([], dtype=np.int64))
        assert record.users_of(commitment).shape == (0,)

    def test_commitment_is_salted_sha256_of_attempt_and_users(self, record, path):
        commitment = record.record("r", 3, 1, np.array([7, 2], dtype=np.int32))
        with closing(sqlite3.connect(path)) as raw:
            (salt,) = raw.execute("SELECT salt FROM participation").fetchone()
        users = (2).to_bytes(8, "little") + (7).to_bytes(8, "little")
        assert len(salt) == 32
        assert commitment == hashlib.sha256(salt + b'["r", 3, 1]' + users).hexdigest()

    def test_equal_cohorts_have_unlike_commitments(self, record):
        users = np.arange(5)
        commitments = {record.record("r", 0, 0, users) for _ in range(20)}
        assert len(commitments) == 20

    def test_salt_is_from_the_operating_system_whatever_is_seeded(self, record, monkeypatch):
        monkeypatch.setattr("secrets.token_bytes", lambda count: b"\x01" * count)
        first = record.record("r", 0, 0, np.arange(5))
        expected = hashlib.sha256(b"\x01" * 32 + b'["r", 0, 0]' + np.arange(5).tobytes())
        assert first == expected.hexdigest()

    def test_others_read_what_was_recorded(self, record, path):
        commitment = record.record("r", 0, 0, np.arange(5))
        with ParticipationRecord.open(path) as other:
            assert other.users_of(commitment).tolist() == [0, 1, 2, 3, 4]

    def test_keeps_compactly(self, record):
        """16 bits of position rather than 64 and no text: a dense cohort costs < 3 bytes each."""
        users = np.random.default_rng(0).permutation(60_000)[:20_000]
        record.record("r", 0, 0, users)
        (size,) = record.database.read("SELECT length(users) FROM participation")[0]
        assert size < 3 * users.size

    @pytest.mark.parametrize(
        ("users", "message"),
        [
            (np.zeros((2, 2), dtype=np.int64), r"shape \(2, 2\)"),
            (np.array([1.0, 2.0]), "type float64"),
            (np.array([True]), "type bool"),
            (np.array([3, 1, 3]), "1 users occur twice"),
            (np.array([0, -1]), "user -1 is not a position"),
            (np.array([2**63], dtype=np.uint64), "is not a position"),
            (np.array([5, 2**63], dtype=np.uint64), "is not a position"),
            (np.array([1, 3, 3]), "1 users occur twice"),
        ],
    )
    def test_illegal_cohorts_are_refused(self, record, users, message):
        with pytest.raises(InvalidValueError, match=message):
            record.record("r", 0, 0, users)

    def test_unknown_commitments_are_refused(self, record):
        with pytest.raises(LedgerError, match=f"no cohort with commitment {'ab' * 32}"):
            record.users_of("ab" * 32)

    @pytest.mark.parametrize(
        "change",
        [
            "run = 'other'",
            "round = round + 1",
            "attempt = attempt + 1",
            "salt = zeroblob(32)",
            "salt = 'text'",
            "users = zeroblob(3)",
            "users = (SELECT users FROM participation WHERE round = 9)",
        ],
    )
    def test_changed_cohorts_are_refused(self, record, path, change):
        commitment = record.record("r", 0, 0, np.arange(5))
        record.record("r", 9, 0, np.arange(6))
        with closing(sqlite3.connect(path, isolation_level=None)) as raw:
            raw.execute(f"UPDATE participation SET {change} WHERE round = 0")
        with pytest.raises(LedgerError, match=f"commitment {commitment} was changed"):
            record.users_of(commitment)


class TestSecrecy:
    def test_only_the_owner_can_use_its_files(self, path):
        mask = os.umask(0)
        try:
            with ParticipationRecord.open_or_create(path) as record:
                record.record("r", 0, 0, np.arange(5))
                with record.database.transaction():
                    record.database.write("DELETE FROM participation")
                    files = path.parent.glob("participation*")
                    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in files}
        finally:
            os.umask(mask)
        assert modes == dict.fromkeys(["participation", "participation-journal"], 0o600)

    def test_git_adds_no_record_wherever_its_ledger_is(self, tmp_path):
        git = partial(subprocess.run, check=True, cwd=tmp_path, capture_output=True, text=True)
        git(["git", "init", "--quiet"])
        for name in ("shared", "other.sqlite", "shared"):
            ParticipationRecord.open_or_create(record_path(tmp_path / name)).close()
            (tmp_path / name).touch()
        git(["git", "add", "."])
        added = git(["git", "ls-files"]).stdout.split()
        assert added == [".gitignore", "other.sqlite", "shared"]

    def test_a_gitignore_of_somebody_else_is_left_alone(self, path):
        ignore = path.with_name(".gitignore")
        ignore.write_bytes(b"\xff*.pyc\n")
        ParticipationRecord.open_or_create(path).close()
        assert ignore.read_bytes() == b"\xff*.pyc\n"

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o666])
    def test_a_file_that_others_can_use_is_refused(self, path, mode):
        ParticipationRecord.open_or_create(path).close()
        path.chmod(mode)
        for attempt in (ParticipationRecord.open, ParticipationRecord.open_or_create):
            with pytest.raises(LedgerError, match=rf"mode {mode:04o}\); it must have mode 0600"):
                attempt(path)
        path.chmod(0o600)
        ParticipationRecord.open(path).close()

    def test_a_ledger_is_no_participation_record(self, tmp_path):
        Ledger.open_or_create(tmp_path / "ledger", "users").close()
        (tmp_path / "ledger").chmod(0o600)
        with pytest.raises(LedgerError, match="is not a participation record"):
            ParticipationRecord.open(tmp_path / "ledger")

    def test_a_missing_record_is_refused_and_not_created(self, path):
        with pytest.raises(LedgerError, match="cannot be opened"):
            ParticipationRecord.open(path)
        assert not path.exists()


class TestWithALedger:
    @pytest.fixture
    def ledger(self, tmp_path):
        with Ledger.open_or_create(tmp_path / "ledger", "users") as ledger:
            yield ledger

    @staticmethod
    def charge(ledger, commitment, round_number=0):
        event = poisson_gaussian(0.1, 1.0, population=10)
        ledger.charge(ProposedCharge("r", round_number, 0, Randomness.SEEDED, event, commitment))

    def test_every_charge_has_its_cohort(self, record, ledger):
        for number in range(3):
            self.charge(ledger, record.record("r", number, 0, np.arange(number)), number)
        record.record("r", 3, 0, np.arange(4))  # the charge did not happen: harmless
        ledger.verify(record)
        users = [record.users_of(row.cohort_commitment).size for row in ledger.charges()]
        assert users == [0, 1, 2]

    def test_a_charge_without_cohort_is_named(self, record, ledger):
        self.charge(ledger, record.record("r", 0, 0, np.arange(4)), 0)
        self.charge(ledger, "ab" * 32, 1)
        ledger.verify()
        with pytest.raises(LedgerError, match=r"charge 2 \(run r, round 1, .*no cohort with"):
            ledger.verify(record)

    def test_a_cohort_of_another_round_is_named(self, record, ledger):
        self.charge(ledger, record.record("r", 0, 1, np.arange(4)), 0)
        with pytest.raises(LedgerError, match=r"charge 1 .*from run r, round 0, attempt 1"):
            ledger.verify(record)

    def test_a_cohort_beyond_the_population_is_named(self, record, ledger):
        self.charge(ledger, record.record("r", 0, 0, np.array([3, 10])), 0)
        with pytest.raises(LedgerError, match=r"charge 1 .*user 10 of a population of 10"):
            ledger.verify(record)

    def test_neither_ledger_nor_export_holds_salt_or_users(self, record, ledger, tmp_path, path):
        self.charge(ledger, record.record("r", 0, 0, np.arange(4)))
        with closing(sqlite3.connect(path)) as raw:
            salt, users = raw.execute("SELECT salt, users FROM participation").fetchone()
        exported = io.StringIO()
        ledger.export(exported)
        ledger.close()
        stored = (tmp_path / "ledger").read_bytes()
        for secret in (salt, users, np.arange(4).tobytes()):
            assert secret not in stored
            assert secret.hex() not in stored.decode(errors="replace") + exported.getvalue()
