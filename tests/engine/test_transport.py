"""The engine against the obvious: one user at a time, with torch's own optimiser."""

import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fedpriv.data.population import UserStore
from fedpriv.engine import side_by_side
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport, chunk_memory_of, device_named
from fedpriv.errors import InvalidValueError
from fedpriv.experiment.grouping import equal_split, scales_by_dimension
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat, joint, layers, per_layer
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import total_of, users_of
from tests.engine.plain import batches_of
from tests.training.transport_conformance import TransportConformance

KEY = bytes(range(32))
CPU, MEMORY = torch.device("cpu"), 10**6
SIZES = [5, 0, 1, 12, 7, 7, 5, 30, 1, 12]


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
    total = np.zeros(request.clipping.layout.dimension, np.int64)
    local = request.local
    for user in request.users.tolist():
        if not users.sizes[user]:
            continue
        own = user, int(users.offsets[user]), int(users.sizes[user])
        model = copy.deepcopy(task.model)
        start = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(
            model.parameters(), lr=local.learning_rate, momentum=local.momentum
        )
        for rows in batches_of(*own, local, KEY):
            batch = users.take(rows)
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
        total += request.clipping.contribution(update)
    return total


@cache
def transport_with(processes: int | None) -> InProcessTransport:
    """One for all rounds of all tests, as a road is settled before the first."""
    users = make_users()
    users.fields["y"][users.rows_of(len(SIZES) - 1)] = 99
    return InProcessTransport(make_task(), users, CPU, MEMORY, processes=processes)


class TestInProcessTransport(TransportConformance):
    """The last user's class is out of range, which makes the loss raise."""

    processes: int | None = None

    def transport(self) -> InProcessTransport:
        return transport_with(self.processes)

    def request(self) -> RoundRequest:
        local = LocalTraining(0.1, batch_size=4, epochs=2)
        return request_for(make_task(), local, list(range(len(SIZES))), "flat")


LOCALS = [
    LocalTraining(0.1, batch_size=4, epochs=2),
    LocalTraining(0.1, batch_size=3, steps=7, momentum=0.5, proximal=0.7),
    LocalTraining(1.0, steps=1),
]


