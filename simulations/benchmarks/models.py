"""Models that people train: those of pfl's benchmarks, and one-line variants of the table's MLP."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

WORDS = 10_004  # StackOverflow's vocabulary in pfl: 10,000 words and four marks
_WIDTH = 96  # of its embeddings


def cifar_cnn(dropout: float = 1.0) -> nn.Module:
    """Return the CNN of pfl's CIFAR-10, [B, 3, 32, 32]: 1,626,442 parameters; 0: no dropout."""
    layers = [
        nn.Conv2d(3, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        *([nn.Dropout(0.25)] if dropout else []),
        nn.Flatten(),
        nn.Linear(64 * 14 * 14, 128),
        nn.ReLU(),
        *([nn.Dropout(0.5)] if dropout else []),
        nn.Linear(128, 10),
    ]
    return nn.Sequential(*layers)


class _Residual(nn.Module):
    """Two convolutions with a shortcut, which changes the size if they do."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.GroupNorm(8, outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(8, outputs),
        )
        shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(8, outputs)
        self.shortcut = nn.Sequential(*shortcut) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.change(x) + self.shortcut(x))


def resnet18(classes: int = 10) -> nn.Module:
    """Return ResNet-18 for images [B, 3, 32, 32], with group normalisation: 11 M parameters."""
    widths = [64, 64, 128, 256, 512]
    blocks = [
        block
        for inner, outer in pairwise(widths)
        for block in (_Residual(inner, outer, 1 + (outer > inner)), _Residual(outer, outer, 1))
    ]
    first = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(8, 64), nn.ReLU()
    last = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)
    return nn.Sequential(*first, *blocks, *last)


class _LanguageModel(nn.Module):
    """A map of words [B, T] to scores [B, WORDS, T]; if tied, scores use the embeddings again."""

    def __init__(self, body: nn.Module, *, tied: bool) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(WORDS, _WIDTH, padding_idx=0), body
        nn.init.uniform_(self.words.weight, -0.05, 0.05)
        self.scores = None if tied else nn.Linear(_WIDTH, WORDS)

    def forward(self, text: Tensor) -> Tensor:
        hidden = self.body(self.words(text))
        scores: Tensor = (
            hidden @ self.words.weight.T if self.scores is None else self.scores(hidden)
        )
        return scores.transpose(1, 2)


class _Recurrent(nn.Module):
    def __init__(self, states: int = 256) -> None:
        super().__init__()
        self.cells, self.out = nn.LSTM(_WIDTH, states, batch_first=True), nn.Linear(states, _WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.out(self.cells(hidden)[0])
        return out


class _Attending(nn.Module):
    places: Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(_WIDTH, 8, 1536, 0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3)
        turns = torch.arange(length)[:, None] * 1e4 ** (-torch.arange(0, _WIDTH, 2) / _WIDTH)
        self.register_buffer("places", torch.stack([turns.sin(), turns.cos()], 2).flatten(1))

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=hidden.device).triu(1)
        out: Tensor = self.layers(hidden * math.sqrt(_WIDTH) + self.places[:length], mask)
        return out


def language_lstm(*, tied: bool) -> nn.Module:
    """Return the LSTM of pfl's StackOverflow: 1.3 million parameters if tied."""
    return _LanguageModel(_Recurrent(), tied=tied)


def language_transformer(length: int, *, tied: bool) -> nn.Module:
    """Return pfl's transformer, with dropout: 2.0 million parameters if tied."""
    return _LanguageModel(_Attending(length), tied=tied)


class TwoTowers(nn.Module):
    """A map of a user's and an item's features, [B, 64] each, to scores [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = (
            nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2)
        )
        self.scores = nn.Linear(64, 2)

    def forward(self, seen: Tensor, item: Tensor) -> Tensor:
        """Return the scores of two classes."""
        out: Tensor = self.scores(self.user(seen) * self.item(item))
        return out


def ten_layers() -> nn.Module:
    """Return ten layers of a million weights each."""
    layers = (part for _ in range(10) for part in (nn.Linear(1000, 1000), nn.ReLU()))
    return nn.Sequential(*layers)


class _TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(784, 128), nn.Linear(128, 10)


class _Borrowed(_TwoLayers):
    """A model that uses the weights of its last layer without calling the layer."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.first(x.flatten(1)))
        return functional.linear(hidden, self.last.weight, self.last.bias)


class _Viewed(_TwoLayers):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(functional.relu(self.first(x.view(-1, 784))))
        return out


class _Unused(_TwoLayers):
    def forward(self, x: Tensor, _other: Tensor) -> Tensor:
        out: Tensor = self.last(functional.relu(self.first(x.flatten(1))))
        return out


def _with(*layers_between: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        inner = (make() for make in layers_between)
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), *inner, nn.Linear(128, 10))

    return build


VARIANTS: Mapping[str, tuple[str, Callable[[], nn.Module]]] = {
    "dropout": ("Dropout", _with(nn.ReLU, lambda: nn.Dropout(0.5))),
    "borrowed": ("F.linear(h, last.weight)", _Borrowed),
    "prelu": ("PReLU", _with(nn.PReLU)),
    "rmsnorm": ("RMSNorm", _with(nn.ReLU, lambda: nn.RMSNorm(128))),
    "view": ("view(-1, 784) and labels of uint8", _Viewed),
    "unused": ("an unused second input", _Unused),
}
"""The MLP 784–128–10 with one changed line: a description of the change, and the model."""
