"""Runs that end before their last round, by what they released."""

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import fedpriv
from fedpriv.errors import InvalidValueError
from fedpriv.ledger.ledger import Ledger, paid_events
from fedpriv.ledger.participation import ParticipationRecord, beside
from fedpriv.run import run as run_module
from fedpriv.run.folder import RunFolder
from fedpriv.run.run import Run
from fedpriv.training.rounds import Stop
from fedpriv.training.stopping import Stopping
from tests.commandline import printed, refused

FILE = Path(__file__).parents[2] / "fedpriv/experiments/digits.toml"
ROUNDS, PATIENCE = 12, 2


@given(
    values=st.lists(st.floats(-10.0, 10.0), max_size=12),
    patience=st.integers(1, 4),
    least=st.floats(0.0, 1.0),
)
def test_means_of_the_last_values_are_compared(
    values: list[float], patience: int, least: float
) -> None:
    late, early = values[-patience:], values[-2 * patience : -patience]
    full = len(late) == len(early) == patience
    gain = float(np.mean(late) - np.mean(early)) if full else math.inf
    if abs(abs(gain) - least) < 1e-9:
        return  # as good as equal
    larger = Stopping("accuracy", patience, least_gain=least)
    smaller = Stopping("loss", patience, least_gain=least)
    assert larger.reached(values) is (full and gain <= least)
    assert smaller.reached(values) is (full and -gain <= least)
    assert Stopping("mine", patience, "larger", least).reached(values) is larger.reached(values)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"patience": 0}, "patience of stopping is 0; it must be at least 1"),
        ({"least_gain": -1.0}, "least_gain of stopping is -1.0"),
        ({"metric": "mine"}, "better of stopping is None for metric 'mine'; it must be 'larger'"),
        ({"better": "more"}, "better of stopping is 'more'"),
    ],
)
def test_a_rule_out_of_range_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        Stopping(**{"metric": "loss", "patience": 3, **settings})


def population() -> fedpriv.Population:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 5)).astype(np.float32)
    y = rng.integers(0, 3, 60)
    return fedpriv.Population.from_arrays(x, y, np.repeat(np.arange(20), 3), held_out=(x, y))


LOSS = {"loss": {"bound": 4.0}}
POISSON = fedpriv.Mechanism.poisson(q=0.5, clipping=fedpriv.Flat(1.0), metrics=LOSS).calibrate(
    epsilon=8.0, delta=1e-2, rounds=ROUNDS
)


def run(
    folder: Path,
    stopping: Stopping | None,
    mechanism: fedpriv.Mechanism = POISSON,
    **others: object,
) -> Run:
    torch.manual_seed(0)
    return fedpriv.simulate(
        population(),
        fedpriv.Task(nn.Linear(5, 3)),
        mechanism,
        local=fedpriv.SGD(0.1, epochs=1),
        stopping=stopping,
        out=folder,
        seed=3,
        quiet=True,
        **others,
    )


def expected_round(values: list[float]) -> int:
    """The round after which the rule stops a run with these losses."""
    for end in range(2 * PATIENCE, len(values) + 1):
        before, last = values[end - 4 : end - 2], values[end - 2 : end]
        if sum(last) / 2 >= sum(before) / 2:
            return end
    return len(values)


def test_a_run_stops_where_its_released_losses_say_and_costs_all_that_it_might_have_run(
    tmp_path: Path,
) -> None:
    whole = run(tmp_path / "whole", None)
    losses = [each.scalar_metrics["loss"] for each in whole.rounds]
    end = expected_round(losses)
    assert 2 * PATIENCE <= end < ROUNDS
    stopped = run(tmp_path / "stopped", Stopping("loss", PATIENCE))
    assert stopped.stop is Stop.NO_GAIN
    assert [each.scalar_metrics["loss"] for each in stopped.rounds] == losses[:end]
    charged = []
    for folder in (tmp_path / "whole", tmp_path / "stopped"):
        ledger = folder / "ledger.sqlite"
        with Ledger.open(ledger) as opened, ParticipationRecord.open(beside(ledger)) as record:
            opened.verify(record)
            charged.append([(row.round, row.event) for row in opened.charges()])
            cohorts = [record.users_of(row.cohort_commitment) for row in opened.charges()]
    # Where a run ends tells of its users, so it has cost what it would have cost to its last round.
    assert charged[0] == charged[1]
    assert [users.size > 0 for users in cohorts] == [True] * end + [False] * (ROUNDS - end)
    assert stopped.epsilon == whole.epsilon == stopped.rounds[-1].epsilon <= 8.0
    assert stopped.rounds[-2].epsilon == whole.rounds[end - 2].epsilon < 0.9 * stopped.epsilon
    assert stopped.rounds[0].metrics_noise_stddev == whole.rounds[0].metrics_noise_stddev
    # The model is the one that was released then.
    assert stopped.accuracy == whole.rounds[end - 1].accuracy


