"""What is trained in a benchmark: works, each with users, a model and local settings.

Images are random, of MNIST's shape: how fast a model trains does not depend on what they show.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from fedpriv.data.synthetic import synthetic_population
from fedpriv.models import CharacterTransformer, cnn, mlp, softmax_regression
from fedpriv.privacy.round import LocalTraining
from simulations.benchmarks.roles import roles

Example = tuple[torch.Tensor, torch.Tensor]

_SEED = 0


@dataclass(frozen=True)
class Work:
    """One row of the table."""

    title: str  # what it is, in a few words
    build: Callable[[], nn.Module]  # makes the model, with the same initial parameters each time
    x: torch.Tensor  # [rows, …] inputs of all users
    y: torch.Tensor  # [rows, …] targets
    offsets: NDArray[np.int64]  # [users + 1]; user u owns rows offsets[u]:offsets[u + 1]
    local: LocalTraining  # how a user trains
    clipping_norm: float  # S of flat clipping
    sampled: int  # on how many of the first users sums are compared; as many nodes Flower has
    # How many of the first users a contestant trains in a turn, by contestant; all users where it
    # is not named
    turns: Mapping[str, int] = field(default_factory=dict)

    @property
    def users(self) -> int:
        """How many users there are."""
        return len(self.offsets) - 1

    def examples_of(self, user: int) -> Example:
        """Inputs and targets of a user; views."""
        rows = slice(int(self.offsets[user]), int(self.offsets[user + 1]))
        return self.x[rows], self.y[rows]

    def users_in_a_turn(self, contestant: str) -> int:
        """How many users a contestant trains in a turn."""
        return self.turns.get(contestant, self.users)

    def without_order(self) -> LocalTraining:
        """Local settings whose result does not depend on the order of a user's examples.

        Those of the work where all of a user's examples are one batch; else two steps on all.
        """
        if max(np.diff(self.offsets)) <= (self.local.batch_size or len(self.x)):
            return self.local
        return replace(self.local, batch_size=None, epochs=2)

    def flops_of(self, users: int) -> float:
        """Floating-point operations of matrix products and convolutions in training some users."""
        model, count = self.build(), FlopCounterMode(display=False)
        with count:
            torch.autograd.backward(functional.cross_entropy(model(self.x[:1]), self.y[:1]))
        examples = int(self.offsets[users]) * (self.local.epochs or 1)
        return float(examples * count.get_total_flops())


def sgd(model: nn.Module, x: torch.Tensor, y: torch.Tensor, local: LocalTraining) -> None:
    """Train a model on the examples of a user, in an order of its own in each epoch."""
    optimizer = torch.optim.SGD(model.parameters(), lr=local.rate)
    for _ in range(local.epochs or 1):
        order = torch.randperm(len(x), device=x.device)
        for batch in torch.split(order, local.batch_size or len(x)):
            optimizer.zero_grad()
            torch.autograd.backward(functional.cross_entropy(model(x[batch]), y[batch]))
            optimizer.step()


def clipped(update: list[torch.Tensor], clipping_norm: float) -> list[torch.Tensor]:
    """An update, scaled down if its norm is above a bound."""
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(u) for u in update]))
    factor = torch.clamp(clipping_norm / norm, max=1.0)
    return [part * factor for part in update]


def flattened(tensors: list[torch.Tensor]) -> NDArray[np.float64]:
    """Tensors in the order of the model's parameters, as one vector [D]."""
    return torch.cat([t.detach().flatten().cpu() for t in tensors]).double().numpy()


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return build()


def _images(users: int, examples: int) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]:
    """Random images and digits of users of equal size."""
    generator = torch.Generator().manual_seed(_SEED)
    rows = users * examples
    x = torch.randn((rows, 1, 28, 28), generator=generator)
    y = torch.randint(0, 10, (rows,), generator=generator)
    return x, y, np.arange(0, rows + 1, examples)


def _mlp(users: int) -> Work:
    local = LocalTraining(learning_rate=0.1, batch_size=10, epochs=1)
    build = lambda: _seeded(mlp)  # noqa: E731
    title, data = f"MLP 784–128–10, {users:,} users × 50", _images(users, 50)
    return Work(title, build, *data, local, 0.5, 100, _fewer(users))


def _cnn(users: int) -> Work:
    local = LocalTraining(learning_rate=0.1, batch_size=10, epochs=1)
    build = lambda: _seeded(cnn)  # noqa: E731
    title, data = f"CNN, {users:,} users × 50", _images(users, 50)
    return Work(title, build, *data, local, 0.1, 100, _fewer(users))


def _fewer(users: int) -> dict[str, int]:
    """How many of many users those train who train one after another."""
    return {name: min(users, 200) for name in ("plain", "pfl", "flower")}


def _shakespeare() -> Work:
    x, y, offsets = roles(users=100)
    local = LocalTraining(learning_rate=0.1, batch_size=10, epochs=1)
    build = lambda: _seeded(lambda: CharacterTransformer(length=x.shape[1]))  # noqa: E731
    return Work("character transformer, 100 roles", build, x, y, offsets, local, 0.5, 100)


def _softmax() -> Work:
    store = synthetic_population(users=100_000, examples_per_user=10, shape=(32,)).users
    x, y = (torch.from_numpy(store.fields[name]) for name in ("x", "y"))
    local = LocalTraining(learning_rate=0.1, batch_size=10, epochs=1)
    turns = {"plain": 10_000, "pfl": 10_000, "flower": 200}
    build = lambda: softmax_regression(32)  # noqa: E731
    return Work(
        "softmax regression, 100,000 users", build, x, y, store.offsets, local, 0.5, 200, turns
    )


def _dpsgd() -> Work:
    local = LocalTraining(learning_rate=0.1, batch_size=1, epochs=1)
    build = lambda: _seeded(cnn)  # noqa: E731
    return Work("DP-SGD, CNN, a lot of 600", build, *_images(600, 1), local, 0.05, 600)


WORKS: Mapping[str, Callable[[], Work]] = {
    "mlp": partial(_mlp, 100),
    "cnn": partial(_cnn, 100),
    "mlp-2000": partial(_mlp, 2_000),
    "cnn-2000": partial(_cnn, 2_000),
    "shakespeare": _shakespeare,
    "softmax": _softmax,
    "dpsgd": _dpsgd,
}
