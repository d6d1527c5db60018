"""Targets that a task ignores: in training, private metrics and figures they count nowhere."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from fedpriv.data.population import UserStore
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.evaluation.held_out import evaluate
from fedpriv.measures.metrics import metric
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import request_under, total_of

CPU = torch.device("cpu")
LENGTH, CLASSES = 5, 4
SIZES = [6, 1, 9, 3, 4]
IGNORED = -100


class Own(nn.Module):
    """Weights of its own, without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(CLASSES, 3) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.w.T).transpose(1, -1)


class Layer(nn.Module):
    """The same as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).transpose(1, -1)


MODELS = {"alone": Layer, "together": Layer, "together, own weights": Own}


def transport_of(task: Task, store: UserStore, kind: str) -> InProcessTransport:
    path: Path = "alone" if kind == "alone" else "together"
    return InProcessTransport(task, store, CPU, 10**6, processes=1, path=path)


def users_with(ignored: int, *, several: bool) -> UserStore:
    """Users of whom about a third of the targets are ignored, and all of the second's."""
    rng, rows = np.random.default_rng(0), sum(SIZES)
    shape = (rows, LENGTH) if several else (rows,)
    x = rng.standard_normal((*shape, 3)).astype(np.float32)
    y = rng.integers(1, CLASSES, shape)
    offsets = np.cumsum([0, *SIZES])
    y[rng.random(shape) < 0.35] = ignored
    y[offsets[1] : offsets[2]] = ignored
    return UserStore({"x": x, "y": y}, offsets)


def torchs(outputs: Tensor, y: Tensor, ignored: int) -> Tensor:
    """Torch's own mean over targets; zero where it is of none."""
    if bool((y == ignored).all()):
        return outputs.sum() * 0.0
    return functional.cross_entropy(outputs, y, ignore_index=ignored)


def descended(task: Task, x: Tensor, y: Tensor, ignored: int, steps: int) -> dict[str, Tensor]:
    """Updates of one user by torch, who takes all examples in each step."""
    start = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    own = dict(start)
    for _ in range(steps):
        leaves = {name: p.detach().requires_grad_() for name, p in own.items()}
        loss = torchs(functional_call(task.model, leaves, (x,)), y, ignored)
        found = torch.autograd.grad(loss, [*leaves.values()])
        own = {n: p.detach() - 0.5 * g for (n, p), g in zip(leaves.items(), found, strict=True)}
    return {name: own[name] - p for name, p in start.items()}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("ignored", [IGNORED, 0])
@pytest.mark.parametrize("kind", MODELS)
def test_training_is_as_of_torchs_mean_over_targets(kind: str, ignored: int, several: bool) -> None:
    torch.manual_seed(0)
    task = Task(MODELS[kind](), "cross-entropy", ignore_index=ignored)
    store = users_with(ignored, several=several)
    transport = transport_of(task, store, kind)
    request = request_under(task, LocalTraining(0.5, steps=3), len(SIZES), 8.0)
    layout, in_units = request.clipping.layout, request.clipping.in_units
    for user in range(len(SIZES)):
        columns = store.examples_of(user)
        x, y = torch.tensor(columns["x"]), torch.tensor(columns["y"])
        expected = descended(task, x, y, ignored, 3)
        asked = replace(request, users=np.array([user]))
        found = layout.unflatten(in_units(total_of(transport, asked)))
        for name, update in expected.items():
            np.testing.assert_allclose(found[name], update, atol=5e-6)
        assert any(update.any() for update in expected.values()) == (user != 1)


