"""Which road users take, and in which shapes: public facts alone, and one trial before the draw."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from fedpriv.data.population import UserStore
from fedpriv.engine import roads
from fedpriv.engine.examples import Chunk, Examples
from fedpriv.engine.roads import Path, Road
from fedpriv.engine.schedule import counted, largest_batch, steps_of
from fedpriv.engine.side_by_side import step_class
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.trainer import Trainer, sizes_of
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping_torch import Updates
from fedpriv.training.local import SGD
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import request_under, torch_threads, total_of, users_of
from tests.isolation import LOCALS

CPU, MEMORY, USERS = torch.device("cpu"), 2**22, 40
BY_BATCHES = SGD(0.1, batch_size=2, epochs=1)


@pytest.fixture(autouse=True)
def _in_one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def transport_of(
    model: nn.Module, users: UserStore | None = None, **given: Any
) -> InProcessTransport:
    store = users_of([4] * USERS) if users is None else users
    given = {"cohort": USERS, "processes": 1, **given}
    return InProcessTransport(Task(model, cross_entropy), store, CPU, MEMORY, **given)


def request_to(transport: InProcessTransport, local: LocalTraining = BY_BATCHES) -> RoundRequest:
    return request_under(transport.task, local, transport.users.population, 0.3)


def road_of(model: nn.Module, local: LocalTraining = BY_BATCHES, **given: Any) -> Road:
    transport = transport_of(model, **given)
    return transport.road(request_to(transport, local))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


# What decides.


class Wide(nn.Module):
    """Computes `width` numbers between six inputs and three scores, by few weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 1), nn.Linear(1, 3)
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the scores [B, 3]."""
        return self.last(torch.tanh(self.first(x) * self.scale).mean(1, keepdim=True))


def test_lanes_have_room_for_what_a_model_computes() -> None:
    """A slice of two rows keeps two tensors of `width` numbers: no more lanes than memory holds."""
    for width in (10, 2_000, 20_000):
        road = road_of(Wide(width), path="together")
        assert road.shapes[0] <= max(1, MEMORY // (2 * 2 * width * 4)) + 31
        assert road.width == 2
    assert road_of(Wide(10), path="together").shapes[0] >= USERS
    with pytest.raises(ModelError, match="one of them fills the memory of a chunk"):
        road_of(Wide(1_000_000), path="together")


sizes_of_users = st.lists(st.integers(0, 300), min_size=1, max_size=20)


@settings(max_examples=5)
@given(sizes_of_users, st.sampled_from(LOCALS[:7]), st.sampled_from([3, 40]))
def test_shapes_follow_from_public_facts_alone(
    sizes: list[int], local: LocalTraining, cohort: int
) -> None:
    users = users_of(sizes)
    users.fields["x"][:] = np.nan
    users.fields["y"][:] = 99
    expected = road_of(mlp(), local, cohort=cohort)
    assert expected.shapes
    assert road_of(mlp(), local, cohort=cohort, users=users) == expected


def test_a_round_asks_for_nothing_that_was_not_settled_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = transport_of(mlp(), users_of([1, 9, 0, 200, 4]))
    request = request_to(transport)
    transport.prepare(replace(request, users=request.users[:0]))
    monkeypatch.setattr(roads, "_Trials", None)
    other = {name: tensor + np.float32(0.1) for name, tensor in request.parameters.items()}
    assert total_of(transport, request).any()
    assert total_of(transport, replace(request, round=2, parameters=other)).any()


@pytest.mark.parametrize("timed", [False, True])
def test_a_clock_is_asked_only_where_it_may_be(
    timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def ticking() -> float:
        asked.append(1.0)
        return sum(asked)

    monkeypatch.setattr(roads, "time", SimpleNamespace(process_time=ticking))
    assert road_of(mlp(), timed=timed).shapes
    assert bool(asked) == timed
    before = len(asked)
    for path in ("alone", "together"):
        assert bool(road_of(mlp(), timed=timed, path=path).shapes) == (path == "together")
    assert len(asked) == before


def test_what_is_hardly_faster_side_by_side_goes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        roads._Trials, "seconds", lambda _, road, _rows: 1.0 - 0.2 * bool(road.shapes)
    )
    assert not road_of(mlp(), timed=True).shapes
    monkeypatch.setattr(
        roads._Trials, "seconds", lambda _, road, _rows: 1.0 - 0.5 * bool(road.shapes)
    )
    assert road_of(mlp(), timed=True).shapes


@pytest.mark.parametrize("path", ["auto", "together"])
def test_a_model_of_which_much_is_computed_goes_alone_unless_it_is_asked_for(path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 3))
    local = SGD(0.1, batch_size=16, steps=1)
    transport = replace(transport_of(model, path=path, cohort=2), chunk_memory=2**28)
    assert transport.road(request_to(transport, local)).shapes  # layers learn without weights
    road = transport.road(request_to(transport, replace(local, momentum=0.5)))
    assert bool(road.shapes) == (path == "together")


# Chunks.


@settings(max_examples=50)
@given(
    sizes_of_users,
    st.sampled_from(LOCALS),
    st.sampled_from([Road(), Road((8, 4), 4), Road((64,), 1), Road((2,), 16)]),
    st.integers(1, 3),
    st.booleans(),
)
@example([1, 0, 4, 0, 9], BY_BATCHES, Road((8, 4), 4), 1, True)
def test_who_has_rows_is_in_one_chunk_and_who_has_none_in_none(
    sizes: list[int], local: LocalTraining, road: Road, processes: int, large: bool
) -> None:
    model = nn.Linear(6, 6000) if large else mlp()  # large layers learn without weights
    transport = transport_of(model, users_of(sizes))
    users = np.arange(len(sizes))[::2]
    found = sizes_of(transport.users, users)
    chunks = road.chunks(transport._trainer, local, users, found, processes)
    expected = [user for user in users.tolist() if sizes[user]]
    assert sorted(np.concatenate([users[:0], *(c.users for c in chunks)]).tolist()) == expected
    for chunk in chunks:
        assert len(chunk.users) <= (chunk.lanes if chunk.shapes else 1)
        assert chunk.shapes in ((), road.shapes)
        rows = counted(sizes_of(transport.users, chunk.users), local)
        steps, slices = steps_of(rows, local), -(-largest_batch(rows, local) // road.width)
        ways = {
            road.way(transport._trainer, local, *of_user)
            for of_user in zip(steps.tolist(), slices.tolist(), strict=True)
        }
        assert ways == {chunk.lean if chunk.shapes else None}
        assert not chunk.lean or len({step_class(step) for step in steps.tolist()}) == 1


# The trial.


def plant(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Chunk, dict[str, torch.Tensor]], None]
) -> None:
    """Have users side by side be given something else."""
    honest = Trainer._moved

    def planted(trainer: Trainer, asked: RoundRequest, start: Any, examples: Examples) -> Updates:
        updates, chunk = honest(trainer, asked, start, examples), examples.chunk
        if chunk.shapes:
            updates = {name: update[:].clone() for name, update in updates.items()}
            change(chunk, updates)
        return updates

    monkeypatch.setattr(Trainer, "_moved", planted)


ULP = 1.0 + 2.0**-23


def at_place(place: int) -> Callable[[Chunk, dict[str, torch.Tensor]], None]:
    """One lane computes otherwise, by its last bit."""

    def change(_: Chunk, updates: dict[str, torch.Tensor]) -> None:
        updates["0.weight"][place] *= ULP

    return change


def by_parity(_: Chunk, updates: dict[str, torch.Tensor]) -> None:
    updates["2.bias"][::2] *= ULP


@pytest.mark.parametrize("change", [at_place(0), at_place(17), at_place(-1), by_parity])
def test_bits_that_depend_on_a_place_are_found(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, change)
    assert road_of(mlp()).shapes == ()
    with pytest.raises(ModelError, match="'together' and users cannot go side by side: their pla"):
        road_of(mlp(), path="together")


def test_a_number_of_lanes_with_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, seen = road_of(mlp()).shapes, list[int]()
    assert len(shapes) > 2

    def change(chunk: Chunk, updates: dict[str, torch.Tensor]) -> None:
        seen.append(chunk.lanes)
        if chunk.lanes == shapes[1]:
            updates["0.weight"] *= ULP

    plant(monkeypatch, change)
    transport = transport_of(mlp())
    request = request_to(transport)
    assert transport.road(request).shapes == (shapes[0], *shapes[2:])
    seen.clear()
    for users in range(1, USERS + 1):
        list(transport.collect(replace(request, users=request.users[:users])))
    assert set(seen) == {shapes[0], *shapes[2:]}


class Sorted(nn.Module):
    """Looks at rows beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - x.sort(0).values)


