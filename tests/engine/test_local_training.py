"""An algorithm of local training from outside the package, chosen by the type of its settings."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from fedpriv.engine import layers as engine_layers
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.privacy.round import LocalStep, LocalTraining
from tests.engine.everyone import request_under, total_of, users_of

SIZES = [5, 1, 12, 3]


@dataclass(frozen=True)
class SignTraining(LocalTraining):
    """SGD by the signs of gradients, which shrink by a factor in each step."""

    decay: float = 1.0

    @property
    def memories(self) -> int:
        return 1

    def direction(self, step: LocalStep) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        (before,) = step.memory
        assert bool((before == 0).all()) == (step.number == 0)
        scale = torch.ones_like(before) if step.number == 0 else before * self.decay
        return step.gradient.sign() * scale, (scale,)


@pytest.mark.parametrize("bias", [True, False])
def test_an_algorithm_from_outside_trains_users(
    bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        engine_layers, "_TOUCHES", 10**9
    )  # corrections would pay, if it were linear
    torch.manual_seed(0)
    task, users = Task(nn.Linear(6, 3, bias=bias), cross_entropy), users_of(SIZES)
    local = SignTraining(0.1, steps=3, decay=0.5)
    request = request_under(task, local, len(SIZES), 8.0)
    transport = InProcessTransport(task, users, torch.device("cpu"), 10**6, processes=1)
    steps, layout = request.clipping.steps, request.clipping.layout
    found = layout.unflatten(total_of(transport, request) * steps)
    expected = {name: np.zeros(p.shape) for name, p in task.parameters().items()}
    for user in range(len(SIZES)):
        data = users.examples_of(user)
        x, y = torch.tensor(data["x"]), torch.tensor(data["y"])
        own = {name: torch.from_numpy(p) for name, p in task.parameters().items()}
        for step in range(3):
            leaves = {name: p.requires_grad_() for name, p in own.items()}
            loss = task.losses_of(functional_call(task.model, leaves, (x,)), y).mean()
            gradients = torch.autograd.grad(loss, [*leaves.values()])
            own = {
                name: p.detach() - 0.1 * 0.5**step * g.sign()
                for (name, p), g in zip(leaves.items(), gradients, strict=True)
            }
        for name, p in task.parameters().items():
            expected[name] += own[name].numpy() - p
    for name, update in expected.items():
        np.testing.assert_allclose(found[name], update, atol=5e-6)
