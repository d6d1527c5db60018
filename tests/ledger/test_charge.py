"""What may be proposed to a ledger, and that its receipt is good for one release."""

import copy
import pickle
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.events import Randomness, RoundEvent
from fedpriv.ledger.ledger import Ledger, ProposedCharge


def propose(run="a", round_number=0, attempt=0):
    return ProposedCharge(
        run=run,
        round=round_number,
        attempt=attempt,
        randomness=Randomness.SEEDED,
        event=poisson_gaussian(0.1, 1.1),
        cohort_commitment="0f" * 32,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"run": ""}, "run is ''"),
        ({"run": "a\nb"}, "must be printable"),
        ({"round": -1}, "must be from 0 to 2^63 - 1"),
        ({"attempt": -1}, "must be from 0 to 2^63 - 1"),
        ({"round": 2**63}, "must be from 0 to 2^63 - 1"),
        ({"attempt": 2**63}, "must be from 0 to 2^63 - 1"),
        ({"event": poisson_gaussian(0.1, 1.0, count=2)}, "count 2"),
        ({"cohort_commitment": "0F" * 32}, "64 lower-case hexadecimal"),
        ({"cohort_commitment": "0f" * 31}, "64 lower-case hexadecimal"),
        ({"cohort_commitment": b"0f" * 32}, "64 lower-case hexadecimal"),
        ({"run": 3}, "run is 3"),
        ({"round": 1.5}, "round is 1.5"),
        ({"attempt": True}, "attempt is True"),
        ({"randomness": "os"}, "randomness is 'os'"),
        ({"event": None}, "event is None"),
    ],
)
def test_illegal_proposals_name_the_value(changes, message):
    with pytest.raises(InvalidValueError, match=re.escape(message)):
        replace(propose(), **changes)


def test_numbers_and_names_of_other_types_are_read_back(tmp_path):
    changes = {"round": np.int64(3), "attempt": np.uint8(1), "randomness": "operating system"}
    with Ledger.open_or_create(tmp_path / "ledger", "users") as ledger:
        ledger.charge(replace(propose(), **changes))
        assert ledger.next_attempt("a", np.int64(3)) == 2
        ledger.charge(propose("b"))
        ledger.verify()
        assert ledger.randomness is Randomness.SEEDED


def test_what_would_not_be_read_back_is_not_written(tmp_path):
    class Other(RoundEvent):
        pass

    event = propose().event
    unknown = Other(event.sampling, event.queries)
    with Ledger.open_or_create(tmp_path / "ledger", "users") as ledger:
        with pytest.raises(InvalidValueError, match="no ledger can hold charge 1"):
            ledger.charge(replace(propose(), event=unknown))
        assert ledger.head.count == 0
        ledger.charge(propose())
        ledger.verify()


class TestReceipt:
    @pytest.fixture
    def receipt(self, tmp_path):
        with Ledger.open_or_create(tmp_path / "ledger", "users") as ledger:
            return ledger.charge(propose("a", 3, 1))

    def test_names_what_was_charged(self, receipt):
        assert (receipt.run, receipt.round, receipt.attempt) == ("a", 3, 1)
        assert receipt.event == propose().event
        assert receipt.redeem() == propose().event

    def test_second_release_is_refused_with_the_guarantee_it_would_break(self, receipt):
        receipt.redeem()
        with pytest.raises(LedgerError, match="two releases on one charge could be averaged"):
            receipt.redeem()

    @pytest.mark.parametrize("duplicate", [copy.copy, lambda receipt: replace(receipt, run="b")])
    def test_copies_share_the_one_release(self, receipt, duplicate):
        other = duplicate(receipt)
        other.redeem()
        with pytest.raises(LedgerError, match="redeemed before"):
            receipt.redeem()

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
    def test_cannot_be_taken_elsewhere(self, receipt, duplicate):
        with pytest.raises(TypeError, match="lock"):
            duplicate(receipt)

    def test_of_many_threads_one_releases(self, receipt):
        def redeem(_):
            try:
                return receipt.redeem()
            except LedgerError:
                return None

        with ThreadPoolExecutor(8) as pool:
            redeemed = [event for event in pool.map(redeem, range(64)) if event]
        assert redeemed == [propose().event]
