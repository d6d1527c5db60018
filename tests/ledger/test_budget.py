"""A budget is never passed: not by one process, not by several, and a refusal changes nothing."""

import math
import subprocess
import sys
import tempfile
from copy import copy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedpriv.accounting.accountants import ACCOUNTANTS, epsilon
from fedpriv.accounting.policies import every_user_gaussian, poisson_gaussian
from fedpriv.errors import BudgetExceededError, InvalidValueError, UnsupportedEventError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    PrivacyBudget,
    Randomness,
    SumQueryEvent,
    merge_equal,
    repeated,
)
from fedpriv.ledger.ledger import Ledger, ProposedCharge

CHEAP, DEAR = poisson_gaussian(0.1, 4.0), poisson_gaussian(0.1, 1.0)


def price(events, delta):
    """A stand-in for an accountant: each round costs Σ 1/z², and δ must be the budget's."""
    assert delta == 1e-5
    return math.fsum(event.count / event.noise_multiplier**2 for event in events)


def admits(ledger, event, budget):
    """Whether `charge` would now find that one more event is within the budget."""
    return ledger.epsilon(budget, event) <= budget.epsilon


def propose(round_number, event=DEAR, attempt=0):
    return ProposedCharge("r", round_number, attempt, Randomness.SEEDED, event, "00" * 32)


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open_or_create(tmp_path / "ledger", "users") as ledger:
        yield ledger


class TestBudget:
    @pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
    def test_epsilon_must_be_positive(self, epsilon):
        with pytest.raises(InvalidValueError, match=f"epsilon is {epsilon}"):
            PrivacyBudget(epsilon, 1e-5, price)

    @pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan, 1e-61, 5e-324])
    def test_delta_must_be_a_probability_inside_that_prices_can_tell_from_0(self, delta):
        with pytest.raises(InvalidValueError, match=f"delta is {delta}"):
            PrivacyBudget(1.0, delta, price)

    def test_admits_up_to_and_including_its_epsilon(self):
        budget = PrivacyBudget(3.0, 1e-5, price)
        assert budget.admits([DEAR, DEAR, DEAR])
        assert not budget.admits([DEAR, DEAR, DEAR, CHEAP])
        assert budget.epsilon_of([DEAR, CHEAP]) == 1.0625

    @pytest.mark.parametrize("epsilon", [1.0, math.inf])
    def test_a_price_that_is_not_a_number_is_not_admitted(self, epsilon):
        assert not PrivacyBudget(epsilon, 1e-5, lambda *_: math.nan).admits([CHEAP])

    def test_equal_events_are_priced_as_one(self):
        priced = []
        budget = PrivacyBudget(9.0, 1e-5, lambda events, _: priced.extend(events) or 0.0)
        budget.epsilon_of([CHEAP, DEAR, replace(CHEAP, count=5), DEAR, CHEAP])
        assert priced == [replace(CHEAP, count=7), replace(DEAR, count=2)]

    def test_repetitions_are_counted(self):
        assert merge_equal([CHEAP, DEAR, CHEAP, CHEAP]) == repeated({CHEAP: 3, DEAR: 1})
        assert repeated({CHEAP: 3, DEAR: 1}) == (replace(CHEAP, count=3), DEAR)
        assert repeated({}) == merge_equal([]) == ()

    def test_events_that_differ_in_the_last_bit_are_not_merged(self):
        close = poisson_gaussian(math.nextafter(0.1, 1.0), 4.0)
        assert merge_equal([CHEAP, close]) == (CHEAP, close)

    @pytest.mark.parametrize("accountant", ["tight", "pld", "rdp"])
    def test_prices_as_an_accountant_does(self, accountant):
        budget = PrivacyBudget(3.0, 1e-6, ACCOUNTANTS[accountant].upper_epsilon)
        assert budget == PrivacyBudget(3.0, 1e-6, ACCOUNTANTS[accountant].upper_epsilon)
        event = poisson_gaussian(0.01, 2.0, 100)
        assert budget.epsilon_of([event]) == epsilon([event], 1e-6, accountant).epsilon


