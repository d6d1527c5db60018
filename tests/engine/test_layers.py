"""Models that train in layers: which they are, and that each user gets what it would get alone."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from fedpriv.engine import layers as module
from fedpriv.engine.adapters import with_adapters
from fedpriv.engine.layers import (
    OnceConv2d,
    OuterProducts,
    PatchProducts,
    Window,
    batched_model,
)
from fedpriv.engine.local_training import (
    Batches,
    by_rung,
    schedule,
    train_chunk,
    train_layers_chunk,
)
from fedpriv.engine.task import RoundParameters, Task, cross_entropy
from fedpriv.errors import ModelError
from fedpriv.models import cnn, mlp, softmax_regression
from fedpriv.privacy.clipping_torch import TorchTensors, Updates
from fedpriv.privacy.round import LocalTraining
from tests.engine.everyone import whole

KEY = bytes(range(32))
CPU = torch.device("cpu")
WORDS = 7


class Reused(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x)))


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 6, bias=False)
        self.two = nn.Linear(6, 6, bias=False)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


class Borrowed(nn.Module):
    """Uses a layer's weight without calling the layer, as language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.words(x).mean(1), self.words.weight)


class Captured(nn.Module):
    """Calls its layer through a function that no copy of the model takes along."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        layer = self.layer
        self.call = lambda x: torch.tanh(layer(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


class Branches(nn.Module):
    """Adds two layers, whose biases then have one and the same gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)


class Language(nn.Module):
    """Words [B, L] → scores [B, 5, L]: embedding, normalisation, linear layers over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6, padding_idx=2)
        self.norm = nn.LayerNorm(6)
        self.one, self.two = nn.Linear(6, 9), nn.Linear(9, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(self.norm(self.words(x))))).transpose(1, 2)


class Placed(nn.Module):
    """Words [B, 4] and their places, which have no axis of examples, in two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 6), nn.Embedding(4, 6)
        self.kinds = nn.Embedding(3, 6, padding_idx=1)
        self.scores = nn.Linear(6, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kinds = self.kinds(torch.tensor([[2, 1, 0, 2]]))
        hidden = self.words(x) + self.places(torch.arange(4)) + kinds
        return self.scores(torch.tanh(hidden)).transpose(1, 2)


class Lost(nn.Module):
    """Gives places an axis of examples themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 6), nn.Embedding(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.words(x) + self.places(torch.arange(4))[None]).transpose(1, 2)


class Twice(nn.Module):
    """Calls one convolution twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scores = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(126, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scores(self.layer(torch.tanh(self.layer(x))).flatten(1))


class Bounded(nn.Module):
    """Bounds its inputs where they lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.copy_(x.clamp(-4.0, 4.0)))


def images() -> nn.Module:
    """[B, 2, 9, 7] through all that a convolution can do."""
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 2), bias=False),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(4, 3, 2, dilation=(1, 2)),
        nn.ReLU(),
        nn.Flatten(),
        nn.LazyLinear(5),
    )


def in_place() -> nn.Module:
    """Layers whose outputs are changed where they lie."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(140, 5),
        nn.ReLU(inplace=True),
        nn.Linear(5, 3),
        nn.Hardtanh(inplace=True),
    )


class Masked(nn.Module):
    """Reads examples beside its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (x.sum(1, keepdim=True) < 1e3)


class Turned(Masked):
    """Gives its layer the numbers of an example in another order, without copying them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.view(-1, 2, 3).mT.reshape(-1, 6))


def built(model: nn.Module, example: torch.Tensor) -> nn.Module:
    model(example)
    return model


def pieces() -> nn.Module:
    """Linear layers of parts of an example and of what they give."""
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 4), nn.Flatten(), nn.Linear(8, 3))


class Looking(nn.Module):
    """Looks at images in places, for which torch must be kept within its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = functional.grid_sample(x, x.new_zeros(len(x), 1, 4, 2), align_corners=False)
        return self.layer(seen.flatten(1))


class Differentiating(nn.Module):
    """Returns a derivative by its input, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 3), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.outer(torch.tanh(self.inner(x))).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]


