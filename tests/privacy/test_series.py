"""Series of private rounds: paid for once, each drawn once, whatever interrupts them."""

import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from fedpriv.errors import BudgetExceededError, LedgerError
from fedpriv.experiment.grouping import equal_split
from fedpriv.ledger import Charge, ExportedLedger, Ledger, ProposedCharge
from fedpriv.ledger.participation import record_path
from fedpriv.privacy import gaussian_mechanism
from fedpriv.privacy import round as private
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.correlated_noise import BandedStrategy
from fedpriv.privacy.gaussian_mechanism import GaussianMechanism
from fedpriv.privacy.layout import Layout, layers, per_layer
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.round import (
    Draws,
    PartialSum,
    PrivacyRecords,
    Release,
    RoundAttempt,
    SeriesDraws,
    private_round,
    release,
)
from fedpriv.privacy.sampling import (
    FixedSizeSampling,
    RandomAllocationSampling,
    Sampling,
    SeparatedSampling,
)
from fedpriv.run.backup import back_up
from tests.training.federation import open_records

LAYOUT = Layout(("a.w", "b.w"), ((3,), (2,)))
GROUPS = per_layer(LAYOUT, layers(LAYOUT), equal_split(layers(LAYOUT), 1.0))
CLIPPING = Clipping(LAYOUT, GROUPS)
N, K, USERS = 4, 2, 12
SEEDED, FRESH = SeededEntropy(3), OperatingSystemEntropy()


def mechanism_of(z: float = 100.0, sampling: Sampling | None = None) -> GaussianMechanism:
    sampling = sampling or RandomAllocationSampling(USERS, N, K)
    return GaussianMechanism.calibrated(sampling, CLIPPING, z, (0.5, 0.5))


MECHANISM = mechanism_of()
ZERO = PartialSum("cohort", 0, np.zeros(LAYOUT.dimension, np.int64), 0)


@dataclass
class Asked:
    """Asks nobody, and remembers who was to be asked."""

    attempts: list[tuple[str, int, int]] = field(default_factory=list)
    cohorts: list[list[int]] = field(default_factory=list)

    def __call__(self, at: RoundAttempt, users: np.ndarray) -> Iterable[PartialSum]:
        self.attempts.append((at.run, at.round, at.attempt))
        self.cohorts.append(users.tolist())
        return ()


def rounds(
    records: PrivacyRecords,
    numbers: Iterable[int],
    *,
    mechanism: GaussianMechanism = MECHANISM,
    run: str = "run",
    collect: object = None,
    entropy: Entropy = SEEDED,
) -> list[Release]:
    asked = collect or Asked()
    return [private_round(mechanism, run, n, asked, records, entropy) for n in numbers]


def stop(*_: object) -> Iterable[PartialSum]:
    raise OSError("the server stopped")