class TestCharging:
    def test_stops_before_the_budget_is_passed(self, ledger):
        budget = PrivacyBudget(3.0, 1e-5, price)
        for number in range(3):
            ledger.charge(propose(number), budget)
        head = ledger.head
        for number, attempt in ((3, 0), (2, 1)):  # a repeated attempt costs as much as a round
            with pytest.raises(
                BudgetExceededError, match=r"ε = 4\.0 at δ = 1e-05.*budget of ε = 3\.0"
            ):
                ledger.charge(propose(number, attempt=attempt), budget)
            assert ledger.head == head
            assert ledger.next_attempt("r", number) == attempt
        ledger.verify()

    def test_a_refusal_leaves_room_for_what_still_fits(self, ledger):
        budget = PrivacyBudget(1.1, 1e-5, price)
        ledger.charge(propose(0), budget)
        with pytest.raises(BudgetExceededError):
            ledger.charge(propose(1), budget)
        ledger.charge(propose(1, CHEAP), budget)
        assert [row.event for row in ledger.charges()] == [DEAR, CHEAP]

    def test_counts_what_others_charged_without_it(self, ledger, tmp_path):
        budget = PrivacyBudget(2.0, 1e-5, price)
        ledger.charge(propose(0), budget)
        with Ledger.open(tmp_path / "ledger") as other:
            other.charge(propose(1))
        with pytest.raises(BudgetExceededError):
            ledger.charge(propose(2), budget)

    def test_a_price_that_is_not_a_number_refuses(self, ledger):
        with pytest.raises(BudgetExceededError, match="ε = nan"):
            ledger.charge(propose(0), PrivacyBudget(math.inf, 1e-5, lambda *_: math.nan))
        assert ledger.head.count == 0

    def test_an_event_without_an_analysis_is_not_charged(self, ledger):
        def refuse(events, delta):
            raise UnsupportedEventError("no analysis")

        with pytest.raises(UnsupportedEventError):
            ledger.charge(propose(0), PrivacyBudget(1.0, 1e-5, refuse))
        assert ledger.head.count == 0
        ledger.charge(propose(0))
        ledger.verify()

    def test_the_price_may_ask_the_ledger(self, ledger):
        ledger.charge(propose(0))
        budget = PrivacyBudget(9.0, 1e-5, lambda _, delta: price(ledger.spent(), delta))
        ledger.charge(propose(1), budget)
        assert ledger.head.count == 2


@dataclass(frozen=True, eq=False)
class Recorded:
    """`price`, with the number of rounds of each question."""

    asked: list[int] = field(default_factory=list)

    def __call__(self, events, delta):
        self.asked.append(sum(event.count for event in events))
        return price(events, delta)


KINDS = [CHEAP, DEAR, poisson_gaussian(0.1, 2.0), poisson_gaussian(0.2, 2.0)]
BUDGETS = [PrivacyBudget(limit, 1e-5, price) for limit in (2.0, 3.0, math.inf)]
QUESTIONS = st.tuples(
    st.integers(0, 1), st.booleans(), st.sampled_from(KINDS), st.sampled_from(BUDGETS)
)


