"""A server that tampers with its ledger is caught by a node, and an honest one never is.

Servers here are real ledgers; what a node gets is their export.
"""

import asyncio
import io
import math
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedpriv.accounting.accountants import epsilon
from fedpriv.accounting.policies import (
    banded_poisson_gaussian,
    every_user_gaussian,
    fixed_size_gaussian,
    poisson_examples_gaussian,
    poisson_gaussian,
    poisson_replace_gaussian,
    random_allocation_gaussian,
    separated_gaussian,
)
from fedpriv.clients import ledger_check
from fedpriv.clients.connection import Backoff
from fedpriv.clients.journal import Journal, TakenPart
from fedpriv.clients.ledger_check import (
    Examined,
    charged_already,
    drawn_too_often,
    price_with,
    tail,
    unpaid,
)
from fedpriv.errors import InvalidValueError, UntrustedLedgerError
from fedpriv.ledger.events import (
    NeighbouringRelation,
    Randomness,
    RoundEvent,
    Schedule,
    SumQueryEvent,
    Unit,
)
from fedpriv.ledger.ledger import ExportedLedger, Ledger, ProposedCharge, paid_events
from fedpriv.wire import Price, RoundId, TaskDescription, Welcome
from tests.wire.examples import small_offer

DELTA = 1e-5
N = 1000
EVENT = poisson_gaussian(0.1, 2.0, population=N)
ADD_OR_REMOVE = NeighbouringRelation.ADD_OR_REMOVE_ONE
NOW = datetime(2026, 3, 1, tzinfo=UTC)
OFFER = small_offer()
WELCOME = Welcome("people", N, np.array([1, 300]), TaskDescription("m", {}, 0, "cross-entropy"))


def charge(
    ledger,
    run="r",
    number=0,
    attempt=0,
    event=EVENT,
    part=0,
    series=None,
    randomness=Randomness.OPERATING_SYSTEM,
):
    named = run, number, attempt, randomness, event, "0" * 64, part, series
    ledger.charge(ProposedCharge(*named))


def read(ledger) -> ExportedLedger:
    stream = io.StringIO()
    ledger.export(stream)
    return ExportedLedger.read(stream.getvalue().splitlines())


def offer(run="r", number=0, attempt=0, event=EVENT, said=math.inf, delta=DELTA, part=0):
    price = Price(event, part, said, delta, 0)
    return replace(OFFER, id=RoundId(run, number, attempt), price=price)


def examine(ledger, welcome, journal, delta) -> Examined:
    """As a node does that knew what it knows now when it asked."""
    found = ledger_check.examine(
        ledger, welcome, journal.remembered(welcome.population_name), delta
    )
    journal.remember_head(ledger.ledger_id, welcome.population_name, ledger.head)
    return found


def confirm(examined, journal, offered=None, counted=None) -> None:
    """An offer that counts so many charges; None: all, as no other was made since."""
    if offered is not None:
        counted = len(examined.ledger.rows) if counted is None else counted
        offered = replace(offered, price=replace(offered.price, charges=counted))
    ledger_check.confirm(examined, journal.remembered(examined.ledger.population), offered)


@dataclass(frozen=True)
class Pair:
    """A server's ledger and a node's journal."""

    ledger: Ledger
    journal: Journal

    def examined(self) -> Examined:
        return examine(read(self.ledger), WELCOME, self.journal, DELTA)

    def take_part(self, *args, **fields) -> None:
        self.journal.record("people", offer(*args, **fields), NOW)

    def confirmed(self, offered=None, counted=None) -> None:
        confirm(self.examined(), self.journal, offered, counted)


@pytest.fixture
def both(tmp_path):
    with (
        Ledger.open_or_create(tmp_path / "ledger", "people") as ledger,
        Journal(tmp_path / "journal") as journal,
    ):
        yield Pair(ledger, journal)


