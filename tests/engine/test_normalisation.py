"""Batch normalisation with running statistics: torch's own, in evaluation mode, user by user."""

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedpriv.data.population import UserStore
from fedpriv.engine.examples import Chunk
from fedpriv.engine.measuring import check_metrics
from fedpriv.engine.task import (
    RunningNorm,
    Task,
    cross_entropy,
    running_norms,
    without_batch_norm,
)
from fedpriv.engine.task_checks import check_task
from fedpriv.engine.trainer import Trainer
from fedpriv.engine.transport import InProcessTransport
from fedpriv.errors import InvalidValueError
from fedpriv.measures.metrics import metric
from fedpriv.privacy.clipping import Clipping
from fedpriv.privacy.gaussian_mechanism import Metric
from fedpriv.privacy.layout import Layout, flat
from fedpriv.training.request import LocalTraining
from tests.engine.everyone import request_under, total_of, users_of

CPU = torch.device("cpu")
SIZES = [3, 1, 6, 2]
CASES = {
    "1d": (nn.BatchNorm1d(4), (5, 4)),
    "1d of sequences": (nn.BatchNorm1d(4), (5, 4, 7)),
    "2d": (nn.BatchNorm2d(4, eps=0.1), (5, 4, 3, 2)),
    "3d": (nn.BatchNorm3d(4, affine=False), (5, 4, 3, 2, 2)),
}


def moved(layer: nn.Module) -> nn.Module:
    """The layer with statistics and parameters that are not those of the start."""
    torch.manual_seed(0)
    for tensor in (*layer.parameters(), *layer.buffers()):
        if tensor.dtype.is_floating_point:
            tensor.data.copy_(torch.rand(tensor.shape) + 0.5)
    return layer


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Flatten(), nn.Linear(12, 5), nn.BatchNorm1d(5)
    ).apply(lambda layer: moved(layer) if isinstance(layer, nn.BatchNorm1d) else None)


def make_users() -> UserStore:
    return users_of(SIZES, (2, 4), classes=5)


@pytest.mark.parametrize("case", sorted(CASES))
def test_equals_torch_in_evaluation_mode(case: str) -> None:
    layer, shape = CASES[case]
    layer = moved(copy.deepcopy(layer))
    x = torch.randn(shape)
    for training in (True, False):
        ours = RunningNorm(layer).train(training)
        before = [buffer.clone() for buffer in ours.buffers()]
        torch.testing.assert_close(ours(x), copy.deepcopy(layer).eval()(x))
        assert all(torch.equal(b, a) for b, a in zip(before, ours.buffers(), strict=True))


def test_models_are_copied_and_keep_their_names() -> None:
    model = make_model()
    task = Task(model, cross_entropy)
    assert isinstance(model[1], nn.BatchNorm1d)
    assert list(running_norms(task.model)) == ["1", "4"]
    named = {n: p.detach().numpy() for n, p in model.named_parameters()}
    assert list(task.parameters()) == list(named)
    for name, parameter in task.parameters().items():
        np.testing.assert_array_equal(parameter, named[name])
    buffers = dict(model.named_buffers())
    statistics = task.statistics()
    assert list(statistics) == [
        f"{layer}.running_{kind}" for layer in (1, 4) for kind in ("mean", "var")
    ]
    for name, tensor in statistics.items():
        np.testing.assert_array_equal(tensor, buffers[name].numpy())


def test_models_without_batch_norm_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.GroupNorm(1, 2))
    assert without_batch_norm(model) is model
    assert Task(model, cross_entropy).statistics() == {}


def test_a_layer_in_two_places_and_a_layer_alone() -> None:
    layer = nn.BatchNorm1d(2)
    shared = without_batch_norm(nn.Sequential(layer, nn.Sequential(layer)))
    assert isinstance(shared[0], RunningNorm)
    assert shared[1][0] is shared[0]
    assert list(Task(nn.BatchNorm1d(2), cross_entropy).statistics()) == [
        "running_mean",
        "running_var",
    ]


