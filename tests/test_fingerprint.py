"""Fingerprints: what changes what a value does changes them, and the process does not."""

import copy
import enum
import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from fedpriv.engine.task import Task
from fedpriv.fingerprint import fingerprint
from fedpriv.training.optimizers import FedAdam

ROOT = Path(__file__).parents[1]


def changed(code: str, globals_: str = "scale = 1.0") -> Callable[..., object]:
    """The last thing that this code defines, as a script would that is edited."""
    space: dict[str, object] = {"__name__": "script", "torch": torch, "nn": nn}
    exec(globals_, space)
    exec(code, space)
    return space["found"]  # type: ignore[return-value]


def net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), *layers)


def frozen(shift: float) -> nn.Module:
    model = net(nn.Linear(3, 2))
    with torch.no_grad():
        model[0].weight.add_(shift).requires_grad_(False)
    return model


def with_attribute(value: object) -> nn.Module:
    model = net()
    model.scale = value
    return model


def tied(*, tie: bool) -> nn.Module:
    model = net(nn.Linear(3, 3))
    model[1].weight = model[0].weight if tie else nn.Parameter(model[0].weight.detach().clone())
    return model


def closing_over(value: object) -> Callable[..., object]:
    return lambda outputs: (outputs, value)


def model_class(forward: str) -> object:
    code = f"""
class Net(nn.Module):
    def forward(self, x):
        return {forward}
found = Net()
"""
    return changed(code)