class TestPrices:
    """The last price is kept, and every answer is as if each question was priced."""

    @settings(max_examples=100, deadline=None)
    @given(st.lists(QUESTIONS, max_size=25))
    def test_two_writers_are_answered_as_the_price_says(self, questions):
        held = []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger"
            with Ledger.open_or_create(path, "users") as one, Ledger.open(path) as other:
                for number, (writer, charges, event, budget) in enumerate(questions):
                    ledger = (one, other)[writer]
                    affordable = budget.admits([*held, event])
                    if not charges:
                        assert admits(ledger, event, budget) == affordable
                    elif affordable:
                        ledger.charge(propose(number, event), budget)
                        held.append(event)
                    else:
                        with pytest.raises(BudgetExceededError, match="would make"):
                            ledger.charge(propose(number, event), budget)
                assert [row.event for row in one.charges()] == held
                for ledger in (one, other):
                    assert ledger.spent() == list(merge_equal(held))

    def test_rounds_of_one_cost_are_priced_as_one_event(self, ledger):
        """Norms that adapt make every event another one; the price sees how often each cost."""
        counts, exact = [], ACCOUNTANTS["tight"].upper_epsilon
        budget = PrivacyBudget(8.0, 1e-5, lambda *asked: counts.append(asked[0]) or exact(*asked))
        for number in range(12):
            split = (2.0 * 1.25**number, 3.0 * 1.25**number)
            queries = [SumQueryEvent(str(norm), norm, norm * (4.0 + number % 2)) for norm in split]
            ledger.charge(propose(number, replace(DEAR, queries=tuple(queries))), budget)
        charged = [row.event for row in ledger.charges()]
        assert len(set(charged)) == 12
        spent = ledger.spent()
        assert sum(event.count for event in spent) == 12
        assert {replace(event, count=1) for event in spent} <= set(charged)
        # S/σ, which is constant, is rounded differently in some rounds.
        assert len(spent) == len({event.cost for event in charged}) < 8
        assert max(map(len, counts)) == len(spent)
        assert ledger.epsilon(budget) == exact(charged, 1e-5)

    def test_the_noise_and_the_sampling_are_in_the_cost(self, ledger):
        relation = NeighbouringRelation.ADD_OR_REMOVE_ONE
        everybody = every_user_gaussian(1.0, relation)
        events = [DEAR, CHEAP, poisson_gaussian(0.2, 1.0), everybody, DEAR]
        for number, event in enumerate(events):
            ledger.charge(propose(number, event))
        assert ledger.spent() == [replace(DEAR, count=2), *events[1:4]]

    def test_every_field_but_the_split_of_noise_is_in_the_cost(self):
        for name in {f.name for f in fields(DEAR)} - {"queries", "count"}:
            other = copy(DEAR)
            object.__setattr__(other, name, "another value")
            assert other.cost != DEAR.cost, name

    @pytest.mark.parametrize("charged", [[], [DEAR], [CHEAP]], ids=["nothing", "it", "another"])
    def test_a_repeated_event_is_priced_with_its_repetitions(self, ledger, charged):
        budget = PrivacyBudget(9.0, 1e-5, price)
        for number, event in enumerate(charged):
            ledger.charge(propose(number, event))
        planned = replace(DEAR, count=5)
        assert ledger.epsilon(budget, planned) == price([*charged, planned], 1e-5)

    def test_a_round_is_priced_once(self, ledger):
        """When it is about to start, when it is charged, and when what was spent is reported."""
        recorded = Recorded()
        budget = PrivacyBudget(3.0, 1e-5, recorded)
        for number in range(3):
            assert admits(ledger, DEAR, budget)
            ledger.charge(propose(number), budget)
            assert ledger.epsilon(budget) == number + 1
        assert recorded.asked == [1, 2, 3]
        assert not admits(ledger, DEAR, budget)
        with pytest.raises(BudgetExceededError):
            ledger.charge(propose(3), budget)
        assert recorded.asked == [1, 2, 3, 4]

    def test_another_process_is_counted_between_asking_and_charging(self, ledger, tmp_path):
        budget = PrivacyBudget(3.0, 1e-5, price)
        assert admits(ledger, DEAR, budget)
        with Ledger.open(tmp_path / "ledger") as other:
            for number in range(3):
                other.charge(propose(number), budget)
        with pytest.raises(BudgetExceededError, match=r"ε = 4\.0"):
            ledger.charge(propose(3), budget)
        assert ledger.epsilon(budget) == 3.0

    @pytest.fixture
    def budget(self, ledger):
        """One in which three more cheap rounds fit."""
        budget = PrivacyBudget(0.49, 1e-5, price)
        for number in range(4):
            ledger.charge(propose(number, CHEAP), budget)
        return budget

    @pytest.mark.parametrize("own", [True, False], ids=["this ledger", "another process"])
    def test_are_asked_again_once_a_dearer_round_was_charged(self, ledger, budget, tmp_path, own):
        with Ledger.open(tmp_path / "ledger") as other:
            assert admits(ledger, CHEAP, budget)
            (ledger if own else other).charge(propose(4, poisson_gaussian(0.1, 2.0)))
        assert not admits(ledger, CHEAP, budget)

    @pytest.mark.parametrize("dearer", [poisson_gaussian(0.1, 2.0), poisson_gaussian(0.2, 2.0)])
    def test_are_of_one_event(self, ledger, budget, dearer):
        assert admits(ledger, CHEAP, budget)
        assert not admits(ledger, dearer, budget)

    def test_are_of_one_budget(self, ledger):
        assert admits(ledger, DEAR, PrivacyBudget(1.0, 1e-5, price))
        assert not admits(ledger, DEAR, PrivacyBudget(0.5, 1e-5, price))

    def test_relations_that_do_not_add_up_are_refused(self, ledger):
        budget = PrivacyBudget(9.0, 1e-6, ACCOUNTANTS["tight"].upper_epsilon)
        ledger.charge(propose(0, CHEAP), budget)
        with pytest.raises(UnsupportedEventError, match="cannot be added up"):
            admits(ledger, every_user_gaussian(9.0, NeighbouringRelation.REPLACE_ONE), budget)


RACER = """
import sys
from pathlib import Path
from fedpriv.ledger.events import PrivacyBudget
from fedpriv.ledger.events import Randomness
from fedpriv.accounting.policies import poisson_gaussian
from fedpriv.ledger.ledger import Ledger, ProposedCharge
from fedpriv.errors import BudgetExceededError

budget = PrivacyBudget(60.0, 1e-5, lambda events, delta: float(sum(e.count for e in events)))
event = poisson_gaussian(0.1, 1.0)
with Ledger.open(Path(sys.argv[1])) as ledger:
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(61):
        proposal = ProposedCharge(sys.argv[2], number, 0, Randomness.SEEDED, event, "00" * 32)
        try:
            ledger.charge(proposal, budget)
        except BudgetExceededError:
            print(number)
            break
"""


def test_processes_that_race_spend_the_budget_exactly(ledger, tmp_path):
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, tmp_path / "ledger", f"racer {number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for racer in racers:
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    charged = [int(racer.communicate(timeout=60)[0]) for racer in racers]
    assert sum(charged) == 60
    assert ledger.head.count == 60
    ledger.verify()
