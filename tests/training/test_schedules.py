"""Learning rates of the server that change from round to round."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedpriv.errors import InvalidValueError
from fedpriv.experiment.config import Config, parse_config, plain, tables_of
from fedpriv.experiment.grouping import Flat
from fedpriv.experiment.mechanism import Mechanism
from fedpriv.privacy.noise import SeededEntropy
from fedpriv.training.local import SGD
from fedpriv.training.optimizers import (
    SERVER_OPTIMIZERS,
    CosineDecay,
    ExponentialDecay,
    FedAdam,
    FedAvg,
    FedAvgM,
    PolynomialDecay,
    PowerDecay,
    RateSchedule,
    ServerOptimizer,
    StepDecay,
    schedules_of,
)
from fedpriv.training.rounds import ServerState, initial_state, train
from tests.training.federation import CONSTANT, PARAMETERS, make_plan, open_records

SCHEDULES: list[RateSchedule] = [
    PolynomialDecay(0.8, 0.1, rounds=4, power=2.0),
    CosineDecay(0.8, 0.1, rounds=4),
    ExponentialDecay(0.8, 0.5, rounds=2),
    StepDecay(0.8, 0.5, rounds=2),
    PowerDecay(0.8, 0.5),
]


@dataclass(frozen=True)
class Falling(RateSchedule):
    """One of one's own, which falls below zero in round 4."""

    def at(self, number: int) -> float:
        return 0.35 - 0.1 * number


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        # Abadi et al. 2016, section 5.2: from 0.1 to 0.052 over ten epochs, then constant.
        (PolynomialDecay(0.1, 0.052, rounds=10), [0.1, 0.0952, 0.0904]),
        (PolynomialDecay(0.8, 0.0, rounds=2, power=2.0), [0.8, 0.2, 0.0, 0.0]),
        (PolynomialDecay(0.1, 0.5, rounds=1), [0.1, 0.5, 0.5]),
        (CosineDecay(0.8, 0.0, rounds=4), [0.8, 0.4 + 0.4 / math.sqrt(2.0), 0.4]),
        (CosineDecay(0.8, 0.2, rounds=2), [0.8, 0.5, 0.2, 0.2]),
        (ExponentialDecay(0.8, 0.25, rounds=2), [0.8, 0.4, 0.2, 0.1]),
        (ExponentialDecay(0.8, 0.5), [0.8, 0.4, 0.2]),
        (StepDecay(0.8, 0.5, rounds=2), [0.8, 0.8, 0.4, 0.4, 0.2]),
        (PowerDecay(0.6, 1.0), [0.6, 0.3, 0.2, 0.15]),
        (PowerDecay(0.6, 0.5), [0.6, 0.6 / math.sqrt(2.0)]),
    ],
    ids=repr,
)
def test_rates_by_round(schedule: RateSchedule, rates: Sequence[float]) -> None:
    assert [schedule.at(number) for number in range(1, len(rates) + 1)] == pytest.approx(rates)


@given(
    st.sampled_from(SCHEDULES), st.integers(1, 10**6), st.floats(0.0, 1e6), st.integers(1, 10**6)
)
def test_rates_never_rise_and_stay_legal(
    schedule: RateSchedule, number: int, start: float, rounds: int
) -> None:
    changes = {"start": start} | ({} if isinstance(schedule, PowerDecay) else {"rounds": rounds})
    changes |= {"end": start / 2} if hasattr(schedule, "end") else {}
    placed = replace(schedule, **changes)
    now, then = placed.at(number), placed.at(number + 1)
    assert 0.0 <= then <= now <= start
    FedAvg(placed).at(number)


def released(optimizer: ServerOptimizer, folder: Path) -> list[ServerState]:
    plan = make_plan(optimizer=optimizer)
    folder.mkdir()
    with open_records(folder) as records:
        start = initial_state(plan, PARAMETERS)
        return [state for state, _ in train(plan, start, CONSTANT, records, SeededEntropy(0))]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS.values())
def test_each_round_steps_by_its_own_rate(
    kind: type[ServerOptimizer], schedule: RateSchedule, tmp_path: Path
) -> None:
    states = released(kind(learning_rate=schedule), tmp_path / "scheduled")
    with open_records(tmp_path) as records:
        plan = make_plan(optimizer=kind())
        state = initial_state(plan, PARAMETERS)
        for number, found in enumerate(states, start=1):
            placed = replace(plan, optimizer=kind(learning_rate=schedule.at(number)))
            state, _ = next(train(placed, state, CONSTANT, records, SeededEntropy(0)))
            for name, tensor in state.parameters.items():
                np.testing.assert_array_equal(found.parameters[name], tensor)
    assert len(states) == 5