def hooked(layer: int, *, trained: bool) -> nn.Module:
    """Its layer passes back a tenth of its gradient."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    if not trained:  # one before it is
        frozen = nn.Linear(6, 6).requires_grad_(requires_grad=False)
        model = nn.Sequential(nn.Linear(6, 6), frozen, *model)
        layer = 1
    model[layer].register_full_backward_pre_hook(lambda _, back: (back[0] / 10.0,))
    return model


def half_frozen() -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.bias.requires_grad_(requires_grad=False)
    return layer


def frozen_trunk() -> nn.Module:
    trunk = nn.Conv1d(1, 2, 3)
    trunk.requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), trunk, nn.Flatten(), nn.Linear(8, 3))


def frozen_convolution() -> nn.Module:
    """A frozen convolution between two that are trained."""
    first, frozen, last = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 4, 2, stride=2), nn.Conv2d(4, 2, 2)
    frozen.requires_grad_(requires_grad=False)
    return nn.Sequential(first, nn.Tanh(), frozen, nn.Tanh(), last, nn.Flatten(), nn.LazyLinear(3))


def adapted(rank: int) -> nn.Module:
    """The language model with adapters that say something."""
    model = with_adapters(Language(), rank, 2.0 * rank)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.5)
    return model


ADAPTERS = {f"{layer}.lora_{which}": 4 for layer in ("one", "two") for which in "AB"}
SIX, IMAGE = torch.zeros(1, 6), torch.zeros(1, 2, 9, 7)
SENTENCE = torch.zeros(1, 4, dtype=torch.int64)
ONE = torch.zeros(1, dtype=torch.int64)


def target_of(example: torch.Tensor) -> torch.Tensor:
    """A class, or one for each word."""
    return example if example is SENTENCE else ONE


KINDS = {
    "bare": (lambda: nn.Linear(6, 3), SIX, {"": 1}),
    "frozen": (frozen_trunk, SIX, {"3": 1}),
    "frozen convolution": (lambda: built(frozen_convolution(), IMAGE), IMAGE, {"6": 1}),
    "adapted": (lambda: adapted(2), SENTENCE, {"words.lora_B": 4, **ADAPTERS}),
    "adapted, aligned": (lambda: adapted(4), SENTENCE, {"words.lora_B": 4, **ADAPTERS}),
    "language": (Language, SENTENCE, {"one": 4, "two": 4}),
    "bounded": (Bounded, SIX, {"layer": 1}),
    "later": (lambda: nn.Sequential(nn.ReLU(), nn.Linear(6, 3)), SIX, {"1": 1}),
    "pieces": (pieces, SIX, {"1": 2, "3": 1}),
    "placed": (Placed, SENTENCE, {"scores": 4}),
    "twice": (Twice, IMAGE, {"scores": 1}),
    "images": (lambda: built(images(), IMAGE), IMAGE, {"7": 1}),
    "reused": (Reused, SIX, {}),
    "tied": (Tied, SIX, {}),
    "in place": (in_place, IMAGE, {"3": 1, "5": 1}),
    "entered in place": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace=True), nn.Linear(5, 3)),
        SIX,
        {"0": 1, "2": 1},
    ),
    "masked": (Masked, SIX, {"layer": 1}),
    "turned": (Turned, SIX, {"layer": 1}),
    "branches": (Branches, SIX, {"one": 1, "two": 1}),
}


@pytest.mark.parametrize(
    ("model", "example", "rows"),
    [
        (mlp(), torch.zeros(1, 1, 28, 28), {"1": 1, "3": 1}),
        (softmax_regression(), torch.zeros(1, 64), {"1": 1}),
        (cnn(), torch.zeros(1, 1, 28, 28), {"7": 1, "9": 1}),
        *((make(), example, rows) for make, example, rows in KINDS.values()),
        (half_frozen(), SIX, None),
        (Borrowed(), SENTENCE, None),
        (Lost(), SENTENCE, None),
        (Captured(), SIX, None),
        (nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3)), SIX, None),
        (nn.Conv2d(2, 2, 3, groups=2), IMAGE, None),
        (nn.Conv2d(2, 2, 3, padding="same"), IMAGE, None),
        (nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), IMAGE, None),
        (nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), SIX, None),
        (nn.Embedding(9, 4, max_norm=1.0), SENTENCE, None),
        (nn.Embedding(9, 4, scale_grad_by_freq=True), SENTENCE, None),
        (hooked(0, trained=True), SIX, None),
        (hooked(0, trained=False), SIX, None),
        (hooked(1, trained=True), SIX, {"0": 1, "2": 1}),  # a layer that stays as it is
        (Differentiating(), SIX, None),
        (Looking(), IMAGE, None),
        (nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)), SIX, None),
    ],
)
def test_models_that_only_call_known_layers_qualify(
    model: nn.Module, example: torch.Tensor, rows: dict[str, int] | None
) -> None:
    found = batched_model(Task(model, cross_entropy), example, target_of(example))
    assert (found.rows if found else None) == rows
    if found:
        assert set(found.trained) >= set(found.rows)


def test_corrections_pay_while_users_have_few_examples() -> None:
    layers = batched_model(Task(mlp(), cross_entropy), torch.zeros(1, 1, 28, 28), ONE)
    assert layers is not None
    assert list(layers.low_rank(5, 10)) == ["1"]
    assert list(layers.low_rank(1, 4)) == ["1", "3"]
    assert not layers.low_rank(500, 10)


def task_of(kind: str) -> tuple[Task, torch.Tensor]:
    make, example, _ = KINDS[kind]
    torch.manual_seed(0)
    return Task(make(), cross_entropy), example


def batches_of(
    example: torch.Tensor, sizes: list[int], local: LocalTraining, *, positions: bool
) -> Batches:
    """Random users, user i with sizes[i] examples."""
    rng, rows = np.random.default_rng(0), sum(sizes)
    shape = (rows, *example.shape[1:])
    floats = example.is_floating_point()
    x = rng.standard_normal(shape).astype(np.float32) if floats else rng.integers(0, WORDS, shape)
    y = rng.integers(0, 3, shape[:2] if positions else rows)
    rungs = [next(by_rung(np.array([size]), local, measured=False))[0] for size in sizes]
    steps, width = (max(getattr(rung, of) for rung in rungs) for of in ("steps", "width"))
    picked = np.zeros((len(sizes), steps, width), np.int64)
    weights = np.zeros(picked.shape, np.float32)
    starts = np.cumsum(sizes) - sizes
    for user, (size, rung) in enumerate(zip(sizes, rungs, strict=True)):
        one = np.array([user])
        plan = schedule(one, starts[one], np.array([size]), local, KEY, rung)
        drawn = plan.rows(plan.words)
        picked[user] = starts[user]
        picked[user, : rung.steps, : rung.width] = drawn.rows[0]
        weights[user, : rung.steps, : rung.width] = drawn.weights[0]
    x, y = torch.from_numpy(x[picked]), torch.from_numpy(y[picked])
    return Batches(x, y, torch.from_numpy(weights), padded=True)


def start_of(task: Task) -> RoundParameters:
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    return RoundParameters(parameters, task.constants(CPU))


def trained_in_layers(
    task: Task, example: torch.Tensor, batches: Batches, local: LocalTraining, touches: float
) -> Updates:
    layers = batched_model(task, example, target_of(example))
    assert layers is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOUCHES", touches)
        return train_layers_chunk(layers, task, start_of(task), batches, local)


def one_at_a_time(task: Task, batches: Batches, local: LocalTraining) -> TorchTensors:
    """Updates of a plain loop: torch.optim.SGD on a copy of the model for each user."""
    updates: dict[str, list[torch.Tensor]] = {name: [] for name in task.parameters()}
    for user in range(batches.weights.shape[0]):
        model = copy.deepcopy(task.model)
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        start = {n: p.detach().clone() for n, p in trained.items()}
        rate, momentum = local.learning_rate, local.momentum
        optimizer = torch.optim.SGD(trained.values(), lr=rate, momentum=momentum)
        for step in range(batches.weights.shape[1]):
            real = batches.weights[user, step] > 0
            if not real.any():
                continue
            optimizer.zero_grad()
            losses = task.losses_of(model(batches.x[user, step][real]), batches.y[user, step][real])
            drift = sum(((p - start[n]) ** 2).sum() for n, p in trained.items())
            (losses.mean() + local.proximal / 2 * drift).backward()
            optimizer.step()
        for name, parameter in trained.items():
            updates[name].append(parameter.detach() - start[name])
    return {name: torch.stack(of_users) for name, of_users in updates.items()}


def assert_equal(found: Updates, expected: TorchTensors) -> None:
    assert list(found) == list(expected)
    for name, update in whole(found).items():
        assert update.shape == expected[name].shape
        # Sums of a few hundred products of numbers near 1, in another order.
        scale = max(1.0, float(expected[name].abs().max()))
        np.testing.assert_allclose(update, expected[name], atol=1e-5 * scale, err_msg=name)


LOCALS = [
    LocalTraining(0.1, batch_size=3, epochs=2),
    LocalTraining(0.1, batch_size=3, steps=5, momentum=0.9, proximal=0.5),
    LocalTraining(0.5, steps=1),
    LocalTraining(0.1, batch_size=1, epochs=1, momentum=0.5),
]


@pytest.mark.parametrize("touches", [0, 10**9], ids=["weights", "corrections"])
@pytest.mark.parametrize("local", LOCALS, ids=["epochs", "steps", "one", "singles"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_equals_one_user_at_a_time(kind: str, local: LocalTraining, touches: float) -> None:
    task, example = task_of(kind)
    batches = batches_of(example, [5, 1, 7, 4], local, positions=example is SENTENCE)
    found = trained_in_layers(task, example, batches, local, touches)
    expected = one_at_a_time(task, batches, local)
    assert all(float(update.abs().max()) > 1e-3 for update in expected.values())
    assert_equal(found, expected)
    assert any(isinstance(u, OuterProducts) for u in found.values()) == bool(
        touches and KINDS[kind][2]
    )


@pytest.mark.parametrize("sizes", [[5, 1, 7, 4], [6]])
@pytest.mark.parametrize("steps", [1, 3])
def test_examples_that_the_model_changes_are_remembered_as_it_changed_them(
    sizes: list[int], steps: int
) -> None:
    task, example = task_of("bounded")
    local = LocalTraining(0.1, batch_size=3, steps=steps)
    batches = batches_of(example, sizes, local, positions=False)
    batches.x.mul_(5.0)
    kept = batches.x.clone()
    expected = one_at_a_time(task, batches, local)
    batches.x.copy_(kept)
    assert_equal(trained_in_layers(task, example, batches, local, 10**9), expected)


class Twice(nn.Module):
    """Calls one convolution twice, and another once."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.once(torch.tanh(self.twice(torch.tanh(self.twice(x))))).mean((2, 3))


