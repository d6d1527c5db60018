"""The engine against the obvious: one user at a time, with torch's own optimiser."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from transport_conformance import TransportConformance

from fedpriv.data.store import UserStore
from fedpriv.engine import layers as engine_layers
from fedpriv.engine.chunks import lane_bytes, lanes_within, numbers_per_example
from fedpriv.engine.qualifying import layers_of
from fedpriv.engine.schedule import schedule
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport, device_named
from fedpriv.errors import InvalidValueError
from fedpriv.federated.transport import LocalTraining, RoundRequest
from fedpriv.privacy.contribution import Clipping
from fedpriv.privacy.groups import equal_split, flat, joint, layers, per_layer, scales_by_dimension
from fedpriv.privacy.layout import Layout
from tests.engine.everyone import users_of

KEY = bytes(range(32))
SIZES = [5, 0, 1, 12, 7, 7, 3, 30, 2, 11]


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def make_task(kind: str = "layered") -> Task:
    torch.manual_seed(0)
    middle = {
        "general": lambda: [nn.BatchNorm1d(8), nn.Tanh()],
        "layered": lambda: [nn.GroupNorm(2, 8), nn.Tanh()],
        "linear": lambda: [nn.Tanh(), nn.Linear(8, 8, bias=False), nn.Tanh()],
    }[kind]()
    return Task(nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 3)), cross_entropy)


def make_users() -> UserStore:
    return users_of(SIZES)


def request_for(task: Task, local: LocalTraining, users: list[int], strategy: str) -> RoundRequest:
    parameters = task.parameters()
    layout = Layout.of(parameters)
    groups = {
        "flat": lambda: flat(layout, 0.3),
        "per-layer": lambda: per_layer(layout, layers(layout), equal_split(layers(layout), 0.3)),
        "joint": lambda: joint(layout, 0.3, scales_by_dimension(layout)),
    }[strategy]()
    clipping = Clipping(layout, groups)
    return RoundRequest("run", 3, 0, parameters, clipping, local, np.array(users, np.int64), KEY)


def one_at_a_time(task: Task, users: UserStore, request: RoundRequest) -> np.ndarray:
    """Contributions summed the slow way: torch.optim.SGD on a deep copy of the model per user."""
    layout = Layout.of(request.parameters)
    query = request.clipping
    total = np.zeros(layout.dimension)
    local = request.local
    for user in request.users.tolist():
        size = int(users.sizes[user])
        if size == 0:
            continue
        plan = schedule(np.array([user]), users.offsets[[user]], np.array([size]), local, KEY)
        model = copy.deepcopy(task.model)
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(
            model.parameters(), lr=local.learning_rate, momentum=local.momentum
        )
        for rows, weights in zip(plan.rows[0], plan.weights[0], strict=True):
            batch = users.take(rows[weights > 0])
            optimizer.zero_grad()
            loss = cross_entropy(
                model(torch.from_numpy(batch["x"])), torch.from_numpy(batch["y"])
            ).mean()
            drift = sum(
                ((p - s) ** 2).sum() for p, s in zip(model.parameters(), start, strict=True)
            )
            (loss + local.proximal / 2 * drift).backward()
            optimizer.step()
        update = {
            name: (p.detach() - s).numpy()
            for (name, p), s in zip(model.named_parameters(), start, strict=True)
        }
        total += query.contribution(update)
    return total


def with_lanes(
    task: Task, users: UserStore, local: LocalTraining, lanes: int
) -> InProcessTransport:
    """Transport with memory for just so many users in a chunk."""
    layers = layers_of(task, torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64))
    numbers = numbers_per_example(task, users.examples_of(0))
    one = lane_bytes(task, numbers, local, max(SIZES), layers)
    return InProcessTransport(task, users, torch.device("cpu"), lanes * one)


class TestInProcessTransport(TransportConformance):
    """The last user's class is out of range, which makes the loss raise."""

    def transport(self) -> InProcessTransport:
        users = make_users()
        users.fields["y"][users.rows_of(len(SIZES) - 1)] = 99
        return InProcessTransport(make_task(), users, torch.device("cpu"), 100_000)

    def request(self) -> RoundRequest:
        local = LocalTraining(0.1, batch_size=4, epochs=2)
        return request_for(make_task(), local, list(range(len(SIZES))), "flat")


def test_a_failing_user_changes_no_bit_of_users_who_train_alone() -> None:
    conformance = TestInProcessTransport()
    transport = replace(conformance.transport(), chunk_memory=1)
    request = conformance.request()
    others = replace(request, users=request.users[:-1])
    total, without = (sum(p.total for p in transport.collect(r)) for r in (request, others))
    assert np.any(without)
    np.testing.assert_array_equal(total, without)


LOCALS = [
    LocalTraining(0.1, batch_size=4, epochs=2),
    LocalTraining(0.1, batch_size=4, epochs=2, momentum=0.9),
    LocalTraining(0.1, batch_size=3, steps=5, proximal=0.7),
    LocalTraining(0.1, batch_size=3, steps=7, momentum=0.5, proximal=0.2),
    LocalTraining(1.0, steps=1),
]


