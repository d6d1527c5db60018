"""Forecasts save prices and change no decision: the ledger charges and refuses as if it priced."""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.budget import PrivacyBudget
from fedpriv.accounting.events import NeighbouringRelation, Randomness, RoundEvent, poisson_gaussian
from fedpriv.accounting.forecast import Forecast, price
from fedpriv.accounting.ledger import Ledger, ProposedCharge
from fedpriv.accounting.policies import every_user_gaussian
from fedpriv.errors import BudgetExceededError, UnsupportedEventError

DELTA = 1e-6


@dataclass(frozen=True)
class Counting:
    """The loss of the tight accountant, and what was priced."""

    priced: list[int] = field(default_factory=list)

    def __call__(self, events: Sequence[RoundEvent], delta: float) -> float:
        self.priced.append(sum(event.count for event in events))
        return epsilon(events, delta, "tight").epsilon


def budgets(limit: float) -> tuple[PrivacyBudget, PrivacyBudget, Counting]:
    """One with forecasts and one without, and what the former prices."""
    counting = Counting()
    tight = PrivacyBudget.priced_by("tight", limit, DELTA)
    return replace(tight, loss=counting), replace(tight, project=None), counting


def propose(number: int, event: RoundEvent) -> ProposedCharge:
    return ProposedCharge("r", number, 0, Randomness.SEEDED, event, "00" * 32)


def run(
    path: Path, budget: PrivacyBudget, events: Sequence[RoundEvent]
) -> tuple[list[str], list[RoundEvent]]:
    """What each charge answered, and what the ledger holds."""
    answers = []
    with Ledger.create(path, "users") as ledger:
        for number, event in enumerate(events):
            admitted = ledger.admits(event, budget)
            try:
                ledger.charge(propose(number, event), budget)
                answers.append("charged")
            except BudgetExceededError as error:
                answers.append(str(error))
            assert admitted == (answers[-1] == "charged")
        ledger.verify()
        return answers, ledger.events()


ROUNDS = st.builds(poisson_gaussian, q=st.floats(0.02, 0.5), noise_multiplier=st.floats(0.7, 5.0))


@settings(max_examples=10, deadline=None)
@given(st.lists(ROUNDS, min_size=1, max_size=5), st.integers(1, 15), st.floats(0.5, 8.0))
def test_the_same_charges_and_the_same_refusals(kinds, times, limit):
    events = [kinds[number % len(kinds)] for number in range(times)]
    forecasting, pricing, _ = budgets(limit)
    with tempfile.TemporaryDirectory() as folder:
        with_forecasts = run(Path(folder) / "1", forecasting, events)
        assert with_forecasts == run(Path(folder) / "2", pricing, events)


def different(count: int) -> list[RoundEvent]:
    return [poisson_gaussian(0.02, 1.2 + 1e-3 * number) for number in range(count)]


class TestRoundsThatAllDiffer:
    def test_few_are_priced_before_the_budget_is_near(self, tmp_path):
        events = different(150)
        limit = 1.02 * epsilon(events, DELTA, "tight").epsilon
        budget, _, counting = budgets(limit)
        answers, _ = run(tmp_path / "l", budget, events)
        assert answers == ["charged"] * 150
        assert len(counting.priced) <= 25

    def test_the_end_is_where_prices_say(self, tmp_path):
        events = different(150)
        limit = epsilon(events[:120], DELTA, "tight").epsilon
        budget, _, counting = budgets(limit)
        answers, held = run(tmp_path / "l", budget, events)
        assert held == events[:120]
        beyond = epsilon(events[:121], DELTA, "tight").epsilon
        assert f"would make ε = {beyond} at δ = 1e-06, which passes" in answers[120]
        assert counting.priced[-1] == 121

    def test_a_budget_without_limit_needs_few_prices(self, tmp_path):
        budget, _, counting = budgets(math.inf)
        answers, _ = run(tmp_path / "l", budget, different(150))
        assert answers == ["charged"] * 150
        assert len(counting.priced) <= 40

    def test_noise_that_changes_course_makes_a_new_plan(self, tmp_path):
        events = [*different(25), *(poisson_gaussian(0.2, 9.0 + 0.01 * n) for n in range(25))]
        limit = 1.05 * epsilon(events, DELTA, "tight").epsilon
        budget, pricing, _ = budgets(limit)
        assert run(tmp_path / "1", budget, events) == run(tmp_path / "2", pricing, events)