def test_only_what_is_called_once_is_convolved_at_once() -> None:
    found = batched_model(Task(Twice(), cross_entropy), IMAGE, ONE)
    assert found is not None
    assert found.once == ("once",)


def test_what_a_convolution_remembers_cannot_be_overwritten() -> None:
    layer = OnceConv2d(1, Window((3, 3), (1, 1), (0, 0), (1, 1)), torch.zeros(3, 2, 3, 3), None)
    images = torch.zeros(IMAGE.shape).contiguous(memory_format=torch.channels_last)
    outputs = layer(images)
    images.zero_()
    with pytest.raises(ModelError, match="changed in place"):
        outputs.sum().backward()


@pytest.mark.parametrize("step", [1, 2])
def test_weights_of_a_convolution_are_made_when_they_are_asked_for(step: int) -> None:
    torch.manual_seed(0)
    window = Window((3, 2), (step, 1), (1, 0), (1, step))
    images, weight = torch.randn(3, 2, 4, 9, 8), torch.zeros(5, 4, 3, 2, requires_grad=True)
    outputs = [
        nn.functional.conv2d(own, weight, None, window.stride, window.padding, window.dilation)
        for own in images
    ]
    gradients = [torch.randn(each.shape) for each in outputs]
    expected = [
        torch.autograd.grad(each, weight, own)[0]
        for each, own in zip(outputs, gradients, strict=True)
    ]
    rows = torch.stack(gradients).movedim(2, -1).reshape(3, -1, 5)
    found = PatchProducts(images.movedim(2, -1), rows, window)
    assert found.shape == (3, *weight.shape)
    torch.testing.assert_close(found[:], torch.stack(expected), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(found[1:2], torch.stack(expected[1:2]), atol=1e-4, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.integers(1, 9), min_size=1, max_size=4),
    st.integers(1, 4),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.9]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0, 3, 10**9]),
)
def test_equals_training_whatever_the_model_is_made_of(
    kind: str,
    sizes: list[int],
    batch: int,
    steps: int,
    momentum: float,
    proximal: float,
    touches: float,
) -> None:
    local = LocalTraining(0.1, batch_size=batch, steps=steps, momentum=momentum, proximal=proximal)
    task, example = task_of(kind)
    batches = batches_of(example, sizes, local, positions=example is SENTENCE)
    expected = train_chunk(task, start_of(task), batches, local)
    assert_equal(trained_in_layers(task, example, batches, local, touches), expected)