class TestExamining:
    def test_says_what_the_charges_cost_and_remembers_the_head(self, both):
        for number in range(3):
            charge(both.ledger, number=number)
            found = both.examined()
            assert found.epsilon == epsilon([EVENT] * (number + 1), DELTA).epsilon
            assert (len(found.ledger.rows), found.ledger.head) == (number + 1, both.ledger.head)
            assert both.journal.remembered("people").head == both.ledger.head
        assert both.journal.remembered("people").ledger_id == both.ledger.ledger_id

    def test_a_charge_whose_noise_comes_of_a_seed_has_no_epsilon(self, both):
        charge(both.ledger, "simulated", randomness=Randomness.SEEDED)
        charge(both.ledger)
        found = both.examined()
        both.confirmed(offer(number=1))  # the server has hidden nothing
        assert (found.epsilon, price_with(found, offer(number=1))) == (math.inf, math.inf)

    def test_a_ledger_without_charges_costs_nothing(self, both):
        assert (both.examined().epsilon, both.examined().ledger.rows) == (0.0, ())

    def test_a_ledger_of_another_population_is_refused(self, both, tmp_path):
        with Ledger.open_or_create(tmp_path / "other", "others") as ledger:
            other = read(ledger)
        with pytest.raises(UntrustedLedgerError, match="not of population 'people'"):
            examine(other, WELCOME, both.journal, DELTA)
        assert both.journal.remembered("others").ledger_id is None

    def test_a_ledger_in_place_of_another_is_refused(self, both, tmp_path):
        charge(both.ledger)
        both.examined()
        with Ledger.open_or_create(tmp_path / "other", "people") as ledger:
            other = read(ledger)
        with pytest.raises(
            UntrustedLedgerError, match=f"and now has {other.ledger_id}: what was spent"
        ):
            examine(other, WELCOME, both.journal, DELTA)
        assert both.journal.remembered("people").ledger_id == both.ledger.ledger_id
        both.examined()

    def test_a_ledger_that_was_set_back_is_refused(self, both):
        states = [read(both.ledger)]
        for number in range(3):
            charge(both.ledger, number=number)
            states.append(read(both.ledger))
        examine(states[2], WELCOME, both.journal, DELTA)
        for older in states[:2]:
            with pytest.raises(
                UntrustedLedgerError, match="its former head of 2 charges with hash"
            ):
                examine(older, WELCOME, both.journal, DELTA)
        assert both.journal.remembered("people").head == states[2].head
        examine(states[3], WELCOME, both.journal, DELTA)

    def test_a_ledger_that_was_rewritten_is_refused(self, both):
        """All digests fit: only what the node remembers tells."""
        charge(both.ledger)
        both.examined()
        kept = read(both.ledger)
        row = replace(kept.rows[0], day="2000-01-01")
        forged = replace(kept, rows=(row,))
        with pytest.raises(UntrustedLedgerError, match="its former head of 1 charges"):
            examine(forged, WELCOME, both.journal, DELTA)

    def test_charges_without_a_common_price_are_refused_and_not_remembered(self, both):
        charge(both.ledger, number=0)
        charge(both.ledger, number=1, event=poisson_replace_gaussian(0.1, 2.0, population=N))
        with pytest.raises(UntrustedLedgerError, match="has no ε"):
            both.examined()
        assert both.journal.remembered("people").head is None

    def test_charges_for_examples_are_refused(self, both):
        sampling = replace(EVENT.sampling, unit=Unit.EXAMPLE)
        charge(both.ledger, event=replace(EVENT, sampling=sampling))
        with pytest.raises(
            UntrustedLedgerError, match="charges for each example; its ε says nothing of us"
        ):
            both.examined()
        with pytest.raises(
            UntrustedLedgerError, match="with example and with user neighbours cannot"
        ):
            price_with(Examined(read(both.ledger), DELTA, 0.0, ADD_OR_REMOVE), offer(number=1))

    def test_a_delta_that_is_none_is_refused(self, both):
        charge(both.ledger)
        with pytest.raises(InvalidValueError, match="delta"):
            examine(read(both.ledger), WELCOME, both.journal, 0.0)


class TestPricing:
    def test_is_that_of_the_charges_and_the_round(self, both):
        charge(both.ledger)
        two = RoundEvent(EVENT.sampling, (SumQueryEvent("a", 1.0, 3.0), SumQueryEvent("b", 2.0, 5)))
        charge(both.ledger, number=1, event=two)
        offered = poisson_gaussian(0.3, 1.5, population=N)
        found = price_with(both.examined(), offer(number=2, event=offered))
        assert found == epsilon([EVENT, two, offered], DELTA).epsilon
        assert found > epsilon([EVENT, two], DELTA).epsilon_low

    def test_without_noise_it_is_infinite(self, both):
        bare = poisson_gaussian(0.1, 0.0, population=N)
        assert price_with(both.examined(), offer(event=bare)) == math.inf

    def test_what_has_no_common_price_is_refused(self, both):
        charge(both.ledger, event=every_user_gaussian(2.0, NeighbouringRelation.REPLACE_ONE))
        with pytest.raises(UntrustedLedgerError, match="has no ε"):
            price_with(both.examined(), offer(number=1))


