"""What a ledger remembers of prices is what it would be told now, whoever charged in between."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.budget import PrivacyBudget, merge_equal
from fedpriv.accounting.events import Randomness, RoundEvent, poisson_gaussian
from fedpriv.accounting.ledger import Ledger, ProposedCharge
from fedpriv.errors import BudgetExceededError

EVENTS = [poisson_gaussian(q, 2.0) for q in (0.125, 0.25, 0.5)]


@dataclass(frozen=True, eq=False)
class Sampled:
    """Sums sampling probabilities, and counts how often it was asked."""

    asked: list[Sequence[RoundEvent]] = field(default_factory=list)

    def __call__(self, events: Sequence[RoundEvent], delta: float) -> float:
        del delta
        self.asked.append(events)
        return sum(event.count * event.sampling.sampling_probability for event in events)


BUDGETS = [PrivacyBudget(limit, 1e-6, Sampled()) for limit in (1.0, 1.5, math.inf)]
asked = st.tuples(
    st.integers(0, 1), st.booleans(), st.sampled_from(EVENTS), st.sampled_from(BUDGETS)
)


def propose(number: int, event: RoundEvent) -> ProposedCharge:
    return ProposedCharge("r", number, 0, Randomness.SEEDED, event, "00" * 32)


@settings(max_examples=40, deadline=None)
@given(st.lists(asked, max_size=25))
def test_two_writers_are_told_what_prices_say(questions):
    held: list[RoundEvent] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger"
        with Ledger.create(path, "users") as one, Ledger.open(path) as other:
            for number, (writer, charges, event, budget) in enumerate(questions):
                ledger = (one, other)[writer]
                affordable = budget.admits([*held, event])
                if not charges:
                    assert ledger.admits(event, budget) == affordable
                elif affordable:
                    ledger.charge(propose(number, event), budget)
                    held.append(event)
                else:
                    with pytest.raises(BudgetExceededError, match="would make"):
                        ledger.charge(propose(number, event), budget)
            assert one.events() == held
            for ledger in (one, other):
                assert ledger.spent() == list(merge_equal(held))


def test_a_price_is_asked_once_until_something_changes(tmp_path):
    loss = Sampled()
    budget, other_budget = PrivacyBudget(9.0, 1e-6, loss), PrivacyBudget(8.0, 1e-6, loss)
    event, other_event = EVENTS[:2]
    path = tmp_path / "ledger"
    with Ledger.create(path, "users") as ledger, Ledger.open(path) as second:

        def prices(of: RoundEvent, within: PrivacyBudget) -> int:
            before = len(loss.asked)
            assert ledger.admits(of, within)
            return len(loss.asked) - before

        assert prices(event, budget) == 1
        assert prices(event, budget) == 0
        ledger.charge(propose(0, event), budget)
        assert len(loss.asked) == 1
        assert prices(event, budget) == 1
        assert prices(other_event, budget) == 1
        assert prices(other_event, other_budget) == 1
        second.charge(propose(1, event))
        assert prices(other_event, other_budget) == 1
        assert prices(other_event, other_budget) == 0
