"""Which models train through their linear layers' inputs and gradients, and that it is exact."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedpriv.engine.linear import linear_layers, train_linear_chunk
from fedpriv.engine.local import train_chunk
from fedpriv.engine.task import Task
from fedpriv.engine.updates import whole
from fedpriv.federated.transport import LocalTraining
from fedpriv.losses import cross_entropy
from fedpriv.models import cnn, mlp, softmax_regression


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


class Words(nn.Module):
    """Linear layers over the positions of a sequence [B, L, 6] → scores [B, 5, L]."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 9)
        self.two = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.relu(self.one(x))).transpose(1, 2)


def half_frozen() -> nn.Module:
    layer = nn.Linear(6, 3)
    layer.bias.requires_grad_(requires_grad=False)
    return layer


def frozen_trunk() -> nn.Module:
    trunk = nn.Conv1d(1, 2, 3)
    trunk.requires_grad_(requires_grad=False)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), trunk, nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("model", "example", "expected"),
    [
        (mlp(), torch.zeros(1, 1, 28, 28), {"1": 1, "3": 1}),
        (softmax_regression(), torch.zeros(1, 64), {"1": 1}),
        (nn.Linear(6, 3), torch.zeros(1, 6), {"": 1}),
        (Words(), torch.zeros(1, 4, 6), {"one": 4, "two": 4}),
        (frozen_trunk(), torch.zeros(1, 6), {"3": 1}),
        (cnn(), torch.zeros(1, 1, 28, 28), None),
        (Reused(), torch.zeros(1, 6), None),
        (Tied(), torch.zeros(1, 6), None),
        (half_frozen(), torch.zeros(1, 6), None),
    ],
    ids=["mlp", "softmax", "bare", "words", "frozen", "cnn", "reused", "tied", "half"],
)
def test_only_models_of_whole_linear_layers_qualify(
    model: nn.Module, example: torch.Tensor, expected: dict[str, int] | None
) -> None:
    found = linear_layers(Task(model, cross_entropy), example)
    assert (found.rows if found else None) == expected


def test_it_pays_while_users_have_fewer_examples_than_layers_are_wide() -> None:
    layers = linear_layers(Task(mlp(), cross_entropy), torch.zeros(1, 1, 28, 28))
    assert layers is not None
    assert layers.pays(50)
    assert not layers.pays(5000)


@pytest.mark.parametrize(
    "local",
    [
        LocalTraining(0.1, steps=4),
        LocalTraining(0.1, steps=4, momentum=0.9, proximal=0.5),
    ],
)
@pytest.mark.parametrize("make", [Words, frozen_trunk], ids=["words", "frozen"])
def test_equals_training_with_weights_per_user(make: type, local: LocalTraining) -> None:
    torch.manual_seed(0)
    task = Task(make(), cross_entropy)
    words = make is Words
    x = torch.randn(3, 4, 5, *((7, 6) if words else (6,)))
    y = torch.randint(0, 3, (3, 4, 5, *((7,) if words else ())))
    weights = torch.ones(3, 4, 5)
    weights[1, 2:] = 0.0
    weights[2, :, 3:] = 0.0
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    constants = task.constants(torch.device("cpu"))
    layers = linear_layers(task, x[0, 0, :1])
    assert layers is not None
    fast = whole(train_linear_chunk(layers, task, parameters, constants, x, y, weights, local))
    slow = train_chunk(task, parameters, constants, x, y, weights, local)
    assert list(fast) == list(slow) == list(parameters)
    for name, update in slow.items():
        assert float(update.abs().max()) > 1e-3
        np.testing.assert_allclose(fast[name].numpy(), update.numpy(), atol=2e-6)


def test_hooks_are_gone_afterwards_even_if_the_loss_raises() -> None:
    def broken(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken")

    model = nn.Linear(6, 3)
    task = Task(model, broken)
    layers = linear_layers(task, torch.zeros(1, 6))
    assert layers is not None
    parameters = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
    x, y, weights = torch.zeros(1, 1, 2, 6), torch.zeros(1, 1, 2), torch.ones(1, 1, 2)
    with pytest.raises(RuntimeError, match="broken"):
        train_linear_chunk(layers, task, parameters, {}, x, y, weights, LocalTraining(0.1, steps=1))
    assert not model._forward_hooks
    assert torch.equal(
        model(torch.ones(2, 6)), functional.linear(torch.ones(2, 6), model.weight, model.bias)
    )