class TestConfirming:
    def test_a_round_that_goes_on_uncharged_is_named(self, both):
        charge(both.ledger, number=0)
        both.take_part("r", 1)
        both.confirmed(offer("r", 1, 1))  # still the same round: it was interrupted
        with pytest.raises(
            UntrustedLedgerError, match="round 1 of run 'r' went on without a charge"
        ):
            both.confirmed(offer("r", 2))

    def test_a_round_in_which_the_node_was_not_drawn_is_named_too(self, both):
        charge(both.ledger, number=0)
        charge(both.ledger, number=2)
        with pytest.raises(
            UntrustedLedgerError, match="round 1 of run 'r' went on without a charge"
        ):
            both.confirmed(offer("r", 3))

    def test_the_run_is_seen_to_have_gone_on_by_ledger_and_journal_alike(self, both):
        both.take_part("r", 1)
        both.confirmed()  # its last round may have been refused by the budget
        both.take_part("r", 2)
        with pytest.raises(UntrustedLedgerError, match="round 1 of run 'r' went on"):
            both.confirmed()
        charge(both.ledger, number=1)
        both.confirmed()
        charge(both.ledger, number=3)
        with pytest.raises(UntrustedLedgerError, match="round 2 of run 'r' went on"):
            both.confirmed()

    def test_runs_that_the_node_was_not_offered_are_nobodys_business(self, both):
        charge(both.ledger, "survey", 7)
        charge(both.ledger, "r", 0)
        both.take_part("r", 0)
        both.confirmed(offer("r", 1))

    def test_rounds_of_another_population_are_no_matter(self, both):
        both.journal.record("others", offer("r", 0), NOW)
        both.journal.record("others", offer("r", 5), NOW)
        both.confirmed(offer("r", 0))

    def test_a_far_round_is_no_work(self, both):
        charge(both.ledger, number=0)
        with pytest.raises(UntrustedLedgerError, match="round 1 of run 'r' went on"):
            both.confirmed(offer("r", 2**32 - 1))

    @pytest.mark.parametrize(
        "event",
        [
            poisson_gaussian(0.1, 1.99, population=N),
            poisson_gaussian(0.11, 2.0, population=N),
            poisson_gaussian(0.1, 2.01, population=N),  # ε would be less than was offered
            poisson_gaussian(0.09, 2.0, population=N),
            poisson_gaussian(0.1, 2.0, population=N + 1),
            poisson_gaussian(0.1, 0.0, population=N),
            every_user_gaussian(2.0, NeighbouringRelation.ADD_OR_REMOVE_ONE),
        ],
    )
    def test_a_charge_that_is_not_as_it_was_offered_is_named(self, both, event):
        both.take_part("r", 0)
        charge(both.ledger, event=event)
        both.confirmed(offer("r", 0, 1))
        with pytest.raises(
            UntrustedLedgerError, match=r"attempt 0 at round 0 of run 'r' was offered with"
        ):
            both.confirmed(offer("r", 1))

    def test_a_charge_of_several_groups_counts_as_a_whole(self, both):
        groups = tuple(SumQueryEvent(g, 0.1 / math.sqrt(3.0), 0.2) for g in "abc")
        both.take_part("r", 0)
        charge(both.ledger, event=RoundEvent(EVENT.sampling, groups))
        both.confirmed(offer("r", 1))

    def test_an_abandoned_attempt_is_covered_by_a_later_one(self, both):
        both.take_part("r", 0, 0)
        charge(both.ledger, attempt=2)
        both.confirmed(offer("r", 1))

    def test_an_earlier_attempt_covers_nothing(self, both):
        charge(both.ledger, attempt=0)
        both.take_part("r", 0, 1)
        with pytest.raises(
            UntrustedLedgerError, match="attempt 1 at round 0 of run 'r' was offered"
        ):
            both.confirmed(offer("r", 1))
        charge(both.ledger, attempt=1)
        both.confirmed(offer("r", 1))


