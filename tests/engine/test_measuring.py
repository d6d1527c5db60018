"""Metrics of users, on both roads, against one at a time in plain Python."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.data.population import UserStore
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError
from fedpriv.measures.metrics import metric
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, VectorGroup
from fedpriv.training.request import LocalTraining, RoundRequest
from tests.engine.everyone import total_of, users_of

CPU = torch.device("cpu")
PATHS: tuple[Path, ...] = ("alone", "together")
SIZES = [5, 0, 1, 12, 7, 3, 30, 2]
CLASSES = 3
UPDATE = VectorGroup(
    "update", ("0.weight", "0.bias", "3.weight", "3.bias"), 64.0, (1.0, 0.5, 2.0, 1.0)
)


def cross_entropy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def confidence(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Two numbers an example: the largest probability, and whether it is above a half."""
    largest = outputs.softmax(1).amax(1)
    return torch.stack([largest, (largest > 0.5).float()], 1)


def make_task() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    return Task(model, cross_entropy, metrics={"confidence": confidence})


def make_users() -> UserStore:
    made = users_of(SIZES, classes=CLASSES, scale=3.0)
    return UserStore({**made.fields, "note": np.array(["words"] * sum(SIZES))}, made.offsets)


def request_for(task: Task, metrics: tuple[Metric, ...], users: list[int]) -> RoundRequest:
    layout = Layout.of(task.parameters())
    names = (*layout.names, *(m.tensor for m in metrics))
    shapes = (*layout.shapes, *(m.shape for m in metrics))
    clipping = Clipping(Layout(names, shapes), (UPDATE, *(m.group for m in metrics)))
    local = LocalTraining(0.1, batch_size=4, steps=2)
    return RoundRequest(
        "run",
        0,
        0,
        task.parameters(),
        clipping,
        local,
        np.array(users, np.int64),
        bytes(range(32)),
        metrics,
    )


def collected(transport: InProcessTransport, request: RoundRequest) -> dict[str, np.ndarray]:
    """What users add up to, in the units of what they send."""
    clipping = request.clipping
    return clipping.layout.unflatten(clipping.in_units(total_of(transport, request)))


def slowly(task: Task, users: UserStore, user: int) -> dict[str, np.ndarray]:
    """Metrics of one user, example by example, with nothing clipped."""
    model = copy.deepcopy(task.model).eval()
    losses, hits, own, counts = [], [], [], np.zeros(CLASSES)
    for row in range(users.offsets[user], users.offsets[user + 1]):
        x, y = torch.tensor(users.fields["x"][row]), int(users.fields["y"][row])
        scores = model(x[None])[0].detach()
        losses.append(float(-torch.log_softmax(scores.double(), 0)[y]))
        hits.append(float(int(scores.argmax()) == y))
        largest = float(torch.softmax(scores, 0).max())
        own.append([largest, float(largest > 0.5)])
        counts[y] += 1
    return {
        "loss": np.array(np.mean(losses)),
        "accuracy": np.array(np.mean(hits)),
        "examples": np.array(float(len(losses))),
        "label-counts": counts,
        "confidence": np.mean(own, axis=0),
    }


METRICS = (
    metric("loss", bound=1.6),
    metric("accuracy"),
    metric("examples", cap=10),
    metric("label-counts", classes=CLASSES, bound=6.0),
    Metric("confidence", (2,), 0.3, 0.6),
)


@pytest.mark.parametrize("path", PATHS)
def test_each_users_metrics_are_those_of_its_examples(path: Path) -> None:
    task, users = make_task(), make_users()
    transport = InProcessTransport(task, users, CPU, 10**6, path=path)
    for user, size in enumerate(SIZES):
        tensors = collected(transport, request_for(task, METRICS, [user]))
        expected = slowly(task, users, user) if size else {}
        for m in METRICS:
            if not size:
                np.testing.assert_array_equal(tensors[m.tensor], 0.0)
                continue
            value = expected[m.name]
            if m.name == "examples":
                value = np.minimum(value, 10.0)
            whole = np.ravel(value - m.centre)
            clipped = whole * min(1.0, m.radius / max(float(np.linalg.norm(whole)), 1e-9))
            np.testing.assert_allclose(np.ravel(tensors[m.tensor]), clipped, atol=1e-5)


def test_these_users_reach_the_bounds_and_stay_below_them() -> None:
    task, users = make_task(), make_users()
    everyone = [slowly(task, users, u) for u, size in enumerate(SIZES) if size]
    for m in METRICS[:1] + METRICS[2:]:
        lengths = [np.linalg.norm(values[m.name] - m.centre) for values in everyone]
        assert min(lengths) < m.radius < max(lengths), m.name


@pytest.mark.parametrize("path", PATHS)
def test_metrics_add_up_and_leave_the_updates_alone(path: Path) -> None:
    task, users = make_task(), make_users()
    everyone = list(range(len(SIZES)))
    transport = InProcessTransport(task, users, CPU, 10**6, path=path)
    together = collected(transport, request_for(task, METRICS, everyone))
    alone = [collected(transport, request_for(task, METRICS, [u])) for u in everyone]
    for m in METRICS:
        total = sum(tensors[m.tensor] for tensors in alone)
        np.testing.assert_allclose(together[m.tensor], total, rtol=1e-12)
    # Dropout draws the same masks, whether users are measured or not.
    for tensors, user in zip(alone, everyone, strict=True):
        plain = collected(transport, request_for(task, (), [user]))
        for name in UPDATE.tensors:
            np.testing.assert_allclose(tensors[name], plain[name], rtol=1e-12)


