"""One user moves one vector, and nothing else: the in-process transport, alone and in processes."""

import gc
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedpriv.data.population import UserStore
from fedpriv.engine.examples import Examples
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task, called, cross_entropy
from fedpriv.engine.trainer import Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import ModelError
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.clipping_torch import Updates
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.local import SGD
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import alone, request_under, torch_threads, total_of, users_of
from tests.isolation import (
    ALONE,
    LOCALS,
    MODELS,
    READERS,
    Plan,
    User,
    assert_bounded,
    people,
    plans,
    request_of,
    store_of,
    task_of,
    total,
)

CPU = torch.device("cpu")
MEMORY = 2**22

roads = st.sampled_from([("auto", 4), ("auto", 40), ("alone", 40)])
"""Which road is asked for, and the cohort that is expected, from which chunks follow."""


def transport_of(
    plan: Plan,
    users: list[User],
    road: tuple[Path, int] = ("auto", 12),
    hosted: np.ndarray | None = None,
    processes: int = 1,
) -> InProcessTransport:
    labels = np.uint8 if plan.model == "spelled" else np.int64
    store = store_of(users, plan.model in READERS, labels)
    (path, cohort), task = road, task_of(plan.model)
    return InProcessTransport(
        task, store, CPU, MEMORY, hosted, processes=processes, path=path, cohort=cohort
    )


@settings(max_examples=6, deadline=None)
@given(plans, people(24, 60), roads, st.data())
def test_a_sum_is_that_of_what_each_user_gives_alone(
    plan: Plan, users: list[User], road: tuple[Path, int], data: st.DataObject
) -> None:
    request, transport = request_of(plan, len(users)), transport_of(plan, users, road)
    everyone = range(len(users))
    together = total(transport, request, everyone)
    one = data.draw(st.sampled_from(everyone))
    own = total(transport, request, [one])
    assert_bounded(request, own)
    without = total(transport, request, [user for user in everyone if user != one])
    np.testing.assert_array_equal(together - without, own)
    # Who is enrolled elsewhere, or nowhere, makes no difference.
    some = sorted(data.draw(st.sets(st.sampled_from(everyone))) | {one})
    elsewhere = transport_of(plan, [users[user] for user in some], road, np.array(some))
    np.testing.assert_array_equal(total(elsewhere, request, [one]), own)
    np.testing.assert_array_equal(
        total(elsewhere, request, everyone), sum(total(transport, request, [u]) for u in some)
    )


# Each model, and each way to train, is in one of those that are not slow.
PAIRS = [
    pytest.param(model, LOCALS[(i + j) % len(LOCALS)], marks=[pytest.mark.slow] if j else [])
    for i, model in enumerate(sorted(MODELS))
    for j in range(len(LOCALS))
]


@pytest.mark.parametrize(("model", "local"), PAIRS, ids=str)
def test_each_of_many_users_gives_what_it_gives_alone(model: str, local: LocalTraining) -> None:
    """On both roads, of Pareto sizes."""
    rng = np.random.default_rng(0)
    kinds = ["normal"] * 12 + ["nan", "illegal", "cancelling", "every label", "huge", "subnormal"]
    sizes = np.minimum((4.0 * rng.pareto(1.0, len(kinds))).astype(int), 90)
    users = [User(kind, int(n), i) for i, (kind, n) in enumerate(zip(kinds, sizes, strict=True))]
    plan = Plan(model, "per-layer", "weights", local, adaptive=True, measured=True, norm=0.3)
    request = request_of(plan, len(users))
    for path in ("auto", "alone"):
        transport = transport_of(plan, users, (path, 6))
        road = transport.road(request)
        assert bool(road.shapes) == (path == "auto" and model not in ALONE), road.why
        expected = sum(total(transport, request, [user]) for user in range(len(users)))
        assert np.any(expected[:-1])
        np.testing.assert_array_equal(total(transport, request, range(len(users))), expected)


@settings(max_examples=3, deadline=None)
@given(plans, people(300, 100), st.integers(0, 299), roads)
def test_one_user_of_hundreds_moves_its_own_vector(
    plan: Plan, users: list[User], one: int, road: tuple[Path, int]
) -> None:
    one %= len(users)
    request, transport = request_of(plan, len(users)), transport_of(plan, users, road)
    others = [user for user in range(len(users)) if user != one]
    own = total(transport, request, [one])
    moved = total(transport, request, range(len(users))) - total(transport, request, others)
    np.testing.assert_array_equal(moved, own)
    assert_bounded(request, own)