class Noisy(nn.Module):
    """Draws numbers that no seed of torch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(np.random.default_rng().uniform(0.5, 1.5))


class Raising(nn.Linear):
    """Cannot be trained."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("no gradient")
        return super().forward(x)


def test_a_model_whose_rows_mix_goes_alone_or_is_refused_side_by_side() -> None:
    road = road_of(Sorted())
    assert road.shapes == ()
    assert "sort" in str(road)
    with pytest.raises(ModelError, match="'together' and users cannot go side by side: sort"):
        road_of(Sorted(), path="together")


class Signs(SGD):
    """An algorithm of one's own, of which nothing is known."""

    def direction(self, step: Any) -> Any:
        return step.gradient.sign(), ()


def test_an_algorithm_that_is_not_known_goes_alone() -> None:
    assert road_of(mlp(), Signs(0.1, epochs=1)).shapes == ()
    with pytest.raises(ModelError, match="Signs is not known to keep users apart"):
        road_of(mlp(), Signs(0.1, epochs=1), path="together")


@pytest.mark.parametrize("path", ["auto", "alone", "together"])
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Noisy(), "training the same user twice gives two results"),
        (Raising(6, 3), "cannot be trained with float32 activations: no gradient"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anyone_is_drawn(
    model: nn.Module, why: str, path: Path
) -> None:
    transport = transport_of(model, path=path)
    request = request_to(transport)
    with pytest.raises(ModelError, match=why):
        transport.prepare(replace(request, users=request.users[:0]))


class OnlyPairs(nn.Module):
    """Takes two rows at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) % 2:
            raise ValueError("an odd number of rows")
        return self.layer(x)


def test_whether_a_round_takes_place_does_not_follow_from_sizes() -> None:
    expected = road_of(OnlyPairs(), path="alone", users=users_of([2, 4]))
    assert road_of(OnlyPairs(), path="alone", users=users_of([3, 1])) == expected
    transport = transport_of(OnlyPairs(), users_of([3, 4, 1]), path="alone")
    request = request_to(transport, SGD(0.1, epochs=1))
    total = total_of(transport, request)
    assert total.any()
    even = replace(request, users=request.users[1:2])
    np.testing.assert_array_equal(total, total_of(transport, even))


def test_random_users_who_do_not_stay_finite_train_at_a_smaller_rate() -> None:
    """Else a trial compares NaN with NaN, which is the same in any place."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    nn.init.constant_(model[0].weight, 1e12)
    transport = transport_of(model)
    trials = roads._Trials(transport._trainer, request_to(transport))
    trials._invent_batches(8, [2], None)
    chunk = Chunk(np.zeros(1, np.int64))
    moved = transport._trainer.sent(trials.request, trials._start, chunk, trials._store)
    assert all(bool(torch.isfinite(update[:]).all()) for update in moved.values())


def test_a_batch_larger_than_any_user_is_tried_on_few_rows() -> None:
    assert road_of(mlp(), SGD(0.1, batch_size=10**12, epochs=1)).shapes


@pytest.mark.parametrize(
    ("local", "rows"),
    [
        (
            LocalTraining(0.1, batch_size=4, epochs=3),
            [24, 6, 300],
        ),  # a partial batch counts as full
        (LocalTraining(0.1, epochs=2), [14, 4, 200]),
        (LocalTraining(0.1, batch_size=4, steps=5), [20, 10, 20]),
    ],
)
def test_users_who_train_alone_cost_the_rows_of_their_steps(
    local: LocalTraining, rows: list[int]
) -> None:
    transport = transport_of(mlp(), users_of([7, 2, 100]))
    users, sizes = np.arange(3), np.array([7, 2, 100])
    chunks = Road().chunks(transport._trainer, local, users, sizes)
    assert {int(chunk.users[0]): chunk.cost for chunk in chunks} == dict(enumerate(rows))
    assert [chunk.cost for chunk in chunks] == sorted(rows, reverse=True)
