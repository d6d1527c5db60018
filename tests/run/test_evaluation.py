"""Evaluation against the obvious, and without touching the model."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.task import Task, cross_entropy, squared_error
from fedpriv.run.run import evaluate

CPU = torch.device("cpu")
RNG = np.random.default_rng(0)


def test_loss_and_accuracy_by_hand() -> None:
    # More rows than are evaluated at once.
    x = RNG.standard_normal((4321, 6)).astype(np.float32)
    y = RNG.integers(0, 3, 4321)
    model = nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.9))
    task = Task(model, cross_entropy)
    weight = RNG.standard_normal((3, 6)).astype(np.float32)
    bias = np.zeros(3, np.float32)
    found = evaluate(task, {"x": x, "y": y}, CPU, {"0.weight": weight, "0.bias": bias})
    loss, accuracy = found.loss, found.accuracy
    scores = torch.from_numpy(x @ weight.T)
    assert accuracy == pytest.approx(float((scores.argmax(1).numpy() == y).mean()))
    assert loss == pytest.approx(
        functional.cross_entropy(scores, torch.from_numpy(y)).item(), rel=1e-5
    )
    assert model.training
    assert not torch.equal(model[0].weight, torch.from_numpy(weight))


class Viewing(nn.Module):
    """A convolution whose outputs must lie in memory as torch lays them out by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.max_pool2d(self.convolution(x), 2).view(len(x), -1)


class Striding(Viewing):
    """The same, and it reads memory without looking at how it lies."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = self.convolution(x)
        return given.as_strided((len(x), 3), (given[0].numel(), 16))


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Conv2d(2, 3, 2), nn.MaxPool2d(4), nn.Flatten()), Viewing(), Striding()],
)
def test_models_of_images_give_what_they_give_alone(model: nn.Module) -> None:
    x = RNG.standard_normal((1234, 2, 5, 5)).astype(np.float32)
    y = RNG.integers(0, 3, 1234)
    scores = model(torch.from_numpy(x))
    task = Task(model, cross_entropy)
    found = evaluate(task, {"x": x, "y": y}, CPU, task.parameters())
    assert found.accuracy == pytest.approx(float((scores.argmax(1).numpy() == y).mean()))
    loss = functional.cross_entropy(scores, torch.from_numpy(y)).item()
    assert found.loss == pytest.approx(loss, rel=1e-5)


def test_sequences_count_every_position() -> None:
    x = RNG.standard_normal((10, 3, 5)).astype(np.float32)
    y = x.argmax(1)
    y[0] = (y[0] + 1) % 3
    task = Task(nn.Identity(), cross_entropy)
    accuracy = evaluate(task, {"x": x, "y": y}, CPU, {}).accuracy
    assert accuracy == pytest.approx(0.9)


def test_regression_has_no_accuracy() -> None:
    x = RNG.standard_normal((10, 2)).astype(np.float32)
    task = Task(nn.Identity(), squared_error)
    found = evaluate(task, {"x": x, "y": x + 2}, CPU, {})
    assert found.accuracy is None
    assert found.loss == pytest.approx(4.0)
