"""The strategy and the mod for apps of Flower's, with usual ClientApps and with hostile ones."""

import logging
import math
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import (
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp.strategy import Strategy

import fedpriv
from fedpriv.accounting.accountants import epsilon
from fedpriv.errors import BudgetExceededError, InvalidValueError, LedgerError, WireError
from fedpriv.experiment.mechanism import (
    AsIf,
    BandedNoise,
    FixedSize,
    Mechanism,
    Poisson,
    RandomAllocation,
    Separated,
)
from fedpriv.flower import PrivateStrategy, clipping_mod, connected
from fedpriv.flower import messages as flower_messages
from fedpriv.flower.strategy import NodesTransport, TrainedModel
from fedpriv.ledger.ledger import Ledger
from fedpriv.ledger.participation import ParticipationRecord
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import CONTRIBUTORS
from fedpriv.privacy.layout import Layout, flat, squared_bound
from fedpriv.training.request import LocalTraining, RoundRequest, Transport
from tests.flower.apps import (
    CLIPPINGS,
    DELTA,
    FIRST_ID,
    HOSTILE,
    NODES,
    NORM,
    OF_MANY,
    ONES,
    SECRET,
    SHAPES,
    START,
    USUAL,
    WITH_MOD,
    arrays_of,
    by_config,
    grid_of,
    ids,
    noiseless,
    private,
    raising,
    record_of,
    run,
    slow_clip,
    summing,
    update_of,
    usual_app,
    weights,
)
from tests.flower.local_grid import App, LocalGrid
from tests.training.transport_conformance import TransportConformance


@pytest.mark.parametrize("mod", [False, True])
@pytest.mark.parametrize("kind", CLIPPINGS)
def test_without_noise_a_round_is_the_mean_of_clipped_updates(
    tmp_path: Path, kind: str, mod: bool
) -> None:
    clipping, parts, norm, scales = CLIPPINGS[kind]
    with grid_of(dict.fromkeys(range(NODES), WITH_MOD if mod else USUAL)) as grid:
        found = arrays_of(run(tmp_path, grid, noiseless(clipping)))
    clipped = [slow_clip(update_of(user), parts, norm, scales) for user in range(NODES)]
    for name, start in START.items():
        expected = start + sum(each[name] for each in clipped) / NODES
        np.testing.assert_allclose(found[name], expected, rtol=0.0, atol=1e-5)
        assert np.abs(found[name] - start).max() > 1e-3


def test_an_app_may_answer_with_the_content_that_it_got(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def in_place(message: Message, context: Context) -> Message:
        message.content["arrays"] = USUAL(message, context).content["arrays"]
        return Message(message.content, reply_to=message)

    found = []
    for k, app in enumerate((USUAL, in_place)):
        with grid_of(dict.fromkeys(range(NODES), app)) as grid:
            found.append(arrays_of(run(tmp_path / str(k), grid, noiseless())))
    for name in SHAPES:
        np.testing.assert_array_equal(found[0][name], found[1][name])
    assert "counts as zero" not in caplog.text


def test_a_node_brings_many_users_and_sends_only_the_sum_of_what_they_give(tmp_path: Path) -> None:
    replies = []

    def seen(message: Message, context: Context) -> Message:
        replies.append(OF_MANY(message, context))
        return replies[-1]

    brought = {FIRST_ID: 3, FIRST_ID + 1: 1, FIRST_ID + 2: 4}
    with grid_of(dict.fromkeys(range(3), seen)) as grid:
        found = arrays_of(run(tmp_path, grid, noiseless(), brought))
        assert len(grid.sent) == 3
    users = [0, 1, 2, 10, 20, 21, 22, 23]
    clipped = [slow_clip(update_of(user), [list(SHAPES)], NORM, ONES) for user in users]
    for name, start in START.items():
        expected = start + sum(each[name] for each in clipped) / len(users)
        np.testing.assert_allclose(found[name], expected, rtol=0.0, atol=1e-5)
    for reply in replies:
        assert set(reply.content) == {"fedpriv", "fedpriv.array"}
        assert reply.content["fedpriv"]["parts"] == []


def test_server_and_mod_clip_alike_to_the_last_bit(tmp_path: Path) -> None:
    found = []
    for k, app in enumerate((USUAL, WITH_MOD)):
        with grid_of(dict.fromkeys(range(NODES), app)) as grid:
            found.append(arrays_of(run(tmp_path / str(k), grid, noiseless(), rounds=2)))
    for name in SHAPES:
        np.testing.assert_array_equal(found[0][name], found[1][name])


# Hostile nodes.


@pytest.fixture(scope="module")
def without_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """The model after a round in which node 2 is not connected."""
    apps = {k: USUAL for k in range(NODES) if k != 2}
    with grid_of(apps) as grid:
        found = arrays_of(run(tmp_path_factory.mktemp("without"), grid, noiseless()))
    assert all(np.any(found[name] != START[name]) for name in SHAPES)
    return found


@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_node_counts_as_zero_and_harms_nobody(
    tmp_path: Path,
    without_two: dict[str, np.ndarray],
    hostile: App,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with grid_of(dict.fromkeys(range(NODES), USUAL) | {2: hostile}) as grid:
        found = arrays_of(run(tmp_path, grid, noiseless()))
    for name in SHAPES:
        np.testing.assert_array_equal(found[name], without_two[name])
    assert SECRET not in caplog.text
    assert str(FIRST_ID + 2) not in caplog.text


# The longest sum of one user that has equal components: 22·a² ≤ B.
LONGEST = math.isqrt(squared_bound(NORM) // sum(math.prod(shape) for shape in SHAPES.values()))


def equal(component: int) -> App:
    """Sends a sum of equal components, and one user."""
    counted = round(1.0 / CONTRIBUTORS.group.granularity)
    return summing(lambda size: np.append(np.full(size - 1, component), counted))


@pytest.mark.parametrize(
    ("hostile", "moves"),
    [
        (weights(lambda w: w + 1e30), NORM),
        (weights(lambda w: w - 1e5), NORM),
        (equal(LONGEST), NORM),
        (equal(LONGEST + 1), 0.0),
    ],
    ids=["far", "near", "a sum of one", "a longer sum"],
)
def test_no_node_moves_the_model_by_more_than_its_norm_over_all_users(
    tmp_path: Path, without_two: dict[str, np.ndarray], hostile: App, moves: float
) -> None:
    with grid_of(dict.fromkeys(range(NODES), USUAL) | {2: hostile}) as grid:
        found = arrays_of(run(tmp_path, grid, noiseless()))
    distance = np.sqrt(sum(np.sum((found[n] - without_two[n]) ** 2) for n in SHAPES))
    assert distance == pytest.approx(moves / NODES, abs=1e-6)


def test_what_comes_late_counts_as_zero(tmp_path: Path, without_two: dict[str, np.ndarray]) -> None:
    over = threading.Event()

    def late(message: Message, context: Context) -> Message:
        over.wait()
        return USUAL(message, context)

    strategy = PrivateStrategy(noiseless(), ids(), "crowd", tmp_path / "l.sqlite")
    with grid_of(dict.fromkeys(range(NODES), USUAL) | {2: late}) as grid:
        try:
            found = arrays_of(strategy.start(grid, record_of(START), 1, timeout=5.0))
        finally:
            over.set()
    for name in SHAPES:
        np.testing.assert_array_equal(found[name], without_two[name])


def test_a_plain_update_of_a_node_of_many_users_counts_as_zero(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with grid_of({0: USUAL}) as grid:
        found = arrays_of(run(tmp_path, grid, noiseless(), {FIRST_ID: 2}))
    for name, start in START.items():
        np.testing.assert_array_equal(found[name], start)
    assert "brings several users, but has no clipping_mod" in caplog.text


class TestNodes(TransportConformance):
    """Nodes of one user and of several, with the mod and without; the last user always fails."""

    @pytest.fixture(autouse=True)
    def _made(self) -> Iterator[None]:
        nodes = {FIRST_ID: 3, FIRST_ID + 1: 1, FIRST_ID + 2: 1, FIRST_ID + 3: 1}
        with grid_of({0: OF_MANY, 1: USUAL, 2: WITH_MOD, 3: raising}) as grid:
            model = TrainedModel.of(record_of(START), [])
            self._transport = NodesTransport(grid, nodes, model, ConfigRecord(), 120.0)
            yield

    def transport(self) -> Transport:
        return self._transport

    def request(self) -> RoundRequest:
        layout = Layout.of(START)
        clipping, local = Clipping(layout, flat(layout, 0.01)), LocalTraining(1.0, steps=1)
        return RoundRequest("run", 3, 0, START, clipping, local, np.arange(6), bytes(32))


# Who is asked.


def test_the_cohort_that_is_recorded_is_the_one_that_is_asked_by_node_and_user(
    tmp_path: Path,
) -> None:
    brought = {FIRST_ID + k: 1 + k % 3 for k in range(12)}
    with grid_of(dict.fromkeys(range(14), OF_MANY)) as grid:  # two of them are not named
        run(tmp_path, grid, private(), brought, rounds=6)
        sent = list(grid.sent)
    everyone = [(node, user) for node, users in brought.items() for user in range(users)]
    with (
        Ledger.open(tmp_path / "l.sqlite") as ledger,
        ParticipationRecord.open(tmp_path / "l.participation.sqlite") as record,
    ):
        drawn = [record.users_of(row.cohort_commitment) for row in ledger.charges()]
        ledger.verify(record)
    assert len(drawn) == 6
    assert len({cohort.tobytes() for cohort in drawn}) > 1
    expected = [(r, everyone[user]) for r, cohort in enumerate(drawn, 1) for user in cohort]
    asked = []
    for message in sent:
        number = message.content["config"]["server-round"]
        users = np.frombuffer(message.content["fedpriv"]["parts"][1], "<i8").tolist()
        asked += [(number, (message.metadata.dst_node_id, user)) for user in users]
    assert asked == expected
    per_round = [(m.content["config"]["server-round"], m.metadata.dst_node_id) for m in sent]
    assert len(set(per_round)) == len(per_round)


def test_of_a_pass_every_node_is_asked_once_and_the_pass_is_charged_once(tmp_path: Path) -> None:
    mechanism = Mechanism(
        RandomAllocation(3), fedpriv.Flat(NORM), 1.0, epsilon=50.0, delta=DELTA
    )  # fmt: skip
    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        result = run(tmp_path, grid, mechanism, rounds=4)
        asked = [(m.content["config"]["server-round"], m.metadata.dst_node_id) for m in grid.sent]
    assert sorted(node for number, node in asked if number <= 3) == sorted(ids())
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        rows, spent = list(ledger.charges()), ledger.spent()
    assert [row.part for row in rows] == [0, 1, 2, 0]
    costs = [epsilon([replace(spent[0], count=n)], DELTA).epsilon for n in (1, 1, 1, 2)]
    figures = result.train_metrics_clientapp
    assert [figures[number]["privacy/epsilon"] for number in (1, 2, 3, 4)] == costs


def test_nodes_that_are_struck_off_in_the_middle_of_a_pass_do_not_move_others(
    tmp_path: Path,
) -> None:
    mechanism = Mechanism(RandomAllocation(3), fedpriv.Flat(NORM), 1.0, epsilon=50.0, delta=DELTA)
    nodes = ids()

    def evaluate(number: int, _arrays: ArrayRecord) -> None:
        if number:
            del nodes[next(iter(nodes))]

    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        run(tmp_path, grid, mechanism, nodes, rounds=3, evaluate_fn=evaluate)
        asked = [message.metadata.dst_node_id for message in grid.sent]
    assert sorted(asked) == sorted(ids())


def test_noise_is_correlated_as_the_mechanism_says(tmp_path: Path) -> None:
    noise = BandedNoise(coefficients=(1.0, 0.5))
    mechanism = Mechanism(
        Separated(4, 2), fedpriv.Flat(NORM), 1.0, epsilon=500.0, delta=DELTA, noise=noise
    )
    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        run(tmp_path, grid, mechanism, rounds=4)
        asked = [
            (m.content["config"]["server-round"] % 2, m.metadata.dst_node_id) for m in grid.sent
        ]
    assert Counter(asked) == dict.fromkeys(set(asked), 2)
    assert sorted(node for _, node in set(asked)) == sorted(ids())
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        (event,) = ledger.spent()
    assert event.strategy == (1.0, 0.5)


def test_noise_that_the_policy_has_no_analysis_of_is_refused(tmp_path: Path) -> None:
    noise = BandedNoise(coefficients=(1.0, 0.5))
    mechanism = Mechanism(
        Poisson(0.5), fedpriv.Flat(NORM), 1.0, epsilon=500.0, delta=DELTA, noise=noise
    )
    sentence = "noise is correlated and sampling is poisson, which has no analysis"
    with (
        grid_of(dict.fromkeys(range(NODES), USUAL)) as grid,
        pytest.raises(InvalidValueError, match=sentence),
    ):
        run(tmp_path, grid, mechanism)
    assert not (tmp_path / "l.sqlite").exists()


def test_cohorts_of_a_fixed_size_have_it(tmp_path: Path) -> None:
    mechanism = Mechanism(FixedSize(2), fedpriv.Flat(NORM), 1.0, epsilon=500.0, delta=DELTA)
    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        run(tmp_path, grid, mechanism, rounds=3)
        asked = Counter(message.content["config"]["server-round"] for message in grid.sent)
    assert asked == {1: 2, 2: 2, 3: 2}


def test_nodes_that_are_not_connected_count_as_zero_in_the_same_denominator(
    tmp_path: Path,
) -> None:
    with grid_of({1: USUAL}) as grid:
        found = arrays_of(run(tmp_path, grid, noiseless()))
    clipped = slow_clip(update_of(1), [list(SHAPES)], NORM, ONES)
    for name, start in START.items():
        np.testing.assert_allclose(found[name], start + clipped[name] / NODES, atol=1e-6)


def test_connected_waits_for_the_nodes_and_refuses_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedpriv.flower.strategy._NODES_CHECK_SECONDS", 0.01)
    with grid_of({0: USUAL}) as grid:
        asked = iter([[], [FIRST_ID + 1], [FIRST_ID + 1, FIRST_ID]])
        monkeypatch.setattr(grid, "get_node_ids", lambda: next(asked))
        assert connected(grid, 2, users=3) == {FIRST_ID: 3, FIRST_ID + 1: 3}
    with grid_of({0: USUAL, 1: USUAL}) as grid, pytest.raises(InvalidValueError, match="name them"):
        connected(grid, 1)


# What is charged.


def test_each_round_says_the_price_of_the_ledger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "flwr")
    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        result = run(tmp_path, grid, private(), rounds=3)
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        spent = ledger.spent()
        charges = list(ledger.charges())
    assert [row.round for row in charges] == [1, 2, 3]
    assert {row.event.sampling.population for row in charges} == {NODES}
    price = epsilon(spent, DELTA).epsilon
    assert result.train_metrics_clientapp[3]["privacy/epsilon"] == pytest.approx(price, rel=1e-12)
    assert result.train_metrics_clientapp[3]["privacy/delta"] == DELTA
    printed = f"{np.ceil(price * 1000) / 1000:.3f}"
    assert f"round 3 of 3 released, ε {printed} at δ 1e-05" in caplog.text


def test_training_stops_before_the_budget_and_a_restart_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        first = run(tmp_path, grid, private(budget=12.0), rounds=50)
        done = len(first.train_metrics_clientapp)
        assert 1 < done < 50
        last = first.train_metrics_clientapp[done]["privacy/epsilon"]
        assert last <= 12.0
        assert f"stopped after {done} of 50 rounds" in caplog.text
        asked = len(grid.sent)
        with pytest.raises(BudgetExceededError, match="no user was asked"):
            run(tmp_path, grid, private(budget=12.0), rounds=50)
        assert len(grid.sent) == asked
        # Another budget goes on where the ledger stands, as another run.
        again = run(tmp_path, grid, private(budget=20.0), rounds=1)
        assert last < again.train_metrics_clientapp[1]["privacy/epsilon"] <= 20.0
        with pytest.raises(LedgerError, match="crowd"):
            PrivateStrategy(private(), ids(), "others", tmp_path / "l.sqlite").start(
                grid, record_of(START)
            )
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        assert len({row.run for row in ledger.charges()}) == 2
        assert len(list(ledger.charges())) == done + 1


def test_a_calibrated_mechanism_has_all_its_rounds(tmp_path: Path) -> None:
    made = Mechanism.poisson(0.5, fedpriv.PerLayer(NORM))
    mechanism = made.calibrate(epsilon=6.0, delta=DELTA, rounds=4)
    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        result = run(tmp_path, grid, mechanism, rounds=4)
    assert 5.9 < result.train_metrics_clientapp[4]["privacy/epsilon"] <= 6.0


def test_the_noise_is_that_of_the_mechanism_whoever_answers(tmp_path: Path) -> None:
    start = {"w": np.zeros(20_000, np.float32)}
    with grid_of({}) as grid:
        result = run(tmp_path, grid, private(z=2.0), start=start)
    expected = 2.0 * NORM / (0.5 * NODES)
    # The estimate of a deviation from 20,000 draws is off by 0.5%; six times that.
    np.testing.assert_allclose(arrays_of(result)["w"].std(), expected, rtol=0.03)


def test_clipping_norms_follow_a_quantile_of_users(tmp_path: Path) -> None:
    mechanism = Mechanism.poisson(1.0, fedpriv.Flat(10.0), adaptive=fedpriv.AdaptiveClipping(0.5))
    mechanism = mechanism.with_noise(1e-3, epsilon=1e9, delta=DELTA)
    for k, app in enumerate((USUAL, WITH_MOD)):
        with grid_of(dict.fromkeys(range(NODES), app)) as grid:
            result = run(tmp_path / str(k), grid, mechanism, rounds=3)
        figures = result.train_metrics_clientapp
        norms = [np.linalg.norm(np.concatenate([u.ravel() for u in update_of(i).values()]))
                 for i in range(NODES)]  # fmt: skip
        for number in (1, 2, 3):
            norm = figures[number]["clipping_norm/update"]
            within = np.mean(np.array(norms) <= norm)
            assert figures[number]["unclipped/update"] == pytest.approx(within, abs=0.05)
        assert figures[2]["clipping_norm/update"] != figures[1]["clipping_norm/update"]


# What is trained.


def test_frozen_and_whole_arrays_keep_their_values_and_types(tmp_path: Path) -> None:
    start = START | {
        "bn.running_var": np.ones(2, np.float32),
        "bn.steps": np.array(7),
        "scale": np.array(0.25),
    }
    strategy = PrivateStrategy(
        noiseless(), ids(), "crowd", tmp_path / "l.sqlite", frozen=["*.running_*", "head.*"]
    )
    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        found = arrays_of(strategy.start(grid, record_of(start), 1))
    assert list(found) == list(start)
    for name, array in start.items():
        assert found[name].dtype == np.asarray(array).dtype
        trained = name in {"conv.weight", "conv.bias", "scale"}
        assert np.array_equal(found[name], array) != trained


def test_the_model_is_evaluated_before_and_after_each_round_and_configs_arrive(
    tmp_path: Path,
) -> None:
    seen: list[tuple[int, float]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append((number, float(arrays["scale"].numpy())))
        return MetricRecord({"accuracy": 0.5})

    with grid_of(dict.fromkeys(range(NODES), USUAL)) as grid:
        config = ConfigRecord({"lr": 0.1})
        more = {"evaluate_fn": evaluate, "train_config": config}
        result = run(tmp_path, grid, noiseless(), rounds=2, **more)
        assert {message.content["config"]["lr"] for message in grid.sent} == {0.1}
    assert dict(config) == {"lr": 0.1}
    assert [number for number, _ in seen] == [0, 1, 2]
    assert seen[0][1] == 0.25 != seen[1][1] != seen[2][1]
    assert list(result.evaluate_metrics_serverapp) == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mechanism": Mechanism.poisson(0.5, fedpriv.Flat(1.0))}, "calibrate"),
        ({"mechanism": Mechanism(Poisson(0.5), fedpriv.Flat(1.0), 1.0, 1.0, DELTA,
                                 metrics={"accuracy": {}})}, "metrics"),
        ({"mechanism": Mechanism(Poisson(0.5), fedpriv.Flat(1.0), 1.0, 1.0, DELTA,
                                 unit="example")}, "with Flower it must be 'user'"),
        ({"mechanism": Mechanism(AsIf(Poisson(0.5), 1000), fedpriv.Flat(1.0), 1.0, 1.0, DELTA)},
         "a projection protects nobody"),
        ({"nodes": {}}, "0 nodes"),
        ({"nodes": {1: 0}}, "node 1 brings 0 users"),
        ({"nodes": {1: 1, 2: 1.5}}, "node 2 brings 1.5 users"),
        ({"nodes": {"1": 1}}, "node '1' brings 1 users"),
        ({"nodes": {np.uint64(5): 1}}, "both must be whole numbers"),
        ({"frozen": ["*"]}, "no array of"),
        ({"frozen": ["body.*"]}, "no array is named"),
        ({"mechanism": None}, "mechanism is None"),
        ({"nodes": [1, 2]}, "nodes is of the type list"),
        ({"population": None}, "population is None"),
        ({"ledger": None}, "ledger is None"),
        ({"server": None}, "server is None"),
        ({"frozen": None}, "frozen is None"),
        ({"frozen": [3]}, "a pattern of frozen is of the type int"),
        ({"name": 3}, "name is of the type int"),
    ],
)  # fmt: skip
def test_what_cannot_be_private_is_refused(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    given = {"mechanism": private(), "nodes": ids(), "population": "crowd",
             "ledger": tmp_path / "l.sqlite"}  # fmt: skip
    with grid_of({}) as grid, pytest.raises(InvalidValueError, match=said):
        PrivateStrategy(**(given | change)).start(grid, record_of(START))
    assert not (tmp_path / "l.sqlite").exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"initial_arrays": START}, "initial_arrays is of the type dict"),
        ({"initial_arrays": None}, "initial_arrays is None"),
        ({"train_config": {"rate": 1}}, "train_config is of the type dict"),
    ],
)
def test_what_is_no_record_of_flower_is_refused(
    tmp_path: Path, given: dict[str, object], said: str
) -> None:
    strategy = PrivateStrategy(private(), ids(), "crowd", tmp_path / "l.sqlite")
    with grid_of({}) as grid, pytest.raises(InvalidValueError, match=said):
        strategy.start(grid, **({"initial_arrays": record_of(START)} | given))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [np.float32(np.nan), np.float16(np.inf), np.float64(1e300)])