@pytest.mark.parametrize("strategy", ["flat", "per-layer", "joint"])
@pytest.mark.parametrize("local", LOCALS, ids=str)
@pytest.mark.parametrize("lanes", [1, 3, 100])
@pytest.mark.parametrize("kind", ["general", "layered", "linear"])
def test_equals_one_user_at_a_time(
    strategy: str, local: LocalTraining, lanes: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Corrections do not pay for layers as small as these; they must be right all the same.
    monkeypatch.setattr(engine_layers, "_TOUCHES", 10**9 if kind == "linear" else 0)
    task, users = make_task(kind), make_users()
    request = request_for(task, local, list(range(len(SIZES))), strategy)
    transport = with_lanes(task, users, local, lanes)
    partials = list(transport.collect(request))
    assert max(partial.users for partial in partials) <= lanes
    total = sum(partial.total for partial in partials)
    np.testing.assert_allclose(total, one_at_a_time(task, users, request), atol=2e-6)


@pytest.mark.parametrize("lanes", [1, 2, 4, 100])
@pytest.mark.parametrize("seed", range(3))
def test_order_and_chunks_do_not_matter(lanes: int, seed: int) -> None:
    task, users = make_task(), make_users()
    local = LocalTraining(0.1, batch_size=4, epochs=1)
    shuffled = np.random.default_rng(seed).permutation(len(SIZES)).tolist()
    totals = [
        sum(p.total for p in with_lanes(task, users, local, n).collect(request))
        for n, request in (
            (3, request_for(task, local, list(range(len(SIZES))), "flat")),
            (lanes, request_for(task, local, shuffled, "flat")),
        )
    ]
    np.testing.assert_allclose(totals[0], totals[1], atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_a_user_with_bad_data_counts_as_zero(bad: float) -> None:
    task, users = make_task(), make_users()
    local = LocalTraining(0.1, batch_size=4, epochs=2)
    everyone = request_for(task, local, list(range(len(SIZES))), "flat")
    others = request_for(task, local, [u for u in range(len(SIZES)) if u != 3], "flat")
    without = sum(p.total for p in with_lanes(task, users, local, 4).collect(others))
    users.fields["x"][users.rows_of(3)] = bad
    total = sum(p.total for p in with_lanes(task, users, local, 4).collect(everyone))
    # A normalised 1e38 overflows to NaN in this model.
    np.testing.assert_allclose(total, without, atol=1e-6)


def test_dropout_differs_between_users_and_repeats_with_the_key() -> None:
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(6, 30), nn.Dropout(0.5), nn.Linear(30, 3)), cross_entropy)
    users = make_users()
    local = LocalTraining(0.1, steps=1)
    request = request_for(task, local, list(range(len(SIZES))), "flat")
    transport = with_lanes(task, users, local, 100)
    state = torch.random.get_rng_state()
    first, again = (sum(p.total for p in transport.collect(request)) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert torch.equal(state, torch.random.get_rng_state())
    other = RoundRequest(**{**vars(request), "local_key": bytes(reversed(KEY))})
    assert not np.allclose(first, sum(p.total for p in transport.collect(other)))


def test_frozen_parameters_stay_out_of_the_update() -> None:
    task = make_task()
    task.model[0].weight.requires_grad_(requires_grad=False)
    assert "0.weight" not in task.parameters()
    request = request_for(task, LocalTraining(0.1, steps=1), [0, 3], "flat")
    (partial,) = InProcessTransport(task, make_users(), torch.device("cpu"), 10**7).collect(request)
    assert partial.total.shape == (Layout.of(task.parameters()).dimension,)


def test_unknown_devices_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="'gpu'"):
        device_named("gpu")
    assert device_named("cpu") == torch.device("cpu")
    assert device_named("auto").type in ("cpu", "cuda")


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="0 bytes"):
        lanes_within(0, 100)
    assert lanes_within(1, 100) == 1
    assert lanes_within(1000, 100) == 10


def test_the_first_users_data_cannot_stop_a_round() -> None:
    # Words out of the vocabulary make the model itself raise, wherever it is called on them.
    rng = np.random.default_rng(0)
    fields = {"x": rng.integers(0, 9, (sum(SIZES), 4)), "y": rng.integers(0, 3, sum(SIZES))}
    users = UserStore(fields, make_users().offsets)
    users.fields["x"][users.rows_of(0)] = 10**6
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3))
    task = Task(model, cross_entropy)
    local = LocalTraining(0.1, batch_size=4, epochs=1)
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**6)
    everyone = request_for(task, local, list(range(len(SIZES))), "flat")
    others = request_for(task, local, list(range(1, len(SIZES))), "flat")
    total, without = (sum(p.total for p in transport.collect(r)) for r in (everyone, others))
    assert np.any(without)
    np.testing.assert_allclose(total, without, atol=1e-6)


def test_a_population_without_any_example_sums_to_nothing() -> None:
    empty = {"x": np.zeros((0, 6), np.float32), "y": np.zeros(0, np.int64)}
    users = UserStore(empty, np.zeros(4, np.int64))
    task, local = make_task(), LocalTraining(0.1, steps=1)
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**6)
    assert list(transport.collect(request_for(task, local, [0, 1, 2], "flat"))) == []