@pytest.fixture
def noised(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The keys with which independent noise was drawn."""
    drawn, keys = gaussian_mechanism.rounded_gaussian, []

    def spy(key: bytes, count: int, stddev: float) -> np.ndarray:
        keys.append(key)
        return drawn(key, count, stddev)

    monkeypatch.setattr(gaussian_mechanism, "rounded_gaussian", spy)
    return keys


def parts(records: PrivacyRecords) -> list[tuple[int, int | None]]:
    return [(row.part, row.series) for row in records.ledger.charges()]


def times(cohorts: list[list[int]]) -> list[int]:
    return np.bincount(np.concatenate(cohorts).astype(np.int64), minlength=USERS).tolist()


# A pass.


@pytest.mark.parametrize("entropy", [SEEDED, FRESH], ids=["seeded", "fresh"])
def test_a_pass_is_charged_once_and_asks_each_user_k_times(
    tmp_path: Path, noised: list[bytes], entropy: Entropy
) -> None:
    asked = Asked()
    with open_records(tmp_path) as records:
        made = rounds(records, range(1, 2 * N + 1), collect=asked, entropy=entropy)
        assert parts(records) == [(0, None), (1, 1), (2, 1), (3, 1), (0, None), *((p, 5) for p in (1, 2, 3))]  # noqa: E501  # fmt: skip
        assert records.ledger.epsilon(records.budget) == 2.0
        records.ledger.verify(records.participation)
        rows = [*records.ledger.charges()]
        drawn = [records.participation.users_of(r.cohort_commitment).tolist() for r in rows]
        assert [row.hash for row in rows] == [each.charge_hash for each in made]
    assert asked.cohorts == drawn
    for cohorts in (drawn[:N], drawn[N:]):
        assert times(cohorts) == [K] * USERS
    assert drawn[:N] != drawn[N:]
    assert len(set(noised)) == len(noised) == 2 * N * len(GROUPS)
    # The noise of all rounds differs, and so does that of groups.
    assert len({tuple(each.average.tolist()) for each in made}) == 2 * N


def test_the_key_is_kept_while_a_pass_is_under_way_and_not_longer(tmp_path: Path) -> None:
    kept = []
    with open_records(tmp_path) as records, closing(_raw(tmp_path)) as raw:
        for number in range(1, 2 * N + 1):
            rounds(records, [number])
            sql = "SELECT round FROM series JOIN participation USING (commitment)"
            kept.append(raw.execute(sql).fetchall())
    assert kept == [*[[(1,)]] * 3, [], *[[(5,)]] * 3, []]


def _raw(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / "participation.sqlite")


def test_a_used_up_budget_lets_a_pass_end_and_no_other_begin(tmp_path: Path) -> None:
    asked = Asked()
    with open_records(tmp_path, limit=1.0) as records:
        rounds(records, range(1, N + 1), collect=asked)
        with pytest.raises(BudgetExceededError, match="no user was asked and nothing charged"):
            rounds(records, [N + 1], collect=asked)
        assert records.next_attempt("run", N + 1) == 0
        assert len(asked.attempts) == N
        with closing(_raw(tmp_path)) as raw:
            assert raw.execute("SELECT * FROM series").fetchall() == []


# What interrupts a pass.


@pytest.mark.parametrize("lost", [1, 3])
def test_an_interrupted_round_is_lost_to_its_pass_and_never_drawn_again(
    tmp_path: Path, lost: int
) -> None:
    asked, failing = Asked(), Asked()

    def late(at: RoundAttempt, users: np.ndarray) -> Iterable[PartialSum]:
        failing(at, users)
        return stop()

    with open_records(tmp_path) as records:
        rounds(records, range(1, lost), collect=asked)
    with open_records(tmp_path) as records, pytest.raises(OSError, match="stopped"):
        rounds(records, [lost], collect=late)
    with open_records(tmp_path) as records:
        made = rounds(records, range(lost, N), collect=asked)
        assert parts(records) == [(0, None), (1, 1), (2, 1), (3, 1)]
        assert [each.attempt for each in made] == [1] + [0] * (N - lost - 1)
        records.ledger.verify(records.participation)
    assert times(asked.cohorts + failing.cohorts) == [K] * USERS


def test_between_charge_and_release_a_round_is_lost_and_never_drawn_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noised: list[bytes]
) -> None:
    """Also if its noise was drawn already, and the release is all that is missing."""
    asked = Asked()
    for when in ("before", "after"):
        folder = tmp_path / when
        folder.mkdir()
        asked.cohorts.clear()

        def lost(*given: object, noising: bool = when == "after") -> object:
            if noising:
                release(*given)
            raise KeyboardInterrupt

        with open_records(folder) as records:
            rounds(records, [1], collect=asked)
            with monkeypatch.context() as patch:
                patch.setattr(private, "release", lost)
                with pytest.raises(KeyboardInterrupt):
                    rounds(records, [2], collect=asked)
        with open_records(folder) as records:
            made = rounds(records, [2, 3, 4], collect=asked)
            assert parts(records) == [(0, None), (1, 1), (2, 1), (3, 1), (0, None)]
            assert [(row.round, row.attempt) for row in records.ledger.charges()] == [
                (1, 0), (2, 0), (2, 1), (3, 0), (4, 0)
            ]  # fmt: skip
            assert made[0].attempt == 1
            records.ledger.verify(records.participation)
        assert times(asked.cohorts[:N]) == [K] * USERS
    assert len(set(noised)) == len(noised) - 4 * len(GROUPS)  # seeded twice, in two folders
    assert len(noised) == (4 + 5) * len(GROUPS)


@pytest.mark.parametrize("reopened", range(1, N + 2))
def test_a_seeded_run_that_goes_on_elsewhere_is_the_same_to_the_bit(
    tmp_path: Path, reopened: int
) -> None:
    folders = [tmp_path / name for name in ("whole", "halves")]
    for folder in folders:
        folder.mkdir()
    asked = [Asked(), Asked()]
    last = N + 2
    with open_records(folders[0]) as records:
        whole = rounds(records, range(1, last + 1), collect=asked[0])
    with open_records(folders[1]) as records:
        halves = rounds(records, range(1, reopened + 1), collect=asked[1])
    with open_records(folders[1]) as records:
        halves += rounds(records, range(reopened + 1, last + 1), collect=asked[1])
    assert asked[0] == asked[1]
    for one, two in zip(whole, halves, strict=True):
        np.testing.assert_array_equal(one.average, two.average)


@pytest.mark.parametrize(
    "sampling",
    [RandomAllocationSampling(USERS, N, K), SeparatedSampling(USERS, N, 2)],
    ids=["allocation", "separated"],
)
def test_without_its_key_a_new_series_is_charged(tmp_path: Path, sampling: Sampling) -> None:
    mechanism, asked = mechanism_of(sampling=sampling), Asked()
    with open_records(tmp_path) as records:
        rounds(records, [1, 2], mechanism=mechanism)
        records.participation.forget_series("run")
        rounds(records, range(3, N + 3), mechanism=mechanism, collect=asked)
        assert parts(records) == [(0, None), (1, 1), (0, None), (1, 3), (2, 3), (3, 3)]
        records.ledger.verify(records.participation)


def test_of_two_copies_of_a_folder_one_goes_on_and_the_other_begins_a_series(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy, sampling = BandedStrategy((1.0, 0.5)), SeparatedSampling(USERS, N, 2)
    made = GaussianMechanism.calibrated(sampling, CLIPPING, 50.0, (0.5, 0.5), strategy=strategy)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    with open_records(here) as records:
        rounds(records, [1, 2], mechanism=made, entropy=FRESH)
    shutil.copytree(here, there)
    released, begun = [], []
    for folder in (here, there):
        with open_records(folder) as records:
            (each,) = rounds(records, [3], mechanism=made, entropy=FRESH)
            released.append(each.average)
            begun.append(parts(records)[2:])
            records.ledger.verify(records.participation)
    assert begun == [[(2, 1)], [(0, None)]]
    assert not np.array_equal(*released)
    assert [record.getMessage() for record in caplog.records] == [
        "the key of the series that run 'run' was in is lost, or belongs to another copy "
        "of the participation record; the series is over and the run charges a new one"
    ]


@pytest.mark.parametrize("backup", [True, False], ids=["backup", "folder"])
@pytest.mark.parametrize("begun", [True, False], ids=["of a new series", "of the old one"])
def test_a_round_drawn_before_a_copy_was_made_is_charged_in_its_own_series_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, begun: bool, backup: bool
) -> None:
    """The process was killed between the draw and the charge, and no copy can use the key."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    with open_records(here) as records:
        rounds(records, [1, 2], entropy=FRESH)
    if begun:  # the copy cannot go on with the series, and begins another
        here = shutil.copytree(here, tmp_path / "begun")
    with open_records(here) as records, monkeypatch.context() as patched:
        patched.setattr(PrivacyRecords, "charge", stop)
        with pytest.raises(OSError, match="stopped"):
            rounds(records, [3], entropy=FRESH)
    if backup:
        (here / "participation.sqlite").rename(record_path(here / "ledger.sqlite"))
        back_up(here / "ledger.sqlite", there / "ledger.sqlite")
        record_path(there / "ledger.sqlite").rename(there / "participation.sqlite")
    else:
        shutil.copytree(here, there)
    with open_records(there) as records:
        rounds(records, [3], entropy=FRESH)
        assert parts(records)[2:] == [(0, None) if begun else (2, 1), (0, None)]
        records.ledger.verify(records.participation)


def test_a_lost_round_whose_part_another_process_took_pays_for_a_new_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn_by_both(*_: object) -> Iterable[PartialSum]:
        with open_records(tmp_path) as others, monkeypatch.context() as patched:
            patched.setattr(PrivacyRecords, "charge", stop)
            patched.setattr(PrivacyRecords, "settle", lambda *_: None)  # it began before
            with pytest.raises(OSError, match="stopped"):
                rounds(others, [2], entropy=FRESH)
        return ()

    with open_records(tmp_path) as records:
        rounds(records, [1], entropy=FRESH)
        rounds(records, [2], entropy=FRESH, collect=drawn_by_both)
        rounds(records, [3], entropy=FRESH)
        assert parts(records) == [(0, None), (1, 1), (0, None), (0, None)]
        records.ledger.verify(records.participation)


def test_another_event_begins_a_series_and_gives_the_old_one_up(tmp_path: Path) -> None:
    louder = mechanism_of(200.0)
    with open_records(tmp_path) as records:
        rounds(records, [1, 2])
        rounds(records, [3, 4], mechanism=louder)
        assert parts(records) == [(0, None), (1, 1), (0, None), (1, 3)]
        rounds(records, [5])  # the key of its first pass is gone
        assert parts(records)[4:] == [(0, None)]
        assert records.ledger.epsilon(records.budget) == 3.0
        records.ledger.verify(records.participation)


def test_a_round_of_another_policy_between_leaves_a_pass_under_way(tmp_path: Path) -> None:
    fixed = mechanism_of(sampling=FixedSizeSampling(USERS, 3))
    with open_records(tmp_path) as records:
        rounds(records, [1])
        rounds(records, [2], mechanism=fixed)
        rounds(records, [3])
        assert parts(records) == [(0, None), (0, None), (1, 1)]


@pytest.mark.parametrize("entropy", [SEEDED, FRESH], ids=["seeded", "fresh"])
def test_runs_that_take_turns_have_passes_of_their_own(
    tmp_path: Path, noised: list[bytes], entropy: Entropy
) -> None:
    asked = {"one": Asked(), "two": Asked()}
    with open_records(tmp_path) as records, open_records(tmp_path) as others:
        for number in range(1, N + 1):
            for run, used in (("one", records), ("two", others), ("one", others)):
                at = number if used is records or run == "two" else N + number
                rounds(used, [at], run=run, collect=asked[run], entropy=entropy)
        records.ledger.verify(records.participation)
        assert records.ledger.epsilon(records.budget) == 3.0
    assert times(asked["two"].cohorts) == [K] * USERS
    for first in (0, N):
        assert times(asked["one"].cohorts[first : first + N]) == [K] * USERS
    assert len(set(noised)) == len(noised)


def test_of_two_processes_at_one_round_one_releases(tmp_path: Path, noised: list[bytes]) -> None:
    """The second takes the first for one that was killed, charges it and goes on."""
    with open_records(tmp_path) as records, open_records(tmp_path) as others:
        rounds(records, [1])
        before = len(noised)

        def overtaken(at: RoundAttempt, users: np.ndarray) -> Iterable[PartialSum]:
            rounds(others, [2])
            return Asked()(at, users)

        with pytest.raises(LedgerError, match="round 2, attempt 0 was charged before"):
            rounds(records, [2], collect=overtaken)
        assert len(noised) == before + len(GROUPS)
        rounds(records, [3])
        assert parts(records) == [(0, None), (1, 1), (2, 1), (3, 1)]


def begin_together(
    folder: Path, runs: tuple[str, str], mechanism: GaussianMechanism, entropy: Entropy
) -> list[Release]:
    """Two processes name their attempts and wait; the second begins once the first has released.

    The first then goes on to the end of its series.
    """
    made = list[Release]()
    with open_records(folder) as records, open_records(folder) as others:

        def overtaken(_: RoundAttempt) -> None:
            made.append(private_round(mechanism, runs[0], 1, Asked(), records, entropy))

        with suppress(LedgerError):
            second = (mechanism, runs[1], 1, Asked(), others, entropy, overtaken)
            made.append(private_round(*second))
        rest = range(2, N + 1)
        return made + rounds(records, rest, mechanism=mechanism, run=runs[0], entropy=entropy)


@pytest.mark.parametrize(
    "sampling",
    [RandomAllocationSampling(USERS, N, K), SeparatedSampling(USERS, N, 2)],
    ids=["allocation", "separated"],
)
def test_two_processes_that_begin_one_attempt_at_once_are_not_taken_for_each_other(
    tmp_path: Path, sampling: Sampling
) -> None:
    """The cohorts that go on with a series are of the key that was charged, or are charged anew."""
    mechanism = mechanism_of(sampling=sampling)
    begin_together(tmp_path, ("run", "run"), mechanism, FRESH)
    with open_records(tmp_path) as records:
        records.ledger.verify(records.participation)
        assert parts(records) == [(0, None), (0, None), (1, 2), (2, 2)]


def test_runs_that_begin_at_once_with_one_seed_have_other_correlated_noise(tmp_path: Path) -> None:
    """Equal noise on two sums would give their difference without any."""
    sampling, strategy = SeparatedSampling(USERS, N, 2), BandedStrategy((1.0, 0.5))
    made = GaussianMechanism.calibrated(sampling, CLIPPING, 50.0, (0.5, 0.5), strategy=strategy)
    one, two, *_ = begin_together(tmp_path, ("one", "two"), made, SEEDED)
    with open_records(tmp_path) as records:
        assert parts(records)[:2] == [(0, None), (0, None)]
    assert not np.array_equal(one.average, two.average)


def test_files_that_are_put_back_do_not_bring_noise_back(
    tmp_path: Path, noised: list[bytes]
) -> None:
    """Two releases of one sum with one noise would give the difference of two sums without any."""
    files = [tmp_path / name for name in ("ledger.sqlite", "participation.sqlite")]
    with open_records(tmp_path) as records:
        rounds(records, [1], entropy=FRESH)
    for file in files:
        shutil.copy(file, file.with_suffix(".kept"))
    for _ in range(3):
        with open_records(tmp_path) as records:
            rounds(records, [2, 3], entropy=FRESH)
        for file in files:
            shutil.copy(file.with_suffix(".kept"), file)
    assert len(set(noised)) == len(noised) == 7 * len(GROUPS)


# A receipt is for one round of the series.


def test_a_receipt_of_another_round_of_the_series_releases_nothing(
    tmp_path: Path, noised: list[bytes]
) -> None:
    drawn, at = SeriesDraws(MECHANISM, SEEDED.key("series")), RoundAttempt("run", 1, 0)
    with open_records(tmp_path) as records:
        charge = _charged(records, at)
        with pytest.raises(LedgerError, match="the charge is for part 0 of its event, not 1"):
            release(MECHANISM, at, ZERO, charge, Draws(SEEDED, drawn, 1, 1))
        assert noised == []
        release(MECHANISM, at, ZERO, charge, Draws(SEEDED, drawn))  # it was not used up
        with pytest.raises(LedgerError, match="redeemed before"):
            release(MECHANISM, at, ZERO, charge, Draws(SEEDED, drawn))


def _charged(records: PrivacyRecords, at: RoundAttempt) -> Charge:
    place = at.run, at.round, at.attempt
    return records.ledger.charge(
        ProposedCharge(*place, SEEDED.randomness, MECHANISM.event, "0" * 64)
    )


# One user more or less.


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (5, 5), (1, 1)])
def test_one_user_moves_the_sums_of_k_rounds_of_a_pass_by_s_at_most(
    tmp_path: Path, n: int, k: int
) -> None:
    """Without noise and with equal keys, as two neighbours would be: what the price is for."""
    sums = []
    for users in (USERS, USERS + 1):
        folder = tmp_path / str(users)
        folder.mkdir()
        mechanism = mechanism_of(0.0, RandomAllocationSampling(users, n, k))

        def honest(_: RoundAttempt, drawn: np.ndarray) -> Iterable[PartialSum]:
            for user in drawn.tolist():
                update = {"a.w": np.full(3, user + 5.0), "b.w": np.array([user, -7.0])}
                yield PartialSum(f"user {user}", 1, CLIPPING.contribution(update, 1), 1)

        with open_records(folder) as records:
            made = rounds(records, range(1, n + 1), mechanism=mechanism, collect=honest)
        expected = mechanism.sampling.expected_cohort_size
        sums.append(np.array([each.average * expected for each in made]))
    moved = sums[1] - sums[0]
    assert np.count_nonzero(np.abs(moved).max(axis=1) > 1e-9) == k
    for group in GROUPS:
        for span in CLIPPING.spans[group.name]:
            norms = np.linalg.norm(moved[:, span], axis=1)
            assert (norms <= group.clipping_norm * (1 + 1e-9)).all()
            assert norms.max() > 0.999 * group.clipping_norm  # the bound is reached