def plain(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss of each target that knows nothing of those that are ignored."""
    chosen = outputs.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    return -chosen + targets.abs()


def of_examples(outputs: Tensor, targets: Tensor) -> Tensor:
    """Torch's losses, whose mean over targets it takes itself."""
    losses = functional.cross_entropy(outputs, targets, reduction="none")
    return losses.sum(1) / (targets != IGNORED).sum(1)


def test_losses_are_means_over_targets_that_count() -> None:
    torch.manual_seed(0)
    outputs, y = torch.randn(6, CLASSES, LENGTH), torch.randint(CLASSES, (6, LENGTH))
    y[0], y[1, 2:], y[2, 0] = IGNORED, IGNORED, IGNORED
    counts = y != IGNORED
    own = torch.where(counts, -outputs.gather(1, y.clamp(min=0)[:, None])[:, 0] + y, 0.0)
    torchs_own = functional.cross_entropy(outputs, y)
    for loss, mean in (
        ("cross-entropy", torchs_own),
        (of_examples, torchs_own),
        (nn.CrossEntropyLoss(reduction="none"), torchs_own),
        (plain, own.sum() / counts.sum()),
    ):
        task = Task(nn.Identity(), loss)
        losses, shares = task.losses_of(outputs, y), task.shares(y)
        assert losses[0] == 0.0
        torch.testing.assert_close(losses.sum() / shares.sum(), mean)


def test_without_ignored_targets_all_shares_are_one_to_the_last_bit() -> None:
    task = Task(nn.Identity(), "cross-entropy")
    for length in range(1, 200):
        assert torch.equal(task.shares(torch.ones(3, length, dtype=torch.long)), torch.ones(3))


@pytest.mark.parametrize("kind", [torch.uint8, torch.bool, torch.float32])
def test_a_target_that_cannot_be_the_ignored_one_counts(kind: torch.dtype) -> None:
    # −100 as a byte is 156.
    task = Task(nn.Identity(), "cross-entropy")
    assert task.counts(torch.tensor([156, 1]).to(kind)) is None


def seen_classes(outputs: Tensor, targets: Tensor) -> Tensor:
    """An own metric that shows which examples it is given."""
    return torch.where((targets == IGNORED).all(1), 1e3, (targets != IGNORED).double().sum(1))


def request_for(task: Task, metrics: tuple[Metric, ...], users: list[int]) -> RoundRequest:
    layout = Layout.of(task.parameters())
    names = (*layout.names, *(m.tensor for m in metrics))
    shapes = (*layout.shapes, *(m.shape for m in metrics))
    groups = (*flat(layout, 10.0), *(m.group for m in metrics))
    clipping, key = Clipping(Layout(names, shapes), groups), bytes(32)
    local, drawn = LocalTraining(0.1, batch_size=2, epochs=1), np.array(users, np.int64)
    return RoundRequest("run", 0, 0, task.parameters(), clipping, local, drawn, key, metrics)


@pytest.mark.parametrize("kind", MODELS)
def test_private_metrics_are_of_targets_that_count(kind: str) -> None:
    torch.manual_seed(0)
    task = Task(MODELS[kind](), "cross-entropy", metrics={"own": seen_classes})
    store = users_with(IGNORED, several=True)
    metrics = (
        metric("accuracy"),
        metric("loss", bound=9.0),
        metric("label-counts", classes=CLASSES, bound=90.0),
        replace(metric("task:own", radius=9.0), name="own"),
    )
    transport = transport_of(task, store, kind)
    for user in (0, 2, 3, 4):
        request = request_for(task, metrics, [user])
        sums = request.clipping.layout.unflatten(
            request.clipping.in_units(total_of(transport, request))
        )
        columns = store.examples_of(user)
        y = torch.tensor(columns["y"])
        outputs = task.evaluated().model(torch.tensor(columns["x"]))
        real = y != IGNORED
        some = real.any(1)
        expected = {
            "accuracy": (outputs.argmax(1) == y)[real].double().mean(),
            "loss": functional.cross_entropy(outputs, y),
            "label-counts": torch.bincount(y[real], minlength=CLASSES),
            "own": real[some].double().sum(1).mean(),
        }
        for each in metrics:
            found = sums[each.tensor] + each.centre
            np.testing.assert_allclose(found, expected[each.name].detach().numpy(), atol=2e-4)


def test_a_user_without_a_target_that_counts_gives_nothing_where_it_is_measured() -> None:
    task = Task(Layer(), "cross-entropy")
    transport = transport_of(task, users_with(IGNORED, several=True), "together")
    for each in (metric("accuracy"), metric("loss", bound=9.0)):
        assert not total_of(transport, request_for(task, (each,), [1])).any()
        assert total_of(transport, request_for(task, (each,), [0])).any()


@pytest.mark.parametrize("kind", MODELS)
def test_another_illegal_target_still_makes_a_user_count_as_zero(kind: str) -> None:
    task, store = Task(MODELS[kind](), "cross-entropy"), users_with(IGNORED, several=True)
    request = request_under(task, LocalTraining(0.5, steps=2), len(SIZES), 1.0)
    transport = transport_of(task, store, kind)
    expected = total_of(transport, replace(request, users=np.array([0, 1, 3, 4])))
    store.fields["y"][store.rows_of(2)][0, 0] = -1
    np.testing.assert_array_equal(total_of(transport, request), expected)


@pytest.mark.parametrize("kind", MODELS)
def test_what_others_ignore_moves_no_bit_of_a_user(kind: str) -> None:
    torch.manual_seed(0)
    task, store = Task(MODELS[kind](), "cross-entropy"), users_with(IGNORED, several=True)
    metrics = (metric("accuracy"), metric("loss", bound=9.0))
    request = request_for(task, metrics, list(range(len(SIZES))))
    transport = transport_of(task, store, kind)
    alone = [
        total_of(transport, replace(request, users=np.array([user]))) for user in request.users
    ]
    np.testing.assert_array_equal(total_of(transport, request), sum(alone))


def test_evaluation_leaves_them_out() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(9, CLASSES, LENGTH), torch.randint(CLASSES, (9, LENGTH))
    y[0], y[3, 1:] = IGNORED, IGNORED
    rows = {"x": x.numpy(), "y": y.numpy()}
    found = evaluate(Task(nn.Identity(), "cross-entropy"), rows, CPU, {})
    real = y != IGNORED
    assert found.accuracy == pytest.approx(float((x.argmax(1) == y)[real].double().mean()))
    assert found.loss == pytest.approx(float(functional.cross_entropy(x, y)), rel=1e-6)