@pytest.mark.parametrize(("every", "evaluations"), [(None, 1), (2, 6), (4, 3), (5, 3)])
def test_what_a_run_with_evaluations_and_passes_would_have_cost_is_charged_too(
    tmp_path: Path, every: int | None, evaluations: int
) -> None:
    asked = fedpriv.FederatedEvaluation(20.0, every=every, report=LOSS)
    passes = fedpriv.Mechanism(fedpriv.RandomAllocation(5), fedpriv.Flat(1.0), metrics=LOSS)
    passes = passes.with_noise(4.0, epsilon=100.0, delta=1e-2)
    events = []
    for number, stopping in enumerate([None, Stopping("loss", 1, least_gain=1e3)]):
        ended = run(
            tmp_path / str(number), stopping, passes, rounds=ROUNDS, federated_evaluation=asked
        )
        with Ledger.open(tmp_path / str(number) / "ledger.sqlite") as ledger:
            events.append(Counter(paid_events(ledger.charges())))
    assert (ended.stop, len(ended.rounds)) == (Stop.NO_GAIN, 2)
    assert events[0] == events[1]
    assert sorted(events[1].values()) == sorted([3, evaluations])  # passes of 12 rounds


def test_a_run_that_would_have_ended_with_its_budget_has_spent_it(tmp_path: Path) -> None:
    longer = {"rounds": 3 * ROUNDS}
    whole = run(tmp_path / "whole", None, **longer)
    assert whole.stop is Stop.BUDGET
    stopped = run(tmp_path / "stopped", Stopping("loss", PATIENCE), **longer)
    assert (stopped.stop, stopped.epsilon) == (Stop.NO_GAIN, whole.epsilon)


def test_resuming_stops_in_the_same_round_and_nothing_is_left_to_go_on_with(tmp_path: Path) -> None:
    rule = Stopping("loss", PATIENCE)
    stopped = run(tmp_path / "stopped", rule)
    end = len(stopped.rounds)

    def interrupt(result: fedpriv.RoundResult) -> None:
        if result.round == end - 1:
            raise KeyboardInterrupt

    folder = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        run(folder, rule, on_round=[interrupt])
    resumed = run(folder, rule, resume=True)
    # Losses of before the interruption count.
    assert resumed.stop is Stop.NO_GAIN
    assert len(resumed.rounds) == end
    again = run(folder, rule, resume=True)
    assert (again.stop, len(again.rounds), again.epsilon) == (Stop.NO_GAIN, end, resumed.epsilon)
    further = run(folder, None, resume=True)
    assert (further.stop, len(further.rounds), further.epsilon) == (
        Stop.BUDGET,
        end,
        resumed.epsilon,
    )


NEVER_ENOUGH = Stopping("loss", 1, least_gain=1e12)  # ends a run after 2 rounds
PASSES = fedpriv.Mechanism(fedpriv.RandomAllocation(5), fedpriv.Flat(1.0), metrics=LOSS)


def killed(folder: Path, after: int, mechanism: fedpriv.Mechanism, **others: object) -> None:
    """A run without a rule that is killed after a round."""

    def kill(result: fedpriv.RoundResult) -> None:
        if result.round == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, None, mechanism, rounds=ROUNDS, on_round=[kill], **others)


def paid(folder: Path) -> Counter[object]:
    with Ledger.open(folder / "ledger.sqlite") as ledger:
        return Counter(paid_events(ledger.charges()))


@pytest.mark.parametrize(
    "mechanism",
    [
        fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0)),
        fedpriv.Mechanism.poisson(1e-6, fedpriv.Flat(1.0)),  # whose cohorts are empty
        PASSES,
    ],
)
@pytest.mark.parametrize(("after", "every"), [(4, 1), (4, 4), (6, 4), (2, 4)])
def test_a_rule_that_is_new_to_a_resumed_run_costs_what_it_would_have_cost_to_go_on(
    tmp_path: Path, mechanism: fedpriv.Mechanism, after: int, every: int
) -> None:
    asked = fedpriv.FederatedEvaluation(20.0, every=2, report=LOSS)
    others = {"checkpoint_every": every, "federated_evaluation": asked}
    plentiful = replace(mechanism, metrics=LOSS).with_noise(4.0, epsilon=100.0, delta=1e-2)
    events = []
    for rule in (None, NEVER_ENOUGH):
        folder = tmp_path / str(rule is None)
        killed(folder, after, plentiful, **others)
        ended = run(folder, rule, plentiful, rounds=ROUNDS, resume=True, **others)
        events.append(paid(folder))
    assert ended.stop is Stop.NO_GAIN
    assert events[0] == events[1]
    # What was released states what it has cost, and the rounds are those of the model.
    assert ended.rounds[-1].epsilon == ended.epsilon
    assert [each.round for each in ended.rounds] == list(range(1, ended.state.round + 1))
    with safe_open(folder / "model.safetensors", "numpy") as model:
        assert json.loads(model.metadata()["release"])["epsilon"] == ended.epsilon
    if mechanism is not PASSES:  # of which one that is under way is paid once more
        lines = (folder / "metrics.jsonl").read_text()
        run(folder, rule, plentiful, rounds=ROUNDS, resume=True, **others)
        assert (paid(folder), (folder / "metrics.jsonl").read_text()) == (events[1], lines)