# The record of cohorts is checked against the schedule.


class TestVerifying:
    @pytest.fixture(params=["allocation", "separated"])
    def sampling(self, request: pytest.FixtureRequest) -> Sampling:
        if request.param == "allocation":
            return RandomAllocationSampling(USERS, N, K)
        return SeparatedSampling(USERS, N, 2)

    def chain(
        self, folder: Path, sampling: Sampling, cohorts: list[list[int]]
    ) -> list[tuple[int, str]]:
        """Charge a series with such cohorts, beside another run that takes turns with it."""
        event = mechanism_of(sampling=sampling).event
        other = mechanism_of(7.0, sampling)
        with open_records(folder) as records:
            paid = None
            for part, users in enumerate(cohorts):
                place = "forged", part + 1, 0
                commitment = records.participation.record(*place, np.array(users, np.int64))
                source = SEEDED.randomness
                charge = ProposedCharge(*place, source, event, commitment, part, paid)
                records.ledger.charge(charge)
                paid = paid or records.ledger.head.count
                rounds(records, [part + 1], mechanism=other, run="honest")
            return [(row.position, row.run) for row in records.ledger.charges()]

    def complaint(self, folder: Path) -> str | None:
        with open_records(folder) as records:
            export = folder / "export"
            with export.open("w") as stream:
                records.ledger.export(stream)
            said = []
            for ledger in (records.ledger, ExportedLedger.load(export)):
                ledger.verify()  # the chain itself is whole
                try:
                    ledger.verify(records.participation)
                except LedgerError as error:
                    said.append(str(error))
                else:
                    said.append(None)
            assert said[0] == said[1]
            return said[0]

    def test_honest_cohorts_pass(self, tmp_path: Path, sampling: Sampling) -> None:
        honest = [users.tolist() for users in sampling.draw(b"k" * 32)]
        for kept in range(1, N + 1):
            folder = tmp_path / str(kept)
            folder.mkdir()
            self.chain(folder, sampling, honest[:kept])
            assert self.complaint(folder) is None

    def test_a_user_in_too_many_rounds_is_found(self, tmp_path: Path) -> None:
        allocation = RandomAllocationSampling(USERS, N, K)
        self.chain(tmp_path, allocation, [[0, 3], [1, 3], [0, 1, 2], [2, 3]])
        assert self.complaint(tmp_path) == (
            "charge 7 (run forged, round 4, attempt 0): a user in its cohort is in more than 2 of "
            "4 rounds"
        )

    def test_rounds_of_a_user_that_are_too_near_are_found(self, tmp_path: Path) -> None:
        separated = SeparatedSampling(USERS, N, 2)
        self.chain(tmp_path, separated, [[0, 3], [1], [0, 3], [2, 3]])
        assert self.complaint(tmp_path) == (
            "charge 7 (run forged, round 4, attempt 0): two rounds of a user in its cohort are "
            "less than 2 apart"
        )

    def test_the_schedule_begins_anew_with_a_series(self, tmp_path: Path) -> None:
        """User 0 is in the last rounds of one and in the first of the next."""
        with open_records(tmp_path) as records:
            for first in (1, 1 + N):
                rounds(records, range(first, first + N), mechanism=mechanism_of(
                    sampling=RandomAllocationSampling(3, N, N)
                ))  # fmt: skip
            records.ledger.verify(records.participation)

    def test_no_user_is_named(self, tmp_path: Path) -> None:
        """Who took part is secret, also in an error message."""
        allocation = RandomAllocationSampling(1000, N, 1)
        self.chain(tmp_path, allocation, [[987], [987], [], []])
        assert "987" not in (self.complaint(tmp_path) or "987")


# Noise that is correlated over the rounds.


def test_correlated_noise_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """To the bit, although the process that drew the first rounds is gone and a round was lost."""
    sampling = SeparatedSampling(USERS, N, 2)
    strategy = BandedStrategy((1.0, 0.5))
    made = GaussianMechanism.calibrated(sampling, CLIPPING, 50.0, (0.5, 0.5), strategy=strategy)
    averages = []
    for name, cuts in (("whole", [range(1, N + 1)]), ("parts", [[n] for n in range(1, N + 1)])):
        folder = tmp_path / name
        folder.mkdir()
        found = []
        for numbers in cuts:
            with open_records(folder) as records:
                found += rounds(records, numbers, mechanism=made)
        averages.append(np.array([each.average for each in found]))
        with Ledger.open(folder / "ledger.sqlite") as ledger:
            assert ledger.spent() == [made.event]
    np.testing.assert_array_equal(*averages)