def test_the_model_and_its_parameters_stay_as_they_are() -> None:
    for kind in KINDS:
        task, example = task_of(kind)
        before, layers = task.parameters(), dict(task.model.named_modules())
        local = LOCALS[1]
        batches = batches_of(example, [5, 2], local, positions=example is SENTENCE)
        trained_in_layers(task, example, batches, local, 10)
        assert dict(task.model.named_modules()) == layers
        for name, parameter in task.parameters().items():
            np.testing.assert_array_equal(parameter, before[name])


@pytest.mark.parametrize("word", [-1, WORDS])
def test_a_word_out_of_range_reaches_nobody_elses_weights(word: int) -> None:
    task, example = task_of("language")
    batches = batches_of(example, [3, 3], LOCALS[0], positions=True)
    batches.x[0, 0, 0, 0] = word
    with pytest.raises((RuntimeError, IndexError)):
        trained_in_layers(task, example, batches, LOCALS[0], 0)


@pytest.mark.parametrize("touches", [0, 10**9])
def test_a_user_with_bad_data_changes_nobody_else(touches: float) -> None:
    for kind in ("images", "frozen", "branches"):
        task, example = task_of(kind)
        batches = batches_of(example, [5, 4, 6], LOCALS[0], positions=False)
        good = whole(trained_in_layers(task, example, batches, LOCALS[0], touches))
        batches.x[1] = torch.nan
        bad = whole(trained_in_layers(task, example, batches, LOCALS[0], touches))
        assert not all(torch.isfinite(update[1]).all() for update in bad.values())
        for name, update in bad.items():
            np.testing.assert_array_equal(update[::2].numpy(), good[name][::2].numpy())
