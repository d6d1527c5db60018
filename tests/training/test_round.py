"""Opening and closing a round by hand."""

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.privacy.gaussian_mechanism import Averaging
from fedpriv.privacy.layout import flat
from fedpriv.privacy.noise import OperatingSystemEntropy, SeededEntropy
from fedpriv.privacy.sampling import PoissonSampling
from fedpriv.training.optimizers import FedAvg
from fedpriv.training.rounds import initial_state, train
from tests.opening import open_round
from tests.training.federation import CONSTANT, LAYOUT, PARAMETERS, make_plan, open_records

SEEDED = SeededEntropy(3)


def test_without_noise_the_average_is_over_the_fixed_denominator(tmp_path) -> None:
    plan = make_plan(noise_multiplier=0.0, groups=flat(LAYOUT, 100.0), optimizer=FedAvg(1.0))
    state = initial_state(plan, PARAMETERS)
    request = open_round(plan, state, 0, SEEDED)
    with open_records(tmp_path) as records:
        after, _ = next(train(plan, state, CONSTANT, records, SEEDED))
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


def test_no_key_of_local_training_is_that_of_another_draw(tmp_path) -> None:
    asked = []

    class Asked(SeededEntropy):
        def key(self, purpose: str) -> bytes:
            asked.append(purpose)
            return super().key(purpose)

    with open_records(tmp_path) as records:
        for run in ("run", "other"):
            plan = make_plan(run=run, rounds=2)
            for _ in range(2):
                list(train(plan, initial_state(plan, PARAMETERS), CONSTANT, records, Asked(3)))
    streams = Counter(purpose.partition("/")[0] for purpose in asked)
    assert streams == {"sampling": 8, "local": 8, "noise": 8}
    assert len(set(asked)) == len(asked)


def test_a_round_is_charged_in_the_steps_in_which_its_users_are_asked_to_answer() -> None:
    for averaging, cap in ((Averaging(), 1), (Averaging(4, 10.0), 4), (Averaging(floor=0.5), 1)):
        plan = make_plan(averaging=averaging)
        request = open_round(plan, initial_state(plan, PARAMETERS), 0, SEEDED)
        (group,), (query,) = request.clipping.groups, plan.mechanism.event.queries
        assert query.granularity == group.granularity == 2.0**-24
        assert request.clipping.weight_cap == cap
        assert request.clipping.weighted == (() if averaging == Averaging() else ("update",))


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
        ({"rounds": 1.5}, "rounds is 1.5"),
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