class TestWhatTheServerSays:
    def test_the_truth_and_more_are_believed(self, both):
        charge(both.ledger)
        truth = epsilon([EVENT] * 2, 1e-6).epsilon
        for said in (truth, truth * (1 - 5e-7), truth * 2, math.inf):
            both.confirmed(offer(number=1, said=said, delta=1e-6))
        by_rdp = epsilon([EVENT] * 2, 1e-6, "rdp").epsilon
        both.confirmed(offer(number=1, said=by_rdp, delta=1e-6))

    def test_less_is_not(self, both):
        charge(both.ledger)
        truth = epsilon([EVENT] * 2, 1e-6).epsilon
        for said in (0.0, truth * 0.5, truth * (1 - 3e-6), epsilon([EVENT], 1e-6).epsilon):
            with pytest.raises(
                UntrustedLedgerError, match=f"the server says ε = {said} at δ = 1e-06, but"
            ):
                both.confirmed(offer(number=1, said=said, delta=1e-6))

    def test_without_noise_or_delta_only_infinity_is(self, both):
        bare = poisson_gaussian(0.1, 0.0, population=N)
        for event, delta in ((bare, 1e-6), (EVENT, 0.0)):
            both.confirmed(offer(event=event, said=math.inf, delta=delta))
            with pytest.raises(
                UntrustedLedgerError, match="but charges and offer cost at least inf"
            ):
                both.confirmed(offer(event=event, said=1e9, delta=delta))

    def test_charges_since_the_offer_do_not_make_it_a_lie(self, both):
        charge(both.ledger, number=0)
        said = epsilon([EVENT] * 2, DELTA).epsilon
        charge(both.ledger, number=1)
        charge(both.ledger, number=2)
        both.confirmed(offer(number=1, said=said), counted=1)

    def test_charges_of_another_run_since_the_offer_do_not_make_it_a_lie(self, both):
        charge(both.ledger, "r", 0)
        charge(both.ledger, "other", 0)
        said = epsilon([EVENT] * 3, DELTA).epsilon
        charge(both.ledger, "other", 1)
        both.confirmed(offer("r", 1, said=said), counted=2)
        # The node decides by what all of them cost.
        assert price_with(both.examined(), offer("r", 1)) == epsilon([EVENT] * 4, DELTA).epsilon

    def test_but_those_of_its_own_run_before_it_must_be_counted(self, both):
        charge(both.ledger, "r", 0)
        charge(both.ledger, "other", 0)
        charge(both.ledger, "r", 1)
        charge(both.ledger, "other", 1)
        for counted, left_out in ((0, 1), (1, 3), (2, 3)):
            with pytest.raises(UntrustedLedgerError, match=f"leaves out charge {left_out} "):
                both.confirmed(offer("r", 2), counted)
        said = epsilon([EVENT] * 4, DELTA).epsilon
        both.confirmed(offer("r", 2, said=said), 3)
        for low in (said * 0.99, epsilon([EVENT] * 3, DELTA).epsilon):
            with pytest.raises(UntrustedLedgerError, match="but charges and offer cost"):
                both.confirmed(offer("r", 2, said=low), 3)
        # A ledger that was fetched after an offer has all charges that the offer counts.
        with pytest.raises(
            UntrustedLedgerError, match="the offer counts 5 charges; the ledger has 4"
        ):
            both.confirmed(offer("r", 2), 5)

    def test_what_another_process_of_the_node_learned_meanwhile_is_no_reproach(self, both):
        """Two runs of one ledger, and one journal: what is checked was asked for before."""
        charge(both.ledger, "r", 0)
        known, fetched = both.journal.remembered("people"), read(both.ledger)
        charge(both.ledger, "other", 0)
        charge(both.ledger, "other", 1)
        both.examined()
        both.take_part("other", 2)
        found = ledger_check.examine(fetched, WELCOME, known, DELTA)
        ledger_check.confirm(found, known, None)
        with pytest.raises(UntrustedLedgerError, match="set back"):
            examine(fetched, WELCOME, both.journal, DELTA)

    def test_an_offer_after_its_charge_is_told(self, both):
        charge(both.ledger, number=0)
        charge(both.ledger, number=1, attempt=3)
        found = both.examined()
        for attempt in range(4):
            assert charged_already(found, offer("r", 1, attempt)) == (
                f"attempt {attempt} at round 1 of run 'r', or one after it, is charged already"
            )
        for other in (offer("r", 1, 4), offer("r", 2), offer("s", 0), offer("r", 0, 1)):
            assert charged_already(found, other) is None


PASS = random_allocation_gaussian(3, 1, 2.0, population=N)


@dataclass(frozen=True)
class Passes:
    """An honest server of a run of passes of three rounds, and a node that audits it."""

    both: Pair

    def next_offer(self, number, attempt=0, event=PASS):
        """What the server offers: all charges are counted in ε, and a round paid for costs none."""
        ledger = self.both.ledger
        found = ledger.open_series("r")
        part = 0 if found is None else found.part
        paid = [*paid_events(ledger.charges()), *([] if part else [event])]
        return offer("r", number, attempt, event, epsilon(paid, DELTA).epsilon, part=part)

    def charged(self, number, attempt=0):
        found = self.both.ledger.open_series("r")
        part, series = (0, None) if found is None else (found.part, found.charge.position)
        charge(self.both.ledger, "r", number, attempt, PASS, part, series)

    def played(self, number, attempt=0):
        """A round that the node believes, takes part in and sees charged."""
        offered = self.next_offer(number, attempt)
        self.both.confirmed(offered)
        found = self.both.examined()
        assert charged_already(found, offered) is None
        assert price_with(found, offered) == offered.price.epsilon_after
        self.both.journal.record("people", offered, NOW)
        self.charged(number, attempt)
        assert charged_already(self.both.examined(), offered) is not None


