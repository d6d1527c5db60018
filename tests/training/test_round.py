"""Opening and closing a round by hand."""

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import product
from typing import ClassVar

import numpy as np
import pytest
from federation import CONSTANT, LAYOUT, PARAMETERS, make_plan, open_books

from fedpriv.errors import InvalidValueError, LedgerError
from fedpriv.ledger.events import Randomness
from fedpriv.ledger.ledger import Charge, ProposedCharge
from fedpriv.privacy.layout import equal_split, flat, layers, per_layer
from fedpriv.privacy.noise import Entropy, OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.query import Averaging
from fedpriv.privacy.round import CohortSum, PartialSum
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.optimizers import FedAvg
from fedpriv.training.plan import TrainingPlan
from fedpriv.training.rounds import close_round, initial_state, open_round, sum_round

SEEDED = SeededEntropy(3)


def charge_for(
    plan: TrainingPlan, books: object, round_number: int = 0, attempt: int = 0
) -> Charge:
    proposed = ProposedCharge(
        plan.run, round_number, attempt, Randomness.SEEDED, plan.mechanism.event, "0" * 64
    )
    return books.ledger.charge(proposed)


def test_without_noise_the_average_is_over_the_fixed_denominator(tmp_path) -> None:
    plan = make_plan(noise_multiplier=0.0, groups=flat(LAYOUT, 100.0), optimizer=FedAvg(1.0))
    state = initial_state(plan, PARAMETERS)
    request = open_round(plan, state, 0, SEEDED)
    total = sum_round(request, CONSTANT.collect(request))
    with open_books(tmp_path) as books:
        after = close_round(plan, state, total, charge_for(plan, books), SEEDED).state
    # 20 enrolled users, q = 0.5: the denominator is 10, whoever came. Steps are 2^-18.
    sent = [Fraction(float(np.float32(user / 100.0))) for user in request.users.tolist()]
    steps = sum(math.floor(value * 2**18) for value in sent)
    np.testing.assert_array_equal(after.parameters["b"], np.float32(steps / 2**18 / 10.0))
    assert 0 <= sum(sent) - Fraction(steps, 2**18) < Fraction(len(sent), 2**18)
    np.testing.assert_array_equal(after.parameters["w"], PARAMETERS["w"])
    assert after.round == 1


def test_cohort_noise_and_local_keys_are_separate_and_fresh_per_attempt() -> None:
    plan = make_plan(sampling=PoissonSampling(1000, 0.5))
    state = initial_state(plan, PARAMETERS)
    first, again, second = (open_round(plan, state, a, SEEDED) for a in (0, 0, 1))
    np.testing.assert_array_equal(first.users, again.users)
    assert first.local_key == again.local_key
    assert first.local_key != second.local_key
    assert not np.array_equal(first.users, second.users)
    later = open_round(plan, initial_state(plan, PARAMETERS), 0, OperatingSystemEntropy())
    assert not np.array_equal(first.users, later.users)


@dataclass(frozen=True)
class Asked(Entropy):
    """Remembers what it was asked for keys for."""

    randomness: ClassVar[Randomness] = Randomness.SEEDED

    purposes: list[str] = field(default_factory=list)

    def key(self, purpose: str) -> bytes:
        self.purposes.append(purpose)
        return SEEDED.key(purpose)


def test_no_key_is_for_two_draws(tmp_path) -> None:
    """In no run, round or attempt: what a seed gives for one purpose is always the same."""
    parts = layers(LAYOUT)
    groups = per_layer(LAYOUT, parts, equal_split(parts, 1.0))
    zero = CohortSum(np.zeros(LAYOUT.dimension, np.int64), 0)
    asked = Asked()
    with open_books(tmp_path) as books:
        for run, number, attempt in product(("run", "other"), (0, 1), (0, 1)):
            plan = make_plan(run=run, groups=groups, noise_shares=(0.5, 0.5))
            state = replace(initial_state(plan, PARAMETERS), round=number)
            open_round(plan, state, attempt, asked)
            close_round(plan, state, zero, charge_for(plan, books, number, attempt), asked)
    streams = Counter(purpose.partition("/")[0] for purpose in asked.purposes)
    assert streams == {"sampling": 8, "local": 8, "noise": 16}
    assert len(set(asked.purposes)) == len(asked.purposes)