@pytest.mark.parametrize(
    "local", [SGD(0.1, epochs=1), SGD(0.1, batch_size=5_000, epochs=1)], ids=str
)
def test_a_user_of_a_hundred_thousand_rows_moves_its_own_vector(local: LocalTraining) -> None:
    task = Task(nn.Linear(6, 3), cross_entropy)
    transport = InProcessTransport(task, users_of([3, 100_000, 7, 0, 3]), CPU, MEMORY, processes=1)
    assert transport.road(request_under(task, local, 5, 0.3)).shapes
    assert_own_vector(transport, request_under(task, local, 5, 0.3), 1)


def test_others_who_take_more_steps_change_no_bit() -> None:
    """Also where layers learn without weights, and room is made for the steps of all."""
    task, sizes = Task(nn.Linear(6, 6000), cross_entropy), [3, 5, 6, 7] * 3 + [20]
    transport = InProcessTransport(task, users_of(sizes), CPU, MEMORY, processes=1, path="together")
    request = request_under(task, SGD(0.5, batch_size=1, epochs=1), len(sizes), 1.0)
    assert transport.road(request).way(transport._trainer, request.local, max(sizes), 1) == (0,)
    expected = sum(alone(transport, request, user) for user in range(len(sizes)))
    np.testing.assert_array_equal(total_of(transport, request), expected)


@pytest.mark.parametrize("model", ["mlp", "own", "dropout", "packed"])
def test_processes_give_the_same_sums(model: str) -> None:
    users = [User("normal", n, i) for i, n in enumerate([5, 1, 30, 8, 8, 8, 5, 1, 0] * 2)]
    users[7], users[12] = User("nan", 8, 0), User("illegal", 5, 0)
    plan = Plan(model, "joint", "floor", LOCALS[0], adaptive=True, measured=True, norm=0.3)
    request, one_process = request_of(plan, len(users)), transport_of(plan, users)
    expected = total(one_process, request, range(len(users)))
    with torch_threads(2):
        side_by_side = transport_of(plan, users, processes=2)
        np.testing.assert_array_equal(total(side_by_side, request, range(len(users))), expected)
        assert len(multiprocessing.active_children()) == 2
        np.testing.assert_array_equal(
            total(side_by_side, request, [4]), total(one_process, request, [4])
        )
    del side_by_side
    gc.collect()
    assert not multiprocessing.active_children()


def plant(monkeypatch: pytest.MonkeyPatch, before: Callable[[Trainer, Examples], object]) -> None:
    """Do something before a chunk trains from now on."""
    honest = Trainer._moved

    def planted(trainer: Trainer, asked: RoundRequest, start: Any, examples: Examples) -> Updates:
        before(trainer, examples)
        return honest(trainer, asked, start, examples)

    monkeypatch.setattr(Trainer, "_moved", planted)


# Attacks on data chosen by an enemy.


def one_image_under_every_label() -> tuple[InProcessTransport, RoundRequest, int]:
    """100 users whose gradients' rows cancel, and one more with other images."""
    classes, others, rng = 30, 100, np.random.default_rng(0)
    x = np.repeat(rng.random(784)[None], classes, 0)
    x[0] *= 0.99
    data = [(x, np.arange(classes))] * others
    data.append((rng.random((38, 784)), rng.integers(0, classes, 38)))
    fields = {
        "x": np.concatenate([images for images, _ in data]).astype(np.float32),
        "y": np.concatenate([labels for _, labels in data]),
    }
    store = UserStore(fields, np.cumsum([0, *(len(labels) for _, labels in data)]))
    model = nn.Linear(784, classes)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    task = Task(model, cross_entropy)
    request = request_under(task, SGD(1.0, epochs=1), others + 1, 1e-3)
    return InProcessTransport(task, store, CPU, MEMORY, processes=1), request, others


def assert_own_vector(transport: InProcessTransport, request: RoundRequest, one: int) -> None:
    users = request.users
    without = replace(request, users=users[users != one])
    moved = total_of(transport, request) - total_of(transport, without)
    np.testing.assert_array_equal(moved, alone(transport, request, one))
    (group,) = request.clipping.groups
    assert sum(x * x for x in moved.tolist()) <= group.squared_bound


def test_rows_that_cancel_scale_nobody_down() -> None:
    transport, request, one = one_image_under_every_label()
    assert_own_vector(transport, request, one)