def test_rounds_far_below_a_budget_are_never_priced(tmp_path):
    budget, _, counting = budgets(9.0)
    event = poisson_gaussian(0.01, 2.0)
    for times in (1, 3):  # from an empty ledger, and from one that was opened again
        with Ledger.open_or_create(tmp_path / "l", "users") as ledger:
            for number in range(ledger.head.count, times):
                assert ledger.admits(event, budget)
                ledger.charge(propose(number, event), budget)
    assert counting.priced == []


class TestWhatIsNotProjected:
    EVERYONE = every_user_gaussian(9.0, NeighbouringRelation.ADD_OR_REMOVE_ONE)
    REPLACED = every_user_gaussian(9.0, NeighbouringRelation.REPLACE_ONE)
    NOISELESS = poisson_gaussian(0.1, 0.0)

    def test_other_policies_are_priced_every_time(self, tmp_path):
        budget, _, counting = budgets(9.0)
        events = [poisson_gaussian(0.01, 2.0), self.EVERYONE, *different(3)]
        answers, _ = run(tmp_path / "l", budget, events)
        assert answers == ["charged"] * 5
        assert counting.priced[-1] == 5
        assert Forecast.of(budget, {self.EVERYONE: 1}, 1.0) is None

    def test_relations_that_differ_are_refused_as_ever(self, tmp_path):
        budget, _, _ = budgets(9.0)
        with Ledger.create(tmp_path / "l", "users") as ledger:
            ledger.charge(propose(0, poisson_gaussian(0.01, 2.0)), budget)
            for ask in (ledger.admits, lambda e, b: ledger.charge(propose(1, e), b)):
                with pytest.raises(UnsupportedEventError, match="cannot be added up"):
                    ask(self.REPLACED, budget)
            assert ledger.head.count == 1

    @pytest.mark.parametrize("limit", [9.0, math.inf])
    def test_a_round_without_noise(self, tmp_path, limit):
        budget, pricing, _ = budgets(limit)
        events = [*different(3), self.NOISELESS, *different(2)]
        answers = run(tmp_path / "1", budget, events)
        assert answers == run(tmp_path / "2", pricing, events)
        assert (answers[0][3] == "charged") == (limit == math.inf)

    def test_other_losses_are_asked_every_time(self):
        asked = []
        budget = PrivacyBudget(9.0, DELTA, lambda events, _: asked.append(events) or 1.0)
        event = poisson_gaussian(0.01, 2.0)
        assert price(None, budget, {event: 2}, event) == (1.0, None)
        assert asked == [(replace(event, count=3),)]


class TestBudgetsOfAccountants:
    @pytest.mark.parametrize("accountant", ["tight", "pld", "rdp"])
    def test_price_as_the_accountant_does(self, accountant):
        budget = PrivacyBudget.priced_by(accountant, 3.0, DELTA)
        assert budget == PrivacyBudget.priced_by(accountant, 3.0, DELTA)
        event = poisson_gaussian(0.01, 2.0, 100)
        assert budget.epsilon_of([event]) == epsilon([event], DELTA, accountant).epsilon
        assert (budget.project is None) == (accountant != "tight")


def test_what_others_charge_counts(tmp_path):
    """A second writer spends nearly all; the first one's forecast must know."""
    events = different(60)
    limit = epsilon(events[:50], DELTA, "tight").epsilon
    budget, _, _ = budgets(limit)
    path = tmp_path / "l"
    with Ledger.create(path, "users") as one, Ledger.open(path) as other:
        for number in range(10):
            one.charge(propose(number, events[number]), budget)
        for number in range(10, 50):
            other.charge(propose(number, events[number]))
        with pytest.raises(BudgetExceededError, match="which passes the budget"):
            one.charge(propose(50, events[50]), budget)
        assert one.head.count == 50