def test_local_training_equals_sgd_in_evaluation_mode() -> None:
    task, users = Task(make_model(), cross_entropy), make_users()
    check_task(task, users.examples_of(0))
    local = LocalTraining(0.1, steps=3)
    layout = Layout.of(task.parameters())
    request = request_under(task, local, len(SIZES), 2.0)
    expected = np.zeros(layout.dimension)
    for user in range(len(SIZES)):
        model = make_model().eval()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = users.examples_of(user)
        for _ in range(3):
            optimizer.zero_grad()
            outputs = model(torch.tensor(data["x"]))
            cross_entropy(outputs, torch.tensor(data["y"])).mean().backward()
            optimizer.step()
        start = task.parameters()
        update = {n: p.detach().numpy() - start[n] for n, p in model.named_parameters()}
        expected += layout.flatten(update)
    found = total_of(InProcessTransport(task, users, CPU, 10**5), request)
    np.testing.assert_allclose(request.clipping.in_units(found), expected, atol=1e-5)


def moments_of(task: Task, users: UserStore, user: int) -> np.ndarray:
    """Mean and mean of squares of each layer's inputs, standardised by hand in NumPy."""
    model = copy.deepcopy(task.model)
    x = torch.tensor(users.examples_of(user)["x"])
    vector = []
    for position in (1, 4):
        with torch.no_grad():
            inputs = model[:position](x).double().numpy()
        norm = model[position]
        axes = (0, 2)[: inputs.ndim - 1]
        mean, var = norm.running_mean.numpy(), norm.running_var.numpy() + norm.eps
        first = (inputs.mean(axes) - mean) / np.sqrt(var)
        column = mean.reshape(1, -1, *[1] * (inputs.ndim - 2))
        second = np.square(inputs - column).mean(axes) / var
        vector += [first, second - 1.0]
    return np.concatenate(vector)


def measured(
    task: Task,
    users: UserStore,
    user: int,
    asked: Metric,
    shapes: tuple[int, ...] = (),
    statistics: Mapping[str, np.ndarray] | None = None,
) -> np.ndarray:
    """A metric of one user, before it is clipped, alone or in a lane of slices of two rows."""
    request = request_under(task, LocalTraining(0.1, steps=1), users.population, 1.0)
    trainer = Trainer(task, users, None, CPU, 10**5, "float32")
    request = replace(request, metrics=(asked,), statistics=statistics or {})
    sent = trainer.sent(request, trainer.begin(request), Chunk(np.array([user]), shapes, 2))
    return sent[asked.tensor][:][0].numpy()


@pytest.mark.parametrize("shapes", [(), (4,)], ids=["alone", "together"])
def test_the_metric_is_the_moments_of_what_layers_see(shapes: tuple[int, ...]) -> None:
    task, users = Task(make_model(), cross_entropy), make_users()
    asked, other = metric("batch-norm", channels=8, bound=3.0), Task(make_model(), cross_entropy)
    for norm in running_norms(other.model).values():  # as a later round is sent them
        for statistic in norm.statistics.values():
            statistic.add_(0.5)
    for user in range(len(SIZES)):
        found = measured(task, users, user, asked, shapes, other.statistics())
        np.testing.assert_allclose(found, moments_of(other, users, user), atol=1e-5)


def test_the_metric_is_zero_where_statistics_are_right() -> None:
    users = UserStore({"x": np.array([[1.0], [3.0]], np.float32), "y": np.zeros(2, int)}, [0, 2])
    layer = nn.BatchNorm1d(1, eps=0.0)
    layer.running_mean.fill_(2.0)
    task = Task(nn.Sequential(layer, nn.Linear(1, 2)), cross_entropy)
    asked = metric("batch-norm", channels=1, bound=1.0)
    np.testing.assert_allclose(measured(task, users, 0, asked), [0.0, 0.0], atol=1e-6)


def test_layers_called_twice_are_refused_by_the_metric() -> None:
    layer = nn.BatchNorm1d(2)
    task = Task(nn.Sequential(nn.Linear(2, 2), layer, layer), cross_entropy)
    asked = metric("batch-norm", channels=2, bound=1.0)
    layout = Layout.of(task.parameters())
    place = Layout((*layout.names, asked.tensor), (*layout.shapes, asked.shape))
    clipping = Clipping(place, (*flat(layout, 1.0), asked.group))
    blank = {"x": np.zeros((1, 2), np.float32), "y": np.zeros(1, np.int64)}
    with pytest.raises(InvalidValueError, match="'1' is called 2 times"):
        check_metrics(task, [asked], clipping, blank)