def test_a_user_who_is_not_drawn_moves_nothing() -> None:
    transport, request, one = one_image_under_every_label()
    drawn = replace(request, users=request.users[:one])
    expected = total_of(transport, drawn)
    store = transport.users
    longest = np.concatenate([store.fields["x"], np.ones((6000, 784), np.float32)])
    labels = np.concatenate([store.fields["y"], np.zeros(6000, np.int64)])
    offsets = store.offsets.copy()
    offsets[-1] += 6000
    larger = UserStore({"x": longest, "y": labels}, offsets)
    np.testing.assert_array_equal(total_of(replace(transport, users=larger), drawn), expected)
    fewer = store.subset(np.arange(one))
    np.testing.assert_array_equal(total_of(replace(transport, users=fewer), drawn), expected)


def test_an_illegal_label_moves_nothing() -> None:
    transport, request, one = one_image_under_every_label()
    expected = total_of(transport, replace(request, users=request.users[:one]))
    transport.users.fields["y"][transport.users.rows_of(one)] = 99
    np.testing.assert_array_equal(total_of(transport, request), expected)


def assert_the_fifth_alone_counts_as_zero(task: Task, x: np.ndarray, y: np.ndarray) -> None:
    """Of twelve users with two rows each; the others add what they add alone."""
    store = UserStore({"x": x, "y": y}, np.arange(0, 25, 2))
    transport = InProcessTransport(task, store, CPU, 2**22, processes=1)
    request = request_under(task, SGD(0.5, steps=2), 12, 1.0)
    each = [alone(transport, request, user) for user in range(12)]
    assert [user for user, own in enumerate(each) if not own.any()] == [4]
    np.testing.assert_array_equal(total_of(transport, request), sum(each))


@pytest.mark.parametrize("layer", [nn.Linear(4, 5), nn.Sequential(nn.PReLU(), nn.Linear(4, 5))])
@pytest.mark.parametrize("label", [5, 12, -1])
def test_a_label_that_ctc_does_not_know_moves_nothing(layer: nn.Module, label: int) -> None:
    """On its own, torch reads and writes beyond the scores."""

    def ctc(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        lengths = (torch.full((len(targets),), each) for each in (6, 2))
        scores = outputs.log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(scores, targets, *lengths, reduction="none")

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((24, 6, 4)).astype(np.float32), rng.integers(1, 5, (24, 3))
    y[:, 2] = -7  # of a row of two labels, which is not read
    y[8:10, 0] = label
    assert_the_fifth_alone_counts_as_zero(Task(layer, ctc), x, y)


class Warped(nn.Module):
    """Looks at images where a layer says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.where, self.layer = nn.Conv2d(1, 1, 1), nn.Linear(64, 6), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, places = self.first(x), self.where(x.mean((1, 2))).view(-1, 2, 3)
        grid = functional.affine_grid(places, x.shape, align_corners=False)
        seen = functional.grid_sample(x, grid, padding_mode="border", align_corners=False)
        return self.layer(seen.mean((1, 2)))


def test_where_an_image_that_is_not_finite_is_looked_at_moves_nothing() -> None:
    """On its own, torch writes beyond the gradient of the images, which ends the process."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((24, 1, 64, 64)).astype(np.float32)
    x[8:10] = np.nan
    assert_the_fifth_alone_counts_as_zero(Task(Warped(), cross_entropy), x, rng.integers(0, 3, 24))


class Reduced(nn.Module):
    """The sum of each segment."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.segment_reduce(x, "sum", **self.options)


def test_segments_are_given_by_lengths_which_torch_checks() -> None:
    lengths, offsets = torch.tensor([3, 5]), torch.tensor([0, 3, 20])
    assert called(Reduced(lengths=lengths), {}, torch.ones(8)).tolist() == [3.0, 5.0]
    for options in ({"offsets": offsets}, {"lengths": lengths, "unsafe": True}):
        with pytest.raises(ModelError, match="unless it is given lengths alone"):
            called(Reduced(**options), {}, torch.ones(8))


class Fitted(nn.Module):
    """What fits best, by least squares."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.lstsq(x[..., :-2], x[..., -2:]).solution


def test_least_squares_do_not_depend_on_what_memory_held_before() -> None:
    x, held, rng = torch.randn(4, 40, 42), [], np.random.default_rng(0)
    first = called(Fitted(), {}, x).clone()
    for size in rng.integers(1, 700, 200).tolist():
        held.append(torch.full((size,), float(size)))
        del held[:-20:2]
        assert torch.equal(called(Fitted(), {}, x), first)


@pytest.mark.slow
def test_chaotic_training_moves_one_vector() -> None:
    # Raw pixels from 0 to 16 and hundreds of epochs: rounding alone leads elsewhere.
    rng = np.random.default_rng(0)
    sizes = [5] * 20 + [7]
    x = rng.integers(0, 17, (sum(sizes), 64)).astype(np.float32)
    store = UserStore({"x": x, "y": rng.integers(0, 10, len(x))}, np.cumsum([0, *sizes]))
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Linear(64, 10)), cross_entropy)
    local = SGD(30.0, batch_size=5, epochs=100)
    request = request_under(task, local, len(sizes), 0.5)
    transport = InProcessTransport(task, store, CPU, 2**24, processes=1)
    assert_own_vector(transport, request, 20)
    assert_own_vector(transport, request, 3)