@pytest.mark.parametrize("path", PATHS)
def test_update_norms_are_of_the_scaled_part_before_clipping(path: Path) -> None:
    task, users = make_task(), make_users()
    transport = InProcessTransport(task, users, CPU, 10**6, path=path)
    plain = request_for(task, (), [])
    lengths = []
    for user in range(len(SIZES)):
        update = collected(transport, replace(plain, users=np.array([user])))
        scaled = zip(UPDATE.tensors, UPDATE.scales, strict=True)
        parts = [update[name].ravel() / scale for name, scale in scaled]
        lengths.append(float(np.linalg.norm(np.concatenate(parts))))
    thresholds = sorted(x * 1.001 for x in lengths if x)[::2]
    asked = metric("update-norms:update", thresholds=thresholds)
    request = request_for(task, (asked,), [])
    groups = (replace(UPDATE, clipping_norm=1e-3), asked.group)
    request = replace(request, clipping=Clipping(request.clipping.layout, groups))
    for user, length in enumerate(lengths):
        tensors = collected(transport, replace(request, users=np.array([user])))
        expected = [0.0 if not length else 0.5 if length <= t else -0.5 for t in thresholds]
        np.testing.assert_allclose(tensors[asked.tensor], expected, atol=1e-6)


def bounded(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy, but for class 2: there it is infinite, with a gradient of zero."""
    losses = functional.cross_entropy(outputs, targets.clamp(max=1), reduction="none")
    return torch.where(targets == 2, torch.inf, losses)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_counts_as_the_bound(bad: float, path: Path) -> None:
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return torch.where(targets == 2, bad, bounded(outputs, targets.clamp(max=1)))

    users = make_users()
    users.fields["y"][users.rows_of(3)] = 2
    task = replace(make_task(), loss=loss)
    transport = InProcessTransport(task, users, CPU, 10**6, path=path)
    asked = metric("loss", bound=1.6)
    tensors = collected(transport, request_for(task, (asked,), [3]))
    np.testing.assert_allclose(tensors[asked.tensor], 0.8, rtol=1e-6)


def failing(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    if int(targets.max()) > 50:
        raise RuntimeError
    return torch.where(targets == 40, torch.nan, 1.0)


def lenient(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(outputs, targets.clamp(max=CLASSES - 1))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("target", [40, 99])
def test_a_user_whose_metric_fails_counts_as_zero_and_harms_nobody(target: int, path: Path) -> None:
    users = make_users()
    users.fields["y"][users.rows_of(4)] = target
    task = replace(make_task(), loss=lenient, metrics={"failing": failing})
    asked = (Metric("failing", radius=2.0), metric("label-counts", classes=CLASSES, bound=100.0))
    transport = InProcessTransport(task, users, CPU, 10**6, path=path)
    everyone = list(range(len(SIZES)))
    others = [u for u in everyone if u != 4]
    total = collected(transport, request_for(task, asked, everyone))
    without = collected(transport, request_for(task, asked, others))
    for name, tensor in without.items():
        assert np.any(tensor)
        np.testing.assert_array_equal(total[name], tensor)
    for tensor in collected(transport, request_for(task, asked, [4])).values():
        np.testing.assert_array_equal(tensor, 0.0)


def test_a_target_that_is_no_class_is_not_counted() -> None:
    users = make_users()
    users.fields["y"][users.rows_of(3)] = [0, 1, 2, 3, -1, 10**9, 0, 0, 0, 0, 0, 0]
    task = replace(make_task(), loss=lambda o, t: cross_entropy(o, t.clamp(0, 2)))
    asked = metric("label-counts", classes=CLASSES, bound=100.0)
    transport = InProcessTransport(task, users, CPU, 10**5)
    tensors = collected(transport, request_for(task, (asked,), [3]))
    np.testing.assert_allclose(tensors[asked.tensor], [7.0, 1.0, 1.0], atol=1e-4)


def test_metrics_of_sequences_are_over_positions() -> None:
    rng = np.random.default_rng(0)
    fields = {
        "x": rng.standard_normal((9, CLASSES, 5)).astype(np.float32),
        "y": rng.integers(0, CLASSES, (9, 5)),
    }
    users = UserStore(fields, np.array([0, 4, 9]))
    task = Task(nn.Conv1d(CLASSES, CLASSES, 1), cross_entropy)
    layout = Layout.of(task.parameters())
    asked = (metric("accuracy"), metric("label-counts", classes=CLASSES, bound=99.0))
    names = (*layout.names, *(m.tensor for m in asked))
    groups = (VectorGroup("update", layout.names, 1.0, (1.0, 1.0)), *(m.group for m in asked))
    clipping = Clipping(Layout(names, (*layout.shapes, (), (CLASSES,))), groups)
    request = replace(request_for(make_task(), (), [1]), metrics=asked, clipping=clipping)
    request = replace(request, parameters=task.parameters())
    tensors = collected(InProcessTransport(task, users, CPU, 10**5), request)
    outputs = task.model(torch.tensor(fields["x"][4:])).argmax(1).numpy()
    hits = np.mean(outputs == fields["y"][4:])
    np.testing.assert_allclose(tensors["metrics/accuracy"] + 0.5, hits, atol=1e-6)
    counts = np.bincount(fields["y"][4:].ravel(), minlength=CLASSES)
    np.testing.assert_allclose(tensors["metrics/label-counts"], counts, atol=1e-4)


def test_bad_metrics_are_refused_before_any_user_is_touched() -> None:
    task = make_task()
    touched: list[int] = []
    task.model.register_forward_pre_hook(lambda _layer, inputs: touched.append(len(inputs[0])))
    transport = InProcessTransport(task, make_users(), CPU, 10**5)
    with pytest.raises(InvalidValueError, match="unknown metric 'nothing'"):
        next(transport.collect(request_for(task, (Metric("nothing"),), [0, 3])))
    assert not touched
