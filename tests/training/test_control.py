"""Control variates of the server, and local learning rates that change from round to round."""

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import Config, parse_config, plain, tables_of
from fedpriv.experiment.grouping import Flat
from fedpriv.experiment.mechanism import Mechanism
from fedpriv.privacy.gaussian_mechanism import Averaging
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.training.local import SGD, AdamW, Scaffold
from fedpriv.training.optimizers import (
    ExponentialDecay,
    FedAvg,
    PolynomialDecay,
    RateSchedule,
    StepDecay,
)
from fedpriv.training.plan import AdaptiveClipping
from fedpriv.training.request import ControlVariates, LocalTraining, RoundRequest
from fedpriv.training.rounds import Checkpoint, initial_state, resume, save_checkpoint, train
from tests.training.federation import LAYOUT, PARAMETERS, FakeTransport, make_plan, open_records

SCAFFOLD = Scaffold(0.1, epochs=2, control_norm=0.5, control_share=0.25, control_rate=0.4)


def sent(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
    """An update of a tenth in w, and a gradient of a tenth in b."""
    del user
    gradient = {"w": np.zeros((2, 2)), "b": np.full(3, 0.1)}
    changes = {f"control/{name}": gradient[name] - c for name, c in request.control.items()}
    return {"w": np.full((2, 2), 0.1), "b": np.zeros(3), **changes}


def test_the_control_variate_moves_by_what_was_released(tmp_path: Path) -> None:
    plan = make_plan(local=SCAFFOLD, noise_multiplier=0.0)
    plan = replace(plan, sampling=replace(plan.sampling, sampling_probability=1.0))
    state, expected = initial_state(plan, PARAMETERS), 0.0
    assert {name: c.shape for name, c in state.control.items()} == {"w": (2, 2), "b": (3,)}
    with open_records(tmp_path) as records:
        for _ in range(3):
            before = state.parameters["w"]
            state, result = next(train(plan, state, FakeTransport(sent), records, SeededEntropy(0)))
            expected += 0.4 * (0.1 - expected)  # by hand: c + β·(g − c), with all users there
            np.testing.assert_allclose(state.control["b"], expected, rtol=1e-6)
            np.testing.assert_allclose(state.control["w"], 0.0, atol=1e-7)
            np.testing.assert_allclose(state.parameters["w"], before + 0.1, rtol=1e-6)
            assert state.control["b"].dtype == np.float32
        assert list(result.clipping_norms) == ["update"]  # those that may adapt
        (query,) = {row.event.queries for row in records.ledger.charges()}
    assert [(each.group, each.clipping_norm) for each in query] == [
        ("update", 1.0),
        ("control/variates", 0.5),
    ]


@pytest.mark.parametrize("averaging", [Averaging(), Averaging(cap=3, total_weight=20.0)])
def test_both_vector_groups_share_the_privacy_of_one_query(averaging: Averaging) -> None:
    plan = make_plan(local=SCAFFOLD, averaging=averaging, noise_multiplier=1.7)
    event = plan.mechanism.event
    # Equation (1) of McMahan et al. 2018: σ_g = z·S_g/√ω_g.
    update, control = event.queries
    assert event.noise_multiplier == pytest.approx(1.7, rel=1e-9)
    assert event.noise_multiplier >= 1.7
    assert update.noise_stddev == pytest.approx(1.7 * 1.0 / np.sqrt(0.75))
    assert control.noise_stddev == pytest.approx(1.7 * 0.5 / np.sqrt(0.25))
    assert event.sampling == make_plan(noise_multiplier=1.7).mechanism.event.sampling
    weighted = plan.mechanism.clipping.weighted
    assert weighted == (("update", "control/variates") if averaging.cap else ())


def test_shares_must_leave_some_to_the_update() -> None:
    greedy = replace(SCAFFOLD, control_share=0.99)
    make_plan(local=greedy)
    with pytest.raises(InvalidValueError, match=r"control variates .* must leave some"):
        make_plan(local=greedy, adaptive=AdaptiveClipping(share=0.02))


def test_noise_cannot_make_a_control_variate_infinite() -> None:
    most = np.finfo(np.float32).max
    moved = ControlVariates(1.0, 0.5, 1.0).updated(
        {"b": np.full(2, most)}, {"control/b": np.array([1e39, -1e39])}
    )
    np.testing.assert_array_equal(moved["b"], [most, -most])


def test_a_resumed_run_has_its_control_variate(tmp_path: Path) -> None:
    # In an order that is not that of names, in which a file has its tensors.
    assert sorted(LAYOUT.names) != list(LAYOUT.names)
    plan, entropy = make_plan(local=SCAFFOLD), SeededEntropy(0)
    with open_records(tmp_path) as records:
        rounds = train(plan, initial_state(plan, PARAMETERS), FakeTransport(sent), records, entropy)
        state, _ = next(rounds)
        path = save_checkpoint(tmp_path, Checkpoint(state, plan.digest, records.ledger.head))
        again = resume(path, plan, records.ledger)
    assert list(again.control) == list(LAYOUT.names)
    for name, c in state.control.items():
        assert np.abs(c).max() > 0.0
        np.testing.assert_array_equal(again.control[name], c)


def test_without_control_variates_nothing_of_them_is_asked_or_kept(tmp_path: Path) -> None:
    asked = []

    def note(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
        asked.append(request)
        return sent(request, user)

    plan = make_plan()
    with open_records(tmp_path) as records:
        state, _ = next(
            train(
                plan,
                initial_state(plan, PARAMETERS),
                FakeTransport(note),
                records,
                SeededEntropy(0),
            )
        )
    assert asked
    assert all(not request.control for request in asked)
    assert asked[0].clipping.layout == LAYOUT
    assert not state.control


def test_users_are_asked_with_the_rate_of_the_round(tmp_path: Path) -> None:
    asked = {}

    def note(request: RoundRequest, user: int) -> dict[str, np.ndarray]:
        asked[request.round] = request.local
        return sent(request, user)

    plan = make_plan(local=SGD(PolynomialDecay(0.4, 0.1, rounds=3), epochs=1, momentum=0.5))
    with open_records(tmp_path) as records:
        start = initial_state(plan, PARAMETERS)
        list(train(plan, start, FakeTransport(note), records, SeededEntropy(0)))
    expected = [0.4, 0.3, 0.2, 0.1, 0.1]
    assert [asked[number].rate for number in range(1, 6)] == pytest.approx(expected)
    assert {local.momentum for local in asked.values()} == {0.5}
    assert {type(local) for local in asked.values()} == {SGD}


@dataclass(frozen=True)
class Falling(RateSchedule):
    """One of one's own, which falls below zero in round 4."""

    def at(self, number: int) -> float:
        return 0.35 - 0.1 * number


def test_a_rate_that_leaves_its_range_is_refused_before_the_first_round() -> None:
    for schedule in (Falling(), PolynomialDecay(0.4, 0.0, rounds=3)):
        local = SGD(schedule, epochs=1)
        make_plan(local=local, rounds=3)
        with pytest.raises(InvalidValueError, match=r"learning_rate is (0\.0|-0\.05)"):
            make_plan(local=local, rounds=5)


def test_plans_with_other_schedules_are_other_plans() -> None:
    rates = [0.4, ExponentialDecay(0.4, 0.5, rounds=2), StepDecay(0.4, 0.5, rounds=2)]
    plans = [make_plan(local=SGD(rate, epochs=1)) for rate in rates]
    assert len({plan.digest for plan in plans}) == 3


EXPERIMENT = """
name = "x"
rounds = 5
model = "softmax"

[clipping]
norm = 1.0

[privacy]
sampling_probability = 0.5
noise_multiplier = 1.0
epsilon = 4.0
delta = 1e-3

[local]
epochs = 2
"""


def experiment(local: str) -> Config:
    return parse_config(tomllib.loads(EXPERIMENT + local), "x.toml")


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("learning_rate = 0.5", SGD(0.5, epochs=2)),
        (
            'learning_rate = { schedule = "polynomial", start = 0.5, end = 0.1, rounds = 5 }',
            SGD(PolynomialDecay(0.5, 0.1, rounds=5), epochs=2),
        ),
        (
            'learning_rate = { schedule = "step", start = 0.5, factor = 0.5, rounds = 2 }\n'
            'algorithm = "adamw"\noptions = { weight_decay = 0.1, beta1 = 0.5 }',
            AdamW(StepDecay(0.5, 0.5, rounds=2), epochs=2, weight_decay=0.1, beta1=0.5),
        ),
        (
            'learning_rate = 0.5\nproximal = 0.1\nalgorithm = "scaffold"\n'
            "options = { control_norm = 0.7, control_share = 0.2, control_rate = 0.3 }",
            Scaffold(
                0.5,
                epochs=2,
                proximal=0.1,
                control_norm=0.7,
                control_share=0.2,
                control_rate=0.3,
            ),
        ),
    ],
    ids=["rate", "schedule", "adamw", "scaffold"],
)
def test_a_file_and_values_say_the_same(text: str, local: LocalTraining) -> None:
    config = experiment(text)
    assert config.training() == local
    mechanism = Mechanism.poisson(0.5, Flat(1.0)).with_noise(1.0, epsilon=4.0, delta=1e-3)
    table = plain(tables_of(mechanism, local, FedAvg()))
    again = parse_config({"name": "x", "rounds": 5, "model": "softmax", **table}, "x")
    assert again.training() == local


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate = -0.5", "local.learning_rate is -0.5"),
        (
            "learning_rate = { start = 1.0 }",
            "learning_rate.schedule '' is unknown",
        ),
        (
            'learning_rate = { schedule = "stepp" }',
            "schedule 'stepp' is unknown; did you mean 'step'",
        ),
        ('algorithm = "adam"\nlearning_rate = 0.1', "did you mean 'adamw'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_in_one_sentence(text: str, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        experiment(text).training()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'learning_rate = 0.1\nalgorithm = "scaffold"',
            "local.algorithm 'scaffold' needs the option 'control_norm'",
        ),
        (
            'learning_rate = 0.1\nalgorithm = "adamw"\noptions = { beta = 0.1 }',
            "local.algorithm 'adamw' has no option 'beta'",
        ),
        (
            'learning_rate = { schedule = "power" }',
            "learning_rate.schedule 'power' needs the option 'start'",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused_when_training_is_built(
    text: str, message: str
) -> None:
    with pytest.raises(InvalidValueError, match=message):
        experiment(text).training()