@contextmanager
def flushing() -> Iterator[None]:
    """Subnormal numbers count as zero, in this thread."""
    assert torch.set_flush_denormal(True)
    yield
    still = bool(torch.full((), torch.finfo(torch.float32).tiny) / 2 == 0)
    torch.set_flush_denormal(False)
    assert still  # what the caller has set stays set


@contextmanager
def float64_by_default() -> Iterator[None]:
    """Numbers that a model or the engine writes down are float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        torch.no_grad,
        torch.inference_mode,
        flushing,
        lambda: torch_threads(3),
        float64_by_default,
    ],
    ids=["autocast", "no grad", "inference", "flushing", "threads", "default type"],
)
@pytest.mark.parametrize("model", ["mlp", "own"])
def test_what_the_caller_has_set_changes_no_bit(model: str, around: type[nullcontext]) -> None:
    users = [User("normal", 8, i) for i in range(9)] + [User("subnormal", 8, 0)]
    plan = Plan(model, "flat", "equal", LOCALS[0], adaptive=False, measured=True, norm=0.3)
    request = request_of(plan, len(users))
    expected = total(transport_of(plan, users), request, range(len(users)))
    with torch_threads(1), around():
        transport = transport_of(plan, users)
        found = total(transport, request, range(len(users)))
    np.testing.assert_array_equal(found, expected)


def transport_and_request(model: nn.Module) -> tuple[InProcessTransport, RoundRequest]:
    task = Task(model, cross_entropy)
    transport = InProcessTransport(task, users_of([4] * 12), CPU, MEMORY, processes=1)
    return transport, request_under(task, SGD(0.1, batch_size=2, epochs=1), 12, 0.3)


def test_later_rounds_compute_with_as_many_threads_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, request = transport_and_request(nn.Linear(6, 3))
    threads: list[int] = []
    plant(monkeypatch, lambda *_: threads.append(torch.get_num_threads()))
    for count in (2, 3, 1):
        with torch_threads(count):
            list(transport.collect(request))
            assert torch.get_num_threads() == count
    assert set(threads) == {2}


def test_dropout_is_by_each_users_own_key() -> None:
    users = [User("normal", 1, 0)] * 3
    plan = Plan("dropout", "flat", "equal", LOCALS[1], adaptive=False, measured=False, norm=100.0)
    request, transport = request_of(plan, 3), transport_of(plan, users)
    same = replace(request, local=SGD(0.1, steps=8))  # one example: no order to draw
    found = [total(transport, same, [user]).tolist() for user in range(3)]
    assert len({tuple(each) for each in found}) == 3  # of one and the same data
    again = [total(transport, same, [user]).tolist() for user in range(3)]
    assert again == found
    other = replace(same, local_key=bytes(31) + b"\x01")
    assert total(transport, other, [0]).tolist() != found[0]
    state = torch.random.get_rng_state()
    total(transport, request, range(3))
    assert torch.equal(state, torch.random.get_rng_state())


class Monitored(nn.Module):
    """Writes unusual inputs down, which its outputs may or may not depend on."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(6, 3), weight
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        most = x.detach().abs().max()
        self.last.copy_(torch.where(most > 10.0, most, self.last))
        return self.inner(x.clamp(-10.0, 10.0)) + self.weight * self.last


@pytest.mark.parametrize("weight", [0.0, 1e-3])
def test_what_users_data_make_of_buffers_ends_with_their_chunk(weight: float) -> None:
    torch.manual_seed(0)
    transport, request = transport_and_request(Monitored(weight))
    transport.users.fields["x"][:4] = 123_456.0
    together = total_of(transport, request)
    np.testing.assert_array_equal(together, sum(alone(transport, request, u) for u in range(12)))
    assert transport.task.model.last == 0.0
    assert transport._trainer.constants["last"] == 0.0


