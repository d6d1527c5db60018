"""A round whose nodes draw their users and add the noise: charged once, opened after the charge."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.errors import BudgetExceededError, InvalidValueError
from fedpriv.ledger.events import SecureSum
from fedpriv.privacy.clipping import Clipping, IntegerVector
from fedpriv.privacy.gaussian_mechanism import Averaging, GaussianMechanism
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.noise import OperatingSystemEntropy
from fedpriv.privacy.round import OpenedSum, PrivacyRecords, Release, RoundAttempt, secure_round
from fedpriv.privacy.sampling import (
    FixedSizeSampling,
    PoissonSampling,
    Sampling,
    SeparatedSampling,
)
from tests.training.federation import open_records

LAYOUT = Layout(("w",), ((4,),))
CLIPPING = Clipping(LAYOUT, flat(LAYOUT, 1.0))
SECURE = SecureSum(5, 1, 1)
TOTAL = np.array([3, -1, 4, 1], np.int64) << 20
ENTROPY = OperatingSystemEntropy()
Opened = Callable[[], OpenedSum | None]


def mechanism_of(
    sampling: Sampling | None = None, z: float = 1.0, averaging: Averaging | None = None
) -> GaussianMechanism:
    drawn, how = sampling or PoissonSampling(20, 0.5), averaging or Averaging()
    return GaussianMechanism.calibrated(drawn, CLIPPING, z, (1.0,), how, secure_sum=SECURE)


MECHANISM = mechanism_of()


class Nodes:
    """Nodes that note what was charged when they are asked."""

    def __init__(self, records: PrivacyRecords, opened: OpenedSum | None) -> None:
        self.records, self.opened = records, opened
        self.charges: list[int] = []

    def collect(self, at: RoundAttempt) -> Opened:
        self.charges.append(len(list(self.records.ledger.charges())))
        self.at = at
        return self.open

    def open(self) -> OpenedSum | None:
        self.charges.append(len(list(self.records.ledger.charges())))
        return self.opened


def run(nodes: Nodes, mechanism: GaussianMechanism = MECHANISM, number: int = 1) -> Release | None:
    return secure_round(mechanism, "run", number, nodes.collect, nodes.records, ENTROPY)


def test_the_sum_is_opened_after_the_charge_and_divided_by_the_expected_cohort(
    tmp_path: Path,
) -> None:
    with open_records(tmp_path) as records:
        nodes = Nodes(records, OpenedSum(TOTAL, 5))
        release = run(nodes)
        (charge,) = records.ledger.charges()
    assert nodes.charges == [0, 1]
    assert release is not None
    assert release.charge_hash == charge.hash
    assert charge.event == MECHANISM.event
    assert charge.event.secure_sum == SECURE
    np.testing.assert_array_equal(release.average, TOTAL * 2.0**-24 / 10.0)


def test_the_participation_record_holds_an_empty_cohort(tmp_path: Path) -> None:
    with open_records(tmp_path) as records:
        run(Nodes(records, OpenedSum(TOTAL, 5)))
        records.ledger.verify(records.participation)
        (charge,) = records.ledger.charges()
        assert records.participation.users_of(charge.cohort_commitment).size == 0


@pytest.mark.parametrize(
    "opened",
    [
        pytest.param(None, id="too few nodes are left"),
        pytest.param(OpenedSum(np.full(4, 2**50, np.int64), 5), id="it is too long"),
        pytest.param(OpenedSum(np.full(4, -(2**63), np.int64), 5), id="it is as long as can be"),
    ],
)
def test_a_void_attempt_is_charged_once_and_releases_nothing(
    tmp_path: Path, opened: OpenedSum | None
) -> None:
    with open_records(tmp_path) as records:
        nodes = Nodes(records, opened)
        assert run(nodes) is None
        assert len(list(records.ledger.charges())) == 1
        nodes.opened = OpenedSum(TOTAL, 5)
        release = run(nodes)
        attempts = [charge.attempt for charge in records.ledger.charges()]
    assert release is not None
    assert release.attempt == 1
    assert attempts == [0, 1]


class LostError(Exception):
    """Nodes are lost."""


def test_a_round_that_fails_after_nodes_drew_users_is_charged(tmp_path: Path) -> None:
    def lost(_: RoundAttempt) -> Opened:
        raise LostError

    with open_records(tmp_path) as records:
        with pytest.raises(LostError):
            secure_round(MECHANISM, "run", 1, lost, records, ENTROPY)
        (charge,) = records.ledger.charges()
    assert charge.attempt == 0


def test_a_round_beyond_the_budget_asks_nobody_and_charges_nothing(tmp_path: Path) -> None:
    with open_records(tmp_path, 0.5) as records:
        nodes = Nodes(records, OpenedSum(TOTAL, 5))
        with pytest.raises(BudgetExceededError):
            run(nodes)
        assert nodes.charges == []
        assert list(records.ledger.charges()) == []


def test_what_prepare_raises_ends_the_round_before_the_charge(tmp_path: Path) -> None:
    def refuse(_: RoundAttempt) -> None:
        raise LostError

    with open_records(tmp_path) as records:
        nodes = Nodes(records, None)
        with pytest.raises(LostError):
            secure_round(MECHANISM, "run", 1, nodes.collect, records, ENTROPY, refuse)
        assert list(records.ledger.charges()) == []


# What cannot be combined.


@pytest.mark.parametrize("sampling", [FixedSizeSampling(20, 5), SeparatedSampling(20, 4, 2)])
def test_policies_that_need_a_central_draw_are_refused(sampling: Sampling) -> None:
    with pytest.raises(InvalidValueError, match=str(sampling.event().policy)):
        mechanism_of(sampling)


def test_a_denominator_that_depends_on_the_cohort_is_refused() -> None:
    weighted = replace(CLIPPING, weighted=("update",), weight_cap=4)
    averaging = Averaging(4, 60.0, 0.5)
    sampling = PoissonSampling(20, 0.5)
    with pytest.raises(InvalidValueError, match=r"averaging\.floor is 0\.5"):
        GaussianMechanism.calibrated(sampling, weighted, 1.0, (1.0,), averaging, secure_sum=SECURE)


@pytest.mark.parametrize("z", [0.0, 1e-5])
def test_noise_whose_shares_would_be_coarse_is_refused(z: float) -> None:
    with pytest.raises(InvalidValueError, match="noise of group 'update'"):
        mechanism_of(z=z)


# How long the sum of honest nodes can be.


def test_honest_sums_are_admitted_and_longer_ones_are_not() -> None:
    """The longest honest sum: all 20 users with one update of norm 1, and the noise."""
    direction = np.array([0.5, 0.5, 0.5, 0.5])
    longest = (20 * direction * 2**24).astype(np.int64)
    generator = np.random.default_rng(1)
    for _ in range(200):
        noise = generator.normal(0.0, 2.0**24 * np.sqrt(5 / 3), 4).astype(np.int64)
        assert MECHANISM.admits(longest + noise, 5)
    assert not MECHANISM.admits(3 * longest, 5)


def test_more_nodes_may_add_more_noise() -> None:
    """With one user the bound is mostly noise."""
    mechanism = mechanism_of(PoissonSampling(1, 1.0), 100.0)
    noise: IntegerVector = np.array([2**24 * 1400, 0, 0, 0], np.int64)
    assert not mechanism.admits(noise, 100)
    assert mechanism.admits(noise // 2, 5)