def test_a_number_is_a_constant_schedule() -> None:
    optimizer = FedAdam(0.3)
    assert optimizer.at(7) is optimizer
    assert schedules_of(optimizer) == {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PolynomialDecay(-0.1, 0.1, 5), "start of the schedule is -0.1"),
        (lambda: PolynomialDecay(0.1, math.inf, 5), "end of the schedule is inf"),
        (lambda: PolynomialDecay(0.1, 0.1, 0), "rounds of the schedule is 0"),
        (lambda: ExponentialDecay(0.1, 0.0), r"factor of the schedule is 0.0"),
        (lambda: StepDecay(0.1, 1.5, 3), "factor of the schedule is 1.5"),
        (lambda: PowerDecay(0.1, math.nan), "power of the schedule is nan"),
        (
            lambda: FedAvgM(0.1, momentum=PowerDecay(0.1)),
            r"momentum is PowerDecay\(.*; it must be in \[0, 1\)",
        ),
        (lambda: make_plan(optimizer=FedAvg(Falling())), r"learning_rate is -0\.0"),
    ],
)
def test_rates_out_of_range_are_refused_before_any_round(make: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make()


def test_a_step_needs_a_number() -> None:
    optimizer = FedAvg(PowerDecay(0.1))
    average = {name: np.zeros(p.shape) for name, p in PARAMETERS.items()}
    with pytest.raises(InvalidValueError, match="call `at` with a round"):
        optimizer.update(average, optimizer.init(PARAMETERS), PARAMETERS)


def test_plans_with_different_schedules_differ() -> None:
    rates = (0.1, *SCHEDULES, ExponentialDecay(0.8, 0.5, rounds=3), StepDecay(0.8, 0.5, rounds=3))
    assert len({make_plan(optimizer=FedAvg(rate)).digest for rate in rates}) == len(rates)


BASE = {
    "name": "test",
    "rounds": 10,
    "data": {"name": "digits"},
    "model": {"name": "softmax"},
    "local": {"learning_rate": 0.5, "epochs": 1},
    "privacy": {"sampling_probability": 0.3, "epsilon": 2.0, "delta": 1e-3},
    "clipping": {"norm": 0.5},
}


def config_with(rate: object, key: str = "learning_rate") -> Config:
    return parse_config({**BASE, "server": {"options": {key: rate}}}, "test")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_file_says_what_python_says(schedule: RateSchedule) -> None:
    mechanism = Mechanism.poisson(0.5, Flat(1.0)).with_noise(1.0, epsilon=2.0, delta=1e-3)
    tables = tables_of(mechanism, SGD(0.5, epochs=1), FedAdam(schedule))
    read = parse_config({**BASE, **plain(tables)}, "test")
    assert read.server.build() == FedAdam(schedule)
    assert parse_config(read.model_dump(exclude_none=True), "again") == read


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        ({"schedule": "polynomal", "start": 1.0}, "schedule 'polynomal' is unknown; did you mean"),
        ({"start": 1.0, "factor": 0.5}, "schedule '' is unknown"),
        ({"schedule": "power", "begin": 1.0}, "has no option 'begin'"),
        ({"schedule": "step", "start": 1.0}, "needs the option 'factor'"),
        ({"schedule": "power", "start": -1.0}, "start of the schedule is -1.0"),
        ({"schedule": "math:sqrt", "x": 1.0}, "must be derived from"),
        ("fast", "server.options.learning_rate is 'fast'"),
    ],
)
def test_a_schedule_that_is_wrong_is_one_sentence(rate: object, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message) as caught:
        config_with(rate).server.build()
    assert "\n" not in str(caught.value)


def test_only_the_learning_rate_of_a_file_may_have_a_schedule() -> None:
    config = config_with({"schedule": "power", "start": 0.1}, key="momentum")
    server = config.server.model_copy(update={"optimizer": "fedavgm"})
    with pytest.raises(InvalidValueError, match=r"momentum is .*; it must be in \[0, 1\)"):
        server.build()
