"""Models whose copies call the original: users side by side would train with each other's model."""

import copy
import ctypes
import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedpriv.engine.leftovers import lazy_copy
from fedpriv.engine.reading import outputs_of_zeros
from fedpriv.engine.task import Task, called, cross_entropy
from fedpriv.engine.task_checks import check_learns, check_task
from fedpriv.errors import ModelError
from fedpriv.experiment.models import MODELS, build_model
from fedpriv.training.local import SGD

ROWS = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
BLANK = np.zeros((1, 6), np.float32)


class Holding(nn.Module):
    """Calls a function that it holds, which may be of another module."""

    def __init__(self, inner: nn.Module, function: object) -> None:
        super().__init__()
        self.inner, self.function = inner, function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def wrapped(model: nn.Module) -> nn.Module:
    """The model with a forward that calls the one it had."""
    original = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return original(x)

    model.forward = forward
    return model


def held(model: nn.Module) -> nn.Module:
    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x)

    return Holding(model, function)


def last_wrapped() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), wrapped(nn.Linear(8, 3)))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    return model


def twice() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(6, 3))


def of_bound_method() -> nn.Module:
    inner = nn.Linear(6, 3)
    return Holding(inner, partial(inner.forward))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    return model


def check(model: nn.Module, rows: np.ndarray) -> None:
    check_task(Task(model, cross_entropy), {"x": rows, "y": np.zeros(len(rows), np.int64)})


@pytest.mark.parametrize("rows", [ROWS, BLANK], ids=["rows", "blank"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: wrapped(nn.Linear(6, 3)),
        lambda: wrapped(nn.Linear(6, 3, bias=False)),
        lambda: held(nn.Linear(6, 3)),
        lambda: nn.Sequential(held(nn.Linear(6, 8)), nn.Linear(8, 3)),
        last_wrapped,
        lambda: wrapped(with_dropout()),
        lambda: wrapped(build_model("softmax", {"inputs": 6}, 0)),
    ],
)
def test_a_model_of_which_copies_call_the_original_is_refused(make, rows: np.ndarray) -> None:
    with pytest.raises(ModelError, match="a copy of the model does not use its own parameters"):
        check(make(), rows)


def test_such_a_copy_ignores_what_is_swapped_into_it() -> None:
    """Why it is refused: nothing else says so."""
    task = Task(wrapped(nn.Linear(6, 3)), cross_entropy)
    ones = {name: torch.ones(p.shape) for name, p in task.model.named_parameters()}
    x = torch.from_numpy(ROWS)
    outputs = [functional_call(m, ones, (x,)) for m in (task.model, task.evaluated().model)]
    assert not torch.allclose(*outputs)


@pytest.mark.parametrize("rows", [ROWS, BLANK], ids=["rows", "blank"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(6, 3),
        tied,
        twice,
        of_bound_method,
        with_dropout,
        partly_frozen,
        lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)),
    ],
)
def test_other_models_are_accepted(make, rows: np.ndarray) -> None:
    model = make()
    before = {name: p.clone() for name, p in model.named_parameters()}
    check(model, rows)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("make", [tied, twice])
def test_what_is_put_in_is_in_all_places_and_gone_afterwards(make) -> None:
    model = make()
    own = dict(model.named_parameters(remove_duplicate=False))
    others = {n: torch.randn(p.shape) for n, p in model.named_parameters()}
    expected = make()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_(others[name])
    x = torch.from_numpy(ROWS)
    torch.testing.assert_close(called(model, others, x), expected(x))
    held = dict(model.named_parameters(remove_duplicate=False))
    assert held.keys() == own.keys()
    assert all(held[name] is parameter for name, parameter in own.items())


@pytest.mark.parametrize("name", MODELS)
def test_models_by_name_are_accepted(name: str) -> None:
    shape = {"softmax": (3, 64), "mlp": (3, 784), "cnn": (3, 1, 28, 28)}.get(name, (3, 9))
    rng = np.random.default_rng(0)
    text = rng.integers(0, 96, shape)
    x, y = (text, text) if "character" in name else (rng.random(shape, np.float32), np.arange(3))
    for rows in (x, np.zeros_like(x)):
        check_task(Task(build_model(name, {}, 0), cross_entropy), {"x": rows, "y": y})


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(6, 3)
    model.lock = threading.Lock()
    with pytest.raises(ModelError, match="the model cannot be copied"):
        check(model, ROWS)


def filled(tensor: torch.Tensor) -> None:
    ctypes.memset(tensor.data_ptr(), 1, 4 * tensor.numel())


WRITES = {
    "in place": lambda t: t.mul_(3.0),
    "through a view": lambda t: t.view(-1)[2:].fill_(5.0),
    "as other numbers": lambda t: t.view(torch.int32).fill_(7),
    "as a result": lambda t: torch.add(torch.ones_like(t), 1.0, out=t),
    "by NumPy": lambda t: t.numpy().fill(5.0),
    "by dlpack": lambda t: torch.from_dlpack(t).fill_(5.0),
    "in its storage": lambda t: t.untyped_storage().fill_(3),
    "at its address": filled,
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("memory", ["torch", "NumPy"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_a_model_and_its_lazy_copies_never_see_what_others_write(
    write: Callable[[torch.Tensor], object], memory: str, frozen: bool
) -> None:
    model = nn.Linear(6, 3).requires_grad_(not frozen)
    if memory == "NumPy":
        model.weight.data = torch.from_numpy(np.ones((3, 6), np.float32))
    start = model.weight.detach().numpy().copy()
    models = [model, lazy_copy(model), lazy_copy(model)]
    models.append(lazy_copy(models[1]))
    for number, writer in enumerate(models):
        write(writer.weight.data)
        for model in models[number + 1 :]:
            assert np.array_equal(model.weight.detach().numpy().copy(), start)
        assert not np.array_equal(writer.weight.detach().numpy(), start)


def test_the_checks_of_a_task_change_no_frozen_parameter() -> None:
    class Teacher(nn.Module):
        """Moves its frozen weights in each call, as momentum encoders do."""

        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = nn.Linear(6, 3), nn.Linear(6, 3).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.teacher.weight.mul_(0.5).add_(self.student.weight)
                self.teacher.bias.data.mul_(0.5)
            return self.student(x) + self.teacher(x)

    model = Teacher()
    start = copy.deepcopy(model.state_dict())
    rows = {"x": ROWS, "y": np.zeros(4, np.int64)}
    task = Task(model, "cross-entropy")
    assert outputs_of_zeros(task, rows) == (1, 3)
    check_task(task, rows)
    check_learns(task, rows, rows, SGD(0.1, steps=1))
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, start[name])