Colour = enum.Enum("Colour", ["RED", "BLUE"])
DIFFERENT = {
    "numbers": (1, 2),
    "types of numbers": (1, 1.0),
    "text": ("ab", ("a", "b")),
    "order": ([1, 2], [2, 1]),
    "what is in a set": ({1, 2}, {1, 3}),
    "tables": (MappingProxyType({"a": 1}), {"a": 2}),
    "members": (Colour.RED, Colour.BLUE),
    "arrays": (np.arange(3), np.arange(3)[::-1]),
    "types of arrays": (np.zeros(2, np.int32), np.zeros(1, np.int64)),
    "objects in arrays": (np.array(["a", None]), np.array(["a", "b"], object)),
    "small tensors": (torch.ones(1).bfloat16(), torch.full([1], 1.01).bfloat16()),
    "empty tensors": (torch.zeros(0), torch.zeros(())),
    "shapes": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "layers": (net(nn.ReLU()), net(nn.Tanh())),
    "numbers of layers": (net(nn.Dropout(0.1)), net(nn.Dropout(0.5))),
    "frozen weights": (frozen(0.0), frozen(1.0)),
    "what is trained": (net(), net().requires_grad_(requires_grad=False)),
    "buffers": (net(nn.BatchNorm1d(3)), net(nn.BatchNorm1d(3), nn.Identity())),
    "attributes": (with_attribute(1.0), with_attribute(2.0)),
    "functions of a model": (with_attribute(functional.relu), with_attribute(torch.tanh)),
    "parameters that are one": (tied(tie=True), tied(tie=False)),
    "parametrisations": (
        net(parametrizations.weight_norm(nn.Linear(3, 3))),
        net(parametrizations.spectral_norm(nn.Linear(3, 3))),
    ),
    "constants": (lambda x: 2 * x, lambda x: 3 * x),
    "names": (lambda x: x.tanh(), lambda x: x.relu()),
    "operations": (lambda x: x + 1, lambda x: x - 1),
    "defaults": (lambda x, y=1: x + y, lambda x, y=2: x + y),
    "inner functions": (lambda: lambda x: x, lambda: lambda x: -x),
    "what is closed over": (closing_over(1), closing_over(2)),
    "arrays that are closed over": (closing_over(np.zeros(2)), closing_over(np.ones(2))),
    "partials": (functools.partial(max, 1), functools.partial(max, 2)),
    "cached": (functools.cache(lambda: 1), functools.cache(lambda: 2)),
    "globals": (
        changed("found = lambda x: scale * x"),
        changed("found = lambda x: scale * x", "scale = 2.0"),
    ),
    "globals of globals": (
        changed("f = lambda: scale\nfound = lambda: f()"),
        changed("f = lambda: scale\nfound = lambda: f()", "scale = 2.0"),
    ),
    "forward": (model_class("x"), model_class("2 * x")),
    "classes": (
        changed("class A:\n a = 1\nfound = A"),
        changed("class A:\n a = 2\nfound = A"),
    ),
    "properties": (
        changed("class A:\n a = property(lambda s: 1)\nfound = A()"),
        changed("class A:\n a = property(lambda s: 2)\nfound = A()"),
    ),
    "bases": (
        changed("class A:\n def f(s): return 1\nclass B(A): pass\nfound = B()"),
        changed("class A:\n def f(s): return 2\nclass B(A): pass\nfound = B()"),
    ),
    "slots": (
        changed("class A:\n __slots__ = ('a',)\nfound = A()\nfound.a = 1"),
        changed("class A:\n __slots__ = ('a',)\nfound = A()\nfound.a = 2"),
    ),
    "figures": (Task(net()), Task(net(), figures={"auc": "auc"})),
    "fedpriv's own": (FedAdam(0.1), FedAdam(0.2)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_does_something_else_has_another_fingerprint(what: str) -> None:
    one, other = DIFFERENT[what]
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one) == fingerprint(one)


@pytest.mark.parametrize("value", [net(nn.ReLU(), nn.BatchNorm1d(3)), tied(tie=True), FedAdam()])
def test_a_copy_has_the_same(value: object) -> None:
    assert fingerprint(copy.deepcopy(value)) == fingerprint(value)


def test_where_code_stands_and_how_an_object_was_made_does_not_count() -> None:
    code = "class A:\n def __init__(s, a): s.a = {}\n def f(s): return s.a\nfound = A({})"
    one, other = changed(code.format(1, 1)), changed("\n\n" + code.format("1 * a", 1))
    assert fingerprint(one) == fingerprint(other)


def test_own_modules_count_as_far_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("losses_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    function = changed("found = lambda x: losses.scale * x")
    function.__globals__["losses"] = module
    module.scale, module.other = 1.0, 1.0
    before = fingerprint(function)
    module.other = 2.0
    assert fingerprint(function) == before
    module.scale = 2.0
    assert fingerprint(function) != before


def test_functions_that_bear_a_librarys_name_are_not_taken_for_it() -> None:
    wrapped = [functools.wraps(functional.relu)(lambda x, s=s: s * x) for s in (1.0, 2.0)]
    assert fingerprint(wrapped[0]) != fingerprint(wrapped[1])


@pytest.mark.parametrize("value", [threading.Lock(), torch.eye(2).to_sparse(), (i for i in "a")])
def test_what_cannot_be_told_is_never_the_same(value: object) -> None:
    held = SimpleNamespace(a=value)
    assert fingerprint(held) != fingerprint(held)


def test_what_is_nested_too_deeply_is_never_the_same() -> None:
    value: list[object] = []
    for _ in range(10_000):
        value = [value]
    assert fingerprint(value) != fingerprint(value)


def test_what_holds_itself_ends() -> None:
    one = SimpleNamespace(a=1)
    one.itself, one.others = one, frozenset({closing_over(one)})
    other = copy.copy(one)
    other.itself, other.a = other, 2
    assert fingerprint(one) == fingerprint(one) != fingerprint(other)


def test_the_process_decides_nothing() -> None:
    code = """
import tests.test_fingerprint as here
from fedpriv.fingerprint import fingerprint
told = {n: [*map(fingerprint, pair)] for n, pair in here.DIFFERENT.items()}
names = {"one", "two", "three", "four"}, {"_hash": hash("a")}
print(told, fingerprint(names, lambda x: x in {"one", "two", "three", "four"}))
"""
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1