def test_a_model_that_no_update_can_move_is_refused(tmp_path: Path, value: np.floating) -> None:
    start = START | {"scale": np.array(value)}
    sentence = "arrays ['scale'] hold NaN, infinity"
    with grid_of({}) as grid, pytest.raises(InvalidValueError, match=re.escape(sentence)):
        run(tmp_path, grid, private(), start=start)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seconds", [0, -1.0, math.nan, math.inf, None, "60"])
def test_a_time_that_is_none_is_refused_before_anyone_is_drawn(
    tmp_path: Path, seconds: object
) -> None:
    strategy = PrivateStrategy(private(), ids(), "crowd", tmp_path / "l.sqlite")
    with grid_of({}) as grid, pytest.raises(InvalidValueError, match="timeout is"):
        strategy.start(grid, record_of(START), timeout=seconds)
    assert list(tmp_path.iterdir()) == []


def test_figures_of_users_are_not_released_and_rounds_are_not_taken_apart(tmp_path: Path) -> None:
    strategy: Strategy = PrivateStrategy(private(), ids(), "crowd", tmp_path / "l.sqlite")
    with grid_of({}) as grid:
        with pytest.raises(InvalidValueError, match="without noise"):
            strategy.start(grid, record_of(START), evaluate_config=ConfigRecord())
        with pytest.raises(InvalidValueError, match="call start"):
            strategy.configure_train(1, record_of(START), ConfigRecord(), grid)
        with pytest.raises(InvalidValueError, match="call start"):
            strategy.aggregate_train(1, [])