class TestSeries:
    def test_an_honest_run_is_believed_in_all_rounds_and_each_pass_costs_once(self, both):
        passes = Passes(both)
        for number in range(1, 8):
            passes.played(number)
            cost = epsilon([PASS] * -(-number // 3), DELTA).epsilon
            assert both.examined().epsilon == cost
        both.confirmed(passes.next_offer(8))

    def test_a_server_that_was_interrupted_goes_on_with_what_it_has_paid_for(self, both):
        passes = Passes(both)
        passes.played(1)
        abandoned = passes.next_offer(2)
        both.confirmed(abandoned)
        both.journal.record("people", abandoned, NOW)
        passes.played(2, 1)  # charged, and not released
        passes.played(2, 2)
        passes.played(3)  # the next pass
        assert [row.part for row in both.ledger.charges()] == [0, 1, 2, 0]
        both.confirmed(passes.next_offer(4))

    def test_a_node_that_is_started_again_believes_it(self, both, tmp_path):
        passes = Passes(both)
        for number in (1, 2):
            passes.played(number)
        for number in (3, 4, 5):
            with Journal(tmp_path / "journal") as journal:
                Passes(replace(both, journal=journal)).played(number)

    def test_other_runs_in_between_change_nothing(self, both):
        passes = Passes(both)
        passes.played(1)
        charge(both.ledger, "other", 1)
        charge(both.ledger, "third", 1, event=PASS)
        passes.played(2)
        charge(both.ledger, "third", 2, event=PASS, part=1, series=3)
        passes.played(3)
        assert both.examined().epsilon == epsilon([PASS, PASS, EVENT], DELTA).epsilon

    @pytest.mark.parametrize(
        ("rounds", "part", "event"),
        [
            (0, 1, PASS),  # nothing is paid
            (0, 2, PASS),
            (1, 2, PASS),  # not the next
            (2, 1, PASS),  # was used
            (3, 1, PASS),  # all were used
            (3, 2, PASS),
            (1, 1, random_allocation_gaussian(3, 1, 1.9, population=N)),  # another was paid for
            (1, 1, random_allocation_gaussian(3, 2, 2.0, population=N)),
            (1, 1, random_allocation_gaussian(4, 1, 2.0, population=N)),
            (1, 1, random_allocation_gaussian(3, 1, 2.0, population=N - 1)),
        ],
    )
    def test_a_part_that_was_not_paid_for_is_not_free(self, both, rounds, part, event):
        passes = Passes(both)
        for number in range(1, rounds + 1):
            passes.played(number)
        lie = offer("r", rounds + 1, 0, event, part=part)
        said = f"round {rounds + 1} of run 'r' is offered as part {part} of an event that was ch"
        with pytest.raises(UntrustedLedgerError, match=said):
            both.confirmed(lie)
        both.confirmed(offer("r", rounds + 1, 0, event))  # whoever pays may do so

    def test_what_another_run_paid_for_is_not_free(self, both):
        charge(both.ledger, "other", 1, event=PASS)
        with pytest.raises(UntrustedLedgerError, match="no such part is left in the ledger"):
            both.confirmed(offer("r", 1, 0, PASS, part=1))
        both.confirmed(offer("other", 2, 0, PASS, part=1))

    def test_a_charge_that_the_offer_does_not_count_pays_for_nothing(self, both):
        Passes(both).played(1)
        with pytest.raises(UntrustedLedgerError, match="the offer counts 0 charges and leaves out"):
            both.confirmed(offer("r", 2, 0, PASS, part=1), counted=0)

    def test_an_epsilon_that_is_understated_is_caught_in_every_part(self, both):
        passes = Passes(both)
        for number in range(1, 5):
            truth = passes.next_offer(number)
            loss = epsilon([PASS] * -(-number // 3), DELTA)
            assert loss.epsilon_low > 0.9 * loss.epsilon
            for said in (0.0, 0.5 * loss.epsilon_low, loss.epsilon_low * (1 - 3e-6)):
                lie = replace(truth, price=replace(truth.price, epsilon_after=said))
                with pytest.raises(
                    UntrustedLedgerError, match="but charges and offer cost at least"
                ):
                    both.confirmed(lie)
            passes.played(number)

    def test_what_was_offered_as_a_new_event_must_be_paid(self, both):
        passes = Passes(both)
        passes.played(1)
        both.take_part("r", 2, 0, PASS)
        passes.charged(2)
        with pytest.raises(UntrustedLedgerError, match="as part 0 of its event"):
            both.confirmed(passes.next_offer(3))

    def test_what_was_offered_as_a_part_must_be_charged_as_that_part(self, both):
        passes = Passes(both)
        passes.played(1)
        both.journal.record("people", passes.next_offer(2), NOW)
        charge(both.ledger, "r", 2, event=PASS)
        with pytest.raises(UntrustedLedgerError, match="as part 1 of its event"):
            both.confirmed(passes.next_offer(3))

    def test_an_attempt_after_an_abandoned_part_may_be_paid_anew(self, both):
        """As by a server whose files were restored, which forgets the series that was under way."""
        passes = Passes(both)
        passes.played(1)
        both.journal.record("people", passes.next_offer(2), NOW)
        both.confirmed(offer("r", 2, 1, PASS))
        charge(both.ledger, "r", 2, 1, PASS)
        passes.played(3)
        both.confirmed(passes.next_offer(4))


def outstanding(both) -> list[tuple[int, int]]:
    rows, taken_part = read(both.ledger).rows, both.journal.remembered("people").taken_part
    return sorted((part.round, part.attempt) for part in unpaid(rows, taken_part))


class TestOutstanding:
    def test_a_charge_pays_for_one_sum_and_its_own_attempt_comes_first(self, both):
        for attempt in range(4):
            both.take_part("r", 0, attempt)
        assert outstanding(both) == [(0, 0), (0, 1), (0, 2), (0, 3)]
        charge(both.ledger, attempt=2)
        assert outstanding(both) == [(0, 0), (0, 1), (0, 3)]
        charge(both.ledger, attempt=5)
        assert outstanding(both) == [(0, 0), (0, 1)]

    @pytest.mark.parametrize(
        "charged",
        [
            {"run": "s"},
            {"number": 1},
            {"attempt": 0},
            {"event": poisson_gaussian(0.09, 2.0, population=N)},
            {"event": poisson_gaussian(0.1, 2.1, population=N)},
        ],
    )
    def test_a_charge_of_anything_else_pays_for_nothing(self, both, charged):
        both.take_part("r", 0, 1)
        charge(both.ledger, **{"attempt": 1} | charged)
        assert outstanding(both) == [(0, 1)]

    @settings(max_examples=50, deadline=None)
    @given(st.sets(st.integers(0, 6)), st.sets(st.integers(0, 6)))
    def test_as_many_are_paid_as_can_be(self, sums, charges):
        rows = [Row("r", 0, number, EVENT, 0) for number in charges]
        parts = [TakenPart("r", 0, number, EVENT, 0, 1) for number in sums]
        most = max(
            sum(row >= part for row, part in zip(order, sorted(sums), strict=False))
            for order in permutations([*sorted(charges), *[-1] * (7 - len(charges))], len(sums))
        )
        assert len(unpaid(rows, parts)) == len(sums) - most

    def test_what_is_charged_is_settled_when_the_ledger_is_read(self, both):
        for number in range(3):
            both.take_part("r", number)
            charge(both.ledger, number=number)
        both.take_part("r", 3)

        @dataclass(frozen=True)
        class Stub:
            async def fetch_ledger(self, _):
                stream = io.StringIO()
                both.ledger.export(stream)
                return iter(stream.getvalue().splitlines())

        verifier = ledger_check.LedgerVerifier(Stub(), both.journal, Backoff())
        asyncio.run(verifier.examined(WELCOME, DELTA))
        assert both.journal.outstanding("people") == 1


@dataclass(frozen=True)
class Row:
    """What is read of a charge."""

    run: str
    round: int
    attempt: int
    event: RoundEvent
    part: int
    pays: bool = True


def played(events, asked, parts=None):
    """Charges of successive rounds, and what the node was asked in those that it answered."""
    parts = [0] * len(events) if parts is None else parts
    rows = [
        Row("r", n, 0, event, part)
        for n, (event, part) in enumerate(zip(events, parts, strict=True))
    ]
    return rows, [TakenPart("r", n, 0, events[n], parts[n], users) for n, users in asked.items()]


def often(q, z=1.0):
    return poisson_gaussian(q, z, population=N)


class TestDraws:
    @pytest.mark.parametrize("q", [1e-9, 0.01, 0.3, 0.999, 1.0])
    @pytest.mark.parametrize("rounds", [1, 7, 100])
    def test_the_line_is_where_the_binomial_says(self, q, rounds):
        users = 3
        for asked in range(users * rounds + 1):
            rows, taken = played([often(q)] * rounds, {0: asked})
            slow = stats.binom.sf(asked - 1, users * rounds, q)
            assert drawn_too_often(rows, taken, users) == (slow < 1e-9)

    def test_a_sum_without_a_charge_has_trials_of_its_own(self):
        rows, taken = played([often(1e-4)], {0: 1})
        for number, refused in ((1, False), (2, True)):
            taken.append(TakenPart("s", number, 0, often(1e-4), 0, 1))
            assert drawn_too_often(rows, taken, 1) == refused

    def test_neither_many_probabilities_nor_larger_ones_hide_a_small_one(self):
        near = [often(1e-9 * (1.0 + n * 1e-3)) for n in range(30)]
        assert drawn_too_often(*played(near, {0: 1, 1: 1}), 1)
        large = [often(0.5)] * 1000
        assert drawn_too_often(*played([*large, *near], {1000: 1, 1001: 1}), 1)
        assert not drawn_too_often(*played([*large, *near], dict.fromkeys(range(550), 1)), 1)

    @settings(max_examples=50, deadline=None)
    @given(st.lists(st.floats(0.05, 0.1), min_size=1, max_size=30))
    def test_different_probabilities_are_less_likely_than_their_mean(self, probabilities):
        law = np.ones(1)  # of the number of heads, coin by coin
        for q in probabilities:
            law = np.convolve(law, [1.0 - q, q])
        mean, n = sum(probabilities), len(probabilities)
        for k in range(math.ceil(mean + 1.0), n + 1):
            assert law[k:].sum() <= tail(k, n, mean) * (1.0 + 1e-9)

    @pytest.mark.parametrize(
        ("population", "users", "drawn"), [(20, 5, 4), (30, 12, 15), (9, 8, 8)]
    )
    def test_cohorts_of_fixed_size_are_less_likely_than_coins(self, population, users, drawn):
        law = np.ones(1)
        one = stats.hypergeom.pmf(np.arange(users + 1), population, users, drawn)
        for rounds in range(1, 8):
            law, trials = np.convolve(law, one), rounds * users
            mean = trials * drawn / population
            for k in range(math.ceil(mean + 1.0), trials + 1):
                assert law[k:].sum() <= tail(k, trials, mean) * (1.0 + 1e-9) + 1e-15

    def test_groups_that_take_turns_have_a_trial_in_each_turn(self):
        event = banded_poisson_gaussian((1.0,), 6, 3, 1e-4, 1.0, ADD_OR_REMOVE, population=N)
        parts = list(range(6))
        assert not drawn_too_often(*played([event] * 6, {1: 2}, parts), 2)
        rows, taken = played([event] * 6, {1: 1, 2: 1, 4: 1}, parts)
        slow = stats.binom.sf(2, 4, 1e-4)
        assert slow < 1e-9
        assert drawn_too_often(rows, taken, 2)

    @pytest.mark.parametrize(
        "event",
        [
            every_user_gaussian(1.0, ADD_OR_REMOVE, population=N),
            random_allocation_gaussian(100, 1, 1.0, population=N),
            separated_gaussian((1.0,), 4, 2, 2, 1.0, ADD_OR_REMOVE, population=N),
        ],
    )
    def test_what_the_journal_counts_or_has_no_coins_is_not_tested(self, event):
        assert not drawn_too_often(*played([event] * 2, {0: 5, 1: 5}), 5)

    @pytest.mark.parametrize("users", [1, 40])
    @pytest.mark.parametrize("q", [1e-3, 0.1, 0.9])
    def test_ten_thousand_honest_rounds_are_never_refused(self, users, q):
        rng, rounds = np.random.default_rng(7), np.arange(1, 10_001)
        asked = rng.binomial(users, q, rounds.size).cumsum()
        chances = [tail(int(k), int(n), n * q) for k, n in zip(asked, rounds * users, strict=True)]
        assert min(chances) > 1e-7


STRATEGY = (1.0, 0.5)
SERIES = separated_gaussian(STRATEGY, 4, 2, 2, 2.0, ADD_OR_REMOVE, population=N)


def changed(event, **fields):
    return replace(event, sampling=replace(event.sampling, **fields))


class TestKinds:
    @pytest.mark.parametrize(
        "charged",
        [
            changed(SERIES, schedule=Schedule(5, 2, 2)),
            changed(SERIES, schedule=Schedule(4, 1, 2)),
            changed(SERIES, schedule=Schedule(4, 2, 1)),
            changed(SERIES, relation=NeighbouringRelation.REPLACE_ONE),
            changed(SERIES, population=N + 1),
            replace(SERIES, strategy=(1.0,)),
            replace(SERIES, strategy=(1.0, 0.25)),
            separated_gaussian(STRATEGY, 4, 2, 2, 1.99, ADD_OR_REMOVE, population=N),
            separated_gaussian(STRATEGY, 4, 2, 2, 2.01, ADD_OR_REMOVE, population=N),
            random_allocation_gaussian(4, 1, 2.0, population=N),
            every_user_gaussian(2.0, ADD_OR_REMOVE, population=N),
        ],
    )
    def test_a_series_is_charged_as_it_was_offered_in_all_that_decides_its_price(
        self, both, charged
    ):
        both.take_part("r", 1, 0, SERIES)
        charge(both.ledger, "r", 1, event=charged)
        with pytest.raises(
            UntrustedLedgerError, match="2 groups in turn, 4 rounds at once, N = 1000"
        ):
            both.confirmed(offer("r", 2, 0, charged))

    def test_examples_of_users_are_charged_as_many_as_were_offered(self, both):
        four, one = (poisson_examples_gaussian(0.1, k, 2.0, population=N) for k in (4, 1))
        both.take_part("r", 1, 0, four)
        charge(both.ledger, "r", 1, event=one)
        with pytest.raises(
            UntrustedLedgerError, match="neither it nor one after it was charged so"
        ):
            both.confirmed(offer("r", 2, 0, four))

    def test_a_ledger_of_replaced_users_has_an_epsilon_of_its_own(self, both):
        event = fixed_size_gaussian(100, N, 2.0)
        for number in range(1, 4):
            said = epsilon([event] * number, DELTA).epsilon
            both.confirmed(offer("r", number, 0, event, said))
            both.take_part("r", number, 0, event, said)
            charge(both.ledger, "r", number, event=event)
        found = both.examined()
        assert found.relation is NeighbouringRelation.REPLACE_ONE
        assert found.epsilon == epsilon([event] * 3, DELTA).epsilon
        with pytest.raises(
            UntrustedLedgerError, match="with replace-one and with add-or-remove-one neigh"
        ):
            price_with(found, offer("r", 4))


@st.composite
def histories(draw):
    """Rounds of a run: of each the attempts, of which the last is charged and any other may be.

    An attempt that is not charged is offered again by the same number or by the next.
    """
    rounds = []
    for _ in range(draw(st.integers(1, 4))):
        attempts, number = [], 0
        for _ in range(draw(st.integers(0, 2))):
            charged = draw(st.booleans())
            attempts.append((number, charged, draw(st.booleans())))
            number += 1 if charged else draw(st.integers(0, 1))
        rounds.append([*attempts, (number, True, draw(st.booleans()))])
    return rounds


class TestHistories:
    """Of each attempt: its number, whether it was charged, and whether the node took part."""

    @settings(max_examples=20, deadline=None)
    @given(histories(), st.data())
    def test_honest_servers_are_believed_and_others_caught(self, tmp_path_factory, rounds, data):
        folder = tmp_path_factory.mktemp("history")
        missing = data.draw(st.integers(1, len(rounds)))
        with (
            Ledger.open_or_create(folder / "honest", "people") as honest,
            Ledger.open_or_create(folder / "lying", "people") as lying,
            Journal(folder / "journal") as journal,
            Journal(folder / "journal of another") as other,
        ):
            for number, attempts in enumerate(rounds, start=1):
                for attempt, charged, drawn in attempts:
                    examined = examine(read(honest), WELCOME, journal, DELTA)
                    offered = offer("r", number, attempt, said=price_with(examined, offer()))
                    confirm(examined, journal, offered)
                    assert charged_already(examined, offered) is None
                    if drawn:
                        journal.record("people", offered, NOW)
                        other.record("people", offered, NOW)
                    if charged:
                        charge(honest, "r", number, attempt)
                    if charged and number != missing:
                        charge(lying, "r", number, attempt)
            confirm(examine(read(honest), WELCOME, journal, DELTA), journal)
            confirm(
                examine(read(honest), WELCOME, journal, DELTA), journal, offer("r", len(rounds) + 1)
            )
            found = examine(read(lying), WELCOME, other, DELTA)
            with pytest.raises(
                UntrustedLedgerError, match=f"round {missing} of run 'r' went on without a"
            ):
                confirm(found, other, offer("r", len(rounds) + 1))


@pytest.mark.parametrize("q", [5e-324, 1e-9, 1.0])
@pytest.mark.parametrize("z", [0.0, 5e-324, 1e-9, 1e300])
@pytest.mark.parametrize("delta", [5e-324, 1e-300, 1.0 - 2.0**-53])
def test_extreme_prices_give_a_number(both, q, z, delta):
    charge(both.ledger)
    extreme = poisson_gaussian(q, z, population=N)
    examined = examine(read(both.ledger), WELCOME, both.journal, max(delta, 1e-60))
    offered = offer("r", 1, event=extreme, delta=delta)
    confirm(examined, both.journal, offered)
    assert price_with(examined, offered) >= examined.epsilon * (1.0 - 1e-3)