@pytest.mark.parametrize("mechanism", [fedpriv.Mechanism.poisson(0.5, fedpriv.Flat(1.0)), PASSES])
def test_a_run_that_is_killed_while_it_pays_for_what_it_forgoes_pays_the_rest_once(
    tmp_path: Path, mechanism: fedpriv.Mechanism, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fedpriv.FederatedEvaluation(20.0, every=2, report=LOSS)
    others: dict[str, object] = {"checkpoint_every": 4, "federated_evaluation": asked}
    plentiful = replace(mechanism, metrics=LOSS).with_noise(4.0, epsilon=100.0, delta=1e-2)
    others["mechanism"] = plentiful
    for folder in (tmp_path / "once", tmp_path / "again"):
        killed(folder, 4, **others)
    others |= {"rounds": ROUNDS, "resume": True}
    run(tmp_path / "once", NEVER_ENOUGH, **others)
    charge, left = run_module.charge_forgone, iter(range(3))

    def charge_some(*given: object) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        charge(*given)

    monkeypatch.setattr(run_module, "charge_forgone", charge_some)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "again", NEVER_ENOUGH, **others)
    assert paid(tmp_path / "again") != paid(tmp_path / "once")
    monkeypatch.undo()
    for _ in range(2):
        run(tmp_path / "again", NEVER_ENOUGH, **others)
        assert paid(tmp_path / "again") == paid(tmp_path / "once")


def test_a_round_that_was_lost_as_its_release_ended_the_run_pays_for_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = fedpriv.FederatedEvaluation(20.0, every=2, report=LOSS)
    plentiful = replace(POISSON, noise_multiplier=4.0, epsilon=100.0, rounds=None)
    others: dict[str, object] = {"checkpoint_every": 4, "federated_evaluation": asked}
    others |= {"mechanism": plentiful, "rounds": ROUNDS}
    append, charge = RunFolder.append_metrics, run_module.charge_forgone

    def cut_short(folder: RunFolder, row: dict[str, object]) -> None:
        if row["round"] == 6:
            raise KeyboardInterrupt
        append(folder, row)

    def charge_one(*given: object) -> None:
        charge(*given)
        raise KeyboardInterrupt

    # One run is killed when it has released round 6, the other when it has also charged for round
    # 7, by which its ledger tells that round 6 ended it.
    rules = {"without": (None, None), "with": (Stopping("loss", 3, least_gain=1e12), NEVER_ENOUGH)}
    for name, (first, then) in rules.items():
        with monkeypatch.context() as patched:
            patched.setattr(RunFolder, "append_metrics", cut_short)
            patched.setattr(run_module, "charge_forgone", charge_one)
            with pytest.raises(KeyboardInterrupt):
                run(tmp_path / name, first, **others)
        ended = run(tmp_path / name, then, resume=True, **others)
    assert (ended.stop, len(ended.rounds)) == (Stop.NO_GAIN, 4)
    assert paid(tmp_path / "with") == paid(tmp_path / "without")


def test_a_file_asks_for_it_and_the_result_says_why(tmp_path: Path) -> None:
    settings = (
        "metrics.report.loss={bound=3.0}",
        'stopping={metric="loss", patience=1, least_gain=3.0}',
        "rounds=5",
        "seed=1",
    )
    given = [part for each in settings for part in ("--set", each)]
    text = printed("simulate", FILE, *given, "--out", tmp_path / "run")
    assert "2 of 5, 5 charged: stopped, its metric got no better" in " ".join(text.split())
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 1.9 < row["epsilon"] <= 2.0
    resumed = printed("simulate", tmp_path / "run/plan.toml", "--out", tmp_path / "run", "--resume")
    assert "2 of 5, 5 charged: stopped, its metric got no better" in " ".join(resumed.split())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ('stopping={metric="los", patience=1, better="larger"}', "stopping.metric is 'los', which"),
        ('stopping={metric="loss", patience=0}', "stopping.patience is 0"),
        ('stopping={metric="evaluation/accuracy", patience=1}', "no round releases as one number"),
        (
            'stopping={metric="label-counts", patience=1, better="larger"}',
            "stopping.metric is 'label-counts', which no round releases as one number",
        ),
        (
            'stopping={metric="contributors", patience=1}',
            "better of stopping is None for metric 'contributors'",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_spent(
    setting: str, message: str, tmp_path: Path
) -> None:
    metrics = "metrics.report={loss={bound=3.0}, label-counts={classes=10, bound=5.0}}"
    given = ("--set", setting, "--set", metrics)
    assert message in refused("simulate", FILE, *given, "--out", tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