# The mod.


def message_of(*parts: bytes, kind: str = MessageType.TRAIN) -> Message:
    LocalGrid({}).close()  # sets what messages are made with
    sent = flower_messages.content_of(*parts) if parts else RecordDict()
    sent["arrays"], sent["config"] = record_of(START), ConfigRecord({"server-round": 1})
    return Message(sent, 1, kind)


CONTEXT = Context(1, 1, {"partition-id": 0}, RecordDict(), {})


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (bytes(8),),
        (b"\xff", bytes(8)),
        (b"", bytes(8)),
        (b"", bytes(7)),
        (b"", bytes(16)),
    ],
)
def test_the_mod_trains_only_where_it_is_told_how_to_clip(parts: tuple[bytes, ...]) -> None:
    called = []
    with pytest.raises(WireError):
        clipping_mod(message_of(*parts), CONTEXT, lambda *given: called.append(given))
    other = message_of(*parts, kind="train.other")
    with pytest.raises(WireError):
        clipping_mod(other, CONTEXT, lambda *given: called.append(given))
    assert not called


def test_the_mod_lets_other_messages_pass() -> None:
    reply = WITH_MOD(message_of(kind=MessageType.EVALUATE), CONTEXT)
    assert dict(reply.content["metrics"]) == {"loss": 0.5}


