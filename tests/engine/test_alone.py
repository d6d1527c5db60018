"""Users one after another: models that no lanes know, against a plain loop in torch."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint

from fedpriv.data.population import UserStore
from fedpriv.engine.examples import Chunk
from fedpriv.engine.task import Task
from fedpriv.engine.trainer import Trainer
from fedpriv.training.local import SGD, AdamW
from tests.engine import plain
from tests.engine.everyone import request_under, whole

SIZES, WORDS, LENGTH = [5, 1, 9, 5], 7, 6
KEY = bytes(range(32))  # of `request_under`


class Dropping(nn.Sequential):
    """Draws from torch's generator."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(LENGTH, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


class Drawing(Dropping):
    """Draws from those of Python and NumPy."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x * random.random())
        return out + float(np.random.random())


class Tied(nn.Module):
    """Scores words by their own embeddings, through a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 4, padding_idx=2), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(torch.tanh(self.layer(self.words(x).mean(1))))
        return functional.linear(hidden, self.words.weight)


class Packed(nn.Module):
    """A GRU over texts that zeros fill up."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(WORDS, 4), nn.GRU(4, 5, batch_first=True)
        self.scores = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x != 0).sum(1).clamp(min=1)
        texts = pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        return self.scores(self.gru(texts)[1][0])


class Experts(nn.Module):
    """Sends each row to the expert that a gate says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.scores = nn.Linear(LENGTH, 3), nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(LENGTH, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(1).max(1)
        hidden = x.new_zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            (rows,) = (chosen == number).nonzero(as_tuple=True)
            hidden = hidden.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.scores(hidden)


class OwnStatistics(nn.Module):
    """Normalises by what is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(LENGTH, 8, bias=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x)
        hidden = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-3).sqrt()
        return self.outer(hidden)


class Two(nn.Module):
    """Reads words and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers = nn.Embedding(WORDS, 4), nn.Linear(LENGTH, 4)
        self.scores = nn.Linear(4, 3)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return self.scores(torch.tanh(self.words(words).mean(1) + self.numbers(x)))


class Keeping(nn.Module):
    """Keeps what it saw, in every way that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.seen = nn.Linear(LENGTH, 3), 0, {"rows": [0.0]}
        self.register_buffer("mean", torch.zeros(LENGTH))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen["rows"].append(float(x.detach().mean()))
        self.count.add_(1)
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        self.last = getattr(self, "last", 0.0) + x.detach().mean()
        self.layer.register_forward_pre_hook(lambda _, given: (given[0] * 1.1,))
        scale = self.calls + self.count + sum(self.seen["rows"]) + self.last
        return self.layer(x - self.mean) / (1.0 + scale.abs())


class Following(nn.Module):
    """Moves frozen weights after the trained ones in each call, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(LENGTH, 3), nn.Linear(LENGTH, 3)
        self.fixed = nn.LSTM(LENGTH, 3, batch_first=True).requires_grad_(False)
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.teacher.weight.mul_(0.5).add_(self.student.weight)
            self.teacher.bias.data.numpy()[:] += 0.1
        return self.student(x) - self.teacher(x) + self.fixed(x)[0]


class Checkpointed(nn.Module):
    """Computes its hidden layer twice to remember less."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(LENGTH, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(checkpoint(self.inner, x, use_reentrant=False)))


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    """How well a row's class is found among the other rows of its user."""
    z = functional.normalize(outputs, dim=1)
    alike = (targets[:, None] == targets).float()
    return -(alike * (z @ z.t() / 0.5).log_softmax(1)).mean(1)


MODELS: dict[str, Callable[[], Task]] = {
    "dropout": lambda: Task(Dropping()),
    "drawing": lambda: Task(Drawing()),
    "tied": lambda: Task(Tied(), inputs="words"),
    "packed": lambda: Task(Packed(), inputs="words"),
    "experts": lambda: Task(Experts()),
    "contrastive": lambda: Task(nn.Linear(LENGTH, 4), contrastive),
    "own statistics": lambda: Task(OwnStatistics()),
    "two inputs": lambda: Task(Two(), inputs=("x", "words")),
    "keeping": lambda: Task(Keeping()),
    "following": lambda: Task(Following()),
    "checkpointed": lambda: Task(Checkpointed()),
}
WAYS = {
    "sgd": SGD(0.3, batch_size=2, epochs=2),
    "momentum": SGD(0.1, batch_size=4, steps=5, momentum=0.9, proximal=0.5),
    "adamw": AdamW(0.05, epochs=3, weight_decay=0.3),
}


def store() -> UserStore:
    rng, rows = np.random.default_rng(0), sum(SIZES)
    words = rng.integers(1, WORDS, (rows, LENGTH))
    words[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, (rows, 1))] = 0
    x = rng.standard_normal((rows, LENGTH)).astype(np.float32)
    fields = {"x": x, "words": words, "y": rng.integers(0, 3, rows)}
    return UserStore(fields, np.cumsum([0, *SIZES]))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_users_move_as_in_a_plain_loop_whoever_went_before(kind: str, way: str) -> None:
    local = WAYS[way]
    torch.manual_seed(0)
    task = MODELS[kind]()
    trainer = Trainer(task, store(), None, plain.CPU, 2**20, "float32")
    request = request_under(task, local, len(SIZES), 1.0)
    start, before = trainer.begin(request), task.parameters()
    expected = plain.moved(task, store(), range(len(SIZES)), local, KEY)
    assert all(float(update.abs().max()) > 1e-4 for update in expected.values())
    first = whole(trainer.sent(request, start, Chunk(np.array([0]))))
    for user in (1, 2, 3, 0):
        found = whole(trainer.sent(request, start, Chunk(np.array([user]))))
        for name, update in found.items():
            wanted = expected[name][user : user + 1]
            torch.testing.assert_close(update, wanted, rtol=1e-3, atol=2e-5, msg=name)
    assert all(torch.equal(found[name], update) for name, update in first.items())
    for name, parameter in task.parameters().items():
        np.testing.assert_array_equal(parameter, before[name])


def test_users_share_the_memory_of_frozen_parameters_until_the_model_writes_to_them() -> None:
    trainer = Trainer(Task(Following()), store(), None, plain.CPU, 2**20, "float32")
    start = trainer.begin(request_under(trainer.task, WAYS["sgd"], len(SIZES), 1.0))
    with trainer.alone.begun(start, training=True) as model:
        names = [name for name, p in model.named_parameters() if not p.requires_grad]
        members = [dict(m.named_parameters()) for m in (model, trainer.task.model)]
        assert all(torch._C._is_cow_tensor(m[name]) for m in members for name in names)
        model(torch.ones(1, LENGTH))
        written = [n for n in names if not torch.equal(*(m[n] for m in members))]
        assert written == ["teacher.weight", "teacher.bias"]