class Recording(nn.Module):
    """Keeps what it was given last, as others keep maps of attention."""

    def __init__(self, inner: nn.Module, rate: float) -> None:
        super().__init__()
        self.inner, self.rate = inner, rate
        self.kept: dict[str, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["last"], self.last = x.detach(), x.detach()
        outputs: torch.Tensor = self.inner(functional.dropout(x, self.rate, self.training))
        return outputs


@pytest.mark.parametrize("rate", [0.0, 0.5], ids=["together", "alone"])
@pytest.mark.parametrize(
    "inner", [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 3), nn.PReLU())], ids=["known", "own"]
)
def test_what_a_model_keeps_of_its_inputs_is_not_in_the_task(inner: nn.Module, rate: float) -> None:
    transport, request = transport_and_request(Recording(inner, rate))
    assert total_of(transport, request).any()
    model = transport.task.model
    assert model.kept == {}
    assert not hasattr(model, "last")


# Users who fail.


@pytest.mark.parametrize("path", ["alone", "together"])
@pytest.mark.parametrize("broken", [[3], [0, 1], list(range(11)), list(range(12))])
def test_who_fails_counts_as_zero_and_nobody_else_does(
    broken: list[int], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport, request = transport_and_request(nn.Linear(6, 3))
    transport = replace(transport, path=path)
    each = [alone(transport, request, user) for user in range(12)]
    for user in broken:
        transport.users.fields["y"][transport.users.rows_of(user)] = 99
    partials = list(transport.collect(request))
    expected = sum((each[u] for u in range(12) if u not in broken), start=np.zeros_like(each[0]))
    np.testing.assert_array_equal(sum(partial.total for partial in partials), expected)
    assert sum(partial.users for partial in partials) == 12 - len(broken)
    messages = {record.getMessage() for record in caplog.records}
    assert messages == {"a user counts as zero: training raised IndexError"}


@pytest.mark.parametrize("raised", [MemoryError, torch.OutOfMemoryError])
def test_a_user_for_whom_memory_is_short_is_a_zero(
    raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, request = transport_and_request(nn.Linear(6, 3))
    expected = total_of(transport, replace(request, users=request.users[1:]))

    def fail(trainer: Trainer, examples: Examples) -> None:
        if examples.store is trainer.users and 0 in examples.chunk.users:
            raise raised("too little")

    plant(monkeypatch, fail)
    np.testing.assert_array_equal(total_of(transport, request), expected)


class AtMost32(nn.Module):
    """Fails as torch does on a CPU where memory is short: by no error of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 32:
            raise RuntimeError("can't allocate memory")
        return self.layer(x)


def test_one_user_with_too_many_examples_does_not_end_the_round() -> None:
    task = Task(AtMost32(), cross_entropy)
    transport = InProcessTransport(
        task, users_of([4] * 5 + [64]), CPU, MEMORY, processes=1, path="alone"
    )
    request = request_under(task, SGD(0.1, epochs=1), 6, 0.3)
    expected = total_of(transport, replace(request, users=request.users[:5]))
    assert np.any(expected)
    np.testing.assert_array_equal(total_of(transport, request), expected)


@pytest.fixture(autouse=True)
def _in_one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


def clipped_to(request: RoundRequest, norm: float) -> RoundRequest:
    layout = Layout.of(request.parameters)
    return replace(request, clipping=Clipping(layout, flat(layout, norm)))


@pytest.mark.parametrize("norm", [1e-30, 1e-6, 1.0, 1e30])
def test_any_clipping_norm_keeps_users_apart(norm: float) -> None:
    users = [User(kind, 5, i) for i, kind in enumerate(["normal", "large", "huge", "zeros"] * 3)]
    plan = Plan("mlp", "flat", "equal", LOCALS[0], adaptive=False, measured=False, norm=1.0)
    request = clipped_to(request_of(plan, len(users)), norm)
    transport = transport_of(plan, users)
    parts = [total(transport, request, [user]) for user in range(len(users))]
    for part in parts:
        assert_bounded(request, part)
    np.testing.assert_array_equal(total(transport, request, range(len(users))), sum(parts))


@pytest.mark.parametrize("path", ["alone", "auto"])
def test_a_user_of_many_rows_moves_no_more_than_the_cap_allows(path: Path) -> None:
    plan = Plan("linear", "flat", "weights", LOCALS[0], adaptive=False, measured=False, norm=1e-3)
    request = request_of(plan, 1)
    own = total(transport_of(plan, [User("normal", 40, 0)], (path, 12)), request, [0])
    assert own[:-1].any()
    assert own[-1] == request.clipping.weight_cap
    assert_bounded(request, own)
