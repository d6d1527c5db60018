"""Words beyond an embedding reach nobody else, on either road."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedpriv.data.population import UserStore
from fedpriv.engine.roads import Path
from fedpriv.engine.task import Task, cross_entropy
from fedpriv.engine.transport import InProcessTransport
from fedpriv.training.local import SGD
from tests.engine.everyone import alone, request_under, total_of

CPU, WORDS, PEOPLE, ROWS = torch.device("cpu"), 20, 12, 4


class TwoInputs(nn.Module):
    """Numbers beside words."""

    def __init__(self, look_up: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.scores = nn.Embedding(WORDS, 4, padding_idx=0), nn.Linear(9, 3)
        self.look_up = look_up

    def forward(self, number: Tensor, word: Tensor) -> Tensor:
        found = self.look_up(word, self.table.weight).mean(1)
        scores: Tensor = self.scores(torch.cat([number, found], 1))
        return scores


class Computed(nn.Module):
    """The words are numbers until the model makes integers of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(WORDS, 4), nn.Conv1d(4, 3, 1)

    def forward(self, word: Tensor) -> Tensor:
        scores: Tensor = self.layers(self.table(word.long()).transpose(1, 2)).mean(2)
        return scores


class Tied(nn.Module):
    """The table gives the scores too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, 4), nn.LayerNorm(4)

    def forward(self, word: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.table(word))
        return (hidden @ self.table.weight[:3].t()).mean(1)


class Filled(nn.Module):
    """Takes indices in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, 3))

    def forward(self, word: Tensor) -> Tensor:
        return torch.stack([self.weight.index_fill(0, row, 0.5).sum(0) for row in word])


class Shortened(nn.Module):
    """Shortens the rows of its table that are looked up, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, 3))

    def forward(self, word: Tensor) -> Tensor:
        found = functional.embedding(word, self.weight, max_norm=1.0).mean(1)
        return found + self.weight.mean(0)


WITH_NUMBERS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "functional": functional.embedding,
    "padded": partial(functional.embedding, padding_idx=0),
    "by frequency": partial(functional.embedding, scale_grad_by_freq=True),
    "torch": lambda word, table: torch.embedding(table, word),
    "aten": lambda word, table: torch.ops.aten.embedding(table, word),
    "its overload": lambda word, table: torch.ops.aten.embedding.default(table, word),
}
OTHERS: Mapping[str, Callable[[], nn.Module]] = {
    "computed": Computed,
    "tied": Tied,
    "filled": Filled,
    "shortened": Shortened,
}


TOGETHER = ("functional", "padded", "computed", "tied")


def sums_of(name: str, path: Path) -> tuple[np.ndarray, list[np.ndarray]]:
    """Of all users, of whom four have illegal words, and of each alone."""
    torch.manual_seed(0)
    rng, rows = np.random.default_rng(0), PEOPLE * ROWS
    fields: dict[str, np.ndarray] = {"y": rng.integers(0, 3, rows)}
    words = rng.integers(0, WORDS, (rows, 5))
    # At each place the word that would be another's, in the lanes before and behind.
    aimed = WORDS * np.arange(-ROWS * 5 // 2, ROWS * 5 // 2).reshape(ROWS, 5)
    for enemy, word in ((2, aimed), (5, aimed + 3), (8, -1), (9, WORDS)):
        words[enemy * ROWS : (enemy + 1) * ROWS] = word
    if name in WITH_NUMBERS:
        model: nn.Module = TwoInputs(WITH_NUMBERS[name])
        fields |= {"number": rng.standard_normal((rows, 5)).astype(np.float32), "word": words}
    else:
        model = OTHERS[name]()
        fields["word"] = words.astype(np.float32) if name == "computed" else words
    inputs = ("number", "word") if name in WITH_NUMBERS else "word"
    task = Task(model, cross_entropy, inputs=inputs)
    store = UserStore(fields, np.arange(PEOPLE + 1) * ROWS)
    transport = InProcessTransport(task, store, CPU, 2**20, processes=1, path=path)
    request = request_under(task, SGD(0.5, steps=2), PEOPLE, 0.5)
    each = [alone(transport, request, user) for user in range(PEOPLE)]
    return total_of(transport, request), each


@pytest.mark.parametrize(
    ("name", "path"),
    [
        *((name, "alone") for name in ("padded", "computed", "filled", "shortened")),
        *((name, "together") for name in TOGETHER),
        *((name, "auto") for name in (*WITH_NUMBERS, *OTHERS) if name not in TOGETHER),
    ],
)
def test_illegal_words_change_no_other_user(name: str, path: Path) -> None:
    total, each = sums_of(name, path)
    np.testing.assert_array_equal(total, sum(each))
    nothing = {user for user, own in enumerate(each) if not own.any()}
    assert nothing == ({2, 5, 9} if name == "filled" else {2, 5, 8, 9})  # −1 fills the last row