@pytest.mark.parametrize("local", LOCALS, ids=repr)
@pytest.mark.parametrize("kind", ["general", "layered", "linear"])
@pytest.mark.parametrize("path", ["alone", "together"])
def test_equals_one_user_at_a_time(
    path: Path, kind: str, local: LocalTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    # To learn without weights does not pay for layers this small; it must be right all the same.
    monkeypatch.setattr(side_by_side, "_TOUCHES", 10**9 if kind == "linear" else 0)
    task, users = make_task(kind), make_users()
    transport = InProcessTransport(task, users, CPU, MEMORY, processes=1, path=path)
    for strategy in ("flat", "per-layer", "joint"):
        request = request_for(task, local, list(range(len(SIZES))), strategy)
        expected = one_at_a_time(task, users, request)
        found, in_units = total_of(transport, request), request.clipping.in_units
        np.testing.assert_allclose(in_units(found), in_units(expected), atol=2e-6)


class Checkpointed(nn.Module):
    """Computes some layers again in the backward pass."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layers, x, use_reentrant=False)


@pytest.mark.parametrize("kind", ["a trained layer", "statistics that a round brings"])
def test_what_is_checkpointed_is_computed_again_by_the_same_numbers(kind: str) -> None:
    torch.manual_seed(0)
    trained = kind == "a trained layer"
    layer = nn.Linear(8, 8) if trained else nn.BatchNorm1d(8, affine=False)
    middle = Checkpointed(nn.Tanh(), layer, nn.Softplus())
    task = Task(nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 3)), cross_entropy)
    later = Task(copy.deepcopy(task.model), cross_entropy)  # as in a later round
    with torch.no_grad():
        own = (*later.model.parameters(), *later.model.buffers())
        for tensor in filter(torch.is_floating_point, own):
            tensor.add_(torch.rand_like(tensor))
    local = LocalTraining(0.3, batch_size=4, steps=3)
    request = request_for(later, local, list(range(len(SIZES))), "flat")
    request = replace(request, statistics=later.statistics())
    transport = InProcessTransport(task, make_users(), CPU, MEMORY, processes=1)
    found = total_of(transport, request)
    expected = one_at_a_time(later, make_users(), request)
    np.testing.assert_allclose(
        *(request.clipping.in_units(t) for t in (found, expected)), atol=2e-6
    )


class Overwriting(nn.Module):
    """A model that overwrites its frozen parameter after each use."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.head(x * self.frozen)
        self.frozen.data.fill_(float(x.detach().mean()))
        return outputs


class Doubling(Overwriting):
    """A model that doubles its frozen parameter with each use."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.head(x * self.frozen)
        self.frozen.data.mul_(2.0)
        return outputs


def test_the_slices_of_one_user_do_not_change_what_others_send() -> None:
    task, local = Task(Doubling(), cross_entropy), LocalTraining(0.1, steps=3)
    transport = InProcessTransport(task, make_users(), CPU, MEMORY, processes=1)
    request = request_for(task, local, list(range(len(SIZES))), "flat")
    expected = sum(
        total_of(transport, replace(request, users=request.users[[user]]))
        for user in range(len(SIZES))
    )
    np.testing.assert_array_equal(total_of(transport, request), expected)


def test_a_user_who_overwrites_frozen_parameters_changes_them_for_nobody_else() -> None:
    task = Task(Overwriting(), cross_entropy)
    transport = InProcessTransport(task, make_users(), CPU, MEMORY, processes=1, path="alone")
    local = LocalTraining(0.1, steps=1)
    request = request_for(task, local, list(range(len(SIZES))), "flat")
    expected = sum(
        total_of(transport, replace(request, users=request.users[[user]]))
        for user in range(len(SIZES))
    )
    np.testing.assert_array_equal(total_of(transport, request), expected)
    np.testing.assert_array_equal(task.model.frozen.detach(), 1.0)


def test_all_models_that_train_share_one_copy_of_frozen_parameters() -> None:
    task = Task(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3)), cross_entropy, frozen="0.*")
    trainer = InProcessTransport(task, make_users(), CPU, MEMORY)._trainer
    models = trainer.alone.model, trainer.side_by_side.kept.model, trainer.measured.kept.model
    assert len({model[0].weight.data_ptr() for model in models}) == 1
    assert len({model[0].weight.data_ptr() for model in (task.model, *models)}) == 2


def test_frozen_parameters_stay_out_of_the_update() -> None:
    task = make_task()
    task.model[0].weight.requires_grad_(requires_grad=False)
    assert "0.weight" not in task.parameters()
    request = request_for(task, LocalTraining(0.1, steps=1), [0, 3], "flat")
    found = total_of(InProcessTransport(task, make_users(), CPU, MEMORY), request)
    assert found.shape == (Layout.of(task.parameters()).dimension,)


def test_unknown_devices_are_refused() -> None:
    legal = "auto, cpu or cuda" if torch.cuda.is_available() else "auto or cpu"
    sentence = f"'gpu', which torch does not find here; it must be {legal}$"
    with pytest.raises(InvalidValueError, match=sentence):
        device_named("gpu")
    assert device_named("cpu") == torch.device("cpu")
    assert device_named("auto").type in ("cpu", "cuda")


@pytest.mark.parametrize("kind", ["general", "layered"])
def test_more_memory_is_for_more_lanes_whatever_users_there_are(kind: str) -> None:
    task, local = make_task(kind), LocalTraining(0.1, batch_size=4, steps=1)
    request = request_for(task, local, [0], "flat")
    given = {"processes": 1, "cohort": 200, "most_rows": 30}
    shapes = []
    for memory in (1, 2**13, 2**14, 2**40):
        road, other = (
            InProcessTransport(task, users, CPU, memory, **given).road(request)
            for users in (make_users(), users_of([300, 0, 2]))
        )
        assert road == other
        shapes.append(road.shapes)
    assert shapes[0] == ()
    lanes = [each[0] for each in shapes[1:]]
    assert lanes == sorted(set(lanes))


def test_chunks_take_what_suits_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**34, 2**40))
    assert [chunk_memory_of(3, device) for device in (cpu, gpu)] == [3 * 2**20] * 2
    assert [chunk_memory_of(None, device) for device in (cpu, gpu)] == [128 * 2**20, 2**32]


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
    transport = InProcessTransport(task, users, CPU, MEMORY)
    everyone = request_for(task, local, list(range(len(SIZES))), "flat")
    others = request_for(task, local, list(range(1, len(SIZES))), "flat")
    total, without = (total_of(transport, request) for request in (everyone, others))
    assert np.any(without)
    np.testing.assert_array_equal(total, without)


def test_a_population_without_any_example_sums_to_nothing() -> None:
    empty = {"x": np.zeros((0, 6), np.float32), "y": np.zeros(0, np.int64)}
    users = UserStore(empty, np.zeros(4, np.int64))
    task, local = make_task(), LocalTraining(0.1, steps=1)
    transport = InProcessTransport(task, users, CPU, MEMORY)
    assert list(transport.collect(request_for(task, local, [0, 1, 2], "flat"))) == []