def test_what_an_app_does_to_its_message_and_configs_does_not_reach_the_next_user(
    tmp_path: Path,
) -> None:
    seen = []

    def using_up(message: Message, context: Context) -> Message:
        content, configs = message.content, (context.node_config, context.run_config)
        found = [content["config"]["rates"].pop(), *(config.get("last") for config in configs)]
        seen.append((*found, float(content["arrays"]["scale"].numpy())))
        for config in configs:
            config["last"] = content["config"]["user"]
        content["arrays"]["scale"].data = content["arrays"]["conv.bias"].data
        return usual_app(by_config)(message, context)

    def many(message: Message, context: Context) -> Message:
        return clipping_mod(message, context, using_up)

    with grid_of({0: many}) as grid:
        config = ConfigRecord({"rates": [0.1, 0.2, 0.3]})
        run(tmp_path, grid, noiseless(), {FIRST_ID: 3}, train_config=config)
    assert seen == [(0.3, None, None, 0.25)] * 3


def test_a_user_that_fails_at_a_node_counts_as_zero_and_others_do_not_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    states = []

    def failing(message: Message, context: Context) -> Message:
        user = message.content["config"]["user"]
        states.append(len(context.state))
        context.state["last"] = ConfigRecord({"user": user})
        if user == 1:
            raise RuntimeError(SECRET)
        if user == 2:
            return Message(Error(code=2, reason=SECRET), reply_to=message)
        if user == 3:
            message.content["arrays"].clear()
            return Message(RecordDict(), reply_to=message)
        return usual_app(by_config)(message, context)

    def many(message: Message, context: Context) -> Message:
        return clipping_mod(message, context, failing)

    with grid_of({0: many}) as grid:
        found = arrays_of(run(tmp_path, grid, noiseless(), {FIRST_ID: 6}))
    clipped = [slow_clip(update_of(user), [list(SHAPES)], NORM, ONES) for user in (0, 4, 5)]
    for name, start in START.items():
        expected = start + sum(each[name] for each in clipped) / 6
        np.testing.assert_allclose(found[name], expected, rtol=0.0, atol=1e-5)
    assert states == [0] * 6
    assert SECRET not in caplog.text
    assert "a user counts as zero: RuntimeError at" in caplog.text


@pytest.mark.parametrize("keep_going", [False, True])
def test_rounds_end_once_noised_counts_say_that_no_app_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, keep_going: bool
) -> None:
    mechanism = replace(private(budget=9e3), noise_multiplier=0.2, contributors_share=0.5)
    with grid_of(dict.fromkeys(range(NODES), raising)) as grid:
        found = run(tmp_path, grid, mechanism, rounds=12, keep_going=keep_going)
    done = len(found.train_metrics_clientapp)
    assert done == 12 if keep_going else done < 12
    with Ledger.open(tmp_path / "l.sqlite") as ledger:
        assert ledger.head.count == done
    said = [each.message for each in caplog.records if each.message.startswith("too few users cou")]
    assert len(said) == (not keep_going)
    assert all("the guarantee is the budget of ε = 9000.0" in text for text in said)
