"""The suite sees broken engines, and accepts the real one."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest

from fedpriv.accounting.accountants import epsilon
from fedpriv.data.population import Population, UserStore
from fedpriv.errors import DataError, InvalidValueError
from fedpriv.ledger.events import Randomness
from fedpriv.privacy.noise import OperatingSystemEntropy, SeededEntropy
from simulations import broken_engines as broken
from simulations.attack import POPULATIONS, AttackedPlan, Finding, attack
from simulations.attack.suite import certifying
from tests.simulations.attack.targets import DELTA, EPSILON, config_of, people, tiny_target

Broken = Callable[[], AbstractContextManager[object]]


def attacked(target: AttackedPlan, name: str, runs: int = 36) -> Finding:
    return attack(target, POPULATIONS[name], runs, entropies=SeededEntropy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "name"),
    [
        (broken.no_clipping, "large"),
        (broken.no_noise, "alone"),
        (broken.sums_of_many_louder, "far-larger"),
        (broken.clipped_together, "large"),
        (broken.one_failure_spoils_all, "not-finite"),
        (broken.failures_raise, "illegal-labels"),
        (broken.shapes_of_all_enrolled, "undrawn"),
        (broken.exact_counts, "tiny"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_a_broken_engine_refutes_its_ledger(engine: Broken, name: str) -> None:
    with engine():
        found = attacked(tiny_target(), name)
    assert found.certificate is not None
    assert found.certificate.epsilon > found.ledger_epsilon > 0.9 * EPSILON
    assert found.refuted
    assert found.verdict == "refuted"


def test_a_denominator_that_depends_on_who_came_refutes_its_ledger() -> None:
    # The noise shrinks with the cohort, and a model of many parameters shows how large it is.
    target = tiny_target(users=3, inputs=200)
    with broken.realised_denominator():
        found = attacked(target, "tiny")
    assert found.refuted
    assert found.distinguisher in ("norm of updates", "learnt combination")  # which sees norms


@pytest.mark.parametrize("name", ["large", "undrawn"])
def test_the_real_engine_does_not(name: str) -> None:
    found = attacked(tiny_target(), name)
    assert found.certificate is not None
    assert found.certificate.epsilon <= found.ledger_epsilon
    assert found.verdict == "consistent"
    assert found.certificate.runs_with == found.certificate.runs_without == certifying(36)


@pytest.mark.slow
def test_the_real_engine_refutes_its_ledger_with_no_kept_population() -> None:
    for name in POPULATIONS:
        found = attacked(tiny_target(), name, 40)
        assert found.verdict == "consistent", name


WITHOUT_COINS = {"epsilon": EPSILON, "delta": DELTA}
SETTINGS: dict[str, dict[str, object]] = {
    "replaced": {
        "sampling": {"policy": "fixed-size", "options": {"cohort_size": 3}},
        "privacy": WITHOUT_COINS,
    },
    "passes": {
        "sampling": {"policy": "random-allocation", "options": {"rounds": 3}},
        "privacy": WITHOUT_COINS,
    },
    "turns": {
        "sampling": {"policy": "separated", "options": {"rounds": 4, "separation": 2}},
        "noise": {"correlation": "banded"},
        "privacy": WITHOUT_COINS,
    },
    "examples": {
        "sampling": {"policy": "poisson-examples", "options": {"examples_per_user": 3}},
        "local": None,
    },
    "audited": {"audit": {"canaries": 40}},
    "adaptive": {"clipping": {"norm": 0.1, "strategy": "per-layer", "adaptive": {}}},
    "scaffold": {
        "local": {"algorithm": "scaffold", "learning_rate": 0.5, "options": {"control_norm": 0.2}}
    },
    "weighted": {"averaging": {"cap": 10, "total_weight": 4.0, "floor": 0.5}},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_plan_can_be_attacked(setting: str) -> None:
    target = AttackedPlan.of(config_of(**SETTINGS[setting]), people(4), 2, 4)
    assert target.plan.sampling.event().canaries == 0
    found = attacked(target, "large", 8)
    assert found.verdict == "consistent"
    assert 0.0 < found.ledger_epsilon <= EPSILON + 1e-6


def test_records_of_another_unit_are_attacked_one_at_a_time() -> None:
    privacy = {"unit": "example", "epsilon": EPSILON, "delta": DELTA, "sampling_probability": 0.5}
    target = AttackedPlan.of(config_of(privacy=privacy, local=None), people(4), 1, 6)
    assert target.crowd.users.sizes.tolist() == [1] * 6  # of 40 rows of four users
    assert attacked(target, "large", 8).verdict == "consistent"
    found = attacked(target, "far-larger", 8)
    assert found.certificate is None
    assert not found.refuted
    assert found.verdict == "skipped: it needs 100 rows of a record, which has at most 1"


def test_runs_are_charged_and_drawn_as_any_other() -> None:
    target = tiny_target(rounds=2)
    transport = target.transport(target.crowd.users)
    one, other = (target.run(transport, OperatingSystemEntropy()) for _ in range(2))
    assert {row.randomness for row in one.charges} == {Randomness.OPERATING_SYSTEM}
    assert [row.round for row in one.charges] == [1, 2]
    assert [row.event for row in one.charges] == [target.plan.mechanism.event] * 2
    assert one.results[-1].epsilon == pytest.approx(epsilon([target.plan.event], DELTA).epsilon)
    assert not np.array_equal(one.averages, other.averages)
    same = [target.run(transport, SeededEntropy(3)).averages for _ in range(2)]
    np.testing.assert_array_equal(*same)  # nothing of a run is left in what the next one uses


def test_every_run_is_told_and_each_has_its_own_number() -> None:
    told, numbers = [], []

    def entropy_of(number: int) -> SeededEntropy:
        numbers.append(number)
        return SeededEntropy(number)

    target = tiny_target(users=3)
    kept = POPULATIONS["no-rows"]
    attack(target, kept, 9, entropies=entropy_of, on_run=lambda: told.append(1))
    assert len(told) == 2 * 9 + 1
    assert numbers == list(range(2 * 9 + 1))


def test_as_many_users_take_part_as_there_are_and_as_have_rows() -> None:
    store = UserStore(people(3).users.fields, np.array([0, 0, 10, 10, 20, 30]))
    population = Population("people", store, people(3).test)
    target = AttackedPlan.of(config_of(), population, 1, 20)
    assert target.plan.sampling.population == 3
    assert target.crowd.users.sizes.tolist() == [10] * 3
    assert AttackedPlan.of(config_of(), population, 1, 2).plan.sampling.population == 2


def test_what_cannot_be_attacked_is_refused() -> None:
    with pytest.raises(DataError, match="1 users with rows are to be attacked"):
        AttackedPlan.of(config_of(), people(1), 1, 20)
    x, y = np.ones((4, 6), np.float32), np.arange(4) % 3
    ids = [["a", "b"], ["b"], ["a"], ["b"]]
    shared = Population.from_arrays(x, y, ids, held_out=(x, y), owners=2)
    examples = config_of(**SETTINGS["examples"])
    with pytest.raises(DataError, match="rows have several owners"):
        AttackedPlan.of(examples, shared, 1, 20)
    unsafe = {"unsafe_no_privacy": True, "noise_multiplier": 0.0, "delta": DELTA}
    with pytest.raises(InvalidValueError, match="the plan has no noise"):
        AttackedPlan.of(config_of(privacy=unsafe), people(3), 1, 3)
    with pytest.raises(InvalidValueError, match="runs is 7"):
        attack(tiny_target(users=3), POPULATIONS["tiny"], 7)
    short = {"noise_multiplier": 2.0, "epsilon": 1.6, "delta": DELTA, "sampling_probability": 1.0}
    with pytest.raises(InvalidValueError, match="a run ends after 1 rounds: the next round would"):
        attack(AttackedPlan.of(config_of(privacy=short), people(3), 2, 3), POPULATIONS["tiny"], 8)
