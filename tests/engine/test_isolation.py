"""One user moves one vector, and nothing else: the in-process transport, alone and in processes."""

import gc
import logging
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedpriv.data.population import UserStore
from fedpriv.engine import layers
from fedpriv.engine import trainer as trainer_module
from fedpriv.engine.local_training import Examples, Rung, by_rung
from fedpriv.engine.task import RoundParameters, Task, called, cross_entropy
from fedpriv.engine.trainer import Chunk, Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import ModelError
from fedpriv.local import AdamW
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.layout import Layout, flat
from fedpriv.privacy.round import LocalTraining, RoundRequest
from tests.engine.everyone import alone, request_under, torch_threads, total_of, users_of
from tests.isolation import (
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
LITTLE = 100_000  # in which dozens of lanes are examined, and not hundreds


def transport_of(
    plan: Plan,
    users: list[User],
    hosted: np.ndarray | None = None,
    processes: int = 1,
    memory: int = MEMORY,
) -> InProcessTransport:
    store = store_of(users, words=plan.model in READERS)
    task = task_of(plan.model)
    return InProcessTransport(task, store, CPU, memory, hosted, processes=processes)


def test_digests_tell_any_bits_apart_but_those_of_nan() -> None:
    rows = np.random.default_rng(0).standard_normal((6, 9)).astype(np.float32)
    rows[1] = rows[0]
    rows.view(np.uint32)[1, 8] ^= 1
    rows[2] = rows[0]
    rows.view(np.uint32)[2, 3] ^= 2**31
    rows[3:5, 4] = np.array([0x7FC00000, 0xFF812345], np.uint32).view(np.float32)
    rows[4, :4], rows[4, 5:] = rows[3, :4], rows[3, 5:]
    rows[5, 0] = np.inf
    factors = np.random.default_rng(1).integers(-(2**63), 2**63, (2, 9))
    found = trainer_module._digests(torch.from_numpy(rows.copy()), factors)
    assert len({*found}) == 5
    assert found[3] == found[4]
    for row in (0, 1, 2, 5):
        words = rows[row].view(np.int32).tolist()
        sums = [sum(w * f for w, f in zip(words, each, strict=True)) for each in factors.tolist()]
        assert found[row] == b"".join((s % 2**64).to_bytes(8, "little") for s in sums)


@settings(max_examples=3, deadline=None)
@given(plans, people(20, 16), st.data())
def test_a_sum_is_that_of_what_each_user_gives_alone(
    plan: Plan, users: list[User], data: st.DataObject
) -> None:
    request, transport = request_of(plan, len(users)), transport_of(plan, users)
    everyone = range(len(users))
    together = total(transport, request, everyone)
    one = data.draw(st.sampled_from(everyone))
    own = total(transport, request, [one])
    assert_bounded(request, own)
    without = total(transport, request, [user for user in everyone if user != one])
    np.testing.assert_array_equal(together - without, own)
    # Who is enrolled elsewhere, or nowhere, makes no difference.
    some = sorted(data.draw(st.sets(st.sampled_from(everyone))) | {one})
    elsewhere = transport_of(plan, [users[user] for user in some], np.array(some))
    np.testing.assert_array_equal(total(elsewhere, request, [one]), own)
    np.testing.assert_array_equal(
        total(elsewhere, request, everyone), sum(total(transport, request, [u]) for u in some)
    )


# Each model with two ways to train. The first of each try every way already; the others are slow.
PAIRS = [
    pytest.param(model, LOCALS[(i + j) % len(LOCALS)], marks=[pytest.mark.slow] if j else [])
    for i, model in enumerate(sorted(MODELS))
    for j in (0, 4)
]


@pytest.mark.parametrize(("model", "local"), PAIRS, ids=str)
def test_each_of_many_users_gives_what_it_gives_alone(model: str, local: LocalTraining) -> None:
    rng = np.random.default_rng(0)
    kinds = ["normal"] * 18 + ["nan", "illegal", "cancelling", "every label", "huge", "subnormal"]
    sizes = rng.choice([0, 1, 8, 17], len(kinds))  # shapes are few, as each is tried first
    users = [User(kind, int(n), i) for i, (kind, n) in enumerate(zip(kinds, sizes, strict=True))]
    plan = Plan(model, "per-layer", "weights", local, adaptive=True, measured=True, norm=0.3)
    request, transport = request_of(plan, len(users)), transport_of(plan, users, memory=LITTLE)
    expected = sum(total(transport, request, [user]) for user in range(len(users)))
    assert np.any(expected[:-1])
    np.testing.assert_array_equal(total(transport, request, range(len(users))), expected)


@settings(max_examples=3, deadline=None)
@given(plans, people(300, 100), st.integers(0, 299))
def test_one_user_of_hundreds_moves_its_own_vector(plan: Plan, users: list[User], one: int) -> None:
    one %= len(users)
    request, transport = request_of(plan, len(users)), transport_of(plan, users)
    others = [user for user in range(len(users)) if user != one]
    own = total(transport, request, [one])
    moved = total(transport, request, range(len(users))) - total(transport, request, others)
    np.testing.assert_array_equal(moved, own)
    assert_bounded(request, own)


@pytest.mark.parametrize("model", ["mlp", "own", "dropout"])
def test_processes_give_the_same_sums(model: str) -> None:
    users = [User("normal", n, i) for i, n in enumerate([5, 1, 30, 8, 8, 8, 5, 1, 0] * 2)]
    users[7], users[12] = User("nan", 8, 0), User("illegal", 5, 0)
    plan = Plan(model, "joint", "floor", LOCALS[0], adaptive=True, measured=True, norm=0.3)
    request = request_of(plan, len(users))
    expected = total(transport_of(plan, users, memory=LITTLE), request, range(len(users)))
    with torch_threads(2):
        side_by_side = transport_of(plan, users, processes=2, memory=LITTLE)
        np.testing.assert_array_equal(total(side_by_side, request, range(len(users))), expected)
        assert len(multiprocessing.active_children()) == 2
        one = total(side_by_side, request, [4])
        np.testing.assert_array_equal(
            one, total(transport_of(plan, users, memory=LITTLE), request, [4])
        )
    del side_by_side
    gc.collect()
    assert not multiprocessing.active_children()


# Of known layers; those of the other models are among them.
@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer", "adapters"])
def test_torchs_own_products_keep_users_apart_side_by_side(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(layers, "numpy_is_faster", lambda: False)
    users = [User("normal", n, i) for i, n in enumerate([5, 5, 8, 8, 17, 5] * 3)]
    plan = Plan(model, "flat", "equal", LOCALS[0], adaptive=False, measured=True, norm=0.3)
    request, transport = request_of(plan, len(users)), transport_of(plan, users, memory=LITTLE)
    together = total(transport, request, range(len(users)))
    expected = sum(total(transport, request, [user]) for user in range(len(users)))
    np.testing.assert_array_equal(together, expected)
    assert "one at a time" not in caplog.text


def test_users_whose_images_are_convolved_at_once_are_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    users = [User("normal", n, i) for i, n in enumerate([1, 2, 1, 5, 1] * 7)]
    plan = Plan("cnn", "flat", "equal", LocalTraining(1.0, steps=1), False, False, 0.3)
    request, transport = request_of(plan, len(users)), transport_of(plan, users)
    together = total(transport, request, range(len(users)))
    alone = [total(transport, request, [user]) for user in range(len(users))]
    np.testing.assert_array_equal(together, sum(alone))
    assert all(own.any() for own in alone)
    assert "one at a time" not in caplog.text


@pytest.mark.parametrize(
    "model", ["linear", "mlp", "cnn", "transformer", "adapters", "frozen-trunk"]
)
def test_few_users_of_a_model_of_known_layers_take_few_lanes(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Their products are cut into pieces of one size, so that a lane of few is like one of many.
    users = [User("normal", 8, i) for i in range(3)]
    plan = Plan(model, "flat", "equal", LOCALS[0], adaptive=False, measured=True, norm=0.3)
    request, transport = request_of(plan, len(users)), transport_of(plan, users)
    list(transport.collect(request))
    lanes = lanes_seen(monkeypatch)
    list(transport.collect(request))
    moved = {name: p + np.float32(0.01) for name, p in request.parameters.items()}
    later = replace(request, parameters=moved, users=request.users[:2])
    list(transport.collect(later))  # a number that was not tried before, from another start
    assert max(lanes) <= 8


def plant(
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[Chunk, Examples], None] = lambda *_: None,
    change: Callable[[Chunk, dict[str, torch.Tensor]], None] | None = None,
) -> None:
    """Do something before a chunk trains from now on, or change the updates that it makes."""
    honest = Trainer._train

    def planted(
        trainer: Trainer,
        asked: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        examples: Examples,
    ) -> object:
        before(chunk, examples)
        updates = honest(trainer, asked, start, chunk, examples)
        if change is not None:
            updates = {name: update[:] for name, update in updates.items()}
            change(chunk, updates)
        return updates

    monkeypatch.setattr(trainer_module.Trainer, "_train", planted)


def lanes_seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of lanes of all chunks that train from now on."""
    lanes: list[int] = []
    plant(monkeypatch, lambda chunk, _: lanes.append(chunk.lanes))
    return lanes


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
    request = request_under(task, LocalTraining(1.0, epochs=1), others + 1, 1e-3)
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
    request = request_under(task, LocalTraining(0.5, steps=2), 12, 1.0)
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
    local = LocalTraining(30.0, batch_size=5, epochs=100)
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
    expected = total(transport_of(plan, users, memory=LITTLE), request, range(len(users)))
    with torch_threads(1), around():
        transport = transport_of(plan, users, memory=LITTLE)
        found = total(transport, request, range(len(users)))
    np.testing.assert_array_equal(found, expected)


def test_later_rounds_compute_with_as_many_threads_as_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport, request = transport_and_request(nn.Linear(6, 3))
    honest, threads = Trainer._train, []

    def watched(
        trainer: Trainer,
        asked: RoundRequest,
        start: RoundParameters,
        chunk: Chunk,
        examples: object,
    ) -> object:
        threads.append(torch.get_num_threads())
        return honest(trainer, asked, start, chunk, examples)

    monkeypatch.setattr(trainer_module.Trainer, "_train", watched)
    for count in (2, 3, 1):
        with torch_threads(count):
            list(transport.collect(request))
            assert torch.get_num_threads() == count
    assert set(threads) == {2}


def test_dropout_is_by_each_users_own_key() -> None:
    users = [User("normal", 1, 0)] * 3
    plan = Plan("dropout", "flat", "equal", LOCALS[1], adaptive=False, measured=False, norm=100.0)
    request, transport = request_of(plan, 3), transport_of(plan, users)
    same = replace(request, local=LocalTraining(0.1, steps=8))  # one example: no order to draw
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


# The examination of shapes.


class Placed(nn.Module):
    """What an example gives depends, by rounding, on its place among those beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(len(x), device=x.device, dtype=x.dtype)
        return self.layer(x) * (1.0 + 2.0**-20 * (places % 7))[:, None]


class Seeing(nn.Module):
    """What an example gives depends on whether all others are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.w * (1.0 if bool(torch.isfinite(x).all()) else 1.0 + 2.0**-20)


class Noisy(nn.Module):
    """Draws numbers that no seed of torch decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.rng = np.random.default_rng()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(self.rng.uniform(0.5, 1.5))


def transport_and_request(model: nn.Module) -> tuple[InProcessTransport, RoundRequest]:
    task = Task(model, cross_entropy)
    sizes = [4] * 12
    transport = InProcessTransport(task, users_of(sizes), CPU, MEMORY, processes=1)
    local = LocalTraining(0.1, batch_size=2, epochs=1)
    return transport, request_under(task, local, len(sizes), 0.3)


@pytest.mark.parametrize("model", [Placed, Seeing])
def test_users_whose_bits_depend_on_others_train_one_at_a_time(
    model: type[nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    transport, request = transport_and_request(model())
    with caplog.at_level(logging.WARNING):
        partials = list(transport.collect(request))
        # In another shape, of which nothing more is said.
        list(transport.collect(replace(request, local=replace(request.local, epochs=2))))
    assert [partial.users for partial in partials] == [1] * 12
    (record,) = [r for r in caplog.records if r.name == trainer_module.__name__]
    assert record.getMessage() == (
        "some users train one at a time: side by side, what one gets would depend on others"
    )
    transport.users.fields["x"][transport.users.rows_of(3)] = np.nan
    assert_own_vector(transport, request, 3)
    assert_own_vector(transport, request, 5)


@pytest.mark.parametrize(
    "local",
    [
        LocalTraining(1e-4, steps=60, proximal=1000.0),
        AdamW(1e-4, steps=60, weight_decay=1000.0),
    ],
    ids=["proximal", "decay"],
)
def test_users_are_tried_where_they_stay_finite(local: LocalTraining) -> None:
    # At a larger rate their numbers are NaN in the end, in any place and beside anyone.
    torch.manual_seed(0)
    transport, request = transport_and_request(Placed())
    transport, request = replace(transport, chunk_memory=LITTLE), replace(request, local=local)
    alone = [total_of(transport, replace(request, users=request.users[[u]])) for u in range(12)]
    assert all(own.any() for own in alone)
    np.testing.assert_array_equal(total_of(transport, request), sum(alone))


def test_training_that_does_not_repeat_is_refused() -> None:
    transport, request = transport_and_request(Noisy())
    with pytest.raises(ModelError, match="training the same user twice gives two results"):
        list(transport.collect(request))


def test_a_model_that_cannot_train_is_refused_before_any_user_does() -> None:
    class Raising(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled():
                raise RuntimeError("no gradient")
            return super().forward(x)

    transport, request = transport_and_request(Raising(6, 3))
    with pytest.raises(ModelError, match="cannot be trained with float32 activations: no gradient"):
        list(transport.collect(request))


@pytest.mark.parametrize("edge", [0, 5, 11])
def test_a_planted_difference_at_one_place_is_found(
    edge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lane of a shape computes otherwise, by its last bit."""
    transport, request = transport_and_request(nn.Linear(6, 3))

    def change(chunk: Chunk, updates: dict[str, torch.Tensor]) -> None:
        if chunk.lanes > edge and chunk.together:
            updates["weight"][edge] *= 1.0 + 2.0**-23

    plant(monkeypatch, change=change)
    assert {partial.users for partial in transport.collect(request)} == {1}


def test_a_planted_difference_beside_what_is_not_finite_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lanes compute otherwise, by their last bit, where one of them is not finite."""
    transport, request = transport_and_request(nn.Linear(6, 3))

    def change(chunk: Chunk, updates: dict[str, torch.Tensor]) -> None:
        if chunk.together and not torch.isfinite(updates["weight"]).all():
            updates["weight"] *= 1.0 + 2.0**-23

    plant(monkeypatch, change=change)
    assert {partial.users for partial in transport.collect(request)} == {1}


def test_a_number_of_lanes_with_other_bits_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    transport, request = transport_and_request(nn.Linear(6, 3))
    fewest = transport._trainer.lanes_for(12, Rung(2, 2, 0, padded=False))
    seen: list[int] = []

    def change(chunk: Chunk, updates: dict[str, torch.Tensor]) -> None:
        seen.append(chunk.lanes)
        if chunk.lanes == fewest:
            updates["weight"] *= 1.0 + 2.0**-23

    plant(monkeypatch, change=change)
    (partial,) = transport.collect(request)
    assert partial.users == 12
    assert fewest in seen
    taken = seen[-1]
    assert fewest < taken < max(seen)
    seen.clear()
    list(transport.collect(request))
    assert seen == [taken]  # what was found out is remembered


@pytest.mark.parametrize("broken", [[3], [0, 1], list(range(11)), list(range(12))])
def test_whoever_fails_is_tried_in_the_same_shape(
    broken: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    transport, request = transport_and_request(nn.Linear(6, 3))
    list(transport.collect(request))
    for user in broken:
        transport.users.fields["y"][transport.users.rows_of(user)] = 99
    lanes = lanes_seen(monkeypatch)
    partials = list(transport.collect(request))
    assert sum(partial.users for partial in partials) == 12 - len(broken)
    assert len(set(lanes)) == 1
    assert len(lanes) <= 2 * 12
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["a user counts as zero: training raised IndexError"] * len(broken)


@pytest.mark.parametrize("raised", [MemoryError, torch.OutOfMemoryError])
def test_a_user_for_whom_memory_is_short_is_a_zero(
    raised: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    transport, request = transport_and_request(nn.Linear(6, 3))
    expected = total_of(transport, replace(request, users=request.users[1:]))

    def fail(chunk: Chunk, examples: Examples) -> None:
        if examples.store is transport.users and 0 in chunk.users:
            raise raised("too little")

    plant(monkeypatch, fail)
    np.testing.assert_array_equal(total_of(transport, request), expected)


def test_a_rung_for_which_memory_is_short_is_a_zero_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = Task(nn.Linear(6, 3), cross_entropy)
    transport = InProcessTransport(task, users_of([4] * 5 + [64]), CPU, MEMORY, processes=1)
    request = request_under(task, LocalTraining(0.1, epochs=1), 6, 0.3)
    expected = total_of(transport, replace(request, users=request.users[:5]))

    def fail(chunk: Chunk, examples: Examples) -> None:
        if chunk.rung.width >= 64:
            raise MemoryError

    plant(monkeypatch, fail)
    np.testing.assert_array_equal(total_of(transport, request), expected)


class AtMost32(nn.Linear):
    """Fails as torch does on a CPU where memory is short: by no error of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) > 32:
            raise RuntimeError("can't allocate memory")
        return super().forward(x)


def test_one_user_with_too_many_examples_does_not_end_the_round() -> None:
    task = Task(AtMost32(6, 3), cross_entropy)
    transport = InProcessTransport(task, users_of([4] * 5 + [64]), CPU, MEMORY, processes=1)
    request = request_under(task, LocalTraining(0.1, epochs=1), 6, 0.3)
    expected = total_of(transport, replace(request, users=request.users[:5]))
    assert np.any(expected)
    np.testing.assert_array_equal(total_of(transport, request), expected)


def test_a_model_that_does_not_repeat_is_refused_though_a_size_fails() -> None:
    class Both(AtMost32):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            drawn = torch.tensor(np.random.default_rng().random(), dtype=torch.float32)
            return super().forward(x) * drawn

    transport = InProcessTransport(Task(Both(6, 3)), users_of([64]), CPU, MEMORY, processes=1)
    request = request_under(transport.task, LocalTraining(0.1, epochs=1), 1, 0.3)
    with pytest.raises(ModelError, match="training the same user twice gives two results"):
        list(transport.collect(request))


@given(st.integers(1, 300), st.sampled_from(LOCALS), st.booleans())
@example(300, LocalTraining(0.1, batch_size=7, epochs=3, max_examples=13), True)
def test_random_users_are_on_the_rung_that_they_stand_for(
    size: int, local: LocalTraining, measured: bool
) -> None:
    ((rung, _),) = by_rung(np.array([size]), local, measured=measured)
    sizes = trainer_module._sizes_on(rung, local, 9)
    assert sizes.shape == (9,)
    for found, _ in by_rung(sizes, local, measured=measured):
        assert found == rung


def test_lanes_follow_from_the_rung_and_not_from_who_is_there() -> None:
    task = Task(nn.Linear(6, 3), cross_entropy)
    few, many = (
        InProcessTransport(task, users_of(sizes), CPU, MEMORY, processes=1)
        for sizes in ([4] * 3, [4] * 300 + [5000])
    )
    request = request_under(task, LocalTraining(0.1, epochs=1), 3, 0.3)
    rung = Rung(1, 4, 0, padded=False)
    assert few._trainer.most_lanes(request, rung) == many._trainer.most_lanes(request, rung)


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