def test_no_more_users_count_than_were_drawn() -> None:
    plan = make_plan(sampling=PoissonSampling(2, 1.0))
    request = open_round(plan, initial_state(plan, PARAMETERS), 0, SEEDED)
    ones = np.ones(LAYOUT.dimension, np.int64)
    for users in (2, 3):
        added = sum_round(request, [PartialSum("node", users, ones, users)])
        np.testing.assert_array_equal(added.total, ones * (users == 2))


def test_a_round_is_charged_in_the_steps_in_which_its_users_are_asked_to_answer() -> None:
    for averaging, cap in ((Averaging(), 1), (Averaging(4, 10.0), 4), (Averaging(floor=0.5), 1)):
        plan = make_plan(averaging=averaging)
        request = open_round(plan, initial_state(plan, PARAMETERS), 0, SEEDED)
        (group,), (query,) = request.clipping.groups, plan.mechanism.event.queries
        assert query.granularity == group.granularity == 2.0**-24
        assert request.clipping.weight_cap == cap
        assert request.clipping.weighted == (() if averaging == Averaging() else ("update",))


def test_a_charge_is_good_for_one_release(tmp_path) -> None:
    plan = make_plan()
    state = initial_state(plan, PARAMETERS)
    zero = CohortSum(np.zeros(LAYOUT.dimension, np.int64), 0)
    with open_books(tmp_path) as books:
        charge = charge_for(plan, books)
        close_round(plan, state, zero, charge, SEEDED)
        with pytest.raises(LedgerError, match="two releases on one charge"):
            close_round(plan, state, zero, charge, SEEDED)


def test_a_charge_of_something_else_releases_nothing(tmp_path) -> None:
    plan = make_plan()
    state = initial_state(plan, PARAMETERS)
    zero = CohortSum(np.zeros(LAYOUT.dimension, np.int64), 0)
    with open_books(tmp_path) as books:
        weaker = charge_for(make_plan(noise_multiplier=2.0), books)
        with pytest.raises(LedgerError, match="event charged"):
            close_round(plan, state, zero, weaker, SEEDED)
        other_round = charge_for(plan, books, round_number=1)
        with pytest.raises(LedgerError, match="round 1 of run 'run'"):
            close_round(plan, state, zero, other_round, SEEDED)
        other_run = charge_for(make_plan(run="other"), books)
        with pytest.raises(LedgerError, match="run 'other'"):
            close_round(plan, state, zero, other_run, SEEDED)


def test_the_digest_changes_with_every_field() -> None:
    plan = make_plan()
    others = [
        make_plan(run="other"),
        make_plan(population="others"),
        make_plan(rounds=6),
        make_plan(groups=flat(LAYOUT, 1.1)),
        make_plan(noise_multiplier=1.1),
        make_plan(sampling=PoissonSampling(20, 0.4)),
        make_plan(sampling=PoissonSampling(21, 0.5)),
        make_plan(optimizer=FedAvg(0.5)),
        make_plan(description="another model"),
        make_plan(averaging=Averaging(floor=0.5)),
        make_plan(averaging=Averaging(4, 10.0)),
        make_plan(averaging=Averaging(5, 10.0)),
    ]
    assert len({plan.digest, *(other.digest for other in others)}) == len(others) + 1
    assert make_plan().digest == plan.digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds is 0"),
        ({"run": ""}, "run is ''"),
        ({"run": "a/b"}, "run is 'a/b'"),
        ({"noise_multiplier": -1.0}, "noise_multiplier is -1.0"),
        ({"noise_shares": (0.5,)}, "noise shares"),
        ({"noise_multiplier": 1e5}, r"noise_stddev of group 'update' .* at most 2\^15 times"),
        ({"sampling": PoissonSampling(2**37 + 1, 0.5)}, "could overflow"),
    ],
)
def test_bad_plans_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make_plan(**changes)
